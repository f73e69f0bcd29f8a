"""Whole runs, as users start them: the log, copies of the script, warm-up, and every way to start one wrong."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train_gpt
from train_gpt import Hyperparameters, Ranks, build, log_header, main, warm_up

ROOT = Path(train_gpt.__file__).parent
TINY = dict(
    model_dim=32, num_heads=2, head_dim=16, batch_unit=64, num_scheduled_iterations=6, num_extension_iterations=2,
    val_every=4, val_tokens=2048, val_batch_tokens=1024, sample_tokens=5, run_id="run",
)  # fmt: skip


def options(shards, folder, **more):
    return [f"--{k}={v}" for k, v in {**TINY, "data": shards, "log_dir": folder / "logs", "preset": "demo", **more}.items()]


def launch(arguments, ranks=2, script=ROOT / "train_gpt.py", timeout=120):
    """A run under torchrun; its exit code, stdout and stderr."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        str(script),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"})


def in_process(shards, folder, **more):
    main(options(shards, folder, **more))


# -----------------------------------------------------------------------------
# What a run leaves behind


@pytest.fixture(scope="module")
def finished(shards, tmp_path_factory):
    """One run on two ranks, of a copy of the script under another name."""
    folder = tmp_path_factory.mktemp("idea")
    for name in ("train_gpt.py", "triton_kernels.py"):
        shutil.copy(ROOT / name, folder / name.replace("train_gpt", "idea"))
    with open(folder / "idea.py", "a") as file:
        file.write("# an idea of my own\n")
    result = launch(options(shards, folder), script=folder / "idea.py")
    assert result.returncode == 0, result.stderr
    return folder, result.stdout, (folder / "logs" / "run.txt").read_text()


def test_the_log_holds_the_exact_source_of_the_copy_that_ran(finished):
    folder, _, log = finished
    sources = log.partition("\n" + "=" * 100 + "\n")[0]
    script, kernels = sources.split("\n" + "-" * 40 + "\n# triton_kernels.py\n" + "-" * 40 + "\n")
    assert script == (folder / "idea.py").read_text() and script.endswith("# an idea of my own\n")
    assert kernels == (folder / "triton_kernels.py").read_text()


def test_the_log_names_the_environment(finished):
    environment = finished[2].split("=" * 100 + "\n")[1]
    assert f"PyTorch {torch.__version__}" in environment and f"Python {sys.version.split()[0]}" in environment
    assert "Triton" in environment and "2 ranks" in environment and "batch_unit=64" in environment


def test_the_log_has_every_step_and_every_loss_in_the_community_format(finished):
    lines = finished[2].split("=" * 100 + "\n")[2].splitlines()
    time_part = r"train_time:\d+ms step_avg:\d+\.\d\dms"
    expected = []
    for step in range(9):
        if step:
            expected.append(rf"step:{step}/8 {time_part}")
        if step in (0, 4, 8):
            expected.append(rf"step:{step}/8 val_loss:\d+\.\d{{4}} {time_part}")
    for line, pattern in zip(lines, expected):
        assert re.fullmatch(pattern, line), line
    assert re.fullmatch(r"peak memory .*: \d+ MiB", lines[-1])
    times = [int(t) for t in re.findall(r"train_time:(\d+)ms", finished[2])]
    assert times == sorted(times) and times[-1] > 0


def test_the_run_learns_and_writes_a_sample(finished):
    losses = [float(x) for x in re.findall(r"val_loss:(\d+\.\d+)", finished[2])]
    assert losses[-1] < losses[0] < 6
    assert "sample, after a prompt" in finished[1] and "⟫" in finished[1]


def test_a_pipe_gets_plain_lines(finished):
    assert "\r" not in finished[1] and "\x1b" not in finished[1]
    assert sum(line.startswith("step:") for line in finished[1].splitlines()) == 8 + 3


def test_a_terminal_gets_one_live_line(shards, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    in_process(shards, tmp_path)
    live = [line for line in terminal.getvalue().split("\r\x1b[K") if line.startswith("step ")]
    assert len(live) == 8
    assert re.match(r"step 8/8  loss \d+\.\d{4}  [\d,]+ tokens/s  0:00 left", live[-1])


def test_one_rank_trains_like_two(finished, shards, tmp_path):
    """fp32 sums in another order, through 8 steps: a difference in the fourth decimal of a loss at most."""
    in_process(shards, tmp_path)
    pattern = r"val_loss:(\d+\.\d+)"
    one = [float(x) for x in re.findall(pattern, (tmp_path / "logs" / "run.txt").read_text())]
    two = [float(x) for x in re.findall(pattern, finished[2])]
    assert one == pytest.approx(two, abs=2e-3)


def test_importing_starts_nothing(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_gpt, torch; "
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized(); import os; assert os.listdir() == []"
    )
    subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, check=True, timeout=60)


def test_the_header_can_be_split_back(shards):
    header = log_header(Hyperparameters(), Ranks(0, 1, torch.device("cpu")))
    assert header.startswith(train_gpt.SOURCES["train_gpt.py"] + "\n" + "-" * 40 + "\n# triton_kernels.py\n")
    assert header.count("\n" + "=" * 100) == 2 and header.endswith("\n" + "=" * 100)


# -----------------------------------------------------------------------------
# Warm-up


def settings_for(shards, **more):
    chosen = {**train_gpt.DEMO, **TINY, "data": str(shards), **more}
    return Hyperparameters(**chosen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_up_leaves_everything_as_it_was(shards, dtype):
    h, ranks = settings_for(shards, dtype=dtype), Ranks(0, 1, torch.device("cpu"))
    model, manager = build(h, ranks)
    before, random_before = manager.state_dict(), torch.get_rng_state()
    table = model.yarn.table.clone()
    warm_up(manager, h, ranks)

    def same(a, b):
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    after = manager.state_dict()
    assert same(before, after)
    assert torch.equal(table, model.yarn.table) and torch.equal(random_before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters()) and model.training and manager.current.batch_tokens == 8 * 64


def test_warm_up_runs_every_shape_that_training_uses(shards):
    h, ranks = settings_for(shards), Ranks(0, 1, torch.device("cpu"))
    model, manager = build(h, ranks)
    seen = set()

    def record(module, inputs):
        x, _, cu_seqlens, schedule = inputs
        seen.add(
            (
                module.training,
                len(x),
                len(cu_seqlens),
                len(schedule.mtp_weights),
                schedule.short_window,
                schedule.long_window,
                module.yarn.scale,
            )
        )

    model.register_forward_pre_hook(record)
    warm_up(manager, h, ranks)
    warmed, seen_in_training = set(seen), seen
    seen_in_training.clear()
    train_gpt.train.__globals__["warm_up"], original = (lambda *_: None), warm_up
    train_gpt.train.__globals__["build"], original_build = (lambda *_: (model, manager)), build
    try:
        train_gpt.train(h.__class__(**{**vars(h), "log_dir": str(shards / "logs"), "run_id": "shapes"}), ranks)
    finally:
        train_gpt.train.__globals__["warm_up"], train_gpt.train.__globals__["build"] = original, original_build
    assert seen_in_training <= warmed and len({s[:2] for s in seen_in_training}) > 3


def test_training_after_a_warm_up_equals_training_without(shards, tmp_path, monkeypatch):
    def losses(name):
        in_process(shards, tmp_path, run_id=name)
        return re.findall(r"val_loss:(\d+\.\d+)", (tmp_path / "logs" / f"{name}.txt").read_text())

    with_warm_up = losses("with")
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    assert losses("without") == with_warm_up


# -----------------------------------------------------------------------------
# Wrong starts


def fails(capsys, arguments, *messages, code=1):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    printed = capsys.readouterr().err
    assert exit_.value.code == code
    for message in messages:
        assert re.search(message, printed), printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(micro_batches=3), "--batch_unit=64 .stage 1.: 512 tokens do not divide into 3 micro-batches"),
        (dict(batch_unit=3), "--batch_unit=3 .stage 1.: 24 tokens do not divide"),
        (dict(num_heads=3, head_dim=16, model_dim=48), "num_heads=3: must be even"),
        (dict(model_dim=40), "model_dim=40 is not num_heads·head_dim"),
        (dict(head_dim=18, model_dim=36), "head_dim=18: must be a multiple of 4"),
        (dict(val_tokens=1500), "--val_tokens=1500 is no multiple of --val_batch_tokens=1024"),
        (dict(vocab_size=70000), "--vocab_size=70000: shards hold uint16"),
        (dict(vocab_size=100), "--bos_id=256 is outside the vocabulary"),
        (dict(bos_id=99, vocab_size=100), r"holds token \d+, but the vocabulary ends at 100"),
        (dict(num_scheduled_iterations=0), "--num_scheduled_iterations=0: must be positive"),
        (dict(val_every=-1), "--val_every=-1: must be 0 or more"),
        (dict(dtype="int8"), "--dtype=int8: bfloat16 or float32"),
        (dict(comms="both"), "--comms=both: sharded or replicated"),
        (dict(grad_dtype="float16"), "--grad_dtype=float16: param or float32"),
        (dict(data="/nowhere"), "no shard matches /nowhere/.*_val_.*data/local_text.py"),
        (dict(num_scheduled_iterations=3000), r"3002 steps need [\d,]+ tokens .* enough for \d+ steps"),
        (dict(val_tokens=1024 * 1024), "validation needs 1,048,577 tokens, it holds 4,096"),
        (dict(log_dir="/proc/none"), "/proc/none"),
    ],
)
def test_impossible_settings_stop_at_once(shards, tmp_path, capsys, more, message):
    fails(capsys, options(shards, tmp_path, **more), message)
    assert not (tmp_path / "logs").exists() or not list((tmp_path / "logs").iterdir())


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--num_iterations=3", "unrecognized arguments: --num_iterations=3"),
        ("--batch_unit=many", "argument --batch_unit: invalid int value: 'many'"),
        ("--fp8_head=maybe", "argument --fp8_head: 'maybe' is neither true nor false"),
        ("--preset=huge", "argument --preset: invalid choice: 'huge'"),
        ("--batch", "unrecognized arguments: --batch"),
    ],
)
def test_unknown_options_and_wrong_types_stop_at_once(capsys, argument, message):
    fails(capsys, [argument], message, code=2)


def test_help_lists_every_setting_with_its_meaning(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = "".join(capsys.readouterr().out.split())
    for field in train_gpt.dataclasses.fields(Hyperparameters):
        kind = {int: "INT", float: "FLOAT", str: "STR", bool: "BOOL"}[field.type]
        assert f"--{field.name}{kind}{''.join(field.metadata['meaning'].split())}" in printed


def test_a_log_is_never_written_over(shards, tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").write_text("mine")
    fails(capsys, options(shards, tmp_path), "run.txt is another run's log: move it, or give another --run_id or --log_dir")
    assert (tmp_path / "logs" / "run.txt").read_text() == "mine"


def test_more_ranks_than_micro_batches_allow(shards, tmp_path):
    started = time.monotonic()
    result = launch(options(shards, tmp_path, micro_batches=8, batch_unit=128), ranks=3)
    assert result.returncode != 0 and time.monotonic() - started < 60
    assert result.stderr.count("--micro_batches=8 cannot be shared evenly by 3 ranks: use a multiple of 3") == 1


def test_a_truncated_shard_stops_all_ranks(shards, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(shards, data, ignore=shutil.ignore_patterns("logs"))
    os.truncate(data / "local_train_000000.bin", 3001)
    result = launch(options(data, tmp_path))
    assert result.returncode != 0
    assert re.search(
        r"local_train_000000.bin: its header names [\d,]+ tokens, but it holds [\d,.]+: truncated or damaged", result.stderr
    )
    assert result.stderr.count("truncated or damaged") == 1  # the first rank speaks for all


def test_a_nan_loss_stops_all_ranks_and_names_the_step(shards, tmp_path):
    """A learning rate that blows the weights up, in a copy of the script."""
    source = (ROOT / "train_gpt.py").read_text()
    assert source.count("lr=0.008") == 1
    (tmp_path / "wild.py").write_text(source.replace("lr=0.008", "lr=1e38"))
    shutil.copy(ROOT / "triton_kernels.py", tmp_path)
    started = time.monotonic()
    result = launch(options(shards, tmp_path, val_every=0), script=tmp_path / "wild.py")
    assert result.returncode != 0 and time.monotonic() - started < 60
    assert re.search(r"wild.py: error: .*the training loss is (nan|inf) at step \d", result.stderr), result.stderr
    assert "val_loss" not in (tmp_path / "logs" / "run.txt").read_text().split("=" * 100 + "\n")[2]


def rank_of(pid):
    """RANK in the environment of a process, or None."""
    try:
        return dict(pair.split(b"=", 1) for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if pair).get(b"RANK")
    except OSError:
        return None


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_rank_is_killed_the_others_say_so_and_end(shards, tmp_path, victim):
    arguments = options(shards, tmp_path, batch_unit=32, num_scheduled_iterations=80, val_every=0)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, ROOT / "train_gpt.py", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        before = []
        while not before or not before[-1].startswith("step:3/"):
            before.append(process.stdout.readline())
            assert before[-1], process.stderr.read()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (pid,) = [int(child) for child in children if rank_of(child) == str(victim).encode()]
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        after, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - killed < 30 and process.returncode != 0
    ours = [line for line in errors.splitlines() if "train_gpt.py: error:" in line]
    assert len(ours) == 1, errors
    assert re.search(rf"rank {1 - victim}: (lost another rank|ended by SIGTERM).* died", ours[0])
    log = (tmp_path / "logs" / "run.txt").read_text()
    assert all(line in log for line in "".join([*before, after]).splitlines() if line.startswith("step:"))


def test_a_shard_missing_on_one_node_stops_all_ranks(shards, tmp_path):
    """Each rank looks into a folder of its own, as on nodes with disks of their own."""
    lonely = tmp_path / "node1"
    lonely.mkdir()
    shutil.copy(shards / "local_val_000000.bin", lonely)
    (tmp_path / "nodes.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train_gpt\n"
        f"train_gpt.main([*sys.argv[1:], '--data=' + [{str(shards)!r}, {str(lonely)!r}][int(os.environ['RANK'])]])\n"
    )
    started = time.monotonic()
    result = launch(options(shards, tmp_path), script=tmp_path / "nodes.py")
    assert result.returncode != 0 and time.monotonic() - started < 60
    assert re.search(rf"error: rank 1: no shard matches {lonely}/\*_train_\*.bin", result.stderr), result.stderr
    assert result.stderr.count("no shard matches") == 1 and not list((tmp_path / "logs").glob("*"))
