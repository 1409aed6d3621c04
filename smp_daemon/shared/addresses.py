"""Addresses as people write them: those of one node, one for each of its network cards, and those of SMPs. Pure."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import MAX_HOSTS, MAX_PORT
from holdfast.smp_daemon.shared.plain import Address

LOOPBACK = "127.0.0.1"


class ServesAt:
    """Whatever says where an SMP listens, in four fields of its own. `more_bulk`: its further addresses for raw bytes,
    if its node has several network cards."""

    __slots__ = ()
    host: str
    control_port: int
    bulk_port: int
    more_bulk: tuple[Address, ...]

    @property
    def control(self) -> Address:
        """Its address for small messages; it also identifies the SMP."""
        return self.host, self.control_port

    @property
    def bulk(self) -> Address:
        """Its first address for raw bytes."""
        return self.host, self.bulk_port

    @property
    def bulk_addresses(self) -> tuple[Address, ...]:
        """All its addresses for raw bytes, one for each network card, `bulk` first."""
        return (self.bulk, *self.more_bulk)


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse IP addresses such as ``"10.0.0.7"`` or ``"10.0.0.7,10.0.1.7"``.

    Raises:
        ConfigError: an entry is not an IP address, or is listed twice; there are more than `MAX_HOSTS`; or a loopback
            address, or 0.0.0.0, is mixed with others.
    """
    hosts = tuple(part.strip() for part in text.split(","))
    if len(hosts) > MAX_HOSTS:
        raise ConfigError(f"{text!r} lists {len(hosts)} addresses; the limit is {MAX_HOSTS}: one for each network card")
    found = []
    for host in hosts:
        try:
            address = ipaddress.ip_address(host)
        except ValueError as error:
            raise ConfigError(f"{host!r} is not an IP address: give one, or several with commas between") from error
        if address in found:
            raise ConfigError(f"{text!r} has {host} twice: give each network card's address once")
        found.append(address)
    if len({address.is_loopback for address in found}) > 1:
        loopback = next(host for host, address in zip(hosts, found, strict=True) if address.is_loopback)
        raise ConfigError(
            f"{text!r}: other hosts cannot reach the loopback address {loopback}: leave it out, or "
            "list only loopback addresses if all nodes run on one host"
        )
    if len(found) > 1 and any(address.is_unspecified for address in found):
        raise ConfigError(f"{text!r}: 0.0.0.0 means every address of this machine: use it alone, or list addresses")
    return hosts


def parse_spares(text: str) -> tuple[Address, ...]:
    """Addresses of SMPs from ``"10.0.0.7:4711,10.0.0.8:4711"``; an empty text gives none. Raises `ConfigError`."""
    found = []
    for part in filter(None, text.split(",")):
        at = _host_and_port(part.strip())
        if at is None or not at[0]:
            raise ConfigError(f"{part!r} is not an address of an SMP: say HOST:PORT, as `holdfast status` shows it")
        found.append(at)
    return tuple(found)


def parse_standby(text: str) -> Address | None:
    """The port at which standbys are awaited, with an empty host, or where a standby waits; an empty text gives None.

    Raises:
        ConfigError: the text is none of these.
    """
    at = _host_and_port(text)
    if text and at is None:
        raise ConfigError(f"{text!r}: give a port from 1 to {MAX_PORT}, or on a standby node HOST:PORT of rank 0")
    return at


def parse_http(text: str) -> Address | None:
    """Where to serve the page: a port of loopback, or an address and a port. ``auto`` gives port 0, ``off`` gives None.

    Raises:
        ConfigError: the text is none of these.
    """
    if text == "off":
        return None
    if text == "auto":
        return LOOPBACK, 0
    if (at := _host_and_port(text)) is not None:
        with suppress(ValueError):
            return str(ipaddress.IPv4Address(at[0] or LOOPBACK)), at[1]
    raise ConfigError(f"{text!r}: give a port from 1 to {MAX_PORT}, ADDRESS:PORT, auto or off")


def _host_and_port(text: str) -> Address | None:
    """Of ``HOST:PORT``, or of ``PORT`` with an empty host; None if it is neither."""
    host, colon, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) <= MAX_PORT or bool(host) != bool(colon):
        return None
    return host, int(port)
