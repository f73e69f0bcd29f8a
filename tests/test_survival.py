"""Never lose a run: checkpoints, resumption, signals, full disks, bad numbers, and what a killed save leaves."""

import functools
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
STEPS, SPLIT = 8, 5  # 6 scheduled and 2; the embedding splits after step 5
TINY = dict(
    preset="demo", model_dim=32, num_heads=2, head_dim=16, batch_unit=32, micro_batches=1, num_scheduled_iterations=6,
    num_extension_iterations=2, val_every=3, val_tokens=512, val_batch_tokens=256, sample_tokens=0, run_id="run",
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


def wait_until(holds: Callable[[], bool], seconds: float = 60, pause: float = 0.005) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


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
    monkeypatch.setattr(train_gpt, "write_checkpoint", lambda *args: (time.sleep(0.5), write(*args)))
    started = time.monotonic()
    main(options(shards, tmp_path, save_every=3, val_every=0))
    saved = read_checkpoint(tmp_path / "logs" / "run" / f"step_{STEPS:06d}.pt")
    assert time.monotonic() - started > saved["seconds"] + 1.5  # three saves


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
    main(options(shards, tmp_path, dtype="bfloat16", save_every=99, resume=unbroken / "run" / "step_000006.pt"))
    a, b = (read_checkpoint(logs / "run" / f"step_{STEPS:06d}.pt") for logs in (unbroken, tmp_path / "logs"))
    assert unequal(a["state"], b["state"]) == []


def killed_in(step: int) -> tuple[str, str]:
    return "            manager.step_optimizers(step)\n", f"            step == {step} and os.kill(os.getpid(), 9)\n"


KILLS = {  # the line, what kills before it, --save_every, and the step of the newest checkpoint
    "stage 1, tied": (*killed_in(1), 1, 1),
    "stage 2, even": (*killed_in(2), 1, 2),
    "at the split": (*killed_in(SPLIT), 1, SPLIT),
    "the extension": (*killed_in(6), 5, 5),
    "in a validation": (
        "    model.eval()\n    total", "    manager.yarn_window > 12 * h.block_size and os.kill(os.getpid(), 9)\n", 5, 5
    ),
    "in a save": ("        os.replace(temporary, path)\n", "        '08.pt' in path.name and os.kill(os.getpid(), 9)\n", 5, 5),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_run_goes_on_under_its_own_log(unbroken, shards, tmp_path, moment):
    """kill -9 of a copy of the script, then --resume=latest: the same log, as if nothing had been."""
    place, death, every, resumed = KILLS[moment]
    source = (ROOT / "train_gpt.py").read_text()
    assert source.count(place) == 1
    (tmp_path / "mortal.py").write_text(source.replace(place, death + place))
    shutil.copy(ROOT / "triton_kernels.py", tmp_path)
    arguments = options(shards, tmp_path, dtype="bfloat16", save_every=every, run_id="mine")
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
    assert sorted(p.name for p in (tmp_path / "logs" / "mine").glob("*.pt")) == [
        f"step_{STEPS - 1 if every == 1 else every:06d}.pt", f"step_{STEPS:06d}.pt"
    ]  # fmt: skip


def test_another_runs_log_is_not_written_over(unbroken, shards, tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").write_text("mine\n")
    with pytest.raises(SystemExit):
        main(options(shards, tmp_path, dtype="bfloat16", resume=unbroken / "run" / "step_000008.pt"))
    assert "run.txt is not the log of the checkpoint's run: move it, or give another --run_id" in capsys.readouterr().err
    assert (tmp_path / "logs" / "run.txt").read_text() == "mine\n"


def test_latest_passes_over_a_damaged_checkpoint(unbroken, shards, tmp_path, capsys, no_warm_up):
    for step in (3, 7):
        (tmp_path / "logs" / "run").mkdir(parents=True, exist_ok=True)
        shutil.copy(unbroken / "run" / f"step_{step:06d}.pt", tmp_path / "logs" / "run")
    os.truncate(tmp_path / "logs" / "run" / "step_000007.pt", 20000)
    main(options(shards, tmp_path, dtype="bfloat16", resume="latest", run_id=""))
    printed = capsys.readouterr()
    assert re.search(r"passed over .*step_000007.pt: damaged or cut short", printed.err)
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
    """Whole runs on two ranks: unbroken, from its step 3 (gradients wait, tied) and 6 (split); then one obeys a signal."""
    ranks, base = Ranks(rank, world_size, torch.device("cpu")), dict(micro_batches=2, save_every=1, keep_checkpoints=99)
    train_gpt.warm_up = lambda *_: None
    train_gpt.train(settings_for(shards, folder, **base), ranks)
    for step in (3, 6):
        resume = str(folder / "logs" / "run" / f"step_{step:06d}.pt")
        train_gpt.train(settings_for(shards, folder, **base, run_id=f"from{step}", resume=resume), ranks)
    signals = Signals()
    step_optimizers = TrainingManager.step_optimizers

    def interrupted(self, step):
        signals.asked = signal.SIGTERM if (rank, step) == (1, 3) else signals.asked  # after the step's report has left
        step_optimizers(self, step)

    TrainingManager.step_optimizers = interrupted
    try:
        train_gpt.train(settings_for(shards, folder, micro_batches=2, save_every=99, run_id="stopped"), ranks, signals)
        raise AssertionError("went on")
    except train_gpt.Stopped as stopped:
        assert stopped.code == 143


def test_two_ranks_resume_bit_for_bit_and_stop_together(run_ranks, shards, tmp_path):
    run_ranks(2, two_ranks_resume, shards, tmp_path)
    logs = tmp_path / "logs"
    unbroken = read_checkpoint(logs / "run" / f"step_{STEPS:06d}.pt")
    assert len(read_checkpoint(logs / "run" / "step_000003.pt")["state"]["gradients"][1]) == 11
    for step in (3, 6):
        assert unequal(unbroken["state"], read_checkpoint(logs / f"from{step}" / f"step_{STEPS:06d}.pt")["state"]) == []
        assert lines_of(logs / f"from{step}.txt") == lines_of(logs / "run.txt")
    stopped = read_checkpoint(logs / "stopped" / "step_000005.pt")
    assert unequal(stopped["state"], read_checkpoint(logs / "run" / "step_000005.pt")["state"]) == []
    assert lines_of(logs / "stopped.txt").splitlines()[-1].startswith("stopped by SIGTERM after step:5/8: checkpoint ")


# -----------------------------------------------------------------------------
# Safe on disk


def test_fifty_kills_at_random_moments_of_a_save_lose_nothing(tmp_path):
    """kill -9 within a save or between two, every other time while a file is being written: the newest checkpoint is
    whole, and no older than the last one reported."""
    generator = random.Random(0)
    payload = {f"{i}": det(f"x{i}", (400_000,)) for i in range(4)}  # 6.4 MB
    folder, reports, in_a_save = tmp_path / "run", tmp_path / "reports", 0
    folder.mkdir()
    reports.touch()

    def save_for_ever() -> None:
        step = int(reports.read_text().split()[-1]) + 1 if reports.stat().st_size else 1
        with open(reports, "a", buffering=1) as file:
            while True:
                write_checkpoint(folder / f"step_{step:06d}.pt", {"step": step, **payload}, keep=2)
                print(step, file=file)
                step += 1

    def reported(more_than: int) -> bool:
        return reports.stat().st_size > more_than

    for i in range(50):
        before = reports.stat().st_size
        child = forked(save_for_ever, tmp_path / "output")
        wait_until(functools.partial(reported, before))
        if i % 2:
            wait_until(lambda: any(folder.glob("*.tmp")), pause=0.0001)
        time.sleep(generator.uniform(0, 0.002 if i % 2 else 0.06))
        os.kill(child, signal.SIGKILL)
        assert wait_for(child) == -signal.SIGKILL
        in_a_save += any(folder.glob("*.tmp"))
        newest = train_gpt.checkpoints(folder)[0]
        saved = read_checkpoint(newest)
        assert unequal({**saved, "step": 0}, {"step": 0, **payload}) == []
        assert saved["step"] >= int(reports.read_text().split()[-1])
        assert len(train_gpt.checkpoints(folder)) in (2, 3) or saved["step"] < 3
    print(f"50 kills, {in_a_save} of them between a file's first byte and its name")
    assert in_a_save >= 5, f"only {in_a_save} of the kills met a file in the making"


@pytest.fixture
def small_file(tmp_path):
    path = tmp_path / "run" / "step_000001.pt"
    path.parent.mkdir()
    write_checkpoint(path, {"step": 1, "weights": {"embed": det("embed", (4, 3))}, "name": "run"}, keep=1)
    return path


@hypothesis_settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_checkpoint_is_found(tmp_path_factory, data):
    """Bytes changed, cut off, inserted: the only outcomes are the content that was saved, and a clear error."""
    path = tmp_path_factory.getbasetemp() / "damaged" / "step_000001.pt"
    path.parent.mkdir(exist_ok=True)
    saved = {"step": 1, "weights": det("embed", (4, 3))}
    write_checkpoint(path, saved, keep=1)
    whole = path.read_bytes()
    broken = data.draw(damaged(whole))
    path.write_bytes(broken)
    if broken == whole:
        assert unequal(read_checkpoint(path), saved) == []
    else:
        with pytest.raises(CheckpointError, match=r"step_000001.pt: (not a checkpoint|damaged or cut short)"):
            read_checkpoint(path)


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    at = draw(st.integers(0, len(whole) - 1))
    some = draw(st.binary(max_size=8))
    kind = draw(st.sampled_from(["change", "cut", "insert", "drop", "other"]))
    if kind == "other":
        return some
    if kind == "cut":
        return whole[:at]
    if kind == "insert":
        return whole[:at] + some + whole[at:]
    return whole[:at] + (some if kind == "change" else b"") + whole[at + max(1, len(some)) :]


@hypothesis_settings(max_examples=200)
@given(data=st.data())
def test_a_forged_checkpoint_loads_or_is_refused(tmp_path_factory, data):
    """Damage under a fitting checksum: a dict of plain types and tensors, or a clear error; nothing else gets through."""
    path = tmp_path_factory.getbasetemp() / "forged" / "step_000001.pt"
    path.parent.mkdir(exist_ok=True)
    write_checkpoint(path, {"step": 1, "weights": {"embed": det("embed", (4, 3))}}, keep=1)
    forge(path, data.draw(damaged(path.read_bytes()[len(train_gpt.CHECKPOINT_MAGIC) + 32 :])))
    try:
        found = read_checkpoint(path)
    except CheckpointError as error:
        assert "step_000001.pt: holds" in str(error)
    else:
        assert isinstance(found, dict)


def forge(path: Path, payload: bytes) -> None:
    path.write_bytes(train_gpt.CHECKPOINT_MAGIC + hashlib.sha256(payload).digest() + payload)


def test_nothing_is_unpickled_that_could_act(tmp_path, small_file):
    import io
    import pickle

    class Act:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "acted"),)

    for dump in (torch.save, lambda x, f: pickle.dump(x, f)):
        buffer = io.BytesIO()
        dump({"step": 1, "state": Act()}, buffer)
        forge(small_file, buffer.getvalue())
        with pytest.raises(CheckpointError, match="holds what cannot be loaded"):
            read_checkpoint(small_file)
    assert not (tmp_path / "acted").exists()


def test_every_load_in_the_sources_is_of_weights_only():
    for path in [ROOT / "train_gpt.py", ROOT / "sample.py", *(ROOT / "data").glob("*.py"), *(ROOT / "records").glob("*.py")]:
        source = path.read_text()
        assert "pickle" not in source.replace("unpickled", "").replace("unpickle", "")
        assert source.count("torch.load(") == source.count("weights_only=True")


# -----------------------------------------------------------------------------
# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_the_run_after_its_step(shards, tmp_path, number, no_warm_up):
    """Saved, told in the log's last line, the signal's exit code, within seconds; and then resumed."""
    arguments = options(shards, tmp_path, save_every=99, num_scheduled_iterations=40)
    child = forked(lambda: main(arguments), tmp_path / "output")
    log = tmp_path / "logs" / "run.txt"
    wait_until(lambda: log.exists() and "\nstep:2/" in log.read_text())
    sent = time.monotonic()
    os.kill(child, number)
    assert wait_for(child) == 128 + number and time.monotonic() - sent < 10
    last = log.read_text().splitlines()[-1]
    match = re.fullmatch(rf"stopped by {number.name} after step:(\d+)/42: checkpoint (\S+/step_0*(\d+)\.pt)", last)
    assert match and match[1] == match[3], last
    assert f"\nstep:{match[1]}/42 " in log.read_text()
    assert read_checkpoint(Path(match[2]))["step"] == int(match[1])


def test_a_signal_in_a_validation_ends_it(shards, tmp_path, monkeypatch, no_warm_up):
    monkeypatch.setattr(train_gpt, "to_device", lambda batch, device: (time.sleep(0.2), list(batch))[1])
    arguments = options(shards, tmp_path, save_every=99, val_tokens=1024, val_batch_tokens=16)
    child = forked(lambda: main(arguments), tmp_path / "output")
    wait_until(lambda: "warm-up" in (tmp_path / "output").read_text() if (tmp_path / "output").exists() else False)
    time.sleep(0.5)
    sent = time.monotonic()
    os.kill(child, signal.SIGTERM)
    assert wait_for(child) == 143 and time.monotonic() - sent < 5  # of 12.8 s
    lines = lines_of(tmp_path / "logs" / "run.txt").splitlines()
    assert len(lines) == 1 and lines[0].startswith("stopped by SIGTERM after step:0/8: checkpoint ")


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
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("training", [True, False])
def test_a_second_signal_ends_at_once_whatever_the_process_waits_for(tmp_path, training):
    """Also the first, outside of training; also in a call that never returns to Python."""

    def hang() -> None:
        with Signals() as signals:
            signals.training = training
            print("ready", flush=True)
            torch.multiprocessing.get_context("fork").Semaphore(0).acquire()

    output = tmp_path / "output"
    child = forked(hang, output)
    wait_until(lambda: output.exists() and "ready" in output.read_text())
    os.kill(child, signal.SIGTERM)
    if training:
        wait_until(lambda: "a second one ends it at once" in output.read_text())
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGINT)
    assert wait_for(child, 5) == (130 if training else 143)
    assert ("SIGINT: ended at once" if training else "SIGTERM: ended at once") in output.read_text()


def test_ranks_that_cannot_end_the_step_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr(Signals, "PATIENCE", 0.2)

    def hang() -> None:
        with Signals() as signals:
            signals.training = signals.several = True
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(50)

    assert wait_for(forked(hang, tmp_path / "output"), 10) == 143
    assert "another rank has died or hangs" in (tmp_path / "output").read_text()


def test_a_launchers_ranks_all_end_with_the_signals_code(shards, tmp_path):
    """SIGTERM to one rank alone; torchrun then reports code 143 for both."""
    script = "import train_gpt; train_gpt.warm_up = lambda *_: None; train_gpt.main()"
    (tmp_path / "launched.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r}); {script}")
    arguments = options(shards, tmp_path, micro_batches=2, save_every=99, num_scheduled_iterations=120, val_every=0)
    shard_path = tmp_path / "many"
    shutil.copytree(shards, shard_path)
    for i in range(2, 12):
        shutil.copy(shards / "local_train_000000.bin", shard_path / f"local_train_{i:06d}.bin")
    arguments = [a if "--data" not in a else f"--data={shard_path}" for a in arguments]
    with open(tmp_path / "output", "w") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "launched.py", *arguments],
            cwd=tmp_path, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        log = tmp_path / "logs" / "run.txt"
        wait_until(lambda: launcher.poll() is not None or log.exists() and "\nstep:2/" in log.read_text(), 100)
        mine = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in path.read_bytes()]
        (second,) = [int(p.name) for p in mine if b"RANK=1" in (p / "environ").read_bytes().split(b"\0")]
        os.kill(second, signal.SIGTERM)
        launcher.wait(60)
    finally:
        launcher.kill()
    printed = (tmp_path / "output").read_text()
    assert re.search(r"\nstopped by SIGTERM after step:\d+/122: checkpoint \S+", log.read_text())
    assert set(re.findall(r"exitcode\s*: (-?\d+)", printed)) == {"143"}, printed
    assert len(list((tmp_path / "logs" / "run").glob("*.pt"))) == 1


# -----------------------------------------------------------------------------
# Full disks


def test_a_disk_that_fills_hurts_neither_the_run_nor_the_last_checkpoint(shards, tmp_path, no_warm_up):
    """A limit on the size of files, as the process meets a full disk: from step 4 on, nothing can be written."""
    step_optimizers = TrainingManager.step_optimizers

    def fill(self, step):
        step_optimizers(self, step)
        if step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(tmp_path / "logs" / "run.txt") + 20,) * 2)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        TrainingManager.step_optimizers = fill
        main(options(shards, tmp_path, save_every=3))

    assert wait_for(forked(work, Path("/dev/null"))) == 0  # a pipe or a terminal has no such limit either
    lines = (tmp_path / "logs" / "run.txt").read_text().split("=" * 100 + "\n")[2]
    assert "\nstep:4/8 " in lines and "step:8/8" not in lines
    assert [p.name for p in (tmp_path / "logs" / "run").iterdir()] == ["step_000003.pt"]
    assert read_checkpoint(tmp_path / "logs" / "run" / "step_000003.pt")["step"] == 3


def test_a_log_that_cannot_be_written_waits_for_room(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """Every write fails from step 3 to 5; then there is room, and the log is whole."""
    write_log = train_gpt.Log.write

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            raise OSError(28, "No space left on device")

    def fail_for_a_while(self, text, console=False):
        if text.startswith("step:3/8 train"):
            self.file = Full(self.file)
        if text.startswith("step:6/8 train"):
            self.file = self.file.file
        write_log(self, text, console)

    monkeypatch.setattr(train_gpt.Log, "write", fail_for_a_while)
    main(options(shards, tmp_path))
    lines = lines_of(tmp_path / "logs" / "run.txt")
    assert re.findall(r"step:(\d)/8 train", lines) == list("12345678")
    assert capsys.readouterr().out.count("No space left on device: the run goes on, the log's lines wait for room") == 1


def test_too_little_room_for_checkpoints_is_an_error_before_training(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(SystemExit):
        main(options(shards, tmp_path, save_every=3, keep_checkpoints=4))
    assert re.search(r"5 checkpoints need [\d,]+ bytes, 1,000,000 are free: make room or lower --keep_", capsys.readouterr().err)
    assert not (tmp_path / "logs" / "run.txt").exists()


def test_a_header_that_does_not_fit_is_an_error_before_training(shards, tmp_path):
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        main(options(shards, tmp_path))

    assert wait_for(forked(work, tmp_path / "output")) == 1
    assert "File too large" in (tmp_path / "output").read_text()


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
    named = re.search(r"not finite(?: at step \d)?: (?:the weights of )?(.*?)(?:;|: stopped)", error)
    assert named and label in re.split(r"[., ]+", named[1]), error
    others = set(train_gpt.PARAM_TABLE) & set(re.split(r"[., ]+", named[1])) - {label}
    assert others <= ({"embed", "lm_head"} if label in ("embed", "lm_head") else set()), error
    assert int(re.search(r"at step (\d)", error)[1]) <= 4
    kept = sorted((tmp_path / "logs" / "run").glob("*"))
    assert kept and all(train_gpt.not_finite(read_checkpoint(path)) == [] for path in kept)


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
    with pytest.raises(SystemExit):
        main(options(shards, tmp_path, val_every=0))
    error = capsys.readouterr().err
    assert re.search(r"the training loss is nan at step 5: stopped before its update; not finite: the weights of x0_lambdas;", error)
    parameters = managers[0][1].state_dict()["parameters"]
    assert train_gpt.not_finite(parameters) == ["x0_lambdas"]


def test_what_the_loss_does_not_show_is_found_at_a_validation(shards, tmp_path, monkeypatch, capsys, no_warm_up):
    """A value embedding of a token that no text holds."""
    spoil_a_weight(monkeypatch, 3, "ve1", 300, torch.nan)
    with pytest.raises(SystemExit):
        main(options(shards, tmp_path))
    assert re.search(r"at step 6: stopped; not finite: the weights of ve1", capsys.readouterr().err)


# -----------------------------------------------------------------------------
# Text from a checkpoint


def test_a_checkpoint_writes_text(unbroken, capsys):
    path = str(unbroken / "run" / f"step_{STEPS:06d}.pt")
    texts = []
    for checkpoint in (path, path, "latest"):
        sample.main([checkpoint, "def ", "--tokens=12", f"--log_dir={unbroken}"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("def ⟫") and len(texts[0]) > 8


def test_sampling_computes_with_the_saved_weights(unbroken, capsys, monkeypatch):
    """The first token's probabilities are those of the saved model at its step."""
    seen = []
    monkeypatch.setattr(torch, "multinomial", lambda p, *_, **__: (seen.append(p.clone()), p.argmax()[None])[1])
    path = unbroken / "run" / "step_000007.pt"
    sample.sample(train_gpt, str(path), "abc", 1, 1.0)
    saved = read_checkpoint(path)
    h = Hyperparameters(**saved["hyperparameters"])
    model, manager = train_gpt.build(h, Ranks(0, 1, torch.device("cpu")))
    for label, param in model.named_parameters():
        param.data.copy_(saved["state"]["parameters"][label])
    manager.advance_schedule(7)
    model.eval()
    with torch.no_grad():
        tokens, cu_seqlens = (torch.tensor(x, dtype=torch.int32) for x in ([256, *b"abc"], [0, 4]))
        x = model.hidden_states(tokens, cu_seqlens, manager.forward_schedule())
        logits = train_gpt.softcap(x[-1] @ model.lm_head).float()[:257]
    logits[256] = -torch.inf
    assert torch.equal(seen[0], torch.softmax(logits, -1))


@pytest.mark.parametrize(
    "arguments, message, code",
    [
        (["/nowhere.pt", "x"], "/nowhere.pt: cannot be read: No such file", 1),
        (["latest", "x", "--log_dir=/nowhere"], "no usable checkpoint in /nowhere", 1),
        (["x"], "required: prompt", 2),
        (["x", "y", "--tokens=0"], "--tokens and --temperature must be positive", 2),
        (["x", "y", "--script=/nowhere.py"], "/nowhere.py: no such file", 2),
    ],
)
def test_sampling_refuses_clearly(capsys, arguments, message, code):
    with pytest.raises(SystemExit) as exit_:
        sample.main(arguments)
    assert exit_.value.code == code and message in capsys.readouterr().err
