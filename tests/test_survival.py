"""Never lose a run: checkpoints, resumption, signals, full disks, bad numbers, and what a killed save leaves."""

import dataclasses
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import sample
import train_gpt
from common import det, tiny_gpt
from data.shards import write_shard
from train_gpt import (
    CheckpointError,
    Hyperparameters,
    Ranks,
    Signals,
    TrainingManager,
    load_whole_state,
    main,
    read_checkpoint,
    whole_layout,
    whole_state,
    write_checkpoint,
)

ROOT = Path(train_gpt.__file__).parent
STEPS, SPLIT = 12, 7  # 9 scheduled and 3; the embedding is tied up to and including step 7
TINY = dict(
    preset="demo", model_dim=32, num_heads=2, head_dim=16, batch_unit=32, num_scheduled_iterations=9,
    num_extension_iterations=3, val_every=4, val_tokens=512, val_batch_tokens=256, sample_tokens=0, run_id="run",
)  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Random bytes in documents of 20 to 200; no token above 256 but in no shard either, though the model has room for 383."""
    folder, generator = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    tokens = [np.concatenate(([256], generator.integers(0, 256, generator.integers(20, 200)))) for _ in range(240)]
    for i in range(2):
        write_shard(folder / f"local_train_{i:06d}.bin", np.concatenate(tokens[120 * i : 120 * (i + 1)]))
    write_shard(folder / "local_val_000000.bin", np.concatenate(tokens[:12]))
    return folder


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """The runs are too small to share out."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.fixture
def no_warm_up(monkeypatch):
    """It changes nothing (tests/test_run.py) and takes longer than these runs."""
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)


def options(shards, folder, **more):
    return [f"--{k}={v}" for k, v in {**TINY, "data": shards, "log_dir": folder / "logs", **more}.items()]


def settings_for(shards, folder, **more):
    chosen = {**train_gpt.DEMO, **TINY, "data": str(shards), "log_dir": str(folder / "logs"), **more}
    chosen.pop("preset")
    return Hyperparameters(**chosen)


def lines_of(path: Path) -> str:
    """A log's lines after its header, without times and memory."""
    lines = path.read_text().split("=" * 100 + "\n")[2]
    return re.sub(r"(train_time:|step_avg:|resident: )\S+", r"\1", lines)


def unequal(a, b, name="") -> list[str]:
    """Names of what is not the same in two nests of dicts, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [k for k in a.keys() | b.keys() if k not in a or k not in b] + [
            x for k in a.keys() & b.keys() for x in unequal(a[k], b[k], f"{name}{k}.")
        ]
    same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b
    return [] if same else [name]


def forked(work: Callable[[], None], output: Path) -> int:
    """The id of a child process that does `work`, its output in a file; it ends with the code of a SystemExit, else 0."""
    if child := os.fork():
        return child
    code = 0
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        torch.set_num_threads(1)
        work()
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException as error:
        print(f"died of {error!r}", flush=True)
        code = 99
    finally:
        os._exit(code)


def wait_for(child: int, seconds: float = 60) -> int:
    """Its exit code, negative for a signal; killed and failed if it takes longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"a process did not end within {seconds} s")


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


# -----------------------------------------------------------------------------
# Resumption


@pytest.fixture(scope="module")
def unbroken(shards, tmp_path_factory):
    """A run in bf16, so that mantissas are in play, that saves at each step; and one that never does."""
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        main(options(shards, folder, dtype="bfloat16", save_every=1, keep_checkpoints=99))
        main(options(shards, folder, dtype="bfloat16", save_every=STEPS, run_id="once"))
    return folder / "logs"


def test_saving_changes_nothing(unbroken):
    """A save at each step, against one at the end alone."""
    a, b = (read_checkpoint(unbroken / run / f"step_{STEPS:06d}.pt") for run in ("run", "once"))
    assert unequal(a["state"], b["state"]) == []
    assert lines_of(unbroken / "run.txt") == lines_of(unbroken / "once.txt")
    assert len(list((unbroken / "once").iterdir())) == 1


def test_the_clock_stands_while_a_checkpoint_is_written(shards, tmp_path, monkeypatch, no_warm_up):
    write = train_gpt.write_checkpoint
    monkeypatch.setattr(train_gpt, "write_checkpoint", lambda *args: (time.sleep(1.0), write(*args)))
    started = time.monotonic()
    main(options(shards, tmp_path, save_every=3, val_every=0))
    saved = read_checkpoint(tmp_path / "logs" / "run" / f"step_{STEPS:06d}.pt")
    assert time.monotonic() - started > saved["seconds"] + 4  # 3, 6, 9, 12


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_resumed_run_ends_like_one_that_was_not_killed(unbroken, shards, tmp_path, step, no_warm_up):
    """From every step: stages 1, 2, 3 and the extension, tied, right after the split, odd and even, the end itself."""
    path = unbroken / "run" / f"step_{step:06d}.pt"
    main(options(shards, tmp_path, dtype="bfloat16", save_every=5, resume=path))
    end = f"step_{STEPS:06d}.pt"
    if step < STEPS:
        a, b = (read_checkpoint(logs / "run" / end) for logs in (unbroken, tmp_path / "logs"))
        assert unequal(a["state"], b["state"]) == []
        assert a["state"]["optimizer"]["tied"] is False and read_checkpoint(path)["state"]["optimizer"]["tied"] == (step <= SPLIT)
        assert bool(read_checkpoint(path)["state"]["gradients"][0]) == (step % 2 == 1)
    assert lines_of(tmp_path / "logs" / "run.txt") == lines_of(unbroken / "run.txt")
    times = [int(t) for t in re.findall(r"train_time:(\d+)ms", (tmp_path / "logs" / "run.txt").read_text())]
    assert times == sorted(times)


def test_a_resumed_run_warms_up_without_a_trace(unbroken, shards, tmp_path):
    main(options(shards, tmp_path, dtype="bfloat16", save_every=99, resume=unbroken / "run" / "step_000009.pt"))
    a, b = (read_checkpoint(logs / "run" / f"step_{STEPS:06d}.pt") for logs in (unbroken, tmp_path / "logs"))
    assert unequal(a["state"], b["state"]) == []


KILLS = {
    "in a step": ("        manager.step_optimizers(step)\n", "        step == 6 and os.kill(os.getpid(), 9)\n", 5),
    "in a validation": ("    model.eval()\n    total", "    manager.yarn_window > 150 and os.kill(os.getpid(), 9)\n", 5),
    "in a save": ("        os.replace(temporary, path)\n", "        '10' in path.name and os.kill(os.getpid(), 9)\n", 5),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_run_goes_on_under_its_own_log(unbroken, shards, tmp_path, moment):
    """kill -9 of a copy of the script, then --resume=latest: the same log, as if nothing had been."""
    place, death, resumed = KILLS[moment]
    source = (ROOT / "train_gpt.py").read_text()
    assert source.count(place) == 1
    (tmp_path / "mortal.py").write_text(source.replace(place, death + place))
    shutil.copy(ROOT / "triton_kernels.py", tmp_path)
    arguments = options(shards, tmp_path, dtype="bfloat16", save_every=5, run_id="mine")
    code = "import os, sys; os.sched_getaffinity = lambda _: {0}; import mortal; mortal.warm_up = lambda *_: None; mortal.main()"
    killed = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert killed.returncode == -9, killed.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        main([argument for argument in arguments if "run_id" not in argument] + ["--resume=latest"])
    log = (tmp_path / "logs" / "mine.txt").read_text()
    assert lines_of(tmp_path / "logs" / "mine.txt") == lines_of(unbroken / "run.txt")
    assert f"\nresumed at step {resumed} from " in log.split("=" * 100 + "\n")[1]
    assert "with changed source, 1 lines of difference" in log and f"\n-{death}" in log
    assert not list((tmp_path / "logs").rglob("*.tmp")) or moment == "in a save"
    assert sorted(p.name for p in (tmp_path / "logs" / "mine").glob("*.pt")) == ["step_000010.pt", "step_000012.pt"]


def test_another_runs_log_is_not_written_over(unbroken, shards, tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").write_text("mine\n")
    with pytest.raises(SystemExit):
        main(options(shards, tmp_path, dtype="bfloat16", resume=unbroken / "run" / "step_000012.pt"))
    assert "run.txt is not the log of the checkpoint's run: move it, or give another --run_id" in capsys.readouterr().err
    assert (tmp_path / "logs" / "run.txt").read_text() == "mine\n"


def test_latest_passes_over_a_damaged_checkpoint(unbroken, shards, tmp_path, capsys, no_warm_up):
    for step in (3, 11):
        (tmp_path / "logs" / "run").mkdir(parents=True, exist_ok=True)
        shutil.copy(unbroken / "run" / f"step_{step:06d}.pt", tmp_path / "logs" / "run")
    os.truncate(tmp_path / "logs" / "run" / "step_000011.pt", 20000)
    main(options(shards, tmp_path, dtype="bfloat16", resume="latest", run_id=""))
    printed = capsys.readouterr()
    assert re.search(r"passed over .*step_000011.pt: damaged or cut short", printed.err)
    assert "resumed at step 3 from" in printed.out
    assert lines_of(tmp_path / "logs" / "run.txt") == lines_of(unbroken / "run.txt")


# -----------------------------------------------------------------------------
# World sizes


H = Hyperparameters(num_scheduled_iterations=9, num_extension_iterations=3, block_size=16, micro_batches=8)


def train_a_little(manager: TrainingManager, steps: int, rank: int) -> None:
    for step in range(steps):
        manager.advance_schedule(step)
        for label, param in manager.model.named_parameters():
            g = det(f"g_{label}_{step}_{rank}", tuple(param.shape)).to(param.dtype)
            param.grad = g if param.grad is None else param.grad + g
        manager.step_optimizers(step)


def saved_on(rank: int, world_size: int, folder: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for steps in (4, 5, 9):
            manager = TrainingManager(tiny_gpt(dtype), H)
            train_a_little(manager, steps, rank)
            whole = whole_state(manager, Ranks(rank, world_size, torch.device("cpu")))
            if rank == 0:
                torch.save(whole, f"{folder}/{world_size}_{steps}_{dtype}.pt")


def converted_on(rank: int, world_size: int, folder: str, origin: int) -> list[str]:
    """Everything saved by `origin` ranks, loaded by these and put together again: what is not the same."""
    faults, ranks = [], Ranks(rank, world_size, torch.device("cpu"))
    for path in sorted(Path(folder).glob(f"{origin}_*.pt")):
        before = torch.load(path, weights_only=True)
        manager = TrainingManager(tiny_gpt(getattr(torch, path.stem.split("torch.")[1])), H)
        load_whole_state(manager, before, ranks)
        after = whole_state(manager, ranks)
        if rank == 0:
            parts = before.pop("gradients"), after.pop("gradients")
            faults += [f"{path.stem}: {name}" for name in unequal(before, after)]
            if world_size == origin:
                faults += [f"{path.stem}: gradients {name}" for name in unequal(*parts)]
            for label in parts[0][0]:
                sums = [sum(part[label].double() for part in of.values()) for of in parts]
                dtype = parts[0][0][label].dtype
                # Sums of so many ranks are rounded once, for each rank here, if there are fewer of them than there were.
                bound = origin * 8 * torch.finfo(dtype).eps / 2 if world_size < origin else 0.0
                if not ((sums[0] - sums[1]).abs() <= bound * (sums[0].abs() + 1)).all():
                    faults.append(f"{path.stem}: sum of {label}")
    return faults


@pytest.fixture(scope="module")
def of_any_size(run_ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sizes"))
    saved_on(0, 1, folder)
    for world_size in (2, 4):
        run_ranks(world_size, saved_on, folder)
    assert len(list(Path(folder).iterdir())) == 18
    return folder


@pytest.mark.parametrize("origin, world_size", [(1, 2), (1, 4), (2, 2), (2, 1), (2, 4), (4, 1), (4, 2)])
def test_a_checkpoint_serves_any_number_of_ranks(of_any_size, run_ranks, origin, world_size):
    if world_size == 1:
        assert converted_on(0, 1, of_any_size, origin) == []
    else:
        assert sum(run_ranks(world_size, converted_on, of_any_size, origin), []) == []


def test_the_layout_of_a_checkpoint_is_that_of_its_state(of_any_size):
    for path in Path(of_any_size).iterdir():
        world_size, steps, dtype = path.stem.split("_")
        manager = TrainingManager(tiny_gpt(getattr(torch, dtype.removeprefix("torch."))), H)
        saved = torch.load(path, weights_only=True)
        assert train_gpt.differences(saved, whole_layout(manager, int(steps), int(world_size))) == []


def two_ranks_resume(rank: int, world_size: int, shards: Path, folder: Path) -> None:
    """Whole runs on two ranks: unbroken, from its step 3 (gradients wait, tied) and 8 (split); then one obeys a signal."""
    ranks, base = Ranks(rank, world_size, torch.device("cpu")), dict(save_every=1, keep_checkpoints=99)
    train_gpt.warm_up = lambda *_: None
    train_gpt.train(settings_for(shards, folder, **base), ranks)
    for step in (3, 8):
        resume = str(folder / "logs" / "run" / f"step_{step:06d}.pt")
        train_gpt.train(settings_for(shards, folder, **base, run_id=f"from{step}", resume=resume), ranks)
    signals = Signals()
    step_optimizers = TrainingManager.step_optimizers

    def interrupted(self, step):
        signals.asked = signal.SIGTERM if (rank, step) == (1, 4) else signals.asked  # after the step's report has left
        step_optimizers(self, step)

    TrainingManager.step_optimizers = interrupted
    try:
        train_gpt.train(settings_for(shards, folder, save_every=99, run_id="stopped"), ranks, signals)
        raise AssertionError("went on")
    except train_gpt.Stopped as stopped:
        assert stopped.code == 143


def test_two_ranks_resume_bit_for_bit_and_stop_together(run_ranks, shards, tmp_path):
    run_ranks(2, two_ranks_resume, shards, tmp_path)
    logs = tmp_path / "logs"
    unbroken = read_checkpoint(logs / "run" / f"step_{STEPS:06d}.pt")
    assert len(read_checkpoint(logs / "run" / "step_000003.pt")["state"]["gradients"][1]) == 11
    for step in (3, 8):
        assert unequal(unbroken["state"], read_checkpoint(logs / f"from{step}" / f"step_{STEPS:06d}.pt")["state"]) == []
        assert lines_of(logs / f"from{step}.txt") == lines_of(logs / "run.txt")
    stopped = read_checkpoint(logs / "stopped" / "step_000006.pt")
    assert unequal(stopped["state"], read_checkpoint(logs / "run" / "step_000006.pt")["state"]) == []
    assert lines_of(logs / "stopped.txt").splitlines()[-1].startswith("stopped by SIGTERM after step:6/12: checkpoint ")
