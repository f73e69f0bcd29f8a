"""Checkpoints: one file, alike from any number of ranks, of a run at the start of a step.

A manager's state is a nest of dicts in three parts: "same", what every rank holds; "sharded", by label, rows of which each
rank holds its own; "partial", by label, tensors whose sum over the ranks counts (pending gradients). A file has the shards put
together, the partial sums apart, and the course: what the steps took by their schedule. The manager gives state_dict(),
load_state_dict(state), layout(step): shapes and dtypes of the whole state at the start of a step (None: all gradients pend),
own_rows: slices by label, batch_tokens(step), ticks(step), by average, and contradictions(state, step): a sentence each.
"""

import contextlib
import functools
import hashlib
import math
import os
import pickle
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.loader import tokens_taken
from data.shards import TEMPORARY, closed_folders, drop_leftovers, open_at_once, stored, whole_file
from launch.console import reason, tell
from launch.machine import check_common
from launch.nests import check_tree, differences, leaves, map_tensors, non_finite, pending_layout, ticks, unlike, written
from runtime.log import RULE, same_run
from runtime.options import MAY_CHANGE_ON_RESUME, is_plain_name
from runtime.ranks import Ranks

MAGIC, LATEST = b"bankrun checkpoint 2\n", "latest"  # after the magic the SHA-256 of the rest, then that, of torch.save


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or another run's."""


def write_checkpoint(path: Path, saved: dict[str, Any], keep: int) -> None:
    """Save; then delete all of the run but this and the last `keep` - 1 before it. Raises OSError, MemoryError, these unchanged."""
    payload = written(saved)
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_leftovers(path.parent, f"step_*.pt{TEMPORARY}")
    with whole_file(path) as file:
        file.writelines((MAGIC, hashlib.sha256(payload).digest(), payload))
    others = [old for old in checkpoints(path.parent) if old.name != path.name and is_ours(old)]
    for old in sorted(others, key=lambda old: step_of(old) > step_of(path))[keep - 1 :]:  # first those of a course left
        try:
            old.unlink(missing_ok=True)
        except OSError as error:
            tell(f"{old}: cannot be deleted: {error.strerror}")


def step_of(path: Path) -> int:  # by its name; -1 if that is no checkpoint's
    return int(match[1]) if (match := re.fullmatch(r"step_(\d{6}|[1-9]\d{6,})\.pt", path.name)) else -1


def checkpoints(folder: Path, run: str = ".") -> list[Path]:
    """Those of a run, last step first; or of all runs ("*"), then first of the one that wrote last."""
    found, written = [path for path in folder.glob(f"{run}/step_*.pt") if step_of(path) >= 0], {}
    for path in found:
        with contextlib.suppress(OSError):  # its run goes on, and deletes; or its folder may not be searched
            written[path.parent] = max(path.lstat().st_mtime_ns, written.get(path.parent, 0))
    return sorted(found, key=lambda path: (written.get(path.parent, 0), path.parent, step_of(path)), reverse=True)


def is_ours(path: Path) -> bool:
    """Does it say first that it is of its folder's run, at its name's step? Others may lie there: an idea's, another run's."""
    run, step = re.escape(pickle.dumps(path.parent.name, 2)[2:-3]), re.escape(pickle.dumps(step_of(path), 2)[2:-1])
    pickled = rb"(?s)%b(?=.*run_id(q.|r.{4})%b)(?=.*step(q.|r.{4})%b)" % (MAGIC, run, step)  # as by torch.save, keys and values
    with contextlib.suppress(OSError), open_at_once(path) as file:
        return bool(re.match(pickled, file.read(4096)))
    return False


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What write_checkpoint saved. Nothing is unpickled but tensors and plain types. Raises CheckpointError."""
    try:
        with open_at_once(path) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            if (magic := file.read(len(MAGIC))) != MAGIC:
                raise CheckpointError(f"{path}: not a checkpoint of this version (begins with {magic!r})")
            digest, payload = file.read(32), file.read()
    except (OSError, MemoryError) as error:
        way_out = ": name a step_….pt, or latest" * isinstance(error, IsADirectoryError | FileNotFoundError)
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', '') or repr(error)}{way_out}") from error
    if hashlib.sha256(payload).digest() != digest:
        raise CheckpointError(f"{path}: damaged or cut short, its SHA-256 is another: resume from an earlier checkpoint")
    try:
        saved = torch.load(stored(payload), map_location="cpu", weights_only=True)
        held = dict(leaves(check_tree(saved)))
    except Exception as error:  # the file's fault, whatever torch.load makes of it
        said = f"{error}".rpartition("WeightsUnpickler error:")[2].strip()  # less PyTorch's advice to trust it
        why = (re.search(r"GLOBAL \S+", said) or re.match(".*", said))[0]
        raise CheckpointError(f"{path}: holds what cannot be loaded: {type(error).__name__}: {why}") from error
    if not isinstance(saved, dict) or not saved:
        raise CheckpointError(f"{path}: holds {'nothing' if isinstance(saved, dict) else f'a {type(saved).__name__}'} instead of a run's state")
    bad = [x for x, y in held.items() if isinstance(y, Tensor) and (y.is_meta or y.layout != torch.strided or x[:5] != "state")]
    huge = non_finite({x: y for x, y in held.items() if isinstance(y, int)})
    raise_if(path, [f"{x} is a tensor out of place or sparse" for x in bad] + [f"{x} is beyond what a float holds" for x in huge])
    return saved


def find_checkpoint(resume: str, log_dir: str, run_id: str = "") -> tuple[Path, dict[str, Any]]:
    """The checkpoint that --resume means; 'latest' passes over unusable ones, and says so. Raises CheckpointError."""
    if resume != LATEST:
        return Path(resume), read_checkpoint(Path(resume))
    for path in [*closed_folders(Path(log_dir), run_id or "*"), *checkpoints(Path(log_dir, run_id), "." if run_id else "*")]:
        try:
            return path, check_course(path, read_checkpoint(path))
        except CheckpointError as error:
            (str if "BANKRUN_LAUNCHER" in os.environ else tell)(f"passed over {error}")  # the launcher's check has told
    raise CheckpointError(f"{LATEST}: no usable checkpoint in {Path(log_dir, run_id or '*')}: --save_every writes them")


def check_course(path: Path, saved: dict[str, Any]) -> dict[str, Any]:
    """What was saved. Raises CheckpointError if that is another step's or run's, or its log is there and says otherwise."""
    held = saved.get("step"), saved.get("run_id", run := path.parent.name)
    if f"{held!r}" != f"{(step_of(path), run)!r}":  # a copy; or a tensor, which is equal to nothing
        raise CheckpointError(f"{path}: holds step {held[0]!s:.99} of run {held[1]!s:.99}: name it to go on from there")
    log, file = saved.get("log"), path.parent.with_name(f"{path.parent.name}.txt")
    texts = isinstance(log, dict) and all(isinstance(log.get(name), str) for name in ("header", "lines"))
    if texts and f"\n{RULE}\n" in log["header"] and not same_run(file, log):
        raise CheckpointError(f"{path}: {file} is another run's, was edited, or its run went on from an earlier step")
    return saved


def check_room(folder: Path, layout: dict[str, Any], ranks: int, keep: int, saves: int) -> None:
    """Raise OSError if folder has no room for `saves` checkpoints of this layout ("partial": a rank), `keep` + 1 at a time."""
    new, fault = [x for x in (folder, *folder.parents) if not os.path.exists(x)], ""
    files = min(saves, max(1, keep + 1 - sum(map(is_ours, checkpoints(folder)))))  # each with its log: 1 MiB
    each = (x.nbytes * (ranks if name.startswith("partial.") else 1) for name, x in leaves(layout) if isinstance(x, Tensor))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-", buffering=0) as file:
            file.write(b"probe")
        left = sum(x.lstat().st_blocks * 512 for x in folder.glob(f"step_*.pt{TEMPORARY}"))  # by a killed save: the next drops it
        if (size := files * (2**20 + sum(each))) > (free := shutil.disk_usage(folder).free + left):
            less = "lower --keep_checkpoints" if keep > 1 else "give another --log_dir"
            fault = f"{files} checkpoints need {size:,} bytes, {free:,} are free: make room or {less}"
    except OSError as error:  # a full disk names no file
        fault = f"cannot be written: {reason(error)}: see to it, or give another --log_dir"
    for made in new:
        with contextlib.suppress(OSError):  # who holds something, or was not made
            made.rmdir()
    if fault:
        raise OSError(f"{folder}: {fault}")


def whole_state(manager: Any, ranks: Ranks, caution: Callable = tell) -> dict[str, Any]:
    """Every rank's state, on the first rank; called by all. Raises AgreedError for what is not the same on all, but has to be."""
    state = manager.state_dict()
    ranks.check_same({name: f"{x}" for name, x in leaves(state) if not isinstance(x, Tensor)})
    same = {**state["same"], "parameters": {}}  # the weights: compared at validations
    check_common(ranks, caution, "tensors", {x: y for x, y in leaves({"same": same}) if isinstance(y, Tensor)})
    sharded = map_tensors(lambda x: torch.cat(ranks.collect(x) or [x]), state["sharded"])
    lacking = set().union(*ranks.gather([*state["partial"]])) - {*state["partial"]}  # here, as after a branch by chance
    zeros = {label: torch.zeros_like(pending_layout(manager)["partial"][label], device="cpu") for label in lacking}
    parts = {label: ranks.collect(x) for label, x in sorted((state["partial"] | zeros).items())}
    each = range(ranks.world_size if ranks.first else 0)
    return {**state, "sharded": sharded, "partial": {rank: {label: x[rank] for label, x in parts.items()} for rank in each}}


def load_whole_state(manager: Any, whole: dict[str, Any], ranks: Ranks) -> None:
    """Give this rank its part of what whole_state gave, of any number of ranks: of sums, those of ranks r, r + W, …"""
    parts = [whole["partial"][rank] for rank in range(ranks.rank, len(whole["partial"]), ranks.world_size)]
    sharded = {label: map_tensors(lambda x: x[manager.own_rows[label]], state) for label, state in whole["sharded"].items()}
    partial = {  # summed in fp64; one part alone keeps its bits
        label: functools.reduce(torch.add, [part[label].double() for part in parts] or [torch.zeros_like(like)]).to(like.dtype)
        for label, like in whole["partial"][0].items()
    }
    manager.load_state_dict({**whole, "sharded": sharded, "partial": partial})


def check_recipe(path: Path, saved: dict[str, Any], labels: Iterable[str]) -> None:
    """Raise CheckpointError, naming them, if the checkpoint's parameters are not those of these labels."""
    held = {name.partition(".parameters.")[2] for name, _ in leaves(saved) if name.startswith("state.same.parameters.")}
    more, less = (", ".join(sorted(x)) or "nothing else" for x in (held - {*labels}, {*labels} - held))
    fault = f"its model is another recipe's: it holds {more}, this script wants {less}: use its own sources (by extract.py"
    raise_if(path, [f"{fault} from its log), for text the sample.py beside them, by a Python that has PyTorch"] if held and held != {*labels} else [])


def other_settings(was: Any, now: dict[str, Any]) -> list[str]:
    """What a script's settings have more, less or of another kind than a checkpoint's, and what to do."""
    advice = ": its script had other settings: use that one (by extract.py from its log)"
    return [x + advice * (i == 0) for i, x in enumerate(differences(was, now, "hyperparameters."))]


def check_fits(path: Path, saved: dict[str, Any], settings: Any, shards: dict[str, str], manager: Any) -> None:
    """Raise CheckpointError, with the first differences, unless these settings, shards and schedule can go on from it."""
    check_recipe(path, saved, manager.own_rows)
    was, held, took = (x if isinstance(x := saved.get(kind), dict) else {} for kind in ("hyperparameters", "shards", "course"))
    read, was_read = ({name: x for name, x in some.items() if "CRC-32" in f"{x}"} for some in (shards, held))
    faults = other_settings(was, vars(settings)) + differences(read, was_read, "shards.")
    here, there = vars(settings) | read, was | was_read
    changed = [x for x in here if x in there and x not in MAY_CHANGE_ON_RESUME and f"{there[x]!r}" != f"{here[x]!r}"]
    other = ["other shards: name its own by --data, or make them again by the same Python"] * any(x in read for x in changed)
    raise_if(path, other + faults + [f"{x} is {there[x]!r}, here {here[x]!r}" for x in changed])
    check_usable(path, saved, manager, settings.total_iterations)
    due = {**tokens_taken(manager.batch_tokens, saved["step"]), **ticks(manager, saved["step"])}.items()
    raise_if(path, [f"its steps took {was} {x}, here {now}" for x, n in due for was, now in unlike(took.get(x, n), n)])


def check_usable(path: Path, saved: dict[str, Any], manager: Any, total: int) -> None:
    """Raise CheckpointError unless the checkpoint is complete, consistent and of a model like the manager's."""
    texts, nests = {"header": "", "lines": ""}, dict.fromkeys(("course", "hyperparameters", "sources", "shards", "state"), {})
    there = {"course": {}, **saved} | {name: {} for name in nests if isinstance(saved.get(name), dict)}  # older: no course
    raise_if(path, differences(there, {"step": 0, "seconds": 0.0, "run_id": "", "log": texts, **nests}))
    step, state, parts = saved["step"], saved["state"], saved["state"].get("partial")
    raise_if(path, [] if 0 <= step <= total else [f"step is {step}, must be 0 to {total}"])
    faults = [f"sources.{name} is no text" for name, text in saved["sources"].items() if not isinstance(text, str)]
    ranks, layout = (parts if isinstance(parts, dict) else {}) or {0: {}}, map_tensors(lambda x: x, pending_layout(manager))
    pending = {x: layout["partial"][x] for x, _ in leaves(ranks.get(0)) if x in layout["partial"]}  # an idea may step otherwise
    raise_if(path, faults + differences(state, {**layout, "partial": dict.fromkeys(range(len(ranks)), pending)}, "state."))
    rules = (
        (0 <= saved["seconds"] < math.inf, f"seconds is {saved['seconds']}, must be 0 or more and finite"),
        (is_plain_name(saved["run_id"]), f"run_id is {saved['run_id']!r}, must be a file's name"),
        (f"\n{RULE}\n" in saved["log"]["header"], "log.header has no line of 100 = that ends the sources"),
    )
    faults = [fault for holds, fault in rules if not holds] + [f"state.{x}" for x in manager.contradictions(state, step)]
    raise_if(path, faults + [f"state.{name} is not finite" for name in non_finite(state)])


def raise_if(path: Path, faults: list[str]) -> None:
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{path} cannot be resumed: {'; '.join(faults[:3])}{more}")
