"""The addresses of one node: one for each of its network cards, as ``HOLDFAST_HOST`` lists them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import MAX_HOSTS
from holdfast.smp_daemon.shared.system import MACHINE, System

OPTION = "--host (HOLDFAST_HOST)"


def parse_hosts(text: str) -> tuple[str, ...]:
    """IP addresses, from ``"10.0.0.7"`` or ``"10.0.0.7,10.0.1.7"``. Pure.

    Raises:
        ConfigError: one is no IP address, or is there twice; there are more than `MAX_HOSTS`; loopback, or 0.0.0.0,
            stands beside others.
    """
    hosts = tuple(part.strip() for part in text.split(","))
    if len(hosts) > MAX_HOSTS:
        raise ConfigError(f"{OPTION} lists {len(hosts)} addresses, and takes {MAX_HOSTS}: one for each network card")
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
            f"{OPTION}={text}: other hosts do not reach the loopback address {loopback}: leave it out, or give "
            "loopback addresses alone, for nodes that are played on one host"
        )
    if len(found) > 1 and any(address.is_unspecified for address in found):
        raise ConfigError(
            f"{OPTION}={text}: 0.0.0.0 is every address of this machine: give it alone, or those you mean"
        )
    return hosts


def check_own(hosts: Sequence[str], system: System = MACHINE) -> None:
    """Raises `ConfigError` if one of these addresses is not this machine's."""
    for host in hosts:
        sock = system.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"{host}, of {OPTION}, cannot be listened on ({error.strerror}): give addresses of this machine, as "
                "`ip -brief addr` lists them"
            ) from error
        finally:
            sock.close()
