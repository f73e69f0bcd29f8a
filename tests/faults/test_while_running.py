"""Promise 3: a loss that is not finite and bad data end a run in one line."""

import copy
import re
from typing import Any

import pytest

from common import train_gpt, unequal
from data.shards import write_shard
from runtime.checkpoints import read_checkpoint
from steps import after_step, spoil_a_weight


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
    assert re.match("the training loss is (nan|inf) at step 3; ", error)
    assert NOT_FINITE[spoil] in error
    changed = unequal(before, copy_of_state(before.pop("manager")))
    assert changed == ["params.scalars"]  # the noise of the idea
    assert not list(tmp_path.glob("logs/run/*.pt"))
    last = (tmp_path / "logs/run.txt").read_text().splitlines()[-1]
    assert last.startswith("error: AgreedError: the training loss is ")


def test_a_host_that_is_a_step_ahead_names_the_step_and_the_newest_checkpoint(
    error_of, tmp_path, monkeypatch
):
    """As a GPU's. By then the next step has been made, and nearly all weights are not finite."""
    init = train_gpt.Run.__init__

    def ahead(run, *args):
        init(run, *args)
        run.ahead = 1

    monkeypatch.setattr(train_gpt.Run, "__init__", ahead)
    after_step(monkeypatch, 4, spoil_a_weight)
    error = error_of(val_every=0, save_every=3)
    newest = tmp_path / "logs/run/step_000003.pt"
    assert re.match("the training loss is (nan|inf) at step 4; the newest checkpoint is ", error)
    assert f"{newest}; lower the learning rate" in error and "not finite" not in error
    assert [*newest.parent.glob("*")] == [newest]
    steps = re.findall(r"^step:(\d+)/8 train_time", (tmp_path / "logs/run.txt").read_text(), re.M)
    assert steps[-1] == "5"


@pytest.mark.parametrize(
    "label, done, save_every, kind",
    [("mlp", 5, 3, "weights of mlp"), ("bigram_embed", 4, 5, "gradients of bigram_embed")],
)
def test_a_step_of_a_finite_loss_whose_gradient_is_not_is_not_saved(
    error_of, tmp_path, monkeypatch, label, done, save_every, kind
):
    """The gradient of √0 times 0. A table that is not due yet holds it as its pending gradient."""

    def spoil(run):
        model = run.manager.model
        forward = model.forward
        model.forward = lambda *batch: forward(*batch) + (0 * getattr(model, label)).sqrt().sum()

    after_step(monkeypatch, done, spoil)
    error = error_of(val_every=0, save_every=save_every)
    step = done + 1
    assert error.startswith(f"not saved before step {step}: not finite: the {kind}; ")
    saved = [path.name for path in tmp_path.glob("logs/run/*.pt")]
    assert saved == ["step_000003.pt"] * (save_every == 3)
    assert ("there is no checkpoint" in error) == (not saved)


def copy_of_state(manager) -> dict[str, Any]:
    """A copy of all parameters and optimizer state."""
    return copy.deepcopy({"params": manager.optimizer.params, "state": manager.optimizer.state})


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
