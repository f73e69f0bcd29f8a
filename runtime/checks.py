"""What can be known before step 0: settings, tables, data. Each fault is one line, with what to do."""

import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from data.encodings import check_encoding
from runtime.options import ROOT, check_values, is_plain_name
from runtime.ranks import RunError

# The tools that make the presets' data, by folder.
DATA_TOOLS = {
    ROOT / "data/local": "data/local_text.py",
    ROOT / "data/fineweb10B": "data/cached_fineweb10B.py",
}


def raise_first(*rules: tuple[Any, str]) -> None:
    """Raise ValueError with the message of the first rule whose condition is true."""
    for broken, message in rules:
        if broken:
            raise ValueError(message)


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
    T = h.max_tokens  # of the longest micro-batch
    val = h.val_batch_tokens
    vocab = h.vocab_size
    bad_name = h.run_id and not is_plain_name(h.run_id)
    raise_first(
        (h.total_iterations > 10**6, f"{h.total_iterations} steps: at most a million"),
        (
            h.micro_batches % world_size,
            f"--micro_batches={h.micro_batches} cannot be shared by {world_size} ranks: use a "
            f"multiple of {world_size}, or RANKS=n ./run.sh with another number",
        ),
        (h.doc_slots > T + 1, f"--doc_slots={h.doc_slots}: a micro-batch has {T} tokens at most"),
        (h.block_size > T, f"--block_size={h.block_size}: a micro-batch has {T} tokens at most"),
        (
            h.val_tokens % val,
            f"--val_tokens={h.val_tokens}: must be a multiple of --val_batch_tokens={val}",
        ),
        (h.bos_id >= vocab, f"--bos_id={h.bos_id}: must be below --vocab_size={vocab}"),
        (vocab > 65536, f"--vocab_size={vocab}: shards hold uint16 tokens, so at most 65536"),
        (bad_name, f"--run_id={ascii(h.run_id)}: must be a plain file name"),
    )


def check_model_sizes(
    num_layers: int, layers: int, num_heads: int, head_dim: int, model_dim: int
) -> None:
    """Raise ValueError for sizes that the topology, with so many layers, cannot have."""
    heads = num_heads * head_dim
    raise_first(
        (num_layers != layers, f"num_layers={num_layers}: must be {layers}, as LAYERS"),
        (num_heads % 2, f"--num_heads={num_heads}: must be even, paired layers split the heads"),
        (head_dim % 4, f"--head_dim={head_dim}: must be a multiple of 4, half of it rotates"),
        (model_dim != heads, f"--model_dim={model_dim}: must be num_heads * head_dim = {heads}"),
        (model_dim % 16, f"--model_dim={model_dim}: must be a multiple of 16 for FP8 matmuls"),
    )


# -----------------------------------------------------------------------------
# Tables


def check_layers(layers: Iterable[Any], read: Iterable[str]) -> None:
    """Raise ValueError, naming the layer, if LAYERS is inconsistent. read: what MUDD reads of it."""
    kept: list[str] = []
    has_attention = False  # of the layer before
    for i, layer in enumerate(layers):
        columns = ("value_gate", "paired", "key_offset", "same_input", "mudd")
        needs_attention = any(getattr(layer, column) for column in columns)
        row = f"LAYERS, layer {i}:"
        raise_first(
            (layer.index != i, f"{row} its index is {layer.index}"),
            (layer.window not in ("", "short", "long"), f"{row} no window {layer.window!r}"),
            (
                not layer.window and needs_attention,
                f"{row} {', '.join(columns)} need attention, so a window",
            ),
            (
                layer.same_input and not has_attention,
                f"{row} same_input, but the layer before has no attention",
            ),
            (
                layer.mudd and layer.value_gate,
                f"{row} mudd has value gates of its own: no value_gate",
            ),
            (layer.add and layer.add not in kept, f"{row} no earlier layer keeps {layer.add!r}"),
            (layer.keep and layer.keep in kept, f"{row} {layer.keep!r} is kept twice"),
        )
        kept.append(layer.keep)
        has_attention = bool(layer.window)
    missing = set(read) - set(kept)
    raise_first((missing, f"LAYERS: no layer keeps {', '.join(sorted(missing))}, which MUDD reads"))


def check_stages(stages: tuple, extension: Any, final: Any, split_embed_at: float) -> None:
    """Raise ValueError, naming the stage, if STAGES is inconsistent."""
    for i, stage in enumerate((*stages, extension, final), 1):
        row = f"STAGES, stage {stage.index}:"
        sizes = (stage.batch, stage.docs, stage.short, stage.long)
        weights = (stage.mtp_first, stage.mtp_last)
        raise_first(
            (stage.index != i, f"{row} must have index {i}"),
            (
                not all(isinstance(x, int) and x > 0 for x in sizes),
                f"{row} batch, docs and windows must be whole numbers above 0",
            ),
            (not 0 < stage.lr < math.inf, f"{row} lr must be above 0"),
            (
                not all(isinstance(x, tuple) and sum(x) > 0 for x in weights)
                or len(stage.mtp_first) != len(stage.mtp_last),
                f"{row} mtp_first and mtp_last must be tuples of equal length, as (1,), with sums > 0",
            ),
        )
    ends = [stage.until for stage in stages]
    longs = [stage.long for stage in (*stages, extension)]
    raise_first(
        (
            ends != sorted(set(ends)) or ends[0] <= 0 or ends[-1] != 1,
            f"STAGES: until must rise to 1, is {ends}",
        ),
        (longs != sorted(longs), f"STAGES: long windows must not shrink (YaRN), are {longs}"),
        (split_embed_at < 0, f"SPLIT_EMBED_AT is {split_embed_at}, must be 0 or more"),
    )


def check_optimizer(
    params: dict[str, torch.Tensor], table: dict[str, Any], *orders: tuple[str, ...]
) -> None:
    """Raise ValueError unless the table and both orders name every parameter exactly once, and
    every tied parameter follows one that is updated at the same steps."""
    names = ("PARAM_TABLE", "SCATTER_ORDER", "WORK_ORDER")
    for name, order in zip(names, (tuple(table), *orders)):
        missing = ", ".join(sorted(params.keys() - set(order)))
        unknown = ", ".join(sorted(set(order) - params.keys()))
        twice = ", ".join(sorted({label for label in order if order.count(label) > 1}))
        raise_first(
            (missing, f"{name} must name every parameter exactly once; missing: {missing}"),
            (unknown, f"{name} has unknown names: {unknown}"),
            (twice, f"{name} must name every parameter exactly once; twice: {twice}"),
        )
    others = [row.tied_to for row in table.values() if row.tied_to]
    twice = ", ".join(sorted({label for label in others if others.count(label) > 1}))
    raise_first((twice, f"PARAM_TABLE ties two parameters to {twice}: only one can be"))
    for label, row in table.items():
        other = table.get(row.tied_to)
        raise_first(
            (row.tied_to and other is None, f"{label} is tied to {row.tied_to}: no parameter"),
            (other and other.tied_to, f"{label} is tied to {row.tied_to}, which is tied itself"),
            (
                other and other.every != row.every,
                f"{label} and {row.tied_to} must have the same `every`",
            ),
        )


def check_no_other_optimizer(manager: Any) -> None:
    """Raise ValueError if the manager holds an optimizer whose state no checkpoint would have."""
    for name, value in vars(manager).items():
        for held in tree_leaves(value):
            if isinstance(held, torch.optim.Optimizer):
                raise ValueError(
                    f"TrainingManager.{name} is a torch.optim.{type(held).__name__}, whose state is "
                    f"not in checkpoints: use --save_every=0 --save_minutes=0, or make it a row of "
                    f"PARAM_TABLE"
                )


# -----------------------------------------------------------------------------
# Data


def make_default_data(folder: str) -> None:
    """Make or fetch a preset's data, if its folder has no shards. Raises RunError."""
    path = Path(folder).resolve()
    if path not in DATA_TOOLS or any(path.glob("*_train_*.bin")):
        return
    tool = DATA_TOOLS[path]
    print(f"data: {tool}", flush=True)
    done = subprocess.run([sys.executable, str(ROOT / tool)])
    if done.returncode:
        raise RunError(f"{tool} failed: without shards in {folder} nothing can be trained")
