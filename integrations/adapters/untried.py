"""Releases of frameworks that were never tried with holdfast."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.smp_daemon.shared.logs import get_log

log = get_log(__name__)


def warn_of_untried(package: str, release: str, tried: Sequence[str]) -> None:
    """Warn unless this release of a package is one of those `tried`, such as ``0.16``."""
    if ".".join(release.split(".")[:2]) not in tried:
        log.warning(
            "%s %s was never tried with holdfast: %s were, see docs/support.md", package, release, ", ".join(tried)
        )
