"""How attempts of a job are counted, and what a trainer's environment says in one."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from holdfast.integrations.survivors.attempts import (
    ATTEMPTS,
    Attempts,
    JobAttempt,
    JobPlace,
    hindrance,
    parse_lines,
    read_too_early,
    replacement,
    to_line,
)
from holdfast.smp_daemon.shared.errors import ProtocolError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_MAX_RESTARTS": "9",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "x",
}


class TestAttempts:
    def test_ranks_lost_in_one_attempt_are_replaced_together(self) -> None:
        attempts = Attempts(world=3, limit=9)
        assert [attempts.lost(0), attempts.lost(0), attempts.lost(1)] == [True, False, True]
        assert attempts.number == 2

    def test_all_end_once_all_are_done_in_the_same_attempt(self) -> None:
        attempts = Attempts(world=2, limit=9)
        attempts.done(0, 0)
        assert attempts.lost(0) and not attempts.has_ended  # who was done begins again, as under torchrun
        attempts.done(1, 0)
        attempts.done(1, 1)
        assert not attempts.has_ended
        attempts.done(0, 1)
        assert attempts.has_ended and not attempts.lost(1)
        attempts.left()
        assert not attempts.is_over

    def test_no_more_attempts_than_the_limit(self) -> None:
        attempts = Attempts(world=2, limit=2)
        assert attempts.lost(0) and not attempts.lost(1)
        assert attempts.is_over and attempts.number == 1

    def test_a_supervisor_that_leaves_ends_it_for_all(self) -> None:
        attempts = Attempts(world=2, limit=9)
        attempts.left()
        assert attempts.is_over and not attempts.lost(0)


def test_the_environment_is_that_of_a_worker_that_torchrun_has_restarted() -> None:
    environment = JobAttempt(3, "head", 555).environment(TORCHRUN)
    assert environment["TORCHELASTIC_RESTART_COUNT"] == "5"
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("head", "555")
    assert "MASTER_PORT" not in JobAttempt(3, "", 0).environment({})


def test_a_lost_node_is_replaced_by_one_with_as_many_processes() -> None:
    waiting = ["a", "b", "b", "c", "c", "a", "a"]
    assert replacement(waiting, 2) == "b" and replacement(waiting, 3) == "a"
    assert replacement(waiting, 1) is None and replacement([], 1) is None


def test_what_a_script_reads_before_a_standby_has_a_rank() -> None:
    script = {"RANK": 0, "lr": 3, "rank_name": "a", "is_rank0": True, "args": Namespace(local_rank=1, steps=2)}
    assert read_too_early(script) == ["RANK", "args.local_rank"]


def test_what_is_sent_is_read() -> None:
    sent: list[dict[str, Any]] = [{"attempt": [1, "a", 2]}, {"end": True}]
    data = b"".join(map(to_line, sent))
    messages, rest = parse_lines(data[:-5])
    assert messages == sent[:1]
    assert parse_lines(rest + data[-5:]) == (sent[1:], b"")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\n", b"[1]\n", b"\xff\n", b"x" * 5000, b"[" * 4000 + b"\n"])
def test_what_no_supervisor_sends_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_lines(data)


def test_where_the_launcher_says_this_process_is() -> None:
    place = JobPlace.from_environment(TORCHRUN)
    assert (place.rank, place.world, place.agents_store, place.limit) == (1, 3, True, 8)
    alone = JobPlace.from_environment({})
    assert (alone.rank, alone.world, alone.host, alone.limit) == (0, 1, "", ATTEMPTS)


@pytest.mark.parametrize(
    ("environment", "threads", "cuda", "said"),
    [
        ({}, [], False, ""),
        (TORCHRUN, [], False, ""),
        (TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "2"}, [], False, "--max-restarts"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, [], False, "MASTER_ADDR"),
        ({"SLURM_STEP_NUM_TASKS": "1"}, [], False, ""),
        ({"RANK": "0", "WORLD_SIZE": "2"}, [], False, "MASTER_ADDR, MASTER_PORT"),
        (TORCHRUN, ["reader"], False, "reader"),
        (TORCHRUN, [], True, "CUDA"),
    ],
)
def test_what_hinders(environment: dict[str, str], threads: list[str], cuda: bool, said: str) -> None:
    reason = hindrance(environment, threads, cuda)
    assert (said in reason) if said else not reason
