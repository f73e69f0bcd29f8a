"""Promise 5: the last good checkpoint survives, and a resumed run ends on the same bits."""

import os
import re
import resource
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from common import add_gradients, tiny_settings, train_gpt, unequal
from runtime import run
from runtime.checkpoints import LATEST, find_resumed, load_whole_state
from runtime.checkpoints import read_checkpoint, whole_state, write_checkpoint
from runtime.ranks import Ranks, RunError, Signals
from steps import after_step, in_child, kill, lines_of, spoil_a_weight, train_idea

# -----------------------------------------------------------------------------
# Resume


def state_in(folder, step: int = 8) -> dict:
    """The state in a run's checkpoint."""
    return read_checkpoint(folder / f"run/step_{step:06d}.pt")["state"]


def test_a_resumed_run_ends_on_the_same_bits(train, checkpoint, finished):
    """From step 3, when the gradients of step 2 are still pending. The log is as if it had never
    stopped, but for a note in its header; the clock goes on."""
    log = checkpoint.parents[1] / "run.txt"
    uninterrupted = lines_of(log)
    assert state_in(finished, 3)["gradients"]
    write_checkpoint(checkpoint, read_checkpoint(checkpoint) | {"seconds": 1000.0}, 9)
    assert train(resume=checkpoint, save_every=3, keep_checkpoints=3) == uninterrupted
    assert unequal(state_in(finished), state_in(log.parent)) == []
    text = log.read_text()
    assert "\nresumed at step 3 from step_000003.pt, with the same source\n" in text
    assert re.search(r"step:8/8 val_loss:\S+ train_time:1\d{6}ms", text)


def test_one_command_begins_and_resumes_a_run(train, finished, tmp_path):
    """Killed before its first checkpoint, then after a step, then let be: it ends on the same bits."""
    given = dict(resume="auto", save_minutes=1e-9)
    for step, begins in ((1, True), (6, True), (9, False)):
        with pytest.MonkeyPatch.context() as patch:
            after_step(patch, step, kill)
            assert in_child(train, **given) == (0 if step == 9 else -signal.SIGKILL)
        text = (tmp_path / "logs/run.txt").read_text()
        assert ("\nresumed at step" not in text) == begins
    assert "\nresumed at step 5 from step_000005.pt, with the same source\n" in text
    assert "step:0/8 val_loss" in (tmp_path / "logs/run.cut1.txt").read_text()
    assert unequal(state_in(finished), state_in(tmp_path / "logs")) == []


def test_latest_skips_damaged_checkpoints_and_needs_no_option(checkpoint, finished, capsys):
    """The settings are the checkpoint's. One that is given and contradicts it is refused."""
    command = ["--resume=latest", "--run_id=run", f"--log_dir={checkpoint.parents[1]}"]
    for step in (8, 6):
        path = checkpoint.with_name(f"step_00000{step}.pt")
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunError, match="--adam_lr_scale was 2.0, is 0.5"):
        train_idea([*command, "--adam_lr_scale=0.5"])
    capsys.readouterr()
    train_idea(command)
    assert unequal(state_in(finished), state_in(checkpoint.parents[1])) == []
    printed = capsys.readouterr().out
    assert re.findall(r"skipped .*/step_00000(\d).pt: damaged", printed) == ["8", "6"]
    for text in (printed, (checkpoint.parents[1] / "run.txt").read_text()):
        assert "resumed at step 3 from step_000003.pt" in text


def test_a_changed_source_is_another_run_unless_asked_for(train, error_of, checkpoint, capsys):
    """With auto, the run's name alone would say that it is the same. A run that is complete says so."""
    newest = checkpoint.with_name("step_000008.pt")
    saved = read_checkpoint(newest)
    saved["sources"]["data/shards.py"] += "# edited\n"
    train(resume="auto")
    same = "resumed at step 8 from step_000008.pt, with the same source"
    assert f"{same}: all its steps are done, nothing is trained\n" in capsys.readouterr().out
    write_checkpoint(newest, saved, 9)
    error = error_of(resume="auto")
    assert error.startswith(f"--resume=auto: the source has changed since {newest}: give another")
    train(resume="latest")
    assert "step_000008.pt, with changed source, 5 lines" in capsys.readouterr().out


def signal_self(_) -> None:
    """As a cluster warns."""
    os.kill(os.getpid(), signal.SIGUSR1)


def train_on_two(rank, world_size, shards, first, again):
    """How each run ends, in a process of run_ranks, which has a process group: a whole one, a resumed
    one, and its rest. Faults are rank 1's, whose clock stands still: all save by that of rank 0."""
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    still = SimpleNamespace(perf_counter=lambda: 0.0, strftime=time.strftime)
    from_3 = f"{first / 'logs/run/step_000003.pt'}"
    runs = [(first, "", 0, kill), (again, from_3, 5, signal_self), (again, LATEST, 0, kill)]
    ends = []
    for folder, resume, step, fault in [*runs, (first, from_3, 5, spoil_a_weight)]:
        h = tiny_settings(shards, folder, save_minutes=1e-9, keep_checkpoints=9, resume=resume)
        resumed = find_resumed(resume, h.log_dir, h.run_id)
        with Signals() as signals, pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(run, "time", still)
                after_step(patch, step, fault)
            try:
                train_gpt.train(h, ranks, signals, resumed)
            except RunError as error:
                ends.append(f"{error.args[0]}")
    return ends


def test_two_ranks_save_and_stop_together_and_resume_on_the_same_bits(
    run_ranks, shards, tmp_path, train
):
    """By one rank sums are in another order: step 3 is compared alone."""
    first = tmp_path / "first"
    again = tmp_path / "again"
    ends, ends_of_rank_1 = run_ranks(2, train_on_two, shards, first, again)
    assert ends == ends_of_rank_1
    stopped, refused = ends
    assert stopped.startswith("stopped by SIGUSR1 after step:6/8: checkpoint ")
    assert refused.startswith("not saved before step 5: not finite: the weights of attn; ")
    saved = [f"step_00000{step}.pt" for step in range(1, 9)]
    assert sorted(os.listdir(first / "logs/run")) == saved
    assert unequal(state_in(first / "logs"), state_in(again / "logs")) == []
    train(resume=first / "logs/run/step_000003.pt")
    logs = [(folder / "logs/run.txt").read_text() for folder in (again, tmp_path)]
    of_two, of_one = (float(re.search(r"step:4/8 val_loss:(\S+)", log)[1]) for log in logs)
    assert of_one == pytest.approx(of_two, abs=0.002)


def load_and_save(rank, world_size, state, settings):
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    manager = train_gpt.build(settings, ranks)
    if state:
        load_whole_state(manager, state, ranks)
    else:
        add_gradients(manager.model, 0)
        manager.optimizer.step(0)
        add_gradients(manager.model, 1)
    state = whole_state(manager, ranks)
    return state if rank == 0 else {}


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_loads_the_same_state(run_ranks, shards, tmp_path, world_size):
    """With pending gradients. Three do not divide the matrices: their banks are padded."""
    settings = tiny_settings(shards, tmp_path, model_dim=48, head_dim=24)
    of_one = load_and_save(0, 1, {}, settings)
    of_more, *_ = run_ranks(world_size, load_and_save, of_one, settings)
    again = load_and_save(0, 1, of_more, settings)
    for state in (of_more, again):
        sums = {label: sum(ranks) for label, ranks in state["gradients"].items()}
        once = {label: ranks[0] for label, ranks in of_one["gradients"].items()}
        assert once and unequal(once, sums) == []
        for part in ("parameters", "optimizer", "extra"):
            assert unequal(of_one[part], state[part]) == []


# -----------------------------------------------------------------------------
# Files


LAST_GOOD = {"fsync": 3, "replace": 3, "unlink": 6}  # by the call in which the process is killed


@pytest.mark.parametrize("call", LAST_GOOD)
def test_kill_9_in_a_save_leaves_the_last_good_checkpoint(train, tmp_path, finished, call):
    """Before the file of step 6 is on disk, before it has its name, before older ones are deleted."""
    folder = tmp_path / "logs/run"
    function = getattr(os, call)

    def kill_in_step_6(*args, **how):
        if list(folder.glob("step_000006.pt*")):
            kill()
        return function(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, kill_in_step_6)
        assert in_child(train, save_every=3, keep_checkpoints=1) == -signal.SIGKILL
    _, saved = find_resumed(LATEST, tmp_path / "logs")
    assert saved["step"] == LAST_GOOD[call]
    assert unequal(state_in(finished, saved["step"]), saved["state"]) == []


@pytest.fixture
def full_disk():
    """full_disk(n): no file grows beyond n bytes, until full_disk() or the test's end."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int = limits[0]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    yield limit
    limit()


def test_a_disk_that_is_full_during_a_save(error_of, finished, tmp_path, monkeypatch, full_disk):
    """The run goes on, the last good checkpoint stays. Its end says that the last step has none."""
    size = 1 << 20  # bytes: more than the log, less than a checkpoint
    after_step(monkeypatch, 4, lambda _: full_disk(size))
    end = error_of(save_every=3, keep_checkpoints=3)
    folder = tmp_path / "logs/run"
    lines = (tmp_path / "logs/run.txt").read_text()
    assert f"no checkpoint of step 6: {folder}/step_000006.pt: File too large" in lines
    assert "\nstep:8/8 val_loss:" in lines
    assert os.listdir(folder) == ["step_000003.pt"]
    assert unequal(state_in(finished, 3), state_in(tmp_path / "logs", 3)) == []
    assert end.startswith("all steps are done, but no checkpoint of step 8: ")


def test_the_newest_checkpoints_are_kept(tmp_path):
    """Those of a run that went on from an earlier step are the newer ones."""
    for step in (1, 2, 5, 6, 3):
        write_checkpoint(tmp_path / f"step_{step:06d}.pt", {}, keep=4)
    write_checkpoint(tmp_path / "step_000004.pt", {}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step_000003.pt", "step_000004.pt"]
