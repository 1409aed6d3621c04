"""Coverage-guided fuzzing with atheris: ``python -m tools.fuzz.guided slot new/ tools/fuzz/corpus/slot``.

Needs ``pip install holdfast-train[fuzz]``. The first argument is a target; the others are libFuzzer's: a directory for
new inputs, directories of seeds, and options such as ``-max_total_time=60``. Minimize the new inputs with ``-merge=1``
and keep them in ``corpus``.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["holdfast"]):
    from tools.fuzz.targets import targets, try_one


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    target = targets()[sys.argv.pop(1)]
    atheris.Setup(sys.argv, lambda data: try_one(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
