"""Statistics: scipy's p-values, Holm's correction, numbers of runs that a simulation confirms."""

import math

import numpy as np
import pytest
from scipy import stats

import made_logs  # noqa: F401, which finds records/

import plan
import simulate_race
import t_tests
from t_tests import P

A, B = [3.28, 3.2812, 3.2795, 3.2806], [3.2779, 3.2791, 3.2786, 3.2774, 3.2801]


def test_p_values_and_intervals_are_scipys():
    expected = stats.ttest_ind(B, A, equal_var=False)
    found = t_tests.different(A, B)
    assert found.p == expected.pvalue
    assert (found.low, found.high) == tuple(expected.confidence_interval(0.95))
    assert found.error == pytest.approx(found.mean / expected.statistic)
    assert t_tests.paired(A, B[:4]).p == pytest.approx(stats.ttest_rel(B[:4], A).pvalue)
    assert t_tests.p_below(B, 3.28) == stats.ttest_1samp(B, 3.28, alternative="less").pvalue
    again = t_tests.with_error(found.mean, found.error, found.freedom)
    assert again == pytest.approx(found)


@pytest.mark.parametrize("a, b", [([1.0], [2.0, 3.0]), ([1.0, 1.0], [2.0, 2.0])])
def test_without_a_spread_there_is_no_p(a, b):
    assert math.isnan(t_tests.different(a, b).p) and t_tests.different(a, b).mean > 0
    assert math.isnan(t_tests.p_below(a, 2.0))
    # 1.1 − 1.0 and 1.2 − 1.1 are not the same number.
    assert math.isnan(t_tests.paired([1.0, 1.1, 1.2], [1.1, 1.2, 1.3]).p)


def test_holms_correction():
    assert t_tests.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    corrected = t_tests.holm([0.6, math.nan, 0.9])
    assert (corrected[0], corrected[2]) == (1.0, 1.0) and math.isnan(corrected[1])


@pytest.mark.parametrize("spreads, alpha", [([1.0, 1.0], P / 2), ([2.0, 1.0], P / 2), ([1.0], P)])
def test_so_many_runs_reach_p_with_the_chance_computed(spreads, alpha):
    n, size, count = t_tests.runs_for(1.5, spreads, alpha), 1.5, 4000
    random = np.random.default_rng(0)
    samples = [random.normal(0, spread, (count, n)) for spread in spreads]
    samples[0] += size
    if len(spreads) == 2:
        p = stats.ttest_ind(*samples, axis=1, equal_var=False, alternative="greater").pvalue
    else:
        p = stats.ttest_1samp(samples[0], 0, axis=1, alternative="greater").pvalue
    power = t_tests.power(size, spreads, n, alpha)
    assert np.mean(p < alpha) == pytest.approx(power, abs=0.02) and power >= t_tests.POWER
    assert t_tests.power(size, spreads, n - 1, alpha) < t_tests.POWER


@pytest.mark.parametrize("pairs", [2, 4, 5, 6, 7, 12, 100])
def test_the_levels_of_all_looks_add_up_to_p(pairs):
    plan = t_tests.looks(pairs)
    assert sum(plan.values()) == pytest.approx(P) and max(plan) == pairs and min(plan) > 1
    assert len(plan) == (1 if pairs < 5 else 3) and [*plan] == sorted(plan)


@pytest.mark.parametrize("t, verdict", [(-5, 0), (5, 10), (-2.5, -1), (2.5, -1), (-1.5, 11)])
def test_the_second_look_also_ends_what_will_show_nothing(t, verdict):
    found = t_tests.with_error(0.01 * t, 0.01, 7)
    plan = t_tests.looks(12)
    assert t_tests.decide(found, 8, plan) == verdict
    assert t_tests.decide(found, 8, plan, futility=False) == (-1 if verdict == 11 else verdict)
    # The chance that four more such pairs show the difference, their σ being the eight's.
    sigma, random = 0.01 * 8**0.5, np.random.default_rng(0)
    means = (8 * found.mean + random.normal(4 * found.mean, 2 * sigma, 100_000)) / 12
    least = stats.t.isf(plan[12] / 2, 11) * sigma / 12**0.5
    expected = np.mean(means * np.sign(t) > least)
    assert t_tests.power_left(found, 8, plan) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("correlation, test", simulate_race.KINDS)
def test_simulated_races_are_tested_as_real_ones_and_rarely_wrong(correlation, test, monkeypatch):
    monkeypatch.setattr(simulate_race, "RACES", 20_000)
    a, b = simulate_race.losses(correlation, 1)
    found = simulate_race.difference(a, b, test)
    real = t_tests.paired if test == "pairs" else t_tests.different
    one = real([*map(float, a[7])], [*map(float, b[7])])
    assert [x[7] for x in found[:2]] == pytest.approx(one[:2], abs=1e-9)
    assert found.p[7] == pytest.approx(one.p)
    assert "%" in simulate_race.row(correlation, test, 0)  # raises for too many false verdicts


def test_plan_on_the_command_line(tmp_path, capsys):
    plan.main(["0.001"])
    assert "48 runs of each" in capsys.readouterr().out
    folder = made_logs.write_runs(tmp_path / "a", [80] * 4, [3.2, 3.21, 3.22, 3.23])
    plan.main(["0.02", folder])
    assert "σ = 0.013" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        plan.main(["0.02", folder, "--time"])  # all alike
