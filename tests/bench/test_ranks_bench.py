"""bench/communication.py, bench/optimizer.py: what they print is what bench/README.md shows and what the optimizer does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import communication, cpu_step, grad_dtype, optimizer, order
from bench.settings import torchrun, trainer_settings
from common import ROOT, run_fresh, train_gpt
from data.loader import synthetic_batch, to_device
from runtime.ranks import Ranks
from tail_averages import TAIL_TABLE
from train_gpt import PARAM_TABLE, TrainingManager


def test_the_readme_shows_the_tables_that_communication_prints(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["communication.py"])
    communication.main()
    readme = (ROOT / "bench" / "README.md").read_text()
    tables = capsys.readouterr().out.replace("| \n", "|\n").strip().split("\n\n")
    assert len(tables) == 3 and [table.splitlines()[0] for table in tables if table.strip() not in readme] == []


def test_the_readme_tells_what_gradients_of_either_dtype_send() -> None:
    """Of the run of bench/grad_dtype.py; its losses, and what they say, are as old as the table."""
    row = "\\| {} \\|.*\\| ([\\d.]+) \\|$"
    readme = (ROOT / "bench" / "README.md").read_text()
    for dtype in ("param", "float32"):
        h = trainer_settings([*(f"--{name}={value}" for name, value in grad_dtype.SETTINGS.items()), f"--grad_dtype={dtype}"])
        calls = communication.expected_calls(communication.model_parameters(h), train_gpt.param_table(h), 2, True, False)
        told = re.search(row.format(dtype), readme, re.MULTILINE)[1]
        assert told == f"{sum(call.sent for call in calls.values()) / 1e6:.2f}"


def test_both_dtypes_are_trained_with_and_nothing_is_left(shards: Path, tmp_path: Path) -> None:
    """torchrun left a folder of each run."""
    small = [*SMALL.split(), "--val_tokens=512", "--num_scheduled_iterations=6", "--num_extension_iterations=2"]
    command = [sys.executable, ROOT / "bench" / "grad_dtype.py", "--seeds=1", "--ranks=1", f"--data={shards}", *small]
    (tmp_path / "tmp").mkdir()
    done = run_fresh(command, env={**os.environ, "TMPDIR": f"{tmp_path / 'tmp'}"}, timeout=200)
    rows = re.findall(r"^\| (param|float32) \| (\d\.\d{4}) \| \2 \| \d\.\d\d \|$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and [row[0] for row in rows] == ["param", "float32"], done
    assert not [*(tmp_path / "tmp").iterdir()]


def test_torchrun_leaves_its_folder_where_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rank.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    (tmp_path / "tmp").mkdir()
    command = [*torchrun(1, tmp_path / "logs"), tmp_path / "own" / "rank.py"]
    there = {**os.environ, "TMPDIR": f"{tmp_path / 'tmp'}"}
    (tmp_path / "logging.py").write_text("raise SystemExit('of the folder where the user stands')")
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n") and not [*(tmp_path / "tmp").iterdir()], done


@pytest.mark.parametrize("text", ["abc", "0", "2,-4", "", "65537", "999999999"])
def test_what_are_no_numbers_of_ranks_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys, text: str) -> None:
    monkeypatch.setattr(sys, "argv", ["communication.py", f"--world_sizes={text}"])
    with pytest.raises(SystemExit) as exit_:
        communication.main()
    said = f"argument --world_sizes: {text!r}: must be whole numbers from 1 to 65536, by comma"
    assert exit_.value.code == 2 and said in capsys.readouterr().err


REFUSED = {  # by the trainer, in the same words: each was a traceback, or a table of what cannot be trained
    "--model_dim=100": "model_dim=100 is not num_heads",
    "--comms=shared": "--comms=shared: must be sharded or replicated",
    "--grad_dtype=bf16": "--grad_dtype=bf16: must be param or float32",
    "--vocab_size=0": "--vocab_size=0: must be positive",
    "--bigram_rows=-1": "--bigram_rows=-1: must be 2 or more",
    f"--num_heads={2**24} --model_dim={2**31} --head_dim=128": "Storage size calculation overflowed",
}


@pytest.mark.parametrize("options", REFUSED)
@pytest.mark.parametrize("tool, arguments", [(communication, []), (optimizer, []), (cpu_step, []), (order, ["search"])])
def test_options_that_the_trainer_refuses_are_one_message(monkeypatch: pytest.MonkeyPatch, tool, arguments, options: str) -> None:
    monkeypatch.setattr(sys, "argv", [tool.__file__, *arguments, *options.split()])
    with pytest.raises(SystemExit, match=rf"^{Path(tool.__file__).name}: error: {REFUSED[options]}[^\n]*$"):
        tool.main()


@pytest.mark.parametrize("tool", [optimizer, cpu_step])
def test_ranks_that_cannot_join_are_one_message(monkeypatch: pytest.MonkeyPatch, tool) -> None:
    monkeypatch.setattr(sys, "argv", [tool.__file__, "--preset=demo"])
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(SystemExit, match=rf"^{Path(tool.__file__).name}: error: MASTER_ADDR, .* missing in the environment"):
        tool.main()


@pytest.mark.parametrize("dtype, averages", [("bfloat16", False), ("float32", False), ("bfloat16", True), ("float32", True)])
def test_state_on_one_rank_is_as_large_as_the_table_says(dtype: str, averages: bool) -> None:
    chosen = ["--preset=demo", f"--dtype={dtype}", f"--tail_averages={averages}"]
    h = trainer_settings([*chosen, "--model_dim=32", "--num_heads=2", "--head_dim=16"])
    model = communication.model_of(h, 16)
    manager = TrainingManager(model if dtype == "bfloat16" else model.float(), h)
    parameters, table = communication.model_parameters(h), train_gpt.param_table(h)
    for label, state in manager.optimizer.state.items():
        size = sum(x.nbytes for x in state.values() if hasattr(x, "nbytes"))
        assert communication.state_bytes(label, parameters[label], table[label], tails=TAIL_TABLE * averages) == size, label


def test_what_training_refuses_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Numbers of ranks; and --help names the options of its own beside the trainer's."""
    monkeypatch.setattr(sys, "argv", ["communication.py", "--world_sizes=2,7"])
    communication.main()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Training refuses")]
    assert len(said) == 1 and said[0].startswith("Training refuses 7 ranks today: the rows of ")
    monkeypatch.setattr(sys, "argv", ["communication.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        communication.main()
    assert "[--world_sizes=2,4,8,16]" in (out := capsys.readouterr().out) and "--model_dim" in out


def test_every_kind_of_step_is_taken_apart_by_label() -> None:
    """On one rank: the banks in each kind, embed only after the split."""
    options = "--preset=demo --model_dim=32 --num_heads=2 --head_dim=16 --val_batch_tokens=512 --val_tokens=512"
    command = [sys.executable, str(ROOT / "bench" / "optimizer.py"), *options.split()]
    done = run_fresh(command, timeout=300)
    assert done.returncode == 0, done.stderr
    kinds = re.split(r"\n(?=NorMuon alone|with Adam)", done.stdout)[1:]
    labels = [set(re.findall(r"^\| (\w+) \| [\d.]", kind, re.MULTILINE)) for kind in kinds]
    assert labels == [{"attn", "mlp"}, set(PARAM_TABLE) - {"embed"}, set(PARAM_TABLE)]


SMALL = "--preset=demo --model_dim=32 --num_heads=2 --head_dim=16 --batch_unit=32 --micro_batches=1 --val_batch_tokens=512"


def test_the_products_of_a_step_are_counted_as_pytorch_counts_them() -> None:
    """By its own counter, which knows no FP8 head; of that, forward and backward, by hand."""
    h = trainer_settings([*SMALL.split(), "--val_tokens=512"])
    manager = train_gpt.build(h, Ranks(0, 1, torch.device("cpu")))
    manager.advance_schedule(300)
    sizes = dict(vocab_size=h.vocab_size, max_doc_len=h.max_doc_len, doc_slots=h.doc_slots)
    batch = to_device(synthetic_batch(768, **sizes), torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        cpu_step.pair(manager, [batch], 300, watch := cpu_step.Timed())
    counted: dict[str, int] = {}
    for call, calls in watch.calls.items():
        if call.name in cpu_step.PRODUCTS:
            counted[call.name] = counted.get(call.name, 0) + calls * cpu_step.operations(call)
    head = 2 * 2 * 768 * 32 * 384  # of two steps
    assert (counted.pop("fp8_linear"), counted.pop("fp8_linear_backward")) == (head, 2 * head)
    assert sum(counted.values()) == counter.get_total_flops() > 20 * head
    rows = [*cpu_step.table([watch], 1.0)]  # of a step of 1 ms, which its operations alone outlast: the rest was told as 0
    assert rows[-1][2] < 0 and sum(row[2] for row in rows) == pytest.approx(1.0, abs=1e-6)
    assert communication.markdown(["ms"], [[-4.40716], [0.0], [0.001]]).split("\n")[2:] == ["| -4.41 |", "| 0.00 |", "| 0.00100 |"]


def test_a_step_that_cannot_be_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu_step.py", "--block_size=100000"])
    with pytest.raises(SystemExit, match=r"^cpu_step\.py: error: --block_size=100000: the most tokens are"):
        cpu_step.main()


def test_data_that_a_run_would_refuse_are_one_message_before_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grad_dtype.py", "--seeds=1", "--data=/nodata"])
    monkeypatch.setattr(grad_dtype, "final_loss", lambda *_: pytest.fail("a run has begun"))
    with pytest.raises(SystemExit, match=r"^grad_dtype\.py: error: no shard matches /nodata/[^\n]*$"):
        grad_dtype.main()


def test_a_step_on_a_cpu_is_taken_apart() -> None:
    command = [sys.executable, str(ROOT / "bench" / "cpu_step.py"), *SMALL.split(), "--val_tokens=512"]
    done = run_fresh(command, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    kinds = {row[0]: row[1:] for row in rows[2:]}
    assert rows[0] == ["operation", "calls", "ms", "share", "GFLOP/s", "ms by itself"]
    assert kinds["products, head, FP8 emulated"][0] == "2" and int(kinds["mul"][0]) > 100
    milliseconds = [float(row[1]) for row in kinds.values()]
    assert all(x >= 0 for x in milliseconds[:-1])  # the rest may be below 0
    shares = [int(row[2].strip("%")) / 100 for row in kinds.values()]
    longest, share = max(zip(milliseconds, shares))
    whole = longest / share  # what the rows are parts of: rounded, as they are
    assert abs(sum(milliseconds) - whole) <= 0.05 * whole + 0.01 * len(kinds), (milliseconds, shares)
    assert all(abs(s - x / whole) <= 0.02 + 0.01 / whole for x, s in zip(milliseconds, shares)), (milliseconds, shares)
