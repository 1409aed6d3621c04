"""Optional packages. Code that needs one refuses before it begins, with the command that installs the package."""

from __future__ import annotations

from importlib.util import find_spec

from holdfast.smp_daemon.shared.errors import ConfigError

EXTRAS = {"megatron": "megatron.core", "plots": "matplotlib"}
"""Name of each extra, and the module that it installs."""


def has(extra: str) -> bool:
    """Whether an extra is installed. Imports only the parent packages of its module."""
    try:
        return find_spec(EXTRAS[extra]) is not None
    except ModuleNotFoundError:
        return False


def require(extra: str, what: str, instead: str = "") -> None:
    """Refuse to go on without an extra.

    Args:
        extra: its name.
        what: the thing that needs it: the subject of the message.
        instead: an alternative that works without it, in words.

    Raises:
        ConfigError: the extra is not installed.
    """
    if not has(extra):
        package = EXTRAS[extra].replace(".", "-")
        otherwise = f", or {instead}" if instead else ""
        raise ConfigError(f"{what} needs {package}: pip install 'holdfast-train[{extra}]'{otherwise}")
