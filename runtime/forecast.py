"""The GPU memory that a run will take, estimated by its sizes before it starts."""

import dataclasses
import itertools
from contextlib import suppress
from typing import Any

from torch import Tensor

# Bytes a token holds at the peak of a pass, for each unit of width. Besides, a token has bf16 logits.
# Measured on one H100 with record 70's recipe (records/2026-11-26-NVIDIA-H100-80GB-HBM3.md): 19.31 GiB
# in training with 49,152 tokens, 24.94 GiB in validation with 262,144.
TRAINING_BYTES = 418
VALIDATION_BYTES = 2
UNUSABLE = 0.1  # share of memory that the allocator cannot give, as its blocks have other sizes
GIB = 2**30


def memory(h: Any, state: int, batch: int) -> int:
    """Bytes of a rank at its peak. state: of weights, gradients and optimizer; batch: tokens of the
    longest step. An estimate."""
    passes = ((batch, TRAINING_BYTES), (h.val_batch_tokens, VALIDATION_BYTES))
    logits = 2 * h.vocab_size
    return state + max(
        tokens // h.micro_batches * (logits + size * h.model_dim) for tokens, size in passes
    )


def state_bytes(manager: Any) -> int:
    """Of this rank's weights, their gradients, buffers and optimizer state."""
    weights = [*manager.model.parameters()]
    state = [x for own in manager.optimizer.state.values() for x in own.values()]
    held = [*weights, *weights, *manager.model.buffers(), *state]
    return sum(x.nbytes for x in held if isinstance(x, Tensor))


def advice(h: Any, manager: Any, batch: int, world_size: int, free: int) -> str:
    """If so many free bytes are too few: the --micro_batches that would do. Empty: they suffice."""
    state = state_bytes(manager)
    usable = (1 - UNUSABLE) * free
    if memory(h, state, batch) <= usable:
        return ""
    need = f"about {memory(h, state, batch) / GIB:.1f} GiB needed, {free / GIB:.1f} GiB free"
    proposal = "no --micro_batches needs so little"
    with suppress(ValueError):  # of a number that cannot run
        for i in itertools.count(1):
            fewer = dataclasses.replace(h, micro_batches=h.micro_batches << i)
            fewer.check(world_size)
            size = memory(fewer, state, batch)
            if size <= usable:
                less = f"{size / GIB:.1f} GiB, and cuts documents elsewhere"
                proposal = f"--micro_batches={fewer.micro_batches} needs about {less}"
                break
    return f"GPU memory, estimated by tokens: {need}: {proposal}"
