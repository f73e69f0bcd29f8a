"""Each verdict is what its figures prove: the sentences, what they may not say, and what is held against them."""

import math
import re

import numpy as np
import pytest

scipy_stats = pytest.importorskip("scipy.stats", reason="pip install -r records/requirements.txt")

from made_logs import ENVIRONMENT, SOURCES, make_log, smi_environment, step_lines, write_runs

import groups
import t_tests
import verdict

TIMES = [100.25, 101.5, 99.75, 100.0]
LOSSES = [3.2772, 3.2791, 3.2785, 3.2768, 3.2780]


def runs(folder, times, losses=LOSSES, **parts):
    """A group of runs with these times in seconds; the losses of as many."""
    return groups.gather(
        folder.name, write_runs(folder, [1000 * time for time in times], losses[: len(times)], steps=50, **parts)
    )


def test_a_mean_of_times_is_of_all_runs_or_none(tmp_path):
    """It was that of the two of three that told theirs, beside a history that had none."""
    group = runs(tmp_path / "a", [100, 101, 102])
    assert verdict.own_figures(group, 3.28)["time_mean"] == 101
    text = (tmp_path / "a" / "2.txt").read_bytes()
    (tmp_path / "a" / "2.txt").write_bytes(re.sub(rb" train_time:\S+ step_avg:\S+", b"", text))
    row = verdict.own_figures(groups.gather("a", str(tmp_path / "a")), 3.28)
    assert row["runs"] == 3 and math.isnan(row["time_mean"]) and math.isnan(row["time_sigma"])


@pytest.mark.parametrize(
    "p, text", [(0.00997, "0.00997"), (0.01, "0.01"), (0.0101, "0.01"), (0.0099999, "0.0099999"), (0.00994, "0.0099"), (2e-9, "2e-09")]
)
def test_a_p_value_is_told_on_its_side_of_the_threshold(p, text):
    """0.00997 was "BELOW 3.28, p = 0.01", and so was 0.0101 "not shown to be"."""
    assert verdict.figure(p) == text and (float(text) < t_tests.P) == (p < t_tests.P)


def said(*compared, **options):
    return [row["verdict"] for row in verdict.compare([*compared], 3.28, **options)][1:]


@pytest.mark.parametrize(
    "times, losses, parts",
    [
        ([90.0, 90.5, 90.2, 89.8], [3.270, 3.271, 3.272, 3.270],
         ["FASTER by 10", "loss LOWER by 0.0071", "mean loss BELOW 3.28"]),
        ([110.0, 110.5, 110.2, 109.8], [3.290, 3.291, 3.292, 3.290],
         ["SLOWER by 9", "loss HIGHER by 0.0128", "mean loss ABOVE 3.28"]),
        ([110.0 + i / 100 for i in range(40)], [3.29 + i % 7 / 1e4 for i in range(40)], ["mean loss ABOVE 3.28, p < 1e-12"]),
        ([99.0, 101.0, 100.5, 98.0], [3.281, 3.279, 3.278, 3.280],
         ["not shown to be faster or slower: -0.750 s", "not shown to have another loss: +0.00160",
          "fewer than 5 runs are too few"]),
        ([90.0], [3.27], ["faster by 10", "two runs of each", "loss lower by", "below 3.28, but no test", "two runs at least"]),
        ([90.0, 90.5], [3.27, 3.27], ["below 3.28, but no test", "one seed?"]),
        ([99.0, 100.0], [3.282, 3.279], ["not below 3.28: no number of runs"]),
    ],
)  # fmt: skip
def test_sentences(tmp_path, times, losses, parts):
    [sentence] = said(runs(tmp_path / "base", TIMES), runs(tmp_path / "new", times, losses))
    assert all(part in sentence for part in parts) and sentence.startswith("new: "), sentence


def test_pairs_that_all_differ_alike_have_no_test(tmp_path):
    a = runs(tmp_path / "a", TIMES[:3], [3.27, 3.28, 3.29])
    [sentence] = said(a, runs(tmp_path / "b", [time - 1 for time in TIMES[:3]], [3.27, 3.28, 3.29]), pairs=True)
    assert "the same loss, but no test: all pairs differ by as much" in sentence and "one seed" not in sentence


def test_every_figure_of_a_sentence_is_scipys(tmp_path):
    times, losses = [90.0, 90.5, 90.2, 89.8, 90.1], [3.270, 3.271, 3.272, 3.270, 3.2705]
    [sentence] = said(runs(tmp_path / "base", TIMES), runs(tmp_path / "new", times, losses))
    for what, unit, digits, (a, b) in (("FASTER", " s", 3, (TIMES, times)), ("loss LOWER", "", 5, (LOSSES[:4], losses))):
        test = scipy_stats.ttest_ind(a, b, equal_var=False)
        low, high = test.confidence_interval(0.95)
        share = f" ({1 - np.mean(b) / np.mean(a):.2%})" if unit else ""
        assert (f"{what} by {np.mean(a) - np.mean(b):.{digits}f}{unit}{share}, 95% interval {low:.{digits}f} to "
                f"{high:.{digits}f}{unit}, p = {test.pvalue:.2g};") in sentence  # fmt: skip
    assert f"BELOW 3.28, p = {scipy_stats.ttest_1samp(losses, 3.28, alternative='less').pvalue:.2g}." in sentence


def test_losses_are_compared_beside_times(tmp_path):
    """Slower, and yet what was tried for: a lower loss."""
    a = runs(tmp_path / "a", [100, 100.1, 99.9, 100.05], [3.2790, 3.2794, 3.2788, 3.2791])
    b = runs(tmp_path / "b", [101.5, 101.6, 101.4, 101.5], [3.2706, 3.2709, 3.2704, 3.2707])
    assert "SLOWER by 1.487 s" in said(a, b)[0] and "loss LOWER by 0.00842, 95% interval 0.00" in said(a, b)[0]
    assert "FASTER by 1.487 s" in said(b, a)[0] and "loss HIGHER by 0.00842" in said(b, a)[0]


# -----------------------------------------------------------------------------
# Machines


TWO_MACHINES = {
    "driver 570.10 and 560.2": {"driver": "560.2"},
    "2 values of GPU ids": {"buses": ("61:00.0", "8a:00.0")},
    "2 values of GPUs": {"buses": ("61:00.0",)},
}


@pytest.mark.parametrize("differ", TWO_MACHINES)
def test_times_of_different_machines_do_not_compare(tmp_path, differ):
    """The same sources, 1.2 s apart with hardly any spread: that is no finding on them. Losses compare."""
    a = runs(tmp_path / "a", [100, 100.1, 99.9, 100.05], environment=smi_environment())
    lower = [3.2672, 3.2691, 3.2685, 3.2668]
    b = runs(tmp_path / "b", [101.2, 101.3, 101.1, 101.25], lower, environment=smi_environment(**TWO_MACHINES[differ]))
    rows = verdict.compare([a, b], 3.28)
    assert f"b: times not comparable: different machines ({differ}" in rows[1]["verdict"], rows[1]["verdict"]
    assert "SLOWER" not in rows[1]["verdict"] and "; loss LOWER by 0.01000, 95% interval 0.0" in rows[1]["verdict"]
    assert math.isnan(rows[1]["time_p"]) and math.isnan(rows[1]["time_difference"]) and not rows[1]["paces"]
    assert rows[1]["time_mean"] == pytest.approx(101.2125)  # of one machine, it is a mean
    ranks = [
        runs(tmp_path / f"on{n}", [100 / n, 101 / n], environment=ENVIRONMENT.replace("8 ranks", f"{n} ranks")) for n in (1, 8)
    ]
    assert "times not comparable: different machines (ranks 1 and 8)" in said(*ranks)[0]
    [same] = said(a, runs(tmp_path / "c", [101.2, 101.3, 101.1, 101.25], environment=smi_environment()))
    assert "c: SLOWER by 1.200 s" in same


def test_a_group_on_two_machines_has_no_mean_time(tmp_path):
    a = runs(tmp_path / "a", [100, 100.1, 99.9], environment=smi_environment())
    b = runs(tmp_path / "b", [101.2, 101.3], environment=smi_environment())
    c = runs(tmp_path / "c", [90.2, 90.3], environment=smi_environment("560.2"))
    b.runs += c.runs
    rows = verdict.compare([a, b], 3.28)
    assert math.isnan(rows[1]["time_mean"]) and "the runs of b come from different machines (driver" in rows[1]["verdict"]
    assert "the runs of b come" in said(b, a)[0]


def test_machines_that_are_not_told_and_runs_far_apart_are_held_against_a_time(tmp_path):
    def cautions(name, a, b):
        pair = [runs(tmp_path / f"{name}{i}", [100 - i, 100.1 - i], environment=text) for i, text in enumerate((a, b))]
        return verdict.compare(pair, 3.28)[1]["cautions"]

    nothing = "Python 3.12\nPyTorch 2.13.0, CUDA 13.0\nSCRIPT S(seed=0)"
    assert cautions("x", nothing, nothing) == ["the logs do not tell their machines: times compare only if it was one"]
    january, hours_later, february = (smi_environment(date=date) + "\nSCRIPT S(seed=0)" for date in (
        "Mon Jan  5 10:00:00 2026", "Tue Jan  6 09:00:00 2026", "Wed Feb  4 10:00:00 2026"))  # fmt: skip
    assert cautions("y", january, hours_later) == []
    assert cautions("z", january, february)[0].startswith("z1 and z0 ran 30 days apart (2026-02-04, 2026-01-05)")


# -----------------------------------------------------------------------------
# What is held against a figure


def test_runs_of_one_seed_are_warned_of(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_bytes(make_log(lines=step_lines(50, 1800 + 4 * i, 3.2700 + i / 10_000)))
    new, base = groups.gather("new", str(folder)), runs(tmp_path / "base", TIMES)
    row = verdict.compare([base, new], 3.28)[1]
    assert row["loss_p_below_target"] < 1e-4
    assert row["cautions"][0].startswith("all 4 runs of new have seed 0: they share their first weights")
    assert verdict.compare([base, new], 3.28)[0]["cautions"] == []
    base.runs.append(new.runs[0])
    assert verdict.compare([base], 3.28)[0]["cautions"] == ["runs of base share seeds (2 have 0): they are not independent"]


def test_three_runs_against_ten_are_warned_of(tmp_path):
    three, ten, five = (
        runs(tmp_path / str(n), [100 + i / 7 for i in range(n)], [3.27 + i / 1000 for i in range(n)]) for n in (3, 10, 5)
    )
    assert any("3 runs against 10: of equal means Welch's test would say p < 0.01 in up to 2.9%" in x
               for x in verdict.compare([three, ten], 3.28)[1]["cautions"])  # fmt: skip
    assert not any("Welch" in x for x in verdict.compare([five, ten], 3.28)[1]["cautions"])


def test_resumed_runs_and_copies_are_warned_of(tmp_path):
    a = runs(tmp_path / "a", TIMES)
    resumed = f"{ENVIRONMENT}\nresumed at step 4 from x.pt, with the same source\n{ENVIRONMENT}"
    b = runs(tmp_path / "b", TIMES[:2] + [90.0], environment=resumed)
    found = verdict.compare([a, b], 3.28)[1]["cautions"]
    assert found[0].startswith("3 runs of b went on from a checkpoint")
    c = runs(tmp_path / "c", [95.0, 96.0, 97.0], environment=resumed.replace("step 4 from", "step 50 from"))  # at its end
    assert not any("checkpoint" in caution for caution in verdict.compare([a, c], 3.28)[1]["cautions"])
    assert f"2 runs of b, such as {tmp_path / 'b' / '0.txt'}, have the times and losses of a run of a" in found


SHARDS = {  # of the runs compared with those of 'a_val_0.bin' 0000000a, 'a_train_0.bin' 0000000b; the shard that is named
    "a longer run": ("'a_val_0.bin' 0000000a, 'a_train_0.bin' 0000000b, 'a_train_1.bin' 0000000c", ""),
    "other names": ("'b_val_0.bin' 0000000a, 'b_train_0.bin' 0000000b", ""),
    "no word on them": ("", ""),
    "made again": ("'a_val_0.bin' 0000000c, 'a_train_0.bin' 0000000b", "a_val_0.bin"),
    "others of other names": ("'b_val_0.bin' 0000000c", "b_val_0.bin"),
    "trained on what validates the other": ("'a_val_0.bin' 0000000a, 'a_train_0.bin' 0000000a", "a_train_0.bin"),
    "in another order": ("'a_val_0.bin' 0000000a, 'a_train_0.bin' 0000000c, 'a_train_1.bin' 0000000b", "a_train_0.bin"),
}


@pytest.mark.parametrize("case", SHARDS)
def test_other_tokens_are_held_against_a_comparison(tmp_path, case):
    texts = ("'a_val_0.bin' 0000000a, 'a_train_0.bin' 0000000b", SHARDS[case][0])
    a, b = (runs(tmp_path / name, TIMES, environment=ENVIRONMENT.replace("SCRIPT", f"shards: {text}\nSCRIPT"))
            for name, text in zip("ab", texts, strict=True))  # fmt: skip
    told = [caution for caution in verdict.compare([a, b], 3.28)[1]["cautions"] if "other tokens" in caution]
    said = f"b read other tokens than a, in 1 shard such as {SHARDS[case][1]}: neither losses nor times compare"
    assert told == ([said] if SHARDS[case][1] else [])


def test_losses_of_other_validation_tokens_are_held_against_a_comparison(tmp_path):
    a, b, c = (runs(tmp_path / name, TIMES, environment=ENVIRONMENT.replace("lr=0.5", f"lr=0.5, {more}"))
               for name, more in (("a", "val_tokens=8"), ("b", "val_tokens=16"), ("c", "x=8")))  # fmt: skip
    cautions = [row["cautions"] for row in verdict.compare([a, b, c], 3.28)]
    assert "b was validated on 16 tokens, a on 8: losses do not compare" in cautions[1]
    assert not any("validated" in caution for caution in cautions[2])


def test_runs_that_multiplied_otherwise_are_held_against_their_mean(tmp_path):
    lines = "products: bf16 operands by AMX, fp32 by X, on AVX512", "products: no bf16 units, fp32 by oneDNN, on AVX2", "cpu: one"
    found = [runs(tmp_path / f"{i}", [80 + i], environment=ENVIRONMENT.replace("SCRIPT", f"{line}\nSCRIPT")).runs[0]
             for i, line in enumerate(lines)]  # fmt: skip
    for count, told in ((3, True), (1, False)):
        cautions = verdict.cautions(groups.Group("a", found[:count]))
        said = f"runs of a multiplied otherwise, as on CPUs of other kinds ({lines[0][10:]}; {lines[1][10:]})"
        assert (said in cautions) == told, cautions


def test_a_cpu_of_other_instructions_is_another_machine(tmp_path):
    """Both of one host's name, or none, and one CPU's: FASTER by 67%, p = 3e-16, of runs on AVX2 and on AVX-512."""
    by = lambda name, products: runs(tmp_path / name, TIMES, environment=ENVIRONMENT.replace("SCRIPT", f"products: {products}\nSCRIPT"))
    a, b = by("a", "bf16 operands by AVX512_BF16, fp32 by oneDNN, on AVX512"), by("b", "no bf16 units, fp32 by oneDNN, on AVX2")
    c, same = by("c", "no bf16 units, fp32 by oneDNN, on AVX512"), by("d", "bf16 operands by AVX512_BF16, fp32 by oneDNN, on AVX512")
    rows = verdict.compare([a, b, c, same], 3.28)
    differ = "different machines (CPU instructions AVX512 and AVX2)"
    assert [row["times_do_not_compare"] for row in rows[1:]] == [differ, "", ""]
    assert [row["verdict"].count("(Holm, 2 ideas)") for row in rows[1:]] == [0, 2, 2]  # times, also at equal loss
    assert [row["verdict"].count("(Holm, 3 ideas)") for row in rows[1:]] == [1, 1, 1]  # and the losses of all
    told = [any("multiplied otherwise than a (bf16" in caution for caution in row["cautions"]) for row in rows[1:]]
    assert told == [False, True, False]


def test_so_are_those_of_documents_cut_elsewhere(tmp_path):
    sizes = {"a": (256, 2), "b": (512, 2), "c": (512, 4), "d": (512, 0), "e": ("x", 2)}
    a, *others = (runs(tmp_path / name, TIMES, environment=ENVIRONMENT.replace("lr=0.5", f"val_batch_tokens={n}, micro_batches={m}"))
                  for name, (n, m) in sizes.items())  # fmt: skip
    told = [[x for x in row["cautions"] if "validated" in x] for row in verdict.compare([a, *others], 3.28)]
    said = "b was validated in micro-batches of 256 tokens, a of 128: documents are cut in other places, from which alone losses"
    assert told == [[], [f"{said} differ a little"], [], [], []]


def test_runs_that_failed_are_in_the_verdict(tmp_path):
    write_runs(tmp_path / "new", [90_000, 90_500], LOSSES[:2], steps=50)
    for i in range(2):
        (tmp_path / "new" / f"cut{i}.txt").write_bytes(make_log(lines=step_lines(4 + i, total=8)))
    (tmp_path / "new" / "copy.txt").write_bytes((tmp_path / "new" / "0.txt").read_bytes())
    (tmp_path / "new" / "nan.txt").write_bytes(make_log(lines=step_lines(8, loss=math.nan)))
    [sentence] = said(runs(tmp_path / "base", TIMES), groups.gather("new", str(tmp_path / "new")))
    assert sentence.startswith("new (2 of 6 logs; set aside: 2 cut short, 1 the same run, 1 crashed): FASTER")


# -----------------------------------------------------------------------------
# Numbers of runs


def test_an_open_verdict_tells_of_a_new_set(tmp_path):
    a, b = [100.0, 102.0, 101.0, 100.5, 101.8], [99.0, 101.5, 100.0, 100.0, 100.3]
    losses = [3.2795, 3.2776, 3.2788, 3.2807, 3.2784]
    [sentence] = said(runs(tmp_path / "a", a), runs(tmp_path / "b", b, losses))
    assert "more" not in sentence
    for needed, what in ((t_tests.new_set_different(a, b), " each"), (t_tests.new_set_below(losses, 3.28), "")):
        high = f"{needed.high:,}" if needed.high else "over 10,000"
        assert (f"a new set of about {needed.about}{what} would settle it with a chance of 80% "
                f"({needed.low} to {high} in 80% of such estimates)") in sentence  # fmt: skip


# -----------------------------------------------------------------------------
# Several ideas, pairs


def test_several_ideas_are_corrected_by_holm(tmp_path):
    base = runs(tmp_path / "base", TIMES)
    ideas = [
        runs(tmp_path / f"idea{i}", [time - cut + i * i / 50 for i, time in enumerate(TIMES)])
        for i, cut in enumerate((1.0, 2.2, 9.0))
    ]
    rows = verdict.compare([base, *ideas], 3.28)[1:]
    ps = [scipy_stats.ttest_ind(base.times, idea.times, equal_var=False).pvalue for idea in ideas]
    assert [row["time_p"] for row in rows] == pytest.approx(ps)
    expected = [ps[0], 2 * ps[1], 3 * ps[2]]
    assert [row["time_p_holm"] for row in rows] == pytest.approx(expected)
    assert ps[1] < t_tests.P < 2 * ps[1]  # shown alone, not shown as one of three
    assert f"p = {3 * ps[2]:.2g} (Holm, 3 ideas)" in rows[2]["verdict"] and "FASTER" in rows[2]["verdict"]
    assert "not shown to be faster or slower" in rows[1]["verdict"] and "FASTER" in said(base, ideas[1])[0]


def test_pairs_are_of_one_seed_and_tested_as_such(tmp_path):
    """A drift of the machine that is larger than the gain: in pairs it is none."""
    drift = [0.0, 3.0, 1.0, 5.0, 2.5]
    a = runs(tmp_path / "a", [100 + x for x in drift])
    b = runs(tmp_path / "b", [99.5 + x + i / 50 for i, x in enumerate(drift)], [loss - 0.001 for loss in LOSSES])
    b.runs.reverse()
    [sentence] = said(a, b, pairs=True)
    test = scipy_stats.ttest_rel(a.times, b.times[::-1])
    low, high = test.confidence_interval(0.95)
    assert f"FASTER by {np.subtract(a.times, b.times[::-1]).mean():.3f} s" in sentence
    assert f"95% interval {low:.3f} to {high:.3f} s, p = {test.pvalue:.2g}, in pairs" in sentence
    assert "not shown to be faster" in said(a, b)[0]
    del b.runs[0]
    rows = verdict.compare(verdict.in_pairs([a, b]), 3.28, pairs=True)
    assert rows[1]["pairs"] == 4 and not rows[1]["set_aside"] and not rows[1]["notes"]
    assert rows[0]["runs"] == 4 and rows[0]["set_aside"][0]["reason"] == "no partner with its seed"
    assert rows[0]["time_mean"] - rows[1]["time_mean"] == pytest.approx(-rows[1]["time_difference"])
    c = runs(tmp_path / "c", [99.0 + x for x in drift])
    rows = verdict.compare(verdict.in_pairs([a, b, c]), 3.28, pairs=True)  # each run of a has a partner in c
    assert [row["runs"] for row in rows] == [5, 4, 5] and not rows[0]["set_aside"]
    assert [row["notes"] for row in rows] == [[], ["1 run of a without a partner: not compared"], []]
    assert verdict.compare([b, a], 3.28, pairs=True)[1]["set_aside"][0]["reason"] == "no partner with its seed"
    for run in a.runs:
        run.settings["seed"] = "7"
    assert verdict.compare([a, b], 3.28, pairs=True)[1]["pairs"] == 4  # by file names then
    for run in (*a.runs, *b.runs):
        run.path = run.path.with_suffix("") / "log.txt"
    assert verdict.compare([a, b], 3.28, pairs=True)[1]["pairs"] == 4  # a folder for each
    for group in (a, b):  # on two machines, seeds twice; MACHINE/SCRIPT/seed.txt
        for i, run in enumerate(group.runs):
            run.path = tmp_path / f"m{i // 3}" / group.name / f"seed{i % 3}.txt"
    assert verdict.compare([a, b], 3.28, pairs=True)[1]["pairs"] == 4
    assert [[x.path.parts[-3::2] for x in group.runs] for group in verdict.in_pairs([a, b])] == [[
        ("m0", "seed0.txt"), ("m0", "seed1.txt"), ("m0", "seed2.txt"), ("m1", "seed0.txt")
    ]] * 2  # fmt: skip
    for run in a.runs:
        run.path = run.path.with_name(f"a{run.path.name}")
    with pytest.raises(groups.InputError, match="no two runs have the same file name"):
        said(a, b, pairs=True)


def test_pairs_may_lie_on_several_machines_if_each_lies_on_one(tmp_path):
    both = [[runs(tmp_path / f"{name}{i}", [time], environment=f"{smi_environment(driver)}\nSCRIPT S(seed={seed})").runs[0]
             for i, (driver, time, seed) in enumerate((("1.1", start, 0), ("2.2", start + 8, 1), ("1.1", start + 0.1, 2)))]
            for name, start in (("a", 100.0), ("b", 99.0))]  # fmt: skip
    a, b = (groups.Group(name, found) for name, found in zip("ab", both, strict=True))
    for i, run in enumerate(a.runs + b.runs):
        run.settings["seed"] = str(i % 3)
    assert "the runs of a come from different machines" in said(a, b)[0]
    assert "faster by 1.000 s" in said(a, b, pairs=True)[0]
    b.runs[0].environment = b.runs[0].environment.replace("1.1", "2.2")
    assert "the runs of a pair come from different machines (driver 1.1 and 2.2" in said(a, b, pairs=True)[0]


def test_sources_that_logs_do_not_hold_are_unknown(tmp_path):
    import changes
    from runlog import parse_log

    bare = groups.Group("bare", [parse_log(step_lines().encode())])
    whole = groups.Group("whole", [parse_log(make_log())])
    assert changes.changed(bare, bare).startswith("bare changes: its sources are unknown: the logs of bare and bare hold none")
    assert changes.changed(whole, bare).startswith("bare changes: its sources are unknown: the logs of bare hold none")
    assert changes.changed(whole, whole) == "whole changes: nothing: the same sources, settings and environment"
    comment = groups.Group("comment", [parse_log(make_log(SOURCES | {"train_gpt.py": b"import torch\nx = 1  # one\n"}))])
    assert changes.changed(whole, comment) == "comment changes: train_gpt.py +1 −1, in comments and the like alone"
