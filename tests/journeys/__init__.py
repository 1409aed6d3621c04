"""Three newcomers' first hours, from ``pip install`` in an empty environment on: ``make journeys``.

What they type is what the pages in docs/ say, read out of these pages; only names and sizes are their own. A step that
is not in the docs is not taken, so a page that has gone stale, or lacks one, ends the journey. Start at `engineer`.
"""
