"""What a step on a CPU is made of: products, at which speed, and everything else.

    torchrun --standalone --nproc_per_node=2 bench/cpu_step.py [any option of the trainer]

A pair of steps of the last stage, without and with Adam, on synthetic tokens: first as training runs them, then with every
operation of PyTorch timed where it is called, and last each product by itself, its operands in the same dtypes and layouts, in
the cache. Of PAIRS of them the one of median time, on the first rank, as a markdown table for a mean step. "by itself" is the
time that the library takes for the same products with nothing between them. What is left to win: the lines below the products. The last is the rest
of a step: below 0 where the steps with timed operations took longer than those without.
"""

import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch")

from launch.console import until_reader_leaves  # before PyTorch, whose threads launch tells how to wait

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.communication import markdown
from bench.settings import refused_in_a_line, trainer_settings
from cpu import use_cpu
from data.loader import synthetic_batch, to_device
from runtime.ranks import join_ranks
from train_gpt import TrainingManager, build, step_schedule

PAIRS, WARM_UP, REPEATS = 12, 3, 30
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "fp8_linear": 0, "fp8_linear_backward": 0}  # where the operands begin
SHOWN = 10  # operations that have a line of their own


class Call(NamedTuple):
    """An operation with what its time depends on."""

    name: str
    function: Callable
    operands: tuple[Any, ...]  # a tensor as Like
    options: tuple[tuple[str, Any], ...]


class Like(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        return torch.randn(self.span).mul_(0.1).to(self.dtype).as_strided(self.shape, self.strides)

    @property
    def span(self) -> int:  # elements from the first to the last
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))


def described(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Like(x.shape, x.stride(), x.dtype)
    return tuple(map(described, x)) if isinstance(x, (list, tuple)) else x


class Timed(TorchDispatchMode):
    """Seconds and number of all calls inside, of any operation that PyTorch dispatches."""

    def __init__(self):
        super().__init__()
        self.seconds: dict[Call, float] = defaultdict(float)
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        options = kwargs or {}
        name = function.overloadpacket.__name__
        call = Call(name, function, described(args), tuple((key, described(x)) for key, x in sorted(options.items())))
        begun = time.perf_counter()
        result = function(*args, **options)
        self.seconds[call] += time.perf_counter() - begun
        self.calls[call] += 1
        return result


def operations(call: Call) -> int:
    """Multiplications and additions of a product; of the head's backward, two products."""
    a, b = (x.shape for x in call.operands[PRODUCTS[call.name] :][:2])
    return (4 if call.name == "fp8_linear_backward" else 2) * math.prod(a) * b[-1]


def alone(call: Call) -> float:
    """Seconds of one call of a product by itself."""
    args = [x.made() if isinstance(x, Like) else x for x in call.operands]
    options = {key: x.made() if isinstance(x, Like) else x for key, x in call.options}
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call.function(*args, **options)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def pair(manager: TrainingManager, batches: list[tuple], step: int, watch: AbstractContextManager) -> float:
    """Milliseconds of a mean step of the two from `step` on, an even one."""
    begun = time.perf_counter()
    with watch:
        for at in (step, step + 1):
            for batch in batches:
                manager.model(*batch, manager.forward_schedule()).backward()
                manager.optimizer.accumulate()
            manager.step_optimizers(at)
    return (time.perf_counter() - begun) / 2 * 1000


def kind_of(call: Call) -> str:
    """What its line in the table is called."""
    if call.name not in PRODUCTS:
        return call.name
    dtype = call.operands[PRODUCTS[call.name]].dtype
    return "products, head, FP8 emulated" if call.name.startswith("fp8") else f"products, {dtype}".replace("torch.", "")


def table(watches: list[Timed], whole: float) -> Iterator[list[Any]]:
    """Rows: what, calls, ms, share, GFLOP/s, ms by itself, of the watched steps that took the median time, so that the rows make
    up the whole; whole: ms of one without a watch."""
    counts, kinds = watches[0].calls, defaultdict(list)
    seconds = sorted((watch.seconds for watch in watches), key=lambda x: sum(x[call] for call in counts))[len(watches) // 2]
    for call in counts:
        kinds[kind_of(call)].append(call)

    def spent(calls: list[Call]) -> float:
        return sum(seconds[call] for call in calls) / 2 * 1000

    def row(what: str, calls: list[Call], *more: Any) -> list[Any]:
        return [what, round(sum(counts[call] for call in calls) / 2), ms := spent(calls), f"{ms / whole:.0%}", *more]

    products = sorted(kind for kind in kinds if kind.startswith("products, "))
    for kind in products:
        speed = sum(operations(call) * counts[call] for call in kinds[kind]) / 2 / spent(kinds[kind]) / 1e6
        yield row(kind, kinds[kind], round(speed), sum(alone(call) * counts[call] for call in kinds[kind]) / 2 * 1000)
    others = sorted(kinds.keys() - products, key=lambda kind: -spent(kinds[kind]))
    for kind in others[:SHOWN]:
        yield row(kind, kinds[kind], "", "")
    rest = others[SHOWN:]
    yield row(f"{len(rest)} others, views among them", [call for kind in rest for call in kinds[kind]], "", "")
    between = whole - spent(list(counts))
    yield ["between them: Python, autograd, other ranks", "", between, f"{between / whole:.0%}", "", ""]


def main() -> None:
    h = trainer_settings(preset="demo")
    with refused_in_a_line():
        ranks = join_ranks()
        h.check(ranks.world_size)
    if ranks.device.type != "cpu":
        raise SystemExit("cpu_step.py: error: this machine has a GPU, whose steps bench/gpu.py takes apart: hide it")
    said = use_cpu()
    with refused_in_a_line():
        manager = build(h, ranks)
    step = round(0.8 * h.num_scheduled_iterations) // 2 * 2
    manager.advance_schedule(step)
    tokens = step_schedule(step, h).batch_tokens // h.micro_batches
    sizes = dict(vocab_size=h.vocab_size, max_doc_len=h.max_doc_len, doc_slots=h.doc_slots)
    share = h.micro_batches // ranks.world_size
    batches = [to_device(synthetic_batch(tokens, **sizes), ranks.device) for _ in range(share)]
    whole, watches = [], []
    for i in range(WARM_UP + PAIRS):
        whole.append(pair(manager, batches, step, nullcontext()))
        watch = Timed()
        pair(manager, batches, step, watch)
        watches.append(watch)
    step_ms = statistics.median(whole[WARM_UP:])
    rows = [*table(watches[WARM_UP:], step_ms)]  # on every rank, so that products meet the others'
    if ranks.first:
        size = f"{ranks.world_size} ranks, {tokens} tokens a micro-batch, {share} on a rank"
        print(f"{said}\n{size}: {step_ms:.1f} ms a step\n")
        print(markdown(["operation", "calls", "ms", "share", "GFLOP/s", "ms by itself"], rows))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    with until_reader_leaves():
        main()
