"""What goes wrong in the middle of a run: full disks, and numbers that are not finite. No good checkpoint is lost to it."""

import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

import train_gpt
from common import ends_with, exit_code, forked, lines_of, options, text_of, tiny_settings
from launch.console import AgreedError
from launch.nests import non_finite
from runtime import log
from runtime.checkpoints import read_checkpoint
from runtime.ranks import Ranks
from train_gpt import TrainingManager, main

# -----------------------------------------------------------------------------
# Full disks


def limit_file_size(size: int) -> None:
    """What this process meets from now on is a disk that has no room for longer files."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def after_step_4(monkeypatch, work):
    """Let work() happen once the optimizer has made step 4."""
    step_optimizers = TrainingManager.step_optimizers

    def wrapped(self, step):
        step_optimizers(self, step)
        if step == 4:
            work()

    monkeypatch.setattr(TrainingManager, "step_optimizers", wrapped)


def test_a_disk_that_fills_hurts_neither_the_run_nor_the_last_checkpoint(shards, tmp_path, monkeypatch, no_warm_up):
    """From step 4 on, nothing can be written."""
    after_step_4(monkeypatch, lambda: limit_file_size(os.path.getsize(tmp_path / "logs" / "run.txt") + 20))
    child = forked(lambda: main(options(shards, tmp_path, save_every=3)), Path("/dev/null"))  # which has no such limit
    assert exit_code(child) == 1  # the last checkpoint is missing
    lines = lines_of(tmp_path / "logs" / "run.txt")
    assert "\nstep:4/8 " in lines and "step:8/8" not in lines
    assert [path.name for path in (tmp_path / "logs" / "run").iterdir()] == ["step_000003.pt"]
    assert read_checkpoint(tmp_path / "logs" / "run" / "step_000003.pt")["step"] == 3


def test_a_signal_on_a_full_disk_ends_the_run_with_its_code(shards, tmp_path, monkeypatch, no_warm_up):

    def fill():
        limit_file_size(os.path.getsize(tmp_path / "logs" / "run.txt") + 1000)
        os.kill(os.getpid(), signal.SIGTERM)

    after_step_4(monkeypatch, fill)
    assert exit_code(forked(lambda: main(options(shards, tmp_path, save_every=3)), Path("/dev/null"))) == 143
    last = lines_of(tmp_path / "logs" / "run.txt").splitlines()[-1]
    assert re.fullmatch(r"stopped by SIGTERM after step:[56]/8: no checkpoint of step [56]: .*\.pt: File too large", last)
    assert [path.name for path in (tmp_path / "logs" / "run").iterdir()] == ["step_000003.pt"]


class FullDisk:
    def __init__(self, file):
        self.file = file

    def write(self, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.file.close()


def while_full(monkeypatch, full_at: str, room_at: str) -> None:
    """Every write of a log fails from one line to another."""
    write = log.Log.write

    def write_if_room(self, text, console=False):
        if text.startswith(full_at):
            self.file = FullDisk(self.file)
        if text.startswith(room_at):
            self.file = self.file.file
        write(self, text, console)

    monkeypatch.setattr(log.Log, "write", write_if_room)


def test_a_log_that_cannot_be_written_waits_for_room(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    while_full(monkeypatch, "step:3/8 train", "step:6/8 train")
    main(options(shards, tmp_path))
    assert re.findall(r"step:(\d)/8 train", lines_of(tmp_path / "logs" / "run.txt")) == list("12345678")
    assert capsys.readouterr().out.count("No space left on device: the run goes on, the log's lines wait for room") == 1


def test_lines_that_never_found_room_are_shown_at_the_end(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    while_full(monkeypatch, "step:8/8 train", "never")
    with pytest.raises(SystemExit) as exit_:
        main(options(shards, tmp_path))
    printed = capsys.readouterr().out
    assert exit_.value.code == 1
    assert "step:8/8" not in lines_of(tmp_path / "logs" / "run.txt")
    assert re.search(r"run.txt lacks its last \d+ bytes:\nstep:8/8 train_time.*\nstep:8/8 val_loss:.*\npeak memory", printed)


def test_a_disk_that_takes_a_part_of_a_character_is_no_traceback(tmp_path, capsys):
    class OneByte(FullDisk):
        room = 1

        def write(self, data: bytes) -> int:
            self.room -= 1
            return self.file.write(data[:1]) if self.room == 0 else super().write(data)

    written = log.Log(Ranks(0, 1, torch.device("cpu")), tmp_path / "run.txt", "header")
    written.file = OneByte(written.file)
    written.write("⟫ text")
    written.close()
    assert "run.txt lacks its last 8 bytes:\n\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} text" in capsys.readouterr().out


def test_too_little_room_for_checkpoints_is_an_error_before_training(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    arguments = options(shards, tmp_path, save_every=3, keep_checkpoints=2)
    message = r"3 checkpoints need [\d,]+ bytes, 1,000,000 are free: make room or lower --keep_checkpoints"
    ends_with(capsys, arguments, message, code=1)
    assert not (tmp_path / "logs").exists()


def test_a_header_that_does_not_fit_is_an_error_before_training(shards, tmp_path):
    def work() -> None:
        limit_file_size(5000)
        main(options(shards, tmp_path))

    assert exit_code(forked(work, tmp_path / "output")) == 1
    assert "File too large" in text_of(tmp_path / "output")


# -----------------------------------------------------------------------------
# Bad numbers


@pytest.mark.parametrize("label", list(train_gpt.PARAM_TABLE))
def test_a_gradient_that_is_not_finite_stops_the_run_and_is_named(shards, tmp_path, monkeypatch, capsys, label, no_warm_up):
    """One element, at step 2 of 8: gone into the weights by step 3 at the latest, and into the loss of step 4."""
    step_optimizers = TrainingManager.step_optimizers

    def spoil(self, step):
        if step == 2:
            gradient = self.optimizer.gradients()[label]
            gradient.view(-1)[gradient.numel() // 257] = torch.nan  # in embeddings, a row that the text uses
        step_optimizers(self, step)

    monkeypatch.setattr(TrainingManager, "step_optimizers", spoil)
    with pytest.raises(SystemExit) as exit_:
        main(options(shards, tmp_path, save_every=1, val_every=0, keep_checkpoints=9))
    error = capsys.readouterr().err
    assert exit_.value.code == 1
    named = re.search(r"not finite(?: at step \d)?: (?:the (?:weights|gradients) of )?(.*?)(?:;|: stopped)", error)
    assert named and label in re.split(r"[., ]+", named[1]), error
    others = set(train_gpt.PARAM_TABLE) & set(re.split(r"[., ]+", named[1])) - {label}
    assert others <= ({"embed", "lm_head"} if label in ("embed", "lm_head") else set()), error
    assert int(re.search(r"at step (\d)", error)[1]) <= 4
    kept = sorted((tmp_path / "logs" / "run").glob("*"))
    assert kept and all(non_finite(read_checkpoint(path)) == [] for path in kept)


def spoil_a_weight(monkeypatch, at: int, label: str, row: int, value: float) -> None:
    """Step `at`'s update ends with this value in a row of the parameter."""
    step_optimizers = TrainingManager.step_optimizers

    def spoil(self, step):
        step_optimizers(self, step)
        if step == at:
            getattr(self.model, label).data[row] = value

    monkeypatch.setattr(TrainingManager, "step_optimizers", spoil)


def test_a_bad_loss_is_found_before_it_reaches_the_weights(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """Without saving, which would find it too: step 5's weights, spoilt by step 4, are those that the message is about."""
    managers, build = [], train_gpt.build
    monkeypatch.setattr(train_gpt, "build", lambda *args: managers.append(build(*args)) or managers[-1])
    spoil_a_weight(monkeypatch, 4, "x0_lambdas", 3, torch.inf)
    message = "the training loss is nan at step 5: stopped before its update; not finite: the weights of x0_lambdas; lower the"
    ends_with(capsys, options(shards, tmp_path, val_every=0), message, code=1)
    assert non_finite(managers[0].state_dict()["same"]["parameters"]) == ["x0_lambdas"]


def test_a_number_of_a_rules_state_that_is_not_finite_is_not_saved(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """Each checkpoint held it; the weights may never show it, as min(1, NaN) is 1."""
    step_optimizers = TrainingManager.step_optimizers

    def change(self, step):
        step_optimizers(self, step)
        if step == 5:
            self.optimizer.state["embed"]["step"] = float("nan")

    monkeypatch.setattr(TrainingManager, "step_optimizers", change)
    message = "not finite at step 6: sharded.embed.step: stopped, not saved; earlier ones are good"
    ends_with(capsys, options(shards, tmp_path, save_every=3, val_every=0), message, code=1)
    assert [path.name for path in (tmp_path / "logs" / "run").iterdir()] == ["step_000003.pt"]


def test_a_first_save_promises_no_earlier_ones(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    monkeypatch.setattr(TrainingManager, "step_optimizers", lambda self, step: self.optimizer.state["embed"].update(step=float("inf")))
    with pytest.raises(SystemExit):
        main(options(shards, tmp_path, save_every=1, val_every=0))
    assert "not finite at step 1: sharded.embed.step: stopped, not saved\n" in capsys.readouterr().err


@pytest.mark.parametrize("value, fault", [(True, "bool, here float"), (torch.zeros(514, 2), "Tensor, here float")])
def test_a_rules_state_that_changes_its_kind_is_found_at_a_save(shards, tmp_path, monkeypatch, capsys, no_warm_up, value, fault):
    """An idea's: every checkpoint was written, and none could be resumed."""
    step_optimizers = TrainingManager.step_optimizers

    def change(self, step):
        step_optimizers(self, step)
        if step == 5:
            self.optimizer.state["value_embeds"]["step"] = value

    monkeypatch.setattr(TrainingManager, "step_optimizers", change)
    said = f"state.sharded.value_embeds.step is {fault}: updates must keep initial_state's kinds; stopped, not saved"
    ends_with(capsys, options(shards, tmp_path, save_every=3), said, code=1)
    assert [path.name for path in (tmp_path / "logs" / "run").iterdir()] == ["step_000003.pt"]


def test_a_step_that_no_checkpoint_may_hold_is_found_at_a_save(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    step_optimizers = TrainingManager.step_optimizers

    def change(self, step):
        step_optimizers(self, step)
        if step == 5:
            self.optimizer.state["value_embeds"]["step"] = -1.0

    monkeypatch.setattr(TrainingManager, "step_optimizers", change)
    ends_with(capsys, options(shards, tmp_path, save_every=3), "the step of value_embeds is -1.0, must be 0 or more: ", code=1)
    assert [path.name for path in (tmp_path / "logs" / "run").iterdir()] == ["step_000003.pt"]


@pytest.mark.parametrize("rank_of_noise", [0, 1])
def test_weights_that_ranks_train_apart_end_the_run(run_ranks, shards, tmp_path, rank_of_noise):
    """As by a replicated parameter's rule that draws random numbers: each rank trained a model of its own, in silence."""
    messages = run_ranks(2, noise_of_its_own, shards, tmp_path, rank_of_noise)
    fault = "the weights of smear_gate are not the same on all ranks at step 4: the rule of a replicated parameter must do the same"
    assert messages[0] == messages[1] and messages[0].startswith(fault)
    assert "step:4/8 val_loss" not in lines_of(tmp_path / "logs" / "run.txt")


def noise_of_its_own(rank: int, world_size: int, shards: Path, folder: Path, rank_of_noise: int) -> str:
    """The message of a run in which one rank adds something to a replicated parameter at step 2."""
    step_optimizers = TrainingManager.step_optimizers

    def spoil(self, step):
        step_optimizers(self, step)
        if step == 2 and rank == rank_of_noise:
            self.model.smear_gate.data.view(-1)[0] += 0.125

    TrainingManager.step_optimizers = spoil
    train_gpt.warm_up = lambda *_: None
    with pytest.raises(AgreedError) as caught:
        train_gpt.train(tiny_settings(shards, folder), Ranks(rank, world_size, torch.device("cpu")))
    return f"{caught.value}"


def test_what_the_loss_does_not_show_is_found_at_a_validation(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """A value embedding of a token that no text holds."""
    spoil_a_weight(monkeypatch, 3, "value_embeds", 300, torch.nan)
    message = r"the validation loss is \d\.\d+ at step 4: stopped; not finite: the weights of value_embeds\n"
    ends_with(capsys, options(shards, tmp_path), message, code=1)
    assert "step:4/8 val_loss" not in lines_of(tmp_path / "logs" / "run.txt")


def test_a_loss_of_weights_that_are_finite_and_too_large_says_so(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    spoil_a_weight(monkeypatch, 3, "mlp", slice(None), 1e30)
    message = "the validation loss is nan at step 4: stopped; weights and gradients are finite\n"
    ends_with(capsys, options(shards, tmp_path), message, code=1)


@pytest.mark.parametrize("rank_of_fault", [0, 1])
def test_a_gradient_of_one_rank_that_is_not_finite_is_told_once_by_all(run_ranks, shards, tmp_path, rank_of_fault):
    messages = run_ranks(2, one_ranks_gradient, shards, tmp_path, rank_of_fault)
    assert messages[0] == messages[1]
    expected = "the training loss is nan at step 4: stopped before its update; not finite: the weights of mlp"
    assert messages[0].startswith(expected)


def one_ranks_gradient(rank: int, world_size: int, shards: Path, folder: Path, rank_of_fault: int) -> str:
    """The message of a run in which one rank's gradient has a NaN at step 3."""
    step_optimizers = TrainingManager.step_optimizers

    def spoil(self, step):
        if step == 3 and rank == rank_of_fault:
            self.optimizer.gradients()["mlp"].view(-1)[7] = torch.nan
        step_optimizers(self, step)

    TrainingManager.step_optimizers = spoil
    train_gpt.warm_up = lambda *_: None
    settings = tiny_settings(shards, folder, val_every=0)
    with pytest.raises(AgreedError) as caught:
        train_gpt.train(settings, Ranks(rank, world_size, torch.device("cpu")))
    return f"{caught.value}"
