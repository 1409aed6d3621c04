"""``python -m holdfast`` is the command ``holdfast``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("holdfast.cli", run_name="__main__", alter_sys=True)  # a room above this one, which imports none
