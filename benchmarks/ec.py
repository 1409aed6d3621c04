"""``python benchmarks/ec.py`` is ``holdfast bench ec``, from a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # or this file would stand before the room of its name

from holdfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "ec", *sys.argv[1:]]))
