"""Optional packages: what needs one says so before it begins, with the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec

from holdfast.smp_daemon.shared.errors import ConfigError

EXTRAS = {"megatron": "megatron.core", "plots": "matplotlib"}
"""What each extra of the package is asked for, and the module that it brings."""


def has(extra: str) -> bool:
    """Whether what an extra brings is installed. Imports nothing of it but the parents of its module."""
    try:
        return find_spec(EXTRAS[extra]) is not None
    except ModuleNotFoundError:
        return False


def require(extra: str, what: str, instead: str = "") -> None:
    """Refuse what cannot be done without an extra.

    Args:
        what: needs it, in words; the subject of the sentence.
        instead: what can be done without it, in words.

    Raises:
        ConfigError: it is not installed.
    """
    if not has(extra):
        package = EXTRAS[extra].replace(".", "-")
        otherwise = f", or {instead}" if instead else ""
        raise ConfigError(f"{what} needs {package}: pip install 'holdfast-train[{extra}]'{otherwise}")
