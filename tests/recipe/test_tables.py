"""The four tables are all there is: a row more, or another one, trains, saves and comes back without
a second edit.

Each idea is the script with some lines added behind one of its tables, as a file of its own.
"""

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import naive_model
import train_gpt
from common import (
    SCRIPT, TOLERANCE64, U64, parameters_of, random_batch, set_parameters, short_schedule, tiny_gpt,
    unequal,
)  # fmt: skip
from runtime.checkpoints import load_whole_state, whole_state
from runtime.ranks import Ranks
from sample import load_script

IDEAS = {
    "fourth stage": ("STAGES", """
STAGES = (
    *STAGES[:2],
    Stage(3, until=3/4, batch=20, docs=9, short=4, long=9, lr=1.60,
          mtp_first=(1, 0.4), mtp_last=(1, 0.1), prefix_first=0.2, prefix_last=0.1),
    STAGES[2]._replace(index=4),
)
"""),
    "scalar": ("SCALARS", """
SCALARS = {"out_lambda": [0.75], **SCALARS}
"""),
    "scalar in use": ("GPT", """
class Scaled(GPT):
    def hidden_states(self, *args):
        return self.scalars[0] * super().hidden_states(*args)
GPT = Scaled
"""),
    "layers": ("LAYERS", """
LAYERS = (
    Layer(0, "short", paired=True, value_gate=True),
    Layer(1, "short", value_gate=True),
    Layer(2, "long", paired=True),
    Layer(3, "long", key_offset=True, keep="c3"),
    Layer(4, "long", paired=True, value_gate=True, same_input=True),
    Layer(5, "short", key_offset=True, keep="early"),
    Layer(6, add="c3"),
    Layer(7, "short", keep="c7"),
    Layer(8, "short", value_gate=True, add="early"),
    Layer(9, "short", paired=True, value_gate=True, same_input=True, keep="c9"),
    Layer(10, add="early"),
    Layer(11, "long", mudd=True),
    Layer(12, "short", value_gate=True),
)
"""),
    "rule": ("NorMuon", """
class SGD(ParamConfig):
    def update(self, rows, grad, state, args):
        rows.sub_(grad, alpha=self.lr * args.lr_schedule * args.grad_scale)
"""),
    "rule in use": ("PARAM_TABLE", """
PARAM_TABLE["value_embeds"] = SGD("sharded", every=2, lr=0.5)
"""),
    "rule of the LM head": ("PARAM_TABLE", """
PARAM_TABLE["lm_head"] = SGD("sharded", every=2, lr=0.5)
"""),
}  # fmt: skip


def idea(folder: Path, *names: str) -> ModuleType:
    """The script as a module, with the lines of IDEAS, each behind the statement that makes a name."""
    source = SCRIPT.read_text()
    lines = source.splitlines()
    ends = {}
    for node in ast.parse(source).body:
        targets = (
            [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [node])
        )
        for target in targets:
            ends[getattr(target, "id", getattr(target, "name", None))] = node.end_lineno
    for name, addition in sorted((IDEAS[name] for name in names), key=lambda x: -ends[x[0]]):
        lines[ends[name] : ends[name]] = addition.splitlines()
    path = folder / f"idea_of_{'_'.join(names).replace(' ', '_')}.py"
    path.write_text("\n".join(lines))
    return load_script(path)


def manager_of(script: ModuleType, **changes: Any) -> Any:
    h = short_schedule(script=script, **{"bigram_rows": 640, **changes})
    model = tiny_gpt(torch.float64, script=script, bigram_rows=h.bigram_rows)
    return script.TrainingManager(model, h)


def train(
    manager: Any, first: int, last: int, rank: int = 0, world_size: int = 1
) -> dict[int, dict[str, Tensor]]:
    """Steps first .. last − 1 on this rank's micro-batches; each step's gradients."""
    gradients = {}
    for step in range(first, last):
        manager.advance_schedule(step)
        for i in range(rank, manager.h.micro_batches, world_size):
            batch = random_batch(64, 120, (0, 17, 40), seed=100 * step + i)
            manager.model(*batch, manager.forward_schedule()).backward()
            manager.optimizer.accumulate()
        gradients[step] = {x: g.clone() for x, g in manager.optimizer.gradients().items()}
        manager.step_optimizers(step)
    return gradients


ALONE = Ranks(0, 1, torch.device("cpu"))


def assert_comes_back(make: Callable[[], Any], manager: Any, step: int) -> None:
    """The saved state starts another manager, which goes on with the same bits."""
    state = whole_state(manager, ALONE)
    other = make()
    set_parameters(other.model, prefix="other ")
    load_whole_state(other, state, ALONE)
    assert unequal(whole_state(other, ALONE), state) == []
    for each in (manager, other):
        train(each, step, step + 2)
    assert unequal(whole_state(other, ALONE), whole_state(manager, ALONE)) == []


# -----------------------------------------------------------------------------
# Stages


@pytest.fixture(scope="module")
def four_stages(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return idea(tmp_path_factory.mktemp("stages"), "fourth stage")


def test_fourth_stage_has_its_steps_and_its_peak(four_stages: ModuleType) -> None:
    """Of 120 steps: from 80, where the second stage ends, to 90."""
    h = short_schedule(script=four_stages, num_scheduled_iterations=120)
    said = [four_stages.step_schedule(step, h) for step in range(h.total_iterations)]
    units = [s.batch_tokens // h.batch_unit for s in said]
    assert units == [8] * 40 + [16] * 40 + [20] * 10 + [24] * 32
    sizes = {(s.max_doc_len, s.short_window, s.long_window) for s in said[80:90]}
    assert sizes == {(144, 64, 144)}
    expected = [0.4 - 0.03 * i for i in range(10)]
    assert [s.mtp_weights[1] for s in said[80:90]] == pytest.approx(expected, rel=1e-12)
    assert [said[step].prefix_weight for step in (80, 85)] == pytest.approx([0.2, 0.15], rel=1e-12)
    assert len(said[90].mtp_weights) == 1
    floor = four_stages.LR_FLOOR
    for step, peak in ((79, 1.52), (80, 1.60), (89, 1.60), (90, 1.73)):
        weight = (1 - step / 120) / (1 - four_stages.LR_DECAY_FROM)
        assert said[step].lr_schedule == pytest.approx(
            peak * weight + floor * (1 - weight), rel=1e-12
        )


def test_longest_batch_is_that_of_any_stage(four_stages: ModuleType, monkeypatch) -> None:
    h = short_schedule(script=four_stages, val_batch_tokens=16)
    before = h.max_tokens
    long = four_stages.STAGES[2]._replace(batch=48)
    stages = (*four_stages.STAGES[:2], long, four_stages.STAGES[3])
    monkeypatch.setattr(four_stages, "STAGES", stages)
    assert h.max_tokens == 2 * before


@pytest.mark.parametrize("number", [2, 3, 5])
def test_each_stages_batch_must_divide_and_the_extensions(
    four_stages: ModuleType, number: int, monkeypatch
) -> None:
    """Into 2 micro-batches of a multiple of 16 tokens."""
    h = short_schedule(script=four_stages, batch_unit=16)
    h.check(1)
    rows = [*four_stages.STAGES, four_stages.EXTENSION]
    rows[number - 1] = rows[number - 1]._replace(batch=21)
    monkeypatch.setattr(four_stages, "STAGES", tuple(rows[:4]))
    monkeypatch.setattr(four_stages, "EXTENSION", rows[4])
    with pytest.raises(ValueError, match=rf"batch_unit=16 \(stage {number}\)"):
        h.check(1)


def test_fourth_stage_trains_with_yarn_once_at_each_boundary(
    four_stages: ModuleType, monkeypatch
) -> None:
    """Of 12 steps it has the one from 8 to 9."""
    manager = manager_of(four_stages)
    extend = manager.model.extend_windows
    extended = {}

    def recorded(old: int, new: int) -> None:
        extended[step] = (old // 16, new // 16)
        extend(old, new)

    monkeypatch.setattr(manager.model, "extend_windows", recorded)
    for step in range(14):
        train(manager, step, step + 1)
    assert extended == {4: (3, 7), 8: (7, 9), 9: (9, 11), 12: (11, 13)}
    again = manager_of(four_stages)
    train(again, 0, 9)
    assert_comes_back(lambda: manager_of(four_stages), again, 9)


# -----------------------------------------------------------------------------
# Scalars


def test_scalar_is_a_row_and_its_use(tmp_path: Path) -> None:
    """The first of all: the others move up. At 1 it changes nothing."""
    script = idea(tmp_path, "scalar", "scalar in use")
    plain = idea(tmp_path, "scalar")
    assert plain.GPT(128, len(plain.LAYERS), 2, 8, 16, 64).scalars[0] == 0.75
    manager, without = manager_of(script), manager_of(plain)
    manager.model.scalars.data[0] = 1.0
    batch = (*random_batch(64, 120, (0, 17)), manager.forward_schedule())
    assert torch.equal(manager.model(*batch), without.model(*batch))

    before = parameters_of(manager.model)["scalars"]
    gradient = train(manager, 0, 2)[1]["scalars"][0]
    moved = manager.model.scalars[0] - before[0]
    # Adam's first step is ± its rate, wherever the gradient is far above ε.
    row = script.PARAM_TABLE["scalars"]
    expected = (
        -row.lr * row.lr_mul * script.step_schedule(1, manager.h).lr_schedule * gradient.sign()
    )
    assert expected and moved.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_comes_back(lambda: manager_of(script), manager, 2)


# -----------------------------------------------------------------------------
# Layers


def test_layers_are_their_rows(tmp_path: Path) -> None:
    """Kinds that the recipe has not, two layers more, another skip: banks of their size, and the
    naive model's numbers."""
    script = idea(tmp_path, "layers")
    manager = manager_of(script)
    model = manager.model
    layers = script.LAYERS
    assert len(model.attn) == len(model.attn_gate_bank) == 11
    assert len(model.ve_gate_bank) == 6 and model.value_embeds.size(1) == 7 * model.model_dim
    assert len(model.mlp) == 16 and len(model.layer_lambdas) == 13
    manager.h.check(1)

    inputs, targets, cu_seqlens = random_batch(64, 120, (0, 17, 40))
    params = {x: param.detach().clone().requires_grad_() for x, param in model.named_parameters()}
    schedule = manager.forward_schedule()
    windows = {"short": schedule.short_window, "long": schedule.long_window}
    hidden = naive_model.hidden_states(
        *(params | {"bigram_signs": model.bigram_signs}, script, model.num_heads),
        *(inputs, cu_seqlens, windows),
        *(model.yarn.frequencies.tolist(), model.yarn.scale),
    )
    difference = model.hidden_states(inputs, cu_seqlens, schedule) - hidden
    assert difference.abs().max() <= 100 * TOLERANCE64
    weights = schedule.mtp_weights.tolist()
    naive_model.training_loss(hidden @ params["lm_head"], targets, weights).backward()
    model(inputs, targets, cu_seqlens, schedule).backward()
    for label, param in model.named_parameters():
        difference = (param.grad - params[label].grad).norm()
        assert difference <= 1e-8 * params[label].grad.norm(), label
        param.grad = None

    before = parameters_of(model)
    train(manager, 0, 2)
    moved = {label: value != before[label] for label, value in parameters_of(model).items()}
    banks = (*moved["attn"], *moved["mlp"][: len(layers)], *moved["ve_gate_bank"])
    assert all(matrices.any() for matrices in banks)
    assert_comes_back(lambda: manager_of(script), manager, 2)


# -----------------------------------------------------------------------------
# Rules


def test_third_rule_moves_its_parameter_by_its_update_alone(tmp_path: Path) -> None:
    """By exactly lr · gradient: a product and a difference, each rounded once, of factors that are
    rounded twice."""
    script = idea(tmp_path, "rule", "rule in use")
    manager = manager_of(script)
    before = manager.model.value_embeds.detach().clone()
    gradient = train(manager, 0, 2)[1]["value_embeds"]
    lr = 0.5 * script.step_schedule(1, manager.h).lr_schedule
    step = lr / manager.h.micro_batches * gradient
    error = (manager.model.value_embeds - (before - step)).abs()
    assert step.any() and (error <= 4 * U64 * (before.abs() + step.abs())).all()
    assert manager.optimizer.state["value_embeds"] == {}

    plain = manager_of(idea(tmp_path, "rule"))
    train(plain, 0, 2)
    assert unequal(parameters_of(manager.model), parameters_of(plain.model)) == ["value_embeds"]
    assert_comes_back(lambda: manager_of(script), manager, 2)


def train_on_ranks(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Three steps with the third rule: the whole state before the last, what a fresh manager makes
    of it, and the weights at the end."""
    script = load_script(Path(path))
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    manager, other = manager_of(script), manager_of(script)
    train(manager, 0, 2, rank, world_size)
    state = ranks.gather(whole_state(manager, ranks))[0]
    set_parameters(other.model, prefix="other ")
    load_whole_state(other, state, ranks)
    restored = unequal(ranks.gather(whole_state(other, ranks))[0], state)
    train(manager, 2, 3, rank, world_size)
    return dict(restored=restored, parameters=parameters_of(manager.model))


def test_third_rule_is_the_same_on_two_ranks(tmp_path: Path, run_ranks) -> None:
    script = idea(tmp_path, "rule", "rule in use")
    first, second = run_ranks(2, train_on_ranks, script.__file__)
    assert first["restored"] == second["restored"] == []
    assert unequal(first["parameters"], second["parameters"]) == []
    alone = manager_of(script)
    train(alone, 0, 3)
    for label, value in parameters_of(alone.model).items():
        # Sums in another order, and Polar Express's thousandfold
        difference = (first["parameters"][label] - value).norm()
        assert difference <= TOLERANCE64 * value.norm(), label


# -----------------------------------------------------------------------------
# Weight tying


def test_tied_parameters_may_have_different_rules(tmp_path: Path) -> None:
    """The LM head moves by SGD on both gradients; embed's Adam begins at the split."""
    script = idea(tmp_path, "rule", "rule of the LM head")
    manager = manager_of(script)
    model = manager.model
    start = model.lm_head.detach().clone()
    gradients = train(manager, 0, 2)[1]
    lr = 0.5 * script.step_schedule(1, manager.h).lr_schedule / manager.h.micro_batches
    step = lr * (gradients["lm_head"] + gradients["embed"].T)
    assert (model.lm_head - (start - step)).abs().max() <= TOLERANCE64 * step.abs().max()
    assert torch.equal(model.embed, model.lm_head.T)
    train(manager, 2, manager.split_step + 1)
    state = manager.optimizer.state["embed"]
    assert state["step"] == 0
    train(manager, manager.split_step + 1, manager.split_step + 3)
    assert state["step"] == 1 and state["exp_avg"].any()
    assert_comes_back(lambda: manager_of(script), manager, manager.split_step + 3)


def test_second_parameter_tied_to_one_is_refused(monkeypatch) -> None:
    """The first one would be updated alone, while it is said to be tied."""
    second = replace(train_gpt.PARAM_TABLE["bigram_embed"], tied_to="lm_head")
    monkeypatch.setitem(train_gpt.PARAM_TABLE, "bigram_embed", second)
    with pytest.raises(ValueError, match="ties two parameters to lm_head"):
        manager_of(train_gpt, bigram_rows=128)


# -----------------------------------------------------------------------------
# A row that cannot be meant


def layers_with(i: int, **changes: Any) -> tuple:
    return tuple(replace(x, **changes) if x.index == i else x for x in train_gpt.LAYERS)


def stages_with(i: int, **changes: Any) -> tuple:
    return tuple(x._replace(**changes) if x.index == i else x for x in train_gpt.STAGES)


# fmt: off
MISTAKES = {
    "no such window": ("LAYERS", layers_with(4, window="shrot"), "layer 4: no window 'shrot'"),
    "add": ("LAYERS", layers_with(6, add="c4"), "layer 6: no earlier layer keeps 'c4'"),
    "add before keep": ("LAYERS", layers_with(2, add="c3"), "layer 2: no earlier layer"),
    "no attention": ("LAYERS", layers_with(6, value_gate=True), "layer 6: .* need attention"),
    "no input": ("LAYERS", layers_with(7, same_input=True), "layer 7: same_input, but the layer"),
    "kept twice": ("LAYERS", layers_with(8, keep="c7"), "layer 8: 'c7' is kept twice"),
    "not kept": ("LAYERS", layers_with(7, keep=""), "no layer keeps c7, which MUDD reads"),
    "layer's index": ("LAYERS", layers_with(5, index=6), "layer 5: its index is 6"),
    "narrower": ("STAGES", stages_with(3, long=3), r"must not shrink .YaRN., are \[3, 7, 3, 13\]"),
    "end": ("STAGES", stages_with(3, until=0.9), "until must rise to 1"),
    "order": ("STAGES", stages_with(2, until=0.2), "until must rise to 1"),
    "MTP weights": ("STAGES", stages_with(2, mtp_last=(1,)), "stage 2: mtp_first and mtp_last must"),
    "weights of 0": ("STAGES", stages_with(1, mtp_first=(0, 0, 0)), "stage 1: mtp_first and"),
    "half a window": ("STAGES", stages_with(2, long=7.5), "stage 2: batch, docs and windows must"),
    "infinite rate": ("STAGES", stages_with(3, lr=math.inf), "stage 3: lr must be above 0"),
    "stage's index": ("STAGES", stages_with(2, index=3), "stage 3: must have index 2"),
    "split": ("SPLIT_EMBED_AT", -1, "SPLIT_EMBED_AT is -1, must be 0 or more"),
}
# fmt: on


@pytest.mark.parametrize("mistake", MISTAKES)
def test_row_that_cannot_be_meant_is_named(mistake: str, monkeypatch) -> None:
    table, changed, message = MISTAKES[mistake]
    train_gpt.Hyperparameters().check(1)
    monkeypatch.setattr(train_gpt, table, changed)
    with pytest.raises(ValueError, match=message):
        train_gpt.Hyperparameters().check(1)


def test_parameter_is_sharded_or_replicated() -> None:
    with pytest.raises(ValueError, match="comms='shardd': must be 'sharded' or 'replicated'"):
        train_gpt.Adam("shardd")
