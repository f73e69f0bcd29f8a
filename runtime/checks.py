"""What can be known before step 0: settings, tables, data. Each fault is one line, with what to do."""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
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
    if h.total_iterations > 10**6:
        raise ValueError(f"{h.total_iterations} steps: at most a million")
    if h.micro_batches % world_size:
        raise ValueError(
            f"--micro_batches={h.micro_batches} cannot be shared by {world_size} ranks: use a "
            f"multiple of {world_size}, or RANKS=n ./run.sh with another number"
        )
    T = h.max_tokens  # the longest micro-batch
    for name, most in (("doc_slots", T + 1), ("block_size", T)):
        if getattr(h, name) > most:
            value = f"--{name}={getattr(h, name)}"
            raise ValueError(f"{value}: a micro-batch has {T} tokens at most")
    if h.val_tokens % h.val_batch_tokens:
        multiple = f"a multiple of --val_batch_tokens={h.val_batch_tokens}"
        raise ValueError(f"--val_tokens={h.val_tokens}: must be {multiple}")
    if h.bos_id >= h.vocab_size:
        raise ValueError(f"--bos_id={h.bos_id}: must be below --vocab_size={h.vocab_size}")
    if h.vocab_size > 65536:
        limit = "shards hold uint16 tokens, so at most 65536"
        raise ValueError(f"--vocab_size={h.vocab_size}: {limit}")
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
    """Raise ValueError, naming the layer, if LAYERS is inconsistent. mixed: the kept outputs that a
    layer with mudd reads; read: those that are read after the last layer."""
    kept = ["c0", "value_embed"]  # always there
    has_attention = False  # the layer before has it
    needs_attention = ("value_gate", "paired", "key_offset", "same_input", "mudd")
    for i, layer in enumerate(layers):
        fault = ""
        if layer.index != i:
            fault = f"its index is {layer.index}"
        elif layer.window not in ("", "short", "long"):
            fault = f"no window {layer.window!r}"
        elif not layer.window and any(getattr(layer, column) for column in needs_attention):
            fault = f"{', '.join(needs_attention)} need attention, so a window"
        elif layer.same_input and not has_attention:
            fault = "same_input, but the layer before has no attention"
        elif layer.mudd and layer.value_gate:
            fault = "mudd has value gates of its own: no value_gate"
        elif layer.mudd and set(mixed) - set(kept):
            missing = ", ".join(sorted(set(mixed) - set(kept)))
            fault = f"mudd reads {missing}, which no earlier layer keeps"
        elif layer.add and layer.add not in kept:
            fault = f"no earlier layer keeps {layer.add!r}"
        elif layer.keep and layer.keep in kept:
            fault = f"{layer.keep!r} is kept twice"
        if fault:
            raise ValueError(f"LAYERS, layer {i}: {fault}")
        kept.append(layer.keep)
        has_attention = bool(layer.window)
    missing = ", ".join(sorted(set(read) - set(kept)))
    if missing:
        raise ValueError(f"LAYERS: no layer keeps {missing}, which MUDD reads")


def check_stages(stages: tuple, extension: Any, final: Any, split_embed_at: float) -> None:
    """Raise ValueError, naming the stage, if STAGES is inconsistent."""
    for i, stage in enumerate((*stages, extension, final), 1):
        sizes = (stage.batch, stage.docs, stage.short, stage.long)
        weights = (stage.mtp_first, stage.mtp_last)
        sums = [isinstance(x, tuple) and sum(x) > 0 for x in weights]
        fault = ""
        if stage.index != i:
            fault = f"must have index {i}"
        elif not all(isinstance(x, int) and x > 0 for x in sizes):
            fault = "batch, docs and windows must be whole numbers above 0"
        elif not 0 < stage.lr < math.inf:
            fault = "lr must be above 0"
        elif not all(sums) or len(stage.mtp_first) != len(stage.mtp_last):
            fault = "mtp_first and mtp_last must be tuples of equal length, as (1,), with sums > 0"
        if fault:
            raise ValueError(f"STAGES, stage {stage.index}: {fault}")
    ends = [stage.until for stage in stages]
    if ends != sorted(set(ends)) or ends[0] <= 0 or ends[-1] != 1:
        raise ValueError(f"STAGES: until must rise to 1, is {ends}")
    longs = [stage.long for stage in (*stages, extension)]
    if longs != sorted(longs):
        raise ValueError(f"STAGES: long windows must not shrink (YaRN), are {longs}")
    if split_embed_at < 0:
        raise ValueError(f"SPLIT_EMBED_AT is {split_embed_at}, must be 0 or more")


def check_optimizer(
    params: dict[str, torch.Tensor], table: dict[str, Any], *orders: tuple[str, ...]
) -> None:
    """Raise ValueError unless the table and both orders name every parameter exactly once, and
    every tied parameter follows one that is updated at the same steps."""
    names = ("PARAM_TABLE", "SCATTER_ORDER", "WORK_ORDER")
    for name, order in zip(names, (tuple(table), *orders)):
        unknown = ", ".join(sorted(set(order) - params.keys()))
        if unknown:
            raise ValueError(f"{name} has unknown names: {unknown}")
        missing = ", ".join(sorted(params.keys() - set(order)))
        twice = _twice(order)
        if missing or twice:
            fault = f"missing: {missing}" if missing else f"twice: {twice}"
            raise ValueError(f"{name} must name every parameter exactly once; {fault}")
    for label, row in table.items():
        if row.comms not in ("sharded", "replicated"):
            raise ValueError(f"{label}: comms={row.comms!r}: must be 'sharded' or 'replicated'")
    leaders = {label: row.tied_to for label, row in table.items() if row.tied_to}
    if twice := _twice(leaders.values()):
        raise ValueError(f"PARAM_TABLE ties two parameters to {twice}: only one can be")
    for label, leader in leaders.items():
        if leader not in table:
            raise ValueError(f"{label} is tied to {leader}: no parameter")
        if table[leader].tied_to:
            raise ValueError(f"{label} is tied to {leader}, which is tied itself")
        if table[leader].every != table[label].every:
            raise ValueError(f"{label} and {leader} must have the same `every`")


def _twice(names: Iterable[str]) -> str:
    return ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))


def check_state(label: str, state: dict[str, Any], rows: int) -> None:
    """Raise ValueError for a rule's initial_state that no other number of ranks could load."""
    for name, x in state.items():
        if isinstance(x, Tensor) and (not x.dim() or len(x) != rows):
            raise ValueError(
                f"PARAM_TABLE, {label}: the state {name!r} has shape {tuple(x.shape)}, but needs a row "
                f"for each of the rank's {rows} rows; what all rows share can be a number"
            )


def check_saved(manager: Any) -> None:
    """Raise ValueError, naming it, for state of the manager that no checkpoint would have: an
    optimizer, or tensors that are neither the model's nor the optimizer's nor in extra_state."""
    in_place = {storage(x) for x in tensors_of([manager.model, manager.optimizer])}
    saved = [*tensors_of(manager.extra_state())]
    for name, value in vars(manager).items():
        for x in tensors_of(value):
            if isinstance(x, torch.optim.Optimizer):
                fault = f"is a torch.optim.{type(x).__name__}, whose state is not in checkpoints: "
                fault += "make it a row of PARAM_TABLE"
            elif storage(x) in in_place or any(torch.equal(x.to(y), y) for y in saved):
                continue
            else:
                fault = f"holds a tensor {tuple(x.shape)} that is not in checkpoints: add it to "
                fault += "extra_state and load_extra_state"
            raise ValueError(
                f"{type(manager).__name__}.{name} {fault}, or use --save_every=0 --save_minutes=0"
            )


def storage(x: Any) -> int:
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else 0


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
