"""A node with several network cards: which addresses are allowed, and an SMP that serves raw bytes on each."""

from __future__ import annotations

import re
import socket

import pytest

from holdfast.smp_daemon.coding.regroup import plan_regroup
from holdfast.smp_daemon.service import Smp, check_own
from holdfast.smp_daemon.shared.addresses import parse_hosts, parse_standby
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.messages import AskShard
from holdfast.smp_daemon.shared.spawn import smp_command
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.smp_daemon.shared.transport import connect
from holdfast.snapshot.resume.arrange import Protection, arrange, node_of_rank
from tests.smp_kit import IN_THREADS, JOB, Ground, SmpProcess, refusal, run_on
from tests.system.test_regroup import SNAPSHOT, everything, layout_of
from tests.unit.test_arrange import rank

ELSEWHERE = "203.0.113.7"
"""An address that no host has: it is reserved for documentation (RFC 5737)."""


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("10.0.0.7", ("10.0.0.7",)),
        ("10.0.0.7,10.0.1.7", ("10.0.0.7", "10.0.1.7")),
        (" 127.0.0.2 , 127.0.0.3 ", ("127.0.0.2", "127.0.0.3")),
        ("0.0.0.0", ("0.0.0.0",)),
        (",".join(f"10.0.{i}.7" for i in range(16)), tuple(f"10.0.{i}.7" for i in range(16))),
    ],
)
def test_one_address_or_several(text: str, hosts: tuple[str, ...]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10.0.0.7,ib1", "'ib1' .*IP address"),
        ("10.0.0.7,", "'' .*IP address"),
        ("", "'' .*IP address"),
        ("10.0.0.7,10.0.1.7,10.0.0.7", "has 10.0.0.7 twice"),
        ("10.0.0.7,127.0.0.1", "loopback address 127.0.0.1"),
        ("127.0.0.2,10.0.0.7", "loopback address 127.0.0.2"),
        ("0.0.0.0,10.0.0.7", "0.0.0.0 means every address"),
        (",".join(f"10.0.{i}.7" for i in range(17)), "17 addresses; .*limit is 16"),
    ],
)
def test_what_is_no_list_of_addresses_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_hosts(text)


def test_an_address_of_another_machine_is_refused_before_anything_starts(ground: Ground) -> None:
    smp = ground.prepare()
    hosts = f"10.255.255.254,{ELSEWHERE}"
    error = refusal([*smp_command(JOB, smp.name, smp.arena, hosts), "--insecure"])
    assert isinstance(error, ConfigError)
    assert "10.255.255.254, from --host (HOLDFAST_HOST)" in str(error) and "ip -brief addr" in str(error)
    with pytest.raises(ConfigError, match=rf"^cannot listen .*{ELSEWHERE}, from --host"):
        check_own(("127.0.0.1", ELSEWHERE), MACHINE)
    assert not smp.arena.exists()


def on_several(ground: Ground, count: int, name: str = "node0") -> SmpProcess:
    smp = ground.prepare(name)
    smp.host = ",".join([smp.host, *(ground.host() for _ in range(count - 1))])
    return smp.launch().wait_ready()


def test_raw_bytes_are_served_on_every_address(ground: Ground) -> None:
    smp = on_several(ground, 3)
    first, *others = smp.host.split(",")
    inventory = smp.client().inventory()
    assert inventory.control[0] == inventory.host == first
    assert [host for host, _ in inventory.more_bulk] == others
    assert {port for _, port in inventory.bulk_addresses} == {inventory.bulk_port}
    for address in inventory.bulk_addresses:
        stream = connect(address, 10.0, JOB)
        stream.send(AskShard(job=JOB, coord="dp0"))
        assert stream.receive() is not None
        stream.close()


def test_a_successor_serves_where_the_one_before_did(ground: Ground) -> None:
    smp = on_several(ground, 2)
    before = smp.client().inventory().bulk_addresses
    smp.restart()
    assert smp.client().inventory().bulk_addresses == before


def test_where_the_port_is_taken_on_another_address_it_has_one_of_its_own_there(ground: Ground) -> None:
    smp, other = ground.prepare(), ground.host()
    with socket.create_server((other, 0)) as taken:
        port = taken.getsockname()[1]
        served = Smp(JOB, smp.name, smp.arena, f"{smp.host},{other}", bulk_port=port, environment=IN_THREADS)
        try:
            (first, second) = served.owner.bulk_addresses
            assert first == (smp.host, port)
            assert second[0] == other and second[1] != port
        finally:
            served.stop(remove=True)
            served.close()


@pytest.mark.parametrize("which", ["control_port", "bulk_port"])
def test_a_successor_whose_port_another_process_has_by_now_serves_at_another(ground: Ground, which: str) -> None:
    smp = ground.smp()
    run = run_on([smp], [[3000]])
    snapshot = run.protect(1)
    smp.kill()
    with socket.create_server((smp.host, getattr(smp.owner, which))) as taken:
        smp.launch().wait_ready()
        assert getattr(smp.owner, which) not in (0, taken.getsockname()[1])
        assert smp.client().inventory().shards == {(snapshot, "dp0")}


def test_a_layout_has_the_addresses_that_its_smps_say(ground: Ground) -> None:
    smp = on_several(ground, 2)
    inventory = smp.client().inventory()
    layout = arrange(JOB, 1, [node_of_rank(inventory, "dp0", 8192), rank(1, "elsewhere")], Protection(1, 1), 3)
    assert layout.node(smp.name).bulk_addresses == inventory.bulk_addresses
    assert layout.node("elsewhere").bulk_addresses == (("host-elsewhere", 7001),)


def test_a_spare_of_several_cards_is_taken_in_with_all_of_them() -> None:
    more = (("10.1.0.9", 2),)
    spare = Inventory("spare", "10.0.0.9", 1, 2, epoch=SNAPSHOT.epoch, more_bulk=more)
    regrouping = plan_regroup([*everything(layout_of(3, 2, 1), but=("node2",)), spare])
    assert regrouping is not None
    assert regrouping.layout.node("spare").bulk_addresses == (("10.0.0.9", 2), *more)


def test_a_standby_has_a_host_and_the_job_a_port() -> None:
    assert parse_standby("") is None
    assert parse_standby("29700") == ("", 29700) and parse_standby("node0:29700") == ("node0", 29700)
    for bad in ("node0", ":29700", "node0:", "0", "node0:70000", "node0:x"):
        with pytest.raises(ConfigError, match=re.escape(repr(bad))):
            parse_standby(bad)
