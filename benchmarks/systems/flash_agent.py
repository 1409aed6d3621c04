"""The part of DLRover's agent that Flash Checkpoint needs: a process that `benchmarks.systems.flash` starts."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from dlrover.python.common.multi_process import SOCKET_TMP_DIR
from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver

OUTLIVE_S = 30.0
"""How long the agent stays after its trainer died, as it must outlive the trainer but not stay forever."""


def main() -> None:
    """Serve until the trainer that started this process sends ``end``, or until `OUTLIVE_S` after its death."""
    AsyncCheckpointSaver.start_async_saving_ckpt()
    if sys.stdin.read() != "end":
        time.sleep(OUTLIVE_S)
    saver = AsyncCheckpointSaver.get_ckpt_saver()
    if saver is not None:
        saver.close()
    shutil.rmtree(Path(SOCKET_TMP_DIR) / os.environ["TORCHELASTIC_RUN_ID"])


if __name__ == "__main__":
    main()
