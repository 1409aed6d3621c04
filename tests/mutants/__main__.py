"""The SMP of a broken build: ``python -m tests.mutants`` with the arguments of ``python -m holdfast.smp_daemon``."""

from __future__ import annotations

import runpy

from tests.mutants import MUTANTS, applied, apply

if (name := applied()) and MUTANTS[name].in_smp:
    apply(name)
runpy.run_module("holdfast.smp_daemon", run_name="__main__", alter_sys=True)
