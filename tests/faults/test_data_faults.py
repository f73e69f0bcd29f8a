"""Faults of data, injected before and between runs: each ends the start with one message and code 1, and no file is written."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

import train_gpt
from common import ends_with, options, text_of, tiny_settings
from data.shards import HEADER_BYTES, read_shard, write_shard
from runtime.ranks import Ranks
from train_gpt import main

TRAIN, VAL = "local_train_000000.bin", "local_val_000000.bin"
ALONE = Ranks(0, 1, torch.device("cpu"))


def fifo(name: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return put


def link(name: str, target: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return put


def short_documents(folder: Path) -> None:
    """Validation has a document at every other token from its 41st on: its last micro-batches begin within one."""
    write_shard(folder / VAL, [256, *[7] * 40, *[256, 7] * 300])


FAULTS = {  # what happens to a good folder, and the message
    "a FIFO for training": (fifo(TRAIN), "train_000000.bin: is not a file; make or fetch it"),
    "a FIFO for validation": (fifo(VAL), "val_000000.bin: is not a file"),
    "a FIFO beyond what the run reads": (fifo("local_train_000007.bin"), "train_000007.bin: is not a file"),
    "a device": (link(TRAIN, "/dev/zero"), "train_000000.bin: is not a file"),
    "a dead link": (link(TRAIN, "nowhere"), "train_000000.bin: no such file"),
    "a circle of links": (link(TRAIN, TRAIN), "train_000000.bin: "),
    "a page beyond what the run reads": (
        lambda folder: (folder / "local_train_000007.bin").write_text("<html>" * 999), "train_000007.bin: is not a token shard"
    ),
    "a name of both splits": (
        lambda folder: (folder / VAL).rename(folder / "x_train_val_0.bin"), "x_train_val_0.bin: its name is of both splits"
    ),
    "one more of both splits": (
        lambda folder: shutil.copy(folder / TRAIN, folder / "a_val_b_train_c.bin"), "a_val_b_train_c.bin: its name is of both"
    ),
    "validation's tokens under a training name": (
        lambda folder: shutil.copy(folder / TRAIN, folder / VAL), "holds the tokens of .*val_000000.bin, validation would be"
    ),
    "validation linked to training": (link(VAL, TRAIN), "holds the tokens of .*val_000000.bin"),
    "too many documents in the last validation batch": (
        short_documents, r"val_000000.bin: 65 documents .* 128 tokens do not fit 65 slots: set --doc_slots=66 or more"
    ),
    "the folder is a pattern of others": (lambda folder: folder.rename(folder.parent / "set1"), "no shard matches .*set.1."),
    "the folder is a file": (
        lambda folder: (folder.rename(folder.parent / "away"), folder.write_text(""))[0],
        "is a file: --data names the folder of the shards",
    ),
}  # fmt: skip


@pytest.fixture
def folder(shards: Path, tmp_path: Path) -> Path:
    """A folder with the characters of a pattern in its name."""
    shutil.copytree(shards, tmp_path / "set[1]")
    return tmp_path / "set[1]"


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_of_data_is_told_before_the_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, case: str) -> None:
    change, message = FAULTS[case]
    change(folder)
    slots = 65 if "documents" in case else 0
    ends_with(capsys, options(folder, tmp_path, doc_slots=slots, max_doc_len=2048), message, code=1)
    assert not (tmp_path / "logs").exists()


def test_a_folder_is_its_name_and_no_pattern(folder: Path, tmp_path: Path) -> None:
    """Beside it stands one that the name matches as a pattern, with another shard."""
    (tmp_path / "set1").mkdir()
    write_shard(tmp_path / "set1" / TRAIN, [256, 65])
    h = tiny_settings(folder, tmp_path)
    found = train_gpt.check_shards(h).shards
    assert list(found) == [TRAIN, VAL] and found[TRAIN].startswith(f"{len(read_shard(folder / TRAIN)):,} tokens, CRC-32 ")
    inputs = next(train_gpt.micro_batches(h, ALONE, training=True))[0]
    assert inputs.tolist() == read_shard(folder / TRAIN)[: len(inputs)].tolist()


def test_as_many_documents_as_slots_are_one_too_many(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    short_documents(folder)
    settings = lambda slots: tiny_settings(folder, tmp_path, max_doc_len=2048, doc_slots=slots)
    train_gpt.check_shards(settings(66))
    for slots in (65, 64, 1):
        with pytest.raises(ValueError, match="set --doc_slots=66 or more"):
            train_gpt.check_shards(settings(slots))


CHANGES = {
    "one token": lambda tokens: tokens + np.eye(1, len(tokens), 3000, dtype=np.uint16)[0],
    "two neighbours, swapped": lambda tokens: np.concatenate((tokens[:3000], tokens[3001:2999:-1], tokens[3002:])),
    "another order": lambda tokens: np.roll(tokens, 1000),
}


@pytest.fixture(scope="module")
def saved(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was saved at its fourth step: its folder, with its shards."""
    folder = tmp_path_factory.mktemp("saved")
    shutil.copytree(shards, folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        main(options(folder / "data", folder, save_every=4))
    return folder


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [TRAIN, VAL])
def test_a_run_does_not_resume_on_shards_of_other_content(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture, name: str, change: str
) -> None:
    """Of the same name, the same size, the same time of change."""
    shutil.copytree(saved, tmp_path / "run")
    path = tmp_path / "run" / "data" / name
    status, tokens = path.stat(), read_shard(path)
    changed = CHANGES[change](tokens).astype(np.uint16)
    assert changed.shape == tokens.shape and (changed != tokens).any()
    write_shard(path, changed)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size == HEADER_BYTES + 2 * len(tokens)
    checkpoint = tmp_path / "run" / "logs" / "run" / "step_000004.pt"
    before = text_of(tmp_path / "run" / "logs" / "run.txt")
    message = rf"step_000004.pt cannot be resumed: other shards: [^;]*; {name} is '{len(tokens):,} tokens, CRC-32 \w+', here '.* CRC-32 \w+'"
    ends_with(capsys, options(path.parent, tmp_path / "run", resume=checkpoint), message, code=1)
    assert text_of(tmp_path / "run" / "logs" / "run.txt") == before


def test_a_run_resumes_on_the_same_content_elsewhere(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among more shards than it reads: a download that goes on brings some."""
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    shutil.copytree(saved / "data", tmp_path / "moved")
    write_shard(tmp_path / "moved" / "local_train_000001.bin", read_shard(saved / "data" / TRAIN)[:9000])
    checkpoint = saved / "logs" / "run" / "step_000004.pt"
    main(options(tmp_path / "moved", tmp_path, resume=checkpoint))
    assert "step:8/8 val_loss:" in text_of(tmp_path / "logs" / "run.txt")


# -----------------------------------------------------------------------------
# The longest validation document, which bounds attention's grid


def attention_of_bounded_length(seen: list[int]) -> Callable:
    """What FlashAttention does, document by document: of one longer than max_len only the beginning is computed."""

    def attend(q, k, v, cu_seqlens, _, max_len, __, *, scale, window_size):
        out = torch.full_like(q, torch.nan)
        for start, end in zip(cu_seqlens.tolist(), [*cu_seqlens.tolist()[1:], len(q)]):
            end = min(end, start + max_len)
            t = torch.arange(end - start)
            hidden = (t[None] > t[:, None]) | (t[None] < t[:, None] - window_size[0])
            logits = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * scale
            out[start:end] = torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v[start:end])
        seen.append(max_len)
        return out

    return attend


def validation_losses(h: train_gpt.Hyperparameters, max_doc_len: int) -> list[float]:
    """Of each micro-batch of a fresh model's validation, with that bound."""
    manager = train_gpt.build(h, ALONE)
    manager.model.eval()
    with torch.no_grad():
        for label, param in manager.model.named_parameters():
            if label in ("lm_head", "value_embeds", "bigram_embed", "attn", "mlp"):
                param.normal_(std=0.1, generator=torch.Generator().manual_seed(len(label)))
        manager.max_val_doc_len = max_doc_len
        batches = train_gpt.micro_batches(h, ALONE, training=False, max_doc_len=max_doc_len)
        count = h.val_tokens // h.val_batch_tokens * h.micro_batches
        return [manager.model(*next(batches), manager.forward_schedule()).item() for _ in range(count)]


def test_the_bound_of_validation_documents_changes_no_figure(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an attention that computes no more than the bound: the same to the bit with it, without it, and by the reference."""
    h = tiny_settings(folder, tmp_path, val_tokens=4 * 256)
    pieces = np.random.default_rng(0).integers(0, 256, (200, 20))
    write_shard(folder / VAL, np.concatenate([[256, *piece[: 3 + i % 17]] for i, piece in enumerate(pieces)]))
    bound, seen = train_gpt.check_shards(h).longest, []
    banded = validation_losses(h, bound)
    monkeypatch.setattr(train_gpt, "uses_flash", lambda _: True)
    monkeypatch.setattr(varlen, "varlen_attn", attention_of_bounded_length(seen))
    whole, bounded = validation_losses(h, 0), validation_losses(h, bound)
    T, half = h.val_batch_tokens // h.micro_batches, len(seen) // 2
    assert bound == 32 and set(seen[:half]) == {T, 2 * T} and set(seen[half:]) == {bound, 2 * bound}
    assert bounded == whole == pytest.approx(banded, rel=1e-5)


def test_a_document_longer_than_the_bound_is_an_error_in_the_validation(folder: Path, tmp_path: Path) -> None:
    """Without the check attention would pass over the document's end."""
    h = tiny_settings(folder, tmp_path)
    write_shard(folder / VAL, [256, *[7] * 19] * 100)
    bound = train_gpt.check_shards(h).longest
    assert bound == 32 and len(validation_losses(h, bound)) == 4
    with pytest.raises(ValueError, match=r"val_000000.bin: a document has 20 tokens, the longest was to have 16"):
        validation_losses(h, 16)
