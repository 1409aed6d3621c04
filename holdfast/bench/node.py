"""``holdfast bench node``: how fast this machine protects snapshots, part by part and as a whole.

The whole is measured with real SMPs. They alternate with the *floor* (`holdfast.bench.floor`): as many plain sockets
between as many processes, which carry the same bytes. The results are ratios of measurements from the same round.
Processor time is the sum over all SMPs, or over all processes of the floor. If another checkout is given, its SMPs take
turns, too. `holdfast plan --measured` reads the result.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from holdfast.bench import cluster as cluster_module
from holdfast.bench.floor import PIECE_BYTES, Carried, Floor, Wires, answer, end, tell, whole_pieces
from holdfast.bench.machine import describe, machine, rounded
from holdfast.bench.parts import PartRate, SocketRate, certificates, measure_parts, measure_sockets
from holdfast.planner.rates import FORMAT, KIND, NodeRates
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.credentials import TLS_ENVS
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.processes import own_command, own_environment
from holdfast.smp_daemon.shared.versions import RELEASE

LINKS_ENV = "HOLDFAST_LINKS"
CODES = {2: "1+1", 4: "3+1"}
"""The code for each number of nodes: one parity unit, and all nodes in one group."""

GB = 1e9


@dataclass(frozen=True, slots=True)
class NodeBenchmark:
    """What to measure.

    Attributes:
        nodes: numbers of SMPs that protect each other; keys of `CODES`.
        connections: numbers of connections from each SMP to each other one.
        shard_bytes: size of each node's shard.
        rounds: how often to measure, after one round that does not count.
        recoveries: how often to lose a node.
        most_bytes: most bytes that a part reads in one pass.
        against: the root of another checkout, whose SMPs take turns with these.
        parts: whether to measure parts and sockets. Without them the planner refuses the result.
        tls: whether to measure TLS connections, too.
    """

    nodes: tuple[int, ...] = (2, 4)
    connections: tuple[int, ...] = (1, 2, 4)
    shard_bytes: int = 256 << 20
    rounds: int = 7
    recoveries: int = 3
    most_bytes: int = 1 << 30
    seed: int = 1234
    against: Path | None = None
    parts: bool = True
    tls: bool = True

    def __post_init__(self) -> None:
        if unknown := [count for count in self.nodes if count not in CODES]:
            raise ConfigError(f"{unknown[0]} nodes: measure with {' or '.join(map(str, CODES))}")
        least = (max(self.nodes) - 1) * max(self.connections) * PIECE_BYTES
        if self.shard_bytes < least:
            raise ConfigError(f"--shard of {self.shard_bytes:,} bytes: give {least:,} or more, or fewer connections")
        if self.rounds < 1 or self.recoveries < 0 or self.seed < 0:
            raise ConfigError("give 1 round or more, 0 recoveries or more, and a seed of 0 or more")
        if self.against is not None and not (self.against / "holdfast" / "smp_daemon").is_dir():
            raise ConfigError(f"--against {self.against}: there is no holdfast/smp_daemon in it; name a checkout")


def quick(seed: int = 1234, against: Path | None = None) -> NodeBenchmark:
    """A benchmark of a few seconds, whose figures are not to be trusted."""
    return NodeBenchmark((2,), (1,), 24 << 20, 1, 1, 32 << 20, seed, against, tls=False)


@dataclass(frozen=True, slots=True)
class ProtectRate:
    """How fast SMPs protect snapshots, from sealed to parity committed. The digests of the seal are not included.

    Bytes are bytes of state, each counted once. All values are medians over the rounds, also those of ratios.

    Attributes:
        code: ``this`` for this code, ``against`` for the other checkout.
        tls: whether the SMPs' connections use TLS; those of the floor never do.
        bytes_per_s, plain_bytes_per_s, folded_bytes_per_s: of the SMPs, and of plain and folded rounds of the floor.
        throughput_ratio: throughput divided by that of plain rounds.
        folded_ratio: throughput divided by that of folded rounds.
        cpu_ratio: processor time divided by that of folded rounds.
        smp_cores: number of cores that one SMP kept busy.
        seal_cpu_s_per_gb: processor time of the seal's digests.
        throughput_gain, cpu_gain: throughput and processor time divided by those of ``against``; None without it.
    """

    code: str
    nodes: int
    protect: str
    connections: int
    tls: bool
    bytes: int
    bytes_per_s: float
    plain_bytes_per_s: float
    folded_bytes_per_s: float
    throughput_ratio: float
    folded_ratio: float
    cpu_s_per_gb: float
    plain_cpu_s_per_gb: float
    folded_cpu_s_per_gb: float
    cpu_ratio: float
    smp_cores: float
    seal_cpu_s_per_gb: float
    throughput_gain: float | None = None
    cpu_gain: float | None = None


@dataclass(frozen=True, slots=True)
class RecoverRate:
    """How fast a replacement gets a lost node's bytes back. Medians; the fields are as in `ProtectRate`."""

    code: str
    nodes: int
    protect: str
    connections: int
    tls: bool
    bytes: int
    bytes_per_s: float
    throughput_ratio: float
    cpu_s_per_gb: float
    cpu_ratio: float


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The result of a run of the benchmark.

    Attributes:
        load: load average of the last minute, before and after the run.
        against: name of the other checkout's folder; empty if there is none.
        rates: the rates that the planner uses; None if the parts were left out.
        notes: sentences on what was left out.
    """

    date: str
    release: str
    machine: dict[str, Any]
    load: tuple[float, float]
    seed: int
    against: str
    rates: NodeRates | None
    parts: list[PartRate]
    sockets: list[SocketRate]
    protect: list[ProtectRate]
    recover: list[RecoverRate]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """The JSON object that ``--json`` writes."""
        return {"kind": KIND, "format": FORMAT} | asdict(self)


def run(plan: NodeBenchmark, console: Console) -> NodeReport:
    """Measure everything, and print what is being measured. Blocks for minutes.

    Raises:
        HoldfastError: there is too little memory, or a process failed.
    """
    computer, load, notes = machine(), os.getloadavg()[0], []
    plain = {name: value for name, value in os.environ.items() if name not in TLS_ENVS}
    environments = {False: plain}
    with tempfile.TemporaryDirectory() as folder:
        if plan.tls:
            try:
                environments[True] = plain | {name: os.environ[name] for name in TLS_ENVS if name in os.environ}
                environments[True] |= certificates(os.environ, Path(folder))
            except ConfigError as error:
                del environments[True]
                notes.append(f"TLS is left out: {error}")
        parts, sockets = [], []
        if plan.parts:
            console.print("parts: copy, digest, fold")
            parts = measure_parts(computer["cores"], plan.rounds, plan.most_bytes)
            for tls, environment in environments.items():
                console.print(f"sockets{' with TLS' * tls}")
                sockets += measure_sockets(plan.connections, plan.shard_bytes, plan.rounds, environment, tls=tls)
        protect, recover = [], []
        for setup in setups(plan, tls=True in environments):
            console.print(str(setup))
            protected, recovered = _measure(plan, setup, environments[setup.tls])
            protect += protected
            recover += recovered
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return NodeReport(
        date=date,
        release=RELEASE,
        machine=computer,
        load=(round(load, 2), round(os.getloadavg()[0], 2)),
        seed=plan.seed,
        against=plan.against.resolve().name if plan.against else "",
        rates=summary(date, computer, parts, sockets, protect) if parts else None,
        parts=parts,
        sockets=sockets,
        protect=protect,
        recover=recover,
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """A number of SMPs, and the number and kind of connections from each to each other one."""

    nodes: int
    connections: int
    tls: bool

    def __str__(self) -> str:
        return f"{self.nodes} SMPs, {_count(self.connections)}{', TLS' * self.tls}"


def setups(plan: NodeBenchmark, *, tls: bool) -> list[Setup]:
    """All setups to measure. TLS is measured only with the smallest number of SMPs."""
    found = [Setup(nodes, count, False) for nodes in plan.nodes for count in plan.connections]
    return found + [Setup(min(plan.nodes), count, True) for count in plan.connections if tls]


@dataclass(frozen=True, slots=True)
class Turn:
    """Results of one round: the floor's, and those of each code, ``this`` and ``against``."""

    plain: Carried
    folded: Carried
    protected: dict[str, cluster_module.Protected]


def _measure(
    plan: NodeBenchmark, setup: Setup, environment: dict[str, str]
) -> tuple[list[ProtectRate], list[RecoverRate]]:
    each = whole_pieces(plan.shard_bytes // (setup.nodes - 1) // setup.connections)
    roots = {"this": None} | ({"against": plan.against} if plan.against else {})
    with ExitStack() as stack:
        floor_environment = {name: value for name, value in environment.items() if name not in TLS_ENVS}
        floor = stack.enter_context(Floor(Wires(setup.nodes, setup.connections, each), floor_environment))
        smps = {
            code: stack.enter_context(
                Smps(setup, plan.shard_bytes, plan.seed, environment | {LINKS_ENV: str(setup.connections)}, root)
            )
            for code, root in roots.items()
        }
        turns = [_turn(number, floor, smps) for number in range(plan.rounds + 1)][1:]
        protected = [protect_rate(setup, code, turns) for code in roots]
        lost: dict[str, list[cluster_module.NodeRecovered]] = {code: [] for code in roots}
        for _ in range(plan.recoveries):
            for code, each_smps in smps.items():
                lost[code].append(each_smps.recover())
        recovered = [recover_rate(row, found) for row in protected if (found := lost[row.code])]
    return protected, recovered


def _turn(number: int, floor: Floor, smps: Mapping[str, Smps]) -> Turn:
    """Measure each of them once, each time in another order, in case the first one finds the machine busier."""
    works: dict[str, Callable[[], Any]] = {
        "plain": lambda: floor.round("plain"),
        "folded": lambda: floor.round("folded"),
    }
    works |= {code: each.protect for code, each in smps.items()}
    names = [*works]
    found = {name: works[name]() for name in names[number % len(names) :] + names[: number % len(names)]}
    return Turn(found.pop("plain"), found.pop("folded"), found)


def protect_rate(setup: Setup, code: str, turns: Sequence[Turn]) -> ProtectRate:
    """The row for one code, from what the rounds measured. Pure."""
    mine = [(turn, turn.protected[code]) for turn in turns]

    def median(of: Callable[[Turn, cluster_module.Protected], float]) -> float:
        return rounded(statistics.median(of(*each) for each in mine))

    def gain(of: Callable[[cluster_module.Protected], float]) -> float | None:
        if code != "this" or "against" not in turns[0].protected:
            return None
        return median(lambda turn, it: of(it) / of(turn.protected["against"]))

    return ProtectRate(
        code=code,
        nodes=setup.nodes,
        protect=CODES[setup.nodes],
        connections=setup.connections,
        tls=setup.tls,
        bytes=mine[0][1].bytes,
        bytes_per_s=median(lambda _, it: _rate(it)),
        plain_bytes_per_s=median(lambda turn, _: _rate(turn.plain)),
        folded_bytes_per_s=median(lambda turn, _: _rate(turn.folded)),
        throughput_ratio=median(lambda turn, it: _rate(it) / _rate(turn.plain)),
        folded_ratio=median(lambda turn, it: _rate(it) / _rate(turn.folded)),
        cpu_s_per_gb=median(lambda _, it: it.cpu_s / it.bytes * GB),
        plain_cpu_s_per_gb=median(lambda turn, _: _cost(turn.plain) * GB),
        folded_cpu_s_per_gb=median(lambda turn, _: _cost(turn.folded) * GB),
        cpu_ratio=median(lambda turn, it: it.cpu_s / it.bytes / _cost(turn.folded)),
        smp_cores=median(lambda _, it: it.cpu_s / it.seconds / setup.nodes),
        seal_cpu_s_per_gb=median(lambda _, it: it.seal_cpu_s / it.bytes * GB),
        throughput_gain=gain(_rate),
        cpu_gain=gain(lambda it: it.cpu_s),
    )


def recover_rate(row: ProtectRate, found: Sequence[cluster_module.NodeRecovered]) -> RecoverRate:
    """The row for one code's recoveries, with ratios to the floor in `row`. Pure."""
    bytes_per_s = statistics.median(_rate(each) for each in found)
    cpu_s_per_gb = statistics.median(each.cpu_s / each.bytes * GB for each in found)
    return RecoverRate(
        **{name: getattr(row, name) for name in ("code", "nodes", "protect", "connections", "tls")},
        bytes=found[0].bytes,
        bytes_per_s=rounded(bytes_per_s),
        throughput_ratio=rounded(bytes_per_s / row.plain_bytes_per_s),
        cpu_s_per_gb=rounded(cpu_s_per_gb),
        cpu_ratio=rounded(cpu_s_per_gb / row.folded_cpu_s_per_gb),
    )


def _rate(it: Carried | cluster_module.Protected | cluster_module.NodeRecovered) -> float:
    return it.bytes / it.seconds


def _cost(it: Carried) -> float:
    return sum(it.cpu_s) / it.bytes


class Smps:
    """A context manager for SMPs of this code or of another checkout, driven through a process of their own.

    Another checkout's SMPs run on this interpreter, with its installed packages.
    """

    def __init__(
        self, setup: Setup, shard_bytes: int, seed: int, environment: Mapping[str, str], root: Path | None
    ) -> None:
        alone = [sys.executable, "-P", str(Path(cluster_module.__file__))]
        self._command = own_command(cluster_module.__name__) if root is None else alone
        self._command += ["--nodes", str(setup.nodes), "--protect", CODES[setup.nodes]]
        self._command += ["--shard-bytes", str(shard_bytes), "--seed", str(seed)]
        self._root = root
        self._environment = own_environment(environment)
        if root is not None:
            self._environment |= {"PYTHONPATH": str(root.resolve()), "PYTHONDONTWRITEBYTECODE": "1"}
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        """Start the SMPs. Raises `HoldfastError` if they do not start, or run another checkout's code."""
        self._process = subprocess.Popen(
            self._command,
            cwd=self._root,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            code = Path(answer(self._process)["code"])
            root = self._root or Path(cluster_module.__file__).parents[2]
            if not code.samefile(root):
                raise HoldfastError(f"the SMPs of {root} run the code of {code}: start from another folder")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        end(self._process)

    def protect(self) -> cluster_module.Protected:
        """Protect a snapshot. Blocks."""
        tell(self._process, {"do": "protect"})
        return cluster_module.Protected(**answer(self._process))

    def recover(self) -> cluster_module.NodeRecovered:
        """Lose a node, and recover its shard. Blocks."""
        tell(self._process, {"do": "recover"})
        return cluster_module.NodeRecovered(**answer(self._process))


def summary(
    date: str,
    computer: Mapping[str, Any],
    parts: Sequence[PartRate],
    sockets: Sequence[SocketRate],
    protect: Sequence[ProtectRate],
) -> NodeRates:
    """The rates that the planner uses. Pure.

    A part's rate is that of one core while all others do the same. The rate of protecting is that of the number of
    connections that needs the least processor time, and of the number of SMPs that then needs the most.
    """
    each = {row.part: row.bytes_per_core_s for row in sorted(parts, key=lambda row: row.threads)}
    plain = [row for row in sockets if not row.tls]
    best: dict[int, ProtectRate] = {}
    for row in protect:
        if row.code == "this" and not row.tls and row.cpu_s_per_gb <= best.get(row.nodes, row).cpu_s_per_gb:
            best[row.nodes] = row
    worst = max(best.values(), key=lambda row: row.cpu_s_per_gb)
    return NodeRates(
        date=date,
        cpu_model=computer["cpu_model"],
        cores=computer["cores"],
        copy=each["copy"],
        digest=each["digest"],
        fold=each["fold_xor"],
        send=max(row.send_bytes_per_core_s for row in plain),
        receive=max(row.receive_bytes_per_core_s for row in plain),
        protect=rounded(GB / worst.cpu_s_per_gb),
        smp_cores=worst.smp_cores,
    )


LEGEND = (
    "GB are 10^9 bytes. Medians; ratios are medians of the ratios of one round. 'Plain' are as many sockets between as "
    "many processes, which send the state and receive it into one buffer; the floor also digests it once and adds it "
    "to parity by XOR once. 'CPU s/GB' is processor time, user and system, of all processes together, both ends, for "
    "each GB of state, from sealed to parity committed; the digests of the seal are apart: encoding is held back until "
    "every node has sealed. TLS rows are compared with sockets without it."
)


def tables(report: NodeReport) -> list[Report]:
    """All tables that have rows. Pure."""
    gains = any(row.throughput_gain is not None for row in report.protect)
    heads = {
        "parts, GB/s": ["part", "threads", "together", "by a core", "memcpy", "x memcpy"],
        "sockets on loopback, GB/s": ["connections", "together", "sent by a core", "received by a core"],
        "SMPs protect a snapshot": [
            *("code", "SMPs", "connections", "GB/s", "x plain", "x floor", "CPU s/GB", "floor's", "x floor's", "seal"),
            *(["x GB/s against", "x CPU against"] if gains else []),
        ],
        "a lost node's bytes come back": ["code", "SMPs", "connections", "GB/s", "x plain", "CPU s/GB", "x floor's"],
    }
    rows = (
        [_part_cells(row) for row in report.parts],
        [_socket_cells(row) for row in report.sockets],
        [_protect_cells(row, gains=gains) for row in report.protect],
        [_recover_cells(row) for row in report.recover],
    )
    return [Report(head, cells, title) for (title, head), cells in zip(heads.items(), rows, strict=True) if cells]


def _part_cells(row: PartRate) -> list[str]:
    rates = row.bytes_per_s, row.bytes_per_core_s, row.memcpy_bytes_per_core_s
    return [row.part, str(row.threads), *map(_gb, rates), f"{row.ratio:.2f}"]


def _socket_cells(row: SocketRate) -> list[str]:
    rates = row.bytes_per_s, row.send_bytes_per_core_s, row.receive_bytes_per_core_s
    return [_links(row.connections, row.tls), *map(_gb, rates)]


def _protect_cells(row: ProtectRate, *, gains: bool) -> list[str]:
    return [
        *_who(row),
        _gb(row.bytes_per_s),
        f"{row.throughput_ratio:.2f}",
        f"{row.folded_ratio:.2f}",
        f"{row.cpu_s_per_gb:.3f}",
        f"{row.folded_cpu_s_per_gb:.3f}",
        f"{row.cpu_ratio:.2f}",
        f"{row.seal_cpu_s_per_gb:.3f}",
        *([_times(row.throughput_gain), _times(row.cpu_gain)] if gains else []),
    ]


def _recover_cells(row: RecoverRate) -> list[str]:
    ratios = f"{row.throughput_ratio:.2f}", f"{row.cpu_s_per_gb:.3f}", f"{row.cpu_ratio:.2f}"
    return [*_who(row), _gb(row.bytes_per_s), *ratios]


def _who(row: ProtectRate | RecoverRate) -> tuple[str, str, str]:
    return row.code, f"{row.nodes}, {row.protect}", _links(row.connections, row.tls)


def show(console: Console, report: NodeReport) -> None:
    """Print the tables."""
    say(console, head(report), *tables(report), LEGEND, *report.notes)


def head(report: NodeReport) -> str:
    """When, where and on what this was measured."""
    load = " and ".join(f"{each:g}" for each in report.load)
    against = f"; 'against' is the code of {report.against}" if report.against else ""
    return (
        f"{report.date}: holdfast {report.release} on {describe(report.machine)}; load average {load} before and "
        f"after; seed {report.seed}{against}."
    )


def _gb(rate: float) -> str:
    return f"{rate / GB:.2f}"


def _times(gain: float | None) -> str:
    return "–" if gain is None else f"{gain:.2f}"


def _links(connections: int, tls: bool) -> str:
    return f"{connections}{', TLS' * tls}"


def _count(connections: int) -> str:
    return f"{connections} connection{'s' * (connections > 1)}"
