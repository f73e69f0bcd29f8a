"""The loader: whole documents from their starts, the same batches for every world size, and errors instead of hangs."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import train_gpt
from data.shards import write_shard
from train_gpt import DataError, Hyperparameters, check_data, default_doc_slots, distributed_data_generator, read_shard

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


def generator(folder, batch_tokens, max_seq_len, micro_batches=4, rank=0, world_size=1, split="train", **more):
    return distributed_data_generator(
        str(folder / f"*_{split}_*.bin"), batch_tokens, max_seq_len, micro_batches=micro_batches, rank=rank, world_size=world_size, bos_id=BOS, **more
    )  # fmt: skip


def expected_slices(shards, batch_tokens, max_seq_len, micro_batches):
    """Word by word what design.md section 7 says, with lists: (tokens, starts) of every micro-batch, step by step."""
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
                    tokens += list(docs[at][:max_seq_len])[: n + 1 - len(tokens)]
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
    max_seq_len=st.integers(1, 50),
    micro_batches=st.sampled_from([1, 2, 4]),
)
def test_slices_are_what_the_design_says(tmp_path_factory, shard_lengths, n, growth, max_seq_len, micro_batches):
    folder = tmp_path_factory.mktemp("shards")
    shards = [documents(lengths, seed=i) for i, lengths in enumerate(shard_lengths)]
    for i, docs in enumerate(shards):
        write(folder, docs, index=i)
    batch_tokens = lambda step: micro_batches * (n + growth * step)
    expected = [s for slices in expected_slices(shards, batch_tokens, max_seq_len, micro_batches) for s in slices]
    found = []
    with pytest.raises(DataError, match="the tokens end after"):
        for batch in generator(folder, batch_tokens, max_seq_len, micro_batches):
            found.append(as_slice(batch))
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


def test_same_tokens_for_every_world_size(tmp_path):
    write(tmp_path, documents([37, 5, 90, 12, 64] * 60))
    whole = [as_slice(b) for b in itertools.islice(generator(tmp_path, 8 * 48, 64, micro_batches=8), 5 * 8)]
    for world_size in (2, 4, 8):
        share = 8 // world_size
        ranks = [generator(tmp_path, 8 * 48, 64, micro_batches=8, rank=r, world_size=world_size) for r in range(world_size)]
        together = [as_slice(next(rank)) for _ in range(5) for rank in ranks for _ in range(share)]
        assert together == whole


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


@pytest.mark.parametrize(
    "tokens, slots", [(16384, 64), (32768, 96), (49152, 128), (262144, 896), (38400, 128), (38700, 256), (512, 128)]
)
def test_cu_seqlens_have_one_size_for_a_micro_batch_size(tokens, slots):
    assert default_doc_slots(tokens) == slots


def test_too_many_documents_name_shard_and_option(tmp_path):
    path = write(tmp_path, documents([2] * 400))
    with pytest.raises(DataError, match=rf"{path}: 50 documents .* 100 tokens do not fit 32 slots: set --doc_slots=51"):
        next(generator(tmp_path, 4 * 100, 20, doc_slots=32))
    assert len(next(generator(tmp_path, 4 * 100, 20, doc_slots=51))[2]) == 51


def test_a_document_that_gives_only_the_last_target_starts_at_T(tmp_path):
    write(tmp_path, documents([16, 10] * 8))
    inputs, targets, cu_seqlens = next(generator(tmp_path, 4 * 16, 100, doc_slots=4))
    assert targets[-1] == BOS and cu_seqlens.tolist() == [0, 16, 16, 16]


def test_the_loading_thread_ends_with_its_generator(tmp_path):
    write(tmp_path, documents([50] * 400))
    others = set(threading.enumerate())
    batches = generator(tmp_path, 4 * 16, 100)
    next(batches)
    (loader,) = set(threading.enumerate()) - others
    assert loader.name == "loader" and loader.is_alive()
    batches.close()
    loader.join(timeout=5)
    assert not loader.is_alive()


# -----------------------------------------------------------------------------
# Errors


def tiny(folder, **more):
    return Hyperparameters(**{**dict(
        data=str(folder), vocab_size=200, bos_id=BOS, num_scheduled_iterations=6, num_extension_iterations=2, batch_unit=16,
        micro_batches=8, max_doc_len=64, val_tokens=256, val_batch_tokens=128), **more})  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Shards that are just enough for `tiny`."""
    write(tmp_path, documents([40] * 200))
    write(tmp_path, documents([40] * 10), split="val")
    return tmp_path


def test_enough_data_passes(folder):
    check_data(tiny(folder))


def test_too_little_data_is_an_error_before_training_that_names_both_numbers(folder):
    (folder / "x_train_000000.bin").unlink()
    write(folder, documents([40] * 30), index=0)
    needed = 2 * 16 * (8 + 16 + 24) + 2 * 24 * 16
    with pytest.raises(
        DataError, match=rf"8 steps need {needed:,} tokens .* 1 shards hold 1,200 usable ones, enough for \d steps: add shards"
    ):
        check_data(tiny(folder))


def test_the_preflight_agrees_with_the_loader_on_the_last_step(folder):
    """What check_data lets pass, the loader can serve to the end; one step more and it cannot."""
    h = tiny(folder)
    steps = 0
    with pytest.raises(DataError):
        for _ in generator(
            folder, lambda step: train_gpt.step_schedule(step, h).batch_tokens, 64, micro_batches=8, vocab_size=200
        ):
            steps += 1
    for total, fits in ((steps // 8, True), (steps // 8 + 1, False)):
        exact = tiny(folder, num_extension_iterations=total - 6)
        if fits:
            check_data(exact)
        else:
            with pytest.raises(DataError):
                check_data(exact)


def test_validation_too_short(folder):
    with pytest.raises(DataError, match=r"x_val_000000.bin: validation needs 513 tokens, it holds 400"):
        check_data(tiny(folder, val_tokens=512))


def test_no_shards(tmp_path):
    with pytest.raises(DataError, match="no shard matches .*_val_.*data/local_text.py"):
        check_data(tiny(tmp_path))


def test_a_shard_without_documents(folder):
    with pytest.raises(DataError, match="no document begins in it .no token 199.: an?other shards?, or --bos_id"):
        check_data(tiny(folder, bos_id=199, val_tokens=256))


def test_a_token_outside_the_vocabulary(folder):
    with pytest.raises(DataError, match=r"x_val_000000.bin: holds token 1\d\d, but the vocabulary ends at 100"):
        check_data(tiny(folder, vocab_size=100))


HEADER = np.zeros(256, dtype="<i4")
HEADER[:3] = 20240520, 1, 10
BODY = np.arange(10, dtype="<u2").tobytes()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not a token shard"),
        (HEADER.tobytes()[:100], "not a token shard"),
        (HEADER.tobytes(), r"names 10 tokens, but it holds 0\.0"),
        (HEADER.tobytes() + BODY[:-2], r"names 10 tokens, but it holds 9\.0"),
        (HEADER.tobytes() + BODY[:-1], r"names 10 tokens, but it holds 9\.5"),
        (HEADER.tobytes() + BODY + b"??", r"names 10 tokens, but it holds 11\.0"),
        (b"\x80\x02" * 600, "not a token shard"),
        (
            np.array([20240520, 2, 10] + [0] * 253, "<i4").tobytes() + BODY,
            r"\[20240520, 2, 10\], expected \[20240520, 1, count\]",
        ),
    ],
)
def test_a_broken_shard_is_named(tmp_path, content, message):
    path = tmp_path / "broken.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_shard(str(path))
    assert str(path) in str(error.value)


def test_a_whole_shard_reads_back(tmp_path):
    path = tmp_path / "whole.bin"
    path.write_bytes(HEADER.tobytes() + BODY)
    assert read_shard(str(path)).tolist() == list(range(10))


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(DataError, match="missing.bin"):
        read_shard(str(tmp_path / "missing.bin"))


def test_an_error_in_the_loading_thread_reaches_the_consumer(tmp_path):
    write(tmp_path, documents([40] * 30), index=0)
    (tmp_path / "x_train_000001.bin").write_bytes(b"no shard")
    with pytest.raises(DataError, match="x_train_000001.bin"):
        for _ in generator(tmp_path, 4 * 16, 100):
            pass
