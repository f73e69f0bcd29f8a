"""Tail averages: what a plain loop over whole weights gives, on any number of ranks, from any checkpoint, once."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import train_gpt
from common import (
    TOLERANCE64, U16, U32, add_gradients, ends_with, lines_of, normal, options, short_schedule, tiny_gpt, tiny_settings,
    unequal,
)  # fmt: skip
from quick_runs import no_warm_up  # noqa: F401
from runtime.checkpoints import read_checkpoint
from runtime.ranks import Ranks
from sample import sample
from tail_averages import TAIL_TABLE, Tail, TailAverages, initial_averages
from train_gpt import PARAM_TABLE, NorMuonAndAdam, TrainingManager, join_mantissa, main, split_mantissa

F64 = torch.float64
VALUES = [tail.label for tail in TAIL_TABLE if not tail.keep_norm]  # value embeddings

# -----------------------------------------------------------------------------
# When: ticks


def ticks(tail: Tail, total: int) -> dict[int, float]:
    """Step: what the average keeps of itself."""
    return {step: keep for step in range(total) if (keep := tail.keep(step, total)) is not None}


@pytest.mark.parametrize("total, window, every, expected", [
    (20, 0.5, 1, range(10, 20)), (20, 0.5, 2, (11, 13, 15, 17, 19)), (20, 0.5, 4, (11, 15, 19)), (21, 0.5, 4, (12, 16, 20)),
    (20, 1.0, 4, (3, 7, 11, 15, 19)), (20, 0.01, 4, (19,)), (1, 0.2, 4, (0,)), (8, 0.3, 1, (6, 7)),
])  # fmt: skip
def test_ticks_are_counted_back_from_the_last_step(total: int, window: float, every: int, expected) -> None:
    assert [*ticks(Tail("x", window, 0.1, every), total)] == [*expected]
    assert Tail("x", window, 0.1, every).ticks(total, total) == len([*expected])


@pytest.mark.parametrize("total", [240, 241, 1765])
def test_every_update_of_adam_counts_once(total: int) -> None:
    """Adam updates on odd steps: a tick after each update of the tail, or one step later, and after the last one."""
    for tail in (tail for tail in TAIL_TABLE if not PARAM_TABLE[tail.label].every_step):
        last_updates = [step - (step % 2 == 0) for step in ticks(tail, total)]
        assert last_updates == [*range(last_updates[0], total, 2)]
        assert abs(total - 1 - last_updates[0] - tail.window * total) < 3


def test_rates_are_those_of_public_record_92() -> None:
    """In its 1,194 steps: 2/299 a step, 4/53 and 2/75 in four steps, the last within 0.7 %; the first tick copies."""
    first = {}
    for tail in TAIL_TABLE:
        keeps = [*ticks(tail, 1194).values()]
        assert keeps[0] == 0 and len({*keeps[1:]}) == 1 and len(keeps) == -(-round(tail.window * 1194) // tail.every)
        first[tail.label, round(tail.window * 1194), tail.every] = 1 - keeps[1]
    assert first == {
        ("lm_head", 298, 2): pytest.approx(1 - (1 - 2 / 299) ** 2, rel=1e-12),
        ("embed", 298, 2): pytest.approx(1 - (1 - 2 / 299) ** 2, rel=1e-12),
        **{(label, 250, 2): pytest.approx(1 - (1 - 4 / 53) ** 0.5, rel=1e-3) for label in VALUES},
        **{(label, 250, 4): pytest.approx(4 / 53, rel=1e-3) for label in ("attn", "mlp")},
        **{(label, 298, 4): pytest.approx(2 / 75, rel=0.007) for label in ("attn", "mlp")},
    }


def test_the_tables_numbers() -> None:
    """Written a second time, as in test_pins.py; blends of Q, K, V, O."""
    head, value = (298, 149.5, 2, (0.65,), True), (250, 51.5, 2, (1.0,), False)
    found: dict[str, list] = {}
    for label, window, memory, *others in TAIL_TABLE:
        found.setdefault(label, []).append((round(window * 1194, 9), round(memory * 1194, 9), *others))
    assert found == {
        "lm_head": [head], "embed": [head], **{label: [value] for label in VALUES},
        "attn": [(250, 51.5, 4, (0, 0, 1, 1), True), (298, 149.5, 4, (0.55, 0.55, 0.35, 0.35), True)],
        "mlp": [(250, 51.5, 4, (1.0,), True), (298, 149.5, 4, (0.35,), True)],
    }  # fmt: skip


# -----------------------------------------------------------------------------
# What: against a plain loop, on any number of ranks

TOTAL = 9
# Sizes that neither 7 nor 8 ranks, nor vector units, divide evenly: 12 and 6 matrices, odd columns.
SHAPES = {
    "attn": (3, 20, 5),
    "mlp": (3, 2, 24, 7),
    "lm_head": (56, 37),
    "embed": (112, 11),
    VALUES[0]: (112, 3),
    "gate": (5, 3),
}
BANKS = ("attn", "mlp")
ROWS = {label: replace(PARAM_TABLE[label], **{} if label in BANKS else {"tied_to": ""}) for label in SHAPES if label != "gate"}
ROWS["gate"] = PARAM_TABLE["attn_gate_bank"]
TABLE = (
    Tail("lm_head", 0.9, 0.4, every=2, blend=(0.65,)),
    Tail("embed", 0.9, 0.4, every=2, blend=(0.25,)),
    Tail(VALUES[0], 0.7, 0.2, every=2, keep_norm=False),
    Tail("attn", 0.7, 0.25, every=2, blend=(0, 0.3, 1, 0.8)),
    Tail("attn", 0.95, 0.6, every=3, blend=(0.5, 0.4, 0.3, 0.2)),
    Tail("mlp", 0.6, 0.2, every=2),
    Tail("mlp", 1.0, 0.5, every=3, blend=(0.4, 0.6)),
    Tail("gate", 0.4, 0.3, every=1, blend=(0.5,)),
)


def weights_after(step: int, label: str) -> Tensor:
    """What a run's weights could be: a drift, and noise."""
    return normal(f"start {label}", SHAPES[label]) * (1 + 0.1 * step) + 0.3 * normal(f"{label} {step}", SHAPES[label])


def end_of_a_run(rank: int, world_size: int, dtype: torch.dtype, comms: str = "sharded") -> dict:
    """Nine steps, of which each sets the weights, in full precision, and is taken in: the end, and this rank's averages."""
    params = {label: nn.Parameter(torch.zeros(shape, dtype=dtype)) for label, shape in SHAPES.items()}
    rows = {label: replace(row, comms=comms) if row.comms == "sharded" else row for label, row in ROWS.items()}
    optimizer = NorMuonAndAdam(params.items(), rows, SHAPES, SHAPES)
    tails, reports = TailAverages(optimizer, TABLE, TOTAL), []
    for step in range(TOTAL):
        for label, param in params.items():
            x, state, own = weights_after(step, label), optimizer.state[label], optimizer.own_rows[label]
            if "mantissa" in state:
                x, lower = split_mantissa(x)
                state["mantissa"].copy_(rows[label].as_rows(lower)[own])
            param.data.copy_(x)
        reports.append(tails.after_step(step))
    wide = {
        label: join_mantissa(optimizer.shards[label], optimizer.state[label]["mantissa"])
        if dtype == torch.bfloat16 and label in BANKS else optimizer.shards[label].clone() for label in SHAPES
    }  # fmt: skip
    averages = {
        label: {name: x for name, x in state.items() if name.startswith("average")} for label, state in optimizer.state.items()
    }
    padded = {label: x.clone() for label, x in optimizer.padded.items()}
    whole = {label: param.data.clone() for label, param in params.items()}
    return dict(params=whole, own=wide, averages=averages, padded=padded, reports=reports)


def ends_of_runs(rank: int, world_size: int) -> dict:
    found = {f"{dtype}": end_of_a_run(rank, world_size, dtype) for dtype in (torch.bfloat16, torch.float32, F64)}
    return found | {"replicated": end_of_a_run(rank, world_size, torch.bfloat16, "replicated")}


@pytest.fixture(scope="module")
def ends(run_ranks) -> Callable[[int], list[dict]]:
    cache: dict[int, list[dict]] = {}

    def get(world_size: int) -> list[dict]:
        if world_size not in cache:
            cache[world_size] = [ends_of_runs(0, 1)] if world_size == 1 else run_ranks(world_size, ends_of_runs)
        return cache[world_size]

    return get


def plain_end(label: str, stored: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The whole parameter's end and its averages, in fp64, by a loop over whole weights; stored: what a step leaves of them."""
    history = [stored(weights_after(step, label)).double() for step in range(TOTAL)]
    x = history[-1].clone()
    matrices = x.view(len(ROWS[label].as_rows(x)), -1)
    averages = []
    for tail in (tail for tail in TABLE if tail.label == label):
        average = None
        for step in range(TOTAL):
            before_the_end = TOTAL - 1 - step
            if before_the_end < round(tail.window * TOTAL) and before_the_end % tail.every == 0:
                rate = 1 - (1 - 1 / max(1, tail.memory * TOTAL)) ** tail.every
                average = history[step].clone() if average is None else average + rate * (history[step] - average)
        for i, (row, target) in enumerate(zip(matrices, average.view_as(matrices))):
            row += tail.blend[i % len(tail.blend)] * (target - row)
        averages.append(ROWS[label].as_rows(average))
    if any(tail.keep_norm for tail in TABLE if tail.label == label):
        x *= history[-1].norm() / x.norm()
    return x, averages


WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 4, 7, 8])
EACH = pytest.mark.parametrize("kind", ["torch.float64", "torch.float32", "torch.bfloat16", "replicated"])


@EACH
@WORLD_SIZES
def test_the_end_is_a_plain_loops_over_whole_weights_in_fp64(ends, world_size: int, kind: str) -> None:
    """Adam's bf16 weights are averaged as they are and end rounded; a bank's, with their mantissas, are fp32 throughout.
    fp32: some ten roundings a tick, of numbers below 8, faded like the weights; nine ticks, two averages, the norm."""
    ranks = ends(world_size)
    for label in SHAPES:
        halves = kind in ("torch.bfloat16", "replicated") and label not in BANKS
        expected, averages = plain_end(label, (lambda x: x.bfloat16()) if halves else (lambda x: x))
        bound = TOLERANCE64 if kind == "torch.float64" else 100 * 8 * U32
        sharded = ROWS[label].comms == "sharded" and kind != "replicated"
        own = [rank[kind]["own"][label] for rank in ranks[: None if sharded else 1]]
        found = torch.cat([x.double() for x in own]).view_as(expected)
        assert ((found - expected).abs() <= bound + U16 * halves * expected.abs()).all(), label
        for i, average in enumerate(averages, 1):
            mine = torch.cat([rank[kind]["averages"][label][f"average_{i}"] for rank in ranks[: None if sharded else 1]])
            assert mine.dtype == (F64 if kind == "torch.float64" else torch.float32)
            assert (mine.double() - average).abs().max() <= bound, (label, i)


@EACH
@pytest.mark.parametrize("world_size", [2, 4, 7, 8])
def test_every_number_of_ranks_ends_on_the_same_bits(ends, world_size: int, kind: str) -> None:
    """And on the same whole parameters on each rank, and says the same."""
    (alone,), ranks = ends(1), ends(world_size)
    for rank in ranks:
        assert unequal(rank[kind]["params"], alone[kind]["params"]) == []
        assert rank[kind]["reports"] == alone[kind]["reports"]
    for label in SHAPES:
        sharded = ROWS[label].comms == "sharded" and kind != "replicated"
        for name, expected in {**alone[kind]["averages"][label], "own": alone[kind]["own"][label]}.items():
            parts = [{**rank[kind]["averages"][label], "own": rank[kind]["own"][label]}[name] for rank in ranks]
            assert unequal(torch.cat(parts) if sharded else parts[0], expected) == [], (label, name)
        padding = len(ranks[0][kind]["padded"][label]) - len(ROWS[label].as_rows(alone[kind]["params"][label]))
        assert bool(padding) == (sharded and label in BANKS and 6 * (1 + (label == "attn")) % world_size != 0)
        if padding:
            whole = ranks[0][kind]["padded"][label]
            assert (whole[:padding] if ROWS[label].pad_front else whole[-padding:]).count_nonzero() == 0


def test_norms_are_restored_and_value_embeddings_are_shorter(ends) -> None:
    for label in SHAPES:
        before, found = weights_after(TOTAL - 1, label).double().norm(), ends(1)[0]["torch.float32"]["params"][label]
        after = found.double().norm()
        if label in VALUES:
            assert after < 0.99 * before
        else:
            assert after == pytest.approx(before, rel=4 * U32), label


def test_the_report_says_what_was_averaged(ends) -> None:
    *before, report = ends(1)[0]["torch.float32"]["reports"]
    assert before == [""] * (TOTAL - 1)
    parts = [part.partition(", norm × ") for part in report.removeprefix("tail averages: ").split("; ")]
    assert [part[0] for part in parts] == [
        "lm_head of 4 steps' weights", "embed of 4 steps' weights", f"{VALUES[0]} of 3 steps' weights",
        "attn of 3 and 3 steps' weights", "mlp of 3 and 3 steps' weights", "gate of 4 steps' weights",
    ]  # fmt: skip
    assert [bool(part[2]) and float(part[2]) > 1 for part in parts] == [True, True, False, True, True, True]


# -----------------------------------------------------------------------------
# In an optimizer


def test_an_average_that_begins_before_the_split_is_the_heads_transposed() -> None:
    """To the bit, while the two are tied, and at the split, where embed takes the head's state over."""
    manager = TrainingManager(tiny_gpt(), short_schedule(tail_averages=True))
    with torch.no_grad():
        manager.model.embed.copy_(manager.model.lm_head.T)
    both = tuple(Tail(label, 1.0, 0.3, every=2) for label in ("lm_head", "embed"))
    manager.optimizer.state["lm_head"].pop("average_1"), manager.optimizer.state["embed"].pop("average_1")
    manager.tails, state = TailAverages(manager.optimizer, both, 14), manager.optimizer.state
    for step in range(manager.split_step + 4):
        manager.advance_schedule(step)
        add_gradients(manager.model, step)
        manager.step_optimizers(step)
        manager.tails.after_step(step)
        same = torch.equal(state["embed"]["average_1"], state["lm_head"]["average_1"].T)
        assert same == (step < manager.split_step + 2)  # then embed has moved by itself
        assert bool(state["embed"]["average_1"].any()) == (step > 0)


@pytest.mark.parametrize("table, holds", [
    ([Tail("embed", 0.9, 0.2, 2)], False),
    ([Tail("embed", 0.9, 0.2, 2), Tail("lm_head", 0.9, 0.1, 2)], False),
    ([Tail("lm_head", 0.2, 0.2, 2), Tail("embed", 0.9, 0.2, 2)], False),
    ([Tail("lm_head", 0.9, 0.2, 2, (0.5,)), Tail("embed", 0.9, 0.2, 2, keep_norm=False)], True),
    ([Tail("lm_head", 0.9, 0.2, 2), Tail("embed", 0.1, 0.1, 1)], True),
    ([Tail("embed", 0.1, 0.1, 1)], True),
])  # fmt: skip
def test_an_average_of_embed_from_before_the_split_is_refused_unless_it_is_the_heads(
    monkeypatch: pytest.MonkeyPatch, table: list[Tail], holds: bool
) -> None:
    """It took in zeros, and at the split the head's average, which may not have begun, replaced it in silence."""
    monkeypatch.setattr(train_gpt, "TAIL_TABLE", (*table,))
    with nullcontext() if holds else pytest.raises(ValueError, match="^TAIL_TABLE, embed: begins while it is lm_head's"):
        TrainingManager(tiny_gpt(), short_schedule(tail_averages=True))


@pytest.mark.parametrize("tail, message", [
    (Tail("ve9", 0.5, 0.1, 2), "there is no parameter 've9'"),
    (Tail("embed", 0.0, 0.1, 2), "embed: window must be above 0 and at most 1"),
    (Tail("embed", 1.5, 0.1, 2), "embed: window must be above 0 and at most 1"),
    (Tail("embed", 0.5, 0.0, 2), "embed: .* memory and every positive"),
    (Tail("embed", 0.5, 0.1, 0), "embed: .* memory and every positive"),
])  # fmt: skip
def test_a_row_that_cannot_be_meant_is_named(monkeypatch: pytest.MonkeyPatch, tail: Tail, message: str) -> None:
    monkeypatch.setattr(train_gpt, "TAIL_TABLE", (tail,))
    with pytest.raises(ValueError, match=f"^TAIL_TABLE.*{message}"):
        TrainingManager(tiny_gpt(), short_schedule(tail_averages=True))


def test_averages_are_in_full_precision_and_only_of_the_tables_parameters() -> None:
    state = TrainingManager(tiny_gpt(torch.bfloat16), short_schedule(tail_averages=True)).optimizer.state
    found = {label: [name for name in values if name.startswith("average")] for label, values in state.items()}
    counts = {"attn": 2, "mlp": 2} | dict.fromkeys(("lm_head", "embed", *VALUES), 1)
    assert {label: len(names) for label, names in found.items() if names} == counts
    assert {state[label][name].dtype for label, names in found.items() for name in names} == {torch.float32}
    assert initial_averages("scalars", TAIL_TABLE, torch.zeros(3)) == {}


# -----------------------------------------------------------------------------
# In a run

STEPS = 8
END, LAST = f"step_{STEPS:06d}.pt", f"step_{STEPS - 1:06d}.pt"
BF16 = dict(dtype="bfloat16", batch_unit=16)  # half the tokens: a CPU without units for bf16 takes long for each
WIDE = tuple(tail._replace(window=0.8, memory=0.4, every=1 + i // 2 % 2) for i, tail in enumerate(TAIL_TABLE))


@pytest.fixture(scope="module")
def wide_tails() -> Iterator[None]:
    """Tails of six of eight steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "TAIL_TABLE", WIDE)
        yield


@pytest.fixture(scope="module")
def logs(shards: Path, tmp_path_factory: pytest.TempPathFactory, wide_tails) -> Path:
    """Runs in bf16 that save at each step: with averages, without."""
    folder = tmp_path_factory.mktemp("tails")
    for run_id, on in (("on", True), ("off", False)):
        more = dict(**BF16, save_every=1, keep_checkpoints=99, val_every=2)
        main(options(shards, folder, run_id=run_id, tail_averages=on, **more))
    return folder / "logs"


def resume(shards: Path, folder: Path, checkpoint: Path) -> None:
    more = dict(**BF16, val_every=2, save_every=STEPS, tail_averages=True)
    main(options(shards, folder, resume=checkpoint, **more))


def without_averages(state: dict) -> dict:
    """A checkpoint's state but for these."""
    keep = lambda values: {name: x for name, x in values.items() if not name.startswith("average_")}
    return {**state, "sharded": {label: keep(values) for label, values in state["sharded"].items()}}


def averaged(state: dict) -> list[str]:
    return [f"{label}.{name}" for label, values in state["sharded"].items() for name in values if name.startswith("average_")]


def test_training_is_the_same_to_the_last_update(logs: Path) -> None:
    """Validations within the run see the weights of training; off, there is nothing in state or log."""
    for step in range(1, STEPS):
        on, off = (read_checkpoint(logs / run / f"step_{step:06d}.pt")["state"] for run in ("on", "off"))
        assert len(averaged(on)) == len(TAIL_TABLE) and averaged(off) == []
        assert unequal(without_averages(on), off) == []
    on, off = (lines_of(logs / f"{run}.txt").splitlines() for run in ("on", "off"))
    (report,) = [line for line in on if line not in off and "val_loss" not in line]
    assert report.startswith("tail averages: lm_head of 6 steps' weights, norm × ")
    changed = [line.split()[0] for line in on if line not in off and line != report]
    assert changed == [f"step:{STEPS}/{STEPS}"] and len(on) == len(off) + 1
    assert on.index(report) == on.index(f"step:{STEPS}/{STEPS} train_time: step_avg:") - 1


def test_the_last_checkpoint_holds_the_averages_and_the_state_of_training(logs: Path) -> None:
    """Weights and mantissas of the table's parameters are other ones; moments, gates and scalars are those of training."""
    on, off = (read_checkpoint(logs / run / END)["state"] for run in ("on", "off"))
    labels = {tail.label for tail in TAIL_TABLE}
    expected = {f"same.parameters.{label}" for label in labels} | {f"sharded.{label}.mantissa" for label in BANKS}
    assert set(unequal(without_averages(on), off)) == expected
    for label in labels:
        a, b = (state["same"]["parameters"][label].double() for state in (on, off))
        assert 0.001 < (a - b).norm() / b.norm() < 1 and (a.norm() == pytest.approx(b.norm(), rel=U16)) == (label not in VALUES)


@pytest.mark.parametrize("step", [1, 2, 3, 6, STEPS - 1, STEPS])
def test_a_resumed_run_ends_on_the_same_bits(logs, shards, tmp_path, step: int, no_warm_up) -> None:  # noqa: F811
    """From before the tail, in it, and at the end, where nothing is averaged again."""
    resume(shards, tmp_path, logs / "on" / f"step_{step:06d}.pt")
    assert lines_of(tmp_path / "logs" / "run.txt") == lines_of(logs / "on.txt")
    if step < STEPS:
        ends = (read_checkpoint(folder / END)["state"] for folder in (logs / "on", tmp_path / "logs" / "run"))
        assert unequal(*ends) == []


def test_the_warm_up_averages_without_a_trace(logs, shards, tmp_path) -> None:
    resume(shards, tmp_path, logs / "on" / "step_000005.pt")
    ends = (read_checkpoint(folder / END)["state"] for folder in (logs / "on", tmp_path / "logs" / "run"))
    assert unequal(*ends) == []


def two_ranks_resume(rank: int, world_size: int, shards: Path, folder: Path) -> None:
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    base = dict(save_every=1, keep_checkpoints=99, **BF16, tail_averages=True)
    train_gpt.warm_up, train_gpt.TAIL_TABLE = lambda *_: None, WIDE
    train_gpt.train(tiny_settings(shards, folder, **base), ranks)
    for step in (5, STEPS - 1, STEPS):
        resume = str(folder / "logs" / "run" / f"step_{step:06d}.pt")
        train_gpt.train(tiny_settings(shards, folder, **base, run_id=f"from{step}", resume=resume), ranks)


def test_two_ranks_resume_to_the_same_bits(run_ranks, shards, tmp_path, wide_tails, no_warm_up) -> None:  # noqa: F811
    """And one goes on for two."""
    run_ranks(2, two_ranks_resume, shards, tmp_path)
    end = read_checkpoint(tmp_path / "logs" / "run" / END)["state"]
    for step in (5, STEPS - 1):
        assert unequal(end, read_checkpoint(tmp_path / "logs" / f"from{step}" / END)["state"]) == []
    for step in (5, STEPS - 1, STEPS):
        assert lines_of(tmp_path / "logs" / f"from{step}.txt") == lines_of(tmp_path / "logs" / "run.txt")
    last = tmp_path / "logs" / "run" / LAST
    main(options(shards, tmp_path, **BF16, save_every=STEPS, tail_averages=True, run_id="alone", resume=last))
    alone = read_checkpoint(tmp_path / "logs" / "alone" / END)["state"]
    for label, x in end["same"]["parameters"].items():  # one step's sums in another order
        assert (alone["same"]["parameters"][label].double() - x.double()).norm() <= 0.02 * x.double().norm(), label


def test_the_final_validation_sees_the_averages_and_the_clock_their_making(shards, tmp_path, monkeypatch, wide_tails) -> None:
    seen, ends, validate, end = {}, [], train_gpt.validate, TailAverages._end

    def validate_seen(step, manager, run):
        seen[step] = manager.state_dict()["same"]["parameters"]
        return validate(step, manager, run)

    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    monkeypatch.setattr(train_gpt, "validate", validate_seen)
    monkeypatch.setattr(TailAverages, "_end", lambda *args: (ends.append(time.sleep(0.1)), end(*args))[1])
    main(options(shards, tmp_path, save_every=STEPS, tail_averages=True))
    saved = read_checkpoint(tmp_path / "logs" / "run" / END)
    assert unequal(seen[STEPS], saved["state"]["same"]["parameters"]) == [] and [*seen] == [0, 4, STEPS]
    log = (tmp_path / "logs" / "run.txt").read_text()
    times = {
        step: int(ms) for step, ms in re.findall(r"^(step:\d+/\d+) (?:val_loss:\S+ )?train_time:(\d+)ms", log, re.MULTILINE)
    }
    assert times[f"step:{STEPS}/{STEPS}"] == pytest.approx(1000 * saved["seconds"], abs=1)
    assert ends and times[f"step:{STEPS}/{STEPS}"] - times[f"step:{STEPS - 1}/{STEPS}"] > 100 * len(ends)


def test_a_checkpoint_from_before_a_longer_window_is_refused(shards, tmp_path, monkeypatch, capsys, wide_tails) -> None:
    """Its averages are 0 and would be taken for begun ones; from before both windows it goes on. Text comes from it anyway."""
    short = (Tail("lm_head", 0.3, 0.1, 2, keep_norm=False),)
    monkeypatch.setattr(train_gpt, "TAIL_TABLE", short)
    more = dict(**BF16, val_every=0, tail_averages=True)
    main(options(shards, tmp_path, **more, save_every=2, keep_checkpoints=9))
    monkeypatch.setattr(train_gpt, "TAIL_TABLE", (short[0]._replace(window=0.6),))
    saved = tmp_path / "logs" / "run"
    at = lambda step: options(shards, tmp_path, **more, run_id=f"from{step}", resume=saved / f"step_{step:06d}.pt")
    message = r"step_000004.pt cannot be resumed: its steps took 0 weights into lm_head.average_1, here 1$"
    ends_with(capsys, at(4), message, 1)
    assert sample(train_gpt, f"{saved / 'step_000004.pt'}", "def ", 3, 1.0)
    main(at(2))
    assert "tail averages: lm_head of 3 steps' weights" in (tmp_path / "logs" / "from2.txt").read_text()


def test_a_checkpoint_of_other_tails_is_refused(logs, shards, tmp_path, monkeypatch, capsys) -> None:
    """By the setting; by a table with other averages, before anything is trained."""
    other = options(shards, tmp_path, **BF16, val_every=2, tail_averages=False, resume=logs / "on" / LAST)
    ends_with(capsys, other, r"step_000007.pt cannot be resumed: tail_averages is True, here False", 1)
    monkeypatch.setattr(train_gpt, "TAIL_TABLE", (*WIDE, Tail("mlp", 0.5, 0.1, 4), Tail("attn_gate_bank", 0.5, 0.1, 4)))
    same = options(shards, tmp_path, **BF16, val_every=2, tail_averages=True, resume=logs / "on" / LAST)
    missing = ("same.optimizer.attn_gate_bank.average_1", "sharded.mlp.average_3")
    message = f"cannot be resumed: {'; '.join(f'state.{name} is missing' for name in missing)}"
    ends_with(capsys, same, message, 1)
    assert not (tmp_path / "logs").exists()
