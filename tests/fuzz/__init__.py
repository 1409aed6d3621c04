"""Everything that reads bytes of others, told nonsense: `targets` are the parsers, `mutation` makes the nonsense,
`campaign` counts what came of it. ``python -m tests.fuzz`` runs millions; ``tests/test_fuzz.py`` thousands, and all of
``corpus``, where every input is kept that once found something.
"""
