"""Shows the demo: a progress bar while it runs, an account when it is done."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from holdfast.chaos.demo import Account, DemoPlan, DemoRecovery, Kill, kind_of
from holdfast.chaos.runner import Event
from holdfast.report import Report

PHASES = ("detect", "restart", "plan", "fetch", "load", "first_step")
TITLES = {"fetch": "fetch/decode", "first_step": "first step"}
LABELS = {"undisturbed": "undisturbed run", "disturbed": "run with kills"}


class DemoProgress:
    """One progress bar per run, on a terminal; elsewhere, one line per event. Use as a context manager."""

    def __init__(self, console: Console, plan: DemoPlan) -> None:
        self._console = console
        self._plan = plan
        self._bar = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=34),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("importing", total=1, note="torch, megatron-core")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def tell(self, phase: str, event: Event) -> None:
        """Show an event: the `progress` argument of `holdfast.chaos.demo.run`."""
        kind = event["kind"]
        if kind == "begin" and phase == "import" and not self._console.is_terminal:
            self._console.print("importing torch, megatron-core")
        elif kind == "begin" and phase in LABELS:
            self._bar.update(self._task, completed=self._bar.tasks[self._task].total, note="")
            self._task = self._bar.add_task(LABELS[phase], total=self._plan.steps, note="")
            if not self._console.is_terminal:
                self._console.print(f"{LABELS[phase]}: {self._plan.steps} steps")
        elif kind == "step" and event["rank"] == 0:
            loss = float.fromhex(event["loss"])
            self._bar.update(self._task, completed=event["step"], note=f"loss {loss:.4f}")
        elif kind == "fault":
            what = Kill(kind_of(event["fault"]), tuple(event["targets"]), event["step"])
            self._bar.console.print(Text(f"  ✗ {what} killed in the middle of step {event['step']}", "red"))
        elif kind == "started" and event["rank"] == 0 and event["generation"] > 0:
            self._bar.update(self._task, completed=event["step"], note="")
            self._bar.console.print(Text(f"  ✓ restored after step {event['step']}", "green"))


def show(console: Console, account: Account) -> None:
    """Print the account."""
    plan = account.plan
    ranks = plan.nodes * plan.ranks_per_node
    console.print()
    parallel = f"tensor parallel 2 x data parallel {ranks // 2}" if plan.device == "cpu" else f"data parallel {ranks}"
    console.print(Text.assemble(("megatron-core GPT", "bold"), f", {parallel}, bf16, dropout"))
    console.print(
        f"{plan.nodes} nodes x {plan.ranks_per_node} ranks, {_how_often(account)}, "
        f"protect {plan.code}{'' if plan.code == plan.protect else f' ({plan.protect})'}, seed {plan.seed}"
    )
    console.print(f"loss {account.losses[0]:.4f} → {account.losses[-1]:.4f}   {_spark(account.losses)}")
    console.print(_timeline(plan, account.recoveries))
    if account.recoveries:
        console.print()
        console.print(_report(account.recoveries))
    console.print()
    for good, text in _verdicts(account):
        console.print(Text("  ✓ " if good else "  ✗ ", "green" if good else "bold red").append(text, "default"))
    console.print(f"  done in {account.seconds:.1f} s")


def _verdicts(account: Account) -> list[tuple[bool, str]]:
    steps, ranks = account.plan.steps, account.plan.nodes * account.plan.ranks_per_node
    lost = max((r.lost_steps for r in account.recoveries), default=0)
    identical = f"all {steps} losses and the final state of all {ranks} ranks: identical to the last bit"
    return [
        (account.identical, identical if account.identical else f"NOT identical: {account.difference}"),
        (
            lost <= 1 or account.plan.defaults,
            f"{lost or 'no'} finished step{'s' * (lost > 1)} had to be done again after a kill",
        ),
        (account.disk_bytes_written == 0, f"{account.disk_bytes_written:,} bytes written to disk"),
        (not account.leaks, "nothing left behind" if not account.leaks else "; ".join(account.leaks)),
        *((False, f"an error that an SMP did not expect: {text}") for text in account.tracebacks),
    ]


def _how_often(account: Account) -> str:
    if not account.plan.defaults or account.held_up is None:
        return "a snapshot every step"
    return (
        f"a snapshot every {account.interval} steps at the rarest, the loop held up {account.held_up:.1%} of its time"
    )


def _report(recoveries: list[DemoRecovery]) -> Report:
    """A row per phase, a column per recovery."""
    rows = [[TITLES.get(phase, phase), *(f"{r.phases[phase]:.2f} s" for r in recoveries)] for phase in PHASES]
    rows.append(["total", *(f"{sum(r.phases.values()):.2f} s" for r in recoveries)])
    rows.append(["steps lost", *(str(r.lost_steps) for r in recoveries)])
    rows.append(["bytes moved", *(f"{r.bytes_fetched:,}" for r in recoveries)])
    return Report(["recovery", *(str(r.kill) for r in recoveries)], rows)


def _timeline(plan: DemoPlan, recoveries: list[DemoRecovery]) -> Text:
    """A line of steps, with a mark at each step in which something was killed."""
    line = Text("1 ")
    kills = {recovery.kill.step: recovery.kill for recovery in recoveries}
    for step in range(1, plan.steps + 1):
        if step in kills:
            line.append(f"✗ {kills[step]} ", "bold red")
        line.append("━", "green")
    return line.append(f" {plan.steps}")


def _spark(values: list[float]) -> str:
    """Values as a row of bars."""
    low, high = min(values), max(values)
    marks = "▁▂▃▄▅▆▇█"
    return "".join(marks[round((v - low) / (high - low or 1.0) * (len(marks) - 1))] for v in values[:80])
