"""Are all network links of a node filled, and what does it cost to lose one? ``make bench-links``, as root.

Two SMPs stand in network namespaces with four cables between them, each with a rate of its own, both ways. *Filled* is
what the SMPs protect in a second as a part of what the links that were used can carry; beside it stands what plain
sockets carry, one for each link, in the same run. Then a cable is pulled in the middle of encoding.
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

sys.path.insert(0, str(Path(__file__).parent.parent))  # or this file would stand before the room of its name

from benchmarks.load_parts import new_namespace, run
from holdfast.bench.cluster import Cluster, random_content
from holdfast.chaos.network.namespaces import inside
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.quantities import parse_rate, parse_size
from holdfast.smp_daemon.shared.scratch import Scratch

CABLES = 4
NODES = 2
DEADLINE_S = 60.0
PIECE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class LinksRow:
    """One way to set it up; medians of all rounds.

    Attributes:
        links: network cards that each SMP was told of.
        carried, plain: bytes a second out of each node, of SMPs and of plain sockets, over these links.
        filled: `carried` as a part of what the links can carry.
        ratio: `carried` over `plain`.
    """

    links: int
    carried: float
    plain: float
    filled: float
    ratio: float


@dataclass(frozen=True, slots=True)
class PulledRow:
    """A cable that is pulled while a snapshot is encoded.

    Attributes:
        pulled_s: how long after the seal.
        seconds: until the snapshot was protected; `next_s`: the one after it, over the cables that are left.
        whole: whether the lost node's state came back to the last bit.
    """

    pulled_s: float
    seconds: float
    next_s: float
    whole: bool


class Cables:
    """Two hosts in namespaces without a name, and cables between them. They go when this process does."""

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
        """Of an end of a cable."""
        return f"10.77.{number}.{end + 1}"

    def namespace(self, end: int) -> str:
        """Path of a host's."""
        return f"/proc/{self._pids[end]}/ns/net"

    def pull(self, number: int) -> None:
        """Nothing passes any more, and nobody is told."""
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
            )  # it drops whatever is longer than a byte
            self._inside(end, "tc", "qdisc", "replace", "dev", f"cable{number}.{end}", *rule)

    def _inside(self, end: int, *command: str) -> None:
        run("nsenter", f"--net={self.namespace(end)}", *command)


def plain(cables: Cables, links: int, count: int) -> float:
    """Bytes a second out of each host, over as many plain sockets: each carries so many bytes, both ways at once."""
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
        """What to do next; ``connect`` is waited for."""
        print(word, file=self._stream(self._process.stdin), flush=True)
        if word == "connect":
            self._await("connected")

    def await_done(self) -> None:
        """Until everything has come."""
        self._await("done")

    def _await(self, word: str) -> None:
        if self._stream(self._process.stdout).readline().strip() != word:
            raise HoldfastError("plain sockets failed")

    def _stream(self, stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


def carry(end: int, links: int, count: int) -> None:
    """A host's side of `plain`: does what is said on standard input."""
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
    """Two SMPs that were told of so many links, and have memory for snapshots."""
    places = [
        (",".join(cables.address(end, number) for number in range(links)), cables.namespace(end))
        for end in range(NODES)
    ]
    settings = {"HOLDFAST_SCRUB": "0", "HOLDFAST_LINKS": "1", "HOLDFAST_REGROUP_AFTER": "0"}
    cluster = Cluster(base, content, NODES, stack, settings, places)
    cluster.configure("1+1")
    return cluster


def measure(rate: float, content: memoryview, links: int, rounds: int) -> LinksRow:
    """SMPs and plain sockets by turns, over so many links. Blocks."""
    with Scratch("bench") as scratch, ExitStack() as stack:
        cables = Cables(stack, rate)
        cluster = smps(cables, links, content, scratch.path, stack)
        cluster.protect()  # the first makes connections, and touches pages
        carried, floor = [], []
        for _ in range(rounds):
            floor.append(plain(cables, links, len(content) // links))
            protected = cluster.protect()
            carried.append(len(content) / protected.seconds)
        ratio = statistics.median(ours / theirs for ours, theirs in zip(carried, floor, strict=True))
        middle = statistics.median(carried)
        return LinksRow(links, middle, statistics.median(floor), middle / (links * rate), ratio)


def pulled(rate: float, content: memoryview) -> PulledRow:
    """A cable is pulled in the middle of encoding over all of them. Blocks for about a minute."""
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
        whole = cluster.recover("chain").bytes == len(content)
        return PulledRow(pulled_s, seconds, following.seconds, whole)


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
        f"node's state {'came back to the last bit' if loss.whole else 'did not come back'}.",
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
