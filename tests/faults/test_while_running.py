"""Promise 3: a loss that is not finite, too little GPU memory and bad data end a run in one line."""

import copy
import re
from typing import Any

import pytest
import torch

from common import tiny_settings, train_gpt, unequal
from data.shards import write_shard
from runtime.checkpoints import read_checkpoint
from runtime.ranks import Ranks, RunError, Signals, describe


@torch.no_grad()
def spoil_a_weight(manager):
    manager.optimizer.params["attn"].view(-1)[7] = float("inf")


def spoil_a_gradient(manager):
    """The forward pass stays finite until the loss, as where bf16 overflows in a logit."""
    model = manager.model
    forward = model.forward
    model.forward = lambda *batch: forward(*batch) + 0 * model.mlp.sum() * float("nan")


NOT_FINITE = {
    spoil_a_weight: "not finite: the weights of attn",
    spoil_a_gradient: "not finite: the gradients of ",
}


def spoil_in_step_3(monkeypatch, spoil, before=None) -> None:
    """Spoil the manager, and note its state, before the passes of that step."""
    forward_backward = train_gpt.forward_backward

    def spoiled(step, manager, *others):
        if step == 3:
            spoil(manager)
            if before is not None:
                before.update(copy_of_state(manager), manager=manager)
        return forward_backward(step, manager, *others)

    monkeypatch.setattr(train_gpt, "forward_backward", spoiled)


class Ahead(train_gpt.Run):
    """A host that goes on before it reads a loss, as a GPU's does."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ahead = 1


@pytest.mark.parametrize("run", [train_gpt.Run, Ahead])
@pytest.mark.parametrize("spoil", NOT_FINITE)
def test_a_loss_that_is_not_finite_reaches_no_weight(error_of, tmp_path, monkeypatch, spoil, run):
    """Nor does it reach any state, in a step of all update rules. An update that changes nothing
    counts as one, and leaves no infinity what it was."""
    monkeypatch.setattr(train_gpt, "Run", run)
    before = {}
    spoil_in_step_3(monkeypatch, spoil, before)
    error = error_of(val_every=0)
    assert re.match("the training loss is (nan|inf) at step 3: its update is skipped", error)
    assert NOT_FINITE[spoil] in error
    changed = unequal(before, copy_of_state(before.pop("manager")))
    assert any(name.endswith("step") for name in changed) == (run is Ahead)
    others = {name for name in changed if not name.endswith("step")}
    noise = {"params.scalars"} if run is Ahead else set()  # of the idea's next step
    assert others == noise | (
        {"params.attn"} if run is Ahead and spoil is spoil_a_weight else set()
    )
    last = (tmp_path / "logs/run.txt").read_text().splitlines()[-1]
    assert last.startswith("error: AgreedError: the training loss is ")


def copy_of_state(manager) -> dict[str, Any]:
    """A copy of all parameters and optimizer state."""
    return copy.deepcopy({"params": manager.optimizer.params, "state": manager.optimizer.state})


def train_with_a_bad_rank(rank, world_size, shards, folder):
    """The error of a rank; rank 1 has a loss that is not finite in step 3."""
    if rank == 1:
        spoil_in_step_3(pytest.MonkeyPatch(), spoil_a_weight)
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


def test_a_host_that_is_ahead_trains_the_same(train, tmp_path, monkeypatch):
    """But for rounding: bits are the same in fp64 (tests/recipe/test_optimizer.py). A loss is read
    before its step counts as done."""

    def losses() -> list[float]:
        found = re.findall(r"val_loss:(\S+)", train(val_every=3))
        return [float(loss) for loss in found]

    expected = losses()
    (tmp_path / "logs/run.txt").unlink()
    monkeypatch.setattr(train_gpt, "Run", Ahead)
    assert len(expected) == 4 and losses() == pytest.approx(expected, abs=2e-4)
    (tmp_path / "logs/run.txt").unlink()
    spoil_in_step_3(monkeypatch, spoil_a_gradient)
    with pytest.raises(
        RunError, match="is nan at step 3.*weights and pending gradients are finite"
    ):
        train(val_every=4)  # its own gradients are gone by then


def test_a_host_that_is_ahead_stops_a_step_later(error_of, tmp_path, monkeypatch):
    """A signal that step 3 hears. The checkpoint is of the last step done."""
    monkeypatch.setattr(train_gpt, "Run", Ahead)
    forward_backward = train_gpt.forward_backward

    def with_signal(step, manager, batches, run):
        if step == 3:
            run.signals.received = 15
        return forward_backward(step, manager, batches, run)

    monkeypatch.setattr(train_gpt, "forward_backward", with_signal)
    path = tmp_path / "logs/run/step_000005.pt"
    error = error_of(val_every=0, save_every=99)
    assert error == f"stopped by SIGTERM after step:5/8: checkpoint {path}"


def test_too_little_gpu_memory_is_one_line_with_advice(train, tmp_path, monkeypatch):
    message = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"

    def allocate(*_):
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(train_gpt, "forward_backward", allocate)
    with pytest.raises(torch.OutOfMemoryError) as error:
        train()
    line = describe(error.value)
    assert "rank 0 is out of GPU memory" in line and "--micro_batches" in line
    assert "\n" not in line
    last = (tmp_path / "logs/run.txt").read_text().splitlines()[-1]
    assert last == f"error: OutOfMemoryError: {message.splitlines()[0]}"


@pytest.mark.parametrize("run", [train_gpt.Run, Ahead])
@pytest.mark.parametrize("shard, save_every, steps", [(2, 99, 4), (2, 0, 4), (0, 0, 0)])
def test_a_shard_that_fails_ends_the_run_saved(
    error_of, make_data, tmp_path, monkeypatch, shard, save_every, steps, run
):
    """The steps before it are done. The shard was whole when the run began."""
    monkeypatch.setattr(train_gpt, "Run", run)
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
