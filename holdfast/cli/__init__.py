"""The ``holdfast`` command: one module a command."""
