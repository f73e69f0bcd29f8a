"""The same run on any number of ranks: whole small trainings on gloo, and what travels between the ranks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attention
import cpu
import train_gpt
import triton_kernels
from bench.communication import Parameter, counted, expected_calls, model_parameters
from common import U16, U32, add_gradients, normal, random_batch, short_schedule, tiny_gpt, tiny_settings, unequal
from runtime.ranks import Ranks
from train_gpt import PARAM_TABLE, ForwardSchedule, Hyperparameters, NorMuonAndAdam, TrainingManager, param_table, step_schedule

BANKS = [label for label, row in PARAM_TABLE.items() if row.may_pad]
SHARDED = [label for label, row in PARAM_TABLE.items() if row.comms == "sharded"]

# Six steps, two, one and one in the stages and two more: Adam on odd ones, the split after step 3, embed's own life on step 5.
STEPS = 6
SMALL = dict(
    model_dim=16, head_dim=8, num_scheduled_iterations=4, momentum_warmup=3, momentum_cooldown=2, micro_batches=8,
    batch_unit=16, val_every=3, val_tokens=1024, val_batch_tokens=512,
)  # fmt: skip
# What is run: (in fp64, settings)
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "fp64": (True, dict(fp8_head=False)),
    "fp64, FP8 head": (True, dict(fp8_head=True)),
    "fp64, FP8 head, replicated": (True, dict(fp8_head=True, comms="replicated")),
    "training dtypes": (False, dict(dtype="bfloat16")),
}
ON_RANKS = {  # what is run on how many; all FP8-head runs compare with one rank's
    1: [name for name in VARIANTS if "replicated" not in name],
    2: list(VARIANTS),
    4: ["fp64", "fp64, FP8 head"],
    8: ["fp64", "fp64, FP8 head", "training dtypes"],
}
PADDED = {"padded": (True, dict(micro_batches=16, batch_unit=32))}  # for 16 ranks: attn 40 → 48 matrices, mlp 24 → 32


# -----------------------------------------------------------------------------
# Whole runs


def whole_runs(rank: int, world_size: int, data: Path, variants: dict[str, tuple[bool, dict]]) -> dict[str, dict]:
    """train(), as main calls it, for each variant: what this rank saw and what it ends with."""
    return {name: whole_run(rank, world_size, data, name, *variant) for name, variant in variants.items()}


def settings_of(data: Path, world_size: int, name: str, changes: dict[str, Any]) -> Hyperparameters:
    return tiny_settings(data, data / f"ranks{world_size}", **{**SMALL, **changes, "run_id": name})


def whole_run(rank: int, world_size: int, data: Path, name: str, in_fp64: bool, changes: dict) -> dict:
    h = settings_of(data, world_size, name, changes)
    tokens, gradient_sizes, val_losses, traffic, managers = [], [], [], [], []
    build, warm_up, validate, quantize = train_gpt.build, train_gpt.warm_up, train_gpt.validate, triton_kernels.quantize_fp8

    def build_recorded(*args) -> TrainingManager:
        manager = build(*args)
        if in_fp64:
            manager = TrainingManager(manager.model.double(), h)
        manager.model.register_forward_pre_hook(
            lambda module, inputs: tokens.append(inputs[0].clone()) if module.training else None
        )
        managers.append(manager)
        step = manager.optimizer.step

        def step_counted(do_adam: bool) -> None:
            tied = manager.optimizer.tied
            with counted() as calls:
                step(do_adam)
            traffic.append((do_adam, tied, calls))

        manager.optimizer.step = step_counted
        return manager

    def warm_up_forgotten(*args) -> None:
        if not in_fp64:  # once is enough
            warm_up(*args)
        tokens.clear()
        gradient_sizes.clear()
        traffic.clear()

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
        train_gpt.train(h, Ranks(rank, world_size, torch.device("cpu")))
    optimizer, saved = managers[0].optimizer, managers[0].state_dict()
    return dict(
        tokens=tokens,
        gradient_sizes=gradient_sizes,
        val_losses=val_losses,
        traffic=traffic,
        params=saved["same"]["parameters"],
        tied=saved["same"]["tied"],
        state={**saved["same"]["optimizer"], **saved["sharded"]},
        pending=saved["partial"],
        padded={label: padded.clone() for label, padded in optimizer.padded.items()},
        wide_grads={label: wide.clone() for label, wide in optimizer.wide_grads.items()},
    )


@pytest.fixture(scope="module")
def runs(run_ranks, shards: Path) -> Callable[[int], dict[str, list[dict]]]:
    """runs(world_size)[variant]: what whole_run returned on each rank; each world size is started once."""
    cache: dict[int, dict[str, list[dict]]] = {}

    def get(world_size: int) -> dict[str, list[dict]]:
        if world_size not in cache:
            variants = {name: VARIANTS[name] for name in ON_RANKS.get(world_size, [])}
            if world_size in (1, 16):
                variants |= PADDED
            if world_size == 1:
                results = [whole_runs(0, 1, shards, variants)]
            else:
                function = whole_runs_and_traced_steps if world_size == 4 else whole_runs  # four processes start once
                results = run_ranks(world_size, function, shards, variants)
            cache[world_size] = {name: [result[name] for result in results] for name in results[0]}
        return cache[world_size]

    return get


def in_order(ranks: list[dict], name: str) -> list:
    """What was recorded for each micro-batch, in the order of the step: rank by rank, each its share."""
    share = len(ranks[0][name]) // STEPS
    return [item for step in range(STEPS) for rank in ranks for item in rank[name][step * share : (step + 1) * share]]


def whole_state(ranks: list[dict], label: str, replicated: bool) -> dict[str, Any]:
    """A parameter's optimizer state, put together from the ranks' shares."""
    states = [rank["state"][label] for rank in ranks]
    joined = not replicated and label in SHARDED
    return {
        name: torch.cat([state[name] for state in states]) if joined and isinstance(value, Tensor) else value
        for name, value in states[0].items()
    }


COUNTS = pytest.mark.parametrize("world_size", [2, 4, 8])
EVERY_RUN = [(name, n) for n, names in ON_RANKS.items() for name in names if n > 1]
EACH = pytest.mark.parametrize("variant, world_size", EVERY_RUN)
EACH_FP64 = pytest.mark.parametrize("variant, world_size", [(name, n) for name, n in EVERY_RUN if VARIANTS[name][0]])


def on_one_rank(variant: str) -> str:
    """The run of one rank that is the same as this one."""
    return variant.removesuffix(", replicated")


def assert_equal_to_1e9(found: list[dict], expected: list[dict], replicated: bool) -> None:
    """Parameters and optimizer state of a run against those of one rank: the state notices what Adam's scale hides."""
    for label, value in expected[0]["params"].items():
        difference = (found[0]["params"][label] - value).abs().max()
        assert difference <= 1e-9 * value.abs().max(), label
        for name, state in whole_state(expected, label, False).items():
            mine = whole_state(found, label, replicated)[name]
            if isinstance(state, Tensor):
                assert mine.shape == state.shape and (mine - state).abs().max() <= 1e-9 * state.abs().max(), (label, name)
            else:
                assert mine == state, (label, name)


@EACH
def test_same_tokens_in_the_same_order_for_every_world_size(runs, variant: str, world_size: int) -> None:
    alone, shared = in_order(runs(1)[on_one_rank(variant)], "tokens"), in_order(runs(world_size)[variant], "tokens")
    assert len(alone) == len(shared) == STEPS * 8
    assert all(torch.equal(a, b) for a, b in zip(alone, shared))
    h = short_schedule(num_scheduled_iterations=4, batch_unit=SMALL["batch_unit"])
    assert sum(map(len, alone)) == sum(step_schedule(step, h).batch_tokens for step in range(STEPS))


@EACH_FP64
def test_same_weights_and_state_for_every_world_size(runs, variant: str, world_size: int) -> None:
    """In fp64, to 1e-9: sums in another order differ by 2⁻⁵³, Polar Express makes 10³ of it, six steps some more."""
    assert_equal_to_1e9(runs(world_size)[variant], runs(1)[on_one_rank(variant)], "replicated" in variant)


@pytest.mark.parametrize("world_size", [2])
def test_sharded_and_replicated_are_the_same_run(runs, world_size: int) -> None:
    sharded, replicated = runs(world_size)["fp64, FP8 head"], runs(world_size)["fp64, FP8 head, replicated"]
    for label, value in sharded[0]["params"].items():
        assert (replicated[0]["params"][label] - value).abs().max() <= 1e-9 * value.abs().max(), label
    for label in SHARDED:  # what it saves: each rank has its share of the state alone
        for rank, everywhere in zip(sharded, replicated):
            for name, value in rank["state"][label].items():
                if isinstance(value, Tensor):
                    assert value.numel() * world_size == everywhere["state"][label][name].numel(), (label, name)


@EACH_FP64
def test_same_validation_losses_for_every_world_size(runs, variant: str, world_size: int) -> None:
    """Summed in fp32 over two batches of eight micro-batches, so 16 roundings apart at most on either side."""
    alone, shared = runs(1)[on_one_rank(variant)][0]["val_losses"], [rank["val_losses"] for rank in runs(world_size)[variant]]
    assert len(alone) == 3 and alone[-1] < alone[0]
    for losses in shared:
        assert losses == shared[0] and losses == pytest.approx(alone, rel=32 * U32)


@EACH
def test_all_ranks_end_with_the_same_bits(runs, variant: str, world_size: int) -> None:
    first, *others = runs(world_size)[variant]
    assert not first["tied"]
    for rank in others:
        assert unequal(rank["params"], first["params"]) == []


@pytest.mark.parametrize("world_size", [2, 8])
def test_sharding_adds_no_error_to_what_rounding_makes(runs, world_size: int) -> None:
    """In bf16 and fp32 the order of sums decides roundings, and training spreads them. How far that goes shows the same run in
    fp64: two draws of one error are √2 of it apart on average, and twice is beyond chance for many elements. Where there are
    few, as among gates and scalars, it is not: there each may be one of its three Adam steps away, at the peak of the rate."""
    alone, shared, exact = runs(1)["training dtypes"], runs(world_size)["training dtypes"], runs(1)["fp64, FP8 head"]
    for label, value in alone[0]["params"].items():
        truth, row = exact[0]["params"][label], PARAM_TABLE[label]
        bound = 2 * (value.double() - truth).norm()
        if value.numel() > 1000:
            assert bound <= truth.norm(), label  # so that it says something
        else:
            bound += 1.73 * train_gpt.DEMO["adam_lr_mul"] * row.lr * row.lr_mul * math.sqrt(value.numel())
        assert (shared[0]["params"][label].double() - value.double()).norm() <= bound, label


@COUNTS
def test_gradients_reach_the_fp8_head_at_the_same_size(runs, world_size: int) -> None:
    """Its scale is static: nothing may be divided before it. So the largest gradient of a micro-batch is one number."""
    alone, shared = (in_order(runs(n)["fp64, FP8 head"], "gradient_sizes") for n in (1, world_size))
    assert len(alone) == len(shared) == STEPS * 8
    assert shared[:8] == alone[:8]  # of the first step, on equal weights, exactly
    assert shared == pytest.approx(alone, rel=1e-9)
    assert min(alone) > 2.0**-16 * train_gpt.FP8_GRAD_SCALE  # e5m2's smallest number: what a division would come close to


# -----------------------------------------------------------------------------
# Padding: 16 ranks, whose banks of 40 and 24 matrices become 48 and 32


def test_padded_banks_train_like_whole_ones(runs) -> None:
    alone, padded = runs(1)["padded"], runs(16)["padded"]
    assert all(torch.equal(a, b) for a, b in zip(in_order(alone, "tokens"), in_order(padded, "tokens"), strict=True))
    assert_equal_to_1e9(padded, alone, False)
    for rank in padded:
        assert unequal(rank["params"], padded[0]["params"]) == []


def test_padding_is_zero_at_the_end_and_nowhere_in_a_checkpoint(runs) -> None:
    alone, ranks = runs(1)["padded"][0], runs(16)["padded"]
    for label in BANKS:
        row = PARAM_TABLE[label]
        rows = row.as_rows(alone["params"][label])
        for rank in ranks:
            assert rank["params"][label].shape == alone["params"][label].shape and label not in rank["pending"]
            for name in ("padded", "wide_grads"):
                whole = rank[name][label]
                padding, within = reversed(whole.split((len(rows), len(whole) - len(rows))))
                if row.pad_front:
                    padding, within = whole.split((len(whole) - len(rows), len(rows)))
                assert 0 < len(padding) < 16 and len(whole) % 16 == 0 and (padding == 0).all() and within.any()
                assert name != "padded" or torch.equal(within, row.as_rows(rank["params"][label]))
    assert {label for rank in ranks for label in rank["wide_grads"]} == set(BANKS)
    counts = [[len(rank["state"][label]["momentum_buffer"]) for rank in ranks] for label in BANKS]
    assert {label: sum(count) for label, count in zip(BANKS, counts)} == {
        label: len(PARAM_TABLE[label].as_rows(alone["params"][label])) for label in BANKS
    }
    assert min(map(sum, zip(*counts))) > 0  # padding in front of one bank, behind the other: no rank is without matrices


@pytest.mark.parametrize("world_size", [3, 16, 24, 32, 48, 100])
@pytest.mark.parametrize("label, shape", [("attn", (2, 64, 16)), ("mlp", (3, 2, 64, 16))])
def test_every_matrix_has_one_owner_whatever_the_world_size(label: str, shape: tuple[int, ...], world_size: int) -> None:
    """Built rank by rank, without a group: shares join to the whole bank, and each matrix keeps its own multiplier."""

    def build() -> NorMuonAndAdam:
        param = torch.nn.Parameter(normal(label, shape))
        return NorMuonAndAdam([(label, param)], {label: PARAM_TABLE[label]}, [label], [label])

    shards, muls, owned = [], [], []
    for rank in range(world_size):
        with (
            patch.object(dist, "is_initialized", lambda: True),
            patch.object(dist, "get_rank", lambda rank=rank: rank),
            patch.object(dist, "get_world_size", lambda: world_size),
        ):
            optimizer = build()
        padded, rows = optimizer.padded[label], optimizer.num_rows(label)
        assert torch.equal(optimizer.params[label], normal(label, shape)) and optimizer.params[label].shape == shape
        assert len(padded) % world_size == 0 and len(padded) - rows < world_size
        shards.append(optimizer.shards[label])
        muls.append(optimizer.constants[label]["lr_mul"])
        owned += range(rows)[optimizer.own_rows[label]]
    assert torch.equal(torch.cat(shards).view(shape), normal(label, shape)) and owned == list(range(rows))
    assert torch.equal(torch.cat(muls), build().constants[label]["lr_mul"])
    idle = 0 if PARAM_TABLE[label].pad_front else -1
    assert len(shards[idle]) < len(padded) // world_size or len(padded) == rows


# -----------------------------------------------------------------------------
# Bytes


@pytest.mark.parametrize("variant, world_size", [*EVERY_RUN, ("padded", 16)])
def test_traffic_is_the_theorys_call_by_call(runs, variant: str, world_size: int) -> None:
    """Kinds, bytes and order of every collective of all six steps: each parameter is reduced once and gathered once."""
    for rank in runs(world_size)[variant]:
        changes = (VARIANTS | PADDED)[variant][1]
        parameters = {label: Parameter(tuple(p.shape), p.dtype) for label, p in rank["params"].items()}
        table = param_table(settings_of(Path(), world_size, variant, changes))
        steps = rank["traffic"]
        split = train_gpt.split_step(4)
        assert [(do_adam, tied) for do_adam, tied, _ in steps] == [(step % 2 == 1, step <= split) for step in range(STEPS)]
        for do_adam, tied, calls in steps:
            expected = expected_calls(parameters, table, world_size, do_adam, tied)
            reduced = [call for (_, phase), call in expected.items() if phase == "reduce"]
            assert calls == list(expected.values()) and [call for call in calls if call.kind != "all-gather"] == reduced


def test_theory_at_the_records_size() -> None:
    """By hand: (W − 1)/W of a parameter's bf16 bytes there and as many back, for the two banks and the four tables."""
    h = Hyperparameters()
    calls = expected_calls(model_parameters(h), param_table(h), 8, True, False)
    dim, vocab, matrices = h.model_dim, -(-h.vocab_size // 128) * 128, 4 * train_gpt.ATTENTION_LAYERS
    mlp = 2 * train_gpt.MLP_BANK_LAYERS * 4 * dim * dim
    tables = dict(value_embeds=vocab * train_gpt.VALUE_LAYERS * dim, bigram_embed=h.bigram_rows * dim)
    sizes = dict(attn=matrices * dim * dim, mlp=mlp, lm_head=dim * vocab, embed=vocab * dim, **tables)
    for label, elements in sizes.items():
        assert [calls[label, phase] for phase in ("reduce", "gather")] == [
            ("reduce-scatter", 7 / 8 * 2 * elements),
            ("all-gather", 7 / 8 * 2 * elements),
        ]
    scalars = sum(map(len, train_gpt.SCALARS.values()))
    assert calls["scalars", "reduce"] == ("all-reduce", 2 * 7 / 8 * 4 * scalars) and ("scalars", "gather") not in calls


# -----------------------------------------------------------------------------
# Zero copies


class LargeOperations(TorchDispatchMode):
    """Names of the operations whose result is new, or written, and as large as a whole bank or table, but no rank's shard of a
    larger one; collectives aside."""

    def __init__(self, elements: int, shards: set[torch.Size]):
        super().__init__()
        self.elements, self.shards, self.names = elements, shards, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        outputs = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, Tensor)]
        view = all(alias.alias_info is not None and not alias.alias_info.is_write for alias in function._schema.returns)
        large = any(x.numel() >= self.elements and x.shape not in self.shards for x in outputs)
        if function.namespace != "c10d" and not view and large:
            self.names.append(function.overloadpacket.__name__)
        return result


def traced_steps(rank: int, world_size: int) -> list[dict]:
    """For four steps, two before and two after the split: what forward and backward passes of two micro-batches, and the
    optimizer's step, do with tensors as large as a parameter; and by address where gradients and weights are, and where the collectives work."""
    cpu.forget_cpu()  # casts for bf16 units are copies
    attention.CACHED_SCORES = 1  # those of several heads are as large as a parameter here
    model = tiny_gpt(vocab_size=1024)
    manager = TrainingManager(model, Hyperparameters(block_size=16))
    whole = min(p.numel() for label, p in model.named_parameters() if label in SHARDED)
    owned = [manager.optimizer.shards[label] for label in SHARDED]
    shards = {shape for shard in owned for shape in (shard.shape, shard.view(-1).shape)}
    assert not shards & {shape for p in model.parameters() for shape in (p.shape, p.view(-1).shape)}
    history = []
    for step in range(4):
        with LargeOperations(whole, shards) as backward:
            for seed in (2 * rank, 2 * rank + 1):
                batch = random_batch(64, 1024, (0, 20), seed=seed)
                model(*batch, ForwardSchedule(torch.ones(1), 16, 48)).backward()
        tied = manager.optimizer.tied
        rows = {label: PARAM_TABLE[label] for label in SHARDED}
        used = [label for label, row in rows.items() if row.every_step or step % 2 == 1 and not (tied and row.tied_to)]
        gradients = {model.get_parameter(label).grad.data_ptr() for label in used}
        weights = {model.get_parameter(label).data_ptr() for label in used}
        labels = {model.get_parameter(label).grad.data_ptr(): label for label in used}
        reduced, gathered, launched = set(), set(), []
        reduce, gather, add = train_gpt.reduce_scatter, train_gpt.all_gather, train_gpt.transpose_add

        def reduce_seen(output, input, **options):
            inside = 0 <= output.data_ptr() - input.data_ptr() < input.nbytes
            reduced.add(input.data_ptr() if inside else None)
            launched.append(labels.get(input.data_ptr()))
            return reduce(output, input, **options)

        def gather_seen(output, input, **options):
            inside = 0 <= input.data_ptr() - output.data_ptr() < output.nbytes
            gathered.add(output.data_ptr() if inside else None)
            return gather(output, input, **options)

        def add_seen(source, target, alone):
            launched.append(("transpose_add", labels[target.data_ptr()], alone))
            return add(source, target, alone)

        with (
            patch.object(train_gpt, "transpose_add", add_seen),
            patch.object(train_gpt, "reduce_scatter", reduce_seen),
            patch.object(train_gpt, "all_gather", gather_seen),
            LargeOperations(whole, shards) as update,
        ):
            manager.optimizer.step(step % 2 == 1)
        if step == 1:
            manager.optimizer.split_tied()
        history.append(
            dict(
                backward=backward.names, update=update.names, gradients=gradients, reduced=reduced, weights=weights,
                gathered=gathered, transposes=int(tied and step % 2 == 1), launched=launched,
            )
        )  # fmt: skip
    return history


def whole_runs_and_traced_steps(rank: int, world_size: int, data: Path, variants: dict[str, tuple[bool, dict]]) -> dict:
    return whole_runs(rank, world_size, data, variants) | {"traced": traced_steps(rank, world_size)}


@pytest.fixture(scope="module")
def traced(runs) -> list[list[dict]]:
    """traced_steps of each of four ranks."""
    return runs(4)["traced"]


COPIES = {"cat", "stack", "clone", "copy_", "_to_copy", "new_zeros", "zeros_like", "slice_backward", "select_backward"}


def test_sharded_step_touches_whole_parameters_by_collectives_and_the_tied_transposes_alone(traced) -> None:
    for rank in traced:
        for step in rank:
            received = ["empty_like"] * len(step["gradients"])  # on a CPU, by each exchange: reduce_scatter of cpu.py
            assert sorted(step["update"]) == sorted(["add_", "copy_"] * step["transposes"] + received)


def test_gradients_are_reduced_where_autograd_left_them_and_weights_gathered_in_place(traced) -> None:
    for rank in traced:
        for step in rank:
            assert step["reduced"] == step["gradients"] and step["gathered"] == step["weights"]
        assert None not in step["reduced"] | step["gathered"]


def test_tied_gradient_is_added_while_the_other_reductions_travel(traced) -> None:
    """Just before the one reduction that waits for it, on few processors; and no rank waits for it where there is no tie."""
    for rank in traced:
        for number, step in enumerate(rank):
            expected = [label for label in train_gpt.SCATTER_ORDER if label in SHARDED]
            if number % 2 == 0:
                expected = [label for label in expected if PARAM_TABLE[label].every_step]
            elif step["transposes"]:
                expected = [label for label in expected if label not in ("lm_head", "embed")]
                expected += [("transpose_add", "lm_head", False), "lm_head"]
            assert step["launched"] == expected
        assert [step["transposes"] for step in rank] == [0, 1, 0, 0]


def test_tied_gradient_takes_all_processors_where_no_rank_waits() -> None:
    manager = TrainingManager(tiny_gpt(), Hyperparameters(block_size=16))
    add_gradients(manager.model, 0, range(1))
    with (
        patch.object(train_gpt, "transpose_add", wraps=train_gpt.transpose_add) as add,
        patch.object(train_gpt, "transpose_copy", wraps=train_gpt.transpose_copy) as copy,
    ):
        manager.optimizer.step(True)
    assert [call.args[2] for call in (*add.call_args_list, *copy.call_args_list)] == [True, True]


def test_backward_pass_builds_each_bank_once_and_copies_nothing_else(traced) -> None:
    """The products write a layer's gradients; one cat (attn) and one stack (mlp) a micro-batch join them, without a zero-padded
    bank for each slice; a second micro-batch is added in place."""
    for rank in traced:
        for step in rank:
            assert sorted(name for name in step["backward"] if name in COPIES) == ["cat", "cat", "stack", "stack"]


# -----------------------------------------------------------------------------
# The dtype in which gradients are summed


def manager_in_bf16(grad_dtype: str) -> TrainingManager:
    return TrainingManager(tiny_gpt(torch.bfloat16), short_schedule(num_scheduled_iterations=4, grad_dtype=grad_dtype))


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
        terms = torch.stack([normal(f"g_{label}_0_{i}", tuple(param.shape)).to(param.dtype).double() for i in range(16)])
        error = ((pending[label].double() - terms.sum(0)).abs() / terms.abs().sum(0)).max()
        wide = grad_dtype == "float32" or param.dtype == torch.float32
        assert pending[label].dtype == (torch.float32 if wide else torch.bfloat16) and pending[label].shape == param.shape
        assert error <= 16 * U32 if wide else U16 / 16 < error <= 16 * U16, label


def test_wide_gradients_stay_for_adam_and_come_back_from_a_saved_state() -> None:
    """After an even step the banks' gradients are used, the others pending in fp32; restored, they give the same weights."""
    manager = manager_in_bf16("float32")
    add_micro_batches(manager, range(2))
    manager.step_optimizers(0)
    pending = manager.optimizer.gradients()
    assert set(pending) == {label for label, row in PARAM_TABLE.items() if not row.every_step}
    saved = manager.state_dict()

    def go_on() -> dict[str, Tensor]:
        add_micro_batches(manager, range(2, 4))
        manager.step_optimizers(1)
        assert not manager.optimizer.gradients()
        return {label: param.detach().clone() for label, param in manager.model.named_parameters()}

    first = go_on()
    manager.load_state_dict(saved)
    assert unequal(saved["partial"], manager.optimizer.gradients()) == []
    assert unequal(first, go_on()) == []
    assert not torch.equal(first["bigram_embed"], saved["same"]["parameters"]["bigram_embed"])


def test_wide_and_plain_gradients_agree_where_sums_are_exact() -> None:
    """One micro-batch a step is not summed: the buffer changes nothing, bit for bit, the tied transpose included."""
    managers = [manager_in_bf16(grad_dtype) for grad_dtype in ("param", "float32")]
    for manager in managers:
        for label in ("embed", "lm_head"):  # a sum over exact quarters, in the tied transpose
            param = manager.model.get_parameter(label)
            param.grad = (normal("g" + label, tuple(param.shape)) * 4).round().div(4).clamp(-3, 3).bfloat16()
        for label, param in manager.model.named_parameters():
            if param.grad is None:
                param.grad = normal("g" + label, tuple(param.shape)).to(param.dtype)
        manager.step_optimizers(1)
    assert unequal(*(dict(manager.model.named_parameters()) for manager in managers)) == []
