"""Statistics: scipy's p-values, Holm's correction, numbers of runs that a simulation confirms."""

import math

import numpy as np
import pytest
from scipy import stats

import made_logs  # noqa: F401, which finds records/

import plan
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


def test_plan_on_the_command_line(tmp_path, capsys):
    plan.main(["0.001"])
    assert "48 runs of each" in capsys.readouterr().out
    folder = made_logs.write_runs(tmp_path / "a", [80] * 4, [3.2, 3.21, 3.22, 3.23])
    plan.main(["0.02", folder])
    assert "σ = 0.013" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        plan.main(["0.02", folder, "--time"])  # all alike
