"""A whole run, as users start it, on two ranks: what it prints and logs, and that it learns. What a start imports."""

import gc
import io
import os
import re
import subprocess
import sys
import weakref
import zlib
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

import cpu

import train_gpt
from common import (
    ROOT, SCRIPT, exit_code, forked, lines_of, options, text_of, tiny_settings, unequal, unfreeze, wait_until,
)  # fmt: skip
from data.shards import read_shard
from runtime.checkpoints import read_checkpoint
from runtime.log import Clock, step_line
from runtime.ranks import Ranks
from train_gpt import main


@pytest.fixture(scope="module")
def finished(shards, tmp_path_factory):
    """stdout, and the log's path, of a run under torchrun."""
    folder = tmp_path_factory.mktemp("finished")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", SCRIPT]
    arguments, environment = options(shards, folder, sample_tokens=5), {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout, folder / "logs" / "run.txt"


def losses(log):
    return [float(x) for x in re.findall(r"val_loss:(\d+\.\d+)", lines_of(log))]


def test_the_log_names_the_environment(finished):
    environment = finished[1].read_text().split("=" * 100 + "\n")[1]
    assert f"PyTorch {torch.__version__}" in environment and f"Python {sys.version.split()[0]}" in environment
    assert "Triton" in environment and "2 ranks" in environment and "batch_unit=32" in environment


def test_the_log_tells_what_the_shards_held(finished, shards):
    digests = [f"{path.name!r} {zlib.crc32(read_shard(path)):08x}" for path in sorted(shards.glob("*.bin"))]
    assert f"\nshards: {', '.join(digests)}\n" in finished[1].read_text()


def test_the_log_has_every_step_and_every_loss_in_the_public_speedruns_format(finished):
    log = finished[1].read_text().split("=" * 100 + "\n")[2]
    time_part = r"train_time:\d+ms step_avg:\d+\.\d\dms"
    expected = []
    for step in range(9):
        if step:
            expected.append(rf"step:{step}/8 {time_part}")
        if step in (0, 4, 8):
            expected.append(rf"step:{step}/8 val_loss:\d+\.\d{{4}} {time_part}")
    lines = log.splitlines()
    for line, pattern in zip(lines, expected):
        assert re.fullmatch(pattern, line), line
    assert re.fullmatch(r"peak memory .*: \d+ MiB", lines[len(expected)])
    assert lines[len(expected) + 1].startswith("sample, after a prompt from the validation shard:")
    times = [int(t) for t in re.findall(r"train_time:(\d+)ms", log)]
    assert times == sorted(times) and times[-1] > 0


def test_the_run_learns_and_writes_a_sample(finished):
    assert losses(finished[1])[-1] < losses(finished[1])[0] < 6
    assert "sample, after a prompt" in finished[0] and "⟫" in finished[0]


def test_no_rank_waits_for_the_sample(run_ranks, shards, tmp_path):
    """It may take longer than a collective: this one takes until the other rank is through."""
    run_ranks(2, run_with_a_long_sample, shards, tmp_path)
    log = (tmp_path / "logs" / "run.txt").read_text()
    assert re.search(r"\npeak memory .*\nsample, after a prompt from the validation shard:\nat last\n$", log)


def run_with_a_long_sample(rank, world_size, shards, folder):
    def sample_text(manager):
        wait_until((folder / "through").exists)
        return "at last"

    train_gpt.sample_text, train_gpt.warm_up = sample_text, lambda *_: None
    train_gpt.train(tiny_settings(shards, folder, sample_tokens=5, val_every=0), Ranks(rank, world_size, torch.device("cpu")))
    if rank == 1:
        (folder / "through").touch()


def test_a_pipe_gets_plain_lines(finished):
    assert "\r" not in finished[0] and "\x1b" not in finished[0]
    assert sum(line.startswith("step:") for line in finished[0].splitlines()) == 8 + 3


@pytest.mark.parametrize("columns", [80, 20])
def test_a_terminal_gets_one_live_line_of_a_row(shards, tmp_path, monkeypatch, no_warm_up, columns):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", f"{columns}")
    main(options(shards, tmp_path))
    live = [line for line in terminal.getvalue().split("\r\x1b[K") if line.startswith("step ")]
    assert len(live) == 8 and max(len(line.partition("\n")[0]) for line in live) < columns
    row = re.match(r"step 8/8  loss \d+(\.\d{4}  [\d,]+ tokens/s  0:00 left)?", live[-1])
    assert row and bool(row[1]) == (columns == 80)


def test_a_stream_of_a_scripts_own_gets_plain_lines(shards, tmp_path, monkeypatch, no_warm_up):
    """One that writes to a file too, and has write() and flush() alone."""
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=text.write, flush=text.flush))
    main(options(shards, tmp_path))
    assert sum(line.startswith("step:") for line in text.getvalue().splitlines()) == 8 + 3


def test_one_rank_trains_like_two(finished, shards, tmp_path, no_warm_up):
    """fp32 sums in another order, through 8 steps: a difference in the fourth decimal of a loss at most. Where a CPU has bf16
    units, a sum in another order may round to its bf16 neighbour, 2⁻⁸ of it: some hundredths of a loss."""
    main(options(shards, tmp_path))
    error = 5e-2 if cpu.bf16_units() else 2e-3
    assert losses(tmp_path / "logs" / "run.txt") == pytest.approx(losses(finished[1]), abs=error)


# Before `import train_gpt`: what is true when it reads the sources.
IMPORT = """
import os, sys
sys.path.insert(0, {root!r})
from launch import sources
init, before = sources.Sources.__init__, set(sys.modules)
def spy(self, script):
    early = sorted(set(sys.modules) - before - {{"train_gpt"}})
    print("sources:", early)
    init(self, script)
sources.Sources.__init__ = spy
import train_gpt, torch
print("started:", torch.distributed.is_initialized(), torch.cuda.is_initialized(), os.listdir())
"""


def test_importing_reads_the_sources_first_and_starts_nothing(tmp_path):
    command = [sys.executable, "-B", "-c", IMPORT.format(root=f"{ROOT}")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.stdout == "sources: []\nstarted: False False []\n", result.stdout + result.stderr


def test_a_run_on_a_cpu_imports_no_compiler_and_has_its_bits(shards, tmp_path, no_warm_up):
    """2 s of every rank. Here Dynamo is imported: operators go another way, through the wrapper that keeps it out."""
    more, logs = dict(num_scheduled_iterations=4, save_every=9), tmp_path / "logs"
    command = [sys.executable, "-X", "importtime", "train_gpt.py", *options(shards, tmp_path, **more, run_id="alone")]
    core = min(os.sched_getaffinity(0))  # for one thread, as here
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert result.returncode == 0 and {"torch", "torch._dynamo", "sympy"} & imported == {"torch"}, result.stdout + result.stderr[-2000:]
    assert "torch._dynamo" in sys.modules
    main(options(shards, tmp_path, **more))
    a, b = (read_checkpoint(logs / name / "step_000006.pt")["state"] for name in ("alone", "run"))
    assert unequal(a, b) == [] and lines_of(logs / "alone.txt") == lines_of(logs / "run.txt")


# Each module in a child of its own, in which nothing of ours is loaded yet.
ALONE = """
import os, sys, importlib
import torch, torch.distributed, numpy
sys.path.insert(0, {root!r})
for name in sys.argv[1:]:
    if not os.fork():
        importlib.import_module(name)
        files = {{n: getattr(m, "__file__", None) or "" for n, m in sys.modules.items()}}
        ours = [n for n, f in files.items() if f.startswith({root!r} + os.sep) and "site-packages" not in f]
        print(name, *sorted(n for n in ours if n.partition(".")[0] not in ("launch", "runtime", "data")), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"{{name}} cannot be imported alone")
"""


def test_each_file_of_launch_and_runtime_is_imported_without_the_recipe():
    """An idea.py would train train_gpt's model otherwise."""
    names = [f"{at}.{path.stem}" for at in ("launch", "runtime") for path in sorted((ROOT / at).glob("[!_]*.py"))]
    command = [sys.executable, "-c", ALONE.format(root=f"{ROOT}"), *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "runtime.run" in names and result.stdout.splitlines() == names, result.stdout + result.stderr


def test_a_step_line_tells_the_mean_time_of_the_steps_so_far():
    assert step_line(4, 8, 2.0) == "step:4/8 train_time:2000ms step_avg:500.00ms"
    assert step_line(8, 8, 2.0, 3.28) == "step:8/8 val_loss:3.2800 train_time:2000ms step_avg:250.00ms"
    assert step_line(0, 8, 0.001, 10.5) == "step:0/8 val_loss:10.5000 train_time:1ms step_avg:1.00ms"


def test_the_model_of_an_earlier_run_is_given_back(shards, tmp_path, no_warm_up):
    """A sweep over seeds in one process kept each: what is set aside before the clock starts is no garbage any more."""

    def sweep() -> None:
        gc.unfreeze, managers, build, there = unfreeze, [], train_gpt.build, []

        def build_and_look(*given: object) -> train_gpt.TrainingManager:
            there.append(sum(manager() is not None for manager in managers))
            managers.append(weakref.ref(made := build(*given)))
            return made

        train_gpt.build = build_and_look
        for seed in (1, 2, 3):
            main(options(shards, tmp_path, seed=seed, run_id=f"seed{seed}"))
        assert there == [0, 0, 0], there

    assert exit_code(forked(sweep, tmp_path / "output")) == 0, text_of(tmp_path / "output")


def test_garbage_is_collected_and_the_rest_set_aside_before_the_clock_starts(shards, tmp_path, no_warm_up, monkeypatch):
    """A full collection takes half a second: once, on no rank's clock."""
    events, start, collect = [], Clock.start, gc.collect
    monkeypatch.setattr(Clock, "start", lambda clock: events.append(gc.get_freeze_count() > 100_000) or start(clock))
    monkeypatch.setattr(gc, "collect", lambda: events.append("collect") or collect())
    unfreeze()
    main(options(shards, tmp_path))
    before = events[: events.index(True)]  # the clock starts; a run before in this process is collected as the ranks join
    assert before and {*before} == {"collect"}
