"""What travels between the ranks in an optimizer step, who does how much of the work, and what each rank holds.

    python bench/communication.py [--world_sizes=2,4,8,16] [any option of the trainer]     # markdown tables, from theory

`sent` and `expected_calls` are the theory; `counted` counts what the optimizer asks the process group for, and
tests/recipe/test_ranks.py compares the two, call by call. Bytes are those that one rank sends in a ring, the least of any
algorithm: (W−1)/W of the tensor for a reduce-scatter or an all-gather, twice that for an all-reduce.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch")

from launch.console import Parser, numbers_between, until_reader_leaves  # before PyTorch: launch tells its threads how to wait

import torch
import torch.distributed as dist
from torch import Tensor

import train_gpt
from bench.settings import model_of, trainer_settings
from tail_averages import TAIL_TABLE, Tail, initial_averages
from train_gpt import WORK_ORDER, Hyperparameters, NorMuon, ParamConfig, param_table

# -----------------------------------------------------------------------------
# Theory


class Call(NamedTuple):
    """One collective of an optimizer step."""

    kind: str  # "reduce-scatter", "all-gather" or "all-reduce"
    sent: float  # bytes that one rank sends


class Parameter(NamedTuple):
    """What the theory needs to know of one."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def sent(kind: str, size: int, world_size: int) -> float:
    """Bytes that one rank of a ring sends, for a tensor of `size` bytes that is whole on every rank before or after."""
    return size * (world_size - 1) / world_size * (2 if kind == "all-reduce" else 1)


def rows_of(parameter: Parameter, config: ParamConfig) -> Tensor:
    """What the ranks share out, without memory: embeddings' rows, or a bank's matrices (n, rows, cols)."""
    return config.as_rows(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))


def padded_bytes(parameter: Parameter, config: ParamConfig, dtype: torch.dtype, world_size: int) -> int:
    """Bytes of a parameter in dtype, with the padding that makes the rows of a sharded one divide over the ranks."""
    rows = rows_of(parameter, config)
    n = len(rows)
    if config.may_pad and config.comms == "sharded":
        n += -n % world_size
    return rows[:1].numel() * n * dtype.itemsize


def expected_calls(
    parameters: dict[str, Parameter], table: dict[str, ParamConfig], world_size: int, do_adam: bool, tied: bool
) -> dict[tuple[str, str], Call]:
    """Each collective of a step, in its order, by label and "reduce" or "gather": every parameter once, none twice."""
    active = [label for label, row in table.items() if (do_adam or row.every_step) and not (tied and row.tied_to)]
    calls = {}
    for label in active:
        parameter, config = parameters[label], table[label]
        kind = "reduce-scatter" if config.comms == "sharded" else "all-reduce"
        dtype = torch.promote_types(parameter.dtype, config.grad_dtype or parameter.dtype)
        calls[label, "reduce"] = Call(kind, sent(kind, padded_bytes(parameter, config, dtype, world_size), world_size))
    for label in WORK_ORDER:
        if label in active and table[label].comms == "sharded":
            size = padded_bytes(parameters[label], table[label], parameters[label].dtype, world_size)
            calls[label, "gather"] = Call("all-gather", sent("all-gather", size, world_size))
    return calls


# -----------------------------------------------------------------------------
# Counting


@contextmanager
def counted() -> Iterator[list[Call]]:
    """Within the block, the list grows by every tensor collective that the trainer asks for, in its order."""
    calls: list[Call] = []

    def counting(kind: str, owner: object, name: str, whole: int):
        """A stand-in for owner.name, whose argument number `whole` is the tensor that every rank has whole."""
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


# -----------------------------------------------------------------------------
# Tables


def model_parameters(h: Hyperparameters) -> dict[str, Parameter]:
    with torch.device("meta"):
        model = model_of(h, 1)
    if h.dtype == "float32":
        model.float()
    return {label: Parameter(tuple(param.shape), param.dtype) for label, param in model.named_parameters()}


def markdown(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    def text(cell: object) -> str:
        return f"{cell:,.{2 if cell == 0 or abs(cell) >= 0.01 else 5}f}" if isinstance(cell, float) else str(cell)

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(map(text, cells)) + " |"

    head = list(head)
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def traffic_table(parameters: dict[str, Parameter], h: Hyperparameters, world_sizes: list[int]) -> str:
    """Megabytes that a rank sends in a step: by parameter, then by kind of step, then what other layouts would send."""
    table, baseline = param_table(h), param_table(Hyperparameters(**{**vars(h), "comms": "replicated"}))
    whole = {W: expected_calls(parameters, table, W, True, False) for W in world_sizes}
    names = {label: f"{label} {'×'.join(map(str, parameter.shape))}" for label, parameter in parameters.items()}

    def total(rows: dict[str, ParamConfig], W: int, do_adam: bool, tied: bool) -> float:
        return sum(call.sent for call in expected_calls(parameters, rows, W, do_adam, tied).values()) / 1e6

    def banks(W: int) -> float:
        """Bytes of all bank matrices in bf16, in which Polar Express takes them."""
        return sum(torch.Size(parameters[label].shape).numel() * 2 for label in banks_of(table)) / 1e6

    kinds = {"NorMuon alone (even steps)": (False, True), "with Adam, tied": (True, True), "with Adam, split": (True, False)}
    rows = [
        [names[label], *(sum(whole[W][label, phase].sent for phase in ("reduce", "gather") if (label, phase) in whole[W]) / 1e6
                         for W in world_sizes)]
        for label in table
    ]  # fmt: skip
    rows += [[f"**{kind}**", *(total(table, W, *how) for W in world_sizes)] for kind, how in kinds.items()]
    rows += [[f"all-reduce: {kind}", *(total(baseline, W, *how) for W in world_sizes)] for kind, how in kinds.items()]
    rows.append(["split matrices would add: updates to all", *(banks(W) * (W - 1) / W for W in world_sizes)])
    rows.append(["or: to one rank each, and back", *(2 * banks(W) * (W - 1) / W**2 for W in world_sizes)])
    return markdown(["MB sent by a rank", *(f"W = {W}" for W in world_sizes)], rows)


def banks_of(table: dict[str, ParamConfig]) -> list[str]:
    """What Polar Express orthogonalises."""
    return [label for label, row in table.items() if isinstance(row, NorMuon)]


def polar_express_flops(rows: int, cols: int) -> int:
    """Of one step on a matrix: the Gram matrix, its square, and the product with the matrix, each multiply-add as two."""
    large, small = max(rows, cols), min(rows, cols)
    return 2 * small * small * large + 2 * small**3 + 2 * small * small * large


def balance_table(parameters: dict[str, Parameter], table: dict[str, ParamConfig], world_sizes: list[int]) -> str:
    """Matrices and orthogonalisation work of the busiest rank, by the same rule for padding as the optimizer's."""
    rows = []
    banks = banks_of(table)
    for W in world_sizes:
        work, shares, padding = [0] * W, [], []
        total = 0
        for label in banks:
            n, height, width = rows_of(parameters[label], table[label]).shape
            share = -(-n // W)
            front = share * W - n if table[label].pad_front else 0
            flops = polar_express_flops(height, width)
            for place in range(front, front + n):  # in the padded bank
                work[place // share] += flops
            total += n * flops
            shares.append(str(share))
            padding.append(f"{n} → {share * W}" if share * W > n else f"{n}")
        rows.append([W, *padding, " + ".join(shares), f"{max(work) / (total / W):.2f}", work.count(0)])
    head = ["W", *banks, "matrices a rank, at most", "busiest rank's work / ideal", "idle ranks"]
    return markdown(head, rows)


def state_bytes(
    label: str, parameter: Parameter, config: ParamConfig, world_size: int = 1, tails: tuple[Tail, ...] = ()
) -> int:  # fmt: skip
    """Bytes of a parameter's optimizer state on the rank that has the most; tails: the table of averages."""
    rows = rows_of(parameter, config)
    share = rows[: -(-len(rows) // world_size)] if config.comms == "sharded" else rows
    state = config.initial_state(share) | initial_averages(label, tails, share)
    return sum(x.nbytes for x in state.values() if isinstance(x, Tensor))


def memory_table(parameters: dict[str, Parameter], h: Hyperparameters, world_sizes: list[int]) -> str:
    """Megabytes of optimizer state on the fullest rank: fp32 moments, NorMuon's second a number a row; mantissas of bf16;
    fp32 averages, if the settings want them."""
    tails = TAIL_TABLE if h.tail_averages else ()

    def total(table: dict[str, ParamConfig], W: int) -> float:
        return sum(state_bytes(label, parameters[label], row, W, tails) for label, row in table.items()) / 1e6

    rows = []
    for comms in ("sharded", "replicated"):
        table = param_table(Hyperparameters(**{**vars(h), "comms": comms}))
        rows.append([comms, *(total(table, W) for W in world_sizes)])
    return markdown(["MB of state on a rank", *(f"W = {W}" for W in world_sizes)], rows)


def refused(h: Hyperparameters, world_size: int) -> list[str]:
    """Labels that cannot be sharded over so many ranks: their rows do not divide, and only banks are padded."""
    parameters, rows = model_parameters(h), param_table(h).items()
    fixed = [(label, config) for label, config in rows if config.comms == "sharded" and not config.may_pad]
    return [label for label, config in fixed if len(rows_of(parameters[label], config)) % world_size]


def main() -> None:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world_sizes", type=numbers_between(1, 2**16), default=[2, 4, 8, 16])
    args, options = parser.parse_known_args()
    if {"-h", "--help"} & {*options}:
        print(__doc__)  # then the trainer's
    h, world_sizes = trainer_settings(options, preset="record"), args.world_sizes
    for W in world_sizes:
        if undivided := refused(h, W):
            print(f"Training refuses {W} ranks today: the rows of {', '.join(undivided)} do not divide among them.\n")
    parameters = model_parameters(h)
    print(traffic_table(parameters, h, world_sizes), "\n")
    print(memory_table(parameters, h, [1, *world_sizes]), "\n")
    print(balance_table(parameters, param_table(h), sorted({8, 16, 24, 32, 48, 64, *world_sizes})))


if __name__ == "__main__":
    with until_reader_leaves():
        main()
