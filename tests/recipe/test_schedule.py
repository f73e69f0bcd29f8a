"""The schedule is its table's, for any number of steps; the manager's state follows it, and comes back."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

import train_gpt
from common import add_gradients, short_schedule, tiny_gpt, unequal
from runtime.checkpoints import differences
from train_gpt import (
    EXTENSION, FINAL_VALIDATION, LR_DECAY_FROM, LR_FLOOR, MOMENTUM_HIGH, MOMENTUM_LOW, SPLIT_EMBED_AT, STAGES, GPT,
    Hyperparameters, Stage, TrainingManager, step_schedule,
)  # fmt: skip

# A handful of fp64 operations on numbers below 2.
EXACT = dict(rel=1e-14, abs=1e-14)
LENGTHS = (1, 2, 3, 4, 7, 100, 280, 1507)


def stage_of(step: int, scheduled: int) -> tuple[Stage, Fraction]:
    """The stage of a step, and how much of it lies behind. Stages end at the nearest step."""
    begin = 0
    for stage in STAGES:
        end = round(Fraction(stage.until).limit_denominator(1000) * scheduled)
        if begin <= step < end:
            return stage, Fraction(step - begin, end - begin)
        begin = end
    return EXTENSION, Fraction(0)


def every_step(scheduled: int) -> tuple[Hyperparameters, range]:
    """With the final validation's."""
    h = short_schedule(num_scheduled_iterations=scheduled)
    return h, range(h.total_iterations + 1)


@pytest.mark.parametrize("scheduled", LENGTHS)
def test_batch_and_windows_are_those_of_the_stage(scheduled: int) -> None:
    h, steps = every_step(scheduled)
    for step in steps:
        stage, _ = stage_of(step, scheduled)
        shown, said = FINAL_VALIDATION if step == h.total_iterations else stage, step_schedule(step, h)
        assert said.batch_tokens == shown.batch * h.batch_unit
        assert (said.short_window, said.long_window) == (shown.short * h.block_size, shown.long * h.block_size)
        assert said.yarn_window == stage.long * h.block_size


@pytest.mark.parametrize("scheduled", LENGTHS)
def test_mtp_weights_fade_over_their_stage(scheduled: int) -> None:
    h, steps = every_step(scheduled)
    for step in steps:
        stage, behind = stage_of(step, scheduled)
        expected = [a + (b - a) * float(behind) for a, b in zip(stage.mtp_first, stage.mtp_last, strict=True)]
        weights = step_schedule(step, h).mtp_weights
        assert len(weights) == len(expected) and weights == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("scheduled", LENGTHS)
def test_lr_is_the_stages_and_decays_to_the_floor(scheduled: int) -> None:
    h, steps = every_step(scheduled)
    begin = math.floor(Fraction(LR_DECAY_FROM).limit_denominator(1000) * scheduled)
    for step in steps:
        done = max(0.0, (step - begin) / (scheduled - begin))
        expected = LR_FLOOR if step >= scheduled else (1 - done) * stage_of(step, scheduled)[0].lr + done * LR_FLOOR
        assert step_schedule(step, h).lr_mul == pytest.approx(expected, **EXACT), step


@pytest.mark.parametrize("warmup, cooldown", [(300, 50), (10, 10), (0, 1), (90, 40)])
def test_momentum_rises_stays_and_falls_and_the_rise_has_precedence(warmup: int, cooldown: int) -> None:
    h = short_schedule(num_scheduled_iterations=98, momentum_warmup=warmup, momentum_cooldown=cooldown)
    rise = MOMENTUM_HIGH - MOMENTUM_LOW
    for step in range(100):
        expected = MOMENTUM_HIGH - rise * max(0, step - (100 - cooldown)) / cooldown
        if step < warmup:
            expected = MOMENTUM_LOW + rise * step / warmup
        assert step_schedule(step, h).momentum == pytest.approx(expected, **EXACT)


def test_adam_steps_are_the_odd_ones() -> None:
    assert [step_schedule(step, Hyperparameters()).do_adam for step in range(4)] == [False, True, False, True]


@pytest.mark.parametrize("scheduled", [1507, 1725, 290, 151, 150, 12, 4, 3, 1])
def test_embedding_splits_on_the_first_adam_step_from_its_share_of_the_steps_on(scheduled: int) -> None:
    h = short_schedule(num_scheduled_iterations=scheduled)
    due = round(Fraction(SPLIT_EMBED_AT).limit_denominator(1000) * scheduled)
    split = next(step for step in range(scheduled + 2) if step >= due and step_schedule(step, h).do_adam)
    assert TrainingManager(tiny_gpt(), h).split_step == split


# The manager


def yarn_of(model: GPT) -> dict[str, object]:
    return {"scale": model.yarn.scale, "table": model.yarn.table.clone()}


def first_step_of(stage: Stage, scheduled: int = 12) -> int:
    return next(step for step in range(scheduled + 1) if stage_of(step, scheduled)[0] == stage)


def test_forward_schedule_is_the_steps() -> None:
    h = short_schedule()
    manager = TrainingManager(tiny_gpt(), h)
    for step in range(h.total_iterations + 1):
        manager.advance_schedule(step)
        said, given = step_schedule(step, h), manager.forward_schedule()
        assert torch.equal(given.mtp_weights, torch.tensor(said.mtp_weights, dtype=torch.float32))
        assert given[1:] == (said.short_window, said.long_window, h.max_doc_len)


def test_yarn_takes_each_change_of_the_long_window_and_not_the_final_validations() -> None:
    model, reference, h = tiny_gpt(), tiny_gpt(), short_schedule()
    manager, changes = TrainingManager(model, h), 0
    for step in range(h.total_iterations + 1):
        manager.advance_schedule(step)
        before, now = (stage_of(max(s, 0), 12)[0].long for s in (step - 1, step))
        if now != before:
            reference.extend_windows(16 * before, 16 * now)
            changes += 1
        assert unequal(yarn_of(model), yarn_of(reference)) == [], step
    assert changes == len({stage.long for stage in (*STAGES, EXTENSION)}) - 1 > 0


@pytest.mark.parametrize("leap", [[5], [9], [12], [14], [3, 13], [0, 8, 14]], ids=str)
def test_leap_ends_where_single_steps_do(leap: list[int]) -> None:
    leaper, walker = tiny_gpt(), tiny_gpt()
    managers = TrainingManager(leaper, short_schedule()), TrainingManager(walker, short_schedule())
    start = yarn_of(walker)
    for step in leap:
        managers[0].advance_schedule(step)
    for step in range(leap[-1] + 1):
        managers[1].advance_schedule(step)
    assert unequal(yarn_of(leaper), yarn_of(walker)) == []
    assert set(unequal(yarn_of(walker), start)) == {"scale", "table"}


def test_advancing_within_a_stage_changes_nothing_more() -> None:
    model = tiny_gpt()
    manager, first = TrainingManager(model, short_schedule()), first_step_of(STAGES[-1])
    manager.advance_schedule(first)
    before = yarn_of(model)
    for step in (first, first + 1, first):
        manager.advance_schedule(step)
        assert unequal(yarn_of(model), before) == []


def test_going_back_beyond_a_change_of_windows_is_refused_and_changes_nothing() -> None:
    model = tiny_gpt()
    manager, first = TrainingManager(model, short_schedule()), first_step_of(STAGES[-1])
    manager.advance_schedule(first)
    before, yarn = manager.forward_schedule(), yarn_of(model)
    with pytest.raises(ValueError, match=f"step 0 .* {16 * STAGES[0].long} tokens.* {16 * STAGES[-1].long}"):
        manager.advance_schedule(0)
    after = manager.forward_schedule()
    assert torch.equal(after.mtp_weights, before.mtp_weights) and after[1:] == before[1:]
    assert unequal(yarn_of(model), yarn) == []


def test_an_update_is_made_of_the_mean_over_a_steps_micro_batches() -> None:
    """Of twice and eight times the gradient, summed over as many micro-batches, moments and weights are the same to the bit."""
    states = []
    for count in (1, 2, 8):
        manager = TrainingManager(tiny_gpt(), short_schedule(micro_batches=count))
        add_gradients(manager.model, 1)
        for param in manager.model.parameters():
            param.grad *= count
        manager.step_optimizers(1)
        states.append(manager.state_dict())
    assert unequal(states[0], states[1]) == [] == unequal(states[0], states[2])


def run_steps(manager: TrainingManager, first: int, last: int) -> None:
    """Steps first .. last − 1 on gradients that only the label and the step decide, and on to the step after them."""
    for step in range(first, last):
        manager.advance_schedule(step)
        add_gradients(manager.model, step)
        manager.step_optimizers(step)
    manager.advance_schedule(last)


def everything(manager: TrainingManager) -> dict[str, object]:
    """The saved state, and what the model has at work."""
    return {**manager.state_dict(), "table": manager.model.yarn.table.clone()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("saved_at", [3, 10])
def test_saved_state_rewinds_bit_for_bit(saved_at: int, dtype: torch.dtype) -> None:
    """Saved between two Adam steps, with pending gradients, before and after the split; the way on is the same again."""
    manager = TrainingManager(tiny_gpt(dtype), short_schedule())
    run_steps(manager, 0, saved_at)
    saved, at_save = manager.state_dict(), everything(manager)
    run_steps(manager, saved_at, 14)
    at_end = everything(manager)
    moved = set(unequal(at_save, at_end))
    parts = ["parameters.attn", "parameters.mlp", "parameters.embed", "parameters.value_embeds", "yarn.scale", "yarn_window"]
    states = "sharded.bigram_embed.exp_avg", "sharded.attn.momentum_buffer"
    assert {*(f"same.{part}" for part in parts), *states, "table"} <= moved
    assert ("same.tied" in moved) == (saved_at <= manager.split_step)

    manager.load_state_dict(saved)
    assert unequal(everything(manager), at_save) == []
    run_steps(manager, saved_at, 14)
    assert unequal(everything(manager), at_end) == []


def test_saved_state_starts_another_manager() -> None:
    first = TrainingManager(tiny_gpt(), short_schedule())
    run_steps(first, 0, 5)
    assert first.state_dict()["partial"]
    model = tiny_gpt()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    second = TrainingManager(model, short_schedule())
    second.load_state_dict(first.state_dict())
    assert unequal(everything(second), everything(first)) == []


def test_loading_keeps_the_tensors_that_compiled_graphs_hold() -> None:
    manager = TrainingManager(tiny_gpt(), short_schedule())

    def addresses() -> list[int]:
        states = [x for state in manager.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        return [x.data_ptr() for x in (*manager.model.parameters(), manager.model.yarn.table, *states)]

    saved, before = manager.state_dict(), addresses()
    run_steps(manager, 0, 6)
    manager.load_state_dict(saved)
    assert addresses() == before


def test_layout_is_the_shape_of_the_state_at_every_step() -> None:
    """What a checkpoint is checked against before anything is loaded."""
    manager = TrainingManager(tiny_gpt(torch.bfloat16), short_schedule())
    for step in range(14):
        state, layout = manager.state_dict(), manager.layout(step)
        assert differences(state, layout) == [] and manager.contradictions(state, step) == []
        run_steps(manager, step, step + 1)


def test_a_long_window_of_another_stage_contradicts_the_step() -> None:
    """As where a script's windows have changed: resumed, it lost the rest of its log and then ended in a traceback."""
    manager = TrainingManager(tiny_gpt(), short_schedule())
    run_steps(manager, 0, 5)
    state, due = manager.state_dict(), {step_schedule(at, manager.h).yarn_window for at in (4, 5)}
    assert len({*manager.windows} - due) > 1
    for window in manager.windows:
        state["same"]["yarn_window"] = window
        said = [] if window in due else [f"same.yarn_window is {window}, must be {' or '.join(map(str, sorted(due)))} at step 5"]
        assert manager.contradictions(state, 5) == said


@pytest.mark.parametrize("due", [lambda step: True, lambda step: step % 3 == 2, lambda step: step % 4 != 1])
def test_so_it_is_of_an_idea_that_updates_by_adam_in_other_steps(monkeypatch: pytest.MonkeyPatch, due: Callable) -> None:
    """What is pending is what the step before has left."""
    schedule = step_schedule
    monkeypatch.setattr(train_gpt, "step_schedule", lambda step, h: schedule(step, h)._replace(do_adam=due(step)))
    monkeypatch.setattr(train_gpt, "split_step", lambda scheduled: 100)
    manager = TrainingManager(tiny_gpt(torch.bfloat16), short_schedule())
    for step in range(8):
        assert differences(manager.state_dict(), manager.layout(step)) == []
        run_steps(manager, step, step + 1)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state["same"].update(tied=False), "tied is False, must be True at step 4"),
        (lambda state: state["same"].update(yarn_window=7), "yarn_window is 7, must be"),
        (lambda state: state["sharded"]["embed"].update(step=-1), "step of embed is -1, must be 0 or more"),
    ],
    ids=["tied", "yarn_window", "step"],
)
def test_contradiction_of_a_state_is_named_with_its_rule(change, message: str) -> None:
    manager = TrainingManager(tiny_gpt(), short_schedule())
    run_steps(manager, 0, 4)
    state = manager.state_dict()
    change(state)
    (fault,) = manager.contradictions(state, 4)
    assert message in fault
