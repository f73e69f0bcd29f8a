"""bankrun: train a GPT-2-class model to a validation loss of 3.28 on FineWeb.

Result so far: the demo, on two CPU cores (records/). The arithmetic is proven on CPUs, by ./test.sh: every kernel against a
reference, 1 to 16 ranks against one. On a GPU 50 steps have run (records/). The recipe is public record 70 of
github.com/KellerJordan/modded-nanogpt (its 10 logs of 1507 + 40 steps: mean loss 3.27824).

    ./run.sh                                               # the record preset on GPUs, the demo without
    ./run.sh my_copy.py --num_scheduled_iterations=200     # your own copy, your own settings
    torchrun --standalone --nproc_per_node=8 train_gpt.py  # by hand, on 8, 4, 2 or 1; nodes: docs/ranks.md
    python train_gpt.py --help                             # every setting

Read on: settings, four tables, model, head, updates, optimizer, schedule, warm-up and validation, the loop. The GPU kernels and
their references are in triton_kernels.py and attention.py, shards in data/, log and checkpoints in runtime/, start in launch/.
"""

import sys
from pathlib import Path

# A copy in a folder of the project, such as ideas/, finds the project.
sys.path[1:1] = [f"{at}" for at in Path(__file__).resolve().parents if (at / "runtime/run.py").is_file()][:1]

from launch.sources import Sources

SOURCES = Sources(__file__)  # what the log will hold, read before anything can change it

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Band, attend, band_bias, flash_attention, norm_and_rotate_qk, uses_flash
from cpu import polar_express_in_fp32, reduce_scatter, use_cpu
from data.encodings import check_encoding
from data.loader import (
    DataFacts, check_data, distributed_data_generator, synthetic_batch, to_device, train_pattern, val_pattern,
)  # fmt: skip
from launch.console import AgreedError, RunError, Stopped, leave, raise_first, tell
from launch.machine import seed_random
from launch.nests import differences, map_tensors
from launch.signals import Signals
from runtime.options import check_values, is_plain_name, parse_options, setting
from runtime.ranks import Ranks, join_ranks
from runtime.run import Run
from sample import sample_text
from tail_averages import TAIL_TABLE, TailAverages
from tracer import Tracer, steps_of
from triton_kernels import (
    CPU_FP32, XTX, XXT, aX_plus_BX, ba_plus_cAA, cache_sized, fp8_head_loss, fused_on_gpu, has_fp8, join_mantissa,
    kernel_device, linear, lookup, norm, relu_squared_mlp, residual_add, softcapped_cross_entropy,
    split_mantissa, transpose_add, transpose_copy,
)  # fmt: skip

# -----------------------------------------------------------------------------
# Settings


@dataclass
class Hyperparameters:
    """The record preset by default. Every field is an option: --num_scheduled_iterations=200."""

    # data
    data: str = setting("data/fineweb10B", "folder of *_train_*.bin and *_val_*.bin shards", path=True)
    vocab_size: int = setting(50257, "token ids are below this; the model pads it to a multiple of 128")
    bos_id: int = setting(50256, "the token that begins every document", least=0)
    encoding: str = setting("gpt2", "tiktoken encoding that turns tokens back into text, or 'bytes'")
    max_doc_len: int = setting(2048, "documents are cut at this many tokens in training", least=2)
    doc_slots: int = setting(0, "entries of cu_seqlens, one more than documents fit; 0: by size", least=0)
    # model
    model_dim: int = setting(768, "width of the residual stream, num_heads * head_dim")
    num_heads: int = setting(6, "attention heads, even")
    head_dim: int = setting(128, "width of a head, a multiple of 4")
    bigram_rows: int = setting(5 * 50304, "of the table of hashed bigrams; the last is position 0's", least=2)
    attention_scale: float = setting(0.1, "of the attention logits, before it grows with the windows")
    dtype: str = setting("bfloat16", "of matrices, embeddings and gates", choices=("bfloat16", "float32"))
    fp8_head: bool = setting(True, "FP8 products in the head, on CUDA from 8.9; emulated on CPU")
    compile: bool = setting(True, "torch.compile the model")
    seed: int = setting(0, "of the initial weights", least=0)
    # schedule
    num_scheduled_iterations: int = setting(1507, "steps of the stages")
    num_extension_iterations: int = setting(40, "steps after them, at a low rate and wider windows", least=0)
    comms: str = setting("sharded", "of large parameters; replicated: DDP", choices=("sharded", "replicated"))
    grad_dtype: str = setting("param", "of sums of gradients; param: as stored", choices=("param", "float32"))
    batch_unit: int = setting(16384, "tokens of a batch unit; a step takes as many units as its stage says")
    micro_batches: int = setting(8, "a step's forward passes, shared by the ranks; 16 or 32 fit smaller GPUs")
    block_size: int = setting(128, "tokens in a block, the unit of the attention windows")
    adam_lr_mul: float = setting(1.0, "multiplies the table's learning rates of Adam")
    muon_lr_mul: float = setting(1.0, "multiplies the table's learning rates of NorMuon")
    momentum_warmup: int = setting(300, "steps over which NorMuon's momentum rises", least=0)
    momentum_cooldown: int = setting(50, "last steps over which it falls back", least=0)
    tail_averages: bool = setting(False, "end on averages of late weights: tail_averages.py")
    # validation
    val_every: int = setting(250, "steps between validations; 0: only at the end", least=0)
    val_tokens: int = setting(10_485_760, "tokens of the validation shard, from its start")
    val_batch_tokens: int = setting(2_097_152, "tokens in a validation batch, shared by the micro-batches")
    # output
    log_dir: str = setting("logs", "folder of the logs", path=True)
    run_id: str = setting("", "name of the log; empty: time and a random part")
    sample_tokens: int = setting(0, "tokens to write at the end after each of three prompts", least=0)
    sample_temperature: float = setting(0.8, "of that text: near 0 the likeliest, 1 as trained")
    sample_nucleus: float = setting(0.99, "it is drawn from the likeliest tokens of this share, at most 1")
    save_every: int = setting(0, "steps between checkpoints in log_dir/run_id, untimed; 0: none", least=0)
    keep_checkpoints: int = setting(2, "checkpoints of a run that stay, the newest")
    trace_steps: str = setting("", "A:B: record the optimizer's times of steps A to B-1, for bench/order.py")
    resume: str = setting("", "checkpoint to go on from, or 'latest': of run_id, or of all runs in log_dir", path=True)

    @property
    def total_iterations(self) -> int:
        return self.num_scheduled_iterations + self.num_extension_iterations

    @property
    def max_tokens(self) -> int:
        """The longest micro-batch, in training or validation."""
        return max(self.val_batch_tokens, *(x.batch * self.batch_unit for x in (*STAGES, EXTENSION))) // self.micro_batches

    @property
    def stream(self) -> dict[str, int]:
        """What decides, beside the batch sizes, what a micro-batch holds."""
        return {x: getattr(self, x) for x in "max_doc_len micro_batches doc_slots bos_id vocab_size".split()}

    def check(self, world_size: int) -> None:
        """Raise ValueError, with what to do, if these settings cannot run on world_size ranks."""
        check_values(self)
        check_tables()
        check_encoding(self.encoding)
        traced, total, val = steps_of(self.trace_steps), self.total_iterations, self.val_batch_tokens
        m, unit, longest, vocab = self.micro_batches, self.batch_unit, self.max_tokens, self.vocab_size
        sizes = {f"batch_unit={unit} (stage {i})": x.batch * unit for i, x in enumerate((*STAGES, EXTENSION), 1)}
        sizes[f"val_batch_tokens={val}"] = val
        uneven = [f"--{name}: {tokens} tokens do not" for name, tokens in sizes.items() if tokens % (16 * m)]
        multiple = f"use a multiple of {world_size}, or start another number of ranks"
        raise_first(
            (total > 10**6, f"{total} steps: a million is the most"),
            (traced and traced.start >= total, f"--trace_steps={self.trace_steps}: the last step is {total - 1}"),
            (m % world_size, f"--micro_batches={m} cannot be shared by {world_size} ranks: {multiple}"),
            (uneven, f"{''.join(uneven[:1])} divide into {m} micro-batches of a multiple of 16 tokens "
                     f"(FP8 products need that): change it or --micro_batches"),
            (self.doc_slots > longest + 1, f"--doc_slots={self.doc_slots}: the most tokens are {longest}"),
            (self.block_size > longest, f"--block_size={self.block_size}: the most tokens are {longest}"),
            (self.val_tokens % val, f"--val_tokens={self.val_tokens} is no multiple of --val_batch_tokens={val}"),
            (self.bos_id >= vocab, f"--bos_id={self.bos_id} is outside the vocabulary, --vocab_size={vocab}"),
            (self.sample_nucleus > 1, f"--sample_nucleus={self.sample_nucleus}: a share is at most 1"),
            (vocab > 65536, f"--vocab_size={vocab}: shards hold uint16 tokens, so at most 65536"),
            (self.run_id and not is_plain_name(self.run_id),
             f"--run_id={ascii(self.run_id)[1:-1]}: must be a file's name, alone, without *, [ and the like"),
        )  # fmt: skip


# What a machine without a GPU trains in a minute or two: the same topology and schedule, small widths, bytes.
DEMO = dict(
    data="data/local", vocab_size=257, bos_id=256, encoding="bytes", max_doc_len=384,
    bigram_rows=16_384, model_dim=64, num_heads=2, head_dim=32, dtype="float32", compile=False,
    attention_scale=0.28,  # queries and keys have length √head_dim: narrow heads make small logits
    num_scheduled_iterations=384, num_extension_iterations=8, batch_unit=72, micro_batches=2, block_size=32,
    momentum_warmup=1000, muon_lr_mul=1.3, adam_lr_mul=0.6,  # short runs: low momentum, high rates of matrices
    val_every=150, val_tokens=262_144, val_batch_tokens=32_768, sample_tokens=100,
)  # fmt: skip
PRESETS = {"record": {}, "demo": DEMO}

# -----------------------------------------------------------------------------
# Table 1: parameters. A row is a rule (Adam, NorMuon: below) with its settings


class Now(NamedTuple):
    """What a step gives to every update."""

    lr_mul: float  # the schedule's; the rate is rule's lr · schedule's lr_mul · row's lr_mul
    momentum: float  # NorMuon's
    grad_scale: float  # 1 / micro-batches: gradients are sums over them, and over tokens


@dataclass(frozen=True)
class ParamConfig:
    """How one parameter is reduced and updated. A rule is a subclass: its settings, state and update."""

    comms: str  # "sharded": reduce-scatter, update own shard, all-gather; "replicated": all-reduce
    _: KW_ONLY
    lr: float
    weight_decay: float = 0.0
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    tied_to: str = ""  # until the split: its gradient joins this parameter's, whose transpose it is
    grad_dtype: torch.dtype | None = None  # of sums over micro-batches and ranks; None: the parameter's

    every_step: ClassVar[bool] = False  # False: updated on odd steps, by the summed gradients of two steps
    may_pad: ClassVar[bool] = False  # padded if its rows do not divide over the ranks, else refused
    pad_front: ClassVar[bool] = False  # padding in front, not at the back

    def __post_init__(self):
        if self.comms not in ("sharded", "replicated"):
            raise ValueError(f"comms={self.comms!r} in PARAM_TABLE: must be 'sharded' or 'replicated'")

    def as_rows(self, x: Tensor) -> Tensor:
        """x, shaped like the parameter, as a stack of what the ranks share out."""
        return x

    def initial_state(self, rows: Tensor) -> dict[str, Tensor | int]:
        """Of one rank's rows: tensors of as many rows, and numbers, the same on all ranks."""
        return {}

    def constants(self, rows: Tensor, first: int) -> dict[str, Tensor]:
        """What update takes beside the state and never changes; first: the number of the first row."""
        return {}

    def update(self, rows: Tensor, grad: Tensor, state: dict[str, Any], now: Now) -> None:
        """One step on a rank's rows, in place; grad · now.grad_scale: their mean over the micro-batches."""
        raise NotImplementedError


def wider(dtype: torch.dtype) -> torch.dtype:  # fp32, or fp64 for fp64
    return torch.promote_types(dtype, torch.float32)


def moments(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, device=rows.device, dtype=wider(rows.dtype))


def scalar(x: float) -> Tensor:
    """A 0-dim CPU tensor: a new value does not recompile an update, and never widens a tensor."""
    return torch.tensor(x, dtype=torch.float64)


@dataclass(frozen=True)
class Adam(ParamConfig):
    """For embeddings, the head, gates and scalars."""

    lr: float = 0.008
    weight_decay: float = 0.005
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-10

    def initial_state(self, rows: Tensor) -> dict[str, Tensor | int]:
        return {"step": 0, "exp_avg": moments(rows, rows.shape), "exp_avg_sq": moments(rows, rows.shape)}

    def update(self, rows: Tensor, grad: Tensor, state: dict[str, Any], now: Now) -> None:
        state["step"] += 1
        t, (beta1, beta2) = state["step"], self.betas
        lr = self.lr * now.lr_mul * self.lr_mul
        step_size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        decay = lr * lr * self.weight_decay * self.wd_mul  # of the rate with both its multipliers
        numbers = beta1, beta2, self.eps, scalar(step_size), scalar(decay), scalar(now.grad_scale)
        for tensors in cache_sized(rows, grad, state["exp_avg"], state["exp_avg_sq"]):
            adam_update(*tensors, *numbers)


@dataclass(frozen=True)
class NorMuon(ParamConfig):
    """For hidden matrices, stacked in a bank (…, rows, cols). The ranks share out matrices: none is split."""

    comms: str = "sharded"
    lr: float = 0.023
    weight_decay: float = 1.2
    beta2: float = 0.95
    lr_mul: tuple[float, ...] = (1.0,)  # repeats over the bank's matrices
    stacked: int = 1  # matrices one below the other in each (rows, cols) slice of the bank
    pad_front: bool = False
    every_step: ClassVar[bool] = True
    may_pad: ClassVar[bool] = True

    def as_rows(self, x: Tensor) -> Tensor:
        return x.view(-1, x.size(-2) // self.stacked, x.size(-1))

    def initial_state(self, rows: Tensor) -> dict[str, Tensor | int]:
        n, height, width = rows.shape
        second = (n, height, 1) if height >= width else (n, 1, width)
        state = {"momentum_buffer": moments(rows, rows.shape), "second_moment": moments(rows, second)}
        if rows.dtype == torch.bfloat16:
            state["mantissa"] = torch.zeros(rows.shape, device=rows.device, dtype=torch.uint16)
        return state

    def constants(self, rows: Tensor, first: int) -> dict[str, Tensor]:
        """lr_mul (n, 1, 1): each matrix its own times √max(1, rows/cols)."""
        n, height, width = rows.shape
        cycle, shape_mul = self.lr_mul, math.sqrt(max(1, height / width))
        muls = [cycle[i % len(cycle)] * shape_mul for i in range(first, first + n)]
        return {"lr_mul": torch.tensor(muls, dtype=wider(rows.dtype), device=rows.device).view(n, 1, 1)}

    def update(self, rows: Tensor, grad: Tensor, state: dict[str, Any], now: Now, lr_mul: Tensor) -> None:
        banks = (rows, state.get("mantissa"), grad, state["momentum_buffer"], state["second_moment"], lr_mul)
        lr, decay = scalar(self.lr * now.lr_mul), scalar(self.weight_decay * self.wd_mul)
        momentum, grad_scale = scalar(now.momentum), scalar(now.grad_scale)
        for matrices in cache_sized(*banks):
            normuon_update(*matrices, lr, decay, momentum, self.beta2, grad_scale)


# In the order in which the reductions are launched. Without Adam, attn's short one goes first, and its update
# hides most of mlp's; with Adam the links never idle (predicted for 8 H100s: bench/README.md, order.py).
PARAM_TABLE: dict[str, ParamConfig] = {
    "attn":           NorMuon(stacked=4, pad_front=True),  # no rank has padding of both: see NorMuonAndAdam
    "mlp":            NorMuon(lr_mul=(1.0, 2.0)),  # W_fc, W_proj
    "scalars":        Adam("replicated", betas=(0.90, 0.99), lr_mul=5.00, wd_mul=0.0),
    "value_embeds":   Adam("sharded",    betas=(0.75, 0.95), lr_mul=75.0, wd_mul=5.0),
    "bigram_embed":   Adam("sharded",    betas=(0.75, 0.95), lr_mul=75.0, wd_mul=5.0),
    "smear_gate":     Adam("replicated", betas=(0.90, 0.99), lr_mul=0.01, wd_mul=0.0),
    "skip_gate":      Adam("replicated", betas=(0.90, 0.99), lr_mul=0.05, wd_mul=0.0),
    "attn_gate_bank": Adam("replicated", betas=(0.90, 0.99), lr_mul=1.00, wd_mul=1.0),
    "ve_gate_bank":   Adam("replicated", betas=(0.90, 0.99), lr_mul=1.00, wd_mul=1.0),
    "x0_lambdas":     Adam("replicated", betas=(0.65, 0.95), lr_mul=5.00, wd_mul=0.0),
    "lm_head":        Adam("sharded",    betas=(0.50, 0.95), lr_mul=1.00, wd_mul=150.0),
    "embed":          Adam("sharded",    betas=(0.50, 0.95), lr_mul=1.00, wd_mul=150.0, tied_to="lm_head"),
}  # fmt: skip
SCATTER_ORDER = tuple(PARAM_TABLE)

# Small first: big reductions travel meanwhile. While tied, embed copies lm_head; the slow banks come last and
# are worked while embeddings are gathered. The model of bench/order.py finds no order that is faster.
WORK_ORDER = (
    "scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "x0_lambdas",
    "value_embeds", "bigram_embed", "lm_head", "embed", "attn", "mlp",
)  # fmt: skip

# -----------------------------------------------------------------------------
# Table 2: layers


@dataclass(frozen=True)
class Layer:
    """What a layer has beside its MLP, which all have."""

    window: str = ""  # of its attention: "short" or "long" (their sizes: Stage); empty: no attention
    paired: bool = False  # a token becomes two positions, one for each half of the heads
    key_offset: bool = False  # half of the key dims look one position back
    value_gate: int = 0  # dims of x that its value embedding's gate reads, beside the embedding's; 0: has none
    keep: str = ""  # a name for its output; "backout" is subtracted at the end
    add: str = ""  # the kept output that is added, gated, to its input


LAYERS = (  # counted from 0
    Layer("short", paired=True),
    Layer("short", value_gate=6),
    Layer("short", paired=True, value_gate=12),
    Layer("long", key_offset=True, keep="skip"),
    Layer("short"),
    Layer("short", paired=True),
    Layer(add="skip"),
    Layer("short", keep="backout"),
    Layer("short", value_gate=6),
    Layer("short", paired=True, value_gate=12),
    Layer("long", key_offset=True, value_gate=6),
)
ATTENTION_LAYERS = sum(bool(layer.window) for layer in LAYERS)
VALUE_LAYERS = sum(bool(layer.value_gate) for layer in LAYERS)
MLP_BANK_LAYERS = -(-len(LAYERS) // 4) * 4  # 12, one unused: 24 matrices divide over 8 ranks
GATE_DIM = 12  # inputs of a gate: the first dims of the residual stream, of a value gate also of the embedding

# -----------------------------------------------------------------------------
# Table 3: scalars, by name, with their starting values, in the order of the parameter `scalars`

SCALARS = {
    "resid_lambda": [1.1] * len(LAYERS),
    "sa_lambda": [0.5, 1.0] * len(LAYERS),  # of W_qkv and W_o
    "bigram_lambda": [0.1] * len(LAYERS),
    "smear_lambda": [0.0],
    "backout_lambda": [0.5],
    "skip_lambda": [-1.5],
}

# -----------------------------------------------------------------------------
# Table 4: stages


class Stage(NamedTuple):
    until: float  # ends at this fraction of the scheduled steps, rounded
    batch: int  # tokens a step, in batch units
    short: int  # window, in blocks
    long: int  # window, in blocks
    lr: float  # factor on every rate, before the cooldown
    mtp_first: tuple[float, ...]  # multi-token weights at the stage's first step
    mtp_last: tuple[float, ...]  # reached, linearly, at the next stage's first step


STAGES = (
    Stage(until=1/3, batch=8,  short=1, long=3,  lr=1.00, mtp_first=(1, 0.5, 0.25), mtp_last=(1, 0.5, 0)),
    Stage(until=2/3, batch=16, short=3, long=7,  lr=1.52, mtp_first=(1, 0.5),       mtp_last=(1, 0)),
    Stage(until=1.0, batch=24, short=5, long=11, lr=1.73, mtp_first=(1,),           mtp_last=(1,)),
)  # fmt: skip
EXTENSION = STAGES[-1]._replace(until=math.inf, short=6, long=13)  # after the scheduled steps, at LR_FLOOR
FINAL_VALIDATION = EXTENSION._replace(long=20)  # YaRN stays at EXTENSION's window
SPLIT_EMBED_AT = 2 / 3  # of the scheduled steps: tied parameters part
LR_FLOOR = 0.10
LR_DECAY_FROM = 0.45  # of the scheduled steps
MOMENTUM_LOW, MOMENTUM_HIGH = 0.85, 0.95


def check_tables() -> None:
    """Raise ValueError, naming the row, if LAYERS or STAGES cannot be what is meant."""
    for i, layer in enumerate(LAYERS):
        window, gate, add, earlier = layer.window, layer.value_gate, layer.add, [x.keep for x in LAYERS[:i]]
        without = not window and (gate or layer.paired or layer.key_offset)
        raise_first(
            (window not in ("", "short", "long"), f"LAYERS, layer {i}: there is no window {window!r}"),
            (not 0 <= gate <= GATE_DIM, f"LAYERS, layer {i}: value_gate is {gate}, must be 0 to {GATE_DIM}"),
            (without, f"LAYERS, layer {i}: paired, key_offset and value_gate need attention, so a window"),
            (add and add not in earlier, f"LAYERS, layer {i}: none keeps {add!r}"),
            (layer.keep and layer.keep in earlier, f"LAYERS, layer {i}: {layer.keep!r} is kept by one before"),
        )
    ends = [0.0, *(stage.until for stage in STAGES)]
    longs = [long for long, _ in itertools.groupby(stage.long for stage in (*STAGES, EXTENSION))]
    rows = [*enumerate((*STAGES, EXTENSION, FINAL_VALIDATION), 1)]
    odd = [i for i, s in rows if not all(x and f"{x}".isdecimal() for x in (s.batch, s.short, s.long)) or not 0 < s.lr < math.inf]
    even = lambda a, b: type(a) is type(b) is tuple and len(a) == len(b) and min(sum(a), sum(b)) > 0
    uneven = [i for i, row in rows if not even(row.mtp_first, row.mtp_last)]
    raise_first(
        (odd, f"STAGES (then EXTENSION), stage {odd[:1]}: batch and windows must be whole numbers from 1 on, lr a number above 0"),
        (ends != sorted(set(ends)) or ends[-1] != 1, f"STAGES: until must rise and end at 1, is {ends[1:]}"),
        ("backout" not in [layer.keep for layer in LAYERS], "LAYERS: none keeps 'backout', which is subtracted at the end"),
        (len(longs) > len({*longs}), f"STAGES, EXTENSION: a long window cannot come back (YaRN), is {longs}"),
        (uneven, f"STAGES, stage {uneven[:1]}: mtp_first and mtp_last must be tuples of as many weights, as (1,), of sums > 0"),
        (SPLIT_EMBED_AT < 0, f"SPLIT_EMBED_AT is {SPLIT_EMBED_AT}, must be 0 or more: a fraction of the scheduled steps"),
    )


# -----------------------------------------------------------------------------
# Model: rotary positions and attention


class Yarn(nn.Module):
    """Rotary positions over the first half of a head; they and the attention scale stretch with the window
    (Peng et al., arXiv 2309.00071). Paired heads use the whole table, 0 .. 2·max_tokens, others its first half."""

    def __init__(self, head_dim: int, max_tokens: int, dtype: torch.dtype, scale: float = 0.1):
        super().__init__()
        frequencies = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4, dtype=torch.float32)
        self.frequencies = torch.cat((frequencies, torch.zeros(head_dim // 4)))  # (D/2,) fp32
        self.scale = scale  # of the attention logits
        table = torch.empty(2 * max_tokens, head_dim // 2, 2, dtype=dtype)
        self.register_buffer("table", table, persistent=False)
        self.fill_table()

    def fill_table(self) -> None:
        """table[t, j] = (cos, −sin) of position t times frequency j: built in fp32, held in its own dtype."""
        positions = torch.arange(len(self.table), dtype=torch.float32, device=self.table.device)
        angle = positions[:, None] * self.frequencies.to(self.table.device)  # radians
        self.table[..., 0] = angle.cos()
        self.table[..., 1] = -angle.sin()

    def extend(self, old_window: int, new_window: int) -> None:
        """The long window goes from old to new, in tokens: slow frequencies stretch, fast ones stay."""
        ratio = old_window / new_window
        rotations = old_window * self.frequencies / (2 * math.pi)
        stay = ((rotations - 1) / (32 - 1)).clamp(0, 1)  # YaRN's α = 1, β = 32
        self.frequencies = self.frequencies * (ratio + stay * (1 - ratio))
        self.scale *= 0.2 * math.log(new_window / old_window) + 1
        self.fill_table()

    def _apply(self, function: Callable, recurse: bool = True) -> "Yarn":
        """A table that is cast or moved is built anew: widening a rounded one would keep its error."""
        super()._apply(function, recurse)
        self.fill_table()
        return self

    def state(self) -> dict[str, Any]:
        return {"frequencies": self.frequencies.clone(), "scale": self.scale}

    def load_state(self, saved: dict[str, Any]) -> None:
        self.frequencies, self.scale = saved["frequencies"].clone(), saved["scale"]
        self.fill_table()


def attention(
    x: Tensor, W_qkv: Tensor, W_o: Tensor, head_gate: Tensor, value: Tensor | None,
    layer: Layer, yarn: Yarn, band: Band,
) -> Tensor:  # fmt: skip
    """x (T, dim), normed; W_qkv (3·dim, dim); W_o (dim, dim); head_gate (H, 12); value (T, H, D), gated."""
    T, dim = x.shape
    H = len(head_gate)
    D, p = dim // H, 2 if layer.paired else 1
    qkv = linear(x, W_qkv).view(T, 3 * H, D)
    q, k, v = norm_and_rotate_qk(qkv, yarn.table, layer.paired, layer.key_offset)
    if value is not None:
        v = v + value
    q, k, v = (z.reshape(T * p, H // p, D) for z in (q, k, v))
    y = attend(q, k, v, band, yarn.scale).reshape(T, H, D)
    y = y * torch.sigmoid(F.linear(x[:, :GATE_DIM], head_gate)).unsqueeze(-1)
    return linear(y.reshape(T, dim), W_o)


# -----------------------------------------------------------------------------
# Model: banks and the residual stream


class ForwardSchedule(NamedTuple):
    """What a forward pass takes from the schedule."""

    mtp_weights: Tensor  # (3,), (2,) or (1,) fp32, on the model's device: weight of the k-th next token
    short_window: int  # positions: tokens, in paired layers half tokens
    long_window: int  # positions
    max_doc_len: int = 0  # tokens: no document of the micro-batch is longer; 0: not known


class GPT(nn.Module):
    """The model of LAYERS. All attention matrices are one parameter, all MLP matrices another; param.label is
    its row in PARAM_TABLE. It computes in its parameters' dtype: bf16, or what .float(), .double() make of it."""

    def __init__(
        self, vocab_size: int, num_layers: int, num_heads: int, head_dim: int, model_dim: int,
        max_tokens: int, *, bigram_rows: int = 0, attention_scale: float = 0.1, fp8_head: bool = False,
    ):  # fmt: skip
        """max_tokens: the longest micro-batch, validation included. bigram_rows: 0 means five for each token.
        attention_scale: before the windows grow; narrow heads want more. fp8_head: FP8 in training.
        Raises ValueError for sizes that the topology cannot have."""
        super().__init__()
        raise_first(
            (num_layers != len(LAYERS), f"num_layers={num_layers}: the topology is fixed for {len(LAYERS)}"),
            (num_heads % 2, f"num_heads={num_heads}: must be even, as paired layers split the heads in two"),
            (head_dim % 4, f"head_dim={head_dim}: must be a multiple of 4 (half of it rotates, in pairs)"),
            (num_heads * head_dim != model_dim, f"model_dim={model_dim} is not num_heads * head_dim"),
            (model_dim % 16, f"model_dim={model_dim}: must be a multiple of 16 (FP8 products)"),
        )
        self.num_heads, self.head_dim, self.model_dim = num_heads, head_dim, model_dim
        self.max_tokens, self.fp8_head = max_tokens, fp8_head
        vocab, dim, hidden = -(-vocab_size // 128) * 128, model_dim, 4 * model_dim

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype))

        self.attn = parameter(ATTENTION_LAYERS, 4 * dim, dim)  # a layer: q, k, v rows, then o
        self.mlp = parameter(MLP_BANK_LAYERS, 2, hidden, dim)  # a layer: W_fc, W_proj
        self.scalars = parameter(sum(map(len, SCALARS.values())), dtype=torch.float32)
        self.value_embeds = parameter(vocab, VALUE_LAYERS * dim)  # a token's value embeddings, side by side
        self.bigram_embed = parameter(bigram_rows or 5 * vocab, dim)
        self.smear_gate = parameter(1, GATE_DIM)
        self.skip_gate = parameter(1, GATE_DIM)
        self.attn_gate_bank = parameter(ATTENTION_LAYERS, num_heads, GATE_DIM)
        self.ve_gate_bank = parameter(VALUE_LAYERS, num_heads, GATE_DIM)
        self.x0_lambdas = parameter(len(LAYERS), dtype=torch.float32)
        self.lm_head = parameter(dim, vocab)
        self.embed = parameter(vocab, dim)
        for label, param in self.named_parameters():
            param.label = label
        self.initialize()
        self.yarn = Yarn(head_dim, max_tokens, self.embed.dtype, attention_scale)

    @torch.no_grad()
    def initialize(self) -> None:
        """Starting values. W_proj, bigrams, gates and x0_lambdas stay zero."""
        bound = math.sqrt(3) / 2 * self.model_dim**-0.5
        self.attn.uniform_(-bound, bound)
        self.mlp[:, 0].uniform_(-bound, bound)
        self.value_embeds.normal_(std=0.01)
        self.lm_head.normal_(std=0.005)
        self.embed.copy_(self.lm_head.T)
        self.scalars.copy_(torch.tensor(sum(SCALARS.values(), [])))

    def extend_windows(self, old_long: int, new_long: int) -> None:  # YaRN, in tokens
        self.yarn.extend(old_long, new_long)

    def forward(
        self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor, schedule: ForwardSchedule
    ) -> Tensor:  # fmt: skip
        """In training the multi-token loss, summed over tokens; else the mean next-token loss. At least fp32.
        inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32: document starts, padded with T."""
        x = self.hidden_states(inputs, cu_seqlens, schedule)
        if self.training:
            return head_loss(x, self.lm_head, targets, schedule.mtp_weights, self.fp8_head)
        next_token_only = torch.ones(1, device=x.device, dtype=schedule.mtp_weights.dtype)
        return head_loss(x, self.lm_head, targets, next_token_only, fp8=False) / len(targets)

    def hidden_states(self, inputs: Tensor, cu_seqlens: Tensor, schedule: ForwardSchedule) -> Tensor:
        """(T, dim): what the head reads."""
        T, dim, H, D = len(inputs), self.model_dim, self.num_heads, self.head_dim
        parts = self.scalars.split([len(values) for values in SCALARS.values()])
        scalars = {name: part.unbind() for name, part in zip(SCALARS, parts)}
        (smear_lambda,), (backout_lambda,), (skip_lambda,) = (scalars[f"{x}_lambda"] for x in ("smear", "backout", "skip"))
        resid_lambda, x0_lambda, sa_lambda = scalars["resid_lambda"], self.x0_lambdas.unbind(), pairs(scalars["sa_lambda"])
        # Views of the banks, by layer: (W_qkv, W_o), gates, (W_fc, W_proj); None where a layer has none.
        attn = of_layers("window", pairs(self.attn.view(-1, dim).split((3 * dim, dim) * ATTENTION_LAYERS)))
        head_gate = of_layers("window", self.attn_gate_bank.unbind())
        ve_gate = of_layers("value_gate", self.ve_gate_bank.unbind())
        mlp = pairs(self.mlp.view(-1, 4 * dim, dim).unbind())
        bands = self.bands(cu_seqlens, T, schedule)

        x, values = lookup(self.embed, self.value_embeds, tokens=inputs)  # (T, dim), (T, VALUE_LAYERS·dim)
        values = of_layers("value_gate", values.split(dim, 1))
        (bigram,) = lookup(self.bigram_embed, tokens=hash_bigrams(inputs, len(self.bigram_embed)))  # (T, dim)
        smear = smear_lambda * torch.sigmoid(F.linear(x[1:, :GATE_DIM], self.smear_gate))
        x = x0 = norm(torch.cat((x[:1], x[1:] + smear * x[:-1])))
        kept = {}
        for i, layer in enumerate(LAYERS):
            if layer.add:
                gate = torch.sigmoid(F.linear(x0[:, :GATE_DIM], self.skip_gate))
                x = x + torch.sigmoid(skip_lambda) * 2 * gate * kept[layer.add]
            x = resid_lambda[i] * x + x0_lambda[i] * x0 + scalars["bigram_lambda"][i] * bigram
            if layer.window:
                xn, value, n = norm(x), None, layer.value_gate
                if n:
                    gate_input = torch.cat((xn[:, :n], values[i][:, : GATE_DIM - n]), 1)
                    gate = 2 * torch.sigmoid(F.linear(gate_input, ve_gate[i]))
                    value = gate.unsqueeze(-1) * values[i].view(T, H, D)
                W_qkv, W_o = (scale * W for scale, W in zip(sa_lambda[i], attn[i]))
                out = attention(xn, W_qkv, W_o, head_gate[i], value, layer, self.yarn, bands[i])
                x = residual_add(x, out)
            x = residual_add(x, relu_squared_mlp(norm(x), *mlp[i]))
            if layer.keep:
                kept[layer.keep] = x
        return norm(x - backout_lambda * kept["backout"])

    def bands(self, cu_seqlens: Tensor, T: int, schedule: ForwardSchedule) -> list[Band | None]:
        """What each layer's attention sees. Windows count positions; paired layers have two for a token."""
        max_len = min(schedule.max_doc_len or T, T)  # attention passes over what is longer
        bands: dict[tuple[str, bool], Band | None] = {("", False): None}
        for layer in LAYERS:
            if (layer.window, layer.paired) not in bands:
                p, window = 2 if layer.paired else 1, getattr(schedule, f"{layer.window}_window")
                starts, bias = p * cu_seqlens, None
                if not uses_flash(self.embed):
                    bias = band_bias(starts, p * T, window, wider(self.embed.dtype))
                bands[layer.window, layer.paired] = Band(starts, window, p * max_len, bias)
        return [bands[layer.window, layer.paired] for layer in LAYERS]


def hash_bigrams(tokens: Tensor, rows: int) -> Tensor:
    """(T,) int32, a row for each token and the one before, of whatever document; the first has the last row."""
    hashed = ((36313 * tokens[1:]) ^ (27191 * tokens[:-1])) % (rows - 1)  # int32 wraps around; at least 0
    return F.pad(hashed, (1, 0), value=rows - 1)


def pairs(items: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """(first, second), (third, fourth), …"""
    return list(zip(items[::2], items[1::2]))


def of_layers(column: str, rows: Iterable[Any]) -> list[Any]:
    """By layer, the next of a bank's rows if the layer's `column` is not empty, else None."""
    rows = iter(rows)
    return [next(rows) if getattr(layer, column) else None for layer in LAYERS]


# -----------------------------------------------------------------------------
# Head and loss

# Static scales of the FP8 products: a tensor divided by its scale fills the format.
FP8_X_SCALE, FP8_W_SCALE = 100 / 448, 1.6 / 448  # e4m3
FP8_GRAD_SCALE = 0.75 / 448  # e5m2, of the gradient of a loss that is summed over tokens, undivided


def head_loss(x: Tensor, w: Tensor, targets: Tensor, mtp_weights: Tensor, fp8: bool) -> Tensor:
    """Σ_t Σ_k mtp_weights[k] · CE(softcap(x[t] @ w), targets[t + k]), in fp32 or better.

    x (T, dim), w (dim, vocab), targets (T,) int64, mtp_weights (K,). Softcap and FP8: triton_kernels.py.
    """
    if fp8:
        return fp8_head_loss(x, w, targets, mtp_weights, FP8_X_SCALE, FP8_W_SCALE, FP8_GRAD_SCALE)
    return softcapped_cross_entropy(x @ w, targets, mtp_weights)


# -----------------------------------------------------------------------------
# Updates

# Optimal quintics of Polar Express, five steps: Amsel et al., arXiv 2505.16932.
POLAR_EXPRESS_COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(G: Tensor) -> Tensor:
    """The orthogonal factor of each of G, nearly: singular values above 0.2 % of the Frobenius norm end between 0.85 and 1.15.

    G (n, rows, cols), any float dtype; result the same shape, in fp64 where G is, in fp32 in a run on a CPU
    without bf16 units, else in bf16. Tall matrices multiply on the right: the Gram matrix is the smaller one,
    and nothing is transposed.
    """
    if kernel_device(G) == CPU_FP32:
        return polar_express_in_fp32(G, POLAR_EXPRESS_COEFFICIENTS)
    X = G.to(G.dtype if G.dtype == torch.float64 else torch.bfloat16)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    tall = X.size(-2) > X.size(-1)
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS:
        A = XTX(X) if tall else XXT(X)
        X = aX_plus_BX(X, ba_plus_cAA(A, beta=b, alpha=c), a, right=tall)
    return X


def normuon_scale(u: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """NorMuon's variance reduction (arXiv 2510.05491): rows at equal mean square, Frobenius norm kept.

    u (n, rows, cols) fp32 or fp64; second_moment (n, rows, 1), or (n, 1, cols) for wide matrices, in place.
    """
    along = -1 if second_moment.size(-1) == 1 else -2
    mean_square = torch.linalg.vector_norm(u, dim=along, keepdim=True).square() / u.size(along)
    second_moment.lerp_(mean_square, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    norm = mean_square.sum((-2, -1), keepdim=True).sqrt()
    scaled_norm = (mean_square * scale.square()).sum((-2, -1), keepdim=True).sqrt()
    return u * (scale * (norm / scaled_norm.clamp_min(1e-10)))


@fused_on_gpu
def adam_update(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    beta1: float, beta2: float, eps: float, step_size: Tensor, decay: Tensor, grad_scale: Tensor,
) -> None:  # fmt: skip
    """One Adam step with cautious decay on p (any shape, any dtype), moments fp32 or fp64, all in place.

    step_size, decay, grad_scale: 0-dim CPU tensors.
    """
    grad = grad.to(exp_avg.dtype) * grad_scale
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    wide = p.to(exp_avg.dtype)
    update = exp_avg / (exp_avg_sq.sqrt() + eps) * step_size
    update = torch.where(update * wide > 0, update + decay * wide, update)
    p.copy_(wide - update)


@fused_on_gpu
def normuon_update(
    p: Tensor, mantissa: Tensor | None, grad: Tensor, momentum_buffer: Tensor, second_moment: Tensor,
    lr_mul: Tensor, lr: Tensor, weight_decay: Tensor, momentum: Tensor, beta2: float, grad_scale: Tensor,
) -> None:  # fmt: skip
    """One NorMuon step on p (n, rows, cols), all in place; a bf16 p has its lower halves in mantissa.

    lr_mul (n, 1, 1); lr, weight_decay, momentum, grad_scale: 0-dim CPU tensors.
    """
    grad = grad.to(momentum_buffer.dtype) * grad_scale
    momentum_buffer.add_((grad - momentum_buffer).mul_(1 - momentum))
    update = polar_express((momentum_buffer - grad).mul_(momentum).add_(grad)).to(momentum_buffer.dtype)
    update = normuon_scale(update, second_moment, beta2)
    wide = p if mantissa is None else join_mantissa(p, mantissa)
    lr_eff = lr * lr_mul
    decay = (wide * (update * wide >= 0)).mul_(weight_decay * lr * lr_eff)
    wide = wide - decay.addcmul_(update, lr_eff)
    if mantissa is None:
        p.copy_(wide)
    else:
        upper, lower = split_mantissa(wide)
        p.copy_(upper)
        mantissa.copy_(lower)


# -----------------------------------------------------------------------------
# Optimizer

# Renamed in PyTorch 2.13. reduce_scatter: cpu.py
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def check_order(name: str, order: Iterable[str], labels: Iterable[str]) -> None:
    """Raise ValueError unless order names every label exactly once."""
    order, labels = list(order), set(labels)
    faults = {
        "missing": sorted(labels - set(order)),
        "twice": sorted({label for label in order if order.count(label) > 1}),
        "unknown": sorted(set(order) - labels),
    }
    if found := "; ".join(f"{kind}: {', '.join(which)}" for kind, which in faults.items() if which):
        raise ValueError(f"{name} must name every parameter exactly once. {found}")


class NorMuonAndAdam:
    """NorMuon for banks of matrices, Adam for everything else, sharded over the ranks; no groups, no hooks.

    A step has three phases:
      1. launch every gradient reduction, asynchronously, in scatter_order; just before, add what is tied;
      2. in work_order: wait for the reduction, update own shard (all, if replicated), launch the gather;
      3. wait for the gathers; first for a parameter that another is tied to, and transpose it into that one.

    A shard is a view of the parameter and of its gradient: both collectives work in place. The ranks share
    out rows of an embedding, matrices of a bank. A bank that does not divide becomes a view of a padded one;
    padding is zero, has no state and is never updated. Matrices on 16 ranks, · for padding:

        rank                0       1       2       3     …   11       12       13       14       15
        attn, 40 of 48    · · ·   · · ·   · · 0   1 2 3     25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        mlp,  24 of 32     0 1     2 3     4 5     6 7       22 23     · ·      · ·      · ·      · ·

    Pending gradients stay where autograd leaves them, in param.grad. Those of padded banks, and those with a
    wider grad_dtype, move to `wide_grads`: `accumulate` adds them there after each backward pass.

    While `tied`, a parameter with tied_to has no reduction: its gradient joins the other's; its state is
    there from the start and stays at zero. `split_tied` ends that.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], param_table: dict[str, ParamConfig],
        scatter_order: Iterable[str], work_order: Iterable[str],
    ):  # fmt: skip
        """named_parameters: (label, parameter) pairs, on their device. Uses the process group, if any.
        Raises ValueError if table or orders do not name each parameter once, or if one cannot be sharded."""
        self.params, self.table = dict(named_parameters), param_table
        self.scatter_order, self.work_order = tuple(scatter_order), tuple(work_order)
        check_order("param_table", param_table, self.params)
        check_order("scatter_order", self.scatter_order, self.params)
        check_order("work_order", self.work_order, self.params)
        for label, row in ((label, row) for label, row in param_table.items() if row.tied_to):
            other = param_table.get(row.tied_to)
            paces = other and other.every_step != row.every_step and "updated in other steps"
            why = (paces or other.tied_to and "tied itself") if other else "no parameter"
            raise_first((why, f"{label} is tied to {row.tied_to}, which is {why}"))
        raise_first(*((not x.dim() * x.numel(), f"{name} is empty or 0-dim: give it rows") for name, x in self.params.items()))
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.tied = True
        self.lr_mul, self.momentum = 1.0, 0.95  # the schedule's; set before each step
        self.grad_divisor = 1  # gradients are sums over this many micro-batches
        self.padded = {label: self._pad(label) for label in self.params}
        self.own_rows = {label: self._find_own_rows(label) for label in self.params}
        self.shards = {label: self._own(label, padded) for label, padded in self.padded.items()}
        self.wide_grads = self._allocate_wide_grads()
        self.in_wide: set[str] = set()  # labels whose pending gradient is in wide_grads
        self.state, self.constants = {}, {}
        for label, shard in self.shards.items():
            self.state[label] = map_tensors(lambda x: x, param_table[label].initial_state(shard))  # NumPy's numbers as Python's
            self.constants[label] = param_table[label].constants(shard, self.own_rows[label].start)
            number = lambda x: type(x) in (bool, int, float) and abs(x) < math.inf
            fits = lambda x: x.shape[:1] == shard.shape[:1] if torch.is_tensor(x) else number(x)
            bad = ", ".join(name for name, x in self.state[label].items() if not fits(x))
            raise_first((bad, f"{label}: initial_state's {bad}: must be finite numbers, or tensors of the rows, {len(shard)}"))

    # Layout

    def num_rows(self, label: str) -> int:  # without padding
        return len(self.table[label].as_rows(self.params[label].data))

    def _pad(self, label: str) -> Tensor:
        """The parameter's rows; if they do not divide over the ranks, the padded ones to which it then moves.
        Raises ValueError for rows that do not divide and may not be padded: of an embedding or a head."""
        param, row = self.params[label], self.table[label]
        rows = row.as_rows(param.data)
        padding = -len(rows) % self.world_size if row.comms == "sharded" else 0
        if not padding:
            return rows
        if not row.may_pad:
            raise ValueError(
                f"{label} {tuple(param.shape)} cannot be sharded: its {len(rows)} rows do not divide over "
                f"{self.world_size} ranks: start a number that divides them, or use --comms=replicated"
            )
        padded = rows.new_zeros(len(rows) + padding, *rows.shape[1:])
        within = self._without_padding(label, padded)
        within.copy_(rows)
        param.data = within.view_as(param)
        return padded

    def _without_padding(self, label: str, padded: Tensor) -> Tensor:
        n = self.num_rows(label)
        return padded[-n:] if self.table[label].pad_front else padded[:n]

    def _rank_share(self, label: str, padded: Tensor) -> Tensor:
        """This rank's equal share, padding included, a view: all if replicated."""
        if self.table[label].comms == "replicated":
            return padded
        share = len(padded) // self.world_size
        return padded.narrow(0, self.rank * share, share)

    def _find_own_rows(self, label: str) -> slice:
        """Which rows this rank updates: those of its share that are not padding."""
        padded, row, n = self.padded[label], self.table[label], self.num_rows(label)
        share = len(self._rank_share(label, padded))
        first = (self.rank * share if row.comms == "sharded" else 0) - row.pad_front * (len(padded) - n)
        start, stop = max(first, 0), max(first + share, 0)
        return slice(min(start, n), min(stop, n))

    def _own(self, label: str, padded: Tensor) -> Tensor:
        return self._without_padding(label, padded)[self.own_rows[label]]

    def _allocate_wide_grads(self) -> dict[str, Tensor]:
        """Zeros, padded, for the gradients that cannot stay where autograd leaves them."""
        wide = {}
        for label, param in self.params.items():
            dtype = torch.promote_types(param.dtype, self.table[label].grad_dtype or param.dtype)
            if dtype != param.dtype or len(self.padded[label]) > self.num_rows(label):
                wide[label] = torch.zeros_like(self.padded[label], dtype=dtype)
        return wide

    # Pending gradients

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add what autograd has left to wide_grads, where there is one. Call it after each backward pass."""
        for label, wide in self.wide_grads.items():
            if (grad := self.params[label].grad) is not None:
                within, rows = self._without_padding(label, wide), self.table[label].as_rows(grad)
                (within.add_ if label in self.in_wide else within.copy_)(rows)
                self.in_wide.add(label)
                self.params[label].grad = None

    def _pending(self, label: str) -> Tensor:
        """The pending gradient's rows, with padding if the parameter has some."""
        if label in self.in_wide:
            return self.wide_grads[label]
        return self.table[label].as_rows(self.params[label].grad)

    def gradients(self) -> dict[str, Tensor]:
        """The pending gradients, by label, shaped like their parameters: by reference."""
        self.accumulate()
        return {
            label: self._without_padding(label, self._pending(label)).view_as(param)
            for label, param in self.params.items() if param.grad is not None or label in self.in_wide
        }  # fmt: skip

    def lack_of_gradients(self, labels: Iterable[str], where: str = "") -> RunError | None:
        if idle := [label for label in labels if self.params[label].grad is None and label not in self.in_wide]:
            advice = "every parameter takes part in every step; one that does nothing by 0 * its sum, added to the loss"
            return RunError(f"{', '.join(idle)}: no gradient{where}: {advice}")

    def load_gradients(self, saved: dict[str, Tensor]) -> None:
        """Make copies of these the pending gradients, and no others."""
        self.in_wide.clear()
        for label, param in self.params.items():
            param.grad = None
            if label in saved and label in self.wide_grads:
                rows = self.table[label].as_rows(saved[label])
                self._without_padding(label, self.wide_grads[label]).copy_(rows)
                self.in_wide.add(label)
            elif label in saved:
                param.grad = saved[label].to(param.device, copy=True)

    # The step

    @torch.no_grad()
    def step(self, do_adam: bool) -> None:
        """Update every NorMuon parameter, and on do_adam every Adam parameter; clear the gradients they used.
        Unused gradients stay: the next backward pass adds to them. Raises RunError for a missing one."""
        self.accumulate()
        used = [label for label, row in self.table.items() if do_adam or row.every_step]
        if error := self.lack_of_gradients(used):
            raise error
        ties = {label: self.table[label].tied_to for label in used if self.tied and self.table[label].tied_to}
        active, alone = [label for label in used if label not in ties], self.world_size == 1
        reductions, gathers = {}, {}
        for label in [label for label in self.scatter_order if label in active]:
            for tied in [tied for tied, other in ties.items() if other == label]:  # while those before travel
                transpose_add(self._pending(tied), self._pending(label), alone)
            reductions[label] = self._launch_reduction(label)
        for label in self.work_order:
            if label in active:
                grad, work = reductions[label]
                if work is not None:
                    work.wait()
                self._update(label, grad)
                gathers[label] = self._launch_gather(label)
        for label in sorted(gathers, key=lambda label: label not in ties.values()):
            if gathers[label] is not None:
                gathers[label].wait()
            for tied in [tied for tied, other in ties.items() if other == label]:
                transpose_copy(self.params[label].data, self.params[tied].data, alone)
        for label in used:
            self.params[label].grad = None
        self.in_wide -= set(used)

    def _launch_reduction(self, label: str) -> tuple[Tensor, dist.Work | None]:
        """The summed gradient of this rank's rows, in place, and what to wait for before reading it."""
        grad = self._pending(label)
        own = self._own(label, grad)
        if self.world_size == 1:
            return own, None
        if self.table[label].comms == "replicated":
            return own, dist.all_reduce(grad, async_op=True)
        return own, reduce_scatter(self._rank_share(label, grad).view(-1), grad.view(-1))

    def _update(self, label: str, grad: Tensor) -> None:
        now = Now(self.lr_mul, self.momentum, 1 / self.grad_divisor)
        self.table[label].update(self.shards[label], grad, self.state[label], now, **self.constants[label])

    def _launch_gather(self, label: str) -> dist.Work | None:
        if self.world_size == 1 or self.table[label].comms == "replicated":
            return None
        padded = self.padded[label]
        return all_gather(padded.view(-1), self._rank_share(label, padded).view(-1), async_op=True)

    @torch.no_grad()
    def split_tied(self) -> None:
        """End the tie: a tied parameter goes on alone from the other's state, transposed and sharded anew.
        Only from what both rules have, and if all of it has the parameters' shapes: else its own starts as it is."""
        for label, other in ((label, row.tied_to) for label, row in self.table.items() if row.tied_to):
            own, fits = self.state[label], lambda x, at: not torch.is_tensor(x) or x.shape[1:] == self.params[at].shape[1:]
            shared = [(name, x) for name, x in self.state[other].items() if name in own]
            for name, value in shared if all(fits(x, other) and fits(own[name], label) for name, x in shared) else ():
                if isinstance(value, Tensor):
                    if value.shape != self.params[other].shape:
                        value, shard = value.new_empty(self.params[other].shape), value
                        all_gather(value.view(-1), shard.view(-1))
                    value = own[name].copy_(self._rank_share(label, value.mT))
                own[name] = value
        self.tied = False

    def load_state(self, saved: dict[str, dict[str, Any]]) -> None:
        """Copy saved states, by label, into these tensors, in place: compiled updates keep them."""
        for label, values in saved.items():
            own = map_tensors(lambda x: x, self.state[label])
            bad = differences(own, values, f"state.{label}.")
            raise_first((bad, f"{'; '.join(bad)}: updates must keep initial_state's names, types and shapes, for checkpoints"))
            for name, value in values.items():
                self.state[label][name] = own[name].copy_(value) if isinstance(value, Tensor) else value


# -----------------------------------------------------------------------------
# Schedule


class StepSchedule(NamedTuple):
    """All that the schedule says of one step."""

    batch_tokens: int
    short_window: int  # tokens
    long_window: int  # tokens
    yarn_window: int  # tokens: the long window that the rotary table is made for
    lr_mul: float
    momentum: float
    mtp_weights: tuple[float, ...]
    do_adam: bool


def step_schedule(step: int, h: Hyperparameters) -> StepSchedule:
    """The schedule as a pure function; step = h.total_iterations stands for the final validation."""
    stage, behind = stage_at(step, h.num_scheduled_iterations)
    shown = FINAL_VALIDATION if step >= h.total_iterations else stage
    return StepSchedule(
        batch_tokens=shown.batch * h.batch_unit,
        short_window=shown.short * h.block_size,
        long_window=shown.long * h.block_size,
        yarn_window=stage.long * h.block_size,
        lr_mul=lr_multiplier(step, h.num_scheduled_iterations),
        momentum=muon_momentum(step, h),
        mtp_weights=tuple(a + (b - a) * behind for a, b in zip(stage.mtp_first, stage.mtp_last)),
        do_adam=step % 2 == 1,
    )


def stage_at(step: int, scheduled: int) -> tuple[Stage, float]:
    """The stage of a step, and the fraction of it that lies behind."""
    begin = 0
    for stage in STAGES:
        end = round(stage.until * scheduled)
        if step < end:
            return stage, (step - begin) / (end - begin)
        begin = end
    return EXTENSION, 0.0


def lr_multiplier(step: int, scheduled: int) -> float:
    """The stage's; from LR_DECAY_FROM on it falls, linearly, to LR_FLOOR at the end of the scheduled steps."""
    weight = min(1.0, max(0.0, (scheduled - step) / max(1, scheduled - int(LR_DECAY_FROM * scheduled))))
    return stage_at(step, scheduled)[0].lr * weight + LR_FLOOR * (1 - weight)


def muon_momentum(step: int, h: Hyperparameters) -> float:
    """Rises over the first steps, falls over the last; where both hold, it rises."""
    rise = MOMENTUM_HIGH - MOMENTUM_LOW
    if step < h.momentum_warmup:
        return MOMENTUM_LOW + rise * step / h.momentum_warmup
    into_cooldown = max(0, step - (h.total_iterations - h.momentum_cooldown))
    return MOMENTUM_HIGH - rise * into_cooldown / max(1, h.momentum_cooldown)


def split_step(scheduled: int) -> int:
    """The first odd step, one with Adam, from SPLIT_EMBED_AT on."""
    return round(SPLIT_EMBED_AT * scheduled) | 1


def param_table(h: Hyperparameters) -> dict[str, ParamConfig]:
    """PARAM_TABLE as the options change it."""
    lr_muls = {Adam: h.adam_lr_mul, NorMuon: h.muon_lr_mul}
    changes = {"comms": "replicated"} if h.comms == "replicated" else {}
    changes |= {"grad_dtype": getattr(torch, h.grad_dtype)} if h.grad_dtype != "param" else {}
    lr = lambda row: row.lr * math.prod(mul for rule, mul in lr_muls.items() if isinstance(row, rule))
    return {label: replace(row, lr=lr(row), **changes) for label, row in PARAM_TABLE.items()}


class TrainingManager:
    """Applies the schedule, a function of the step; what that changed in the model (YaRN, the tie) is state."""

    def __init__(self, model: GPT, h: Hyperparameters):
        self.model, self.h = model, h
        self.optimizer = NorMuonAndAdam(model.named_parameters(), param_table(h), SCATTER_ORDER, WORK_ORDER)
        self.optimizer.grad_divisor = h.micro_batches
        self.split_step, tails = split_step(h.num_scheduled_iterations), TAIL_TABLE if h.tail_averages else ()
        self.tails = TailAverages(self.optimizer, tails, h.total_iterations, self.split_step)
        self.own_rows, self.ticks = self.optimizer.own_rows, self.tails.ticks  # by label; before a step
        self.windows = [stage.long * h.block_size for stage in (*STAGES, EXTENSION)]
        self.yarn_window = self.windows[0]
        self.max_val_doc_len = 0  # tokens: no document of a validation micro-batch is longer; 0: not known
        self.advance_schedule(0)

    def advance_schedule(self, step: int) -> None:
        """Set the schedule to `step`. YaRN passes through the windows of all stages on the way.
        Raises ValueError if YaRN is beyond that step: restore an earlier state first."""
        coming = step_schedule(step, self.h)
        at, to = self.windows.index(self.yarn_window), self.windows.index(coming.yarn_window)
        if to < at:
            raise ValueError(f"step {step} has a long window of {coming.yarn_window} tokens, YaRN is at {self.yarn_window}")
        for old, new in itertools.pairwise(self.windows[at : to + 1]):
            self.model.extend_windows(old, new)
        self.current, self.yarn_window = coming, coming.yarn_window
        self.mtp_weights = torch.tensor(coming.mtp_weights, dtype=torch.float32).to(self.model.embed.device, non_blocking=True)

    def forward_schedule(self) -> ForwardSchedule:
        now, longest = self.current, self.h.max_doc_len if self.model.training else self.max_val_doc_len
        return ForwardSchedule(self.mtp_weights, now.short_window, now.long_window, longest)

    def batch_tokens(self, step: int) -> int:
        return step_schedule(step, self.h).batch_tokens

    def step_optimizers(self, step: int) -> None:
        """Update the model by the gradients of `step`, at its lr and momentum; split the embedding if due."""
        current = step_schedule(step, self.h)
        self.optimizer.lr_mul, self.optimizer.momentum = current.lr_mul, current.momentum
        self.optimizer.step(current.do_adam)
        if step == self.split_step:
            self.optimizer.split_tied()

    # State: what training has changed, in the three parts of runtime/checkpoints.py

    def state_dict(self) -> dict[str, Any]:
        """A copy on the CPU, keyed by label, pending gradients included."""
        state = self._arrange(self.optimizer.state, self.optimizer.gradients())
        return map_tensors(lambda x: x.detach().to("cpu", copy=True), state)

    def layout(self, step: int | None) -> dict[str, Any]:
        """What the state of all ranks together is at the start of `step`: shapes and dtypes alone. None: all gradients pend."""
        optimizer, left = self.optimizer, step is None or step > 0 and not step_schedule(step - 1, self.h).do_adam
        whole, pending = {}, {}
        for label, param in optimizer.params.items():
            n, like = optimizer.num_rows(label), optimizer.wide_grads.get(label, param.data)
            whole[label] = map_tensors(lambda x: x.new_empty(n, *x.shape[1:], device="meta"), optimizer.state[label])
            if step is None or left and not optimizer.table[label].every_step:
                pending[label] = like.new_empty(param.shape, device="meta")
        return self._arrange(whole, pending)

    def _arrange(self, states: dict[str, Any], pending: dict[str, Tensor]) -> dict[str, Any]:
        optimizer, table = self.optimizer, self.optimizer.table
        sharded = {label: state for label, state in states.items() if table[label].comms == "sharded"}
        same = {
            "parameters": {label: param.data for label, param in optimizer.params.items()},
            "optimizer": {label: state for label, state in states.items() if label not in sharded},
            "tied": optimizer.tied,
            "yarn": self.model.yarn.state(),
            "yarn_window": self.yarn_window,
        }
        return {"same": same, "sharded": sharded, "partial": pending}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Back to a saved state, bit for bit, in place: compiled graphs keep their tensors."""
        same = saved["same"]
        for label, param in self.optimizer.params.items():
            param.data.copy_(same["parameters"][label])
        self.optimizer.load_gradients(saved["partial"])
        self.optimizer.load_state({**same["optimizer"], **saved["sharded"]})
        self.optimizer.tied = same["tied"]
        self.model.yarn.load_state(same["yarn"])
        self.yarn_window = same["yarn_window"]

    def live_tensors(self) -> dict[str, dict[str, Tensor]]:
        weights = {label: param.data for label, param in self.optimizer.params.items()}
        return {"weights": weights, "gradients": self.optimizer.gradients(), "buffers": dict(self.model.named_buffers())}

    def contradictions(self, state: dict[str, Any], step: int) -> list[str]:
        """What a state of the right layout cannot hold at the start of `step`: the value and the rule."""
        same, tied = state["same"], step <= self.split_step
        faults = [f"same.tied is {same['tied']}, must be {tied} at step {step}"] * (same["tied"] != tied)
        due = {f"{step_schedule(at, self.h).yarn_window}" for at in (max(0, step - 1), step)}  # before or after its validation
        if f"{same['yarn_window']}" not in due:
            faults.append(f"same.yarn_window is {same['yarn_window']}, must be {' or '.join(sorted(due))} at step {step}")
        counts = {x: n for x, y in (same["optimizer"] | state["sharded"]).items() if not torch.is_tensor(n := y.get("step", 0))}
        return faults + [f"the step of {label} is {n}, must be 0 or more" for label, n in counts.items() if n < 0 or n % 1]


# -----------------------------------------------------------------------------
# Model and data of a run


def build(h: Hyperparameters, ranks: Ranks) -> TrainingManager:
    """The model with its first weights, the same on every rank and device, in its manager."""
    seed_random(h.seed)
    torch.manual_seed(h.seed)
    sizes = (h.vocab_size, len(LAYERS), h.num_heads, h.head_dim, h.model_dim, h.max_tokens)
    options = dict(bigram_rows=h.bigram_rows, attention_scale=h.attention_scale)
    try:
        model = GPT(*sizes, **options, fp8_head=h.fp8_head and has_fp8(ranks.device))
        if h.dtype == "float32":
            model.float()
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ValueError(f"no such model can be made; if for its size, lower --model_dim or --val_batch_tokens: {error}") from error
    model.to(ranks.device)
    if h.compile:
        model.compile(dynamic=False, fullgraph=True)
    return TrainingManager(model, h)


def check_shards(h: Hyperparameters) -> DataFacts:
    """Raise DataError if the shards cannot feed the schedule or the validation: now, not at step 1700."""
    tokens = lambda step: step_schedule(step, h).batch_tokens
    more = dict(val_tokens=h.val_tokens, val_batch_tokens=h.val_batch_tokens, encoding=h.encoding if h.sample_tokens else None)
    return check_data(h.data, steps=h.total_iterations, batch_tokens=tokens, **more, **h.stream)


def micro_batches(h: Hyperparameters, ranks: Ranks, training: bool, first_step: int = 0, **change: int) -> Iterator:
    """This rank's micro-batches (inputs, targets, cu_seqlens), in order, on the CPU; change: of h.stream."""
    pattern, tokens = val_pattern(h.data), h.val_batch_tokens
    if training:
        pattern, tokens = train_pattern(h.data), lambda step: step_schedule(step, h).batch_tokens
    place = dict(rank=ranks.rank, world_size=ranks.world_size, aligned=training, first_step=first_step)
    return distributed_data_generator(pattern, tokens, **{**h.stream, **change}, **place)


# -----------------------------------------------------------------------------
# Warm-up and validation


def warm_up(manager: TrainingManager, ranks: Ranks, first_step: int = 0, again: int | None = None) -> None:
    """Run each shape from first_step on, of validations the first alone if nothing compiles; or one pass and the update of step
    `again`. Then restore the state. Raises AgreedError for a parameter that takes no part in the passes of two steps."""
    model, h = manager.model, manager.h
    slow = h.compile or ranks.device.type == "cuda"  # the first time
    sizes, saved, seen = {x: getattr(h, x) for x in ("vocab_size", "max_doc_len", "doc_slots")}, manager.state_dict(), set()
    for step in range(first_step, h.total_iterations + 1):
        now, validated = step_schedule(step, h), is_validated(step, h) and (slow or step == first_step)
        for training in [True] * (step < h.total_iterations) + [False] * validated:
            tokens = (now.batch_tokens if training else h.val_batch_tokens) // h.micro_batches
            shape = (training, tokens, now.short_window, now.long_window, training and len(now.mtp_weights))
            if shape in seen or seen and again is not None:
                continue
            seen.add(shape)
            manager.advance_schedule(step)
            model.train(training)
            model.zero_grad()
            for _ in range(2 * h.micro_batches):  # of a step with Adam: a parameter need not take part in each
                with torch.set_grad_enabled(training):
                    loss = model(*to_device(synthetic_batch(tokens, **sizes), ranks.device), manager.forward_schedule())
                if training:
                    loss.backward()
                if not (idle := training and manager.optimizer.lack_of_gradients(manager.optimizer.params, f" at step {step}")):
                    break
            ranks.raise_together(idle or None)
    for step in sorted({*range(4), *range(manager.split_step, manager.split_step + 4)}) if again is None else [again]:
        for param in model.parameters():
            param.grad = torch.ones_like(param)  # so that weights move, and averages of them
        manager.step_optimizers(step)  # with Adam or not; tied, split, later
    manager.tails.after_step(h.total_iterations - 1)
    ranks.on_all(manager.load_state_dict, saved)
    manager.advance_schedule(0)
    model.train()


def is_validated(step: int, h: Hyperparameters) -> bool:
    return step == h.total_iterations or (h.val_every > 0 and step % h.val_every == 0)


@torch.no_grad()
def validate(step: int, manager: TrainingManager, run: Run) -> float:
    """Mean next-token loss of the validation tokens, in nats; meaningless if a signal cuts it short."""
    model, h, ranks = manager.model.eval(), manager.h, run.ranks
    seed_random(h.seed, step, ranks.rank)  # an idea draws the same after a resumption
    manager.advance_schedule(step)
    share, steps = h.micro_batches // ranks.world_size, h.val_tokens // h.val_batch_tokens  # micro-batches of a batch, batches
    opened = functools.partial(micro_batches, h, ranks, False, max_doc_len=manager.max_val_doc_len)
    batches = run.ahead(opened, share, steps)
    total = torch.zeros((), device=ranks.device)
    for i, batch in enumerate(batches):
        total += model(*to_device(batch, ranks.device), manager.forward_schedule())
        if i % share == 0 and run.heard_signal(total):
            break
    batches.close()
    model.train()
    return sum(ranks.gather(total.item())) / (steps * h.micro_batches)


# -----------------------------------------------------------------------------
# The loop


def prepare(run: Run) -> TrainingManager:
    """All that comes before the clock: checks, before any file is written; model, log, warm-up, state."""
    h, ranks = run.settings, run.ranks
    ranks.on_all(h.check, ranks.world_size)
    data = ranks.on_all(check_shards, h)
    facts = [f"attention: {flash_attention()}" if ranks.device.type == "cuda" else use_cpu(h.compile)]
    if h.compile or ranks.device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64  # a graph for each stage and mode, an update for each shape
    manager = ranks.on_all(build, h, ranks)
    manager.max_val_doc_len = data.longest
    run.open(manager, data.shards, facts)
    started = time.perf_counter()
    warm_up(manager, ranks, run.first_step)
    run.restore(functools.partial(warm_up, manager, ranks, run.first_step))
    parameters, seconds = sum(p.numel() for p in manager.model.parameters()), time.perf_counter() - started
    run.log.show(f"{parameters:,} parameters, ranks: {ranks.world_size}, warm-up {seconds:.0f} s")
    return manager


def forward_backward(step: int, manager: TrainingManager, batches: Iterator, run: Run) -> None:
    """This rank's micro-batches of a step: their gradients are pending, their multi-token loss on its way."""
    ranks, schedule, share = run.ranks, manager.current, manager.h.micro_batches // run.ranks.world_size
    tokens, total = schedule.batch_tokens // ranks.world_size, torch.zeros((), device=ranks.device)
    for i, batch in enumerate(itertools.islice(batches, share)):
        loss = manager.model(*to_device(batch, ranks.device), manager.forward_schedule())
        total += loss.detach()
        if i == share - 1:
            run.report_loss(step, total / (tokens * sum(schedule.mtp_weights)))
        loss.backward()
        manager.optimizer.accumulate()


def train(h: Hyperparameters, ranks: Ranks, signals: Signals | None = None) -> None:
    """One run, from the first weights or a checkpoint to the log's last line. Raises RunError. Timed is the
    loop, but for run.paused: data, forward, backward, reductions, updates, gathers, step lines."""
    with Run(replace(h), ranks, signals or Signals(), SOURCES) as run:
        manager, tracer = prepare(run), Tracer(h.trace_steps, run)
        opened = functools.partial(micro_batches, h, ranks, training=True, first_step=run.first_step)
        batches = run.ahead(opened, h.micro_batches // ranks.world_size, h.total_iterations - run.first_step)
        run.start_clock()
        for step in range(run.first_step, h.total_iterations + 1):
            if is_validated(step, h) or run.must_pause(step):
                with run.paused(step):  # the clock stands; saves; leaves here if all ranks agreed to stop
                    if is_validated(step, h):
                        run.log_validation(step, validate(step, manager, run))
            if step == h.total_iterations:
                break
            seed_random(h.seed, step, ranks.rank)  # as validate
            manager.advance_schedule(step)
            forward_backward(step, manager, batches, run)
            run.agree_on_loss(step)  # an infinity or NaN ends the run here, before it reaches the weights
            with tracer.traced(step, manager.optimizer):
                manager.step_optimizers(step)
            if report := manager.tails.after_step(step):  # the last: the weights are now their averages
                run.log.write(report)
            run.end_step()
        batches.close()
        run.finish(functools.partial(sample_text, manager) if h.sample_tokens else None)


def main(argv: list[str] | None = None) -> None:
    """Options, ranks, training. Raises SystemExit after a message: code 1, 2 (options), or 128 + signal."""
    try:
        h = parse_options(Hyperparameters, PRESETS, "", argv)
        with Signals() as signals:
            train(h, join_ranks(), signals)
    except Stopped as stopped:
        raise SystemExit(stopped.args[1]) from None
    except RunError as error:
        if os.environ.get("RANK", "0") == "0" or not isinstance(error, AgreedError):
            tell(f"error: {error}")
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave("", 0)  # at its end, before the interpreter's, which a thread inside PyTorch can abort
