"""gRPC between simulated processes, in place of the module `grpc` that `smp_daemon.net.peers` uses.

Requests are serialised, and answered by the production servicer in a thread of its server's own pool. They may be
late, lost, overtaken or repeated. As with gRPC, the caller learns of a failure at once or at its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from tests.proof.sim.network import network
from tests.proof.sim.scheduler import active
from tests.proof.sim.tasks import SimProcess
from tests.proof.sim.threads import Event, ThreadPoolExecutor

RETRY_S = 0.25
"""How long a call that waits for its server, or a reply at a cut link, waits before it tries again, in seconds."""


class SimRpcError(grpc.RpcError):
    """What a failed call raises."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class _CallContext:
    """The part of `grpc.ServicerContext` that is used."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def add_callback(self, done: Callable[[], None]) -> bool:
        self._callbacks.append(done)
        return True

    def end(self) -> None:
        """Run the callbacks: the server is done with the call."""
        for done in self._callbacks:
            done()


class SimServer:
    """`grpc.Server`."""

    def __init__(self, pool: ThreadPoolExecutor, options: object = None, **more: object) -> None:
        """Ignores `options` and `more`: callers are not authenticated, and their number is not limited."""
        self._pool = pool
        self._handlers: list[Any] = []
        self._address = ""
        self.process: SimProcess = active().current.process
        self.calls: dict[int, _Call] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers += handlers

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port) or network().free_port()
        self._address = f"{host}:{number}"
        if self._address in network().servers:
            raise RuntimeError(f"{self._address} is taken")
        return number

    def start(self) -> None:
        network().servers[self._address] = self
        self.process.on_death[id(self)] = self._die

    def stop(self, grace: float | None) -> Event:
        network().servers.pop(self._address, None)
        self.process.on_death.pop(id(self), None)
        ended = Event()
        ended.set()
        return ended

    def handle(self, call: _Call) -> None:
        """Answer a request that has arrived, in the server's pool."""
        self.calls[id(call)] = call
        self._pool.submit(self._answer, call)

    def _answer(self, call: _Call) -> None:
        active().point()
        handler = next(filter(None, (each.service(call) for each in self._handlers)))
        context = _CallContext()
        try:
            call.replied(handler.unary_unary(call.request, context), None)
        finally:
            self.calls.pop(id(call), None)
            context.end()

    def _die(self) -> None:
        if network().servers.get(self._address) is self:
            del network().servers[self._address]
        for call in self.calls.values():
            call.finish(None, SimRpcError(grpc.StatusCode.UNAVAILABLE, "the connection was reset"))


class _Call:
    """One call in progress: `grpc.Future` and `grpc.Call` in one."""

    def __init__(self, channel: SimChannel, method: str, request: bytes) -> None:
        self.method = method
        self.request = request
        self._channel = channel
        self._scheduler = active()
        self._process = self._scheduler.current.process
        self._ended = Event()
        self._reply: bytes | None = None
        self._error: SimRpcError | None = None

    def begin(self, timeout: float, wait_for_ready: bool) -> None:
        self._wait_for_ready = wait_for_ready
        self._limit = self._scheduler.now + timeout
        self._scheduler.at(self._limit, self._time_out)
        net = network()
        self._send_after(net.delay_s(self._process.host, self._channel.host))
        if net.break_chance and net.random.random() < net.break_chance:
            net.counts["repeated call"] += 1
            self._send_after(net.random.random() * 0.05)

    def result(self) -> Any:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply

    def cancel(self) -> None:
        """End the call because its channel is closed."""
        self.finish(None, SimRpcError(grpc.StatusCode.CANCELLED, "the channel is closed"))

    def replied(self, reply: bytes, error: SimRpcError | None) -> None:
        """Send the server's answer on its way, or lose it."""
        net = network()
        if net.break_chance and net.random.random() < net.break_chance:
            net.counts["lost reply"] += 1
            error = SimRpcError(grpc.StatusCode.UNAVAILABLE, "the connection was reset")
        delay = net.delay_s(self._channel.host, self._process.host)
        self._scheduler.at(self._scheduler.now + delay, lambda: self._arrive(reply, error))

    def finish(self, reply: bytes | None, error: SimRpcError | None) -> None:
        """End the call. Only the first end counts."""
        if self._ended.is_set():
            return
        self._reply, self._error = reply, error
        self._ended.set()
        self._channel.calls.pop(id(self), None)

    def _send_after(self, delay_s: float) -> None:
        self._scheduler.at(self._scheduler.now + delay_s, self._deliver)

    def _deliver(self) -> None:
        if self._ended.is_set() or not self._process.alive:
            return
        net = network()
        server = net.servers.get(self._channel.address)
        reachable = not net.is_cut(self._process.host, self._channel.host)
        if server is None and reachable and not self._wait_for_ready:
            self.finish(None, SimRpcError(grpc.StatusCode.UNAVAILABLE, "nobody listens there"))
        elif net.is_dark(self._process.host, self._channel.host):
            return  # the call times out
        elif server is None or not reachable:
            self._send_after(RETRY_S)
        elif net.break_chance and net.random.random() < net.break_chance:
            net.counts["lost call"] += 1
            self.finish(None, SimRpcError(grpc.StatusCode.UNAVAILABLE, "the connection was reset"))
        else:
            server.handle(self)

    def _arrive(self, reply: bytes, error: SimRpcError | None) -> None:
        if self._ended.is_set() or network().is_dark(self._channel.host, self._process.host):
            return
        if network().is_cut(self._channel.host, self._process.host):
            self._scheduler.at(self._scheduler.now + RETRY_S, lambda: self._arrive(reply, error))
        else:
            self.finish(reply, error)

    def _time_out(self) -> None:
        self.finish(None, SimRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))


class SimChannel:
    """`grpc.Channel`."""

    def __init__(self, address: str, options: object = None) -> None:
        self.address = address
        self.host = address.rpartition(":")[0]
        self.calls: dict[int, _Call] = {}

    def unary_unary(self, method: str, request_serializer: None, response_deserializer: None) -> _Method:
        return _Method(self, method)

    def close(self) -> None:
        for call in list(self.calls.values()):
            call.cancel()


class _Method:
    """`grpc.UnaryUnaryMultiCallable`."""

    def __init__(self, channel: SimChannel, method: str) -> None:
        self._channel = channel
        self._method = method

    def __call__(self, request: bytes, timeout: float, wait_for_ready: bool = False) -> Any:
        active().point()
        return self.future(request, timeout, wait_for_ready).result()

    def future(self, request: bytes, timeout: float, wait_for_ready: bool = False) -> _Call:
        call = _Call(self._channel, self._method, request)
        self._channel.calls[id(call)] = call
        call.begin(timeout, wait_for_ready)
        return call


class SimGrpc:
    """The part of the module `grpc` that `smp_daemon.net.peers` uses."""

    RpcError = grpc.RpcError
    StatusCode = grpc.StatusCode
    Call = SimRpcError
    server = SimServer
    insecure_channel = SimChannel
    unary_unary_rpc_method_handler = staticmethod(grpc.unary_unary_rpc_method_handler)
    method_handlers_generic_handler = staticmethod(grpc.method_handlers_generic_handler)
