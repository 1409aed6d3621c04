"""A framework that is too old is refused by its name, its release, and what would do."""

from __future__ import annotations

import pytest

from holdfast.integrations.adapters.releases import need_release
from holdfast.smp_daemon.shared.errors import ConfigError, failure_of


@pytest.mark.parametrize("release", ["5.9", "5.9.0", "5.10.1", "6.0.dev1", "5.17.0+cu128"])
def test_a_release_that_is_new_enough_passes(release: str) -> None:
    assert failure_of(lambda: need_release("transformers", release, "5.9"), ConfigError) is None


@pytest.mark.parametrize("release", ["5.8.9", "4.57.6", "0.10", "main"])
def test_an_older_one_is_refused(release: str) -> None:
    with pytest.raises(ConfigError, match=f"transformers {release} .*5.9"):
        need_release("transformers", release, "5.9")
