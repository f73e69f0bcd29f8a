"""Promise 2: bad options, bad data, a bad checkpoint and a full disk are one line before step 0."""

import copy
import os
import shutil
import sys

import pytest
import torch

from common import ROOT, SCRIPT, options, run_fresh, train_gpt
from runtime import checkpoints
from runtime.checkpoints import read_checkpoint, write_checkpoint

LAUNCH = [sys.executable, ROOT / "runtime/launch.py", SCRIPT]

# -----------------------------------------------------------------------------
# Settings


def test_an_error_is_printed_once_for_all_ranks(shards, tmp_path):
    """Through the launcher: one line, no traceback, code 1."""
    arguments = options(shards, tmp_path, micro_batches=2)
    done = run_fresh([*LAUNCH, *arguments], env={**os.environ, "RANKS": "3"})
    assert done.returncode == 1
    assert done.stderr.startswith("error: --micro_batches=2 cannot be shared by 3 ranks")
    assert done.stderr.count("\n") == 1 and done.stderr.endswith("\n")
    assert done.stdout == ""
    assert not (tmp_path / "logs").exists()


BAD_VALUES = {
    "out of range": (dict(val_every=-1), "--val_every=-1: must be at least 0"),
    "positive": (dict(val_batch_tokens=0), "--val_batch_tokens=0: must be positive"),
    "nan": (dict(adam_lr_scale="nan"), "--adam_lr_scale=nan: must be positive and finite"),
    "choice": (dict(grad_dtype="float16"), "--grad_dtype=float16: must be"),
    "heads": (dict(num_heads=3), "--num_heads=3: must be even"),
    "head": (dict(head_dim=18, model_dim=36), "--head_dim=18: must be a multiple of 4"),
    "model": (dict(model_dim=48), "--model_dim=48: must be"),
    "batch": (dict(batch_unit=98), "--batch_unit=98 (stage 1): 784 tokens do not divide"),
    "validation": (dict(val_tokens=513), "must be a multiple of --val_batch_tokens"),
    "encoding": (dict(encoding="klingon"), "unknown encoding 'klingon'; there are: bytes, "),
    "run id": (dict(run_id="a/b"), "--run_id='a/b': must be a plain file name"),
    "log folder": (dict(log_dir="/dev/null"), "/dev/null"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_value_that_cannot_be_used(early_error_of, case):
    given, message = BAD_VALUES[case]
    assert message in early_error_of(**given)


# -----------------------------------------------------------------------------
# Data


def test_a_folder_without_shards_is_named_with_what_lies_there(early_error_of, tmp_path):
    assert "no such folder" in early_error_of(data=tmp_path / "nowhere")
    (tmp_path / "fineweb.parquet").touch()
    error = early_error_of(data=tmp_path)
    assert f"{tmp_path}/*_train_*.bin" in error
    assert "'fineweb.parquet'" in error


BAD_SHARDS = {
    "truncated or damaged": lambda content: content[:-2],
    "not a token shard": lambda _: b"To be, or not to be. " * 99,
}


@pytest.mark.parametrize("fault", BAD_SHARDS)
def test_a_shard_that_cannot_be_used_is_named(early_error_of, make_data, fault):
    data = make_data()
    shard = data / "own_train_000000.bin"
    shard.write_bytes(BAD_SHARDS[fault](shard.read_bytes()))
    error = early_error_of(data=data)
    assert str(shard) in error and fault in error


def test_too_few_tokens(early_error_of, make_data):
    data = make_data(tokens=2048, val_tokens=512)
    error = early_error_of(data=data, val_tokens=256)
    assert "8 steps need" in error and "--num_scheduled_iterations" in error
    error = early_error_of(data=data)
    assert "validation needs 513 tokens, but it has 512" in error


# -----------------------------------------------------------------------------
# Run ids and checkpoints


def test_a_run_id_that_is_training(train, error_of, monkeypatch):
    """As a second ./run.sh of the same command: the first one goes on."""
    validate, errors = train_gpt.validate, []

    def start_another(*args):
        if not errors:
            errors.append(error_of())
        return validate(*args)

    monkeypatch.setattr(train_gpt, "validate", start_another)
    assert "step:8/8 val_loss" in train()
    assert errors == ["--run_id=run: a run of this name is training now"]


def test_a_run_id_that_exists(early_error_of, checkpoint):
    assert "--resume=latest, or give another --run_id" in early_error_of()
    shutil.rmtree(checkpoint.parent)
    assert "run.txt exists: give another --run_id" in early_error_of()


def rewrite(path, **changes):
    write_checkpoint(path, read_checkpoint(path) | changes, 9)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_torch_save(path):
    torch.save({"step": 3}, path)


class Code:
    """What runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.unlink, (str(self.path),)


def put_code_into_it(path):
    rewrite(path, code=Code(path))


def rename_a_parameter(path):
    state = read_checkpoint(path)["state"]
    state["parameters"]["wte"] = state["parameters"].pop("embed")
    rewrite(path, state=state)


BAD_CHECKPOINTS = {
    os.unlink: "cannot be read: No such file",
    flip_a_bit: "damaged or cut short",
    replace_by_torch_save: "not a checkpoint of this version",
    put_code_into_it: "cannot be loaded",
    rename_a_parameter: "wte was (384, 32) torch.float32, is not there",
}


@pytest.mark.parametrize("damage", BAD_CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_used(early_error_of, checkpoint, damage):
    damage(checkpoint)
    error = early_error_of(resume=checkpoint)
    assert damage is os.unlink or checkpoint.exists()
    assert error.startswith(str(checkpoint)) and BAD_CHECKPOINTS[damage] in error


def test_a_checkpoint_of_another_setting_other_data_or_another_schedule(
    early_error_of, checkpoint, make_data, monkeypatch
):
    error = early_error_of(resume=checkpoint, adam_lr_scale=0.5)
    assert "--adam_lr_scale was 2.0, is 0.5" in error
    error = early_error_of(resume=checkpoint, data=make_data(tokens=16384))
    assert "shard local_train_000000.bin was" in error
    first, *others = train_gpt.STAGES
    monkeypatch.setattr(train_gpt, "STAGES", (first._replace(batch=16), *others))
    error = early_error_of(resume=checkpoint)
    assert "plan of step 0: batch_tokens was 256, is 512" in error
    monkeypatch.setattr(train_gpt.Adam, "initial_state", lambda row, rows: {})
    error = early_error_of(resume=checkpoint)
    assert " cannot be resumed: scalars's state.step was int, is not there; " in error


def test_no_checkpoint_to_resume(early_error_of, checkpoint):
    """With auto a run may begin, but not where its checkpoints are damaged."""
    assert "--resume=auto: needs the run's name" in early_error_of(resume="auto", run_id="")
    for path in checkpoint.parent.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    for resume in ("latest", "auto"):
        assert early_error_of(resume=resume).startswith(f"{resume}: no usable checkpoint in ")


def test_no_disk_space_for_checkpoints(early_error_of, monkeypatch):
    """Counted before the start: two are kept, and the third is written before one is deleted."""
    usage = shutil.disk_usage("/")
    for free in (1 << 20, 12 << 20):
        small = usage._replace(free=free)
        monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: small)
        error = early_error_of(save_every=2)
        assert "3 checkpoints may need" in error and f"{free:,} are free" in error


class Average:
    def __init__(self, model):
        self.by_label = {label: x.detach().clone() for label, x in model.named_parameters()}


HELD = {  # what an idea may keep in its manager
    "optimizer": lambda model: [torch.optim.AdamW([model.embed])],
    "dict": lambda model: Average(model).by_label,
    "object": Average,
    "module": copy.deepcopy,
}


@pytest.mark.parametrize("held", HELD)
def test_state_that_no_checkpoint_would_hold(early_error_of, monkeypatch, held):
    """Such a script may run, but not save."""
    init = train_gpt.TrainingManager.__init__

    def with_state(self, model, h):
        init(self, model, h)
        self.parts = [model.attn[0]]  # of a parameter: nothing of its own
        self.others = HELD[held](model)

    monkeypatch.setattr(train_gpt.TrainingManager, "__init__", with_state)
    error = early_error_of(save_every=4)
    name = "a torch.optim.AdamW" if held == "optimizer" else "holds a tensor (10, 128, 32)"
    assert error.startswith("TrainingManager.others ") and name in error
    assert "--save_every=0" in error


@pytest.mark.parametrize("saved", [False, True])
def test_an_average_that_its_first_update_makes(train, error_of, monkeypatch, saved):
    """In the warm-up already, so before step 0. One in extra_state is as good as any."""

    class Averaging(train_gpt.TrainingManager):
        def step_optimizers(self, now):
            super().step_optimizers(now)
            self.average = [self.model.embed.detach().clone()]

        def extra_state(self):
            extra = super().extra_state()
            return extra | ({"average": getattr(self, "average", [])} if saved else {})

    monkeypatch.setattr(train_gpt, "TrainingManager", Averaging)
    end = train if saved else error_of
    words = "step:8/8 val_loss" if saved else "Averaging.average holds a tensor (384, 32)"
    assert words in end(save_every=4)


@pytest.mark.parametrize("shape", [(), (1, 8)])
def test_a_rules_state_that_is_not_by_rows(early_error_of, monkeypatch, shape):
    """As Adafactor's means of columns: another number of ranks could not share it."""
    state = lambda row, rows: {"column": torch.zeros(shape)}
    monkeypatch.setattr(train_gpt.Adam, "initial_state", state)
    words = f"PARAM_TABLE, scalars: the state 'column' has shape {shape}, "
    assert early_error_of().startswith(words)
