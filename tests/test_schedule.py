"""The schedule says what design.md's table says, and the manager's state follows it, and comes back."""

import math

import pytest
import torch

from common import det, tiny_gpt
from train_gpt import GPT, Hyperparameters, TrainingManager, step_schedule

H = Hyperparameters()
UNIT, BLOCK = 16384, 128

# step: (batch units, short window, long window, YaRN's window, lr peak before its decay), windows in blocks
TABLE = {
    0: (8, 1, 3, 3, 1.00),
    574: (8, 1, 3, 3, 1.00),
    575: (16, 3, 7, 7, 1.00),  # x = 1/3, not above it: the lr follows one step later
    576: (16, 3, 7, 7, 1.52),
    862: (16, 3, 7, 7, 1.52),
    863: (16, 3, 7, 7, 1.52),
    1149: (16, 3, 7, 7, 1.52),
    1150: (24, 5, 11, 11, 1.52),
    1151: (24, 5, 11, 11, 1.73),
    1724: (24, 5, 11, 11, 1.73),
    1725: (24, 6, 13, 13, None),
    1764: (24, 6, 13, 13, None),
    1765: (24, 6, 20, 13, None),  # the final validation
}
MTP = {
    0: (1, 0.5, 0.25),
    574: (1, 0.5, 0.25 / 575),
    575: (1, 0.5),
    576: (1, 0.5 * 574 / 575),
    862: (1, 0.5 * 288 / 575),
    863: (1, 0.5 * 287 / 575),
    1149: (1, 0.5 / 575),
    1150: (1,),
    1151: (1,),
    1724: (1,),
    1725: (1,),
    1764: (1,),
    1765: (1,),
}
MOMENTUM = {
    0: 0.85,
    150: 0.90,
    299: 0.85 + 0.1 * 299 / 300,
    300: 0.95,
    1000: 0.95,
    1715: 0.95,
    1716: 0.948,
    1740: 0.90,
    1764: 0.852,
}
# A handful of fp64 operations on numbers below 2.
EXACT = dict(rel=1e-14, abs=1e-14)


def test_record_is_1725_steps_and_40() -> None:
    assert (H.num_scheduled_iterations, H.num_extension_iterations, H.total_iterations) == (1725, 40, 1765)
    assert (H.batch_unit, H.block_size, H.micro_batches, H.max_doc_len) == (UNIT, BLOCK, 8, 2048)
    assert (H.val_every, H.val_tokens, H.val_batch_tokens) == (250, 10_485_760, 2_097_152)


@pytest.mark.parametrize("step", TABLE)
def test_batch_windows_and_yarn_follow_the_table(step: int) -> None:
    batch, short, long, yarn, _ = TABLE[step]
    s = step_schedule(step, H)
    assert (s.batch_tokens, s.short_window, s.long_window, s.yarn_window) == (
        batch * UNIT,
        short * BLOCK,
        long * BLOCK,
        yarn * BLOCK,
    )


@pytest.mark.parametrize("step", TABLE)
def test_lr_follows_the_table_and_decays_from_the_middle(step: int) -> None:
    peak, x = TABLE[step][4], step / 1725
    w = (1 - x) / 0.5
    expected = 0.1 if peak is None else peak if x < 0.5 else peak * w + 0.1 * (1 - w)
    assert step_schedule(step, H).lr_mul == pytest.approx(expected, **EXACT)


def test_lr_decay_begins_at_step_863() -> None:
    lr = [step_schedule(step, H).lr_mul for step in (862, 863)]
    assert lr[0] == 1.52 and lr[1] == pytest.approx(1.52 - 1.42 * (0.5 / 1725) / 0.5, **EXACT)


@pytest.mark.parametrize("step", MTP)
def test_mtp_weights_fade_over_their_stage(step: int) -> None:
    weights = step_schedule(step, H).mtp_weights
    assert len(weights) == len(MTP[step]) and weights == pytest.approx(MTP[step], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("step", MOMENTUM)
def test_momentum_warms_up_and_cools_down(step: int) -> None:
    assert step_schedule(step, H).momentum == pytest.approx(MOMENTUM[step], **EXACT)


def test_momentum_warm_up_has_precedence_over_its_cool_down() -> None:
    tiny = Hyperparameters(num_scheduled_iterations=12, num_extension_iterations=2)
    assert [step_schedule(s, tiny).momentum for s in range(14)] == pytest.approx(
        [0.85 + 0.1 * s / 300 for s in range(14)], **EXACT
    )
    overlap = Hyperparameters(num_scheduled_iterations=300, num_extension_iterations=20)  # cools down from 270, warms up to 300
    assert step_schedule(299, overlap).momentum == pytest.approx(0.85 + 0.1 * 299 / 300, **EXACT)
    assert step_schedule(300, overlap).momentum == pytest.approx(0.95 - 0.1 * 30 / 50, **EXACT)


def test_adam_steps_are_the_odd_ones() -> None:
    assert [step_schedule(step, H).do_adam for step in range(4)] == [False, True, False, True]
    assert not step_schedule(1764, H).do_adam


@pytest.mark.parametrize("scheduled, split", [(1725, 1151), (12, 9), (4, 3), (3, 3), (290, 195), (150, 101), (151, 101)])
def test_embedding_splits_after_two_thirds_on_an_adam_step(scheduled: int, split: int) -> None:
    manager = TrainingManager(tiny_gpt(), small(num_scheduled_iterations=scheduled))
    assert manager.split_step == split == math.ceil(scheduled * 2 / 3) | 1
    assert step_schedule(split, small(num_scheduled_iterations=scheduled)).do_adam


def test_every_step_has_a_stage_for_any_number_of_steps() -> None:
    for scheduled in (1, 2, 3, 4, 7, 100):
        h = small(num_scheduled_iterations=scheduled)
        units = [step_schedule(step, h).batch_tokens // h.batch_unit for step in range(h.total_iterations)]
        assert units == [8 * (1 + 3 * s // scheduled) for s in range(scheduled)] + [24, 24]


# The manager


def small(**changes: int) -> Hyperparameters:
    return Hyperparameters(
        **(dict(num_scheduled_iterations=12, num_extension_iterations=2, block_size=16, micro_batches=2) | changes)
    )


def yarn_of(model: GPT) -> tuple[float, torch.Tensor]:
    return model.yarn.scale, model.yarn.table.clone()


def test_forward_schedule_is_the_steps() -> None:
    manager = TrainingManager(tiny_gpt(), small())
    for step in range(15):
        manager.advance_schedule(step)
        said, given = step_schedule(step, small()), manager.forward_schedule()
        assert torch.equal(given.mtp_weights, torch.tensor(said.mtp_weights, dtype=torch.float32))
        assert (given.short_window, given.long_window) == (said.short_window, said.long_window)


def test_yarn_takes_each_change_of_the_long_window_and_not_the_last() -> None:
    """After 3, 7, 11, 13 blocks; the final validation's 20 change nothing."""
    model, reference = tiny_gpt(), tiny_gpt()
    manager = TrainingManager(model, small())
    changes = {4: (3, 7), 8: (7, 11), 12: (11, 13)}
    for step in range(15):
        manager.advance_schedule(step)
        if step in changes:
            old, new = changes[step]
            reference.extend_windows(16 * old, 16 * new)
        assert model.yarn.scale == reference.yarn.scale and torch.equal(model.yarn.table, reference.yarn.table), step


@pytest.mark.parametrize("leap", [[5], [9], [12], [14], [3, 13], [0, 8, 14]], ids=str)
def test_leap_ends_where_single_steps_do(leap: list[int]) -> None:
    leaper, walker = tiny_gpt(), tiny_gpt()
    managers = TrainingManager(leaper, small()), TrainingManager(walker, small())
    for step in leap:
        managers[0].advance_schedule(step)
    for step in range(leap[-1] + 1):
        managers[1].advance_schedule(step)
    assert yarn_of(leaper)[0] == yarn_of(walker)[0] != 0.1 and torch.equal(yarn_of(leaper)[1], yarn_of(walker)[1])


def test_advancing_twice_to_a_step_changes_nothing_more() -> None:
    model = tiny_gpt()
    manager = TrainingManager(model, small())
    manager.advance_schedule(9)
    scale, table = yarn_of(model)
    manager.advance_schedule(9)
    manager.advance_schedule(11)
    assert model.yarn.scale == scale and torch.equal(model.yarn.table, table)


def test_going_back_beyond_a_change_of_windows_is_refused() -> None:
    manager = TrainingManager(tiny_gpt(), small())
    manager.advance_schedule(9)
    with pytest.raises(ValueError, match="step 3 .* 48 tokens.* 176"):
        manager.advance_schedule(3)
    manager.advance_schedule(8)  # same windows


def test_refused_step_changes_nothing() -> None:
    model = tiny_gpt()
    manager = TrainingManager(model, small())
    manager.advance_schedule(9)
    before, yarn = manager.forward_schedule(), yarn_of(model)
    with pytest.raises(ValueError):
        manager.advance_schedule(3)
    after = manager.forward_schedule()
    assert torch.equal(after.mtp_weights, before.mtp_weights) and after[1:] == before[1:]
    assert yarn_of(model)[0] == yarn[0] and torch.equal(yarn_of(model)[1], yarn[1])


def run_steps(manager: TrainingManager, first: int, last: int) -> None:
    """Steps first .. last − 1 on gradients that only the label and the step decide."""
    for step in range(first, last):
        manager.advance_schedule(step)
        for label, param in manager.model.named_parameters():
            g = det(f"g_{label}_{step}", tuple(param.shape)).to(param.dtype)
            param.grad = g if param.grad is None else param.grad + g
        manager.step_optimizers(step)


def everything(manager: TrainingManager) -> dict[str, object]:
    """All that training changes, flat, copied."""
    flat: dict[str, object] = {}
    for label, param in manager.model.named_parameters():
        flat[label], flat[label + ".grad"] = param.detach().clone(), None if param.grad is None else param.grad.clone()
        for name, value in manager.optimizer.state[label].items():
            flat[f"{label}.{name}"] = value.clone() if isinstance(value, torch.Tensor) else value
    flat["tied"], flat["scale"], flat["table"] = manager.optimizer.tied, *yarn_of(manager.model)
    return flat


def differences(a: dict[str, object], b: dict[str, object]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    assert a.keys() == b.keys()
    return [
        k
        for k in a
        if type(a[k]) is not type(b[k]) or not (torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k])
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("saved_at", [3, 10])
def test_saved_state_rewinds_bit_for_bit(saved_at: int, dtype: torch.dtype) -> None:
    """Saved between two Adam steps (gradients wait), before and after the split; the way on is the same again."""
    manager = TrainingManager(tiny_gpt(dtype), small())
    run_steps(manager, 0, saved_at)
    saved, at_save = manager.state_dict(), everything(manager)
    run_steps(manager, saved_at, 14)
    manager.advance_schedule(14)
    at_end = everything(manager)
    moved = set(differences(at_save, at_end))
    assert {"attn", "mlp", "embed", "ve0", "ve0.exp_avg", "attn.momentum_buffer", "scale", "table"} <= moved
    assert ("tied" in moved) == (saved_at == 3)

    manager.load_state_dict(saved)
    assert differences(everything(manager), at_save) == []
    run_steps(manager, saved_at, 14)
    manager.advance_schedule(14)
    assert differences(everything(manager), at_end) == []


def test_saved_state_starts_another_manager() -> None:
    first = TrainingManager(tiny_gpt(), small())
    run_steps(first, 0, 5)
    second = TrainingManager(GPT(128, 11, 2, 8, 16, 256).float(), small())
    second.load_state_dict(first.state_dict())
    assert differences(everything(second), everything(first)) == []


def test_loading_keeps_the_tensors_that_compiled_graphs_hold() -> None:
    manager = TrainingManager(tiny_gpt(), small())
    saved = manager.state_dict()
    pointers = [param.data_ptr() for param in manager.model.parameters()] + [manager.model.yarn.table.data_ptr()]
    run_steps(manager, 0, 6)
    manager.load_state_dict(saved)
    assert [param.data_ptr() for param in manager.model.parameters()] + [manager.model.yarn.table.data_ptr()] == pointers
