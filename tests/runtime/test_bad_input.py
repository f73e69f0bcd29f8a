"""Every bad shard and every bad checkpoint has a message that says what, where and what to do, and exit code 1."""

import hashlib
import io
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import train_gpt
from common import ends_with, options, unequal
from data.shards import DataError, read_shard
from runtime import checkpoints
from runtime.checkpoints import CheckpointError, check_fits, read_checkpoint, write_checkpoint
from runtime.ranks import Ranks
from train_gpt import Hyperparameters, main

TRAIN, VAL = "local_train_000000.bin", "local_val_000000.bin"

# -----------------------------------------------------------------------------
# Shards


def header(magic: int = 20240520, version: int = 1, count: int = 0) -> bytes:
    return np.array([magic, version, count, *[0] * 253], dtype="<i4").tobytes()


def shard(*tokens: int) -> bytes:
    return header(count=len(tokens)) + np.array(tokens, dtype="<u2").tobytes()


def with_count(change: int) -> Callable[[bytes], bytes]:
    return lambda good: header(count=(len(good) - 1024) // 2 + change) + good[1024:]


SHARDS = {  # what becomes of which shard, and the message
    "empty": (TRAIN, lambda _: b"", r"train_000000.bin: is empty \(0 bytes\); make or fetch it again"),
    "three bytes": (TRAIN, lambda _: b"abc", "has 3 bytes, fewer than the 1,024 of a header; make or fetch it again"),
    "header only": (TRAIN, lambda good: good[:1024], r"names [\d,]+ tokens, .* has 1,024 \([\d,]+ too few\): truncated"),
    "no tokens": (TRAIN, lambda _: shard(), "train_000000.bin: its header names 0 tokens; make or fetch it again"),
    "half a header": (TRAIN, lambda good: good[:512], "has 512 bytes, fewer than the 1,024 of a header"),
    "wrong magic": (TRAIN, lambda good: header(magic=1) + good[1024:], "is not a token shard: magic number 1, not 20240520"),
    "wrong version": (TRAIN, lambda good: header(version=2) + good[1024:], "has version 2; only version 1 is known"),
    "count too large": (TRAIN, with_count(1), r"\(2 too few\): truncated or damaged; make or fetch it again"),
    "count too small": (TRAIN, with_count(-1), r"\(2 too many\): truncated or damaged"),
    "negative count": (TRAIN, lambda good: header(count=-5) + good[1024:], "its header names -5 tokens"),
    "odd bytes": (TRAIN, lambda good: good + b"x", r"\(1 too many\): truncated or damaged"),
    "cut short": (TRAIN, lambda good: good[:-2], r"\(2 too few\): truncated or damaged"),
    "text": (TRAIN, lambda _: b"To be, or not to be\n" * 100, "not a token shard"),
    "no document start": (TRAIN, lambda _: shard(*[7] * 5000), r"no document begins in it \(no token 256\): other shards"),
    "one giant document": (TRAIN, lambda _: shard(256, *[7] * 50000), "hold 2,048 usable ones, used up in step 1: add shards"),
    "too few tokens": (TRAIN, lambda _: shard(256, *[7] * 30), r"8 steps need 4,608 tokens .* used up in step 1"),
    "token out of range": (TRAIN, lambda _: shard(256, *[7] * 50000, 257), "holds token 257, but the vocabulary ends at 257"),
    "too many documents": (TRAIN, lambda _: shard(*[256, 7] * 9000), r"do not fit 128 slots: set --doc_slots=\d+ or more"),
    "missing": (TRAIN, None, "no shard matches .*_train_.*: make some with data/local_text.py"),
    "a folder": (TRAIN, "folder", "train_000000.bin: is not a file; make or fetch it"),
    "validation missing": (VAL, None, "no shard matches .*_val_"),
    "validation empty": (VAL, lambda _: b"", "val_000000.bin: is empty"),
    "validation too short": (VAL, lambda _: shard(256, *[7] * 255), "needs 513 tokens, it holds 256: lower --val_tokens"),
    "validation without a document": (VAL, lambda _: shard(*[7] * 600), "val_000000.bin: no document begins in it"),
    "validation out of range": (VAL, lambda _: shard(256, *[7] * 600, 65535), "val_000000.bin: holds token 65535"),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARDS)
def test_a_bad_shard_is_named(shards, tmp_path, capsys, case):
    name, change, message = SHARDS[case]
    for path in shards.glob("*.bin"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if callable(change):
        (tmp_path / name).write_bytes(change((shards / name).read_bytes()))
    else:
        (tmp_path / name).unlink()
        if change == "folder":
            (tmp_path / name).mkdir()
    ends_with(capsys, options(tmp_path, tmp_path, max_doc_len=2048), message, code=1)
    assert not (tmp_path / "logs").exists()


@hypothesis_settings(max_examples=300)
@given(data=st.data())
def test_a_shard_of_any_bytes_is_read_right_or_refused(tmp_path_factory, data):
    """Damage to a good shard, or headers and tokens at random: its tokens, or a DataError that names the file."""
    tokens = data.draw(st.lists(st.integers(0, 65535), max_size=40))
    content = bytearray(shard(*tokens))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(content)) | st.integers(0, 12))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path = tmp_path_factory.getbasetemp() / "any_train_0.bin"
    path.write_bytes(content)
    vocab = data.draw(st.sampled_from([None, 257, 65536]))
    try:
        read = read_shard(str(path), vocab)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert read.tobytes() == bytes(content[1024:]) and read.dtype == np.uint16
        assert np.frombuffer(bytes(content[:12]), "<i4").tolist() == [20240520, 1, len(read)]
        assert vocab is None or all(token < vocab for token in read)


# -----------------------------------------------------------------------------
# Checkpoints


@pytest.fixture(scope="module")
def good(shards, tmp_path_factory):
    """A run's folder, with a checkpoint in which gradients are pending."""
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        main(options(shards, folder, save_every=1, keep_checkpoints=9, dtype="bfloat16"))
    return folder


def ways(tree: dict, before: tuple = ()) -> list[tuple]:
    """The way to every value, and to every dict, of a nest of them."""
    found = []
    for key, value in tree.items():
        found += [(*before, key), *(ways(value, (*before, key)) if isinstance(value, dict) else [])]
    return found


def changed(tree: dict, way: tuple, replace: Callable[[Any], Any] | None) -> dict:
    """A copy in which what is at the end of the way is replaced, or missing."""
    here, (key, *rest) = dict(tree), way
    if rest:
        here[key] = changed(here[key], tuple(rest), replace)
    elif replace is None:
        del here[key]
    else:
        here[key] = replace(here[key])
    return here


def other_kind(value: Any) -> Any:
    """Of another shape, dtype or type."""
    if isinstance(value, torch.Tensor):
        return value.new_zeros(*value.shape, 1)
    return "text" if not isinstance(value, str) else 7


def other_dtype(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) else 1.5 if isinstance(value, int) else value


def test_every_field_of_a_checkpoint_is_missed_and_checked(good):
    """Each in turn missing, of another type or shape, and of another dtype: refused, by its name; some 500 cases."""
    path = good / "logs" / "run" / "step_000001.pt"
    saved = read_checkpoint(path)
    shards, h = dict(saved["shards"]), Hyperparameters(**saved["hyperparameters"])
    manager = train_gpt.build(h, Ranks(0, 1, torch.device("cpu")))

    def check(candidate: dict) -> None:
        check_fits(path, candidate, h, shards, manager)

    check(saved)
    for way in ways(saved):
        for replace in (None, other_kind, other_dtype):
            candidate = changed(saved, way, replace)
            may_lack = way[0] == "sources" and len(way) == 2 or way[0] == "course" or way[:2] == ("state", "partial") and len(way) == 4
            if may_lack and replace is None or not unequal(candidate, saved):
                check(candidate)  # a script imports and steps as it likes, older ones lack a course; there is no other dtype of a text
                continue
            with pytest.raises(CheckpointError) as caught:
                check(candidate)
            message = str(caught.value)
            assert "step_000001.pt cannot be resumed: " in message
            assert str(way[-1]) in message or way[:2] == ("state", "partial"), (way, message)


VALUES = {  # of a checkpoint that is complete, and yet cannot be
    "step below": (("step",), lambda _: -1, "step is -1, must be 0 to 8"),
    "step beyond": (("step",), lambda _: 9, "step is 9, must be 0 to 8"),
    "half a step": (("step",), lambda _: 1.0, "step is float, here int"),
    "step far beyond": (("step",), lambda _: 10**400, "step is beyond what a float holds"),
    "Adam's step far beyond": (("state", "sharded", "embed", "step"), lambda _: 10**400, "embed.step is beyond what a float"),
    "a number that is none": (("state", "same", "yarn", "scale"), lambda _: float("nan"), "state.same.yarn.scale is not finite"),
    "step of other batches": (("step",), lambda _: 2, r"its steps took 1 × \d+ tokens in batches, here 2 × \d+"),
    "a gradient of nothing": (("state", "partial", 0), lambda x: {**x, "made": x["embed"]}, "state.partial.0.made is unknown"),
    "a gradient of one rank": (("state", "partial"), lambda x: {0: x[0], 1: {}}, r"state.partial.1.\w+ is missing"),
    "time": (("seconds",), lambda _: float("nan"), "seconds is nan, must be 0 or more and finite"),
    "time without end": (("seconds",), lambda _: float("inf"), "seconds is inf, must be"),
    "run id": (("run_id",), lambda _: "../x", "run_id is '../x', must be a file's name"),
    "no run id": (("run_id",), lambda _: "", "run_id is '', must be a file's name"),
    "log": (("log", "header"), lambda _: "x", "log.header has no line of 100 = that ends the sources"),
    "source": (("sources", "runtime/log.py"), lambda _: 7, "sources.runtime/log.py is no text"),
    "tied": (("state", "same", "tied"), lambda _: False, "state.same.tied is False, must be True at step 1"),
    "window": (("state", "same", "yarn_window"), lambda _: 17, r"yarn_window is 17, must be \d+ at step"),
    "Adam's step": (("state", "sharded", "embed", "step"), lambda _: -1, "state.the step of embed is -1, must be 0 or more"),
    "a tensor as number": (("hyperparameters", "seed"), lambda _: torch.zeros(2), "hyperparameters.seed is a tensor out of place"),
    "a tensor as count": (("course", "tokens in batches"), lambda _: torch.zeros(3), "course.tokens in batches is a tensor"),
    "a tensor that takes hours to print": (("course", "tokens"), lambda _: torch.zeros(1).expand(*[7] * 12), "tokens is a tensor out"),
    "no numbers": (("state", "same", "parameters", "mlp"), lambda x: x.to("meta"), "mlp is a tensor out of place or sparse"),
    "sparse": (("state", "same", "parameters", "scalars"), lambda x: x.to_sparse(), "scalars is a tensor out of place or sparse"),
    "sparse rows": (("state", "same", "parameters", "embed"), lambda x: x.to_sparse(), "embed is a tensor out of place or sparse"),
    "NaN": (("state", "same", "parameters", "mlp"), lambda x: x * torch.nan, "state.same.parameters.mlp is not finite"),
    "infinite gradient": (("state", "partial", 0, "embed"), lambda x: x + torch.inf, "state.partial.0.embed is not finite"),
    "rank numbers": (("state", "partial"), lambda x: {1: x[0]}, "state.partial.0 is missing"),
    "no ranks": (("state", "partial"), lambda _: {}, "state.partial.0 is missing"),
    "a setting that has come": (("hyperparameters",), lambda x: {y: x[y] for y in x if y != "seed"},
                                r"hyperparameters.seed is missing: its script had other settings: use that one \(by extract.py"),
    "other sizes": (("hyperparameters", "model_dim"), lambda _: 64, "model_dim is 64, here 32"),
    "other vocabulary": (("hyperparameters", "vocab_size"), lambda _: 300, "vocab_size is 300, here 257"),
    "other schedule": (("hyperparameters", "num_scheduled_iterations"), lambda _: 30, "num_scheduled_iterations is 30, here 6"),
    "other sizes of shards": (("shards", TRAIN), lambda x: f"1{x}", r"train_000000.bin is '1\d+,\d+ tokens, .*, here '\d"),
    "other tokens": (("shards", TRAIN), lambda x: x[:-1] + "x", r"train_000000.bin is '.* CRC-32 \w+x', here '.* CRC-32 \w+'"),
    "more shards": (("shards",), lambda x: {**x, "local_train_1.bin": "9 tokens, CRC-32 0"}, "shards.local_train_1.bin is missing"),
    "fewer shards": (("shards",), lambda x: {VAL: x[VAL]}, f"shards.{TRAIN} is unknown"),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_checkpoint_that_contradicts_itself_or_the_run_is_refused(good, shards, tmp_path, capsys, case):
    way, replace, message = VALUES[case]
    path = tmp_path / "step_000001.pt"
    write_checkpoint(path, changed(read_checkpoint(good / "logs" / "run" / "step_000001.pt"), way, replace), keep=1)
    arguments = options(shards, good, dtype="bfloat16", resume=path, run_id="again")
    ends_with(capsys, arguments, f"step_000001.pt cannot be resumed: .*({message})", code=1)
    assert not (good / "logs" / "again.txt").exists()


def test_the_first_differences_are_named_and_the_others_counted(good, shards, capsys):
    checkpoint = good / "logs" / "run" / "step_000001.pt"
    arguments = options(shards, good, resume=checkpoint, model_dim=64, head_dim=32, batch_unit=64, seed=3)
    message = "model_dim is 32, here 64; head_dim is 16, here 32; dtype is 'bfloat16', here 'float32'; and 2 more"
    ends_with(capsys, arguments, message, code=1)


def of_pickle(text: bytes, *more: tuple[str, bytes]) -> bytes:
    """A checkpoint file whose archive holds this pickle, and more."""
    with zipfile.ZipFile(archive := io.BytesIO(), "w") as records:
        for name, content in (("data.pkl", b"\x80\x02" + text + b"."), ("version", b"3\n"), ("byteorder", b"little"), *more):
            records.writestr(f"archive/{name}", content)
    return checkpoints.MAGIC + hashlib.sha256(archive.getvalue()).digest() + archive.getvalue()


KEYS = [b"X\x01\0\0\0" + key for key in (b"a", b"b")]
NESTS = {
    "in itself": b"}q\0" + KEYS[0] + b"h\0s",
    "deep": (b"}" + KEYS[0]) * 5000 + b"}" + b"s" * 5000,
    "a list in itself": b"]q\0h\0a",
    "lists deep": b"]" * 5000 + b"a" * 4999,
    "of 2**60 leaves": b"}q\0" + b"".join(b"}%sh%cs%sh%csq%c" % (KEYS[0], i, KEYS[1], i, i + 1) for i in range(60)),
}  # fmt: skip
FILES = {
    "a number of 5000 digits": (  # PyTorch would advise to unpickle whatever it is
        lambda _: of_pickle(b"\x8b\0\x10\0\0" + b"x" * 4096), "holds what cannot be loaded: UnpicklingError: Unsupported operand 139\n"),
    **{f"calls {name}": (lambda _, text=text: of_pickle(b"c" + text + b"\n("), f"holds what cannot be loaded: {said}\n")
       for name, text, said in (("a command", b"posix\nsystem", "UnpicklingError: GLOBAL posix.system"),
                                ("code", b"builtins\neval", "UnpicklingError: GLOBAL (builtins.)?eval"))},
    "TorchScript's": (
        lambda _: of_pickle(b"}", ("constants.pkl", b"\x80\x02).")),
        "holds what cannot be loaded: ValueError: a TorchScript archive, which torch.jit would run\n$"),
    **{f"nests {name}": (lambda _, text=text: of_pickle(text), "holds what cannot be loaded: ValueError: dicts or lists within themselves")
       for name, text in NESTS.items()},
    "empty": (lambda _: b"", "not a checkpoint of this version"),
    "text": (lambda _: b"hello", r"not a checkpoint of this version \(begins with b'hello'\)"),
    "of another version": (lambda good: good.replace(b"checkpoint 2", b"checkpoint 1", 1), "not a checkpoint of this version"),
    "magic only": (lambda good: good[:21], "damaged or cut short"),
    "cut short": (lambda good: good[:-1], "damaged or cut short, its SHA-256 is another: resume from an earlier checkpoint"),
    "longer": (lambda good: good + b"\0", "damaged or cut short"),
    "one bit": (lambda good: good[:5000] + bytes([good[5000] ^ 1]) + good[5001:], "damaged or cut short"),
    "a plain torch.save": (lambda good: good[53:], "not a checkpoint of this version"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_checkpoint_stops_the_start(good, shards, tmp_path, capsys, case):
    change, message = FILES[case]
    path = tmp_path / "step_000001.pt"
    path.write_bytes(change((good / "logs" / "run" / "step_000001.pt").read_bytes()))
    ends_with(capsys, options(shards, good, dtype="bfloat16", resume=path), f"step_000001.pt: {message}", code=1)
