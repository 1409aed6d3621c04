"""Three newcomers' first hours, and a keeper's work, from ``pip install`` in an empty environment: ``make journeys``.

They type the commands that are extracted from the pages in docs/; only names and sizes are their own. They take no step
that is not in the docs, so a page that is stale or lacks a step fails the journey. Start reading at `engineer`.
"""
