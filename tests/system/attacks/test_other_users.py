"""Another user of the same node cannot get in, and no directory of another user is taken for ours."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import sys
from pathlib import Path

import pytest

from holdfast.cli.output import NO_ANSWER
from holdfast.smp_daemon.net.peers import METHOD
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, SmpUnavailable
from holdfast.smp_daemon.shared.spawn import smp_command
from holdfast.smp_daemon.shared.uids import _asked, _looked_up, uid_of
from tests.scripts import completed, started
from tests.smp_kit import JOB, Ground, read_line, refusal
from tests.system.attacks.victim import Victim, frame

pytestmark = pytest.mark.smps(own_python=True)

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")

SAY = """
import socket, sys
kind, where, data = sys.argv[1:]
sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
sock.settimeout(20)
try:
    sock.connect(where if kind == "unix" else (where.split(":")[0], int(where.split(":")[1])))
    sock.sendall(bytes.fromhex(data))
    heard = b""
    while more := sock.recv(65536):
        heard += more
    print(heard.hex())
except OSError as error:
    print(type(error).__name__)
"""


def nobody_says(kind: str, where: str, data: bytes) -> str:
    """Send `data` from a process of another user; return what that process prints."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin") or sys.executable
    command = [python, "-I", "-c", SAY, kind, where, data.hex()]
    done = completed(command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/")
    if done.returncode:
        pytest.skip(f"another user cannot run {python}: {done.stderr[-200:]}")
    return done.stdout.strip()


QUESTION = frame(json.dumps({"op": "inventory", "job": JOB}).encode())


@pytest.mark.proves("other-users")
def test_the_socket_and_its_directory_are_this_users_alone(victim: Victim) -> None:
    assert stat.S_IMODE(victim.local.stat().st_mode) == 0o600
    assert stat.S_IMODE(victim.smp.arena.stat().st_mode) == 0o700
    assert stat.S_IMODE(victim.smp.arena.parent.stat().st_mode) == 0o700
    for path in victim.smp.arena.iterdir():
        if path.suffix in (".safetensors", ".parity") or path.name == "board":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@as_root
@pytest.mark.proves("other-users")
def test_another_user_cannot_even_reach_the_socket(victim: Victim) -> None:
    assert nobody_says("unix", str(victim.local), QUESTION) == "PermissionError"


@as_root
def test_nor_talk_over_it_if_its_modes_are_opened(victim: Victim) -> None:
    """The kernel identifies the peer, whatever the file modes are."""
    opened = [victim.ground.base, victim.smp.arena.parent, victim.smp.arena, victim.local]
    before = [path.stat().st_mode for path in opened]
    try:
        for path in opened:
            path.chmod(0o777)
        assert nobody_says("unix", str(victim.local), QUESTION) in ("", "ConnectionResetError", "BrokenPipeError")
    finally:
        for path, mode in zip(opened, before, strict=True):
            path.chmod(stat.S_IMODE(mode))


AS_NOBODY = """
import os, sys
import grpc, rich.console, rich.live, encodings.idna
import holdfast.cli.main as cli, holdfast.smp_daemon.ops.overview
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(cli.main(sys.argv[1:]))
"""


@as_root
@pytest.mark.parametrize("words", ["status", "status --job", "smp status --job", "smp stop --job", "gc --job"])
def test_a_command_of_another_user_says_that_it_may_not_look(victim: Victim, words: str) -> None:
    """Not that there is no such job, nor that its SMP does not run."""
    command = [*words.split(), *[JOB] * words.endswith("--job"), "--arena", str(victim.ground.base)]
    done = completed([sys.executable, "-c", AS_NOBODY, *command])
    assert done.returncode == NO_ANSWER and "refused: permission" in done.stderr, done


@as_root
@pytest.mark.parametrize("what", ["shard", "accumulate", "adopt"])
@pytest.mark.proves("other-users")
def test_nor_use_the_port_for_bulk_on_loopback(victim: Victim, what: str) -> None:
    host, port = victim.smp.bulk
    data = frame(json.dumps({"op": what, "job": JOB}).encode())
    assert nobody_says("tcp", f"{host}:{port}", data) in ("", "ConnectionResetError", "BrokenPipeError")


@as_root
def test_nor_make_grpc_calls_on_loopback(victim: Victim) -> None:
    code = (
        "import copy, sys, grpc, grpc._channel\n"
        "import os; os.setgid(65534); os.setuid(65534)\n"
        "ask = grpc.insecure_channel(sys.argv[1]).unary_unary(sys.argv[2])\n"
        "try: print(ask(sys.argv[3].encode(), timeout=20))\n"
        "except grpc.RpcError as error: print(error.code().name)\n"
    )
    root = str(Path(__file__).parents[3])
    done = completed(
        [sys.executable, "-c", code, "{}:{}".format(*victim.control), METHOD, json.dumps({"op": "ping", "job": JOB})],
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.stdout.strip() == "UNAUTHENTICATED", done


@as_root
def test_the_kernel_says_whose_a_connection_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as mine:
            for ask in (uid_of, _asked, lambda peer, ours: _looked_up(peer, ours[1])):
                assert ask(mine.getsockname(), ("127.0.0.1", port)) == os.getuid()
                assert ask(mine.getsockname(), ("127.0.0.1", port ^ 1)) is None
            assert uid_of(mine.getsockname(), ("0.0.0.0", port)) == os.getuid()
        assert uid_of(("127.0.0.1", 1), ("127.0.0.1", port)) is None


# ---------------------------------------------------------------------- directories of other users


def start(ground: Ground, arena: Path) -> str:
    """Start an SMP in `arena`, which must fail; return the error."""
    error = refusal(smp_command(JOB, "node0", arena, ground.host()))
    assert isinstance(error, ConfigError)
    return str(error)


@pytest.mark.parametrize("target", ["mine", "nowhere"])
def test_an_arena_that_is_a_link_is_refused(ground: Ground, target: str) -> None:
    real = ground.base / "real"
    if target == "mine":
        real.mkdir(mode=0o700)
    (ground.base / "link").symlink_to(real)
    assert "link" in start(ground, ground.base / "link")
    assert not real.exists() or not list(real.iterdir())


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707, 0o777])
def test_an_arena_that_others_can_enter_is_refused(ground: Ground, mode: int) -> None:
    arena = ground.base / "arena"
    arena.mkdir()
    arena.chmod(mode)
    assert "chmod 700" in start(ground, arena)


@as_root
def test_an_arena_in_a_directory_of_another_user_is_refused(ground: Ground) -> None:
    """That user could replace the arena: anybody can create a directory in /dev/shm under the name we would use."""
    parent = ground.base / "holdfast-4711"
    parent.mkdir(mode=0o700)
    os.chown(parent, 4711, 4711)
    assert "belongs to user 4711" in start(ground, parent / JOB)


@as_root
def test_a_socket_that_another_user_serves_is_not_talked_to(shm: Path) -> None:
    """A trainer would write its model into any file that such a process names."""
    code = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "sock = socket.socket(socket.AF_UNIX); sock.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777); sock.listen()\n"
        "print('listening', flush=True); sys.stdin.readline()\n"
    )
    shm.chmod(0o777)
    with started([sys.executable, "-c", code, str(shm / "smp.sock")]) as process:
        assert read_line(process.stdout) == "listening\n"
        with pytest.raises(SmpUnavailable, match="of user 65534"):
            SmpClient(shm, JOB)


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o1777, False), (0o775, False)])
def test_an_arena_in_a_directory_that_every_user_may_change_is_refused(
    ground: Ground, mode: int, refused: bool
) -> None:
    """Without the sticky bit anybody could replace the arena."""
    parent = ground.base / "shared"
    parent.mkdir()
    parent.chmod(mode)
    if refused:
        assert "chmod +t" in start(ground, parent / JOB)
        assert not list(parent.iterdir())
    else:
        smp = ground.prepare()
        smp.arena = parent / JOB
        smp.launch().wait_ready()
