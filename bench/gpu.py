"""Check and time the model and its training on a CUDA machine; nothing is downloaded.

    ./run.sh bench/gpu.py                       # all sections, a report under records/
    ./run.sh bench/gpu.py --section=model,run   # some of them
    ./run.sh bench/gpu.py --dry-run             # on a CPU at tiny sizes: proves the command alone
    ./run.sh bench/gpu.py --section=ab --variant=ideas/idea.py --variant=triton_kernels.LOSS.WIDTH=512

The kernels have their own: tests/kernels/test_on_gpu.py checks them, bench/kernels.py times them.
Shards and compiled kernels stay in --cache, where the next call finds them.
A section that fails leaves the others their turn and makes the exit code 1. The report is written
anew after each, with the GPU's clock and power, which nvidia-smi reads once a second.
"""

import argparse
import ast
import contextlib
import dataclasses
import datetime
import functools
import importlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

import train_gpt
import triton_kernels as tk
from bench.floors import floor
from bench.settings import longest_cut, markdown, model_of
from data.loader import distributed_data_generator, train_pattern
from runtime.ranks import Ranks
from sample import load_script
from train_gpt import (
    EXTENSION, FINAL_VALIDATION, STAGES, ForwardSchedule, Hyperparameters, compile_model,
    step_schedule,
)  # fmt: skip


class SectionError(AssertionError):
    """A check that failed, with what was found."""

    def __init__(self, message: str, text: str, data: Any):
        super().__init__(message)
        self.text, self.data = text, data


@dataclasses.dataclass
class Bench:
    """What the sections share."""

    dry: bool
    scratch: Path  # logs; gone at the end
    cache: Path  # shards; stays
    report: Path  # without suffix
    variants: list[str]  # of section ab

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def gpu(self) -> str:
        return "a CPU" if self.dry else torch.cuda.get_device_name()

    @functools.cached_property
    def shards(self) -> Path:
        """PyTorch's own text as bytes, some 85 million tokens; asyncio's on a dry run. Documents are
        as long as FineWeb's: attention takes what it does in a real run."""
        source = Path(torch.__file__).parent
        if self.dry:
            source = Path(sysconfig.get_paths()["stdlib"], "asyncio")
        folder = self.cache / source.name
        command = [sys.executable, str(ROOT / "data/local_text.py")]
        command += [f"--input={source}", f"--output={folder}", "--lengths=fineweb"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return folder

    def settings(self, **changes: Any) -> Any:
        """The record preset on these shards: byte tokens under its vocabulary, few steps, validated
        at the start and the end alone; tiny on a dry run."""
        found = dict(
            data=str(self.shards), bos_id=256, encoding="bytes", num_scheduled_iterations=45,
            num_extension_iterations=5, val_every=50, val_tokens=524_288, val_batch_tokens=524_288,
            log_dir=str(self.scratch / "logs"),
        )  # fmt: skip
        if self.dry:
            found |= dict(
                vocab_size=257, model_dim=32, num_heads=2, head_dim=16, dtype="float32",
                compile=False, batch_unit=32, micro_batches=2, block_size=16,
                num_scheduled_iterations=6, num_extension_iterations=2, val_every=8,
                val_tokens=2048, val_batch_tokens=2048,
            )  # fmt: skip
        return Hyperparameters(**found | changes)

    @property
    def ranks(self) -> Ranks:
        return Ranks(0, 1, self.device)

    def manager(self, h: Any, script: ModuleType) -> Any:
        torch._dynamo.config.recompile_limit = 64
        return script.build(h, self.ranks, longest_cut(h))

    @functools.cached_property
    def warm_up(self) -> float:
        """Seconds of the script's own warm-up, once a process: what follows compiles nothing."""
        started = time.perf_counter()
        train_gpt.warm_up(self.manager(self.settings(), train_gpt), self.ranks)
        return time.perf_counter() - started

    def batches(self, h: Any, step: int, count: int) -> list[list[tuple[torch.Tensor, ...]]]:
        """The micro-batches of so many steps from `step` on, on the CPU."""
        stream = train_gpt.training_batches(h, self.ranks, step)
        found = [list(itertools.islice(stream, h.micro_batches)) for _ in range(count)]
        stream.close()
        return found

    def passes(self, manager: Any, batches: Iterable[tuple]) -> None:
        """Forward and backward passes of a step."""
        for batch in batches:
            batch = [x.to(self.device, non_blocking=True) for x in batch]
            manager.model(*batch, manager.forward_schedule()).backward()
            manager.optimizer.accumulate()

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """This moment in what the GPU does; on a dry run the time."""
        if self.dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one mark to another that has passed."""
        return second - first if self.dry else first.elapsed_time(second) / 1000


# -----------------------------------------------------------------------------
# Sections: each returns Markdown and data, and raises SectionError for what does not hold


def environment(bench: Bench) -> tuple[str, Any]:
    version = getattr(sys.modules.get("triton"), "__version__", "none")
    facts = {"Python": sys.version.split()[0], "PyTorch": torch.__version__, "Triton": version}
    if not bench.dry:
        query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        facts["GPUs"] = done.stdout.strip().replace("\n", "; ")
        facts["CUDA"] = torch.version.cuda
        facts["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    facts["FP8 matmuls in the LM head"] = tk.has_fp8(bench.device)
    facts["attention"] = tk.flash_attention()
    return markdown(["what", "is"], facts.items()), facts


def attention(bench: Bench) -> tuple[str, Any]:
    """attend as the model calls it, forward and backward, against the banded reference in fp64."""
    h = bench.settings()
    dtype, T = (torch.float32, 512) if bench.dry else (torch.bfloat16, 16384)
    # A result is rounded once, after probabilities and their gradients have been rounded too.
    allowed = 40 * 2.0**-24 if bench.dry else 4 * 2.0**-8
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, T // 8, (64,), generator=generator).cumsum(0)
    starts = torch.cat((torch.zeros(1), lengths[lengths < T], torch.full((64,), T)))[:64]
    starts = starts.int().to(bench.device)
    stages = (*STAGES, EXTENSION, FINAL_VALIDATION)
    windows = dict.fromkeys(x * h.block_size for stage in stages for x in (stage.short, stage.long))
    rows = []
    for window, p in itertools.product(windows, (1, 2)):  # plain, paired heads
        shape = (p * T, h.num_heads // p, h.head_dim)
        x = torch.randn((4, *shape), generator=generator).to(bench.device)
        x = (x / x.square().mean(-1, keepdim=True).sqrt()).to(dtype)
        exact_bias = tk.band_bias(p * starts, p * T, window, torch.float64)
        results = []
        for wide in (dtype, torch.float64):
            bias = exact_bias if wide == torch.float64 else None
            if bench.dry and bias is None:
                bias = exact_bias.float()
            q, k, v = (z.to(wide).requires_grad_() for z in x[:3])
            out = tk.attend(q, k, v, tk.Band(p * starts, window, p * T, bias), 0.1)
            grads = torch.autograd.grad(out, (q, k, v), x[3].to(out.dtype))
            results.append((out.detach(), *grads))
        errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(*results)]
        rows.append([window, "paired" if p == 2 else "plain", *errors])
    head = ["window", "heads", "output", "dq", "dk", "dv"]
    text = markdown(head, [[*row[:2], *(f"{error:.2e}" for error in row[2:])] for row in rows])
    if off := [row[:2] for row in rows if max(row[2:]) > allowed]:
        raise SectionError(f"attention is off: {off}", text, rows)
    return text, rows


def model(bench: Bench) -> tuple[str, Any]:
    """The model as it trains against fp32 on the CPU: same weights and batch, FP8 in both."""
    h, tokens = bench.settings(), 256 if bench.dry else 2048
    torch.manual_seed(h.seed)
    reference = model_of(h, tokens, fp8=True)
    with torch.no_grad():
        for param in reference.parameters():
            if param.ndim > 1:
                param.add_(torch.randn(param.shape) * 0.02)
        # Of the smear gate: times 0, it would have no gradient.
        reference.scalars.add_(0.5 * (reference.scalars == 0))
    trained = model_of(h, tokens, fp8=tk.has_fp8(bench.device))
    trained.load_state_dict(reference.state_dict())
    trained.to(bench.device)
    if h.dtype == "float32":
        trained.float()
    if h.compile:
        compile_model(trained)
    reference.float()
    one = dict(micro_batches=1, rank=0, world_size=1, bos_id=h.bos_id)
    loader = distributed_data_generator(train_pattern(h.data), tokens, longest_cut(h), **one)
    batch, grads, losses = next(loader), [], []
    for net in (trained, reference):
        device = net.embed.device
        weights = torch.tensor([1.0, 0.5], device=device)
        windows = (3 * h.block_size, 7 * h.block_size)
        schedule = ForwardSchedule(weights, *windows, longest_cut(h))
        loss = net(*(x.to(device) for x in batch), schedule)
        loss.backward()
        losses.append(loss.item() / tokens)
        grads.append({label: x.grad.double().cpu() for label, x in net.named_parameters()})
    errors = {"loss": abs(losses[0] / losses[1] - 1)}
    for label, exact in grads[1].items():
        difference = (grads[0][label] - exact).norm()
        errors[label] = (difference / exact.norm().clamp_min(1e-30)).item()
    text = markdown(["of", "relative error"], [[x, f"{e:.2e}"] for x, e in errors.items()])
    # bf16 keeps 8 bits, and the layers lose some of them; a gate sums small differences.
    if off := [label for label, e in errors.items() if e > (5e-3 if label == "loss" else 0.2)]:
        raise SectionError(f"off: {', '.join(off)}", text, errors)
    return text, errors


def stages_of(h: Any) -> dict[str, range]:
    """The steps of each stage: those in a row whose micro-batches and windows have one shape."""

    def shape(step: int) -> tuple:
        now = step_schedule(step, h)
        return now.batch_tokens, now.short_window, now.long_window, len(now.mtp_weights)

    stages = {}
    for _, group in itertools.groupby(range(h.total_iterations), shape):
        steps = list(group)
        extension = steps[0] >= h.num_scheduled_iterations
        name = "extension" if extension else f"stage {len(stages) + 1}"
        stages[name] = range(steps[0], steps[-1] + 1)
    return stages


def run(bench: Bench) -> tuple[str, Any]:
    """The real script, launched as users launch it: compiles cleanly, learns; the stages' speed."""
    h = bench.settings(run_id="gpu")
    defaults = vars(Hyperparameters())
    options = [f"--{name}={x}" for name, x in vars(h).items() if x != defaults[name]]
    command = [sys.executable, str(ROOT / "runtime/launch.py"), str(ROOT / "train_gpt.py")]
    environ = {**os.environ, "TORCH_LOGS": "recompiles,graph_breaks"}
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    command += ["--preset=record", *options]
    done = subprocess.run(command, timeout=560, env=environ, **output)
    if done.returncode:
        tail = f"```\n{done.stdout[-4000:]}\n```"
        raise SectionError(f"exit code {done.returncode}", tail, done.stdout[-20000:])
    log = Path(h.log_dir, "gpu.txt").read_text(encoding="utf-8").rpartition("=" * 100)[2]
    losses = [float(x) for x in re.findall(r"val_loss:([\d.]+)", log)]
    times = re.findall(r"^step:(\d+)/\d+ train_time:(\d+)ms", log, re.M)
    ends = {int(step): float(ms) / 1000 for step, ms in times}
    ranks = int(re.search(r"parameters, (?:ranks: )?(\d+)", done.stdout)[1])
    rows, stages = [], []
    for name, steps in stages_of(h).items():
        last = range(max(steps.start + 2, steps.stop - 6), steps.stop + 1)  # step:7 ends step 6
        seconds = statistics.median(ends[s] - ends[s - 1] for s in last if s - 1 in ends)
        tokens = step_schedule(steps[-1], h).batch_tokens
        limit = sum(floor(steps[-1], h).values()) / ranks
        stages.append({"stage": name, "seconds": seconds, "tokens": tokens, "floor": limit})
        speed = f"{tokens / seconds:,.0f}"
        rows.append([name, f"{tokens:,}", 1000 * seconds, speed, 1000 * limit, seconds / limit])
    warm_up, after = re.search(r"warm-up:? (\d+) s$(.*)", done.stdout, re.M | re.S).groups()
    recompiled, breaks = after.count("Recompiling function"), done.stdout.count("Graph break")
    head = ["stage", "tokens a step", "ms a step", "tokens/s", "floor of an H100, ms", "times that"]
    text = (
        f"{markdown(head, rows)}\n\n{ranks} ranks. Warm-up: {warm_up} s. Graph breaks: {breaks}; "
    )
    text += f"recompiled after the warm-up: {recompiled}. Losses: {', '.join(map(str, losses))}. "
    text += re.search(r"^peak memory.*", log, re.M)[0]
    data = dict(stages=stages, warm_up=warm_up, recompiled=recompiled, breaks=breaks, losses=losses)
    if breaks or recompiled or not losses[-1] < losses[0]:
        raise SectionError("graph breaks, recompilation, or a loss that does not fall", text, data)
    return text, data


OTHER = "gates, values, other"
GENERATED = r"^triton_(poi|red|per)_fused\w*"  # by Inductor, named after all that is fused
# Classes of GPU kernels, and of PyTorch's operators on a CPU, by name; the first that matches. Those
# that bench/floors.py knows have its names.
KINDS = {
    "embeddings": rf"{GENERATED}embedding|scatter\w*kernel|radix|sort",
    "norms, residuals": rf"{GENERATED}(vector_norm|rsqrt|addcmul)",
    OTHER: GENERATED,
    "gradient accumulation": r"CUDAFunctor_add\b",
    "attention": r"flash|fmha|attention|Banded|softmax|bmm",
    "q, k": r"norm_rotate",
    "loss": r"loss\w*_kernel|cross_entropy|logsumexp",
    "MLP kernels": r"relu_squared",
    "LM head": r"nvjet_(sm\d+_)?[qr]{2}|e4m3|e5m2|_scaled_mm|fp8_",
    "matmuls": r"gemm|nvjet|cutlass|wgmma|xmma|product_kernel|aten::(add)?mm",
    "communication": r"nccl|gloo|c10d",
    "copies, quantization": r"Memcpy|Memset|copy_|transpose_kernel|quantize_kernel",
}
SHOWN = [*KINDS, "optimizer", "idle"]


def kind_of(kernel: str) -> str:
    return next((kind for kind, name in KINDS.items() if re.search(name, kernel, re.I)), OTHER)


def profiled(bench: Bench, work: Callable[[], None]) -> tuple[Any, Counter, Counter, float, float]:
    """The profile; seconds and calls by kernel, on a CPU by operator; seconds in which at least one
    ran; seconds in all."""
    kinds = torch.autograd.DeviceType
    bench.synchronize()
    with torch.profiler.profile() as prof:  # of the CPU, and of a GPU if there is one
        started = time.perf_counter()
        work()
        bench.synchronize()
        wall = time.perf_counter() - started
    times, calls, spans = Counter(), Counter(), []
    for event in prof.events():
        if event.device_type == (kinds.CPU if bench.dry else kinds.CUDA):
            start, end = event.time_range.start, event.time_range.end
            times[event.name] += (event.self_cpu_time_total if bench.dry else end - start) / 1e6
            calls[event.name] += 1
            spans.append((start, end))
    busy = end = 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return prof, times, calls, busy / 1e6, wall


def enter(manager: Any, step: int) -> None:
    """The manager as it is in this step, which may skip steps before it."""
    manager.advance_schedule(step)
    if manager.optimizer.tied and step > manager.split_step:
        manager.optimizer.split_tied()


def profile(bench: Bench) -> tuple[str, Any]:
    """Two steps of each stage under the profiler, without Adam and with it, in one process; the mean
    of both, class by class, beside the floor."""
    h = bench.settings()
    text = f"Warm-up: {bench.warm_up:.0f} s. ms of the mean step of two, and the H100's floor.\n\n"
    manager = bench.manager(h, train_gpt)
    columns, tops, data = {}, [], []
    for stage, steps in stages_of(h).items():
        if stage == "extension":  # stage 3 with wider windows
            continue
        even = [step for step in steps[:-1] if step % 2 == 0][:2][-1]
        both = bench.batches(h, even, 2)
        measured = dict.fromkeys(SHOWN, 0.0)
        for step, batches in zip((even, even + 1), both):
            enter(manager, step)
            kind = f"{stage}, {'Adam' if step % 2 else 'NorMuon alone'}"
            passes = functools.partial(bench.passes, manager, batches)
            update = functools.partial(manager.step_optimizers, step)
            for part, work in (("model", passes), ("optimizer", update)):
                prof, times, calls, busy, wall = profiled(bench, work)
                shares = dict.fromkeys(SHOWN, 0.0) | {"idle": max(0.0, wall - busy)}
                for name, seconds in times.items():
                    shares["optimizer" if part == "optimizer" else kind_of(name)] += seconds
                for name, seconds in shares.items():
                    measured[name] += seconds / 2
                label = f"{kind}, {part}"
                top = [(x, calls[x], 1e3 * t, 1e6 * t / calls[x]) for x, t in times.most_common(40)]
                tops += [[label, name[:90], *numbers] for name, *numbers in top[:8]]
                data.append(dict(step=label, seconds=wall, shares=shares, top=top))
                if part == "model" and not bench.dry:
                    name = f"{bench.report.name}-{kind}.trace.json.gz"
                    path = bench.report.with_name(name.replace(", ", "-").replace(" ", "-"))
                    prof.export_chrome_trace(str(path))
        columns[stage] = measured
        columns[f"{stage}, floor"] = floor(even, h, sum(both, []))
    rows = [[name, *(1000 * x.get(name, 0.0) for x in columns.values())] for name in SHOWN]
    rows.append(["**step**", *(1000 * sum(x.values()) for x in columns.values())])
    text += markdown(["class", *columns], rows) + "\n\n"
    return text + markdown(["step", "kernel", "calls", "ms", "µs a call"], tops), data


STEPS = 6  # of a stage that section `step` times


def step(bench: Bench) -> tuple[str, Any]:
    """The last steps of each stage, nothing profiled: medians of model and optimizer between CUDA
    events, and wall time, beside the floor."""
    h = bench.settings()
    text = f"Warm-up: {bench.warm_up:.0f} s.\n\n"
    manager = bench.manager(h, train_gpt)
    rows, data = [], []
    for stage, steps in stages_of(h).items():
        chosen = steps[-1 - STEPS :]
        batches = bench.batches(h, chosen[0], len(chosen))
        marks = []
        for number, own in zip(chosen, batches):
            if number == chosen[1]:  # the first is not timed
                bench.synchronize()
                started = time.perf_counter()
            enter(manager, number)
            marks.append([number, bench.mark()])
            bench.passes(manager, own)
            marks[-1].append(bench.mark())
            manager.step_optimizers(number)
            marks[-1].append(bench.mark())
        bench.synchronize()
        wall = (time.perf_counter() - started) / (len(chosen) - 1)
        times = defaultdict(list)
        for number, first, second, third in marks[1:]:
            times["model"].append(bench.between(first, second))
            times["Adam" if number % 2 else "NorMuon alone"].append(bench.between(second, third))
        least = floor(chosen[1], h, sum(batches[1:], []))
        limit = sum(least.values())
        data.append(dict(stage=stage, wall=wall, times=times, floor=least))
        parts = (times[name] for name in ("model", "NorMuon alone", "Adam"))
        parts = [1000 * statistics.median(x) if x else "" for x in parts]
        rows.append([stage, *parts, 1000 * wall, 1000 * limit, wall / limit])
    head = ["stage", "model, ms", "NorMuon alone", "with Adam", "a step, wall"]
    return text + markdown([*head, "floor of an H100", "times that"], rows), data


ROUNDS = 12  # of section `ab`


@contextlib.contextmanager
def constants(changes: Iterable[str], script: ModuleType) -> Iterator[None]:
    """Inside, constants have other values: "triton_kernels.LOSS.WIDTH=512" is an entry of a dict;
    "train_gpt.MUDD_SCALE=0.2" is the script's. Raises KeyError for an unknown one."""
    before = []
    try:
        for change in changes:
            place, _, value = change.partition("=")
            module, *path, last = place.split(".")
            values = vars(script if module == "train_gpt" else importlib.import_module(module))
            for name in path:
                values = values[name]
            before.append((values, last, values[last]))
            values[last] = ast.literal_eval(value)
        yield
    finally:
        for values, last, value in reversed(before):
            values[last] = value


def ab(bench: Bench) -> tuple[str, Any]:
    """Forward and backward of one micro-batch of the first and the last stage: the script and each
    --variant in turn, in one process. Each has its own module of the script, and compiles anew."""
    h = bench.settings()
    variants, rows, data = [], [], []
    for name in ("train_gpt.py", *bench.variants):
        changes = [word for word in name.split() if "=" in word]
        own = [word for word in name.split() if "=" not in word] or [ROOT / "train_gpt.py"]
        script = load_script(Path(own[0]).resolve(), f"variant_{len(variants)}")
        changed = functools.partial(constants, changes, script)
        with changed():
            manager = bench.manager(script.Hyperparameters(**vars(h)), script)
        variants.append((name, changed, manager, []))
    for stage in ("stage 1", "stage 3"):
        number = stages_of(h)[stage][0]
        batch = bench.batches(h, number, 1)[0][:1]
        for *_, times in variants:
            times.clear()
        for _ in range(1 + ROUNDS):
            for _, changed, manager, times in variants:
                with changed():
                    enter(manager, number)
                    bench.passes(manager, batch)  # the host gets ahead, as in a step
                    start = bench.mark()
                    bench.passes(manager, batch)
                    end = bench.mark()
                    bench.synchronize()
                times.append(bench.between(start, end))
        first = statistics.median(variants[0][-1][1:])
        for name, _, _, (_, *times) in variants:  # the first round compiles
            median = statistics.median(times)
            spread = abs(statistics.median(times[::2]) / statistics.median(times[1::2]) - 1)
            rows.append([stage, name, 1000 * median, f"{median / first:.4f}", f"{spread:.2%}"])
            data.append(dict(stage=stage, variant=name, seconds=times))
    text = f"Medians of {ROUNDS} rounds; A/A: every second round against the others.\n\n"
    return text + markdown(["stage", "variant", "ms", "of the first", "A/A"], rows), data


ALL = (environment, attention, model, run, profile, step, ab)
SECTIONS: dict[str, Callable[[Bench], tuple[str, Any]]] = {x.__name__: x for x in ALL}


# -----------------------------------------------------------------------------
# The report

SMI = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits")


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[float, float]]]:
    """Inside, the list grows once a second by each GPU's clock in MHz and power in W."""
    seen, over = [], threading.Event()

    def look() -> None:
        while shutil.which(SMI[0]) and not over.wait(1):
            said = subprocess.run(SMI, capture_output=True, text=True).stdout
            seen.extend((float(x), float(y)) for x, y in re.findall(r"([\d.]+), ([\d.]+)", said))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield seen
    over.set()
    thread.join()


def write_report(bench: Bench, results: dict[str, dict]) -> None:
    title = "A dry run on a CPU: no figure here is a measurement" if bench.dry else bench.gpu
    failed = [name for name, result in results.items() if result["failure"]]
    lines = [f"# {title}, {datetime.date.today()}", ""]
    lines.append(f"By `bench/gpu.py`. Failed: {', '.join(failed) or 'nothing'}.")
    for name, result in results.items():
        lines += ["", f"## {name} ({result['seconds']:.0f} s)", ""]
        if result["failure"]:
            lines += [f"**FAILED**: {result['failure']}", ""]
        lines.append(result["text"])
    bench.report.with_suffix(".json").write_text(json.dumps(results, indent=1, default=str))
    bench.report.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def result_of(section: str, bench: Bench) -> dict[str, Any]:
    started, failure = time.perf_counter(), ""
    with watched() as seen:
        try:
            text, data = SECTIONS[section](bench)
        except SectionError as error:
            failure, text, data = str(error), error.text, error.data
        except Exception as error:  # one section's fault must not cost the others their turn
            failure, data = f"{type(error).__name__}: {error}", {}
            text = f"```\n{traceback.format_exc()}\n```"
    seconds = time.perf_counter() - started
    for name, values in zip(("MHz", "W"), zip(*seen)):
        middle = statistics.median(values)
        text += f"\n\n{name}: median {middle:.0f}, {min(values):.0f} to {max(values):.0f}"
    print(f"{section}: {'FAILED: ' + failure if failure else 'ok'} ({seconds:.0f} s)", flush=True)
    return dict(failure=failure, seconds=seconds, text=text, data=data, clock_and_power=seen)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--section", default=",".join(SECTIONS), help="by comma: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="the same code on a CPU, tiny sizes")
    parser.add_argument("--variant", action="append", default=[], help="in section ab: a script, or "
        "constants such as triton_kernels.LOSS.WIDTH=512, or both; may be repeated")  # fmt: skip
    parser.add_argument("--output", type=Path, default=ROOT / "records", help="of the report")
    parser.add_argument("--cache", type=Path, help="shards, compiled kernels (~/.cache/bankrun)")
    args = parser.parse_args(argv)
    if unknown := set(args.section.split(",")) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry-run walks the same code on a CPU")
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="bankrun-gpu-") as scratch:
        usual = Path(scratch) if args.dry_run else Path.home() / ".cache/bankrun"
        cache = (args.cache or usual).resolve()
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/inductor")
        os.environ.setdefault("TRITON_CACHE_DIR", f"{cache}/triton")
        for folder in (cache, args.output):
            folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(args.dry_run, Path(scratch), cache, args.output, args.variant)
        name = f"{datetime.date.today()}-{'dry-run' if bench.dry else bench.gpu}"
        bench.report = args.output / re.sub(r"[^\w-]+", "-", name)
        if bench.report.with_suffix(".md").exists():
            bench.report = args.output / f"{bench.report.name}-{time.strftime('%H%M%S')}"
        results: dict[str, dict] = {}
        for section in args.section.split(","):
            results[section] = result_of(section, bench)
            write_report(bench, results)
    print(f"report: {bench.report}.md and .json", flush=True)
    return int(any(result["failure"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
