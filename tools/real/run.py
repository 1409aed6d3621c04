"""What is known of a third-party script: how it is started, and our lines in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tools.real.edits import Edit


class Run(NamedTuple):
    """One script.

    Attributes:
        name: name on the command line.
        framework: name in the support table.
        what: a short description of the training.
        page: the documentation page that names `lines`.
        script: path relative to the working folder, or ``-m module``.
        arguments: arguments of the script; ``{source}`` is the checkout, ``{work}`` the working folder.
        program: instead of a script, a program in ``tools/real`` that runs and kills a framework itself, see
            `tools.real.programs`.
        lines: holdfast's lines, inserted in the protected run.
        package: the framework's name on the package index; empty if it is only in `checkout`.
        checkout: a folder below ``REAL`` from which `files` are copied into the working folder; without `files`, the
            script runs in the checkout.
        ranks: number of ranks; 0 means one process without torchrun.
        fits: edits that make the script small or let it run on a CPU, applied in both runs.
        launcher: prefix of the script in the protected run.
        first: modules for the probe's ``--first``.
        needs: other required packages.
        make: makes the data in the working folder; see `tools.real.data`.
        python: the environment to run in.
        variables: environment variables.
        said: regular expression of printed lines to compare.
    """

    name: str
    framework: str
    what: str
    page: str
    script: str = ""
    arguments: str = ""
    program: str = ""
    lines: tuple[Edit, ...] = ()
    package: str = ""
    checkout: str = ""
    files: tuple[str, ...] = ()
    ranks: int = 0
    fits: tuple[Edit, ...] = ()
    launcher: str = ""
    first: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    make: Callable[[Path, Path], None] | None = None
    python: str = "frameworks-3.11"
    variables: tuple[tuple[str, str], ...] = ()
    said: str = ""
    deadline_s: float = 900.0
