"""Breaks the process that imports it, as a trainer of a broken build."""

from tests.mutants import applied, apply

if name := applied():
    apply(name)
