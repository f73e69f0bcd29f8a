"""Time the training on a CUDA machine, beside the least time that an H100 could take.

    ./run.sh bench/gpu.py --first               # 8 minutes on a new card: the first answers, in order
    ./run.sh bench/gpu.py --second              # 6 minutes more, with filled caches
    ./run.sh bench/gpu.py                       # environment, run, profile, ab
    ./run.sh bench/gpu.py --section=run,loss    # some sections
    ./run.sh bench/gpu.py --first --dry-run     # on a CPU at tiny sizes: proves the command alone
    ./run.sh bench/gpu.py --section=ab --variant=ideas/idea.py --variant=triton_kernels.LOSS.WIDTH=512

Nothing is downloaded; shards and compiled kernels stay in ~/.cache/bankrun. The report is written to
records/ anew after each section. A section that fails leaves the others their turn and makes the exit
code 1; with --first and --second each is a process of its own, with a limit of its own.
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
import math
import operator
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

STARTED = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

import train_gpt
import triton_kernels as tk
from bench import kernels
from bench.settings import fineweb_lengths, largest_batch, longest_cut, markdown
from bench.settings import model_parameters, rows_of
from data.local_text import find_files, read_text
from data.shards import write_shard
from runtime.ranks import Ranks
from runtime.run import cache_graphs
from sample import load_script
from train_gpt import LAYERS, MLP_BANK_LAYERS, MUDD, POLAR_EXPRESS_COEFFICIENTS, STAGES
from train_gpt import VALUE_LAYERS, Hyperparameters, NorMuon, StepSchedule, make_plan, param_table
from triton_kernels import tl, triton  # or what stands in for them

# -----------------------------------------------------------------------------
# What the sections share


@dataclasses.dataclass
class Bench:
    dry: bool
    scratch: Path  # gone at the end
    cache: Path  # shards; stays
    report: Path  # without suffix
    variants: list[str]  # for section ab
    until: float = math.inf  # time.monotonic() by which a section must have ended

    @functools.cached_property
    def attention(self) -> str:
        """Chosen before the first model is made."""
        return tk.flash_attention()

    def beside(self, name: str) -> Path:
        """A file beside the report."""
        return self.report.with_name(f"{self.report.name}-{name}.txt")

    def output_of(self, name: str, command: list, **variables: str) -> tuple[int | None, str]:
        """Exit code and output of a command, which stays in a file beside the report. No code: it is
        ended where the section's time ends."""
        with open(self.beside(name), "w+", encoding="utf-8", errors="replace") as file:
            environ = {**os.environ, **variables}
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, cwd=ROOT)
            left = self.until - time.monotonic() - GRACE
            with suppress(subprocess.TimeoutExpired):
                process.wait(None if math.isinf(left) else max(1.0, left))
            code = process.poll()
            process.terminate()
            file.seek(0)
            return code, file.read()

    @property
    def ranks(self) -> Ranks:
        return Ranks(0, 1, torch.device("cpu" if self.dry else "cuda"))

    @functools.cached_property
    def shards(self) -> Path:
        """PyTorch's own text as bytes, some 85 million tokens; asyncio's on a dry run."""
        source = Path(sysconfig.get_paths()["stdlib"], "asyncio")
        if not self.dry:
            source = Path(torch.__file__).parent
        folder = self.cache / f"text-{torch.__version__}"
        if not (folder / "text_val_000000.bin").exists():
            make_shards(source, folder)
        return folder

    def settings(self, **changes: Any) -> Any:
        """The record preset on these shards: byte tokens under its vocabulary, few steps, validated
        at the start and the end alone; tiny on a dry run."""
        found = dict(data=str(self.shards), bos_id=256, encoding="bytes")
        found |= dict(num_scheduled_iterations=45, num_extension_iterations=5, val_every=50)
        found |= dict(val_tokens=524_288, val_batch_tokens=524_288, log_dir=str(self.scratch))
        if self.dry:
            found |= dict(vocab_size=257, model_dim=32, num_heads=2, head_dim=16, bigram_rows=768)
            found |= dict(dtype="float32", compile=False, batch_unit=32, micro_batches=2)
            found |= dict(num_scheduled_iterations=6, num_extension_iterations=2, val_every=8)
            found |= dict(val_tokens=2048, val_batch_tokens=2048, block_size=16)
        return Hyperparameters(**found | changes)

    def manager(self, h: Any, script: ModuleType) -> Any:
        """The script's model in its manager. Graphs of the recipe come from the cache that its runs
        fill; a variant's never, as the cache does not see its operators and constants."""
        self.attention
        torch._dynamo.config.recompile_limit = 64
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = False
        if script is train_gpt:
            cache_graphs(recipe_sources())
        return script.build(h, self.ranks, longest_cut(h))

    @functools.cached_property
    def warm_up(self) -> float:
        """Seconds of the script's own warm-up, once a process: what follows compiles nothing."""
        started = time.perf_counter()
        h = self.settings()
        train_gpt.warm_up(self.manager(h, train_gpt), make_plan(h), self.ranks)
        return time.perf_counter() - started

    def batches(self, h: Any, step: int, count: int) -> list[list[tuple[torch.Tensor, ...]]]:
        """The micro-batches of so many steps from `step` on, on the CPU."""
        stream = train_gpt.training_batches(h, make_plan(h), self.ranks, step)
        found = [list(itertools.islice(stream, h.micro_batches)) for _ in range(count)]
        stream.close()
        return found

    def passes(self, manager: Any, schedule: Any, batches: Iterable[tuple]) -> None:
        """Forward and backward passes of a step."""
        for batch in batches:
            batch = [x.to(self.ranks.device, non_blocking=True) for x in batch]
            manager.model(*batch, schedule).backward()
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


GRACE = 5.0  # seconds in which a section reports, or is ended


def ended(code: int | None) -> str:
    if code is None:
        return "ended at its limit"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def recipe_sources() -> dict[str, str]:
    """What a run of the recipe imports of ours: the cache of graphs is one run's for these."""
    found = train_gpt.SOURCES.imported().items()
    own = ("bench/", "data/local_text.py")  # imported here alone
    return {name: text for name, text in found if not name.startswith(own)}


END = np.array([256], np.uint16)  # the token with which a document begins


def make_shards(source: Path, folder: Path) -> None:
    """Shards of all text in `source`, as bytes, in documents as long as FineWeb's: attention takes
    what it does in a real run. One document in twenty is validation."""
    text = np.frombuffer(
        b"".join(filter(None, map(read_text, find_files(source, [], folder)))), "u1"
    )
    documents, start = {"train": [], "val": []}, 0
    for number, tokens in enumerate(fineweb_lengths()):
        if start >= len(text):
            break
        piece = np.concatenate((END, text[start : start + tokens - 1]))
        documents["train" if number % 20 else "val"].append(piece)
        start += tokens - 1
    folder.mkdir(parents=True, exist_ok=True)
    for side, own in documents.items():
        write_shard(folder / f"text_{side}_000000.bin", np.concatenate(own))


def stages_of(h: Any) -> dict[str, range]:
    """The steps of each stage, and of the extension."""
    ends = [round(stage.until * h.num_scheduled_iterations) for stage in STAGES]
    names = [*(f"stage {stage.index}" for stage in STAGES), "extension"]
    bounds = itertools.pairwise([0, *ends, h.total_iterations])
    return {name: range(*pair) for name, pair in zip(names, bounds)}


def enter(manager: Any, now: StepSchedule) -> Any:
    """Take the manager to this step of the plan, which may skip steps before it; what its forward
    passes need."""
    split = train_gpt.split_step(manager.h.num_scheduled_iterations)
    if manager.optimizer.tied and now.step > split:
        manager.optimizer.split_tied()
    return manager.advance_schedule(now)


# -----------------------------------------------------------------------------
# The floor: the least time of a step on one H100, class by class. Operations or bytes take it, at
# rates that an H100 reaches. Bytes are those of the tensors that must cross from one matmul,
# attention or sum over all tokens to the next, each once, without weights. Nothing overlaps; a matmul
# adds up its gradients.

BF16 = 790e12  # operations a second: matmuls of 8192 cubed on an H100
FP8 = 1500e12  # operations a second: the LM head in records/2026-11-26, 1.66 ms backward
ATTENTION = 600e12  # operations a second, assumed: FlashAttention 3, arXiv 2407.08608
MEMORY = 3.0e12  # bytes a second: adam_update in records/2026-11-26


def mean_keys(documents: np.ndarray, window: int, positions: int = 1) -> float:
    """Keys that a query sees on average: its own and up to `window` before it in its document.
    documents: lengths in tokens, a token being so many positions; window in positions."""
    lengths = positions * documents.astype(np.int64)
    first = np.minimum(lengths, window + 1)  # queries that see the document's start
    seen = first * (first + 1) // 2 + (lengths - first) * (window + 1)
    return seen.sum() / lengths.sum()


def floor(now: StepSchedule, h: Hyperparameters, batches: list[tuple] = ()) -> dict[str, float]:
    """Seconds of each class in a step of one GPU, with the documents of these micro-batches, (inputs,
    targets, cu_seqlens) each, or of FineWeb's lengths."""
    documents = np.minimum(list(itertools.islice(fineweb_lengths(), 20_000)), now.max_doc_len)
    if batches:
        documents = np.concatenate([np.diff(np.unique(starts)) for _, _, starts in batches])
    shapes = {label: x.shape for label, x in model_parameters(h).items()}
    weights = {label: math.prod(shape) for label, shape in shapes.items()}
    up = weights["mlp"] * len(LAYERS) // MLP_BANK_LAYERS // 2  # weights of all up-projections
    mudd = weights["mudd_W1"] + weights["mudd_W2"]
    fp8_head, fp8_up = (FP8 if on else BF16 for on in (h.fp8_head, h.fp8_mlp))
    matmul = 2 * now.batch_tokens  # operations of a weight
    tensor = 2 * now.batch_tokens * h.model_dim / MEMORY  # seconds of one (tokens, dim) in 16 bits
    attending = [layer for layer in LAYERS if layer.window]
    attention = 0.0
    for layer in attending:
        keys = mean_keys(documents, getattr(now, f"{layer.window}_window"), 1 + layer.paired)
        product = matmul * h.model_dim * keys / ATTENTION
        # Scores and y; q, k, v and y move. Backward scores and four gradients; these, dy, dq, dk, dv.
        attention += max(2 * product, 4 * tensor) + max(5 * product, 8 * tensor)
    # A sum of the stream reads two tensors and writes one; backward a gradient is read and written. A
    # norm is written; backward it and its gradient are read. Kept tensors are read, and backward they
    # and a gradient; the embedding's uses are one pass.
    sums = len(attending) + len(LAYERS)
    norms = 2 + sums - sum(layer.same_input for layer in LAYERS)
    kept = len(MUDD[1]) + sum(bool(layer.add) + 2 * layer.mudd for layer in LAYERS)
    stream = 5 * sums + 3 * norms + 2 * len(attending) + 3 * kept
    # Head gates take 2 and 3 tensors. XSA reads v; backward it reads v, writes its part of dv and adds
    # the two. A value embedding takes 3 each way. FP8 reads 16 bits of input and weights, writes 8.
    xsa = sum(not layer.paired for layer in attending)
    values = 5 * len(attending) + 6 * xsa + 6 * VALUE_LAYERS
    up_in_fp8 = 1.5 * len(LAYERS) * tensor + 3 * h.micro_batches * up / MEMORY
    head_in_fp8 = 2 * tensor + 4 * h.micro_batches * weights["lm_head"] / MEMORY
    rows = sum(shapes[label][1] for label in ("embed", "value_embeds", "bigram_embed"))
    return {
        "matmuls": matmul * (3 * (weights["attn"] + mudd) + 4 * up) / BF16,
        "MLP kernels": matmul * up * (1 / fp8_up + 1 / BF16),
        "LM head": 3 * matmul * weights["lm_head"] / fp8_head,
        "attention": attention,
        "loss": 4 * now.batch_tokens * shapes["embed"][0] / MEMORY,  # 2 bytes read, 2 written
        "q, k": 10 * len(attending) * tensor,  # 2 read, 2 written; backward 4 and 2
        "norms, residuals": stream * tensor,
        "gates, values, other": values * tensor + up_in_fp8 * h.fp8_mlp,
        "embeddings": 3 * rows / h.model_dim * tensor,  # rows read and written; gradients read
        "copies, quantization": head_in_fp8 * h.fp8_head,
        "optimizer": update_floor(h),
    }


def update_floor(h: Hyperparameters) -> float:
    """Seconds of an optimizer step, the mean of one with Adam and one without."""
    seconds = 0.0
    for label, parameter in model_parameters(h).items():
        row = param_table(h)[label]
        moved = 10 if row.tied_to else 22  # bytes: transposes; gradient, weight, two moments
        operations = 0
        if isinstance(row, NorMuon):
            moved = 18  # gradient, weight with mantissa, momentum
            count, height, width = rows_of(parameter, row).shape
            for groups in (row.groups(i, height) for i in range(count)):
                short, long = sorted((height // groups, width))
                # X Xᵀ and A² are symmetric: half of them; then the matmul with X.
                operations += groups * (3 * short**2 * long + short**3)
        operations *= len(POLAR_EXPRESS_COEFFICIENTS)
        seconds += (operations / BF16 + moved * math.prod(parameter.shape) / MEMORY) / row.every
    return seconds


# -----------------------------------------------------------------------------
# Sections: each returns Markdown and data, and raises an error for what does not hold


def nvidia_smi(query: str) -> str:
    """These properties of each GPU, or why they are not known."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        said = subprocess.check_output(command, text=True, stderr=subprocess.STDOUT, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return said.strip().replace("\n", "; ")


def environment(bench: Bench) -> tuple[str, Any]:
    version = getattr(sys.modules.get("triton"), "__version__", "none")
    facts = {"Python": sys.version.split()[0], "PyTorch": torch.__version__, "Triton": version}
    if not bench.dry:
        facts["GPUs"] = nvidia_smi("name,driver_version,memory.total,clocks.max.sm")
        facts["CUDA"] = torch.version.cuda
        facts["compute capability"] = torch.cuda.get_device_capability()
    facts["FP8 matmuls in the LM head"] = tk.has_fp8(bench.ranks.device)
    facts["attention"] = bench.attention
    filled = any(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).glob("*"))
    facts["cache"] = f"{bench.cache}: {'filled' if filled else 'empty'}"
    return markdown(["what", "is"], facts.items()), facts


def run(bench: Bench) -> tuple[str, Any]:
    """The real script, launched as users launch it: compiles cleanly, learns; the stages' speed."""
    log_path = bench.beside("run")
    h = bench.settings(run_id=log_path.stem, log_dir=str(log_path.parent))
    plan = make_plan(h)
    defaults = vars(Hyperparameters())
    options = [f"--{name}={x}" for name, x in vars(h).items() if x != defaults[name]]
    command = [sys.executable, ROOT / "runtime/launch.py", ROOT / "train_gpt.py", "--preset=record"]
    how = dict(TORCH_LOGS="recompiles,graph_breaks")
    code, said = bench.output_of("console", [*command, *options], **how)
    if code != 0:
        raise RuntimeError(f"{ended(code)}\n{said[-4000:]}")
    log = log_path.read_text(encoding="utf-8").rpartition("=" * 100)[2]
    losses = [float(x) for x in re.findall(r"val_loss:([\d.]+)", log)]
    times = re.findall(r"^step:(\d+)/\d+ train_time:(\d+)ms", log, re.M)
    ends = {int(step): float(ms) / 1000 for step, ms in times}
    ranks = int(re.search(r"parameters, (?:ranks: )?(\d+)", said)[1])
    rows, stages = [], []
    for name, steps in stages_of(h).items():
        last = range(max(steps.start + 2, steps.stop - 6), steps.stop + 1)  # step:7 ends step 6
        seconds = statistics.median(ends[s] - ends[s - 1] for s in last if s - 1 in ends)
        tokens = plan[steps[-1]].batch_tokens
        least = sum(floor(plan[steps[-1]], h).values()) / ranks
        stages.append({"stage": name, "seconds": seconds, "tokens": tokens, "floor": least})
        speed = f"{tokens / seconds:,.0f}"
        rows.append([name, f"{tokens:,}", 1000 * seconds, speed, 1000 * least, seconds / least])
    warm_up, after = re.search(r"warm-up:? (\d+) s$(.*)", said, re.M | re.S).groups()
    recompiled, breaks = after.count("Recompiling function"), said.count("Graph break")
    head = ["stage", "tokens a step", "ms a step", "tokens/s", "floor of an H100, ms", "times that"]
    text = f"{markdown(head, rows)}\n\n{ranks} ranks. Warm-up: {warm_up} s. Losses: {losses}. "
    text += f"Graph breaks: {breaks}; recompiled after the warm-up: {recompiled}. "
    text += re.search(r"^peak memory.*", log, re.M)[0]
    text += "".join(f"\n{x}" for x in re.findall(r"^.*kernels agree with PyTorch.*", log, re.M))
    if breaks or recompiled or not losses[-1] < losses[0]:
        raise RuntimeError(f"graph breaks, recompilation, or a loss that does not fall\n{text}")
    return text, dict(stages=stages, losses=losses, outcomes={"warm-up": warm_up})


OTHER = "gates, values, other"
GENERATED = r"^triton_(poi|red|per)_fused\w*"  # by Inductor, named after all that is fused
# Classes of GPU kernels, and of PyTorch's operators on a CPU, by name; the first that matches. Those
# that `floor` knows have its names.
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


def profiled(bench: Bench, work: Callable[[], None]) -> tuple[Counter, Counter, float]:
    """Seconds and calls by kernel, on a CPU by operator; seconds in which none ran."""
    bench.synchronize()
    with torch.profiler.profile() as prof:  # the CPU, and a GPU if there is one
        started = time.perf_counter()
        work()
        bench.synchronize()
        wall = time.perf_counter() - started
    times, calls = Counter(), Counter()
    for event in prof.events():
        if (event.device_type == torch.autograd.DeviceType.CPU) == bench.dry:
            own = event.self_cpu_time_total if bench.dry else event.time_range.elapsed_us()
            times[event.name] += own / 1e6
            calls[event.name] += 1
    return times, calls, max(0.0, wall - sum(times.values()))


def profile(bench: Bench) -> tuple[str, Any]:
    """Two steps of each stage under the profiler, without Adam and with it, in one process; the mean
    of both, class by class, beside the floor."""
    h = bench.settings()
    text = f"Attention: {bench.attention}. Warm-up: {bench.warm_up:.0f} s. "
    text += "ms of the mean step of two, and the H100's floor.\n\n"
    plan, manager = make_plan(h), bench.manager(h, train_gpt)
    columns, tops, data = {}, [], []
    for stage, steps in stages_of(h).items():
        if stage == "extension":  # stage 3 with wider windows
            continue
        even = [step for step in steps[:-1] if step % 2 == 0][:2][-1]
        both = bench.batches(h, even, 2)
        measured = Counter()
        for step, batches in zip((even, even + 1), both):
            schedule = enter(manager, plan[step])
            passes = functools.partial(bench.passes, manager, schedule, batches)
            update = functools.partial(manager.step_optimizers, plan[step])
            for part, work in (("model", passes), ("optimizer", update)):
                label = f"{stage}, {'Adam' if step % 2 else 'NorMuon alone'}, {part}"
                times, calls, idle = profiled(bench, work)
                shares = Counter(idle=idle)
                for name, seconds in times.items():
                    shares["optimizer" if part == "optimizer" else kind_of(name)] += seconds
                measured.update({name: seconds / 2 for name, seconds in shares.items()})
                top = [(x, calls[x], 1e3 * t, 1e6 * t / calls[x]) for x, t in times.most_common(40)]
                tops += [[label, name[:60], *numbers] for name, *numbers in top[:4]]
                data.append(dict(step=label, shares=shares, top=top))
                print(label, {x: round(1e3 * t, 2) for x, t in shares.items()}, flush=True)
        columns[stage] = measured
        columns[f"{stage}, floor"] = floor(plan[even], h, sum(both, []))
    rows = [[name, *(1000 * x.get(name, 0.0) for x in columns.values())] for name in SHOWN]
    rows.append(["**step**", *(1000 * sum(x.values()) for x in columns.values())])
    text += markdown(["class", *columns], rows) + "\n\n"
    return text + markdown(["step", "kernel", "calls", "ms", "µs a call"], tops), data


def signed(numbers: Iterable[float]) -> str:
    return " / ".join(f"{x:+.1f}" for x in numbers).replace("-", "−")


@contextlib.contextmanager
def constants(changes: Iterable[str], script: ModuleType) -> Iterator[None]:
    """Inside, constants have other values: "triton_kernels.LOSS.WIDTH=512" is an entry of a dict;
    "train_gpt.MUDD_SCALE=0.2" is the script's; "train_gpt.lookup=reference" takes a function's kernel
    away. Raises KeyError for an unknown one."""
    with contextlib.ExitStack() as stack:
        for change in changes:
            place, _, value = change.partition("=")
            module, *path, name = place.split(".")
            owner = script if module == "train_gpt" else importlib.import_module(module)
            values = functools.reduce(operator.getitem, path, vars(owner))
            stack.callback(values.__setitem__, name, values[name])
            plain = value == "reference"
            values[name] = values[name].__wrapped__ if plain else ast.literal_eval(value)
        yield


def ab(bench: Bench) -> tuple[str, Any]:
    """Forward and backward of one micro-batch of the first and the last stage: the script and each
    --variant in turn, in one process. Each has its own module of the script, and compiles anew."""
    h = bench.settings()
    plan, variants, rows, data, gains = make_plan(h), [], [], [], defaultdict(list)
    rounds = 2 if bench.dry else 12
    for name in ("train_gpt.py", *bench.variants):
        changes = [word for word in name.split() if "=" in word]
        own = [word for word in name.split() if "=" not in word] or [ROOT / "train_gpt.py"]
        script = load_script(Path(own[0]).resolve(), f"variant_{len(variants)}")
        changed = functools.partial(constants, changes, script)
        with changed():
            manager = bench.manager(script.Hyperparameters(**vars(h)), script)
        variants.append((name, changed, manager, []))
    for stage in ("stage 1", "stage 3"):
        now = plan[stages_of(h)[stage][0]]
        batch = bench.batches(h, now.step, 1)[0][:1]
        for *_, times in variants:
            times.clear()
        for _ in range(1 + rounds):
            for _, changed, manager, times in variants:
                with changed():
                    schedule = enter(manager, now)
                    bench.passes(manager, schedule, batch)  # the host gets ahead, as in a step
                    start = bench.mark()
                    bench.passes(manager, schedule, batch)
                    end = bench.mark()
                    bench.synchronize()
                times.append(bench.between(start, end))
        first = statistics.median(variants[0][-1][1:])
        for name, _, _, (_, *times) in variants:  # the first round compiles
            median = statistics.median(times)
            spread = abs(statistics.median(times[::2]) / statistics.median(times[1::2]) - 1)
            rows.append([stage, name, 1000 * median, f"{median / first:.4f}", f"{spread:.2%}"])
            print(*rows[-1], flush=True)
            data.append(dict(stage=stage, variant=name, seconds=times))
            gains[name].append(1000 * h.micro_batches * (first - median))
    text = f"Medians of {rounds} rounds; A/A: every second round against the others. Attention: "
    text += f"{bench.attention}.\n\n"
    outcomes = {x: f"{signed(own)} in stages 1 / 3" for x, own in gains.items()}
    table = markdown(["stage", "variant", "ms", "of the first", "A/A"], rows)
    return text + table, dict(rounds=data, outcomes=outcomes)


def pytest_collection_modifyitems(items: list) -> None:
    """pytest -p bench.gpu: first what no report lists as passed, then a case of each test in turn."""
    known, cases = set(), defaultdict(itertools.count)
    for path in (ROOT / "records").glob("2*.json"):
        with suppress(ValueError, KeyError, TypeError):  # of another tool, or without this section
            known |= set(json.loads(path.read_text())["tests"]["data"]["passed"])
    order = {x: (x.nodeid in known, next(cases[x.nodeid.partition("[")[0]])) for x in items}
    items.sort(key=order.get)


def tests(bench: Bench) -> tuple[str, Any]:
    """The kernels against their references: pytest on the GPU, as many as there is time for."""
    chosen = ["tests/kernels/test_seam.py"] if bench.dry else ["-m", "gpu", "tests/kernels"]
    how = ["-vv", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-p", "bench.gpu"]
    how += ["--continue-on-collection-errors"]  # of files without GPU tests
    command = [sys.executable, "-m", "pytest", *chosen, *how]
    code, said = bench.output_of("tests", command, COLUMNS="160")
    results = re.findall(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", said, re.M)
    if not results:
        raise RuntimeError(f"no test has run, {ended(code)}\n{said[-1500:]}")
    names = defaultdict(list)
    for name, result in results:
        names[result.lower()].append(name)
    asked = re.search(r"collected .*?(\d+)(?: items?| selected)$", said, re.M)
    text = ", ".join(f"{len(own)} {result}" for result, own in names.items())
    text += f" of {asked[1] if asked else 'unknown'}; pytest {ended(code)}.\n"
    failed = names["failed"] + names["error"]
    reasons = dict(re.findall(r"^(?:FAILED|ERROR) (tests/\S+::.*?) - (.*)", said, re.M))
    text += "".join(f"\n- {name}: {reasons.get(name, '')}" for name in failed[:20])
    return text, dict(names, failure=f"{len(failed)} tests failed" if failed else "")


def compared(case: kernels.Case, variants: dict[str, Callable], calls: int) -> str:
    """A kernel with each of these changes, in turn: three medians of its time, and that of a step with
    so many calls."""
    inputs, times = kernels.made_inputs(case), defaultdict(list)
    rounds = 3 if torch.cuda.is_available() else 1
    for _, (name, changed) in itertools.product(range(rounds), variants.items()):
        with tk.kernels_of("cuda"), changed():
            times[name].append(1e6 * kernels.median_time(case.run, inputs))
        print(name, times[name][-1], flush=True)
    rows = []
    for name, own in times.items():
        medians = " / ".join(f"{x:,.1f}" for x in own)
        rows.append([name, medians, calls * statistics.median(own) / 1000])
    return markdown(["variant", "µs a call, three times", "ms a step"], rows)


# None spills on an H100; by Triton 3.6 all do but the last, 8 to 24 bytes a thread.
LOSS_VARIANTS = (
    "LOSS.WIDTH=256", "LOSS.WIDTH=1024", "LOSS.AHEAD=2", "LOSS.AHEAD=4", "LOSS.BLOCK=32",
    "LOSS.ROWS=32 LOSS.num_warps=4 LOSS_PROGRAMS=8", "LOSS.maxnreg=80 LOSS_PROGRAMS=3",
)  # fmt: skip
RECORDED_LOSS = (24.25, 48.68, 73.78)  # ms a step of the kernel before, records/2026-11-26


def loss(bench: Bench) -> tuple[str, Any]:
    """The loss kernel with each stage's tokens; with other constants, in the last stage."""
    h = bench.settings()
    steps = []  # ms
    for stage in STAGES:
        tokens = stage.batch * h.batch_unit // h.micro_batches
        case = kernels.cases_of(h, tokens)["loss_and_fp8_gradient"]
        with tk.kernels_of("cuda"):
            seconds = kernels.median_time(case.run, kernels.made_inputs(case))
        steps.append(1000 * h.micro_batches * seconds)
    text = f"ms a step in stages 1 / 2 / 3: {' / '.join(map('{:.2f}'.format, steps))}. "
    print(text, flush=True)
    variants = {"as it is": contextlib.nullcontext}
    for name in LOSS_VARIANTS[: 1 if bench.dry else None]:
        changes = [f"triton_kernels.{word}" for word in name.split()]
        variants[name] = functools.partial(constants, changes, train_gpt)
    text += f"In stage 3:\n\n{compared(case, variants, h.micro_batches)}"
    gain = signed(new - old for new, old in zip(steps, RECORDED_LOSS))
    return text, dict(outcomes={"loss": gain})


def speed(bench: Bench) -> tuple[str, Any]:
    """Two kernels that were slower than PyTorch, at their own shapes."""
    h, rows = bench.settings(), []
    cases = kernels.cases_of(h, largest_batch(h) // h.micro_batches)
    for name in ("cross_entropy", "XTX"):
        case = cases[name]
        if bench.dry:
            case = case._replace(torch=case.torch[:1])  # nothing is compiled
        rows.append([name, case.shape, *kernels.measured_row(case)])
        print(*rows[-1], flush=True)
    return markdown(["kernel", "shape", *kernels.MEASURED], rows), rows


def attention(bench: Bench) -> tuple[str, Any]:
    """FlashAttention 4 against 2."""
    text, saved = kernels.attention_table()
    return text, dict(outcomes={"attention": signed(-x for x in saved[:3])} if saved else {})


@triton.jit
def no_prefetch(matrix, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    pass


def prefetch(bench: Bench) -> tuple[str, Any]:
    """The MLP's backward kernel with and without its prefetch, in the last stage."""
    original = tk.relu_squared_kernel.fn
    names = {**vars(tk), "_prefetch_tile": no_prefetch}
    plain = FunctionType(original.__code__, names)
    plain.__annotations__ = original.__annotations__
    without = functools.partial(mock.patch.object, tk, "relu_squared_kernel", triton.jit(plain))
    h = bench.settings()
    case = kernels.cases_of(h, largest_batch(h) // h.micro_batches)["relu_squared_backward"]
    variants = {"as it is": contextlib.nullcontext, "without prefetch": without}
    return compared(case, variants, h.micro_batches * len(LAYERS)), {}


ALL = (environment, run, tests, loss, speed, attention, prefetch, ab, profile)
SECTIONS: dict[str, Callable[[Bench], tuple[str, Any]]] = {x.__name__: x for x in ALL}


# -----------------------------------------------------------------------------
# The first hours with a card


class Plan(NamedTuple):
    minutes: float
    needs: dict[str, float]  # seconds that each section takes at least, in their order
    predicted: dict[str, tuple[str, str, str]]  # by an outcome's name: section, what, estimate


GATES, TABLES = "train_gpt.gate_logits=reference", "train_gpt.lookup=reference"
FIRST = dict(environment=15, run=250, tests=60, loss=35, speed=35)
SECOND = dict(environment=15, run=60, attention=20, prefetch=20, ab=60, profile=60)
STEP = "ms a step in stages 1 / 2 / 3"
PLANS = {
    "first": Plan(8, FIRST, {
        "warm-up": ("run", "first warm-up, s; records/2026-11-26: 184", "130 to 200"),
        "loss": ("loss", f"the loss kernel against records/2026-11-26, {STEP}", "−12 / −25 / −37"),
    }),
    "second": Plan(6, SECOND, {
        "attention": ("attention", f"FlashAttention 4, not 2, {STEP}", "−8 / −22 / −40"),
        GATES: ("ab", "gates as sums, not matmuls, ms a step", "−0.9"),
        TABLES: ("ab", f"tables' gradients in place, {STEP}", "−9 / −9 / −8"),
    }),
}  # fmt: skip
CHILD = [sys.executable, __file__]


def in_process(section: str, bench: Bench, until: float) -> dict[str, Any]:
    """A section's result from a process of its own, which is killed where its time ends."""
    started = time.monotonic()
    folder = bench.scratch / section
    folder.mkdir()
    command = [*CHILD, f"--section={section}", f"--output={folder}", f"--until={until}"]
    command += [f"--name={bench.report.name}", *(f"--variant={x}" for x in bench.variants)]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if bench.dry:
        command.append("--dry-run")
        if section in ("loss", "speed", "prefetch"):
            environ["TRITON_INTERPRET"] = "1"
    with open(folder / "printed", "w+", encoding="utf-8", errors="replace") as printed:
        how = dict(stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=environ)
        process = subprocess.Popen(command, process_group=0, **how)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(until - time.monotonic())
            code = process.poll()
        finally:
            with suppress(OSError, subprocess.TimeoutExpired):  # no group; a driver that hangs
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(GRACE)
        printed.seek(0)
        last = "".join(printed.readlines()[-30:])
    for path in folder.glob("*.txt"):
        shutil.move(path, bench.report.parent)
    try:
        return json.loads((folder / f"{bench.report.name}.json").read_text())[section]
    except (OSError, ValueError, KeyError):  # it had not finished
        text = f"**FAILED**: {ended(code)}\n\n```\n{last}\n```"
        return dict(failure=ended(code), seconds=time.monotonic() - started, text=text, data={})


def in_turn(plan: Plan, minutes: float, bench: Bench, results: dict[str, dict]) -> None:
    """The plan's sections. Each may take what the later ones do not need."""
    end = STARTED + 60 * minutes
    needs = list(plan.needs.values())
    for i, section in enumerate(plan.needs):
        now = time.monotonic()
        until = max(now + needs[i], end - sum(needs[i + 1 :])) - GRACE
        failure = f"left out: {end - now:.0f} s are left, and it takes {needs[i]:.0f}"
        result = dict(failure=failure, seconds=0.0, text=failure, data={})
        if end - now >= needs[i]:
            result = in_process(section, bench, until)
        keep(bench, results, section, result, plan.predicted)


# -----------------------------------------------------------------------------
# The report


def result_of(section: str, bench: Bench) -> dict[str, Any]:
    """What a section found, or why it failed; clock and power at its end."""
    started, failure = time.perf_counter(), ""
    try:
        text, data = SECTIONS[section](bench)
        failure = data.pop("failure", "") if isinstance(data, dict) else ""
    except Exception as error:  # one section's fault must not cost the others their turn
        failure, data = f"{type(error).__name__}: {error}".partition("\n")[0], {}
        text = f"**FAILED**: {failure}\n\n```\n{traceback.format_exc()}\n```"
    seconds = time.perf_counter() - started
    if not bench.dry:
        text += f"\n\nAt its end: {nvidia_smi('clocks.sm,power.draw,temperature.gpu')}"
    return dict(failure=failure, seconds=seconds, text=text, data=data)


def keep(bench: Bench, results: dict, section: str, result: dict, predicted: dict = {}) -> None:
    """Print how a section has ended, and write the report anew."""
    results[section] = result
    said = f"FAILED: {result['failure']}" if result["failure"] else "ok"
    print(f"{section}: {said} ({result['seconds']:.0f} s)", flush=True)
    write_report(bench, results, predicted)


def write_report(bench: Bench, results: dict[str, dict], predicted: dict[str, tuple] = {}) -> None:
    title = "A dry run on a CPU: no figure here is a measurement"
    if not bench.dry:
        title = torch.cuda.get_device_name()
    failed = [name for name, result in results.items() if result["failure"]]
    lines = [f"# {title}, {datetime.date.today()}\n"]
    lines.append(f"By `bench/gpu.py`. Failed: {', '.join(failed) or 'nothing'}.")
    for name, result in results.items():
        lines.append(f"\n## {name} ({result['seconds']:.0f} s)\n\n{result['text']}")
    rows = []
    for name, (section, what, estimate) in predicted.items():
        found = results.get(section, {}).get("data", {}).get("outcomes", {})
        rows.append([what, estimate, found.get(name, "not measured")])
    if rows:
        head = ["what", "predicted: an estimate, no measurement", "measured"]
        lines.append(f"\n## Predicted and measured\n\n{markdown(head, rows)}")
    bench.report.with_suffix(".json").write_text(json.dumps(results, indent=1, default=str))
    bench.report.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    usual, all_of = "environment,run,profile,ab", ", ".join(SECTIONS)
    add("--section", default=usual, help=f"by comma, of {all_of} (%(default)s)")
    for name, plan in PLANS.items():
        what = f"{', '.join(plan.needs)}: within {plan.minutes} minutes"
        add(f"--{name}", dest="plan", action="store_const", const=plan, help=what)
    add("--minutes", type=float, help="for --first or --second: another number")
    add("--dry-run", action="store_true", help="the same code on a CPU, tiny sizes")
    what = "a script, or constants such as triton_kernels.LOSS.WIDTH=512, or both; may be repeated"
    add("--variant", action="append", default=[], help=f"of section ab: {what}")
    add("--output", type=Path, default=ROOT / "records", help="folder of the report")
    add("--name", help="of the report; else date and GPU")
    add("--until", type=float, default=math.inf, help=argparse.SUPPRESS)  # time.monotonic()
    args = parser.parse_args(argv)
    if unknown := set(args.section.split(",")) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {all_of}")
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry-run walks the same code on a CPU")
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)  # the tensors are tiny
    gpu = "dry-run" if args.dry_run else torch.cuda.get_device_name()
    name = args.name or re.sub(r"[^\w-]+", "-", f"{datetime.date.today()}-{gpu}")
    if any(args.output.glob(f"{name}*")):
        name += time.strftime("-%H%M%S")
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bankrun-gpu-") as scratch:
        cache = Path(scratch) if args.dry_run else Path.home() / ".cache/bankrun"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/inductor")
        os.environ.setdefault("TRITON_CACHE_DIR", f"{cache}/triton")
        places = Path(scratch), cache, args.output.resolve() / name
        bench = Bench(args.dry_run, *places, args.variant, args.until)
        results: dict[str, dict] = {}
        write_report(bench, results)  # what cannot be written is known now
        if args.plan:
            bench.variants += [GATES, TABLES]
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the section ends too
            in_turn(args.plan, args.minutes or args.plan.minutes, bench, results)
            print(bench.report.with_suffix(".md").read_text(encoding="utf-8"))
        else:
            for section in args.section.split(","):
                keep(bench, results, section, result_of(section, bench))
    print(f"report: {bench.report}.md and .json", flush=True)
    return int(any(result["failure"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
