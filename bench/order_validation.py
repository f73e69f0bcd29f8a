"""Does the model of the schedule predict real ranks? Steps of the optimizer on gloo in many orders, beside their predictions.

Started by `python bench/order.py validate`, one process a rank. Costs are measured by label, each collective and each update
alone; the one number that cannot be, how much both lanes slow each other, is fitted to the first FITTED orders, which are then
left out. Everything else is prediction.
"""

import datetime
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from launch.console import run_to_end  # before PyTorch, whose threads launch tells how to wait

import torch
import torch.distributed as dist

from bench.schedule_costs import read_machine, tasks_of
from bench.schedule_model import Interference, ModelError, Orders, Task, step_seconds
from bench.settings import model_of, torchrun, trainer_settings
from runtime.ranks import Ranks, join_ranks
import train_gpt
from train_gpt import SCATTER_ORDER, WORK_ORDER, Hyperparameters, NorMuonAndAdam, param_table

# Sizes at which arithmetic and communication are of one size on a laptop. Steps with Adam, tied: every kind of dependency.
SIZES = ("--preset=demo", "--vocab_size=2048", "--model_dim=128", "--num_heads=4", "--head_dim=32", "--fp8_head=false")
WORKERS = 1  # of gloo: one serves collectives in their order, as NCCL's stream does
TRIED = [i / 50 for i in range(50)]  # slowdowns that the fit tries: at 1 nothing is gained by overlapping
FITTED = 3  # orders to which it is fitted; they are not counted as predicted


class Result(NamedTuple):
    """Seconds of one pair of orders."""

    orders: Orders
    predicted: float
    measured: float  # of the slowest rank, the least of all repetitions


def orders_to_try(labels: list[str], count: int) -> list[Orders]:
    """The default orders, some that should be bad or good, and random ones."""
    default = Orders(*(tuple(label for label in order if label in labels) for order in (SCATTER_ORDER, WORK_ORDER)))
    chance, tried = random.Random(1), [default]
    backwards = default.work[::-1]
    tried += [Orders(default.work, default.work), Orders(default.work, backwards), Orders(backwards, backwards)]
    tried += [Orders(backwards, default.work), Orders(default.scatter, default.scatter)]
    tried += [Orders(default.scatter, default.scatter[::-1])]
    while len(tried) < count + FITTED:
        tried.append(Orders(tuple(chance.sample(labels, len(labels))), tuple(chance.sample(labels, len(labels)))))
    return tried


# -----------------------------------------------------------------------------
# One rank


class Gloo(dist.ProcessGroupGloo):
    """gloo with so many WORKERS, where init_process_group makes one with two."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        options = self._Options()
        options._devices, options._threads, options._timeout = [self.create_default_device()], WORKERS, timeout
        super().__init__(store, rank, size, options)


def give_gradients(optimizer: NorMuonAndAdam, gradients: dict[str, torch.Tensor]) -> None:
    for label, param in optimizer.params.items():
        param.grad = gradients[label].clone()
    optimizer.accumulate()


def timed(ranks: Ranks, function: Callable, *args: Any) -> tuple[Any, float]:
    """What function returns, and its seconds from when all ranks are there."""
    dist.barrier()
    started = time.monotonic()
    result = function(*args)
    return result, time.monotonic() - started


def one_by_one(optimizer: NorMuonAndAdam, ranks: Ranks) -> dict[str, Task]:
    """Each label's times, nothing beside it."""
    tied = {row.tied_to: label for label, row in optimizer.table.items() if row.tied_to}
    tasks = {}
    for label in (label for label in optimizer.scatter_order if label not in tied.values()):
        pending, parameter = optimizer._pending(label), optimizer.params[label].data
        before = behind = gather = 0.0
        if other := tied.get(label):
            _, before = timed(ranks, train_gpt.transpose_add, optimizer._pending(other), pending, False)
            _, behind = timed(ranks, train_gpt.transpose_copy, parameter, optimizer.params[other].data, False)
        (grad, work), launch = timed(ranks, optimizer._launch_reduction, label)
        started = time.monotonic()
        work.wait()
        reduce = time.monotonic() - started
        _, update = timed(ranks, optimizer._update, label, grad)
        dist.barrier()
        started = time.monotonic()
        if (work := optimizer._launch_gather(label)) is not None:
            work.wait()
            gather = time.monotonic() - started
        tasks[label] = Task(reduce, update, gather, before, launch, behind)
    return tasks


def stand_in(optimizer: NorMuonAndAdam, ranks: Ranks) -> None:
    """Put sleep in the place of arithmetic: each label's share of what bench/machines/8xh100.json says, all together as long as
    the collectives alone. Ranks that share a processor are then as independent as those that have a GPU each."""
    give_gradients(optimizer, {label: torch.ones_like(param) for label, param in optimizer.params.items()})
    tasks = one_by_one(optimizer, ranks)
    communication = max(ranks.gather(sum(task.reduce + task.gather for task in tasks.values())))
    model = tasks_of(Hyperparameters(), read_machine("8xh100"), 8, do_adam=True, tied=True)
    scale = communication / sum(task.before + task.update + task.behind for task in model.values())
    optimizer._update = lambda label, grad: time.sleep(scale * model[label].update)
    for name, phase in (("transpose_add", "before"), ("transpose_copy", "behind")):
        seconds = scale * sum(getattr(task, phase) for task in model.values())
        setattr(train_gpt, name, lambda *_, seconds=seconds: time.sleep(seconds))


def rank_main(output: Path, count: int, repetitions: int, asleep: bool) -> None:
    """One of torchrun's processes: the first rank writes tasks and windows, the least of all repetitions: whatever else runs on
    the machine only adds to them."""
    with patch.object(dist.distributed_c10d, "ProcessGroupGloo", Gloo):
        ranks = join_ranks()
    torch.manual_seed(0)
    h = trainer_settings(list(SIZES))
    model = model_of(h, 16).float()
    named = list(model.named_parameters())
    gradients = {label: torch.randn_like(param) for label, param in named}
    optimizer = NorMuonAndAdam(named, param_table(h), SCATTER_ORDER, WORK_ORDER)
    if asleep:
        stand_in(optimizer, ranks)
    labels = [label for label, row in optimizer.table.items() if not row.tied_to]
    tried, tied = orders_to_try(labels, count), [label for label in SCATTER_ORDER if label not in labels]
    alone, windows = [], [[] for _ in tried]
    for _ in range(repetitions + 1):  # the first warms up
        give_gradients(optimizer, gradients)
        found = one_by_one(optimizer, ranks)
        everywhere = ranks.gather(found)
        alone.append({label: Task(*(max(times) for times in zip(*(rank[label] for rank in everywhere)))) for label in found})
        for i, orders in enumerate(tried):
            optimizer.scatter_order, optimizer.work_order = (*orders.scatter, *tied), (*orders.work, *tied)
            give_gradients(optimizer, gradients)
            dist.barrier()
            started = time.monotonic()
            optimizer.step(True)
            spans = ranks.gather((started, time.monotonic()))
            windows[i].append(max(end for _, end in spans) - min(start for start, _ in spans))
        optimizer.load_gradients({})
    tasks = {label: Task(*map(min, zip(*(found[label] for found in alone[1:])))) for label in labels}
    if ranks.first:
        least = [min(times[1:]) for times in windows]
        output.write_text(json.dumps({"tasks": tasks, "orders": tried, "windows": least, "all": windows}))
    dist.destroy_process_group()


# -----------------------------------------------------------------------------
# The ranks' parent


def measure(world_size: int, count: int, repetitions: int, gigabits: float, asleep: bool) -> dict[str, Any]:
    """rank_main's file. gigabits: the rate of a loopback of the ranks' own, in a network namespace (needs root, ip and tc); 0:
    the machine's. Raises ModelError with the ranks' own message if they fail."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "measured.json")
        command = [*torchrun(world_size, folder), __file__, str(output), str(count), str(repetitions), str(int(asleep))]
        if gigabits:
            if missing := [tool for tool in ("unshare", "ip", "tc") if not shutil.which(tool)]:
                raise ModelError(f"--link: {', '.join(missing)} missing: install it (iproute2), or leave --link out")
            shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {gigabits}gbit burst 256kb latency 200ms"
            command = ["unshare", "--net", "sh", "-c", f'{shape} && exec "$@"', "sh", *command]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        done = run_to_end(command, **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if not output.exists():
            lines = [line for line in done.stderr.splitlines() if "rror" in line] or [done.stderr.strip()]
            raise ModelError(f"{world_size} ranks failed: {lines[0]}" + " (--link needs root)" * bool(gigabits))
        return json.loads(output.read_text())


def fit(tasks: dict[str, Task], orders: list[Orders], seconds: list[float]) -> Interference:
    """The slowdown, of both lanes alike, of those TRIED with the least error over these orders."""

    def error(slowdown: float) -> float:
        alike = Interference(slowdown, slowdown)
        return sum(abs(step_seconds(tasks, pair, alike, WORKERS) / took - 1) for pair, took in zip(orders, seconds))

    return Interference(*[min(TRIED, key=error)] * 2)


def compare(found: dict[str, Any]) -> tuple[Interference, list[Result]]:
    """The fitted slowdown, and each order but the default's, predicted and measured."""
    tasks = {label: Task(*times) for label, times in found["tasks"].items()}
    orders = [Orders(*map(tuple, pair)) for pair in found["orders"]]
    measured = found["windows"]
    slowdown = fit(tasks, orders[:FITTED], measured[:FITTED])
    predicted = [step_seconds(tasks, pair, slowdown, WORKERS) for pair in orders]
    return slowdown, [Result(*row) for row in zip(orders, predicted, measured)][FITTED:]


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's, ties at their mean rank; 0 if all of one side are equal."""

    def places(values: list[float]) -> list[float]:
        return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]

    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(places(a), places(b))


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
