"""Headless Chromium, controlled over a pipe. Shows pages as on a phone, in dark mode, or with impaired colour
vision."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast import DeadlineExceeded, HoldfastError
from tests.deadlines import DEADLINE_S

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
TYPICAL = "none"
SIGHTS = (TYPICAL, "protanopia", "deuteranopia", "tritanopia")
"""Kinds of colour vision that Chromium can emulate."""


class Browser:
    """One page of one browser. Calls block until there is an answer, for up to `DEADLINE_S`."""

    def __init__(self, home: Path) -> None:
        """`home`: an empty directory for the browser's data."""
        assert CHROMIUM is not None, "skip the test where there is no browser"
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={home}", "about:blank"]
        # The browser reads descriptor 3 and writes to 4. Our pipes may have these numbers, so both are moved first.
        moved = f"exec {{a}}<&{theirs_in} {{b}}>&{theirs_out}; exec 3<&$a 4>&$b"
        self._process = subprocess.Popen(
            ["bash", "-c", f'{moved}; exec "$@"', "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread = b""
        self._asked = 0
        self._session: str | None = None
        [page] = [each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; return its result."""
        self._asked += 1
        message: dict[str, Any] = {"id": self._asked, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._hear()).get("id") != self._asked:
            pass  # events are ignored
        if "error" in answer:
            raise HoldfastError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _hear(self) -> dict[str, Any]:
        limit = time.monotonic() + DEADLINE_S
        while b"\0" not in self._unread:
            if not select.select([self._in], [], [], max(0.0, limit - time.monotonic()))[0]:
                raise DeadlineExceeded("the browser said nothing")
            more = os.read(self._in, 1 << 16)
            if not more:
                raise HoldfastError(f"the browser has ended, status {self._process.wait(DEADLINE_S)}")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def run(self, script: str) -> Any:
        """The value of an expression in the page, or of the promise that it returns."""
        done = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise HoldfastError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def open(self, address: str, ready: str) -> None:
        """Load a page, and block until the expression `ready` is true in it."""
        self.ask("Page.navigate", url=address)
        limit = time.monotonic() + DEADLINE_S
        look = f"new Promise(done => setTimeout(() => done(document.readyState === 'complete' && !!({ready})), 50))"
        while not self.run(look):
            if time.monotonic() > limit:
                raise DeadlineExceeded(f"{address} did not become ready: {ready}")

    def resize(self, width: int, *, phone: bool = False) -> None:
        """Set the width of the screen in CSS pixels; a phone has two device pixels for each."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def see(self, *, dark: bool = False, sight: str = TYPICAL) -> None:
        """Emulate dark mode, and one of `SIGHTS`."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Emulation.setEmulatedVisionDeficiency", type=sight)

    def picture(self, target: Path) -> Path:
        """Save the whole page as a PNG, whatever its length; return the path."""
        width, height = self.run("[innerWidth, document.documentElement.scrollHeight]")
        all_of_it = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=all_of_it)
        target.write_bytes(base64.b64decode(taken["data"]))
        return target

    def close(self) -> None:
        """End the browser and all its processes."""
        for pipe in (self._out, self._in):
            os.close(pipe)
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            raise


@contextmanager
def browser(home: Path) -> Iterator[Browser]:
    """A browser for a ``with`` block."""
    opened = Browser(home)
    try:
        yield opened
    finally:
        opened.close()
