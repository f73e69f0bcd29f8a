"""bankrun: train a GPT-2-class model to a validation loss of 3.28 on FineWeb.

The recipe is public record 84 of github.com/KellerJordan/modded-nanogpt with record 88's loss. Its
public logs of 1365 + 10 steps have a mean loss of 3.27848 on 8 H100s (ten, in 78.5 s) and of 3.27782
on one (ten, in 595 s); a full run of this script is still to come. ./test.sh proves the arithmetic on
a CPU: every kernel against a reference, 1 to 16 ranks against one.

    ./run.sh                                               # record preset on GPUs, demo without
    ./run.sh ideas/idea.py --num_scheduled_iterations=200  # your own copy, your own settings
    torchrun --standalone --nproc_per_node=8 train_gpt.py  # by hand; several nodes: docs/running.md
    python train_gpt.py --help                             # every option

First the tables (parameters, layers, scalars, stages), then model, loss, optimizer, schedule, loop.
Kernels are in triton_kernels.py, shards and batches in data/, log and checkpoints in runtime/.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# A copy in ideas/ finds the project: its own folder comes first, then the one above.
HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(folder) for folder in HERE.parents if (folder / "runtime/run.py").is_file()]

# fmt: off
import triton_kernels
from data.encodings import load_prefixes
from data.loader import (
    Batch, check_data, distributed_data_generator, synthetic_batch, to_device,
    train_pattern, val_pattern,
)
from runtime import checks
from runtime.checkpoints import Checkpoint, find_resumed
from runtime.cpu import CPU_FP32, all_gather, reduce_scatter, use_cpu
from runtime.options import parse_options, setting
from runtime.ranks import Ranks, RunError, Signals, join_ranks, run_main
from runtime.run import Run, seed_random
from runtime.self_check import self_check
from runtime.sources import Sources
from sample import sample_text
from triton_kernels import (
    XTX, XXT, Band, aX_plus_BX, agree_on_attention, attend, ba_plus_cAA, band_bias, cache_sized,
    fp8_head_loss, fused_on_gpu, gate_logits, graph_input, has_fp8, has_kernel, join_mantissa,
    linear, lookup, norm, norm_and_rotate_qk, quantize_by_largest, relu_squared_mlp,
    relu_squared_mlp_fp8, residual_sum, softcapped_cross_entropy, split_mantissa, transpose_add,
    transpose_copy, uses_flash,
)
# fmt: on

SOURCES = Sources(__file__)  # read now, so that the log holds what runs, not a later edit

# -----------------------------------------------------------------------------
# Settings


@dataclass
class Hyperparameters:
    """The record preset by default. Every field is an option, e.g. --num_scheduled_iterations=200."""

    # fmt: off
    # Data
    data: str = setting("data/fineweb10B", "folder of *_train_*.bin and *_val_*.bin shards", path=True)
    vocab_size: int = setting(50257, "token ids are below this; the model pads it to a multiple of 128")
    bos_id: int = setting(50256, "the token that begins every document", least=0)
    encoding: str = setting("gpt2", "tiktoken encoding that turns tokens into text, or 'bytes'")
    doc_slots: int = setting(0, "length of cu_seqlens (max documents + 1); 0: by batch size", least=0)
    # Model
    model_dim: int = setting(768, "width of the residual stream, num_heads * head_dim")
    num_heads: int = setting(6, "attention heads, an even number")
    head_dim: int = setting(128, "width of a head, a multiple of 4")
    bigram_rows: int = setting(15 * 50304, "rows of the table of hashed bigrams", least=2)
    attention_scale: float = setting(0.1, "initial scale of the attention logits; grows with the windows")
    dtype: str = setting("bfloat16", "dtype of matrices, embeddings, gates", choices=("bfloat16", "float32"))
    fp8_head: bool = setting(True, "FP8 matmuls in the LM head (compute capability 8.9 or later)")
    fp8_mlp: bool = setting(True, "FP8 up-projections in the MLPs, in the forward pass of training")
    compile: bool = setting(True, "torch.compile the model")
    flash_attention: int = setting(4, "in training: 4 or 2; 4 needs Hopper and its package", choices=(4, 2))
    self_check: bool = setting(True, "compare the kernels with PyTorch before training, on a GPU")
    seed: int = setting(0, "of the initial weights", least=0)
    # Schedule
    num_scheduled_iterations: int = setting(1365, "steps of the stages")
    num_extension_iterations: int = setting(10, "steps after them, at a low rate and wider windows", least=0)
    comms: str = setting("sharded", "how large parameters are reduced", choices=("sharded", "replicated"))
    grad_dtype: str = setting("param", "dtype in which gradients accumulate", choices=("param", "float32"))
    batch_unit: int = setting(16384, "tokens in a batch unit; STAGES says how many units a step takes")
    micro_batches: int = setting(8, "forward passes of a step, shared by the ranks; more fit smaller GPUs")
    block_size: int = setting(128, "tokens in a block, the unit of windows and document cuts")
    adam_lr_scale: float = setting(1.0, "scales every Adam learning rate in PARAM_TABLE")
    muon_lr_scale: float = setting(1.0, "scales every NorMuon learning rate in PARAM_TABLE")
    small_lr_scale: float = setting(1.0, "scales those of SMALL besides: for batches of few tokens")
    mudd_lr_scale: float = setting(1.0, "scales those of MUDD's networks besides")
    momentum_warmup: int = setting(300, "steps over which NorMuon's momentum rises", least=0)
    momentum_cooldown: int = setting(50, "last steps, over which it falls", least=0)
    # Validation
    val_every: int = setting(250, "steps between validations; 0: only at the end", least=0)
    val_tokens: int = setting(10_485_760, "tokens of the validation shard, from its start")
    val_batch_tokens: int = setting(2_097_152, "tokens in a validation batch, shared by the micro-batches")
    # Output
    log_dir: str = setting("logs", "folder of the logs", path=True)
    run_id: str = setting("", "name of the log; empty: date, time and a random part")
    sample_tokens: int = setting(0, "tokens to write at the end after each of three prompts", least=0)
    save_every: int = setting(0, "steps between checkpoints in log_dir/run_id, untimed; 0: none", least=0)
    save_minutes: float = setting(0.0, "minutes between them, by rank 0's clock; 0: none", least=0)
    keep_checkpoints: int = setting(2, "number of checkpoints to keep, the newest ones")
    resume: str = setting("", "checkpoint, 'latest', or 'auto': run_id's, if there is one", path=True)
    # fmt: on

    @property
    def total_iterations(self) -> int:
        return self.num_scheduled_iterations + self.num_extension_iterations

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest micro-batch, in training or validation."""
        batches = [stage.batch * self.batch_unit for stage in (*STAGES, EXTENSION)]
        return max(self.val_batch_tokens, *batches) // self.micro_batches

    @property
    def stream(self) -> dict[str, int]:
        """What decides, besides the stages, which tokens a micro-batch holds."""
        return {x: getattr(self, x) for x in ("micro_batches", "doc_slots", "bos_id", "vocab_size")}

    def check(self, world_size: int) -> None:
        """Raise ValueError, with what to do, if these settings or the tables cannot run."""
        checks.check_layers(LAYERS, MUDD_SOURCES, MUDD[1])
        checks.check_stages(STAGES, EXTENSION, FINAL_VALIDATION)
        checks.check_settings(self, [stage.batch for stage in (*STAGES, EXTENSION)], world_size)


# A minute or two on a machine without a GPU: the same topology and schedule, small widths, bytes.
# fmt: off
DEMO = dict(
    data="data/local", vocab_size=257, bos_id=256, encoding="bytes",
    bigram_rows=16_384, model_dim=64, num_heads=2, head_dim=32, dtype="float32", compile=False,
    attention_scale=0.28,  # normed queries have length √head_dim: narrow heads make small logits
    num_scheduled_iterations=220, num_extension_iterations=3,
    batch_unit=144, micro_batches=2, block_size=32, fp8_head=False, fp8_mlp=False,
    momentum_warmup=1000, muon_lr_scale=1.3, adam_lr_scale=2.0,  # for a short run
    small_lr_scale=0.2, mudd_lr_scale=0.08,  # a batch has few tokens: Adam's steps are noise
    val_every=100, val_tokens=262_144, val_batch_tokens=32_768, sample_tokens=100,
)
# A tenth of the record preset's steps at full width, to try an idea quickly: docs/running.md.
SHORT = dict(
    num_scheduled_iterations=136, num_extension_iterations=1,
    momentum_warmup=30, momentum_cooldown=5, val_every=0,
)
# fmt: on
PRESETS = {"record": {}, "short": SHORT, "demo": DEMO}

# -----------------------------------------------------------------------------
# Table 1: parameters. A row is an update rule (Adam, NorMuon) with its settings


class UpdateArgs(NamedTuple):
    """What a step passes to every update. A parameter's rate is its row's lr · lr_scale · lr_factor."""

    lr_factor: float  # the schedule's
    momentum: float  # NorMuon's
    grad_scale: float  # 1 / micro-batches; tokens stay summed, as both rules ignore the scale


@dataclass(frozen=True)
class ParamConfig:
    """How one parameter is reduced and updated. A rule is a subclass: settings, state and update."""

    comms: str  # "sharded": reduce-scatter, update own shard, all-gather; "replicated": all-reduce
    _: KW_ONLY
    every: int = 1  # steps between updates; gradients of the steps in between are summed
    lr: float  # the rate, which option and schedule multiply
    lr_scale: float = 1.0  # the option's
    weight_decay: float = 0.0
    wd_mul: float = 1.0
    tied_to: str = ""  # weight tying until the split: the transpose of that parameter
    grad_dtype: torch.dtype | None = None  # in which gradients accumulate; None: the parameter's
    may_pad: bool = False  # zero padding, if the rows do not divide over the ranks
    pad_front: bool = False  # the padding comes first, not last

    def is_due(self, step: int) -> bool:
        """Whether the parameter is updated at the end of this step."""
        return (step + 1) % self.every == 0

    def as_rows(self, x: Tensor) -> Tensor:
        """x, shaped like the parameter, as a stack of the rows that the ranks share."""
        return x

    def initial_state(self, rows: Tensor) -> dict[str, Tensor | int]:
        """State of one rank's rows: tensors with as many rows, and numbers equal on all ranks."""
        return {}

    def constants(self, rows: Tensor, first: int) -> dict[str, Tensor]:
        """Constant tensors for update; first: index of the rank's first row."""
        return {}

    def update(self, rows: Tensor, grad: Tensor, state: dict[str, Any], args: UpdateArgs) -> None:
        """One step on a rank's rows, in place; grad · args.grad_scale is the step's gradient."""
        raise NotImplementedError


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def zeros_for(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros for optimizer state: fp32, or fp64 for fp64 rows."""
    return torch.zeros(shape, device=rows.device, dtype=at_least_fp32(rows.dtype))


def scalar(x: float | Tensor) -> Tensor:
    """A 0-dim CPU tensor, for the updates: changing it recompiles none, and it never widens a tensor.
    A tensor stays as it is."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


@dataclass(frozen=True)
class Adam(ParamConfig):
    """For embeddings, the LM head, gates and scalars."""

    lr: float | tuple[float, ...]  # a tuple: by column, its last entry for all columns that follow
    weight_decay: float = 0.005
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-10

    def initial_state(self, rows: Tensor) -> dict[str, Tensor | int]:
        moments = {name: zeros_for(rows, rows.shape) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": 0, **moments}

    def constants(self, rows: Tensor, first: int) -> dict[str, Tensor]:
        """column_lr (cols,), if lr goes by column."""
        if not isinstance(self.lr, tuple):
            return {}
        rates = self.lr + self.lr[-1:] * (rows.size(-1) - len(self.lr))
        dtype = at_least_fp32(rows.dtype)
        return {"column_lr": torch.tensor(rates, dtype=dtype, device=rows.device)}

    def update(
        self, rows: Tensor, grad: Tensor, state: dict, args: UpdateArgs, column_lr: Any = None
    ) -> None:
        state["step"] += 1
        t = state["step"]
        beta1, beta2 = self.betas
        lr = (self.lr if column_lr is None else column_lr) * self.lr_scale * args.lr_factor
        step_size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        # The decay is quadratic in the rate, as in the public recipe.
        squared_lr_decay = lr * lr * self.weight_decay * self.wd_mul
        settings = dict(betas=self.betas, eps=self.eps, grad_scale=scalar(args.grad_scale))
        settings |= dict(step_size=scalar(step_size), squared_lr_decay=scalar(squared_lr_decay))
        for tensors in cache_sized(rows, grad, state["exp_avg"], state["exp_avg_sq"]):
            adam_update(*tensors, **settings)


@dataclass(frozen=True)
class NorMuon(ParamConfig):
    """For hidden matrices, stacked in a bank (…, rows, cols). Ranks share whole matrices, because
    orthogonalization needs them whole. Not for embeddings, the LM head or vectors."""

    comms: str = "sharded"
    weight_decay: float = 1.2
    beta2: float = 0.90
    lr_mul: tuple[float, ...] = (1.0,)  # of single matrices: repeats over the bank
    # This many heads' rows of a matrix are orthogonalized together, 0: all. Repeats like lr_mul.
    heads_per_group: tuple[int, ...] = (0,)
    head_dim: int = 0  # rows of a head: param_table fills it in
    matrices_per_slice: int = 1  # stacked vertically in each (rows, cols) slice of the bank
    may_pad: bool = True

    def groups(self, matrix: int, height: int) -> int:
        """Groups of rows in the matrix of that index in the bank."""
        rows = self.heads_per_group[matrix % len(self.heads_per_group)] * self.head_dim
        return height // rows if rows else 1

    def as_rows(self, x: Tensor) -> Tensor:
        return x.view(-1, x.size(-2) // self.matrices_per_slice, x.size(-1))

    def initial_state(self, rows: Tensor) -> dict[str, Tensor | int]:
        n, height, width = rows.shape
        per_row_or_column = (n, height, 1) if height >= width else (n, 1, width)
        state = {
            "momentum_buffer": zeros_for(rows, rows.shape),
            "second_moment": zeros_for(rows, per_row_or_column),
        }
        groups = max(self.groups(i, height) for i in range(len(self.heads_per_group)))
        if groups > 1:  # each matrix has a row in both second moments and uses one of them
            state["group_second_moment"] = zeros_for(rows, (n, groups, width))
        if rows.dtype == torch.bfloat16:  # the lower 16 bits of fp32 weights
            state["mantissa"] = torch.zeros(rows.shape, device=rows.device, dtype=torch.uint16)
        return state

    def constants(self, rows: Tensor, first: int) -> dict[str, Tensor]:
        """matrix_lr_mul (n, 1, 1): each matrix's lr_mul times √max(1, height/width). If some of them
        have groups: `grouped`, their indices, and `whole`, those of the others."""
        n, height, width = rows.shape
        shape_mul = math.sqrt(max(1, height / width))
        muls = [self.lr_mul[i % len(self.lr_mul)] * shape_mul for i in range(first, first + n)]
        dtype = at_least_fp32(rows.dtype)
        muls = torch.tensor(muls, dtype=dtype, device=rows.device).view(n, 1, 1)
        grouped = [i for i in range(n) if self.groups(first + i, height) > 1]
        if not grouped:
            return {"matrix_lr_mul": muls}
        kinds = {"grouped": grouped, "whole": sorted(set(range(n)) - set(grouped))}
        indices = {kind: torch.tensor(i, device=rows.device) for kind, i in kinds.items()}
        return {"matrix_lr_mul": muls, **indices}

    def update(
        self, rows: Tensor, grad: Tensor, state: dict, args: UpdateArgs, **constants: Tensor
    ) -> None:
        banks = (rows, state.get("mantissa"), grad, state["momentum_buffer"])
        banks += (state["second_moment"], constants["matrix_lr_mul"])
        lr = self.lr * self.lr_scale * args.lr_factor
        settings = dict(lr=scalar(lr), beta2=self.beta2, momentum=scalar(args.momentum))
        settings |= dict(grad_scale=scalar(args.grad_scale))
        settings |= dict(weight_decay=scalar(self.weight_decay * self.wd_mul))
        if "grouped" in constants:
            kinds = {kind: constants[kind] for kind in ("whole", "grouped")}
            group_moment = state["group_second_moment"]
            return normuon_update(*banks, **settings, **kinds, group_second_moment=group_moment)
        for matrices in cache_sized(*banks):
            normuon_update(*matrices, **settings)


# every=2: Adam parameters are updated at odd steps, on the summed gradients of two steps.
# fmt: off
PARAM_TABLE: dict[str, ParamConfig] = {
    # Banks. attn is padded in front, mlp at the back: no rank holds padding of both.
    # q, k, v, o; q and k by pairs of neighbouring heads
    "attn":           NorMuon(lr=0.023, heads_per_group=(2, 2, 0, 0), matrices_per_slice=4, pad_front=True),
    "mlp":            NorMuon(lr=0.023, lr_mul=(1.0, 2.0)),  # W_fc, W_proj
    # Scalars, embeddings, gates.
    "scalars":        Adam("replicated", every=2, betas=(0.90, 0.99), lr=0.04,    wd_mul=0.0),
    "value_embeds":   Adam("sharded",    every=2, betas=(0.75, 0.95), lr=0.6,     wd_mul=5.0),
    "bigram_embed":   Adam("sharded",    every=2, betas=(0.75, 0.95), lr=0.6,     wd_mul=5.0),
    "smear_gate":     Adam("replicated", every=2, betas=(0.90, 0.99), lr=0.00008, wd_mul=0.0),
    "skip_gate":      Adam("replicated", every=2, betas=(0.90, 0.99), lr=0.0004,  wd_mul=0.0),
    "attn_gate_bank": Adam("replicated", every=2, betas=(0.90, 0.99), lr=0.008,   wd_mul=1.0),
    "ve_gate_bank":   Adam("replicated", every=2, betas=(0.90, 0.99), lr=0.008,   wd_mul=1.0),
    "layer_lambdas":  Adam("replicated", every=2, betas=(0.90, 0.95), lr=(0.04, 0.04, 0.008), wd_mul=0.0),
    "mudd_W1":        Adam("replicated", every=2, betas=(0.90, 0.99), lr=0.002,   wd_mul=1.0),
    "mudd_W2":        Adam("replicated", every=2, betas=(0.90, 0.99), lr=0.002,   wd_mul=1.0),
    "mudd_b":         Adam("replicated", every=2, betas=(0.90, 0.99), lr=0.002,   wd_mul=1.0),
    # LM head and embedding, which are tied for two thirds of the run.
    "lm_head":        Adam("sharded",    every=2, betas=(0.50, 0.95), lr=0.008,   wd_mul=150.0),
    "embed":          Adam("sharded",    every=2, betas=(0.50, 0.95), lr=0.008,   wd_mul=150.0,
                           tied_to="lm_head"),
}

# Gates and scalars, which small_lr_scale scales.
SMALL = ("scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "layer_lambdas")

# The order in which reductions are launched. Without Adam, attn's short one goes first, and its
# update hides most of mlp's; on steps with Adam the interconnect never idles: docs/without_a_gpu.md.
SCATTER_ORDER = (
    "attn", "mlp", "scalars", "value_embeds", "bigram_embed", "smear_gate", "skip_gate",
    "attn_gate_bank", "ve_gate_bank", "layer_lambdas", "mudd_W1", "mudd_W2", "mudd_b", "lm_head",
    "embed",
)
# The order of the updates. Small ones first, while big reductions travel. The slow banks come last,
# while embeddings are gathered. lm_head before embed, which copies it while they are tied.
WORK_ORDER = (
    "scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "layer_lambdas",
    "mudd_W1", "mudd_W2", "mudd_b", "value_embeds", "bigram_embed", "lm_head", "embed", "attn", "mlp",
)
# fmt: on

# -----------------------------------------------------------------------------
# Table 2: layers


@dataclass(frozen=True)
class Layer:
    """What a layer has besides its MLP, which all layers have."""

    index: int  # 0-based, as in messages
    window: str = ""  # its attention's: "short" or "long" (sizes: STAGES); empty: no attention
    paired: bool = False  # a token becomes two positions, one for each half of the heads
    key_offset: bool = False  # half of the key dims look one position back
    value_gate: bool = False  # each token's value embedding is added to the values, by head gates
    same_input: bool = False  # its attention reuses the attention input of the layer before
    keep: str = ""  # name under which its output is kept
    add: str = ""  # the kept output that is added, gated, to its input
    mudd: bool = False  # MUDD computes its lambdas and value gates, per token

    @property
    def value_embed(self) -> bool:
        return self.value_gate or self.mudd


# Layers 8 to 10 attend over layer 7's output: what late MLPs add serves the prediction alone.
LAYERS = (
    Layer(0, "short", paired=True),
    Layer(1, "short", value_gate=True),
    Layer(2, "short", paired=True, value_gate=True),
    Layer(3, "long", key_offset=True, keep="c3"),
    Layer(4, "short"),
    Layer(5, "short", paired=True),
    Layer(6, add="c3"),
    Layer(7, "short", keep="c7"),
    Layer(8, "short", value_gate=True),
    Layer(9, "short", paired=True, value_gate=True, same_input=True, keep="c9"),
    Layer(10, "long", key_offset=True, same_input=True, mudd=True),
)
ATTENTION_LAYERS = sum(bool(layer.window) for layer in LAYERS)  # 10: 40 matrices
VALUE_LAYERS = sum(layer.value_embed for layer in LAYERS)
VALUE_GATES = sum(layer.value_gate for layer in LAYERS)
MLP_BANK_LAYERS = -(-len(LAYERS) // 4) * 4  # 12, one unused: 24 matrices divide over 8 ranks
SIGN_ROWS = 8192  # rows of random signs, by which bigrams are multiplied
GATE_DIM = 12  # inputs of a gate: first dims of x; of a value gate half x, half value embedding

# -----------------------------------------------------------------------------
# Table 3: scalars, by name, with their initial values

# Columns of the parameter `layer_lambdas`, which has a row for each layer. A column for each head
# follows: XSA's α, which starts at 0.
LAMBDAS = {
    "resid_attn": math.sqrt(1.1),  # scale of the stream where attention's output is added
    "resid_mlp": math.sqrt(1.1),  # the same where the MLP's is added
    "post_attn": 1.0,  # scale of attention's output
    "post_mlp": 1.0,  # scale of the MLP's output
    "x0": 0.0,  # how much of the embedding is added once more
    "bigram": 0.05,  # the same for the bigram; layer 0's goes into its input
}
# Entries of the parameter `scalars`.
SCALARS = {
    "sa_lambda": [0.5, 1.0] * len(LAYERS),  # scale of W_qkv, scale of W_o
    "smear_lambda": [0.0],
    "skip_lambda": [-1.5],
}
# MUDD: two small networks give earlier activations a weight per token. Each output has its initial
# value, MUDD_SCALE times its bias, and whether the bias is trained. Large biases are not: in bf16, which
# the public logs have, an Adam step is too small to change them.
# fmt: off
MUDD = (
    # From the stream before layer 10, for that layer.
    {
        # How much of c0, c7 and the stream its attention's values get, and how much the stream gets.
        "value_c0": (0.0, True), "value_c7": (0.0, True), "value_x": (0.0, True),
        "add_c0": (0.0, True), "add_c7": (0.0, True), "add_x": (0.0, True),
        # Scale of the value embedding for the first half of the heads, and for the second.
        "gate_low": (2.0, False), "gate_high": (2.0, False),
        # As in LAMBDAS.
        "resid_attn": (math.sqrt(1.1), False), "post_attn": (1.0, False),
        "x0": (0.0, True), "bigram": (0.05, True),
        "resid_mlp": (math.sqrt(1.1), False), "post_mlp": (1.0, False),
    },
    # From the stream after the last layer: how much of these it gets; value_embed is the first one.
    {
        "c0": (0.0, True), "c7": (-0.5, False), "c9": (0.0, True),
        "value_embed": (0.0, True), "c3": (0.0, True),
    },
)
# fmt: on
MUDD_SOURCES = ("c0", "c7")  # what MUDD's layer may add to its values and its stream
MUDD_HIDDEN = 64  # width of the networks' hidden layer
MUDD_SCALE = 0.1  # multiplies their outputs

# -----------------------------------------------------------------------------
# Table 4: stages


class Stage(NamedTuple):
    index: int  # 1-based, as in messages
    until: float  # ends at this fraction of the scheduled steps, rounded
    batch: int  # batch units in a step: tokens / batch_unit
    docs: int  # documents are cut at this many blocks of block_size tokens
    short: int  # short window, in blocks of positions: a paired layer has two positions per token
    long: int  # long window, in blocks
    lr: float  # multiplies every learning rate, before the cooldown
    mtp_first: tuple[float, ...]  # multi-token prediction weights at the stage's first step
    mtp_last: tuple[float, ...]  # weights reached, linearly, at the next stage's first step
    prefix_first: float  # weight of the next token's prefix, at the first step; bytes have none
    prefix_last: float  # weight reached, linearly, at the next stage's first step


# The rate grows with the batch: 1.52 is (16/8)^0.6, and 1.73 is (24/8)^0.5 (public record 61).
# fmt: off
STAGES = (
    Stage(1, until=1/3, batch=8,  docs=7,  short=1, long=3,  lr=1.00,
          mtp_first=(1, 0.5, 0.25), mtp_last=(1, 0.5, 0), prefix_first=0.25, prefix_last=0.25),
    Stage(2, until=2/3, batch=16, docs=16, short=3, long=7,  lr=1.52,
          mtp_first=(1, 0.5), mtp_last=(1, 0), prefix_first=0.25, prefix_last=0),
    Stage(3, until=1.0, batch=24, docs=16, short=5, long=11, lr=1.73,
          mtp_first=(1,), mtp_last=(1,), prefix_first=0, prefix_last=0),
)
# fmt: on
# After the stages, at LR_FLOOR. The last validation has a wider window, with YaRN as it was.
EXTENSION = STAGES[-1]._replace(index=len(STAGES) + 1, until=math.inf, short=6, long=13)
FINAL_VALIDATION = EXTENSION._replace(index=len(STAGES) + 2, long=20)
SPLIT_EMBED_AT = 2 / 3  # weight tying ends at this fraction of the scheduled steps
LR_DECAY_FROM = 0.40  # the cooldown begins at this fraction of them
LR_FLOOR = 0.15  # learning-rate multiplier at its end, and in the extension
MOMENTUM_LOW = 0.85  # NorMuon's momentum at the first step and at the last
MOMENTUM_HIGH = 0.95  # in between

# -----------------------------------------------------------------------------
# Model: rotary positions and attention


class Yarn(nn.Module):
    """Rotary positions over the first half of a head. YaRN (Peng et al., arXiv 2309.00071) stretches
    them, and the attention scale, when the long window grows. Paired heads use the whole table,
    positions 0 .. 2·max_tokens, other heads its first half."""

    def __init__(self, head_dim: int, max_tokens: int, dtype: torch.dtype, scale: float = 0.1):
        super().__init__()
        frequencies = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4, dtype=torch.float32)
        self.frequencies = F.pad(frequencies, (0, head_dim // 4))  # (D/2,) fp32, radians a position
        self.scale = scale  # multiplies the attention logits; in a graph scale_input
        table = torch.empty(2 * max_tokens, head_dim // 2, 2, dtype=dtype)
        self.register_buffer("table", table, persistent=False)
        self.fill_table()

    def fill_table(self) -> None:
        """table[t, j] = (cos, −sin) of position t times frequency j: built in fp32, then rounded."""
        positions = torch.arange(len(self.table), dtype=torch.float32, device=self.table.device)
        self.frequencies = self.frequencies.to(self.table.device)
        angle = positions[:, None] * self.frequencies  # radians
        self.table.copy_(torch.stack((angle.cos(), -angle.sin()), -1))
        self.scale_input = graph_input(self.scale, self.table.device)

    def extend(self, old_window: int, new_window: int) -> None:
        """The long window goes from old to new, in tokens: slow frequencies stretch, fast ones stay."""
        # Frequencies that turn 32 times or more in the old window stay, those that turn once or less
        # stretch by the whole ratio: YaRN's β and α.
        ratio = old_window / new_window
        rotations = old_window * self.frequencies / (2 * math.pi)
        stay = ((rotations - 1) / (32 - 1)).clamp(0, 1)
        self.frequencies = self.frequencies * (ratio + stay * (1 - ratio))
        self.scale = self.scale * (0.2 * math.log(new_window / old_window) + 1)
        self.fill_table()

    def _apply(self, function: Callable, recurse: bool = True) -> "Yarn":
        """A cast or moved table is rebuilt: widening a rounded one would keep its rounding error."""
        super()._apply(function, recurse)
        self.fill_table()
        return self

    def state(self) -> dict[str, Any]:
        return {"frequencies": self.frequencies.to("cpu", copy=True), "scale": self.scale}

    def load_state(self, saved: dict[str, Any]) -> None:
        self.frequencies = saved["frequencies"].clone()
        self.scale = saved["scale"]
        self.fill_table()


# -----------------------------------------------------------------------------
# Model: banks and the residual stream


class ForwardSchedule(NamedTuple):
    """What a forward pass takes from the schedule."""

    # Weight of the k-th next token in the loss: (3,), (2,) or (1,) fp32, on the model's device.
    mtp_weights: Tensor
    # In positions; a paired layer has two per token, so its window covers half as many tokens.
    # With FlashAttention as inputs of a graph, which serves all windows.
    short_window: int | Tensor
    long_window: int | Tensor
    max_doc_len: int = 0  # tokens of the longest document in the micro-batch; 0: unknown
    prefix_weight: Tensor | None = None  # the next token's prefix, (1,); None: no such target


class LayerViews(NamedTuple):
    """One layer's row of LAYERS, and its part of each parameter; None where it has none."""

    layer: Layer
    lambdas: dict[str, Tensor]  # LAMBDAS by name, 0-dim
    W_qkv: Tensor | None  # (3·dim, dim)
    W_o: Tensor | None  # (dim, dim)
    qkv_scale: Tensor  # multiplies W_qkv, 0-dim
    o_scale: Tensor  # multiplies W_o, 0-dim
    head_gate: Tensor | None  # (H, GATE_DIM)
    ve_gate: Tensor | None  # (H, GATE_DIM)
    xsa: Tensor  # (11, H), all layers': attention takes the layer's row
    W_fc: Tensor  # (4·dim, dim)
    W_proj: Tensor  # (4·dim, dim)
    W8: tuple[Tensor, Tensor] | None  # W_fc in FP8, and its scale
    band: Band | None  # the keys that each query sees
    value_embed: Tensor | None  # (T, dim), the tokens' rows


def attention(
    x: Tensor,  # (T, dim), normed
    L: LayerViews,
    head_scale: Tensor,  # multiplies the output: 0-dim, or (T, 1)
    value: Tensor | None,  # (T, H, D), added to the values
    yarn: Yarn,
) -> Tensor:
    """Attention of one layer, (T, dim). Each head's output is scaled by its sigmoid gate.

    XSA (arXiv 2603.09078), except in paired layers: the output loses xsa times its projection on the
    token's own value."""
    W_qkv = L.qkv_scale * L.W_qkv  # scaling the weights costs less than scaling activations
    W_o = L.o_scale * L.W_o
    T, dim = x.shape
    H = len(L.head_gate)
    D = dim // H
    positions = 2 if L.layer.paired else 1  # a token's
    qkv = linear(x, W_qkv).view(T, 3 * H, D)  # q heads, k heads, v heads
    q, k, v = norm_and_rotate_qk(qkv, yarn.table, L.layer.paired, L.layer.key_offset)  # (T, H, D)
    if value is not None:
        v = v + value
    # Paired: row 2t has heads 0 .. H/2−1 of token t, row 2t+1 the other half.
    q, k, v = (z.reshape(T * positions, H // positions, D) for z in (q, k, v))
    y = attend(q, k, v, L.band, yarn.scale_input).reshape(T, H, D)
    if not L.layer.paired:
        wide = at_least_fp32(v.dtype)
        length = (v * v).sum(-1, keepdim=True, dtype=wide).clamp_min(1e-8)
        share = L.xsa[L.layer.index][:, None] * (y * v).sum(-1, keepdim=True, dtype=wide) / length
        y = y - share.to(v.dtype) * v
    gate = head_scale * torch.sigmoid(gate_logits(x, L.head_gate))
    y = y * gate.unsqueeze(-1)
    return linear(y.reshape(T, dim), W_o)


class GPT(nn.Module):
    """The model that LAYERS describes. All attention matrices are one parameter, all MLP matrices
    another: the banks. A parameter's name is its row in PARAM_TABLE. The forward pass computes
    in the parameters' dtype: bf16, or what .float() or .double() make of it."""

    def __init__(self, h: Hyperparameters, prefixes: Any = None, fp8: bool = True):
        """prefixes: each token's prefix, (vocab_size,) int64, -1 where it has none; None: no prefixes.
        fp8: whether the device takes the FP8 matmuls that the settings ask for, only in training.
        Raises ValueError for sizes that do not fit LAYERS."""
        super().__init__()
        checks.check_model_sizes(h.num_heads, h.head_dim, h.model_dim)
        self.num_heads = h.num_heads
        self.model_dim = h.model_dim
        self.fp8_head = h.fp8_head and fp8
        self.fp8_mlp = h.fp8_mlp and fp8
        vocab = -(-h.vocab_size // 128) * 128
        dim = h.model_dim

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype))

        # Banks: of each layer q, k, v rows, then o; of each layer W_fc, W_proj.
        self.attn = parameter(ATTENTION_LAYERS, 4 * dim, dim)  # (10, 4·dim, dim)
        self.mlp = parameter(MLP_BANK_LAYERS, 2, 4 * dim, dim)  # (12, 2, 4·dim, dim)
        self.scalars = parameter(sum(map(len, SCALARS.values())), dtype=torch.float32)  # (24,)
        # Value embeddings of a token lie side by side; the first bigram has the last row.
        self.value_embeds = parameter(vocab, VALUE_LAYERS * dim)  # (vocab, 5·dim)
        self.bigram_embed = parameter(h.bigram_rows, dim // 4)  # (rows, dim / 4)
        self.smear_gate = parameter(1, GATE_DIM)  # (1, 12)
        self.skip_gate = parameter(1, GATE_DIM)  # (1, 12)
        self.attn_gate_bank = parameter(ATTENTION_LAYERS, h.num_heads, GATE_DIM)  # (10, H, 12)
        self.ve_gate_bank = parameter(VALUE_GATES, h.num_heads, GATE_DIM)  # (4, H, 12)
        columns = len(LAMBDAS) + h.num_heads
        self.layer_lambdas = parameter(len(LAYERS), columns, dtype=torch.float32)  # (11, 6 + H)
        # MUDD's two networks; the second uses 5 of its 14 outputs.
        outputs = len(MUDD[0])
        self.mudd_W1 = parameter(2, MUDD_HIDDEN, dim)  # (2, 64, dim)
        self.mudd_W2 = parameter(2, outputs, MUDD_HIDDEN)  # (2, 14, 64)
        self.mudd_b = parameter(2, outputs)  # (2, 14)
        self.lm_head = parameter(dim, vocab)  # (dim, vocab), stored transposed like its gradient
        self.embed = parameter(vocab, dim)  # (vocab, dim)
        signs = torch.empty(SIGN_ROWS, self.bigram_embed.size(1), dtype=torch.bfloat16)
        self.register_buffer("bigram_signs", signs)
        table = torch.full((vocab,), -1)
        if prefixes is not None:
            table[: len(prefixes)] = torch.as_tensor(prefixes)
        self.register_buffer("prefixes", table, persistent=False)
        self.initialize()
        self.yarn = Yarn(h.head_dim, h.max_tokens, self.embed.dtype, h.attention_scale)

    @torch.no_grad()
    def initialize(self) -> None:
        """Initial weights. W_proj, bigrams and gates stay zero."""
        bound = math.sqrt(3) / 2 * self.model_dim**-0.5  # uniform with std 0.5 / √dim
        self.attn.uniform_(-bound, bound)
        self.mlp[:, 0].uniform_(-bound, bound)
        self.value_embeds.normal_(std=0.01)
        self.lm_head.normal_(std=0.005)
        self.embed.copy_(self.lm_head.T)
        self.layer_lambdas[:, : len(LAMBDAS)] = torch.tensor(list(LAMBDAS.values()))
        self.bigram_signs.copy_(2 * torch.randint(0, 2, self.bigram_signs.shape) - 1)
        self.mudd_W1.uniform_(-(self.model_dim**-0.5), self.model_dim**-0.5)
        for b, outputs in zip(self.mudd_b, MUDD):
            starts = torch.tensor([start for start, _ in outputs.values()])
            b[: len(starts)] = starts / MUDD_SCALE
        self.scalars.copy_(torch.tensor(sum(SCALARS.values(), [])))

    def forward(
        self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor, schedule: ForwardSchedule
    ) -> Tensor:
        """In training the loss of several targets, summed over tokens; else the mean next-token loss;
        both in fp32 or better. inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32:
        document starts, padded with T."""
        # Look-ups stay outside the compiled graph: their backward pass adds to the tables' gradients
        # in place, which a graph would not do.
        return self.loss(self.look_up(inputs), inputs, targets, cu_seqlens, schedule)

    def look_up(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tables' rows: embeddings (T, dim), value embeddings (T, VALUE_LAYERS·dim), bigrams
        (T, dim / 4)."""
        x, values = lookup(self.embed, self.value_embeds, tokens=tokens)
        hashed = hash_bigrams(tokens, len(self.bigram_embed))
        (bigrams,) = lookup(self.bigram_embed, tokens=hashed)
        return x, values, bigrams

    def loss(
        self, rows: tuple[Tensor, ...], inputs: Tensor, targets: Tensor, cu_seqlens: Tensor,
        schedule: ForwardSchedule,
    ) -> Tensor:  # fmt: skip
        """What forward gives, from the tables' rows at the inputs: the part that is compiled."""
        x = self.trunk(rows, inputs, cu_seqlens, schedule)
        weights = schedule.mtp_weights
        if not self.training:
            next_token_only = torch.ones(1, device=x.device, dtype=weights.dtype)
            loss = head_loss(x, self.lm_head, targets[:, None], next_token_only, fp8=False)
            return loss / len(targets)
        columns = mtp_targets(targets, len(weights))
        if schedule.prefix_weight is not None:
            weights = torch.cat((weights, schedule.prefix_weight))
            columns = torch.cat((columns, self.prefixes[targets][:, None]), 1)
        return head_loss(x, self.lm_head, columns, weights, self.fp8_head)

    def trunk(
        self, rows: tuple[Tensor, ...], inputs: Tensor, cu_seqlens: Tensor,
        schedule: ForwardSchedule,
    ) -> Tensor:  # fmt: skip
        """What the LM head reads, (T, dim), from the tables' rows at the inputs."""
        x, values, bigram = rows
        scalars, layers = self.layer_views(values, cu_seqlens, schedule)
        bigram = self.signed_bigrams(bigram, inputs)
        # Each token sees a bit of the one before it: smear.
        gate = torch.sigmoid(gate_logits(x[1:], self.smear_gate))
        smear = scalars["smear_lambda"][0] * gate
        x = norm(torch.cat((x[:1], x[1:] + smear * x[:-1])))
        # The embedding that skip gate and layers get, with the first bigram term.
        first = layers[0].lambdas["bigram"] * bigram
        x = c0 = x + F.pad(first, (0, x.size(1) - first.size(1)))

        kept = {"c0": c0, "value_embed": next(L.value_embed for L in layers if L.layer.value_embed)}
        for L in layers:
            layer = L.layer
            lambdas = L.lambdas
            if layer.add:  # a gated skip connection
                gate = torch.sigmoid(gate_logits(c0, self.skip_gate))
                x = x + torch.sigmoid(scalars["skip_lambda"][0]) * 2 * gate * kept[layer.add]
            if layer.window:
                if not layer.same_input:  # else xn is the layer before's
                    xn = norm(x)  # (T, dim)
                value = None  # or (T, H, D)
                if layer.value_gate:
                    value = self.gated_value(xn, L.value_embed, L.ve_gate)
                if layer.mudd:
                    lambdas = self.token_weights(x, 0)  # each token's, in place of the layer's
                    value, x = self.mudd_inputs(lambdas, L.value_embed, x, kept)
                out = attention(xn, L, lambdas["post_attn"], value, self.yarn)
                terms = [(lambdas["resid_attn"], x), (lambdas["x0"], c0)]
                if layer.index > 0:  # the bigram once more, as the embedding
                    terms.append((lambdas["bigram"], bigram))
                x = residual_sum(out, *terms)
            out = scaled_mlp(norm(x), L.W_fc, L.W_proj, lambdas["post_mlp"], L.W8)
            x = residual_sum(out, (lambdas["resid_mlp"], x))
            if layer.keep:
                kept[layer.keep] = x
        for name, weight in self.token_weights(x, 1).items():
            x = x + weight * kept[name]
        return norm(x)

    def layer_views(
        self, values: Tensor, cu_seqlens: Tensor, schedule: ForwardSchedule
    ) -> tuple[dict[str, tuple[Tensor, ...]], list[LayerViews]]:
        """SCALARS by name, and each layer's part of the banks. values (T, VALUE_LAYERS·dim): the
        tokens' rows of value_embeds."""
        dim = self.model_dim
        parts = self.scalars.split([len(starts) for starts in SCALARS.values()])
        scalars = {name: part.unbind() for name, part in zip(SCALARS, parts)}
        by_column, alpha = self.layer_lambdas.split((len(LAMBDAS), self.num_heads), 1)
        flat = by_column.flatten().unbind()  # one list, so that gradients are joined once
        n = len(LAMBDAS)
        xsa = torch.tanh(alpha).to(self.attn.dtype)
        W_qkv_and_o = self.attn.view(-1, dim).split((3 * dim, dim) * ATTENTION_LAYERS)
        head_gate = self.attn_gate_bank.unbind()
        ve_gate = self.ve_gate_bank.unbind()
        W_fc_and_proj = self.mlp.view(-1, 4 * dim, dim).unbind()
        W8 = [None] * len(LAYERS)
        if self.fp8_mlp and self.training:
            W8 = zip(*quantize_by_largest(self.mlp.detach()[:, 0]))
        columns = LayerViews(
            layer=LAYERS,
            lambdas=[dict(zip(LAMBDAS, flat[i * n : (i + 1) * n])) for i in range(len(LAYERS))],
            W_qkv=by_layer("window", W_qkv_and_o[::2]),
            W_o=by_layer("window", W_qkv_and_o[1::2]),
            qkv_scale=scalars["sa_lambda"][::2],
            o_scale=scalars["sa_lambda"][1::2],
            head_gate=by_layer("window", head_gate),
            ve_gate=by_layer("value_gate", ve_gate),
            xsa=[xsa] * len(LAYERS),
            W_fc=W_fc_and_proj[::2],
            W_proj=W_fc_and_proj[1::2],
            W8=W8,
            band=self.bands(cu_seqlens, len(values), schedule),
            value_embed=by_layer("value_embed", values.split(dim, 1)),
        )
        return scalars, [LayerViews(*view) for view in zip(*columns)]  # without unused MLPs

    def signed_bigrams(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The rows of each token and the one before it, (T, dim / 4), times rows of random signs.
        Bigrams that share a row disagree in half of their signs: each is noise to the other."""
        return rows * F.embedding(sign_rows(tokens), self.bigram_signs)

    def gated_value(self, xn: Tensor, value: Tensor, ve_gate: Tensor) -> Tensor:
        """The value embedding (T, dim) as (T, H, D), each head scaled by 2 · sigmoid of its gate.
        A gate (H, GATE_DIM) reads the first dims of xn (T, dim) and of the value embedding."""
        n = GATE_DIM // 2
        gate_input = torch.cat((xn[:, :n], value[:, :n]), 1)
        gate = 2 * torch.sigmoid(gate_logits(gate_input, ve_gate))
        return gate.unsqueeze(-1) * value.view(len(value), self.num_heads, -1)

    def token_weights(self, x: Tensor, network: int) -> dict[str, Tensor]:
        """MUDD (Xiao et al., arXiv 2502.12170): a network's weights for each token, by name, (T, 1)
        each. x (T, dim): the stream, not normed."""
        W1, W2, b = self.mudd_W1[network], self.mudd_W2[network], self.mudd_b[network]
        out = linear(F.gelu(linear(x, W1)), W2).to(at_least_fp32(x.dtype))
        weights = {}
        for (name, (start, learns)), bias, column in zip(MUDD[network].items(), b, out.split(1, 1)):
            if not learns:
                bias = start / MUDD_SCALE
            weights[name] = (MUDD_SCALE * (column + bias)).to(x.dtype)
        return weights

    def mudd_inputs(
        self, weights: dict[str, Tensor], value: Tensor, x: Tensor, kept: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What MUDD's layer adds to its attention's values, (T, H, D), and its stream, (T, dim).
        weights: (T, 1) each; value, x, kept: (T, dim)."""
        low, high = value.chunk(2, 1)
        gated = torch.cat((weights["gate_low"] * low, weights["gate_high"] * high), 1)
        earlier = [weights[f"value_{name}"] * kept[name] for name in MUDD_SOURCES]
        value = gated + functools.reduce(torch.add, earlier) + weights["value_x"] * x
        x = (1 + weights["add_x"]) * x
        for name in MUDD_SOURCES:
            x = x + weights[f"add_{name}"] * kept[name]
        return value.view(len(x), self.num_heads, -1), x

    def bands(self, cu_seqlens: Tensor, T: int, schedule: ForwardSchedule) -> list[Band | None]:
        """The keys that each layer's attention sees. Paired layers have two positions per token."""
        max_len = min(schedule.max_doc_len or T, T)
        bands: dict[tuple[str, bool], Band | None] = {("", False): None}
        for layer in LAYERS:
            if (layer.window, layer.paired) not in bands:
                positions = 2 if layer.paired else 1  # a token's
                window = getattr(schedule, f"{layer.window}_window")
                starts = positions * cu_seqlens
                bias = None
                if not uses_flash(self.embed):
                    wide = at_least_fp32(self.embed.dtype)
                    bias = band_bias(starts, positions * T, window, wide)
                band = Band(starts, window, positions * max_len, bias)
                bands[layer.window, layer.paired] = band
        return [bands[layer.window, layer.paired] for layer in LAYERS]


def hash_bigrams(tokens: Tensor, rows: int) -> Tensor:
    """(T,) int32: a row for each token and the one before it, across documents too. The first
    position has the last row to itself."""
    hashed = ((36313 * tokens[1:]) ^ (27191 * tokens[:-1])) % (rows - 1)  # int32 wraps around
    return F.pad(hashed, (1, 0), value=rows - 1)


def sign_rows(tokens: Tensor) -> Tensor:
    """(T,) int32: the row of signs for each token and the one before it; row 0 for the first."""
    return F.pad((tokens[1:] ^ tokens[:-1]) % SIGN_ROWS, (1, 0))


def scaled_mlp(x: Tensor, W_fc: Tensor, W_proj: Tensor, scale: Tensor, W8: Any) -> Tensor:
    """The MLP's output times scale: 0-dim, or (T, 1). W8: None, or W_fc in FP8 and its scale."""
    if not scale.dim():  # scaling the weights costs less than scaling activations
        W_proj = scale * W_proj
    if W8 is None:
        out = relu_squared_mlp(x, W_fc, W_proj)
    else:
        out = relu_squared_mlp_fp8(x, W_fc, W_proj, *W8)
    return scale * out if scale.dim() else out


def by_layer(column: str, rows: Iterable[Any]) -> list[Any]:
    """For each layer the next of a bank's rows if the layer's `column` is set, else None."""
    rows = iter(rows)
    return [next(rows) if getattr(layer, column) else None for layer in LAYERS]


# -----------------------------------------------------------------------------
# LM head and loss

# Static scales of the FP8 matmuls: a tensor divided by its scale fills the format.
FP8_X_SCALE = 100 / 448  # e4m3
FP8_W_SCALE = 1.6 / 448  # e4m3
FP8_GRAD_SCALE = 0.75 / 448  # e5m2, of the gradient of a loss that is summed over tokens


def mtp_targets(targets: Tensor, K: int) -> Tensor:
    """Multi-token prediction (Gloeckle et al., arXiv 2404.19737): (T, K) targets from (T,). Row t
    holds targets t … t + K − 1, and -1 past the end."""
    return F.pad(targets, (0, K - 1), value=-1).unfold(0, K, 1)


def head_loss(x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, fp8: bool) -> Tensor:
    """Σ_t Σ_k weights[k] · CE(softcap(x[t] @ w), targets[t, k]), 0-dim, in fp32 or better.

    x (T, dim), w (dim, vocab), targets (T, K) int64, -1 for none, weights (K,). Softcap and FP8:
    triton_kernels.py.
    """
    if fp8:
        return fp8_head_loss(x, w, targets, weights, FP8_X_SCALE, FP8_W_SCALE, FP8_GRAD_SCALE)
    return softcapped_cross_entropy(x @ w, targets, weights)


# -----------------------------------------------------------------------------
# Update arithmetic

# Optimal quintics of Polar Express, five steps: Amsel et al., arXiv 2505.16932.
POLAR_EXPRESS_COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


@has_kernel
def polar_express(G: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The nearly orthogonal factor of each matrix of G: singular values above 0.2 % of the Frobenius
    norm end between 0.85 and 1.15.

    G (n, rows, cols), any float dtype; result (n, rows, cols) in dtype, in fp64 if G is. A run on a CPU
    without bf16 units has fp32. Tall matrices are multiplied on the right: their smaller Gram
    matrix is XᵀX, and nothing is transposed.
    """
    X = G.to(G.dtype if G.dtype == torch.float64 else dtype)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)  # 2 % of room for bf16 rounding
    tall = X.size(-2) > X.size(-1)
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS:
        A = XTX(X) if tall else XXT(X)
        X = aX_plus_BX(X, ba_plus_cAA(A, beta=b, alpha=c), a, right=tall)  # aX + (bA + cA²)X
    return X


polar_express.kernel(CPU_FP32)(functools.partial(polar_express.__wrapped__, dtype=torch.float32))


def normuon_scale(u: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """NorMuon's variance reduction (arXiv 2510.05491): rows at equal mean square, Frobenius norm kept.

    u (n, rows, cols) fp32 or fp64; second_moment (n, rows, 1), for wide matrices (n, 1, cols), is
    updated in place.
    """
    along = -1 if second_moment.size(-1) == 1 else -2
    mean_square = torch.linalg.vector_norm(u, dim=along, keepdim=True).square() / u.size(along)
    second_moment.lerp_(mean_square, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    norm = mean_square.sum((-2, -1), keepdim=True).sqrt()
    scaled_norm = (mean_square * scale.square()).sum((-2, -1), keepdim=True).sqrt()
    return u * (scale * (norm / scaled_norm.clamp_min(1e-10)))


def orthogonalize(update: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """The matrices of update (n, rows, cols) orthogonalized and scaled; shapes as in normuon_scale."""
    return normuon_scale(polar_express(update).to(update.dtype), second_moment, beta2)


def orthogonalize_kinds(
    update: Tensor, kinds: tuple[tuple[Tensor, Tensor], ...], beta2: float
) -> Tensor:
    """The same, where some matrices are taken whole and others by groups of their rows. kinds: the
    indices of each kind, and its second moments (n, rows, 1) or (n, groups, cols)."""
    _, rows, cols = update.shape
    result = torch.empty_like(update)
    for index, second_moment in kinds:
        if not len(index):
            continue
        moment = second_moment[index]  # a copy
        groups = moment.size(1) if moment.size(2) > 1 else 1
        parts = update[index].view(-1, rows // groups, cols)
        parts = orthogonalize(parts, moment.view(len(parts), -1, moment.size(2)), beta2)
        second_moment.index_copy_(0, index, moment)
        result.index_copy_(0, index, parts.view(-1, rows, cols))
    return result


@fused_on_gpu
def adam_update(
    p: Tensor,  # any shape and dtype
    grad: Tensor,  # the shape of p
    exp_avg: Tensor,  # the shape of p, fp32 or fp64
    exp_avg_sq: Tensor,  # as exp_avg
    *,
    betas: tuple[float, float],
    eps: float,
    step_size: Tensor,  # rate with bias correction: 0-dim on the CPU, or (cols,)
    squared_lr_decay: Tensor,  # as step_size
    grad_scale: Tensor,  # 0-dim on the CPU
) -> None:
    """One Adam step with cautious weight decay on p, in place: decay only where the update shrinks
    the weight too."""
    beta1, beta2 = betas
    grad = grad.to(exp_avg.dtype) * grad_scale
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    wide = p.to(exp_avg.dtype)
    update = exp_avg / (exp_avg_sq.sqrt() + eps) * step_size
    update = torch.where(update * wide > 0, update + squared_lr_decay * wide, update)
    p.copy_(wide - update)


@fused_on_gpu
def normuon_update(
    p: Tensor,  # (n, rows, cols)
    mantissa: Tensor | None,  # (n, rows, cols) uint16 for a bf16 p
    grad: Tensor,  # (n, rows, cols)
    momentum_buffer: Tensor,  # (n, rows, cols) fp32 or fp64
    second_moment: Tensor,  # (n, rows, 1), or (n, 1, cols) if wide
    matrix_lr_mul: Tensor,  # (n, 1, 1)
    *,
    lr: Tensor,  # 0-dim on the CPU
    weight_decay: Tensor,  # 0-dim on the CPU
    momentum: Tensor,  # 0-dim on the CPU
    beta2: float,
    grad_scale: Tensor,  # 0-dim on the CPU
    whole: Tensor | None = None,  # indices of the matrices to orthogonalize whole; None: all
    grouped: Tensor | None = None,  # indices of those to orthogonalize by groups of rows
    group_second_moment: Tensor | None = None,  # (n, groups, cols)
) -> None:
    """One NorMuon step with cautious weight decay on p (n, rows, cols), in place. A bf16 p is the
    upper half of fp32 weights, mantissa the lower: no fp32 copy, and no rounding."""
    grad = grad.to(momentum_buffer.dtype) * grad_scale
    momentum_buffer.add_((grad - momentum_buffer).mul_(1 - momentum))
    update = (momentum_buffer - grad).mul_(momentum).add_(grad)  # Nesterov momentum
    if grouped is None:
        update = orthogonalize(update, second_moment, beta2)
    else:
        kinds = ((whole, second_moment), (grouped, group_second_moment))
        update = orthogonalize_kinds(update, kinds, beta2)
    wide = p if mantissa is None else join_mantissa(p, mantissa)
    matrix_lr = lr * matrix_lr_mul
    change = (wide * (update * wide >= 0)).mul_(weight_decay * lr * matrix_lr)
    wide = wide - change.addcmul_(update, matrix_lr)
    if mantissa is None:
        p.copy_(wide)
    else:
        upper, lower = split_mantissa(wide)
        p.copy_(upper)
        mantissa.copy_(lower)


# -----------------------------------------------------------------------------
# Optimizer


class ShardedParameters:
    """Where the ranks' shards of parameters and pending gradients lie.

    The ranks share the rows of an embedding and the matrices of a bank. A shard is a view of the
    parameter and of its gradient: collectives work in place. A bank that does not divide becomes a
    view of a padded one; padding is zero, has no state and is never updated. Matrices on 16 ranks,
    · for padding:

        rank              0      1      2      3    …  11       12       13       14       15
        attn, 40 of 48  · · ·  · · ·  · · 0  1 2 3    25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        mlp,  24 of 32   0 1    2 3    4 5    6 7      22 23     · ·      · ·      · ·      · ·

    Pending gradients stay where autograd leaves them, in param.grad. Those of padded banks, and
    those with a wider grad_dtype, move to `wide_grads`: `accumulate` adds them there after each
    backward pass. Without padding and --grad_dtype, as on 1, 2, 4 or 8 ranks, nothing moves.
    """

    def __init__(self, params: dict[str, nn.Parameter], table: dict[str, ParamConfig]):
        """Uses the process group, if any. Raises ValueError if a parameter cannot be sharded."""
        self.params = params
        self.table = table
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        # By label: rows of the whole parameter. If they are padded, the parameter is a view of them.
        self.padded = {label: self._pad(label) for label in params}
        # Which rows this rank updates, without padding, and a view of them.
        self.own_rows = {label: self._find_own_rows(label) for label in params}
        self.shards = {label: self._own(label, padded) for label, padded in self.padded.items()}
        self.wide_grads = self._allocate_wide_grads()
        self.in_wide: set[str] = set()  # labels whose pending gradient is in wide_grads

    def num_rows(self, label: str) -> int:
        """Rows of a parameter, without padding."""
        return len(self.table[label].as_rows(self.params[label].data))

    def _pad(self, label: str) -> Tensor:
        """The parameter's rows. If they do not divide over the ranks, the parameter moves into
        padded ones. Raises ValueError for rows that may not be padded: of an embedding or LM head."""
        param = self.params[label]
        row = self.table[label]
        rows = row.as_rows(param.data)
        padding = -len(rows) % self.world_size if row.comms == "sharded" else 0
        if not padding:
            return rows
        if not row.may_pad:
            raise ValueError(
                f"{label} {tuple(param.shape)} cannot be sharded: its {len(rows)} rows do not divide "
                f"over {self.world_size} ranks; use another number of ranks or --comms=replicated"
            )
        padded = rows.new_zeros(len(rows) + padding, *rows.shape[1:])
        inner = self._without_padding(label, padded)
        inner.copy_(rows)
        param.data = inner.view_as(param)
        return padded

    def _without_padding(self, label: str, padded: Tensor) -> Tensor:
        n = self.num_rows(label)
        return padded[-n:] if self.table[label].pad_front else padded[:n]

    def _rank_slice(self, label: str, padded: Tensor) -> Tensor:
        """This rank's equal part, padding included, as a view; everything if replicated."""
        if self.table[label].comms == "replicated":
            return padded
        size = len(padded) // self.world_size
        return padded.narrow(0, self.rank * size, size)

    def _find_own_rows(self, label: str) -> slice:
        """The rows this rank updates: those of its part that are not padding."""
        n = self.num_rows(label)
        if self.table[label].comms == "replicated":
            return slice(0, n)
        size = len(self.padded[label]) // self.world_size
        padding_before = (len(self.padded[label]) - n) * self.table[label].pad_front
        first = self.rank * size - padding_before
        return slice(min(max(first, 0), n), min(max(first + size, 0), n))

    def _own(self, label: str, padded: Tensor) -> Tensor:
        return self._without_padding(label, padded)[self.own_rows[label]]

    def _allocate_wide_grads(self) -> dict[str, Tensor]:
        """Zeros, padded, for the gradients that cannot stay where autograd leaves them."""
        wide = {}
        for label, padded in self.padded.items():
            dtype = torch.promote_types(padded.dtype, self.table[label].grad_dtype or padded.dtype)
            if dtype != padded.dtype or len(padded) > self.num_rows(label):
                wide[label] = torch.zeros_like(padded, dtype=dtype)
        return wide

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add what autograd has left to wide_grads, where there are any. Call it after each backward."""
        for label, wide in self.wide_grads.items():
            grad = self.params[label].grad
            if grad is None:
                continue
            inner = self._without_padding(label, wide)
            add = inner.add_ if label in self.in_wide else inner.copy_
            add(self.table[label].as_rows(grad))
            self.in_wide.add(label)
            self.params[label].grad = None

    def _pending(self, label: str) -> Tensor | None:
        """Rows of the pending gradient, if any, with padding if the parameter has some."""
        if label in self.in_wide:
            return self.wide_grads[label]
        grad = self.params[label].grad
        return None if grad is None else self.table[label].as_rows(grad)

    def gradients(self) -> dict[str, Tensor]:
        """Pending gradients by label, shaped like their parameters, not copied."""
        self.accumulate()
        pending = {label: self._pending(label) for label in self.params}
        return {
            label: self._without_padding(label, rows).view_as(self.params[label])
            for label, rows in pending.items()
            if rows is not None
        }

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

    def _clear(self, labels: Iterable[str]) -> None:
        """The next backward pass starts these gradients from zero."""
        for label in labels:
            self.params[label].grad = None
        self.in_wide -= set(labels)


class NorMuonAndAdam(ShardedParameters):
    """NorMuon for banks of matrices, Adam for everything else, sharded over the ranks, without hooks.

    A step has three phases:
      1. launch every gradient reduction, asynchronously, in scatter_order; a tied parameter's
         gradient is added to the other's just before;
      2. in work_order: wait for the reduction, update own shard (all, if replicated), launch the gather;
      3. wait for the gathers, lm_head's first: while embed is tied, it becomes the transpose.

    While `tied`, a parameter with tied_to has no reduction: its gradient joins the other's, and its
    own state stays at zero. `split_tied` ends weight tying.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], param_table: dict[str, ParamConfig],
        scatter_order: Iterable[str], work_order: Iterable[str],
    ):  # fmt: skip
        """named_parameters: (label, parameter) pairs, on their device. Raises ValueError if table or
        orders do not name each parameter once, or if a parameter cannot be sharded."""
        params = dict(named_parameters)
        self.scatter_order = tuple(scatter_order)
        self.work_order = tuple(work_order)
        checks.check_optimizer(params, param_table, self.scatter_order, self.work_order)
        super().__init__(params, param_table)
        self.tied = True  # until split_tied
        self.grad_divisor = 1  # gradients are sums over this many micro-batches
        self.state: dict[str, dict[str, Any]] = {}
        self.constants: dict[str, dict[str, Tensor]] = {}
        for label, shard in self.shards.items():
            row = param_table[label]
            self.state[label] = row.initial_state(shard)
            checks.check_state(label, self.state[label], len(shard))
            self.constants[label] = row.constants(shard, self.own_rows[label].start)

    @torch.no_grad()
    def step(self, step: int, lr_factor: float = 1.0, momentum: float = 0.95) -> None:
        """Update every parameter that is due at this step, then clear its gradient. The gradients of
        the others stay: the next backward pass adds to them. lr_factor, momentum: see UpdateArgs.
        Raises RunError for a missing gradient."""
        self.accumulate()
        due = [label for label, row in self.table.items() if row.is_due(step)]
        missing = [label for label in due if self._pending(label) is None]
        if missing:
            raise RunError(
                f"no gradient for {', '.join(missing)} at step {step}: every parameter needs a "
                f"gradient; for an unused one add `0 * p.sum()` to the loss"
            )
        # While tied, a leader's follower takes no part of its own: {"lm_head": "embed"}.
        follower = {row.tied_to: label for label, row in self.table.items() if row.tied_to}
        follower = follower if self.tied else {}
        active = [label for label in due if label not in follower.values()]

        # 1. Launch the reductions.
        reductions = {}
        for label in self.scatter_order:
            if label not in active:
                continue
            if label in follower:  # added while the reductions before it travel
                follower_grad = self._pending(follower[label])
                transpose_add(follower_grad, self._pending(label), self.world_size == 1)
            reductions[label] = self._launch_reduction(label)

        # 2. Update as soon as the reduction is done, and launch the gather.
        args = UpdateArgs(lr_factor, momentum, 1 / self.grad_divisor)
        gathers = {}
        for label in self.work_order:
            if label not in active:
                continue
            grad, work = reductions[label]
            if work is not None:
                work.wait()
            self._update(label, grad, args)
            gathers[label] = self._launch_gather(label)

        # 3. Wait for the gathers, the leaders' first; a follower becomes the transpose.
        leaders = [label for label in gathers if label in follower]
        for label in dict.fromkeys([*leaders, *gathers]):
            if gathers[label] is not None:
                gathers[label].wait()
            if label in follower:
                copy = self.params[follower[label]].data
                transpose_copy(self.params[label].data, copy, self.world_size == 1)

        self._clear(due)

    def _launch_reduction(self, label: str) -> tuple[Tensor, dist.Work | None]:
        """The summed gradient of this rank's rows, in place, and what to wait for before reading it."""
        grad = self._pending(label)
        own = self._own(label, grad)
        if self.world_size == 1:
            return own, None
        if self.table[label].comms == "replicated":
            return own, dist.all_reduce(grad, async_op=True)
        return own, reduce_scatter(self._rank_slice(label, grad).view(-1), grad.view(-1))

    def _update(self, label: str, grad: Tensor, args: UpdateArgs) -> None:
        constants = self.constants[label]
        self.table[label].update(self.shards[label], grad, self.state[label], args, **constants)

    def _launch_gather(self, label: str) -> dist.Work | None:
        if self.world_size == 1 or self.table[label].comms == "replicated":
            return None
        padded = self.padded[label]
        return all_gather(padded.view(-1), self._rank_slice(label, padded).view(-1), async_op=True)

    @torch.no_grad()
    def split_tied(self) -> None:
        """End weight tying: a tied parameter takes over the other's optimizer state, transposed and
        sharded anew, and from then on is updated alone. Both rules must keep the same state."""
        for label, row in self.table.items():
            if not row.tied_to:
                continue
            own = self.state[label]
            for name, value in self.state[row.tied_to].items():
                if isinstance(value, Tensor):
                    whole = self._gather_rows(row.tied_to, value)
                    own[name].copy_(self._rank_slice(label, whole.mT))
                else:
                    own[name] = value
        self.tied = False

    def _gather_rows(self, label: str, shard: Tensor) -> Tensor:
        """A state tensor of the whole parameter from every rank's rows."""
        if shard.shape == self.params[label].shape:
            return shard
        whole = shard.new_empty(self.params[label].shape)
        all_gather(whole.view(-1), shard.view(-1))
        return whole


# -----------------------------------------------------------------------------
# Schedule


class StepSchedule(NamedTuple):
    """Everything the schedule says about one step."""

    step: int
    batch_tokens: int  # all micro-batches together
    max_doc_len: int  # documents are cut at this many tokens
    short_window: int  # positions before a query: tokens, but in paired layers half tokens
    long_window: int  # positions
    yarn_window: int  # tokens: the long window that the rotary table is made for
    lr_factor: float  # multiplies every learning rate
    momentum: float  # NorMuon's
    mtp_weights: tuple[float, ...]  # the next token's, then the one after it, …
    prefix_weight: float  # the next token's prefix
    is_validated: bool  # before the step
    splits: bool  # weight tying ends with the step's update


def make_plan(h: Hyperparameters) -> list[StepSchedule]:
    """The schedule of every step and, as the last entry, of the final validation. Built once a run."""
    return [step_schedule(step, h) for step in range(h.total_iterations + 1)]


def step_schedule(step: int, h: Hyperparameters) -> StepSchedule:
    """The schedule as a pure function. step = h.total_iterations is the final validation."""
    stage, progress = stage_at(step, h.num_scheduled_iterations)
    sizes = FINAL_VALIDATION if step >= h.total_iterations else stage

    def interpolate(first: float, last: float) -> float:
        return first + (last - first) * progress

    return StepSchedule(
        step=step,
        batch_tokens=sizes.batch * h.batch_unit,
        max_doc_len=sizes.docs * h.block_size,
        short_window=sizes.short * h.block_size,
        long_window=sizes.long * h.block_size,
        yarn_window=stage.long * h.block_size,
        lr_factor=lr_multiplier(step, stage, h.num_scheduled_iterations),
        momentum=muon_momentum(step, h),
        mtp_weights=tuple(map(interpolate, stage.mtp_first, stage.mtp_last)),
        prefix_weight=interpolate(stage.prefix_first, stage.prefix_last),
        is_validated=step == h.total_iterations or (h.val_every > 0 and step % h.val_every == 0),
        splits=step == split_step(h.num_scheduled_iterations),
    )


def stage_at(step: int, scheduled: int) -> tuple[Stage, float]:
    """The stage of a step, and the fraction of the stage that is done."""
    begin = 0  # the stage's first step
    for stage in STAGES:
        end = round(stage.until * scheduled)
        if step < end:
            return stage, (step - begin) / (end - begin)
        begin = end
    return EXTENSION, 0.0


def lr_multiplier(step: int, stage: Stage, scheduled: int) -> float:
    """The stage's multiplier; from LR_DECAY_FROM it falls, linearly, to LR_FLOOR at the end of the
    scheduled steps."""
    decay_from = int(LR_DECAY_FROM * scheduled)
    if step >= scheduled:  # the extension
        return LR_FLOOR
    if step <= decay_from:  # constant within a stage
        return stage.lr
    weight = (scheduled - step) / (scheduled - decay_from)
    return stage.lr * weight + LR_FLOOR * (1 - weight)


def muon_momentum(step: int, h: Hyperparameters) -> float:
    """Rises over the first steps and falls over the last; where both overlap, it rises."""
    cooldown_from = h.total_iterations - h.momentum_cooldown
    rise = MOMENTUM_HIGH - MOMENTUM_LOW
    if step < h.momentum_warmup:
        return MOMENTUM_LOW + rise * step / h.momentum_warmup
    if step <= cooldown_from:
        return MOMENTUM_HIGH
    return MOMENTUM_HIGH - rise * (step - cooldown_from) / h.momentum_cooldown


def split_step(scheduled: int) -> int:
    """The first step from SPLIT_EMBED_AT on in which tied parameters are updated: an odd one."""
    step = round(SPLIT_EMBED_AT * scheduled)
    while not all(row.is_due(step) for row in PARAM_TABLE.values() if row.tied_to):
        step += 1
    return step


def param_table(h: Hyperparameters) -> dict[str, ParamConfig]:
    """PARAM_TABLE as the options change it."""
    table = {}
    for label, row in PARAM_TABLE.items():
        if isinstance(row, Adam):
            small = h.small_lr_scale if label in SMALL else 1
            mudd = h.mudd_lr_scale if label.startswith("mudd") else 1
            row = replace(row, lr_scale=h.adam_lr_scale * small * mudd)
        if isinstance(row, NorMuon):
            row = replace(row, lr_scale=h.muon_lr_scale, head_dim=h.head_dim)
        if h.comms == "replicated":
            row = replace(row, comms="replicated")
        if h.grad_dtype != "param":
            row = replace(row, grad_dtype=getattr(torch, h.grad_dtype))
        table[label] = row
    return table


class TrainingManager:
    """Model and optimizer of a run, taken through the plan. What the plan has changed in the model
    (YaRN, the end of weight tying) is kept as extra state."""

    def __init__(self, model: GPT, h: Hyperparameters):
        self.model = model
        self.h = h
        self.max_val_doc_len = 0  # tokens of the longest validation document; 0: unknown
        self.optimizer = NorMuonAndAdam(
            model.named_parameters(), param_table(h), SCATTER_ORDER, WORK_ORDER
        )
        self.optimizer.grad_divisor = h.micro_batches
        # In tokens, by stage: the rotary table is made for one after the other.
        self.long_windows = [stage.long * h.block_size for stage in (*STAGES, EXTENSION)]
        self.yarn_window = self.long_windows[0]

    def advance_schedule(self, now: StepSchedule) -> ForwardSchedule:
        """Take the model to a step of the plan; what its forward passes need. YaRN passes through the
        windows of all stages on the way. Raises ValueError if YaRN is already beyond that step."""
        old = self.long_windows.index(self.yarn_window)
        new = self.long_windows.index(now.yarn_window)
        if new < old:
            raise ValueError(f"step {now.step} is before the stage that YaRN has reached")
        for narrow, wide in itertools.pairwise(self.long_windows[old : new + 1]):
            self.model.yarn.extend(narrow, wide)
        self.yarn_window = now.yarn_window
        windows = (now.short_window, now.long_window)
        if uses_flash(self.model.embed):
            windows = (graph_input(x, self.model.embed.device) for x in windows)
        values = (*now.mtp_weights, now.prefix_weight)
        weights = torch.empty(len(values), device=self.model.embed.device)
        for weight, value in zip(weights, values):  # launches: a copy would keep the host waiting
            weight.fill_(value)
        if not self.model.training:  # one graph for all stages
            return ForwardSchedule(weights[:1], *windows, self.max_val_doc_len)
        prefix_weight = weights[-1:] if now.prefix_weight else None
        return ForwardSchedule(weights[:-1], *windows, now.max_doc_len, prefix_weight)

    def step_optimizers(self, now: StepSchedule) -> None:
        """Update the model with the gradients of a step, at its learning rate and momentum. End
        weight tying if that is due."""
        self.optimizer.step(now.step, now.lr_factor, now.momentum)
        if now.splits:
            self.optimizer.split_tied()

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint needs besides parameters, optimizer state and pending gradients."""
        yarn = self.model.yarn.state()
        return {"tied": self.optimizer.tied, "yarn": yarn, "yarn_window": self.yarn_window}

    def load_extra_state(self, saved: dict[str, Any]) -> None:
        self.optimizer.tied = saved["tied"]
        self.model.yarn.load_state(saved["yarn"])
        self.yarn_window = saved["yarn_window"]


# -----------------------------------------------------------------------------
# Model and data of a run


def compile_model(model: GPT) -> None:
    """Compile all but the lookups, which add the tables' gradients up in place."""
    model.loss = torch.compile(model.loss, dynamic=False, fullgraph=True)


def build(
    h: Hyperparameters, ranks: Ranks, max_val_doc_len: int = 0, prefixes: Any = None
) -> TrainingManager:
    """The model with its initial weights, the same on every rank and device, in its manager."""
    seed_random(h.seed)  # for Python and NumPy, should an idea draw from them
    torch.manual_seed(h.seed)
    model = GPT(h, prefixes, has_fp8(ranks.device))
    if h.dtype == "float32":
        model.float()
    model.to(ranks.device)
    if h.compile:
        compile_model(model)
    manager = TrainingManager(model, h)
    manager.max_val_doc_len = max_val_doc_len
    return manager


def training_batches(
    h: Hyperparameters, plan: list[StepSchedule], ranks: Ranks, first_step: int = 0
) -> Iterator:
    """This rank's micro-batches (inputs, targets, cu_seqlens) from first_step on, on the CPU."""
    place = dict(rank=ranks.rank, world_size=ranks.world_size, first_step=first_step)
    return distributed_data_generator(train_pattern(h.data), plan[:-1], **place, **h.stream)


# -----------------------------------------------------------------------------
# Warm-up and validation


def forward_shapes(plan: list[StepSchedule], h: Hyperparameters) -> list[tuple]:
    """(step of the plan, whether it trains, tokens of a micro-batch) of each shape of a forward pass.
    With FlashAttention one graph serves all windows; on a CPU each has its own."""
    first = {}
    for now in plan:
        windows = (now.short_window, now.long_window)
        tokens = now.batch_tokens // h.micro_batches
        if now.step < h.total_iterations:
            first.setdefault((tokens, windows, len(now.mtp_weights)), (now, True, tokens))
        if now.is_validated:
            first.setdefault(windows, (now, False, h.val_batch_tokens // h.micro_batches))
    return list(first.values())


def warm_up(manager: TrainingManager, plan: list[StepSchedule], ranks: Ranks) -> None:
    """Run every shape and kind of update of these steps: nothing compiles while the clock runs."""
    model = manager.model
    h = manager.h
    shapes = forward_shapes(plan, h)
    if not h.compile and ranks.device.type == "cpu":  # the longest pass touches all memory
        shapes = [max(shapes, key=lambda shape: shape[1:])]
    for now, training, tokens in shapes:
        model.train(training)
        model.zero_grad()
        schedule = manager.advance_schedule(now)
        sizes = (tokens, h.vocab_size, now.max_doc_len, h.doc_slots)
        batch = to_device(synthetic_batch(*sizes), ranks.device)
        for _ in range(1 + training):  # the second gradient is added to the first
            with torch.set_grad_enabled(training):
                loss = model(*batch, schedule)
            if training:
                loss.backward()
    # Updates at even and odd steps; tied, at the split, and after it.
    split = split_step(h.num_scheduled_iterations)
    for step in (0, 1, split, split + 1, split + 2):
        for param in model.parameters():  # an update compiles for shapes, whatever the gradient
            param.grad = torch.ones_like(param)
        manager.step_optimizers(plan[0]._replace(step=step, splits=step == split))


@torch.no_grad()
def validate(now: StepSchedule, manager: TrainingManager, run: Run) -> float | None:
    """Mean next-token loss of the validation tokens, in nats; None if a signal has cut it short.
    Micro-batches are contiguous tokens; documents are not cut."""
    h = manager.h
    model = manager.model.eval()
    seed_random(h.seed, now.step, run.ranks.rank)  # the same draws after a resume
    schedule = manager.advance_schedule(now)
    per_rank = h.micro_batches // run.ranks.world_size
    num_batches = h.val_tokens // h.val_batch_tokens
    plan = [Batch(h.val_batch_tokens, manager.max_val_doc_len)] * num_batches
    place = dict(rank=run.ranks.rank, world_size=run.ranks.world_size, aligned=False)
    batches = distributed_data_generator(val_pattern(h.data), plan, **place, **h.stream)
    total = torch.zeros((), device=run.ranks.device)  # sum of this rank's mean losses
    for i, batch in enumerate(run.read_ahead(batches, per_rank)):
        total += model(*to_device(batch, run.ranks.device), schedule)
        if i % per_rank == 0 and run.heard_signal():
            return None
    model.train()
    return sum(run.ranks.gather(total.item())) / (num_batches * h.micro_batches)


# -----------------------------------------------------------------------------
# The training loop


def prepare(run: Run) -> TrainingManager:
    """Everything before the clock starts: checks, log, warm-up, then the model that is trained."""
    h = run.settings
    plan = run.plan
    ranks = run.ranks
    ranks.on_first(functools.partial(checks.make_default_data, h.data))
    check = functools.partial(check_data, h.data, plan[:-1], encoding=h.encoding, **h.stream)
    data = ranks.on_all_ranks(check, h.val_tokens, h.val_batch_tokens)
    prefixes = ranks.on_all_ranks(load_prefixes, h.data, h.encoding, h.vocab_size)
    if ranks.device.type == "cuda":
        arithmetic = f"attention: {agree_on_attention(ranks.gather, h.flash_attention)}"
    else:
        arithmetic = use_cpu(h.compile)
    if h.compile or ranks.device.type == "cuda":
        # A graph for each batch size and mode, on a CPU for each window; an update for each shape.
        torch._dynamo.config.recompile_limit = 64

    # For the warm-up alone: none of its gradients reaches the run's own manager, built below.
    manager = ranks.on_all_ranks(build, h, ranks, data.longest, prefixes)
    run.open(manager, data.shards, [arithmetic])
    run.announce(manager)
    with run.timed_warm_up(globals()):
        if h.self_check and ranks.device.type == "cuda" and run.first_step < h.total_iterations:
            batch = ranks.on_all_ranks(next, training_batches(h, plan, ranks, run.first_step))
            self_check(run, manager, to_device(batch, ranks.device), triton_kernels)
        warm_up(manager, plan[run.first_step :], ranks)
        run.check_saved(manager)  # again: an average may be made in its first step
        del manager
    manager = build(h, ranks, data.longest, prefixes)
    run.restore(manager)
    return manager


def train(
    h: Hyperparameters, ranks: Ranks, signals: Signals, resumed: Checkpoint | None = None
) -> None:
    """One run, from the initial weights or a checkpoint to the log's last line. Raises RunError."""
    ranks.on_all_ranks(h.check, ranks.world_size)
    plan = make_plan(h)
    with Run(h, plan, ranks, signals, SOURCES, resumed) as run:
        manager = prepare(run)
        last = h.total_iterations
        per_rank = h.micro_batches // ranks.world_size
        batches = run.read_ahead(training_batches(h, plan, ranks, run.first_step), per_rank)
        clock = run.clock
        clock.start()
        for now in plan[run.first_step :]:
            step = now.step
            # Not timed: validation, checkpoints, and the end that a signal asks for.
            if now.is_validated or run.must_pause(step):
                clock.stop()
                run.save_or_stop(step)  # if a checkpoint is due, or a signal has arrived
                if now.is_validated:
                    val_loss = validate(now, manager, run)
                    run.stop_if_signalled(step)
                    run.log.write(
                        f"step:{step}/{last} val_loss:{val_loss:.4f} "
                        f"train_time:{clock.ms():.0f}ms step_avg:{clock.ms() / max(step, 1):.2f}ms"
                    )
                clock.start()
            if step == last:
                break

            # Timed: data (the first micro-batches are there), forward, backward, reductions, updates,
            # gathers, the step line.
            seed_random(h.seed, step, ranks.rank)
            schedule = manager.advance_schedule(now)
            tokens = now.batch_tokens // ranks.world_size
            total = torch.zeros((), device=ranks.device)  # loss of this rank, summed over tokens
            for i, batch in enumerate(itertools.islice(batches, per_rank), 1):
                loss = manager.model(*to_device(batch, ranks.device), schedule)
                total += loss.detach()
                if i == per_rank:  # reduced over the ranks while the last backward pass runs
                    run.send_loss(step, total / (tokens * sum(now.mtp_weights)))
                loss.backward()
                manager.optimizer.accumulate()
            run.check_loss()
            manager.step_optimizers(now)
            run.log_step(
                f"step:{step + 1}/{last} "
                f"train_time:{clock.ms():.0f}ms step_avg:{clock.ms() / (step + 1):.2f}ms"
            )
        clock.stop()
        model = manager.model
        matrices = (model.attn, model.mlp[: len(LAYERS)], model.lm_head)
        run.finish(val_loss, matrices, functools.partial(sample_text, manager, plan[-1]))


def main(argv: list[str] | None = None) -> None:
    """Options, ranks, training. Raises RunError, or SystemExit with code 2 for bad options."""
    parse = functools.partial(parse_options, Hyperparameters, PRESETS, argv)
    with Signals() as signals:
        h = parse()
        ranks = join_ranks()
        resumed = ranks.on_all_ranks(find_resumed, h.resume, h.log_dir, h.run_id)
        if resumed:  # its settings, under this command's options
            h = parse(resumed.content["settings"])
        train(h, ranks, signals, resumed)


if __name__ == "__main__":
    run_main(main)  # errors as one line, and the exit code: runtime/ranks.py
