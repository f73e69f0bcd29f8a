"""The figures of a comparison are right, runs that do not belong are set aside, and every change of a source is told."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

scipy_stats = pytest.importorskip("scipy.stats", reason="pip install -r records/requirements.txt")

from made_logs import ENVIRONMENT, ROOT, SOURCES, make_log, step_lines, write_runs

import compare
import groups
from runlog import parse_log

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
    base = groups.gather("base", write_runs(tmp_path / "base", [1000 * t for t in TIMES_A], LOSSES[:4], steps=50))
    new = groups.gather("new", write_runs(tmp_path / "new", [1000 * t for t in times], losses, steps=50))
    verdict = compare.summary(new, base, 3.28)["verdict"]
    assert all(part in verdict for part in said), verdict


def test_runs_that_do_not_belong_are_set_aside(tmp_path):
    folder = tmp_path / "runs"
    write_runs(folder, [80, 81, 82], [3.27, 3.28, 3.29])
    (folder / "copy.txt").write_bytes((folder / "0.txt").read_bytes())
    (folder / "source.txt").write_bytes(make_log(script=b"x = 2\n"))
    (folder / "setting.txt").write_bytes(make_log(environment=ENVIRONMENT.replace("lr=0.5", "lr=0.6")))
    (folder / "steps.txt").write_bytes(make_log(lines=step_lines(9)))
    (folder / "cut.log").write_bytes(make_log(lines=step_lines(4, total=8)))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    group = groups.gather("runs", str(folder))
    assert [run.path.name for run in group.runs] == ["0.txt", "1.txt", "2.txt"]
    assert {log.path.name: reason for log, reason in group.aside} == {
        "copy.txt": f"the same run as {folder / '0.txt'}",
        "source.txt": "made with other sources than most here",
        "setting.txt": "made with other settings than most here",
        "steps.txt": "made with another number of steps than most here",
        "cut.log": "cut short at step 4/8",
    }


def test_runs_of_one_experiment_may_differ_in_names_and_output(tmp_path):
    """The script's name, the order in which its modules were imported, the seed and what is written: all are one group."""
    (_, script), *modules = SOURCES.items()
    changes = {
        "a.txt": make_log(),
        "name.txt": make_log({"my idea.py": script, **dict(modules)}, lines=step_lines(ms=11)),
        "order.txt": make_log({"train_gpt.py": script, **dict(modules[::-1])}, lines=step_lines(ms=12)),
        "output.txt": make_log(environment=ENVIRONMENT.replace("seed=0", "seed=1, sample_tokens=9, log_dir='x'"),
                               lines=step_lines(ms=13)),
    }  # fmt: skip
    for name, data in changes.items():
        (tmp_path / name).write_bytes(data)
    group = groups.gather("runs", str(tmp_path))
    assert ([run.path.name for run in group.runs], group.aside) == ([*changes], [])
    assert compare.source_diffs(group.runs[0], group.runs[1]) == []
    assert compare.environment_differences(group.runs[0], group.runs[3]) == []


def test_sources_are_compared_by_path():
    before = SOURCES | {"data/loader.py": b"a = 1\nb = 2\n", "runtime/log.py": b"c = 3\n"}
    after = {"ideas/idea.py": b"import torch\nx = 3\n", "data/loader.py": b"a = 1\nb = 3\n", "data/log.py": b"c = 3\n",
             "runtime/__init__.py": b"", "data/shards.py": SOURCES["data/shards.py"],
             "data/__init__.py": b"", "triton_kernels.py": SOURCES["triton_kernels.py"].replace(b"\n", b"\r\n")}  # fmt: skip
    a, b = parse_log(make_log(before), Path("a.txt")), parse_log(make_log(after), Path("b.txt"))
    diffs = dict(compare.source_diffs(a, b))
    assert {name: [line for line in lines if line[0] in "+-"] for name, lines in diffs.items()} == {
        "ideas/idea.py": ["--- a.txt: train_gpt.py", "+++ b.txt: ideas/idea.py", "-x = 1", "+x = 3"],
        "data/loader.py": ["--- a.txt: data/loader.py", "+++ b.txt: data/loader.py", "-b = 2", "+b = 3"],
        "data/log.py": ["--- a.txt: (none)", "+++ b.txt: data/log.py", "+c = 3"],
        "runtime/log.py": ["--- a.txt: runtime/log.py", "+++ b.txt: (none)", "-c = 3"],
        "runtime/__init__.py": ["--- a.txt: (none)", "+++ b.txt: runtime/__init__.py"],
        "triton_kernels.py": ["--- a.txt: triton_kernels.py", "+++ b.txt: triton_kernels.py"],
    }
    said = compare.changed(groups.Group("a", [a]), groups.Group("b", [b]))
    assert said == (
        "b changes: ideas/idea.py +1 −1; data/loader.py +1 −1; data/log.py +1 −0; runtime/__init__.py +0 −0; "
        "runtime/log.py +0 −1; triton_kernels.py +0 −0"
    )


@pytest.fixture
def two_groups(tmp_path):
    a = write_runs(tmp_path / "a", [80_000, 81_000, 82_500], [3.2772, 3.2791, 3.2785])
    b = write_runs(tmp_path / "b", [70_000, 71_000, 72_000], [3.2752, 3.2771, 3.2785], script=b"import torch\nx = 2\n",
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


def test_many_random_losses_against_scipy():
    rng = random.Random(0)
    for _ in range(50):
        a, b = ([rng.gauss(3.28, 0.002) for _ in range(rng.randint(2, 12))] for _ in range(2))
        assert compare.p_different(a, b) == pytest.approx(scipy_stats.ttest_ind(a, b, equal_var=False).pvalue, rel=1e-9)
        assert compare.p_below(a, 3.28) == pytest.approx(scipy_stats.ttest_1samp(a, 3.28, alternative="less").pvalue, rel=1e-9)


def test_the_tools_run_from_any_folder(tmp_path):
    (tmp_path / "log.txt").write_bytes(make_log())
    for tool, options, said in (
        ("compare.py", ["log.txt"], "log.txt: mean loss below 3.28"),
        ("extract.py", ["log.txt", "x y"], "run it: ./run.sh 'x y/train_gpt.py'"),
        ("history.py", ["--help"], "--add"),
    ):
        command = [sys.executable, ROOT / "records" / tool, *options]
        assert said in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
