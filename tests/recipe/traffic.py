"""The collectives of an optimizer step: what theory says, and what the recipe asks for.

Bytes are those that one rank sends in a ring, the least of any algorithm: (W−1)/W of the tensor for
a reduce-scatter or an all-gather, twice that for an all-reduce.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

import train_gpt
from bench.settings import Parameter, rows_of
from train_gpt import WORK_ORDER, ParamConfig

Table = dict[str, ParamConfig]


class Call(NamedTuple):
    """One collective of an optimizer step."""

    kind: str  # "reduce-scatter", "all-gather" or "all-reduce"
    sent: float  # bytes that one rank sends


def sent(kind: str, size: int, world_size: int) -> float:
    """Bytes that one rank of a ring sends; size: bytes of the tensor that every rank has whole."""
    return size * (world_size - 1) / world_size * (2 if kind == "all-reduce" else 1)


def padded_bytes(
    parameter: Parameter, row: ParamConfig, dtype: torch.dtype, world_size: int
) -> int:
    """Bytes of a parameter in dtype, with the padding of one whose rows do not divide."""
    rows = rows_of(parameter, row)
    n = len(rows)
    if row.may_pad and row.comms == "sharded":
        n += -n % world_size
    return rows[:1].numel() * n * dtype.itemsize


def expected_calls(
    parameters: dict[str, Parameter], table: Table, world_size: int, step: int, tied: bool
) -> dict[tuple[str, str], Call]:
    """Each collective of a step, in order, by label and "reduce" or "gather"."""
    calls = {}
    due = [label for label, row in table.items() if row.is_due(step)]
    active = [label for label in due if not (tied and table[label].tied_to)]
    for label in active:
        parameter, row = parameters[label], table[label]
        kind = "reduce-scatter" if row.comms == "sharded" else "all-reduce"
        dtype = torch.promote_types(parameter.dtype, row.grad_dtype or parameter.dtype)
        size = padded_bytes(parameter, row, dtype, world_size)
        calls[label, "reduce"] = Call(kind, sent(kind, size, world_size))
    for label in WORK_ORDER:
        if label in active and table[label].comms == "sharded":
            parameter = parameters[label]
            size = padded_bytes(parameter, table[label], parameter.dtype, world_size)
            calls[label, "gather"] = Call("all-gather", sent("all-gather", size, world_size))
    return calls


@contextmanager
def counted() -> Iterator[list[Call]]:
    """Within the block, the list grows by every collective that the recipe asks for."""
    calls: list[Call] = []

    def counting(kind: str, owner: object, name: str, whole: int):
        """A stand-in for owner.name; its argument `whole` is the tensor that every rank has whole."""
        function = getattr(owner, name)

        def call(*args, **options):
            calls.append(Call(kind, sent(kind, args[whole].nbytes, dist.get_world_size())))
            return function(*args, **options)

        return patch.object(owner, name, call)

    with (
        counting("reduce-scatter", train_gpt, "reduce_scatter", 1),
        counting("all-gather", train_gpt, "all_gather", 0),
        counting("all-reduce", dist, "all_reduce", 0),
    ):
        yield calls
