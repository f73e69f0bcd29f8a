"""SIGTERM and Ctrl-C end a run after its step, saved and told; a second one, or one at another time, ends it at once."""

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from common import exit_code, forked, lines_of, options, text_of, wait_until
from launch import signals
from launch.console import Stopped
from launch.signals import ONE_SIGNAL, Signals, while_saving
from runtime import checkpoints
from runtime.checkpoints import read_checkpoint
from runtime.run import Run
from train_gpt import TrainingManager, main

SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])


@SIGNALS
def test_a_signal_ends_the_run_after_its_step(shards, tmp_path, number, no_warm_up):
    """Saved, told in the log's last line, the signal's exit code, within seconds; and then resumed to the end."""
    arguments = options(shards, tmp_path, save_every=99, num_scheduled_iterations=12, val_every=0)
    step_optimizers = TrainingManager.step_optimizers
    slowly = lambda *args: (time.sleep(0.1), step_optimizers(*args))
    child = forked(lambda: (setattr(TrainingManager, "step_optimizers", slowly), main(arguments)), tmp_path / "output")
    log = tmp_path / "logs" / "run.txt"
    wait_until(lambda: "\nstep:2/" in text_of(log))
    sent = time.monotonic()
    os.kill(child, number)
    assert exit_code(child) == 128 + number and time.monotonic() - sent < 10
    last = log.read_text().splitlines()[-1]
    match = re.fullmatch(rf"stopped by {number.name} after step:(\d+)/14: checkpoint (.+/step_0*(\d+)\.pt)", last)
    assert match and match[1] == match[3], last
    assert f"\nstep:{match[1]}/14 " in log.read_text()
    assert read_checkpoint(Path(match[2]))["step"] == int(match[1])
    main([*arguments, "--resume=latest"])
    assert re.findall(r"step:(\d+)/14 train", lines_of(log)) == [f"{step}" for step in range(1, 15)]
    assert "stopped by" not in lines_of(log)


# Where a signal may arrive in a run that saves every 3 steps and validates every 4: the method that sends it, from its
# call number `at` on; how many steps are done when the run ends.
MOMENTS = {
    "before the loss is reported": (TrainingManager, "advance_schedule", 4, 2),
    "after the loss is reported": (TrainingManager, "step_optimizers", 2, 3),
    "in a save": (checkpoints, "write_checkpoint", 1, 4),
    "in a validation": (Run, "heard_signal", 2, 0),
    "at the end of a validation": (Run, "log_validation", 1, 1),
    "in the last save": (checkpoints, "write_checkpoint", 3, 8),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_is_obeyed_with_one_checkpoint(shards, tmp_path, monkeypatch, moment, no_warm_up):
    owner, name, at, steps = MOMENTS[moment]
    write, written = checkpoints.write_checkpoint, []
    monkeypatch.setattr(checkpoints, "write_checkpoint", lambda path, *rest: (written.append(path), write(path, *rest)))
    method, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(name)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: any(signals.received for signals in seen))
        return method(*args, **kwargs)

    seen, init = [], Signals.__init__
    monkeypatch.setattr(Signals, "__init__", lambda self: (init(self), seen.append(self))[0])
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(SystemExit) as exit_:
        main(options(shards, tmp_path, save_every=3))
    assert exit_.value.code == 143
    lines = lines_of(tmp_path / "logs" / "run.txt").splitlines()
    folder = tmp_path / "logs" / "run"
    assert lines[-1] == f"stopped by SIGTERM after step:{steps}/8: checkpoint {folder}/step_{steps:06d}.pt"
    assert read_checkpoint(folder / f"step_{steps:06d}.pt")["step"] == steps
    assert written.count(folder / f"step_{steps:06d}.pt") == (2 if moment == "in the last save" else 1)
    assert [line for line in lines if f"step:{steps}/8 train" in line] or steps == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_in_a_validation_ends_it(shards, tmp_path, monkeypatch, no_warm_up):
    to_device, passes = train_gpt.to_device, []

    def interrupted(*args):
        passes.append(len(passes))
        if len(passes) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # a thread hears it
        return to_device(*args)

    monkeypatch.setattr(train_gpt, "to_device", interrupted)
    with pytest.raises(SystemExit) as exit_:
        main(options(shards, tmp_path, save_every=99, val_tokens=2048, val_batch_tokens=32))  # 64 batches
    lines = lines_of(tmp_path / "logs" / "run.txt").splitlines()
    assert exit_.value.code == 143 and len(lines) == 1 and len(passes) < 64
    assert lines[0].startswith("stopped by SIGTERM after step:0/8: checkpoint ")


def test_without_saving_a_signal_ends_the_run_all_the_same(shards, tmp_path, monkeypatch, no_warm_up):
    step_optimizers = TrainingManager.step_optimizers

    def interrupted(self, step):
        step_optimizers(self, step)
        if step == 0:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainingManager, "step_optimizers", interrupted)
    with pytest.raises(SystemExit) as exit_:
        main(options(shards, tmp_path))
    assert exit_.value.code == 130
    last = lines_of(tmp_path / "logs" / "run.txt").splitlines()[-1]
    assert re.fullmatch(r"stopped by SIGINT after step:[12]/8: no checkpoint, as --save_every=0", last)


OUTSIDE = {  # of the timed steps: what sends the signal, which then ends the process at once
    "in the checks": (train_gpt, "check_shards"),
    "in the warm-up": (train_gpt, "warm_up"),
    "in the sample": (train_gpt, "sample_text"),
}


@SIGNALS
@pytest.mark.parametrize("moment", OUTSIDE)
def test_a_signal_outside_of_training_ends_the_process_at_once(shards, tmp_path, monkeypatch, moment, number, no_warm_up):
    owner, name = OUTSIDE[moment]
    monkeypatch.setattr(owner, name, lambda *_: (os.kill(os.getpid(), number), time.sleep(50)))
    child = forked(lambda: main(options(shards, tmp_path, sample_tokens=5, val_every=0)), tmp_path / "output")
    assert exit_code(child) == 128 + number
    assert f"{number.name}: ended at once" in text_of(tmp_path / "output")
    assert ("\nstep:8/8 val_loss" in text_of(tmp_path / "logs" / "run.txt")) == (moment == "in the sample")


@pytest.mark.parametrize("training", [True, False])
def test_a_second_signal_ends_at_once_whatever_the_process_waits_for(tmp_path, training):
    """Also the first, outside of training; also in a call that never returns to Python."""

    def hang() -> None:
        with Signals() as signals:
            signals.in_training = training
            print("ready", flush=True)
            torch.multiprocessing.get_context("fork").Semaphore(0).acquire()

    output = tmp_path / "output"
    child = forked(hang, output)
    wait_until(lambda: "ready" in text_of(output))
    os.kill(child, signal.SIGTERM)
    if training:
        wait_until(lambda: "a second one ends it at once" in output.read_text())
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGINT)
    assert exit_code(child, 5) == (130 if training else 143)
    assert ("SIGINT: ended at once" if training else "SIGTERM: ended at once") in output.read_text()


def test_the_same_signal_at_once_is_one_and_later_a_second(tmp_path):
    """As from a service manager to all processes, and from the launcher, which hands on what it has got."""

    def hang() -> None:
        with Signals() as signals:
            signals.in_training = True
            for pause in (0.0, 0.2, 1.5 * ONE_SIGNAL, 50.0):
                time.sleep(pause)
                print(f"{pause} in step", flush=True)
                os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(forked(hang, tmp_path / "output"), 20) == 143
    said = text_of(tmp_path / "output")
    assert re.findall(r"(\S+) in step", said) == ["0.0", "0.2", f"{1.5 * ONE_SIGNAL}"] and "SIGTERM: ended at once" in said


SLOW = {  # the state in which a signal comes; for how long it goes well; until when
    "a slow machine": (dict(pace=(30.0, 30)), 2.0, 4),  # steps of 1 s where 0.2 s are usual: one that has begun may take four
    "a validation": (dict(pausing=True), 1.0, 2),  # two healthy ranks left a long batch without saving, and named each other
}


@pytest.mark.parametrize("case", SLOW)
def test_what_is_slow_has_more_time(tmp_path, monkeypatch, case):
    monkeypatch.setattr(signals, "STOP_TIMEOUT", 0.2)
    monkeypatch.setattr(signals, "PAUSE_TO_STOP", 2.0)
    state, well, seconds = SLOW[case]

    def slow() -> None:
        with Signals() as heard:
            vars(heard).update(state, in_training=True, has_peers=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(well)
            print("ended", flush=True)
            time.sleep(50)

    assert exit_code(forked(slow, tmp_path / "output"), 20) == 143
    said = text_of(tmp_path / "output")
    assert "ended\n" in said and said.endswith(f"the step did not end within {seconds} s: another rank has died or hangs\n")


@pytest.mark.parametrize("has_peers, code", [(True, 143), (False, 0)])
def test_ranks_that_cannot_end_the_step_give_up(tmp_path, monkeypatch, has_peers, code):
    """One rank alone has nobody to wait for, and takes as long as it takes."""
    monkeypatch.setattr(signals, "STOP_TIMEOUT", 0.2)

    def slow_step() -> None:
        with Signals() as signals:
            signals.in_training, signals.has_peers = True, has_peers
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(50 if has_peers else 1)

    assert exit_code(forked(slow_step, tmp_path / "output"), 10) == code
    assert ("another rank has died or hangs" in text_of(tmp_path / "output")) == has_peers


def test_a_checkpoint_takes_as_long_as_it_takes(tmp_path, monkeypatch):
    """Whether the signal comes before it or meanwhile: the first one, that is."""
    monkeypatch.setattr(signals, "STOP_TIMEOUT", 0.2)

    def slow_disk() -> None:
        with Signals() as heard:
            heard.in_training = heard.has_peers = True
            os.kill(os.getpid(), signal.SIGTERM)
            run = SimpleNamespace(signals=heard)
            print(while_saving(lambda run, step: time.sleep(1) or f"step {step}")(run, 3), heard.saving, flush=True)
            time.sleep(50)

    assert exit_code(forked(slow_disk, tmp_path / "output"), 10) == 143
    said = text_of(tmp_path / "output")
    assert "step 3 False\n" in said and said.endswith("the step did not end within 0 s: another rank has died or hangs\n")


def test_a_run_is_in_a_pause_while_it_validates(shards, tmp_path, monkeypatch, no_warm_up):
    seen, validate, forward_backward = [], train_gpt.validate, train_gpt.forward_backward
    note = lambda run, name: seen.append((name, run.signals.pausing))
    monkeypatch.setattr(train_gpt, "validate", lambda *given: note(given[2], "validation") or validate(*given))
    monkeypatch.setattr(train_gpt, "forward_backward", lambda *given: note(given[3], "step") or forward_backward(*given))
    train_gpt.main(options(shards, tmp_path))
    assert {*seen} == {("validation", True), ("step", False)}


def left_behind(work: Callable[[], None]) -> Signals:
    with Signals() as signals:
        work()
    return signals


def test_what_listens_ends_with_its_block_and_gives_the_handlers_back(tmp_path):
    """Also when a forked process lives on, which has the same pipe open."""

    def main_with_a_child() -> None:
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        child = []
        left_behind(lambda: child.append(forked(lambda: time.sleep(50), tmp_path / "child")))
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        assert [thread.name for thread in threading.enumerate() if thread.name == "signals"] == []
        os.kill(child[0], signal.SIGKILL)

    assert exit_code(forked(main_with_a_child, tmp_path / "output"), 10) == 0, text_of(tmp_path / "output")


def test_a_signal_to_a_forked_worker_ends_it_alone(tmp_path):
    """As the end of a pool that an idea keeps busy."""

    def idea() -> None:
        with Signals() as heard:
            heard.in_training = True
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(50,))
            worker.start()
            worker.terminate()
            worker.join(10)
            time.sleep(0.2)
            print(worker.exitcode, heard.received, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: heard.received)

    assert exit_code(forked(idea, tmp_path / "output"), 30) == 0
    assert "-15 0\n" in text_of(tmp_path / "output")


def test_a_command_that_a_shell_made_deaf_stays_deaf(tmp_path):
    """A shell starts its background commands with Ctrl-C ignored."""

    def deaf() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Signals():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    assert exit_code(forked(deaf, tmp_path / "output"), 10) == 0


@pytest.mark.parametrize("peers", [True, False])
def test_ranks_that_stop_are_deaf_to_a_second_signal(tmp_path, peers):
    """A launcher that sees one rank leave sends SIGTERM to the others, on their way out with the right code. One rank alone, to
    which the signal came twice within a second, was killed: code 1."""

    def leaves_last() -> None:
        with contextlib.suppress(Stopped), Signals() as signals:
            signals.agreed, signals.has_peers, signals.launched = signal.SIGTERM, peers, not peers
            raise Stopped("", 143)
        os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(forked(leaves_last, tmp_path / "output"), 10) == 0
