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
    EXTENSION, FINAL_VALIDATION, LR_DECAY_FROM, LR_FLOOR, PARAM_TABLE, SPLIT_EMBED_AT, STAGES, GPT,
    Stage, TrainingManager, make_plan, split_step,
)  # fmt: skip

# A handful of fp64 operations on numbers below 2.
EXACT = dict(rel=1e-14, abs=1e-14)


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


@pytest.mark.parametrize("scheduled", (1, 3, 4, 7, 280))
def test_every_number_is_that_of_the_stage(scheduled: int) -> None:
    """Loss weights fade over their stage; the rate decays to the floor, which the extension has."""
    h = short_schedule(num_scheduled_iterations=scheduled)
    begin = math.floor(exactly(LR_DECAY_FROM) * scheduled)
    plan = make_plan(h)
    assert len(plan) == h.total_iterations + 1
    for step, now in enumerate(plan):
        stage, behind = stage_of(step, scheduled)
        shown = FINAL_VALIDATION if step == h.total_iterations else stage
        assert now.step == step and now.splits == (step == split_step(scheduled))
        assert now.batch_tokens == shown.batch * h.batch_unit
        blocks = (stage.docs, shown.short, shown.long, stage.long)
        assert now[2:6] == tuple(size * h.block_size for size in blocks)
        first = (*stage.mtp_first, stage.prefix_first)
        ends = zip(first, (*stage.mtp_last, stage.prefix_last), strict=True)
        weights = [a + (b - a) * float(behind) for a, b in ends]
        assert (*now.mtp_weights, now.prefix_weight) == pytest.approx(tuple(weights), **EXACT)
        done = min(1.0, max(0.0, (step - begin) / (scheduled - begin)))
        rate = (1 - done) * stage.lr + done * LR_FLOOR
        assert now.lr_factor == pytest.approx(rate, **EXACT), step


@pytest.mark.parametrize("scheduled", [1725, 151, 12, 3, 1])
def test_embedding_splits_on_the_first_step_from_its_time_on_that_updates_it(
    scheduled: int,
) -> None:
    time = round(exactly(SPLIT_EMBED_AT) * scheduled)
    row = PARAM_TABLE["embed"]
    split = next(step for step in range(time, scheduled + 2) if row.is_due(step))
    assert split_step(scheduled) == split


# -----------------------------------------------------------------------------
# The manager

ALONE = Ranks(0, 1, torch.device("cpu"))
PLAN = make_plan(short_schedule())


def yarn_of(model: GPT) -> dict[str, object]:
    return {"scale": model.yarn.scale, "table": model.yarn.table.clone()}


def test_leap_ends_where_single_steps_do_and_going_back_is_refused() -> None:
    """As in a run that is shorter than its stages."""
    leaper, walker = tiny_gpt(), tiny_gpt()
    start = yarn_of(walker)
    for model, steps in ((leaper, (3, 13)), (walker, range(14))):
        manager = TrainingManager(model, short_schedule())
        for step in steps:
            manager.advance_schedule(PLAN[step])
        with pytest.raises(ValueError, match="step 0 is before the stage"):
            manager.advance_schedule(PLAN[0])
    assert unequal(yarn_of(leaper), yarn_of(walker)) == []
    assert set(unequal(yarn_of(walker), start)) == {"scale", "table"}


def run_steps(manager: TrainingManager, first: int, last: int) -> None:
    """Steps first .. last − 1 on gradients that label and step decide, and on to the step `last`."""
    for step in range(first, last):
        manager.advance_schedule(PLAN[step])
        for i in range(2):
            add_gradients(manager.model, step, range(i, i + 1))
            manager.optimizer.accumulate()
        manager.step_optimizers(PLAN[step])
    manager.advance_schedule(PLAN[last])


def everything(manager: TrainingManager) -> dict[str, object]:
    """What a checkpoint has, and the table that the model reads."""
    return {**whole_state(manager, ALONE), "table": manager.model.yarn.table.clone()}


@pytest.mark.parametrize("saved_at, grad_dtype", [(3, "param"), (3, "float32"), (11, "param")])
def test_saved_state_starts_another_manager_that_ends_on_the_same_bits(
    saved_at: int, grad_dtype: str
) -> None:
    """Saved between two steps of Adam, with pending gradients, before and after the split. In the
    training dtypes, whose banks have a second half."""
    dtype, h = torch.bfloat16, short_schedule(grad_dtype=grad_dtype)
    manager = TrainingManager(tiny_gpt(dtype), h)
    run_steps(manager, 0, saved_at)
    saved = everything(manager)
    assert saved["gradients"].keys() == {x for x, row in PARAM_TABLE.items() if row.every > 1}
    run_steps(manager, saved_at, 14)
    at_end = everything(manager)
    tables = ("attn", "mlp", "embed", "lm_head", "value_embeds", "scalars")
    assert {f"parameters.{label}" for label in tables} <= {*unequal(saved, at_end)}
    assert saved["extra"]["tied"] == (saved_at <= split_step(12))

    model = tiny_gpt(dtype)
    for param in model.parameters():
        param.data.zero_()
    other = TrainingManager(model, h)
    load_whole_state(other, saved, ALONE)
    assert unequal(everything(other), saved) == []
    run_steps(other, saved_at, 14)
    assert unequal(everything(other), at_end) == []
