"""Releases of frameworks: too old ones, and those that were never tried with holdfast."""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log

log = get_log(__name__)


def need_release(package: str, release: str, least: str) -> None:
    """Raises `ConfigError` if a release of a package is older than `least`, such as ``0.2``."""
    if _numbers(release) < _numbers(least):
        raise ConfigError(f"{package} {release} is not supported: holdfast works with {least} and later")


def _numbers(release: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", release)[:2]]


def warn_of_untried(package: str, release: str, tried: Sequence[str]) -> None:
    """Warn unless this release of a package is one of those `tried`, such as ``0.16``."""
    if ".".join(release.split(".")[:2]) not in tried:
        log.warning(
            "%s %s was never tried with holdfast: %s were, see docs/support.md", package, release, ", ".join(tried)
        )
