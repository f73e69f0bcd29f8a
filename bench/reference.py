"""Baselines on the same GPU: the recipe in plain PyTorch, with the published kernels; and GPT-2.

    ./run.sh bench/reference.py --variants=ours,R0,R1 --stages=1,3   # ms a step, alternating
    ./run.sh bench/reference.py --dry-run                            # on a CPU at tiny sizes
    ./run.sh bench/reference.py --variants=R0,R1 --write=ideas       # scripts that train with them
    ./run.sh bench/reference.py --model=gpt2 --data=data/fineweb10B  # trains a plain GPT-2 124M

A variant is train_gpt.py with some of its functions replaced, so that recipe and parameters stay
the same:

R0  No kernel of ours. What a PyTorch programmer writes, under torch.compile: F.rms_norm, rotary
    positions, FlashAttention 2, F.embedding, FP8 matmuls by torch._scaled_mm, loss and residual stream
    left to Inductor, Polar Express by torch.matmul and baddbmm.
R1  The kernels that public record 61 lists, on today's recipe: R0 with our fused relu² matmul, our
    loss in bf16 as two kernels, our symmetric matmuls and our choice of FlashAttention. In one point
    it is better than that record: the MLP keeps the square alone, without relu(x).

GPT-2 is the plain one: learned positions, LayerNorm, GELU, causal SDPA, biases, a tied LM head, fused
AdamW, bf16 autocast. It reads the same shards by the same loader, and writes the same log lines, so
that records/compare.py compares by time to a loss. One process, one GPU.
"""

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "train_gpt.py"
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triton_kernels as tk
from bench.settings import markdown, numbers
from data.loader import (
    check_data, default_doc_slots, distributed_data_generator, make_micro_batch, to_device,
    train_pattern, val_pattern,
)  # fmt: skip
from runtime.options import parse_options, setting
from runtime.ranks import Ranks, RunError, Signals, join_ranks, run_main
from runtime.run import Clock, Run
from runtime.sources import Sources
from sample import load_script

SOURCES = Sources(__file__)

# -----------------------------------------------------------------------------
# R0: the operations of triton_kernels.py as a PyTorch programmer writes them. Shapes: see there


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=tk.RMS_EPS)


def norm_and_rotate_qk(qkv: Tensor, table: Tensor, paired: bool, key_offset: bool) -> tk.Triple:
    T, heads, D = qkv.shape
    p = 2 if paired else 1
    qk, v = qkv.split((heads // 3 * 2, heads // 3), 1)
    angles = table[: p * T].view(T, 1, p, D // 2, 2)
    q, k = tk.rotate(norm(qk).view(T, -1, p, D), angles).view_as(qk).chunk(2, 1)
    return q, tk.offset_keys(k) if key_offset else k, v


def attend(q: Tensor, k: Tensor, v: Tensor, band: tk.Band, scale: Any) -> Tensor:
    """FlashAttention 2 of PyTorch; where a band has a bias, SDPA with a mask of all positions."""
    starts, window = band.cu_seqlens, band.window
    if band.bias is None:
        numbers = (tk.graph_input(window), tk.graph_input(scale), band.max_len)
        return tk.flash_attention_op(q, k, v, starts, *numbers, fa4=False)[0]
    at = torch.arange(len(q), device=q.device, dtype=starts.dtype)
    document = torch.searchsorted(starts, at, right=True)
    distance = at[:, None] - at
    seen = (document[:, None] == document) & (distance >= 0) & (distance <= window)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=float(scale))
    return y.transpose(0, 1)


def relu_squared_mlp(x: Tensor, W_fc: Tensor, W_proj: Tensor) -> Tensor:
    return F.relu(F.linear(x, W_fc)).square() @ W_proj


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * (1 / scale)).clamp(-limit, limit).to(dtype)


class FP8Forward(torch.autograd.Function):
    """x @ Wᵀ of operands that are given in FP8 too; backward as if they had not been rounded."""

    @staticmethod
    def forward(ctx, x: Tensor, W: Tensor, x8: Tensor, W8: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, W)
        return tk.fp8_matmul(x8, W8.mT, scale, x.dtype, True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, W = ctx.saved_tensors
        return grad @ W, grad.mT @ x, None, None, None


def relu_squared_mlp_fp8(
    x: Tensor, W_fc: Tensor, W_proj: Tensor, W8: Tensor, W_scale: Tensor
) -> Tensor:
    x8, x_scale = tk.quantize_by_largest(x.detach())
    h = FP8Forward.apply(x, W_fc, x8, W8, x_scale * W_scale)
    return F.relu(h).square() @ W_proj


class FP8Linear(torch.autograd.Function):
    """x @ w with FP8 operands in all three matmuls, as tk.fp8_linear. On a GPU tk.fp8_matmul is
    torch._scaled_mm, which wants its second operand by columns."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, x_scale: float, w_scale: float, grad_scale: float):
        x8 = to_fp8(x, x_scale, tk.E4M3)
        w8 = to_fp8(w, w_scale, tk.E4M3)
        ctx.save_for_backward(x8, w8)
        ctx.scales = x_scale, w_scale, grad_scale
        ctx.dtype = x.dtype
        return tk.fp8_matmul(x8, w8, x_scale * w_scale, x.dtype, True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, w8 = ctx.saved_tensors
        x_scale, w_scale, grad_scale = ctx.scales
        grad8 = to_fp8(grad, grad_scale, tk.E5M2)
        grad_x = tk.fp8_matmul(grad8, w8.mT, grad_scale * w_scale, ctx.dtype, False)
        grad_w = tk.fp8_matmul(x8.mT, grad8, x_scale * grad_scale, ctx.dtype, False)
        return grad_x, grad_w, None, None, None


class SoftcappedCrossEntropy(torch.autograd.Function):
    """A pass over the logits each way. Inductor would write fp32 logits to memory for F.cross_entropy,
    which looks targets up in them."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        lse = tk.softcap(logits).logsumexp(-1)
        weights = weights.to(lse.dtype) * (targets >= 0)
        z = tk.softcap(logits.gather(1, targets.clamp(min=0)))
        ctx.save_for_backward(logits, targets, weights, lse)
        return ((lse[:, None] - z) * weights).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, weights, lse = ctx.saved_tensors
        z = tk.softcap(logits)
        column = torch.arange(z.size(1), device=z.device)
        grad_z = weights.sum(1, keepdim=True) * (z - lse[:, None]).exp()
        for target, weight in zip(targets.split(1, 1), weights.split(1, 1)):
            grad_z = grad_z - torch.where(target == column, weight, 0)
        slope = z * (1 - z / tk.SOFTCAP) / tk.SOFTCAP_SCALE
        return (grad * grad_z * slope).to(logits.dtype), None, None


def softcapped_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return SoftcappedCrossEntropy.apply(logits, targets, weights)


def fp8_head_loss(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, *scales: float,
    loss: Callable = softcapped_cross_entropy,
) -> Tensor:  # fmt: skip
    return loss(FP8Linear.apply(x, w, *scales), targets, weights)


# -----------------------------------------------------------------------------
# Variants


def plain(*functions: Callable) -> dict[str, Callable]:
    """By name the references of functions that have kernels: one or two lines of PyTorch each."""
    return {function.__name__: function.__wrapped__ for function in functions}


PUBLISHED = plain(tk.lookup, tk.residual_add, tk.aX_plus_BX, tk.transpose_add, tk.transpose_copy)
PUBLISHED |= dict(
    norm=norm, norm_and_rotate_qk=norm_and_rotate_qk,
    fp8_head_loss=functools.partial(fp8_head_loss, loss=tk.softcapped_cross_entropy),
)  # fmt: skip
PUBLISHED["compile_model"] = lambda model: model.compile(dynamic=False, fullgraph=True)
PLAIN = PUBLISHED | plain(tk.XXT, tk.XTX, tk.ba_plus_cAA)
PLAIN |= dict(
    attend=attend, relu_squared_mlp=relu_squared_mlp, relu_squared_mlp_fp8=relu_squared_mlp_fp8,
    fp8_head_loss=fp8_head_loss, softcapped_cross_entropy=softcapped_cross_entropy,
)  # fmt: skip
VARIANTS = {"ours": {}, "R0": PLAIN, "R1": PUBLISHED}


def replace_functions(script: dict[str, Any], variant: str) -> None:
    """Put the variant's functions in the place of those of the same names in a script's globals.
    Raises KeyError for a name that the script does not have: it would be replaced in vain."""
    for name, function in VARIANTS[variant].items():
        script[name]  # KeyError
        script[name] = function


def script_of(variant: str) -> ModuleType:
    """train_gpt.py with the variant's functions, a module of its own."""
    script = load_script(TRAIN, f"train_gpt_{variant}")
    replace_functions(vars(script), variant)
    return script


def write_script(variant: str, folder: Path) -> Path:
    """The same as a file, which run.sh trains and bench/codegen.py compiles."""
    body, main, end = TRAIN.read_text(encoding="utf-8").rpartition("\n\nif __name__ ==")
    replaced = f'replace_functions(globals(), "{variant}")'
    text = f"{body}\nfrom bench.reference import replace_functions\n\n{replaced}\n{main}{end}"
    path = folder / f"{variant}.py"
    path.write_text(text, encoding="utf-8")
    return path


# -----------------------------------------------------------------------------
# Steps of the variants, one after the other

# Of FineWeb in GPT-2's tokens: lengths of documents are lognormal, tokens follow Zipf's law.
MEDIAN_LENGTH, SIGMA = 480, 0.95
ZIPF_SHIFT = 2.7


def like_fineweb(h: Any, tokens: int, cut: int) -> tuple[Tensor, ...]:
    """A micro-batch of random documents, cut at so many tokens, on the CPU."""
    lengths = torch.empty(tokens).log_normal_(math.log(MEDIAN_LENGTH), SIGMA)
    ends = lengths.clamp(2, cut).long().cumsum(0)
    starts = F.pad(ends[ends < tokens], (1, 0))
    probabilities = 1 / (torch.arange(h.vocab_size) + ZIPF_SHIFT)
    stream = torch.multinomial(probabilities, tokens + 1, replacement=True)
    stream[starts] = h.bos_id
    slots = h.doc_slots or default_doc_slots(tokens)
    return make_micro_batch(stream.numpy(), starts.numpy(), slots, "bench", cut)


def run_step(manager: Any, step: int, batches: list[list[Tensor]]) -> float:
    """One step as in train_gpt.py's loop; its loss per token."""
    manager.advance_schedule(step)
    if manager.optimizer.tied and step > manager.split_step:
        manager.optimizer.split_tied()
    total = 0.0
    for batch in batches:
        loss = manager.model(*batch, manager.forward_schedule())
        total += loss.detach()
        loss.backward()
        manager.optimizer.accumulate()
    manager.step_optimizers(step)
    return total.item() / sum(len(inputs) for inputs, *_ in batches)


def compare_steps(h: Any, variants: list[str], stages: list[int], rounds: int, device: Any) -> list:
    """Of each stage and variant the milliseconds a step in every round, the mean of one without Adam
    and one with it; and the first loss. A round takes all variants, every second in reverse."""
    from bench.gpu import stages_of
    from train_gpt import step_schedule

    managers = {}
    for variant in variants:
        script = script_of(variant)
        settings = script.Hyperparameters(**vars(h))
        managers[variant] = script.build(settings, Ranks(0, 1, device))
    found = []
    for stage in sorted(stages):
        steps = stages_of(h)[f"stage {stage}"]
        even = next(step for step in steps[len(steps) // 2 :] if step % 2 == 0)
        now = step_schedule(even, h)
        torch.manual_seed(stage)
        sizes = (now.batch_tokens // h.micro_batches, now.max_doc_len)
        made = [like_fineweb(h, *sizes) for _ in range(h.micro_batches)]
        batches = [to_device(batch, device) for batch in made]
        results = {variant: dict(stage=stage, variant=variant, ms=[]) for variant in variants}
        for i in range(1 + rounds):
            for variant in variants[:: -1 if i % 2 else 1]:
                clock = Clock(device)
                clock.start()
                losses = [run_step(managers[variant], n, batches) for n in (even, even + 1)]
                clock.stop()
                results[variant].setdefault("loss", losses[0])
                results[variant]["ms"].append(clock.ms() / 2)
        for result in results.values():
            del result["ms"][0]  # it has compiled
        found += results.values()
    return found


def steps_table(found: list[dict]) -> str:
    """Medians; the spread of the middle half of the rounds; the ratio's median over the rounds."""
    rows = []
    for x in found:
        first = next(y for y in found if y["stage"] == x["stage"])
        ratio = statistics.median(a / b for a, b in zip(first["ms"], x["ms"]))
        low, median, high = statistics.quantiles(x["ms"], n=4)
        row = [x["stage"], x["variant"], median, high - low, f"{ratio:.3f}", f"{x['loss']:.4f}"]
        rows.append(row)
    ratio = f"{found[0]['variant']} / it"
    return markdown(["stage", "variant", "ms a step", "spread", ratio, "loss"], rows)


TINY = dict(
    vocab_size=257, bos_id=256, bigram_rows=768, model_dim=32, num_heads=2, head_dim=16,
    dtype="float32", compile=False, batch_unit=32, micro_batches=2, block_size=16,
    num_scheduled_iterations=24, num_extension_iterations=2, val_batch_tokens=256,
)  # fmt: skip


def run_steps(args: argparse.Namespace) -> None:
    """Prints the table; raises RunError without a GPU, unless it is a dry run."""
    from train_gpt import Hyperparameters

    if not args.dry_run and not torch.cuda.is_available():
        raise RunError("no CUDA device here; --dry-run walks the same code on a CPU")
    device = torch.device("cpu" if args.dry_run else "cuda")
    h = Hyperparameters(**(TINY if args.dry_run else {}))
    torch._dynamo.config.recompile_limit = 64
    name = "a CPU at tiny sizes" if args.dry_run else torch.cuda.get_device_name()
    print(f"{name}, PyTorch {torch.__version__}, attention: {tk.flash_attention()}", flush=True)
    found = compare_steps(h, args.variants, args.stages, args.rounds, device)
    print(steps_table(found))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


# -----------------------------------------------------------------------------
# GPT-2


WHOLE = 1 << 40  # tokens: no document is cut


@dataclass
class GPT2Settings:
    """GPT-2 124M. Every field is an option."""

    # fmt: off
    data: str = setting("data/fineweb10B", "folder of *_train_*.bin and *_val_*.bin shards", path=True)
    vocab_size: int = setting(50257, "token ids are below this; padded to a multiple of 128")
    bos_id: int = setting(50256, "the token that begins every document", least=0)
    encoding: str = setting("gpt2", "encoding of the shards")
    layers: int = setting(12, "transformer blocks")
    heads: int = setting(12, "attention heads")
    dim: int = setting(768, "width, a multiple of heads")
    context: int = setting(1024, "tokens in a sequence, which runs across documents")
    total_iterations: int = setting(19_560, "steps; 10 billion tokens")
    batch_tokens: int = setting(524_288, "tokens in a step or a validation batch")
    micro_batches: int = setting(8, "forward passes of a step, of whole sequences")
    lr: float = setting(6e-4, "highest learning rate: after 4 % of the steps, then a cosine to a tenth")
    val_every: int = setting(250, "steps between validations; 0: only at the end", least=0)
    val_tokens: int = setting(10_485_760, "tokens of the validation shard, from its start")
    compile: bool = setting(True, "torch.compile the model")
    seed: int = setting(0, "of the initial weights", least=0)
    log_dir: str = setting("logs", "folder of the logs", path=True)
    run_id: str = setting("", "name of the log; empty: date, time and a random part")
    # fmt: on
    save_every = save_minutes = 0  # no checkpoints; Run asks
    resume = ""

    def lr_multiplier(self, step: int) -> float:
        warm_up = round(0.04 * self.total_iterations)
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / (self.total_iterations - warm_up)
        return 0.55 + 0.45 * math.cos(math.pi * progress)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, dim)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, h: GPT2Settings):
        super().__init__()
        self.tokens = nn.Embedding(-(-h.vocab_size // 128) * 128, h.dim)  # and the LM head
        self.positions = nn.Embedding(h.context, h.dim)
        self.blocks = nn.ModuleList(Block(h.dim, h.heads) for _ in range(h.layers))
        self.norm = nn.LayerNorm(h.dim)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                onto_stream = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * h.layers if onto_stream else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean next-token loss of sequences (B, T)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_gpt2(h: GPT2Settings, ranks: Ranks, signals: Signals) -> None:
    """From the initial weights to the log's last line. Raises RunError; ValueError for bad data."""
    if h.batch_tokens % (h.micro_batches * h.context) or ranks.world_size > 1:
        raise RunError("--batch_tokens must be a multiple of micro_batches · context; on one rank")
    device = ranks.device
    slots = h.batch_tokens // h.micro_batches + 1  # for any number of documents: they are not used
    stream = {name: getattr(h, name) for name in ("micro_batches", "bos_id", "vocab_size")}
    stream |= dict(batch_tokens=lambda _: h.batch_tokens, doc_slots=slots)
    checked = dict(val_tokens=h.val_tokens, val_batch_tokens=h.batch_tokens, encoding=h.encoding)
    data = check_data(h.data, steps=h.total_iterations, max_doc_len=WHOLE, **checked, **stream)
    read = functools.partial(distributed_data_generator, rank=0, world_size=1, **stream)

    torch.manual_seed(h.seed)
    torch.set_float32_matmul_precision("high")
    model = GPT2(h).to(device)
    if h.compile:
        model.compile(dynamic=False, fullgraph=True)
    matrices = dict(params=[x for x in model.parameters() if x.ndim == 2], weight_decay=0.1)
    vectors = dict(params=[x for x in model.parameters() if x.ndim < 2], weight_decay=0.0)
    adam = torch.optim.AdamW([matrices, vectors], lr=h.lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, h.lr_multiplier)

    def loss_of(batch: Iterable[Tensor]) -> Tensor:
        inputs, targets, _ = to_device(batch, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return model(inputs.view(-1, h.context), targets.view(-1, h.context))

    @torch.no_grad()
    def validate(count: int) -> float:
        batches = read(val_pattern(h.data), max_doc_len=0, aligned=False)
        return sum(map(loss_of, itertools.islice(batches, count))).item() / count

    with Run(h, ranks, signals, SOURCES) as run:
        run.open(None, data.shards, [])
        with run.timed_warm_up():
            tokens = torch.zeros(slots - 1, dtype=torch.int32)
            loss_of((tokens, tokens.long(), tokens)).backward()
            model.zero_grad()
            validate(1)
        run.restore(SimpleNamespace(model=model, batch_tokens=lambda step: h.batch_tokens))
        opened = functools.partial(read, train_pattern(h.data), max_doc_len=WHOLE)
        batches = run.read_ahead(opened, h.micro_batches, h.total_iterations)
        last, clock = h.total_iterations, run.clock

        def write(step: int, val_loss: str = "") -> None:
            time = f"train_time:{clock.ms():.0f}ms step_avg:{clock.ms() / max(step, 1):.2f}ms"
            run.log.write(f"step:{step}/{last} {val_loss}{time}", console=step % 10 == 0)

        clock.start()
        for step in range(last + 1):
            if step == last or run.heard_signal() or (h.val_every and step % h.val_every == 0):
                clock.stop()
                run.stop_if_signalled(step)
                val_loss = validate(h.val_tokens // h.batch_tokens * h.micro_batches)
                write(step, f"val_loss:{val_loss:.4f} ")
                clock.start()
            if step == last:
                break
            for batch in itertools.islice(batches, h.micro_batches):
                (loss_of(batch) / h.micro_batches).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            schedule.step()
            adam.zero_grad()
            write(step + 1)
        clock.stop()
        run.finish()


# -----------------------------------------------------------------------------
# The command


def arguments(argv: list[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    names = ", ".join(VARIANTS)
    add("--variants", default="ours,R0,R1", help=f"by comma, of {names}; ratios are to the first")
    add("--stages", type=numbers, default=[1, 3], help="by comma; of 1, 2, 3")
    add("--rounds", type=int, default=12, help="of every variant, two steps each (%(default)s)")
    add("--dry-run", action="store_true", help="the same code on a CPU at tiny sizes")
    add("--output", type=Path, metavar="FILE", help="every time, in JSON")
    add("--write", type=Path, metavar="FOLDER", help="write the variants as scripts, time nothing")
    args = parser.parse_args(argv)
    args.variants = args.variants.split(",")
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"no variant {', '.join(sorted(unknown))}; there are {names}")
    if not set(args.stages) <= {1, 2, 3} or args.rounds < 2:
        parser.error("--stages: of 1, 2, 3; --rounds: at least 2")
    return args


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if "--model=gpt2" in argv:
        rest = [x for x in argv if x != "--model=gpt2"]
        h = parse_options(GPT2Settings, {"gpt2": {}}, rest)
        with Signals() as signals:
            return train_gpt2(h, join_ranks(), signals)
    args = arguments(argv)
    if not args.write:
        return run_steps(args)
    for variant in args.variants:
        print(write_script(variant, args.write))


if __name__ == "__main__":
    run_main(main)
