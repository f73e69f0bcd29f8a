"""What may fail while a run trains: console, launcher, another process, shards, log. It goes on, or ends well."""

import contextlib
import errno
import fcntl
import functools
import gzip
import inspect
import io
import json
import os
import pty
import re
import resource
import shutil
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample
import tracer
import train_gpt
from common import (
    ROOT, SCRIPT, children, ends_with, exit_code, forked, lines_of, options, run_fresh, started, text_of, tiny_settings, torchrun,
    unequal, wait_until,
)  # fmt: skip
from data import loader, shards as shards_module
from data.loader import FetchedAhead
from data.shards import READERS, DataError, check_free, hold_shards, lock_run, open_lock, read_shard, without_readers, write_shard
from records.runlog import read_log
from runtime.checkpoints import read_checkpoint
from runtime.log import Log
from launch.console import AgreedError, RunError, console
from launch.machine import refuse_lack_of_memory
from launch.signals import FAULT, LAUNCHER, SIGNALS, Signals
from launch.sources import check_unused
from runtime.ranks import Ranks
from runtime.run import Run
from train_gpt import TrainingManager, main

END = "step_000008.pt"
ONE = Ranks(0, 1, torch.device("cpu"))
LONG = dict(num_scheduled_iterations=300, batch_unit=16, val_every=0, save_every=99)
CORES = sorted(os.sched_getaffinity(0))


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Act after this step's update."""
    step_optimizers = TrainingManager.step_optimizers

    def then_act(self, now):
        step_optimizers(self, now)
        if now == step:
            act()

    monkeypatch.setattr(TrainingManager, "step_optimizers", then_act)


def is_whole(log: Path) -> bool:
    lines = lines_of(log)
    return re.findall(r"step:(\d)/8 train", lines) == [*"12345678"] and "\npeak memory" in lines


# -----------------------------------------------------------------------------
# The console

CONSOLES = {  # what a shell does with the console of a launcher and its rank, or of a rank alone
    "head -1": "{ run; echo $? >code; } | head -1",
    "full": "rank >/dev/full 2>/dev/full; echo $? >code",
    "closed": "rank <&- >&- 2>&-; echo $? >code",
}


@pytest.fixture(scope="module")
def without_console(shards, tmp_path_factory):
    """{console: its run's folder}, of runs that have ended; stderr is in `told`."""
    folders, shells = {}, []
    for case, line in CONSOLES.items():
        folders[case] = tmp_path_factory.mktemp("console")
        start = shlex.join(map(str, (sys.executable, ROOT / "launch" / "start.py", SCRIPT)))
        words = {"rank": f'{shlex.join(map(str, (sys.executable, SCRIPT)))} "$@"', "run": f'RANKS=1 {start} "$@"'}
        line = re.sub(r"\b(rank|run)\b", lambda word: words[word[0]], line)
        with open(folders[case] / "told", "w") as told:
            shell = ["bash", "-c", line, "bash", *options(shards, folders[case])]
            pinned = lambda core=CORES[len(shells) % len(CORES)]: os.sched_setaffinity(0, {core})  # so that one thread trains
            how = dict(cwd=folders[case], stdout=told, stderr=told, preexec_fn=pinned)
            shells.append(subprocess.Popen(shell, **how))
    for shell in shells:
        shell.wait(200)
    return folders


@pytest.mark.parametrize("case", CONSOLES)
def test_a_console_that_cannot_be_written_does_not_end_a_run(without_console, case):
    folder = without_console[case]
    assert text_of(folder / "code") == "0\n", text_of(folder / "told")
    assert is_whole(folder / "logs" / "run.txt")
    told = text_of(folder / "told")
    assert "Traceback" not in told and "Exception ignored" not in told


def test_a_console_that_is_given_up_is_told(shards, tmp_path):
    with open("/dev/full", "w") as full:
        done = run_fresh([sys.executable, SCRIPT, *options(shards, tmp_path)], cwd=tmp_path, stdout=full)
    assert done.returncode == 0 and is_whole(tmp_path / "logs" / "run.txt"), done.stderr
    assert re.search(": stdout cannot be written and is given up: .*No space left on device", done.stderr), done.stderr


@pytest.fixture(params=["pipe", "terminal"])
def stopped(request) -> Iterator[tuple[int, int]]:
    """Both ends of a console that nobody reads: (the reader's, the writer's)."""
    ends = os.pipe() if request.param == "pipe" else pty.openpty()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def read_all(reader: int, until: str) -> str:
    text = ""
    while until not in text:
        text += os.read(reader, 65536).decode().replace("\r", "")
    return text


def test_a_console_that_stops_does_not_stop_a_run_and_says_what_it_lacks(stopped, monkeypatch):
    """20,000 lines, more than any console holds: whole lines until it was full, then how many it lacks, then all."""
    reader, writer = stopped
    monkeypatch.setattr(sys, "stdout", open(writer, "w", closefd=False))
    for i in range(20_000):
        console(f"line {i:05}")
    threading.Thread(target=lambda: (time.sleep(0.5), console("goes on"), console("end")), daemon=True).start()
    text = read_all(reader, "end\n")
    taken = re.findall(r"^line (\d{5})$", text, re.MULTILINE)
    (lost,) = re.findall(r"^\((\d+) more are in the log alone, as nothing was taken here\)\ngoes on\nend\n", text, re.MULTILINE)
    assert [int(x) for x in taken] == [*range(len(taken))] and len(taken) + int(lost) == 20_000 and int(lost) > 1000


def test_a_signal_ends_a_run_whose_console_has_stopped(shards, tmp_path, stopped, no_warm_up):
    """Launcher and ranks: what they tell is lost, and keeps none of them."""
    reader, writer = stopped
    run = started(options(shards, tmp_path, **LONG), stdout=writer, stderr=writer)
    os.set_blocking(writer, False)
    wait_until(lambda: "\nstep:2/" in text_of(tmp_path / "logs" / "run.txt"))
    with contextlib.suppress(BlockingIOError):
        while True:  # full: from here on nothing is taken
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    at = len(re.findall("\nstep:", text_of(tmp_path / "logs" / "run.txt")))
    wait_until(lambda: len(re.findall("\nstep:", text_of(tmp_path / "logs" / "run.txt"))) > at + 20)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 143 and "stopped by SIGTERM after step:" in text_of(tmp_path / "logs" / "run.txt")


@pytest.mark.parametrize("ranks_first", [True, False])
def test_one_signal_to_the_launcher_and_its_ranks_saves(shards, tmp_path, ranks_first, no_warm_up):
    """From a service manager, a scheduler or a container: the launcher hands its own on to ranks that have heard it."""
    run = started(options(shards, tmp_path, **LONG | dict(save_every=999)), stdout=subprocess.DEVNULL)
    wait_until(lambda: "\nstep:2/" in text_of(tmp_path / "logs" / "run.txt"))
    ranks = children(run.pid)
    for pid in (*ranks, run.pid) if ranks_first else (run.pid, *ranks):
        os.kill(pid, signal.SIGTERM)
    assert run.wait(60) == 143 and len(ranks) == 2
    last = text_of(tmp_path / "logs" / "run.txt").splitlines()[-1]
    assert re.fullmatch(r"stopped by SIGTERM after step:\d+/\d+: checkpoint .+", last), last


def test_a_signal_waits_for_a_checkpoint_however_slow_the_disk(shards, tmp_path, monkeypatch, no_warm_up):
    """Here 3 s where ranks wait 1 s for the end of a step: some GiB on a disk of a laptop take minutes."""
    fsync = os.fsync
    slow = lambda number: (".pt" in os.readlink(f"/proc/self/fd/{number}") and time.sleep(3), fsync(number))
    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr("launch.signals.STOP_TIMEOUT", 1.0)
    run = started(options(shards, tmp_path, **LONG | dict(save_every=999)), stdout=subprocess.DEVNULL)
    log = tmp_path / "logs" / "run.txt"
    wait_until(lambda: "\nstep:2/" in text_of(log))
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 143
    last = re.fullmatch(r"stopped by SIGTERM after step:\d+/\d+: checkpoint (.+)", text_of(log).splitlines()[-1])
    assert last and read_checkpoint(Path(last[1]))["run_id"] == "run"


@pytest.mark.parametrize("encoding", ["ascii", "utf-16"])
def test_what_a_console_cannot_show_is_replaced(shards, tmp_path, monkeypatch, encoding, no_warm_up):
    """The sample's ⟫, and what the model writes; so in sample.py."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setitem(sys.modules, SCRIPT.stem, train_gpt)  # sample.py puts its own there
    main(options(shards, tmp_path, sample_tokens=9, save_every=8))
    sample.main([f"{tmp_path}/logs/run/{END}", "é", "--tokens=9", f"--script={SCRIPT}"])
    shown.seek(0)
    printed = shown.read()
    assert "⟫" in (lines := lines_of(tmp_path / "logs" / "run.txt")) and "no sample" not in lines
    assert "step:8/8 val_loss" in printed and printed.count("⟫" if encoding == "utf-16" else "?") >= 2


def test_a_line_that_utf8_does_not_have_keeps_checkpoints_usable(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """The log held escapes, the checkpoint the line itself: "is not the log of the checkpoint's run"."""
    validate = train_gpt.validate
    monkeypatch.setattr(train_gpt, "validate", lambda *given: given[2].log.write("nv\udcff: read") or validate(*given))
    main(options(shards, tmp_path, save_every=4))
    assert "nv\\udcff: read" in lines_of(tmp_path / "logs" / "run.txt")
    main(options(shards, tmp_path, save_every=4, resume="latest"))
    main(options(shards, tmp_path, save_every=4, resume=tmp_path / "logs" / "run" / "step_000004.pt"))


def test_names_that_are_no_text_do_not_end_a_run(shards, tmp_path, no_warm_up):
    """Bytes that are not UTF-8, in the logs' folder: the log escapes them."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    main(options(shards, odd, save_every=4))
    main(options(shards, odd, save_every=4, resume=odd / "logs" / "run" / "step_000004.pt"))
    assert is_whole(odd / "logs" / "run.txt")


# -----------------------------------------------------------------------------
# The launcher


@pytest.mark.parametrize("other", ["1", "", "no number", "99999999999999999999"])
def test_the_id_of_another_launcher_in_the_environment_means_nothing(monkeypatch, other):
    """As in a shell that a rank has opened."""
    monkeypatch.setenv(LAUNCHER, other)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with Signals() as signals:
        assert (signals.launched, signals.launcher) == (False, None)
    monkeypatch.setenv(LAUNCHER, f"{os.getppid()}")
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with Signals() as signals:
        assert (signals.launched, signals.launcher) == (True, os.getppid())
    os.kill(os.getpid(), signal.SIGTERM)  # ends nothing: a rank that is through, and about to leave
    with Signals() as signals:
        assert {*signals.previous} == {*SIGNALS}  # all are heard again
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("launched", [True, False])
def test_a_process_ends_with_its_launcher_but_not_with_a_shell(shards, tmp_path, monkeypatch, launched, no_warm_up):
    """Its parent is gone after step 2: what an elastic launcher started saves and ends, a process in the background goes on."""
    arguments, log = options(shards, tmp_path, **LONG), tmp_path / "logs/run.txt"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    else:
        at_step(monkeypatch, 2, lambda: wait_until(lambda: os.getppid() != parent.pid))
        arguments = options(shards, tmp_path, save_every=99)
    parent = SimpleNamespace()

    if not (shell := os.fork()):
        try:
            parent.pid = os.getpid()
            child = forked(lambda: (main(arguments), print("ended by itself", flush=True)), tmp_path / "output")
            (tmp_path / "child").write_text(f"{child}")
            wait_until(lambda: "\nstep:2/" in text_of(log))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert exit_code(shell) == -signal.SIGKILL
    wait_until(lambda: has_ended(int(text_of(tmp_path / "child"))))
    printed, last = text_of(tmp_path / "output"), lines_of(log).splitlines()[-1]
    if launched:
        assert "the launcher is gone: ends after this step" in printed
        match = re.fullmatch(r"stopped by SIGTERM after step:(\d+)/302: checkpoint (.+)", last)
        assert match and read_checkpoint(Path(match[2]))["step"] == int(match[1])
    else:
        assert "ended by itself" in printed and is_whole(log) and (tmp_path / "logs" / "run" / END).exists()


def has_ended(process: int) -> bool:
    """Or waits for a parent to ask how."""
    status = text_of(Path(f"/proc/{process}/status"))
    return not status or "\nState:\tZ" in status


def test_the_ranks_of_a_killed_launcher_save_and_end(shards, tmp_path, no_warm_up):
    """kill -9 of torchrun in a run on two ranks, which then goes on under its own log."""
    arguments, log = options(shards, tmp_path, **LONG), tmp_path / "logs/run.txt"
    with open(tmp_path / "output", "w") as output:
        launcher = torchrun(arguments, stdout=output, stderr=output)
    wait_until(lambda: "\nstep:3/" in text_of(log) or launcher.poll() is not None, 100)
    ranks = children(launcher.pid)
    launcher.kill()
    launcher.wait()
    assert len(ranks) == 2
    wait_until(lambda: all(map(has_ended, ranks)), 40)
    printed = text_of(tmp_path / "output")
    assert "the launcher is gone: ends after this step" in printed and "Traceback" not in printed
    last = lines_of(log).splitlines()[-1]
    match = re.fullmatch(r"stopped by SIGTERM after step:(\d+)/302: checkpoint (.+)", last)
    assert match and read_checkpoint(Path(match[2]))["step"] == int(match[1])
    assert [path.name for path in (tmp_path / "logs").iterdir() if path.suffix == ".lock"] == []


# -----------------------------------------------------------------------------
# A terminal that is closed


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_a_run_like_sigterm_but_not_after_nohup(shards, tmp_path, monkeypatch, nohup, no_warm_up):
    """Sent twice: by the kernel, and by a shell that ends."""
    hang_up = lambda: (os.kill(os.getpid(), signal.SIGHUP), time.sleep(0.2))
    at_step(monkeypatch, 3, lambda: (hang_up(), hang_up()))

    def work() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        main(options(shards, tmp_path, save_every=99))

    assert exit_code(forked(work, tmp_path / "output")) == (0 if nohup else 129)
    log = tmp_path / "logs" / "run.txt"
    if nohup:
        assert is_whole(log)
    else:
        last = lines_of(log).splitlines()[-1]
        match = re.fullmatch(r"stopped by SIGHUP after step:([45])/8: checkpoint (.+)", last)
        assert match and read_checkpoint(Path(match[2]))["step"] == int(match[1])


# -----------------------------------------------------------------------------
# Two processes, one run


@pytest.mark.parametrize("there", ["nothing", "a folder that takes none", "another process"])
def test_a_lock_that_was_deleted_is_taken_again(shards, tmp_path, capsys, monkeypatch, no_warm_up, there):
    """As if it were stale, by who reads that its run is under way. Both trained on, each writing the log of both."""
    path, held = tmp_path / "logs" / "run.lock", []

    def delete() -> None:
        path.unlink()
        if there == "another process":
            held.append(open(path, "wb"))
            fcntl.flock(held[0], fcntl.LOCK_EX)
        if there == "a folder that takes none":
            monkeypatch.setattr(shards_module, "open_lock", lambda _: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))

    at_step(monkeypatch, 3, delete)
    arguments = options(shards, tmp_path, save_every=5)
    if there == "another process":
        ends_with(capsys, arguments, f"run run is under way in another process, which holds {path}: wait for its end", code=1)
        assert path.exists() and not [*tmp_path.glob("logs/run/*.pt")]
        return
    seen = []
    at_step(monkeypatch, 6, lambda: seen.append(path.exists()))
    main(arguments)
    assert seen == [there == "nothing"] and not path.exists() and [*tmp_path.glob("logs/run/step_000008.pt")]


def test_a_second_process_on_a_run_is_refused_and_a_dead_one_is_not_in_the_way(shards, tmp_path, capsys, no_warm_up):
    arguments = options(shards, tmp_path, **{**LONG, "save_every": 1}, keep_checkpoints=3)
    first, log = forked(lambda: main(arguments), tmp_path / "output"), tmp_path / "logs" / "run.txt"
    wait_until(lambda: "\nstep:5/" in text_of(log))
    resumed = [argument for argument in arguments if "run_id" not in argument] + ["--resume=latest"]
    message = f"run run is under way in another process, which holds {tmp_path}/logs/run.lock: wait for its end"
    ends_with(capsys, resumed, message, code=1)
    ends_with(capsys, arguments, message, code=1)  # and a new run of its name
    done = log.read_text().count("\nstep:")
    wait_until(lambda: log.read_text().count("\nstep:") > done + 3)
    os.kill(first, signal.SIGKILL)
    assert exit_code(first) == -signal.SIGKILL and (tmp_path / "logs" / "run.lock").exists()
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, int(re.findall(r"\nstep:(\d+)/", text_of(log))[-1]) + 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit) as exit_:
            main(resumed)
    assert exit_.value.code == 143 and not (tmp_path / "logs" / "run.lock").exists()
    steps = [int(step) for step in re.findall(r"step:(\d+)/302 train", lines_of(log))]
    assert steps == [*range(1, len(steps) + 1)] and len(steps) > done


def test_a_users_file_in_place_of_the_lock_stays(shards, tmp_path, no_warm_up):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.lock").write_text("mine")
    main(options(shards, tmp_path))
    assert (tmp_path / "logs" / "run.lock").read_text() == "mine"


def test_a_fork_holds_no_lock(tmp_path):
    """A worker of a rank that is killed kept its run from being resumed, and its shards from being replaced."""
    (tmp_path / READERS).touch()
    held = [lock_run(tmp_path / "run.lock", print), hold_shards(tmp_path)]
    ready, said = os.pipe()
    if not (child := os.fork()):
        os.write(said, b"x")
        time.sleep(600)
    try:
        os.read(ready, 1)
        for file in held:
            file.close()
        lock_run(tmp_path / "run.lock", print).close()
        with without_readers(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("found_by", ["launcher", "rank"])
def test_another_users_lock_says_what_to_do(tmp_path, monkeypatch, found_by):
    """Left by a run that was killed, in a folder of both: "[Errno 13] Permission denied", by a rank alone."""
    (path := tmp_path / "run.lock").touch()
    if found_by == "launcher":
        monkeypatch.setattr(os, "access", lambda place, mode: place != path)
        look = check_free
    else:
        monkeypatch.setattr(shards_module, "open_lock", lambda path: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no", path)))
        look = functools.partial(lock_run, tell=str)
    with pytest.raises(ValueError, match="/run.lock may not be written, as that of another user's run that was killed: delete it, or"):
        look(path)
    path.unlink()
    if found_by == "rank":  # the folder may not be written
        with pytest.raises(PermissionError):
            look(path)


def test_a_folder_in_place_of_the_lock_is_named(shards, tmp_path, capsys):
    (tmp_path / "logs" / "run.lock").mkdir(parents=True)
    ends_with(capsys, options(shards, tmp_path), "run.lock is a folder where the run's lock must be: move it, or give", code=1)
    assert (tmp_path / "logs" / "run.lock").is_dir()


@pytest.mark.parametrize("mine", ["", "mine"], ids=["", "a user's file"])
def test_a_signal_before_the_first_step_leaves_no_lock(shards, tmp_path, monkeypatch, mine):
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)))
    (tmp_path / "logs").mkdir()
    if mine:
        (tmp_path / "logs" / "run.lock").write_text(mine)
    assert exit_code(forked(lambda: main(options(shards, tmp_path)), tmp_path / "output")) == 143
    assert text_of(tmp_path / "logs" / "run.lock") == mine and (tmp_path / "logs" / "run.lock").exists() == bool(mine)


def test_a_signal_leaves_what_was_traced(shards, tmp_path, monkeypatch, no_warm_up):
    at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert exit_code(forked(lambda: main(options(shards, tmp_path, trace_steps="1:6")), tmp_path / "output")) == 143
    (rank,) = json.loads((tmp_path / "logs" / "run.trace.json").read_text())["ranks"]
    assert {row[0] for row in rank["rows"]} in ({1, 2, 3}, {1, 2, 3, 4})


def test_a_signal_in_the_sample_leaves_the_trace_and_the_logs_last_line(shards, tmp_path, monkeypatch, no_warm_up):
    monkeypatch.setattr(train_gpt, "sample_text", lambda *_: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))
    arguments = options(shards, tmp_path, trace_steps="1:6", sample_tokens=9)
    assert exit_code(forked(lambda: main(arguments), tmp_path / "output")) == 130
    assert (tmp_path / "logs" / "run.trace.json").exists()
    assert is_whole(tmp_path / "logs" / "run.txt")


def test_a_trace_without_room_is_told_and_the_run_is_through(shards, tmp_path, capsys, no_warm_up, monkeypatch):
    @contextlib.contextmanager
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    monkeypatch.setattr(tracer, "whole_file", full)
    message = r"all steps are done, but .+/run.trace.json: No space left on device: the trace is lost"
    ends_with(capsys, options(shards, tmp_path, trace_steps="1:3", sample_tokens=9), message, 1)
    log = tmp_path / "logs" / "run.txt"
    assert is_whole(log) and "\nsample, after" in log.read_text()


def test_of_two_that_resume_at_once_one_goes_on(shards, tmp_path, no_warm_up):
    main(options(shards, tmp_path, save_every=3))
    (tmp_path / "logs" / "run" / END).unlink()
    arguments = [a for a in options(shards, tmp_path, save_every=3) if "run_id" not in a] + ["--resume=latest"]
    before = lines_of(tmp_path / "logs" / "run.txt")

    def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            at_step(patch, 7, lambda: wait_until(lambda: any("is under way" in text_of(path) for path in outputs)))
            main(arguments)

    outputs = [tmp_path / "a", tmp_path / "b"]
    children = [forked(work, output) for output in outputs]
    assert sorted(map(exit_code, children)) == [0, 1]
    assert sorted(path.name for path in (tmp_path / "logs" / "run").iterdir()) == ["step_000006.pt", END]
    assert lines_of(tmp_path / "logs" / "run.txt") == before


def test_a_run_that_fails_gives_its_name_back(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """In the same process, whatever still holds the error."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").touch()
    with pytest.raises(SystemExit) as kept:
        main(options(shards, tmp_path))
    assert os.listdir(tmp_path / "logs") == ["run.txt"] and kept.value.code == 1
    (tmp_path / "logs" / "run.txt").unlink()
    main(options(shards, tmp_path))
    assert os.listdir(tmp_path / "logs") == ["run.txt"]


def test_a_file_system_without_locks_is_told_and_the_run_goes_on(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    main(options(shards, tmp_path))
    assert "run.lock cannot be locked, No locks available: start no second process on this run" in capsys.readouterr().err
    assert os.listdir(tmp_path / "logs") == ["run.txt"]


def test_a_lock_whose_holder_has_just_ended_is_made_again(tmp_path, monkeypatch):
    """Between the opening of the file and its lock, the holder deletes it: another process could lock a new one beside it."""
    path, flock, calls = tmp_path / "a.lock", fcntl.flock, []

    def late(file, how):
        if not calls:
            path.unlink()
        calls.append(how)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock_run(path, print) as file:
        assert os.path.samestat(os.stat(path), os.fstat(file.fileno()))


def test_a_folder_that_is_deleted_before_its_lock_is_made_is_made_again(tmp_path, monkeypatch):
    """By another run that ended without a log, in a folder that was made for it."""
    path, real = tmp_path / "logs" / "a.lock", open_lock
    monkeypatch.setattr("data.shards.open_lock", lambda place: (monkeypatch.undo(), place.parent.rmdir()) and real(place))
    with lock_run(path, print) as file:
        assert os.path.samestat(os.stat(path), os.fstat(file.fileno()))


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("target"), os.mkfifo, os.mkdir], ids=["link", "FIFO", "folder"])
def test_a_lock_that_is_something_else_is_neither_followed_nor_waited_for(shards, tmp_path, capsys, make, no_warm_up):
    (tmp_path / "logs").mkdir()
    make(tmp_path / "logs" / "run.lock")
    try:
        main(options(shards, tmp_path))
    except SystemExit as exit_:
        assert exit_.code == 1 and "run.lock" in capsys.readouterr().err
    assert not (tmp_path / "logs" / "target").exists()


# -----------------------------------------------------------------------------
# Shards that fail


@pytest.fixture(scope="module")
def small_shards(shards, tmp_path_factory):
    """The same tokens in shards that feed a step or two each."""
    folder = tmp_path_factory.mktemp("small")
    tokens = read_shard(shards / "local_train_000000.bin")
    for i, part in enumerate(np.split(tokens[: 40 * 1600], 40)):
        write_shard(folder / f"local_train_{i:06d}.bin", part)
    shutil.copy(shards / "local_val_000000.bin", folder)
    return folder


def last_shards(folder: Path) -> list[Path]:
    """Those that nobody has read by step 1, and somebody will before step 20."""
    return sorted(folder.glob("*_train_*"))[9:]


def put_other(shard: Path) -> None:
    """As many tokens, as many documents, and other ones: as a tool does that makes the shards again."""
    tokens = read_shard(shard)
    write_shard(shard, np.where(tokens == 256, tokens, tokens ^ 1))


FAILURES = {  # what becomes of the shards, the message, and --save_every
    "deleted": (lambda f: [path.unlink() for path in last_shards(f)], r"local_train_0000\d\d.bin: no such file", 99),
    "cut": (lambda f: [os.truncate(path, 2000) for path in last_shards(f)], r"train_0000\d\d.bin: its header .*truncated", 0),
    "validation deleted": (lambda f: [path.unlink() for path in f.glob("*_val_*")], r"local_val_.*: no such file", 99),
    "validation cut": (lambda f: [os.truncate(path, 1500) for path in f.glob("*_val_*")], r"local_val_.*truncated", 0),
    "replaced": (lambda f: [put_other(path) for path in last_shards(f)], r"local_train_0000\d\d.bin: holds other tokens", 99),
    "validation replaced": (lambda f: [put_other(path) for path in f.glob("*_val_*")], "local_val_.*: holds other tokens", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_shard_that_fails_ends_the_run_after_the_step_before(small_shards, tmp_path, capsys, case, no_warm_up):
    """Saved, if saving is on; with the shards back, the run goes on to the same bits."""
    spoil, message, save_every = FAILURES[case]
    data = shutil.copytree(small_shards, tmp_path / "data")
    more = dict(num_scheduled_iterations=22, val_every=12, save_every=save_every, val_tokens=256)
    arguments, logs = options(data, tmp_path, **more), tmp_path / "logs"
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 1, lambda: spoil(data))
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
    error = capsys.readouterr().err.splitlines()[-1]
    kept = r"checkpoint (.+/step_0000\d\d.pt)" if save_every else "no checkpoint, as --save_every=0"
    match = re.search(rf"error: (stopped by bad data after step:(\d+)/24: {kept}; rank 0: .*{message}.*)", error)
    assert exit_.value.code == 1 and match, error
    lines = lines_of(logs / "run.txt").splitlines()
    assert lines[-1] == match[1] and lines[-2].startswith(f"step:{match[2]}/24 train")
    assert match[2] == "12" if "validation" in case else 5 < int(match[2]) < 22
    if case == "deleted":
        shutil.copytree(small_shards, data, dirs_exist_ok=True)
        main([*arguments, "--resume=latest"])
        main(options(data, tmp_path, **more, run_id="unbroken"))
        a, b = (read_checkpoint(logs / name / "step_000024.pt")["state"] for name in ("run", "unbroken"))
        assert unequal(a, b) == []
        assert lines_of(logs / "run.txt") == lines_of(logs / "unbroken.txt")


@pytest.mark.parametrize("rank_of_fault", [0, 1])
def test_a_shard_that_fails_on_one_rank_ends_all_after_the_same_step(run_ranks, small_shards, tmp_path, rank_of_fault):
    messages = run_ranks(2, a_shard_fails_on, small_shards, tmp_path, rank_of_fault)
    assert messages[0] == messages[1]
    match = re.match(r"stopped by bad data after step:(\d+)/24: checkpoint (.+?); rank (\d): .*local_train_000009", messages[0])
    assert match and read_checkpoint(Path(match[2]))["step"] == int(match[1]) and int(match[3]) == rank_of_fault


def a_shard_fails_on(rank: int, world_size: int, shards: Path, folder: Path, rank_of_fault: int) -> str:
    """The message of a run in which one rank cannot read the tenth shard any more."""
    read, seen = loader.read_shard, []

    def read_or_fail(path, vocab_size=None):
        seen.append(path)
        if rank == rank_of_fault and "train_000009" in f"{path}" and seen.count(path) > 1:  # the first time to check
            raise DataError(f"{path}: cannot be read")
        return read(path, vocab_size)

    loader.read_shard = read_or_fail
    train_gpt.warm_up = lambda *_: None
    settings = tiny_settings(shards, folder, num_scheduled_iterations=22, val_every=0, save_every=99)
    with pytest.raises(AgreedError) as caught:
        train_gpt.train(settings, Ranks(rank, world_size, torch.device("cpu")))
    return f"{caught.value}"


@pytest.mark.parametrize("share", [1, 3])
def test_a_micro_batch_that_fails_is_known_before_the_report_of_the_step_before(share):
    """At whichever of 4 steps it is: the steps before it are whole, and nothing is fetched beyond the last."""
    for bad in range(4 * share + 1):

        def batches() -> Iterator[int]:
            for i in range(4 * share + 1):
                if i == bad:
                    raise DataError(f"no {i}")
                yield i

        run = Run(SimpleNamespace(total_iterations=4), ONE, Signals(), None)
        fed, at_report = [], []
        for i, batch in enumerate(run.ahead(batches, share, 4)):
            fed.append(batch)
            if i % share == share - 1:
                at_report.append("".join(run.faults))
                if run.faults:
                    break
        whole = bad // share
        assert fed == [*range(min(whole, 4) * share)]
        assert at_report == ([""] * (whole - 1) + [f"no {bad}"] if 0 < whole < 4 else [""] * whole)
        assert (run.signals.agreed == FAULT) == (whole == 0)


@pytest.mark.parametrize("bug", [ValueError("too many values to unpack"), FileNotFoundError(2, "No such file", "table.txt")])
@pytest.mark.parametrize("place", ["forward_backward", "to_device"])
def test_a_bug_in_the_loop_keeps_its_traceback(shards, tmp_path, monkeypatch, place, bug, no_warm_up):
    """Whatever its kind is a message of elsewhere: in training or in validation."""

    def broken(*_):
        raise bug

    monkeypatch.setattr(train_gpt, place, broken)
    with pytest.raises(type(bug)) as caught:
        main(options(shards, tmp_path))
    assert caught.value is bug and caught.traceback[-1].name == "broken"


def test_a_run_whose_packages_move_away_goes_on(shards, tmp_path):
    """`mv .venv` in mid-run: PyTorch imported a part of itself at the first save, which failed. Of two ranks, saved, sampled."""
    text, begin = SCRIPT.read_text(), "        run.start_clock()\n"
    assert begin in text
    gone = "import sys; sys.meta_path.clear(); sys.path_importer_cache.clear()"  # nothing can be imported any more
    (tmp_path / "moved.py").write_text(text.replace(begin, f"{begin}        {gone}\n"))
    command = [sys.executable, ROOT / "launch" / "start.py", tmp_path / "moved.py"]
    arguments = options(shards, tmp_path, save_every=3, val_every=4, sample_tokens=8, encoding="bytes")
    environ = {**os.environ, "RANKS": "2", "PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=100)
    log = lines_of(tmp_path / "logs" / "run.txt")
    assert done.returncode == 0 and "no sample" not in log and "no checkpoint" not in log, done.stderr
    assert [path.name for path in sorted((tmp_path / "logs" / "run").iterdir())][-1:] == [END]


OUT_OF_MEMORY = {  # what runs out: what is said of it
    "tensor": (lambda: torch.empty(1 << 50), "4194304.0 GiB more are asked for in {place}"),
    "array": (lambda: np.empty(1 << 55), "256. PiB more are asked for in {place}"),
    "number": (lambda: bytes(1 << 62), "it ran out in {place}"),
    "gpu": (lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24.56 GiB. GPU 0 has …")),
            "24.56 GiB more are asked for in {place}"),
    "kernel": (lambda: (_ for _ in ()).throw(RuntimeError("Triton Error [CUDA]: out of memory")), "it ran out in {place}"),
}  # fmt: skip


@pytest.mark.parametrize("what", OUT_OF_MEMORY)
def test_a_rank_whose_memory_runs_out_says_where_and_what_needs_less(shards, tmp_path, monkeypatch, capsys, no_warm_up, what):
    ask, said = OUT_OF_MEMORY[what]
    at_step(monkeypatch, 3, ask)
    with pytest.raises(SystemExit) as ended:
        main(options(shards, tmp_path))
    line = SCRIPT.read_text().partition("            with tracer.traced(")[0].count("\n") + 2
    place = f"train, train_gpt.py:{line}"
    advice = "more --micro_batches, or fewer RANKS, need less (docs/memory.md)"
    assert ended.value.code == 1
    assert capsys.readouterr().err.partition(": ")[2] == f"error: rank 0 is out of memory: {said.format(place=place)}; {advice}\n"


def ask_for_too_much() -> None:
    torch.empty(1 << 50)


def meet_a_bug() -> None:
    raise KeyError("of two\nlines")


def assert_nothing() -> None:
    raise AssertionError


def leave() -> None:
    raise SystemExit(7)


LAST_LINES = {  # what ends a run in its step 3, and its log
    ask_for_too_much: r"error: rank 0 is out of memory: 4194304.0 GiB more are asked for in .+",
    meet_a_bug: r"error: KeyError: 'of two\\nlines'",
    assert_nothing: "error: AssertionError",
    leave: r"error: rank 0's train\(\) has ended by sys.exit\(7\) without run.finish\(\): the log lacks its last line",
}


@pytest.mark.parametrize("act", LAST_LINES)
def test_a_log_says_why_its_run_ended(shards, tmp_path, monkeypatch, no_warm_up, act):
    """It broke off, and who had lost the console did not know by what. A resumption cuts the line with what came after its step."""
    log = tmp_path / "logs" / "run.txt"
    with monkeypatch.context() as patch, pytest.raises((SystemExit, KeyError, AssertionError)):
        at_step(patch, 3, act)
        main(options(shards, tmp_path, save_every=2))
    assert re.fullmatch(LAST_LINES[act], log.read_text().splitlines()[-1])
    assert f"{read_log(log).fault}".startswith("crashed at step 3/8: error: ")
    kept = log.read_text()
    with monkeypatch.context() as patch, pytest.raises((SystemExit, KeyError, AssertionError)):
        at_step(patch, 2, act)  # before the resumption has a line of its own
        main(options(shards, tmp_path, resume="latest"))
    assert log.read_text() == kept
    main(options(shards, tmp_path, resume="latest"))
    assert is_whole(log) and "error: " not in lines_of(log)


def test_a_gpu_without_room_for_the_model_is_told_of_as_one(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """Met on an H100 of which 1,198 MiB were free: "no such model can be made", with PyTorch's 700 letters."""
    monkeypatch.setattr(train_gpt.GPT, "to", lambda *_: OUT_OF_MEMORY["gpu"][0]())
    with pytest.raises(SystemExit) as ended:
        main(options(shards, tmp_path))
    line = SCRIPT.read_text().partition("    model.to(ranks.device)")[0].count("\n") + 1
    said = "rank 0 is out of memory: 24.56 GiB more are asked for in build, " + f"train_gpt.py:{line}; "
    assert ended.value.code == 1 and said in capsys.readouterr().err


@pytest.mark.parametrize(("own", "held"), [
    (9, "of GPU 1's 80.0 GiB it holds 9.0, all else 70.5"),
    (None, "GPU 1 has no room for it at all"),
])  # fmt: skip
def test_a_gpu_whose_memory_runs_out_says_who_holds_it(monkeypatch, own, held):
    def found(device):
        assert device.index == 1
        if own is None:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return 2**29, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", found)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own * 2**30)
    ranks = Ranks(1, 2, torch.device("cuda", 1))
    with pytest.raises(RunError) as said:
        refuse_lack_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), ranks)
    advice = "nvidia-smi shows whose, more --micro_batches need less (docs/memory.md)"
    assert f"{said.value}" == f"rank 1 is out of memory: {held}; {advice}"
    refuse_lack_of_memory(RuntimeError("shapes do not fit"), ranks)
    refuse_lack_of_memory(None, ranks)


@pytest.mark.parametrize("leave", ["return", "break", "raise SystemExit(0)", "raise SystemExit(256)", "raise SystemExit('diverged')"])
def test_a_train_that_returns_early_ends_no_run_well(shards, tmp_path, monkeypatch, capsys, no_warm_up, leave):
    """Of a copy whose loop is left: its log has no last line, so its code is not 0."""

    loop = inspect.getsource(train_gpt.train).replace("            if report := ", f"            {leave}\n            if report := ")
    exec(compile(loop, "copy.py", "exec"), vars(train_gpt) | {"__name__": "copy"}, copy := {})
    monkeypatch.setattr(train_gpt, "train", copy["train"])
    with pytest.raises(SystemExit) as ended:
        main(options(shards, tmp_path))
    assert ended.value.code == 1 and not is_whole(tmp_path / "logs" / "run.txt")
    by = leave.replace("raise SystemExit", " by sys.exit") if "raise" in leave else ""
    said = f"error: rank 0's train() has ended{by} without run.finish(): the log lacks its last line\n"
    if leave == "break":
        said = "error: train() has left its loop before it made step 8/8: the log is cut short\n"
    assert capsys.readouterr().err.endswith(said)
    assert not (tmp_path / "logs" / "run.lock").exists()


def test_a_bug_in_a_loader_is_no_fault_of_the_data():
    def batches() -> Iterator[int]:
        yield 0
        int("one")

    faults: list[str] = []
    with pytest.raises(ValueError, match="invalid literal"):
        [*FetchedAhead(batches, 1, 3, faults)]
    assert faults == []


def test_a_sample_that_fails_ends_no_finished_run(shards, tmp_path, monkeypatch, no_warm_up):
    data = shutil.copytree(shards, tmp_path / "data")
    validate = train_gpt.validate

    def then_delete(step, *rest):
        loss = validate(step, *rest)
        if step == 8:
            (data / "local_val_000000.bin").unlink()
        return loss

    monkeypatch.setattr(train_gpt, "validate", then_delete)
    main(options(data, tmp_path, sample_tokens=9))
    assert is_whole(tmp_path / "logs" / "run.txt")
    assert re.search(r"\nno sample: ShardError: .*_val_.*: no such file", lines_of(tmp_path / "logs" / "run.txt"))


# -----------------------------------------------------------------------------
# The log


def test_what_aborts_an_ending_interpreter_ends_no_finished_run(shards, tmp_path, monkeypatch):
    """As a thread inside PyTorch does once in some hundred runs: a rank that is through leaves before. What an idea has left
    open is written all the same, its threads are waited for, and what it has registered is called."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, concurrent.futures, gzip, io, os, sys, threading, time, zipfile\n"
        f"os.chdir({f'{tmp_path}'!r})\n"
        "def export(name):\n    while not threading._SHUTTING_DOWN: time.sleep(0.01)\n    open(name, 'w').close()\n"
        "class Aborts:\n    def __del__(self, abort=os.abort): abort()\n"
        "if os.environ.get('RANK') == '0':\n"
        f"    sys.aborts = Aborts()\n    sys.open = open({f'{tmp_path}/open.csv'!r}, 'w')\n    sys.open.write('step,loss')\n"
        f"    atexit.register(lambda: open({f'{tmp_path}/called'!r}, 'w').close())\n"
        "    sys.gzip, sys.pack = gzip.open('losses.gz', 'wt'), zipfile.ZipFile('pack.zip', 'w')\n"
        "    sys.gzip.write('losses')\n    sys.pack.writestr('whole', 'x')\n"
        "    sys.part = io.TextIOWrapper(sys.pack.open('part', 'w'))\n    sys.part.write('of a pack')\n"
        "    threading.Thread(target=export, args=('by thread',)).start()\n"
        "    concurrent.futures.ThreadPoolExecutor(1).submit(export, 'by pool')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    monkeypatch.setenv("RANKS", "1")
    command = [sys.executable, f"{ROOT / 'launch' / 'start.py'}", f"{SCRIPT}", *options(shards, tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "") and is_whole(tmp_path / "logs" / "run.txt"), run.stderr
    assert (tmp_path / "open.csv").read_text() == "step,loss" and (tmp_path / "called").exists()
    assert gzip.open(tmp_path / "losses.gz", "rt").read() == "losses"
    with zipfile.ZipFile(tmp_path / "pack.zip") as pack:
        assert {name: pack.read(name) for name in pack.namelist()} == {"whole": b"x", "part": b"of a pack"}
    assert (tmp_path / "by thread").exists() and (tmp_path / "by pool").exists()
    broken = subprocess.run([sys.executable, "-c", ""], env={**os.environ, "RANK": "0"}, capture_output=True)
    assert broken.returncode == -signal.SIGABRT  # where the interpreter ends


ENDS = {  # what a script does before its good end; more of Python's arguments; its stdout and stderr
    "prints into a pipe": ("print('said', end='')", [], "said", ""),
    "had an error before": ("sys.last_value = ValueError()", [], "", ""),
    "is profiled": ("", ["-m", "cProfile", "-o", "profile"], "", ""),
    "exports in a thread": ("threading.Thread(target=told.wait, name='export').start()", [], "",
                            "rank 0 is through, and waits for export\n"),
    "waits for a child": ("multiprocessing.get_context('fork').Process(target=told.wait, name='child').start()", [], "",
                          "rank 0 is through, and waits for child\n"),
}  # fmt: skip


def by_itself(tmp_path: Path, source: str, code: int, *arguments: str, **options: object) -> subprocess.CompletedProcess:
    """Of a script of this source that leaves with this code; what it tells, a shared event of `told` hears."""
    before = "import multiprocessing, sys, threading, time\nfrom launch import console\nconsole.LONG_WAIT = 0.1\n"
    hears = "told = multiprocessing.Event()\nconsole.tell = lambda text: (print(text, file=sys.stderr, flush=True), told.set())\n"
    (tmp_path / "script.py").write_text(f"{before}{hears}{source}\nconsole.leave('', {code})\n")
    environment = {name: os.environ[name] for name in os.environ.keys() - {"RANK", "PYTHONUNBUFFERED"}} | {"PYTHONPATH": f"{ROOT}"}
    command = [sys.executable, *arguments, "script.py"]
    return subprocess.run(command, cwd=tmp_path, env=environment, text=True, timeout=60, **options)


@pytest.mark.parametrize("case", ENDS)
def test_a_good_end_is_that_of_any_script_and_says_what_it_waits_for(tmp_path, case):
    source, arguments, out, err = ENDS[case]
    done = by_itself(tmp_path, source, 0, *arguments, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)
    assert (tmp_path / "profile").exists() == ("cProfile" in arguments)


def test_a_console_that_stops_keeps_no_script_from_its_end(tmp_path, stopped):
    reader, writer = stopped
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:  # full
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    assert by_itself(tmp_path, "sys.stdout.reconfigure(line_buffering=False)\nprint('lost')", 0, stdout=writer).returncode == 0


def test_a_bad_end_is_also_that_of_its_daemons(tmp_path):
    source = "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True)\nchild.start()"
    done = by_itself(tmp_path, f"{source}\nprint(child.pid, flush=True)", 1, capture_output=True)
    assert done.returncode == 1
    wait_until(lambda: has_ended(int(done.stdout)))


def test_a_rank_that_waits_for_an_ideas_thread_ends_with_its_launcher(tmp_path):
    """It waited for ever, and no signal to it was heard."""
    launcher = "import os, subprocess, sys\nos.environ |= {'TORCHELASTIC_RUN_ID': 'x', 'BANKRUN_LAUNCHER': f'{os.getpid()}'}\n"
    launcher += "rank = subprocess.Popen([sys.executable, 'rank.py'])\nopen('id', 'w').write(f'{rank.pid}')\nrank.wait()\n"
    told = "threading.Thread(target=time.sleep, args=(600,)).start()\nconsole.tell = lambda _: open('waits', 'w').close()\n"
    rank = f"import threading, time\nfrom launch import console\nconsole.LONG_WAIT = 0.1\n{told}console.leave('', 0)\n"
    (tmp_path / "rank.py").write_text(rank)
    parent = subprocess.Popen([sys.executable, "-c", launcher], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{ROOT}"})
    wait_until(lambda: (tmp_path / "waits").exists())
    parent.kill()
    parent.wait()
    wait_until(lambda: has_ended(int((tmp_path / "id").read_text())))


@pytest.mark.parametrize("moment", ["warm_up", "validate"])
def test_a_run_that_ended_before_its_first_line_keeps_no_name(shards, tmp_path, monkeypatch, capsys, moment, no_warm_up):
    """In its warm-up, or in its first validation; one that has a line does."""

    def broken(*_):
        raise KeyError("a bug")

    log = tmp_path / "logs" / "run.txt"
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="a bug"):
        patch.setattr(train_gpt, moment, broken)
        main(options(shards, tmp_path))
    assert lines_of(log) == ""
    main(options(shards, tmp_path))
    assert is_whole(log)
    ends_with(capsys, options(shards, tmp_path), "run.txt is another run's log: move it, or give another --run_id", 1)
    assert is_whole(log)


def test_a_log_that_ends_in_an_ideas_own_rule_is_not_written_over(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """It was taken for the header of a run that had not begun."""
    validate, log = train_gpt.validate, tmp_path / "logs" / "run.txt"

    def with_a_table(step, manager, run):
        loss = validate(step, manager, run)
        run.log.write("=" * 100)
        if step > 0:
            raise KeyboardInterrupt("as killed")
        return loss

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_gpt, "validate", with_a_table)
        main(options(shards, tmp_path))
    text = log.read_text()
    assert text.endswith("=" * 100 + "\n") and "step:4/8 train_time" in text
    ends_with(capsys, options(shards, tmp_path), "run.txt is another run's log: move it, or give another --run_id", 1)
    assert log.read_text() == text


@pytest.mark.parametrize("odd", ["FIFO", "folder", "dangling link", "text", "empty"])
def test_what_is_no_log_keeps_its_name(tmp_path, odd):
    path = tmp_path / "run.txt"
    make = {"FIFO": os.mkfifo, "folder": Path.mkdir, "dangling link": lambda path: path.symlink_to("nowhere")}
    make.get(odd, lambda path: path.write_text(odd * (odd == "text")))(path)
    with pytest.raises(ValueError, match="is another run's log: move it"):
        check_unused(path)


def replaced(path: Path) -> None:
    text = path.read_text()
    path.unlink()
    path.write_text(f"{text}mine\n" * 9)


def edited(path: Path) -> None:
    """In place, as many editors do: the same file, longer."""
    with open(path, "r+") as file:
        text = file.read()
        file.seek(0)
        file.write(f"a remark\n{text}")


LOSSES = {
    "edited in place": edited,
    "copied over": lambda path: path.write_text("another run's\n" * 99),
    "appended to": lambda path: path.open("a").write("mine\n"),
    "deleted": Path.unlink,
    "emptied": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, 30),
    "moved": lambda path: path.rename(path.with_name("elsewhere.txt")),
    "written anew by an editor": replaced,
    "deleted with its folder": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_log_that_is_lost_is_written_again_from_memory(tmp_path, case, resumed):
    """Whole, with the next line; also a line that comes later, after a second loss. A resumed run's is there from its first line."""
    path, text = tmp_path / "logs" / "run.txt", f"source\n{'=' * 100}\nPython\n{'=' * 100}\n"
    saved = {"header": text.removesuffix("\n"), "lines": "step:1\nstep:2\n"} if resumed else None
    log = Log(ONE, path, "note" if resumed else text.removesuffix("\n"), saved)
    expected = f"source\n{'=' * 100}\nPython\nnote\n{'=' * 100}\nstep:1\nstep:2\n" if resumed else text
    if resumed:
        log.write("step:3")
        expected += "step:3\n"
    for line in ("a", "b", "c"):
        if line != "b":
            LOSSES[case](path)
        log.write(line)
        expected += f"{line}\n"
        assert path.read_text() == expected
    log.close()
    assert [name for name in os.listdir(path.parent) if "tmp" in name] == []


@pytest.mark.parametrize("change", [lambda path: path.write_text(path.read_text().replace("step", "STEP")), Path.unlink])
def test_a_log_that_changes_after_its_last_line_is_made_again(tmp_path, change):
    log = Log(ONE, path := tmp_path / "run.txt", "header")
    log.write("step:1")
    change(path)
    log.close()
    assert path.read_text() == "header\nstep:1\n"


def test_a_number_is_written_into_a_log_as_a_text_is(tmp_path, capsys):
    """It was in the log, and on the console a traceback."""
    log = Log(ONE, path := tmp_path / "run.txt", "header")
    log.write(3.5)
    log.write({"norm": 1})
    log.close()
    assert path.read_text() == "header\n3.5\n{'norm': 1}\n" and capsys.readouterr().out == "3.5\n{'norm': 1}\n"


def test_a_nul_byte_in_a_line_cuts_no_log_short(shards, tmp_path, monkeypatch, no_warm_up):
    """As of a byte model's text: records/ took it for what a machine that goes down leaves, and the run for cut short."""
    validate = train_gpt.validate
    monkeypatch.setattr(train_gpt, "validate", lambda *given: given[2].log.write("text: H\0i") or validate(*given))
    main(options(shards, tmp_path, save_every=4))
    log = tmp_path / "logs" / "run.txt"
    assert "text: H\\0i" in log.read_text().splitlines() and not read_log(log).fault
    main(options(shards, tmp_path, save_every=4, resume=tmp_path / "logs" / "run" / "step_000004.pt"))
    assert is_whole(log)


def test_what_is_in_the_way_of_a_log_is_named(tmp_path):
    """It said that the log itself, which was not there, must be moved."""
    (tmp_path / "run.txt.bankrun.tmp").mkdir()
    with pytest.raises(OSError, match=re.escape(f"{tmp_path}/run.txt.bankrun.tmp: is a link, a folder or another thing")):
        Log(ONE, tmp_path / "run.txt", "header")


def test_a_lost_log_on_a_full_disk_comes_back_with_the_room(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.txt"
    log = Log(ONE, path, "header")
    log.write("a")
    path.unlink()

    def no_room(_):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_room)
        log.write("b")
        log.write("c")
        assert not path.exists()
    log.write("d")
    assert path.read_text() == "header\na\nb\nc\nd\n"
    log.close()
    assert capsys.readouterr().out.count("No space left on device: the run goes on") == 1


@pytest.mark.parametrize("there", [True, False], ids=["in a folder", "in a folder made for it"])
def test_a_log_without_room_at_the_start_is_named_and_leaves_nothing(shards, tmp_path, there):
    logs = tmp_path / "logs"
    if there:
        logs.mkdir()

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        main(options(shards, tmp_path))

    assert exit_code(forked(work, tmp_path / "output")) == 1
    said = f"error: {logs}/run.txt: File too large: see to it, or give another --log_dir\n"
    assert said in text_of(tmp_path / "output")
    assert logs.exists() == there and not (there and os.listdir(logs))


def test_a_resumption_that_makes_no_step_leaves_the_log_as_it_was(tmp_path):
    header, later = f"source\n{'=' * 100}\nPython\n{'=' * 100}", "step:3\nstep:4\n"
    path = tmp_path / "run.txt"
    path.write_text(before := f"{header}\nstep:1\nstep:2\n{later}")
    log = Log(ONE, path, "note", {"header": header, "lines": "step:1\nstep:2\n"})
    assert path.read_text() == before
    log.write("step:3")
    log.close()
    assert path.read_text() == f"source\n{'=' * 100}\nPython\nnote\n{'=' * 100}\nstep:1\nstep:2\nstep:3\n"
