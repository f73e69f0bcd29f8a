"""The pictures: of a comparison (compare.py --plot), and of a record's losses alone (history.py --picture)."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path

from launch.console import without_matplotlibrc

with without_matplotlibrc():
    import matplotlib
import numpy as np
import t_tests
import verdict
from curves import stages, times_from_0
from data.shards import whole_file
from groups import Group
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.special import stdtrit
from t_tests import CONFIDENCE
from tool import clean

matplotlib.rcdefaults()  # one picture whatever a user's matplotlibrc asks for, as LaTeX, to which a name may be no text

BINS = 120  # of the step times: single steps are rounded to milliseconds, and noisy
COLOURS = ("#4c5a67", "#d1495b", "#00798c", "#edae49", "#6a4c93", "#66a182")
LINES = ("-", "--", ":", "-.")  # the next, when the colours begin again
LONGEST = 30  # characters of a name


def draw(groups: list[Group], target: float, path: Path | str, pairs: bool = False) -> None:
    """The groups, the first being the baseline, into an image at `path`.

    Above: losses against step and time, step times. Below, a line a group: final losses and times, and, of several groups,
    their differences from the baseline with the intervals of the verdict's tests; pairs: of the paired ones, of groups in_pairs.
    Raises OSError if it cannot be written, ValueError for a kind of image that is not known.
    """
    rows = verdict.compare(groups, target, pairs)
    below = "ddeeffgg" if len(groups) > 1 else "ddddffff"
    heights = (4.2, 1.3 + 0.34 * len(groups))
    figure, panels = new_figure((14, sum(heights) + 0.5), [[*"aaabbbcc"], [*below]], height_ratios=heights)
    validations(panels["a"], groups, target, lambda step, _: step)
    panels["a"].set(xlabel="step", title="validation loss against step")
    validations(panels["b"], groups, target, by_time)
    panels["b"].set(xlabel="training time, s", title="validation loss against time", ylabel="")
    step_times(panels["c"], groups)
    finals(panels["d"], [group.losses for group in groups], "final loss", target)
    times = [[] if math.isnan(row["time_mean"]) else group.times for row, group in zip(rows, groups, strict=True)]
    finals(panels["f"], times, "final time, s")
    if len(groups) > 1:
        differences(panels["e"], rows, "loss", "Δ loss")
        differences(panels["g"], rows, "time", "Δ time, s")
    for name in below:
        lines_of_groups(panels[name], groups if name == "d" else [], len(groups))
    legend(figure, groups)
    save(figure, panels, path)


def draw_loss(groups: list[Group], target: float, path: str) -> None:
    """One panel, validation loss against training time, into an image at `path`. Raises as draw does."""
    figure, panels = new_figure((7.2, 3.6), [["a"]])
    validations(panels["a"], groups, target, by_time)
    panels["a"].set(xlabel="training time, s")
    legend(figure, groups)
    save(figure, panels, path)


def new_figure(size: tuple[float, float], mosaic: list[list[str]], **how) -> tuple[Figure, dict]:
    """A figure, and its panels by name."""
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    return figure, figure.subplot_mosaic(mosaic, **how)


def save(figure: Figure, panels: dict, path: Path | str) -> None:
    """With a light grid and no frames; whole, or the old file stays. Raises OSError."""
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.title.set_fontsize(10)
    unknown_letters = warnings.catch_warnings(action="ignore", category=UserWarning)
    with unknown_letters, whole_file(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:] or None)


def label(name: str) -> str:
    """A name that fits, and is no formula."""
    name = clean(name, one_line=True)
    return (name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}").replace("$", r"\$")


def styles(groups: list[Group]):
    """(group, how its lines look) of each."""
    for i, group in enumerate(groups):
        yield group, {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % len(LINES)]}


def legend(figure: Figure, groups: list[Group]) -> None:
    """Above the panels, where no line is."""
    handles = [Line2D([], [], linewidth=2, **style) for _, style in styles(groups)]
    labels = [f"{label(group.name)} ({len(group.runs)} run{'s' * (len(group.runs) > 1)})" for group in groups]
    columns = max(1, min(len(groups), int(figure.get_figwidth() / 3.4)))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=9)


def note(axes, text: str) -> None:
    axes.annotate(text, (0.5, 0.98), xycoords="axes fraction", ha="center", va="top", fontsize=8, color="#777777")


def mark_target(axes, target: float) -> None:
    axes.axhline(target, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(f"target {target:g}", (0, target), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=8)  # fmt: skip


# -----------------------------------------------------------------------------
# Curves


def by_time(step: int, milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def validations(axes, groups: list[Group], target: float, x: Callable[[int, float | None], float | None]) -> None:
    """Every run's validation losses over x(step, milliseconds), cut to the last seven eighths of training."""
    shown, without = [], []
    for group, style in styles(groups):
        for run in group.runs:
            points = [(at, loss) for step, loss, time in run.validations if (at := x(step, time)) is not None]
            if not points:
                without += [group.name] * (group.name not in without)
                continue
            axes.plot(*zip(*points, strict=True), alpha=0.7, linewidth=1.1, marker=".", markersize=4, **style)
            shown += [loss for step, loss, _ in run.validations if step >= run.validations[-1][0] / 8]
    if without:
        note(axes, f"without times: {', '.join(map(label, without))}")
    mark_target(axes, target)
    low, high = min([*shown, target]), max([*shown, target])
    room = high - low or 1
    axes.set_ylim(low - 0.05 * room, high + 0.1 * room)
    axes.set_xlim(left=0)
    axes.set_ylabel("validation loss")


def step_times(axes, groups: list[Group]) -> None:
    """Milliseconds a step, the mean of a group's runs in bins of steps, with the baseline's stages where its log tells them."""
    drawn = False
    for group, style in styles(groups):
        lines = [sorted(times_from_0(run).items()) for run in group.runs if len(run.times) > 1]
        if not lines:
            continue
        first, last = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
        edges = np.linspace(first, last, min(BINS, last - first, max(map(len, lines)) - 1) + 1)
        times = np.mean([np.interp(edges, *zip(*line, strict=True)) for line in lines], axis=0)
        axes.stairs(np.diff(times) / np.diff(edges), edges, linewidth=1.3, baseline=None, **style)
        drawn = True
    for name, start in stages(groups[0].runs[0]):
        axes.axvline(start, color="black", alpha=0.35, linewidth=0.8, linestyle="--")
        axes.annotate(name, (start, 0.98), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                      fontsize=8, va="top", rotation=90)  # fmt: skip
    if not drawn:
        note(axes, "no times in the logs")
    axes.set(xlabel="step", ylabel="ms a step", title="step time")
    axes.set_xlim(left=0)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)


# -----------------------------------------------------------------------------
# Final figures: a line a group, the baseline's on top


def lines_of_groups(axes, named: list[Group], count: int) -> None:
    axes.set_yticks(range(count), [label(group.name) for group in named] or [""] * count, fontsize=9)
    axes.set_ylim(count - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=5)


def finals(axes, values: list[list[float]], title: str, target: float | None = None) -> None:
    """Every run's as a point; the mean below, and where there are two runs, its confidence interval."""
    for i, found in enumerate(values):
        colour = COLOURS[i % len(COLOURS)]
        if not found:
            axes.annotate("no times that compare", (0.5, i), xycoords=("axes fraction", "data"), ha="center", va="center",
                          fontsize=8, color="#777777")  # fmt: skip
            continue
        axes.plot(found, [i - 0.14] * len(found), "o", color=colour, alpha=0.55, markersize=5, markeredgewidth=0)
        half = None
        if len(found) > 1:
            half = stdtrit(len(found) - 1, (1 + CONFIDENCE) / 2) * t_tests.sigma(found) / math.sqrt(len(found))
        style = {"color": colour, "marker": "|", "markersize": 11, "markeredgewidth": 2, "capsize": 3}
        axes.errorbar(t_tests.mean(found), i + 0.14, xerr=half or None, **style)
    if target is not None:
        axes.axvline(target, color="black", linewidth=0.8, linestyle=":")
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set_title(f"{title}; mean, {CONFIDENCE:.0%} interval")


def differences(axes, rows: list[dict], what: str, title: str) -> None:
    """Each group's difference from the baseline, new minus old, with its interval where there is one."""
    axes.axvline(0, color=COLOURS[0], linewidth=1)
    for i, row in enumerate(rows[1:], 1):
        mean, low, high = (row[f"{what}_{name}"] for name in ("difference", "low", "high"))
        if math.isnan(mean):
            axes.annotate("not comparable", (0.5, i), xycoords=("axes fraction", "data"), ha="center", va="center", fontsize=8,
                          color="#777777")  # fmt: skip
            continue
        error = None if math.isnan(low) else [[mean - low], [high - mean]]
        axes.errorbar(mean, i, xerr=error, color=COLOURS[i % len(COLOURS)], marker="o", markersize=5, capsize=4)
        axes.annotate(f"{mean:+.4g}", (mean, i), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.set_title(f"{title}; {CONFIDENCE:.0%} interval")
