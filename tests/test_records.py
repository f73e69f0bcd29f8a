"""The tools in records/: what a log held is read back exactly, and the figures of a comparison are right."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "records"))

scipy_stats = pytest.importorskip("scipy.stats", reason="pip install -r records/requirements.txt")

import compare
import extract
import history
from runlog import parse_log, read_log

from data.shards import write_shard

RULE, BANNER = "=" * 100, "-" * 40
ENVIRONMENT = (
    "Python 3.12.3 (main) [GCC 13]\nPyTorch 2.13.0+cu130, CUDA 13.0, Triton 3.9.0\nLinux-6.8-x86_64, 8 ranks\n"
    "0: _CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9)\n"
    "1: _CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9)\n"
    "attention: varlen_attn, FA3\ntrain_gpt.py Hyperparameters(lr=0.5, seed=0, run_id='a')"
)
SCRIPT, KERNELS = "import torch\nx = 1\n", "def kernel():\n    pass\n"


def step_lines(steps=8, ms=10.0, loss=3.27, total=None, every=4):
    """The lines of a run of so many steps of `total`; validations every so many steps."""
    total, lines = total or steps, []
    for step in range(steps + 1):
        if step:
            lines.append(f"step:{step}/{total} train_time:{step * ms:.0f}ms step_avg:{ms:.2f}ms")
        if step % every == 0 or step == total:
            value = loss + 0.1 * (total - step)
            lines.append(f"step:{step}/{total} val_loss:{value:.4f} train_time:{step * ms:.0f}ms step_avg:{ms:.2f}ms")
    return "\n".join(lines) + "\n"


def make_log(
    script=SCRIPT, kernels=KERNELS, environment=ENVIRONMENT, lines=None, end="peak memory allocated: 1 MiB reserved: 2 MiB\n"
):
    """A log as train_gpt.py writes it."""
    sources = f"{script}\n{BANNER}\n# triton_kernels.py\n{BANNER}\n{kernels}"
    return f"{sources}\n{RULE}\n{environment}\n{RULE}\n{step_lines() if lines is None else lines}{end}".encode()


def write_runs(folder, times, losses, steps=8, **parts):
    """A folder of complete runs with these training times in ms and last losses."""
    folder.mkdir(parents=True)
    for i, (time, loss) in enumerate(zip(times, losses, strict=True)):
        environment = parts.get("environment", ENVIRONMENT).replace("seed=0", f"seed={i}")
        lines = step_lines(steps, time / steps, loss)
        (folder / f"{i}.txt").write_bytes(make_log(**{**parts, "environment": environment, "lines": lines}))
    return str(folder)


# -----------------------------------------------------------------------------
# Reading

TRAPS = (
    RULE, BANNER, "# triton_kernels.py", "Python 3.12", "Running Python 3.12",
    "step:1/2 val_loss:3.0 train_time:1ms step_avg:1ms",
    "step:7/9 train_time:1ms step_avg:1.00ms", "sample, after a prompt from x:", "peak memory allocated: 7 MiB",
    "", "é ⟫", "\r", make_log().decode(),
)  # fmt: skip
STATEMENTS = ("x = 1", "import os", "# ----", "", "if x:\n    y = 2", 'q = \'"""\'')


@st.composite
def python_sources(draw):
    """Statements and strings; the strings hold whatever a log may hold."""
    pieces = draw(st.lists(st.one_of(st.sampled_from(STATEMENTS), trap_strings()), max_size=5))
    return "\n".join(pieces) + draw(st.sampled_from(["", "\n", "\n\n"])) if pieces else "x = 1\n"


def trap_strings():
    """Assignments of triple-quoted strings of such lines."""
    lines = st.lists(st.one_of(st.sampled_from(TRAPS), st.text("abc =-#:/'\t", max_size=12)), max_size=6)
    return st.tuples(lines, st.sampled_from(["'''", '"""'])).map(
        lambda pair: f"x = {pair[1]}\n" + "\n".join(pair[0]).replace("''", "'").replace(pair[1], "") + f"\n{pair[1]}"
    )


@settings(max_examples=80)
@given(script=python_sources(), kernels=python_sources(), data=st.data())
def test_any_log_reads_back_as_it_was_written(script, kernels, data):
    total = data.draw(st.integers(1, 12))
    stop = data.draw(st.integers(0, total))
    lines, times, validations, clock = [], {}, [], 0
    for step in range(stop + 1):
        if step:
            clock += data.draw(st.integers(0, 10**6))
            times[step] = clock
            lines.append(f"step:{step}/{total} train_time:{clock}ms step_avg:{clock / step:.2f}ms\n")
        if step == total or data.draw(st.booleans()):
            loss = data.draw(st.integers(0, 200_000)) / 10_000
            times[step] = clock
            validations.append((step, loss, clock))
            lines.append(
                f"step:{step}/{total} val_loss:{loss:.4f} train_time:{clock}ms step_avg:{clock / max(step, 1):.2f}ms\n"
            )
    tail = (
        data.draw(st.sampled_from(["", "sample, after a prompt from x:\nstep:1/1 val_loss:0.1\n⟫step:0\n"]))
        + "peak memory resident: 9 MiB\n"
    )
    log = parse_log(make_log(script, kernels, lines="".join(lines), end=tail))
    assert log.sources == {"train_gpt.py": script.encode(), "triton_kernels.py": kernels.encode()}
    assert (log.environment, log.times, log.validations) == (ENVIRONMENT, times, validations)
    assert (log.total, log.peak_memory, log.problems) == (total if lines else None, "peak memory resident: 9 MiB", [])
    assert bool(log.fault) == (stop < total)


@pytest.mark.parametrize("kernels", [None, KERNELS])
def test_community_logs_read_exactly(kernels):
    """Their script prints its files with empty lines around the banner, then nvidia-smi's table."""
    code = SCRIPT + (f"\n\n{BANNER}\n# triton_kernels.py\n{BANNER}\n\n{kernels}" if kernels else "")
    smi = "\n".join(
        f"|   {i}  NVIDIA H100 80GB HBM3          On  |   00000000:61:00.0 Off |                    0 |" for i in range(8)
    )
    environment = (
        "Running Python 3.12.7 (main) [GCC 13.2.0]\nRunning PyTorch 2.10.0.dev compiled for CUDA 12.6\n"
        "Running Triton version 3.5.0\n"
        f"Mon Jan  1 00:00:00 2026\n| NVIDIA-SMI 560  Driver Version: 560.35  CUDA Version: 12.6 |\n|=====+====|\n{smi}\n\n"
    )
    lines = "step:0/2 val_loss:10.8 train_time:0ms step_avg:nanms\n" + step_lines(2).partition("\n")[2]
    log = parse_log(f"{code}\n{RULE}\n{environment}\n{RULE}\n{lines}".encode())
    assert log.sources == {"train_gpt.py": SCRIPT.encode(), **({"triton_kernels.py": kernels.encode()} if kernels else {})}
    assert log.facts == {
        "Python": "3.12.7", "PyTorch": "2.10.0.dev", "CUDA": "12.6", "Triton": "3.5.0", "driver": "560.35",
        "GPUs": "8 × NVIDIA H100 80GB HBM3",
    }  # fmt: skip
    assert (log.validations, log.fault, log.problems) == ([(0, 10.8, 0.0), (2, 3.27, 20.0)], "", [])


@pytest.mark.parametrize(
    "line, loss, seconds",
    [
        ("step:125/125 val_loss:4.35 train_time:1000ms step_avg:8ms", 4.35, 1.0),
        ("step:125/125 val_loss:4.35 train_time:1.5s", 4.35, 1.5),
        ("step:125/125 val_loss:4.35", 4.35, None),
        ("step:125/125 val_loss:4.35 step_avg:8ms", 4.35, None),
        ("s:125 tel:4.35", 4.35, None),
        ("step 125/125 | val loss 4.35 | train time: 2 s", 4.35, 2.0),
        ("step:125/125 val_loss:4.35 train_time:1000ms step_avg:8ms\r", 4.35, 1.0),
    ],
)
@pytest.mark.parametrize("opening", ["", RULE + "\n"])
def test_older_formats(line, loss, seconds, opening):
    """The oldest logs open with a rule and write the code without a line break of their own."""
    environment = "Running pytorch 2.6.0.dev compiled for CUDA 12.4\nnvidia-smi:"
    log = parse_log(f"{opening}{SCRIPT}{RULE}\n{environment}\n{RULE}\n{line}\n".encode())
    assert (log.sources, log.environment, log.fault) == ({"train_gpt.py": SCRIPT.encode()}, environment, "")
    assert (log.loss, log.seconds) == (loss, seconds)


def test_other_rules_and_none():
    for rule in ("-" * 80, "*" * 60):
        log = parse_log(make_log().replace(RULE.encode(), rule.encode()))
        assert (log.sources["train_gpt.py"], log.loss, log.fault) == (SCRIPT.encode(), 3.27, "")
    log = parse_log(step_lines().encode())
    assert (log.sources, log.loss, log.fault) == ({}, 3.27, "") and "no sources" in log.problems[0]


def test_quotes_within_quotes_do_not_hide_the_end_of_a_source():
    """The end of the sources is where they parse, not where some count of quotes is even."""
    script = f"quotes = '\"\"\"'\nx = '''\n{make_log().decode()}'''\n"
    log = parse_log(make_log(script))
    assert log.sources == {"train_gpt.py": script.encode(), "triton_kernels.py": KERNELS.encode()} and not log.fault


def test_every_truncation_reads_and_none_invents_a_figure():
    """A log cut at any byte, as a run that still writes it leaves it: never an error, and only whole figures."""
    whole = parse_log(make_log())
    data = make_log()
    for size in range(len(data)):
        log = parse_log(data[:size])
        assert set(log.validations) <= set(whole.validations) and log.times.items() <= whole.times.items()
        assert log.sources in ({}, whole.sources)
        assert bool(log.fault) == (not log.validations or log.loss != whole.loss)


@settings(max_examples=100)
@given(st.binary(max_size=300), st.integers(0, 10**6), st.booleans())
def test_no_bytes_break_the_parser(junk, where, within):
    log = parse_log(junk)
    assert log.fault or log.validations
    data = make_log()
    where %= len(data)
    parse_log(data[:where] + junk + data[where if within else where + len(junk) :]).recipe  # noqa: B018


@pytest.mark.parametrize(
    "data, fault",
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\0" * 4096, "binary"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "no log"),
        (b"x" * 5_000_000, "no log"),
        (b"=" * 5_000_000, "no log"),
        (b"step:" + b"9" * 5_000_000, "cut short before its first step"),
        (make_log(lines="step:1/9 val_loss:" + "1" * 1_000_000 + "\n"), "cut short at step 1/9"),
        (make_log()[:30], "cut short within its sources"),
        (make_log(lines="", end=""), "cut short before its first step"),
        (make_log(lines=step_lines(5, total=9)), "cut short at step 5/9"),
        (make_log(lines=step_lines(5, total=9), end="Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA\n"),
         "crashed at step 5/9: torch.OutOfMemoryError"),
        (make_log(lines=step_lines(8, loss=math.nan)), "crashed: the validation loss is nan at step 0"),
        (make_log(lines=step_lines(8) + step_lines(8)), "step 0 comes after step 8: more than one run"),
        (make_log(script=f"x = '''\n{make_log().decode()}'''\n").rpartition(b"# triton")[0], "cut short within its sources"),
        (make_log(lines=step_lines(8).replace("step:8/8 val", "# ")), "cut short at step 8/8: no validation loss"),
    ],
)  # fmt: skip
def test_what_is_no_complete_run_is_named(data, fault):
    assert parse_log(data).fault.startswith(fault)


def test_malformed_lines_are_named_with_their_number():
    lines = step_lines().replace("step:3/8 train_time:30ms", "step:3/8 train_time:3oms").replace("step:5/", "step:five/")
    log = parse_log(make_log(lines=lines))
    first = make_log().decode().split("\n").index("step:3/8 train_time:30ms step_avg:10.00ms") + 1
    assert [problem.partition(" train")[0] for problem in log.problems] == [
        f"line {first}: no time in 'step:3/8",
        f"line {first + 3}: no step in 'step:five/8",
    ]
    assert 3 not in log.times and not log.fault


def test_unreadable_paths(tmp_path):
    assert read_log(tmp_path).fault == "not a file"
    assert read_log(tmp_path / "absent").fault == "not a file"


# -----------------------------------------------------------------------------
# Figures

TIMES_A, TIMES_B = [100.25, 101.5, 99.75, 100.0], [98.5, 99.25, 98.75]
LOSSES = [3.2772, 3.2791, 3.2785, 3.2768, 3.2780]


def test_p_values_are_scipys():
    assert compare.p_different(TIMES_A, TIMES_B) == pytest.approx(
        scipy_stats.ttest_ind(TIMES_A, TIMES_B, equal_var=False).pvalue, rel=1e-12
    )
    for target in (3.28, 3.277):
        expected = scipy_stats.ttest_1samp(LOSSES, target, alternative="less").pvalue
        assert compare.p_below(LOSSES, target) == pytest.approx(expected, rel=1e-12)
    assert compare.sigma(LOSSES) == pytest.approx(np.std(LOSSES, ddof=1), rel=1e-12)


def test_undefined_is_nan():
    for a, b in (([1.0], [2.0, 3.0]), ([1.0, 1.0], [2.0, 2.0]), ([], [1.0, 2.0])):
        assert math.isnan(compare.p_different(a, b)) and math.isnan(compare.p_different(b, a))
    assert math.isnan(compare.p_below([3.2], 3.28)) and math.isnan(compare.p_below([3.2, 3.2], 3.28))
    assert compare.more_runs_below([3.2], 3.28) is None and compare.more_runs_below([3.29, 3.30], 3.28) is None
    assert compare.more_runs_different([1.0], [2.0]) is None


def rejection_rate(p_of, samples=40_000):
    """How often p < 0.01, and its standard error."""
    rate = np.mean(p_of(np.random.default_rng(0), samples) < compare.P)
    return rate, math.sqrt(rate * (1 - rate) / samples)


def test_more_runs_reach_the_power_in_simulation():
    """The number given reaches p < 0.01 in 80% of simulated experiments, one fewer does not."""
    values = [3.2795, 3.2776, 3.2788, 3.2807, 3.2784]
    n = len(values) + compare.more_runs_below(values, 3.28)

    def p_of_runs(rng, k, runs):
        samples = rng.normal(np.mean(values), np.std(values, ddof=1), (k, runs))
        return scipy_stats.ttest_1samp(samples, 3.28, axis=1, alternative="less").pvalue

    rate, error = rejection_rate(lambda rng, k: p_of_runs(rng, k, n))
    assert rate > compare.POWER - 4 * error
    rate, error = rejection_rate(lambda rng, k: p_of_runs(rng, k, n - 1))
    assert compare.POWER - 0.1 < rate < compare.POWER + 4 * error

    a, b = [100.0, 102.0, 101.0], [99.0, 101.5, 100.0, 100.0]
    more = compare.more_runs_different(a, b)

    def p_of(rng, k):
        samples = (rng.normal(np.mean(x), np.std(x, ddof=1), (k, len(x) + more)) for x in (a, b))
        return scipy_stats.ttest_ind(*samples, axis=1, equal_var=False).pvalue

    rate, error = rejection_rate(p_of)
    assert compare.POWER - 4 * error < rate < compare.POWER + 0.05


@pytest.mark.parametrize(
    "times, losses, said",
    [
        ([90.0, 90.5, 90.2, 89.8], [3.270, 3.271, 3.272, 3.270], ["FASTER by 10", "BELOW 3.28"]),
        ([110.0, 110.5, 110.2, 109.8], [3.290, 3.291, 3.292, 3.290], ["SLOWER by 9", "ABOVE 3.28"]),
        ([99.0, 101.0, 100.5, 98.0], [3.281, 3.279, 3.278, 3.280],
         ["not shown to be faster", "more of each would", "more would settle"]),
        ([90.0], [3.27], ["faster by 10", "two runs of each", "below 3.28, but no test", "two runs at least"]),
        ([90.0, 90.5], [3.27, 3.27], ["below 3.28, but no test", "one seed?"]),
        ([99.0, 100.0], [3.282, 3.279], ["not below 3.28: no number of runs"]),
    ],
)  # fmt: skip
def test_verdicts(tmp_path, times, losses, said):
    base = compare.gather("base", write_runs(tmp_path / "base", [1000 * t for t in TIMES_A], LOSSES[:4], steps=50))
    new = compare.gather("new", write_runs(tmp_path / "new", [1000 * t for t in times], losses, steps=50))
    verdict = compare.summary(new, base, 3.28)["verdict"]
    assert all(part in verdict for part in said), verdict


# -----------------------------------------------------------------------------
# The commands


def test_runs_that_do_not_belong_are_set_aside(tmp_path):
    folder = tmp_path / "runs"
    write_runs(folder, [80, 81, 82], [3.27, 3.28, 3.29])
    (folder / "copy.txt").write_bytes((folder / "0.txt").read_bytes())
    (folder / "source.txt").write_bytes(make_log(script="x = 2\n"))
    (folder / "setting.txt").write_bytes(make_log(environment=ENVIRONMENT.replace("lr=0.5", "lr=0.6")))
    (folder / "steps.txt").write_bytes(make_log(lines=step_lines(9)))
    (folder / "cut.log").write_bytes(make_log(lines=step_lines(4, total=8)))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    group = compare.gather("runs", str(folder))
    assert [run.path.name for run in group.runs] == ["0.txt", "1.txt", "2.txt"]
    assert {log.path.name: reason for log, reason in group.aside} == {
        "copy.txt": f"the same run as {folder / '0.txt'}",
        "source.txt": "made with other sources than most here",
        "setting.txt": "made with other settings than most here",
        "steps.txt": "made with another number of steps than most here",
        "cut.log": "cut short at step 4/8",
    }


@pytest.fixture
def two_groups(tmp_path):
    a = write_runs(tmp_path / "a", [80_000, 81_000, 82_500], [3.2772, 3.2791, 3.2785])
    b = write_runs(tmp_path / "b", [70_000, 71_000, 72_000], [3.2752, 3.2771, 3.2785], script="import torch\nx = 2\n",
                   environment=ENVIRONMENT.replace("2.13.0", "2.14.0").replace("lr=0.5", "lr=0.6"))  # fmt: skip
    return a, b


def test_table_diff_and_picture(two_groups, tmp_path, capsys):
    picture = tmp_path / "out.png"
    compare.main([*two_groups, "--source", "--plot", str(picture)])
    out = capsys.readouterr().out
    assert "| a " in out and "| b " in out and "3.27827 | 0.00097" in out and "81.167 | 1.258" in out and "-10.167" in out
    assert "a losses: 3.2772, 3.2791, 3.2785" in out and "b times, s: 70.000, 71.000, 72.000" in out
    assert "b changes: train_gpt.py +1 −1; PyTorch 2.13.0+cu130 → 2.14.0+cu130; --lr 0.5 → 0.6" in out
    assert "\n-x = 1\n+x = 2\n" in out and "\x1b" not in out
    assert "\nb: FASTER by 10.167 s (12.53%), p = " in out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_json_is_for_programs(two_groups, capsys):
    compare.main([*two_groups, f"{two_groups[0]}/0.txt", "--json"])
    a, b, single = json.loads(capsys.readouterr().out)["groups"]
    assert a["times"] == [80, 81, 82.5] and b["losses"] == [3.2752, 3.2771, 3.2785] and a["steps"] == 8
    assert b["time_p"] == pytest.approx(scipy_stats.ttest_ind(a["times"], b["times"], equal_var=False).pvalue)
    assert b["loss_p"] == pytest.approx(scipy_stats.ttest_ind(a["losses"], b["losses"], equal_var=False).pvalue)
    assert single["runs"] == 1 and single["time_sigma"] is None and single["time_p"] is None
    assert {change["what"] for change in b["environment_changes"]} == {"PyTorch", "--lr"}


def test_wrong_input_ends_with_a_message(tmp_path, two_groups):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.txt").write_bytes(make_log(lines=step_lines(4, total=8)))
    for argument, said in (
        ("absent", "no such log or folder"),
        ("empty", "no *.txt or *.log"),
        ("cut.txt", "cut short at step 4/8"),
    ):
        with pytest.raises(SystemExit, match=r"compare\.py: error: ") as error:
            compare.main([two_groups[0], str(tmp_path / argument)])
        assert said in error.value.code
    with pytest.raises(SystemExit, match="error: .*nowhere"):
        compare.main([*two_groups, "--plot", str(tmp_path / "nowhere" / "x.png")])


def test_globs_and_names_that_tell_groups_apart(tmp_path, capsys):
    for name in ("x", "y"):
        write_runs(tmp_path / name / "logs", [80, 81], [3.27, 3.28])
    compare.main([str(tmp_path / "x" / "logs"), str(tmp_path / "y" / "*" / "[01].txt")])
    compare.main([str(tmp_path / "x" / "logs"), str(tmp_path / "y" / "logs")])
    out = capsys.readouterr().out
    assert "| *.txt" not in out and "| x/logs |    2" in out and "| y/logs |    2" in out


def test_extract_writes_all_or_nothing(tmp_path):
    log, folder = tmp_path / "log.txt", tmp_path / "deep" / "out"
    log.write_bytes(make_log(script="x = 1\r\n\n", kernels="y = 'é'"))
    extract.main([str(log), str(folder)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "train_gpt.py": b"x = 1\r\n\n",
        "triton_kernels.py": "y = 'é'".encode(),
    }
    (folder / "train_gpt.py").write_text("mine")
    (folder / "triton_kernels.py").unlink()
    with pytest.raises(SystemExit, match="train_gpt.py exists: choose another folder, or --force"):
        extract.main([str(log), str(folder)])
    assert [path.name for path in folder.iterdir()] == ["train_gpt.py"] and (folder / "train_gpt.py").read_text() == "mine"
    extract.main([str(log), str(folder), "--force"])
    assert (folder / "train_gpt.py").read_bytes() == b"x = 1\r\n\n"
    for data, said in ((step_lines().encode(), "no sources"), (make_log()[:40], "cut short within its sources"),
                       (make_log().replace(b"# triton_kernels.py", b"# ../escape.py"), "not a plain file name")):  # fmt: skip
        log.write_bytes(data)
        with pytest.raises(SystemExit, match=said):
            extract.main([str(log), str(tmp_path / "none")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "log.txt"]


def test_an_extracted_run_runs_and_logs_the_same_source(tmp_path):
    """A script with foreign line breaks and a whole log in a string: out of a log, run, and in the run's log the same bytes."""
    tokens = np.tile(np.frombuffer(b"\0" + SCRIPT.encode() * 20, dtype=np.uint8).astype(np.uint16), 40)
    tokens[tokens == 0] = 256
    for split in ("train", "val"):
        write_shard(tmp_path / f"local_{split}_000000.bin", tokens)
    source = (ROOT / "train_gpt.py").read_bytes() + f"\nTRAP = '''\n{make_log().decode()}'''\r\n".encode()
    sources = {"idea.py": source, "triton_kernels.py": (ROOT / "triton_kernels.py").read_bytes()}
    environment = ENVIRONMENT.replace("train_gpt.py", "idea.py")
    (tmp_path / "log.txt").write_bytes(make_log(*(source.decode() for source in sources.values()), environment))
    script, _ = extract.extract(tmp_path / "log.txt", tmp_path / "again")
    options = (
        f"--preset=demo --data={tmp_path} --log_dir={tmp_path} --run_id=run --model_dim=32 --num_heads=2 --head_dim=16 "
        "--batch_unit=64 --num_scheduled_iterations=1 --num_extension_iterations=0 --val_every=0 --val_tokens=2048 "
        "--val_batch_tokens=1024 --sample_tokens=5"
    )
    run = subprocess.run(  # noqa: PLW1510
        [sys.executable, script, *options.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    log = read_log(tmp_path / "run.txt")
    assert (log.sources, log.fault, log.problems, log.total) == (sources, "", [], 1)
    assert log.settings["model_dim"] == "32" and {"Python", "PyTorch", "CPU", "ranks"} <= set(log.facts)


def test_history_is_made_from_the_records(tmp_path, capsys):
    (tmp_path / "README.md").write_text(f"before\n{history.BEGIN}\nold\n{history.END}\nafter\n")
    runs = write_runs(tmp_path / "runs" / "a", [80_000, 81_000], [3.27, 3.28])
    faster = write_runs(tmp_path / "runs" / "b", [70_000, 71_000], [3.27, 3.28])
    more = ["--contributors", "Ann, Bob", "--track", "test"]
    history.main(["--add", "1_A", runs, "--description", "first | one", "--date", "2026-01-01", *more], tmp_path)
    history.main(
        ["--add", "2_B", faster, "--description", "second", "--date", "2026-01-02", "--baseline", "1_A", *more], tmp_path
    )
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert rows == [
        "| [2](2_B/README.md) | 70.5 s | 3.2750 | second | 2026-01-02 | [log](2_B/0.txt), of 2 | Ann, Bob |",
        "| [1](1_A/README.md) | 80.5 s | 3.2750 | first \\| one | 2026-01-01 | [log](1_A/0.txt), of 2 | Ann, Bob |",
    ]
    assert (tmp_path / "2_B" / "0.txt").read_bytes() == Path(faster, "0.txt").read_bytes()
    page = (tmp_path / "2_B" / "README.md").read_text()
    assert "| 1_A " in page and "2_B: FASTER by 10.000 s" in page and "comparison.png" in page and str(tmp_path) not in page
    history.main(["--check"], tmp_path)
    (tmp_path / "2_B" / "README.md").write_text("edited")
    with pytest.raises(SystemExit, match="out of date: .*2_B"):
        history.main(["--check"], tmp_path)

    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SystemExit, match="exists"):
        history.main(["--add", "1_A", runs, "--description", "x", *more], tmp_path)
    with pytest.raises(SystemExit, match="no such log"):
        history.main(["--add", "3_C", str(tmp_path / "absent"), "--description", "x", *more], tmp_path)
    with pytest.raises(SystemExit, match=r"nowhere.record\.toml"):
        history.main(["--add", "3_C", runs, "--description", "x", "--baseline", "nowhere", *more], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "1_A" / "record.toml").write_text('date = "2026-01-01"\n')
    with pytest.raises(SystemExit, match=r"1_A.record\.toml: description, contributors, track, target: missing"):
        history.main([], tmp_path)


def test_the_pages_in_records_are_up_to_date():
    history.main(["--check"])


def test_many_random_losses_against_scipy():
    rng = random.Random(0)
    for _ in range(50):
        a, b = ([rng.gauss(3.28, 0.002) for _ in range(rng.randint(2, 12))] for _ in range(2))
        assert compare.p_different(a, b) == pytest.approx(scipy_stats.ttest_ind(a, b, equal_var=False).pvalue, rel=1e-9)
        assert compare.p_below(a, 3.28) == pytest.approx(scipy_stats.ttest_1samp(a, 3.28, alternative="less").pvalue, rel=1e-9)
