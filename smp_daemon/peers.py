"""Control between the SMPs of a group: gRPC, small messages, a deadline on each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from smp_daemon import peer_pb2, peer_pb2_grpc
from smp_daemon.codings import Coding
from smp_daemon.errors import ConfigError, HoldfastError
from smp_daemon.layout import Layout, SnapshotId
from smp_daemon.logs import get_log
from smp_daemon.store import Store

NOTIFY_DEADLINE_S = 20.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
]

log = get_log(__name__)


class PeerServer(peer_pb2_grpc.PeerServicer):  # type: ignore[misc]  # generated, untyped
    """Answers the other SMPs of the job."""

    def __init__(self, store: Store, host: str, port: int) -> None:
        """Starts to serve. Raises `ConfigError` if the port is taken."""
        self._store = store
        self._server = grpc.server(ThreadPoolExecutor(2, "peer"), options=_OPTIONS)
        peer_pb2_grpc.add_PeerServicer_to_server(self, self._server)
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                f"the SMP cannot listen on {host}:{port}; choose another with --host or --port"
            ) from error
        self._server.start()

    def close(self) -> None:
        """Stop serving; waits at most a second for calls in progress."""
        self._server.stop(1.0).wait()

    def ParityDone(self, request: peer_pb2.ParityDoneRequest, context: grpc.ServicerContext) -> peer_pb2.Ack:
        self._check_job(request.job, context)
        coding = Coding(SnapshotId(request.snapshot_epoch, request.snapshot_step), request.tag)
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

    def __init__(self) -> None:
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()

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
                stub = peer_pb2_grpc.PeerStub(self._channel(member.control))
                call = stub.ParityDone.future(request, timeout=NOTIFY_DEADLINE_S, wait_for_ready=True)
                call.add_done_callback(_reporter(member.name, failed))

    def ping(self, address: str, job: str, deadline_s: float, *, starting: bool = False) -> peer_pb2.PingReply:
        """Ask who is there. Raises `HoldfastError` if nobody answers in time, or answers for another job.

        Args:
            starting: it may not listen yet; it is waited for until the deadline.
        """
        stub = peer_pb2_grpc.PeerStub(self._channel(address))
        try:
            request = peer_pb2.PingRequest(job=job)
            reply: peer_pb2.PingReply = stub.Ping(request, timeout=deadline_s, wait_for_ready=starting)
            return reply
        except grpc.RpcError as error:
            raise HoldfastError(f"{address} does not answer: {error.code().name}: {error.details()}") from error

    def close(self) -> None:
        """Close every channel."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = grpc.insecure_channel(address, options=_OPTIONS)
            return self._channels[address]


def _reporter(peer: str, failed: Callable[[str], None]) -> Callable[[grpc.Future[peer_pb2.Ack]], None]:
    def done(call: grpc.Future[peer_pb2.Ack]) -> None:
        if call.cancelled():
            return
        error = call.exception()
        if error is not None:
            detail = error.details() if isinstance(error, grpc.Call) else error
            failed(f"node {peer!r} could not be told: {detail}")

    return done
