"""Parses IPv4 packets with TCP that pass a wire: their addresses, and which of their bytes belong to a unit. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

_TCP = 6
_MAGIC = b"HFST"
_FRAME = struct.Struct("<4sIQ")
_SEQUENCE = 1 << 32


def addresses(packet: bytes) -> tuple[bytes, bytes] | None:
    """The source and target addresses of a packet, 4 bytes each; None if it is not IPv4."""
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    return packet[12:16], packet[16:20]


@dataclass(frozen=True, slots=True)
class Segment:
    """The TCP segment in a packet.

    Attributes:
        flow: addresses and ports.
        begin, data: where in the packet the TCP header and its data begin.
    """

    flow: bytes
    sequence: int
    begin: int
    data: int

    @classmethod
    def of(cls, packet: bytes) -> Segment | None:
        """The segment in a packet; None if there is no TCP in it, or no data."""
        begin = (packet[0] & 15) * 4
        if packet[9] != _TCP or len(packet) < begin + 20:
            return None
        data = begin + (packet[begin + 12] >> 4) * 4
        if data >= len(packet):
            return None
        (sequence,) = struct.unpack_from(">I", packet, begin + 4)
        return cls(packet[12:20] + packet[begin : begin + 4], sequence, begin, data)


@dataclass(slots=True)
class UnitTracker:
    """Finds the raw bytes of the SMPs' messages (`smp_daemon.shared.transport`) in segments of any connection.

    A message's frame is found where a segment begins with one, or where another message ends. Retransmissions are
    recognized by their sequence numbers. After a frame that cannot be found, raw bytes are found from the next one on.
    """

    _bodies: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def within(self, packet: bytes) -> tuple[int, int] | None:
        """The range of the first raw bytes in a packet, counted from the packet's start; None if there are none."""
        segment = Segment.of(packet)
        if segment is None:
            return None
        found, at = None, segment.data
        while at < len(packet):
            sequence = segment.sequence + at - segment.data
            start, length = self._bodies.get(segment.flow, (0, 0))
            passed = (sequence - start) % _SEQUENCE
            if passed < length:
                end = min(len(packet), at + length - passed)
                found = found or (at, end)
                at = end
            elif packet[at : at + 4] == _MAGIC and at + _FRAME.size <= len(packet):
                _, text, raw = _FRAME.unpack_from(packet, at)
                self._bodies[segment.flow] = ((sequence + _FRAME.size + text) % _SEQUENCE, raw)
                at += _FRAME.size + text
            else:
                break
        return found


def flipped(packet: bytes, bit: int) -> bytes:
    """The packet with one bit of its TCP data flipped, counted from the packet's start, and a matching checksum.

    The checksum is a sum of 16-bit words; it is corrected for the one that changed (RFC 1624, equation 3).

    Raises:
        ValueError: the bit is not in the data of a segment.
    """
    segment = Segment.of(packet)
    octet = bit // 8
    if segment is None or not segment.data <= octet < len(packet):
        raise ValueError(f"bit {bit} is in no TCP data")
    spoilt = bytearray(packet)
    spoilt[octet] ^= 1 << bit % 8
    word = octet - (octet - segment.begin) % 2
    before = int.from_bytes(packet[word : word + 2].ljust(2, b"\0"), "big")
    after = int.from_bytes(spoilt[word : word + 2].ljust(2, b"\0"), "big")
    (checksum,) = struct.unpack_from(">H", packet, segment.begin + 16)
    total = (~checksum & 0xFFFF) + (~before & 0xFFFF) + after
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into(">H", spoilt, segment.begin + 16, ~total & 0xFFFF)
    return bytes(spoilt)
