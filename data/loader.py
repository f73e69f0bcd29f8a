"""Micro-batches from shards: whole documents from their starts, the same for any number of ranks.

A step's batch is a number of micro-batches, which the ranks share. Each is filled with documents,
in their order, each cut at the step's max_doc_len, to T + 1 tokens. The rest of the last document
is dropped: the next micro-batch begins with the next document.

    shard                 |• a a a a a a a|• b b b|• c c c c c c|• d d|• e e …    • begins a document
    cut at max_doc_len 5  |• a a a a      |• b b b|• c c c c    |• d d|• e e …
    micro-batches, T = 6  [• a a a a • b]          [• c c c c • d]     [• e e …    drops of b and d

What must stay true:
- micro-batch i of step s has the same tokens for any number of ranks: each rank plans the whole
  step and makes its share of it;
- a step lies in one shard, so a plan needs one in memory; a rest that fills no step is dropped;
- cu_seqlens has one size for a size of micro-batch, as a compiled graph needs fixed shapes;
- no step waits for a disk: one thread makes micro-batches ahead, from when the loader is made,
  another reads and indexes the next shard.
"""

import itertools
import json
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.encodings import load_lengths
from data.shards import TRAIN, VALIDATION, DataError, read_shard, verify_shard

MicroBatch = tuple[Tensor, Tensor, Tensor]  # inputs (T,) int32, targets (T,) int64, cu_seqlens


def train_pattern(folder: str) -> str:
    return os.path.join(folder, TRAIN)


def val_pattern(folder: str) -> str:
    return os.path.join(folder, VALIDATION)


def find_shards(pattern: str) -> list[str]:
    """The files that match, sorted; the last part is the pattern. Raises DataError if none do."""
    folder = Path(pattern).parent
    shards = sorted(str(path) for path in folder.glob(Path(pattern).name) if path.name[0] != ".")
    if shards:
        return shards
    there = "there is no such folder"
    if folder.is_dir():
        names = map(repr, sorted(os.listdir(folder))[:5])
        there = f"the folder has {', '.join(names) or 'no files'}"
    raise DataError(
        f"no shard matches {os.path.abspath(pattern)}; {there}. Shards are called like "
        "fineweb_train_000001.bin or fineweb_val_000000.bin: make some with data/local_text.py or "
        "fetch them with data/cached_fineweb10B.py"
    )


# By pattern, the shards that check_data found last: {path: CRC-32, or None if the run reads less}.
# A run reads these: not what comes into the folder later, nor a shard that has changed.
CHECKED: dict[str, dict[str, int | None]] = {}


def shards_in_use(pattern: str) -> dict[str, int | None]:
    return CHECKED.get(pattern) or dict.fromkeys(find_shards(pattern))


class Documents:
    """A shard in memory as documents. Tokens before the first are dropped.

    tokens: (N,) uint16
    starts: (documents,) where each begins in tokens
    lengths: (documents,) whole; a plan and a slice cut each document at their max_doc_len

    Raises DataError if no document begins in the shard, or as read_shard does; OSError.
    """

    def __init__(self, path: str, bos_id: int, vocab_size: int | None, crc: int | None) -> None:
        self.path = path
        self.tokens = read_shard(path, vocab_size, crc)
        self.starts = np.flatnonzero(self.tokens == bos_id)
        if not len(self.starts):
            fault = f"no document begins in it (no token {bos_id})"
            raise DataError(f"{path}: {fault}: check --bos_id and the encoding of the shards")
        self.lengths = np.diff(self.starts, append=len(self.tokens))

    def plan(
        self, first: int, slices: int, length: int, max_doc_len: int
    ) -> list[tuple[int, int]] | None:
        """Documents [i, j) of each slice of `length` tokens, from `first` on; None if too few."""
        lengths = self.lengths[first : first + slices * length]  # each has a token at least
        ends = np.cumsum(np.minimum(lengths, max_doc_len))
        bounds = [0]  # of the slices, in documents from `first` on
        done = 0  # tokens
        for _ in range(slices):
            last = int(np.searchsorted(ends, done + length))
            if last >= len(ends):
                return None
            done = ends[last]
            bounds.append(last + 1)
        return [(first + i, first + j) for i, j in itertools.pairwise(bounds)]

    def slice(
        self, first: int, end: int, length: int, max_doc_len: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """At most `length` tokens of documents [first, end), uint16, and each document's start."""
        lengths = np.minimum(self.lengths[first:end], max_doc_len)
        spans = zip(self.starts[first:end], lengths)
        pieces = [self.tokens[start : start + n] for start, n in spans]
        return np.concatenate(pieces)[:length], np.cumsum(lengths) - lengths


def first_documents(folder: str, bos_id: int, tokens: int, count: int) -> list[list[int]]:
    """The first documents of `tokens` tokens or more, cut there, of validation; else the first."""
    path, crc = next(iter(shards_in_use(val_pattern(folder)).items()))
    documents = Documents(path, bos_id, None, crc)
    chosen = np.flatnonzero(documents.lengths >= tokens)[:count].tolist() or [0]
    return [documents.slice(i, i + 1, tokens, tokens)[0].tolist() for i in chosen]


def validation_bytes(folder: str, tokens: int, encoding: str, vocab_size: int) -> int:
    """Bytes of the text of the first `tokens` targets of validation. Raises DataError, OSError."""
    path, crc = next(iter(shards_in_use(val_pattern(folder)).items()))
    targets = read_shard(path, vocab_size, crc)[1 : tokens + 1]
    return int(load_lengths(folder, encoding, vocab_size)[targets].sum())


class Batch(NamedTuple):
    """What the loader needs to know of a step. A plan is a list of these, or of tuples with more."""

    batch_tokens: int  # all micro-batches together
    max_doc_len: int  # documents are cut at this many tokens


def plan_batches(
    shards: Iterable[Documents], plan: Sequence[Batch], micro_batches: int
) -> Iterator[tuple[Documents, int, int, list[tuple[int, int]]]]:
    """For each step of the plan: the shard, the tokens of a micro-batch, where its documents are cut,
    and the documents [i, j) of each micro-batch. Ends early where the tokens do."""
    shards = iter(shards)
    documents = next(shards, None)
    first = 0
    for now in plan:
        tokens = now.batch_tokens // micro_batches
        size = (micro_batches, tokens + 1, now.max_doc_len)
        while documents and not (ranges := documents.plan(first, *size)):
            documents = next(shards, None)  # a rest that fills no step is dropped
            first = 0
        if documents is None:
            return
        yield documents, tokens, now.max_doc_len, ranges
        first = ranges[-1][1]


# The most documents seen in FineWeb are 56, 90 and 121; attention pays for every slot.
DOC_SLOTS = {16384: 64, 32768: 96, 49152: 128}


def default_doc_slots(tokens: int) -> int:
    """Length of cu_seqlens for so many tokens: one entry for every 300, in units of 128."""
    return DOC_SLOTS.get(tokens) or max(1, -(-(tokens // 300) // 128)) * 128


def make_micro_batch(
    tokens: np.ndarray, starts: np.ndarray, slots: int, where: str, max_doc_len: int = 0
) -> MicroBatch:
    """(T + 1,) tokens and their documents' starts as inputs, targets and cu_seqlens.

    inputs (T,) int32; targets (T,) int64, the inputs' next tokens; cu_seqlens (slots,) int32, the
    starts, then T. In pinned memory if there is a GPU. Raises DataError if the documents do not fit
    the slots, or one is longer than max_doc_len, if that is not 0: attention would ignore its end.
    """
    T = len(tokens) - 1
    starts = starts[starts < T]  # a document that starts at T gives only the last target
    check_slots(len(starts), T, slots, where)
    longest = int(np.diff(starts, append=T).max())
    if max_doc_len and longest > max_doc_len:
        raise DataError(f"{where}: a document has {longest} tokens, more than {max_doc_len}")
    cu_seqlens = np.full(slots, T, dtype=np.int32)
    cu_seqlens[: len(starts)] = starts
    inputs = torch.from_numpy(tokens[:-1].astype(np.int32))
    targets = torch.from_numpy(tokens[1:].astype(np.int64))
    batch = (inputs, targets, torch.from_numpy(cu_seqlens))
    return tuple(x.pin_memory() for x in batch) if torch.cuda.is_available() else batch


def check_slots(documents: int, T: int, slots: int, where: str) -> None:
    if documents >= slots:
        found = f"{documents} documents in a micro-batch of {T} tokens do not fit {slots} slots"
        raise DataError(f"{where}: {found}: set --doc_slots={documents + 1} or more")


def synthetic_batch(
    tokens: int, vocab_size: int, max_doc_len: int, doc_slots: int = 0
) -> MicroBatch:
    """A micro-batch of the shapes that training and validation use, without data, for warm-ups."""
    stream = (torch.arange(tokens + 1) * 7919) % vocab_size
    starts = np.arange(0, tokens, min(tokens, max_doc_len))
    slots = doc_slots or default_doc_slots(tokens)
    return make_micro_batch(stream.numpy(), starts[: slots - 1], slots, "warm-up")


def to_device(batch: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """A micro-batch on its way to the device; pinned memory is copied while it computes."""
    return [x.to(device, non_blocking=True) for x in batch]


def prefetch(items: Iterator, depth: int, thread: str) -> Iterator:
    """A generator's items and its error, made `depth` ahead in a thread; the first on return."""
    pool = ThreadPoolExecutor(1, thread)
    ready = deque(pool.submit(next, items, None) for _ in range(depth))
    wait([ready[0]])

    def serve() -> Iterator:
        try:
            while (item := ready.popleft().result()) is not None:
                ready.append(pool.submit(next, items, None))
                yield item
        finally:
            pool.shutdown(cancel_futures=True)
            items.close()

    return serve()


def fetch_ahead(batches: Iterator, count: int, faults: list[str]) -> Iterator[MicroBatch]:
    """The batches, of which the first `count` are fetched before this returns, and then one more
    before each is served. An error's message is put into `faults` at once; the batches before it
    are still served."""
    ready: deque[MicroBatch] = deque()

    def fetch(n: int) -> None:
        try:
            ready.extend(itertools.islice(batches, n))
        except (DataError, OSError, MemoryError) as error:
            faults.append(str(error) or repr(error))

    def serve() -> Iterator[MicroBatch]:
        while ready:
            fetch(1)
            yield ready.popleft()

    fetch(count)
    return serve()


def distributed_data_generator(
    pattern: str, plan: Sequence[Batch], *,
    micro_batches: int, rank: int, world_size: int, aligned: bool = True, bos_id: int = 50256,
    doc_slots: int = 0, vocab_size: int | None = None, first_step: int = 0,
) -> Iterator[MicroBatch]:  # fmt: skip
    """This rank's micro-batches, in order, on the CPU; the first is ready on return.

    Each is inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32. Rank r of W takes
    micro-batches r·m/W … of each step's m, so that any number of ranks sees the same tokens.

    plan: of each step its batch_tokens and max_doc_len
    aligned: micro-batches of whole documents; a step lies in one shard. Not aligned (validation):
        contiguous tokens of the first shard; a document longer than max_doc_len is an error,
        unless that is 0.
    first_step: where to begin; the steps before it are planned as the first time, but not made

    Raises DataError, OSError for a bad shard, for more documents than doc_slots (0: by size), and
    where the tokens end before the plan.
    """
    shards = shards_in_use(pattern)
    share = micro_batches // world_size
    mine = range(rank * share, (rank + 1) * share)

    def aligned_batches() -> Iterator[MicroBatch]:
        steps = 0
        read = (Documents(path, bos_id, vocab_size, crc) for path, crc in shards.items())
        ahead = prefetch(read, 1, "shards")
        for documents, tokens, cut, ranges in plan_batches(ahead, plan, micro_batches):
            steps += 1
            if steps <= first_step:
                continue
            slots = doc_slots or default_doc_slots(tokens)
            for i in mine:
                slice_tokens, starts = documents.slice(*ranges[i], tokens + 1, cut)
                yield make_micro_batch(slice_tokens, starts, slots, documents.path)
        if steps < len(plan):
            raise DataError(f"{pattern}: the tokens end after {steps} steps")

    def contiguous_batches() -> Iterator[MicroBatch]:
        path, crc = next(iter(shards.items()))
        tokens = read_shard(path, vocab_size, crc)
        position = 0
        for step, now in enumerate(plan):
            if position + now.batch_tokens >= len(tokens):
                raise DataError(f"{path}: its {len(tokens):,} tokens end after {step} batches")
            n = now.batch_tokens // micro_batches
            slots = doc_slots or default_doc_slots(n)
            for i in mine if step >= first_step else ():
                begin = position + i * n
                slice_tokens = tokens[begin : begin + n + 1]
                starts = np.union1d([0], np.flatnonzero(slice_tokens == bos_id))
                yield make_micro_batch(slice_tokens, starts, slots, path, now.max_doc_len)
            position += now.batch_tokens

    return prefetch(aligned_batches() if aligned else contiguous_batches(), 4, "loader")


class DataFacts(NamedTuple):
    """What check_data finds.

    shards: of all shards by name, their tokens; and a CRC-32 of those that the run reads
    longest: tokens of the longest document in a validation micro-batch, up to a power of two
    """

    shards: dict[str, str]
    longest: int


def check_manifest(folder: str, **given: int | str) -> None:
    """Compare settings with those of the manifest.json that a tool left. Raises DataError."""
    path = Path(folder, "manifest.json")
    made = json.loads(path.read_text()) if path.exists() else {}
    wrong = []
    for name, value in given.items():
        there = made.get(name, value)
        enough = name == "vocab_size" and there <= value  # a vocabulary may be padded
        if there != value and not enough:
            wrong.append(f"--{name}={there}")
    if wrong:
        raise DataError(f"{path}: the shards are of other settings: give {' '.join(wrong)}")


def check_data(
    folder: str, plan: Sequence[Batch], val_tokens: int, val_batch_tokens: int, *,
    micro_batches: int, doc_slots: int, bos_id: int, vocab_size: int, encoding: str,
) -> DataFacts:  # fmt: skip
    """Raise DataError or OSError if the shards cannot feed the whole plan, or the validation.

    val_tokens: of the first validation shard, in whole batches of val_batch_tokens. encoding: what
    a manifest must name. Every micro-batch is planned, none is made. Loaders of this process then
    read these tokens, or raise DataError.
    """
    CHECKED.clear()
    train = dict.fromkeys(find_shards(train_pattern(folder)))
    val = dict.fromkeys(find_shards(val_pattern(folder)))
    sizes = {path: verify_shard(path) for path in train | val}
    shards = {os.path.basename(path): f"{size:,} tokens" for path, size in sizes.items()}
    check_manifest(folder, bos_id=bos_id, vocab_size=vocab_size, encoding=encoding)

    def index(path: str) -> Documents:
        documents = Documents(path, bos_id, vocab_size, None)
        crc = zlib.crc32(documents.tokens)
        for twin, other in (train | val).items():
            if other == crc:
                raise DataError(f"{path}: has the same tokens as {twin}; remove one of the two")
        (val if path in val else train)[path] = crc
        shards[os.path.basename(path)] += f", CRC-32 {crc:08x}"
        return documents

    first_val = index(next(iter(val)))
    n = val_batch_tokens // micro_batches
    most, longest = validation_documents(first_val, val_tokens, n)
    counts = [(most, n, first_val.path)]  # by micro-batch: documents, tokens, shard
    fed = 0
    for documents, tokens, cut, ranges in plan_batches(map(index, train), plan, micro_batches):
        for first, end in ranges:
            # a document that starts at T gives only the last target
            at_end = np.minimum(documents.lengths[first : end - 1], cut).sum() == tokens
            counts.append((end - first - int(at_end), tokens, documents.path))
        fed += 1

    for documents, tokens, path in sorted(counts, reverse=True):  # the error names the most
        check_slots(documents, tokens, doc_slots or default_doc_slots(tokens), path)
    if fed < len(plan):
        there = sum(sizes[path] for path in train)
        needed = sum(now.batch_tokens for now in plan)
        cuts = [now.max_doc_len for now in plan]
        raise DataError(
            f"{train_pattern(folder)}: {len(plan):,} steps need {needed:,} tokens, but the shards feed "
            f"only {fed:,} steps. They have {there:,} tokens; documents are cut at {min(cuts)} to "
            f"{max(cuts)} tokens, and each micro-batch begins with a new one. Add shards or "
            "documents, or lower --num_scheduled_iterations or --batch_unit"
        )
    CHECKED.update({train_pattern(folder): train, val_pattern(folder): val})
    return DataFacts(shards, 1 << (longest - 1).bit_length())


def validation_documents(val: Documents, val_tokens: int, n: int) -> tuple[int, int]:
    """The most documents in a micro-batch of n tokens, and the tokens of the longest one in any.

    A document counts where it lies in a micro-batch. Raises DataError for too few tokens.
    """
    if len(val.tokens) <= val_tokens:
        needed = f"validation needs {val_tokens + 1:,} tokens, but it has {len(val.tokens):,}"
        advice = "lower --val_tokens and --val_batch_tokens, or make longer shards"
        raise DataError(f"{val.path}: {needed}: {advice}")
    starts = np.union1d(np.arange(0, val_tokens, n), val.starts[val.starts < val_tokens])
    longest = np.diff(starts, append=val_tokens).max()
    return int(np.bincount(starts // n).max()), int(longest)
