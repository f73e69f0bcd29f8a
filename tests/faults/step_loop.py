"""A training script without a model: steps of 50 ms, with what train_gpt.py uses of runtime/ranks.py.

FAULT: Python that each step executes, with `step`, `ranks` and `signals`. It ends by that or a signal.
"""

import itertools
import os
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from runtime.ranks import RunError, Signals, Stopped, join_ranks, run_main  # noqa: F401

TRIED = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB."


def main() -> None:
    with Signals() as signals:
        ranks = join_ranks()
        signals.in_training = True
        for step in itertools.count():
            if ranks.first:
                print(f"step:{step}", flush=True)
            exec(os.environ.get("FAULT", ""))
            time.sleep(0.05)
            received = torch.tensor(signals.received)
            if ranks.world_size > 1:
                dist.all_reduce(received, op=dist.ReduceOp.MAX)
            if received:
                raise Stopped(f"stopped after step:{step}", 128 + int(received))


run_main(main)
