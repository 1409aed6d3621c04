"""``python -m holdfast.chaos.loops.worker FD``: runs the seeds that come over a socket, a line each; answers them."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys

from holdfast.chaos.loops.trial import PR_SET_PDEATHSIG, Trials


def main() -> None:
    """Until the socket closes. It dies with the process that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    channel = socket.socket(fileno=int(sys.argv[1]))
    with Trials() as trials, channel.makefile("r") as orders:
        for line in orders:
            try:
                channel.sendall(trials.result(int(line)).write().encode() + b"\n")
            except BrokenPipeError:
                return  # nobody wants to know any more


if __name__ == "__main__":
    main()
