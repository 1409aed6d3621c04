"""Control between the SMPs of a group: gRPC, small messages, a deadline on each. Who may call: `net.control`."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from holdfast.smp_daemon.net import peer_pb2, peer_pb2_grpc
from holdfast.smp_daemon.net.control import CALL_KEY, Guard, Signer
from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.layout import Layout, Node, SnapshotId
from holdfast.smp_daemon.shared.limits import is_identifier
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.storage.codings import Coding
from holdfast.smp_daemon.storage.store import Store

NOTIFY_DEADLINE_S = 20.0
MAX_CALLS = 64
"""Under way at a time; more are refused."""

_OPTIONS = [
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.server_handshake_timeout_ms", 5000),
]

log = get_log(__name__)


class PeerServer(peer_pb2_grpc.PeerServicer):  # type: ignore[misc]  # generated, untyped
    """Answers the other SMPs of the job."""

    def __init__(self, store: Store, host: str, port: int, credentials: Credentials, system: System = MACHINE) -> None:
        """Starts to serve. Raises `ConfigError` if the port is taken."""
        self._store = store
        guard = Guard(credentials, store.job)
        self._server = grpc.server(
            system.Pool(2, "peer"), options=_OPTIONS, interceptors=[guard], maximum_concurrent_rpcs=MAX_CALLS
        )
        peer_pb2_grpc.add_PeerServicer_to_server(self, self._server)
        try:
            self.port = self._listen(f"{host}:{port}", credentials)
            guard.listens_at = host, self.port
        except RuntimeError as error:
            raise ConfigError(
                f"the SMP cannot listen on {host}:{port}; choose another with --host or --port"
            ) from error
        self._server.start()

    def _listen(self, address: str, credentials: Credentials) -> int:
        tls = credentials.tls
        if tls is None:
            return int(self._server.add_insecure_port(address))
        shown = grpc.ssl_server_credentials([(tls.key, tls.cert)], root_certificates=tls.ca, require_client_auth=True)
        return int(self._server.add_secure_port(address, shown))

    def close(self) -> None:
        """Stop serving; waits at most a second for calls in progress."""
        self._server.stop(1.0).wait()

    def ParityDone(self, request: peer_pb2.ParityDoneRequest, context: grpc.ServicerContext) -> peer_pb2.Ack:
        self._check_job(request.job, context)
        coding = Coding(SnapshotId(request.snapshot_epoch, request.snapshot_step), request.tag)
        if not is_identifier(request.tag) or request.position > 255:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "that names no parity of a group")
        try:
            self._store.codings.parity_done(request.epoch, coding, request.position)
        except HoldfastError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return peer_pb2.Ack()

    def Ping(self, request: peer_pb2.PingRequest, context: grpc.ServicerContext) -> peer_pb2.PingReply:
        self._check_job(request.job, context)
        layout = self._store.newest_layout()
        revision = layout.revision if layout is not None and layout.epoch == self._store.epoch else 0
        return peer_pb2.PingReply(
            job=self._store.job, node=self._store.node, epoch=self._store.epoch, revision=revision
        )

    def _check_job(self, job: str, context: grpc.ServicerContext) -> None:
        if job != self._store.job:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"this SMP serves job {self._store.job!r}, not {job!r}")


class PeerClient:
    """Tells the group's other SMPs. Thread-safe; one channel per peer, kept open."""

    def __init__(
        self,
        credentials: Credentials = Credentials(),  # noqa: B008  # frozen
        job: str = "",
        system: System = MACHINE,
    ) -> None:
        """`job` is needed with a token only."""
        self._credentials = credentials
        self._signer = Signer(credentials.token, job) if credentials.token else None
        self._channels: dict[str, grpc.Channel] = {}
        # Guards the channels. Any thread takes it, some with the store's lock held; a channel connects by itself, so
        # making one under the lock does not block.
        self._lock = system.Lock()

    def tell_parity_done(
        self, layout: Layout, node: str, epoch: int, snapshot: SnapshotId, failed: Callable[[str], None]
    ) -> None:
        """Tell every other member of the group of `node`; returns at once. `failed` is called with a reason."""
        group, position = layout.place(node)
        request = peer_pb2.ParityDoneRequest(
            job=layout.job,
            epoch=epoch,
            snapshot_epoch=snapshot.epoch,
            snapshot_step=snapshot.step,
            tag=layout.tag(group),
            position=position,
        )
        for member in layout.members(group):
            if member.name != node:
                self._tell(member, request, failed, again=True)

    def ping(self, address: str, job: str, deadline_s: float, *, starting: bool = False) -> peer_pb2.PingReply:
        """Ask who is there. Raises `HoldfastError` if nobody answers in time, or answers for another job.

        Args:
            starting: it may not listen yet; it is waited for until the deadline.
        """
        stub = peer_pb2_grpc.PeerStub(self._channel(address))
        request = peer_pb2.PingRequest(job=job)
        try:
            if self._signer is not None:
                return self._signed_ping(self._signer, stub, address, request, deadline_s, starting)
            reply: peer_pb2.PingReply = stub.Ping(request, timeout=deadline_s, wait_for_ready=starting)
            return reply
        except grpc.RpcError as error:
            raise HoldfastError(f"{address} does not answer: {error.code().name}: {error.details()}") from error

    def _signed_ping(
        self,
        signer: Signer,
        stub: peer_pb2_grpc.PeerStub,
        address: str,
        request: peer_pb2.PingRequest,
        deadline_s: float,
        starting: bool,
    ) -> peer_pb2.PingReply:
        def ask() -> tuple[peer_pb2.PingReply, grpc.Call, bytes]:
            sign = signer.sign(address, "/holdfast.v1.Peer/Ping", request.SerializeToString())
            signed = {"metadata": ((CALL_KEY, sign),), "wait_for_ready": starting}
            return *stub.Ping.with_call(request, timeout=deadline_s, **signed), sign

        try:
            reply, call, sign = ask()
        except grpc.RpcError as error:
            if not signer.learn(address, error):
                raise
            reply, call, sign = ask()
        if not signer.is_genuine(sign, call, reply.SerializeToString()):
            raise HoldfastError(f"what answers at {address} does not know this job's token")
        return reply

    def _tell(
        self, member: Node, request: peer_pb2.ParityDoneRequest, failed: Callable[[str], None], *, again: bool
    ) -> None:
        stub = peer_pb2_grpc.PeerStub(self._channel(member.control))
        signer, signed = self._signer, {}
        if signer is not None:
            sign = signer.sign(member.control, "/holdfast.v1.Peer/ParityDone", request.SerializeToString())
            signed = {"metadata": ((CALL_KEY, sign),)}

        def done(call: grpc.Future[peer_pb2.Ack]) -> None:
            if call.cancelled():
                return
            error = call.exception()
            if error is None:
                return
            if again and signer is not None and signer.learn(member.control, error):
                self._tell(member, request, failed, again=False)
                return
            detail = error.details() if isinstance(error, grpc.Call) else error
            failed(f"node {member.name!r} could not be told: {detail}")

        call = stub.ParityDone.future(request, timeout=NOTIFY_DEADLINE_S, wait_for_ready=True, **signed)
        call.add_done_callback(done)

    def close(self) -> None:
        """Close every channel."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = self._connected(address)
            return self._channels[address]

    def _connected(self, address: str) -> grpc.Channel:
        tls = self._credentials.tls
        if tls is None:
            return grpc.insecure_channel(address, options=_OPTIONS)
        shown = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
        return grpc.secure_channel(address, shown, options=[*_OPTIONS, ("grpc.ssl_target_name_override", tls.name)])
