"""The loader: whole documents from their starts, the same batches for every world size, and errors instead of hangs."""

import itertools
import json
import os
import re
import threading
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from common import wait_until
from data import loader
from data.loader import check_data, default_doc_slots, distributed_data_generator, find_shards, first_documents, synthetic_batch
from data.shards import DataError, without_readers, write_shard

BOS = 0


def documents(lengths, seed=0):
    """Token arrays of these lengths, each beginning with BOS and without another."""
    generator = np.random.default_rng(seed)
    return [np.concatenate(([BOS], generator.integers(1, 190, n - 1))).astype(np.uint16) for n in lengths]


def write(folder, docs, split="train", index=0):
    folder.mkdir(exist_ok=True)
    path = folder / f"x_{split}_{index:06d}.bin"
    write_shard(path, np.concatenate(docs))
    return path


def generator(folder, batch_tokens, max_doc_len, micro_batches=4, rank=0, world_size=1, split="train", **more):
    return distributed_data_generator(
        str(folder / f"*_{split}_*.bin"), batch_tokens, max_doc_len, micro_batches=micro_batches, rank=rank,
        world_size=world_size, bos_id=BOS, **more,
    )  # fmt: skip


def expected_slices(shards, batch_tokens, max_doc_len, micro_batches):
    """The rule for batches word by word, with lists: (tokens, starts) of every micro-batch, step by step."""
    step = 0
    for docs in shards:
        position = 0
        while True:
            n = batch_tokens(step) // micro_batches
            slices, at = [], position
            for _ in range(micro_batches):
                tokens, starts = [], []
                while len(tokens) < n + 1 and at < len(docs):
                    starts.append(len(tokens))
                    tokens += list(docs[at][:max_doc_len])[: n + 1 - len(tokens)]
                    at += 1
                if len(tokens) < n + 1:
                    break
                slices.append((tokens, starts))
            if len(slices) < micro_batches:
                break
            yield slices
            position, step = at, step + 1


def as_slice(batch):
    """What came out, back to (tokens, starts) in plain lists."""
    inputs, targets, cu_seqlens = batch
    assert inputs.dtype == torch.int32 and targets.dtype == torch.int64 and cu_seqlens.dtype == torch.int32
    assert torch.equal(inputs[1:].long(), targets[:-1])
    T = len(inputs)
    starts = [s for s in cu_seqlens.tolist() if s < T]
    assert cu_seqlens.tolist() == starts + [T] * (len(cu_seqlens) - len(starts)) and cu_seqlens[-1] == T
    return inputs.tolist() + [targets[-1].item()], starts


@settings(max_examples=40, deadline=None)
@given(
    shard_lengths=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=40), min_size=1, max_size=3),
    n=st.integers(1, 40),
    growth=st.integers(0, 2),
    max_doc_len=st.integers(1, 50),
    micro_batches=st.sampled_from([1, 2, 4]),
)
def test_slices_are_what_the_rule_says(tmp_path_factory, shard_lengths, n, growth, max_doc_len, micro_batches):
    folder = tmp_path_factory.mktemp("shards")
    shards = [documents(lengths, seed=i) for i, lengths in enumerate(shard_lengths)]
    for i, docs in enumerate(shards):
        write(folder, docs, index=i)
    batch_tokens = lambda step: micro_batches * (n + growth * step)
    expected = [s for slices in expected_slices(shards, batch_tokens, max_doc_len, micro_batches) for s in slices]
    found = []
    with pytest.raises(DataError, match="the tokens end after"):
        batches = generator(folder, batch_tokens, max_doc_len, micro_batches)
        for batch in itertools.islice(batches, len(expected) + 1):  # a wrong rule may never come to the end
            found.append(as_slice(batch))
        batches.close()
    assert len(found) == len(expected)
    for (tokens, starts), (expected_tokens, expected_starts) in zip(found, expected):
        assert tokens == expected_tokens
        assert starts == [s for s in expected_starts if s < len(tokens) - 1]


def test_documents_are_never_mixed(tmp_path):
    """Every document carries its own number in all its tokens, so that a slice shows what it is made of."""
    docs = [np.array([BOS] + [i] * 30, dtype=np.uint16) for i in range(1, 200)]
    write(tmp_path, docs)
    for tokens, starts in map(as_slice, itertools.islice(generator(tmp_path, 4 * 64, 20), 40)):
        for a, b in itertools.pairwise(starts + [len(tokens)]):
            assert tokens[a] == BOS and len(set(tokens[a + 1 : b])) <= 1 and b - a <= 20


@pytest.mark.parametrize("aligned", [True, False])
def test_same_tokens_for_every_world_size(tmp_path, aligned):
    write(tmp_path, documents([37, 5, 90, 12, 64] * 60))
    whole = [as_slice(b) for b in itertools.islice(generator(tmp_path, 8 * 48, 64, micro_batches=8, aligned=aligned), 5 * 8)]
    for world_size in (2, 4, 8):
        ranks = [
            generator(tmp_path, 8 * 48, 64, micro_batches=8, rank=r, world_size=world_size, aligned=aligned)
            for r in range(world_size)
        ]
        together = [as_slice(next(rank)) for _ in range(5) for rank in ranks for _ in range(8 // world_size)]
        assert together == whole


@pytest.mark.parametrize("aligned", [True, False])
def test_a_later_first_step_gives_the_batches_of_an_uninterrupted_run(tmp_path, aligned):
    for index in range(2):
        write(tmp_path, documents([37, 5, 90, 12, 64] * 10, seed=index), index=index)
    batch_tokens = lambda step: 4 * (20 + step)

    def slices(first):
        batches = generator(tmp_path, batch_tokens, 64, aligned=aligned, first_step=first)
        return [as_slice(b) for b in itertools.islice(batches, 4 * (12 - first))]

    whole = slices(0)
    for first in (1, 7, 11):
        assert slices(first) == whole[4 * first :]


def test_ranks_that_cannot_share_a_step_are_refused(tmp_path):
    with pytest.raises(ValueError, match="8 micro-batches cannot be shared evenly by 3 ranks"):
        generator(tmp_path, 8 * 16, 64, micro_batches=8, world_size=3)


def test_a_step_never_crosses_a_shard(tmp_path):
    first, second = documents([50] * 9, seed=1), documents([50] * 40, seed=2)
    write(tmp_path, first, index=0)
    write(tmp_path, second, index=1)
    batches = [as_slice(b)[0] for b in itertools.islice(generator(tmp_path, 4 * 99, 50), 8)]
    flat = np.concatenate(first).tolist()
    assert all(b == flat[i * 100 : i * 100 + 100] for i, b in enumerate(batches[:4]))
    assert batches[4] == np.concatenate(second)[:100].tolist()  # the ninth document was dropped


def test_validation_is_contiguous(tmp_path):
    docs = documents([7, 300, 40, 1, 1, 150] * 20)
    write(tmp_path, docs, split="val")
    flat = np.concatenate(docs).tolist()
    batches = [as_slice(b) for b in itertools.islice(generator(tmp_path, 4 * 60, 0, split="val", aligned=False), 16)]
    for i, (tokens, starts) in enumerate(batches):
        assert tokens == flat[i * 60 : i * 60 + 61]
        assert starts == [j for j in range(60) if j == 0 or tokens[j] == BOS]


@pytest.mark.parametrize("tokens, most", [(16384, 56), (32768, 90), (49152, 121)])  # documents seen in FineWeb
def test_slots_fit_fineweb_closely(tokens, most):
    assert most < default_doc_slots(tokens) <= most + 8


@given(tokens=st.integers(1, 2**20).filter(lambda n: n not in (16384, 32768, 49152)))
def test_slots_of_other_sizes_are_one_for_300_tokens_in_units_of_128(tokens):
    slots = default_doc_slots(tokens)
    assert slots % 128 == 0 and slots - 128 < max(1, tokens // 300) <= slots


def test_too_many_documents_name_shard_and_option(tmp_path):
    path = write(tmp_path, documents([2] * 400))
    with pytest.raises(DataError, match=rf"{path}: 50 documents .* 100 tokens do not fit 32 slots: set --doc_slots=51"):
        next(generator(tmp_path, 4 * 100, 20, doc_slots=32))
    assert len(next(generator(tmp_path, 4 * 100, 20, doc_slots=51))[2]) == 51


def test_a_document_that_gives_only_the_last_target_starts_at_T(tmp_path):
    write(tmp_path, documents([16, 10] * 8))
    inputs, targets, cu_seqlens = next(generator(tmp_path, 4 * 16, 100, doc_slots=4))
    assert targets[-1] == BOS and cu_seqlens.tolist() == [0, 16, 16, 16]


@pytest.mark.parametrize("end", ["closed", "dropped", "dropped unused"])
def test_the_loading_threads_end_with_their_generator(tmp_path, end):
    for index in range(3):
        write(tmp_path, documents([50] * 400), index=index)
    others = set(threading.enumerate())
    batches = generator(tmp_path, 4 * 16, 100)
    threads = set(threading.enumerate()) - others
    assert {thread.name for thread in threads} == {"loader", "shards_0"}
    if end != "dropped unused":
        next(batches)
    if end == "closed":
        batches.close()
        assert next(batches, None) is None
    del batches
    assert not any(thread.is_alive() for thread in threads)


class Counted(loader.Documents):
    """Documents that tell which shards were read."""

    read = []

    def __init__(self, path, *index):
        super().__init__(path, *index)
        self.read.append(path[-8:-4])


def test_a_loader_is_ready_when_it_is_made_and_reads_one_shard_ahead(tmp_path, monkeypatch):
    """What the clock must not see: the first shard is indexed and the first micro-batch made before anything is asked for."""
    monkeypatch.setattr(loader, "Documents", Counted)
    monkeypatch.setattr(Counted, "read", [])
    for index in range(4):
        write(tmp_path, documents([50] * 400, seed=index), index=index)
    steps = 400 * 50 // 200  # of a shard, at most
    batches = generator(tmp_path, 4 * 49, 50)
    assert Counted.read[0] == "0000" and batches.next[0] == "item"
    pool = next(thread for thread in threading.enumerate() if thread.name == "shards_0")
    assert pool.is_alive()
    wait_until(lambda: Counted.read == ["0000", "0001"])
    for _ in range(4 * (steps - 5)):
        next(batches)
    assert Counted.read == ["0000", "0001"]  # two in memory, never three
    for _ in range(4 * 6):
        next(batches)
    wait_until(lambda: Counted.read == ["0000", "0001", "0002"])
    batches.close()


def test_an_error_in_the_loading_thread_reaches_the_consumer(tmp_path):
    write(tmp_path, documents([40] * 30), index=0)
    (tmp_path / "x_train_000001.bin").write_bytes(b"no shard")
    batches, made = generator(tmp_path, 4 * 16, 100), 0
    with pytest.raises(DataError, match="x_train_000001.bin"):
        for _ in batches:
            made += 1
    assert made == 4 * 7  # in its turn: what came before is served
    assert next(batches, None) is None


# -----------------------------------------------------------------------------
# Without the generator


def test_a_synthetic_batch_has_the_shapes_and_types_of_a_real_one(tmp_path):
    write(tmp_path, documents([40] * 60))
    for doc_slots in (0, 40):
        real = next(generator(tmp_path, 512, 64, micro_batches=1, doc_slots=doc_slots))
        synthetic = synthetic_batch(512, vocab_size=200, max_doc_len=64, doc_slots=doc_slots)
        assert [(x.shape, x.dtype, x.device) for x in synthetic] == [(x.shape, x.dtype, x.device) for x in real]


@pytest.mark.parametrize("tokens, max_doc_len, doc_slots", [(512, 64, 0), (512, 64, 3), (512, 2048, 0), (48, 2048, 1)])
def test_a_synthetic_batch_has_tokens_of_the_vocabulary_and_no_more_documents_than_slots(tokens, max_doc_len, doc_slots):
    inputs, starts = as_slice(synthetic_batch(tokens, vocab_size=200, max_doc_len=max_doc_len, doc_slots=doc_slots))
    assert len(set(inputs)) > min(tokens, 200) / 2 and 0 <= min(inputs) and max(inputs) < 200
    documents = list(range(0, tokens, max_doc_len))
    assert starts == documents[: (doc_slots or default_doc_slots(tokens)) - 1]


def test_the_first_documents_begin_with_their_bos_and_are_long_enough(tmp_path):
    """If none is, the first one is there, and ends with itself."""
    head, first, second = np.array([5, 6], dtype=np.uint16), *documents([30, 40])
    write(tmp_path, [head, first, second], split="val")
    write(tmp_path, documents([50], seed=9), split="val", index=1)
    for tokens, chosen in ((1, [first, second]), (30, [first, second]), (31, [second]), (40, [second]), (41, [first])):
        expected = [document.tolist()[:tokens] for document in chosen]
        assert first_documents(str(tmp_path), BOS, tokens, 2) == expected
        assert first_documents(str(tmp_path), BOS, tokens, 1) == expected[:1]
    with pytest.raises(DataError, match="x_val_000000.bin: no document begins in it"):
        first_documents(str(tmp_path), 199, 64, 1)


# -----------------------------------------------------------------------------
# Checks before training


def batch_tokens(step):
    """Three stages of two steps, then the last stage's size."""
    return 16 * (8, 16, 24)[min(step // 2, 2)]


def check(folder, **changes):
    """check_data of eight steps in eight micro-batches, of 16, 32 and 48 tokens each."""
    settings = dict(
        steps=8, batch_tokens=batch_tokens, max_doc_len=64, micro_batches=8, doc_slots=0, bos_id=BOS, vocab_size=200,
        val_tokens=256, val_batch_tokens=128,
    )  # fmt: skip
    return check_data(str(folder), **(settings | changes))


MANIFEST = {"bos_id": BOS, "vocab_size": 200, "encoding": "bytes", "recipe": {}}
OTHER = {  # what a check is given, and what it says; "": nothing
    "as they are": ({"encoding": "bytes"}, ""),
    "no encoding": ({}, ""),
    "a larger vocabulary": ({"vocab_size": 256}, ""),
    "bos_id": ({"bos_id": 7}, f"--bos_id=7: give --bos_id={BOS}$"),
    "all": (
        {"bos_id": 7, "vocab_size": 100, "encoding": "gpt2"},
        f"--bos_id=7 --vocab_size=100 --encoding=gpt2: give --bos_id={BOS} --vocab_size=200 --encoding=bytes$",
    ),
}  # fmt: skip


def test_an_encoding_that_is_not_that_of_finewebs_progress_is_refused(folder):
    """The samples' text was of another vocabulary than the shards."""
    for path in [*folder.iterdir()]:
        path.rename(folder / f"fineweb_{path.name.partition('_')[2]}")
    for text in ("", "[]", '{"recipe": 3}', '{"recipe": {"encoding": "gpt2"}}'):
        (folder / "progress.json").write_text(text)
        check(folder, encoding="gpt2")
    check(folder)
    with pytest.raises(DataError, match="/progress.json: its shards were not made for --encoding=r50k_base: give --encoding=gpt2$"):
        check(folder, encoding="r50k_base")
    (folder / "progress.json").write_text('{"recipe": {"encoding": "a;\\n$(touch x)"}}')
    with pytest.raises(DataError, match=r"give '--encoding=a; \$\(touch x\)'$"):  # to be pasted
        check(folder, encoding="gpt2")
    write(folder, documents([40] * 10), index=9)  # beside another's
    check(folder, encoding="r50k_base")


@pytest.mark.parametrize("case", OTHER)
def test_settings_that_are_not_those_of_the_shards_manifest_are_refused(folder, case):
    """With the bos_id of another encoding a run trained on wrong documents, without a word."""
    changes, message = OTHER[case]
    listed = {name: 1 for name in os.listdir(folder)}
    (folder / "manifest.json").write_text(json.dumps({**MANIFEST, "shards": listed}))
    if not message:
        check(folder, **changes)
        return
    with pytest.raises(DataError, match="/manifest.json: its shards were not made for " + message):
        check(folder, **changes)


def test_shards_of_two_makers_are_no_data(folder):
    """Of data/local_text.py, and others that came into its folder: a run trained on both, and validated on one."""
    listed = dict.fromkeys([*os.listdir(folder)], 1)
    added = sorted(listed)[0]
    del listed[added]
    (folder / "manifest.json").write_text(json.dumps({**MANIFEST, "shards": listed}))
    with pytest.raises(DataError, match=f"{folder}: {added} beside .*, which alone is in manifest.json: a run would train on both: move"):
        check(folder)


@pytest.mark.parametrize(
    "manifest",
    ["no JSON", "[]", '{"bos_id": 7}', '{"bos_id": 7, "shards": {"x_train_000000.bin": 1}}', '{"bos_id": "7", "shards": ALL}'],
)
def test_a_manifest_of_other_shards_or_another_program_says_nothing(folder, manifest):
    listed = json.dumps({name: 1 for name in os.listdir(folder)})
    (folder / "manifest.json").write_text(manifest.replace("ALL", listed))
    check(folder)


def test_a_shard_that_comes_after_the_check_is_not_read_and_one_that_goes_is_missed(folder):
    """A validation that lists its folder anew would go on with other tokens, and say nothing."""
    check(folder)
    before = {split: as_slice(next(generator(folder, 128, 64, split=split))) for split in ("train", "val")}
    for split in before:
        write_shard(folder / f"a_{split}_000000.bin", np.concatenate(documents([90] * 40, seed=9 + len(split))))
        assert as_slice(next(generator(folder, 128, 64, split=split))) == before[split]
    first = first_documents(str(folder), BOS, 8, 1)
    next(folder.glob("x_val_*")).unlink()
    for read in (lambda: next(generator(folder, 128, 64, split="val")), lambda: first_documents(str(folder), BOS, 8, 1)):
        with pytest.raises(DataError, match="x_val_000000.bin: no such file"):
            read()
    check(folder)  # another run's
    assert first_documents(str(folder), BOS, 8, 1) != first


def test_checked_shards_are_not_replaced_until_others_are_checked(folder, tmp_path_factory):
    with without_readers(folder):
        pass
    check(folder)
    with pytest.raises(DataError, match="a run trains on these shards, which others would replace"), without_readers(folder):
        pass
    with pytest.raises(DataError, match="_val_"):
        check(tmp_path_factory.mktemp("other"))
    with without_readers(folder):
        pass


def test_tokens_that_would_be_trained_on_twice_are_refused(tmp_path):
    """A copy, or a link, where a run reads both; not where it ends before the second."""
    write(tmp_path, documents([40] * 10), split="val")
    write(tmp_path, documents([40] * 60, seed=1), index=0)
    write(tmp_path, documents([40] * 60, seed=2), index=1)
    (tmp_path / "x_train_000002.bin").symlink_to(tmp_path / "x_train_000000.bin")
    check(tmp_path, steps=6)
    with pytest.raises(DataError, match="x_train_000002.bin: holds the tokens of .*x_train_000000.bin, which would be"):
        check(tmp_path, steps=12)


@pytest.fixture
def folder(tmp_path):
    """Shards that are enough for `check`."""
    write(tmp_path, documents([40] * 200))
    write(tmp_path, documents([40] * 10), split="val")
    return tmp_path


def test_the_check_passes_what_the_loader_can_serve_to_the_last_step_and_no_more(folder):
    served = 0
    with pytest.raises(DataError, match="the tokens end after"):
        for _ in generator(folder, batch_tokens, 64, micro_batches=8, vocab_size=200):
            served += 1
    check(folder, steps=served // 8)
    with pytest.raises(DataError, match=rf"{served // 8 + 1} steps need .* used up in step {served // 8 + 1}"):
        check(folder, steps=served // 8 + 1)


def test_too_little_data_is_an_error_before_training_that_names_both_numbers(folder):
    write(folder, documents([40] * 30))
    needed = 2 * 16 * (8 + 16 + 24) + 2 * 24 * 16
    expected = rf"8 steps need {needed:,} tokens .* the shards here \(1\) hold 1,200 usable ones, used up in step \d: add"
    with pytest.raises(DataError, match=expected):
        check(folder)


def test_far_too_little_data_is_told_before_all_steps_are_counted(folder):
    """Of a million steps the sum alone took seconds."""
    asked = []

    def tokens(step: int) -> int:
        asked.append(step)
        return batch_tokens(0)

    with pytest.raises(DataError, match=r"1000000 steps need over [\d,]+ tokens .* used up in step \d+: add"):
        check(folder, steps=10**6, batch_tokens=tokens)
    assert max(asked) < 20_000


def test_validation_of_one_token_too_few(folder):
    check(folder, val_tokens=399, val_batch_tokens=399)  # the last one's target is the 400th
    with pytest.raises(DataError, match=r"x_val_000000.bin: validation needs 401 tokens, it holds 400: lower --val_tokens.* of more text, or longer ones"):
        check(folder, val_tokens=400)


@pytest.mark.parametrize("split", ["train", "val"])
def test_no_shards(folder, split, monkeypatch):
    (folder / f"x_{split}_000000.bin").unlink()
    with pytest.raises(DataError, match=rf"no shard matches .*_{split}_.*data/local_text.py.*data/cached_fineweb10B.py"):
        check(folder)
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=rf"no shard matches {folder}/none/x_{split}_"):  # where it has looked
        find_shards(f"none/x_{split}_*.bin")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_shard_without_documents(folder, split):
    write(folder, [np.full(800, 7, dtype=np.uint16)], split)
    with pytest.raises(DataError, match=rf"x_{split}_000000.bin: no document begins in it .no token 0.: .*--bos_id"):
        check(folder)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_token_outside_the_vocabulary(folder, split):
    write(folder, [*documents([40] * 200), np.array([BOS, 200], dtype=np.uint16)], split)
    with pytest.raises(DataError, match=rf"x_{split}_000000.bin: holds token 200, but the vocabulary ends at 200"):
        check(folder)


def serve(folder, slots, split, aligned, steps):
    """The most documents in a micro-batch of the first steps. Raises DataError where training or validation would."""
    tokens = batch_tokens if aligned else 128
    batches = generator(folder, tokens, 64, 8, split=split, doc_slots=slots, aligned=aligned)
    return max(len(as_slice(batch)[1]) for batch in itertools.islice(batches, 8 * steps))


@pytest.mark.parametrize("seed", range(4))
def test_the_check_counts_documents_as_the_loader_does_to_the_one(tmp_path, seed):
    """With as many slots as documents both refuse, with one more neither does; the check names that number."""
    lengths, folder = np.random.default_rng(seed).integers(1, 12, (2, 900)), tmp_path
    write(folder, documents(lengths[0]))
    write(folder, documents(lengths[1], seed=1), split="val")
    most = [serve(folder, 100, "train", True, 8), serve(folder, 100, "val", False, 2)]
    check(folder, doc_slots=max(most) + 1)
    for slots in (max(most), min(most), 1):
        message = rf"x_(train|val)_000000.bin: .* do not fit {slots} slots.* or more"
        with pytest.raises(DataError, match=message) as caught:
            check(folder, doc_slots=slots)
        assert int(re.search(r"--doc_slots=(\d+)", str(caught.value))[1]) == max(most) + 1
        with pytest.raises(DataError, match=f"do not fit {slots} slots"):
            serve(folder, slots, "train", True, 8)
            serve(folder, slots, "val", False, 2)
    serve(folder, max(most) + 1, "train", True, 8)


def test_the_check_does_not_count_a_document_that_gives_the_last_target_only(folder):
    write(folder, documents([16, 5] * 100))
    sizes = dict(batch_tokens=lambda step: 8 * 16, val_tokens=16, val_batch_tokens=128)  # validation: one document of 40
    check(folder, doc_slots=2, **sizes)
    with pytest.raises(DataError, match="x_.*: 1 documents in one micro-batch of 16 tokens do not fit 1 slots"):
        check(folder, doc_slots=1, **sizes)


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 300) | st.integers(1, 9), min_size=10, max_size=60).filter(lambda x: sum(x) > 260),
    val_tokens=st.sampled_from([128, 256]),
)
def test_the_longest_validation_document_bounds_every_one_and_is_one_for_a_run(tmp_path_factory, lengths, val_tokens):
    """A power of two, at most twice the longest in the micro-batches: what of a document lies in one of them counts."""
    folder = tmp_path_factory.mktemp("longest")
    write(folder, documents([40] * 200))
    write(folder, documents(lengths, seed=1), split="val")
    found = check(folder, val_tokens=val_tokens, val_batch_tokens=128, micro_batches=2, doc_slots=100).longest
    batches = generator(folder, 128, 0, micro_batches=2, split="val", aligned=False, doc_slots=100)
    starts = [batch[2] for batch in itertools.islice(batches, val_tokens // 64)]
    longest = max(int(x.diff().max()) for x in starts)
    assert longest <= found < 2 * longest and found & (found - 1) == 0


def test_a_validation_document_longer_than_the_bound_is_an_error_and_never_passed_over(tmp_path):
    write(tmp_path, documents([30, 50, 20, 28, 30, 50]), split="val")
    batches = lambda limit: generator(tmp_path, 64, limit, micro_batches=1, split="val", aligned=False)
    assert len(list(itertools.islice(batches(34), 3))) == 3  # 50 are cut in two, at 64: 34 and 16
    with pytest.raises(DataError, match="x_val_000000.bin: a document has 34 tokens, the longest was to have 33: has the"):
        next(batches(33))


def test_the_check_knows_every_shard_by_its_tokens_and_those_of_the_run_by_their_digest(folder):
    tokens = {split: np.concatenate(documents([40] * n)) for split, n in (("train", 200), ("val", 10))}
    write(folder, documents([30]), index=1)  # more than the run reads
    crc = {split: f"{zlib.crc32(x.tobytes()):08x}" for split, x in tokens.items()}
    assert check(folder).shards == {
        "x_train_000000.bin": f"8,000 tokens, CRC-32 {crc['train']}", "x_train_000001.bin": "30 tokens",
        "x_val_000000.bin": f"400 tokens, CRC-32 {crc['val']}",
    }  # fmt: skip
