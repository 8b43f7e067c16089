"""A capture in a process of its own, one row a shard: to be killed, or to be one of several ranks.

`python -m capture_job DIRECTORY [SECONDS]` waits SECONDS before every shard is written.
"""

import sys
import time
from pathlib import Path

import torch
from training import chat_target, random_rows

from headstart.data import store_job, store_writer
from headstart.data.capture import capture
from headstart.data.rows import RowsMeta

ROWS, META = random_rows(24, seed=5), RowsMeta("", "t", {})


def main(directory: Path, pause: float = 0.0) -> None:
    """Capture ROWS; with a pause, kills at random moments meet shards half made."""
    torch.set_num_threads(1)
    store_job.SHARD_ROWS = 1
    ours = store_writer.write_shard

    def slowly(*arguments: object) -> None:
        time.sleep(pause)
        ours(*arguments)

    store_writer.write_shard = slowly
    capture(chat_target(), ROWS, directory, meta=META, taps=[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
