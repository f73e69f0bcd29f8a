"""A comparison's figures, its verdicts as sentences that the figures prove, and its cautions."""

import math
from collections import Counter
from dataclasses import replace

import t_tests
from equal_loss import EqualLoss, equal_loss
from groups import Group, InputError, different_machines, machine_known, plural
from runlog import RunLog
from t_tests import CONFIDENCE, LEAST_RUNS, MOST_RUNS, POWER, RANGE, Difference, Needed, P
from t_tests import mean, sigma


def compare(groups: list[Group], target: float, pairs: bool = False) -> list[dict]:
    """The figures of the groups, the first being the baseline, and their verdicts. Seconds, nats.

    pairs: run i of each group is a pair with run i of the baseline (see in_pairs). p-values of
    several ideas are corrected by Holm's method: times, losses, times at equal loss apart.
    """
    rows = [own_figures(groups[0], target)]
    for group in groups[1:]:
        rows.append(own_figures(group, target) | differences(groups[0], group, pairs))
    for what in ("time", "loss", "equal"):
        ps = [row[what].p for row in rows[1:]]
        for row, p in zip(rows[1:], t_tests.holm(ps)):
            row[f"{what}_p_holm"] = p
            row[f"{what}_tests"] = sum(not math.isnan(x) for x in ps)
    for row in rows:
        row["sentences"] = sentences(row, target)
    return rows


def own_figures(group: Group, target: float) -> dict:
    mixed = different_machines(group.runs)  # such times have no mean
    below = mean(group.losses) - target
    error = sigma(group.losses) / math.sqrt(len(group.runs))
    p_below = t_tests.p_below(group.losses, target)
    found = Difference(below, error, len(group.runs) - 1, p_below)
    return {
        "name": group.name,
        "runs": len(group.runs),
        "steps": group.runs[0].steps,
        "time_mean": math.nan if mixed else mean(group.times),
        "time_sigma": math.nan if mixed else sigma(group.times),
        "loss_mean": mean(group.losses),
        "loss_sigma": sigma(group.losses),
        "p_below_target": p_below,
        "below_needs": t_tests.needed(found, [sigma(group.losses)], P),
        "losses": group.losses,
        "times": group.times,
        "seeds": [run.settings.get("seed") for run in group.runs],
        "logs": [str(run.path) for run in group.runs],
        "set_aside": [f"{log.path}: {why}" for log, why in group.aside],
        "problems": [f"{log.path}: {why}" for log in group.logs for why in log.problems],
        "several_machines": mixed,
        "cautions": cautions(group),
    }


def differences(baseline: Group, group: Group, pairs: bool) -> dict:
    """The figures of a group against the baseline."""
    test = t_tests.paired if pairs else t_tests.different
    why_not = why_times_do_not_compare(baseline, group, pairs)
    time = Difference(math.nan) if why_not else test(baseline.times, group.times)
    equal = equal_loss(baseline, group, not why_not, pairs)
    spreads = [sigma(baseline.times), sigma(group.times)]
    if pairs:
        spreads = [sigma(t_tests.differences_of_pairs(baseline.times, group.times))]
    return {
        "pairs": pairs,
        "time": time,
        "loss": test(baseline.losses, group.losses),
        "equal": equal and equal.time or Difference(math.nan),
        "equal_loss": equal,
        "baseline_runs": len(baseline.runs),
        "baseline_time_mean": mean(baseline.times),
        "times_do_not_compare": why_not,
        "machines_known": machine_known(baseline.runs + group.runs),
        "time_needs": t_tests.needed(time, spreads),
        "cautions": cautions(group) + cautions_of_both(baseline, group, pairs, why_not),
    }


def in_pairs(groups: list[Group]) -> list[Group]:
    """The groups, each with the runs of the seeds in all of them, in one order; others set aside.

    Raises InputError if a log has no seed, if two runs of a group share one, or if no seed is in
    all groups.
    """
    by_seed: list[dict[str, RunLog]] = []
    for group in groups:
        seeds = [run.settings.get("seed") for run in group.runs]
        if None in seeds or len({*seeds}) < len(seeds):
            raise InputError(f"{group.name}: pairs need logs with seeds, each seed once")
        by_seed.append(dict(zip(seeds, group.runs)))
    shared = [seed for seed in by_seed[0] if all(seed in runs for runs in by_seed)]
    if not shared:
        raise InputError("no seed is in all groups, so there are no pairs: leave out --pairs")
    paired = []
    for group, runs in zip(groups, by_seed):
        single = [(runs[seed], "no partner with its seed") for seed in runs if seed not in shared]
        kept = [runs[seed] for seed in shared]
        paired.append(replace(group, runs=kept, aside=group.aside + single))
    return paired


def why_times_do_not_compare(a: Group, b: Group, pairs: bool) -> str:
    """The reason; empty if they compare, as far as the logs say."""
    # In a pair only the two runs must share a machine: each pair may have its own.
    together = zip(a.runs, b.runs, strict=True) if pairs else [a.runs + b.runs]
    for runs in together:
        if differ := different_machines([*runs]):
            return f"different machines ({', '.join(differ)})"
    return ""


# ----------------------------------------------------------------------------------------------
# Cautions: what makes a figure worth less than it looks


def cautions(group: Group) -> list[str]:
    found = []
    seeds = Counter(run.settings["seed"] for run in group.runs if "seed" in run.settings)
    if repeated := [seed for seed, count in seeds.items() if count > 1]:
        shared = f"runs of {group.name} share seeds ({', '.join(repeated)})"
        found.append(f"{shared}: not independent, so σ and p say nothing about other seeds")
    # A run resumed at its last step trained nothing since.
    resumed = [run for run in group.runs if any(step < run.total for step in run.resumed_at)]
    if resumed:
        how = ", with changed source" if any(run.source_changes for run in resumed) else ""
        found.append(f"{plural(len(resumed), 'run')} of {group.name} resumed{how}")
    return found


def cautions_of_both(a: Group, b: Group, pairs: bool, why_not: str) -> list[str]:
    found = []
    if shards := other_tokens(a.runs[0], b.runs[0]):
        found.append(f"{b.name} read other tokens than {a.name}, as in {shards[0]}")
    for name in ("val_tokens", "val_batch_tokens", "micro_batches"):
        before, after = (group.runs[0].settings.get(name) for group in (a, b))
        if before != after and None not in (before, after):
            found.append(f"{b.name} has --{name}={after}, was {before}: losses may not compare")
    fewest, most = sorted((len(a.runs), len(b.runs)))
    if not pairs and fewest < most and (fewest < LEAST_RUNS or most > 2 * fewest):
        found.append(f"{len(a.runs)} runs against {len(b.runs)}: p may be too small")
    if not why_not and not machine_known(a.runs + b.runs):
        found.append("the logs do not name their machines: times compare only if it was one")
    return found


def other_tokens(a: RunLog, b: RunLog) -> list[str]:
    """Shards of b in whose place a read other tokens. One run may have read more shards."""
    found = []
    for split in ("_train_", "_val_"):
        before, after = ([x for x in sorted(log.shards) if split in x] for log in (a, b))
        found += [new for old, new in zip(before, after) if a.shards[old] != b.shards[new]]
    return found


# ----------------------------------------------------------------------------------------------
# Sentences


def sentences(row: dict, target: float) -> list[str]:
    """Time and loss against the baseline, time at equal loss, loss against the target."""
    if "time" not in row:
        return [about_target(row, target)]
    said = [about_time(row), f"loss {tested(row, 'loss', ('lower', 'higher'), 5)}"]
    if row["equal_loss"]:
        said.append(about_equal_loss(row, row["equal_loss"]))
    return [*said, about_target(row, target)]


def about_time(row: dict) -> str:
    if row["times_do_not_compare"]:
        return f"times not comparable: {row['times_do_not_compare']}"
    share = abs(row["time"].mean) / row["baseline_time_mean"]
    said = tested(row, "time", ("faster", "slower"), 3, " s", f" ({share:.2%})")
    runs = min(row["runs"], row["baseline_runs"])
    more = enough(row["time_needs"], runs, "pairs" if row["pairs"] else "runs of each")
    return f"{said}; {more}" if said.startswith("not shown") else said


def tested(row: dict, what: str, words: tuple[str, str], digits: int, unit="", share="") -> str:
    """A difference and its test. words: for below 0, for above 0; share: in per cent."""
    found: Difference = row[what]
    p, tests = row[f"{what}_p_holm"], row[f"{what}_tests"]
    word = words[found.mean > 0]
    if math.isnan(p):
        few = min(row["runs"], row["baseline_runs"]) < 2
        why = "that takes two runs of each" if few else "there is no variation between the runs"
        return f"{word} by {abs(found.mean):.{digits}f}{unit}{share}, not tested: {why}"
    tail = f"p = {figure(p)}"
    tail += f" (Holm, {tests} ideas)" if tests > 1 else ""
    tail += ", in pairs" if row["pairs"] else ""
    ends = f"{found.low:+.{digits}f} to {found.high:+.{digits}f}{unit}"
    interval = f"{CONFIDENCE:.0%} interval {ends}"
    if p < P:
        return f"{word.upper()} by {abs(found.mean):.{digits}f}{unit}{share}, {interval}, {tail}"
    either = " or ".join(words)
    return f"not shown to be {either}: {found.mean:+.{digits}f}{unit}, {interval}, {tail}"


def about_equal_loss(row: dict, equal: EqualLoss) -> str:
    """What the difference in loss is worth in steps and seconds, and the times at equal loss."""
    verb = "is worth" if equal.steps >= 0 else "costs"
    seconds = abs(equal.steps * equal.pace)
    said = f"at equal loss: its loss {verb} {abs(equal.steps):.1f} steps, {seconds:.3f} s at "
    said += f"{1000 * equal.pace:.2f} ms a step "
    said += f"(slope {equal.slope:.3g} a step over the last {equal.over})"
    if equal.far:
        return f"{said}: not tested, too far along a straight line"
    if not equal.time:
        return said
    return f"{said}: {tested(row, 'equal', ('faster', 'slower'), 3, ' s')}"


def about_target(row: dict, target: float) -> str:
    p, below = row["p_below_target"], row["loss_mean"] < target
    if math.isnan(p):
        why = "that takes two runs" if row["runs"] < 2 else "there is no variation between the runs"
        return f"mean loss {'below' if below else 'not below'} {target:g}, not tested: {why}"
    if p < P:
        return f"mean loss BELOW {target:g}, p = {figure(p)}"
    if p > 1 - P:
        return f"mean loss ABOVE {target:g}, p = {figure(1 - p)}"
    if not below:
        return f"mean loss not below {target:g}"
    more = enough(row["below_needs"], row["runs"], "runs")
    return f"mean loss not shown to be below {target:g}, p = {figure(p)}; {more}"


def enough(needs: Needed | None, runs: int, what: str) -> str:
    """How many runs of a new set would settle it. runs: the present number, at least, of each."""
    if runs < LEAST_RUNS or needs is None:
        return f"fewer than {LEAST_RUNS} runs are too few to say how many would settle it"
    if needs.about is None:
        return f"{MOST_RUNS:,} {what} would not settle it"
    high = f"{needs.high:,}" if needs.high else f"over {MOST_RUNS:,}"
    within = f"({needs.low:,} to {high} within its {RANGE:.0%} interval)"
    settled = f"a new set of about {needs.about:,} {what} would settle it"
    return f"{settled} with a chance of {POWER:.0%} {within}"


def figure(value: float, form: str = "") -> str:
    """A number for people, "" for nan; without a form a p-value."""
    if math.isnan(value):
        return ""
    if form:
        return f"{value:{form}}"
    # As many digits as keep it on its side of P: 0.00996 is not shown as 0.01.
    texts = (f"{value:{form}}" for form in (".2g", ".3g", ".4g", ".17g"))
    return next(text for text in texts if (float(text) < P) == (value < P))
