"""The SMP of a broken build: ``python -m tests.proof.mutants`` with an SMP's arguments."""

from __future__ import annotations

import runpy

from tests.proof.mutants import MUTANTS, applied, apply

if (name := applied()) and MUTANTS[name].in_smp:
    apply(name)
runpy.run_module("holdfast.smp_daemon", run_name="__main__", alter_sys=True)
