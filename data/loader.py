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
- no step waits for a disk or an index, not even the first: a thread plans and makes micro-batches ahead, from when the loader
  is made, and another reads and indexes the next shard.
"""

import itertools
import os
import queue
import shlex
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.shards import TRAIN, VALIDATION, DataError, check_replaced, hold_shards, one_line, read_json, read_shard, verify_shard

# ----------------------------------------------------------------------------------------------------------------------
# Shards of a folder


def train_pattern(folder: str) -> str:
    return os.path.join(folder, TRAIN)


def val_pattern(folder: str) -> str:
    return os.path.join(folder, VALIDATION)


def find_shards(pattern: str) -> list[str]:
    """The files that match, in the order of their names. The folder is taken as it is: a pattern is the last part alone.

    Raises DataError if there are none, if the folder cannot be read, or if a name is of both splits.
    """
    folder, pattern_of_name = os.path.split(pattern)
    try:
        names = sorted(name for name in os.listdir(folder or ".") if fnmatchcase(name, pattern_of_name) and name[0] != ".")
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}: check the folder and its disk") from error
    if not names and os.path.isfile(folder):
        raise DataError(f"{folder} is a file: --data names the folder of the shards")
    if not names:
        raise DataError(
            f"no shard matches {os.path.abspath(pattern)}: make some with data/local_text.py or fetch them with data/cached_fineweb10B.py"
        )
    for name in names:
        if fnmatchcase(name, TRAIN) and fnmatchcase(name, VALIDATION):
            raise DataError(f"{os.path.join(folder, name)}: its name is of both splits, _train_ and _val_: rename it")
    return [os.path.join(folder, name) for name in names]


# ----------------------------------------------------------------------------------------------------------------------
# Documents of a shard


LISTED: dict[str, list[str]] = {}  # by pattern, the shards that check_data has found last: a run reads these
CHECKED: dict[str, int] = {}  # by path, the digests of those that it has read
HELD: dict[str, BinaryIO | None] = {}  # by folder, what keeps tools from replacing its shards


def shards_in_use(pattern: str) -> list[str]:
    """As find_shards, but what check_data has found there, if it has: what comes into the folder later is not read."""
    return LISTED.get(pattern) or find_shards(pattern)


def read_unchanged(path: str, vocab_size: int | None) -> np.ndarray:
    """As read_shard. Raises DataError, too, for other tokens than check_data has found there."""
    tokens = read_shard(path, vocab_size)
    if path in CHECKED and digest_of(tokens) != CHECKED[path]:
        raise DataError(f"{path}: holds other tokens than at the start: leave shards alone while they are in use")
    return tokens


def digest_of(tokens: np.ndarray) -> int:
    """CRC-32 of all tokens, by which a shard is known again: 0.1 s for 200 MB."""
    return zlib.crc32(tokens)


class Documents:
    """A shard in memory as documents, each cut at max_doc_len. What comes before the first end-of-text is dropped.

    tokens: (N,) uint16      starts: (documents,) where each begins in tokens      lengths: (documents,) after the cut
    ends: (documents + 1,) tokens before each document, after the cut; the last is the total

    Raises DataError if no document begins in the shard, or as read_unchanged does.
    """

    def __init__(self, path: str, max_doc_len: int, bos_id: int, vocab_size: int | None):
        self.path = path
        self.tokens = read_unchanged(path, vocab_size)
        self.starts = np.flatnonzero(self.tokens == bos_id)
        if not len(self.starts):
            raise DataError(f"{path}: no document begins in it (no token {bos_id}): other shards, or longer ones, or --bos_id?")
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


def first_documents(folder: str, bos_id: int, tokens: int, count: int) -> list[list[int]]:
    """The first documents of the first validation shard that are as long, bos first, cut at `tokens` tokens: at most `count`,
    but the first in any case. Raises DataError."""
    documents = Documents(shards_in_use(val_pattern(folder))[0], tokens, bos_id, vocab_size=None)
    chosen = np.flatnonzero(documents.lengths == tokens)[:count].tolist() or [0]
    return [documents.slice(i, i + 1, tokens)[0].tolist() for i in chosen]


# ----------------------------------------------------------------------------------------------------------------------
# Plan


def read_ahead(files: Iterable[str], *index: Any) -> Iterator[Documents]:
    """Documents(path, *index) of each file; the next one is read and indexed while one is in use, and no more."""
    with ThreadPoolExecutor(1, "shards") as pool:
        coming = (pool.submit(Documents, path, *index) for path in files)  # each begins when it is asked for
        ahead = next(coming, None)
        while ahead:
            documents, ahead = ahead.result(), next(coming, None)
            yield documents


def plan_batches(
    shards: Iterable[Documents], batch_tokens: Callable[[int], int], micro_batches: int
) -> Iterator[tuple[Documents, int, list[tuple[int, int]]]]:
    """For step 0, 1, …: the shard, the tokens of a micro-batch, and the documents [i, j) of each. Ends where the shards do.

    batch_tokens: tokens of a step's batch.
    """
    step = 0
    for documents in shards:
        first = 0
        while True:
            tokens = batch_tokens(step) // micro_batches
            ranges = documents.plan(first, micro_batches, tokens + 1)
            if ranges is None:
                break
            yield documents, tokens, ranges
            first, step = ranges[-1][1], step + 1


def tokens_taken(batch_tokens: Callable[[int], int], steps: int) -> dict[str, str]:
    """By the first steps: in batches, as "384 × 24576 + 256 × 49152", and in all. At which document the next one begins depends on
    each batch, not on their sum alone: every micro-batch drops the rest of its last document."""
    sizes = [batch_tokens(step) for step in range(steps)]
    terms = (f"{len([*alike])} × {tokens}" for tokens, alike in itertools.groupby(sizes))
    return {"tokens in batches": " + ".join(terms), "tokens": f"{sum(sizes)}"}


# ----------------------------------------------------------------------------------------------------------------------
# Micro-batch

MicroBatch = tuple[Tensor, Tensor, Tensor]  # inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32, on the CPU

# The most documents seen in FineWeb are 56, 90 and 121; attention pays for every slot.
DOC_SLOTS = {16384: 64, 32768: 96, 49152: 128}


def default_doc_slots(tokens: int) -> int:
    """Entries of cu_seqlens for a micro-batch of this many tokens: one for every 300 tokens, in units of 128."""
    return DOC_SLOTS.get(tokens) or max(1, -(-(tokens // 300) // 128)) * 128


def slots_fault(documents: int, T: int, slots: int) -> str:
    """What is wrong if cu_seqlens has no entry for each document of a micro-batch and one for its end; else nothing."""
    fits = documents < slots
    return "" if fits else f"{documents} documents in one micro-batch of {T} tokens do not fit {slots} slots"


def make_micro_batch(tokens: np.ndarray, starts: np.ndarray, slots: int, where: str, max_doc_len: int = 0) -> MicroBatch:
    """(T + 1,) tokens and their documents' starts as inputs (T,) int32, targets (T,) int64, cu_seqlens (slots,) int32.

    targets are the inputs' next tokens; cu_seqlens holds the starts, then T. In pinned memory if there is a GPU.
    where: the shard, for the error. Raises DataError if there are not more slots than documents, or if one of those is longer
    than max_doc_len, unless that is 0: attention would pass over its end without a word.
    """
    T = len(tokens) - 1
    starts = starts[starts < T]  # one at T gives the last target only
    if fault := slots_fault(len(starts), T, slots):
        raise DataError(f"{where}: {fault}: set --doc_slots={len(starts) + 1} or more")
    if max_doc_len and (longest := int(np.diff(starts, append=T).max())) > max_doc_len:
        changed = "has the shard changed since the start? Leave shards alone while they are in use"
        raise DataError(f"{where}: a document has {longest} tokens, the longest was to have {max_doc_len}: {changed}")
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


class Prefetched:
    """The same items, made ahead in a thread, at most `depth` of them; when this is made, the first is.

    An error in the thread is raised here, in its turn. The thread ends with `close`, with this object, or with the process.
    """

    def __init__(self, items: Iterable, depth: int = 4):
        self.ready: queue.Queue = queue.Queue(depth)
        stopped = threading.Event()
        thread = threading.Thread(target=make_ahead, args=(items, self.ready, stopped), daemon=True, name="loader")
        self.close = weakref.finalize(self, stop_and_join, thread, stopped, self.ready)
        thread.start()
        self.next = self.ready.get()

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if not self.close.alive:
            raise StopIteration
        (kind, value), self.next = self.next or self.ready.get(), None
        if kind == "item":
            return value
        self.close()
        raise value


def make_ahead(items: Iterable, ready: queue.Queue, stopped: threading.Event) -> None:
    """Puts ("item", item) for each item into `ready`, then ("end", error to raise), until `stopped`."""

    def put(*message: Any) -> bool:
        ready.put(message)  # it waits for room, which stop_and_join makes
        return not stopped.is_set()

    try:
        if all(put("item", item) for item in items):
            put("end", StopIteration())
    except BaseException as error:  # the consumer's, of whatever kind
        put("end", error)


def stop_and_join(thread: threading.Thread, stopped: threading.Event, ready: queue.Queue) -> None:
    stopped.set()
    with suppress(queue.Empty):
        ready.get_nowait()
    if thread is not threading.current_thread():
        thread.join(10)  # a thread inside PyTorch while the interpreter ends would abort the process


def to_device(batch: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """A micro-batch on its way to the device; pinned memory is copied behind what runs there."""
    return [x.to(device, non_blocking=True) for x in batch]


class FetchedAhead:
    """The micro-batches of so many steps, `share` in each, fetched a step early. One that fails ends them a step later; its
    message is put into `faults` at once. Iterated over once."""

    def __init__(self, open_batches: Callable[[], Iterator[MicroBatch]], share: int, steps: int, faults: list[str]):
        self.faults, self.ready, self.rest = faults, deque(), self._needed(open_batches, share * steps)
        self._fetch(share)

    def _needed(self, open_batches: Callable[[], Iterator[MicroBatch]], count: int) -> Iterator[MicroBatch]:
        with closing(open_batches()) as batches:
            yield from itertools.islice(batches, count)

    def _fetch(self, count: int) -> None:
        try:
            self.ready.extend(itertools.islice(self.rest, count))
        except (DataError, OSError, MemoryError) as error:
            self.faults.append(f"{error}" or repr(error))

    def __iter__(self) -> Iterator[MicroBatch]:
        try:
            while self.ready:
                self._fetch(1)
                yield self.ready.popleft()
        finally:
            self.rest.close()

    def close(self) -> None:
        self.ready.clear()
        self.rest.close()


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

    pattern: a folder, as it is, and a pattern of its shards' names; they come in that order. batch_tokens: tokens of a step, or
    a function of the step. Ready when this returns: the first micro-batch is made, or its error waits for the first `next`.
    Rank r of W takes micro-batches r·m/W … of each step's m, so that every world size sees the same tokens.
    aligned: micro-batches of whole documents from their starts, each cut at max_doc_len, a step never across two shards.
    Not aligned: contiguous tokens of the first shard, documents marked where they begin and not cut: one longer than
    max_doc_len is an error; 0: of any length.
    first_step: where to begin; the steps before it are planned, as the first time, and not made.
    Raises DataError for a bad shard, for more documents than doc_slots (0: by size), and where the tokens end; ValueError if
    the ranks cannot share the micro-batches evenly.
    """
    tokens_at = batch_tokens if callable(batch_tokens) else lambda step: batch_tokens
    if micro_batches % world_size:
        raise ValueError(f"{micro_batches} micro-batches cannot be shared evenly by {world_size} ranks")
    files = shards_in_use(pattern)
    share = micro_batches // world_size
    mine = range(rank * share, (rank + 1) * share)

    def aligned_batches() -> Iterator[MicroBatch]:
        steps = 0
        shards = read_ahead(files, max_doc_len, bos_id, vocab_size)
        for documents, tokens, ranges in plan_batches(shards, tokens_at, micro_batches):
            steps += 1
            for i in mine if steps > first_step else ():
                slice_tokens, starts = documents.slice(*ranges[i], tokens + 1)
                yield make_micro_batch(slice_tokens, starts, doc_slots or default_doc_slots(tokens), documents.path)
        raise DataError(f"{pattern}: the tokens end after {steps} steps")

    def contiguous_batches() -> Iterator[MicroBatch]:
        tokens, step, position = read_unchanged(files[0], vocab_size), 0, 0
        while position + tokens_at(step) < len(tokens):
            n = tokens_at(step) // micro_batches
            for i in mine if step >= first_step else ():
                slice_tokens = tokens[position + i * n : position + (i + 1) * n + 1]
                starts = np.union1d([0], np.flatnonzero(slice_tokens == bos_id))
                yield make_micro_batch(slice_tokens, starts, doc_slots or default_doc_slots(n), files[0], max_doc_len)
            position, step = position + tokens_at(step), step + 1
        raise DataError(f"{files[0]}: its {len(tokens):,} tokens end after {step} batches of {tokens_at(0):,}")

    return Prefetched(aligned_batches() if aligned else contiguous_batches())


# ----------------------------------------------------------------------------------------------------------------------
# Checks


class DataFacts(NamedTuple):
    """What check_data finds out."""

    shards: dict[str, str]  # by name, all of the folder: tokens, and a digest of those that the run reads
    longest: int  # tokens of the longest document of a validation micro-batch, rounded up to a power of two


def check_manifest(folder: str, shards: Set[str], **given: int | str) -> None:
    """Raise DataError if the manifest.json of data/local_text.py lists some of these shards and not all, or lists them all and is
    of other settings than those given. A vocabulary may be larger."""
    try:
        manifest = read_json(Path(folder, "manifest.json"))
    except (DataError, OSError):  # somebody else's
        return
    listed = manifest.get("shards") if isinstance(manifest, dict) else None
    if not isinstance(listed, dict) or not (own := shards & listed.keys()):
        return
    if others := sorted(shards - own):
        if "recipe" in manifest:
            both = f"{others[0]} beside {min(own)}, which alone is in manifest.json"
            raise DataError(f"{folder}: {both}: a run would train on both: move what is not meant, or manifest.json, away")
        return
    made = {name: x for name in given if type(x := manifest.get(name)) is type(given[name])}
    if other := [x for x in made if (made[x] > given[x] if x == "vocab_size" else made[x] != given[x])]:
        here, there = (" ".join(option(x, values[x]) for x in other) for values in (given, made))
        raise DataError(f"{folder}/manifest.json: its shards were not made for {here}: give {there}")


def option(name: str, value: Any) -> str:
    """As a shell takes it: the value may be another's text."""
    return shlex.quote(one_line(f"--{name}={value}"))


def check_progress(folder: str, shards: Set[str], encoding: str | None) -> None:
    """Raise DataError if the progress.json of data/fineweb.py tells of another encoding of these shards."""
    try:
        made = read_json(Path(folder, "progress.json"))["recipe"]["encoding"]
    except (DataError, OSError, KeyError, TypeError):  # none, or somebody else's
        return
    if encoding and made != encoding and all(name.startswith("fineweb_") for name in shards):
        fault = f"its shards were not made for --encoding={encoding}: give {option('encoding', made)}"
        raise DataError(f"{folder}/progress.json: {fault}")


def check_data(
    folder: str,
    *,
    steps: int,
    batch_tokens: Callable[[int], int],
    max_doc_len: int,
    micro_batches: int,
    doc_slots: int,
    bos_id: int,
    vocab_size: int,
    val_tokens: int,
    val_batch_tokens: int,
    encoding: str | None = None,
) -> DataFacts:
    """Raise DataError if the shards cannot feed all steps, or the validation: before step 0, not at step 1700.

    batch_tokens: tokens of a step's batch. val_tokens: of the first validation shard, from its start, in whole batches of
    val_batch_tokens. encoding: if given, the one that a manifest of the shards must name. Every micro-batch is planned, and its
    documents counted; none is made. Who reads the folder later in this process finds these shards and tokens, or an error.
    """
    for found in (LISTED, CHECKED, HELD):
        found.clear()
    HELD[folder] = hold_shards(Path(folder))
    check_replaced(Path(folder))
    val, train = (LISTED.setdefault(pattern, find_shards(pattern)) for pattern in (val_pattern(folder), train_pattern(folder)))
    shards = {os.path.basename(path): f"{verify_shard(path):,} tokens" for path in (*train, *val)}
    check_manifest(folder, shards.keys(), bos_id=bos_id, vocab_size=vocab_size, encoding=encoding)
    check_progress(folder, shards.keys(), encoding)
    most, faults = 0, []  # most documents in a micro-batch; where there are too many

    def note_digest(documents: Documents) -> str:
        name, CHECKED[documents.path] = os.path.basename(documents.path), digest_of(documents.tokens)
        shards[name] += f", CRC-32 {CHECKED[documents.path]:08x}"
        return shards[name]

    def count(documents: int, T: int, where: str) -> None:
        nonlocal most
        most = max(most, documents)
        if fault := slots_fault(documents, T, doc_slots or default_doc_slots(T)):
            faults.append(f"{where}: {fault}")

    validation = Documents(val[0], max_doc_len, bos_id, vocab_size)
    if len(validation.tokens) <= val_tokens:
        raise DataError(
            f"{validation.path}: validation needs {val_tokens + 1:,} tokens, it holds {len(validation.tokens):,}: "
            f"lower --val_tokens and --val_batch_tokens, or make shards of more text, or longer ones (--shard_tokens)"
        )
    val_content = note_digest(validation)
    n = val_batch_tokens // micro_batches  # a micro-batch begins and ends within documents
    starts = np.union1d(np.arange(0, val_tokens, n), validation.starts[validation.starts < val_tokens])
    count(int(np.bincount(starts // n).max()), n, validation.path)
    longest = int(np.diff(starts, append=val_tokens).max())

    fed, present = 0, 0  # steps, usable tokens of the shards read
    trained: dict[str, str] = {}  # shards by what they hold

    def indexed() -> Iterator[Documents]:
        nonlocal present
        for path in train:
            documents = Documents(path, max_doc_len, bos_id, vocab_size)
            if (content := note_digest(documents)) == val_content:
                raise DataError(f"{path}: holds the tokens of {validation.path}, validation would be trained on")
            if (twin := trained.setdefault(content, path)) != path:
                raise DataError(f"{path}: holds the tokens of {twin}, which would be trained on twice: remove one")
            present += int(documents.ends[-1])
            yield documents

    for documents, tokens, ranges in plan_batches(indexed(), batch_tokens, micro_batches):
        for first, end in ranges:  # a document that starts at T gives the last target only
            count(end - first - int(documents.ends[end - 1] == documents.ends[first] + tokens), tokens, documents.path)
        fed += 1
        if fed == steps:
            break
    if faults:
        raise DataError(f"{faults[0]}: set --doc_slots={most + 1} or more")
    if fed == steps:
        return DataFacts(shards, 1 << (longest - 1).bit_length())
    needed, counted = 0, 0
    while counted < steps and (counted < 10_000 or needed < 10 * present):  # of a million steps the rest would take seconds
        needed, counted = needed + batch_tokens(counted), counted + 1
    over = "over " if counted < steps else ""
    raise DataError(
        f"{train_pattern(folder)}: {steps} steps need {over}{needed:,} tokens and what document cuts drop, each step's from "
        f"one shard; the shards here ({len(train)}) hold {present:,} usable ones, used up in step {fed + 1}: add shards, or lower "
        f"--num_scheduled_iterations or --batch_unit"
    )
