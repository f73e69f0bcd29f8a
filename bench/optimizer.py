"""How long one optimizer step takes, by label and phase, on any device and any number of ranks.

    python bench/optimizer.py --preset=demo                                              # one rank
    torchrun --standalone --nproc_per_node=8 bench/optimizer.py [any option of the trainer]

Phases: `reduce` launches the reductions, `wait` waits for them, `update` is the arithmetic, `gather` launches the all-gathers
and waits for them. Taken apart, each part is timed on a synchronised device, so nothing overlaps; `whole` is the step as
training runs it, where reductions travel meanwhile. Medians over steps of the slowest rank, a markdown table in milliseconds.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch")

from launch.console import until_reader_leaves  # before PyTorch, whose threads launch tells how to wait

import torch
import torch.distributed as dist

from bench.communication import markdown
from bench.settings import refused_in_a_line, trainer_settings
from cpu import use_cpu
from runtime.log import Clock
from runtime.ranks import Ranks, join_ranks
from train_gpt import NorMuonAndAdam, TrainingManager, build

STEPS, WARM_UP = 12, 4  # of each kind
PHASES = ("reduce", "wait", "update", "gather")


class Stopwatch:
    """Milliseconds by (label, phase), summed over one step."""

    def __init__(self, ranks: Ranks):
        self.clock = Clock(ranks.device)
        self.spent: dict[tuple[str, str], float] = defaultdict(float)

    def timed(self, label: str, phase: str, function: Callable, *args: Any) -> Any:
        self.clock.synchronize()
        started = time.perf_counter()
        result = function(*args)
        self.clock.synchronize()
        self.spent[label, phase] += 1000 * (time.perf_counter() - started)
        return result


class TimedWork:
    """A collective under way, whose waiting is timed."""

    def __init__(self, work: dist.Work, label: str, phase: str, watch: Stopwatch):
        self.work, self.label, self.phase, self.watch = work, label, phase, watch

    def wait(self) -> None:
        self.watch.timed(self.label, self.phase, self.work.wait)


class TimedOptimizer(NorMuonAndAdam):
    """NorMuonAndAdam with every phase of every label on a stopwatch, while there is one."""

    watch: Stopwatch | None = None

    def _launch_reduction(self, label):
        if self.watch is None:
            return super()._launch_reduction(label)
        gradient, work = self.watch.timed(label, "reduce", super()._launch_reduction, label)
        return gradient, work and TimedWork(work, label, "wait", self.watch)

    def _update(self, label, grad):
        if self.watch is None:
            return super()._update(label, grad)
        return self.watch.timed(label, "update", super()._update, label, grad)

    def _launch_gather(self, label):
        if self.watch is None:
            return super()._launch_gather(label)
        work = self.watch.timed(label, "gather", super()._launch_gather, label)
        return work and TimedWork(work, label, "gather", self.watch)


def one_step(manager: TrainingManager, do_adam: bool) -> float:
    """Milliseconds of a step on random gradients, which are made before."""
    for param in manager.model.parameters():
        param.grad = torch.randn_like(param)
    manager.optimizer.accumulate()
    clock = Clock(next(manager.model.parameters()).device)
    clock.start()
    manager.optimizer.step(do_adam)
    clock.stop()
    manager.optimizer.load_gradients({})
    return 1000 * clock.before


def slowest(times: dict[Any, float], ranks: Ranks) -> dict[Any, float]:
    """Each time as its slowest rank had it."""
    keys = sorted(times)
    values = torch.tensor([times[key] for key in keys], device=ranks.device)
    if ranks.world_size > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(keys, values.tolist()))


def main() -> None:
    h = trainer_settings()
    with refused_in_a_line():
        ranks = join_ranks()
    if ranks.device.type == "cpu":  # as in a run
        use_cpu()
    with refused_in_a_line(), patch("train_gpt.NorMuonAndAdam", TimedOptimizer):
        manager = build(h, ranks)
    optimizer = manager.optimizer
    kinds = {"NorMuon alone": (False, True), "with Adam, tied": (True, True), "with Adam, split": (True, False)}
    for name, (do_adam, tied) in kinds.items():
        optimizer.tied = tied
        whole, parts = [], defaultdict(list)
        for _ in range(WARM_UP + STEPS):
            optimizer.watch = None
            whole.append(one_step(manager, do_adam))
            optimizer.watch = Stopwatch(ranks)
            one_step(manager, do_adam)
            for key, milliseconds in optimizer.watch.spent.items():
                parts[key].append(milliseconds)
        medians = {key: statistics.median(values[WARM_UP:]) for key, values in parts.items()}
        medians["", "whole"] = statistics.median(whole[WARM_UP:])
        medians = slowest(medians, ranks)
        if ranks.first:
            labels = [label for label in optimizer.work_order if (label, "update") in medians]
            rows = [[label, *(medians.get((label, phase), 0.0) for phase in PHASES)] for label in labels]
            rows.append(["**sum**", *(sum(row[1 + i] for row in rows) for i in range(len(PHASES)))])
            print(f"\n{name}, {ranks.world_size} ranks, {ranks.device.type}: whole {medians['', 'whole']:.2f} ms\n")
            print(markdown(["ms", *PHASES], rows))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    with until_reader_leaves():
        main()
