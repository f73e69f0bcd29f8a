"""The schedule is its table's, for any number of steps; the manager's state follows it, and comes
back from a checkpoint."""

import math
from fractions import Fraction

import pytest
import torch

from common import add_gradients, short_schedule, tiny_gpt, unequal
from runtime.checkpoints import load_whole_state, whole_state
from runtime.ranks import Ranks
from train_gpt import (
    EXTENSION, FINAL_VALIDATION, LR_DECAY_FROM, LR_FLOOR, MOMENTUM_HIGH, MOMENTUM_LOW, PARAM_TABLE,
    SPLIT_EMBED_AT, STAGES, GPT, Hyperparameters, Stage, TrainingManager, step_schedule,
)  # fmt: skip

# A handful of fp64 operations on numbers below 2.
EXACT = dict(rel=1e-14, abs=1e-14)
LENGTHS = pytest.mark.parametrize("scheduled", (1, 2, 3, 4, 7, 100, 280))


def exactly(fraction: float) -> Fraction:
    return Fraction(fraction).limit_denominator(1000)


def stage_of(step: int, scheduled: int) -> tuple[Stage, Fraction]:
    """The stage of a step, and how much of it lies behind. Stages end at the nearest step."""
    begin = 0
    for stage in STAGES:
        end = round(exactly(stage.until) * scheduled)
        if begin <= step < end:
            return stage, Fraction(step - begin, end - begin)
        begin = end
    return EXTENSION, Fraction(0)


def every_step(scheduled: int) -> tuple[Hyperparameters, range]:
    """With the final validation's."""
    h = short_schedule(num_scheduled_iterations=scheduled)
    return h, range(h.total_iterations + 1)


@LENGTHS
def test_batch_cut_and_windows_are_those_of_the_stage(scheduled: int) -> None:
    h, steps = every_step(scheduled)
    for step in steps:
        stage, _ = stage_of(step, scheduled)
        shown = FINAL_VALIDATION if step == h.total_iterations else stage
        said = step_schedule(step, h)
        assert said.batch_tokens == shown.batch * h.batch_unit
        assert said.max_doc_len == stage.docs * h.block_size
        assert said.short_window == shown.short * h.block_size
        assert said.long_window == shown.long * h.block_size
        assert said.yarn_window == stage.long * h.block_size


@LENGTHS
def test_loss_weights_fade_over_their_stage(scheduled: int) -> None:
    h, steps = every_step(scheduled)
    for step in steps:
        stage, behind = stage_of(step, scheduled)
        first = (*stage.mtp_first, stage.prefix_first)
        ends = zip(first, (*stage.mtp_last, stage.prefix_last), strict=True)
        expected = [a + (b - a) * float(behind) for a, b in ends]
        said = step_schedule(step, h)
        found = (*said.mtp_weights, said.prefix_weight)
        assert found == pytest.approx(tuple(expected), **EXACT)


@LENGTHS
def test_lr_is_the_stages_and_decays_to_the_floor(scheduled: int) -> None:
    h, steps = every_step(scheduled)
    begin = math.floor(exactly(LR_DECAY_FROM) * scheduled)
    for step in steps:
        done = max(0.0, (step - begin) / (scheduled - begin))
        expected = (1 - done) * stage_of(step, scheduled)[0].lr + done * LR_FLOOR
        if step >= scheduled:
            expected = LR_FLOOR
        assert step_schedule(step, h).lr_schedule == pytest.approx(expected, **EXACT), step


@pytest.mark.parametrize("warmup, cooldown", [(300, 50), (10, 10), (0, 1), (90, 40)])
def test_momentum_rises_stays_and_falls_and_the_rise_has_precedence(
    warmup: int, cooldown: int
) -> None:
    changes = dict(momentum_warmup=warmup, momentum_cooldown=cooldown)
    h = short_schedule(num_scheduled_iterations=98, **changes)
    rise = MOMENTUM_HIGH - MOMENTUM_LOW
    for step in range(100):
        expected = MOMENTUM_HIGH - rise * max(0, step - (100 - cooldown)) / cooldown
        if step < warmup:
            expected = MOMENTUM_LOW + rise * step / warmup
        assert step_schedule(step, h).momentum == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("scheduled", [1365, 1725, 290, 151, 150, 12, 4, 3, 1])
def test_embedding_splits_on_the_first_step_from_its_time_on_that_updates_it(
    scheduled: int,
) -> None:
    time = round(exactly(SPLIT_EMBED_AT) * scheduled)
    row = PARAM_TABLE["embed"]
    split = next(step for step in range(time, scheduled + 2) if row.is_due(step))
    h = short_schedule(num_scheduled_iterations=scheduled)
    assert TrainingManager(tiny_gpt(), h).split_step == split


# -----------------------------------------------------------------------------
# The record's numbers, written a second time

# By first step: batch in units of 16,384 tokens; in blocks of 128 tokens the document cut, short
# and long window, and the long window that YaRN has reached; peak of the rate; MTP weights and the
# prefix's at the stage's begin and end.
RECORD = {
    0: (8, 7, 1, 3, 3, 1.00, (1, 0.5, 0.25, 0.25), (1, 0.5, 0, 0.25)),
    455: (16, 16, 3, 7, 7, 1.52, (1, 0.5, 0.25), (1, 0, 0)),
    910: (24, 16, 5, 11, 11, 1.73, (1, 0), (1, 0)),
    1365: (24, 16, 6, 13, 13, 0.15, (1, 0), (1, 0)),  # the extension, at the cooldown's floor
    1375: (24, 16, 6, 20, 13, 0.15, (1, 0), (1, 0)),  # the final validation
}


def test_every_step_of_the_record_has_its_numbers() -> None:
    """The cooldown goes from step 546, 0.40 of 1365, to the floor of 0.15; the peak jumps on the way.
    Momentum rises over 300 steps and falls over the last 50."""
    h = Hyperparameters()
    assert h.total_iterations == 1375
    for step in range(1376):
        begin = max(first for first in RECORD if first <= step)
        end = min((first for first in RECORD if first > step), default=1376)
        batch, *blocks, peak, first, last = RECORD[begin]
        done = (step - begin) / (end - begin)
        weights = [a + done * (b - a) for a, b in zip(first, last)]
        t = min(1, max(0, (step - 546) / 819))
        momentum = min(0.85 + 0.1 * step / 300, 0.95, 0.95 - 0.002 * (step - 1325))
        said = step_schedule(step, h)
        assert said[:5] == (batch * 16384, *(128 * x for x in blocks)), step
        assert said.lr_schedule == pytest.approx(peak * (1 - t) + 0.15 * t, **EXACT), step
        assert said.momentum == pytest.approx(momentum, **EXACT), step
        found = (*said.mtp_weights, said.prefix_weight)
        assert found == pytest.approx(tuple(weights), **EXACT), step


# -----------------------------------------------------------------------------
# The manager

ALONE = Ranks(0, 1, torch.device("cpu"))


def yarn_of(model: GPT) -> dict[str, object]:
    return {"scale": model.yarn.scale, "table": model.yarn.table.clone()}


def test_forward_schedule_is_the_steps() -> None:
    h = short_schedule()
    manager = TrainingManager(tiny_gpt(), h)
    for step in range(h.total_iterations + 1):
        manager.advance_schedule(step)
        said = step_schedule(step, h)
        given = manager.forward_schedule()
        assert torch.equal(given.mtp_weights, torch.tensor(said.mtp_weights, dtype=torch.float32))
        assert given[1:4] == (said.short_window, said.long_window, said.max_doc_len)
        prefix = torch.tensor([said.prefix_weight]) if said.prefix_weight else None
        assert unequal({"prefix": given.prefix_weight}, {"prefix": prefix}) == []


def test_yarn_takes_each_change_of_the_long_window_and_not_the_final_validations() -> None:
    model, reference = tiny_gpt(), tiny_gpt()
    h = short_schedule()
    manager = TrainingManager(model, h)
    changes = 0
    for step in range(h.total_iterations + 1):
        manager.advance_schedule(step)
        before, now = (stage_of(max(s, 0), 12)[0].long for s in (step - 1, step))
        if now != before:
            reference.yarn.extend(16 * before, 16 * now)
            changes += 1
        assert unequal(yarn_of(model), yarn_of(reference)) == [], step
    assert changes == len({stage.long for stage in (*STAGES, EXTENSION)}) - 1 > 0


@pytest.mark.parametrize("leap", [[9], [14], [3, 13], [0, 8, 14]], ids=str)
def test_leap_ends_where_single_steps_do(leap: list[int]) -> None:
    leaper, walker = tiny_gpt(), tiny_gpt()
    start = yarn_of(walker)
    manager = TrainingManager(leaper, short_schedule())
    for step in leap:
        manager.advance_schedule(step)
    manager = TrainingManager(walker, short_schedule())
    for step in range(leap[-1] + 1):
        manager.advance_schedule(step)
    assert unequal(yarn_of(leaper), yarn_of(walker)) == []
    assert set(unequal(yarn_of(walker), start)) == {"scale", "table"}


def test_going_back_beyond_a_change_of_windows_is_refused_and_changes_nothing() -> None:
    model = tiny_gpt()
    manager = TrainingManager(model, short_schedule())
    manager.advance_schedule(8)
    before = manager.forward_schedule()
    yarn = yarn_of(model)
    with pytest.raises(ValueError, match="step 0 is before the stage"):
        manager.advance_schedule(0)
    after = manager.forward_schedule()
    assert torch.equal(after.mtp_weights, before.mtp_weights) and after[1:] == before[1:]
    assert unequal(yarn_of(model), yarn) == []


def test_update_takes_the_mean_over_a_steps_micro_batches() -> None:
    """Of twice and eight times the gradient, summed over as many micro-batches, every bit is the
    same."""
    states = []
    for count in (1, 2, 8):
        manager = TrainingManager(tiny_gpt(), short_schedule(micro_batches=count))
        add_gradients(manager.model, 1)
        for param in manager.model.parameters():
            param.grad *= count
        manager.step_optimizers(1)
        states.append(whole_state(manager, ALONE))
    assert unequal(states[0], states[1]) == [] == unequal(states[0], states[2])


def run_steps(manager: TrainingManager, first: int, last: int) -> None:
    """Steps first .. last − 1 on gradients that label and step decide, and on to the step `last`."""
    for step in range(first, last):
        manager.advance_schedule(step)
        add_gradients(manager.model, step)
        manager.step_optimizers(step)
    manager.advance_schedule(last)


def everything(manager: TrainingManager) -> dict[str, object]:
    """What a checkpoint has, and the table that the model reads."""
    return {**whole_state(manager, ALONE), "table": manager.model.yarn.table.clone()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("saved_at", [3, 11])
def test_saved_state_starts_another_manager_that_ends_on_the_same_bits(
    saved_at: int, dtype: torch.dtype
) -> None:
    """Saved between two steps of Adam, with pending gradients, before and after the split."""
    manager = TrainingManager(tiny_gpt(dtype), short_schedule())
    run_steps(manager, 0, saved_at)
    saved = everything(manager)
    assert saved["gradients"].keys() == {x for x, row in PARAM_TABLE.items() if row.every > 1}
    run_steps(manager, saved_at, 14)
    at_end = everything(manager)
    tables = ("attn", "mlp", "embed", "lm_head", "value_embeds", "scalars")
    assert {f"parameters.{label}" for label in tables} <= {*unequal(saved, at_end)}
    assert saved["extra"]["tied"] == (saved_at <= manager.split_step)

    model = tiny_gpt(dtype)
    for param in model.parameters():
        param.data.zero_()
    other = TrainingManager(model, short_schedule())
    load_whole_state(other, saved, ALONE)
    assert unequal(everything(other), saved) == []
    run_steps(other, saved_at, 14)
    assert unequal(everything(other), at_end) == []
