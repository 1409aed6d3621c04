"""How well SMPs use all network links of a node, and the cost of losing one: ``make bench-links``, as root.

Two SMPs run in network namespaces that are connected by four cables, each limited to the same rate in each direction.
*Filled* is the rate at which the SMPs protect, as a fraction of the capacity of the links in use; for comparison, plain
sockets, one per link, are measured in the same run. Finally a cable is pulled in the middle of encoding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parent.parent))  # finds the checkout's packages when run as a script

from benchmarks.load_parts import new_namespace, run
from holdfast.bench.cluster import Cluster, random_content
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.quantities import parse_rate, parse_size
from tests.proof.chaos.network.namespaces import inside, place_of

CABLES = 4
NODES = 2
DEADLINE_S = 60.0
PIECE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class LinksRow:
    """Results for one number of links: medians of all rounds.

    Attributes:
        links: number of network links that each SMP was configured with.
        carried, plain: bytes per second sent by each node over these links, by SMPs and by plain sockets.
        filled: `carried` as a fraction of the links' capacity.
        ratio: `carried` over `plain`.
    """

    links: int
    carried: float
    plain: float
    filled: float
    ratio: float


@dataclass(frozen=True, slots=True)
class PulledRow:
    """Results of pulling a cable while a snapshot is encoded.

    Attributes:
        pulled_s: seconds from the seal until the cable was pulled.
        seconds: seconds from the seal until the snapshot was protected.
        next_s: the same for the next snapshot, over the remaining cables.
    """

    pulled_s: float
    seconds: float
    next_s: float


class Cables:
    """Two hosts in unnamed network namespaces, connected by cables. They disappear with this process."""

    def __init__(self, stack: ExitStack, rate: float) -> None:
        self._pids = [new_namespace(stack) for _ in range(NODES)]
        for number in range(CABLES):
            near, far = (f"cable{number}.{end}" for end in range(NODES))
            run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            for end, device in enumerate((near, far)):
                run("ip", "link", "set", device, "netns", str(self._pids[end]))
                self._inside(end, "ip", "addr", "add", f"{self.address(end, number)}/24", "dev", device)
                self._inside(end, "ip", "link", "set", device, "up")
                rule = ("root", "tbf", "rate", f"{int(rate * 8)}bit", "burst", "256kb", "latency", "200ms")
                self._inside(end, "tc", "qdisc", "add", "dev", device, *rule)

    def address(self, end: int, number: int) -> str:
        """The IP address of one end of a cable."""
        return f"10.77.{number}.{end + 1}"

    def namespace(self, end: int) -> str:
        """The path of a host's network namespace."""
        return f"/proc/{self._pids[end]}/ns/net"

    def pull(self, number: int) -> None:
        """Drop all packets on a cable silently; its devices stay up."""
        for end in range(NODES):
            rule = (
                "root",
                "tbf",
                "rate",
                "8bit",
                "burst",
                "1",
                "limit",
                "1",
            )  # drops every packet longer than one byte
            self._inside(end, "tc", "qdisc", "replace", "dev", f"cable{number}.{end}", *rule)

    def _inside(self, end: int, *command: str) -> None:
        run("nsenter", f"--net={self.namespace(end)}", *command)


def plain(cables: Cables, links: int, count: int) -> float:
    """Bytes per second sent by each host over `links` plain sockets, of which each sends `count` bytes each way."""
    with ExitStack() as stack:
        ends = [stack.enter_context(_Plain(cables, end, links, count)) for end in range(NODES)]
        for each in ends:
            each.tell("connect")
        began = time.perf_counter()
        for each in ends:
            each.tell("go")
        for each in ends:
            each.await_done()
        return links * count / (time.perf_counter() - began)


class _Plain:
    """One host's plain sockets: ``python benchmarks/links.py carry END LINKS BYTES`` in its namespace."""

    def __init__(self, cables: Cables, end: int, links: int, count: int) -> None:
        with inside(cables.namespace(end)):
            self._process = subprocess.Popen(
                [sys.executable, __file__, "carry", str(end), str(links), str(count)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._await("listening")

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def tell(self, word: str) -> None:
        """Send a command; after ``connect``, wait until the sockets are connected."""
        print(word, file=self._stream(self._process.stdin), flush=True)
        if word == "connect":
            self._await("connected")

    def await_done(self) -> None:
        """Wait until all bytes have arrived."""
        self._await("done")

    def _await(self, word: str) -> None:
        if self._stream(self._process.stdout).readline().strip() != word:
            raise HoldfastError("plain sockets failed")

    def _stream(self, stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


def carry(end: int, links: int, count: int) -> None:
    """One host's side of `plain`, controlled by lines on standard input."""
    here = [socket.create_server((f"10.77.{number}.{end + 1}", 4711)) for number in range(links)]
    print("listening", flush=True)
    sys.stdin.readline()
    out = [
        socket.create_connection((f"10.77.{number}.{2 - end}", 4711), DEADLINE_S, (f"10.77.{number}.{end + 1}", 0))
        for number in range(links)
    ]
    print("connected", flush=True)
    sys.stdin.readline()
    content = memoryview(os.urandom(PIECE_BYTES))

    def send(sock: socket.socket) -> None:
        for start in range(0, count, PIECE_BYTES):
            sock.sendall(content[: min(PIECE_BYTES, count - start)])

    def receive(listening: socket.socket) -> None:
        sock, _ = listening.accept()
        buffer, left = memoryview(bytearray(PIECE_BYTES)), count
        while left:
            left -= sock.recv_into(buffer)

    threads = [threading.Thread(target=send, args=(sock,)) for sock in out]
    threads += [threading.Thread(target=receive, args=(sock,)) for sock in here]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("done", flush=True)


def smps(cables: Cables, links: int, content: memoryview, base: Path, stack: ExitStack) -> Cluster:
    """Two SMPs that are configured with `links` links and have memory for snapshots."""
    places = [
        (",".join(cables.address(end, number) for number in range(links)), place_of(cables.namespace(end)))
        for end in range(NODES)
    ]
    settings = {"HOLDFAST_SCRUB": "0", "HOLDFAST_LINKS": "1", "HOLDFAST_REGROUP_AFTER": "0"}
    cluster = Cluster(base, content, NODES, stack, settings, places)
    cluster.configure("1+1")
    return cluster


def measure(rate: float, content: memoryview, links: int, rounds: int) -> LinksRow:
    """Measure SMPs and plain sockets in turns, over `links` links. Blocks."""
    with Scratch("bench") as scratch, ExitStack() as stack:
        cables = Cables(stack, rate)
        cluster = smps(cables, links, content, scratch.path, stack)
        cluster.protect()  # the first one connects and touches pages
        carried, floor = [], []
        for _ in range(rounds):
            floor.append(plain(cables, links, len(content) // links))
            protected = cluster.protect()
            carried.append(len(content) / protected.seconds)
        ratio = statistics.median(ours / theirs for ours, theirs in zip(carried, floor, strict=True))
        middle = statistics.median(carried)
        return LinksRow(links, middle, statistics.median(floor), middle / (links * rate), ratio)


def pulled(rate: float, content: memoryview) -> PulledRow:
    """Pull a cable in the middle of encoding over all of them. Blocks for about a minute."""
    with Scratch("bench") as scratch, ExitStack() as stack:
        cables = Cables(stack, rate)
        cluster = smps(cables, CABLES, content, scratch.path, stack)
        cluster.protect()
        pulled_s = len(content) / (CABLES * rate) / 2
        snapshot = cluster.write()
        began = time.perf_counter()
        cluster.seal(snapshot)
        timer = threading.Timer(pulled_s, cables.pull, (CABLES - 1,))
        timer.start()
        cluster.await_protected(snapshot)
        seconds = time.perf_counter() - began
        timer.join()
        following = cluster.protect()
        cluster.recover("chain")  # raises unless the lost node's state comes back to the last bit
        return PulledRow(pulled_s, seconds, following.seconds)


def markdown(rate: float, count: int, rows: Sequence[LinksRow], loss: PulledRow) -> str:
    """The report."""
    lines = [
        f"# {CABLES} links of a node",
        "",
        f"{date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, Linux "
        f"{platform.release()}. Two SMPs in network namespaces, {CABLES} veth pairs between them, each with "
        f"{rate / 1e6:.0f} MB/s each way (tc tbf); shards of {count >> 20} MiB, 1+1; medians. MB are 10^6 bytes. "
        "Headers count against the links, so that not even plain sockets fill them.",
        "",
        "| links | SMPs, MB/s | plain sockets, MB/s | filled | of plain sockets |",
        "| ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row.links} | {row.carried / 1e6:.0f} | {row.plain / 1e6:.0f} | {row.filled:.2f} | {row.ratio:.2f} |"
            for row in rows
        ),
        "",
        f"One of {CABLES} cables pulled {loss.pulled_s:.2f} s after the seal, in the middle of encoding: that snapshot "
        f"was protected after {loss.seconds:.1f} s, the next one in {loss.next_s:.1f} s over those left; then a lost "
        "node's state came back to the last bit.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    if sys.argv[1:2] == ["carry"]:
        carry(*map(int, sys.argv[2:5]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="50MB/s", help="of each link, each way (default 50MB/s)")
    parser.add_argument("--shard", default="256MiB", help="of each node (default 256MiB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    rate, count = parse_rate(options.rate, "--rate"), parse_size(options.shard, "--shard")
    content = random_content(count, 1234)
    rows = [measure(rate, content, links, options.rounds) for links in (1, 2, CABLES)]
    row = pulled(rate, content)
    text = markdown(rate, count, rows, row)
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"links": [asdict(each) for each in rows], "pulled": asdict(row)}, indent=1))
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
