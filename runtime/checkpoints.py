"""Checkpoints: one file of a run at the start of a step, alike from any number of ranks.

A file has a line that names the format, the SHA-256 of the rest, then the output of torch.save. It
holds the parameters, the whole optimizer state (put together from the ranks' shards), each rank's
pending gradients, and what the manager adds (extra_state): plain types and tensors only.

The manager gives `optimizer` with params, table (rows have comms), state, own_rows, num_rows(label),
gradients(), load_gradients(); extra_state() and load_extra_state().
"""

import hashlib
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from data.shards import replace_file
from runtime.options import MAY_CHANGE_ON_RESUME
from runtime.ranks import Ranks

MAGIC = b"bankrun checkpoint 4\n"
LATEST = "latest"
AUTO = "auto"  # the latest, or a new run where there is no checkpoint


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or of another run."""


class Checkpoint(NamedTuple):
    """A checkpoint in memory."""

    path: Path
    content: dict[str, Any]  # what Run saves


# -----------------------------------------------------------------------------
# Files


def write_checkpoint(path: Path, saved: dict[str, Any], keep: int) -> None:
    """Save, then delete all but the newest `keep` checkpoints of the folder. The file appears whole
    or not at all. Raises OSError."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    payload = buffer.getbuffer()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(MAGIC)
        file.write(hashlib.sha256(payload).digest())
        file.write(payload)
    # A run that went on from an earlier step leaves later checkpoints behind: they are not newer.
    others = [other for other in checkpoints(path.parent) if other != path]
    by_age = sorted(others, key=lambda other: (step_of(other) > step_of(path), -step_of(other)))
    for other in by_age[keep - 1 :]:
        other.unlink(missing_ok=True)


def step_of(path: Path) -> int:
    return int(re.fullmatch(r"step_(\d+)\.pt", path.name)[1])


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder, the last step first."""
    found = [path for path in folder.glob("step_*.pt") if re.fullmatch(r"step_\d+\.pt", path.name)]
    return sorted(found, key=step_of, reverse=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What write_checkpoint saved. Unpickles tensors and plain types only. Raises CheckpointError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    digest = content[len(MAGIC) : len(MAGIC) + 32]
    payload = content[len(MAGIC) + 32 :]
    if not content.startswith(MAGIC):
        raise CheckpointError(f"{path}: not a checkpoint of this version")
    if hashlib.sha256(payload).digest() != digest:
        raise CheckpointError(f"{path}: damaged or cut short: resume from an earlier checkpoint")
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch.load makes of it
        raise CheckpointError(f"{path}: cannot be loaded: {type(error).__name__}") from error


def find_resumed(resume: str, log_dir: str | Path, run_id: str = "") -> Checkpoint | None:
    """The checkpoint that --resume names, if any. 'latest' or 'auto' is the newest usable one of
    run_id, or of the run in log_dir that saved last; 'auto' may find none. Raises ValueError."""
    if resume == AUTO and not run_id:
        raise ValueError("--resume=auto: needs the run's name, as --run_id=mine")
    if not resume or (resume == AUTO and not checkpoints(Path(log_dir, run_id))):
        return None
    if resume not in (LATEST, AUTO):
        return Checkpoint(Path(resume), read_checkpoint(Path(resume)))
    folders = [Path(log_dir, run_id)] if run_id else Path(log_dir).glob("*")
    found = filter(None, map(checkpoints, folders))
    newest_first = sorted(found, key=lambda x: x[0].stat().st_mtime, reverse=True)
    for path in sum(newest_first, []):
        try:
            return Checkpoint(path, read_checkpoint(path))
        except CheckpointError as error:
            if os.environ.get("RANK", "0") == "0":
                print(f"skipped {error}", flush=True)
    place = Path(log_dir, run_id or "*")
    raise CheckpointError(
        f"{resume}: no usable checkpoint in {place}: --save_every or --save_minutes writes them"
    )


def check_disk_space(folder: Path, manager: Any, world_size: int, files: int) -> None:
    """Raise OSError if the disk has no room for so many more checkpoints."""
    optimizer = manager.optimizer
    parameters = sum(param.nbytes for param in optimizer.params.values())
    whole = sum(
        x.nbytes // max(1, len(x)) * optimizer.num_rows(label)
        for label, state in optimizer.state.items()
        for x in state.values()
        if isinstance(x, Tensor)
    )
    gradients = world_size * parameters  # each rank has its own, if they are pending
    needed = files * (2**20 + parameters + gradients + whole)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder}: {files} checkpoints may need {needed:,} bytes of disk space, {free:,} are "
            f"free: lower --keep_checkpoints or give another --log_dir"
        )


# -----------------------------------------------------------------------------
# State


def whole_state(manager: Any, ranks: Ranks) -> dict[str, Any]:
    """Every rank's state on rank 0, copied to the CPU. Called by all ranks."""
    optimizer = manager.optimizer
    state = {}
    for label, own in optimizer.state.items():
        own = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, own)
        if optimizer.table[label].comms == "sharded":
            for name, x in own.items():
                if isinstance(x, Tensor):
                    own[name] = torch.cat(ranks.collect(x) or [x])
        state[label] = own
    gradients = {label: ranks.collect(x.cpu()) for label, x in optimizer.gradients().items()}
    saved = {
        "parameters": {label: param.detach() for label, param in optimizer.params.items()},
        "optimizer": state,
        "gradients": gradients,  # a list over the ranks: only their sum counts
        "extra": manager.extra_state(),
    }
    return tree_map(lambda x: x.cpu().clone() if isinstance(x, Tensor) else x, saved)


def load_whole_state(manager: Any, saved: dict[str, Any], ranks: Ranks) -> None:
    """Give this rank its part of what whole_state returned, on any number of ranks."""
    optimizer = manager.optimizer
    for label, param in optimizer.params.items():
        param.data.copy_(saved["parameters"][label])
        own_rows = optimizer.own_rows[label]
        for name, x in saved["optimizer"][label].items():
            if isinstance(x, Tensor):
                optimizer.state[label][name].copy_(x[own_rows])
            else:
                optimizer.state[label][name] = x
    own_gradients = {}
    for label, of_ranks in saved["gradients"].items():
        parts = of_ranks[ranks.rank :: ranks.world_size] or [torch.zeros_like(of_ranks[0])]
        first, *others = (part.double() for part in parts)
        own_gradients[label] = sum(others, first).to(of_ranks[0].dtype)  # one: bit for bit
    optimizer.load_gradients(own_gradients)
    manager.load_extra_state(saved["extra"])


# -----------------------------------------------------------------------------
# Checks


def check_fits(
    resumed: Checkpoint, settings: Any, plan: list, shards: dict[str, str], manager: Any
) -> None:
    """Raise CheckpointError, naming the first differences, unless this script, with these settings
    and shards, can go on from the checkpoint."""
    path, saved = resumed
    check_parameters(path, saved, manager)
    was, now = (
        {f"--{name}": x for name, x in given.items() if name not in MAY_CHANGE_ON_RESUME}
        for given in (saved["settings"], vars(settings))
    )
    raise_if_any(path, differences(was, now))
    was, now = (
        {f"shard {name}": text for name, text in texts.items() if "CRC-32" in text}
        for texts in (saved["shards"], shards)
    )
    faults = differences(was, now)
    for before, here in zip(saved["plan"], plan):
        changed = differences(before, here._asdict())
        faults += [f"plan of step {here.step}: {x}" for x in changed]
    raise_if_any(path, faults)


def check_parameters(path: Path, saved: dict[str, Any], manager: Any) -> None:
    """Raise CheckpointError if the checkpoint is of another recipe: if parameters or optimizer state
    differ in names, shapes or dtypes."""
    there = saved["state"]
    was = _layout(there["parameters"], there["optimizer"])
    raise_if_any(path, differences(was, _layout(manager.optimizer.params, manager.optimizer.state)))


def _layout(parameters: dict[str, Tensor], state: dict[str, dict]) -> dict[str, str]:
    """Shape and dtype of each parameter and of a row of its state; the type of what is no tensor."""
    found = {label: f"{tuple(x.shape)} {x.dtype}" for label, x in parameters.items()}
    for label, own in state.items():
        for name, x in own.items():
            text = f"rows of {tuple(x.shape[1:])} {x.dtype}" if isinstance(x, Tensor) else ""
            found[f"{label}'s state.{name}"] = text or type(x).__name__
    return found


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is not the same in two dicts, in words."""
    return [
        f"{name} was {was.get(name, 'not there')}, is {now.get(name, 'not there')}"
        for name in was | now
        if was.get(name, "not there") != now.get(name, "not there")
    ]


def raise_if_any(path: Path, faults: list[str]) -> None:
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{path} cannot be resumed: {'; '.join(faults[:3])}{more}")
