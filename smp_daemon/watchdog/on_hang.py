"""Runs the user's command when a trainer hangs, once per hang, without blocking the SMP."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.watchdog.liveness import WatchedTrainer

MOST_LOGGED = 4096

log = get_log(__name__)


class OnHang:
    """Runs a shell command for each hang, in a thread and a session of its own."""

    def __init__(self, command: str, job: str, node: str, deadline_s: float = 60.0) -> None:
        """`deadline_s`: timeout after which the command is killed, with its whole process group."""
        self._command = command
        self._names = {"HOLDFAST_JOB": job, "HOLDFAST_NODE": node}
        self._deadline_s = deadline_s

    def run(self, trainer: WatchedTrainer) -> None:
        """Run the command for a hang of `trainer`. Returns at once."""
        threading.Thread(target=self._run, args=(trainer,), name="on-hang", daemon=True).start()

    def _guard(self) -> list[str]:
        """A prefix that kills the command in time even if the SMP dies first; empty where there is no ``timeout``."""
        timeout = shutil.which("timeout")
        return [timeout, "-s", "KILL", f"{self._deadline_s + 1:.0f}"] if timeout else []

    def _run(self, trainer: WatchedTrainer) -> None:
        environment = {
            **os.environ,
            **self._names,
            "HOLDFAST_COORD": trainer.coord,
            "HOLDFAST_PID": str(trainer.pid),
            "HOLDFAST_PHASE": trainer.phase,
            "HOLDFAST_STEP": str(trainer.step),
        }
        try:
            process = subprocess.Popen(
                [*self._guard(), "/bin/sh", "-c", self._command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            log.error("the command for a hang of %s could not be run: %s", trainer.coord, error)
            return
        try:
            said, _ = process.communicate(timeout=self._deadline_s)
            text = said[:MOST_LOGGED].decode(errors="replace").strip()
            log.warning("the command for a hang of %s ended with %d: %s", trainer.coord, process.returncode, text)
        except subprocess.TimeoutExpired:
            log.error("the command for a hang of %s took over %.0f s and is killed", trainer.coord, self._deadline_s)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
