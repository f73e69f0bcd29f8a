"""The same run on any number of ranks: whole small trainings on gloo, and what travels between the
ranks."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
import triton_kernels
from bench.settings import Parameter, model_parameters
from common import (
    TOLERANCE64, U16, U32, add_gradients, normal, parameters_of, random_batch, short_schedule, tiny_gpt,
    tiny_settings, unequal,
)  # fmt: skip
from runtime import cpu
from runtime.ranks import Ranks, Signals
from train_gpt import (
    PARAM_TABLE, ForwardSchedule, Hyperparameters, NorMuonAndAdam, TrainingManager, param_table,
    step_schedule,
)  # fmt: skip
from traffic import counted, expected_calls

BANKS = [label for label, row in PARAM_TABLE.items() if row.may_pad]
SHARDED = [label for label, row in PARAM_TABLE.items() if row.comms == "sharded"]

# Six steps, two, one and one in the stages and two more: Adam at odd ones, the split after step 3,
# embed's own life at step 5.
STEPS = 6
SMALL = dict(
    model_dim=16, num_heads=4, head_dim=4, num_scheduled_iterations=4, momentum_warmup=3,
    momentum_cooldown=2, micro_batches=8, batch_unit=16, val_every=3, val_tokens=1024,
    val_batch_tokens=512,
)  # fmt: skip
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {  # (in fp64, settings)
    "fp64": (True, dict(fp8_head=False, fp8_mlp=False)),
    "fp64, FP8": (True, dict()),
    "fp64, FP8, replicated": (True, dict(comms="replicated")),
    "training dtypes": (False, dict(dtype="bfloat16")),
    # On 16 ranks attn has 48 matrices instead of 40, mlp 32 instead of 24.
    "padded": (True, dict(micro_batches=16, batch_unit=32)),
}
ON_RANKS = {
    1: ["fp64", "fp64, FP8", "training dtypes", "padded"],
    2: ["fp64", "fp64, FP8", "fp64, FP8, replicated", "training dtypes"],
    4: ["fp64", "fp64, FP8"],
    8: ["fp64", "fp64, FP8", "training dtypes"],
    16: ["padded"],
}


def runs_of(kind: str, most: int = 8) -> Any:
    """Parametrize over the runs on 2 to `most` ranks whose name holds this; 8 and more are slow."""
    found = []
    for world_size, names in ON_RANKS.items():
        for name in names:
            if 1 < world_size <= most and kind in name:
                marks = [pytest.mark.slow] if world_size >= 8 else []
                found.append(pytest.param(name, world_size, marks=marks))
    return pytest.mark.parametrize("variant, world_size", found)


# -----------------------------------------------------------------------------
# Whole runs


def settings_of(data: Path, world_size: int, name: str) -> Hyperparameters:
    changes = SMALL | VARIANTS[name][1] | {"run_id": re.sub(r"\W+", "_", name)}
    return tiny_settings(data, data / f"ranks{world_size}", **changes)


def whole_runs(rank: int, world_size: int, data: Path) -> dict[str, Any]:
    """A training run of each variant, and on four ranks the traced steps: the processes start once."""
    found = {name: whole_run(rank, world_size, data, name) for name in ON_RANKS[world_size]}
    if world_size == 4:
        found["traced"] = traced_steps(rank)
    return found


def whole_run(rank: int, world_size: int, data: Path, name: str) -> dict[str, Any]:
    """train(), as main calls it: what this rank saw, and what it ends with."""
    in_fp64, _ = VARIANTS[name]
    h = settings_of(data, world_size, name)
    tokens, gradient_sizes, val_losses, traffic, managers = [], [], [], [], []
    build = train_gpt.build
    warm_up = train_gpt.warm_up
    validate = train_gpt.validate
    quantize = triton_kernels.quantize_fp8

    def see_inputs(model: torch.nn.Module, inputs: tuple) -> None:
        if model.training:
            tokens.append(inputs[0].clone())

    def build_recorded(*args) -> TrainingManager:
        manager = build(*args)
        if in_fp64:
            manager = TrainingManager(manager.model.double(), h)
        manager.model.register_forward_pre_hook(see_inputs)
        managers.append(manager)
        step_optimizer = manager.optimizer.step

        def step_counted(step: int) -> None:
            tied = manager.optimizer.tied
            with counted() as calls:
                step_optimizer(step)
            traffic.append((step, tied, calls))

        manager.optimizer.step = step_counted
        return manager

    def warm_up_forgotten(*args) -> None:
        if not in_fp64:  # once is enough
            warm_up(*args)
        for record in (tokens, gradient_sizes, traffic):
            record.clear()

    def validate_recorded(*args) -> float:
        val_losses.append(validate(*args))
        return val_losses[-1]

    def quantize_recorded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float8_e5m2:
            gradient_sizes.append(x.abs().max().item())
        return quantize(x, scale, dtype)

    with (
        patch.object(train_gpt, "build", build_recorded),
        patch.object(train_gpt, "warm_up", warm_up_forgotten),
        patch.object(train_gpt, "validate", validate_recorded),
        patch.object(triton_kernels, "quantize_fp8", quantize_recorded),
    ):
        train_gpt.train(h, Ranks(rank, world_size, torch.device("cpu")), Signals())
    manager = managers[-1]
    optimizer = manager.optimizer
    return dict(
        tokens=tokens,
        gradient_sizes=gradient_sizes,
        val_losses=val_losses,
        traffic=traffic,
        params=parameters_of(manager.model),
        tied=optimizer.tied,
        state=optimizer.state,
        pending=list(optimizer.gradients()),
        padded=optimizer.padded,
        wide_grads=optimizer.wide_grads,
    )


Runs = Callable[[int], dict[str, list[dict]]]


@pytest.fixture(scope="module")
def runs(run_ranks, shards: Path) -> Runs:
    """runs(world_size)[variant]: what whole_run returned on each rank; each is run once."""
    cache: dict[int, dict[str, list[dict]]] = {}

    def get(world_size: int) -> dict[str, list[dict]]:
        if world_size not in cache:
            if world_size == 1:
                results = [whole_runs(0, 1, shards)]
            else:
                results = run_ranks(world_size, whole_runs, shards)
            cache[world_size] = {name: [result[name] for result in results] for name in results[0]}
        return cache[world_size]

    return get


def in_order(ranks: list[dict], name: str) -> list:
    """What was recorded for each micro-batch, in the order of the step: rank by rank, its own."""
    count = len(ranks[0][name]) // STEPS
    found = []
    for step in range(STEPS):
        for rank in ranks:
            found += rank[name][step * count : (step + 1) * count]
    return found


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


def assert_equal_to_1e9(found: list[dict], expected: list[dict]) -> None:
    """Parameters and optimizer state against those of one rank: the state notices what Adam's scale
    hides. In fp64: sums in another order differ by 2⁻⁵³, Polar Express makes 10³ of it, six steps
    some more."""
    for label, value in expected[0]["params"].items():
        difference = (found[0]["params"][label] - value).abs().max()
        assert difference <= 1e-9 * value.abs().max(), label
        mine = whole_state(found, label)
        for name, state in expected[0]["state"][label].items():
            where = (label, name)
            if isinstance(state, Tensor):
                assert mine[name].shape == state.shape, where
                assert (mine[name] - state).abs().max() <= 1e-9 * state.abs().max(), where
            else:
                assert mine[name] == state, where


@runs_of("")
def test_same_tokens_in_the_same_order_for_every_world_size(runs, variant, world_size) -> None:
    alone = in_order(runs(1)[on_one_rank(variant)], "tokens")
    shared = in_order(runs(world_size)[variant], "tokens")
    assert len(alone) == len(shared) == STEPS * 8
    assert all(torch.equal(a, b) for a, b in zip(alone, shared))
    h = settings_of(Path(), 1, variant)
    expected = sum(step_schedule(step, h).batch_tokens for step in range(STEPS))
    assert sum(map(len, alone)) == expected


@runs_of("fp64")
def test_same_weights_and_state_for_every_world_size(runs, variant, world_size) -> None:
    shared = runs(world_size)[variant]
    if "replicated" in variant:  # every rank has all
        shared = shared[:1]
    assert_equal_to_1e9(shared, runs(1)[on_one_rank(variant)])


@runs_of("fp64")
def test_same_validation_losses_for_every_world_size(runs, variant, world_size) -> None:
    """Summed in fp32 over two batches of eight micro-batches: 16 roundings at most on either side."""
    alone = runs(1)[on_one_rank(variant)][0]["val_losses"]
    assert len(alone) == 3 and alone[-1] < alone[0]
    shared = [rank["val_losses"] for rank in runs(world_size)[variant]]
    for losses in shared:
        assert losses == shared[0] and losses == pytest.approx(alone, rel=32 * U32)


@runs_of("")
def test_all_ranks_end_with_the_same_bits(runs, variant, world_size) -> None:
    first, *others = runs(world_size)[variant]
    assert not first["tied"]
    for rank in others:
        assert unequal(rank["params"], first["params"]) == []


@runs_of("training dtypes")
def test_sharding_adds_no_error_to_what_rounding_makes(runs, variant, world_size) -> None:
    """In bf16 and fp32 the order of sums decides roundings, and training spreads them. How far that
    goes shows the same run in fp64: two draws of one error are √2 of it apart on average, and twice
    is beyond chance for many elements. Where there are few, as among gates and scalars, it is not:
    each may be one of its three Adam steps away, at the peak of the rate."""
    alone = runs(1)[variant][0]["params"]
    shared = runs(world_size)[variant][0]["params"]
    exact = runs(1)["fp64, FP8"][0]["params"]
    scale = train_gpt.DEMO["adam_lr_scale"]
    for label, value in alone.items():
        row = PARAM_TABLE[label]
        bound = 2 * (value.double() - exact[label]).norm()
        if value.numel() > 1000:
            assert bound <= exact[label].norm(), label  # so that it says something
        else:
            lr_mul = max(row.lr_mul) if isinstance(row.lr_mul, tuple) else row.lr_mul
            bound += 1.73 * scale * row.lr * lr_mul * math.sqrt(value.numel())
        assert (shared[label].double() - value.double()).norm() <= bound, label


@pytest.mark.parametrize("world_size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_gradients_reach_the_fp8_head_at_the_same_size(runs, world_size: int) -> None:
    """Its scale is static: nothing may be divided before it. So the largest gradient of a
    micro-batch is one number."""
    alone = in_order(runs(1)["fp64, FP8"], "gradient_sizes")
    shared = in_order(runs(world_size)["fp64, FP8"], "gradient_sizes")
    assert len(alone) == len(shared) == STEPS * 8
    assert shared[:8] == alone[:8]  # of the first step, on equal weights, exactly
    assert shared == pytest.approx(alone, rel=1e-9)
    # e5m2's smallest number: what a division would come close to
    assert min(alone) > 2.0**-16 * train_gpt.FP8_GRAD_SCALE


# -----------------------------------------------------------------------------
# Padding: 16 ranks


@pytest.mark.slow
def test_padded_banks_train_like_whole_ones(runs) -> None:
    alone, padded = runs(1)["padded"], runs(16)["padded"]
    both = zip(in_order(alone, "tokens"), in_order(padded, "tokens"), strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    assert_equal_to_1e9(padded, alone)
    for rank in padded:
        assert unequal(rank["params"], padded[0]["params"]) == []


@pytest.mark.slow
def test_padding_is_zero_at_the_end_and_has_no_state(runs) -> None:
    alone, ranks = runs(1)["padded"][0], runs(16)["padded"]
    matrices = [0] * 16
    for label in BANKS:
        row = PARAM_TABLE[label]
        rows = row.as_rows(alone["params"][label])
        for i, rank in enumerate(ranks):
            assert rank["params"][label].shape == alone["params"][label].shape
            assert label not in rank["pending"]
            matrices[i] += len(rank["state"][label]["momentum_buffer"])
            for name in ("padded", "wide_grads"):
                whole = rank[name][label]
                n = len(whole) - len(rows)
                padding = whole[:n] if row.pad_front else whole[-n:]
                assert 0 < n < 16 and len(whole) % 16 == 0 and not padding.any()
    assert {label for rank in ranks for label in rank["wide_grads"]} == set(BANKS)
    # Padding in front of one bank, behind the other: no rank is without matrices.
    assert sum(matrices) == 40 + 24 and min(matrices) > 0


@pytest.mark.parametrize("world_size", [*range(2, 17), 24, 100])
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
            optimizer._update(label, grad[own])
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


@runs_of("", 16)
def test_traffic_is_the_theorys_call_by_call(runs, variant: str, world_size: int) -> None:
    """Kinds, bytes and order of every collective: each parameter is reduced once, gathered once."""
    table = param_table(settings_of(Path(), world_size, variant))
    split = train_gpt.split_step(4)
    for rank in runs(world_size)[variant]:
        params = rank["params"]
        parameters = {label: Parameter(tuple(p.shape), p.dtype) for label, p in params.items()}
        assert [tied for _, tied, _ in rank["traffic"]] == [s <= split for s in range(STEPS)]
        for step, tied, calls in rank["traffic"]:
            expected = expected_calls(parameters, table, world_size, step, tied)
            assert calls == list(expected.values())


def test_theory_at_the_records_size() -> None:
    """By hand: (W − 1)/W of a parameter's bf16 bytes there and as many back, for the two banks and
    the four tables."""
    h = Hyperparameters()
    calls = expected_calls(model_parameters(h), param_table(h), 8, 1, False)
    dim, vocab = 768, 50304
    sizes = dict(
        attn=10 * 4 * dim * dim,
        mlp=12 * 2 * 4 * dim * dim,
        lm_head=dim * vocab,
        embed=vocab * dim,
        value_embeds=vocab * 5 * dim,
        bigram_embed=754_560 * 192,
    )
    for label, elements in sizes.items():
        sent = 7 / 8 * 2 * elements
        assert calls[label, "reduce"] == ("reduce-scatter", sent)
        assert calls[label, "gather"] == ("all-gather", sent)
    assert calls["scalars", "reduce"] == ("all-reduce", 2 * 7 / 8 * 4 * 24)
    assert ("scalars", "gather") not in calls


# -----------------------------------------------------------------------------
# Zero copies


class LargeOperations(TorchDispatchMode):
    """Names of the operations whose result is new, or written, and as large as a whole bank or table,
    but no rank's shard of a larger one; collectives aside."""

    def __init__(self, elements: int, shards: set[torch.Size]):
        super().__init__()
        self.elements = elements
        self.shards = shards
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else [result]
        infos = [returned.alias_info for returned in function._schema.returns]
        view = all(info is not None and not info.is_write for info in infos)
        if function.namespace != "c10d" and not view and any(map(self.is_large, outputs)):
            self.names.append(function.overloadpacket.__name__)
        return result

    def is_large(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.numel() >= self.elements and x.shape not in self.shards


def traced_steps(rank: int) -> list[dict]:
    """For four steps, two before and two after the split: what forward and backward passes of two
    micro-batches, and the optimizer's step, do with tensors as large as a parameter; and by address
    where gradients and weights are, and where the collectives work."""
    cpu.forget_cpu()  # casts for bf16 units are copies
    triton_kernels.CACHED_SCORES = 1  # those of several heads are as large as a parameter here
    model = tiny_gpt(vocab_size=1024, num_heads=4, head_dim=4)
    manager = TrainingManager(model, Hyperparameters(block_size=16, head_dim=4))
    optimizer = manager.optimizer
    whole = min(model.get_parameter(label).numel() for label in SHARDED)
    shards = set()
    for label in SHARDED:
        own = optimizer.shards[label]
        shards |= {own.shape, own.view(-1).shape}
    history = []
    for step in range(4):
        with LargeOperations(whole, shards) as backward:
            for seed in (2 * rank, 2 * rank + 1):
                batch = random_batch(64, 1024, (0, 20), seed=seed)
                model(*batch, ForwardSchedule(torch.ones(1), 16, 48)).backward()
        used = [label for label in SHARDED if PARAM_TABLE[label].is_due(step)]
        if optimizer.tied:
            used = [label for label in used if label != "embed"]
        labels = {model.get_parameter(label).grad.data_ptr(): label for label in used}
        weights = {model.get_parameter(label).data_ptr() for label in used}
        entry = dict(tied=optimizer.tied, gradients=set(labels), weights=weights)
        entry |= watched_step(optimizer, step, labels, LargeOperations(whole, shards))
        history.append(entry | dict(backward=backward.names))
        if step == 1:
            optimizer.split_tied()
    return history


def watched_step(
    optimizer: NorMuonAndAdam, step: int, labels: dict[int, str], update: LargeOperations
) -> dict[str, Any]:
    """An optimizer step: its large operations, and where its collectives work."""
    reduced, gathered, launched = set(), set(), []
    reduce, gather, add = train_gpt.reduce_scatter, train_gpt.all_gather, train_gpt.transpose_add

    def inside(part: Tensor, x: Tensor) -> bool:
        return 0 <= part.data_ptr() - x.data_ptr() < x.nbytes

    def reduce_seen(output, input, **options):
        reduced.add(input.data_ptr() if inside(output, input) else None)
        launched.append(labels.get(input.data_ptr()))
        return reduce(output, input, **options)

    def gather_seen(output, input, **options):
        gathered.add(output.data_ptr() if inside(input, output) else None)
        return gather(output, input, **options)

    def add_seen(source, target, alone):
        launched.append(("transpose_add", labels[target.data_ptr()], alone))
        return add(source, target, alone)

    with (
        patch.object(train_gpt, "transpose_add", add_seen),
        patch.object(train_gpt, "reduce_scatter", reduce_seen),
        patch.object(train_gpt, "all_gather", gather_seen),
        update,
    ):
        optimizer.step(step)
    return dict(update=update.names, reduced=reduced, gathered=gathered, launched=launched)


@pytest.fixture(scope="module")
def traced(runs: Runs) -> list[tuple[int, dict]]:
    """(step, what was traced) of every step of each of four ranks."""
    return [pair for rank in runs(4)["traced"] for pair in enumerate(rank)]


def test_sharded_step_touches_whole_parameters_by_collectives_and_tied_transposes_alone(
    traced,
) -> None:
    for number, step in traced:
        transposes = int(step["tied"] and number % 2 == 1)
        # On a CPU each exchange receives into new memory: reduce_scatter of runtime/cpu.py.
        received = ["empty_like"] * len(step["gradients"])
        assert sorted(step["update"]) == sorted(["add_", "copy_"] * transposes + received)


def test_gradients_are_reduced_where_autograd_left_them_and_weights_gathered_in_place(
    traced,
) -> None:
    for _, step in traced:
        assert step["reduced"] == step["gradients"] and step["gathered"] == step["weights"]


def test_tied_gradient_is_added_while_the_other_reductions_travel(traced) -> None:
    """Just before the one reduction that waits for it, on few processors."""
    for number, step in traced:
        due = [x for x in train_gpt.SCATTER_ORDER if x in SHARDED and PARAM_TABLE[x].is_due(number)]
        if step["tied"] and number % 2 == 1:
            due = [label for label in due if label not in ("lm_head", "embed")]
            due += [("transpose_add", "lm_head", False), "lm_head"]
        assert step["launched"] == due
    assert [step["tied"] for _, step in traced[:4]] == [True, True, False, False]


def test_tied_gradient_takes_all_processors_where_no_rank_waits() -> None:
    manager = TrainingManager(tiny_gpt(), Hyperparameters(block_size=16))
    add_gradients(manager.model, 1)
    with (
        patch.object(train_gpt, "transpose_add", wraps=train_gpt.transpose_add) as add,
        patch.object(train_gpt, "transpose_copy", wraps=train_gpt.transpose_copy) as copy,
    ):
        manager.optimizer.step(1)
    assert [call.args[2] for call in (*add.call_args_list, *copy.call_args_list)] == [True, True]


COPIES = {
    "cat", "stack", "clone", "copy_", "_to_copy", "new_zeros", "zeros_like", "slice_backward",
    "select_backward",
}  # fmt: skip


def test_backward_pass_builds_each_bank_once_and_copies_nothing_else(traced) -> None:
    """The matmuls write a layer's gradients; one cat (attn) and one stack (mlp) a micro-batch join
    them, without a zero-padded bank for each slice; a second micro-batch is added in place."""
    for _, step in traced:
        copies = sorted(name for name in step["backward"] if name in COPIES)
        assert copies == ["cat", "cat", "stack", "stack"]


# -----------------------------------------------------------------------------
# The dtype in which gradients are summed


def manager_in_bf16(grad_dtype: str) -> TrainingManager:
    h = short_schedule(num_scheduled_iterations=4, grad_dtype=grad_dtype)
    return TrainingManager(tiny_gpt(torch.bfloat16), h)


def add_micro_batches(manager: TrainingManager, micro_batches: range) -> None:
    for i in micro_batches:
        add_gradients(manager.model, 0, range(i, i + 1))
        manager.optimizer.accumulate()


@pytest.mark.parametrize("grad_dtype", ["param", "float32"])
def test_gradients_are_summed_in_their_dtype(grad_dtype: str) -> None:
    """Sixteen bf16 numbers: fp32 sums them within fp32's rounding, bf16 does not."""
    manager = manager_in_bf16(grad_dtype)
    add_micro_batches(manager, range(16))
    pending = manager.optimizer.gradients()
    for label, param in manager.model.named_parameters():
        terms = [normal(f"g_{label}_0_{i}", tuple(param.shape)).to(param.dtype) for i in range(16)]
        terms = torch.stack(terms).double()
        error = ((pending[label].double() - terms.sum(0)).abs() / terms.abs().sum(0)).max()
        wide = grad_dtype == "float32" or param.dtype == torch.float32
        assert pending[label].dtype == (torch.float32 if wide else torch.bfloat16)
        assert pending[label].shape == param.shape
        assert error <= 16 * U32 if wide else U16 / 16 < error <= 16 * U16, label


def test_wide_gradients_stay_for_adam_and_come_back_from_a_saved_state() -> None:
    """After an even step the banks' gradients are used, the others pending in fp32; restored, they
    give the same weights."""
    first, second = manager_in_bf16("float32"), manager_in_bf16("float32")
    add_micro_batches(first, range(2))
    first.step_optimizers(0)
    saved = {label: g.clone() for label, g in first.optimizer.gradients().items()}
    assert saved.keys() == {label for label, row in PARAM_TABLE.items() if row.every == 2}
    add_micro_batches(second, range(2))
    second.step_optimizers(0)
    second.optimizer.load_gradients(saved)
    assert unequal(saved, second.optimizer.gradients()) == []
    for manager in (first, second):
        add_micro_batches(manager, range(2, 4))
        manager.step_optimizers(1)
        assert not manager.optimizer.gradients()
    assert unequal(parameters_of(first.model), parameters_of(second.model)) == []


def test_wide_and_plain_gradients_agree_where_sums_are_exact() -> None:
    """One micro-batch a step is not summed: the buffer changes no bit, the tied transpose included."""
    managers = [manager_in_bf16(grad_dtype) for grad_dtype in ("param", "float32")]
    for manager in managers:
        add_gradients(manager.model, 0)
        for label in ("embed", "lm_head"):  # a sum over exact quarters, in the tied transpose
            grad = manager.model.get_parameter(label).grad
            grad.copy_((grad.float() * 4).round().div(4).clamp(-3, 3))
        manager.step_optimizers(1)
    assert unequal(*(parameters_of(manager.model) for manager in managers)) == []
