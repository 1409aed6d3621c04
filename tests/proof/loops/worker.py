"""``python -m tests.proof.loops.worker FD``: reads seeds from a socket, one per line, and answers with results."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys

from tests.proof.loops.trial import PR_SET_PDEATHSIG, Trials


def main() -> None:
    """Answer until the socket is closed. The process is terminated when the one that started it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` blocks end what was started
    channel = socket.socket(fileno=int(sys.argv[1]))
    with Trials() as trials, channel.makefile("r") as orders:
        for line in orders:
            try:
                channel.sendall(trials.result(int(line)).write().encode() + b"\n")
            except BrokenPipeError:
                return  # nobody reads the results any more


if __name__ == "__main__":
    main()
