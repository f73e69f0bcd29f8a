"""Check and time everything on a CUDA machine; nothing is downloaded.

    python bench/gpu.py                     # all sections; a report under records/, exit code 1 if a check failed
    python bench/gpu.py --only=kernels,run  # some of them
    python bench/gpu.py --dry-run           # the same code on a CPU at tiny sizes: proves the command, measures nothing

Where a machine is lent for ten minutes at a time, two calls. By calculation, from the seconds that each graph takes to
generate, neither reaches ten minutes; the second finds what the first compiled and the shards it made in --cache:

    python bench/gpu.py --output=OUT --only=environment,kernels,attention,run
    python bench/gpu.py --output=OUT --only=model,profile,memory,kernel_table

Each section checks or measures one thing and fails alone. The report is written anew after each, so that what was found
stays when the machine goes.
"""

import argparse
import contextlib
import dataclasses
import datetime
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
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "torch")

from data.shards import whole_file
from launch.console import Parser, console, ended_by_signals, run_to_end, user_path

BF16_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense operations a second


def table(header: list[str], rows: list[list]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


@dataclasses.dataclass
class Bench:
    """What the sections share."""

    dry: bool
    scratch: Path  # logs; gone at the end
    cache: Path  # shards; stays
    report: Path  # without suffix
    was_empty: bool = True  # the compile cache, at the start
    folder: Path | None = None  # shards, once made

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def settings(self, **changes):
        """The record preset on generated shards: byte tokens under its vocabulary, few steps; tiny on a dry run. Validated at
        the start and at the end alone: every shape more is a graph more to compile."""
        from train_gpt import Hyperparameters

        h = Hyperparameters(
            data=str(self.shards()), bos_id=256, encoding="bytes", num_scheduled_iterations=45, num_extension_iterations=5,
            val_every=50, val_tokens=524_288, val_batch_tokens=524_288, log_dir=str(self.scratch / "logs"),
        )  # fmt: skip
        if self.dry:
            h = dataclasses.replace(
                h, vocab_size=257, model_dim=32, num_heads=2, head_dim=16, dtype="float32", compile=False, batch_unit=32,
                micro_batches=2, block_size=16, num_scheduled_iterations=6, num_extension_iterations=2, val_every=8,
                val_tokens=2048, val_batch_tokens=2048,
            )  # fmt: skip
        return dataclasses.replace(h, **changes)

    def shards(self) -> Path:
        """PyTorch's own text as bytes, some 85 million tokens; asyncio's on a dry run."""
        import torch

        if self.folder is None:
            source = Path(sysconfig.get_paths()["stdlib"], "asyncio") if self.dry else Path(torch.__file__).parent
            self.folder = self.cache / source.name
            command = [sys.executable, ROOT / "data" / "local_text.py", f"--input={source}", f"--output={self.folder}"]
            run_to_end(command, stdout=subprocess.DEVNULL).check_returncode()
        return self.folder

    def ranks(self) -> int:
        """As many ranks as run.sh starts: one a GPU, and what shares 8 micro-batches evenly."""
        import torch

        return 2 if self.dry else max(n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count())


# -----------------------------------------------------------------------------
# Sections: each returns Markdown and data, and raises AssertionError for what should hold and does not


def environment(bench: Bench) -> tuple[str, dict]:
    import torch

    import triton_kernels as tk
    from attention import flash_attention

    facts = {
        "Python": sys.version.split()[0],
        "PyTorch": torch.__version__,
        "CUDA": torch.version.cuda,
        "Triton": getattr(sys.modules.get("triton"), "__version__", "none"),
    }
    if not bench.dry:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
        facts["GPUs"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
        facts["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        facts["FP8 head"] = tk.has_fp8(torch.device("cuda"))
    facts["attention"] = flash_attention()
    return table(["what", "is"], [[key, value] for key, value in facts.items()]), facts


def kernels(bench: Bench) -> tuple[str, dict]:
    """Every kernel against fp64: the largest error, as a share of what the formats' rounding allows."""
    import torch

    from bench import kernel_checks as checks

    worst = [0.0]
    assert_within = checks.assert_within

    def recorded(found, exact, bound) -> None:
        assert_within(found, exact, bound)
        share = ((found.double() - exact).abs() / bound).nan_to_num(0.0, 0.0, 0.0)
        worst[0] = max(worst[0], share.max().item() if share.numel() else 0.0)

    dtype, device = (torch.float16, "cpu") if bench.dry else (torch.bfloat16, "cuda")
    products = [(2, 20, 10)] if bench.dry else [(257, 40), (3, 20, 300), (5, 768, 768), (3, 3072, 768)]
    values = ["random"] if bench.dry else ["random", "zeros", "equal", "large", "nan"]
    nearest = checks.CARRIES_LOST if bench.dry else checks.NEAREST
    cases: list[tuple[str, Callable]] = []
    for shape in products:
        for name in ("XXT", "XTX", "ba_plus_cAA", "aX_plus_BX", "aX_plus_XB"):
            cases += [
                (f"{name} {shape} {v}", lambda n=name, s=shape, v=v: checks.check_product(n, s, dtype, v, False, device))
                for v in values
            ]
    for sizes in [(20, 24, 40)] if bench.dry else [(8, 8, 16), (150, 72, 312), (16384, 768, 3072)]:
        cases += [
            (f"relu_squared {sizes} {v}", lambda s=sizes, v=v: checks.check_relu_squared(s, dtype, v, device)) for v in values
        ]
    for sizes in [(6, 2, 12)] if bench.dry else [(9, 4, 12), (16384, 6, 128)]:
        for kind in ((False, False), (True, False), (False, True)):  # paired, key offset
            cases += [
                (
                    f"norm_rotate {sizes} {kind} {v}",
                    lambda s=sizes, k=kind, v=v: checks.check_norm_and_rotate(s, *k, dtype, v, device),
                )
                for v in values
            ]
    for T, V in [(70, 130)] if bench.dry else [(1, 3), (65, 1030), (330, 2100), (2048, 50304)]:
        cases += [(f"loss ({T}, {V}) {v}", lambda T=T, V=V, v=v: checks.check_loss(T, V, 3, dtype, v, device)) for v in values]
    if bench.dry or torch.cuda.get_device_capability() >= (8, 9):
        cases.append(("loss in FP8", lambda: checks.check_loss_in_fp8(device, nearest)))
        cases.append(("quantize in FP8", lambda: checks.check_quantize_in_fp8(device, nearest)))
    for shape in [(20, 30)] if bench.dry else [(1, 1), (70, 130), (50304, 768), (768, 50304)]:
        cases.append((f"transposes {shape}", lambda s=shape: checks.check_transpose(s, dtype, device)))
        cases.append((f"quantize {shape}", lambda s=shape: checks.check_quantize((s[0], s[1] + 4), dtype, device)))
    for T, vocab, dim in [(20, 9, 30)] if bench.dry else [(70, 30, 40), (16384, 50304, 768), (49152, 50304, 768)]:
        cases.append((f"lookup {(T, vocab, dim)}", lambda s=(T, vocab, dim): checks.check_lookup(*s, dtype, device)))
    rows, failed = [], []
    with mock.patch.object(checks, "assert_within", recorded):
        for name, check in cases:
            worst[0] = 0.0
            try:
                check()
                rows.append([name, f"{worst[0]:.2f}"])
            except Exception as error:  # a failed kernel must not hide the others
                failed.append(name)
                rows.append([name, f"FAILED: {type(error).__name__}: {error}".replace("\n", " ")[:300]])
    text = table(["kernel, shape, values", "largest error / allowed"], rows)
    if failed:
        raise SectionError(f"{len(failed)} of {len(cases)} checks failed: {', '.join(failed)}", text, {"rows": rows})
    return text, {"rows": rows}


class SectionError(AssertionError):
    """A check that failed, with what was found."""

    def __init__(self, message: str, text: str, data: dict):
        super().__init__(message)
        self.text, self.data = text, data


def attention(bench: Bench) -> tuple[str, dict]:
    """attend as the model calls it, forward and backward, against the banded reference in fp64."""
    import torch

    from attention import Band, attend, band_bias
    from train_gpt import EXTENSION, FINAL_VALIDATION, STAGES

    h = bench.settings()
    dtype, T = (torch.float32, 512) if bench.dry else (torch.bfloat16, 16384)
    unit = 2.0**-24 if bench.dry else 2.0**-8
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, T // 8, (64,), generator=generator).cumsum(0)
    starts = torch.cat((torch.zeros(1), lengths[lengths < T], torch.full((64,), T)))[:64].int().to(bench.device)
    rows, failed = [], []
    windows = [(kind, getattr(stage, kind)) for stage in (*STAGES, EXTENSION, FINAL_VALIDATION) for kind in ("short", "long")]
    for kind, blocks in dict.fromkeys(windows):
        for p in (1, 2):  # plain, paired heads
            shape = (p * T, h.num_heads // p, h.head_dim)
            x = [torch.randn(shape, generator=generator).to(bench.device, dtype) for _ in range(4)]
            x = [z / z.float().square().mean(-1, keepdim=True).sqrt().to(dtype) for z in x]
            window, cu_seqlens = blocks * h.block_size, p * starts
            bias = band_bias(cu_seqlens, p * T, window, torch.float64)
            results = []
            for wide in (False, True):
                q, k, v = (z.to(torch.float64 if wide else dtype).requires_grad_() for z in x[:3])
                band = Band(cu_seqlens, window, p * T, bias if wide else (bias.float() if bench.dry else None))
                out = attend(q, k, v, band, 0.1)
                results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), x[3].to(out.dtype))))
            del bias
            errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(*results)]
            # A result is rounded once, after probabilities and their gradients have been rounded too.
            if max(errors) > (40 if bench.dry else 4) * unit:
                failed.append(f"window {window}, paired {p == 2}")
            rows.append([f"{kind} {window}", "paired" if p == 2 else "plain", *(f"{error:.2e}" for error in errors)])
    text = table(["window", "heads", "output", "dq", "dk", "dv"], rows)
    if failed:
        raise SectionError(f"attention is off: {'; '.join(failed)}", text, {"rows": rows})
    return text, {"rows": rows}


def model(bench: Bench) -> tuple[str, dict]:
    """The model as it trains against fp32 on the CPU: same weights and batch, FP8 head in both; loss and gradients by label."""
    import torch

    import triton_kernels as tk
    from bench.settings import model_of
    from data.loader import distributed_data_generator, train_pattern
    from train_gpt import ForwardSchedule

    h = bench.settings()
    tokens = 256 if bench.dry else 2048
    torch.manual_seed(h.seed)
    reference = model_of(h, tokens, fp8_head=True)
    with torch.no_grad():
        for param in reference.parameters():
            if param.ndim > 1:
                param.add_(torch.randn(param.shape) * 0.02)
        reference.scalars.add_(0.5 * (reference.scalars == 0))  # of the smear gate: times 0, it would have no gradient
    device = torch.device(bench.device)
    trained = model_of(h, tokens, fp8_head=tk.has_fp8(device))
    trained.load_state_dict(reference.state_dict())
    trained.to(device)
    if h.dtype == "float32":
        trained.float()
    reference.float()
    if h.compile:
        trained.compile(dynamic=False, fullgraph=True)
    batch = next(distributed_data_generator(
        train_pattern(h.data), tokens, h.max_doc_len, micro_batches=1, rank=0, world_size=1, bos_id=h.bos_id,
    ))  # fmt: skip
    grads, losses = [], []
    for net in (trained, reference):
        where = net.embed.device
        schedule = ForwardSchedule(torch.tensor([1.0, 0.5], device=where), 3 * h.block_size, 7 * h.block_size, h.max_doc_len)
        loss = net(*(x.to(where) for x in batch), schedule)
        loss.backward()
        losses.append(loss.item() / tokens)
        grads.append({label: param.grad.double().cpu() for label, param in net.named_parameters()})
    errors = {label: ((grads[0][label] - g).norm() / g.norm().clamp_min(1e-30)).item() for label, g in grads[1].items()}
    loss_error = abs(losses[0] / losses[1] - 1)
    rows = [["loss", f"{loss_error:.2e}"], *([label, f"{error:.2e}"] for label, error in errors.items())]
    text = table(["gradient of", "relative error"], rows)
    # bf16 keeps 8 bits, and the layers lose some of them; gates of 12 inputs are sums of small differences.
    worst = max(errors, key=errors.get)
    if loss_error > 5e-3 or errors[worst] > 0.2:
        raise SectionError(f"loss off by {loss_error:.2e}, the gradient of {worst} by {errors[worst]:.2e}", text, errors)
    return text, {"loss": losses, **errors}


def flops_per_token(h) -> int:
    """Operations of the products with weights, forward and backward; attention's own products are not counted."""
    from bench.communication import model_parameters
    from train_gpt import LAYERS, MLP_BANK_LAYERS

    size = {label: math.prod(parameter.shape) for label, parameter in model_parameters(h).items()}
    return 6 * (size["attn"] + size["mlp"] * len(LAYERS) // MLP_BANK_LAYERS + size["lm_head"])


def stages_of(h) -> dict[str, range]:
    """The steps of each stage: those in a row whose micro-batches and windows have one shape."""
    from train_gpt import step_schedule

    def shape(step: int) -> tuple:
        now = step_schedule(step, h)
        return now.batch_tokens, now.short_window, now.long_window, len(now.mtp_weights)

    stages = {}
    for _, group in itertools.groupby(range(h.total_iterations), shape):
        steps = list(group)
        name = "extension" if steps[0] >= h.num_scheduled_iterations else f"stage {len(stages) + 1}"
        stages[name] = range(steps[0], steps[-1] + 1)
    return stages


def split_at_warm_up(output: str) -> tuple[int, str]:
    """The seconds of the warm-up that a run has printed, and what it printed after them."""
    found = re.search(r"warm-up (\d+) s$", output, re.MULTILINE)
    return int(found[1]), output[found.end() :]


def run(bench: Bench) -> tuple[str, dict]:
    """The real script, launched as users launch it: compiles cleanly, learns, and how fast each stage is."""
    import train_gpt as tg
    from bench.settings import torchrun

    h = bench.settings(run_id="gpu")
    defaults = tg.Hyperparameters()
    names = [field.name for field in dataclasses.fields(h)]
    options = [f"--{name}={getattr(h, name)}" for name in names if getattr(h, name) != getattr(defaults, name)]
    command = [*torchrun(bench.ranks(), bench.scratch / "torchrun"), str(ROOT / "train_gpt.py"), "--preset=record", *options]
    environ = {**os.environ, "TORCH_LOGS": "recompiles,graph_breaks", "OMP_NUM_THREADS": "1"}
    done = run_to_end(command, timeout=560, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
    if done.returncode:
        raise SectionError(f"exit code {done.returncode}", f"```\n{done.stdout[-4000:]}\n```", {"output": done.stdout[-20000:]})
    warm_up, after = split_at_warm_up(done.stdout)
    recompiles = len(re.findall(r"Recompiling function", after))
    breaks = len(re.findall(r"Graph break", done.stdout))
    log = Path(h.log_dir, "gpu.txt").read_text(encoding="utf-8").rpartition("=" * 100)[2]
    losses = [float(x) for x in re.findall(r"val_loss:([\d.]+)", log)]
    ends = {int(step): float(ms) / 1000 for step, ms in re.findall(r"^step:(\d+)/\d+ train_time:(\d+)ms", log, re.M)}
    memory = re.search(r"^peak memory.*", log, re.M)[0]
    rows, stages = [], []
    for name, steps in stages_of(h).items():
        last = steps.stop  # step:7 ends step 6
        seconds = statistics.median(
            ends[s] - ends[s - 1] for s in range(max(steps.start + 2, last - 6), last + 1) if s - 1 in ends
        )
        tokens = tg.step_schedule(last - 1, h).batch_tokens
        achieved = flops_per_token(h) * tokens / seconds / bench.ranks()
        peak = next((value for chip, value in BF16_PEAK.items() if not bench.dry and chip in _gpu_name()), None)
        share = f"{achieved / peak:.1%}" if peak else ""
        stages.append({"stage": name, "seconds": seconds, "tokens": tokens, "flops": achieved})
        rows.append([name, f"{tokens:,}", f"{1000 * seconds:.1f}", f"{tokens / seconds:,.0f}", f"{achieved / 1e12:.3g}", share])
    text = table(["stage", "tokens a step", "ms a step", "tokens/s", "TFLOP/s a GPU", "of the bf16 peak"], rows)
    cache = "an empty" if bench.was_empty else "a filled"
    text += f"\n\n{bench.ranks()} ranks. Warm-up with {cache} compile cache: {warm_up} s. "
    text += f"Graph breaks: {breaks}; recompiled after the warm-up: {recompiles}.\n"
    text += f"Validation losses: {', '.join(map(str, losses))}. {memory}."
    data = {"stages": stages, "warm_up": warm_up, "recompiles": recompiles, "breaks": breaks, "losses": losses}
    if breaks or recompiles or not losses[-1] < losses[0]:
        raise SectionError("graph breaks, recompilation after the warm-up, or a loss that does not fall", text, data)
    return text, data


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


KINDS = {  # of GPU kernels, and of PyTorch's operators on a CPU, by name; the first that matches
    "attention": r"flash|fmha|attention|Banded|softmax|bmm",
    "products": r"gemm|nvjet|cutlass|wgmma|sm90_xmma|product_kernel|relu_squared|aten::(add)?mm|baddbmm|_scaled_mm|fp8_",
    "loss": r"loss_kernel|cross_entropy|logsumexp",
    "communication": r"nccl|gloo|c10d",
    "copies": r"Memcpy|Memset|copy_|transpose_kernel|quantize_kernel",
}
OTHER = "elementwise and other"


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.I)), OTHER)


def profile(bench: Bench) -> tuple[str, dict]:
    """In one process: the warm-up from a filled cache restores every bit; then two steps of each stage under the profiler."""
    import torch
    from torch.profiler import ProfilerActivity

    import train_gpt as tg
    from bench.settings import unequal
    from runtime.ranks import Ranks

    h = bench.settings()
    device = torch.device(bench.device)
    ranks = Ranks(0, 1, device)
    if not bench.dry:
        torch._dynamo.config.recompile_limit = 64
    manager = tg.build(h, ranks)
    saved, started = manager.state_dict(), time.perf_counter()
    tg.warm_up(manager, ranks)
    warm_up_seconds = time.perf_counter() - started
    changed = unequal(saved, manager.state_dict())
    rows, tops, data = [], [], {"warm_up": warm_up_seconds, "changed": changed, "steps": []}
    for stage, steps in stages_of(h).items():
        if stage == "extension":  # stage 3 with wider windows
            continue
        pairs = [(step, step + 1) for step in steps[:-1] if step % 2 == 0]  # NorMuon alone, then Adam too
        for step in pairs[:2][-1]:
            manager.advance_schedule(step)
            if manager.optimizer.tied and step > manager.split_step:
                manager.optimizer.split_tied()
            loader = tg.micro_batches(h, ranks, training=True, first_step=step)
            batch = [tg.to_device(next(loader), device) for _ in range(h.micro_batches)]
            loader.close()

            def passes() -> None:
                for micro_batch in batch:
                    manager.model(*micro_batch, manager.forward_schedule()).backward()
                    manager.optimizer.accumulate()

            for part, work in (("model", passes), ("optimizer", lambda: manager.step_optimizers(step))):
                _synchronize(device)
                activities = [ProfilerActivity.CPU] + ([] if bench.dry else [ProfilerActivity.CUDA])
                with torch.profiler.profile(activities=activities) as prof:
                    started = time.perf_counter()
                    work()
                    _synchronize(device)
                    wall = time.perf_counter() - started
                times, busy = _kernel_times(prof, bench.dry)
                shares: dict[str, float] = defaultdict(float)
                for name, seconds in times.items():
                    shares[kind_of(name)] += seconds
                shares["idle"] = max(0.0, wall - busy)
                adam = "Adam" if manager.current.do_adam else "NorMuon alone"
                label = f"{stage}, {adam}, {part}"
                parts = (f"{shares[kind] / wall:.0%}" for kind in (*KINDS, OTHER, "idle"))
                rows.append([label, f"{1000 * wall:.1f}", *parts])
                top = sorted(times.items(), key=lambda item: -item[1])[:8]
                tops += [[label, name[:90], f"{1000 * seconds:.2f}", f"{seconds / wall:.0%}"] for name, seconds in top]
                data["steps"].append({"step": label, "seconds": wall, "shares": shares, "top": top})
                if part == "model" and not bench.dry:
                    trace = f"{bench.report.name}-{stage}-{adam}.trace.json.gz".replace(" ", "-")
                    prof.export_chrome_trace(str(bench.report.with_name(trace)))
    text = f"Warm-up from a filled compile cache: {warm_up_seconds:.0f} s; "
    text += f"state that it did not restore: {', '.join(changed) or 'none'}.\n\n"
    text += table(["step", "ms", *KINDS, OTHER, "idle"], rows) + "\n\n" + table(["step", "kernel", "ms", "of the step"], tops)
    if changed:
        raise SectionError(f"the warm-up changed {', '.join(changed)}", text, data)
    return text, data


def _synchronize(device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kernel_times(prof, dry: bool) -> tuple[dict[str, float], float]:
    """Seconds by kernel, and seconds in which at least one ran; on a CPU by operator, without those it calls."""
    from torch.autograd import DeviceType

    times: dict[str, float] = defaultdict(float)
    if dry:
        for event in prof.key_averages():
            times[event.key] += event.self_cpu_time_total / 1e6
        return times, sum(times.values())
    spans = []
    for event in prof.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name] += (event.time_range.end - event.time_range.start) / 1e6
            spans.append((event.time_range.start, event.time_range.end))
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return times, busy / 1e6


def memory(bench: Bench) -> tuple[str, dict]:
    """What a micro-batch keeps for its backward pass, from the shapes alone; on a GPU also the peaks of such a pass and of one
    of a validation batch."""
    from bench.communication import model_parameters, state_bytes
    from bench.settings import largest_batch
    from tail_averages import TAIL_TABLE
    from train_gpt import Hyperparameters, param_table

    h, rows, data = Hyperparameters(), [], []
    parameters = model_parameters(h)
    vocab = parameters["embed"].shape[0]
    for micro_batches in (8, 16, 32):
        tokens = largest_batch(h) // micro_batches
        saved = saved_bytes(h, tokens)
        logits = vocab * h.val_batch_tokens // micro_batches * parameters["lm_head"].dtype.itemsize
        whole = bench.settings(micro_batches=micro_batches, val_batch_tokens=h.val_batch_tokens)
        peaks = [] if bench.dry else _peaks(whole, tokens, h.val_batch_tokens // micro_batches)
        measured = [f"{peak / 2**30:.2f}" for peak in peaks] or ["", ""]
        rows.append([micro_batches, f"{tokens:,}", f"{saved / 2**30:.2f}", f"{logits / 2**30:.2f}", *measured])
        data.append({"micro_batches": micro_batches, "saved": saved, "validation_logits": logits, "peaks": peaks})
    fixed, tails = 0, TAIL_TABLE if h.tail_averages else ()
    for label, row in param_table(h).items():
        shape, dtype = parameters[label]
        fixed += 2 * math.prod(shape) * dtype.itemsize  # weight and gradient
        fixed += state_bytes(label, parameters[label], row, tails=tails)
    header = ["micro-batches", "tokens each", "saved for backward, GiB", "logits of a validation pass, GiB"]
    header += [f"measured: peak of a {kind} pass above the state, GiB" for kind in ("training", "validation")]
    text = table(header, rows)
    text += f"\n\nWeights, gradients and optimizer state on one GPU: {fixed / 2**30:.2f} GiB."
    return text, {"rows": data, "fixed": fixed}


def saved_bytes(h, tokens: int) -> int:
    """Bytes that autograd keeps of a training pass of the last stage on a GPU, before the compiler saves some of them."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import triton_kernels as tk
    from bench.settings import model_of
    from data.loader import default_doc_slots
    from train_gpt import ForwardSchedule, step_schedule

    now = step_schedule(h.num_scheduled_iterations - 1, h)

    storages: dict[int, int] = {}
    with FakeTensorMode(), tk.kernels_of("cuda"):
        net = model_of(h, tokens, fp8_head=True)
        weights = {param.untyped_storage()._cdata for param in net.parameters()}
        kept = []

        def pack(x):
            storage = x.untyped_storage()
            if storage._cdata not in weights:
                storages[storage._cdata] = storage.nbytes()
                kept.append(x)  # so that no address is used twice
            return x

        inputs, targets = torch.zeros(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64)
        starts = torch.zeros(default_doc_slots(tokens), dtype=torch.int32)
        schedule = ForwardSchedule(torch.tensor(now.mtp_weights), now.short_window, now.long_window, h.max_doc_len)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            net(inputs, targets, starts, schedule)
    return sum(storages.values())


def _peaks(h, trained: int, validated: int) -> list[int]:
    """Bytes above what is allocated before it, of a training and of a validation pass of so many tokens; of the second each,
    once it is compiled."""
    import torch

    import train_gpt as tg
    from data.loader import synthetic_batch
    from runtime.ranks import Ranks

    ranks = Ranks(0, 1, torch.device("cuda", 0))
    manager, peaks = tg.build(h, ranks), []
    manager.max_val_doc_len = h.max_doc_len
    net = manager.model
    manager.advance_schedule(h.num_scheduled_iterations - 1)
    for training, tokens in ((True, trained), (False, validated)):
        net.train(training)
        for _ in range(2):
            net.zero_grad(set_to_none=False)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            batch = synthetic_batch(tokens, vocab_size=h.vocab_size, max_doc_len=h.max_doc_len, doc_slots=h.doc_slots)
            with torch.set_grad_enabled(training):
                loss = net(*tg.to_device(batch, ranks.device), manager.forward_schedule())
                if training:
                    loss.backward()
            del loss
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return peaks


def kernel_table(bench: Bench) -> tuple[str, dict]:
    """bench/kernels.py: on a GPU with its measured columns."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "bench" / "kernels.py"), *(["transpose_copy"] if bench.dry else [])]
    done = run_to_end(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    if done.returncode:
        raise SectionError(f"bench/kernels.py ended with {done.returncode}", f"```\n{done.stderr[-3000:]}\n```", {})
    return done.stdout, {"table": done.stdout}


SECTIONS: dict[str, Callable[[Bench], tuple[str, dict]]] = {
    "environment": environment,
    "kernels": kernels,
    "attention": attention,
    "model": model,
    "run": run,
    "profile": profile,
    "memory": memory,
    "kernel_table": kernel_table,
}


# -----------------------------------------------------------------------------
# The report


def claim_report(folder: Path, name: str) -> Path:
    """A path without suffix in the folder that is this call's alone, as its .md is there from now on, empty; neither that nor
    its .json was there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    now = f"{name}-{time.strftime('%H%M%S')}"
    for own in itertools.chain([name, now], (f"{now}-{i}" for i in itertools.count(2))):
        if os.path.lexists(folder / f"{own}.json"):  # whose .md was moved, or never was
            continue
        with contextlib.suppress(FileExistsError):  # an earlier call's, or one's at the same time: all stay
            open(folder / f"{own}.md", "x").close()
            return folder / own


def write_report(bench: Bench, results: dict[str, dict]) -> None:
    title = "A dry run on a CPU: no figure here is a measurement" if bench.dry else f"{_gpu_name()}"
    failed = [name for name, result in results.items() if result["failure"]]
    lines = [f"# {title}, {datetime.date.today()}", "", f"By `python bench/gpu.py`. Failed: {', '.join(failed) or 'nothing'}."]
    for name, result in results.items():
        lines += ["", f"## {name} ({result['seconds']:.0f} s)", ""]
        if result["failure"]:
            lines += [f"**FAILED**: {result['failure']}", ""]
        lines.append(result["text"])
    for suffix, text in ((".json", json.dumps(results, indent=1, default=str)), (".md", "\n".join(lines) + "\n")):
        with whole_file(bench.report.with_suffix(suffix)) as file:
            file.write(text.encode())


def drop_if_empty(path: Path) -> None:
    if path.stat().st_size == 0:  # ended before the first section was through
        path.unlink()


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="walk the same code on a CPU at tiny sizes")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by comma: %(default)s")
    parser.add_argument("--output", type=user_path, default=ROOT / "records", help="folder of the report (%(default)s)")
    cache = "folder of shards and compiled kernels, for later calls (~/.cache/bankrun; of a dry run: none)"
    parser.add_argument("--cache", type=user_path, help=cache)
    args = parser.parse_args(argv)
    if unknown := set(args.only.split(",")) - set(SECTIONS):
        parser.error(f"--only: no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if args.dry_run and os.environ.get("TRITON_INTERPRET") != "1":  # must stand before Triton is imported: begin again
        command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
        environ = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return run_to_end(command, env=environ).returncode
    with tempfile.TemporaryDirectory(prefix="bankrun-gpu-") as scratch, contextlib.ExitStack() as ends:
        cache = args.cache or (Path(scratch) if args.dry_run else Path.home() / ".cache" / "bankrun")
        cache.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache.resolve()}/inductor")
        os.environ.setdefault("TRITON_CACHE_DIR", f"{cache.resolve()}/triton")
        import torch

        if not args.dry_run and not torch.cuda.is_available():
            print("bench/gpu.py: no CUDA device here; --dry-run walks the same code on a CPU", file=sys.stderr)
            return 2
        name = "dry-run" if args.dry_run else re.sub(r"\W+", "-", _gpu_name())
        report = claim_report(args.output, f"{datetime.date.today()}-{name}")
        ends.callback(drop_if_empty, report.with_suffix(".md"))
        was_empty = not Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).exists()
        bench = Bench(args.dry_run, Path(scratch), cache.resolve(), report, was_empty)
        results: dict[str, dict] = {}
        for section in args.only.split(","):
            started, failure = time.perf_counter(), ""
            try:
                text, data = SECTIONS[section](bench)
            except SectionError as error:
                failure, text, data = str(error), error.text, error.data
            except Exception as error:  # one section's fault must not cost the others their turn
                failure, text, data = f"{type(error).__name__}: {error}", f"```\n{traceback.format_exc()}\n```", {}
            seconds = time.perf_counter() - started
            results[section] = {"failure": failure, "seconds": seconds, "text": text, "data": data}
            write_report(bench, results)
            console(f"{section}: {'FAILED: ' + failure if failure else 'ok'} ({seconds:.0f} s)")
        console(f"report: {bench.report}.md and .json")
    return int(any(result["failure"] for result in results.values()))


if __name__ == "__main__":
    try:
        with ended_by_signals():
            sys.exit(main())
    except OSError as error:  # of --output, --cache or the scratch folder: a section's own is in the report
        sys.exit(f"bench/gpu.py: error: {error.filename or ''}: {error.strerror or error}")
