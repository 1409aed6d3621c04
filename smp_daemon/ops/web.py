"""Serves the state of an SMP over HTTP on loopback: a page, ``/status.json``, ``/metrics`` and ``/healthz``.

Read-only. A request is answered only if its Host header names loopback, so that no web page elsewhere can read the
state through a name that it controls (DNS rebinding). At an address off loopback, only the metrics are served.
"""

from __future__ import annotations

import ipaddress
import json
import math
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
from holdfast.smp_daemon.shared.addresses import LOOPBACK
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.sources import Address

METRICS = "/metrics"
REQUEST_DEADLINE_S = 5.0
"""How long a client may take to send its request, in seconds: it holds one of `MAX_REQUESTS` threads."""
MAX_REQUESTS = 32
FRESH_S = 1.0
"""Shortest time between two looks at the whole job, however many requests come."""

SHARE = 4.0
"""An overview is shown for this many times as long as it took to make: looking takes a fifth of the time at most."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
}

log = get_log(__name__)


def show(smp: Core, asked: Address | None) -> Web | None:
    """Serve the state of `smp` at `asked` or, if that is taken, where its predecessor did or on any port of loopback.

    Errors are not raised, since training does not depend on the page. They are logged and added to `Core.impaired`.

    Args:
        asked: see `shared.addresses.parse_http`; port 0: where the predecessor did, or on any port; None: nowhere.
    """
    if asked is None:
        smp.record_http_address(LOOPBACK, 0)
        return None
    before = smp.owner.http_host, smp.owner.http_port
    places = [*([asked] if asked[1] else []), *([before] if before[1] else []), (LOOPBACK, 0)]
    problem = ""
    for place in places:
        try:
            web = Web(smp, *place)
        except (OSError, RuntimeError) as error:  # `RuntimeError`: no thread can be started
            problem = problem or f"{place[0]}:{place[1]} ({getattr(error, 'strerror', None) or error})"
            continue
        smp.record_http_address(place[0], web.port)
        if asked[1] and place != asked:
            url = smp.owner.url
            smp.impair(
                f"the page and /metrics are served at {url}, not at {problem}. "
                "Free that address, or change HOLDFAST_HTTP"
            )
        return web
    smp.record_http_address(LOOPBACK, 0)
    smp.impair(f"no page and no /metrics: cannot serve at {problem}")
    return None


class Web:
    """The HTTP server. It runs in its own threads until `close`."""

    def __init__(self, smp: Core, host: str = LOOPBACK, port: int = 0) -> None:
        """Serve on `port` of `host`; 0: any free one. Raises `OSError` if it is taken."""
        self._smp = smp
        # Held for seconds by the one thread that looks at the job. Meanwhile the other threads show the last overview,
        # and wait only if there is none. They read `_overview` without the lock: it is replaced as a whole.
        self._lock = threading.Lock()
        self._overview: Overview | None = None
        self._fresh_until = -math.inf
        self._bodies: dict[str, tuple[Overview, bytes]] = {}
        self._server = _Server((host, port), self)
        try:
            threading.Thread(target=self._server.serve_forever, name="web", daemon=True).start()
        except RuntimeError:
            self._server.server_close()
            raise

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def overview(self) -> Overview:
        """The job at most `FRESH_S` ago, or `SHARE` times as long ago as a look takes, which is seconds in a large job.

        Blocks for some seconds at most, if other SMPs do not answer.
        """
        if time.monotonic() > self._fresh_until and self._lock.acquire(blocking=self._overview is None):
            try:  # other threads show the last overview, or all would wait for an SMP that does not answer
                if time.monotonic() > self._fresh_until:
                    owner, began = self._smp.owner, time.monotonic()
                    self._overview = look(owner.job, owner.control)
                    now = time.monotonic()
                    self._fresh_until = now + max(FRESH_S, SHARE * (now - began))
            finally:
                self._lock.release()
        assert self._overview is not None
        return self._overview

    def pages(self) -> dict[str, Callable[[], tuple[str, bytes]]]:
        """For each path, a function that returns the content type and the body."""
        return {
            "/": lambda: ("text/html; charset=utf-8", page()),
            "/status.json": lambda: (
                "application/json",
                self._rendered("/status.json", lambda job: json.dumps(job.to_json()).encode()),
            ),
            METRICS: lambda: ("text/plain; version=0.0.4; charset=utf-8", self._metrics()),
            "/healthz": lambda: ("text/plain; charset=utf-8", self._health()),
        }

    def _rendered(self, path: str, render: Callable[[Overview], bytes]) -> bytes:
        """Render the overview, once for all requests that get the same one."""
        overview = self.overview()
        if path not in self._bodies or self._bodies[path][0] is not overview:
            self._bodies[path] = overview, render(overview)
        return self._bodies[path][1]

    def _health(self) -> bytes:
        """Whether this SMP works; no other is asked. It takes the store's lock, so a stuck SMP does not answer."""
        self._smp.inventory()
        return b"ok\n"

    def _metrics(self) -> bytes:
        """Only some SMPs ask all others. If every scraped one did, requests would grow as the square of the nodes."""
        if sees_the_job(self._smp.inventory()):
            return self._rendered(METRICS, self._metrics_of_job)
        return exposition(self._smp.owner.job, take_status(self._smp), None)

    def _metrics_of_job(self, overview: Overview) -> bytes:
        owner = self._smp.owner
        mine = next((status for status in overview.statuses if status.inventory.node == owner.node), None)
        return exposition(owner.job, mine or take_status(self._smp), overview)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


@cache
def page() -> bytes:
    """The page. It requests ``/status.json`` and nothing else."""
    return resources.files(__package__).joinpath("page.html").read_bytes()


def is_local(host: str) -> bool:
    """Whether a Host header names ``localhost`` or a loopback address."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # a client that finds the queue full tries again only after a second

    def __init__(self, address: tuple[str, int], web: Web) -> None:
        self.web = web
        self._lock = threading.Lock()  # guards `_open`, which the serving thread and the request threads change
        self._open: dict[int, Any] = {}
        super().__init__(address, _HttpRequest)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve at most `MAX_REQUESTS` at a time. A new one replaces the oldest, whose client may be silent."""
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
        """Log an error; usually the client has gone away."""
        log.debug("a request from %s failed", client_address, exc_info=True)


class _HttpRequest(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_DEADLINE_S
    protocol_version = "HTTP/1.1"  # a client reuses its connection, and thus its thread
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        """Like GET, but without the body. `http.server` already omits the body of errors."""
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
        except Exception:  # a bug: report it to the client, and keep serving
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
        """Why this client may not read `path`; empty if it may."""
        if not ipaddress.ip_address(self.connection.getsockname()[0]).is_loopback:
            return "" if path == METRICS else f"only {METRICS} is to be had from other machines"
        return "" if is_local(self.headers.get("Host", "")) else "ask for 127.0.0.1 or localhost"

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
