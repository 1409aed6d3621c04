"""Unnamed network namespaces, and the TUN devices that are the only way out of them. Needs Linux and root.

A namespace exists while a process is in it or a descriptor of it is open, and a device while its descriptor is open. So
both are gone when their owner dies, by whatever signal.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError
from tests.proof.chaos.network import clocks

DEVICE = "wire0"
PREFIX = "255.255.0.0"
QUEUE_PACKETS = 4096

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI, _IFF_UP = 0x1, 0x1000, 0x1
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943

_libc = ctypes.CDLL(None, use_errno=True)


def enter(path: str) -> None:
    """Move this thread, and what it starts from now on, into the namespace at `path`. Raises `ConfigError`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"there is no network namespace {path}: its node is gone") from error
    try:
        _set(fd)
    finally:
        os.close(fd)


@contextmanager
def inside(path: str | None) -> Iterator[None]:
    """Run a block with this thread in the namespace at `path`; None: where it is. Raises `ConfigError`."""
    if path is None:
        yield
        return
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(path)
        try:
            yield
        finally:
            _set(before)
    finally:
        os.close(before)


def place_of(namespace: str) -> tuple[str, str]:
    """The namespace as a place, see `chaos.runner.within`; an empty path: this machine's."""
    return f"{__name__}:{beside.__name__}", namespace


@contextmanager
def beside(namespace: str) -> Iterator[None]:
    """As `inside`; a trainer with a clock of its own follows that."""
    if clock := os.environ.get(clocks.ENV):
        clocks.follow(clock)
    with inside(namespace or None):
        yield


def make(host: str, mtu_bytes: int) -> tuple[int, int]:
    """Create a namespace whose only way out is a TUN device with the address `host`.

    Returns descriptors of the namespace and the device, which the caller closes. The device's does not block: a read
    returns one IPv4 or IPv6 packet, a write takes one.

    Raises:
        ConfigError: that is not possible on this machine.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            raise _refused("make a network namespace")
        try:
            device = _open_tun(host, mtu_bytes)
            _retry_soon()
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC), device
        finally:
            _set(before)
    finally:
        os.close(before)


@functools.cache
def unavailable() -> str:
    """Why `make` cannot work on this machine, or an empty text. Tries it once, in a separate thread."""
    if os.geteuid() != 0:
        return "needs root"
    problems = []

    def attempt() -> None:
        try:
            for fd in make("10.0.0.1", 1500):
                os.close(fd)
        except ConfigError as error:
            problems.append(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return problems[0] if problems else ""


def inhabitants(namespaces: set[int]) -> list[int]:
    """Pids of the processes in any of the namespaces with these inode numbers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if path.stat().st_ino in namespaces:
                found.append(int(path.parts[2]))
        except OSError:
            continue  # it has ended
    return found


def _open_tun(host: str, mtu_bytes: int) -> int:
    """Open a TUN device in this thread's namespace, give it an address, and bring up both it and loopback."""
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"/dev/net/tun cannot be opened: {error.strerror}") from error
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            _ask(control, _SIOCSIFFLAGS, "lo", struct.pack("H", _IFF_UP))
            _ask(control, _SIOCSIFADDR, DEVICE, _address(host))
            _ask(control, _SIOCSIFNETMASK, DEVICE, _address(PREFIX))
            _ask(control, _SIOCSIFMTU, DEVICE, struct.pack("i", mtu_bytes))
            _ask(control, _SIOCSIFTXQLEN, DEVICE, struct.pack("i", QUEUE_PACKETS))
            _ask(control, _SIOCSIFFLAGS, DEVICE, struct.pack("H", _IFF_UP))
    except OSError as error:
        os.close(device)
        raise ConfigError(f"a TUN device cannot be made here: {error}") from error
    return device


def _ask(control: socket.socket, request: int, device: str, argument: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("16s24s", device.encode(), argument))


def _address(text: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))


RETRY = {"tcp_rto_min_us": 20_000, "tcp_rto_max_ms": 1000}
"""TCP retransmits after 20 ms to 1 s instead of 0.2 to 120 s, since links here are short."""


def _retry_soon() -> None:
    for name, value in RETRY.items():
        setting = Path("/proc/sys/net/ipv4") / name
        if setting.exists():  # since Linux 6.11 and 6.15; without them runs take longer
            setting.write_text(str(value))


def _set(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise _refused("enter a network namespace")


def _refused(what: str) -> ConfigError:
    number = ctypes.get_errno()
    hint = ": needs CAP_SYS_ADMIN" if number == errno.EPERM else ""
    return ConfigError(f"cannot {what} here: {os.strerror(number)}{hint}")
