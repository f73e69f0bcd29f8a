"""Batches from shards: whole documents from their starts, the same tokens for every number of ranks, ready before they are due.

A step's batch is a number of micro-batches, which the ranks share. Each is filled with documents, in their order, to T + 1
tokens, and the rest of the document that is cut there is dropped: the next micro-batch begins with the next document.

    shard                 |• a a a a a a a|• b b b|• c c c c c c|• d d|• e e e …      • begins a document
    cut at max_doc_len 5  |• a a a a      |• b b b|• c c c c    |• d d|• e e e …
    micro-batches, T = 6  [• a a a a • b]          [• c c c c • d]     [• e e e …     the rest of b and of d is dropped

What stays true:
- micro-batch i of step s holds the same tokens for every number of ranks: all plan the whole step, each makes its share of it;
- a step lies in one shard, so that a plan needs one shard in memory: the rest of a shard that cannot fill a step is dropped;
- cu_seqlens has one size for a size of micro-batch: a compiled graph wants fixed shapes;
- no step waits for a disk or an index: a thread reads, plans and makes micro-batches ahead.
"""

import glob
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.shards import DataError, read_shard

# ----------------------------------------------------------------------------------------------------------------------
# Shards of a folder


def train_pattern(folder: str) -> str:
    return os.path.join(folder, "*_train_*.bin")


def val_pattern(folder: str) -> str:
    return os.path.join(folder, "*_val_*.bin")


def find_shards(pattern: str) -> list[str]:
    """The files that match, in the order of their names. Raises DataError if there are none."""
    files = sorted(glob.glob(pattern))
    if not files:
        raise DataError(
            f"no shard matches {pattern}: make some with data/local_text.py or fetch them with data/cached_fineweb10B.py"
        )
    return files


def shard_sizes(folder: str) -> dict[str, int]:
    """Bytes of each shard, training and validation, by name: a resumed run finds its place only in shards of these sizes."""
    files = find_shards(train_pattern(folder)) + find_shards(val_pattern(folder))
    return {Path(path).name: os.path.getsize(path) for path in files}


# ----------------------------------------------------------------------------------------------------------------------
# Documents of a shard


class Documents:
    """A shard in memory as documents, each cut at max_doc_len. What comes before the first end-of-text is dropped.

    tokens: (N,) uint16      starts: (documents,) where each begins in tokens      lengths: (documents,) after the cut
    ends: (documents + 1,) tokens before each document, after the cut; the last is the total

    Raises DataError if no document begins in the shard, or as read_shard does.
    """

    def __init__(self, path: str, max_doc_len: int, bos_id: int, vocab_size: int | None):
        self.path = path
        self.tokens = read_shard(path, vocab_size)
        self.starts = np.flatnonzero(self.tokens == bos_id)
        if not len(self.starts):
            raise DataError(f"{path}: no document begins in it (no token {bos_id}): other shards, or --bos_id?")
        lengths = np.diff(self.starts, append=len(self.tokens))
        self.lengths = np.minimum(lengths, max_doc_len)
        self.ends = np.concatenate(([0], np.cumsum(self.lengths)))

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
        """The tokens of documents [first, end), at most `length` of them, uint16, and each document's start in it."""
        pieces = [self.tokens[s : s + n] for s, n in zip(self.starts[first:end], self.lengths[first:end])]
        return np.concatenate(pieces)[:length], self.ends[first:end] - self.ends[first]


def first_document(folder: str, bos_id: int, tokens: int) -> list[int]:
    """The first document of the first validation shard, bos first, cut at `tokens` tokens. Raises DataError."""
    documents = Documents(find_shards(val_pattern(folder))[0], tokens, bos_id, vocab_size=None)
    return documents.slice(0, 1, tokens)[0].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Plan


def plan_batches(
    files: Iterable[str],
    batch_tokens: Callable[[int], int],
    max_doc_len: int,
    micro_batches: int,
    bos_id: int,
    vocab_size: int | None,
) -> Iterator[tuple[Documents, int, list[tuple[int, int]]]]:
    """For step 0, 1, …: the shard, the tokens of a micro-batch, and the documents [i, j) of each. Ends where the shards do.

    batch_tokens: tokens of a step's batch. Raises DataError as Documents does.
    """
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


# ----------------------------------------------------------------------------------------------------------------------
# Micro-batch

MicroBatch = tuple[Tensor, Tensor, Tensor]  # inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32, on the CPU

# The most documents seen in FineWeb are 56, 90 and 121; attention pays for every slot.
DOC_SLOTS = {16384: 64, 32768: 96, 49152: 128}


def default_doc_slots(tokens: int) -> int:
    """Entries of cu_seqlens for a micro-batch of this many tokens: one for every 300 tokens, in units of 128."""
    return DOC_SLOTS.get(tokens) or max(1, -(-(tokens // 300) // 128)) * 128


def make_micro_batch(tokens: np.ndarray, starts: np.ndarray, slots: int, where: str) -> MicroBatch:
    """(T + 1,) tokens and their documents' starts as inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32.

    targets are the inputs' next tokens; cu_seqlens holds the starts, then T. In pinned memory if there is a GPU.
    where: the shard, for the error. Raises DataError if there are more documents than slots.
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


def synthetic_batch(tokens: int, *, vocab_size: int, max_doc_len: int, doc_slots: int) -> MicroBatch:
    """A micro-batch of the shapes that training and validation use, from no data and no random state: for warm-ups."""
    stream = (torch.arange(tokens + 1) * 7919) % vocab_size
    starts = np.arange(0, tokens, min(tokens, max_doc_len))
    slots = doc_slots or default_doc_slots(tokens)
    return make_micro_batch(stream.numpy(), starts[: slots - 1], slots, "warm-up")


# ----------------------------------------------------------------------------------------------------------------------
# Generator


def prefetch(items: Iterable, depth: int = 4) -> Iterator:
    """The same items, made ahead in a thread, at most `depth` of them. An error in the thread is raised here, in its turn."""
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
        except BaseException as error:  # the consumer's, of whatever kind
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
        thread.join(10)  # a thread inside PyTorch while the interpreter ends would abort the process


def to_device(batch: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """A micro-batch on its way to the device; pinned memory is copied behind what runs there."""
    return [x.to(device, non_blocking=True) for x in batch]


def distributed_data_generator(
    pattern: str,
    batch_tokens: int | Callable[[int], int],
    max_doc_len: int,
    *,
    micro_batches: int,
    rank: int,
    world_size: int,
    aligned: bool = True,
    bos_id: int = 50256,
    doc_slots: int = 0,
    vocab_size: int | None = None,
    first_step: int = 0,
) -> Iterator[MicroBatch]:
    """This rank's micro-batches, in order: inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32, on the CPU.

    pattern: glob of shards, in the order of their names. batch_tokens: tokens of a step, or a function of the step.
    Rank r of W takes micro-batches r·m/W … of each step's m, so that every world size sees the same tokens.
    aligned: micro-batches of whole documents from their starts, each cut at max_doc_len, a step never across two shards.
    Not aligned: contiguous tokens of the first shard, documents marked where they begin, max_doc_len unused.
    first_step: where to begin; the steps before it are planned, as the first time, and not made.
    Raises DataError for a bad shard, for more documents than doc_slots (0: by size), and where the tokens end; ValueError if
    the ranks cannot share the micro-batches evenly.
    """
    tokens_at = batch_tokens if callable(batch_tokens) else lambda step: batch_tokens
    if micro_batches % world_size:
        raise ValueError(f"{micro_batches} micro-batches cannot be shared evenly by {world_size} ranks")
    files = find_shards(pattern)
    share = micro_batches // world_size
    mine = range(rank * share, (rank + 1) * share)

    def aligned_batches() -> Iterator[MicroBatch]:
        steps = 0
        for documents, tokens, ranges in plan_batches(files, tokens_at, max_doc_len, micro_batches, bos_id, vocab_size):
            steps += 1
            for i in mine if steps > first_step else ():
                slice_tokens, starts = documents.slice(*ranges[i], tokens + 1)
                yield make_micro_batch(slice_tokens, starts, doc_slots or default_doc_slots(tokens), documents.path)
        raise DataError(f"{pattern}: the tokens end after {steps} steps")

    def contiguous_batches() -> Iterator[MicroBatch]:
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


# ----------------------------------------------------------------------------------------------------------------------
# Checks


def check_data(
    folder: str,
    *,
    steps: int,
    batch_tokens: Callable[[int], int],
    max_doc_len: int,
    micro_batches: int,
    bos_id: int,
    vocab_size: int,
    val_tokens: int,
) -> None:
    """Raise DataError if the shards cannot feed all steps, or the validation: before step 0, not at step 1700.

    batch_tokens: tokens of a step's batch. val_tokens: of the first validation shard, from its start.
    """
    validation = Documents(find_shards(val_pattern(folder))[0], max_doc_len, bos_id, vocab_size)
    if len(validation.tokens) <= val_tokens:
        raise DataError(
            f"{validation.path}: validation needs {val_tokens + 1:,} tokens, it holds {len(validation.tokens):,}: "
            f"lower --val_tokens and --val_batch_tokens"
        )
    files = find_shards(train_pattern(folder))
    plans = plan_batches(files, batch_tokens, max_doc_len, micro_batches, bos_id, vocab_size)
    fed, shard, present = 0, None, 0  # steps, the last one's shard, tokens up to that shard's end
    for documents, _, _ in plans:
        if documents is not shard:
            shard, present = documents, present + int(documents.ends[-1])
        fed += 1
        if fed == steps:
            return
    needed = sum(batch_tokens(step) for step in range(steps))
    raise DataError(
        f"{train_pattern(folder)}: {steps} steps need {needed:,} tokens and what document cuts drop; these {len(files)} shards "
        f"hold {present:,} usable ones, enough for {fed} steps: add shards or lower --num_scheduled_iterations"
    )
