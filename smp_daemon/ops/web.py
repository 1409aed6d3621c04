"""What an SMP shows to people and monitoring, over HTTP on loopback: a page, ``/status.json``, ``/metrics``
and ``/healthz``.

Read-only. A browser is answered only under a name of this machine's own, so that no web page elsewhere can read it
through a name that it controls (DNS rebinding). Where it listens off loopback, others are given the metrics alone.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from holdfast.smp_daemon.node.core import Core
from holdfast.smp_daemon.ops.metrics import exposition, sees_the_job
from holdfast.smp_daemon.ops.overview import Overview, look
from holdfast.smp_daemon.ops.status import take_status
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.paths import LOOPBACK
from holdfast.smp_daemon.shared.sources import Address

METRICS = "/metrics"
REQUEST_DEADLINE_S = 5.0
MAX_REQUESTS = 32
FRESH_S = 1.0
"""Other SMPs are asked no more often than that, however many requests come."""

SHARE = 4.0
"""Nor for more than a fifth of the time."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
}

log = get_log(__name__)


def parse_http(text: str) -> Address | None:
    """What ``--http`` says: a port of loopback or of an address; port 0 for ``auto``; None for ``off``.

    Raises:
        ConfigError: it says something else.
    """
    if text == "off":
        return None
    if text == "auto":
        return LOOPBACK, 0
    host, colon, port = text.rpartition(":")
    try:
        ipaddress.IPv4Address(host if colon else LOOPBACK)
        if port.isdigit() and 0 < int(port) < 1 << 16:
            return host or LOOPBACK, int(port)
    except ValueError:
        pass
    raise ConfigError(f"--http takes a port from 1 to 65535, ADDRESS:PORT, auto or off, not {text!r}")


def show(smp: Core, asked: Address | None) -> Web | None:
    """Have `smp` show itself at `asked`, if it can be had; else where its predecessor did, or on any port of loopback.

    Nothing that goes wrong here is raised: training does not depend on it. The log says it, and `Core.impaired`.

    Args:
        asked: see `parse_http`; port 0: where its predecessor did, or anywhere; None: nowhere.
    """
    if asked is None:
        smp.shown_at(LOOPBACK, 0)
        return None
    before = smp.owner.http_host, smp.owner.http_port
    places = [*([asked] if asked[1] else []), *([before] if before[1] else []), (LOOPBACK, 0)]
    problem = ""
    for place in places:
        try:
            web = Web(smp, *place)
        except (OSError, RuntimeError) as error:  # the latter: no thread can be started
            problem = problem or f"{place[0]}:{place[1]} ({getattr(error, 'strerror', None) or error})"
            continue
        smp.shown_at(place[0], web.port)
        if asked[1] and place != asked:
            url = smp.owner.url
            smp.impair("page", f"page and /metrics are at {url}, not at {problem}: free that, or change HOLDFAST_HTTP")
        return web
    smp.shown_at(LOOPBACK, 0)
    smp.impair("page", f"there is no page and no /metrics, for want of {problem}")
    return None


class Web:
    """The server, in threads of its own until `close`."""

    def __init__(self, smp: Core, host: str = LOOPBACK, port: int = 0) -> None:
        """Serve on `port` of an address; 0: any free one. Raises `OSError` if it is taken."""
        self._smp = smp
        # Held by the one thread that looks at the job, for seconds. The others are shown the last overview meanwhile,
        # and wait only if there is none; what they read is replaced as a whole.
        self._lock = threading.Lock()
        self._overview: Overview | None = None
        self._fresh_until = 0.0
        self._bodies: dict[str, tuple[Overview, bytes]] = {}
        self._server = _Server((host, port), self)
        try:
            threading.Thread(target=self._server.serve_forever, name="web", daemon=True).start()
        except RuntimeError:
            self._server.server_close()
            raise

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def overview(self) -> Overview:
        """The job now, or up to `FRESH_S` ago, or `SHARE` times as long as it takes to look, which in a large job is
        seconds. Blocks for some seconds at most, if other SMPs do not answer."""
        if not self._is_fresh() and self._lock.acquire(blocking=self._overview is None):
            try:  # the others are shown what there was: they would all wait for an SMP that does not answer
                if not self._is_fresh():
                    owner, began = self._smp.owner, time.monotonic()
                    self._overview = look(owner.job, owner.control)
                    now = time.monotonic()
                    self._fresh_until = now + max(FRESH_S, SHARE * (now - began))
            finally:
                self._lock.release()
        assert self._overview is not None
        return self._overview

    def _is_fresh(self) -> bool:
        return self._overview is not None and time.monotonic() <= self._fresh_until

    def pages(self) -> dict[str, Callable[[], tuple[str, bytes]]]:
        """What is there: by path, the content type and the body."""
        return {
            "/": lambda: ("text/html; charset=utf-8", page()),
            "/status.json": lambda: ("application/json", self._rendered(_status_json)),
            METRICS: lambda: ("text/plain; version=0.0.4; charset=utf-8", self._metrics()),
            "/healthz": lambda: ("text/plain; charset=utf-8", self._health()),
        }

    def _rendered(self, render: Callable[[Overview], bytes]) -> bytes:
        """Made once of each overview, however many ask."""
        overview = self.overview()
        known = self._bodies.get(render.__name__)
        if known is None or known[0] is not overview:
            known = self._bodies[render.__name__] = overview, render(overview)
        return known[1]

    def _health(self) -> bytes:
        """Of this SMP alone: no other is asked. Blocks for as long as it holds its own lock, so one that is stuck does
        not answer."""
        self._smp.inventory()
        return b"ok\n"

    def _metrics(self) -> bytes:
        """Some SMPs alone ask all others: all are scraped, and what each asks of each would grow with the square."""
        if sees_the_job(self._smp.inventory()):
            return self._rendered(self._metrics_of_job)
        return exposition(self._smp.owner.job, take_status(self._smp), None)

    def _metrics_of_job(self, overview: Overview) -> bytes:
        owner = self._smp.owner
        mine = next((status for status in overview.statuses if status.inventory.node == owner.node), None)
        return exposition(owner.job, mine or take_status(self._smp), overview)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _status_json(overview: Overview) -> bytes:
    return json.dumps(overview.to_json()).encode()


@cache
def page() -> bytes:
    """The page: it asks for ``/status.json`` by itself, and needs nothing else."""
    return resources.files(__package__).joinpath("page.html").read_bytes()


def is_local(host: str) -> bool:
    """Whether a request's Host header names this machine by address, or ``localhost``."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # a connection that finds no room waits for a second before it tries again

    def __init__(self, address: tuple[str, int], web: Web) -> None:
        self.web = web
        self._lock = threading.Lock()  # guards the requests that are open: of the serving thread and of theirs
        self._open: dict[int, Any] = {}
        super().__init__(address, _HttpRequest)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve at most `MAX_REQUESTS` at a time: the oldest gives way, for it may be one that says nothing."""
        with self._lock:
            for oldest in list(self._open)[: max(0, len(self._open) - MAX_REQUESTS + 1)]:
                with suppress(OSError):
                    self._open.pop(oldest).shutdown(socket.SHUT_RDWR)
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """It went away, as a rule."""
        log.debug("a request from %s failed", client_address, exc_info=True)


class _HttpRequest(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_DEADLINE_S
    protocol_version = "HTTP/1.1"  # who asks again uses the same connection, and the same thread
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        """As a GET, without the body: `http.server` leaves that out of errors by itself."""
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if refused := self._refused(path):
            self.send_error(HTTPStatus.FORBIDDEN, refused)
            return
        made = self.server.web.pages().get(path)
        if made is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            kind, body = made()
        except Exception:  # a bug: whoever asks shall see that it is one, and the SMP goes on
            log.exception("%s could not be made", path)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "see the log of this SMP")
            return
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refused(self, path: str) -> str:
        """Why that is not given to whoever asks; empty if it is."""
        if not ipaddress.ip_address(self.connection.getsockname()[0]).is_loopback:
            return "" if path == METRICS else f"only {METRICS} is to be had from other machines"
        return "" if is_local(self.headers.get("Host", "")) else "ask for 127.0.0.1 or localhost"

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
