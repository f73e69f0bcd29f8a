"""The same run on any number of ranks: whole small trainings on gloo, and what travels between the
ranks."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import train_gpt
import triton_kernels
from common import (
    TOLERANCE64, U16, U32, add_gradients, normal, parameters_of, short_schedule, tiny_gpt,
    tiny_settings, unequal,
)  # fmt: skip
from runtime.ranks import Ranks, Signals
from train_gpt import (
    PARAM_TABLE, WORK_ORDER, Hyperparameters, NorMuonAndAdam, TrainingManager, UpdateArgs, param_table,
)  # fmt: skip

SHARDED = [label for label, row in PARAM_TABLE.items() if row.comms == "sharded"]

# Six steps, two, one and one in the stages and two more: Adam at odd ones, the split after step 3,
# embed's own life at step 5.
STEPS = 6
SMALL = dict(
    model_dim=16, num_heads=4, head_dim=4, num_scheduled_iterations=4, momentum_warmup=3,
    momentum_cooldown=2, micro_batches=8, batch_unit=16, val_every=3, val_tokens=512, fp8_head=True,
    val_batch_tokens=256, fp8_mlp=True,
)  # fmt: skip
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {  # (in fp64, settings)
    "fp64": (True, dict()),
    "fp64, replicated": (True, dict(comms="replicated")),
    # On 16 ranks attn has 48 matrices instead of 40, mlp 32 instead of 24.
    "fp64, padded": (True, dict(micro_batches=16, batch_unit=32)),
    "bf16": (False, dict(dtype="bfloat16", micro_batches=2)),
    "bf16, wide gradients": (False, dict(dtype="bfloat16", micro_batches=2, grad_dtype="float32")),
}
ON_RANKS = {
    2: ["fp64", "fp64, replicated", "bf16", "bf16, wide gradients"],
    4: ["fp64"],
    8: ["fp64"],
    16: ["fp64, padded"],
}


def runs_of(kind: str) -> Any:
    """Parametrize over the runs on several ranks whose name holds this; 8 and more are slow."""
    found = []
    for world_size, names in ON_RANKS.items():
        for name in names:
            if kind in name:
                marks = [pytest.mark.slow] if world_size >= 8 else []
                found.append(pytest.param(name, world_size, marks=marks))
    return pytest.mark.parametrize("variant, world_size", found)


# -----------------------------------------------------------------------------
# Whole runs


def settings_of(data: Path, world_size: int, name: str) -> Hyperparameters:
    changes = SMALL | VARIANTS[name][1] | {"run_id": re.sub(r"\W+", "_", name)}
    return tiny_settings(data, data / f"ranks{world_size}", **changes)


def whole_runs(rank: int, world_size: int, data: Path) -> dict[str, Any]:
    """A training run of each variant: the processes start once."""
    return {name: whole_run(rank, world_size, data, name) for name in ON_RANKS[world_size]}


def whole_run(rank: int, world_size: int, data: Path, name: str) -> dict[str, Any]:
    """train(), as main calls it: what this rank saw, and what it ends with."""
    in_fp64, _ = VARIANTS[name]
    h = settings_of(data, world_size, name)
    gradient_sizes, traffic, managers = [], [], []
    build = train_gpt.build
    warm_up = train_gpt.warm_up
    quantize = triton_kernels.quantize_fp8

    def build_recorded(*args) -> TrainingManager:
        manager = build(*args)
        if in_fp64:
            manager = TrainingManager(manager.model.double(), h)
        managers.append(manager)
        step_optimizer = manager.optimizer.step

        def step_counted(step: int, *rates: float) -> None:
            tied = manager.optimizer.tied
            with counted() as calls:
                step_optimizer(step, *rates)
            traffic.append((step, tied, calls))

        manager.optimizer.step = step_counted
        return manager

    def warm_up_forgotten(*args) -> None:
        if world_size == 2 and name == "fp64":  # once is enough
            warm_up(*args)
        gradient_sizes.clear()
        traffic.clear()

    def quantize_recorded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float8_e5m2:
            gradient_sizes.append(x.abs().max().item())
        return quantize(x, scale, dtype)

    with (
        patch.object(train_gpt, "build", build_recorded),
        patch.object(train_gpt, "warm_up", warm_up_forgotten),
        patch.object(triton_kernels, "quantize_fp8", quantize_recorded),
    ):
        train_gpt.train(h, Ranks(rank, world_size, torch.device("cpu")), Signals())
    manager = managers[-1]
    optimizer = manager.optimizer
    return dict(
        gradient_sizes=gradient_sizes,
        traffic=traffic,
        params=parameters_of(manager.model),
        tied=optimizer.tied,
        state=optimizer.state,
    )


Runs = Callable[[int], dict[str, list[dict]]]


@pytest.fixture(scope="module")
def runs(run_ranks, shards: Path) -> Runs:
    """runs(world_size)[variant]: what whole_run returned on each rank; each is run once."""

    class Alone(dict):
        def __missing__(self, name: str) -> list[dict]:
            self[name] = [whole_run(0, 1, shards, name)]
            return self[name]

    cache: dict[int, dict[str, list[dict]]] = {1: Alone()}

    def get(world_size: int) -> dict[str, list[dict]]:
        if world_size not in cache:
            results = run_ranks(world_size, whole_runs, shards)
            cache[world_size] = {name: [result[name] for result in results] for name in results[0]}
        return cache[world_size]

    return get


def gradient_sizes(ranks: list[dict]) -> list[float]:
    """One for each micro-batch, in the order of the step: rank by rank, its own."""
    by_rank = [iter(rank["gradient_sizes"]) for rank in ranks]
    count = len(ranks[0]["gradient_sizes"]) // STEPS
    return [next(sizes) for _ in range(STEPS) for sizes in by_rank for _ in range(count)]


def whole_state(ranks: list[dict], label: str) -> dict[str, Any]:
    """A parameter's optimizer state, put together from the ranks' rows."""
    states = [rank["state"][label] for rank in ranks]
    whole = dict(states[0])
    for name, value in whole.items():
        if isinstance(value, Tensor) and len(ranks) > 1 and label in SHARDED:
            whole[name] = torch.cat([state[name] for state in states])
    return whole


def on_one_rank(variant: str) -> str:
    """The run of one rank that is the same as this one."""
    return variant.removesuffix(", replicated")


@runs_of("fp64")
def test_same_weights_and_state_for_every_world_size(runs, variant, world_size) -> None:
    """The state notices what Adam's scale hides. In fp64: sums in another order differ by 2⁻⁵³,
    Polar Express makes 10³ of it, six steps some more."""
    found, (alone,) = runs(world_size)[variant], runs(1)[on_one_rank(variant)]
    if "replicated" in variant:  # every rank has all
        found = found[:1]
    for label, value in alone["params"].items():
        mine = whole_state(found, label) | {"weights": found[0]["params"][label]}
        for name, expected in (alone["state"][label] | {"weights": value}).items():
            expected, one = torch.as_tensor(expected), torch.as_tensor(mine[name])
            assert one.shape == expected.shape, (label, name)
            assert (one - expected).abs().max() <= 1e-9 * expected.abs().max(), (label, name)


@runs_of("")
def test_all_ranks_end_with_the_same_bits(runs, variant, world_size) -> None:
    first, *others = runs(world_size)[variant]
    assert not first["tied"]
    for rank in others:
        assert unequal(rank["params"], first["params"]) == []


@runs_of("fp64")
def test_gradients_reach_the_fp8_head_at_the_same_size(runs, variant, world_size) -> None:
    """Its scale is static: nothing may be divided before it. So the largest gradient of a
    micro-batch is one number."""
    alone = gradient_sizes(runs(1)[on_one_rank(variant)])
    shared = gradient_sizes(runs(world_size)[variant])
    assert len(alone) == STEPS * settings_of(Path(), 1, variant).micro_batches
    assert shared == pytest.approx(alone, rel=1e-9)
    # e5m2's smallest number: what a division would come close to
    assert min(alone) > 2.0**-16 * train_gpt.FP8_GRAD_SCALE


# -----------------------------------------------------------------------------
# Padding


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 16, 100])
@pytest.mark.parametrize("label, shape", [("attn", (2, 64, 16)), ("mlp", (3, 2, 64, 16))])
def test_every_matrix_has_one_owner(label: str, shape: tuple[int, ...], world_size: int) -> None:
    """Built rank by rank, without a group: the ranks' rows join to the whole bank, and each matrix
    keeps its own multiplier and its own groups of heads, in two updates."""
    table = param_table(short_schedule(head_dim=4))

    def build() -> NorMuonAndAdam:
        param = torch.nn.Parameter(normal(label, shape).double())
        return NorMuonAndAdam([(label, param)], {label: table[label]}, [label], [label])

    def update(optimizer: NorMuonAndAdam) -> Tensor:
        own = optimizer.own_rows[label]
        for step in range(2 * (own.start < own.stop)):
            grad = table[label].as_rows(normal(f"{label}{step}", shape).double())
            optimizer._update(label, grad[own], UpdateArgs(1.0, 0.95, 1.0))
        return optimizer.shards[label]

    alone = build()
    expected = update(alone)
    shards, muls, owned, updated = [], [], [], []
    for rank in range(world_size):
        with (
            patch.object(dist, "is_initialized", lambda: True),
            patch.object(dist, "get_rank", lambda rank=rank: rank),
            patch.object(dist, "get_world_size", lambda: world_size),
        ):
            optimizer = build()
        padded = optimizer.padded[label]
        rows = optimizer.num_rows(label)
        assert torch.equal(optimizer.params[label], normal(label, shape).double())
        assert len(padded) % world_size == 0 and len(padded) - rows < world_size
        shards.append(optimizer.shards[label].clone())
        updated.append(update(optimizer))
        muls.append(optimizer.constants[label]["matrix_lr_mul"])
        owned += range(rows)[optimizer.own_rows[label]]
    assert owned == list(range(rows))
    assert torch.equal(torch.cat(shards).view(shape), normal(label, shape).double())
    assert torch.equal(torch.cat(muls), alone.constants[label]["matrix_lr_mul"])
    assert (torch.cat(updated) - expected).abs().max() <= TOLERANCE64


# -----------------------------------------------------------------------------
# Bytes

Calls = list[tuple[str, int]]  # of each collective, its name and the bytes of the whole tensor


@contextmanager
def counted() -> Iterator[Calls]:
    """Within the block, the list grows by every collective that the recipe asks for."""
    calls: Calls = []

    def counting(owner: object, name: str, whole: int):
        """A stand-in for owner.name; its argument `whole` is the tensor that every rank has whole."""
        function = getattr(owner, name)

        def call(*args, **options):
            calls.append((name, args[whole].nbytes))
            return function(*args, **options)

        return patch.object(owner, name, call)

    with (
        counting(train_gpt, "reduce_scatter", 1),
        counting(train_gpt, "all_gather", 0),
        counting(dist, "all_reduce", 0),
    ):
        yield calls


@runs_of("")
def test_traffic_is_the_theorys_call_by_call(runs, variant: str, world_size: int) -> None:
    """Kinds, bytes and order of every collective: each parameter is reduced once, gathered once."""
    table = param_table(settings_of(Path(), world_size, variant))
    split = train_gpt.split_step(4)
    for rank in runs(world_size)[variant]:

        def call(name: str, label: str, dtype: torch.dtype) -> tuple[str, int]:
            rows = table[label].as_rows(rank["params"][label])
            padding = 0 if name == "all_reduce" else -len(rows) % world_size
            return name, rows[0].numel() * (len(rows) + padding) * dtype.itemsize

        dtypes = {label: param.dtype for label, param in rank["params"].items()}
        assert [tied for _, tied, _ in rank["traffic"]] == [s <= split for s in range(STEPS)]
        for step, tied, calls in rank["traffic"]:
            due = [x for x, row in table.items() if row.is_due(step) and not (tied and row.tied_to)]
            expected = []
            for label in due:
                dtype = torch.promote_types(dtypes[label], table[label].grad_dtype or dtypes[label])
                name = "reduce_scatter" if table[label].comms == "sharded" else "all_reduce"
                expected.append(call(name, label, dtype))
            for label in WORK_ORDER:
                if label in due and table[label].comms == "sharded":
                    expected.append(call("all_gather", label, dtypes[label]))
            assert calls == expected


# -----------------------------------------------------------------------------
# The dtype in which gradients are summed


@pytest.mark.parametrize("grad_dtype", ["param", "float32"])
def test_gradients_are_summed_in_their_dtype(grad_dtype: str) -> None:
    """Sixteen bf16 numbers: fp32 sums them within fp32's rounding, bf16 does not."""
    h = short_schedule(grad_dtype=grad_dtype)
    manager = TrainingManager(tiny_gpt(torch.bfloat16), h)
    for i in range(16):
        add_gradients(manager.model, 0, range(i, i + 1))
        manager.optimizer.accumulate()
    pending = manager.optimizer.gradients()
    for label, param in manager.model.named_parameters():
        terms = [normal(f"g_{label}_0_{i}", tuple(param.shape)).to(param.dtype) for i in range(16)]
        terms = torch.stack(terms).double()
        error = ((pending[label].double() - terms.sum(0)).abs() / terms.abs().sum(0)).max()
        wide = grad_dtype == "float32" or param.dtype == torch.float32
        assert pending[label].dtype == (torch.float32 if wide else torch.bfloat16)
        assert pending[label].shape == param.shape
        assert error <= 16 * U32 if wide else U16 / 16 < error <= 16 * U16, label
