"""The ``holdfast`` command: one module per command."""
