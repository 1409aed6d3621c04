"""Fuzzing of every parser of foreign bytes: `targets` are the parsers, `mutation` makes invalid inputs, `campaign` runs
them and counts the results. ``python -m tools.fuzz`` runs millions of inputs; ``tests/system/test_fuzz.py`` thousands,
and all of ``corpus``, which keeps every input that once found a bug.
"""
