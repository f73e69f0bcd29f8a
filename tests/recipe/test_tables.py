"""The four tables are all there is: a row more, or another one, trains, saves and comes back without a second edit.

Each idea is the script with some lines added behind one of its tables, as a file of its own, in every process that trains it.
"""

import ast
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import naive_model
import train_gpt
from common import SCRIPT, TOLERANCE64, U64, random_batch, set_parameters, short_schedule, tiny_gpt, unequal
from runtime.checkpoints import differences, load_whole_state, map_tensors, whole_state
from runtime.ranks import Ranks
from sample import load_script

IDEAS = {
    "fourth stage": ("STAGES", """
STAGES = (
    Stage(until=1/3, batch=8,  short=1, long=3,  lr=1.00, mtp_first=(1, 0.5, 0.25), mtp_last=(1, 0.5, 0)),
    Stage(until=2/3, batch=16, short=3, long=7,  lr=1.52, mtp_first=(1, 0.5),       mtp_last=(1, 0)),
    Stage(until=3/4, batch=20, short=4, long=9,  lr=1.60, mtp_first=(1, 0.4),       mtp_last=(1, 0.1)),
    Stage(until=1.0, batch=24, short=5, long=11, lr=1.73, mtp_first=(1,),           mtp_last=(1,)),
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
    Layer("short", paired=True, value_gate=9),
    Layer("short", value_gate=12),
    Layer("long", paired=True),
    Layer("long", key_offset=True, keep="skip"),
    Layer("long", paired=True, value_gate=1),
    Layer("short", key_offset=True, keep="early"),
    Layer(add="skip"),
    Layer("short", keep="backout"),
    Layer("short", value_gate=6),
    Layer("short", paired=True, value_gate=6),
    Layer(add="early"),
    Layer("long"),
    Layer("short", value_gate=3),
)
"""),
    "rule": ("NorMuon", """
class SGD(ParamConfig):
    def update(self, rows, grad, state, now):
        rows.sub_(grad, alpha=self.lr * now.lr_mul * now.grad_scale)
"""),
    "rule in use": ("PARAM_TABLE", """
PARAM_TABLE["value_embeds"] = SGD("sharded", lr=0.5, weight_decay=0.0)
"""),
    "rule of the head": ("PARAM_TABLE", """
PARAM_TABLE["lm_head"] = SGD("sharded", lr=0.5, weight_decay=0.0)
"""),
    "matrices' rule of both": ("PARAM_TABLE", """
PARAM_TABLE["lm_head"] = NorMuon()
PARAM_TABLE["embed"] = NorMuon(tied_to="lm_head")
"""),
    "a moment for each row": ("NorMuon", """
@dataclass(frozen=True)
class Mini(ParamConfig):
    lr: float = 0.01
    def initial_state(self, rows):
        return {"step": 0, "mean": moments(rows, rows.shape), "square": moments(rows, (len(rows), 1))}
    def update(self, rows, grad, state, now):
        state["step"] += 1
        state["mean"].lerp_(grad * now.grad_scale, 0.1)
        state["square"].lerp_((grad * now.grad_scale).square().mean(1, keepdim=True), 0.1)
        rows.sub_(state["mean"] / (state["square"].sqrt() + 1e-9), alpha=self.lr * now.lr_mul)
"""),
    "rows' rule of both": ("PARAM_TABLE", """
PARAM_TABLE["lm_head"] = Mini("sharded")
PARAM_TABLE["embed"] = Mini("sharded", tied_to="lm_head")
"""),
    "tie": ("PARAM_TABLE", """
PARAM_TABLE["bigram_embed"] = replace(PARAM_TABLE["bigram_embed"], tied_to="lm_head")
"""),
}  # fmt: skip


def idea(folder: Path, *names: str) -> ModuleType:
    """The script as a module, with the lines of IDEAS, each behind the top-level statement that makes the name."""
    lines, tree = SCRIPT.read_text().splitlines(), ast.parse(SCRIPT.read_text())
    ends = {}
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [node])
        ends |= {getattr(target, "id", getattr(target, "name", None)): node.end_lineno for target in targets}
    for name, addition in sorted((IDEAS[name] for name in names), key=lambda idea: -ends[idea[0]]):
        lines[ends[name] : ends[name]] = addition.splitlines()
    path = folder / f"idea_of_{'_'.join(names).replace(' ', '_')}.py"
    path.write_text("\n".join(lines))
    return load_script(path)


def manager_of(script: ModuleType, **changes: Any) -> Any:
    h = short_schedule(script=script, **{"bigram_rows": 640, **changes})
    return script.TrainingManager(tiny_gpt(torch.float64, script=script, bigram_rows=h.bigram_rows), h)


def train(manager: Any, first: int, last: int, rank: int = 0, world_size: int = 1) -> dict[int, dict[str, Tensor]]:
    """Steps first .. last − 1 on this rank's micro-batches; the gradients of each step's end, before the update."""
    gradients = {}
    for step in range(first, last):
        manager.advance_schedule(step)
        for i in range(rank, manager.h.micro_batches, world_size):
            manager.model(*random_batch(64, 120, (0, 17, 40), seed=100 * step + i), manager.forward_schedule()).backward()
            manager.optimizer.accumulate()
        gradients[step] = map_tensors(torch.clone, manager.optimizer.gradients())
        manager.step_optimizers(step)
    return gradients


def parameters(manager: Any) -> dict[str, Tensor]:
    return map_tensors(torch.clone, manager.state_dict()["same"]["parameters"])


ALONE = Ranks(0, 1, torch.device("cpu"))


def assert_comes_back(make: Callable[[], Any], manager: Any, step: int) -> None:
    """The state fits its layout, is free of contradictions, and starts another manager, which goes on with the same bits."""
    state = whole_state(manager, ALONE)
    layout = manager.layout(step)
    assert differences(state, {**layout, "partial": {0: layout["partial"]}}) == []
    assert manager.contradictions(state, step) == []
    other = make()
    set_parameters(other.model, prefix="other ")
    load_whole_state(other, state, ALONE)
    assert unequal(other.state_dict(), manager.state_dict()) == []
    for each in (manager, other):
        train(each, step, step + 2)
    assert unequal(other.state_dict(), manager.state_dict()) == []


# Stages


@pytest.fixture(scope="module")
def four_stages(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return idea(tmp_path_factory.mktemp("stages"), "fourth stage")


def test_fourth_stage_has_its_steps_and_its_peak(four_stages: ModuleType) -> None:
    """Of 120 steps: from 80, where the second stage ends, to 90."""
    h = short_schedule(script=four_stages, num_scheduled_iterations=120)
    said = [four_stages.step_schedule(step, h) for step in range(h.total_iterations)]
    row = four_stages.STAGES[2]
    assert [step for step, s in enumerate(said) if s.batch_tokens == 20 * h.batch_unit] == list(range(80, 90))
    assert [step for step, s in enumerate(said) if (s.short_window, s.long_window) == (64, 144)] == list(range(80, 90))
    assert [s.mtp_weights[1] for s in said[80:90]] == pytest.approx([0.4 - 0.03 * i for i in range(10)], rel=1e-12)
    assert len(said[79].mtp_weights) == 2 and len(said[90].mtp_weights) == 1
    weights = [(1 - step / 120) / (1 - four_stages.LR_DECAY_FROM) for step in range(120)]
    peaks = [(said[step].lr_mul - four_stages.LR_FLOOR * (1 - weights[step])) / weights[step] for step in range(79, 92)]
    expected = [four_stages.STAGES[1].lr] + [row.lr] * 10 + [four_stages.STAGES[3].lr] * 2
    assert peaks == pytest.approx(expected, rel=1e-12)


def test_fourth_stage_is_the_longest_batch_if_it_is(four_stages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    h = short_schedule(script=four_stages, val_batch_tokens=16)
    before = h.max_tokens
    monkeypatch.setattr(four_stages, "STAGES", (*four_stages.STAGES[:2], four_stages.STAGES[2]._replace(batch=48)))
    assert h.max_tokens == 2 * before


def test_each_stages_batch_must_divide_and_the_extensions(four_stages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into 2 micro-batches of a multiple of 16 tokens."""
    h = short_schedule(script=four_stages, batch_unit=16)
    h.check(1)
    for batches, number in (((8, 9, 20, 24, 24), 2), ((8, 16, 21, 24, 24), 3), ((8, 16, 20, 24, 25), 5)):
        stages = [row._replace(batch=n) for row, n in zip((*four_stages.STAGES, four_stages.EXTENSION), batches)]
        monkeypatch.setattr(four_stages, "STAGES", tuple(stages[:-1]))
        monkeypatch.setattr(four_stages, "EXTENSION", stages[-1])
        with pytest.raises(ValueError, match=rf"batch_unit=16 \(stage {number}\)"):
            h.check(1)


def test_fourth_stage_trains_with_yarn_once_at_each_boundary(four_stages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 steps it has the one from 8 to 9."""
    make = functools.partial(manager_of, four_stages)
    manager, extended = make(), []
    extend = manager.model.extend_windows
    monkeypatch.setattr(manager.model, "extend_windows", lambda *windows: extended.append(windows) or extend(*windows))
    at = {}
    for step in range(14):
        train(manager, step, step + 1)
        at[step], extended[:] = [(old // 16, new // 16) for old, new in extended], []
    changes = {step: windows for step, windows in at.items() if windows}
    assert changes == {4: [(3, 7)], 8: [(7, 9)], 9: [(9, 11)], 12: [(11, 13)]}
    again = make()
    train(again, 0, 9)
    assert_comes_back(make, again, 9)


# Scalars


def test_scalar_is_a_row_and_its_use(tmp_path: Path) -> None:
    """First of the bank: all others move. The residual stream ends normed: at 0.75 hidden states are 0.75 as long."""
    script, plain = idea(tmp_path, "scalar", "scalar in use"), idea(tmp_path, "scalar")
    make = functools.partial(manager_of, script)
    manager, without = make(), manager_of(plain)
    for each in (manager, without):
        assert each.model.scalars.shape == (sum(map(len, plain.SCALARS.values())),)
    assert plain.GPT(128, len(plain.LAYERS), 2, 8, 16, 64).scalars[0] == 0.75
    manager.model.scalars.data[0] = 1.0
    batch = random_batch(64, 120, (0, 17)), manager.forward_schedule()
    assert torch.equal(*(each.model(*batch[0], batch[1]) for each in (manager, without)))

    before = parameters(manager)["scalars"]
    gradients = train(manager, 0, 3)
    moved = parameters(manager)["scalars"] - before
    assert gradients[1]["scalars"][0] != 0
    # Adam's first step is ± its rate, wherever the gradient is far above ε.
    row, now = script.PARAM_TABLE["scalars"], script.step_schedule(1, manager.h)
    expected = -row.lr * row.lr_mul * now.lr_mul * gradients[1]["scalars"][0].sign()
    assert moved[0].item() == pytest.approx(expected.item(), rel=1e-6)
    assert_comes_back(make, manager, 3)


# Layers


def test_layers_are_their_rows(tmp_path: Path) -> None:
    """Kinds that the recipe has not, two layers more, another skip: banks of their size, and the naive model's numbers."""
    script = idea(tmp_path, "layers")
    make = functools.partial(manager_of, script)
    manager, layers = make(), script.LAYERS
    model = manager.model
    with_window, with_value = (sum(bool(getattr(layer, column)) for layer in layers) for column in ("window", "value_gate"))
    assert len(model.attn) == len(model.attn_gate_bank) == with_window
    assert len(model.ve_gate_bank) == model.value_embeds.size(1) // model.model_dim == with_value
    assert len(model.mlp) == 4 * math.ceil(len(layers) / 4) and len(model.x0_lambdas) == len(layers)

    inputs, targets, cu_seqlens = random_batch(64, 120, (0, 17, 40))
    params = {label: param.detach().clone().requires_grad_() for label, param in model.named_parameters()}
    schedule, freq = manager.forward_schedule(), model.yarn.frequencies.tolist()
    windows = {"short": schedule.short_window, "long": schedule.long_window}
    hidden = naive_model.hidden_states(
        params, layers, script.SCALARS, model.num_heads, inputs, cu_seqlens, windows, freq, model.yarn.scale
    )
    assert (model.hidden_states(inputs, cu_seqlens, schedule) - hidden).abs().max() <= 100 * TOLERANCE64
    naive_model.training_loss(hidden @ params["lm_head"], targets, schedule.mtp_weights.tolist()).backward()
    model(inputs, targets, cu_seqlens, schedule).backward()
    for label, param in model.named_parameters():
        assert (param.grad - params[label].grad).norm() <= 1e-8 * params[label].grad.norm(), label
        param.grad = None

    before = parameters(manager)
    train(manager, 0, 3)
    moved = {label: value != before[label] for label, value in parameters(manager).items()}
    assert all(layer.any() for layer in moved["attn"]) and all(layer.any() for layer in moved["mlp"][: len(layers)])
    assert all(gate.any() for gate in moved["ve_gate_bank"])
    assert_comes_back(make, manager, 3)


# Rules


def assert_sgd(script: ModuleType, h: Any, before: Tensor, after: Tensor, gradient: Tensor) -> None:
    """By exactly lr · gradient: a product and a difference, each rounded once, of factors that are rounded twice."""
    row, now = script.PARAM_TABLE["value_embeds"], script.step_schedule(1, h)
    step = row.lr * now.lr_mul / h.micro_batches * gradient
    assert ((after - (before - step)).abs() <= 4 * U64 * (before.abs() + step.abs())).all() and step.any()


def test_third_rule_moves_its_parameter_by_its_update_alone(tmp_path: Path) -> None:
    script = idea(tmp_path, "rule", "rule in use")
    make = functools.partial(manager_of, script)
    manager = make()
    start = parameters(manager)
    gradients = train(manager, 0, 3)
    label = "value_embeds"
    assert_sgd(script, manager.h, start[label], parameters(manager)[label], gradients[1][label])
    saved = manager.state_dict()["sharded"][label]
    assert [name for name in saved if not name.startswith("average")] == [] and [*manager.optimizer.state[label]] == [*saved]
    plain = manager_of(idea(tmp_path, "rule"))
    train(plain, 0, 2)
    again = make()
    train(again, 0, 2)
    assert unequal(parameters(again), parameters(plain)) == [label]
    assert_comes_back(make, manager, 3)


def train_on_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Three steps with SGD on value_embeds, its whole state before the third, and what a fresh manager makes of it."""
    script = idea(folder / f"{rank}", "rule", "rule in use")
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    manager, other = manager_of(script), manager_of(script)
    train(manager, 0, 2, rank, world_size)
    state = ranks.gather(whole_state(manager, ranks))[0]
    set_parameters(other.model, prefix="other ")
    load_whole_state(other, state, ranks)
    restored = unequal(other.state_dict(), manager.state_dict())
    train(manager, 2, 3, rank, world_size)
    return dict(state=state, restored=restored, parameters=parameters(manager))


def test_third_rule_is_the_same_on_two_ranks(tmp_path: Path, run_ranks) -> None:
    for name in ("0", "1", "alone"):
        (tmp_path / name).mkdir()
    first, second = run_ranks(2, train_on_ranks, tmp_path)
    assert first["restored"] == second["restored"] == [] == unequal(first["parameters"], second["parameters"])
    alone = manager_of(idea(tmp_path / "alone", "rule", "rule in use"))
    train(alone, 0, 2)
    assert differences(first["state"]["same"], alone.layout(2)["same"]) == []
    assert differences(first["state"]["sharded"], alone.layout(2)["sharded"]) == []
    train(alone, 2, 3)
    for label, value in parameters(alone).items():  # sums in another order, and Polar Express's thousandfold
        assert (first["parameters"][label] - value).norm() <= TOLERANCE64 * value.norm(), label


# Ties


def test_tied_parameters_may_have_different_rules(tmp_path: Path) -> None:
    """The head moves by SGD on both gradients; embed, whose Adam finds no state to take over, begins it at the split."""
    script = idea(tmp_path, "rule", "rule of the head")
    make = functools.partial(manager_of, script)
    manager = make()
    start = parameters(manager)["lm_head"]
    gradients = train(manager, 0, 2)[1]
    params, now = parameters(manager), script.step_schedule(1, manager.h)
    step = 0.5 * now.lr_mul / manager.h.micro_batches * (gradients["lm_head"] + gradients["embed"].T)
    assert (params["lm_head"] - (start - step)).abs().max() <= TOLERANCE64 * step.abs().max()
    assert torch.equal(params["embed"], params["lm_head"].T)
    train(manager, 2, manager.split_step + 1)
    assert manager.optimizer.state["embed"]["step"] == 0
    train(manager, manager.split_step + 1, manager.split_step + 3)
    assert manager.optimizer.state["embed"]["step"] == 1 and manager.optimizer.state["embed"]["exp_avg"].any()
    assert_comes_back(make, manager, manager.split_step + 3)


@pytest.mark.parametrize("names", [("matrices' rule of both",), ("a moment for each row", "rows' rule of both")])
def test_state_that_is_not_of_the_parameters_shape_starts_anew_at_the_split(tmp_path: Path, run_ranks, names: tuple) -> None:
    """All of it: a step's number beside moments that begin would be another rule. It ended in gloo's traceback."""
    script = idea(tmp_path, *names)
    manager = manager_of(script)
    train(manager, 0, manager.split_step + 1)
    state = manager.optimizer.state["embed"]
    assert not manager.optimizer.tied and not any(x.any() if isinstance(x, Tensor) else x for x in state.values())
    assert torch.equal(manager.model.embed, manager.model.lm_head.T)
    train(manager, manager.split_step + 1, manager.split_step + 3)
    assert any(x.any() for x in state.values() if isinstance(x, Tensor)) and not torch.equal(manager.model.embed, manager.model.lm_head.T)
    assert_comes_back(lambda: manager_of(script), manager, manager.split_step + 3)
    run_ranks(2, trained_past_the_split, script.__file__)


def trained_past_the_split(rank: int, world_size: int, path: str) -> None:
    manager = manager_of(load_script(Path(path)))
    train(manager, 0, manager.split_step + 2, rank, world_size)


def test_second_tie_is_one_column(tmp_path: Path) -> None:
    """A third table of as many rows: lm_head learns from three gradients, both are its transpose, and part with its state."""
    script = idea(tmp_path, "tie")
    make = functools.partial(manager_of, script, bigram_rows=128)
    manager = make()
    gradients = train(manager, 0, 2)[1]
    row, state = script.PARAM_TABLE["lm_head"], manager.optimizer.state
    total = gradients["lm_head"] + gradients["embed"].T + gradients["bigram_embed"].T
    expected = (1 - row.betas[0]) * total / manager.h.micro_batches
    assert (state["lm_head"]["exp_avg"] - expected).abs().max() <= TOLERANCE64 * expected.abs().max()
    params = parameters(manager)
    assert torch.equal(params["embed"], params["lm_head"].T) and torch.equal(params["bigram_embed"], params["lm_head"].T)
    train(manager, 2, manager.split_step + 1)
    for label in ("embed", "bigram_embed"):
        assert state[label]["step"] == state["lm_head"]["step"]
        assert all(torch.equal(state[label][name], state["lm_head"][name].T) for name in ("exp_avg", "exp_avg_sq"))
    train(manager, manager.split_step + 1, manager.split_step + 3)
    params = parameters(manager)
    assert not torch.equal(params["embed"], params["lm_head"].T) and not torch.equal(params["bigram_embed"], params["embed"])
    assert_comes_back(make, manager, manager.split_step + 3)


# A row that cannot be meant


def layer(i: int, **changes: Any) -> tuple:
    return (*train_gpt.LAYERS[:i], replace(train_gpt.LAYERS[i], **changes), *train_gpt.LAYERS[i + 1 :])


def stage(i: int, **changes: Any) -> tuple:
    return (*train_gpt.STAGES[:i], train_gpt.STAGES[i]._replace(**changes), *train_gpt.STAGES[i + 1 :])


MISTAKES = {
    "window": ("LAYERS", lambda: layer(4, window="shrot"), "LAYERS, layer 4: there is no window 'shrot'"),
    "gate": ("LAYERS", lambda: layer(8, value_gate=13), "LAYERS, layer 8: value_gate is 13, must be 0 to 12"),
    "negative gate": ("LAYERS", lambda: layer(8, value_gate=-1), "LAYERS, layer 8: value_gate is -1, must be 0 to 12"),
    "add": ("LAYERS", lambda: layer(6, add="skp"), "LAYERS, layer 6: none keeps 'skp'"),
    "add before keep": ("LAYERS", lambda: layer(2, add="skip"), "LAYERS, layer 2: none keeps 'skip'"),
    "gate of no attention": ("LAYERS", lambda: layer(6, value_gate=6), "LAYERS, layer 6: paired, .* so a window"),
    "pairs of no attention": ("LAYERS", lambda: layer(6, paired=True), "LAYERS, layer 6: .* need attention, so a window"),
    "offset of no attention": ("LAYERS", lambda: layer(6, key_offset=True), "LAYERS, layer 6: .* so a window"),
    "kept twice": ("LAYERS", lambda: layer(8, keep="backout"), "LAYERS, layer 8: 'backout' is kept by one before"),
    "nothing to subtract": ("LAYERS", lambda: layer(7, keep=""), "LAYERS: none keeps 'backout', which is subtracted at the end"),
    "window again": ("STAGES", lambda: stage(2, long=3), r"a long window cannot come back \(YaRN\), is \[3, 7, 3, 13\]"),
    "extension again": ("EXTENSION", lambda: train_gpt.EXTENSION._replace(long=7), r"cannot come back .* \[3, 7, 11, 7\]"),
    "end": ("STAGES", lambda: stage(2, until=0.9), "STAGES: until must rise and end at 1, is .*0.9"),
    "order": ("STAGES", lambda: stage(1, until=0.2), "STAGES: until must rise and end at 1, is .*0.2, 1.0"),
    "twice": ("STAGES", lambda: stage(1, until=1 / 3), "STAGES: until must rise"),
    "weights": ("STAGES", lambda: stage(1, mtp_last=(1,)), r"STAGES, stage \[2\]: mtp_first and mtp_last must be tuples of as many"),
    "no tuple": ("STAGES", lambda: stage(2, mtp_last=1), r"STAGES, stage \[3\]: mtp_first and mtp_last must be tuples"),
    "no weights": ("STAGES", lambda: stage(2, mtp_first=(), mtp_last=()), r"STAGES, stage \[3\]: mtp_first and .*sums > 0"),
    "weights of 0": ("STAGES", lambda: stage(0, mtp_first=(0, 0, 0)), r"STAGES, stage \[1\]: mtp_first and .*sums > 0"),
    "half a window": ("STAGES", lambda: stage(1, long=7.5), r"STAGES .then EXTENSION., stage \[2\]: batch and windows must be whole numbers"),
    "no window": ("STAGES", lambda: stage(0, short=0), r"STAGES .then EXTENSION., stage \[1\]: batch and windows must be whole numbers from 1"),
    "a float for a batch": ("STAGES", lambda: stage(0, batch=8.0), r"STAGES .then EXTENSION., stage \[1\]: batch and windows must be whole"),
    "less than no batch": ("STAGES", lambda: stage(2, batch=-8), r"STAGES .then EXTENSION., stage \[3\]: batch and windows must be whole"),
    "no rate": ("STAGES", lambda: stage(2, lr=math.nan), r"STAGES .then EXTENSION., stage \[3\]: .*lr a number above 0"),
    "an infinite rate": ("STAGES", lambda: stage(2, lr=math.inf), r"STAGES .then EXTENSION., stage \[3\]: .*lr a number above 0"),
    "extension": ("EXTENSION", lambda: train_gpt.EXTENSION._replace(long=0), r"STAGES .then EXTENSION., stage \[4\]: batch and windows must"),
    "a row's field is a text": ("STAGES", lambda: stage(0, long="3x"), r"STAGES .then EXTENSION., stage \[1\]: batch and windows"),
    "split": ("SPLIT_EMBED_AT", lambda: -1, "SPLIT_EMBED_AT is -1, must be 0 or more: a fraction of the scheduled steps"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_row_that_cannot_be_meant_is_named(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    table, changed, message = MISTAKES[mistake]
    train_gpt.Hyperparameters().check(1)
    monkeypatch.setattr(train_gpt, table, changed())
    with pytest.raises(ValueError, match=message):
        train_gpt.Hyperparameters().check(1)


def test_a_row_may_have_fields_of_an_ideas_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were taken for the weights, which then stood last."""
    fields = {name: float for name in (*train_gpt.Stage._fields, "weight_decay")}
    longer = NamedTuple("Stage", fields.items())
    monkeypatch.setattr(train_gpt, "STAGES", tuple(longer(*row, 0.1) for row in train_gpt.STAGES))
    train_gpt.Hyperparameters().check(1)


def test_a_parameter_is_sharded_or_replicated() -> None:
    with pytest.raises(ValueError, match="comms='shardd' in PARAM_TABLE: must be 'sharded' or 'replicated'"):
        train_gpt.Adam("shardd")
