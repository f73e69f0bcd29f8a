"""bankrun: train a 124M-parameter GPT-2-class model to 3.28 validation loss on FineWeb, as fast as 8 H100s allow.

    ./run.sh                                          # what this machine can do: the record on GPUs, the demo without
    ./run.sh my_copy.py --num_scheduled_iterations=200  # your own copy, your own settings
    torchrun --standalone --nproc_per_node=8 train_gpt.py   # the same by hand: 8, 4, 2 or 1 GPUs (README.md: two nodes)
    python train_gpt.py --help                        # every setting

Read on: settings, head, optimizer, model, data, schedule, checkpoints, loop. The GPU kernels are in triton_kernels.py.
"""

# -----------------------------------------------------------------------------
# Source: what the log will hold, read before anything can change it

from pathlib import Path

SCRIPT = Path(__file__).resolve()
KERNELS = SCRIPT.with_name("triton_kernels.py")
SOURCES = {path.name: path.read_bytes().decode("utf-8") for path in (SCRIPT, KERNELS)}  # line breaks as they are

import argparse
import ctypes
import dataclasses
import difflib
import functools
import glob
import hashlib
import importlib.util
import io
import itertools
import math
import os
import platform
import queue
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, library, nn

from triton_kernels import (
    XTX,
    XXT,
    Band,
    aX_plus_BX,
    attend,
    ba_plus_cAA,
    band_bias,
    fp8_matmul,
    loss_and_fp8_gradient,
    quantize_fp8,
    quantize_fp8_both,
    relu_squared_mlp,
    softcap,
    softcapped_cross_entropy,
    transpose_add,
    transpose_copy,
    uses_flash,
)

# -----------------------------------------------------------------------------
# Settings


def setting(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass
class Hyperparameters:
    """The record by default. Every field is an option: --num_scheduled_iterations=200."""

    # data
    data: str = setting("data/fineweb10B", "folder of *_train_*.bin and *_val_*.bin shards")
    vocab_size: int = setting(50257, "token ids in the data are below this; the model pads it to a multiple of 128")
    bos_id: int = setting(50256, "the token that begins every document")
    encoding: str = setting("gpt2", "tiktoken encoding that turns tokens back into text, or 'bytes'")
    max_doc_len: int = setting(2048, "documents are cut at this many tokens in training")
    doc_slots: int = setting(0, "entries of cu_seqlens, one more than documents fit; 0: by the size of the micro-batch")
    # model
    model_dim: int = setting(768, "width of the residual stream, num_heads * head_dim")
    num_heads: int = setting(6, "attention heads, even")
    head_dim: int = setting(128, "width of a head, a multiple of 4")
    attention_scale: float = setting(0.1, "of the attention logits, before it grows with the windows")
    dtype: str = setting("bfloat16", "of matrices, embeddings and gates: bfloat16 or float32")
    fp8_head: bool = setting(True, "FP8 products in the head, where the device has them (CUDA from 8.9; emulated on CPU)")
    compile: bool = setting(True, "torch.compile the model")
    seed: int = setting(0, "of the initial weights")
    # schedule
    num_scheduled_iterations: int = setting(1725, "steps of the three stages")
    num_extension_iterations: int = setting(40, "steps after them, at a flat low rate and longer windows")
    comms: str = setting("sharded", "of banks and embeddings: sharded, or replicated (all-reduce, everyone updates: DDP)")
    grad_dtype: str = setting("param", "in which gradients are summed and reduced: param (the parameter's own) or float32")
    batch_unit: int = setting(16384, "a step takes 8, 16 and 24 of these many tokens in its three stages")
    micro_batches: int = setting(8, "a step's forward passes, shared by the ranks; 16 or 32 fit smaller GPUs")
    block_size: int = setting(128, "tokens in a block, the unit of the attention windows")
    adam_lr_mul: float = setting(1.0, "multiplies the table's learning rates of Adam")
    muon_lr_mul: float = setting(1.0, "multiplies the table's learning rates of NorMuon")
    momentum_warmup: int = setting(300, "steps over which NorMuon's momentum rises from 0.85 to 0.95")
    momentum_cooldown: int = setting(50, "last steps over which it falls back to 0.85")
    # validation
    val_every: int = setting(250, "steps between validations; 0: only at the end")
    val_tokens: int = setting(10_485_760, "tokens of the validation shard, from its start")
    val_batch_tokens: int = setting(2_097_152, "tokens in a validation batch, shared by the micro-batches")
    # output
    log_dir: str = setting("logs", "folder of the logs")
    run_id: str = setting("", "name of the log; empty: time and a random part")
    sample_tokens: int = setting(0, "tokens of text to write at the end")
    save_every: int = setting(0, "steps between checkpoints in log_dir/run_id, untimed, one more at the end; 0: none")
    keep_checkpoints: int = setting(2, "checkpoints of a run that stay, the newest")
    resume: str = setting("", "checkpoint to go on from, or 'latest': of run_id, if given, else of all runs in log_dir")

    @property
    def total_iterations(self) -> int:
        return self.num_scheduled_iterations + self.num_extension_iterations

    def check(self, world_size: int) -> None:
        """Raise ValueError, with what to do, if these settings cannot run on world_size ranks."""
        may_be_zero = {
            "doc_slots",
            "bos_id",
            "seed",
            "num_extension_iterations",
            "momentum_warmup",
            "momentum_cooldown",
            "val_every",
            "sample_tokens",
            "save_every",
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < (0 if field.name in may_be_zero else 1):
                raise ValueError(f"--{field.name}={value}: must be {'0 or more' if field.name in may_be_zero else 'positive'}")
            if field.type is float and not 0 < value < math.inf:
                raise ValueError(f"--{field.name}={value}: must be positive and finite")
            if field.type is int and value >= 2**40:
                raise ValueError(f"--{field.name}={value}: must be below 2**40")
        if self.total_iterations > 10**6:
            raise ValueError(f"--num_scheduled_iterations={self.num_scheduled_iterations}: a million steps is the most")
        if self.micro_batches % world_size:
            raise ValueError(
                f"--micro_batches={self.micro_batches} cannot be shared evenly by {world_size} ranks: "
                f"use a multiple of {world_size} (16 and 32 also fit smaller GPUs)"
            )
        for name, tokens in [
            (f"batch_unit={self.batch_unit} (stage {i + 1})", s.batch * self.batch_unit) for i, s in enumerate(STAGES)
        ] + [(f"val_batch_tokens={self.val_batch_tokens}", self.val_batch_tokens)]:
            if tokens % (16 * self.micro_batches):
                raise ValueError(
                    f"--{name}: {tokens} tokens do not divide into {self.micro_batches} micro-batches of a multiple of 16 "
                    f"tokens (FP8 products need that): change it or --micro_batches"
                )
        longest = max(max(s.batch for s in STAGES) * self.batch_unit, self.val_batch_tokens) // self.micro_batches
        if self.doc_slots > longest + 1:
            raise ValueError(f"--doc_slots={self.doc_slots}: the longest micro-batch has but {longest} tokens")
        if self.val_tokens % self.val_batch_tokens:
            raise ValueError(f"--val_tokens={self.val_tokens} is no multiple of --val_batch_tokens={self.val_batch_tokens}")
        if not 0 <= self.bos_id < self.vocab_size:
            raise ValueError(f"--bos_id={self.bos_id} is outside the vocabulary, --vocab_size={self.vocab_size}")
        if self.vocab_size > 65536:
            raise ValueError(f"--vocab_size={self.vocab_size}: shards hold uint16 tokens, so at most 65536")
        if self.run_id and Path(self.run_id).name != self.run_id:
            raise ValueError(f"--run_id={self.run_id}: is a file's name, without folders")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"--{name}={getattr(self, name)}: {' or '.join(choices)}")


CHOICES = {"dtype": ("bfloat16", "float32"), "comms": ("sharded", "replicated"), "grad_dtype": ("param", "float32")}

# What a machine without a GPU trains in two minutes: the same topology and schedule, small widths, bytes.
DEMO = dict(
    data="data/local", vocab_size=257, bos_id=256, encoding="bytes", max_doc_len=384,
    model_dim=128, num_heads=4, head_dim=32, dtype="float32", compile=False,
    attention_scale=0.28,  # queries and keys have length √head_dim: narrow heads make small logits
    num_scheduled_iterations=232, num_extension_iterations=8, batch_unit=72, micro_batches=2, block_size=32,
    momentum_warmup=1000, muon_lr_mul=1.3, adam_lr_mul=1.5,  # so short a run wants low momentum and higher rates
    val_every=100, val_tokens=262_144, val_batch_tokens=32_768, sample_tokens=300,
)  # fmt: skip
PRESETS = {"record": {}, "demo": DEMO}

# -----------------------------------------------------------------------------
# Head: y = x @ w with w (in, out), the layout its gradient is born in, in FP8 with static scales

FP8_X_SCALE = 100 / 448
FP8_W_SCALE = 1.6 / 448
FP8_GRAD_SCALE = 0.75 / 448


@library.custom_op("bankrun::fp8_linear", mutates_args=())
def fp8_linear_op(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, in), w (in, out) → y (T, out) in x's dtype, and both operands in e4m3 for the backward."""
    x8 = quantize_fp8(x, FP8_X_SCALE, torch.float8_e4m3fn)
    w8 = quantize_fp8(w, FP8_W_SCALE, torch.float8_e4m3fn)
    return fp8_matmul(x8, w8, FP8_X_SCALE * FP8_W_SCALE, x.dtype, True), x8, w8


@fp8_linear_op.register_fake
def _(x, w):
    return (
        x.new_empty(x.size(0), w.size(1)),
        torch.empty_like(x, dtype=torch.float8_e4m3fn),
        torch.empty_like(w, dtype=torch.float8_e4m3fn),
    )


@library.custom_op("bankrun::fp8_linear_backward", mutates_args=())
def fp8_linear_backward_op(grad: Tensor, x8: Tensor, w8: Tensor) -> tuple[Tensor, Tensor]:
    """grad (T, out) → grad_x (T, in) and grad_w (in, out), both in grad's dtype."""
    grad8 = quantize_fp8(grad, FP8_GRAD_SCALE, torch.float8_e5m2)
    grad_x = fp8_matmul(grad8, w8.mT, FP8_GRAD_SCALE * FP8_W_SCALE, grad.dtype, False)
    grad_w = fp8_matmul(x8.mT, grad8, FP8_X_SCALE * FP8_GRAD_SCALE, grad.dtype, False)
    return grad_x, grad_w


@fp8_linear_backward_op.register_fake
def _(grad, x8, w8):
    return torch.empty_like(x8, dtype=grad.dtype), torch.empty_like(w8, dtype=grad.dtype)


def _fp8_setup_context(ctx, inputs, output):
    _, x8, w8 = output
    ctx.save_for_backward(x8, w8)
    ctx.set_materialize_grads(False)


def _fp8_backward(ctx, grad, *_):
    return torch.ops.bankrun.fp8_linear_backward(grad, *ctx.saved_tensors)


fp8_linear_op.register_autograd(_fp8_backward, setup_context=_fp8_setup_context)


def fp8_linear(x: Tensor, w: Tensor) -> Tensor:
    """x @ w with FP8 operands and fp32 accumulation; x (T, in), w (in, out), both of one dtype; y (T, out) likewise.

    The gradient that comes in is quantised to e5m2 by a static scale, so it must have the size of a summed token loss,
    not divided by anything.
    """
    return torch.ops.bankrun.fp8_linear(x, w)[0]


@library.custom_op("bankrun::fp8_head_loss", mutates_args=())
def fp8_head_loss_op(
    x: Tensor, w: Tensor, targets: Tensor, mtp_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Product and loss at once. x (T, in), w (in, out) → the loss; its gradient in the logits in e5m2, (T, out) and (out, T);
    x transposed and w in e4m3: all that the two backward products want, each contiguous along what they sum over."""
    x8, x8_t = quantize_fp8_both(x, FP8_X_SCALE, torch.float8_e4m3fn)
    w8, w8_t = quantize_fp8_both(w, FP8_W_SCALE, torch.float8_e4m3fn)
    logits = fp8_matmul(x8, w8_t.mT, FP8_X_SCALE * FP8_W_SCALE, x.dtype, True)
    loss, grad8, grad8_t = loss_and_fp8_gradient(logits, targets, mtp_weights, FP8_GRAD_SCALE, torch.float8_e5m2)
    return loss, grad8, grad8_t, x8_t, w8


@fp8_head_loss_op.register_fake
def _(x, w, targets, mtp_weights):
    T, inner, out = *x.shape, w.size(1)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    return (
        x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32)),
        x.new_empty(T, out, dtype=e5m2), x.new_empty(out, T, dtype=e5m2),
        x.new_empty(inner, T, dtype=e4m3), x.new_empty(inner, out, dtype=e4m3),
    )  # fmt: skip


@library.custom_op("bankrun::fp8_head_loss_backward", mutates_args=())
def fp8_head_loss_backward_op(
    grad: Tensor, grad8: Tensor, grad8_t: Tensor, x8_t: Tensor, w8: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """grad_x (T, in) and grad_w (in, out) in dtype. The loss's own gradient, a number, multiplies the products' scales."""
    grad_x = fp8_matmul(grad8, w8.mT, grad * (FP8_GRAD_SCALE * FP8_W_SCALE), dtype, False)
    grad_w = fp8_matmul(x8_t, grad8_t.mT, grad * (FP8_X_SCALE * FP8_GRAD_SCALE), dtype, False)
    return grad_x, grad_w


@fp8_head_loss_backward_op.register_fake
def _(grad, grad8, grad8_t, x8_t, w8, dtype):
    return grad.new_empty(x8_t.shape[::-1], dtype=dtype), grad.new_empty(w8.shape, dtype=dtype)


def _fp8_head_loss_setup_context(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)


def _fp8_head_loss_backward(ctx, grad, *_):
    return *torch.ops.bankrun.fp8_head_loss_backward(grad, *ctx.saved_tensors, ctx.dtype), None, None


fp8_head_loss_op.register_autograd(_fp8_head_loss_backward, setup_context=_fp8_head_loss_setup_context)


def head_loss(x: Tensor, w: Tensor, targets: Tensor, mtp_weights: Tensor, fp8: bool) -> Tensor:
    """The training loss of logits x @ w, summed over tokens; x (T, in), w (in, out), targets (T,) int64, mtp_weights (K,).

    On a GPU with FP8 the loss's kernel writes the gradient as the backward products want it; elsewhere the two stand apart,
    which is the same arithmetic.
    """
    if fp8 and fuses_head(x):
        return torch.ops.bankrun.fp8_head_loss(x, w, targets, mtp_weights)[0]
    return softcapped_cross_entropy(fp8_linear(x, w) if fp8 else x @ w, targets, mtp_weights)


def fuses_head(x: Tensor) -> bool:
    """Whether the FP8 head and its loss are one node: on GPUs. On a CPU that would only add passes."""
    return x.is_cuda


def has_fp8(device: torch.device) -> bool:
    """FP8 matrix units (CUDA from compute capability 8.9), or the CPU's emulation of the same arithmetic."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


# -----------------------------------------------------------------------------
# Optimizer: the updates


def compiled_on_cuda(function: Callable) -> Callable:
    """Fuse by torch.compile where the first argument is on a GPU; on CPU compiling costs more than it saves."""

    @functools.cache
    def compiled() -> Callable:
        return torch.compile(function, dynamic=False, fullgraph=True)

    @functools.wraps(function)
    def dispatch(first: Tensor, *args):
        return (compiled() if first.is_cuda else function)(first, *args)

    return dispatch


# Optimal quintics of Polar Express, five steps: Amsel et al., arXiv 2505.16932.
POLAR_EXPRESS_COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(G: Tensor) -> Tensor:
    """The orthogonal factor of each matrix of G, nearly: singular values end within about 0.85 .. 1.15 of 1.

    G (n, rows, cols), any float dtype; result the same shape in bf16, or fp64 where G is fp64. Tall matrices multiply on
    the right, so that the Gram matrix is the smaller one and nothing is transposed.
    """
    dtype = G.dtype if G.dtype == torch.float64 else torch.bfloat16
    held = torch.float32 if G.device.type == "cpu" and dtype == torch.bfloat16 else dtype

    def rounded(x: Tensor) -> Tensor:
        """x at the precision of dtype, in place; on CPU, whose units multiply nothing narrower, bf16 is held in fp32."""
        return x if x.dtype == dtype else x.copy_(x.to(dtype))

    X = G.to(dtype)
    X = (X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)).to(held)
    tall = X.size(-2) > X.size(-1)
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS:
        A = rounded(XTX(X) if tall else XXT(X))
        B = rounded(ba_plus_cAA(A, beta=b, alpha=c))
        X = rounded(aX_plus_BX(X, B, a, right=tall))
    return X.to(dtype)


def normuon_scale(u: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """NorMuon's variance reduction (arXiv 2510.05491): rows at equal root mean square over time, Frobenius norm kept.

    u (n, rows, cols) fp32 or fp64; second_moment (n, rows, 1), or (n, 1, cols) for wide matrices, updated in place.
    """
    along = -1 if second_moment.size(-1) == 1 else -2
    mean_square = torch.linalg.vector_norm(u, dim=along, keepdim=True).square() / u.size(along)
    second_moment.lerp_(mean_square, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    norm = mean_square.sum((-2, -1), keepdim=True).sqrt()
    scaled_norm = (mean_square * scale.square()).sum((-2, -1), keepdim=True).sqrt()
    return u * (scale * (norm / scaled_norm.clamp_min(1e-10)))


def join_mantissa(p: Tensor, mantissa: Tensor) -> Tensor:
    """The fp32 numbers whose upper halves are p (bf16) and whose lower halves are mantissa (uint16)."""
    return ((p.view(torch.int16).to(torch.int32) << 16) | mantissa.to(torch.int32)).view(torch.float32)


def split_mantissa(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 x as (bf16 upper half, truncated, and uint16 lower half): join_mantissa gives back every bit."""
    bits = x.contiguous().view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), (bits & 0xFFFF).to(torch.uint16)


@compiled_on_cuda
def adam_update(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    beta1: float, beta2: float, eps: float, step_size: Tensor, decay: Tensor, grad_scale: Tensor,
) -> None:  # fmt: skip
    """One Adam step with cautious decay on p (any shape and dtype), moments fp32 (fp64 for fp64), all in place.

    step_size, decay, grad_scale: 0-dim CPU tensors, so that a new value does not recompile.
    """
    grad = grad.to(exp_avg.dtype) * grad_scale
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    wide = p.to(exp_avg.dtype)
    update = exp_avg / (exp_avg_sq.sqrt() + eps) * step_size
    update = torch.where(update * wide > 0, update + decay * wide, update)
    p.copy_(wide - update)


CPU_CACHE_ELEMENTS = 65_536  # matrices updated at once on CPU: what its cache holds, a few times over


@compiled_on_cuda
def normuon_update(
    p: Tensor, mantissa: Tensor | None, grad: Tensor, momentum_buffer: Tensor, second_moment: Tensor, lr_mul: Tensor,
    lr: Tensor, weight_decay: Tensor, momentum: Tensor, beta2: float, grad_scale: Tensor,
) -> None:  # fmt: skip
    """One NorMuon step on p (n, rows, cols), all in place; a bf16 p has its lower halves in mantissa.

    lr_mul (n, 1, 1); lr, weight_decay, momentum, grad_scale 0-dim CPU tensors, so that a new value does not recompile.
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
# Optimizer: the table and the step


@dataclass(frozen=True)
class ParamConfig:
    """How one parameter is updated. lr_mul may be a tuple: it repeats over the bank's matrices."""

    optim: str  # "adam" or "normuon"
    comms: str  # "sharded": reduce-scatter, update own shard, all-gather; "replicated": all-reduce, everyone updates
    lr: float
    weight_decay: float
    lr_mul: float | tuple[float, ...] = 1.0
    wd_mul: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)  # adam
    eps: float = 1e-10  # adam
    beta2: float = 0.95  # normuon
    stacked: int = 1  # normuon: matrices stacked in the rows of each (rows, cols) slice of the bank
    pad_front: bool = False  # normuon: where padding goes, if the matrices do not divide over the ranks
    grad_dtype: torch.dtype | None = None  # in which micro-batches are summed and ranks reduced; None: the parameter's


adam = functools.partial(ParamConfig, "adam", lr=0.008, weight_decay=0.005)
normuon = functools.partial(ParamConfig, "normuon", "sharded", lr=0.023, weight_decay=1.2)

# In the order in which the reductions are launched.
PARAM_TABLE: dict[str, ParamConfig] = {
    "attn":           normuon(stacked=4, pad_front=True),  # the ranks that mlp's padding leaves idle have full shards here
    "mlp":            normuon(lr_mul=(1.0, 2.0)),  # W_fc, W_proj
    "scalars":        adam("replicated", betas=(0.90, 0.99), lr_mul=5.00, wd_mul=0.0),
    "ve0":            adam("sharded",    betas=(0.75, 0.95), lr_mul=75.0, wd_mul=5.0),
    "ve1":            adam("sharded",    betas=(0.75, 0.95), lr_mul=75.0, wd_mul=5.0),
    "ve2":            adam("sharded",    betas=(0.75, 0.95), lr_mul=75.0, wd_mul=5.0),
    "smear_gate":     adam("replicated", betas=(0.90, 0.99), lr_mul=0.01, wd_mul=0.0),
    "skip_gate":      adam("replicated", betas=(0.90, 0.99), lr_mul=0.05, wd_mul=0.0),
    "attn_gate_bank": adam("replicated", betas=(0.90, 0.99), lr_mul=1.00, wd_mul=1.0),
    "ve_gate_bank":   adam("replicated", betas=(0.90, 0.99), lr_mul=1.00, wd_mul=1.0),
    "x0_lambdas":     adam("replicated", betas=(0.65, 0.95), lr_mul=5.00, wd_mul=0.0),
    "lm_head":        adam("sharded",    betas=(0.50, 0.95), lr_mul=1.00, wd_mul=150.0),
    "embed":          adam("sharded",    betas=(0.50, 0.95), lr_mul=1.00, wd_mul=150.0),
}  # fmt: skip
SCATTER_ORDER = tuple(PARAM_TABLE)

# Small first, so that the big reductions travel meanwhile; lm_head before the embed that copies it; the banks, whose
# updates are the longest, last.
WORK_ORDER = (
    "scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "x0_lambdas",
    "ve0", "ve1", "ve2", "lm_head", "embed", "attn", "mlp",
)  # fmt: skip


def check_order(name: str, order: Iterable[str], labels: Iterable[str]) -> None:
    """Raise ValueError unless order names every label exactly once."""
    order, labels = list(order), set(labels)
    faults = {
        "missing": sorted(labels - set(order)),
        "twice": sorted({label for label in order if order.count(label) > 1}),
        "unknown": sorted(set(order) - labels),
    }
    if any(faults.values()):
        found = "; ".join(f"{kind}: {', '.join(which)}" for kind, which in faults.items() if which)
        raise ValueError(f"{name} must name every parameter exactly once. {found}")


# PyTorch 2.13 renamed these two; 2.11 has the old names only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NorMuonAndAdam:
    """NorMuon for banks of matrices, Adam for everything else, sharded over the ranks; no groups, no hooks.

    NorMuon belongs to hidden matrices, stacked in a bank (n, …, rows, cols): none is ever split. Embeddings, the head,
    gates and scalars belong to Adam.

    A step has three phases:
      1. launch every gradient reduction, asynchronously, in scatter_order;
      2. in work_order: wait for the reduction, update this rank's shard (or the whole, if replicated), launch the gather;
      3. wait for the gathers, lm_head's first, whose transpose becomes embed while they are tied.
    A shard is a view of the parameter and of its gradient: both collectives work in place. A bank whose matrices do not
    divide over the ranks becomes a view of a padded one; padding is zero, has no state and is never updated.

    Gradients wait where autograd leaves them. Those of padded banks, and those with a wider grad_dtype, wait in a buffer:
    `accumulate` moves them there, after each backward pass, so that micro-batches are summed in the buffer's dtype.

    While `tied`, embed has no reduction and no state: its gradient joins lm_head's. `split_embed` ends that.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        param_table: dict[str, ParamConfig],
        scatter_order: Iterable[str],
        work_order: Iterable[str],
    ):
        """named_parameters: (label, parameter) pairs, on their device. Uses the default process group, if there is one.

        Raises ValueError if table or orders do not name the parameters exactly once, or if a parameter cannot be sharded.
        """
        self.params = dict(named_parameters)
        self.table = param_table
        self.scatter_order, self.work_order = tuple(scatter_order), tuple(work_order)
        check_order("param_table", param_table, self.params)
        check_order("scatter_order", self.scatter_order, self.params)
        check_order("work_order", self.work_order, self.params)
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.tied = True
        self.lr_mul, self.momentum = 1.0, 0.95  # the schedule's; set before each step
        self.grad_divisor = 1  # gradients are sums over this many micro-batches
        self.slots = {label: self._place(label) for label in self.params}
        self.owned = {label: self._owned(label) for label in self.params}
        self.shards = {label: self._own(label, slots) for label, slots in self.slots.items()}
        self.buffers = self._make_buffers()
        self.filled: set[str] = set()  # the buffers that hold a gradient
        self.state = {label: self._initial_state(label) for label in self.params}
        self.matrix_lr_mul = {
            label: self._matrix_lr_mul(label) for label in self.params if self.table[label].optim == "normuon"
        }

    # Layout: a parameter is rows (of an embedding, or matrices of a bank); its slots are its rows and its padding

    def _rows(self, label: str, x: Tensor) -> Tensor:
        """x, shaped like the parameter, as a stack of what is shared out: rows, or (matrices, rows, cols)."""
        if self.table[label].optim == "adam":
            return x
        return x.view(-1, x.size(-2) // self.table[label].stacked, x.size(-1))

    def _place(self, label: str) -> Tensor:
        """The parameter's slots, as many as divide over the ranks; a bank that needs padding moves, and views them.

        Raises ValueError for rows that do not divide: an embedding or a head has no padding.
        """
        param, config = self.params[label], self.table[label]
        rows = self._rows(label, param.data)
        padding = -len(rows) % self.world_size if config.comms == "sharded" else 0
        if not padding:
            return rows
        if config.optim == "adam":
            raise ValueError(
                f"{label} {tuple(param.shape)} cannot be sharded: its {len(rows)} rows do not divide over {self.world_size} "
                f"ranks: start a number of ranks that divides them, or use --comms=replicated"
            )
        slots = rows.new_zeros(len(rows) + padding, *rows.shape[1:])
        real = self._real(label, slots)
        real.copy_(rows)
        param.data = real.view_as(param)
        return slots

    def _real(self, label: str, slots: Tensor) -> Tensor:
        """The slots that are not padding."""
        n = len(self._rows(label, self.params[label].data))
        return slots[-n:] if self.table[label].pad_front else slots[:n]

    def _share(self, label: str, slots: Tensor) -> Tensor:
        """This rank's slots, a view: all of them if replicated."""
        if self.table[label].comms == "replicated":
            return slots
        share = len(slots) // self.world_size
        return slots.narrow(0, self.rank * share, share)

    def _owned(self, label: str) -> slice:
        """Which rows this rank updates: those of its share that are not padding."""
        slots, config = self.slots[label], self.table[label]
        n, share = len(self._real(label, slots)), len(self._share(label, slots))
        first = self.rank * share if config.comms == "sharded" else 0
        front = len(slots) - n if config.pad_front else 0
        return slice(*(min(max(i - front, 0), n) for i in (first, first + share)))

    def _own(self, label: str, slots: Tensor) -> Tensor:
        return self._real(label, slots)[self.owned[label]]

    def _make_buffers(self) -> dict[str, Tensor]:
        """Zero slots for the gradients that cannot wait where autograd leaves them."""
        buffers = {}
        for label, param in self.params.items():
            dtype = torch.promote_types(param.dtype, self.table[label].grad_dtype or param.dtype)
            if dtype != param.dtype or len(self.slots[label]) > len(self._rows(label, param.data)):
                buffers[label] = torch.zeros_like(self.slots[label], dtype=dtype)
        return buffers

    def _initial_state(self, label: str) -> dict[str, Tensor | int]:
        shard = self.shards[label]
        moment = functools.partial(torch.zeros, device=shard.device, dtype=torch.promote_types(shard.dtype, torch.float32))
        if self.table[label].optim == "adam":
            return {"step": 0, "exp_avg": moment(shard.shape), "exp_avg_sq": moment(shard.shape)}
        n, rows, cols = shard.shape
        state = {
            "momentum_buffer": moment(shard.shape),
            "second_moment": moment((n, rows, 1) if rows >= cols else (n, 1, cols)),
        }
        if shard.dtype == torch.bfloat16:
            state["mantissa"] = torch.zeros(shard.shape, device=shard.device, dtype=torch.uint16)
        return state

    def _matrix_lr_mul(self, label: str) -> Tensor:
        """(n, 1, 1): each matrix of the shard its lr_mul · √max(1, rows/cols)."""
        config, (n, rows, cols) = self.table[label], self.shards[label].shape
        cycle = config.lr_mul if isinstance(config.lr_mul, tuple) else (config.lr_mul,)
        first = self.owned[label].start
        muls = [cycle[(first + i) % len(cycle)] * math.sqrt(max(1, rows / cols)) for i in range(n)]
        dtype = self.state[label]["momentum_buffer"].dtype
        return torch.tensor(muls, dtype=dtype, device=self.shards[label].device).view(n, 1, 1)

    # Gradients that wait

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add what autograd has left to the buffers of those parameters that have one. Call it after each backward pass."""
        for label, buffer in self.buffers.items():
            if (grad := self.params[label].grad) is not None:
                real = self._real(label, buffer)
                (real.add_ if label in self.filled else real.copy_)(self._rows(label, grad))
                self.filled.add(label)
                self.params[label].grad = None

    def _gradient(self, label: str) -> Tensor:
        """Slots of the gradient that waits."""
        return self.buffers[label] if label in self.filled else self._rows(label, self.params[label].grad)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that wait, by label, shaped like their parameters: by reference."""
        self.accumulate()
        waiting = {label for label, param in self.params.items() if param.grad is not None} | self.filled
        return {label: self._real(label, self._gradient(label)).view_as(self.params[label]) for label in waiting}

    def load_gradients(self, saved: dict[str, Tensor]) -> None:
        """Let copies of these wait, and no others."""
        self.filled.clear()
        for label, param in self.params.items():
            param.grad = None
            if label in saved and label in self.buffers:
                self._real(label, self.buffers[label]).copy_(self._rows(label, saved[label]))
                self.filled.add(label)
            elif label in saved:
                param.grad = saved[label].to(param.device, copy=True)

    # The step

    @torch.no_grad()
    def step(self, do_adam: bool) -> None:
        """Update every NorMuon parameter, and on do_adam every Adam parameter; clear the gradients that were used.

        Gradients not used stay, so that the next backward pass adds to them. Raises RuntimeError for a missing one.
        """
        self.accumulate()
        used = {label for label in self.params if do_adam or self.table[label].optim == "normuon"}
        for label in used:
            if self.params[label].grad is None and label not in self.filled:
                raise RuntimeError(f"{label} has no gradient: every parameter takes part in every step")
        active = used - {"embed"} if self.tied else used
        if self.tied and "lm_head" in used:
            transpose_add(self._gradient("embed"), self._gradient("lm_head"))

        reductions = {label: self._launch_reduction(label) for label in self.scatter_order if label in active}
        gathers = {}
        for label in self.work_order:
            if label in active:
                grad, work = reductions[label]
                if work is not None:
                    work.wait()
                self._update(label, grad)
                gathers[label] = self._launch_gather(label)
        for label in sorted(gathers, key=lambda label: label != "lm_head"):
            if gathers[label] is not None:
                gathers[label].wait()
            if label == "lm_head" and self.tied:
                transpose_copy(self.params["lm_head"].data, self.params["embed"].data)
        for label in used:
            self.params[label].grad = None
        self.filled -= used

    def _launch_reduction(self, label: str) -> tuple[Tensor, dist.Work | None]:
        """The summed gradient of the rows this rank owns, in place, and what to wait for before reading it."""
        grad = self._gradient(label)
        own = self._own(label, grad)
        if self.world_size == 1:
            return own, None
        if self.table[label].comms == "replicated":
            return own, dist.all_reduce(grad, async_op=True)
        return own, _reduce_scatter(self._share(label, grad).view(-1), grad.view(-1), async_op=True)

    def _launch_gather(self, label: str) -> dist.Work | None:
        if self.world_size == 1 or self.table[label].comms == "replicated":
            return None
        slots = self.slots[label]
        return _all_gather(slots.view(-1), self._share(label, slots).view(-1), async_op=True)

    def _update(self, label: str, grad: Tensor) -> None:
        config, state, shard = self.table[label], self.state[label], self.shards[label]
        scalar = functools.partial(torch.tensor, dtype=torch.float64)  # 0-dim, so it never widens a tensor
        lr = config.lr * self.lr_mul
        grad_scale = scalar(1 / self.grad_divisor)
        if config.optim == "adam":
            state["step"] += 1
            beta1, beta2 = config.betas
            lr *= config.lr_mul
            step_size = lr * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
            decay = lr * lr * config.weight_decay * config.wd_mul
            adam_update(
                shard, grad, state["exp_avg"], state["exp_avg_sq"],
                beta1, beta2, config.eps, scalar(step_size), scalar(decay), grad_scale,
            )  # fmt: skip
        else:
            banks = (
                shard, state.get("mantissa"), grad, state["momentum_buffer"], state["second_moment"], self.matrix_lr_mul[label]
            )  # fmt: skip
            at_once = max(1, len(shard) if shard.is_cuda else CPU_CACHE_ELEMENTS // shard.stride(0))
            for i in range(0, len(shard), at_once):  # not once, where all that a rank has is padding
                normuon_update(
                    *(bank if bank is None else bank[i : i + at_once] for bank in banks),
                    scalar(lr), scalar(config.weight_decay * config.wd_mul), scalar(self.momentum), config.beta2, grad_scale,
                )  # fmt: skip

    # Tied and split

    @torch.no_grad()
    def split_embed(self) -> None:
        """End the tie: embed starts its own life with lm_head's Adam state, transposed and sharded anew."""
        source, target = self.state["lm_head"], self.state["embed"]
        for name in ("exp_avg", "exp_avg_sq"):
            whole = source[name].new_empty(self.params["lm_head"].shape)
            if source[name].shape == whole.shape:
                whole = source[name]
            else:
                _all_gather(whole.view(-1), source[name].view(-1))
            target[name].copy_(self._share("embed", whole.mT))
        target["step"] = source["step"]
        self.tied = False

    # State, keyed by label

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, by reference: clone it to keep it."""
        return {"tied": self.tied, "state": self.state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Copy a saved state into this one's tensors, in place."""
        self.tied = saved["tied"]
        for label, values in saved["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    self.state[label][name].copy_(value)
                else:
                    self.state[label][name] = value


# -----------------------------------------------------------------------------
# Model: norm, rotary positions, attention

RMS_EPS = torch.finfo(torch.float32).eps


class _RMSNorm(torch.autograd.Function):
    """With r = 1/rms and y = r·x: dx = r·(dy − y·mean(dy·y))."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = length.square_().mul_(1 / x.size(-1)).add_(RMS_EPS).rsqrt_()
        y = (wide * rstd).to(x.dtype)
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        y, rstd = ctx.saved_tensors
        grad, wide = grad.to(rstd.dtype), y.to(rstd.dtype)
        mean = (grad * wide).sum(-1, keepdim=True).mul_(-1 / y.size(-1))
        return torch.addcmul(grad, wide, mean).mul_(rstd).to(y.dtype)


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, no weights."""
    return _RMSNorm.apply(x)


class _Rotate(torch.autograd.Function):
    """Pairs of neighbouring dims as complex numbers, turned by the table; the gradient turns back."""

    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return turn(x, table, back=False)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return turn(grad, *ctx.saved_tensors, back=True), None


def turn(x: Tensor, table: Tensor, back: bool) -> Tensor:
    """y[2j] = c·x[2j] + s·x[2j+1], y[2j+1] = c·x[2j+1] − s·x[2j]; back: with −s.

    x (…, D); table (…, D/2, 2), broadcast, holds c and −s: on CPU the product is one complex one.
    """
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        factor = torch.view_as_complex(table)
        return torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2))) * (factor.conj() if back else factor)
        ).flatten(-2)
    (even, odd), (c, s) = x.unflatten(-1, (-1, 2)).unbind(-1), table.unbind(-1)
    s = s if back else -s
    return torch.stack((c * even + s * odd, c * odd - s * even), -1).flatten(-2)


class Yarn(nn.Module):
    """Rotary positions over the first half of a head, and how they and the attention scale stretch with the window.

    The table serves plain and paired heads alike: positions 0 .. 2·max_seq_len, plain heads use the first half of it.
    YaRN: Peng et al., arXiv 2309.00071.
    """

    def __init__(self, head_dim: int, max_seq_len: int, dtype: torch.dtype, scale: float = 0.1):
        super().__init__()
        frequencies = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4, dtype=torch.float32)
        self.frequencies = torch.cat((frequencies, torch.zeros(head_dim // 4)))  # (D/2,) radians a position, fp32
        self.scale = scale  # of the attention logits
        self.register_buffer("table", torch.empty(2 * max_seq_len, head_dim // 2, 2, dtype=dtype), persistent=False)
        self.fill_table()

    def fill_table(self) -> None:
        """table[t, j] = (cos, −sin) of position t times frequency j, built in fp32, held in the table's dtype."""
        frequencies = self.frequencies.to(self.table.device)
        angle = torch.arange(len(self.table), dtype=torch.float32, device=self.table.device)[:, None] * frequencies
        self.table[..., 0] = angle.cos()
        self.table[..., 1] = -angle.sin()

    def extend(self, old_window: int, new_window: int) -> None:
        """The long window goes from old to new, in tokens: slow frequencies stretch with it, fast ones stay."""
        ratio = old_window / new_window
        rotations = old_window * self.frequencies / (2 * math.pi)
        stay = ((rotations - 1) / (32 - 1)).clamp(0, 1)
        self.frequencies = self.frequencies * (ratio + stay * (1 - ratio))
        self.scale *= 0.2 * math.log(new_window / old_window) + 1
        self.fill_table()

    def rotate(self, x: Tensor, paired: bool) -> Tensor:
        """x (T, heads, D) at positions t; paired: even heads at 2t, odd heads at 2t + 1."""
        T, heads, D = x.shape
        p = 2 if paired else 1
        table = self.table[: p * T].view(T, 1, p, D // 2, 2)
        return _Rotate.apply(x.reshape(T, heads // p, p, D), table).view(T, heads, D)

    def _apply(self, function: Callable, recurse: bool = True) -> "Yarn":
        """A table cast to another dtype, or moved, is built anew: widening a rounded one would keep its error."""
        super()._apply(function, recurse)
        self.fill_table()
        return self

    def state(self) -> dict[str, Any]:
        return {"frequencies": self.frequencies.clone(), "scale": self.scale}

    def load_state(self, saved: dict[str, Any]) -> None:
        self.frequencies, self.scale = saved["frequencies"].clone(), saved["scale"]
        self.fill_table()


class Attention:
    """One layer's attention, without its weights: they are slices of the bank.

    paired: a token becomes two positions, one for each half of the heads. key_offset: half of the key dims look one
    position back (plain layers with the long window).
    """

    def __init__(self, num_heads: int, head_dim: int, paired: bool, key_offset: bool):
        self.num_heads, self.head_dim, self.paired, self.key_offset = num_heads, head_dim, paired, key_offset

    def __call__(
        self, x: Tensor, W_qkv: Tensor, W_o: Tensor, head_gate: Tensor, value: Tensor | None, yarn: Yarn, band: Band
    ) -> Tensor:
        """x (T, dim), normed; W_qkv (3·dim, dim); W_o (dim, dim); head_gate (H, 12); value (T, H, D), gated, or None."""
        T, H, D = x.size(0), self.num_heads, self.head_dim
        qk, v = F.linear(x, W_qkv).view(T, 3 * H, D).split((2 * H, H), 1)
        q, k = yarn.rotate(norm(qk), self.paired).split(H, 1)
        if value is not None:
            v = v + value
        if self.key_offset:
            k = self._offset(k)
        p = 2 if self.paired else 1
        q, k, v = (z.reshape(T * p, H // p, D) for z in (q, k, v))
        y = attend(q, k, v, band, yarn.scale).reshape(T, H, D)
        y = y * torch.sigmoid(F.linear(x[:, :12], head_gate)).unsqueeze(-1)
        return F.linear(y.reshape(T, H * D), W_o)

    def _offset(self, k: Tensor) -> Tensor:
        """k[t] ← k[t−1] for t ≥ 1 in the second quarter and the last quarter of the head's dims."""
        previous = torch.cat((k[:1], k[:-1]))
        quarters = zip(k.chunk(4, -1), previous.chunk(4, -1))
        return torch.cat([before if i % 2 else here for i, (here, before) in enumerate(quarters)], -1)


# -----------------------------------------------------------------------------
# Model: the topology

NUM_LAYERS = 11
PAIRED_LAYERS = (0, 2, 5, 9)
LONG_WINDOW_LAYERS = (3, 10)
MLP_ONLY_LAYER = 6
SKIP_FROM, SKIP_TO = 3, 6
BACKOUT_FROM = 7
VALUE_EMBEDDINGS = {0: "ve1", 1: "ve2", 8: "ve0", 9: "ve1", 10: "ve2"}  # by layer
ATTENTION_LAYERS = tuple(i for i in range(NUM_LAYERS) if i != MLP_ONLY_LAYER)
MLP_BANK_LAYERS = 12  # one is padding, so that 24 matrices divide over 8 ranks
GATE_DIM = 12


class ForwardSchedule(NamedTuple):
    """What a forward pass takes from the schedule."""

    mtp_weights: Tensor  # (3,), (2,) or (1,) fp32, on the model's device: weight of the k-th next token
    short_window: int  # tokens
    long_window: int  # tokens
    max_doc_len: int = 0  # tokens of the longest document of a training micro-batch; 0: not known


class GPT(nn.Module):
    """The 11-layer model. All attention matrices are one parameter, all MLP matrices another; parameters know their label.

    It computes in the dtype of its parameters: bf16 as built, or what .float() and .double() make of it.
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        max_seq_len: int,
        *,
        attention_scale: float = 0.1,
        fp8_head: bool = False,
    ):
        """max_seq_len: the longest flat micro-batch in tokens, validation included. attention_scale: of the attention logits,
        before the windows grow; made for 128 dims, narrower heads want more. fp8_head: FP8 in the training head.

        Raises ValueError for sizes that the topology cannot have.
        """
        super().__init__()
        for fault, message in (
            (num_layers != NUM_LAYERS, f"num_layers={num_layers}: the topology is fixed for {NUM_LAYERS}"),
            (num_heads % 2, f"num_heads={num_heads}: must be even, because paired layers split the heads in two"),
            (head_dim % 4, f"head_dim={head_dim}: must be a multiple of 4 (half of it rotates, in pairs)"),
            (num_heads * head_dim != model_dim, f"model_dim={model_dim} is not num_heads·head_dim = {num_heads}·{head_dim}"),
            (model_dim % 16, f"model_dim={model_dim}: must be a multiple of 16 (FP8 products)"),
        ):
            if fault:
                raise ValueError(message)
        self.num_heads, self.head_dim, self.model_dim, self.max_seq_len = num_heads, head_dim, model_dim, max_seq_len
        self.fp8_head = fp8_head
        vocab = -(-vocab_size // 128) * 128
        dim, hidden = model_dim, 4 * model_dim

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype))

        self.attn = parameter(len(ATTENTION_LAYERS), 4 * dim, dim)  # a layer: q, k, v rows, then o
        self.mlp = parameter(MLP_BANK_LAYERS, 2, hidden, dim)  # a layer: W_fc, W_proj
        self.scalars = parameter(3 * NUM_LAYERS + 3, dtype=torch.float32)
        self.ve0 = parameter(vocab, dim)
        self.ve1 = parameter(vocab, dim)
        self.ve2 = parameter(vocab, dim)
        self.smear_gate = parameter(1, GATE_DIM)
        self.skip_gate = parameter(1, GATE_DIM)
        self.attn_gate_bank = parameter(len(ATTENTION_LAYERS), num_heads, GATE_DIM)
        self.ve_gate_bank = parameter(len(VALUE_EMBEDDINGS), num_heads, GATE_DIM)
        self.x0_lambdas = parameter(NUM_LAYERS, dtype=torch.float32)
        self.lm_head = parameter(dim, vocab)
        self.embed = parameter(vocab, dim)
        for label, param in self.named_parameters():
            param.label = label
        self.initialize()

        self.yarn = Yarn(head_dim, max_seq_len, self.embed.dtype, attention_scale)
        self.attentions = [
            Attention(num_heads, head_dim, i in PAIRED_LAYERS, i in LONG_WINDOW_LAYERS and i not in PAIRED_LAYERS)
            for i in range(NUM_LAYERS)
        ]

    @torch.no_grad()
    def initialize(self) -> None:
        """Starting values. Output matrices, value embeddings and gates stay zero."""
        dim = self.model_dim
        bound = math.sqrt(3) * dim**-0.5
        self.attn[:, : 3 * dim].uniform_(-bound, bound)
        self.mlp[:, 0].uniform_(-bound / 2, bound / 2)
        self.lm_head.normal_(std=0.005)
        self.embed.copy_(self.lm_head.T)
        self.scalars.copy_(torch.tensor([1.1] * NUM_LAYERS + [0.5, 1.0] * NUM_LAYERS + [0.0, 0.5, -1.5]))

    def extend_windows(self, old_long: int, new_long: int) -> None:
        """YaRN for a long window that goes from old_long to new_long tokens."""
        self.yarn.extend(old_long, new_long)

    def forward(self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor, schedule: ForwardSchedule) -> Tensor:
        """Training: the multi-token loss, summed over tokens. Evaluation: the mean next-token cross-entropy. fp32 or better.

        inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32: document starts, padded at the end with T.
        """
        x = self.hidden_states(inputs, cu_seqlens, schedule)
        if self.training:
            return head_loss(x, self.lm_head, targets, schedule.mtp_weights, self.fp8_head)
        next_token_only = torch.ones(1, device=x.device, dtype=schedule.mtp_weights.dtype)
        return softcapped_cross_entropy(x @ self.lm_head, targets, next_token_only) / len(targets)

    def hidden_states(self, inputs: Tensor, cu_seqlens: Tensor, schedule: ForwardSchedule) -> Tensor:
        """(T, dim): what the head reads."""
        T, dim, H, D = len(inputs), self.model_dim, self.num_heads, self.head_dim
        resid, sa, rest = self.scalars.split((NUM_LAYERS, 2 * NUM_LAYERS, 3))
        resid_lambda, x0_lambda = resid.unbind(), self.x0_lambdas.unbind()
        sa_lambda = sa.unbind()
        smear_lambda, backout_lambda, skip_lambda = rest.unbind()
        attn_weights = self.attn.view(-1, dim).split((3 * dim, dim) * len(ATTENTION_LAYERS))
        mlp_weights = self.mlp.view(-1, 4 * dim, dim).unbind()
        head_gates, ve_gates = self.attn_gate_bank.unbind(), self.ve_gate_bank.unbind()
        bands = self.bands(cu_seqlens, T, schedule)

        x = F.embedding(inputs, self.embed)
        smear = smear_lambda * torch.sigmoid(F.linear(x[1:, :GATE_DIM], self.smear_gate))
        x = x0 = norm(torch.cat((x[:1], x[1:] + smear * x[:-1])))
        skip = backout = None
        for i in range(NUM_LAYERS):
            if i == SKIP_TO:
                x = x + torch.sigmoid(skip_lambda) * 2 * torch.sigmoid(F.linear(x0[:, :GATE_DIM], self.skip_gate)) * skip
            x = resid_lambda[i] * x + x0_lambda[i] * x0
            if i != MLP_ONLY_LAYER:
                a = ATTENTION_LAYERS.index(i)
                xn = norm(x)
                value = None
                if i in VALUE_EMBEDDINGS:
                    gate = 2 * torch.sigmoid(F.linear(xn[:, :GATE_DIM], ve_gates[list(VALUE_EMBEDDINGS).index(i)]))
                    value = gate.unsqueeze(-1) * F.embedding(inputs, getattr(self, VALUE_EMBEDDINGS[i])).view(T, H, D)
                W_qkv, W_o = sa_lambda[2 * i] * attn_weights[2 * a], sa_lambda[2 * i + 1] * attn_weights[2 * a + 1]
                x = x + self.attentions[i](xn, W_qkv, W_o, head_gates[a], value, self.yarn, bands[i])
            x = x + relu_squared_mlp(norm(x), mlp_weights[2 * i], mlp_weights[2 * i + 1])
            if i == SKIP_FROM:
                skip = x
            if i == BACKOUT_FROM:
                backout = x
        return norm(x - backout_lambda * backout)

    def bands(self, cu_seqlens: Tensor, T: int, schedule: ForwardSchedule) -> list[Band]:
        """What each layer's attention sees. Paired layers count documents, but not the window, in doubled positions."""
        max_len = min(schedule.max_doc_len or T, T) if self.training else T
        wide = torch.promote_types(self.embed.dtype, torch.float32)
        kinds = [(i in LONG_WINDOW_LAYERS, 2 if i in PAIRED_LAYERS else 1) for i in range(NUM_LAYERS)]
        bands = {}
        for long, p in dict.fromkeys(kinds):
            window = schedule.long_window if long else schedule.short_window
            starts = p * cu_seqlens
            bias = None if uses_flash(self.embed) else band_bias(starts, p * T, window, wide)
            bands[long, p] = Band(starts, window, p * max_len, bias)
        return [bands[kind] for kind in kinds]


# -----------------------------------------------------------------------------
# Data: shards, slices of whole documents, batches

SHARD_MAGIC, SHARD_VERSION, HEADER_INTS = 20240520, 1, 256


class DataError(ValueError):
    """Shards that are missing, broken, foreign or too few."""


def read_shard(path: str, vocab_size: int | None = None) -> np.ndarray:
    """(tokens,) uint16 of a shard: 256 little-endian int32 of header, then the tokens.

    Raises DataError, naming file and numbers, if it is not one, not whole, or holds tokens outside the vocabulary.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(4 * HEADER_INTS), dtype="<i4")
            if len(header) < HEADER_INTS or header[0] != SHARD_MAGIC or header[1] != SHARD_VERSION:
                raise DataError(
                    f"{path}: not a token shard (first numbers {header[:3].tolist()}, "
                    f"expected [{SHARD_MAGIC}, {SHARD_VERSION}, count])"
                )
            if size != 4 * HEADER_INTS + 2 * int(header[2]):
                raise DataError(
                    f"{path}: its header names {header[2]:,} tokens, but it holds {(size - 4 * HEADER_INTS) / 2:,.1f}: "
                    f"truncated or damaged, make or fetch it again"
                )
            tokens = np.fromfile(file, dtype="<u2")
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be read as a shard: {error}") from error
    if vocab_size is not None and len(tokens) and (largest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"{path}: holds token {largest}, but the vocabulary ends at {vocab_size}: other shards, or --vocab_size?"
        )
    return tokens


def find_shards(pattern: str) -> list[str]:
    files = sorted(glob.glob(pattern))
    if not files:
        raise DataError(
            f"no shard matches {pattern}: make some with data/local_text.py or fetch them with data/cached_fineweb10B.py"
        )
    return files


class Documents:
    """A shard seen as documents, each cut at max_doc_len, and the slices that fit into it."""

    def __init__(self, path: str, max_doc_len: int, bos_id: int, vocab_size: int | None):
        self.path = path
        self.tokens = read_shard(path, vocab_size)
        self.starts = np.flatnonzero(self.tokens == bos_id)
        if not len(self.starts):
            raise DataError(f"{path}: no document begins in it (no token {bos_id}): other shards, or --bos_id?")
        lengths = np.diff(self.starts, append=len(self.tokens))
        self.lengths = np.minimum(lengths, max_doc_len)
        self.ends = np.concatenate(([0], np.cumsum(self.lengths)))  # (documents + 1,) tokens before each document

    def plan(self, first: int, slices: int, length: int) -> list[tuple[int, int]] | None:
        """Documents [i, j) of each slice of `length` tokens, from document `first` on; None if the shard cannot fill all."""
        ranges = []
        for _ in range(slices):
            end = int(np.searchsorted(self.ends, self.ends[first] + length)) if first < len(self.starts) else len(self.ends)
            if end >= len(self.ends):
                return None
            ranges.append((first, end))
            first = end
        return ranges

    def slice(self, first: int, end: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of documents [first, end), the last cut to fit: (length,) uint16, and each document's start in it."""
        pieces = [self.tokens[s : s + n] for s, n in zip(self.starts[first:end], self.lengths[first:end])]
        return np.concatenate(pieces)[:length], self.ends[first:end] - self.ends[first]


def plan_batches(
    files: Iterable[str],
    batch_tokens: Callable[[int], int],
    max_doc_len: int,
    micro_batches: int,
    bos_id: int,
    vocab_size: int | None,
) -> Iterator[tuple[Documents, int, list[tuple[int, int]]]]:
    """For step 0, 1, …: the shard, the tokens of a micro-batch, and the documents of each. Ends where the shards do."""
    step = 0
    for path in files:
        documents, first = Documents(path, max_doc_len, bos_id, vocab_size), 0
        while True:
            tokens = batch_tokens(step) // micro_batches
            ranges = documents.plan(first, micro_batches, tokens + 1)
            if ranges is None:
                break
            yield documents, tokens, ranges
            first, step = ranges[-1][1], step + 1


def default_doc_slots(tokens: int) -> int:
    """Entries of cu_seqlens for a micro-batch of so many tokens: compiled graphs want one, and attention pays for each."""
    return {16384: 64, 32768: 96, 49152: 128}.get(tokens) or max(1, -(-(tokens // 300) // 128)) * 128


def make_micro_batch(tokens: np.ndarray, starts: np.ndarray, slots: int, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """(T + 1,) tokens and their documents' starts as inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32.

    Raises DataError if there are more documents than slots.
    """
    T = len(tokens) - 1
    starts = starts[starts < T]  # one at T gives the last target only
    if len(starts) >= slots:
        raise DataError(
            f"{where}: {len(starts)} documents in one micro-batch of {T} tokens do not fit {slots} slots: "
            f"set --doc_slots={len(starts) + 1} or more"
        )
    cu_seqlens = np.full(slots, T, dtype=np.int32)
    cu_seqlens[: len(starts)] = starts
    batch = (
        torch.from_numpy(tokens[:-1].astype(np.int32)),
        torch.from_numpy(tokens[1:].astype(np.int64)),
        torch.from_numpy(cu_seqlens),
    )
    return tuple(x.pin_memory() for x in batch) if torch.cuda.is_available() else batch


def prefetch(items: Iterable, depth: int = 4) -> Iterator:
    """The same items, made ahead in a thread; what it raises is raised here, in its place."""
    ready: queue.Queue = queue.Queue(depth)
    stopped = threading.Event()

    def put(kind: str, value: Any) -> bool:
        while not stopped.is_set():
            try:
                ready.put((kind, value), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put("item", item):
                    return
            put("end", None)
        except BaseException as error:  # handed to the consumer, whatever it is
            put("error", error)

    thread = threading.Thread(target=work, daemon=True, name="loader")
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        stopped.set()
        thread.join(10)  # one that is inside of PyTorch while the interpreter ends would abort the process


def distributed_data_generator(
    pattern: str,
    batch_tokens: int | Callable[[int], int],
    max_seq_len: int,
    *,
    micro_batches: int,
    rank: int,
    world_size: int,
    aligned: bool = True,
    bos_id: int = 50256,
    doc_slots: int = 0,
    vocab_size: int | None = None,
    first_step: int = 0,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """This rank's micro-batches, in order: inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32, on the CPU.

    pattern: glob of shards, in the order of their names. batch_tokens: tokens of a step, or a function of the step.
    Rank r of W takes micro-batches r·m/W … of each step's m, so that every world size sees the same tokens.
    aligned: micro-batches of whole documents from their starts, each cut at max_seq_len, a step never across two shards.
    Not aligned: contiguous tokens of the first shard, documents marked where they begin, max_seq_len unused.
    first_step: where to begin; the steps before it are planned, as the first time, and not read.
    Raises DataError for a bad shard, for more documents than doc_slots (0: by size), and where the tokens end.
    """
    tokens_at = batch_tokens if callable(batch_tokens) else lambda step: batch_tokens
    if micro_batches % world_size:
        raise ValueError(f"{micro_batches} micro-batches cannot be shared evenly by {world_size} ranks")
    files = find_shards(pattern)
    share = micro_batches // world_size
    mine = range(rank * share, (rank + 1) * share)

    def aligned_batches() -> Iterator:
        steps = 0
        for documents, tokens, ranges in plan_batches(files, tokens_at, max_seq_len, micro_batches, bos_id, vocab_size):
            steps += 1
            for i in mine if steps > first_step else ():
                slice_tokens, starts = documents.slice(*ranges[i], tokens + 1)
                yield make_micro_batch(slice_tokens, starts, doc_slots or default_doc_slots(tokens), documents.path)
        raise DataError(f"{pattern}: the tokens end after {steps} steps")

    def contiguous_batches() -> Iterator:
        tokens, step, position = read_shard(files[0], vocab_size), 0, 0
        while position + tokens_at(step) < len(tokens):
            n = tokens_at(step) // micro_batches
            for i in mine if step >= first_step else ():
                slice_tokens = tokens[position + i * n : position + (i + 1) * n + 1]
                starts = np.union1d([0], np.flatnonzero(slice_tokens == bos_id))
                yield make_micro_batch(slice_tokens, starts, doc_slots or default_doc_slots(n), files[0])
            position, step = position + tokens_at(step), step + 1
        raise DataError(f"{files[0]}: its {len(tokens):,} tokens end after {step} batches of {tokens_at(0):,}")

    return prefetch(aligned_batches() if aligned else contiguous_batches())


def check_data(h: Hyperparameters) -> None:
    """Raise DataError if the shards cannot feed the whole schedule, or the validation: before step 0, not at step 1700."""
    validation = find_shards(val_pattern(h))[0]
    tokens = read_shard(validation, h.vocab_size)
    if not (tokens == h.bos_id).any():
        raise DataError(f"{validation}: no document begins in it (no token {h.bos_id}): another shard, or --bos_id?")
    if len(tokens) <= h.val_tokens:
        raise DataError(
            f"{validation}: validation needs {h.val_tokens + 1:,} tokens, it holds {len(tokens):,}: "
            f"lower --val_tokens and --val_batch_tokens"
        )
    files = find_shards(train_pattern(h))
    plans = plan_batches(
        files, lambda step: step_schedule(step, h).batch_tokens, h.max_doc_len, h.micro_batches, h.bos_id, h.vocab_size
    )
    total, steps, shard, present = h.total_iterations, 0, None, 0
    for documents, _, _ in plans:
        if documents is not shard:
            shard, present = documents, present + int(documents.ends[-1])
        steps += 1
        if steps == total:
            return
    needed = sum(step_schedule(step, h).batch_tokens for step in range(total))
    raise DataError(
        f"{train_pattern(h)}: {total} steps need {needed:,} tokens and what document cuts drop; these {len(files)} shards "
        f"hold {present:,} usable ones, enough for {steps} steps: add shards or lower --num_scheduled_iterations"
    )


def train_pattern(h: Hyperparameters) -> str:
    return os.path.join(h.data, "*_train_*.bin")


def val_pattern(h: Hyperparameters) -> str:
    return os.path.join(h.data, "*_val_*.bin")


# -----------------------------------------------------------------------------
# Schedule


class Stage(NamedTuple):
    batch: int  # tokens a step, in batch units
    short: int  # window, in blocks
    long: int  # window, in blocks
    lr: float  # multiplier, before the decay
    mtp_first: tuple[float, ...]  # multi-token weights at the stage's first step,
    mtp_last: tuple[float, ...]  # and where they would be at the next stage's; linear between


STAGES = (  # a third of the scheduled steps each
    Stage(batch=8,  short=1, long=3,  lr=1.00, mtp_first=(1.0, 0.5, 0.25), mtp_last=(1.0, 0.5, 0.0)),
    Stage(batch=16, short=3, long=7,  lr=1.52, mtp_first=(1.0, 0.5),       mtp_last=(1.0, 0.0)),
    Stage(batch=24, short=5, long=11, lr=1.73, mtp_first=(1.0,),           mtp_last=(1.0,)),
)  # fmt: skip
EXTENSION = Stage(batch=24, short=6, long=13, lr=0.10, mtp_first=(1.0,), mtp_last=(1.0,))
FINAL_VALIDATION = EXTENSION._replace(long=20)  # seen by no YaRN change
LR_FLOOR = 0.10
LR_DECAY_FROM = 0.5  # of the scheduled steps
MOMENTUM_LOW, MOMENTUM_HIGH = 0.85, 0.95


@dataclass(frozen=True)
class StepSchedule:
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
    scheduled, total = h.num_scheduled_iterations, h.total_iterations
    if step >= total:
        stage, fraction = FINAL_VALIDATION, 0.0
    elif step >= scheduled:
        stage, fraction = EXTENSION, 0.0
    else:
        stage, fraction = STAGES[3 * step // scheduled], 3 * step / scheduled % 1
    yarn_blocks = EXTENSION.long if step >= scheduled else stage.long
    return StepSchedule(
        batch_tokens=stage.batch * h.batch_unit,
        short_window=stage.short * h.block_size,
        long_window=stage.long * h.block_size,
        yarn_window=yarn_blocks * h.block_size,
        lr_mul=lr_multiplier(step, scheduled),
        momentum=muon_momentum(step, h),
        mtp_weights=tuple(a + (b - a) * fraction for a, b in zip(stage.mtp_first, stage.mtp_last)),
        do_adam=step % 2 == 1,
    )


def lr_multiplier(step: int, scheduled: int) -> float:
    """The peak of the stage, changed one step late (x > 1/3, strictly), decayed from the middle on, then flat."""
    if step >= scheduled:
        return EXTENSION.lr
    peak = STAGES[(3 * step > scheduled) + (3 * step > 2 * scheduled)].lr
    weight = min(1.0, (1 - step / scheduled) / (1 - LR_DECAY_FROM))
    return peak * weight + LR_FLOOR * (1 - weight)


def muon_momentum(step: int, h: Hyperparameters) -> float:
    """Rises over the first steps, falls over the last; where both hold, it rises."""
    rise = MOMENTUM_HIGH - MOMENTUM_LOW
    if step < h.momentum_warmup:
        return MOMENTUM_LOW + rise * step / h.momentum_warmup
    into_cooldown = step - (h.total_iterations - h.momentum_cooldown)
    if into_cooldown > 0:
        return MOMENTUM_HIGH - rise * into_cooldown / h.momentum_cooldown
    return MOMENTUM_HIGH


def param_table(h: Hyperparameters) -> dict[str, ParamConfig]:
    """PARAM_TABLE as the options change it."""
    muls = {"adam": h.adam_lr_mul, "normuon": h.muon_lr_mul}
    changes = {"comms": "replicated"} if h.comms == "replicated" else {}
    if h.grad_dtype != "param":
        changes["grad_dtype"] = getattr(torch, h.grad_dtype)
    return {label: dataclasses.replace(row, lr=row.lr * muls[row.optim], **changes) for label, row in PARAM_TABLE.items()}


class TrainingManager:
    """Applies the schedule to model and optimizer, step by step.

    What the schedule says is a function of the step; what it has changed in them (YaRN, the tied embedding) is state.
    """

    def __init__(self, model: GPT, h: Hyperparameters):
        self.model, self.h = model, h
        self.optimizer = NorMuonAndAdam(model.named_parameters(), param_table(h), SCATTER_ORDER, WORK_ORDER)
        self.optimizer.grad_divisor = h.micro_batches
        self.split_step = -(-2 * h.num_scheduled_iterations // 3) | 1  # odd, so an Adam step
        self.windows = [stage.long * h.block_size for stage in (*STAGES, EXTENSION)]
        self.yarn_window = self.windows[0]
        self.advance_schedule(0)

    def advance_schedule(self, step: int) -> None:
        """Make `step` the coming one. YaRN goes window by window, so that a leap ends where single steps would.

        Raises ValueError if the model's windows are already beyond that step's: restore an earlier state first.
        """
        coming = step_schedule(step, self.h)
        at, to = self.windows.index(self.yarn_window), self.windows.index(coming.yarn_window)
        if to < at:
            raise ValueError(
                f"step {step} has a long window of {coming.yarn_window} tokens, but YaRN is already at {self.yarn_window}"
            )
        for old, new in zip(self.windows[at:to], self.windows[at + 1 : to + 1]):
            self.model.extend_windows(old, new)
        self.current, self.yarn_window = coming, coming.yarn_window
        weights = torch.tensor(self.current.mtp_weights, dtype=torch.float32)
        self._mtp_weights = weights.to(self.model.embed.device, non_blocking=True)

    def forward_schedule(self) -> ForwardSchedule:
        return ForwardSchedule(self._mtp_weights, self.current.short_window, self.current.long_window, self.h.max_doc_len)

    def step_optimizers(self, step: int) -> None:
        """Update the model by the gradients of `step`, at its lr and momentum; split the embedding where it is due."""
        current = step_schedule(step, self.h)
        self.optimizer.lr_mul, self.optimizer.momentum = current.lr_mul, current.momentum
        self.optimizer.step(current.do_adam)
        if step == self.split_step:
            self.optimizer.split_embed()

    def state_dict(self) -> dict[str, Any]:
        """A copy, keyed by label, of all that training has changed on this rank, gradients that wait for Adam included."""
        params = self.optimizer.params
        return clone_tensors({
            "parameters": {label: param.data for label, param in params.items()},
            "gradients": self.optimizer.gradients(),
            "optimizer": self.optimizer.state_dict(),
            "yarn": self.model.yarn.state(),
            "yarn_window": self.yarn_window,
        })  # fmt: skip

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Back to a saved state, bit for bit, in place: compiled graphs keep their tensors."""
        for label, param in self.optimizer.params.items():
            param.data.copy_(saved["parameters"][label])
        self.optimizer.load_gradients(saved["gradients"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.model.yarn.load_state(saved["yarn"])
        self.yarn_window = saved["yarn_window"]


def clone_tensors(tree: Any) -> Any:
    """A nest of dicts with its tensors copied to the CPU."""
    if isinstance(tree, dict):
        return {key: clone_tensors(value) for key, value in tree.items()}
    return tree.detach().to("cpu", copy=True) if isinstance(tree, Tensor) else tree


# -----------------------------------------------------------------------------
# Loop: ranks, log, clock


class Ranks(NamedTuple):
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def agree(self, error: Exception | None, found: str = "") -> None:
        """Called by all ranks: raise on each of them if any has an error, or has found something else than the first, so
        that none waits for one that has left."""
        reports = [(error and f"{error}", found)]
        if self.world_size > 1:
            reports = [None] * self.world_size
            dist.all_gather_object(reports, (error and f"{error}", found))
        for rank, (message, other) in enumerate(reports):
            if not message and other != reports[0][1] and not reports[0][0]:
                message = f"found {other}, but rank 0 {reports[0][1]}"
            if message:
                if not self.main:  # the first rank tells, before a launcher ends them all
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    time.sleep(2)
                raise AgreedError(message if rank == 0 else f"rank {rank}: {message}")

    def together(self, function: Callable, *args: Any) -> Any:
        """function(*args), called by all ranks: a ValueError or OSError of one is raised on each of them, as an AgreedError."""
        result = error = None
        try:
            result = function(*args)
        except (ValueError, OSError) as caught:
            error = caught
        self.agree(error)
        return result

    def sum(self, x: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def collect(self, x: Tensor) -> list[Tensor]:
        """On the first rank, every rank's x, in order; nothing on the others. x (n, …) on the CPU, n may differ."""
        parts = [x]
        if not self.main:
            dist.send(torch.tensor([len(x)], device=self.device), 0)
            if x.numel():
                dist.send(x.contiguous().view(-1).view(torch.uint8).to(self.device), 0)  # bytes: any dtype, any backend
            return []
        for rank in range(1, self.world_size):
            length = torch.empty(1, dtype=torch.int64, device=self.device)
            dist.recv(length, rank)
            part = torch.empty(int(length), *x.shape[1:], dtype=x.dtype)
            if part.numel():
                octets = torch.empty(part.numel() * part.itemsize, dtype=torch.uint8, device=self.device)
                dist.recv(octets, rank)
                part = octets.cpu().view(x.dtype).view(part.shape)
            parts.append(part)
        return parts


class RunError(RuntimeError):
    """A run that cannot go on; its message is all that the user needs."""


class AgreedError(RunError):
    """A RunError that every rank raises; the first one tells."""


class Stopped(RunError):
    """SIGTERM or Ctrl-C, obeyed by all ranks."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.code = 128 + number


JOIN_PATIENCE = timedelta(seconds=60)  # how long ranks wait for each other at the start
PATIENCE = timedelta(minutes=5)  # and later; the most is asked for when they compile


def environment_number(name: str, default: int, least: int = 0) -> int:
    """A number of torchrun's environment. Raises RunError if it is none, or too small."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise RunError(
            f"{name}={text!r} in the environment: a number from {least} on belongs there; start with torchrun, or unset it"
        )
    return int(text)


def join_ranks() -> Ranks:
    """Rank, world size and device as torchrun's environment has them; one rank without it. Starts the process group.

    Raises RunError if the environment cannot be meant, or if the ranks do not find each other within a minute.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    missing = [name for name in needed if name not in os.environ]
    if launched and missing:
        raise RunError(
            f"{', '.join(missing)} missing in the environment, which has RANK or WORLD_SIZE: start with torchrun, or unset all"
        )
    world_size, rank = environment_number("WORLD_SIZE", 1, least=1), environment_number("RANK", 0)
    local_rank = environment_number("LOCAL_RANK", 0)
    local_size = environment_number("LOCAL_WORLD_SIZE", local_rank + 1, least=1)
    if not (rank < world_size and local_rank < local_size <= world_size):
        raise RunError(
            f"RANK={rank} of WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size} "
            f"in the environment cannot be: start with torchrun"
        )
    if torch.cuda.is_available():
        if local_rank >= (gpus := torch.cuda.device_count()):
            raise RunError(f"local rank {local_rank} has no GPU: this machine shows {gpus}; start as many ranks as GPUs")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        flash_attention()
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
        keep_freed_memory()
    if launched:
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=JOIN_PATIENCE))
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE,
                device_id=device if device.type == "cuda" else None,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"rank {rank} of {world_size} cannot join the others at {os.environ['MASTER_ADDR']}:"
                f"{os.environ['MASTER_PORT']}, are all of them started, once each, and is the port free? "
                f"{str(error).splitlines()[0]}"
            ) from error
    return Ranks(rank, world_size, device)


@functools.cache
def flash_attention() -> str:
    """Turn FlashAttention 3 on where its package is installed; what attention runs on, in words."""
    if not torch.cuda.is_available():
        return "banded, in PyTorch"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "varlen_attn, FA2"
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return "varlen_attn, FA3"


def leave(message: str) -> None:
    """End this process at once, with a message and code 1: what a broken process group would still wait for is lost."""
    print(f"{SCRIPT.name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def is_lost_rank(error: RuntimeError) -> bool:
    """What a collective raises when another rank has gone or hangs; gloo has no type of its own for it."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def keep_freed_memory() -> None:
    """On glibc: never give memory back, because its pages would be faulted in again, a third of the time of an MLP."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and the heap never shrinks


class Signals:
    """SIGTERM and Ctrl-C, heard in a thread, as the main one may be waiting for a rank that is gone.

    While `training`, the first one is `asked` of this rank; all obey at the end of the step in which they have `agreed`. A
    second one, or one at another time, ends the process at once, with code 128 + signal.
    """

    PATIENCE = 25.0  # seconds for several ranks to obey, less than a launcher's 30

    def __init__(self):
        self.asked, self.agreed, self.training, self.several = 0, 0, False, False

    def __enter__(self) -> Self:
        self.pipe, self.previous = os.pipe(), {}
        if threading.current_thread() is threading.main_thread():  # no other can set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) != signal.SIG_IGN:  # as for a command that a shell has put in the background
                    self.previous[number] = signal.signal(number, lambda *_: None)
            os.set_blocking(self.pipe[1], False)
            self.previous_pipe = signal.set_wakeup_fd(self.pipe[1])
        self.thread = threading.Thread(target=self._listen, daemon=True, name="signals")
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():  # a launcher that sees another rank leave first sends one more
            signal.signal(number, signal.SIG_IGN if self.agreed and self.several else handler)
        if self.previous:
            signal.set_wakeup_fd(self.previous_pipe)
        self.training = False
        os.write(self.pipe[1], b"\0")
        self.thread.join()
        for end in self.pipe:
            os.close(end)

    def _listen(self) -> None:
        while number := os.read(self.pipe[0], 1)[0]:
            if number not in self.previous:
                continue
            name = signal.Signals(number).name
            if self.asked or not self.training:
                self._leave(number, f"{name}: ended at once; a launcher sends SIGTERM to all ranks when one of them has died")
            self.asked = number
            print(f"{SCRIPT.name}: {name}: ends after this step; a second one ends it at once", file=sys.stderr, flush=True)
            if self.several:
                timer = threading.Timer(self.PATIENCE, self._give_up, [number])
                timer.daemon = True
                timer.start()

    def _give_up(self, number: int) -> None:
        if self.training:
            self._leave(number, f"the step did not end within {self.PATIENCE:.0f} s: another rank has died or hangs")

    def _leave(self, number: int, message: str) -> None:
        print(f"{SCRIPT.name}: {message}", file=sys.stderr, flush=True)
        os._exit(128 + number)


RULE = "=" * 100


class Log:
    """logs/<run id>.txt on the first rank, nothing on the others. The console sees what is asked to; a terminal one live line.

    A resumed run's log is that of the run it resumes, cut where the checkpoint was made, with a note in the header. Lines
    that the disk does not take later on wait for the next try; that is told once, and the run goes on.
    """

    def __init__(self, ranks: Ranks, h: Hyperparameters, header: str, resumed: dict[str, str] | None = None):
        """header: see log_header; resumed: a checkpoint's log, `header` then being the note. Raises OSError or ValueError."""
        self.quiet = not ranks.main
        self.live = ranks.main and sys.stdout.isatty()
        self.header, self.lines, self.waiting, self.warned = header, [], b"", False
        if self.quiet:
            return
        self.path = Path(h.log_dir) / f"{h.run_id}.txt"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resumed is None:
            try:
                self.file = open(self.path, "xb", buffering=0)
            except FileExistsError:
                raise ValueError(f"{self.path} is another run's log: move it, or give another --run_id or --log_dir") from None
            self._put(f"{header}\n")
        else:
            self.header, self.lines = self._annotated(resumed, header), [resumed["lines"]]
            replace_file(self.path, f"{self.header}\n{resumed['lines']}".encode())
            self.file = open(self.path, "ab", buffering=0)

    def _annotated(self, resumed: dict[str, str], note: str) -> str:
        """The header with the note, and with those on earlier resumptions. Raises ValueError if the log is another run's."""
        sources, environment = resumed["header"].removesuffix(f"\n{RULE}").split(f"\n{RULE}\n", 1)
        if self.path.exists():
            parts = self.path.read_bytes().decode(errors="replace").split(f"\n{RULE}\n", 2)
            for old, new in ((parts[0], sources), (parts[2] if len(parts) == 3 else "", resumed["lines"])):
                if not old.startswith(new) and not new.startswith(old):  # a machine that goes down can leave less
                    raise ValueError(f"{self.path} is not the log of the checkpoint's run: move it, or give another --run_id")
            environment = parts[1] if len(parts) == 3 else environment
        return f"{sources}\n{RULE}\n{environment}\n{note}\n{RULE}"

    def write(self, text: str, console: bool = False) -> None:
        if self.quiet:
            return
        self.lines.append(f"{text}\n")
        try:
            self._put(self.lines[-1])
        except OSError as error:
            if not self.warned:
                self.show(f"{self.path}: {error}: the run goes on, the log's lines wait for room")
            self.warned = True
        if console:
            self.show(text)

    def _put(self, text: str) -> None:
        self.waiting += text.encode()
        while self.waiting:  # a full disk takes a part, then raises
            self.waiting = self.waiting[self.file.write(self.waiting) :]

    def show(self, text: str) -> None:
        """For the console alone."""
        if not self.quiet:
            print(("\r\x1b[K" if self.live else "") + text, flush=True)

    def progress(self, line: str, live_line: str) -> None:
        """A step's line: into the log; on a terminal as the live line, in a pipe as it is."""
        self.write(line, console=not self.quiet and not self.live)
        if self.live:
            print(f"\r\x1b[K{live_line}", end="", flush=True)

    def text(self) -> dict[str, str]:
        """What a checkpoint keeps of it."""
        return {"header": self.header, "lines": "".join(self.lines)}

    def close(self) -> None:
        if self.quiet:
            return
        self.file.close()
        if self.waiting:
            self.show(f"{self.path} lacks its last {len(self.waiting)} bytes:\n{self.waiting.decode()}")


def log_header(h: Hyperparameters, ranks: Ranks) -> str:
    """The sources, exactly, then the environment, each ended by a line of 100 =."""
    banner = "-" * 40
    sources = f"{SOURCES[SCRIPT.name]}\n{banner}\n# {KERNELS.name}\n{banner}\n{SOURCES[KERNELS.name]}"
    return "\n".join([sources, RULE, *environment(h, ranks), RULE])


def environment(h: Hyperparameters, ranks: Ranks) -> list[str]:
    """Versions, machine and settings, a line each."""
    triton_version = "none"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        pass
    if ranks.device.type == "cuda":
        devices = [f"{i}: {torch.cuda.get_device_properties(i)}" for i in range(torch.cuda.device_count())]
        devices.append(f"attention: {flash_attention()}")
    else:
        devices = [f"cpu: {cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank"]
    return [
        f"Python {sys.version}",
        f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton_version}",
        f"{platform.platform()}, {ranks.world_size} ranks",
        *devices,
        f"{SCRIPT.name} {h}",
    ]


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


class Clock:
    """Training time: what lies between start and stop, each on a synchronised device."""

    def __init__(self, device: torch.device):
        self.device, self.before, self.started = device, 0.0, 0.0

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start(self) -> None:
        self.synchronize()
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.synchronize()
        self.before += time.perf_counter() - self.started

    def read(self) -> float:
        """Seconds, running. Wait for the device first, or for the event of the step that is read."""
        return self.before + time.perf_counter() - self.started


class StepReport:
    """What all ranks have to say of a step, and its end.

    The mean of their losses and the signals they were sent travel in one asynchronous all-reduce of three numbers, during
    the last backward pass, and are read before the update: the device never waits, all ranks decide alike, and a loss
    that is not finite never reaches the weights. On a GPU the end is waited for one step later.
    """

    def __init__(self, step: int, tokens: int, loss: Tensor, asked: int, ranks: Ranks):
        """loss: of this rank, 0-dim; asked: the signal it was sent, or 0. Launches the reduction."""
        self.step, self.tokens, self.ended, self.work = step, tokens, None, None
        self.sums = loss.new_zeros(3)
        self.sums[0] = loss / ranks.world_size
        if asked:
            self.sums[1 if asked == signal.SIGINT else 2].fill_(1)
        if ranks.world_size > 1:
            self.work = dist.all_reduce(self.sums, async_op=True)
        if loss.is_cuda:
            self.on_host = torch.empty(3, pin_memory=True)
            self.arrived = torch.cuda.Event()
            aside = torch.cuda.Stream()  # the backward pass does not wait for other ranks
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                if self.work:
                    self.work.wait()
                self.on_host.copy_(self.sums, non_blocking=True)
                self.arrived.record()

    def read(self) -> tuple[float, int]:
        """The loss, and the signal that any rank was sent, or 0: the same on all ranks."""
        if self.sums.is_cuda:
            self.arrived.synchronize()
            numbers = self.on_host
        else:
            if self.work:
                self.work.wait()
            numbers = self.sums
        self.loss, interrupted, terminated = numbers.tolist()
        return self.loss, signal.SIGINT if interrupted else signal.SIGTERM if terminated else 0

    def end(self) -> None:
        """The step's work is launched."""
        if self.sums.is_cuda:
            self.ended = torch.cuda.Event()
            self.ended.record()

    def wait(self) -> None:
        if self.ended is not None:
            self.ended.synchronize()


# -----------------------------------------------------------------------------
# Checkpoints: one file, alike from any number of ranks, at the start of a step

CHECKPOINT_MAGIC = b"bankrun checkpoint 1\n"  # then the SHA-256 of all that follows, 32 bytes, then what torch.save writes
NEWEST = "latest"
# Settings that may change on the way: where things are, and what is written.
FREE_SETTINGS = {"data", "encoding", "log_dir", "run_id", "sample_tokens", "save_every", "keep_checkpoints", "resume"}


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or another run's."""


def replace_file(path: Path, *pieces: bytes | memoryview) -> None:
    """Write a file beside its place, onto the disk, then rename it: what has this name is whole at any moment."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def write_checkpoint(path: Path, saved: dict[str, Any], keep: int) -> None:
    """Save, then delete all but the newest `keep` of the folder. Raises OSError; the earlier ones are then untouched."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    payload = buffer.getbuffer()
    replace_file(path, CHECKPOINT_MAGIC, hashlib.sha256(payload).digest(), payload)
    for old in checkpoints(path.parent)[keep:]:
        old.unlink(missing_ok=True)


def checkpoints(folder: Path, run: str = ".") -> list[Path]:
    """Those of a run, or of all ("*"), newest first."""
    return sorted(folder.glob(f"{run}/step_*.pt"), key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What write_checkpoint saved. Nothing is unpickled but tensors and plain types. Raises CheckpointError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    start = len(CHECKPOINT_MAGIC) + 32
    if not data.startswith(CHECKPOINT_MAGIC):
        raise CheckpointError(f"{path}: not a checkpoint of this version (begins with {data[: len(CHECKPOINT_MAGIC)]!r})")
    if hashlib.sha256(memoryview(data)[start:]).digest() != data[len(CHECKPOINT_MAGIC) : start]:
        raise CheckpointError(f"{path}: damaged or cut short, its SHA-256 is another: resume from an earlier checkpoint")
    try:
        saved = torch.load(io.BytesIO(data[start:]), map_location="cpu", weights_only=True)
    except Exception as error:  # the file's fault, whatever torch.load makes of it
        raise CheckpointError(f"{path}: holds what cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: holds a {type(saved).__name__} instead of a run's state")
    return saved


def find_checkpoint(h: Hyperparameters) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that h.resume means; 'latest' passes over damaged ones, and says so. Raises CheckpointError."""
    if h.resume != NEWEST:
        return Path(h.resume), read_checkpoint(Path(h.resume))
    for path in checkpoints(Path(h.log_dir), h.run_id or "*"):
        try:
            return path, read_checkpoint(path)
        except CheckpointError as error:
            print(f"{SCRIPT.name}: passed over {error}", file=sys.stderr, flush=True)
    raise CheckpointError(f"--resume={NEWEST}: no usable checkpoint in {Path(h.log_dir) / (h.run_id or '*')}: start without it")


def differences(found: Any, expected: Any, name: str = "") -> list[str]:
    """Where two nests of dicts differ in keys and types, or tensors in shape and dtype; values are not looked at."""
    if isinstance(expected, dict) and isinstance(found, dict):
        here = [f"{name}{key} is missing" for key in expected.keys() - found.keys()]
        here += [f"{name}{key} is unknown" for key in found.keys() - expected.keys()]
        both = [differences(found[key], expected[key], f"{name}{key}.") for key in expected if key in found]
        return sorted(here) + list(itertools.chain(*both))
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        kinds = [f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in (found, expected)]
    else:
        kinds = [type(x).__name__ for x in (found, expected)]
    return [] if kinds[0] == kinds[1] else [f"{name[:-1]} is {kinds[0]}, here {kinds[1]}"]


def whole_layout(manager: TrainingManager, step: int, ranks: int) -> dict[str, Any]:
    """What whole_state gives at the start of `step`, of so many ranks: shapes and dtypes alone."""
    optimizer, due = manager.optimizer, step_schedule(step, manager.h).do_adam
    waiting = {
        label: optimizer.buffers.get(label, param.data).new_empty(param.shape, device="meta")
        for label, param in optimizer.params.items() if due and optimizer.table[label].optim == "adam"
    }  # fmt: skip

    def whole(label: str, value: Tensor | int) -> Tensor | int:
        rows = len(optimizer._rows(label, optimizer.params[label].data))
        return value.new_empty(rows, *value.shape[1:], device="meta") if isinstance(value, Tensor) else value

    return {
        "parameters": {label: param.data for label, param in optimizer.params.items()},
        "gradients": {rank: waiting for rank in range(ranks)},
        "optimizer": {
            "tied": True,
            "state": {
                label: {name: whole(label, value) for name, value in state.items()} for label, state in optimizer.state.items()
            },
        },
        "yarn": manager.model.yarn.state(),
        "yarn_window": manager.yarn_window,
    }


def whole_state(manager: TrainingManager, ranks: Ranks) -> dict[str, Any]:
    """The manager's state with shards put together and each rank's waiting gradients, on the first rank; called by all.

    Those gradients are parts of a sum: kept apart, the same number of ranks goes on with the same bits.
    """
    saved, optimizer = manager.state_dict(), manager.optimizer
    for label, state in saved["optimizer"]["state"].items():
        if optimizer.table[label].comms == "sharded" and ranks.world_size > 1:
            for name in [name for name, value in state.items() if isinstance(value, Tensor)]:
                state[name] = torch.cat(ranks.collect(state[name]) or [state[name]])
    parts = {label: ranks.collect(grad) for label, grad in sorted(saved["gradients"].items())}
    saved["gradients"] = {
        rank: {label: grads[rank] for label, grads in parts.items()} for rank in range(ranks.world_size if ranks.main else 0)
    }
    return saved


def load_whole_state(manager: TrainingManager, whole: dict[str, Any], ranks: Ranks) -> None:
    """Give this rank its part of what whole_state gave, of any number of ranks.

    Waiting gradients of another number of ranks are shared out: rank r of W takes the sum of those of ranks r, r + W, …
    """
    optimizer, parts = manager.optimizer, whole["gradients"]
    mine = [parts[rank] for rank in range(ranks.rank, len(parts), ranks.world_size)]
    gradients = {
        label: sum((part[label].double() for part in mine[1:]), mine[0][label].double()).to(grad.dtype)
        if len(mine) > 1 else mine[0][label] if mine else torch.zeros_like(grad)
        for label, grad in parts[0].items()
    }  # fmt: skip
    state = {
        label: {name: value[optimizer.owned[label]] if isinstance(value, Tensor) else value for name, value in values.items()}
        for label, values in whole["optimizer"]["state"].items()
    }
    manager.load_state_dict(
        {**whole, "gradients": gradients, "optimizer": {"tied": whole["optimizer"]["tied"], "state": state}}
    )


def not_finite(tree: Any, name: str = "") -> list[str]:
    """Names of the tensors of a nest of dicts that hold an infinity or NaN."""
    if isinstance(tree, dict):
        return list(itertools.chain(*(not_finite(value, f"{name}{key}.") for key, value in tree.items())))
    bad = isinstance(tree, Tensor) and tree.is_floating_point() and not tree.isfinite().all()
    return [name[:-1]] if bad else []


def shard_sizes(h: Hyperparameters) -> dict[str, int]:
    """Bytes of each shard: what the position in the data counts on."""
    return {Path(path).name: os.path.getsize(path) for path in find_shards(train_pattern(h)) + find_shards(val_pattern(h))}


def save(step: int, manager: TrainingManager, log: Log, seconds: float, ranks: Ranks) -> str:
    """Save the run as it is at the start of `step`; called by all ranks. The path, or why there is none: a full disk does
    not end the run. Raises RunError on all ranks, and keeps what is there, if a tensor is not finite."""
    h, state = manager.h, whole_state(manager, ranks)

    def write() -> str:
        path = Path(h.log_dir) / h.run_id / f"step_{step:06d}.pt"
        if bad := not_finite(state):
            raise ValueError(f"not finite at step {step}: {', '.join(bad)}: stopped, not saved; earlier checkpoints are good")
        saved = {
            "step": step, "seconds": seconds, "run_id": h.run_id, "log": log.text(), "hyperparameters": dataclasses.asdict(h),
            "sources": {"script": SOURCES[SCRIPT.name], "kernels": SOURCES[KERNELS.name]}, "shards": shard_sizes(h),
            "state": state,
        }  # fmt: skip
        try:
            write_checkpoint(path, saved, h.keep_checkpoints)
        except OSError as error:
            message = f"no checkpoint of step {step}: {path}: {error.strerror}"
            log.show(f"{message}: the run goes on")
            return message
        return f"checkpoint {path}"

    return ranks.together(write if ranks.main else str)


def check_usable(path: Path, saved: dict[str, Any], manager: TrainingManager) -> None:
    """Raise CheckpointError unless the checkpoint is complete, consistent and of a model like the manager's."""
    h, texts = manager.h, {"header": "", "lines": ""}
    expected = {"step": 0, "seconds": 0.0, "run_id": "", "log": texts, "hyperparameters": {}, "shards": {}, "state": {}}
    expected["sources"] = {"script": "", "kernels": ""}
    nests = {name: {} for name in ("hyperparameters", "shards", "state") if isinstance(saved.get(name), dict)}
    faults = differences({**saved, **nests}, expected)  # of these three, only that they are there
    if not faults:
        step, state = saved["step"], saved["state"]
        parts = state.get("gradients")
        ranks = len(parts) if isinstance(parts, dict) and parts else 1
        faults = differences(state, whole_layout(manager, step, ranks), "state.")
    if not faults:
        steps = [state["step"] for state in saved["state"]["optimizer"]["state"].values() if "step" in state]
        sound = {
            "step": 0 <= step <= h.total_iterations,
            "seconds": 0 <= saved["seconds"] < math.inf,
            "run_id": Path(saved["run_id"]).name == saved["run_id"] != "",
            "log": f"\n{RULE}\n" in saved["log"]["header"],
            "state.optimizer.tied": state["optimizer"]["tied"] == (step <= manager.split_step),
            "state.optimizer.state": min(steps) >= 0,
            "state.yarn_window": state["yarn_window"] in manager.windows,
        }
        faults = [f"{name} cannot be what it is" for name, holds in sound.items() if not holds]
        faults += [f"{name} is not finite" for name in not_finite(state, "state.")]
    refuse(path, faults)


def check_fits(path: Path, saved: dict[str, Any], h: Hyperparameters) -> None:
    """Raise CheckpointError, with the first differences, if the checkpoint is of other settings or other shards."""
    faults = []
    for kind, here in (("hyperparameters", dataclasses.asdict(h)), ("shards", shard_sizes(h))):
        there = saved.get(kind)
        faults += differences(there, here, f"{kind}.")
        for name in here if isinstance(there, dict) else ():
            if name in there and name not in FREE_SETTINGS and there[name] != here[name]:
                faults.append(f"{name} is {there[name]!r}, here {here[name]!r}")
    refuse(path, faults)


def refuse(path: Path, faults: list[str]) -> None:
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{path} cannot be resumed: {'; '.join(faults[:3])}{more}")


def resumption_note(path: Path, saved: dict[str, Any], h: Hyperparameters, ranks: Ranks) -> str:
    """For the log's header: where the run went on, on what machine, and by what changes to the source."""
    here = {"script": SOURCES[SCRIPT.name], "kernels": SOURCES[KERNELS.name]}
    diff = []
    for name, before in saved["sources"].items():
        lines = before.splitlines(), here[name].splitlines()
        diff += difflib.unified_diff(*lines, f"{name} before", f"{name} now", n=1, lineterm="")
    changed = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff)
    source = f"with changed source, {changed} lines of difference" if diff else "with the same source"
    return "\n".join([f"resumed at step {saved['step']} from {path}, {source}", *environment(h, ranks), *diff])


def check_room(manager: TrainingManager, ranks: Ranks) -> None:
    """Raise OSError if checkpoints, should there be any, cannot be written where they belong: before training."""
    h = manager.h
    folder = Path(h.log_dir) / h.run_id
    if not (h.save_every and ranks.main):
        return
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "probe", b"probe")
    (folder / "probe").unlink()

    def size(tree: Any) -> int:
        return sum(map(size, tree.values())) if isinstance(tree, dict) else tree.nbytes if isinstance(tree, Tensor) else 0

    files = max(1, h.keep_checkpoints + 1 - len(checkpoints(folder)))
    needed, free = files * size(whole_layout(manager, 0, 1)), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder}: {files} checkpoints need {needed:,} bytes, {free:,} are free: make room or lower --keep_checkpoints"
        )


# -----------------------------------------------------------------------------
# Loop: warm-up, validation, sample, training


def synthetic_batch(tokens: int, h: Hyperparameters, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """A micro-batch of the right shapes, from no data and no random state."""
    stream = (torch.arange(tokens + 1) * 7919) % h.vocab_size
    starts = np.arange(0, tokens, min(tokens, h.max_doc_len))
    slots = h.doc_slots or default_doc_slots(tokens)
    batch = make_micro_batch(stream.numpy(), starts[: slots - 1], slots, "warm-up")
    return tuple(x.to(ranks.device) for x in batch)


def warm_up(manager: TrainingManager, h: Hyperparameters, ranks: Ranks, first: int = 0) -> None:
    """Run every shape that the schedule will use from step `first` on, so that nothing is compiled later; then restore
    every bit of state."""
    model, optimizer = manager.model, manager.optimizer
    saved = manager.state_dict()
    seen = set()
    for step in range(first, h.total_iterations + 1):
        now = step_schedule(step, h)
        for training in (True, False):
            if not (step < h.total_iterations if training else is_validated(step, h)):
                continue
            tokens = (now.batch_tokens if training else h.val_batch_tokens) // h.micro_batches
            shape = (training, tokens, now.short_window, now.long_window, training and len(now.mtp_weights))
            if shape in seen:
                continue
            seen.add(shape)
            manager.advance_schedule(step)
            model.train(training)
            with torch.set_grad_enabled(training):
                loss = model(*synthetic_batch(tokens, h, ranks), manager.forward_schedule())
            if training:
                loss.backward()
    for do_adam, then_split in ((False, False), (True, True), (True, False)):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step(do_adam)
        if then_split:
            optimizer.split_embed()
    manager.load_state_dict(saved)
    manager.advance_schedule(0)
    model.train()


def is_validated(step: int, h: Hyperparameters) -> bool:
    return step == h.total_iterations or (h.val_every > 0 and step % h.val_every == 0)


@torch.no_grad()
def validate(model: GPT, manager: TrainingManager, h: Hyperparameters, ranks: Ranks, signals: Signals) -> float:
    """Mean next-token cross-entropy over the validation tokens, in nats; NaN if a signal, signals.agreed, cuts it short."""
    batches = distributed_data_generator(
        val_pattern(h), h.val_batch_tokens, 0, micro_batches=h.micro_batches, rank=ranks.rank, world_size=ranks.world_size,
        aligned=False, bos_id=h.bos_id, doc_slots=h.doc_slots, vocab_size=h.vocab_size,
    )  # fmt: skip
    share = h.micro_batches // ranks.world_size  # of each batch, this rank's
    count = h.val_tokens // h.val_batch_tokens * share
    model.eval()
    total = torch.zeros((), device=ranks.device)
    for i, batch in enumerate(itertools.islice(batches, count)):
        total += model(*to_device(batch, ranks.device), manager.forward_schedule())
        if i % share == 0:
            _, signals.agreed = StepReport(0, 0, total, signals.asked, ranks).read()
        if signals.agreed:
            break
    batches.close()
    model.train()
    return math.nan if signals.agreed else (ranks.sum(total) / (count * ranks.world_size)).item()


def to_device(batch: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    return [x.to(device, non_blocking=True) for x in batch]


@torch.no_grad()
def continue_text(
    model: GPT, manager: TrainingManager, device: torch.device, prompt: list[int], count: int, temperature: float = 0.7
) -> list[int]:
    """Up to `count` tokens after those of the prompt, which begins with bos_id; the document does not end in between."""
    tokens, h = list(prompt), manager.h
    generator = torch.Generator().manual_seed(h.seed)
    model.eval()
    for _ in range(min(count, model.max_seq_len - len(tokens))):
        inputs = torch.tensor(tokens, dtype=torch.int32, device=device)
        cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32, device=device)
        x = model.hidden_states(inputs, cu_seqlens, manager.forward_schedule())
        logits = softcap(x[-1] @ model.lm_head).float().cpu()[: h.vocab_size]
        logits[h.bos_id] = -math.inf
        tokens.append(int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)))
    model.train()
    return tokens[len(prompt) :]


def decode(tokens: list[int], encoding: str) -> str:
    """Text of tokens: bytes by themselves, anything else by tiktoken's encoding of that name, numbers if it cannot be had."""
    if encoding == "bytes":
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")
    try:
        import tiktoken

        return tiktoken.get_encoding(encoding).decode(tokens)
    except Exception as error:  # tiktoken fetches its vocabulary: the run is over, a missing network must not spoil it
        return f"{tokens} (no text: {type(error).__name__}: {error})"


def blame(manager: TrainingManager, ranks: Ranks) -> str:
    """Labels whose weights hold an infinity or NaN, or else whose gradients do, on any rank; empty if all is finite."""
    params, gradients = manager.optimizer.params, manager.optimizer.gradients()
    bad = torch.zeros(2, len(params), device=ranks.device)
    for i, (label, param) in enumerate(params.items()):
        bad[0, i] = not param.isfinite().all()
        bad[1, i] = label in gradients and not gradients[label].isfinite().all()
    ranks.sum(bad)
    for kind, row in zip(("weights", "gradients"), bad):
        if names := [label for label, count in zip(params, row.tolist()) if count]:
            return f"not finite: the {kind} of {', '.join(names)}"
    return ""


def train(h: Hyperparameters, ranks: Ranks, signals: Signals | None = None) -> None:
    """One run, from the weights' start, or from a checkpoint, to the last line of the log. Raises RunError."""
    run = Run(dataclasses.replace(h), ranks, signals or Signals())
    run.prepare()
    run.loop()
    run.end()


class Run:
    """Settings, ranks and signals become a model, its manager, a log and a clock; then the loop over steps."""

    def __init__(self, h: Hyperparameters, ranks: Ranks, signals: Signals):
        self.h, self.ranks, self.signals = h, ranks, signals
        self.clock = Clock(ranks.device)
        self.first, self.total = 0, h.total_iterations  # steps
        self.tokens_done = 0

    def prepare(self) -> None:
        """Check everything that can be known, before any file is written; open the log; warm up; load the checkpoint."""
        h, ranks = self.h, self.ranks
        ranks.together(h.check, ranks.world_size)
        ranks.together(check_data, h)
        path, saved = ranks.together(find_checkpoint, h) if h.resume else (None, None)
        if saved:
            ranks.together(check_fits, path, saved, h)
        self.model, self.manager = ranks.together(build, h, ranks)
        if saved:
            ranks.together(check_usable, path, saved, self.manager)
            self.first, self.clock.before = saved["step"], saved["seconds"]
        ranks.agree(None, f"{path} at step {self.first}" if saved else "")
        unnamed = saved["run_id"] if saved else f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        h.run_id = h.run_id or unnamed
        ranks.together(check_room, self.manager, ranks)
        header = resumption_note(path, saved, h, ranks) if saved else log_header(h, ranks)
        self.log = ranks.together(Log, ranks, h, header, saved and saved["log"])
        if ranks.main:
            self.log.show(f"log: {self.log.path}")
            if saved:
                self.log.show(header.partition("\n")[0])

        if ranks.device.type == "cuda":
            torch._dynamo.config.recompile_limit = 64  # a graph for each stage and mode, an update for each shape
        started = time.perf_counter()
        warm_up(self.manager, h, ranks, self.first)
        parameters = sum(p.numel() for p in self.model.parameters())
        seconds = time.perf_counter() - started
        self.log.show(f"{parameters:,} parameters, {ranks.world_size} ranks, warm-up {seconds:.0f} s")
        if saved:
            load_whole_state(self.manager, saved["state"], ranks)
        self.tokens_done = sum(step_schedule(step, h).batch_tokens for step in range(self.first))
        self.tokens = sum(step_schedule(step, h).batch_tokens for step in range(self.total))

    def loop(self) -> None:
        """All steps. The clock runs over them, and stands while a checkpoint is written or the model validated."""
        h, ranks, signals, manager, clock = self.h, self.ranks, self.signals, self.manager, self.clock
        batches = distributed_data_generator(
            train_pattern(h), lambda step: step_schedule(step, h).batch_tokens, h.max_doc_len, micro_batches=h.micro_batches,
            rank=ranks.rank, world_size=ranks.world_size, bos_id=h.bos_id, doc_slots=h.doc_slots, vocab_size=h.vocab_size,
            first_step=self.first,
        )  # fmt: skip
        signals.training, signals.several = True, ranks.world_size > 1
        pending: StepReport | None = None  # on a GPU, a step that is launched and not yet through
        clock.start()
        for step in range(self.first, self.total + 1):
            saving = h.save_every > 0 and step > self.first and (step % h.save_every == 0 or step == self.total)
            if signals.agreed or saving or is_validated(step, h):
                if pending:
                    pending = self.report(pending)
                clock.stop()
                self.pause(step, saving)
                clock.start()
            if step == self.total:
                break
            manager.advance_schedule(step)
            current = self.forward_backward(step, batches)
            loss, signals.agreed = current.read()
            if not math.isfinite(loss):
                what = f"the training loss is {loss} at step {step}: stopped before its update; {blame(manager, ranks)}"
                ranks.agree(RunError(f"{what}; lower the learning rate or look at the last change"))
            manager.step_optimizers(step)
            current.end()
            if pending:
                self.report(pending)
            pending = current if current.ended else self.report(current)
        batches.close()
        signals.training = False

    def forward_backward(self, step: int, batches: Iterator) -> StepReport:
        """This rank's micro-batches of a step; their gradients wait. The report of it is on its way."""
        h, ranks, manager = self.h, self.ranks, self.manager
        share = h.micro_batches // ranks.world_size
        tokens, mtp_weights = manager.current.batch_tokens, manager.current.mtp_weights
        total = torch.zeros((), device=ranks.device)
        for i, batch in enumerate(itertools.islice(batches, share)):
            loss = self.model(*to_device(batch, ranks.device), manager.forward_schedule())
            total += loss.detach()
            if i == share - 1:
                mean = total / (tokens // ranks.world_size * sum(mtp_weights))
                report = StepReport(step, tokens, mean, self.signals.asked, ranks)
            loss.backward()
            manager.optimizer.accumulate()
        return report

    def report(self, done: StepReport) -> None:
        """Write a step's line, once the device is through with it."""
        done.wait()
        seconds, number = self.clock.read(), done.step + 1
        self.tokens_done += done.tokens
        left = int(seconds * (self.tokens / self.tokens_done - 1))
        speed = self.tokens_done / seconds
        self.log.progress(
            step_line(number, self.total, seconds),
            f"step {number}/{self.total}  loss {done.loss:.4f}  {speed:,.0f} tokens/s  {left // 60}:{left % 60:02d} left",
        )

    def pause(self, step: int, saving: bool) -> None:
        """Between steps: save, validate, obey a signal."""
        h, ranks, signals, manager = self.h, self.ranks, self.signals, self.manager
        if saving and not signals.agreed:
            save(step, manager, self.log, self.clock.before, ranks)
        if is_validated(step, h) and not signals.agreed:
            manager.advance_schedule(step)
            val_loss = validate(self.model, manager, h, ranks, signals)
        if signals.agreed:
            self.stop(step)
        if is_validated(step, h):
            culprits = blame(manager, ranks)
            if culprits or not math.isfinite(val_loss):
                ranks.agree(RunError(f"the validation loss is {val_loss} at step {step}: stopped; {culprits}"))
            self.log.write(step_line(step, self.total, self.clock.before, val_loss), console=True)

    def stop(self, step: int) -> None:
        """Obey the signal: save, if that is on, say so in the log, leave together."""
        kept = "no checkpoint, as --save_every=0"
        if self.h.save_every:
            kept = save(step, self.manager, self.log, self.clock.before, self.ranks)
        message = f"stopped by {signal.Signals(self.signals.agreed).name} after step:{step}/{self.total}: {kept}"
        self.log.write(message, console=True)
        self.log.close()
        self.ranks.agree(None)
        raise Stopped(self.signals.agreed, message)

    def end(self) -> None:
        """The sample, and the log's last line."""
        h, ranks, log = self.h, self.ranks, self.log
        if h.sample_tokens and ranks.main:
            shard = read_shard(find_shards(val_pattern(h))[0])
            begin = int(np.flatnonzero(shard == h.bos_id)[0])
            prompt = shard[begin : begin + 64].tolist()
            text = continue_text(self.model, self.manager, ranks.device, prompt, h.sample_tokens)
            shown = f"{decode(prompt[1:], h.encoding)}⟫{decode(text, h.encoding)}"
            log.write(f"sample, after a prompt from the validation shard:\n{shown}", console=True)
        log.write(peak_memory(ranks.device), console=True)
        log.close()
        ranks.agree(None)  # all leave together: a rank that is gone breaks the connections of those still at work


def step_line(step: int, total: int, seconds: float, val_loss: float | None = None) -> str:
    """In the community's format."""
    loss = "" if val_loss is None else f"val_loss:{val_loss:.4f} "
    return f"step:{step}/{total} {loss}train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / max(step, 1):.2f}ms"


def build(h: Hyperparameters, ranks: Ranks) -> tuple[GPT, TrainingManager]:
    """The model with its first weights, the same on every rank and device, and its manager."""
    torch.manual_seed(h.seed)
    longest = max(max(stage.batch for stage in (*STAGES, EXTENSION)) * h.batch_unit, h.val_batch_tokens) // h.micro_batches
    fp8 = h.fp8_head and has_fp8(ranks.device)
    try:
        model = GPT(
            h.vocab_size, NUM_LAYERS, h.num_heads, h.head_dim, h.model_dim, longest,
            attention_scale=h.attention_scale, fp8_head=fp8,
        )  # fmt: skip
        if h.dtype == "float32":
            model.float()
        model.to(ranks.device)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ValueError(f"no model of this size can be made here, lower --model_dim or --val_batch_tokens: {error}") from error
    if h.compile:
        model.compile(dynamic=False, fullgraph=True)
    return model, TrainingManager(model, h)


def peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return f"peak memory allocated: {allocated >> 20} MiB reserved: {reserved >> 20} MiB"
    import resource

    return f"peak memory resident: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"


def parse_options(argv: list[str] | None) -> Hyperparameters:
    """The preset's settings, changed by --name=value. Unknown options and wrong types end the process with a message."""
    preset = "record" if torch.cuda.is_available() else "demo"
    parser = argparse.ArgumentParser(
        prog=SCRIPT.name,
        allow_abbrev=False,
        description=f"Train by the speedrun's recipe. The preset here is {preset!r}; options override its settings.",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default=preset, help="record: the full-size run; demo: small widths and bytes, for a CPU"
    )
    types = {"int": int, "float": float, "str": str, "bool": boolean}
    for field in dataclasses.fields(Hyperparameters):
        kind = field.type if isinstance(field.type, str) else field.type.__name__
        demo = f"; demo: {DEMO[field.name]}" if field.name in DEMO else ""
        parser.add_argument(f"--{field.name}", type=types[kind], metavar=kind.upper(), default=argparse.SUPPRESS,
                            help=f"{field.metadata['meaning']} ({field.default!r}{demo})".replace("%", "%%"))  # fmt: skip
    given = vars(parser.parse_args(argv))
    return Hyperparameters(**{**PRESETS[given.pop("preset")], **given})


def boolean(text: str) -> bool:
    """argparse type: true or false."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def main(argv: list[str] | None = None) -> None:
    """Parse options, join the other ranks, train. Raises SystemExit after a message: code 1 or 2, or 128 + signal."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        h = parse_options(argv)
        with Signals() as signals:
            try:
                train(h, join_ranks(), signals)
            except RuntimeError as error:  # told while SIGTERM is still heard: a launcher sends it the moment a rank has died
                if isinstance(error, RunError) or not is_lost_rank(error):
                    raise
                leave(f"rank {os.environ.get('RANK', 0)}: lost another rank, which has died or hangs: {error}")
    except Stopped as stopped:
        raise SystemExit(stopped.code) from None
    except (RunError, ValueError) as error:
        if first or not isinstance(error, AgreedError):
            print(f"{SCRIPT.name}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
