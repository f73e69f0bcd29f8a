"""What a run will take, said before it is known: GPU memory by its sizes, minutes by its first steps."""

import dataclasses
import itertools
from typing import Any

from torch import Tensor

# Bytes a token holds at the peak of a pass, for each unit of width. Besides, a token has bf16 logits.
# Measured on one H100 with record 70's recipe (records/2026-11-26-NVIDIA-H100-80GB-HBM3.md): 19.31 GiB
# in training with 49,152 tokens, 24.94 GiB in validation with 262,144.
TRAINING_BYTES = 418
VALIDATION_BYTES = 2
UNUSABLE = 0.1  # share of memory that the allocator cannot give, as its blocks have other sizes
GIB = 2**30


def plan(preset: str, batches: list[int], count: int, places: str) -> str:
    """What will happen. batches: tokens of each step; count, places: "1", "GPU"."""
    return (
        f"preset {preset}: {len(batches):,} steps, {sum(batches):,} tokens on {count} {places}"
        f"{'s'[: count > 1]}; the stream of tokens is the same on any number of {places}s, and so is "
        f"the loss, but for rounding"
    )


def minutes(batches: list[int], rate: float) -> str:
    """How long the rest will take. batches: tokens of each step to come; rate: tokens a second."""
    parts = []
    for tokens, steps in itertools.groupby(batches):
        count = len(list(steps))
        parts.append(f"{count * tokens / rate / 60:.1f} for {count:,} steps of {tokens:,} tokens")
    stages = f": {', '.join(parts)}; later stages by tokens, as their steps are not timed yet"
    return (
        f"about {sum(batches) / rate / 60:.1f} minutes of training left"
        f"{stages if len(parts) > 1 else ''} (validation, checkpoints and compiling not counted)"
    )


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
    count = 2 * h.micro_batches
    while fewer := _with_micro_batches(h, count, world_size):
        if memory(fewer, state, batch) <= usable:
            less = f"{memory(fewer, state, batch) / GIB:.1f} GiB"
            proposal = f"--micro_batches={count} needs about {less}, and cuts documents elsewhere"
            break
        count *= 2
    return f"GPU memory, estimated by tokens: {need}: {proposal}"


def _with_micro_batches(h: Any, count: int, world_size: int) -> Any:
    """These settings with another --micro_batches; None if they cannot run."""
    fewer = dataclasses.replace(h, micro_batches=count)
    try:
        fewer.check(world_size)
    except ValueError:
        return None
    return fewer
