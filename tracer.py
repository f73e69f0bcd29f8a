"""--trace_steps: when each label's reduction, update and gather ran on every rank, for bench/order.py."""

import json
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from data.shards import whole_file
from launch.console import tell


def steps_of(text: str) -> range:
    """A:B as the steps from A on and before B; none if empty. Raises ValueError for anything else."""
    first, _, end = text.partition(":")
    if text and not (first.isdecimal() and end.isdecimal() and max(len(first), len(end)) < 13 and int(first) < int(end)):
        raise ValueError(f"--trace_steps={text}: must be A:B, for the steps from A on and before B")
    return range(int(first), int(end)) if text else range(0)


class Tracer:
    """Stands around an optimizer's launches, waits and updates in the steps that it traces, and nowhere else.

    A row is [step, label, phase, start, end, bytes of the whole tensor]: "launch reduce", "reduce" from its launch to its end,
    "wait reduce", "update", the same of "gather"; "step". Times: events on a GPU, elsewhere seconds of a monotonic clock.
    """

    def __init__(self, text: str, run: Any):
        """text: see steps_of. run: with ranks, folder, and at_end, which all ranks call at its end, early or not."""
        self.steps, self.ranks, self.rows, self.on_gpu = steps_of(text), run.ranks, [], run.ranks.device.type == "cuda"
        self.path, run.at_end = run.folder.with_name(f"{run.folder.name}.trace.json"), lambda: self.write(self.gather())
        if self.steps:  # what sees a collective end while the step goes on: a stream; threads, as gloo does not tell
            self.aside = torch.cuda.Stream() if self.on_gpu else ThreadPoolExecutor(32)
        if self.steps and not self.on_gpu:
            list(self.aside.map(time.sleep, [0.01] * 32))  # starts them

    def now(self) -> Any:
        if not self.on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, key: tuple, function: Callable, *args: Any, start: Any = None, size: int = 0) -> Any:
        """function(*args), whose start and end become a row; key: step, label, phase."""
        start = self.now() if start is None else start
        result = function(*args)
        self.rows.append([*key, start, self.now(), size])
        return result

    def watched(self, step: int, label: str, phase: str, work: Any, size: int) -> Any:
        """A collective just launched, in the step's hands; None if there is none."""
        if work is None:
            return None
        start, wait = self.now(), work.wait
        if self.on_gpu:
            with torch.cuda.stream(self.aside):
                self.timed((step, label, phase), wait, start=start, size=size)
        else:
            wait = self.aside.submit(lambda: self.timed((step, label, phase), work.wait, start=start, size=size)).result
        return SimpleNamespace(wait=lambda: self.timed((step, label, f"wait {phase}"), wait))

    @contextmanager
    def traced(self, step: int, optimizer: Any) -> Iterator[None]:
        """Within the block `optimizer` makes this step."""
        if step not in self.steps:
            yield
            return
        reduction, update, gather = optimizer._launch_reduction, optimizer._update, optimizer._launch_gather

        def launch_reduction(label: str) -> tuple:
            grad, work = self.timed((step, label, "launch reduce"), reduction, label)
            return grad, self.watched(step, label, "reduce", work, optimizer._pending(label).nbytes)

        def launch_gather(label: str) -> Any:
            work = self.timed((step, label, "launch gather"), gather, label)
            return self.watched(step, label, "gather", work, optimizer.padded[label].nbytes)

        optimizer._launch_reduction, optimizer._launch_gather = launch_reduction, launch_gather
        optimizer._update = lambda label, grad: self.timed((step, label, "update"), update, label, grad)
        start = self.now()
        yield
        self.rows.append([step, "", "step", start, self.now(), 0])
        del optimizer._launch_reduction, optimizer._update, optimizer._launch_gather  # back to the class's

    def gather(self) -> dict[str, Any]:
        """All ranks' rows, times in seconds; empty if no step was to be traced. Called by every rank, at the run's end."""
        if not self.steps:
            return {}
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = (lambda t: self.rows[0][3].elapsed_time(t) / 1000) if self.on_gpu else float
        rows = [[*row[:3], seconds(row[3]), seconds(row[4]), row[5]] for row in self.rows]
        clock = "" if self.on_gpu else platform.node()  # ranks with the same clock need no aligning
        found = {"format": "bankrun trace 1", "device": self.ranks.device.type}
        return found | {"ranks": self.ranks.gather({"clock": clock, "rows": rows})}

    def write(self, found: dict[str, Any]) -> str:
        """What was gathered, into a file, by the first rank; without a traced step what is there stays. Says if it is lost."""
        if found and self.ranks.first and any(rank["rows"] for rank in found["ranks"]):
            try:
                with whole_file(self.path) as file:
                    file.write(json.dumps(found).encode())
            except OSError as error:
                return f"{self.path}: {error.strerror}: the trace is lost"
        elif found and self.ranks.first:
            tell(f"no trace: this run made no step of --trace_steps={self.steps.start}:{self.steps.stop}")
        return ""
