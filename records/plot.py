"""The pictures: of a comparison (compare.py --plot), and of a record's losses alone (history.py --picture)."""

import ast
import math
from itertools import pairwise

import numpy as np
from groups import Group
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from runlog import RunLog
from scipy.special import stdtrit

CONFIDENCE = 0.95
BINS = 120  # of the step times: single steps are rounded to milliseconds, and noisy
COLOURS = ("#4c5a67", "#d1495b", "#00798c", "#edae49", "#6a4c93", "#66a182")


def draw(groups: list[Group], target: float, path: str) -> None:
    """Losses and step times of the groups, the first being the baseline, into an image at `path`.

    Raises OSError if it cannot be written, ValueError for a kind of image that is not known.
    """
    figure = Figure(figsize=(13, 8.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    (by_step, by_time), (pace, finals) = figure.subplots(2, 2)
    validations(by_step, groups, target, lambda step, _: step)
    by_step.set(xlabel="step", title="validation loss against step")
    validations(by_time, groups, target, lambda _, milliseconds: milliseconds / 1000)
    by_time.set(xlabel="training time, s", title="validation loss against time")
    step_times(pace, groups)
    final_losses(finals, groups, target)
    for axes in (by_step, by_time, pace, finals):
        plain(axes)
    by_step.legend(frameon=False, loc="upper right")
    figure.savefig(path)


def draw_loss(groups: list[Group], target: float, path: str) -> None:
    """One panel, validation loss against training time, into an image at `path`. Raises as draw does."""
    figure = Figure(figsize=(7.2, 3.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    validations(axes, groups, target, lambda _, milliseconds: milliseconds / 1000)
    axes.set(xlabel="training time, s")
    plain(axes)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)


def plain(axes) -> None:
    """A light grid and no frame."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def styles(groups: list[Group]):
    """(group, colour, label) of each."""
    for i, group in enumerate(groups):
        yield group, COLOURS[i % len(COLOURS)], f"{group.name} ({len(group.runs)} run{'s' * (len(group.runs) > 1)})"


def validations(axes, groups: list[Group], target: float, x) -> None:
    """Every run's validation losses over x(step, milliseconds), cut to the last seven eighths of training."""
    shown = []
    for group, colour, label in styles(groups):
        for i, run in enumerate(group.runs):
            points = [(x(step, time), loss) for step, loss, time in run.validations if time is not None]
            axes.plot(*zip(*points, strict=True), color=colour, alpha=0.7, linewidth=1.1, marker=".", markersize=4,
                      label=None if i else label)  # fmt: skip
            shown += [loss for step, loss, _ in run.validations if step >= run.validations[-1][0] / 8]
    axes.axhline(target, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(f"target {target:g}", (0, target), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=8)  # fmt: skip
    low, high = min(*shown, target), max(*shown, target)
    axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
    axes.set_xlim(left=0)
    axes.set_ylabel("validation loss")


def step_times(axes, groups: list[Group]) -> None:
    """Milliseconds a step, the mean of a group's runs in bins of steps, with the baseline's stages where its log tells them."""
    for group, colour, label in styles(groups):
        lines = [sorted({0: 0.0, **run.times}.items()) for run in group.runs if len(run.times) > 1]
        if not lines:
            continue
        last = min(line[-1][0] for line in lines)
        edges = np.linspace(0, last, min(BINS, last, max(map(len, lines)) - 1) + 1)
        times = np.mean([np.interp(edges, *zip(*line, strict=True)) for line in lines], axis=0)
        axes.stairs(np.diff(times) / np.diff(edges), edges, color=colour, label=label, linewidth=1.3, baseline=None)
    for name, start in stages(groups[0].runs[0]):
        axes.axvline(start, color="black", alpha=0.35, linewidth=0.8, linestyle="--")
        axes.annotate(name, (start, 0.98), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                      fontsize=8, va="top", rotation=90)  # fmt: skip
    axes.set(xlabel="step", ylabel="ms a step", title="step time")
    axes.set_xlim(left=0)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)


def stages(run: RunLog) -> list[tuple[str, float]]:
    """The names of its stages and the steps at which they begin; empty if its sources and settings do not tell.

    The script's table STAGES has a row a stage, whose `until` is the fraction of the scheduled steps at which it ends; in
    older scripts, which have none, the stages are equal parts.
    """
    try:
        scheduled = int(run.settings["num_scheduled_iterations"])
        tables = [
            node.value.elts
            for node in ast.parse(run.script[1]).body
            if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith(("STAGES = ", "STAGES: "))
        ]
        options = [option for row in tables[0] for option in getattr(row, "keywords", ())]
        ends = [number(option.value) for option in options if option.arg == "until"]
        ends = ends or [(i + 1) / len(tables[0]) for i in range(len(tables[0]))]
    except (KeyError, ValueError, SyntaxError, IndexError, AttributeError, ArithmeticError, RecursionError, MemoryError):
        return []
    starts = [0.0, *ends][:-1]
    if len(ends) != len(tables[0]) or not all(a < b for a, b in pairwise([0.0, *ends])):
        return []
    named = [(f"stage {i + 1}", scheduled * start) for i, start in enumerate(starts)]
    return named + [("extension", scheduled)] * (run.validations[-1][0] > scheduled)


def number(expression: ast.expr) -> float:
    """The value of a number, or of a division of such. Raises ValueError for anything else, ZeroDivisionError."""
    if isinstance(expression, ast.Constant) and type(expression.value) in (int, float):
        return float(expression.value)
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Div):
        return number(expression.left) / number(expression.right)
    raise ValueError(f"neither a number nor a division: {ast.unparse(expression)}")


def final_losses(axes, groups: list[Group], target: float) -> None:
    """Every run's last loss as a point; the mean, and where there are two runs, its confidence interval."""
    for i, (group, colour, _) in enumerate(styles(groups)):
        losses = np.array(group.losses)
        spread = np.linspace(-0.08, 0.08, len(losses)) if len(losses) > 1 else [0.0]
        axes.plot(i - 0.12 + np.array(spread), losses, "o", color=colour, alpha=0.55, markersize=5, markeredgewidth=0)
        half = 0.0
        if len(losses) > 1:
            half = stdtrit(len(losses) - 1, (1 + CONFIDENCE) / 2) * losses.std(ddof=1) / math.sqrt(len(losses))
        axes.errorbar(
            i + 0.12, losses.mean(), half or None, color=colour, marker="_", markersize=14, markeredgewidth=2, capsize=4
        )
    axes.axhline(target, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(f"target {target:g}", (0, target), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=8)  # fmt: skip
    axes.set_xticks(range(len(groups)), [group.name for group in groups])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(ylabel="validation loss", title=f"final losses; mean and its {CONFIDENCE:.0%} interval")
