"""Control messages between SMPs, and from commands to SMPs, over gRPC. Authentication is in `net.control`.

Messages are small, and every call has a deadline. There is one method. Its request is one of `messages.PeerControl` as
JSON; its reply, or the error that the request was refused with, is JSON too. A call may arrive twice; every one of
these messages is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc

from holdfast.smp_daemon.net.control import CALL_KEY, REPLY_KEY, Guard, Strangers, learn, most_connections, value
from holdfast.smp_daemon.net.gate import Gate
from holdfast.smp_daemon.net.refusals import Refusal, Refused, refusal_in
from holdfast.smp_daemon.shared import messages
from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.handshake import Signer
from holdfast.smp_daemon.shared.layout import Layout, Node, SnapshotId
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S, MAX_MESSAGE_BYTES
from holdfast.smp_daemon.shared.plain import encode_json, from_plain, pack, unpack
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.system import MACHINE, Network
from holdfast.smp_daemon.shared.transport import Message, Outbound, checked_reply

SERVICE, NAME = "holdfast.Smp", "Ask"
METHOD = f"/{SERVICE}/{NAME}"
NOTIFY_DEADLINE_S = 20.0
"""How long a notice may take, in seconds: an SMP that is being started again still gets it."""
MAX_CALLS = 64
"""Largest number of calls in progress; more are refused."""

THREADS = 16
"""Number of threads that answer. Few requests take long: those of commands, and of the SMP that leads a regrouping."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),  # the default leaves a node that comes back unreached for 2 minutes
]

AtEnd = Callable[[Callable[[], None]], None]
"""Calls a function once the caller has its reply, or is gone."""


class PeerServer:
    """Answers the other SMPs of the job, and commands, in its own threads. `strangers`: who only connects."""

    def __init__(
        self,
        gate: Gate,
        answer: Callable[[messages.PeerControl, AtEnd], Outbound],
        host: str,
        port: int,
        network: Network,
    ) -> None:
        """Bind the port. Nothing is answered before `start`.

        Args:
            gate: says who may call, and for which job.
            answer: returns the reply to a message for this job; called in several threads. A `HoldfastError` becomes an
                error reply.

        Raises:
            ConfigError: the port is taken.
        """
        self._job = gate.job
        self._answer = answer
        guard = Guard(gate)
        self.strangers = Strangers(guard)
        options = [*_OPTIONS, ("grpc.max_allowed_incoming_connections", most_connections())]
        rpc = network.grpc()
        self._server = rpc.server(
            network.ReadyPool(THREADS, "peer"), options=options, interceptors=[guard], maximum_concurrent_rpcs=MAX_CALLS
        )
        handler = rpc.unary_unary_rpc_method_handler(self._handle)
        self._server.add_generic_rpc_handlers((rpc.method_handlers_generic_handler(SERVICE, {NAME: handler}),))
        try:
            self.port = self._listen(f"{host}:{port}", gate.credentials)
            guard.listens_at = host, self.port
        except RuntimeError as error:
            raise ConfigError(
                f"the SMP cannot listen on {host}:{port}; choose another with --host or --port"
            ) from error

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def close(self) -> None:
        """Stop serving; waits at most a second for calls in progress."""
        self._server.stop(1.0).wait()

    def _listen(self, address: str, credentials: Credentials) -> int:
        tls = credentials.tls
        if tls is None:
            return int(self._server.add_insecure_port(address))
        shown = grpc.ssl_server_credentials([(tls.key, tls.cert)], root_certificates=tls.ca, require_client_auth=True)
        return int(self._server.add_secure_port(address, shown))

    def _handle(self, body: bytes, context: Any) -> bytes:
        def at_end(done: Callable[[], None]) -> None:
            if not context.add_callback(done):  # the call has ended already
                done()

        try:
            request: messages.PeerControl = messages.read_peer_control(unpack(dict[str, Any], body, "a message"))
            messages.check_request(request, self._job)
            return pack(self._answer(request, at_end))
        except HoldfastError as error:
            return encode_json({"error": type(error).__name__, "message": str(error)})


class PeerClient:
    """Asks SMPs. Thread-safe; one channel to each stays open until `close`. Not for trainers, which may fork."""

    def __init__(self, job: str, credentials: Credentials | None = None, network: Network = MACHINE) -> None:
        """`credentials`: by default those of this process."""
        self._job = job
        self._credentials = network.credentials() if credentials is None else credentials
        self._network = network
        self._grpc = network.grpc()
        token = self._credentials.token
        self._signer = Signer(token, job) if token else None
        self._channels: dict[Address, grpc.Channel] = {}
        # Guards `_channels`. Any thread takes it, some while they hold the store's lock. Creating a channel under it
        # does not block, since a channel connects in the background.
        self._lock = network.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(
        self,
        address: Address,
        request: messages.PeerRequest,
        deadline_s: float = CALL_DEADLINE_S,
        *,
        starting: bool = False,
    ) -> Message:
        """Send `request` and wait for its reply.

        Args:
            starting: the SMP may not listen yet; wait for it until the deadline.

        Raises:
            Refused: an SMP runs there and does not let this process in.
            SmpUnavailable: nothing answers there.
            DeadlineExceeded: no answer in time.
            HoldfastError: the error that the SMP replies with.
        """
        body = pack(messages.introduced(request))
        try:
            return self._asked(address, body, deadline_s, starting, again=True)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and (refusal := refusal_in(error)):
                raise Refused(_text(address), refusal) from error
            text = f"{_text(address)} does not answer: {_why(error)}"
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            raise DeadlineExceeded(text) if late else SmpUnavailable(text) from error

    def ping(self, address: Address, deadline_s: float, *, starting: bool = False) -> messages.Pong:
        """Ask an SMP which job, node and epoch it serves. Raises as `ask`."""
        return from_plain(
            messages.Pong,
            self.ask(address, messages.Ping(job=self._job), deadline_s, starting=starting),
            "who is there",
        )

    def tell_parity_done(
        self, layout: Layout, node: str, epoch: int, snapshot: SnapshotId, failed: Callable[[str], None]
    ) -> None:
        """Tell the other members of `node`'s group. Returns at once; `failed` gets the reason if one cannot be told."""
        group, position = layout.place(node)
        tag = layout.tag(group)
        request = messages.ParityDone(job=layout.job, epoch=epoch, snapshot=snapshot, tag=tag, position=position)
        for member in layout.members(group):
            if member.name != node:
                # One for each member, which owns nothing: a member that is down holds it for its deadline at most, and
                # nobody else meanwhile.
                told = (member, request, failed)
                try:
                    self._network.Thread(target=self._tell, args=told, name="tell", daemon=True).start()
                except RuntimeError as error:
                    failed(f"node {member.name!r} could not be told: {error}")

    def _tell(self, member: Node, request: messages.ParityDone, failed: Callable[[str], None]) -> None:
        try:
            self.ask(member.control, request, NOTIFY_DEADLINE_S, starting=True)
        except (HoldfastError, ValueError) as error:  # gRPC raises `ValueError` for a channel that is closed
            with self._lock:
                if not self._channels:
                    return  # closed meanwhile
            failed(f"node {member.name!r} could not be told: {error}")

    def close(self) -> None:
        """Close every channel."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _asked(self, address: Address, body: bytes, deadline_s: float, starting: bool, *, again: bool) -> Message:
        method, signer = self._method(address), self._signer
        if signer is None:
            return checked_reply(_read(method(body, timeout=deadline_s, wait_for_ready=starting)))
        sign = signer.sign(_text(address), METHOD, body)
        metadata = ((CALL_KEY, sign),)
        try:
            reply, call = method.with_call(body, timeout=deadline_s, wait_for_ready=starting, metadata=metadata)
        except grpc.RpcError as error:
            if not again or not learn(signer, _text(address), error):
                raise
            return self._asked(address, body, deadline_s, starting, again=False)
        if not signer.is_genuine(sign, value(call.trailing_metadata(), REPLY_KEY), reply):
            raise Refused(f"what answers at {_text(address)}", Refusal.TOKEN)
        return checked_reply(_read(reply))

    def _method(self, address: Address) -> Any:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = self._connected(_text(address))
            return self._channels[address].unary_unary(METHOD, None, None)

    def _connected(self, target: str) -> Any:
        tls = self._credentials.tls
        if tls is None:
            return self._grpc.insecure_channel(target, options=_OPTIONS)
        shown = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
        return grpc.secure_channel(target, shown, options=[*_OPTIONS, ("grpc.ssl_target_name_override", tls.name)])


def _why(error: grpc.RpcError) -> str:
    """The error code and the cause, which stands at the end of gRPC's text after the names of its layers."""
    return f"{error.code().name.replace('_', ' ').lower()}, {str(error.details()).rpartition(': ')[2]}"


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _read(reply: bytes) -> Message:
    return unpack(dict[str, Any], reply, "an answer")
