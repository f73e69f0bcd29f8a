"""Check and time the model and its training on a CUDA machine; nothing is downloaded.

    ./run.sh bench/gpu.py                       # all sections, a report under records/
    ./run.sh bench/gpu.py --section=model,run   # some of them
    ./run.sh bench/gpu.py --dry-run             # on a CPU at tiny sizes: proves the command alone

The kernels have their own: tests/kernels/test_on_gpu.py checks them, bench/kernels.py times them.
Shards and compiled kernels stay in --cache, where the next call finds them.
A section that fails leaves the others their turn and makes the exit code 1. The report is written
anew after each.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from bench.settings import longest_cut, markdown, model_of, synthetic

BF16_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense operations a second


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

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def gpu(self) -> str:
        return "a CPU" if self.dry else torch.cuda.get_device_name()

    @functools.cached_property
    def shards(self) -> Path:
        """PyTorch's own text as bytes, some 85 million tokens; asyncio's on a dry run."""
        source = Path(torch.__file__).parent
        if self.dry:
            source = Path(sysconfig.get_paths()["stdlib"], "asyncio")
        folder = self.cache / source.name
        command = [sys.executable, str(ROOT / "data/local_text.py")]
        command += [f"--input={source}", f"--output={folder}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return folder

    def settings(self, **changes: Any) -> Any:
        """The record preset on these shards: byte tokens under its vocabulary, few steps, validated
        at the start and the end alone; tiny on a dry run."""
        from train_gpt import Hyperparameters

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

    def manager(self, h: Any) -> Any:
        import train_gpt
        from runtime.ranks import Ranks

        torch._dynamo.config.recompile_limit = 64
        return train_gpt.build(h, Ranks(0, 1, self.device), longest_cut(h))

    def batch(self, h: Any, tokens: int) -> list[torch.Tensor]:
        return [x.to(self.device) for x in synthetic(h, tokens)]

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()


# -----------------------------------------------------------------------------
# Sections: each returns Markdown and data, and raises SectionError for what does not hold


def environment(bench: Bench) -> tuple[str, Any]:
    import triton_kernels as tk

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
    import triton_kernels as tk
    from train_gpt import EXTENSION, FINAL_VALIDATION, STAGES

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
    import triton_kernels as tk
    from data.loader import distributed_data_generator, train_pattern
    from train_gpt import ForwardSchedule

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
        trained.compile(dynamic=False, fullgraph=True)
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


def flops_per_token(h: Any) -> int:
    """Operations of the matmuls with weights, forward and backward, without attention's own."""
    from bench.communication import model_parameters
    from train_gpt import LAYERS, MLP_BANK_LAYERS

    size = {label: math.prod(x.shape) for label, x in model_parameters(h).items()}
    return 6 * (size["attn"] + size["mlp"] * len(LAYERS) // MLP_BANK_LAYERS + size["lm_head"])


def stages_of(h: Any) -> dict[str, range]:
    """The steps of each stage: those in a row whose micro-batches and windows have one shape."""
    from train_gpt import step_schedule

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
    from train_gpt import Hyperparameters, step_schedule

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
    peak = next((x for chip, x in BF16_PEAK.items() if chip in bench.gpu), math.inf)
    rows, stages = [], []
    for name, steps in stages_of(h).items():
        last = range(max(steps.start + 2, steps.stop - 6), steps.stop + 1)  # step:7 ends step 6
        seconds = statistics.median(ends[s] - ends[s - 1] for s in last if s - 1 in ends)
        tokens = step_schedule(steps[-1], h).batch_tokens
        flops = flops_per_token(h) * tokens / seconds / ranks
        stages.append({"stage": name, "seconds": seconds, "tokens": tokens, "flops": flops})
        share = f"{flops / peak:.1%}"
        speed = f"{tokens / seconds:,.0f}"
        rows.append([name, f"{tokens:,}", 1000 * seconds, speed, f"{flops / 1e12:.3g}", share])
    warm_up, after = re.search(r"warm-up:? (\d+) s$(.*)", done.stdout, re.M | re.S).groups()
    recompiled, breaks = after.count("Recompiling function"), done.stdout.count("Graph break")
    head = ["stage", "tokens a step", "ms a step", "tokens/s", "TFLOP/s a GPU", "of the bf16 peak"]
    text = (
        f"{markdown(head, rows)}\n\n{ranks} ranks. Warm-up: {warm_up} s. Graph breaks: {breaks}; "
    )
    text += f"recompiled after the warm-up: {recompiled}. Losses: {', '.join(map(str, losses))}. "
    text += re.search(r"^peak memory.*", log, re.M)[0]
    data = dict(stages=stages, warm_up=warm_up, recompiled=recompiled, breaks=breaks, losses=losses)
    if breaks or recompiled or not losses[-1] < losses[0]:
        raise SectionError("graph breaks, recompilation, or a loss that does not fall", text, data)
    return text, data


OTHER = "elementwise and other"
KINDS = {  # of GPU kernels, and of PyTorch's operators on a CPU, by name; the first that matches
    OTHER: r"^triton_(poi|red|per)_",  # Inductor's: fused, named after all that is in them
    "attention": r"flash|fmha|attention|Banded|softmax|bmm",
    "matmuls": r"gemm|nvjet|cutlass|wgmma|sm90_xmma|product_kernel|relu_squared|aten::(add)?mm"
    r"|baddbmm|_scaled_mm|fp8_",
    "loss": r"loss_kernel|cross_entropy|logsumexp",
    "communication": r"nccl|gloo|c10d",
    "copies": r"Memcpy|Memset|copy_|transpose_kernel|quantize_kernel",
}
SHOWN = [*list(KINDS)[1:], OTHER, "idle"]


def kind_of(kernel: str) -> str:
    return next((kind for kind, name in KINDS.items() if re.search(name, kernel, re.I)), OTHER)


def kernel_times(prof: Any, dry: bool) -> tuple[dict[str, float], float]:
    """Seconds by kernel, and seconds in which at least one ran; on a CPU by operator."""
    times: dict[str, float] = defaultdict(float)
    if dry:
        for event in prof.key_averages():
            times[event.key] += event.self_cpu_time_total / 1e6
        return times, sum(times.values())
    spans = []
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += (event.time_range.end - event.time_range.start) / 1e6
            spans.append((event.time_range.start, event.time_range.end))
    busy = end = 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return times, busy / 1e6


def profile(bench: Bench) -> tuple[str, Any]:
    """Two steps of each stage under the profiler, without Adam and with it, in one process."""
    import train_gpt
    from runtime.ranks import Ranks

    h = bench.settings()
    started = time.perf_counter()
    train_gpt.warm_up(bench.manager(h), Ranks(0, 1, bench.device))
    text = f"Warm-up: {time.perf_counter() - started:.0f} s.\n\n"
    manager = bench.manager(h)
    rows, tops, data = [], [], []
    for stage, steps in stages_of(h).items():
        if stage == "extension":  # stage 3 with wider windows
            continue
        even = [step for step in steps[:-1] if step % 2 == 0][:2][-1]
        for step in (even, even + 1):
            manager.advance_schedule(step)
            if manager.optimizer.tied and step > manager.split_step:
                manager.optimizer.split_tied()
            batch = bench.batch(h, manager.current.batch_tokens // h.micro_batches)
            kind = f"{stage}, {'Adam' if step % 2 else 'NorMuon alone'}"

            def passes() -> None:
                for _ in range(h.micro_batches):
                    manager.model(*batch, manager.forward_schedule()).backward()
                    manager.optimizer.accumulate()

            update = functools.partial(manager.step_optimizers, step)
            for part, work in (("model", passes), ("optimizer", update)):
                prof, wall = profiled(bench, work)
                times, busy = kernel_times(prof, bench.dry)
                shares = dict.fromkeys(SHOWN, 0.0) | {"idle": max(0.0, wall - busy)}
                for name, seconds in times.items():
                    shares[kind_of(name)] += seconds
                parts = [f"{seconds / wall:.0%}" for seconds in shares.values()]
                label = f"{kind}, {part}"
                rows.append([label, 1000 * wall, *parts])
                top = sorted(times.items(), key=lambda item: -item[1])[:8]
                tops += [[label, name[:90], 1000 * t, f"{t / wall:.0%}"] for name, t in top]
                data.append(dict(step=label, seconds=wall, shares=shares, top=top))
                if part == "model" and not bench.dry:
                    name = f"{bench.report.name}-{kind}.trace.json.gz"
                    path = bench.report.with_name(name.replace(", ", "-").replace(" ", "-"))
                    prof.export_chrome_trace(str(path))
    text += markdown(["step", "ms", *SHOWN], rows) + "\n\n"
    return text + markdown(["step", "kernel", "ms", "of the step"], tops), data


def profiled(bench: Bench, work: Callable[[], None]) -> tuple[Any, float]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not bench.dry:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    bench.synchronize()
    with torch.profiler.profile(activities=activities) as prof:
        started = time.perf_counter()
        work()
        bench.synchronize()
        wall = time.perf_counter() - started
    return prof, wall


ALL = (environment, attention, model, run, profile)
SECTIONS: dict[str, Callable[[Bench], tuple[str, Any]]] = {x.__name__: x for x in ALL}


# -----------------------------------------------------------------------------
# The report


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
    try:
        text, data = SECTIONS[section](bench)
    except SectionError as error:
        failure, text, data = str(error), error.text, error.data
    except Exception as error:  # one section's fault must not cost the others their turn
        failure, data = f"{type(error).__name__}: {error}", {}
        text = f"```\n{traceback.format_exc()}\n```"
    seconds = time.perf_counter() - started
    print(f"{section}: {'FAILED: ' + failure if failure else 'ok'} ({seconds:.0f} s)", flush=True)
    return dict(failure=failure, seconds=seconds, text=text, data=data)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--section", default=",".join(SECTIONS), help="by comma: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="the same code on a CPU, tiny sizes")
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
        bench = Bench(args.dry_run, Path(scratch), cache, args.output)
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
