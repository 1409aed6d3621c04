"""``holdfast doctor``: what it reports of good and bad machines; it never crashes on one."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.checks import Facts, Finding, Mount, NetworkCard, Secrets, examine
from holdfast.doctor import MARKS, chosen, mount_of, network_cards, numa_memory, secrets_of, why_not_bound
from holdfast.smp_daemon.shared.memory import cgroup_memory
from tests.access_kit import Authority, needs_openssl
from tests.scripts import completed

ROOT = Path(__file__).parents[2]
GIB = 1 << 30

GOOD = Facts(
    python="3.11.7",
    packages={"torch": "2.13.0", "megatron-core": "0.16.1", "pyeclib": "1.8.0", "grpcio": "1.85.1"},
    auto=("isal", ""),
    unusable={"isal": "", "numpy": ""},
    isal="/usr/lib/libisal.so.2",
    arena=Path("/dev/shm/holdfast-0"),
    parent=Path("/dev/shm"),
    writable=True,
    mount=Mount(Path("/dev/shm"), "tmpfs", frozenset({"rw", "huge=advise"})),
    room=32 * GIB,
    memory_bytes=64 * GIB,
    cgroup_bytes=None,
    cgroup_used=0,
    memlock_bytes=None,
    gpu=True,
    shmem_huge="advise",
    numa={0: 64 * GIB},
    swap_bytes=0,
    files=20_000,
    kernel="6.1",
    populate=True,
    idle=True,
    streaming=True,
    receives=True,
    host="127.0.0.1",
    insecure=False,
    bindings={"127.0.0.1:0": ""},
    cards=(),
    clock="tsc",
    synchronised=True,
    secrets=Secrets(),
)
CARDS = (
    NetworkCard("eno1", ("10.0.0.7",), 125e6),
    NetworkCard("ib0", ("10.1.0.7",), 50e9),
    NetworkCard("ib1", ("10.2.0.7",), 50e9),
)
TLS = ("HOLDFAST_TLS_CERT", "HOLDFAST_TLS_KEY", "HOLDFAST_TLS_CA")
DISK = Mount(Path("/"), "ext4", frozenset({"rw"}))


def doctor(*, env: dict[str, str] | None = None, before: str = "pass") -> tuple[int, dict[str, dict[str, Any]], str]:
    """Run the command in a process that has executed `before`. Returns its status, its findings, and what it showed."""
    code = f"{before}\nimport sys\nfrom holdfast.cli.main import main\nsys.exit(main(['doctor', '--json', '-']))"
    done = completed([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **(env or {})})
    assert done.stdout, done.stderr
    return done.returncode, {each["check"]: each for each in json.loads(done.stdout)}, done.stderr


def test_the_command_reports_on_this_machine() -> None:
    done = completed([sys.executable, "-m", "holdfast.cli", "doctor", "--json", "-"], cwd=ROOT)
    findings = json.loads(done.stdout)
    assert [finding["check"] for finding in findings] == [finding.check for finding in examine(GOOD)]
    assert done.returncode == (not all(finding["ok"] for finding in findings))
    for finding in findings:
        assert list(finding) == ["check", "ok", "found", "needed", "fix"]
        assert finding["found"] and finding["needed"]
        assert finding["ok"] or finding["fix"]
        assert finding["check"] in done.stderr


def test_a_missing_isal_is_a_note_with_the_fix() -> None:
    status, findings, _ = doctor(
        before="import holdfast.ec.backends; holdfast.ec.backends._candidates = lambda: ['libisal-none.so']"
    )
    for name in ("erasure code", "backend isal"):
        assert findings[name]["ok"]
        assert "libisal-none.so" in findings[name]["found"]
        assert "libisal2" in findings[name]["fix"]
    assert "auto takes numpy" in findings["erasure code"]["found"]
    assert findings["backend numpy"]["fix"] == ""
    assert status == (not all(finding["ok"] for finding in findings.values()))


def test_an_arena_that_cannot_be_is_a_problem() -> None:
    status, findings, shown = doctor(env={"HOLDFAST_ARENA": "/proc/none/such"})
    assert status == 1
    found = findings["arena's file system"]
    assert (found["check"], found["ok"], found["needed"]) == ("arena's file system", False, "tmpfs")
    assert "/proc" in found["found"] and "HOLDFAST_ARENA" in found["fix"]
    assert not findings["arena's room"]["ok"]
    assert "HOLDFAST_ARENA" in shown


def test_a_good_machine_has_nothing_to_fix() -> None:
    assert [finding for finding in examine(GOOD) if finding.verdict != "ok" or finding.fix] == []
    assert "/usr/lib/libisal.so.2" in next(f.found for f in examine(GOOD) if f.check == "backend isal")


@pytest.mark.parametrize(
    ("changes", "name", "verdict", "fix"),
    [
        ({"packages": {"torch": None}}, "torch", "problem", "pip install torch"),
        ({"packages": {"grpcio": None}}, "grpcio", "problem", "pip install grpcio"),
        ({"packages": {"pyeclib": None}}, "pyeclib", "note", "pip install pyeclib"),
        ({"packages": {"megatron-core": None}}, "megatron-core", "note", "holdfast-train[megatron]"),
        ({"auto": ("numpy", "no usable ISA-L")}, "erasure code", "note", "libisal2"),
        ({"unusable": {"isal": "no usable ISA-L"}}, "backend isal", "note", "libisal2"),
        ({"writable": False}, "arena", "problem", "chown"),
        ({"mount": replace(GOOD.mount, kind="ext4")}, "arena's file system", "problem", "on tmpfs"),
        ({"room": 64 << 20}, "arena's room", "problem", "--shm-size"),
        ({"room": 2 * GIB}, "arena's room", "note", "remount"),
        ({"swap_bytes": GIB}, "swap", "note", "swapoff"),
        ({"files": 256}, "open files", "note", "ulimit -n 1024"),
        ({"populate": False}, "kernel", "note", "Linux 5.14"),
        ({"idle": False}, "SCHED_IDLE", "note", "HOLDFAST_PRIORITY=idle"),
        ({"streaming": False}, "copies", "note", "--no-deps holdfast-train"),
        ({"receives": False}, "units", "note", "apt install gcc"),
        ({"cgroup_bytes": 40 * GIB, "cgroup_used": 30 * GIB}, "cgroup memory", "note", "docker update --memory 62g"),
        ({"cgroup_bytes": 40 * GIB, "cgroup_used": 40 * GIB}, "cgroup memory", "problem", "limits.memory: 72Gi"),
        ({"shmem_huge": "never"}, "huge pages", "note", "remount,huge=advise /dev/shm"),
        ({"shmem_huge": "deny"}, "huge pages", "note", "echo advise >"),
        ({"numa": {0: GIB, 1: GIB}}, "NUMA", "note", "mpol=interleave:0,1 /dev/shm"),
        ({"memlock_bytes": 8 << 20}, "locked memory", "note", "ulimit -l unlimited"),
        ({"bindings": {"127.0.0.1:0": "no"}}, "address 127.0.0.1", "problem", "link set lo"),
        ({"bindings": {"10.9.9.9:0": "no"}}, "address 10.9.9.9", "problem", "HOLDFAST_HOST"),
        (
            {"bindings": {"10.0.0.7:0": ""}, "cards": CARDS},
            "address 10.0.0.7",
            "note",
            "export HOLDFAST_HOST=10.1.0.7,10.2.0.7",
        ),
        ({"bindings": {"127.0.0.1:9411": "taken"}}, "port 9411 of 127.0.0.1", "note", "HOLDFAST_HTTP=auto"),
        ({"clock": "hpet"}, "monotonic clock", "note", "echo tsc >"),
        ({"synchronised": False}, "wall clock", "note", "timedatectl set-ntp true"),
        ({"host": "10.0.0.1"}, "token", "problem", "token_hex"),
        ({"host": "10.0.0.1", "insecure": True}, "token", "note", "token_hex"),
        ({"secrets": Secrets("HOLDFAST_TOKEN", 5)}, "token", "problem", "token_hex"),
        ({"secrets": Secrets("HOLDFAST_TOKEN_FILE=/t", 64, 0o644)}, "token", "problem", "chmod 600 /t"),
        (
            {"secrets": Secrets("HOLDFAST_TOKEN_FILE=/t", unreadable={"HOLDFAST_TOKEN_FILE": "/t: no"})},
            "token",
            "problem",
            "token_hex",
        ),
        ({"secrets": Secrets(tls=frozenset(TLS[:2]))}, "certificates", "problem", "export HOLDFAST_TLS_CA="),
        (
            {"secrets": Secrets(tls=frozenset(TLS), unreadable={TLS[1]: "/key: Permission denied"})},
            "certificates",
            "problem",
            'chmod 600 "$HOLDFAST_TLS_KEY"',
        ),
        (
            {"secrets": Secrets(tls=frozenset(TLS), refused="other nodes would refuse it")},
            "certificates",
            "problem",
            "SECURITY.md",
        ),
        ({"secrets": Secrets(tls=frozenset(TLS), expires_s=86400.0)}, "certificates", "note", "SECURITY.md"),
    ],
)
def test_each_bad_fact_is_found_alone_and_comes_with_its_fix(
    changes: dict[str, Any], name: str, verdict: str, fix: str
) -> None:
    found = [finding for finding in examine(replace(GOOD, **changes)) if finding.verdict != "ok"]
    assert [(finding.check, finding.verdict) for finding in found] == [(name, verdict)]
    assert fix in found[0].fix


def test_swap_does_not_matter_to_a_tmpfs_that_is_not_swapped() -> None:
    mount = Mount(Path("/dev/shm"), "tmpfs", frozenset({"rw", "noswap", "huge=always"}))
    found = examine(replace(GOOD, swap_bytes=GIB, mount=mount))
    assert {finding.verdict for finding in found} == {"ok"}


def test_a_path_lies_on_its_deepest_and_latest_mount() -> None:
    shm = GOOD.mount
    over = Mount(Path("/dev/shm"), "ramfs", frozenset())
    beside = Mount(Path("/dev/shm2"), "tmpfs", frozenset())
    assert mount_of(Path("/dev/shm/job"), [DISK, shm, beside]) is shm
    assert mount_of(Path("/dev/shm"), [shm, DISK, over]) is over
    assert mount_of(Path("/dev/shm3"), [shm, beside, DISK]) is DISK
    assert "unknown" in mount_of(Path("/tmp"), [shm]).kind, "in a chroot"


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": False, "memlock_bytes": 0},
        {"cgroup_bytes": 100 * GIB, "cgroup_used": GIB},
        {"shmem_huge": "force", "mount": replace(GOOD.mount, options=frozenset())},
        {"shmem_huge": "never", "mount": replace(GOOD.mount, options=frozenset({"huge=within_size"}))},
        {"numa": {0: GIB, 1: GIB}, "mount": replace(GOOD.mount, options=frozenset({"mpol=interleave", "huge=always"}))},
        {"numa": {}},
        {"clock": ""},
        {"synchronised": None},
        {"host": "10.0.0.1", "secrets": Secrets("HOLDFAST_TOKEN", 64)},
        {"host": "10.0.0.1", "secrets": Secrets("HOLDFAST_TOKEN_FILE=/t", 64, 0o400)},
        {"host": "10.0.0.1", "secrets": Secrets(tls=frozenset(TLS))},
        {"host": "10.0.0.1", "secrets": Secrets(tls=frozenset(TLS), expires_s=365 * 86400.0)},
        {"host": "::1"},
        {"bindings": {"10.1.0.7:0": "", "10.2.0.7:0": ""}, "cards": CARDS},
        {"bindings": {"10.0.0.7:0": ""}, "cards": (replace(CARDS[0], rate=0.0), CARDS[1])},
    ],
)
def test_what_is_well_in_another_way_is_well(changes: dict[str, Any]) -> None:
    assert [f for f in examine(replace(GOOD, **changes)) if f.verdict != "ok"] == []


def test_a_problem_is_not_ok_and_a_note_is() -> None:
    oks = [Finding("a", "b", "c", verdict, "d").to_json()["ok"] for verdict in MARKS]
    assert oks == [True, True, False]


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        root.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_tightest_control_group_counts_in_version_2(tmp_path: Path) -> None:
    write(tmp_path / "a", **{"memory.max": "4000\n", "memory.current": "1000\n"})
    write(tmp_path / "a/b", **{"memory.max": "max\n", "memory.current": "900\n"})
    assert cgroup_memory("0::/a/b", tmp_path) == (4000, 1000)
    write(tmp_path / "a/b", **{"memory.max": "3000\n"})
    assert cgroup_memory("0::/a/b", tmp_path) == (3000, 900)
    assert cgroup_memory("0::/elsewhere", tmp_path) == (None, 0)


def test_control_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    write(tmp_path / "memory/job", **{"memory.limit_in_bytes": "5000", "memory.usage_in_bytes": "17"})
    write(tmp_path / "memory", **{"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "99"})
    assert cgroup_memory("4:memory:/job\n1:cpu:/job\n0::/", tmp_path) == (5000, 17)
    assert cgroup_memory("4:cpu,memory:/other", tmp_path) == (None, 0)


def test_what_sysfs_says_is_read(tmp_path: Path) -> None:
    assert chosen("always within_size [advise] never") == "advise"
    assert chosen("") == ""
    for node, kilobytes in ((0, 8), (1, 0), (2, 4)):
        write(tmp_path / f"devices/system/node/node{node}", meminfo=f"Node {node} MemTotal: {kilobytes} kB\n")
    assert numa_memory(tmp_path) == {0: 8192, 2: 4096}


def test_of_secrets_only_that_they_are_there_is_kept(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cr3t-and-long-enough\n")
    token.chmod(0o640)
    found = secrets_of({"HOLDFAST_TOKEN_FILE": str(token), "HOLDFAST_TLS_KEY": str(tmp_path / "none.pem")})
    assert (found.token_bytes, found.token_mode, set(found.tls)) == (22, 0o640, {"HOLDFAST_TLS_KEY"})
    assert "No such file" in found.unreadable["HOLDFAST_TLS_KEY"]
    assert "s3cr3t" not in repr(found)
    assert secrets_of({"HOLDFAST_TOKEN": "four"}) == Secrets("HOLDFAST_TOKEN", 4)
    assert "No such file" in secrets_of({"HOLDFAST_TOKEN_FILE": "/none"}).unreadable["HOLDFAST_TOKEN_FILE"]


@needs_openssl
def test_certificates_are_tried_as_other_nodes_do(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    good, bad = secrets_of(authority.environment(days=9)), secrets_of(authority.environment("web.example.org"))
    assert good.refused == "" and good.expires_s is not None and 8 < good.expires_s / 86400 < 9
    assert bad.expires_s is None and "holdfast-smp" in bad.refused


@needs_openssl
def test_certificates_made_as_the_page_says_are_good(tmp_path: Path) -> None:
    (block,) = (part for part in (ROOT / "SECURITY.md").read_text().split("```") if "openssl x509" in part)
    script = re.sub(r"^\$ ", "", block.removeprefix("console"), flags=re.MULTILINE) + "env"
    done = completed(["bash", "-ec", script], cwd=tmp_path, check=True)
    found = secrets_of(dict(line.partition("=")[::2] for line in done.stdout.splitlines()))
    assert found.refused == "" and found.expires_s is not None and found.expires_s > 300 * 86400
    assert (tmp_path / "node7.key").stat().st_mode & 0o077 == 0


def test_a_port_that_is_taken_is_told_from_one_that_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "in use" in why_not_bound("127.0.0.1", taken.getsockname()[1])
    assert why_not_bound("127.0.0.1", 0) == ""
    assert why_not_bound("203.0.113.7", 0) != ""


def test_the_card_behind_an_address_is_named() -> None:
    found = examine(replace(GOOD, bindings={"10.1.0.7:0": ""}, cards=CARDS))
    assert "ib0, 400 Gbit/s" in next(finding.found for finding in found if finding.check == "address 10.1.0.7")
    assert {card.name for card in network_cards()} <= {path.name for path in Path("/sys/class/net").iterdir()} - {"lo"}


def test_scripts_learn_from_the_exit_status_that_a_token_is_missing() -> None:
    status, findings, _ = doctor(env={"HOLDFAST_HOST": "0.0.0.0"})
    assert status == 1
    assert not findings["token"]["ok"] and "token_hex" in findings["token"]["fix"]
