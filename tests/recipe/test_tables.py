"""The four tables are all there is: a row more, or another one, trains, saves and comes back without
a second edit.

Each idea is the script with some lines added behind one of its tables, as a file of its own.
"""

import ast
import sys
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
    trunk, unequal,
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
    def trunk(self, *args):
        return self.scalars[0] * super().trunk(*args)
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
        rows.sub_(grad, alpha=self.lr * args.lr_factor * args.grad_scale)
"""),
    "rule in use": ("PARAM_TABLE", """
PARAM_TABLE["value_embeds"] = SGD("sharded", every=2, lr=0.5)
"""),
}  # fmt: skip


def idea(folder: Path, *names: str) -> ModuleType:
    """The script as a module, with the lines of IDEAS, each behind the statement that makes a name."""
    source = SCRIPT.read_text()
    lines = source.splitlines()
    ends = {}
    for node in ast.parse(source).body:
        for made in (node, getattr(node, "target", node), *getattr(node, "targets", ())):
            ends[getattr(made, "name", getattr(made, "id", ""))] = node.end_lineno
    for name, addition in sorted((IDEAS[name] for name in names), key=lambda x: -ends[x[0]]):
        lines[ends[name] : ends[name]] = addition.splitlines()
    path = folder / f"idea_of_{'_'.join(names).replace(' ', '_')}.py"
    path.write_text("\n".join(lines))
    return load_script(path)


def manager_of(script: ModuleType) -> Any:
    h = short_schedule(script=script, bigram_rows=640)
    model = tiny_gpt(torch.float64, script=script, bigram_rows=h.bigram_rows)
    return script.TrainingManager(model, h)


def plan_of(manager: Any) -> list:
    script = sys.modules[type(manager).__module__]
    return script.make_plan(manager.h)


def train(manager: Any, first: int, last: int) -> dict[int, dict[str, Tensor]]:
    """Steps first .. last − 1; each step's gradients."""
    gradients = {}
    for now in plan_of(manager)[first:last]:
        step = now.step
        schedule = manager.advance_schedule(now)
        for i in range(manager.h.micro_batches):
            batch = random_batch(64, 120, (0, 17, 40), seed=100 * step + i)
            manager.model(*batch, schedule).backward()
            manager.optimizer.accumulate()
        gradients[step] = {x: g.clone() for x, g in manager.optimizer.gradients().items()}
        manager.step_optimizers(now)
    return gradients


ALONE = Ranks(0, 1, torch.device("cpu"))
SIZES = dict(vocab_size=128, num_heads=2, head_dim=8, model_dim=16, bigram_rows=640)


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
# An idea for each table


def test_fourth_stage_has_its_steps_and_trains(tmp_path: Path, monkeypatch) -> None:
    """The step from 8 to 9 of 12. YaRN is once at each boundary."""
    script = idea(tmp_path, "fourth stage")
    manager = manager_of(script)
    h = manager.h
    h.check(1)
    schedule = script.make_plan(h)[:-1]
    units = [said.batch_tokens // h.batch_unit for said in schedule]
    assert units == [8] * 4 + [16] * 4 + [20] + [24] * 5
    assert schedule[8][2:6] == (9 * 16, 4 * 16, 9 * 16, 9 * 16)
    assert (*schedule[8].mtp_weights, schedule[8].prefix_weight) == (1, 0.4, 0.2)
    done = (8 - int(script.LR_DECAY_FROM * 12)) / (12 - int(script.LR_DECAY_FROM * 12))
    rate = 1.6 * (1 - done) + script.LR_FLOOR * done
    assert schedule[8].lr_factor == pytest.approx(rate, rel=1e-12)

    extend = manager.model.yarn.extend
    extended = {}

    def recorded(old: int, new: int) -> None:
        extended[step] = (old // 16, new // 16)
        extend(old, new)

    monkeypatch.setattr(manager.model.yarn, "extend", recorded)
    for step in range(9):
        train(manager, step, step + 1)
    assert extended == {4: (3, 7), 8: (7, 9)}
    assert_comes_back(lambda: manager_of(script), manager, 9)


def test_scalar_is_a_row_and_its_use(tmp_path: Path) -> None:
    """The first of all: the others move up."""
    script = idea(tmp_path, "scalar", "scalar in use")
    manager = manager_of(script)
    fresh, usual = (x.GPT(x.Hyperparameters(**SIZES)) for x in (script, train_gpt))
    assert fresh.scalars.tolist() == [0.75, *usual.scalars.tolist()]
    before = parameters_of(manager.model)["scalars"]
    gradient = train(manager, 0, 2)[1]["scalars"][0]
    moved = manager.model.scalars[0] - before[0]
    # Adam's first step is ± its rate, wherever the gradient is far above ε.
    row = script.PARAM_TABLE["scalars"]
    rate = row.lr * plan_of(manager)[1].lr_factor
    assert gradient and moved.item() == pytest.approx(-rate * gradient.sign().item(), rel=1e-6)
    assert_comes_back(lambda: manager_of(script), manager, 2)


def test_layers_are_their_rows(tmp_path: Path) -> None:
    """Kinds that the recipe has not, two layers more, another skip: the naive model's numbers."""
    script = idea(tmp_path, "layers")
    manager = manager_of(script)
    model = manager.model
    manager.h.check(1)

    inputs, targets, cu_seqlens = random_batch(64, 120, (0, 17, 40))
    params = {x: param.detach().clone().requires_grad_() for x, param in model.named_parameters()}
    schedule = manager.advance_schedule(plan_of(manager)[0])
    windows = {"short": schedule.short_window, "long": schedule.long_window}
    hidden = naive_model.hidden_states(
        *(params | {"bigram_signs": model.bigram_signs}, script, model.num_heads),
        *(inputs, cu_seqlens, windows),
        *(model.yarn.frequencies.tolist(), model.yarn.scale),
    )
    difference = trunk(model, inputs, cu_seqlens, schedule) - hidden
    assert difference.abs().max() <= 100 * TOLERANCE64
    weights = schedule.mtp_weights.tolist()
    naive_model.training_loss(hidden @ params["lm_head"], targets, weights).backward()
    model(inputs, targets, cu_seqlens, schedule).backward()
    for label, param in model.named_parameters():
        difference = (param.grad - params[label].grad).norm()
        assert difference <= 1e-8 * params[label].grad.norm(), label
        param.grad = None

    train(manager, 0, 2)
    assert_comes_back(lambda: manager_of(script), manager, 2)


def test_third_rule_moves_its_parameter_by_its_update(tmp_path: Path) -> None:
    """By exactly lr · gradient: a product and a difference, each rounded once, of factors that are
    rounded twice."""
    script = idea(tmp_path, "rule", "rule in use")
    manager = manager_of(script)
    before = manager.model.value_embeds.detach().clone()
    gradient = train(manager, 0, 2)[1]["value_embeds"]
    lr = 0.5 * plan_of(manager)[1].lr_factor
    step = lr / manager.h.micro_batches * gradient
    error = (manager.model.value_embeds - (before - step)).abs()
    assert step.any() and (error <= 4 * U64 * (before.abs() + step.abs())).all()
    assert manager.optimizer.state["value_embeds"] == {}
    assert_comes_back(lambda: manager_of(script), manager, 2)


# -----------------------------------------------------------------------------
# A row that cannot be meant


def layers_with(i: int, **changes: Any) -> tuple:
    return tuple(replace(x, **changes) if x.index == i else x for x in train_gpt.LAYERS)


def stages_with(i: int, **changes: Any) -> tuple:
    return tuple(x._replace(**changes) if x.index == i else x for x in train_gpt.STAGES)


# fmt: off
MISTAKES = {
    "column": ("LAYERS", layers_with(4, window="shrot"), "layer 4: no window 'shrot'"),
    "order of layers": ("LAYERS", layers_with(2, add="c3"), "layer 2: no earlier layer keeps c3"),
    "read by mudd": ("LAYERS", layers_with(7, keep=""), "layer 10: no earlier layer keeps c7"),
    "read elsewhere": ("LAYERS", layers_with(9, keep=""), "no layer keeps c9, which MUDD reads"),
    "columns together": ("LAYERS", layers_with(6, value_gate=True), "layer 6: .* need attention"),
    "lengths": ("STAGES", stages_with(2, mtp_last=(1,)), "stage 2: mtp_first and mtp_last must"),
    "order of stages": ("STAGES", stages_with(2, until=0.2), "until must rise to 1"),
    "windows": ("STAGES", stages_with(3, long=3), r"must not shrink .YaRN., are \[3, 7, 3, 13\]"),
    "batch": ("STAGES", stages_with(3, batch=1), r"batch_unit=16 \(stage 3\)"),
}
# fmt: on


@pytest.mark.parametrize("mistake", MISTAKES)
def test_row_that_cannot_be_meant_is_named(mistake: str, monkeypatch) -> None:
    table, changed, message = MISTAKES[mistake]
    h = short_schedule(batch_unit=16)
    h.check(1)
    monkeypatch.setattr(train_gpt, table, changed)
    with pytest.raises(ValueError, match=message):
        h.check(1)


def test_scales_of_rates_meet_their_parameters_whatever_the_reductions() -> None:
    """In the record preset none; the demo's are for gates and scalars, and for MUDD."""
    table = train_gpt.param_table(train_gpt.Hyperparameters())
    assert {row.lr_scale for row in table.values()} == {1.0}
    small = "scalars smear_gate skip_gate attn_gate_bank ve_gate_bank layer_lambdas".split()
    expected = dict.fromkeys(table, 3.0) | dict.fromkeys(small, 1.5) | {"attn": 5.0, "mlp": 5.0}
    expected |= dict.fromkeys(("mudd_W1", "mudd_W2", "mudd_b"), 0.75)
    scales = dict(adam_lr_scale=3.0, muon_lr_scale=5.0, small_lr_scale=0.5, mudd_lr_scale=0.25)
    for comms in ("sharded", "replicated"):
        table = train_gpt.param_table(train_gpt.Hyperparameters(comms=comms, **scales))
        assert {x: row.lr_scale for x, row in table.items()} == expected
