"""``python benchmarks/load.py``: loading a lost node's state from other nodes' memory or from a shared file system.

Every node and the file server has its own network namespace with one link that is shaped to `--rate` bytes per second
in each direction (`tc tbf`). For each number of nodes:

* *lost, memory*: a node is lost, and its empty replacement gets the shard back, computed by the SMPs of its group.
* *lost, file server*: the replacement alone reads as many bytes from the file server.
* *all, memory*: every node fetches the shard of its neighbour, as when all ranks have moved.
* *all, file server*: every node reads as many bytes from the file server, as after a restart from files.

The file server is a process that holds the file in memory, as if its disks were infinitely fast; its one link is the
bottleneck. A reader has four connections, requests units of 2 MiB, checks them, and writes to shared memory.

Finally, one source of a lost shard is slow, is stopped, or is slow and the only holder. This is measured with stealing
and without (the SMP considers no source slow and no request late). Needs root; uses its own network namespaces only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.load_parts import WITH, WITHOUT, Fleet, Links, line_of, part, read_all
from holdfast.smp_daemon.shared.paths import arena_base

LOST, SLOW = 1, 2
SLOWER = 10
STOP_AFTER_S = 0.7
INSIDE = "BENCH_LOAD"


def main() -> None:
    """Measure, print the report, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--slow-nodes", type=int, default=8, help="nodes where one source is slow (default 8)")
    parser.add_argument("--rate", type=float, default=25e6, help="of each link, bytes a second (default 25e6)")
    parser.add_argument("--mib", type=int, default=48, help="of each node's shard (default 48)")
    parser.add_argument("--protect", default="2+2", help="the code (default 2+2: two nodes are a mirror)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if INSIDE not in os.environ:  # run in a new network namespace; child processes need the path
        environment = os.environ | {INSIDE: "1", "PYTHONPATH": sys.path[0], "PYTHONDONTWRITEBYTECODE": "1"}
        os.execvpe("unshare", ["unshare", "--net", "--", sys.executable, *sys.argv], environment)
    load_before = os.getloadavg()[0]
    sizes = [on_nodes(count, options) for count in options.nodes]
    slow = one_is_slow(options.slow_nodes, options)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "rate_bytes_s": options.rate,
        "shard_bytes": options.mib << 20,
        "protect": options.protect,
        "repeats": options.repeats,
        "slow_nodes": options.slow_nodes,
        "nodes": sizes,
        "slow": slow,
    }
    text = markdown(report)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(text)


def on_nodes(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """The four times on `count` nodes, in seconds; medians of the repeats where a load is repeated."""
    with Ground(count, options) as ground:
        fleet, length = ground.fleet, ground.fleet.forms[LOST].total_bytes
        lost = []
        for _ in range(options.repeats):
            fleet.replace(LOST)
            lost.append(fleet.recover({LOST: LOST})[0])
        before = fleet.received()
        all_memory = round(fleet.recover({i: (i + 1) % count for i in range(count)})[0], 3)
        row = {
            "nodes": count,
            "lost_memory_s": median(lost),
            "lost_files_s": median(ground.read([LOST]) for _ in range(options.repeats)),
            "all_memory_s": all_memory,
            "all_memory_received": fleet.received() - before,
            "all_files_s": round(ground.read(range(count)), 3),
            "line_s": length / options.rate,
            "lost_spread_s": [round(min(lost), 3), round(max(lost), 3)],
        }
    print(json.dumps(row), flush=True)
    return row


def one_is_slow(count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A loss while one source is slow, with and without stealing: seconds, and bytes that all SMPs received."""
    rows = []
    with Ground(count, options) as ground:
        fleet = ground.fleet
        stops: list[threading.Timer] = []

        def measure(name: str, fetched: int, before: Callable[[], object], after: Callable[[], object]) -> None:
            row: dict[str, Any] = {"name": name}
            for key, module in (("with", WITH), ("without", WITHOUT)):
                times, received = [], []
                for _ in range(options.repeats if name != "stopped" else 1):
                    fleet.replace(LOST, module=module)
                    before()
                    sum_before = fleet.received()
                    times.append(fleet.recover({LOST: fetched})[0])
                    after()
                    received.append(fleet.received() - sum_before)
                row[f"{key}_s"], row[f"{key}_received"] = median(times), int(median(received))
            rows.append(row)
            print(json.dumps(row), flush=True)

        def throttle() -> None:
            ground.links.shape(ground.host(SLOW), options.rate / SLOWER)

        def free() -> None:
            ground.links.shape(ground.host(SLOW), options.rate)

        def stop_soon() -> None:
            stops.append(threading.Timer(STOP_AFTER_S, os.kill, (fleet.nodes[SLOW].pid, signal.SIGSTOP)))
            stops[-1].start()

        def go_on() -> None:
            stops[-1].cancel()  # if all was loaded before the stop
            stops[-1].join()
            os.kill(fleet.nodes[SLOW].pid, signal.SIGCONT)

        measure("none", LOST, free, free)
        measure("slow", LOST, throttle, free)
        measure("slow holder", SLOW, throttle, free)
        measure("stopped", LOST, stop_soon, go_on)
    return rows


class Ground:
    """Hosts with SMPs and a file server. Their links are shaped after a snapshot has been protected."""

    def __init__(self, count: int, options: argparse.Namespace) -> None:
        self._stack = ExitStack()
        self._count, self._options = count, options

    def __enter__(self) -> Ground:
        with ExitStack() as stack:
            base = arena_base()
            base.mkdir(parents=True, mode=0o700, exist_ok=True)
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-load-", dir=base)))
            self.links = Links(stack)
            hosts = {self.host(i): self.links.add(self.host(i)) for i in range(self._count)}
            server = self.links.add("10.77.9.9")
            self.fleet = Fleet(hosts, path, self._options.mib << 20, self._options.protect, stack)
            self._length = self.fleet.forms[LOST].total_bytes
            process = part(server, stack, "serve", "10.77.9.9", str(self._length))
            assert process.stdout is not None
            self._port = int(line_of(process.stdout))
            self._namespaces = list(hosts.values())
            for host in [*hosts, "10.77.9.9"]:
                self.links.shape(host, self._options.rate)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self.fleet.nodes:
            node.close()
        self._stack.close()

    @staticmethod
    def host(index: int) -> str:
        """The address of a node."""
        return f"10.77.0.{index + 1}"

    def read(self, nodes: Sequence[int]) -> float:
        """Seconds until the last of `nodes` has read a shard's bytes from the file server."""
        return read_all("10.77.9.9", self._port, self._length, [self._namespaces[i] for i in nodes])


def median(values: Iterable[float]) -> float:
    """The median, rounded to three decimals."""
    return round(statistics.median(values), 3)


def markdown(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    rate, size = report["rate_bytes_s"] / 1e6, report["shard_bytes"] >> 20
    before, after = report["load_average"]
    lines = [
        "# A lost node's state: from memory, and from a shared file system",
        "",
        f"{report['date']}, `make bench-load`, {report['machine']}, load average {before} to {after}",
        "from before to after. Ratios are of one run.",
        "",
        f"{size} MiB on each node, links of {rate:.0f} MB/s each way, {report['protect']}; medians of "
        f"{report['repeats']} (*all*: once).",
        "*x line*: so many times what a link takes for the bytes of one shard.",
        "",
        "The file server holds the file in its memory and has one link, as fast as a node's, which all nodes share.",
        "*lost*: one node reads. *all*: every node reads its own bytes, as after a restart from files, or fetches the",
        "shard of its neighbour from its SMP.",
        "",
        "| nodes | lost, memory | x line | lost, files | memory / files "
        "| all, memory | x line | all, files | files / memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["nodes"]:
        line = row["line_s"]
        lines.append(
            f"| {row['nodes']} | {row['lost_memory_s']:.2f} s | {row['lost_memory_s'] / line:.2f} "
            f"| {row['lost_files_s']:.2f} s | {row['lost_memory_s'] / row['lost_files_s']:.2f} "
            f"| {row['all_memory_s']:.2f} s | {row['all_memory_s'] / line:.2f} | {row['all_files_s']:.2f} s "
            f"| {row['all_files_s'] / row['all_memory_s']:.1f} |"
        )
    lines += [
        "",
        f"{report['slow_nodes']} nodes; one source, node {SLOW}, is {SLOWER} times slower each way, or stops "
        f"{STOP_AFTER_S} s after",
        "the load began (once). *slow holder*: the shard that it alone holds is fetched. *Received*: by all SMPs",
        "together, in shards. *Without*: nobody is slow to the SMP that loads, nothing late before the network's",
        "deadline.",
        "",
        "| source | with stealing | received | without | received | without / with |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["slow"]:
        shards = [row[f"{key}_received"] / report["shard_bytes"] for key in ("with", "without")]
        lines.append(
            f"| {row['name']} | {row['with_s']:.2f} s | {shards[0]:.2f} | {row['without_s']:.2f} s | {shards[1]:.2f} "
            f"| {row['without_s'] / row['with_s']:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
