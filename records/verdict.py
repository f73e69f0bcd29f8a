"""What is said of a comparison: all its figures, and each verdict as sentences that its figures prove."""

import dataclasses
import math
import re
from collections import Counter
from datetime import timedelta

import t_tests
from changes import other_tokens
from curves import EqualLoss, equal_loss, paces
from groups import Group, InputError, figures, machine_told, on_several_machines, plural
from runlog import RunLog, resumed_at, resumed_with_changes, started
from t_tests import CONFIDENCE, LEAST_RUNS, MOST_RUNS, POWER, RANGE, Difference, Needed, P, mean, sigma

FAR_APART = timedelta(days=1)  # runs of one machine, if nothing but their dates speaks against it


# -----------------------------------------------------------------------------
# Figures


def compare(groups: list[Group], target: float, pairs: bool = False) -> list[dict]:
    """All figures of the groups, the first being the baseline, each with its verdict. Times in seconds.

    pairs: each run with its partner in the baseline, of groups that in_pairs gives. p-values of several ideas are corrected by
    Holm's method: those of times, of losses and of times at equal loss each as one family. Raises InputError for runs that make
    no pairs.
    """
    rows = [own_figures(groups[0], target)]
    for group in groups[1:]:
        baseline, group = paired_runs(groups[0], group) if pairs else (groups[0], group)
        rows.append(own_figures(group, target) | differences(baseline, group, pairs))
        if alone := len(groups[0].runs) - len(baseline.runs):
            rows[-1]["notes"] = [*group.notes, f"{plural(alone, 'run')} of {baseline.name} without a partner: not compared"]
    for what in ("time", "loss", "equal"):
        each = [row[f"{what}_p"] for row in rows[1:]]
        for row, p in zip(rows[1:], t_tests.holm(each), strict=True):
            row |= {f"{what}_p_holm": p, f"{what}_tests": sum(not math.isnan(x) for x in each)}
    for row in rows:
        row["title"], row["sentences"] = title(row), sentences(row, rows[0], target, len(rows) - 1)
        row["verdict"] = f"{row['title']}: {'; '.join(row['sentences'])}."
    return rows


def own_figures(group: Group, target: float) -> dict:
    """Those of one group."""
    mixed = on_several_machines(group.runs)
    no_mean = mixed or len(group.times) < len(group.runs)  # of times
    return {
        "name": group.name,
        "runs": len(group.runs),
        "steps": group.runs[0].validations[-1][0],
        "time_mean": math.nan if no_mean else mean(group.times),
        "time_sigma": math.nan if no_mean else sigma(group.times),
        "loss_mean": mean(group.losses),
        "loss_sigma": sigma(group.losses),
        "loss_p_below_target": t_tests.p_below(group.losses, target),
        "below_needs": t_tests.new_set_below(group.losses, target),
        "losses": group.losses,
        "times": [run.seconds for run in group.runs],
        "seeds": [run.settings.get("seed") for run in group.runs],
        "logs": [str(run.path) for run in group.runs],
        "set_aside": [{"log": str(log.path), "reason": reason} for log, reason in group.aside],
        "problems": [{"log": str(log.path), "problem": problem} for log in group.logs for problem in log.problems],
        "notes": group.notes,
        "several_machines": mixed,
        "cautions": cautions(group),
    }


def differences(baseline: Group, group: Group, pairs: bool) -> dict:
    """The figures of a group against the baseline."""
    test, needs = (t_tests.paired, t_tests.new_set_paired) if pairs else (t_tests.different, t_tests.new_set_different)
    why_not = why_times_do_not_compare(baseline, group, pairs)
    time = Difference(math.nan) if why_not else test(baseline.times, group.times)
    loss = test(baseline.losses, group.losses)
    equal = equal_loss(baseline, group, not why_not, pairs)
    return {
        "test": "paired t-test" if pairs else "Welch's t-test",
        "pairs": len(group.runs) if pairs else None,
        "fewest": min(len(baseline.runs), len(group.runs)),
        **{f"{what}_{name.replace('mean', 'difference')}": value
           for what, found in (("time", time), ("loss", loss), ("equal", equal and equal.time or Difference(math.nan)))
           for name, value in found._asdict().items()},
        "baseline_time_mean": mean(baseline.times),
        "times_do_not_compare": why_not,
        "where": where(baseline, group, pairs),
        "time_needs": None if why_not else needs(baseline.times, group.times),
        "true_error": math.nan if pairs or min(len(baseline.runs), len(group.runs)) < 2 else
                      t_tests.true_error(len(baseline.runs), len(group.runs)),
        "equal_loss": equal,
        "paces": [] if why_not else paces(baseline, group, pairs),
        "cautions": cautions(group) + cautions_of_both(baseline, group, pairs, why_not),
    }  # fmt: skip


def in_pairs(groups: list[Group]) -> list[Group]:
    """The groups with the runs that have a partner, the others set aside: what is shown or drawn of them beside figures of pairs.
    Of the first, the baseline, those with a partner in any other. Raises InputError if a group has none."""
    baseline, *others = groups
    pairs = [paired_runs(baseline, group) for group in others]
    with_partners = [run for before, _ in pairs for run in before.runs]
    kept = [run for run in baseline.runs if not pairs or any(run is other for other in with_partners)]
    alone = [(run, reason) for before, _ in pairs[:1] for run, reason in before.aside[len(baseline.aside) :]
             if all(run is not other for other in kept)]  # fmt: skip
    return [dataclasses.replace(baseline, runs=kept, aside=baseline.aside + alone), *(after for _, after in pairs)]


def paired_runs(a: Group, b: Group) -> tuple[Group, Group]:
    """The groups with the runs that have a partner, run i of each being a pair; the others set aside.

    Partners have the same seed, where the logs tell seeds and no two of a group are the same, else the same file name, with as
    many folders before it as tell those of a group apart, but for folders that all of a group lie in. Those that in_pairs has
    found stay. Raises InputError if there are none.
    """
    if b.partners:
        return dataclasses.replace(a, runs=b.partners), b

    def by_seed(group: Group) -> dict[str, RunLog]:
        return {run.settings["seed"]: run for run in group.runs if "seed" in run.settings}

    def by_path(group: Group, count: int) -> dict[tuple[str, ...], RunLog]:
        return {tuple(run.path.parts[i] for i in tells if -i <= min(count, len(run.path.parts))): run for run in group.runs}

    def differs(group: Group, i: int) -> bool:
        return len({run.path.parts[i] for run in group.runs if len(run.path.parts) >= -i}) > 1

    tells = [*(i for i in range(-8, -1) if differs(a, i) or differs(b, i)), -1]  # of a path: the name, and some folders above it
    found, what = [by_seed(group) for group in (a, b)], "seed"
    if any(len(runs) < len(group.runs) for runs, group in zip(found, (a, b), strict=True)):
        depth = next((n for n in range(1, 9) if all(len(by_path(group, n)) == len(group.runs) for group in (a, b))), 1)
        found, what = [by_path(group, depth) for group in (a, b)], "file name"
    shared = [key for key in found[0] if key in found[1]]
    if not shared:
        raise InputError(f"{a.name} and {b.name}: no two runs have the same {what}, so there are no pairs: leave out --pairs")
    chosen = []
    for group, runs in zip((a, b), found, strict=True):
        of_pairs = [runs[key] for key in shared]
        alone = [(run, f"no partner with its {what}") for run in group.runs if all(run is not other for other in of_pairs)]
        chosen.append(dataclasses.replace(group, runs=of_pairs, aside=group.aside + alone))
    return chosen[0], dataclasses.replace(chosen[1], partners=chosen[0].runs)


def why_times_do_not_compare(a: Group, b: Group, pairs: bool) -> str:
    """Why not; empty if they do, as far as the logs tell."""
    if not all(run.seconds is not None for run in a.runs + b.runs):
        return "some logs lack times" if a.times or b.times else "the logs lack times"
    if pairs:
        found = [on_several_machines([*pair]) for pair in zip(a.runs, b.runs, strict=True)]
        differ = next(filter(None, found), [])
        return f"the runs of a pair come from different machines ({', '.join(differ)})" if differ else ""
    for group in (a, b):
        if differ := on_several_machines(group.runs):
            return f"the runs of {group.name} come from different machines ({', '.join(differ)})"
    differ = on_several_machines(a.runs + b.runs)
    return f"different machines ({', '.join(differ)})" if differ else ""


def where(a: Group, b: Group, pairs: bool) -> str:
    """On what machines times that compare were taken; "" if not all logs tell."""
    return ("each pair on one machine" if pairs else "on one machine") if machine_told(a.runs + b.runs) else ""


# -----------------------------------------------------------------------------
# Cautions: what makes a figure worth less than it looks


def cautions(group: Group) -> list[str]:
    found = []
    seeds = Counter(seed for run in group.runs if (seed := run.settings.get("seed")) is not None)
    repeated = [seed for seed, count in seeds.items() if count > 1]
    if len(seeds) == 1 and repeated:
        found.append(f"all {len(group.runs)} runs of {group.name} have seed {repeated[0]}: they share their first weights, and "
                     f"neither σ nor p tells of other seeds")  # fmt: skip
    elif repeated:
        found.append(f"runs of {group.name} share seeds ({', '.join(f'{seeds[seed]} have {seed}' for seed in repeated)}): "
                     f"they are not independent")  # fmt: skip
    if len(products := {run.facts.get("products") for run in group.runs} - {None}) > 1:
        found.append(f"runs of {group.name} multiplied otherwise, as on CPUs of other kinds ({'; '.join(sorted(products))})")
    resumed = [run for run in group.runs if any(step < (run.total or math.inf) for step in resumed_at(run))]  # not after --at
    if resumed:
        found.append(f"{plural(len(resumed), 'run')} of {group.name} went on from a checkpoint: the first steps after it "
                     f"count in its time")  # fmt: skip
    if changed := [run for run in resumed if resumed_with_changes(run)]:
        found.append(f"{plural(len(changed), 'run')} of {group.name} went on with changed source: the first steps are not "
                     f"its own")  # fmt: skip
    return found


def cautions_of_both(a: Group, b: Group, pairs: bool, why_not: str) -> list[str]:
    found = []
    if shards := other_tokens(a.runs[0], b.runs[0]):
        found.append(f"{b.name} read other tokens than {a.name}, in {plural(len(shards), 'shard')} such as {shards[0]}: "
                     f"neither losses nor times compare")  # fmt: skip
    before, after = (group.runs[0].settings.get("val_tokens") for group in (a, b))
    if before != after and None not in (before, after):
        found.append(f"{b.name} was validated on {after} tokens, {a.name} on {before}: losses do not compare")
    before, after = (validation_micro_batch(group.runs[0]) for group in (a, b))
    if before != after and None not in (before, after):
        found.append(f"{b.name} was validated in micro-batches of {after} tokens, {a.name} of {before}: documents are cut in "
                     f"other places, from which alone losses differ a little")  # fmt: skip
    n_a, n_b = len(a.runs), len(b.runs)
    if min(n_a, n_b) > 1 and not pairs and (error := t_tests.true_error(n_a, n_b)) > t_tests.UNSAFE * P:
        found.append(f"{n_a} runs against {n_b}: of equal means Welch's test would say p < {P:g} in up to {error:.1%} of "
                     f"comparisons; run as many of each")  # fmt: skip
    contents = {figures(run) for run in a.runs}
    copies = [run for run in b.runs if run.times and figures(run) in contents]
    if copies:
        found.append(f"{plural(len(copies), 'run')} of {b.name}, such as {copies[0].path}, have the times and losses of a "
                     f"run of {a.name}")  # fmt: skip
    products = [{run.facts["products"] for run in group.runs if "products" in run.facts} for group in (a, b)]
    if all(products) and products[0] != products[1] and not why_not:
        ways = " against ".join("; ".join(sorted(each)) for each in products)
        found.append(f"{b.name} multiplied otherwise than {a.name} ({ways}): times compare only if its source wants that")
    if why_not:
        return found
    dates = [sorted(date for run in group.runs if (date := started(run))) for group in (a, b)]
    if not machine_told(a.runs + b.runs):
        found.append("the logs do not tell their machines: times compare only if it was one")
    elif all(dates) and max(dates[1][0] - dates[0][-1], dates[0][0] - dates[1][-1]) > FAR_APART:
        days = max(dates[1][0] - dates[0][-1], dates[0][0] - dates[1][-1]).days
        found.append(f"{b.name} and {a.name} ran {plural(days, 'day')} apart ({dates[1][0]:%Y-%m-%d}, {dates[0][0]:%Y-%m-%d}): "
                     f"times compare only if it was the same machine, as it was")  # fmt: skip
    return found


def validation_micro_batch(run: RunLog) -> int | None:
    """Its tokens, over which no document goes on; None: the log does not tell."""
    try:
        return int(run.settings["val_batch_tokens"]) // int(run.settings["micro_batches"])
    except (KeyError, ValueError, ZeroDivisionError):
        return None


# -----------------------------------------------------------------------------
# Sentences


def title(row: dict) -> str:
    """The group's name; with runs set aside, how many and why."""
    if not (aside := row["set_aside"]):
        return row["name"]
    reasons = Counter(re.split(r" at step | as |: ", item["reason"])[0] for item in aside)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return f"{row['name']} ({row['runs']} of {plural(row['runs'] + len(aside), 'log')}; set aside: {why})"


def sentences(row: dict, baseline: dict, target: float, ideas: int) -> list[str]:
    """Time and loss against the baseline, time at equal loss, loss against the target."""
    said = []
    if row is not baseline:
        said = [about_time(row, ideas), about_loss(row)]
        said += filter(None, [about_equal_loss(row)])
    return [*said, about_target(row, target)]


def about_time(row: dict, ideas: int) -> str:
    if row["times_do_not_compare"]:
        return f"times not comparable: {row['times_do_not_compare']}"
    share = f" ({abs(row['time_difference']) / row['baseline_time_mean']:.2%})" if row["baseline_time_mean"] > 0 else ""
    said = tested(row, "time", ("faster", "slower", "be faster or slower"), 3, " s", share)
    return f"{said}; {enough(row['time_needs'], row, ideas)}" if said.startswith("not shown") else said


def about_loss(row: dict) -> str:
    return tested(row, "loss", ("loss lower", "loss higher", "have another loss"), 5, "", "")


def tested(row: dict, what: str, words: tuple[str, str, str], digits: int, unit: str, share: str) -> str:
    """A difference and its test. words: for below 0, for above, for what is not shown; share: the difference in per cent."""
    difference, p, tests = row[f"{what}_difference"], row[f"{what}_p_holm"], row[f"{what}_tests"]
    word, size = words[difference > 0], f"by {abs(difference):.{digits}f}{unit}{share}"
    if math.isnan(p):
        alike = "all pairs differ by as much" if row["pairs"] else "the runs do not differ at all (one seed?)"
        why = "it takes two runs of each at least" if row["fewest"] < 2 else alike
        same = f"the same {'time' if what == 'equal' else what}"
        return f"{f'{word} {size}' if difference else same}, but no test: {why}"
    tail = f"p = {figure(p)}{f' (Holm, {tests} ideas)' if tests > 1 else ''}{', in pairs' if row['pairs'] else ''}"
    low, high = row[f"{what}_low"], row[f"{what}_high"]
    if p < P:
        low, high = sorted((abs(low), abs(high)))
        loud = re.sub("faster|slower|lower|higher", lambda match: match[0].upper(), word)
        return f"{loud} {size}, {CONFIDENCE:.0%} interval {low:.{digits}f} to {high:.{digits}f}{unit}, {tail}"
    interval = f"{CONFIDENCE:.0%} interval {low:+.{digits}f} to {high:+.{digits}f}{unit}"
    return f"not shown to {words[2]}: {difference:+.{digits}f}{unit}, {interval}, {tail}"


def about_equal_loss(row: dict) -> str:
    """What the difference in loss is worth in steps and seconds, and the times at equal loss; "" if it is not defined."""
    equal: EqualLoss | None = row["equal_loss"]
    if equal is None:
        return ""
    seconds = "" if math.isnan(equal.pace) else f", {abs(equal.seconds):.3f} s at {1000 * equal.pace:.2f} ms a step"
    worth = "is worth" if equal.steps >= 0 else "costs"
    said = (f"at equal loss: its loss {worth} {abs(equal.steps):.1f} steps{seconds} (slope {equal.slope:.3g} a step over "
            f"the last {equal.over})")  # fmt: skip
    if equal.far:
        return f"{said}: no test, as that is too far along a straight line"
    tests = tested(row, "equal", ("faster", "slower", "be faster or slower"), 3, " s", "") if equal.time else ""
    return f"{said}: {tests}" if tests else said


def about_target(row: dict, target: float) -> str:
    p, below = row["loss_p_below_target"], row["loss_mean"] < target
    if math.isnan(p):
        lack = "it takes two runs at least" if row["runs"] < 2 else "the runs do not differ at all (one seed?)"
        return f"mean loss {'below' if below else 'not below'} {target:g}, but no test: {lack}"
    if p < P:
        return f"mean loss BELOW {target:g}, p = {figure(p)}"
    if p > 1 - P:
        return f"mean loss ABOVE {target:g}, p {f'= {figure(1 - p)}' if p < 1 - 1e-12 else '< 1e-12'}"
    if not below:
        return f"mean loss not below {target:g}: no number of runs would help at the present mean"
    return f"mean loss not shown to be below {target:g}, p = {figure(p)}; {enough(row['below_needs'], row, 0)}"


def enough(needs: Needed | None, row: dict, ideas: int) -> str:
    """How many runs of a new set would settle it. ideas: compared with the baseline; 0: it is a group alone."""
    if row["runs"] < LEAST_RUNS or ideas and row["fewest"] < LEAST_RUNS:
        return f"fewer than {LEAST_RUNS} runs are too few to say how many would settle it"
    if needs is None or needs.about is None:
        return f"over {MOST_RUNS:,} runs would not settle it"
    what = (" pairs" if row.get("pairs") else " each") if ideas else ""
    alone = " of this idea alone" if ideas > 1 else ""
    high = f"{needs.high:,}" if needs.high else f"over {MOST_RUNS:,}"
    return (
        f"a new set of about {needs.about:,}{what}{alone} would settle it with a chance of {POWER:.0%} "
        f"({needs.low:,} to {high} in {RANGE:.0%} of such estimates)"
    )


P_FORM = ".2g"


def figure(value: float | None, form: str = P_FORM) -> str:
    """A number for people; p-values by default, with as many digits as show on which side of P they are. Nothing for what is
    undefined."""
    if value is None or math.isnan(value):
        return ""
    texts = (f"{value:{form}}" for form in ([".2g", ".3g", ".4g", ".6g", ".17g"] if form == P_FORM else [form]))
    return next(text for text in texts if form != P_FORM or (float(text) < t_tests.P) == (value < t_tests.P))
