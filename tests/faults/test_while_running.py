"""Promise 3: a loss that is not finite and bad data end a run in one line."""

import copy
import re
from typing import Any

import pytest
import torch

from common import tiny_settings, train_gpt, unequal
from data.shards import write_shard
from runtime.checkpoints import read_checkpoint
from runtime.ranks import Ranks, RunError, Signals
from steps import after_step


@torch.no_grad()
def spoil_a_weight(run):
    run.manager.optimizer.params["attn"].view(-1)[7] = float("inf")


def spoil_a_gradient(run):
    """The forward pass stays finite until the loss, as where bf16 overflows in a logit."""
    model = run.manager.model
    forward = model.forward
    model.forward = lambda *batch: forward(*batch) + 0 * model.mlp.sum() * float("nan")


NOT_FINITE = {
    spoil_a_weight: "not finite: the weights of attn",
    spoil_a_gradient: "not finite: the gradients of ",
}


@pytest.mark.parametrize("spoil", NOT_FINITE)
def test_a_loss_that_is_not_finite_reaches_no_weight(error_of, tmp_path, monkeypatch, spoil):
    """Nor any state, in a step of all update rules. On a CPU the parameters are named."""
    before = {}

    def spoil_and_copy(run):
        spoil(run)
        before.update(copy_of_state(run.manager), manager=run.manager)

    after_step(monkeypatch, 3, spoil_and_copy)
    error = error_of(val_every=0, save_every=99)
    assert re.match("the training loss is (nan|inf) at step 3: ", error)
    assert NOT_FINITE[spoil] in error
    changed = unequal(before, copy_of_state(before.pop("manager")))
    assert changed == ["params.scalars"]  # the noise of the idea
    assert not list(tmp_path.glob("logs/run/*.pt"))
    last = (tmp_path / "logs/run.txt").read_text().splitlines()[-1]
    assert last.startswith("error: AgreedError: the training loss is ")


def copy_of_state(manager) -> dict[str, Any]:
    """A copy of all parameters and optimizer state."""
    return copy.deepcopy({"params": manager.optimizer.params, "state": manager.optimizer.state})


def train_with_a_bad_rank(rank, world_size, shards, folder):
    """The error of a rank; rank 1 has a loss that is not finite in step 3."""
    if rank == 1:
        after_step(pytest.MonkeyPatch(), 3, spoil_a_weight)
    h = tiny_settings(shards, folder, val_every=0)
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    try:
        train_gpt.train(h, ranks, Signals())
    except RunError as error:
        return f"{type(error).__name__}: {error}"


def test_the_ranks_agree_on_a_loss_that_is_not_finite(run_ranks, shards, tmp_path):
    errors = run_ranks(2, train_with_a_bad_rank, shards, tmp_path)
    assert errors[0] == errors[1]
    assert errors[0].startswith("AgreedError: the training loss is ")
    assert "not finite: the weights of attn" in errors[0]


@pytest.mark.parametrize("shard, save_every, steps", [(2, 99, 4), (0, 0, 0)])
def test_a_shard_that_fails_ends_the_run_saved(
    error_of, make_data, tmp_path, monkeypatch, shard, save_every, steps
):
    """The steps before it are done. The shard was whole when the run began."""
    data = make_data(count=5, tokens=2048)
    name = f"own_train_00000{shard}.bin"
    warm_up = train_gpt.warm_up

    def overwrite(*args):
        write_shard(data / name, [256, 1, 2, 3])
        warm_up(*args)

    monkeypatch.setattr(train_gpt, "warm_up", overwrite)
    error = error_of(data=data, save_every=save_every, val_every=0)
    saved = "no checkpoint, as --save_every=0"
    if save_every:
        path = tmp_path / f"logs/run/step_00000{steps}.pt"
        saved = f"checkpoint {path}"
        assert read_checkpoint(path)["step"] == steps
    assert error.startswith(f"stopped by bad data after step:{steps}/8: {saved}; rank 0: ")
    assert f"{name}: has changed since the start" in error
    assert error in (tmp_path / "logs/run.txt").read_text().splitlines()
