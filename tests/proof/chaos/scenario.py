"""Scenarios: a small job, the faults that strike it, and the expected outcome. Read from TOML, or drawn from a seed.

::

    [a-node-in-the-middle-of-a-copy]
    what = "a node loses its memory while a trainer on it copies"
    nodes = 3
    fault = [{kind = "lose-node", targets = [1], at = "copy.middle", step = 5}]
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from holdfast.chaos.faults import SMP_FAILPOINTS, STEP_POINTS
from holdfast.planner.profiles import FailureProfile
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.resume.arrange import parse_protect
from tests.proof.chaos.actions import check
from tests.proof.chaos.faults import CATALOGUE, Fault

IDENTICAL, UNRECOVERABLE, PERSISTED = "identical", "unrecoverable", "persisted"
WORKLOAD = "tests.proof.chaos.workload:Workload"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run with faults.

    Attributes:
        what: description in one sentence.
        steps, seed: steps and seed of the job.
        faults: the faults to inject, in any order; see `tests.proof.chaos.faults.Fault`.
        expect: ``identical``: the run ends like an undisturbed one; ``unrecoverable``: it fails, and says that too much
            is lost; ``persisted``: it resumes from a persisted snapshot, since nothing better is left, and ends like an
            undisturbed one.
        persist: how often a snapshot is persisted, in seconds; 0: never.
        peer: the corresponding fault of another project, by the name in that project's report, and its outcome there.
        options: options of the job. `hook`: options of `InMemorySnapshot`, except `protect`.
        renumber: whether ranks move to the next node at every restart.
        again: maximum number of finished steps that may have to be done again after a restart.
        drain: whether each step waits for the snapshot of the step before, or the last step that does; see
            `chaos.drill.train`. Without it such short steps skip most snapshots.
        defaults: run the job with the hook's default options and without waiting, as a user would: the cost of
            snapshots decides how often they are taken. Otherwise one is taken at every step.
        quick: whether it is in the quick selection, which the test suite runs.
    """

    name: str
    what: str
    faults: tuple[Fault, ...]
    nodes: int = 3
    ranks_per_node: int = 1
    protect: str = "auto"
    steps: int = 10
    seed: int = 1
    expect: str = IDENTICAL
    persist: float = 0.0
    peer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    hook: Mapping[str, Any] = field(default_factory=dict)
    renumber: bool = False
    again: int = 3
    drain: bool | int = True
    defaults: bool = False
    quick: bool = True

    @property
    def world(self) -> int:
        """The number of trainers."""
        return self.nodes * self.ranks_per_node

    @property
    def wired(self) -> bool:
        """Whether the nodes need a `tests.proof.chaos.network.wire` between them."""
        return any(CATALOGUE[fault.kind].wired for fault in self.faults)

    @property
    def clocked(self) -> bool:
        """Whether the nodes need clocks that can be set."""
        return any(CATALOGUE[fault.kind].clocked for fault in self.faults)

    @property
    def beyond_parity(self) -> bool:
        """Whether more is lost than can be recovered, on purpose."""
        return self.expect == UNRECOVERABLE

    @property
    def from_storage(self) -> bool:
        """Whether so much is lost that only a persisted snapshot is left."""
        return self.expect == PERSISTED

    @property
    def asked(self) -> int:
        """The number of faults, counting each target."""
        return sum(max(1, len(fault.targets)) for fault in self.faults)


def parse(text: str, where: str) -> list[Scenario]:
    """The scenarios of a TOML file.

    Raises:
        ConfigError: the text is invalid; the message names the scenario and what is wrong with it.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    return [_scenario(name, table, where) for name, table in tables.items()]


def built_in() -> list[Scenario]:
    """The scenarios in ``scenarios/``."""
    found = []
    for file in sorted((Path(__file__).parent / "scenarios").glob("*.toml")):
        found += parse(file.read_text(), file.name)
    return found


def choose(wanted: str) -> list[Scenario]:
    """Scenarios by ``all``, ``quick``, ``campaign``, comma-separated names, or the path of a file.

    Raises:
        ConfigError: there is no such scenario.
    """
    if wanted.endswith(".toml"):
        try:
            return parse(Path(wanted).read_text(), wanted)
        except OSError as error:
            raise ConfigError(f"{wanted} cannot be read: {error}") from error
    if wanted == "campaign":
        return campaign()
    known = {scenario.name: scenario for scenario in built_in()}
    if wanted in ("all", "quick"):
        return [scenario for scenario in known.values() if wanted == "all" or scenario.quick]
    if missing := [name for name in wanted.split(",") if name not in known]:
        raise ConfigError(f"there is no scenario {missing[0]!r}: `python -m tests.proof.chaos list` names them")
    return [known[name] for name in wanted.split(",")]


def to_json(scenario: Scenario) -> dict[str, Any]:
    """A JSON object that `from_json` reads back."""
    faults = [{**asdict(fault), "targets": list(fault.targets)} for fault in scenario.faults]
    return {**{item.name: getattr(scenario, item.name) for item in fields(scenario)}, "faults": faults}


def from_json(data: Mapping[str, Any]) -> Scenario:
    """The scenario that `to_json` made `data` from. Raises `ConfigError` if `data` has another form."""
    try:
        faults = tuple(
            Fault(
                **{name: value for name, value in each.items() if name not in ("due", "seen", "fired_at", "targets")},
                targets=tuple(each["targets"]),
            )
            for each in data["faults"]
        )
        return Scenario(**{**data, "faults": faults})
    except (TypeError, KeyError) as error:
        raise ConfigError(f"this is not a scenario: {error!r}") from error


def _scenario(name: str, table: Any, where: str) -> Scenario:
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} is not a table")
    known = {item.name for item in fields(Scenario)} - {"name", "faults"} | {"fault"}
    if unknown := table.keys() - known:
        raise ConfigError(f"{where}: [{name}] has the unknown keys {sorted(unknown)}; known are {sorted(known)}")
    rest = dict(table)
    nodes, ranks = rest.get("nodes", 3), rest.get("ranks_per_node", 1)
    try:
        faults = tuple(_fault(entry, ranks) for entry in rest.pop("fault", []))
        scenario = Scenario(name, faults=faults, **rest)
    except (TypeError, KeyError, ValueError, ConfigError) as error:
        raise ConfigError(f"{where}: [{name}]: {error}") from error
    if scenario.expect not in (IDENTICAL, UNRECOVERABLE, PERSISTED):
        expected = f"{IDENTICAL}, {UNRECOVERABLE} or {PERSISTED}"
        raise ConfigError(f"{where}: [{name}]: expect = {scenario.expect!r}: choose {expected}")
    parse_protect(scenario.protect)
    for fault in faults:
        limit = {"rank": nodes * ranks, "node": nodes}.get(CATALOGUE[fault.kind].of, 1)
        if not all(0 <= target < limit for target in fault.targets):
            raise ConfigError(f"{where}: [{name}]: {fault.kind} of {list(fault.targets)}: choose targets below {limit}")
    return scenario


def _fault(entry: Mapping[str, Any], ranks_per_node: int) -> Fault:
    rest = dict(entry)
    kind, at = str(rest.pop("kind")), str(rest.pop("at", "train.step"))
    targets = tuple(int(target) for target in rest.pop("targets", ()))
    by = rest.pop("by", None)
    fault = Fault(by or "", at, rest.pop("step", None), kind, targets, **rest)
    check(fault)
    return fault if by else replace(fault, who=witness(kind, targets, at, ranks_per_node))


def witness(kind: str, targets: tuple[int, ...], at: str, ranks_per_node: int) -> str:
    """The process that triggers a fault by default: its first target, or a process on its first target's node."""
    of, first = CATALOGUE[kind].of, targets[0] if targets else 0
    if at in SMP_FAILPOINTS:
        return f"smp{first if of == 'node' else first // ranks_per_node}"
    return f"rank{first * ranks_per_node if of == 'node' else first}"


# ---------------------------------------------------------------------- drawn from a seed

AGAIN = ("restore.before", "restore.middle", "rebuild.middle")
"""Points at which a second fault strikes the recovery from the first."""


KINDS = (
    *("kill-trainer", "kill-trainer", "segv-trainer", "abort-trainer", "term-trainer", "hang-trainer", "pause-trainer"),
    *("lose-node", "lose-node", "kill-smp", "pause-smp", "flip-shards", "flip-parity", "zombie-trainer"),
)
"""The kinds to draw from; each entry is equally likely."""

ON_THE_NETWORK: dict[str, tuple[int, int]] = {
    "lose-packets": (5, 15),
    "delay-packets": (2, 10),
    "reorder-packets": (5, 40),
    "repeat-packets": (5, 50),
    "throttle": (2000, 20_000),
    "partition": (0, 0),
    "mute-node": (0, 0),
    "deaf-node": (0, 0),
    "flip-in-flight": (1, 5),
}
"""Further kinds to draw from where nodes have a wire between them, and the range of their amounts."""

WIRED_SHARE = 0.1
"""Fraction of the scenarios drawn from all kinds that get a wire. They take longer, and are skipped where no wire can
be made."""


def draw(
    seed: int,
    faults: int,
    *,
    double: bool = False,
    beyond: bool = False,
    announced: bool = False,
    defaults: bool = False,
    profile: FailureProfile | None = None,
) -> Scenario:
    """A scenario with this number of faults on a small cluster; the same for the same arguments.

    Faults that may destroy memory are far enough apart that parity is complete again before the next one.

    Args:
        profile: draw from a published mix of failures, instead of uniformly from all kinds: process failures, lost
            memory, and losses of as many nodes at once as parity allows.
        double: each fault that ends the job is followed by another one during the recovery from it.
        beyond: the last fault takes more nodes of a group than it has parity.
        announced: nodes are drained and others lost, or trainers killed, in turn.
        defaults: see `Scenario`; faults strike processes in the middle of steps, and the last one takes nodes.
    """
    if defaults:
        return _with_defaults(seed, faults)
    if not 1 <= faults <= 20:
        raise ConfigError(f"{faults} faults: choose 1 to 20")
    source = random.Random(f"{seed} {faults} {double} {beyond} {profile.name if profile else ''}{announced or ''}")
    nodes, protect = source.choice([(3, "auto"), (4, "auto"), (4, "2+2"), (5, "3+2"), (4, "copies:2")])
    parity = parse_protect(protect).parity
    gap = 4
    wired = (
        not (double or beyond or announced or profile) and random.Random(f"{seed} {faults} wire").random() < WIRED_SHARE
    )
    found: list[Fault] = []
    for number in range(faults):
        step = 3 + gap * number + source.randrange(2)
        if beyond and number == faults - 1:
            found.append(_lose(source, nodes, parity + 1, step))
            break
        if profile is not None and source.random() < profile.shock:
            found.append(_lose(source, nodes, parity, step))
            continue
        if wired and number % 2 == 0:
            found.append(_on_the_network(source, nodes, step))
            continue
        kind = "drain-node" if announced and number % 2 == 0 else _kind(source, double or announced, profile)
        found += _one(source, kind, nodes, parity, step, double)
    ways = {"beyond parity": beyond, "double": double, "announced": announced}
    kind = profile.name if profile else next((way for way, chosen in ways.items() if chosen), "single")
    return Scenario(
        f"seed-{seed}-{faults}-{kind.replace(' ', '-')}",
        f"{faults} faults drawn from seed {seed}: {kind}",
        tuple(found),
        nodes=nodes,
        protect=protect,
        steps=3 + gap * faults + 2,
        seed=seed,
        expect=UNRECOVERABLE if beyond else IDENTICAL,
    )


def _with_defaults(seed: int, faults: int) -> Scenario:
    """A scenario with default settings. Nodes are lost only once, since nobody knows when parity is complete again."""
    source = random.Random(f"{seed} {faults} defaults")
    nodes, protect = source.choice([(3, "auto"), (4, "2+2"), (4, "copies:2")])
    gap = 30
    found = []
    for number in range(faults - 1):
        target, step = source.randrange(nodes), 20 + gap * number + source.randrange(gap // 2)
        kind = source.choice(("kill-trainer", "segv-trainer", "kill-smp", "pause-smp", "hang-trainer"))
        found.append(Fault(f"rank{target}", "train.step", step, kind, (target,), for_s=source.uniform(0.1, 0.4)))
    steps = 20 + gap * faults
    found.append(_lose(source, nodes, parse_protect(protect).parity, steps - gap // 2))
    name, what = f"seed-{seed}-{faults}-defaults", f"{faults} faults drawn from seed {seed}: at the default settings"
    return Scenario(name, what, tuple(found), nodes=nodes, protect=protect, steps=steps, seed=seed, defaults=True)


def several(
    first: int,
    count: int,
    faults: int,
    *,
    double: bool = False,
    beyond: bool = False,
    announced: bool = False,
    defaults: bool = False,
    profile: FailureProfile | None = None,
) -> Iterator[Scenario]:
    """`count` scenarios from consecutive seeds: drawn as the arguments say (see `draw`), or `mixed` by default."""
    if not (double or beyond or announced or defaults or profile):
        yield from mixed(first, count)
        return
    for seed in range(first, first + count):
        yield draw(
            *(seed, faults), double=double, beyond=beyond, announced=announced, defaults=defaults, profile=profile
        )


def mixed(first: int, count: int) -> Iterator[Scenario]:
    """`count` scenarios from consecutive seeds: every fifth with double faults, every twentieth beyond parity, every
    tenth with default settings."""
    for seed in range(first, first + count):
        if seed % 20 == 7:
            yield draw(seed, 2, beyond=True)
        elif seed % 5 == 0:
            yield draw(seed, 3, double=True)
        elif seed % 10 == 3:
            yield draw(seed, 4, defaults=True)
        else:
            yield draw(seed, 4)


def campaign() -> list[Scenario]:
    """All built-in scenarios, and 480 drawn ones: some 2,000 faults, of which more than 300 strike a recovery."""
    drawn = [*mixed(1, 300)]
    drawn += [draw(seed, 3, double=True) for seed in range(1001, 1061)]
    drawn += [draw(seed, 2, beyond=True) for seed in range(2001, 2091)]
    drawn += [draw(seed, 4, announced=True) for seed in range(3001, 3031)]
    return [*built_in(), *drawn]


def replay_command(scenario: Scenario) -> str:
    """The command that runs a scenario again."""
    match = re.fullmatch(r"seed-(\d+)-(\d+)-(.+)", scenario.name)
    if match is None:
        return f"python -m tests.proof.chaos run {scenario.name}"
    seed, faults, kind = match.groups()
    option = {"single": "", "beyond-parity": " --beyond"} | {
        way: f" --{way}" for way in ("double", "announced", "defaults")
    }
    how = option.get(kind, f" --profile {kind}")
    return f"python -m tests.proof.chaos run --seed {seed} --faults {faults}{how}"


def _lose(source: random.Random, nodes: int, count: int, step: int) -> Fault:
    lost = tuple(sorted(source.sample(range(nodes), min(count, nodes))))
    return Fault(f"rank{lost[0]}", "train.step", step, "lose-node", lost)


def _on_the_network(source: random.Random, nodes: int, step: int) -> Fault:
    kind = source.choice(list(ON_THE_NETWORK))
    targets = tuple(sorted(source.sample(range(nodes), source.randint(1, nodes - 1))))
    point = source.choice(STEP_POINTS)
    amount, seed = source.randint(*ON_THE_NETWORK[kind]), source.randrange(1 << 30)
    for_s = 0.0 if kind == "flip-in-flight" else source.uniform(0.3, 0.8)
    return Fault(f"rank{targets[0]}", point, step, kind, targets, for_s=for_s, amount=amount, seed=seed)


def _kind(source: random.Random, ends_job: bool, profile: FailureProfile | None) -> str:
    if ends_job:
        return source.choice(("kill-trainer", "lose-node"))
    if profile is None:
        return source.choice(KINDS)
    lost = source.random() < profile.memory / (profile.memory + profile.process)
    return "lose-node" if lost else source.choice([kind for kind in KINDS if kind.endswith("-trainer")])


def _one(source: random.Random, kind: str, nodes: int, parity: int, step: int, double: bool) -> Iterator[Fault]:
    target = source.randrange(nodes)
    seed = source.randrange(1 << 30)
    if kind in ("flip-shards", "flip-parity"):
        yield Fault(f"rank{target}", "train.step", step, kind, (target,), amount=1 + source.randrange(3), seed=seed)
        yield Fault(f"rank{target}", "train.step", step, "kill-trainer", (target,))
        return
    point = source.choice(STEP_POINTS)
    delay = source.choice([0.0, 0.0, source.uniform(0.0, 0.01)])
    for_s = source.uniform(0.1, 0.4)
    yield Fault(f"rank{target}", point, step, kind, (target,), delay_s=delay, for_s=for_s)
    if not double:
        return
    lost = kind == "lose-node"
    again = source.choice(AGAIN if lost else AGAIN[:2])
    other = (target + 1 + source.randrange(nodes - 1)) % nodes
    if again == "rebuild.middle":
        # The node that is rebuilding dies again, or, if parity allows it, another one.
        second = other if parity > 1 and source.random() < 0.5 else target
        yield Fault(f"smp{target}", again, None, "lose-node", (second,))
    else:
        yield Fault(f"rank{other}", again, None, "kill-trainer", (other,))
