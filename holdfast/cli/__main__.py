"""``holdfast`` and ``python -m holdfast.cli``."""

import signal
import sys


def main() -> int:
    """Run the command. Imports happen inside the ``try``, so that Ctrl-C ends it quietly from the beginning."""
    try:
        from holdfast.cli.main import main as run
        from holdfast.smp_daemon.shared.processes import open_standard_streams

        open_standard_streams()

        status = run()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all work is done: ignore a late Ctrl-C
    except KeyboardInterrupt:
        print("holdfast: ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


if __name__ == "__main__":
    sys.exit(main())
