"""Access control: tokens and certificates, right and wrong, over both protocols between real SMPs."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest

from holdfast.cli.main import main
from holdfast.cli.output import NO_ANSWER
from holdfast.smp_daemon.net.control import CALL_KEY, address_of, learn
from holdfast.smp_daemon.net.gate import COMPLAIN_EVERY_S, Gate
from holdfast.smp_daemon.net.peers import METHOD, PeerClient
from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.recovery.inventories import gather_inventories
from holdfast.smp_daemon.shared.credentials import (
    MIN_TOKEN_BYTES,
    TLS_ENVS,
    TOKEN_ENV,
    Credentials,
    access_of,
    check_certificates,
    current,
    load,
)
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, ProtocolError, SmpUnavailable
from holdfast.smp_daemon.shared.handshake import (
    MAGIC,
    MAX_CALLERS,
    NAME_BYTES,
    SIGN_BYTES,
    WINDOW,
    Signer,
    UsedNumbers,
    Verifier,
    check_client,
    prove_to_server,
)
from holdfast.smp_daemon.shared.messages import PeerInventory, Ping
from holdfast.smp_daemon.shared.plain import encode_json
from holdfast.smp_daemon.shared.settings import TLS_NAME
from holdfast.smp_daemon.shared.spawn import smp_command
from holdfast.smp_daemon.shared.transport import call, connect
from tests.access_kit import Authority, credentials, needs_openssl, token_file
from tests.deadlines import DEADLINE_S
from tests.smp_kit import JOB, Ground, ManualClock, Run, SmpProcess, refusal, run_on
from tests.system.attacks.victim import HELD, say_control

TOKEN = b"a token of enough bytes"


def environment_of(kind: str, path: Path) -> dict[str, str]:
    path.mkdir(exist_ok=True)
    token = token_file(path / "token") if "token" in kind else {}
    return token | (Authority(path / "ca").environment() if "mTLS" in kind else {})


KINDS = ["token", pytest.param("mTLS", marks=needs_openssl), pytest.param("token and mTLS", marks=needs_openssl)]


# ---------------------------------------------------------------------- settings from the environment


class TestCredentials:
    def test_are_none_unless_they_are_named(self) -> None:
        assert not load({})
        assert load({}).kind == "none"

    def test_a_token_is_read_from_a_file_or_a_variable_without_white_space(self, tmp_path: Path) -> None:
        assert load(token_file(tmp_path / "token", TOKEN.decode())).token == TOKEN
        assert load({TOKEN_ENV: f" {TOKEN.decode()}\n"}).token == TOKEN
        assert load({TOKEN_ENV: os.fsdecode(b"\xff" * 32)}).token == b"\xff" * 32

    def test_are_not_shown(self) -> None:
        assert TOKEN.decode() not in repr(load({TOKEN_ENV: TOKEN.decode()}))

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o700 | 0o010])
    def test_a_token_that_others_can_read_is_refused(self, tmp_path: Path, mode: int) -> None:
        with pytest.raises(ConfigError, match="chmod 600"):
            load(token_file(tmp_path / "token", mode=mode))

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
    def test_a_token_of_another_user_is_refused(self, tmp_path: Path) -> None:
        environment = token_file(tmp_path / "token")
        os.chown(tmp_path / "token", 4711, 4711)
        # Root can read any file; the question is who could have written this one.
        with pytest.raises(ConfigError, match="file of this user"):
            load(environment)

    @pytest.mark.parametrize("token", ["", "short", "x" * (MIN_TOKEN_BYTES - 1), "x" * 4097, "x" * 5000])
    def test_a_token_that_is_too_short_or_too_long_is_refused(self, tmp_path: Path, token: str) -> None:
        (tmp_path / "token").touch(mode=0o600)
        (tmp_path / "token").write_text(token)
        with pytest.raises(ConfigError, match=r"16 to 4096|longer than 4096"):
            load({"HOLDFAST_TOKEN_FILE": str(tmp_path / "token")})

    @pytest.mark.parametrize("what", ["nothing", "directory", "fifo"])
    def test_a_token_that_is_no_file_is_refused_at_once(self, tmp_path: Path, what: str) -> None:
        path = tmp_path / "token"
        if what == "directory":
            path.mkdir()
        elif what == "fifo":
            os.mkfifo(path, 0o600)
        with pytest.raises(ConfigError, match="HOLDFAST_TOKEN_FILE="):
            load({"HOLDFAST_TOKEN_FILE": str(path)})

    @needs_openssl
    def test_certificates_come_all_or_none(self, tmp_path: Path) -> None:
        environment = Authority(tmp_path / "ca").environment()
        assert load(environment).kind == "mTLS"
        for name in TLS_ENVS:
            with pytest.raises(ConfigError, match="all of"):
                load({k: v for k, v in environment.items() if k != name})
        Path(environment[TLS_ENVS[1]]).chmod(0o644)
        with pytest.raises(ConfigError, match="chmod 600"):
            load(environment)

    @needs_openssl
    def test_what_is_no_certificate_is_refused(self, tmp_path: Path) -> None:
        environment = Authority(tmp_path / "ca").environment()
        Path(environment[TLS_ENVS[0]]).write_text("no certificate")
        with pytest.raises(ConfigError, match="a key and a CA"):
            load(environment)

    def test_off_loopback_they_or_the_users_word_are_needed(self) -> None:
        token = Credentials(TOKEN)
        assert access_of(("127.0.0.2", "127.0.0.3"), False, Credentials()) == "loopback"
        assert access_of(("10.0.0.1",), False, token) == access_of(("127.0.0.1",), False, token) == "token"
        assert access_of(("10.0.0.1", "10.0.1.1"), True, Credentials()) == "insecure"
        for host in ("10.0.0.1", "0.0.0.0"):
            with pytest.raises(ConfigError, match="say --insecure"):
                access_of((host,), False, Credentials())


# ---------------------------------------------------------------------- the handshake


def shake(server: bytes, client: bytes, jobs: tuple[str, str] = (JOB, JOB)) -> list[BaseException | None]:
    """Run both sides of a handshake; return the error of each, or None."""
    ends = socket.socketpair()

    def run(index: int) -> BaseException | None:
        with ends[index]:
            try:
                (check_client, prove_to_server)[index](ends[index], (server, client)[index], jobs[index])
            except (HoldfastError, EOFError, OSError) as error:
                return error
        return None

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2), timeout=DEADLINE_S))


class TestAHandshake:
    @pytest.mark.parametrize(("other", "jobs"), [(b"another token, as long", (JOB, JOB)), (TOKEN, (JOB, "other"))])
    def test_keeps_out_another_token_and_another_job(self, other: bytes, jobs: tuple[str, str]) -> None:
        server, client = shake(TOKEN, other, jobs)
        assert isinstance(server, ProtocolError)
        assert isinstance(client, SmpUnavailable)

    def test_does_not_take_back_what_it_sent(self) -> None:
        """A peer that reflects everything proves nothing."""
        mine, other = socket.socketpair()

        def reflect() -> None:
            other.sendall(other.recv(len(MAGIC)) + bytes(NAME_BYTES))
            with suppress(ConnectionResetError):
                while data := other.recv(1 << 10):
                    other.sendall(data)

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(SmpUnavailable, match="this job's token"):
            prove_to_server(mine, TOKEN, JOB)
        mine.close()
        thread.join(DEADLINE_S)
        other.close()


# ---------------------------------------------------------------------- signed calls


class TestSignedCalls:
    def setup_method(self) -> None:
        self.verifier, self.signer = Verifier(TOKEN, JOB), Signer(TOKEN, JOB)
        self.signer._servers["here"] = self.verifier.name

    def test_are_good_once(self) -> None:
        sign = self.signer.sign("here", "Ping", b"request")
        self.verifier.verify("Ping", sign)
        with pytest.raises(ProtocolError, match="a replay"):
            self.verifier.verify("Ping", sign)

    def test_may_overtake_each_other(self) -> None:
        signs = [self.signer.sign("here", "Ping", b"") for _ in range(WINDOW)]
        for sign in reversed(signs):
            self.verifier.verify("Ping", sign)
        for sign in signs:
            with pytest.raises(ProtocolError, match="a replay"):
                self.verifier.verify("Ping", sign)

    def test_are_for_one_method_and_one_request(self) -> None:
        sign = self.signer.sign("here", "Ping", b"request")
        with pytest.raises(ProtocolError, match="not signed"):
            self.verifier.verify("ParityDone", sign)
        self.verifier.verify_request(b"request", sign)
        with pytest.raises(ProtocolError, match="that was signed"):
            self.verifier.verify_request(b"Request", sign)

    def test_are_for_one_server_as_it_is_now(self) -> None:
        sign = self.signer.sign("here", "Ping", b"")
        with pytest.raises(ProtocolError, match="another server"):
            Verifier(TOKEN, JOB).verify("Ping", sign)

    @pytest.mark.parametrize("bit", range(0, SIGN_BYTES * 8, 7))
    def test_break_with_any_bit(self, bit: int) -> None:
        sign = bytearray(self.signer.sign("here", "Ping", b""))
        sign[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            self.verifier.verify("Ping", bytes(sign))

    def test_of_too_many_callers_change_the_name_and_repeat_nothing(self) -> None:
        sign = self.signer.sign("here", "Ping", b"")
        self.verifier.verify("Ping", sign)
        name = self.verifier.name
        for _ in range(MAX_CALLERS):
            other = Signer(TOKEN, JOB)
            other._servers["here"] = name
            try:
                self.verifier.verify("Ping", other.sign("here", "Ping", b""))
            except ProtocolError:
                break
        assert self.verifier.name != name
        with pytest.raises(ProtocolError):
            self.verifier.verify("Ping", sign)

    def test_numbers_below_the_window_count_as_used(self) -> None:
        once = UsedNumbers()
        assert once.use(0) and once.use(WINDOW)
        assert not once.use(0) and once.use(1) and not once.use(1)
        assert once.use(1 << 63) and not once.use(WINDOW + 1)


@pytest.mark.parametrize(
    ("named", "address"),
    [
        ("ipv4:127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("ipv6:%5B::ffff:127.0.0.1%5D:4711", ("127.0.0.1", 4711)),
        ("ipv6:[::1]:4711", ("::1", 4711)),
        ("unknown", None),
        ("ipv4:", None),
        ("ipv4:127.0.0.1", None),
        ("", None),
    ],
)
def test_a_caller_that_has_hung_up_may_have_no_address(named: str, address: tuple[str, int] | None) -> None:
    assert address_of(named) == address


def test_a_refusal_is_logged_once_a_minute_for_each_address() -> None:
    clock = ManualClock()
    gate = Gate(Credentials(), JOB, clock)
    assert gate.complain("a", "why") and gate.complain("b", "why") and not gate.complain("a", "why")
    clock.now_s += COMPLAIN_EVERY_S
    assert gate.complain("a", "why")


def test_a_connection_that_is_let_in_ends_some_time_after_its_peer_has_lost_power() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        admitted = Gate(Credentials(), JOB).admit(server.accept()[0])
        assert admitted is not None
        with admitted:
            assert admitted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


# ---------------------------------------------------------------------- real SMPs


def ping(smp: SmpProcess) -> str:
    """The name of the SMP that answers over gRPC to this process's credentials."""
    with PeerClient(JOB) as client:
        return str(client.ping(smp.control, 5.0).node)


class Guarded:
    """Two SMPs that authenticate each other by `kind`, and a job on them."""

    def __init__(self, ground: Ground, kind: str, path: Path) -> None:
        self.environment = environment_of(kind, path)
        self.kind = kind
        with credentials(self.environment):
            self.smps = ground.smps(2)
            self.run: Run = run_on(self.smps, [[3000], [3000]])


@pytest.mark.parametrize("kind", KINDS)
def test_smps_that_know_each_other_protect_and_recover(ground: Ground, tmp_path: Path, kind: str) -> None:
    """Units travel both ways over authenticated connections, gRPC announces parity, and operators see it all."""
    guarded = Guarded(ground, kind, tmp_path)
    with credentials(guarded.environment):
        run, smps = guarded.run, guarded.smps
        snapshot = run.protect(1)
        for smp in smps:
            assert [ping(smp) for _ in range(3)] == [smp.name] * 3
            assert "not let in" not in (smp.arena / "smp.log").read_text(), "nobody complains of friends"
        assert {i.node for i in gather_inventories(JOB, [smp.control for smp in smps])} == {"node0", "node1"}
        overview = look(JOB, smps[0].control)
        assert [status.access for status in overview.statuses] == [kind, kind]
        lost = smps[1]
        lost.lose().launch().wait_ready()
        run["dp1"].client.reconnect()
        plan = run.plan()
        assert plan.snapshot == snapshot
        run.join(2)
        recovered = run["dp1"].recover(plan)
        assert recovered.how == "rebuilt"
        assert recovered.view == run["dp1"].image(snapshot)


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_does_not_know_them_gets_nothing(ground: Ground, tmp_path: Path, kind: str) -> None:
    guarded = Guarded(ground, kind, tmp_path)
    snapshot = guarded.run.protect(1)
    strangers = [{}, token_file(tmp_path / "other")]
    if "mTLS" in kind:
        strangers += [Authority(tmp_path / "other-ca").environment()]
    if kind == "token and mTLS":
        strangers += [{k: v for k, v in guarded.environment.items() if k in TLS_ENVS}]
    smp = guarded.smps[0]
    unit = {"op": "shard_unit", "coord": "dp0", "unit": 0}
    question = {"op": "fetch", "job": JOB, "snapshot": snapshot, "what": unit}
    for stranger in strangers:
        with credentials(stranger):
            with pytest.raises(HoldfastError):
                call(connect(smp.bulk, DEADLINE_S, JOB), question)
            with pytest.raises(HoldfastError):
                ping(smp)
            assert gather_inventories(JOB, [smp.control]) == []
    log = (smp.arena / "smp.log").read_text()
    assert log.count("was not let in") == 1, "whichever way they try, and however often"
    with credentials(guarded.environment):
        assert ping(smp) == smp.name
        assert guarded.run.protect(2)


@needs_openssl
def test_a_certificate_for_another_name_is_not_enough(ground: Ground, tmp_path: Path) -> None:
    """The authority may have signed certificates for many other things, so both sides check the name."""
    authority = Authority(tmp_path / "ca")
    with credentials(authority.environment()):
        smp = ground.smp()
    with credentials(authority.environment("web.example.org")):
        with pytest.raises(HoldfastError):
            call(connect(smp.bulk, DEADLINE_S, JOB), HELD)
        with pytest.raises(HoldfastError):
            ping(smp)
    with credentials(authority.environment() | {"HOLDFAST_TLS_NAME": "web.example.org"}):
        with pytest.raises(SmpUnavailable, match="certificate"):
            connect(smp.bulk, DEADLINE_S, JOB)


LACKS = [
    ("token", "", "token"),
    ("token", "token", "token"),
    ("", "token", "token"),
    pytest.param("mTLS", "", "certificate", marks=needs_openssl),
    pytest.param("mTLS", "mTLS", "certificate", marks=needs_openssl),
    pytest.param("", "mTLS", "certificate", marks=needs_openssl),
]


@pytest.mark.parametrize(("theirs", "ours", "refused"), LACKS)
def test_a_command_that_is_refused_says_what_it_lacks(
    ground: Ground, tmp_path: Path, capsys: pytest.CaptureFixture[str], theirs: str, ours: str, refused: str
) -> None:
    """Never that the SMP does not answer. `gc`, which cannot ask for trainers, keeps the arena."""
    with credentials(environment_of(theirs, tmp_path / "theirs")):
        smp = ground.smp()
    where = ["--arena", str(ground.base), "--job", JOB]
    with credentials(environment_of(ours, tmp_path / "ours")):
        for status, words in (
            (1, ["status", *where]),
            (NO_ANSWER, ["drain", smp.name, *where]),
            (NO_ANSWER, ["drain", smp.name, "--at", "{}:{}".format(*smp.control), "--job", JOB]),
            (NO_ANSWER, ["give-up", *where]),
            (NO_ANSWER, ["export", "--list", *where]),
            (NO_ANSWER, ["export", str(tmp_path / "out"), *where]),
            (1, ["gc", *where]),
        ):
            assert main(words) == status, words
            said = "".join(capsys.readouterr())
            assert f"refused: {refused}" in said and "does not answer" not in said, words
        assert main(["status", *where, "--json", "-"]) == 1
        assert list(json.loads(capsys.readouterr().out)[0]["refused"].values()) == [refused]


def test_a_node_among_others_that_refuses_is_told_from_a_silent_one(ground: Ground, tmp_path: Path) -> None:
    smps = ground.smps(3)
    run_on(smps, [[3000], [3000], [3000]]).protect(1)
    smps[2].kill()
    smps[1].kill()
    with credentials(token_file(tmp_path / "token")):
        smps[1].launch().wait_ready()
    overview = look(JOB, smps[0].control)
    assert overview.silent == ("node1", "node2") and not overview.is_well
    assert {name: why.value for name, why in overview.refused.items()} == {"node1": "token"}


def test_with_a_token_there_is(ground: Ground, tmp_path: Path) -> None:
    with credentials(token_file(tmp_path / "token")):
        smp = ground.prepare()
        smp.host = "0.0.0.0"
        smp.launch().wait_ready()
        assert ping(smp)
        assert look(JOB, smp.control).statuses[0].access == "token"


def test_an_insecure_smp_says_so(ground: Ground) -> None:
    smp = ground.prepare()
    smp.host = "0.0.0.0"
    smp.launch("--insecure").wait_ready().wait_settled()
    assert look(JOB, smp.control).statuses[0].access == "insecure"
    assert "INSECURE: anyone who can reach 0.0.0.0" in (smp.arena / "smp.log").read_text()


@needs_openssl
@pytest.mark.parametrize(("name", "days"), [("web.example.org", 2), (TLS_NAME.default, -1)])
def test_a_certificate_that_others_would_refuse_stops_an_smp_at_once(
    ground: Ground, tmp_path: Path, name: str, days: int
) -> None:
    with credentials(Authority(tmp_path / "ca").environment(name, days)):
        began = time.monotonic()
        error = refusal(smp_command(JOB, "node0", ground.base / "node0", "127.0.0.1"))
        assert time.monotonic() - began < DEADLINE_S / 2, "not after it has waited for itself"
    assert isinstance(error, ConfigError)
    assert TLS_ENVS[0] in str(error) and TLS_NAME.default in str(error)
    assert not (ground.base / "node0").exists()


@needs_openssl
def test_of_another_authority_is_refused_before_anybody_sees_it(tmp_path: Path) -> None:
    own = Authority(tmp_path / "a").environment(days=9)
    with credentials(own):
        tls = current().tls
        assert tls is not None
        left = check_certificates(tls) - datetime.now(UTC)
        assert 8 <= left.days <= 9
    with credentials(own | {TLS_ENVS[2]: Authority(tmp_path / "b").environment()[TLS_ENVS[2]]}):
        tls = current().tls
        assert tls is not None
        with pytest.raises(ConfigError, match="refuse the certificate"):
            check_certificates(tls)


def test_a_call_that_was_overheard_cannot_be_repeated(ground: Ground, tmp_path: Path) -> None:
    """Neither on the same server, nor on it after a restart, nor on another one."""
    with credentials(token_file(tmp_path / "token")):
        smps = ground.smps(2)
        signer = Signer(current().token, JOB)
        body = encode_json(Ping(job=JOB))
        with pytest.raises(grpc.RpcError) as refused:
            say_control(smps[0].control, body)
        assert learn(signer, "it", refused.value)
        overheard = ((CALL_KEY, signer.sign("it", METHOD, body)),)
        assert b"node0" in say_control(smps[0].control, body, overheard)
        with pytest.raises(grpc.RpcError, match="a replay"):
            say_control(smps[0].control, body, overheard)
        smps[0].restart()
        for smp in smps:
            with pytest.raises(grpc.RpcError, match="not let in"):
                say_control(smp.control, body, overheard)


def test_calls_that_learn_a_servers_name_at_once_are_all_answered(ground: Ground, tmp_path: Path) -> None:
    """As when an SMP has started again while its peers have something to tell it."""
    with credentials(token_file(tmp_path / "token")):
        smp = ground.smp()
        with PeerClient(JOB) as client, ThreadPoolExecutor(8) as pool:
            for _ in range(2):
                client.ping(smp.control, DEADLINE_S, starting=True)
                smp.restart()
                pings = [pool.submit(client.ping, smp.control, DEADLINE_S, starting=True) for _ in range(8)]
                assert {each.result().node for each in pings} == {"node0"}


def test_a_call_whose_request_was_exchanged_is_refused(ground: Ground, tmp_path: Path) -> None:
    with credentials(token_file(tmp_path / "token")):
        smp = ground.smp()
        signer = Signer(current().token, JOB)
        with pytest.raises(grpc.RpcError) as refused:
            say_control(smp.control, b"")
        assert learn(signer, "it", refused.value)
        sign = signer.sign("it", METHOD, encode_json(Ping(job=JOB)))
        with pytest.raises(grpc.RpcError, match="that was signed"):
            say_control(smp.control, encode_json(PeerInventory(job=JOB)), ((CALL_KEY, sign),))
