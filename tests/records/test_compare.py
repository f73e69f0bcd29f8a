"""What compare.py says: the runs that share a mean, those set aside, verdicts and cautions."""

import json
import random
import subprocess
import sys

import pytest
from scipy import stats

from made_logs import ENVIRONMENT, make_log, step_lines, write_runs

import compare
from groups import InputError, gather_all, same_code

random.seed(0)
TIMES = [random.gauss(80_000, 200) for _ in range(8)]
LOSSES = [random.gauss(3.279, 0.001) for _ in range(8)]


def said(capsys, *arguments):
    """The output of compare.py, in a pipe."""
    compare.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def figures(capsys, *arguments):
    return json.loads(said(capsys, *arguments, "--json"))["groups"]


def environment(old, new):
    """Runs with another text in their environment."""
    return {"environment": ENVIRONMENT.replace(old, new)}


@pytest.fixture
def baseline(tmp_path):
    return write_runs(tmp_path / "base", TIMES, LOSSES)


@pytest.fixture
def idea(tmp_path):
    times = [time - 3000 + 50 * i for i, time in enumerate(TIMES)]
    changed = {"train_gpt.py": b"import torch\nx = 2\n"}
    return write_runs(tmp_path / "idea", times, [x - 0.002 for x in LOSSES], changed=changed)


# ----------------------------------------------------------------------------------------------
# Sources


SOURCES = [
    ("def f():  # one\n\n    return 'a # b'\n", "def f():\n    return 'a'\n"),
    ('"""About."""\ndef f():\n    """About."""\n    return \'a # b\'\n', ""),
    ("def f(\n):\n    return 'a # b'\n", "def f(): pass\nreturn 'a # b'\n"),
]


@pytest.mark.parametrize("same, other", SOURCES)
def test_sources_are_compared_without_comments_and_docstrings(same, other):
    source = b"def f():\n    return 'a # b'\n"
    assert same_code(source, same.encode()) and not same_code(source, other.encode())


# ----------------------------------------------------------------------------------------------
# Which runs share a mean


def test_the_figures_of_two_groups(baseline, idea, capsys):
    before, after = figures(capsys, baseline, idea)
    expected = stats.ttest_ind(after["times"], before["times"], equal_var=False)
    assert after["time"]["p"] == expected.pvalue == after["time_p_holm"]
    assert after["time_mean"] == pytest.approx(sum(after["times"]) / 8)
    assert after["loss"]["mean"] == pytest.approx(-0.002, abs=1e-4)
    below = stats.ttest_1samp(before["losses"], 3.28, alternative="less")
    assert before["p_below_target"] == below.pvalue


RESUMED = "resumed at step 4 from c/4.pt, with changed source, 2 lines of difference"
OTHER_RUNS = [
    ({"changed": {"train_gpt.py": b"x = 3\n"}}, "sources (the script)"),
    ({"changed": {"data/shards.py": b"y\n"}}, "sources (data/shards.py)"),
    (environment("lr=0.5", "lr=0.6"), "lr 0.5 → 0.6"),
    (environment("2.13.0", "2.12.0"), "PyTorch 2.13.0+cu130 → 2.12.0"),
    (environment("0000000a", "0000000c"), "a_train_0.bin 0000000a"),
    (environment("8 ranks", "4 ranks"), "ranks 8 → 4"),
    ({"lines": step_lines(12, 9000)}, "steps 8 → 12"),
    (
        {"environment": f"{ENVIRONMENT}\n{RESUMED}\n{ENVIRONMENT}\n-x = 1\n+x = 2"},
        "changes of source",
    ),
]
SAME_RUNS = [
    {"changed": {"train_gpt.py": b"import torch  # faster?\nx = 1\n"}},
    environment("seed=0", "seed=77"),
    environment("'data/x'", "'/disk/x'"),
    environment("run_id='a'", "run_id='b', save_every=10"),
]


@pytest.mark.parametrize("changed, reason", OTHER_RUNS)
def test_a_run_of_another_experiment_is_set_aside_and_said(
    changed, reason, baseline, tmp_path, capsys
):
    (tmp_path / "base" / "z.txt").write_bytes(make_log(**{"lines": step_lines(8, 9000)} | changed))
    text = said(capsys, baseline)
    assert f"unlike the others: {reason}" in text and "(1 of 9 set aside)" in text


def test_what_makes_no_other_run_counts(baseline, tmp_path, capsys):
    for i, changed in enumerate(SAME_RUNS):
        log = make_log(lines=step_lines(8, 9990 + i), **changed)
        (tmp_path / "base" / f"z{i}.txt").write_bytes(log)
    assert figures(capsys, baseline)[0]["runs"] == 8 + len(SAME_RUNS)


def test_two_experiments_share_no_mean(tmp_path):
    folder = write_runs(tmp_path / "a", TIMES[:3], LOSSES[:3])
    for i in range(2):
        log = make_log(lines=step_lines(8, 10 + i), changed={"train_gpt.py": b"x = 3\n"})
        (tmp_path / "a" / f"other{i}.txt").write_bytes(log)
    with pytest.raises(InputError, match="share no mean") as error:
        gather_all([folder])
    assert "3 runs" in str(error.value) and "sources (the script)" in str(error.value)


def test_crashed_cut_and_copied_runs_are_set_aside_and_said(baseline, tmp_path, capsys):
    folder = tmp_path / "base"
    crash = step_lines(5, total=8) + "RuntimeError: boom\n"
    (folder / "crash.txt").write_bytes(make_log(lines=crash))
    (folder / "cut.log").write_bytes(make_log(lines=step_lines(5, total=8)))
    (folder / "copy.txt").write_bytes((folder / "0.txt").read_bytes())
    text = said(capsys, baseline)
    assert "crash.txt: crashed at step 5/8: RuntimeError: boom" in text
    assert "cut.log: cut short at step 5/8" in text
    assert "the same run as" in text and "(3 of 11 set aside)" in text


def test_runs_of_different_machines_have_no_mean_time(baseline, idea, tmp_path, capsys):
    other = ENVIRONMENT.replace("0bbfd16a", "22222222")
    elsewhere = write_runs(tmp_path / "elsewhere", TIMES, LOSSES, environment=other)
    row = figures(capsys, baseline, elsewhere)[1]
    assert "host 0bbfd16a and 22222222" in row["times_do_not_compare"]
    assert row["time"]["mean"] is None and row["loss"]["mean"] is not None
    log = make_log(environment=other, lines=step_lines(8, 9000))
    (tmp_path / "base" / "z.txt").write_bytes(log)
    row = figures(capsys, baseline)[0]
    assert row["time_mean"] is None and row["several_machines"] and row["loss_mean"]


def test_which_logs_an_argument_names(baseline, idea, tmp_path):
    (tmp_path / "base" / "notes.md").write_text("x")
    groups = gather_all([baseline, str(tmp_path / "i*")])
    assert [(group.name, len(group.runs)) for group in groups] == [("base", 8), ("i*", 8)]
    with pytest.raises(InputError, match="name it once"):
        gather_all([idea, str(tmp_path / "idea" / "0.txt")])
    with pytest.raises(InputError, match="no logs"):
        gather_all([str(tmp_path / "none*")])


# ----------------------------------------------------------------------------------------------
# Verdicts


def test_the_verdict_in_words(baseline, idea, capsys):
    text = said(capsys, baseline, idea)
    assert "idea: FASTER by 2." in text and "95% interval -3." in text
    assert "loss LOWER by 0.002" in text and "mean loss BELOW 3.28" in text
    assert "train_gpt.py +1 −1" in text and "but:" not in text
    assert text.splitlines()[1].startswith("|") and "| base |" in text


def test_what_is_not_shown_is_not_said(baseline, tmp_path, capsys):
    losses = [x + 1e-4 for x in LOSSES[::-1]]
    same = write_runs(tmp_path / "same", TIMES[::-1], losses, seeds=range(8, 16))
    text = said(capsys, baseline, same)
    assert "not shown to be faster or slower" in text and "loss not shown to be" in text
    assert "FASTER" not in text and "LOWER" not in text


def test_pairs_take_out_what_drifts(tmp_path, capsys):
    drift = [80_000 + 3000 * i for i in range(8)]
    a = write_runs(tmp_path / "a", drift, LOSSES)
    times = [x - 500 + 20 * (i % 3) for i, x in enumerate(drift)]
    b = write_runs(tmp_path / "b", times, LOSSES[::-1])
    plain, paired = (figures(capsys, a, b, *more)[1] for more in ([], ["--pairs"]))
    assert plain["time"]["p"] > 0.5 and paired["time"]["p"] < 1e-6
    expected = stats.ttest_rel(paired["times"], [x / 1000 for x in drift]).pvalue
    assert paired["time"]["p"] == pytest.approx(expected, rel=1e-3)


def test_a_run_without_a_partner_is_set_aside(baseline, idea, tmp_path, capsys):
    (tmp_path / "idea" / "3.txt").unlink()
    rows = figures(capsys, baseline, idea, "--pairs")
    assert [row["runs"] for row in rows] == [7, 7]
    assert "no partner" in rows[0]["set_aside"][0] and rows[0]["seeds"] == rows[1]["seeds"]
    with pytest.raises(SystemExit, match="no seed is in all groups"):
        other = write_runs(tmp_path / "other", TIMES, LOSSES, seeds=range(20, 28))
        compare.main([baseline, other, "--pairs"])


def test_several_ideas_are_corrected(baseline, idea, tmp_path, capsys):
    second = write_runs(tmp_path / "second", TIMES[::-1], LOSSES[::-1])
    rows = figures(capsys, baseline, idea, second)
    assert rows[1]["time_p_holm"] == pytest.approx(2 * rows[1]["time"]["p"])
    assert "Holm" in said(capsys, baseline, idea, second)


def test_a_loss_gain_in_time(tmp_path, capsys):
    """A run that ends 0.1 lower, where a step takes off 0.1, could end one step earlier."""
    a = write_runs(tmp_path / "a", [80_000, 80_100, 79_900], [3.3, 3.31, 3.29])
    b = write_runs(tmp_path / "b", [80_000, 80_080, 79_900], [3.2, 3.21, 3.19])
    row = figures(capsys, a, b)[1]
    assert row["equal_loss"]["steps"] == pytest.approx(1.0)
    assert row["equal_loss"]["pace"] == pytest.approx(10.0, rel=0.01)
    assert row["equal"]["mean"] == pytest.approx(-10.0, rel=0.01)


def test_as_if_the_runs_had_ended_earlier(baseline, idea, capsys):
    row = figures(capsys, baseline, idea, "--at", 4)[1]
    assert row["steps"] == 4 and row["time_mean"] < 39
    with pytest.raises(SystemExit, match="not validated at step 5"):
        compare.main([baseline, idea, "--at", "5"])


def test_what_makes_a_figure_worth_less_is_said(baseline, tmp_path, capsys):
    other = write_runs(
        tmp_path / "other", TIMES, LOSSES[::-1], **environment("0000000a", "0000000c")
    )
    few = write_runs(tmp_path / "few", TIMES[:3][::-1], LOSSES[:3])
    equal = write_runs(tmp_path / "equal", TIMES[::-1], LOSSES[::-1], seeds=[*range(7), 6])
    assert "but:" not in said(capsys, baseline)
    assert "but: other read other tokens than base" in said(capsys, baseline, other)
    assert "but: 8 runs against 3" in said(capsys, baseline, few)
    assert "but: runs of equal share seeds (6)" in said(capsys, baseline, equal)


# ----------------------------------------------------------------------------------------------
# Rules, snippet, command line


def test_the_rules_by_what_the_logs_say(baseline, idea, tmp_path, capsys):
    """A further column is the script's, not another clock: only runtime/ is the clock."""
    for path in (tmp_path / "idea").glob("*.txt"):
        path.write_bytes(path.read_bytes().replace(b".00ms\n", b".00ms grad_norm:1.23\n"))
    text = said(capsys, baseline, idea, "--rules")
    marks = [line[2:5] for line in text.splitlines() if line.startswith("- [")]
    assert marks == ["[x]"] * 7 + ["[ ]"] * 2
    assert "- [ ] The number of runs" in text and "- [ ] The script's use" in text


FLAG = b"import torch\nx = 1\ntorch._inductor.config.max_autotune = True\n"
BROKEN = [
    ({"changed": {"runtime/run.py": b"fast = True\n"}}, "[!] The clock is the baseline's: changed"),
    ({"changed": {"data/shards.py": b"y = 2\n"}}, "[!] The data stream is the baseline's: changed"),
    (environment("0000000b", "0000000c"), "[!] The data stream is the baseline's: other tokens"),
    ({"seeds": [1] * 8}, "[!] Every run has its own seed: 1, 1"),
    ({"changed": {"train_gpt.py": FLAG}}, "[ ] No extra compiler flags: added: torch._inductor"),
]


@pytest.mark.parametrize("changed, line", BROKEN)
def test_a_rule_that_is_broken(changed, line, baseline, tmp_path, capsys):
    other = write_runs(tmp_path / "other", TIMES, LOSSES, **changed)
    assert f"- {line}" in said(capsys, baseline, other, "--rules")


def test_the_snippet_computes_the_figures_of_the_table(baseline, idea, capsys):
    row = figures(capsys, baseline, idea)[1]
    text = said(capsys, baseline, idea, "--snippet")
    python = text.partition("```python\n")[2].partition("```")[0]
    found = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True)
    lines = dict(line.rsplit(": ", 1) for line in found.stdout.splitlines())
    assert float(lines["p of another time"]) == row["time"]["p"]
    assert float(lines["p of a mean below 3.28"]) == row["p_below_target"]


def test_nothing_in_a_log_reaches_the_terminal_as_an_escape(baseline, tmp_path, capsys):
    evil = "\x1b[2J\x1b]0;owned\x07\u202e"
    text = ENVIRONMENT.replace("8 ranks", f"8 ranks\nattention: {evil}").replace("FA3", evil)
    changed = {"train_gpt.py": f"x = '{evil}'\n".encode(), f"a{evil}.py": b"x = 1\n"}
    folder = write_runs(tmp_path / "evil", TIMES, LOSSES, environment=text, changed=changed)
    crash = step_lines(5, total=8) + f"RuntimeError: {evil}\nstep:6/8 train_time:{evil}\n"
    (tmp_path / "evil" / "crash.txt").write_bytes(make_log(lines=crash))
    text = said(capsys, baseline, folder, "--source", "--rules", "--snippet")
    assert "\\x1b[2J" in text and "-x = 1" in text
    assert all(c.isprintable() or c == "\n" for c in text)
