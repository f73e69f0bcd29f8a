"""The loader: whole documents from their starts, the same batches for any number of ranks."""

import itertools
import shutil

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common import wait_until
from data import loader
from data.loader import Batch, check_data, distributed_data_generator, synthetic_batch
from data.shards import DataError, save_manifest, write_shard

BOS = 0


def documents(lengths, seed=0):
    """Token arrays of these lengths, each beginning with BOS and without another."""
    random = np.random.default_rng(seed)
    bodies = [random.integers(1, 190, n - 1) for n in lengths]
    return [np.concatenate(([BOS], body)).astype(np.uint16) for body in bodies]


def write(folder, docs, split="train", index=0):
    path = folder / f"x_{split}_{index:06d}.bin"
    write_shard(path, np.concatenate(docs))
    return path


def plan_of(steps, batch_tokens, max_doc_len):
    """A plan; tokens and cut are numbers, or functions of the step."""
    at = lambda x, step: x(step) if callable(x) else x
    return [Batch(at(batch_tokens, step), at(max_doc_len, step)) for step in range(steps)]


def generator(folder, batch_tokens, max_doc_len, micro_batches=4, split="train", **more):
    """Of a plan that no test's shards can feed to its end."""
    plan = plan_of(2000, batch_tokens, max_doc_len)
    place = {"rank": 0, "world_size": 1, "bos_id": BOS, "micro_batches": micro_batches}
    pattern = str(folder / f"*_{split}_*.bin")
    return distributed_data_generator(pattern, plan, **{**place, **more})


def expected_slices(shards, batch_tokens, max_doc_len, micro_batches):
    """The rule for batches word by word, with lists: (tokens, starts) of every micro-batch."""
    step = 0
    for docs in shards:
        position = 0
        while True:
            n = batch_tokens(step) // micro_batches
            slices = []
            at = position
            for _ in range(micro_batches):
                tokens = []
                starts = []
                while len(tokens) < n + 1 and at < len(docs):
                    starts.append(len(tokens))
                    tokens += list(docs[at][: max_doc_len(step)])[: n + 1 - len(tokens)]
                    at += 1
                if len(tokens) < n + 1:
                    break
                slices.append((tokens, [s for s in starts if s < n]))
            if len(slices) < micro_batches:
                break
            yield from slices
            position = at
            step += 1


def as_slice(batch):
    """A micro-batch back as (tokens, starts) in plain lists; its form is checked."""
    inputs, targets, cu_seqlens = batch
    assert [x.dtype for x in batch] == [torch.int32, torch.int64, torch.int32]
    assert torch.equal(inputs[1:].long(), targets[:-1])
    T = len(inputs)
    starts = [s for s in cu_seqlens.tolist() if s < T]
    assert starts[0] == 0 and cu_seqlens[-1] == T
    assert cu_seqlens.tolist() == starts + [T] * (len(cu_seqlens) - len(starts))
    return inputs.tolist() + [targets[-1].item()], starts


def take(batches, count):
    return [as_slice(batch) for batch in itertools.islice(batches, count)]


@settings(max_examples=30, deadline=None)
@given(
    shard_lengths=st.lists(
        st.lists(st.integers(1, 60), min_size=1, max_size=40), min_size=1, max_size=3
    ),
    n=st.integers(1, 40),
    growth=st.integers(0, 2),
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    micro_batches=st.sampled_from([1, 2, 4]),
)
@example([[5, 4], [9]], 8, 0, [50], 1)  # each shard to its last token
def test_batches_are_what_the_rule_says(
    tmp_path_factory, shard_lengths, n, growth, cuts, micro_batches
):
    """Plan, each step's cut and alignment; a step never crosses a shard."""
    folder = tmp_path_factory.mktemp("shards")
    shards = [documents(lengths, seed=i) for i, lengths in enumerate(shard_lengths)]
    for i, docs in enumerate(shards):
        write(folder, docs, index=i)
    batch_tokens = lambda step: micro_batches * (n + growth * step)
    max_doc_len = lambda step: cuts[step % len(cuts)]
    expected = list(expected_slices(shards, batch_tokens, max_doc_len, micro_batches))
    batches = generator(folder, batch_tokens, max_doc_len, micro_batches)
    assert take(batches, len(expected)) == expected
    with pytest.raises(DataError, match="the tokens end after"):
        next(batches)


def shorter_at_first(step):
    """Tokens at which documents are cut: two stages, of three steps and of the others."""
    return 16 if step < 3 else 64


@pytest.mark.parametrize("aligned", [True, False])
def test_the_same_tokens_for_any_number_of_ranks(tmp_path, aligned):
    write(tmp_path, documents([37, 5, 90, 12, 64] * 60))
    settings = {"micro_batches": 16, "aligned": aligned}
    max_doc_len = shorter_at_first if aligned else 64
    whole = take(generator(tmp_path, 16 * 24, max_doc_len, **settings), 5 * 16)
    for world_size in (2, 4, 8, 16):
        place = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
        ranks = [generator(tmp_path, 16 * 24, max_doc_len, **settings, **x) for x in place]
        together = [take(rank, 16 // world_size) for _ in range(5) for rank in ranks]
        assert sum(together, []) == whole


@pytest.mark.parametrize("aligned", [True, False])
def test_a_later_first_step_gives_the_batches_of_an_uninterrupted_run(tmp_path, aligned):
    for index in range(2):
        write(tmp_path, documents([37, 5, 90, 12, 64] * 10, seed=index), index=index)
    batch_tokens = lambda step: 4 * (20 + step)
    given = (tmp_path, batch_tokens, shorter_at_first if aligned else 64)
    batches = lambda first: generator(*given, aligned=aligned, first_step=first)
    whole = take(batches(0), 4 * 12)
    for first in (1, 7, 11):
        assert take(batches(first), 4 * (12 - first)) == whole[4 * first :]


def test_validation_is_contiguous(tmp_path):
    docs = documents([7, 300, 40, 1, 1, 150] * 20)
    write(tmp_path, docs, split="val")
    flat = np.concatenate(docs).tolist()
    batches = take(generator(tmp_path, 4 * 60, 0, split="val", aligned=False), 16)
    for i, (tokens, starts) in enumerate(batches):
        assert tokens == flat[i * 60 : i * 60 + 61]
        assert starts == [j for j in range(60) if j == 0 or tokens[j] == BOS]


def test_a_validation_document_longer_than_the_bound_is_an_error(tmp_path):
    """Attention, which is given the bound, would ignore its end in silence."""
    write(tmp_path, documents([30, 50, 20, 28, 30, 50]), split="val")
    batches = lambda limit: generator(tmp_path, 64, limit, 1, split="val", aligned=False)
    assert len(take(batches(34), 3)) == 3  # 50 is cut in two, at 64: 34 and 16
    with pytest.raises(DataError, match="x_val_000000.bin: a document has 34 tokens"):
        next(batches(33))


@pytest.mark.parametrize("doc_slots", [0, 3])
def test_a_synthetic_batch_has_the_form_of_a_real_one(tmp_path, doc_slots):
    write(tmp_path, documents([400] * 60))
    real = next(generator(tmp_path, 512, 2048, micro_batches=1, doc_slots=doc_slots))
    made = synthetic_batch(512, vocab_size=200, max_doc_len=64, doc_slots=doc_slots)
    assert [x.shape for x in made] == [x.shape for x in real]
    tokens, starts = as_slice(made)
    assert starts == list(range(0, 512, 64))[: (doc_slots or 128) - 1]
    assert len(set(tokens)) > 100 and max(tokens) < 200


def test_a_loader_is_ready_when_it_is_made_and_reads_one_shard_ahead(tmp_path, monkeypatch):
    """The clock must not see a disk; memory must not hold a third shard."""
    read = []

    class Counted(loader.Documents):
        def __init__(self, path, *index):
            super().__init__(path, *index)
            read.append(path[-5])

    monkeypatch.setattr(loader, "Documents", Counted)
    for index in range(4):
        write(tmp_path, documents([50] * 400, seed=index), index=index)
    batches = generator(tmp_path, 4 * 49, 50)
    assert read[0] == "0"
    wait_until(lambda: read == ["0", "1"])
    take(batches, 4 * 95)  # a shard has 100 steps
    assert read == ["0", "1"]
    take(batches, 4 * 6)
    wait_until(lambda: read == ["0", "1", "2"])
    batches.close()


def test_a_shard_that_comes_after_the_check_is_not_read(folder):
    """A download that continues must not change the order of tokens."""
    check(folder)
    before = {split: take(generator(folder, 128, 64, split=split), 1) for split in ("train", "val")}
    for split in before:
        docs = documents([90] * 40, seed=9 + len(split))
        write_shard(folder / f"a_{split}_000000.bin", np.concatenate(docs))
        assert take(generator(folder, 128, 64, split=split), 1) == before[split]


# --------------------------------------------------------------------------------------------------
# Checks before training


def stages(step):
    """Tokens of a batch: three stages of two steps, then the last stage's size."""
    return 16 * (8, 16, 24)[min(step // 2, 2)]


def check(folder, **changes):
    """check_data of eight steps in eight micro-batches, of 16, 32 and 48 tokens each."""
    sizes = {"steps": 8, "batch_tokens": stages, "max_doc_len": 64}
    plan = plan_of(*(changes.pop(name, size) for name, size in sizes.items()))
    given = {"plan": plan, "micro_batches": 8}
    given |= {"doc_slots": 0, "bos_id": BOS, "vocab_size": 200, "encoding": "bytes"}
    given |= {"val_tokens": 256, "val_batch_tokens": 128}
    return check_data(str(folder), **given | changes)


@pytest.fixture
def folder(tmp_path):
    """Shards that are enough for `check`."""
    write(tmp_path, documents([40] * 200))
    write(tmp_path, documents([40] * 10), split="val")
    return tmp_path


def test_the_check_passes_what_the_loader_can_serve_and_no_more(folder):
    served = 0
    with pytest.raises(DataError, match="the tokens end after"):
        for _ in generator(folder, stages, shorter_at_first, micro_batches=8, vocab_size=200):
            served += 1
    steps = served // 8
    check(folder, steps=steps, max_doc_len=shorter_at_first)
    with pytest.raises(DataError, match=f"feed only {steps} steps.* cut at 16 to 64"):
        check(folder, steps=steps + 1, max_doc_len=shorter_at_first)


def test_shards_that_are_not_of_these_settings(folder):
    write_shard(folder / "x_train_000000.bin", [*[BOS, 5] * 4000, 200])
    with pytest.raises(DataError, match="x_train_000000.bin: has token 200, but --vocab_size=200"):
        check(folder)
    write_shard(folder / "x_val_000000.bin", [7] * 800)
    message = "x_val_000000.bin: no document begins in it .no token 0.: check --bos_id"
    with pytest.raises(DataError, match=message):
        check(folder)


def test_settings_that_a_manifest_contradicts(folder):
    save_manifest(folder, {"encoding": "bytes", "bos_id": BOS, "vocab_size": 200, "shards": {}})
    check(folder, encoding="bytes", vocab_size=256)  # a vocabulary may be padded
    with pytest.raises(DataError, match="manifest.json: .*: give --bos_id=0 --encoding=bytes$"):
        check(folder, bos_id=5, encoding="gpt2")
    with pytest.raises(DataError, match="manifest.json: .*: give --vocab_size=200$"):
        check(folder, vocab_size=199)


def test_a_copy_is_refused_where_it_would_be_trained_on_twice_or_validated_on(tmp_path):
    write(tmp_path, documents([40] * 10), split="val")
    write(tmp_path, documents([40] * 60, seed=1), index=0)
    write(tmp_path, documents([40] * 60, seed=2), index=1)
    (tmp_path / "x_train_000002.bin").symlink_to(tmp_path / "x_train_000000.bin")
    check(tmp_path, steps=6)  # ends before the copy
    with pytest.raises(DataError, match="_000002.bin: has the same tokens as .*x_train_000000.bin"):
        check(tmp_path, steps=12)
    shutil.copy(tmp_path / "x_val_000000.bin", tmp_path / "x_train_000000.bin")
    with pytest.raises(DataError, match="_000000.bin: has the same tokens as .*x_val_000000.bin"):
        check(tmp_path, steps=6)


@pytest.mark.parametrize("shortest", [64, 3])
def test_the_check_counts_documents_as_the_loader_does(tmp_path, shortest):
    """With as many slots as documents both refuse, with one more neither; the check says so.

    A shorter cut in the last steps takes more slots: one for three tokens at least.
    """
    max_doc_len = lambda step: 64 if step < 6 else shortest
    lengths = np.random.default_rng(0).integers(1, 12, (2, 900))
    write(tmp_path, documents(lengths[0]))
    write(tmp_path, documents(lengths[1], seed=1), split="val")
    train = lambda slots: take(generator(tmp_path, stages, max_doc_len, 8, doc_slots=slots), 64)
    counts = [len(starts) for _, starts in train(100)]
    most = max(counts)
    assert (most >= 48 / 3) == (shortest == 3)
    check(tmp_path, doc_slots=most + 1, max_doc_len=max_doc_len)
    assert len(train(most + 1)) == 64
    message = f"{most} documents .* do not fit {most} slots: set --doc_slots={most + 1}"
    with pytest.raises(DataError, match=message):
        check(tmp_path, doc_slots=most, max_doc_len=max_doc_len)
    with pytest.raises(DataError, match=message):
        train(most)


@pytest.mark.parametrize("seed", range(3))
def test_the_longest_validation_document_bounds_every_one(folder, seed):
    """A power of two, at most twice the longest part of a document in a micro-batch."""
    lengths = np.random.default_rng(seed).integers(1, 9 * 10**seed, 90)
    write(folder, documents([*lengths, 300], seed=1), split="val")
    found = check(folder, micro_batches=2, doc_slots=100).longest
    batches = generator(folder, 128, 0, 2, split="val", aligned=False, doc_slots=100)
    longest = max(int(batch[2].diff().max()) for batch in itertools.islice(batches, 4))
    assert longest <= found < 2 * longest and found & (found - 1) == 0
