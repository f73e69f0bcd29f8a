"""A loss gain in steps and seconds, and step times by stage, are a hand's calculation from the logs' lines."""

import math
import re

import numpy as np
import pytest

scipy_stats = pytest.importorskip("scipy.stats", reason="pip install -r records/requirements.txt")

from made_logs import ENVIRONMENT, make_log, step_lines, write_runs

import compare
import curves
import verdict
from groups import gather
from runlog import parse_log

SLOPES = ([0.0010, 0.0012, 0.0011], [0.0014, 0.0012, 0.0013])  # of runs' last 40 steps
TIMES = ([60_000, 60_400, 60_100], [61_000, 61_300, 60_900])
LOSSES = ([3.2790, 3.2781, 3.2786], [3.2720, 3.2734, 3.2711])


def curve(loss, slope, ms, steps=400):
    """Step lines with validations at 0, 360, 390 and the end: the slope counts over the last 40, as 10 are too few."""
    lines = []
    for step in range(steps + 1):
        if step in (0, 360, 390, steps):
            left = steps - step
            value = loss + slope * left + (0.01 if step == 390 else 0) + (5 if step == 0 else 0)
            lines.append(f"step:{step}/{steps} val_loss:{value:.4f} train_time:{ms * step / steps:.0f}ms step_avg:1.00ms")
    return "\n".join(lines) + "\n"


def write(folder, slopes, times, losses, **parts):
    folder.mkdir()
    for i, (slope, time, loss) in enumerate(zip(slopes, times, losses, strict=True)):
        environment = parts.get("environment", ENVIRONMENT).replace("seed=0", f"seed={i}")
        (folder / f"{i}.txt").write_bytes(make_log(**{**parts, "environment": environment, "lines": curve(loss, slope, time)}))
    return gather(folder.name, str(folder))


@pytest.fixture
def two(tmp_path):
    return [write(tmp_path / name, *rest) for name, *rest in zip("ab", SLOPES, TIMES, LOSSES, strict=True)]


def test_a_loss_gain_in_steps_and_seconds_by_hand(two):
    slopes = np.array(SLOPES)
    slope, gain = slopes.mean(), np.mean(LOSSES[0]) - np.mean(LOSSES[1])
    pace = np.mean(TIMES[1]) / 400 / 1000
    found = curves.equal_loss(*two, comparable=True, pairs=False)
    assert (found.slope, found.over) == (pytest.approx(slope), 40)
    assert found.steps == pytest.approx(gain / slope) and found.pace == pytest.approx(pace, rel=1e-4)
    assert found.seconds == pytest.approx(gain / slope * pace, rel=1e-4)
    assert found.slope_error == pytest.approx(math.hypot(*(slopes.std(axis=1, ddof=1) / math.sqrt(3))) / 2, rel=1e-6)

    equal = [np.array(t) / 1000 + np.array(losses) * found.pace / slope for t, losses in zip(TIMES, LOSSES)]
    expected = scipy_stats.ttest_ind(equal[1], equal[0], equal_var=False)
    error = abs((equal[1].mean() - equal[0].mean()) / expected.statistic)
    error = math.hypot(error, gain * found.pace * found.slope_error / slope**2)
    half = scipy_stats.t.ppf(0.975, expected.df) * error
    difference = np.mean(TIMES[1]) / 1000 - np.mean(TIMES[0]) / 1000 - found.seconds
    assert found.time.mean == pytest.approx(difference, rel=1e-9)
    assert (found.time.low, found.time.high) == pytest.approx((difference - half, difference + half), rel=1e-6)
    assert found.time.p == pytest.approx(2 * scipy_stats.t.sf(abs(difference / error), expected.df), rel=1e-6)

    differences = scipy_stats.ttest_rel(equal[1], equal[0])
    pairs = curves.equal_loss(*two, comparable=True, pairs=True).time
    assert pairs.mean == pytest.approx(difference) and pairs.freedom == differences.df == 2


def test_a_loss_that_is_worth_too_many_steps_has_no_test(tmp_path, two, capsys):
    """As far along a straight line as the run is long it was FASTER by more seconds than that takes."""
    slope = np.mean(SLOPES[0])
    for share, far in ((0.24, False), (0.26, True), (-0.26, True)):
        losses = [x - share * 400 * slope for x in LOSSES[0]]
        ends = [round(x, 4) for x in losses]
        other = write(tmp_path / f"{share}", SLOPES[0], TIMES[1], ends)
        found = curves.equal_loss(two[0], other, comparable=True, pairs=False)
        assert found.far == far and (found.time is None) == far and found.steps == pytest.approx(400 * share, rel=0.05), share
    compare.main([str(tmp_path / "a"), str(tmp_path / "0.26")])
    assert "no test, as that is too far along a straight line" in capsys.readouterr().out


def test_a_slope_over_more_steps_does_not_count(tmp_path, two):
    """Of runs validated at their start and end alone: the loss fell faster then."""
    other, known = gather_validated(tmp_path, {0, 400}), gather_validated(tmp_path, {0, 360, 400})
    found = [curves.equal_loss(two[0], group, comparable=True, pairs=False) for group in (other, known)]
    assert found[0].over == found[1].over == 40
    slopes = np.array(SLOPES)
    assert found[0].slope == pytest.approx(slopes[0].mean()) and found[1].slope == pytest.approx(slopes.mean())
    assert found[0].slope_error == pytest.approx(slopes[0].std(ddof=1) / math.sqrt(3), rel=1e-6)
    back = curves.equal_loss(other, two[0], comparable=True, pairs=False)
    assert back.slope == found[0].slope and back.over == 40
    near = gather_validated(tmp_path, {0, 350, 400})
    assert curves.equal_loss(two[0], near, comparable=True, pairs=False).slope == pytest.approx(slopes.mean())


def test_the_step_from_raw_to_averaged_weights_is_no_slope(tmp_path, two):
    """--tail_averages: its last validation sees the averages. The other group's slope counts; none, if both are so."""
    averaged = gather_validated(tmp_path, {0, 360, 400}, tail_averages=True)
    found = curves.equal_loss(two[0], averaged, comparable=True, pairs=False)
    assert found.slope == pytest.approx(np.array(SLOPES)[0].mean())
    assert curves.equal_loss(averaged, averaged, comparable=True, pairs=False) is None


def gather_validated(folder, at, **settings):
    """Runs of the second group that were validated at these steps alone."""
    folder = folder / f"at {sorted(at)}"
    folder.mkdir()
    for i, (slope, time, loss) in enumerate(zip(SLOPES[1], TIMES[1], LOSSES[1], strict=True)):
        lines = [f"step:{step}/400 val_loss:{loss + slope * (400 - step) + (5 if step == 0 else 0):.4f} "
                 f"train_time:{time * step / 400:.0f}ms step_avg:1.00ms\n" for step in sorted(at)]  # fmt: skip
        more = "".join(f", {name}={value!r}" for name, value in settings.items())
        environment = ENVIRONMENT.replace("seed=0", f"seed={i}{more}")
        (folder / f"{i}.txt").write_bytes(make_log(environment=environment, lines="".join(lines)))
    return gather(folder.name, str(folder))


def test_the_verdict_tells_it(two):
    """Slower, but lower: faster at equal loss; the figures of the sentence are those above."""
    said = verdict.compare(two, 3.28)[1]["verdict"]
    found = curves.equal_loss(*two, comparable=True, pairs=False)
    assert "b: SLOWER by 0.900 s (1.50%), 95% interval " in said and "loss LOWER by 0.00640, 95% interval " in said
    assert (
        f"its loss is worth {found.steps:.1f} steps, {found.seconds:.3f} s at 152.67 ms a step (slope 0.0012 a step over"
        in said
    )
    assert found.steps == pytest.approx(5.333, abs=1e-3) and "the last 40): not shown to be faster or slower: +0.086 s" in said
    back = verdict.compare(two[::-1], 3.28)[1]["verdict"]
    assert "at equal loss: its loss costs 5.3 steps, 0.802 s at 150.42 ms a step" in back


def test_times_of_different_machines_are_not_added_to_it(tmp_path, two):
    other = write(tmp_path / "c", SLOPES[1], TIMES[1], LOSSES[1], environment=ENVIRONMENT.replace("6.8", "6.9"))
    found = curves.equal_loss(two[0], other, comparable=False, pairs=False)
    assert found.time is None and found.steps == pytest.approx(5.333, abs=1e-3)
    said = verdict.compare([two[0], other], 3.28)[1]["verdict"]
    assert "its loss is worth 5.3 steps, 0.814 s at 152.67 ms a step (slope 0.0012 a step over the last 40); mean loss" in said


@pytest.mark.parametrize("slopes, count", [(SLOPES[0], 1), ([-0.002] * 3, 3)])
def test_where_a_loss_does_not_fall_or_runs_are_single_nothing_is_said(tmp_path, two, slopes, count):
    other = write(tmp_path / "c", slopes[:count], TIMES[1][:count], LOSSES[1][:count])
    assert curves.equal_loss(two[0], other, comparable=True, pairs=False) is None
    assert "at equal loss" not in verdict.compare([two[0], other], 3.28)[1]["verdict"]


def staged(folder, ms, script=b"STAGES = (Stage(until=1/2), Stage(until=1))\n", **parts):
    """Runs of 12 steps, 8 scheduled, whose stages take ms[0], ms[1] and ms[2] a step, and a little more in each run."""
    folder.mkdir()
    for i in range(3):
        lines, clock = ["step:0/12 val_loss:9.0 train_time:0ms step_avg:nanms"], 0
        for step in range(1, 13):
            clock += ms[(step > 4) + (step > 8)] + 10 * i
            lines.append(f"step:{step}/12 train_time:{clock}ms step_avg:1.00ms")
        lines.append(f"step:12/12 val_loss:3.27 train_time:{clock}ms step_avg:1.00ms\n")
        environment = parts.get("environment", ENVIRONMENT).replace("seed=0", f"seed={i}, num_scheduled_iterations=8")
        (folder / f"{i}.txt").write_bytes(make_log(environment=environment, lines="\n".join(lines), script=script))
    return gather(folder.name, str(folder))


def test_milliseconds_a_step_by_stage(tmp_path):
    a, b = (
        staged(tmp_path / "a", [100, 200, 300]),
        staged(tmp_path / "b", [90, 200, 360], b"STAGES = (Stage(until=1/2), Stage(until=1),)\n"),
    )
    found = curves.paces(a, b, pairs=False)
    assert [(pace.part, pace.before, pace.after) for pace in found] == [
        ("all steps", 210, pytest.approx(680 / 3)), ("stage 1", 110, 100), ("stage 2", 210, 210), ("extension", 310, 370),
    ]  # fmt: skip
    assert found[1].difference.mean == -10 and found[1].difference.error == pytest.approx(math.sqrt(2 * 10**2 / 3))
    assert curves.paces(a, b, pairs=True)[1].difference.mean == -10
    assert math.isnan(curves.paces(a, b, pairs=True)[1].difference.error)  # each pair differs by exactly that
    unknown = staged(tmp_path / "c", [100, 200, 300], b"x = 1\n")
    assert [pace.part for pace in curves.paces(unknown, unknown, False)] == [
        "all steps",
        "first third",
        "second third",
        "last third",
    ]


def test_the_first_step_counts_with_or_without_a_validation_before_it():
    """Of the same times, the arm without --val_every had 12 ms a step more."""
    lines = step_lines(8, 10.0).splitlines(keepends=True)
    slow = [re.sub(r"train_time:(\d+)ms", lambda found: f"train_time:{int(found[1]) + 90 * (not line.startswith('step:0'))}ms", line) for line in lines]
    with_it, without = (parse_log(make_log(lines="".join(some))) for some in (slow, [x for x in slow if not x.startswith("step:0")]))
    assert 0 in with_it.times and 0 not in without.times
    for start, end in ((0, 8), (0, 4)):
        assert curves.pace(with_it, start, end) == curves.pace(without, start, end) == (10 * end + 90) / end


def test_steps_without_times_are_passed_over(tmp_path):
    run = parse_log(
        make_log(lines="step:4/8 train_time:100ms step_avg:1.00ms\nstep:8/8 val_loss:3.27 train_time:500ms step_avg:1ms\n")
    )
    assert curves.pace(run, 0, 8) == 100 and curves.pace(run, 0, 6) is None
    run = parse_log(make_log(lines="step:0/8 val_loss:9.0\nstep:8/8 val_loss:3.27\n"))
    assert curves.pace(run, 0, 8) is None and curves.ending(run) == (8, pytest.approx(5.73 / 8), None)
    assert curves.ending(parse_log(make_log(lines="step:8/8 val_loss:3.27\n"))) is None
    assert curves.parts(parse_log(make_log(lines=step_lines(9))))[1:] == [
        ("first third", 0, 3),
        ("second third", 3, 6),
        ("last third", 6, 9),
    ]


def test_the_times_before_a_clock_was_set_to_0_count_nowhere():
    """As the public speedrun's script did after its first 10 steps, some seconds each, of which the rest were told."""
    lines = [f"step:{step}/40 train_time:{3000 * step if step < 10 else 100 * (step - 10)}ms step_avg:1ms" for step in range(1, 41)]
    run = parse_log(make_log(lines="\n".join([*lines, "step:40/40 val_loss:3.27 train_time:3000ms step_avg:1ms\n"])))
    assert (run.fault, run.restart, min(run.times)) == ("", 10, 10)
    assert {curves.pace(run, start, end) for _, start, end in curves.parts(run)} == {100}


def test_write_runs_fall_by_a_tenth_a_step(tmp_path):
    a, b = (
        gather(name, write_runs(tmp_path / name, [80, 88, 84], losses)) for name, losses in (("a", [3.4] * 3), ("b", [3.2] * 3))
    )
    assert curves.equal_loss(a, b, True, False).steps == pytest.approx(2)
