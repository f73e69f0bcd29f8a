"""Pictures of a comparison (compare.py --plot) and of a record (history.py --picture)."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

import t_tests
import verdict
from groups import Group, plural
from runlog import RunLog, shown
from t_tests import CONFIDENCE

matplotlib.use("agg")  # draws without a display

BINS = 120  # step times are averaged: single ones are noisy, and rounded to milliseconds
COLOURS = ("#4c5a67", "#d1495b", "#00798c", "#edae49", "#6a4c93", "#66a182")
LONGEST = 30  # characters that a name may have


def draw(groups: list[Group], target: float, path: Path | str, pairs: bool = False) -> None:
    """An image of the groups, the first being the baseline.

    Above: losses against step and time, step times. Below, a line for each group: final losses
    and times, and their differences from the baseline with the intervals of the verdict's tests.
    """
    rows = verdict.compare(groups, target, pairs)
    below = "ddeeffgg" if len(groups) > 1 else "ddddffff"
    heights = (4.2, 1.3 + 0.34 * len(groups))
    figure = Figure(figsize=(14, sum(heights) + 0.5), dpi=110, layout="constrained")
    panels = figure.subplot_mosaic([[*"aaabbbcc"], [*below]], height_ratios=heights)
    validations(panels["a"], groups, target, by_time=False)
    panels["a"].set_title("validation loss against step")
    validations(panels["b"], groups, target, by_time=True)
    panels["b"].set(title="validation loss against time", ylabel="")
    step_times(panels["c"], groups)
    finals(panels["d"], [group.losses for group in groups], "final loss")
    panels["d"].axvline(target, color="black", linewidth=0.8, linestyle=":")
    times = [[] if row["several_machines"] else row["times"] for row in rows]
    finals(panels["f"], times, "final time, s")
    if len(groups) > 1:
        differences(panels["e"], rows, "loss", "Δ loss")
        differences(panels["g"], rows, "time", "Δ time, s")
    for name in {*below}:
        labels = [label(group.name) if name == "d" else "" for group in groups]
        panels[name].set_yticks(range(len(groups)), labels, fontsize=9)
        panels[name].set_ylim(len(groups) - 0.5, -0.5)
        panels[name].tick_params(axis="x", labelsize=8)
        panels[name].locator_params(axis="x", nbins=5)
    save(figure, groups, path)


def draw_loss(groups: list[Group], target: float, path: Path | str) -> None:
    """An image with one panel: validation loss against training time."""
    figure = Figure(figsize=(7.2, 3.6), dpi=110, layout="constrained")
    validations(figure.subplots(), groups, target, by_time=True)
    save(figure, groups, path)


def save(figure: Figure, groups: list[Group], path: Path | str) -> None:
    """With a legend above the panels, a light grid and no frames."""
    handles = [Line2D([], [], linewidth=2, color=colour(i)) for i in range(len(groups))]
    labels = [f"{label(group.name)} ({plural(len(group.runs), 'run')})" for group in groups]
    columns = max(1, min(len(groups), int(figure.get_figwidth() / 3.4)))
    place = {"loc": "outside upper center", "ncols": columns}
    figure.legend(handles, labels, frameon=False, fontsize=9, **place)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.title.set_fontsize(10)
    figure.savefig(path)


def label(name: str) -> str:
    """A name that fits, its $ escaped: matplotlib would begin a formula."""
    name = shown(name)
    return (name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}").replace("$", r"\$")


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def note(axes, text: str, y: float) -> None:
    """Grey text in the middle of a panel, at height y in its data."""
    place = {"xycoords": ("axes fraction", "data"), "ha": "center", "va": "center"}
    axes.annotate(text, (0.5, y), fontsize=8, color="#777777", **place)


# ----------------------------------------------------------------------------------------------
# Curves


def validations(axes, groups: list[Group], target: float, by_time: bool) -> None:
    """Every run's validation losses. The first eighth of training does not set the scale."""
    seen = [target]
    for i, group in enumerate(groups):
        for run in group.runs:
            losses = [loss for _, loss, _ in run.validations]
            x = [ms / 1000 if by_time else step for step, _, ms in run.validations]
            style = {"linewidth": 1.1, "marker": ".", "markersize": 4, "color": colour(i)}
            axes.plot(x, losses, alpha=0.7, **style)
            seen += [loss for step, loss, _ in run.validations if step >= run.steps / 8]
    axes.axhline(target, color="black", linewidth=0.8, linestyle=":")
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 8}
    axes.annotate(f"target {target:g}", (0, target), (4, 3), **place)
    margin = max(seen) - min(seen) or 1
    axes.set_ylim(min(seen) - 0.05 * margin, max(seen) + 0.1 * margin)
    axes.set_xlim(left=0)
    axes.set(xlabel="training time, s" if by_time else "step", ylabel="validation loss")


def step_times(axes, groups: list[Group]) -> None:
    """Milliseconds a step, the mean of a group's runs in bins of steps."""
    for i, group in enumerate(groups):
        lines = [line_of_times(run) for run in group.runs if len(run.times) > 1]
        if not lines:
            continue
        first = max(steps[0] for steps, _ in lines)
        last = min(steps[-1] for steps, _ in lines)
        bins = min(BINS, last - first, max(len(steps) for steps, _ in lines) - 1)
        edges = np.linspace(first, last, bins + 1)
        times = np.mean([np.interp(edges, steps, ms) for steps, ms in lines], axis=0)
        paces = np.diff(times) / np.diff(edges)
        axes.stairs(paces, edges, linewidth=1.3, baseline=None, color=colour(i))
    axes.set(xlabel="step", ylabel="ms a step", title="step time")
    axes.set_xlim(left=0)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)


def line_of_times(run: RunLog) -> tuple[list[int], list[float]]:
    """Steps and their times, ms, in order; from step 0 if step 1 is logged."""
    times = {0: 0.0, **run.times} if 1 in run.times else run.times
    steps = sorted(times)
    return steps, [times[step] for step in steps]


# ----------------------------------------------------------------------------------------------
# Final figures: a line for each group, the baseline's on top


def finals(axes, values: list[list[float]], title: str) -> None:
    """Each run's figure as a point; below them the mean with its interval."""
    for i, found in enumerate(values):
        if not found:
            note(axes, "times of different machines", i)
            continue
        points = {"alpha": 0.55, "markersize": 5, "markeredgewidth": 0}
        axes.plot(found, [i - 0.14] * len(found), "o", color=colour(i), **points)
        half = None
        if len(found) > 1:
            error = t_tests.sigma(found) / len(found) ** 0.5
            half = stats.t.ppf((1 + CONFIDENCE) / 2, len(found) - 1) * error or None
        style = {"marker": "|", "markersize": 11, "markeredgewidth": 2, "capsize": 3}
        axes.errorbar(t_tests.mean(found), i + 0.14, xerr=half, color=colour(i), **style)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set_title(f"{title}; mean, {CONFIDENCE:.0%} interval")


def differences(axes, rows: list[dict], what: str, title: str) -> None:
    """Each group's difference from the baseline, new minus old, with its interval."""
    axes.axvline(0, color=COLOURS[0], linewidth=1)
    for i, row in enumerate(rows[1:], 1):
        found = row[what]
        if np.isnan(found.mean):
            note(axes, "not comparable", i)
            continue
        error = [[found.mean - found.low], [found.high - found.mean]]
        shown_error = None if np.isnan(found.low) else error
        style = {"marker": "o", "markersize": 5, "capsize": 4}
        axes.errorbar(found.mean, i, xerr=shown_error, color=colour(i), **style)
        place = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        axes.annotate(f"{found.mean:+.4g}", (found.mean, i), (0, 6), **place)
    axes.set_title(f"{title}; {CONFIDENCE:.0%} interval")
