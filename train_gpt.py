"""bankrun: train a GPT-2-class model to a validation loss of 3.28 on FineWeb.

Result so far: the demo on two CPU cores, and 50 steps of record 70's recipe on one H100 (records/).
The arithmetic is proven on CPUs by ./test.sh: every kernel against a reference, 1 to 16 ranks
against one. The recipe is public record 84 of github.com/KellerJordan/modded-nanogpt with
record 88's loss. Its logs of 1365 + 10 steps have a mean loss of 3.27848 on 8 H100s (ten, in
78.5 s) and of 3.27782 on one (ten, in 595 s).

    ./run.sh                                               # record preset on GPUs, demo without
    ./run.sh ideas/idea.py --num_scheduled_iterations=200  # your own copy, your own settings
    torchrun --standalone --nproc_per_node=8 train_gpt.py  # by hand; several nodes: docs/running.md
    python train_gpt.py --help                             # every option

In this order: settings, the tables (parameters, layers, scalars, stages), model, LM head and loss,
update rules, optimizer, schedule, warm-up and validation, the training loop. GPU kernels and their
references are in triton_kernels.py, shards and batches in data/, log and checkpoints in runtime/.
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
from data.encodings import load_prefixes
from data.loader import (
    DataFacts, check_data, distributed_data_generator, synthetic_batch, to_device,
    train_pattern, val_pattern,
)
from runtime.checks import (
    check_layers, check_model_sizes, check_optimizer, check_settings, check_stages,
    make_default_data,
)
from runtime.cpu import polar_express_in_fp32, reduce_scatter, use_cpu
from runtime.options import parse_options, setting
from runtime.ranks import Ranks, RunError, Signals, join_ranks, run_main
from runtime.run import Run, seed_random
from runtime.sources import Sources
from sample import sample_text
from triton_kernels import (
    CPU_FP32, XTX, XXT, Band, aX_plus_BX, attend, ba_plus_cAA, band_bias, cache_sized,
    flash_attention, fp8_head_loss, fused_on_gpu, gate_logits, graph_input, has_fp8, join_mantissa,
    kernel_device, linear, lookup, norm, norm_and_rotate_qk, quantize_by_largest, relu_squared_mlp,
    relu_squared_mlp_fp8, residual_add, softcapped_cross_entropy, split_mantissa, transpose_add,
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
        names = ("micro_batches", "doc_slots", "bos_id", "vocab_size")
        return {name: getattr(self, name) for name in names}

    def check(self, world_size: int) -> None:
        """Raise ValueError, with what to do, if these settings or the tables cannot run."""
        check_layers(LAYERS, MUDD[1].keys() - {"c0", "value_embed"})
        check_stages(STAGES, EXTENSION, FINAL_VALIDATION, SPLIT_EMBED_AT)
        check_settings(self, [stage.batch for stage in (*STAGES, EXTENSION)], world_size)


# What a machine without a GPU trains in a minute or two: the same topology and schedule, small
# widths, bytes as tokens.
# fmt: off
DEMO = dict(
    data="data/local", vocab_size=257, bos_id=256, encoding="bytes",
    bigram_rows=16_384, model_dim=64, num_heads=2, head_dim=32, dtype="float32", compile=False,
    attention_scale=0.28,  # normed queries have length √head_dim: narrow heads make small logits
    num_scheduled_iterations=345, num_extension_iterations=3,
    batch_unit=72, micro_batches=2, block_size=32,
    momentum_warmup=1000, muon_lr_scale=1.3, adam_lr_scale=1.5,  # for a short run
    val_every=150, val_tokens=262_144, val_batch_tokens=32_768, sample_tokens=100,
)
# fmt: on
# A tenth of the record preset's steps at full width, to judge an idea soon: docs/running.md.
SHORT = dict(
    num_scheduled_iterations=136,
    num_extension_iterations=1,
    momentum_warmup=30,
    momentum_cooldown=5,
    val_every=0,
)
PRESETS = {"record": {}, "short": SHORT, "demo": DEMO}

# -----------------------------------------------------------------------------
# Table 1: parameters. A row is an update rule (Adam, NorMuon) with its settings


class UpdateArgs(NamedTuple):
    """What a step passes to every update. The schedule's learning-rate multiplier scales all rates:
    a parameter's rate is the rule's lr · lr_schedule · the row's lr_mul."""

    lr_schedule: float
    momentum: float  # of NorMuon
    grad_scale: float  # 1 / micro-batches: gradients are sums over them, and over tokens
    finite: Tensor | None = None  # on a GPU whether the step's loss is, 0-dim: see only_if


@dataclass(frozen=True)
class ParamConfig:
    """How one parameter is reduced and updated. A rule is a subclass: settings, state and update."""

    comms: str  # "sharded": reduce-scatter, update own shard, all-gather; "replicated": all-reduce
    _: KW_ONLY
    every: int = 1  # steps between updates; gradients of the steps in between are summed
    lr: float
    weight_decay: float = 0.0
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    tied_to: str = ""  # weight tying until the split: the transpose of that parameter
    grad_dtype: torch.dtype | None = None  # in which gradients accumulate; None: the parameter's
    may_pad: bool = False  # zero padding, if the rows do not divide over the ranks
    pad_front: bool = False  # the padding comes first, not last

    def __post_init__(self):
        if self.comms not in ("sharded", "replicated"):
            raise ValueError(f"comms={self.comms!r}: must be 'sharded' or 'replicated'")

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
        """One step on a rank's rows, in place; grad · args.grad_scale is the step's gradient. Where
        args.finite is a tensor and false, no weight and no moment may change: use only_if."""
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


def only_if(finite: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | float]:
    """The gradient and 1, or where `finite` is false zeros and 0: an update that multiplies its rates by
    that leaves everything as it is. So a GPU's host does not wait for the loss. None: a CPU's has."""
    if finite is None:
        return grad, 1.0
    return torch.where(finite, grad, 0), finite.to(grad.dtype)


@dataclass(frozen=True)
class Adam(ParamConfig):
    """For embeddings, the LM head, gates and scalars."""

    lr: float = 0.008
    weight_decay: float = 0.005
    # A tuple: by column; its last entry goes for all columns that follow.
    lr_mul: float | tuple[float, ...] = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-10

    def initial_state(self, rows: Tensor) -> dict[str, Tensor | int]:
        return {
            "step": 0,
            "exp_avg": zeros_for(rows, rows.shape),
            "exp_avg_sq": zeros_for(rows, rows.shape),
        }

    def constants(self, rows: Tensor, first: int) -> dict[str, Tensor]:
        """column_lr_mul (cols,), if lr_mul goes by column."""
        if not isinstance(self.lr_mul, tuple):
            return {}
        muls = self.lr_mul + self.lr_mul[-1:] * (rows.size(-1) - len(self.lr_mul))
        dtype = at_least_fp32(rows.dtype)
        return {"column_lr_mul": torch.tensor(muls, dtype=dtype, device=rows.device)}

    def update(
        self, rows: Tensor, grad: Tensor, state: dict, args: UpdateArgs, column_lr_mul: Any = None
    ) -> None:
        state["step"] += 1
        t = state["step"]
        beta1, beta2 = self.betas
        lr_mul = self.lr_mul if column_lr_mul is None else column_lr_mul
        lr = self.lr * args.lr_schedule * lr_mul
        step_size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        # The decay is quadratic in the rate, multipliers included, as in the public recipe.
        squared_lr_decay = lr * lr * self.weight_decay * self.wd_mul
        scalars = (scalar(step_size), scalar(squared_lr_decay), scalar(args.grad_scale))
        for tensors in cache_sized(rows, grad, state["exp_avg"], state["exp_avg_sq"]):
            adam_update(*tensors, beta1, beta2, self.eps, *scalars, args.finite)


@dataclass(frozen=True)
class NorMuon(ParamConfig):
    """For hidden matrices, stacked in a bank (…, rows, cols). Ranks share whole matrices, because
    orthogonalization needs them whole. Not for embeddings, the LM head or vectors."""

    comms: str = "sharded"
    lr: float = 0.023
    weight_decay: float = 1.2
    beta2: float = 0.90
    lr_mul: tuple[float, ...] = (1.0,)  # repeats over the bank's matrices
    # So many heads' rows of a matrix are orthogonalized together, 0: all. Repeats like lr_mul.
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
        lr = scalar(self.lr * args.lr_schedule)
        weight_decay = scalar(self.weight_decay * self.wd_mul)
        momentum = scalar(args.momentum)
        grad_scale = scalar(args.grad_scale)
        moments = (state["momentum_buffer"], state["second_moment"])
        banks = (rows, state.get("mantissa"), grad, *moments, constants["matrix_lr_mul"])
        scalars = (lr, weight_decay, momentum, self.beta2, grad_scale, args.finite)
        if "grouped" in constants:
            groups = (constants["whole"], constants["grouped"], state["group_second_moment"])
            return normuon_update(*banks, *scalars, *groups)
        for matrices in cache_sized(*banks):
            normuon_update(*matrices, *scalars)


# every=2: Adam parameters are updated at odd steps, on the summed gradients of two steps.
# fmt: off
PARAM_TABLE: dict[str, ParamConfig] = {
    # Banks. attn is padded in front, mlp at the back: no rank holds padding of both.
    # q, k, v, o; q and k by pairs of neighbouring heads
    "attn":           NorMuon(every=1, heads_per_group=(2, 2, 0, 0), matrices_per_slice=4, pad_front=True),
    "mlp":            NorMuon(every=1, lr_mul=(1.0, 2.0)),  # W_fc, W_proj
    # Scalars, embeddings, gates.
    "scalars":        Adam("replicated", every=2, betas=(0.90, 0.99), lr_mul=5.00, wd_mul=0.0),
    "value_embeds":   Adam("sharded",    every=2, betas=(0.75, 0.95), lr_mul=75.0, wd_mul=5.0),
    "bigram_embed":   Adam("sharded",    every=2, betas=(0.75, 0.95), lr_mul=75.0, wd_mul=5.0),
    "smear_gate":     Adam("replicated", every=2, betas=(0.90, 0.99), lr_mul=0.01, wd_mul=0.0),
    "skip_gate":      Adam("replicated", every=2, betas=(0.90, 0.99), lr_mul=0.05, wd_mul=0.0),
    "attn_gate_bank": Adam("replicated", every=2, betas=(0.90, 0.99), lr_mul=1.00, wd_mul=1.0),
    "ve_gate_bank":   Adam("replicated", every=2, betas=(0.90, 0.99), lr_mul=1.00, wd_mul=1.0),
    "layer_lambdas":  Adam("replicated", every=2, betas=(0.90, 0.95), lr_mul=(5.0, 5.0, 1.0), wd_mul=0.0),
    "mudd":           Adam("replicated", every=2, betas=(0.90, 0.99), lr_mul=0.25, wd_mul=1.0),
    # LM head and embedding, which are tied for two thirds of the run.
    "lm_head":        Adam("sharded",    every=2, betas=(0.50, 0.95), lr_mul=1.00, wd_mul=150.0),
    "embed":          Adam("sharded",    every=2, betas=(0.50, 0.95), lr_mul=1.00, wd_mul=150.0,
                           tied_to="lm_head"),
}

# The order in which reductions are launched. Without Adam, attn's short one goes first, and its
# update hides most of mlp's; on steps with Adam the interconnect never idles (predicted: bench/order.py).
SCATTER_ORDER = (
    "attn", "mlp", "scalars", "value_embeds", "bigram_embed", "smear_gate", "skip_gate",
    "attn_gate_bank", "ve_gate_bank", "layer_lambdas", "mudd", "lm_head", "embed",
)
# The order of the updates. Small ones first, while big reductions travel. The slow banks come last,
# while embeddings are gathered. lm_head before embed, which copies it while they are tied.
WORK_ORDER = (
    "scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "layer_lambdas", "mudd",
    "value_embeds", "bigram_embed", "lm_head", "embed", "attn", "mlp",
)
# fmt: on

# -----------------------------------------------------------------------------
# Table 2: layers


@dataclass(frozen=True)
class Layer:
    """What a layer has besides its MLP, which all layers have."""

    index: int  # 0-based, as in messages
    window: str = ""  # of its attention: "short" or "long" (sizes: STAGES); empty: no attention
    paired: bool = False  # a token becomes two positions, one for each half of the heads
    key_offset: bool = False  # half of the key dims look one position back
    value_gate: bool = False  # each token's value embedding is added to the values, by head gates
    same_input: bool = False  # its attention reads what the layer before's read, not its own input
    keep: str = ""  # name under which its output is kept
    add: str = ""  # the kept output that is added, gated, to its input
    mudd: bool = False  # MUDD gives its factors and value gates, for each token

    @property
    def value_embed(self) -> bool:
        return self.value_gate or self.mudd


# Layers 8 to 10 attend over one tensor, layer 7's output: late MLPs predict, and nobody reads them.
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
GATE_DIM = 12  # inputs of a gate: first dims of x; of a value gate half x, half value embedding

# -----------------------------------------------------------------------------
# Table 3: scalars, by name, with their initial values

# Columns of the parameter `layer_lambdas`, which has a row for each layer. Then one for each head: α
# of XSA, at first 0.
LAMBDAS = {
    "resid_attn": math.sqrt(1.1),  # scale of the stream where attention's output is added
    "resid_mlp": math.sqrt(1.1),  # the same where the MLP's is added
    "post_attn": 1.0,  # scale of attention's output
    "post_mlp": 1.0,  # scale of the MLP's output
    "x0": 0.0,  # how much of the embedding is added once more
    "bigram": 0.05,  # and of the bigram; layer 0's goes into its input
}
# Entries of the parameter `scalars`.
SCALARS = {
    "sa_lambda": [0.5, 1.0] * len(LAYERS),  # scale of W_qkv, scale of W_o
    "smear_lambda": [0.0],
    "skip_lambda": [-1.5],
}
# MUDD: two small networks weigh earlier activations, token by token. Names, and the values where they
# start: MUDD_SCALE times the biases.
MUDD = (
    {  # from the stream before layer 10, for that layer
        "value_c0": 0.0,  # how much of c0, c7 and the stream its attention's values get
        "value_c7": 0.0,
        "value_x": 0.0,
        "add_c0": 0.0,  # and how much the stream
        "add_c7": 0.0,
        "add_x": 0.0,
        "gate_low": 2.0,  # scale of the value embedding for the first half of the heads
        "gate_high": 2.0,  # and for the second
        "resid_attn": math.sqrt(1.1),  # from here on as in LAMBDAS
        "post_attn": 1.0,
        "x0": 0.0,
        "bigram": 0.05,
        "resid_mlp": math.sqrt(1.1),
        "post_mlp": 1.0,
    },
    # from the stream after the last layer: how much of these it gets; value_embed is layer 1's
    {"c0": 0.0, "c7": -0.5, "c9": 0.0, "value_embed": 0.0, "c3": 0.0},
)
MUDD_HIDDEN = 64  # width of the networks' hidden layer
MUDD_SCALE = 0.1  # of their outputs
# Biases from here on stay at their start, also in fp32: in bf16, which the public logs have, a step of
# Adam does not reach the next number. The networks still move what they belong to.
MUDD_LEARNT_BELOW = 0.1

# -----------------------------------------------------------------------------
# Table 4: stages


class Stage(NamedTuple):
    index: int  # 1-based, as in messages
    until: float  # ends at this fraction of the scheduled steps, rounded
    batch: int  # batch units in a step: tokens / batch_unit
    docs: int  # documents are cut at so many blocks of block_size tokens
    short: int  # short window: a token sees so many blocks of block_size tokens before it
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
SPLIT_EMBED_AT = 2 / 3  # of the scheduled steps: weight tying ends
LR_DECAY_FROM = 0.40  # of the scheduled steps: the cooldown begins
LR_FLOOR = 0.15  # learning-rate multiplier at its end, and in the extension
MOMENTUM_LOW = 0.85  # of NorMuon, at the first step and at the last
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
        no_rotation = torch.zeros(head_dim // 4)
        self.frequencies = torch.cat((frequencies, no_rotation))  # (D/2,) fp32, radians a position
        self.scale = graph_input(scale)  # of the attention logits
        table = torch.empty(2 * max_tokens, head_dim // 2, 2, dtype=dtype)
        self.register_buffer("table", table, persistent=False)
        self.fill_table()

    def fill_table(self) -> None:
        """table[t, j] = (cos, −sin) of position t times frequency j: built in fp32, then rounded."""
        positions = torch.arange(len(self.table), dtype=torch.float32, device=self.table.device)
        angle = positions[:, None] * self.frequencies.to(self.table.device)  # radians
        self.table[..., 0] = angle.cos()
        self.table[..., 1] = -angle.sin()

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
        return {"frequencies": self.frequencies.clone(), "scale": self.scale.item()}

    def load_state(self, saved: dict[str, Any]) -> None:
        self.frequencies = saved["frequencies"].clone()
        self.scale = graph_input(saved["scale"])
        self.fill_table()


def attention(
    x: Tensor,  # (T, dim), normed
    W_qkv: Tensor,  # (3·dim, dim)
    W_o: Tensor,  # (dim, dim)
    head_gate: Tensor,  # (H, GATE_DIM)
    head_scale: Tensor,  # of the output: 0-dim, or (T, 1)
    xsa: Tensor,  # (H,): how much of its own value a head's output loses
    value: Tensor | None,  # (T, H, D), added to the values
    layer: Layer,
    yarn: Yarn,
    band: Band,
) -> Tensor:
    """Attention of one layer, (T, dim). Each head's output is scaled by its sigmoid gate.

    XSA (arXiv 2603.09078), except in paired layers: the output loses xsa times its projection on the
    token's own value."""
    T, dim = x.shape
    H = len(head_gate)
    D = dim // H
    positions = 2 if layer.paired else 1  # of a token
    qkv = linear(x, W_qkv).view(T, 3 * H, D)  # q heads, k heads, v heads
    q, k, v = norm_and_rotate_qk(qkv, yarn.table, layer.paired, layer.key_offset)  # (T, H, D)
    if value is not None:
        v = v + value
    # Paired: row 2t has heads 0 .. H/2−1 of token t, row 2t+1 the other half.
    q, k, v = (z.reshape(T * positions, H // positions, D) for z in (q, k, v))
    y = attend(q, k, v, band, yarn.scale).reshape(T, H, D)
    if not layer.paired:
        wide = at_least_fp32(v.dtype)
        length = (v * v).sum(-1, keepdim=True, dtype=wide).clamp_min(1e-8)
        share = xsa[:, None] * (y * v).sum(-1, keepdim=True, dtype=wide) / length
        y = y - share.to(v.dtype) * v
    gate = head_scale * torch.sigmoid(gate_logits(x, head_gate))
    y = y * gate.unsqueeze(-1)
    return linear(y.reshape(T, dim), W_o)


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
    prefix_weight: Tensor | None = None  # of the next token's prefix, (1,); None: no such target


class GPT(nn.Module):
    """The model that LAYERS describes. All attention matrices are one parameter, all MLP matrices
    another: the banks. param.label is the parameter's row in PARAM_TABLE. The forward pass computes
    in the parameters' dtype: bf16, or what .float() or .double() make of it."""

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        max_tokens: int,  # of the longest micro-batch, validation included
        *,
        bigram_rows: int = 0,  # 0: fifteen per token
        attention_scale: float = 0.1,  # initial, before the windows grow
        fp8_head: bool = False,  # FP8 matmuls in the LM head, only in training
        fp8_mlp: bool = False,  # FP8 up-projections in the MLPs, only in training
        prefixes: Any = None,  # each token's prefix, (vocab_size,) int64; -1, None: it has none
    ):
        """Raises ValueError for sizes that do not fit LAYERS."""
        super().__init__()
        check_model_sizes(num_layers, len(LAYERS), num_heads, head_dim, model_dim)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.model_dim = model_dim
        self.max_tokens = max_tokens
        self.fp8_head = fp8_head
        self.fp8_mlp = fp8_mlp
        vocab = -(-vocab_size // 128) * 128
        dim = model_dim

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype))

        # Banks: of each layer q, k, v rows, then o; of each layer W_fc, W_proj.
        self.attn = parameter(ATTENTION_LAYERS, 4 * dim, dim)  # (10, 4·dim, dim)
        self.mlp = parameter(MLP_BANK_LAYERS, 2, 4 * dim, dim)  # (12, 2, 4·dim, dim)
        self.scalars = parameter(sum(map(len, SCALARS.values())), dtype=torch.float32)  # (24,)
        # Value embeddings of a token lie side by side; the first bigram has the last row.
        self.value_embeds = parameter(vocab, VALUE_LAYERS * dim)  # (vocab, 5·dim)
        self.bigram_embed = parameter(bigram_rows or 15 * vocab, dim // 4)  # (rows, dim / 4)
        self.smear_gate = parameter(1, GATE_DIM)  # (1, 12)
        self.skip_gate = parameter(1, GATE_DIM)  # (1, 12)
        self.attn_gate_bank = parameter(ATTENTION_LAYERS, num_heads, GATE_DIM)  # (10, H, 12)
        self.ve_gate_bank = parameter(VALUE_GATES, num_heads, GATE_DIM)  # (4, H, 12)
        columns = len(LAMBDAS) + num_heads
        self.layer_lambdas = parameter(len(LAYERS), columns, dtype=torch.float32)  # (11, 6 + H)
        # W1, W2 and b of each network: (2, 64·dim + 14·65)
        self.mudd = parameter(2, MUDD_HIDDEN * dim + (MUDD_HIDDEN + 1) * len(MUDD[0]))
        self.lm_head = parameter(dim, vocab)  # (dim, vocab), stored transposed like its gradient
        self.embed = parameter(vocab, dim)  # (vocab, dim)
        for label, param in self.named_parameters():
            param.label = label
        signs = torch.empty(SIGN_ROWS, self.bigram_embed.size(1), dtype=torch.bfloat16)
        self.register_buffer("bigram_signs", signs)
        table = torch.full((vocab,), -1)
        if prefixes is not None:
            table[: len(prefixes)] = torch.as_tensor(prefixes)
        self.register_buffer("prefixes", table, persistent=False)
        self.initialize()
        self.yarn = Yarn(head_dim, max_tokens, self.embed.dtype, attention_scale)

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
        for network, starts in enumerate(MUDD):
            W1, _, b = self.mudd_network(network)
            W1.uniform_(-(self.model_dim**-0.5), self.model_dim**-0.5)
            b[: len(starts)] = torch.tensor(list(starts.values())) / MUDD_SCALE
        self.scalars.copy_(torch.tensor(sum(SCALARS.values(), [])))

    def extend_windows(self, old_long: int, new_long: int) -> None:
        """Apply YaRN; old and new long window in tokens."""
        self.yarn.extend(old_long, new_long)

    def forward(
        self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor, schedule: ForwardSchedule
    ) -> Tensor:
        """In training the loss of several targets, summed over tokens; else the mean next-token loss;
        both in fp32 or better. inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32:
        document starts, padded with T."""
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
        """What forward gives, from the tables' rows at the inputs."""
        x = self.hidden_states(inputs, cu_seqlens, schedule, rows)
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

    def hidden_states(
        self, inputs: Tensor, cu_seqlens: Tensor, schedule: ForwardSchedule, rows: tuple = ()
    ) -> Tensor:
        """What the LM head reads, (T, dim). rows: what look_up gives, if it is there."""
        x, values, bigram = rows or self.look_up(inputs)
        T = len(inputs)
        dim = self.model_dim
        # Scalars by name.
        parts = self.scalars.split([len(values) for values in SCALARS.values()])
        scalars = {name: part.unbind() for name, part in zip(SCALARS, parts)}
        sa_lambda = pairs(scalars["sa_lambda"])
        by_column, alpha = self.layer_lambdas.split((len(LAMBDAS), self.num_heads), 1)
        flat = by_column.flatten().unbind()  # one list, so that gradients are joined once
        n = len(LAMBDAS)
        lambdas = [dict(zip(LAMBDAS, flat[i * n : (i + 1) * n])) for i in range(len(LAYERS))]
        xsa = torch.tanh(alpha).to(self.attn.dtype)  # (11, H)
        # Views of the banks, by layer; None where a layer has none.
        qkv_and_o = self.attn.view(-1, dim).split((3 * dim, dim) * ATTENTION_LAYERS)
        attn = by_layer("window", pairs(qkv_and_o))  # (W_qkv, W_o)
        head_gate = by_layer("window", self.attn_gate_bank.unbind())
        ve_gate = by_layer("value_gate", self.ve_gate_bank.unbind())
        mlp = pairs(self.mlp.view(-1, 4 * dim, dim).unbind())  # (W_fc, W_proj)
        W8 = [None] * len(LAYERS)  # or W_fc in FP8, with its scale
        if self.fp8_mlp and self.training:
            W8 = list(zip(*quantize_by_largest(self.mlp.detach()[:, 0])))
        bands = self.bands(cu_seqlens, T, schedule)

        value_embeds = values.split(dim, 1)
        values = by_layer("value_embed", value_embeds)
        bigram = self.signed_bigrams(bigram, inputs)
        # Each token sees a bit of the one before it: smear.
        gate = torch.sigmoid(gate_logits(x[1:], self.smear_gate))
        smear = scalars["smear_lambda"][0] * gate
        x = norm(torch.cat((x[:1], x[1:] + smear * x[:-1])))
        # What skip gate and layers get as the embedding has the first bigram term in it.
        x = c0 = add_bigram(x, lambdas[0]["bigram"] * bigram)

        kept = {"c0": c0, "value_embed": value_embeds[0]}
        for i, (layer, factors) in enumerate(zip(LAYERS, lambdas)):
            if layer.add:  # a gated skip connection
                gate = torch.sigmoid(gate_logits(c0, self.skip_gate))
                x = x + torch.sigmoid(scalars["skip_lambda"][0]) * 2 * gate * kept[layer.add]
            if layer.window:
                if not layer.same_input:
                    xn = norm(x)  # (T, dim)
                value = None  # or (T, H, D)
                if layer.value_gate:
                    value = self.gated_value(xn, values[i], ve_gate[i])
                if layer.mudd:
                    factors = self.token_weights(x, 0)  # each token's, in place of the layer's
                    value, x = self.mudd_inputs(factors, values[i], x, kept)
                # Scaling the weights costs less than scaling activations.
                W_qkv, W_o = (sa * W for sa, W in zip(sa_lambda[i], attn[i]))
                scales = (head_gate[i], factors["post_attn"], xsa[i])
                out = attention(xn, W_qkv, W_o, *scales, value, layer, self.yarn, bands[i])
                # The embedding and the bigram once more.
                x = factors["resid_attn"] * x + factors["x0"] * c0
                if i > 0:
                    x = add_bigram(x, factors["bigram"] * bigram)
                x = residual_add(x, out)
            out = scaled_mlp(norm(x), *mlp[i], factors["post_mlp"], W8[i])
            x = residual_add(factors["resid_mlp"] * x, out)
            if layer.keep:
                kept[layer.keep] = x
        for name, weight in self.token_weights(x, 1).items():
            x = x + weight * kept[name]
        return norm(x)

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
        return gate.unsqueeze(-1) * value.view(len(value), self.num_heads, self.head_dim)

    def mudd_network(self, network: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the parameter: W1 (MUDD_HIDDEN, dim), W2 (n, MUDD_HIDDEN), b (n,)."""
        n = len(MUDD[0])  # the second network uses fewer
        sizes = (MUDD_HIDDEN * self.model_dim, n * MUDD_HIDDEN, n)
        W1, W2, b = self.mudd[network].split(sizes)
        return W1.view(MUDD_HIDDEN, -1), W2.view(n, -1), b

    def token_weights(self, x: Tensor, network: int) -> dict[str, Tensor]:
        """MUDD (Xiao et al., arXiv 2502.12170): a network's weights for each token, by name, (T, 1)
        each. x (T, dim): the stream, not normed."""
        W1, W2, b = self.mudd_network(network)
        out = linear(F.gelu(linear(x, W1)), W2).to(at_least_fp32(x.dtype))
        weights = {}
        for (name, start), bias, column in zip(MUDD[network].items(), b, out.split(1, 1)):
            if abs(start) >= MUDD_LEARNT_BELOW:
                bias = start / MUDD_SCALE
            weights[name] = (MUDD_SCALE * (column + bias)).to(x.dtype)
        return weights

    def mudd_inputs(
        self, weights: dict[str, Tensor], value: Tensor, x: Tensor, kept: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What MUDD's layer adds to its attention's values, (T, H, D), and its stream, (T, dim).
        weights: (T, 1) each; value, x, kept: (T, dim)."""
        c0 = kept["c0"]
        c7 = kept["c7"]
        low, high = value.chunk(2, 1)
        gated = torch.cat((weights["gate_low"] * low, weights["gate_high"] * high), 1)
        earlier = weights["value_c0"] * c0 + weights["value_c7"] * c7
        value = gated + earlier + weights["value_x"] * x
        x = (1 + weights["add_x"]) * x + weights["add_c0"] * c0 + weights["add_c7"] * c7
        return value.view(len(x), self.num_heads, self.head_dim), x

    def bands(self, cu_seqlens: Tensor, T: int, schedule: ForwardSchedule) -> list[Band | None]:
        """The keys that each layer's attention sees. Paired layers have two positions per token."""
        max_len = min(schedule.max_doc_len or T, T)
        bands: dict[tuple[str, bool], Band | None] = {("", False): None}
        for layer in LAYERS:
            if (layer.window, layer.paired) not in bands:
                positions = 2 if layer.paired else 1  # of a token
                window = getattr(schedule, f"{layer.window}_window")
                starts = positions * cu_seqlens
                bias = None
                if not uses_flash(self.embed):
                    dtype = at_least_fp32(self.embed.dtype)
                    bias = band_bias(starts, positions * T, window, dtype)
                band = Band(starts, window, positions * max_len, bias)
                bands[layer.window, layer.paired] = band
        return [bands[layer.window, layer.paired] for layer in LAYERS]


def hash_bigrams(tokens: Tensor, rows: int) -> Tensor:
    """(T,) int32: a row for each token and the one before it, across documents too. The first
    position has the last row to itself."""
    hashed = ((36313 * tokens[1:]) ^ (27191 * tokens[:-1])) % (rows - 1)  # int32 wraps around
    return F.pad(hashed, (1, 0), value=rows - 1)


SIGN_ROWS = 8192


def sign_rows(tokens: Tensor) -> Tensor:
    """(T,) int32: the row of signs for each token and the one before it; row 0 for the first."""
    return F.pad((tokens[1:] ^ tokens[:-1]) % SIGN_ROWS, (1, 0))


def add_bigram(x: Tensor, bigram: Tensor) -> Tensor:
    """x (T, dim), with bigram (T, dim / 4) added to its first dims."""
    return x + F.pad(bigram, (0, x.size(1) - bigram.size(1)))


def scaled_mlp(x: Tensor, W_fc: Tensor, W_proj: Tensor, scale: Tensor, W8: Any) -> Tensor:
    """The MLP's output times scale: 0-dim, or (T, 1). W8: None, or W_fc in FP8 and its scale."""
    if not scale.dim():  # scaling the weights costs less than scaling activations
        W_proj = scale * W_proj
    if W8 is None:
        out = relu_squared_mlp(x, W_fc, W_proj)
    else:
        out = relu_squared_mlp_fp8(x, W_fc, W_proj, *W8)
    return scale * out if scale.dim() else out


def pairs(items: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """(first, second), (third, fourth), …"""
    return list(zip(items[::2], items[1::2]))


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
        scales = (FP8_X_SCALE, FP8_W_SCALE, FP8_GRAD_SCALE)
        return fp8_head_loss(x, w, targets, weights, *scales)
    return softcapped_cross_entropy(x @ w, targets, weights)


# -----------------------------------------------------------------------------
# Update rules

# Optimal quintics of Polar Express, five steps: Amsel et al., arXiv 2505.16932.
POLAR_EXPRESS_COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(G: Tensor) -> Tensor:
    """The nearly orthogonal factor of each matrix of G: singular values above 0.2 % of the Frobenius
    norm end between 0.85 and 1.15.

    G (n, rows, cols), any float dtype; result (n, rows, cols) in bf16, in fp64 if G is, in fp32 in a
    run on a CPU without bf16 units. Tall matrices are multiplied on the right: their smaller Gram
    matrix is XᵀX, and nothing is transposed.
    """
    if kernel_device(G) == CPU_FP32:
        return polar_express_in_fp32(G, POLAR_EXPRESS_COEFFICIENTS)
    X = G.to(G.dtype if G.dtype == torch.float64 else torch.bfloat16)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)  # 2 % of room for bf16 rounding
    tall = X.size(-2) > X.size(-1)
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS:
        A = XTX(X) if tall else XXT(X)
        X = aX_plus_BX(X, ba_plus_cAA(A, beta=b, alpha=c), a, right=tall)  # aX + (bA + cA²)X
    return X


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
    beta1: float,
    beta2: float,
    eps: float,
    step_size: Tensor,  # rate with bias correction: 0-dim on the CPU, or (cols,)
    squared_lr_decay: Tensor,  # as step_size
    grad_scale: Tensor,  # 0-dim on the CPU
    finite: Tensor | None = None,  # 0-dim: whether to change anything
) -> None:
    """One Adam step with cautious weight decay on p, in place: decay only where the update shrinks
    the weight too."""
    grad, active = only_if(finite, grad.to(exp_avg.dtype) * grad_scale)
    exp_avg.lerp_(grad, (1 - beta1) * active)
    exp_avg_sq.lerp_(grad.square(), (1 - beta2) * active)
    wide = p.to(exp_avg.dtype)
    update = exp_avg / (exp_avg_sq.sqrt() + eps) * (step_size * active)
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
    lr: Tensor,  # 0-dim on the CPU
    weight_decay: Tensor,  # 0-dim on the CPU
    momentum: Tensor,  # 0-dim on the CPU
    beta2: float,
    grad_scale: Tensor,  # 0-dim on the CPU
    finite: Tensor | None = None,  # 0-dim: whether to change anything
    whole: Tensor | None = None,  # indices of the matrices to orthogonalize whole; None: all
    grouped: Tensor | None = None,  # of those to orthogonalize by groups of rows
    group_second_moment: Tensor | None = None,  # (n, groups, cols)
) -> None:
    """One NorMuon step with cautious weight decay on p (n, rows, cols), in place. A bf16 p is the
    upper half of fp32 weights, mantissa the lower: no fp32 copy, and no rounding."""
    grad, active = only_if(finite, grad.to(momentum_buffer.dtype) * grad_scale)
    beta2 = 1 - (1 - beta2) * active
    momentum_buffer.add_((grad - momentum_buffer).mul_((1 - momentum) * active))
    update = (momentum_buffer - grad).mul_(momentum).add_(grad)  # Nesterov momentum
    if grouped is None:
        update = orthogonalize(update, second_moment, beta2)
    else:
        kinds = ((whole, second_moment), (grouped, group_second_moment))
        update = orthogonalize_kinds(update, kinds, beta2)
    wide = p if mantissa is None else join_mantissa(p, mantissa)
    matrix_lr = lr * active * matrix_lr_mul
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

# Renamed in PyTorch 2.13. reduce_scatter: runtime/cpu.py
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NorMuonAndAdam:
    """NorMuon for banks of matrices, Adam for everything else, sharded over the ranks. No parameter
    groups, no backward hooks.

    A step has three phases:
      1. launch every gradient reduction, asynchronously, in scatter_order; a tied parameter's
         gradient is added to the other's just before;
      2. in work_order: wait for the reduction, update own shard (all, if replicated), launch the gather;
      3. wait for the gathers, lm_head's first: while embed is tied, it becomes the transpose.

    A shard is a view of the parameter and of its gradient: both collectives work in place. The ranks
    share the rows of an embedding and the matrices of a bank. A bank that does not divide becomes a
    view of a padded one; padding is zero, has no state and is never updated. Matrices on 16 ranks,
    · for padding:

        rank              0      1      2      3    …  11       12       13       14       15
        attn, 40 of 48  · · ·  · · ·  · · 0  1 2 3    25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        mlp,  24 of 32   0 1    2 3    4 5    6 7      22 23     · ·      · ·      · ·      · ·

    Pending gradients stay where autograd leaves them, in param.grad. Those of padded banks, and
    those with a wider grad_dtype, move to `wide_grads`: `accumulate` adds them there after each
    backward pass.

    While `tied`, a parameter with tied_to has no reduction: its gradient joins the other's, and its
    own state stays at zero. `split_tied` ends weight tying.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        param_table: dict[str, ParamConfig],
        scatter_order: Iterable[str],
        work_order: Iterable[str],
    ):
        """named_parameters: (label, parameter) pairs, on their device. Uses the process group, if any.
        Raises ValueError if table or orders do not name each parameter once, or if a parameter
        cannot be sharded."""
        self.params = dict(named_parameters)
        self.table = param_table
        self.scatter_order = tuple(scatter_order)
        self.work_order = tuple(work_order)
        check_optimizer(self.params, self.table, self.scatter_order, self.work_order)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.tied = True  # until split_tied
        self.lr_schedule = 1.0  # these two come from the schedule, before each step
        self.momentum = 0.95
        device = next(iter(self.params.values())).device
        # On a GPU, whether the step's loss is finite: forward_backward sets it. A tensor from the
        # start, so that the warm-up compiles the updates of the run.
        on_gpu = device.type == "cuda"
        self.finite = torch.ones((), dtype=torch.bool, device=device) if on_gpu else None
        self.grad_divisor = 1  # gradients are sums over this many micro-batches
        # By label: rows of the whole parameter. If they are padded, the parameter is a view of them.
        self.padded = {label: self._pad(label) for label in self.params}
        # Which rows this rank updates, without padding, and a view of them.
        self.own_rows = {label: self._find_own_rows(label) for label in self.params}
        self.shards = {label: self._own(label, padded) for label, padded in self.padded.items()}
        self.wide_grads = self._allocate_wide_grads()
        self.in_wide: set[str] = set()  # labels whose pending gradient is in wide_grads
        self.state: dict[str, dict[str, Any]] = {}
        self.constants: dict[str, dict[str, Tensor]] = {}
        for label, shard in self.shards.items():
            row = param_table[label]
            self.state[label] = row.initial_state(shard)
            self.constants[label] = row.constants(shard, self.own_rows[label].start)

    # Layout

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
        row = self.table[label]
        n = self.num_rows(label)
        size = len(self._rank_slice(label, self.padded[label]))
        first = self.rank * size if row.comms == "sharded" else 0
        if row.pad_front:
            first -= len(self.padded[label]) - n
        return slice(min(max(first, 0), n), min(max(first + size, 0), n))

    def _own(self, label: str, padded: Tensor) -> Tensor:
        return self._without_padding(label, padded)[self.own_rows[label]]

    def _allocate_wide_grads(self) -> dict[str, Tensor]:
        """Zeros, padded, for the gradients that cannot stay where autograd leaves them."""
        wide = {}
        for label, param in self.params.items():
            dtype = torch.promote_types(param.dtype, self.table[label].grad_dtype or param.dtype)
            padded = len(self.padded[label]) > self.num_rows(label)
            if dtype != param.dtype or padded:
                wide[label] = torch.zeros_like(self.padded[label], dtype=dtype)
        return wide

    # Pending gradients

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add what autograd has left to wide_grads, where there are any. Call it after each backward."""
        for label, wide in self.wide_grads.items():
            grad = self.params[label].grad
            if grad is None:
                continue
            inner = self._without_padding(label, wide)
            rows = self.table[label].as_rows(grad)
            if label in self.in_wide:
                inner.add_(rows)
            else:
                inner.copy_(rows)
            self.in_wide.add(label)
            self.params[label].grad = None

    def _has_gradient(self, label: str) -> bool:
        return self.params[label].grad is not None or label in self.in_wide

    def _pending(self, label: str) -> Tensor:
        """Rows of the pending gradient, with padding if the parameter has some."""
        if label in self.in_wide:
            return self.wide_grads[label]
        return self.table[label].as_rows(self.params[label].grad)

    def gradients(self) -> dict[str, Tensor]:
        """Pending gradients by label, shaped like their parameters, not copied."""
        self.accumulate()
        return {
            label: self._without_padding(label, self._pending(label)).view_as(param)
            for label, param in self.params.items()
            if self._has_gradient(label)
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

    # The step

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Update every parameter that is due at this step, then clear its gradient. The gradients of
        the others stay: the next backward pass adds to them. Raises RunError for a missing one."""
        self.accumulate()
        due = [label for label, row in self.table.items() if row.is_due(step)]
        missing = [label for label in due if not self._has_gradient(label)]
        if missing:
            raise RunError(
                f"no gradient for {', '.join(missing)} at step {step}: every parameter needs a "
                f"gradient; for an unused one add `0 * p.sum()` to the loss"
            )
        # By label, the parameter that is tied to it. Tied ones take no part of their own.
        tied_to = {}
        if self.tied:
            tied_to = {row.tied_to: label for label, row in self.table.items() if row.tied_to}
        active = [label for label in due if label not in tied_to.values()]

        # 1. Launch the reductions.
        reductions = {}
        for label in self.scatter_order:
            if label not in active:
                continue
            if label in tied_to:  # added while the reductions before it travel
                tied_grad = self._pending(tied_to[label])
                transpose_add(tied_grad, self._pending(label), self.world_size == 1)
            reductions[label] = self._launch_reduction(label)

        # 2. Update as soon as the reduction is done, and launch the gather.
        gathers = {}
        for label in self.work_order:
            if label not in active:
                continue
            grad, work = reductions[label]
            if work is not None:
                work.wait()
            self._update(label, grad)
            gathers[label] = self._launch_gather(label)

        # 3. Wait for the gathers; first for what a tied parameter copies.
        for label in sorted(gathers, key=lambda label: label not in tied_to):
            if gathers[label] is not None:
                gathers[label].wait()
            if label in tied_to:
                tied = self.params[tied_to[label]]
                transpose_copy(self.params[label].data, tied.data, self.world_size == 1)

        # The next backward pass begins these anew.
        for label in due:
            self.params[label].grad = None
        self.in_wide -= set(due)

    def _launch_reduction(self, label: str) -> tuple[Tensor, dist.Work | None]:
        """The summed gradient of this rank's rows, in place, and what to wait for before reading it."""
        grad = self._pending(label)
        own = self._own(label, grad)
        if self.world_size == 1:
            return own, None
        if self.table[label].comms == "replicated":
            return own, dist.all_reduce(grad, async_op=True)
        return own, reduce_scatter(self._rank_slice(label, grad).view(-1), grad.view(-1))

    def _update(self, label: str, grad: Tensor) -> None:
        args = UpdateArgs(self.lr_schedule, self.momentum, 1 / self.grad_divisor, self.finite)
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

    batch_tokens: int  # of all micro-batches together
    max_doc_len: int  # documents are cut at this many tokens
    short_window: int  # tokens
    long_window: int  # tokens
    yarn_window: int  # tokens: the long window that the rotary table is made for
    lr_schedule: float  # multiplies every learning rate
    momentum: float  # of NorMuon
    mtp_weights: tuple[float, ...]  # of the next token, the one after it, …
    prefix_weight: float  # of the next token's prefix


def step_schedule(step: int, h: Hyperparameters) -> StepSchedule:
    """The schedule as a pure function. step = h.total_iterations is the final validation."""
    stage, progress = stage_at(step, h.num_scheduled_iterations)
    shown = FINAL_VALIDATION if step >= h.total_iterations else stage

    def interpolate(first: float, last: float) -> float:
        return first + (last - first) * progress

    return StepSchedule(
        batch_tokens=shown.batch * h.batch_unit,
        max_doc_len=shown.docs * h.block_size,
        short_window=shown.short * h.block_size,
        long_window=shown.long * h.block_size,
        yarn_window=stage.long * h.block_size,
        lr_schedule=lr_multiplier(step, h.num_scheduled_iterations),
        momentum=muon_momentum(step, h),
        mtp_weights=tuple(map(interpolate, stage.mtp_first, stage.mtp_last)),
        prefix_weight=interpolate(stage.prefix_first, stage.prefix_last),
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


def lr_multiplier(step: int, scheduled: int) -> float:
    """The stage's multiplier; from LR_DECAY_FROM it falls, linearly, to LR_FLOOR at the end of the
    scheduled steps."""
    decay_from = int(LR_DECAY_FROM * scheduled)
    stage, _ = stage_at(step, scheduled)
    if step >= scheduled:  # the extension
        return LR_FLOOR
    if step <= decay_from:  # constant within a stage
        return stage.lr
    # The cooldown: linear, while the stages go on.
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
    # The last steps follow the newest gradients.
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
            row = replace(row, lr=row.lr * h.adam_lr_scale)
        if isinstance(row, NorMuon):
            row = replace(row, lr=row.lr * h.muon_lr_scale, head_dim=h.head_dim)
        if h.comms == "replicated":
            row = replace(row, comms="replicated")
        if h.grad_dtype != "param":
            row = replace(row, grad_dtype=getattr(torch, h.grad_dtype))
        table[label] = row
    return table


class TrainingManager:
    """Model and optimizer of a run. Applies the schedule, which is a pure function of the step; what
    it has changed in the model (YaRN, the end of weight tying) is kept as extra state."""

    def __init__(self, model: GPT, h: Hyperparameters):
        self.model = model
        self.h = h
        self.optimizer = NorMuonAndAdam(
            model.named_parameters(), param_table(h), SCATTER_ORDER, WORK_ORDER
        )
        self.optimizer.grad_divisor = h.micro_batches
        self.split_step = split_step(h.num_scheduled_iterations)
        # In tokens, by stage: the rotary table is made for one after the other.
        self.long_windows = [stage.long * h.block_size for stage in (*STAGES, EXTENSION)]
        self.yarn_window = self.long_windows[0]
        self.max_val_doc_len = 0  # tokens of the longest validation document; 0: unknown
        self.advance_schedule(0)

    def advance_schedule(self, step: int) -> None:
        """Set the schedule to `step`. YaRN passes through the windows of all stages on the way.
        Raises ValueError if YaRN is already beyond that step."""
        coming = step_schedule(step, self.h)
        old = self.long_windows.index(self.yarn_window)
        new = self.long_windows.index(coming.yarn_window)
        if new < old:
            raise ValueError(f"step {step} is before the stage that YaRN has reached")
        for narrow, wide in itertools.pairwise(self.long_windows[old : new + 1]):
            self.model.extend_windows(narrow, wide)
        self.current = coming
        self.yarn_window = coming.yarn_window
        values = (*coming.mtp_weights, coming.prefix_weight)
        weights = torch.empty(len(values), device=self.model.embed.device)
        for weight, value in zip(weights, values):  # launches: a copy would keep the host waiting
            weight.fill_(value)
        self.mtp_weights = weights[:-1]
        self.prefix_weight = weights[-1:] if coming.prefix_weight else None

    def forward_schedule(self) -> ForwardSchedule:
        current = self.current
        windows = (current.short_window, current.long_window)
        if uses_flash(self.model.embed):
            windows = map(graph_input, windows)
        if not self.model.training:  # one graph for all stages
            return ForwardSchedule(self.mtp_weights[:1], *windows, self.max_val_doc_len)
        return ForwardSchedule(self.mtp_weights, *windows, current.max_doc_len, self.prefix_weight)

    def batch_tokens(self, step: int) -> int:
        return step_schedule(step, self.h).batch_tokens

    def max_doc_len(self, step: int) -> int:
        return step_schedule(step, self.h).max_doc_len

    def step_optimizers(self, step: int) -> None:
        """Update the model with the gradients of `step`, at its learning rate and momentum. End
        weight tying if that is due."""
        current = step_schedule(step, self.h)
        self.optimizer.lr_schedule = current.lr_schedule
        self.optimizer.momentum = current.momentum
        self.optimizer.step(step)
        if step == self.split_step:
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
    seed_random(h.seed)
    torch.manual_seed(h.seed)
    sizes = (h.vocab_size, len(LAYERS), h.num_heads, h.head_dim, h.model_dim, h.max_tokens)
    tables = dict(bigram_rows=h.bigram_rows, prefixes=prefixes)
    options = dict(**tables, attention_scale=h.attention_scale)
    fp8 = has_fp8(ranks.device)
    model = GPT(*sizes, **options, fp8_head=h.fp8_head and fp8, fp8_mlp=h.fp8_mlp and fp8)
    if h.dtype == "float32":
        model.float()
    model.to(ranks.device)
    if h.compile:
        compile_model(model)
    manager = TrainingManager(model, h)
    manager.max_val_doc_len = max_val_doc_len
    return manager


def check_shards(h: Hyperparameters) -> DataFacts:
    """Raise DataError if the shards cannot feed the schedule or the validation."""
    return check_data(
        h.data,
        steps=h.total_iterations,
        batch_tokens=lambda step: step_schedule(step, h).batch_tokens,
        max_doc_len=lambda step: step_schedule(step, h).max_doc_len,
        val_tokens=h.val_tokens,
        val_batch_tokens=h.val_batch_tokens,
        encoding=h.encoding,
        **h.stream,
    )


def training_batches(h: Hyperparameters, ranks: Ranks, first_step: int) -> Iterator:
    """This rank's micro-batches (inputs, targets, cu_seqlens) from first_step on, on the CPU."""
    return distributed_data_generator(
        train_pattern(h.data),
        lambda step: step_schedule(step, h).batch_tokens,
        lambda step: step_schedule(step, h).max_doc_len,
        rank=ranks.rank,
        world_size=ranks.world_size,
        first_step=first_step,
        **h.stream,
    )


def validation_batches(h: Hyperparameters, ranks: Ranks, max_doc_len: int) -> Iterator:
    """This rank's micro-batches of the validation tokens: contiguous, documents not cut."""
    return distributed_data_generator(
        val_pattern(h.data),
        h.val_batch_tokens,
        max_doc_len,
        rank=ranks.rank,
        world_size=ranks.world_size,
        aligned=False,
        **h.stream,
    )


# -----------------------------------------------------------------------------
# Warm-up and validation


def is_validated(step: int, h: Hyperparameters) -> bool:
    return step == h.total_iterations or (h.val_every > 0 and step % h.val_every == 0)


def forward_shapes(h: Hyperparameters, first_step: int = 0) -> Iterator[tuple[int, bool, int]]:
    """(step, whether it trains, tokens of a micro-batch) of every shape of a forward pass in the
    schedule from first_step on. With FlashAttention one graph serves all windows; on a CPU each has
    its own."""
    seen = set()
    for step in range(first_step, h.total_iterations + 1):
        current = step_schedule(step, h)
        passes = [(True, current.batch_tokens)] if step < h.total_iterations else []
        if is_validated(step, h):
            passes.append((False, h.val_batch_tokens))
        for training, batch_tokens in passes:
            tokens = batch_tokens // h.micro_batches
            windows = (current.short_window, current.long_window)
            shape = (training, tokens, windows, training and len(current.mtp_weights))
            if shape not in seen:
                seen.add(shape)
                yield step, training, tokens


def warm_up(manager: TrainingManager, ranks: Ranks, first_step: int = 0) -> None:
    """Run every shape of the schedule from first_step on, and every kind of update, so that nothing
    compiles while the clock runs. The manager is of no use afterwards: the run builds its own."""
    model = manager.model
    h = manager.h
    sizes = dict(vocab_size=h.vocab_size, doc_slots=h.doc_slots)
    for step, training, tokens in forward_shapes(h, first_step):
        manager.advance_schedule(step)
        model.train(training)
        model.zero_grad()
        batch = synthetic_batch(tokens, max_doc_len=manager.current.max_doc_len, **sizes)
        batch = to_device(batch, ranks.device)
        for _ in range(1 + training):  # the second gradient is added to the first
            with torch.set_grad_enabled(training):
                loss = model(*batch, manager.forward_schedule())
            if training:
                loss.backward()
    # Updates at even and odd steps; tied, at the split, and after it.
    split = manager.split_step
    for step in (0, 1, split, split + 1, split + 2):
        for param in model.parameters():  # an update compiles for shapes, whatever the gradient
            param.grad = torch.ones_like(param)
        manager.step_optimizers(step)


@torch.no_grad()
def validate(step: int, manager: TrainingManager, run: Run) -> float | None:
    """Mean next-token loss of the validation tokens, in nats; None if a signal has cut it short."""
    h = manager.h
    model = manager.model.eval()
    seed_random(h.seed, step, run.ranks.rank)  # the same draws after a resume
    manager.advance_schedule(step)
    num_batches = h.val_tokens // h.val_batch_tokens
    per_batch = h.micro_batches // run.ranks.world_size  # this rank's micro-batches
    opened = functools.partial(validation_batches, h, run.ranks, manager.max_val_doc_len)
    total = torch.zeros((), device=run.ranks.device)  # of this rank's mean losses
    for i, batch in enumerate(run.read_ahead(opened, per_batch, num_batches)):
        total += model(*to_device(batch, run.ranks.device), manager.forward_schedule())
        if i % per_batch == 0 and run.heard_signal():
            return None
    model.train()
    return sum(run.ranks.gather(total.item())) / (num_batches * h.micro_batches)


# -----------------------------------------------------------------------------
# The training loop


def prepare(run: Run) -> TrainingManager:
    """Everything before the clock starts: checks, log, warm-up, then the model that is trained."""
    h = run.settings
    ranks = run.ranks
    ranks.on_all_ranks(h.check, ranks.world_size)
    ranks.on_first(functools.partial(make_default_data, h.data))
    data = ranks.on_all_ranks(check_shards, h)
    prefixes = ranks.on_all_ranks(load_prefixes, h.data, h.encoding, h.vocab_size)
    if ranks.device.type == "cuda":
        arithmetic = f"attention: {flash_attention()}"
    else:
        arithmetic = use_cpu(h.compile)
    if h.compile or ranks.device.type == "cuda":
        # A graph for each batch size and mode, on a CPU for each window; an update for each shape.
        torch._dynamo.config.recompile_limit = 64

    # The warm-up has a manager of its own: none of its gradients reaches an optimizer or a moving
    # average of the run. What it compiles, the second manager uses.
    manager = ranks.on_all_ranks(build, h, ranks, data.longest, prefixes)
    run.open(manager, data.shards, [arithmetic])
    run.announce(manager, PRESETS)
    with run.timed_warm_up():
        warm_up(manager, ranks, run.first_step)
        del manager
    manager = build(h, ranks, data.longest, prefixes)
    run.restore(manager)
    return manager


def forward_backward(step: int, manager: TrainingManager, batches: Iterator, run: Run) -> None:
    """This rank's micro-batches of a step: leaves their gradients pending. Raises AgreedError on all
    ranks if a loss is not finite: on a CPU this step's, on a GPU that of the step before, so that the
    host can go on. There the update itself leaves out a step whose loss is not."""
    ranks = run.ranks
    schedule = manager.current
    tokens = schedule.batch_tokens // ranks.world_size
    num_batches = manager.h.micro_batches // ranks.world_size
    total = torch.zeros((), device=ranks.device)  # of this rank's losses, summed over tokens
    for i, batch in enumerate(itertools.islice(batches, num_batches)):
        loss = manager.model(*to_device(batch, ranks.device), manager.forward_schedule())
        total += loss.detach()
        if i == num_batches - 1:  # reduced over the ranks while the last backward pass runs
            run.send_loss(step, total / (tokens * sum(schedule.mtp_weights)))
        loss.backward()
        manager.optimizer.accumulate()
    manager.optimizer.finite = run.check_loss()


def train(
    h: Hyperparameters, ranks: Ranks, signals: Signals, parse: Callable | None = None
) -> None:
    """One run, from the initial weights or a checkpoint to the log's last line. Raises RunError.
    parse: see Run."""
    with Run(replace(h), ranks, signals, SOURCES, parse) as run:
        h = run.settings
        manager = prepare(run)
        last = h.total_iterations
        opened = functools.partial(training_batches, h, ranks, run.first_step)
        per_step = h.micro_batches // ranks.world_size
        batches = run.read_ahead(opened, per_step, last - run.first_step)
        clock = run.clock
        clock.start()
        for step in range(run.first_step, last + 1):
            # Not timed: validation, checkpoints, and the end that a signal asks for.
            if is_validated(step, h) or run.must_pause(step):
                clock.stop()
                run.save_or_stop(step)  # if a checkpoint is due, or a signal has arrived
                if is_validated(step, h):
                    val_loss = validate(step, manager, run)
                    run.stop_if_signalled(step)
                    run.log.write(
                        f"step:{step}/{last} val_loss:{val_loss:.4f} "
                        f"train_time:{clock.ms():.0f}ms step_avg:{clock.ms() / max(step, 1):.2f}ms"
                    )
                clock.start()
            if step == last:
                break

            # Timed: data, forward, backward, reductions, updates, gathers, the step line.
            seed_random(h.seed, step, ranks.rank)
            manager.advance_schedule(step)
            forward_backward(step, manager, batches, run)
            manager.step_optimizers(step)
            run.log_step(
                f"step:{step + 1}/{last} "
                f"train_time:{clock.ms():.0f}ms step_avg:{clock.ms() / (step + 1):.2f}ms"
            )
        clock.stop()
        run.finish(functools.partial(sample_text, manager) if h.sample_tokens else None)


def main(argv: list[str] | None = None) -> None:
    """Options, ranks, training. Raises RunError, or SystemExit with code 2 for bad options."""
    parse = functools.partial(parse_options, Hyperparameters, PRESETS, argv)
    with Signals() as signals:
        train(parse(), join_ranks(), signals, parse)


if __name__ == "__main__":
    run_main(main)  # errors as one line, and the exit code: runtime/ranks.py
