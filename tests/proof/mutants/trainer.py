"""Turns the process that imports it into a trainer of a broken build."""

from tests.proof.mutants import MUTANTS, applied, apply

if (name := applied()) and MUTANTS[name].in_trainer:
    apply(name)
