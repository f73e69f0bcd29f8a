"""Tail averages: a run ends on averages of its late weights.

Late weights swing around what they tend to. Their mean lies nearer to it, as after a decay of the rate, and costs no step.
While a run is in its tail, each rank keeps exponential averages of the rows that it owns, in fp32 or better. After the last
step the weights go to them, all the way or in part. A mean is shorter than what it is made of, so embed, lm_head and the banks
then get back the Frobenius norm that they had. Training itself is the same with and without.

From public record 92 of github.com/KellerJordan/modded-nanogpt (39.9 s, 1,194 steps): 20 millinats there, 3.8 of 34 s.

The averages are state of the optimizer: in checkpoints, for any number of ranks, from the start of the run. They are 0 until
the tail begins. What the last step leaves is the averaged weights: so they are what the final validation sees, the final
checkpoint holds, and a finished run that is resumed starts from; nothing is averaged twice. The unaveraged ones are gone.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from triton_kernels import fused_on_gpu, join_mantissa, split_mantissa


class Tail(NamedTuple):
    """One average of a parameter's late weights. Times are fractions of the run's steps."""

    label: str
    window: float  # how long before the end it begins
    memory: float  # in this time a weight's share falls to 1/e; at least a step
    every: int  # steps between ticks, counted back from the last one; 2 is each update of Adam
    blend: tuple[float, ...] = (1.0,)  # how far the weights go to it; repeats over the bank's matrices
    keep_norm: bool = True  # of the whole parameter, if one of its rows has it

    def keep(self, step: int, total: int) -> float | None:
        """What the average keeps of itself when it takes in the weights after `step`: 0 at the first tick, which copies.
        None: no tick."""
        window, memory = max(1, round(self.window * total)), max(1.0, self.memory * total)
        left = total - 1 - step
        if left >= window or left % self.every:
            return None
        return (1 - 1 / memory) ** self.every if left + self.every < window else 0.0

    def ticks(self, step: int, total: int) -> int:
        """How many there are before `step`."""
        return sum(self.keep(earlier, total) is not None for earlier in range(step))


LONG, SHORT = 298 / 1194, 250 / 1194  # windows
SLOW, FAST = 149.5 / 1194, 51.5 / 1194  # memories: of rates 2/299 a step, 4/53 in four steps
# The weights go to a parameter's averages in the order of its rows. With the slow one after the fast one, V, O and the MLP
# end on 0.65 of their fast average and 0.35 of the slow one; Q and K have the slow one alone.
TAIL_TABLE = (
    Tail("lm_head",      LONG,  SLOW, every=2, blend=(0.65,)),
    Tail("embed",        LONG,  SLOW, every=2, blend=(0.65,)),
    Tail("value_embeds", SHORT, FAST, every=2, keep_norm=False),
    Tail("attn",         SHORT, FAST, every=4, blend=(0, 0, 1, 1)),  # Q, K, V, O
    Tail("attn",         LONG,  SLOW, every=4, blend=(0.55, 0.55, 0.35, 0.35)),
    Tail("mlp",          SHORT, FAST, every=4),
    Tail("mlp",          LONG,  SLOW, every=4, blend=(0.35,)),
)  # fmt: skip


def initial_averages(label: str, table: tuple[Tail, ...], rows: Tensor) -> dict[str, Tensor]:
    """State of one rank's rows of a parameter: average_1, average_2, … in fp32, or fp64 for fp64; zeros."""
    count, dtype = sum(tail.label == label for tail in table), torch.promote_types(rows.dtype, torch.float32)
    return {f"average_{i}": torch.zeros_like(rows, dtype=dtype) for i in range(1, count + 1)}


def full_precision(rows: Tensor, mantissa: Tensor | None) -> Tensor:
    """The weights in fp32, or fp64 for fp64; a bf16 bank has its lower halves in mantissa."""
    if mantissa is not None:
        return join_mantissa(rows, mantissa)
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


@fused_on_gpu
def average_update(rows: Tensor, mantissa: Tensor | None, average: Tensor, keep: Tensor) -> None:
    """One tick of an average, in place; keep: 0-dim on the CPU. Not lerp: its bits depend on an element's place."""
    weights = full_precision(rows, mantissa)
    average.copy_(weights + (average - weights) * keep)


class TailAverages:
    """The averages of a run's weights, in the state of its optimizer. An empty table: there are none."""

    def __init__(self, optimizer: Any, table: tuple[Tail, ...], total: int, split_step: int = 0):
        """optimizer: a NorMuonAndAdam, whose state gets them. total: steps of the run; with the update of split_step ties end.
        Raises ValueError for a row of the table that cannot be meant."""
        self.optimizer, self.total, self.tails = optimizer, total, {}
        for tail in table:
            label = tail.label
            if label not in optimizer.params:
                raise ValueError(f"TAIL_TABLE: there is no parameter {label!r}")
            if not (0 < tail.window <= 1 and 0 < tail.memory and tail.every >= 1):
                raise ValueError(f"TAIL_TABLE, {label}: window must be above 0 and at most 1, memory and every positive")
            optimizer.state[label] |= initial_averages(label, table, optimizer.shards[label])
            names = self.tails.setdefault(label, {})
            names[f"average_{len(names) + 1}"] = tail
        for label, name, tail in ((x, name, tail) for x, tails in self.tails.items() for name, tail in tails.items()):
            if (other := optimizer.table[label].tied_to) and tail.ticks(split_step, total):
                its = self.tails.get(other, {}).get(name)
                if its is None or (its.window, its.memory, its.every) != (tail.window, tail.memory, tail.every):
                    fault = f"TAIL_TABLE, {label}: begins while it is {other}'s, and goes on from {other}'s average"
                    raise ValueError(f"{fault}: give {other} the same window, memory and every, or a window from the split on")

    def ticks(self, step: int) -> dict[str, int]:
        """How many weights each average takes in before `step`, by the table."""
        return {
            f"weights into {label}.{name}": tail.ticks(step, self.total)
            for label, tails in self.tails.items() for name, tail in tails.items()
        }  # fmt: skip

    @torch.no_grad()
    def after_step(self, step: int) -> str:
        """Take in the weights after `step`, where that is due. After the last one, end on the averages, and say so."""
        for label, tails in self.tails.items():
            rows, state = self.optimizer.shards[label], self.optimizer.state[label]
            for name, tail in tails.items():
                if (keep := tail.keep(step, self.total)) is not None:
                    average_update(rows, state.get("mantissa"), state[name], torch.tensor(keep, dtype=torch.float64))
        if step != self.total - 1 or not self.tails:
            return ""
        return f"tail averages: {'; '.join(self._end(label) for label in self.tails)}"

    def _end(self, label: str) -> str:
        """Move a parameter's weights to its averages, on all ranks, and say how."""
        optimizer, tails = self.optimizer, self.tails[label]
        rows, state, own = optimizer.shards[label], optimizer.state[label], optimizer.own_rows[label]
        weights = full_precision(rows, state.get("mantissa"))
        before = self._norm(label, weights)
        for name, tail in tails.items():
            blend = [tail.blend[i % len(tail.blend)] for i in range(own.start, own.stop)]
            blend = torch.tensor(blend, dtype=weights.dtype, device=weights.device).view(-1, *[1] * (weights.dim() - 1))
            weights = weights + (state[name] - weights) * blend
        said = f"{label} of {' and '.join(str(tail.ticks(self.total, self.total)) for tail in tails.values())} steps' weights"
        if any(tail.keep_norm for tail in tails.values()) and (after := self._norm(label, weights)):
            weights = weights * (before / after)
            said += f", norm × {before / after:.4f}"
        if "mantissa" in state:
            upper, lower = split_mantissa(weights)
            rows.copy_(upper)
            state["mantissa"].copy_(lower)
        else:
            rows.copy_(weights)
        if work := optimizer._launch_gather(label):
            work.wait()
        return said

    def _norm(self, label: str, weights: Tensor) -> float:
        """The Frobenius norm of a whole parameter, of which this rank has these rows, in fp64. The squares of each row of a
        matrix are summed where it lies, and then all these sums in one order: the same bits for any number of ranks."""
        optimizer, squares = self.optimizer, torch.linalg.vector_norm(weights, dim=-1, dtype=torch.float64).square()
        if optimizer.world_size > 1 and optimizer.table[label].comms == "sharded":
            own, squares = squares, squares.new_zeros(optimizer.num_rows(label), *squares.shape[1:])
            squares[optimizer.own_rows[label]] = own
            dist.all_reduce(squares)  # of each number all ranks but one have 0
        return squares.sum().sqrt().item()
