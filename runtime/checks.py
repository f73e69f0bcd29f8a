"""What can be known before step 0: settings, tables, data, GPU memory. Each fault is one line, with
what to do."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from data.encodings import check_encoding
from data.shards import TRAIN, UNFINISHED, VALIDATION
from runtime.options import ROOT, check_values, is_plain_name
from runtime.ranks import RunError

# The tools that make the presets' data, by folder.
DATA_TOOLS = {
    ROOT / "data/local": "data/local_text.py",
    ROOT / "data/fineweb10B": "data/cached_fineweb10B.py",
}


# -----------------------------------------------------------------------------
# Settings


def check_settings(h: Any, batches: list[int], world_size: int) -> None:
    """Raise ValueError if these settings cannot run on world_size ranks. batches: batch units of a
    step, by stage."""
    check_values(h)
    check_encoding(h.encoding)
    sizes = {
        f"--batch_unit={h.batch_unit} (stage {i})": units * h.batch_unit
        for i, units in enumerate(batches, 1)
    }
    sizes[f"--val_batch_tokens={h.val_batch_tokens}"] = h.val_batch_tokens
    for name, tokens in sizes.items():
        if tokens % (16 * h.micro_batches):
            raise ValueError(
                f"{name}: {tokens} tokens do not divide into {h.micro_batches} micro-batches of a "
                f"multiple of 16 tokens: change it, or use another --micro_batches"
            )
    if h.micro_batches % world_size:
        raise ValueError(
            f"--micro_batches={h.micro_batches} cannot be shared by {world_size} ranks: use a "
            f"multiple of {world_size}, or RANKS=n ./run.sh with another number"
        )
    if h.val_tokens % h.val_batch_tokens:
        multiple = f"a multiple of --val_batch_tokens={h.val_batch_tokens}"
        raise ValueError(f"--val_tokens={h.val_tokens}: must be {multiple}")
    if h.run_id and not is_plain_name(h.run_id):
        raise ValueError(f"--run_id={ascii(h.run_id)}: must be a plain file name")


def check_model_sizes(num_heads: int, head_dim: int, model_dim: int) -> None:
    """Raise ValueError for sizes that the topology cannot have."""
    if num_heads % 2:
        raise ValueError(f"--num_heads={num_heads}: must be even, paired layers split the heads")
    if head_dim % 4:
        raise ValueError(f"--head_dim={head_dim}: must be a multiple of 4, half of it rotates")
    if model_dim != num_heads * head_dim:
        product = f"num_heads * head_dim = {num_heads * head_dim}"
        raise ValueError(f"--model_dim={model_dim}: must be {product}")
    if model_dim % 16:
        raise ValueError(f"--model_dim={model_dim}: must be a multiple of 16 for FP8 matmuls")


# -----------------------------------------------------------------------------
# Tables


def check_layers(layers: Iterable[Any], mixed: Iterable[str], read: Iterable[str]) -> None:
    """Raise ValueError, naming the layer, for columns of LAYERS that the model would ignore, or that
    read what is not kept. mixed: what a layer with mudd reads; read: what the last layer's output is
    mixed with."""
    kept = {"", "c0", "value_embed"}
    has_attention = False  # the layer before has it
    needs_attention = ("value_gate", "paired", "key_offset", "same_input", "mudd")
    for i, layer in enumerate(layers):
        fault = ""
        missing = {layer.add, *(mixed if layer.mudd else ())} - kept
        if layer.index != i:
            fault = f"its index is {layer.index}"
        elif layer.window not in ("", "short", "long"):
            fault = f"no window {layer.window!r}"
        elif missing:
            fault = f"no earlier layer keeps {', '.join(sorted(missing))}"
        elif not layer.window and any(getattr(layer, column) for column in needs_attention):
            fault = f"{', '.join(needs_attention)} need attention, so a window"
        elif layer.same_input and not has_attention:
            fault = "same_input, but the layer before has no attention"
        elif layer.mudd and layer.value_gate:
            fault = "mudd has value gates of its own: no value_gate"
        if fault:
            raise ValueError(f"LAYERS, layer {i}: {fault}")
        kept.add(layer.keep)
        has_attention = bool(layer.window)
    if missing := set(read) - kept:
        raise ValueError(f"LAYERS: no layer keeps {', '.join(sorted(missing))}, which MUDD reads")


def check_stages(stages: tuple, extension: Any, final: Any) -> None:
    """Raise ValueError, naming the stage, for STAGES that would train as they do not say."""
    for i, stage in enumerate((*stages, extension, final), 1):
        if len(stage.mtp_first) != len(stage.mtp_last):
            raise ValueError(f"STAGES, stage {i}: mtp_first and mtp_last must be of equal length")
    ends = [stage.until for stage in stages]
    if ends != sorted(set(ends)) or ends[0] <= 0 or ends[-1] != 1:
        raise ValueError(f"STAGES: until must rise to 1, is {ends}")
    longs = [stage.long for stage in (*stages, extension)]
    if longs != sorted(longs):
        raise ValueError(f"STAGES: long windows must not shrink (YaRN), are {longs}")


def check_optimizer(
    params: dict[str, torch.Tensor], table: dict[str, Any], *orders: tuple[str, ...]
) -> None:
    """Raise ValueError unless the table and both orders name every parameter exactly once, and
    tied parameters are updated at the same steps."""
    names = ("PARAM_TABLE", "SCATTER_ORDER", "WORK_ORDER")
    for name, order in zip(names, (tuple(table), *orders)):
        wrong = {x for x in (*params, *order) if order.count(x) != (x in params)}
        if wrong:
            fault = f"unknown, missing or twice: {', '.join(sorted(wrong))}"
            raise ValueError(f"{name} must name every parameter exactly once; {fault}")
    for label, row in table.items():
        if row.comms not in ("sharded", "replicated"):
            raise ValueError(f"{label}: comms={row.comms!r}: must be 'sharded' or 'replicated'")
        if row.tied_to and table[row.tied_to].every != row.every:
            raise ValueError(f"{label} and {row.tied_to} must have the same `every`")


def check_state(label: str, state: dict[str, Any], rows: int) -> None:
    """Raise ValueError for a rule's initial_state that no other number of ranks could load."""
    for name, x in state.items():
        if isinstance(x, Tensor) and (not x.dim() or len(x) != rows):
            found = f"the state {name!r} has shape {tuple(x.shape)}, but needs {rows} rows"
            raise ValueError(f"PARAM_TABLE, {label}: {found}; what all rows share can be a number")


def check_saved(manager: Any) -> None:
    """Raise ValueError, naming it, for state of the manager that no checkpoint would have: an
    optimizer, or tensors that are neither the model's nor the optimizer's nor in extra_state."""
    own = [x for x in tensors_of([manager.model, manager.optimizer]) if isinstance(x, Tensor)]
    in_place = {x.untyped_storage().data_ptr() for x in own}
    saved = [*tensors_of(manager.extra_state())]
    for name, value in vars(manager).items():
        for x in tensors_of(value):
            fault = f"is a torch.optim.{type(x).__name__}: make it a row of PARAM_TABLE"
            if isinstance(x, Tensor):
                place = x.untyped_storage().data_ptr()
                if place in in_place or any(torch.equal(x.to(y), y) for y in saved):
                    continue
                fault = f"holds a tensor {tuple(x.shape)}: add it to extra_state, load_extra_state"
            raise ValueError(
                f"{type(manager).__name__}.{name} {fault}, as checkpoints do not have it, or use "
                f"--save_every=0 --save_minutes=0"
            )


def tensors_of(x: Any, deeper: bool = True) -> Iterator[Any]:
    """The tensors and optimizers in containers, in modules, and in the attributes of other objects."""
    for leaf in tree_leaves(x):
        if isinstance(leaf, (Tensor, torch.optim.Optimizer)):
            yield leaf
        elif isinstance(leaf, torch.nn.Module):
            yield from (*leaf.parameters(), *leaf.buffers())
        elif deeper and hasattr(leaf, "__dict__"):
            yield from tensors_of(dict(vars(leaf)), deeper=False)


# -----------------------------------------------------------------------------
# Data


def make_default_data(folder: str) -> None:
    """Make or fetch a preset's data, unless its folder has all shards. Raises RunError."""
    path = Path(folder).resolve()
    whole = any(path.glob(TRAIN)) and any(path.glob(VALIDATION))
    if path not in DATA_TOOLS or (whole and not (path / UNFINISHED).exists()):
        return
    tool = DATA_TOOLS[path]
    print(f"data: {tool}", flush=True)
    done = subprocess.run([sys.executable, str(ROOT / tool)])
    if done.returncode:
        raise RunError(
            f"{tool} failed: without shards in {folder} nothing can be trained; where the project is "
            f"read-only, make them by {tool} --output, and give --data and --log_dir"
        )


# -----------------------------------------------------------------------------
# GPU memory, estimated

# Bytes a token holds at the peak of a pass, for each unit of width. Besides, a token has bf16 logits.
# Counted in the code that torch.compile generates: 20.6 GiB with 49,152 tokens, within the loss; 27.3
# in validation with 262,144, where x and the tables' rows lie beside the logits, 2 · (1 + 1 + 5 + 1/4).
# This count of record 70's recipe, 19.30 and 24.94, is what an H100 measured (2026-11-26 in records/).
TRAINING_BYTES = 456
VALIDATION_BYTES = 15
UNUSABLE = 0.1  # share of memory that the allocator cannot give, as its blocks have other sizes
GIB = 2**30


def memory(h: Any, state: int, batch: int) -> int:
    """Bytes of a rank at its peak, estimated. state: state_bytes; batch: tokens of the longest step."""
    passes = ((batch, TRAINING_BYTES), (h.val_batch_tokens, VALIDATION_BYTES))
    held = (tokens * (2 * h.vocab_size + size * h.model_dim) for tokens, size in passes)
    return state + max(held) // h.micro_batches


def state_bytes(manager: Any) -> int:
    """Of this rank's weights, their gradients, buffers and optimizer state."""
    weights = [*manager.model.parameters()]
    state = [x for own in manager.optimizer.state.values() for x in own.values()]
    held = [*weights, *weights, *manager.model.buffers(), *state]
    return sum(x.nbytes for x in held if isinstance(x, Tensor))


def memory_advice(h: Any, manager: Any, batch: int, world_size: int, free: int) -> str:
    """If so many free bytes are too few: the --micro_batches that would do. Empty: they suffice."""
    state = state_bytes(manager)
    usable = (1 - UNUSABLE) * free
    need = size = memory(h, state, batch)
    if need <= usable:
        return ""
    proposal = "no --micro_batches needs so little"
    with suppress(ValueError):  # of a number that cannot run
        while size > usable:
            h = dataclasses.replace(h, micro_batches=2 * h.micro_batches)
            h.check(world_size)
            size = memory(h, state, batch)
        less = f"{size / GIB:.1f} GiB, and cuts documents elsewhere"
        proposal = f"--micro_batches={h.micro_batches} needs about {less}"
    found = f"about {need / GIB:.1f} GiB needed, {free / GIB:.1f} GiB free"
    return f"GPU memory, estimated by tokens: {found}: {proposal}"
