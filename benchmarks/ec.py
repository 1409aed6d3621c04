"""``python benchmarks/ec.py`` is ``holdfast bench ec``, from a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # finds the checkout's packages when run as a script

from holdfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "ec", *sys.argv[1:]]))
