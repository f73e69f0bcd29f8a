"""What the process that run_ranks forks has imported, found and set aside, so that no rank does it again."""

import gc

gc.disable()

import numpy.random  # noqa: F401, E402
import pytest  # noqa: F401, E402
import torch.distributed  # noqa: F401, E402

import common  # noqa: E402

common.train_gpt.SOURCES.imported()
gc.freeze()
gc.enable()
