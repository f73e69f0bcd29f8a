"""Pictures of a step's schedule: a Gantt chart of both lanes, and a file for chrome://tracing or ui.perfetto.dev."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.schedule_model import COMMUNICATION, COMPUTE, ModelError, Operation, Span, exposures
from data.shards import whole_file
from launch.console import without_matplotlibrc

COLOURS = {"reduce": "#00798c", "gather": "#66a182", "update": "#edae49"}  # by the last word of an operation's name
OTHER = "#b9a3c9"  # what stands before reductions, in launches and behind gathers
EXPOSED = "#d1495b"
WRITER = "bankrun bench/order.py"  # in the metadata of what is written here
TALLEST, LETTER = 0.82, 0.008  # of a lane's height; of the step's time: a name that does not fit is left out


def gantt(steps: Sequence[tuple[str, Sequence[Operation], Mapping[str, Span]]], path: Path) -> None:
    """A panel for each (title, operations, spans), one time axis: both lanes, and in red where no arithmetic runs.
    Raises ModelError if the picture cannot be drawn or written."""
    try:
        with without_matplotlibrc():
            import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ModelError(f"no picture: {error}: pip install -r records/requirements.txt, or leave --picture out") from None
    matplotlib.rcdefaults()  # one picture whatever a user's matplotlibrc asks for, as LaTeX
    figure = Figure(figsize=(13, 0.9 + 1.75 * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(span.end for _, _, spans in steps for span in spans.values()) or 1.0
    for panel, (title, operations, spans) in zip(panels, steps):
        for op in operations:
            start, end = spans[op.name]
            label, _, phase = op.name.rpartition(" ")
            row = 0 if op.lane == COMPUTE else 1
            colour = COLOURS.get(phase, OTHER)
            box = dict(height=TALLEST, color=colour, edgecolor="white", linewidth=0.6)
            panel.barh(row, 1000 * (end - start), left=1000 * start, **box)
            if (end - start) / longest > LETTER * len(label):
                middle = 500 * (start + end)
                panel.text(middle, row, label, ha="center", va="center", fontsize=7.5, color="#222222", clip_on=True)
        for exposed in exposures(operations, spans):
            panel.barh(0, 1000 * exposed.seconds, left=1000 * exposed.start, height=0.12, color=EXPOSED)
        panel.set_yticks([0, 1], [COMPUTE, COMMUNICATION])
        panel.set_ylim(-0.55, 1.55)
        panel.set_title(title, loc="left", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms from the step's start")
    names = {**COLOURS, "before a reduction, behind a gather": OTHER, "no arithmetic": EXPOSED}
    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    try:
        with whole_file(path) as file:
            kind = path.suffix[1:].lower() or "png"
            figure.savefig(file, format=kind, dpi=110, metadata={"Software": WRITER} if kind == "png" else None)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}: give a path that ends in .png, in a folder that can be written") from None


def chrome_trace(steps: Sequence[tuple[str, Sequence[Operation], Mapping[str, Span]]], path: Path) -> None:
    """The same as events of Chrome's trace format: a process a step, a thread a lane, microseconds."""
    events: list[dict] = []
    for number, (title, operations, spans) in enumerate(steps):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}})
        for thread, lane in enumerate((COMMUNICATION, COMPUTE)):
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": lane}})
        for op in operations:
            start, end = spans[op.name]
            where = {"pid": number, "tid": 0 if op.lane == COMMUNICATION else 1, "cat": op.lane}
            times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
            events.append({"ph": "X", "name": op.name, **where, **times, "args": {"bytes": op.bytes, "after": op.after}})
    try:
        with whole_file(path) as file:
            file.write(json.dumps({"otherData": {"writer": WRITER}, "traceEvents": events}).encode())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}: give a path that can be written") from None
