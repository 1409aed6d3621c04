"""How what ranks and SMPs tell each other grows with the job: ``make bench-scale``, or ``python benchmarks/scale.py``.

All parts run the code that trains: pure functions for up to 12,500 nodes; ranks that are processes, on loopback and in
network namespaces with links of a millisecond (as root); what one rank of a large job takes in as it enters, with
every other rank's message made as that rank would make it; and whole jobs that lose a node, of up to 1,024 ranks,
played in one process by ``holdfast.chaos.sim``.

Many ranks share two cores here, so most of the time of a round they wait for their turn at a processor. What the
agreement of 16,384 ranks takes is therefore worked out: the time of one round between two ranks, which have a core
each, times the number of rounds, which is counted at every size.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # or this file would stand before the room of its name

import numpy as np
import torch
import torch.distributed as dist

from holdfast.chaos.network.namespaces import DEVICE, enter, inside, unavailable
from holdfast.chaos.network.wire import Wire
from holdfast.chaos.sim.plan import DrawnFault, Gap, draw
from holdfast.chaos.sim.run import play
from holdfast.chaos.sim.seams import installed
from holdfast.smp_daemon.coding.regroup import plan_regroup
from holdfast.smp_daemon.recovery.redundancy import redundancies
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.smp_daemon.shared.plan import plan_restore
from holdfast.snapshot.collective.agreement import Alone
from holdfast.snapshot.collective.mesh import Mesh
from holdfast.snapshot.collective.routes import distances, sockets_needed
from holdfast.snapshot.resume.arrange import Protection, RankInfo, arrange
from holdfast.snapshot.resume.choice import StartOptions
from holdfast.snapshot.resume.entering import Entering, exchange
from holdfast.snapshot.resume.reserve import lay_out
from holdfast.snapshot.state.live import Change, LiveTensor
from holdfast.snapshot.state.replicas import agree_on_shares

RANKS_A_NODE = 8
SLOTS = 3
SHARD_BYTES = 297_123_840
"""Of 405 billion parameters with Adam on 16,384 ranks."""

NODES = (8, 64, 512, 2048, 12_500)
PROCESSES = (2, 4, 8, 16, 32, 64, 128, 256)
WIRED = (2, 8, 32)
ENTERING = (512, 4096, 16_384)
PLAYED = (8, 64, 256, 1024)
LARGE = 16_384

LEAVES = 1000
"""Tensors that replicas hold alike."""

MINIMA = 30
STEP_S = 0.02
"""How long the training thread does something else while ranks agree."""

LINK_MS = 1
HOST = "10.78.{}.{}"
DEADLINE_S = 900.0
HEADLINES = (
    "agreement_ms",
    "agreement_on_training_thread_ms",
    "sockets",
    "enter_bytes",
    "enter_cpu_s",
    "layout_bytes",
)
FITTED = 3
"""An exponent is that of the largest so many sizes."""


def main() -> int:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    parser.add_argument("--markdown", type=Path, help="write the tables to a file")
    parser.add_argument("--most", type=int, default=max(PROCESSES), help="processes at most (default %(default)s)")
    parser.add_argument("--played", type=int, default=max(PLAYED), help="ranks played at most (default %(default)s)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"date": str(date.today()), "machine": machine()}
    found["pure_cpu_s"] = pure()
    found["processes"] = [processes(size) for size in PROCESSES if size <= asked.most]
    found["wired"] = wired([size for size in WIRED if size <= asked.most])
    found["entering"] = [in_process_of_its_own(entering, size) for size in ENTERING]
    found["played"] = [in_process_of_its_own(played, size) for size in PLAYED if size <= asked.played]
    found |= headline(found)
    print("\n".join(markdown(found)))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text("\n".join(markdown(found)) + "\n")
    return 0


def machine() -> str:
    """What this ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


# ---------------------------------------------------------------------- a large job


def rank_infos(nodes: int) -> list[RankInfo]:
    """What each rank of a job says of itself: tensor parallel within a node, pipelines of 16 over nodes."""
    stages = 16 if nodes >= 256 else 1
    return [
        RankInfo(
            f"pp{node % stages}-tp{place}-cp0-ep0-dp{node // stages}",
            f"gpu-node-{node:05d}",
            f"10.{node // 62_500}.{node // 250 % 250}.{node % 250 + 1}",
            40_001,
            40_002,
            SHARD_BYTES,
            (f"rack=r{node // 4:04d}",),
        )
        for node in range(nodes)
        for place in range(RANKS_A_NODE)
    ]


def large_layout(nodes: int, epoch: int = 3) -> Layout:
    """Of such a job, by 7+1."""
    return arrange("llama405b-run17", epoch, rank_infos(nodes), Protection(7, 1), 3)


def inventory(layouts: Sequence[Layout], index: int) -> Inventory:
    """What the SMP of a node says in the middle of a run, with two snapshots."""
    newest = layouts[-1]
    node = newest.nodes[index]
    snapshots = [SnapshotId(newest.epoch, 1233), SnapshotId(newest.epoch, 1234)]
    group, position = newest.place(node.name)
    return Inventory(
        node.name,
        node.host,
        node.control_port,
        node.bulk_port,
        newest.epoch,
        snapshots[0],
        RANKS_A_NODE,
        {(layout.epoch, layout.revision): layout for layout in layouts},
        frozenset((snapshot, shard.coord) for snapshot in snapshots for shard in node.shards),
        frozenset((snapshot, newest.tag(group), position) for snapshot in snapshots),
    )


# ---------------------------------------------------------------------- pure functions


def pure() -> dict[str, dict[int, float]]:
    """Seconds of a processor by function and number of nodes."""
    found: dict[str, dict[int, float]] = {}

    def took(name: str, nodes: int, work: Callable[[], object]) -> None:
        found.setdefault(name, {})[nodes] = round(cpu_s(work), 5)

    for nodes in NODES:
        infos = rank_infos(nodes)
        took("arrange", nodes, lambda infos=infos: arrange("job", 3, infos, Protection(7, 1), 3))  # type: ignore[misc]
        layout = large_layout(nodes)
        text = encode_json(layout)
        took("layout to JSON", nodes, lambda layout=layout: encode_json(layout))  # type: ignore[misc]
        took("layout from JSON", nodes, lambda text=text: decode_json(Layout, text, "a layout"))  # type: ignore[misc]
        held = [inventory([layout], index) for index in range(nodes)]
        _ = layout.tag(0), layout.digest  # known to whoever has had the layout for a while
        survivors = held[1:]
        coords = layout.coords
        took("restore plan, a node lost", nodes, lambda held=survivors, coords=coords: plan_restore(held, coords))  # type: ignore[misc]
        took("regroup plan, a node lost", nodes, lambda held=survivors: plan_regroup(held))  # type: ignore[misc]
        took("what a snapshot tolerates", nodes, lambda held=held: redundancies(held))  # type: ignore[misc]
    return found


def cpu_s(work: Callable[[], object]) -> float:
    """Processor time of one call, without the collector of garbage: it would look at all else that is measured here."""
    gc.collect()
    gc.disable()
    try:
        began = time.process_time()
        work()
        return time.process_time() - began
    finally:
        gc.enable()


# ---------------------------------------------------------------------- ranks that are processes


class CountingMesh(Mesh):
    """A mesh that counts what it sends and receives."""

    def __init__(self, *arguments: Any) -> None:
        self.sent = self.received_bytes = 0
        super().__init__(*arguments)

    def _start(self, name: str, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        if name == "send":
            self.sent += 1
        else:
            self.received_bytes += tensor.nbytes
        return super()._start(name, tensor, rank, tag)


class MeshAgreement(Alone):
    """What `exchange` needs of an agreement, over a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank = mesh.rank
        self._mesh = mesh
        self._all = range(mesh.size)

    def gather(self, data: bytes, among: Sequence[int] | None = None) -> list[bytes]:
        return self._mesh.gather(data, self._all).result()

    def tell(self, data: bytes, root: int) -> bytes:
        return self._mesh.tell(data, root, self._all).result()

    def minimum(self, values: Any, among: Sequence[int] | None = None) -> Callable[[], list[int]]:
        return self._mesh.minimum(lambda: values, self._all).result


def sockets() -> int:
    """Of this process."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            found += str(file.readlink()).startswith("socket:")
        except OSError:
            continue  # that by which they are listed
    return found


def be_rank(rank: int, size: int, host: str, port: int, namespace: str | None, results: Any) -> None:
    """One process. What it measured goes into `results`."""
    if namespace is not None:
        enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if namespace is None else DEVICE
    store = dist.TCPStore(host, port, size, rank == 0, timedelta(seconds=DEADLINE_S))
    before, began = sockets(), time.perf_counter()
    mesh = CountingMesh(dist.PrefixStore("scale", store), rank, size, timedelta(seconds=DEADLINE_S))
    everyone = range(size)

    def agree() -> list[int]:
        return mesh.minimum(lambda: [1, 2, 3, -1, rank], everyone).result()

    agree()
    told: dict[str, Any] = {"connected_s": time.perf_counter() - began}
    agree()
    sent, cpu, took = mesh.sent, time.process_time(), []
    for _ in range(MINIMA):
        at = time.perf_counter()
        assert agree()[-1] == 0
        took.append(time.perf_counter() - at)
    told["agreement_ms"] = 1e3 * statistics.median(took)
    told["cpu_ms"] = 1e3 * (time.process_time() - cpu) / MINIMA
    told["messages"] = (mesh.sent - sent) / MINIMA
    told["training_thread_ms"] = 1e3 * statistics.median(beside_a_step(mesh) for _ in range(MINIMA))
    layouts = [large_layout(-(-size // RANKS_A_NODE), epoch) for epoch in (2, 3)]
    held = inventory(layouts, rank // RANKS_A_NODE)
    client: Any = FirstSmp(held.node, encode_json(held.to_plain()))
    rank_coord = rank_infos(len(layouts[-1].nodes))[rank].coord
    agree()
    received, cpu = mesh.received_bytes, time.process_time()
    inventories, coords, _ = exchange(client, MeshAgreement(mesh), rank_coord)
    assert len(coords) == size and len(inventories) == len(layouts[-1].nodes)
    told["enter_bytes"], told["enter_cpu_s"] = mesh.received_bytes - received, time.process_time() - cpu
    told["sockets"] = sockets() - before
    agree()
    mesh.end()
    mesh.join(DEADLINE_S)
    results.put((rank, told))


def beside_a_step(mesh: Mesh) -> float:
    """Seconds that an agreement takes of the training thread, which meanwhile computes."""
    began = time.perf_counter()
    asked = mesh.minimum(lambda: [1], range(mesh.size))
    asking = time.perf_counter() - began
    left = torch.ones(64, 64)
    until = time.perf_counter() + STEP_S
    while time.perf_counter() < until:
        left = torch.mm(left, left).clamp_(0, 1)
    began = time.perf_counter()
    asked.result()
    return asking + time.perf_counter() - began


def processes(size: int, hosts: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Ranks that are processes, on loopback, or spread over hosts, (address, namespace); of each figure the most that
    any rank has."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    here = ("127.0.0.1", None)
    first = (hosts or [here])[0]
    port = free_port(first)
    members = [
        context.Process(
            target=be_rank,
            args=(rank, size, first[0], port, (hosts or [here])[rank * max(1, len(hosts)) // size][1], results),
        )
        for rank in range(size)
    ]
    for member in members:
        member.start()
    try:
        limit = time.monotonic() + DEADLINE_S
        told: list[dict[str, Any]] = []
        while len(told) < size:
            if any(member.exitcode for member in members) or time.monotonic() > limit:
                raise RuntimeError(f"of {size} ranks {len(told)} have come to an end")
            if results.empty():
                time.sleep(0.01)
            else:
                told.append(results.get()[1])
    finally:
        for member in members:
            member.join(5)
            member.kill()
            member.join()
    print(f"{size} processes{' over a wire' if hosts else ''}", file=sys.stderr, flush=True)
    return {"ranks": size} | {name: round(max(each[name] for each in told), 4) for name in told[0]}


def free_port(host: tuple[str, str | None]) -> int:
    """A port on that host that nobody listens at."""
    with inside(host[1]), socket.create_server((host[0], 0)) as listening:
        return int(listening.getsockname()[1])


def wired(sizes: Iterable[int]) -> list[dict[str, Any]]:
    """The same in namespaces, one rank or two in each, with links of `LINK_MS`; empty where that cannot be done."""
    if reason := unavailable():
        print(f"no links are measured: {reason}", file=sys.stderr)
        return []
    found = []
    for size in sizes:
        wire = Wire()
        try:
            count = min(size, 16)
            addresses = [HOST.format(number // 250, number % 250 + 1) for number in range(count)]
            hosts = [(address, wire.open(address)) for address in addresses]
            wire.impair("delay-packets", addresses, amount=LINK_MS, seed=1, for_s=0)
            trip_ms = round_trip_ms(hosts[0], hosts[1])
            found.append(processes(size, hosts) | {"round_trip_ms": round(trip_ms, 3)})
        finally:
            wire.close()
    return found


def round_trip_ms(here: tuple[str, str], there: tuple[str, str]) -> float:
    """Of a byte over a TCP connection, there and back."""
    with inside(there[1]):
        listening = socket.create_server((there[0], 0))
    with listening, inside(here[1]), socket.create_connection(listening.getsockname(), DEADLINE_S) as one:
        other, _ = listening.accept()
        with other:
            for end in (one, other):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            took = []
            for _ in range(MINIMA):
                began = time.perf_counter()
                one.sendall(b"?")
                other.sendall(other.recv(1))
                one.recv(1)
                took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took)


# ---------------------------------------------------------------------- what one rank of a large job takes in


class PlayedAgreement(Alone):
    """Everyone else's messages, made ahead; counts what this rank, the first, is sent."""

    def __init__(self, ranks: int, gathered: Sequence[list[bytes]]) -> None:
        self._ranks = ranks
        self._gathered = iter(gathered)
        self.received_bytes = 0

    def gather(self, data: bytes, among: Sequence[int] | None = None) -> list[bytes]:
        everyone = next(self._gathered)
        assert len(everyone[0]) == len(data), "the first rank's message is another than was made for it"
        self.received_bytes += sum(map(len, everyone)) + 8 * len(everyone)
        return everyone

    def minimum(self, values: Any, among: Sequence[int] | None = None) -> Callable[[], list[int]]:
        rounds = len(distances(self._ranks if among is None else len(among)))
        self.received_bytes += 8 * len(values) * rounds
        return lambda: list(values)


def entering(ranks: int) -> dict[str, Any]:
    """A restart of so many ranks, and a new layout after it, as the first of them: what it is sent, in bytes, and
    processor time and memory that it takes."""
    nodes = ranks // RANKS_A_NODE
    layouts = [large_layout(nodes, epoch) for epoch in (2, 3)]
    digests = {layout.digest for layout in layouts}
    held = [inventory(layouts, index) for index in range(nodes)]
    infos = rank_infos(nodes)
    client: Any = FirstSmp(held[0].node, encode_json(held[0].to_plain()))
    facts = [
        encode_json(Entering(info.coord, info.node, (info.host, info.control_port), StartOptions())) for info in infos
    ]
    said = [b""] * ranks
    said[::RANKS_A_NODE] = [encode_json(each.to_plain(digests)) for each in held]
    restart = PlayedAgreement(ranks, [facts, said])
    told = {"ranks": ranks}
    with noting(told, "enter", restart):
        exchange(client, restart, infos[0].coord)
    sets = [info.coord.rpartition("-dp")[0].encode() for info in infos]
    shares = PlayedAgreement(ranks, [sets])
    weights = [
        LiveTensor(f"weight{i}", torch.full((8,), float(i)), Change.STEP, replicated=True) for i in range(LEAVES)
    ]
    anew = PlayedAgreement(ranks, [[encode_json(info) for info in infos], [str(SLOTS).encode()] * ranks])
    with noting(told, "layout", shares, anew):
        agree_on_shares(shares, sets[0].decode(), iter(weights))
        first = infos[0]
        domains, protection = first.domains, Protection(7, 1)
        lay_out(client, anew, "job", 4, first.coord, SHARD_BYTES, protection, SLOTS, domains)
    return told


@contextmanager
def noting(told: dict[str, Any], what: str, *agreements: PlayedAgreement) -> Iterator[None]:
    """Of a block: processor time, memory, and what was received."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    yield
    told[f"{what}_cpu_s"] = round(time.process_time() - began, 4)
    told[f"{what}_rss_mb"] = round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) / 1e3, 1)
    told[f"{what}_bytes"] = sum(agreement.received_bytes for agreement in agreements)


@dataclass(frozen=True, slots=True)
class FirstSmp:
    """An SMP's client, as far as a rank that enters asks it: its answers are ready, as they come over the socket."""

    node: str
    answer: bytes

    def inventory(self) -> Inventory:
        return Inventory.read(decode_json(dict[str, Any], self.answer, "what the SMP holds"))

    def join(self, epoch: int) -> None:
        """It has."""

    def configure(self, layout: Layout, *, wait: bool) -> int:
        """What goes over the unix socket is made, and goes nowhere."""
        encode_json(layout)
        return layout.slots


def in_process_of_its_own(work: Callable[[int], dict[str, Any]], size: int) -> dict[str, Any]:
    """What it returns; its memory is that of this work alone."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=lambda: results.put(work(size)))
    process.start()
    try:
        limit = time.monotonic() + DEADLINE_S
        while results.empty():
            if process.exitcode or time.monotonic() > limit:
                raise RuntimeError(f"{work.__name__} of {size} did not come to its end")
            time.sleep(0.01)
        told: dict[str, Any] = results.get()
    finally:
        process.join(5)
        process.kill()
        process.join()
    print(f"{work.__name__} of {size}", file=sys.stderr, flush=True)
    return told


# ---------------------------------------------------------------------- whole jobs, played


def played(ranks: int) -> dict[str, Any]:
    """A job of so many ranks that takes two snapshots, loses a node, starts again and is protected: in one process."""
    nodes = ranks // RANKS_A_NODE if ranks > RANKS_A_NODE else ranks
    plan = replace(
        draw(0),
        nodes=nodes,
        ranks=tuple(rank * nodes // ranks for rank in range(ranks)),
        lengths=(200,) * ranks,
        protect="auto",
        slots=3,
        every=1,
        unit_bytes=512,
        regroup_after_s=0.0,
        chance=0.0,
        latency_s=0.0002,
        capacity=64,
        flip_chance=0.0,
        break_chance=0.0,
        steps=2,
        step_s=0.05,
        persist_s=0.0,
        state=None,
        lives=((DrawnFault("lose-node", awaits=3000 * nodes),),),
        gaps=(Gap(1.0, replace=True),),
        quiet=1,
        final="stop",
        generations=1,
        order="uniform",
    )
    with installed():
        began = time.process_time()
        report = play(plan)
    if report.violations:
        raise RuntimeError(f"{ranks} ranks: {report.violations[0]}")
    return {
        "ranks": ranks,
        "cpu_s": round(time.process_time() - began, 2),
        "turns": report.turns,
        "faults": sum(report.faults.values()),
    }


# ---------------------------------------------------------------------- what comes of it


def exponent(figures: Mapping[int, float]) -> float:
    """Of a power law through the figures of the largest sizes."""
    sizes = sorted(figures)[-FITTED:]
    logs = np.log([[size, max(figures[size], 1e-9)] for size in sizes])
    return round(float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]), 2)


def headline(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is promised of `LARGE` ranks, and the exponents. Pure."""
    by_ranks = {each["ranks"]: each for each in found["processes"]}
    two = by_ranks[2]
    rounds = len(distances(LARGE))
    exponents = {name: exponent(figures) for name, figures in found["pure_cpu_s"].items()}
    for name in ("enter_bytes", "enter_cpu_s", "layout_bytes", "layout_cpu_s"):
        exponents[name] = exponent({each["ranks"]: each[name] for each in found["entering"]})
    for name in ("cpu_s", "turns"):
        exponents[f"played {name}"] = exponent({each["ranks"]: each[name] for each in found["played"]})
    largest = found["entering"][-1]
    return {
        "agreement_ms": {str(n): each["agreement_ms"] for n, each in by_ranks.items()}
        | {str(LARGE): round(rounds * two["agreement_ms"], 3)},
        "agreement_on_training_thread_ms": {str(n): each["training_thread_ms"] for n, each in by_ranks.items()}
        | {str(LARGE): two["training_thread_ms"]},
        "sockets": {str(n): each["sockets"] for n, each in by_ranks.items()} | {str(LARGE): sockets_needed(LARGE)},
        "enter_bytes": {str(each["ranks"]): each["enter_bytes"] for each in [*found["processes"], *found["entering"]]},
        "enter_cpu_s": {str(each["ranks"]): each["enter_cpu_s"] for each in [*found["processes"], *found["entering"]]},
        "layout_bytes": {str(each["ranks"]): each["layout_bytes"] for each in found["entering"]},
        "node_rss_mb": RANKS_A_NODE * max(largest["enter_rss_mb"], largest["layout_rss_mb"]),
        "exponents": exponents,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """In Markdown; the columns are those of the first row."""
    yield "| " + " | ".join(name.replace("_", " ") for name in rows[0]) + " |"
    yield "|" + "---:|" * len(rows[0])
    for row in rows:
        yield "| " + " | ".join(f"{value:,}" for value in row.values()) + " |"


def markdown(found: Mapping[str, Any]) -> Iterator[str]:
    """All tables. Pure."""
    yield f"# How the control plane grows, {found['date']}\n"
    yield f"`make bench-scale` on {found['machine']}. {__doc__.split(chr(10) * 2, 1)[1].strip()}\n"
    yield "## Pure functions, seconds of a processor by nodes\n"
    sizes = sorted(next(iter(found["pure_cpu_s"].values())))
    yield "| function | " + " | ".join(f"{size:,}" for size in sizes) + " | exponent |"
    yield "|---|" + "---:|" * (len(sizes) + 1)
    for name, figures in found["pure_cpu_s"].items():
        cells = " | ".join(f"{figures[size]:.4f}" for size in sizes)
        yield f"| {name} | {cells} | {found['exponents'][name]} |"
    yield "\n## Ranks that are processes: the most that any of them has\n"
    yield from table(found["processes"])
    if found["wired"]:
        yield f"\n## The same with links of {LINK_MS} ms between nodes\n"
        yield from table(found["wired"])
    yield "\n## One rank of a large job: a restart, and a new layout\n"
    yield from table(found["entering"])
    yield "\n## Whole jobs in one process, a node lost\n"
    yield from table(found["played"])
    large = {name: figures[str(LARGE)] for name, figures in found.items() if name in HEADLINES}
    yield f"\n## {LARGE:,} ranks\n"
    yield (
        f"{len(distances(LARGE))} rounds of {found['agreement_ms']['2']} ms are {large['agreement_ms']} ms, of which "
        f"the training thread is held up {large['agreement_on_training_thread_ms']} ms; {large['sockets']} connections "
        f"a process; entering takes {large['enter_bytes'] / 1e6:.1f} MB and {large['enter_cpu_s']} s of a processor a "
        f"rank, and {found['node_rss_mb']:.0f} MB a node; a new layout {large['layout_bytes'] / 1e6:.1f} MB a rank."
    )
    yield "\nExponents: " + ", ".join(f"{name} {value}" for name, value in found["exponents"].items()) + "."


if __name__ == "__main__":
    sys.exit(main())
