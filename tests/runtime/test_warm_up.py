"""The warm-up runs every shape that the schedule uses, and leaves no trace."""

import random

import numpy
import pytest
import torch

import train_gpt
from common import options, tiny_settings, unequal
from launch.console import AgreedError
from runtime.checkpoints import read_checkpoint
from runtime.ranks import Ranks
from train_gpt import build, main, step_schedule, warm_up

RANKS = Ranks(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_up_leaves_everything_as_it_was(shards, tmp_path, dtype):
    manager = build(tiny_settings(shards, tmp_path, dtype=dtype), RANKS)
    model = manager.model
    before, random_before, table = manager.state_dict(), torch.get_rng_state(), model.yarn.table.clone()
    warm_up(manager, RANKS)
    assert unequal(before, manager.state_dict()) == []
    assert torch.equal(table, model.yarn.table) and torch.equal(random_before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert manager.current == step_schedule(0, manager.h)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_the_forward_pass_changes_is_refused(shards, tmp_path, monkeypatch, persistent):
    """No checkpoint held an idea's running mean: a resumed run went on without it, and without a word."""

    def add(model, _) -> None:
        model.running += model.fixed

    def build_with_buffers(*args):
        manager = build(*args)
        manager.model.register_buffer("running", torch.zeros(3), persistent)
        manager.model.register_buffer("fixed", torch.ones(3), persistent)
        manager.model.register_forward_pre_hook(add)
        return manager

    monkeypatch.setattr(train_gpt, "build", build_with_buffers)
    with pytest.raises(AgreedError, match="^the forward pass changes running: neither a checkpoint nor another rank knows"):
        train_gpt.train(tiny_settings(shards, tmp_path), RANKS)


def test_all_random_numbers_of_the_first_weights_are_the_seeds(shards, tmp_path):
    def drawn(seed: int) -> list[float]:
        numpy.random.seed(None), random.seed()
        first = build(tiny_settings(shards, tmp_path, seed=seed), RANKS).model.embed
        return [first.sum().item(), numpy.random.rand(), random.random()]

    assert drawn(1) == drawn(1) and not {*drawn(1)} & {*drawn(2)}


@pytest.mark.parametrize("first_step", [0, 5])
def test_warm_up_runs_every_shape_that_training_uses(shards, tmp_path, monkeypatch, first_step):
    """From the first step on: what lies behind a resumed run is not run again."""
    h = tiny_settings(shards, tmp_path, save_every=5, keep_checkpoints=9)
    manager = build(h, RANKS)
    shapes = []

    def record(module, inputs):
        x, _, cu_seqlens, schedule = inputs
        windows = schedule.short_window, schedule.long_window, module.yarn.scale
        numbers = *windows, schedule.max_doc_len  # a graph holds them
        shapes.append((module.training, len(x), len(cu_seqlens), len(schedule.mtp_weights), *numbers))

    manager.max_val_doc_len = train_gpt.check_shards(h).longest
    manager.model.register_forward_pre_hook(record)
    warm_up(manager, RANKS, first_step)  # on a CPU without the compiler
    assert [s[0] for s in shapes].count(True) == 1 and len(shapes) <= 2
    shapes.clear()
    h.compile = True
    warm_up(manager, RANKS, first_step)
    warmed, h.compile = shapes.copy(), False
    assert len(set(warmed)) == len(warmed)
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    monkeypatch.setattr(train_gpt, "build", lambda *_: manager)
    train_gpt.train(h, RANKS)
    if first_step:
        shapes.clear()
        resume = f"{tmp_path / 'logs' / 'run' / 'step_000005.pt'}"
        train_gpt.train(tiny_settings(shards, tmp_path, run_id="on", resume=resume), RANKS)
    else:
        del shapes[: len(warmed)]
    assert set(shapes) == set(warmed) and len({s[:2] for s in warmed}) > (1 if first_step else 3)
    assert len({(s[0], s[-1]) for s in warmed}) == 2  # one longest document for all of training, one for all validations


def test_training_after_a_warm_up_equals_training_without(shards, tmp_path, monkeypatch):
    main(options(shards, tmp_path, run_id="with", save_every=8))
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    main(options(shards, tmp_path, run_id="without", save_every=8))
    a, b = (read_checkpoint(tmp_path / "logs" / name / "step_000008.pt")["state"] for name in ("with", "without"))
    assert unequal(a, b) == []
