"""How large jobs fail, from published studies: rates, and what each failure takes with it.

There are three classes, by what is left of a node's memory:

* *process*: processes die and the host lives, or is drained with its memory still readable;
* *memory*: one host's memory is lost at once: power, chassis, kernel, memory modules;
* *shock*: several hosts are lost at once: a rack's power, a switch, a parallel group that is evicted whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failures import SEVERAL_LOST

SHOCK = SEVERAL_LOST
"""Share of failures that hit several hosts at once, if a study does not report it. (3-5 % of Meta RSC's hardware
failures come with another one.)"""


@dataclass(frozen=True, slots=True)
class FailureProfile:
    """Failures as reported by one study.

    Attributes:
        source: where its numbers were published.
        rate: unexpected interruptions per 1,000 node-days.
        memory, shock: shares of these classes; the rest is *process*.
        causes: counts by cause, as published; empty if only a rate was published.
    """

    name: str
    source: str
    rate: float
    memory: float
    shock: float = SHOCK
    causes: tuple[tuple[str, int], ...] = ()

    @property
    def process(self) -> float:
        """Share of failures that leave the node's memory readable."""
        return 1.0 - self.memory - self.shock

    def node_mtbf_s(self) -> float:
        """Mean time between failures of one node, in seconds."""
        return 1000.0 / self.rate * 86400.0


PROFILES = {
    profile.name: profile
    for profile in (
        FailureProfile(
            "llama3",
            "Llama 3 (arXiv 2407.21783), table 5: 419 unexpected interruptions of 2,048 nodes in 54 days",
            3.79,
            11 / 419,
            causes=(
                ("faulty GPU", 148),
                ("HBM3", 72),
                ("software bug", 54),
                ("switch or cable", 35),
                ("host maintenance", 32),
                ("GPU SRAM", 19),
                ("GPU system processor", 17),
                ("NIC", 7),
                ("NCCL watchdog", 7),
                ("silent data corruption", 6),
                ("GPU thermal or sensor", 6),
                ("SSD", 3),
                ("power supply", 3),
                ("chassis", 2),
                ("IO board", 2),
                ("dependency", 2),
                ("CPU", 2),
                ("system memory", 2),
            ),
        ),
        FailureProfile(
            "ft-hsdp",
            "FT-HSDP at Meta, 32,768 H100: 678 interruptions",
            2.3,
            81 / 678,
            causes=(
                ("HBM3", 155),
                ("PCIe", 122),
                ("NCCL watchdog", 61),
                ("GPU compute", 50),
                ("software bug", 48),
                ("host maintenance", 42),
                ("kernel fault", 39),
                ("system reboot", 38),
                ("silent data corruption", 37),
                ("network", 36),
                ("SSD", 30),
                ("SRAM", 8),
                ("unknown", 7),
                ("system memory", 2),
                ("cooling", 2),
                ("thermal", 1),
            ),
        ),
        FailureProfile("rsc-1", "Meta RSC-1, 16,000 A100, jobs of over 128 GPUs, 11 months", 6.50, 0.10, 0.03),
        FailureProfile("rsc-2", "Meta RSC-2, 8,000 A100, jobs of over 128 GPUs, 11 months", 2.34, 0.10, 0.03),
        FailureProfile("unicron", "Unicron: 73 % of errors are transient, 37 % need a drain", 6.5, 0.12, 0.02),
    )
}
"""By name. The shares of rsc-1, rsc-2 and unicron are estimates: these studies report rates and transient failures."""


PUBLISHED = "ft-hsdp"
"""The profile that is assumed as long as nothing else is known."""


def profile(name: str) -> FailureProfile:
    """The profile called `name`. Raises `ConfigError` if there is none."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ConfigError(f"{name!r} is not a failure profile: choose one of {', '.join(PROFILES)}") from None
