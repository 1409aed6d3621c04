"""The addresses of one node, one for each of its network cards, as listed in ``HOLDFAST_HOST``."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import MAX_HOSTS
from holdfast.smp_daemon.shared.system import MACHINE, System

OPTION = "--host (HOLDFAST_HOST)"


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse IP addresses such as ``"10.0.0.7"`` or ``"10.0.0.7,10.0.1.7"``. Pure.

    Raises:
        ConfigError: an entry is not an IP address, or is listed twice; there are more than `MAX_HOSTS`; or a loopback
            address, or 0.0.0.0, is mixed with others.
    """
    hosts = tuple(part.strip() for part in text.split(","))
    if len(hosts) > MAX_HOSTS:
        raise ConfigError(f"{OPTION} lists {len(hosts)} addresses; the limit is {MAX_HOSTS}: one for each network card")
    found = []
    for host in hosts:
        try:
            address = ipaddress.ip_address(host)
        except ValueError as error:
            raise ConfigError(
                f"{OPTION} takes an IP address, or several with commas between them, not {host!r}"
            ) from error
        if address in found:
            raise ConfigError(f"{OPTION}={text} has {host} twice: give each network card's address once")
        found.append(address)
    if len({address.is_loopback for address in found}) > 1:
        loopback = next(host for host, address in zip(hosts, found, strict=True) if address.is_loopback)
        raise ConfigError(
            f"{OPTION}={text}: other hosts cannot reach the loopback address {loopback}: leave it out, or "
            "list only loopback addresses if all nodes run on one host"
        )
    if len(found) > 1 and any(address.is_unspecified for address in found):
        raise ConfigError(
            f"{OPTION}={text}: 0.0.0.0 means every address of this machine: use it alone, or list addresses"
        )
    return hosts


def check_own(hosts: Sequence[str], system: System = MACHINE) -> None:
    """Raises `ConfigError` if any of these addresses does not belong to this machine."""
    for host in hosts:
        sock = system.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, from {OPTION} ({error.strerror}): use addresses of this machine, which "
                "`ip -brief addr` lists"
            ) from error
        finally:
            sock.close()
