"""Every bad input has a message that says what, where and what to do, and an exit code: shards, options, environment, checkpoints."""

import dataclasses
import os
import re
import socket
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import train_gpt
from data.shards import write_shard
from train_gpt import CheckpointError, DataError, Hyperparameters, Ranks, main, read_checkpoint, read_shard, write_checkpoint

TINY = dict(
    preset="demo", model_dim=32, num_heads=2, head_dim=16, batch_unit=32, micro_batches=1, num_scheduled_iterations=3,
    num_extension_iterations=1, val_every=0, val_tokens=256, val_batch_tokens=256, sample_tokens=4, run_id="run",
)  # fmt: skip
TRAIN, VAL = "local_train_000000.bin", "local_val_000000.bin"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The bytes of two good shards, by name."""
    folder, generator = tmp_path_factory.mktemp("good"), np.random.default_rng(0)
    documents = [np.concatenate(([256], generator.integers(0, 256, generator.integers(20, 200)))) for _ in range(60)]
    write_shard(folder / TRAIN, np.concatenate(documents))
    write_shard(folder / VAL, np.concatenate(documents[:8]))
    return {name: (folder / name).read_bytes() for name in (TRAIN, VAL)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    monkeypatch.setattr(train_gpt, "JOIN_PATIENCE", timedelta(seconds=1))


def options(folder: Path, **more) -> list[str]:
    return [f"--{k}={v}" for k, v in {**TINY, "data": folder, "log_dir": folder / "logs", **more}.items()]


def write_shards(folder: Path, shards: dict[str, bytes]) -> None:
    for name, content in shards.items():
        (folder / name).write_bytes(content)


def ends_with(capsys, arguments: list[str], message: str, code: int) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    printed = capsys.readouterr().err
    assert exit_.value.code == code, printed
    assert re.search(message, printed), printed
    assert "Traceback" not in printed


# -----------------------------------------------------------------------------
# Shards


def header(magic: int = 20240520, version: int = 1, count: int = 0) -> bytes:
    return np.array([magic, version, count, *[0] * 253], dtype="<i4").tobytes()


def shard(*tokens: int) -> bytes:
    return header(count=len(tokens)) + np.array(tokens, dtype="<u2").tobytes()


def with_count(change: int):
    return lambda good: header(count=(len(good) - 1024) // 2 + change) + good[1024:]


SHARDS = {  # what becomes of which shard, and the message
    "empty": (TRAIN, lambda _: b"", r"train_000000.bin: not a token shard \(first numbers \[\]"),
    "three bytes": (TRAIN, lambda _: b"abc", "cannot be read as a shard|not a token shard"),
    "header only": (TRAIN, lambda good: good[:1024], r"its header names [\d,]+ tokens, but it holds 0.0: truncated"),
    "no tokens": (TRAIN, lambda _: shard(), r"train_000000.bin: no document begins in it \(no token 256\)"),
    "half a header": (TRAIN, lambda good: good[:512], "not a token shard"),
    "wrong magic": (TRAIN, lambda good: header(magic=1) + good[1024:], r"not a token shard \(first numbers \[1, 1, 0\]"),
    "wrong version": (TRAIN, lambda good: header(version=2) + good[1024:], r"\[20240520, 2, 0\], expected \[20240520, 1"),
    "count too large": (TRAIN, with_count(1), "truncated or damaged, make or fetch it again"),
    "count too small": (TRAIN, with_count(-1), "truncated or damaged"),
    "negative count": (TRAIN, lambda good: header(count=-5) + good[1024:], "its header names -5 tokens"),
    "odd bytes": (TRAIN, lambda good: good + b"x", r"holds [\d,]+\.5: truncated or damaged"),
    "cut short": (TRAIN, lambda good: good[:-2], "truncated or damaged"),
    "text": (TRAIN, lambda _: b"To be, or not to be\n" * 100, "not a token shard"),
    "no document start": (TRAIN, lambda _: shard(*[7] * 5000), r"no document begins in it \(no token 256\): other shards, or --bos_id"),
    "one giant document": (TRAIN, lambda _: shard(256, *[7] * 50000), r"hold 2,048 usable ones, enough for \d+ steps: add shards"),
    "too few tokens": (TRAIN, lambda _: shard(256, *[7] * 30), r"4 steps need 2,304 tokens .* enough for 0 steps"),
    "token out of range": (TRAIN, lambda _: shard(256, *[7] * 50000, 257), "holds token 257, but the vocabulary ends at 257"),
    "too many documents": (TRAIN, lambda _: shard(*[256, 7] * 9000), r"do not fit 128 slots: set --doc_slots=\d+ or more"),
    "missing": (TRAIN, None, "no shard matches .*_train_.*: make some with data/local_text.py"),
    "a folder": (TRAIN, "folder", "train_000000.bin: cannot be read as a shard: .*Is a directory"),
    "validation missing": (VAL, None, "no shard matches .*_val_"),
    "validation empty": (VAL, lambda _: b"", "val_000000.bin: not a token shard"),
    "validation too short": (VAL, lambda _: shard(256, *[7] * 255), "validation needs 257 tokens, it holds 256: lower --val_tokens"),
    "validation without a document": (VAL, lambda _: shard(*[7] * 500), "val_000000.bin: no document begins in it"),
    "validation out of range": (VAL, lambda _: shard(256, *[7] * 500, 65535), "val_000000.bin: holds token 65535"),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARDS)
def test_a_bad_shard_is_named(shards, tmp_path, capsys, case):
    name, change, message = SHARDS[case]
    write_shards(tmp_path, shards)
    if change is None or change == "folder":
        (tmp_path / name).unlink()
    if change == "folder":
        (tmp_path / name).mkdir()
    elif change:
        (tmp_path / name).write_bytes(change(shards[name]))
    ends_with(capsys, options(tmp_path, max_doc_len=2048), message, code=1)


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
# Options

SIGNED = ("doc_slots", "seed", "num_extension_iterations", "momentum_warmup", "momentum_cooldown", "val_every", "sample_tokens", "save_every")
POSITIVE = (
    "vocab_size", "model_dim", "num_heads", "head_dim", "num_scheduled_iterations", "batch_unit", "micro_batches", "block_size",
    "max_doc_len", "val_tokens", "val_batch_tokens", "keep_checkpoints",
)  # fmt: skip
FLOATS = ("attention_scale", "adam_lr_mul", "muon_lr_mul")
HUGE = 10**30
OPTIONS = [  # arguments, message, exit code
    *((f"--{name}=-1", f"--{name}=-1: must be 0 or more", 1) for name in SIGNED),
    *((f"--{name}=0", f"--{name}=0: must be positive", 1) for name in POSITIVE),
    *((f"--{name}={HUGE}", f"--{name}={HUGE}: must be below 2..40", 1) for name in (*SIGNED, *POSITIVE)),
    *((f"--{name}=1.5", f"argument --{name}: invalid int value: '1.5'", 2) for name in ("batch_unit", "seed", "save_every")),
    *((f"--{name}=", f"argument --{name}: invalid int value: ''", 2) for name in ("val_every", "keep_checkpoints")),
    *((f"--{name}={x}", f"--{name}={float(x)}: must be positive and finite", 1)
      for name in FLOATS for x in ("0", "-1", "nan", "inf")),
    ("--adam_lr_mul=fast", "argument --adam_lr_mul: invalid float value: 'fast'", 2),
    ("--compile=perhaps", "argument --compile: 'perhaps' is neither true nor false", 2),
    ("--fp8_head=", "argument --fp8_head: '' is neither true nor false", 2),
    ("--preset=laptop", "argument --preset: invalid choice: 'laptop'", 2),
    ("--batch_unit", "argument --batch_unit: expected one argument", 2),
    ("--learning_rate=1", "unrecognized arguments: --learning_rate=1", 2),
    ("stray", "unrecognized arguments: stray", 2),
    ("--bos_id=-1", "--bos_id=-1: must be 0 or more", 1),
    ("--bos_id=257", "--bos_id=257 is outside the vocabulary, --vocab_size=257", 1),
    ("--vocab_size=65537", "--vocab_size=65537: shards hold uint16 tokens", 1),
    ("--num_heads=3", "num_heads=3: must be even", 1),
    ("--model_dim=33", "model_dim=33 is not num_heads·head_dim", 1),
    ("--dtype=fp8", "--dtype=fp8: bfloat16 or float32", 1),
    ("--micro_batches=7", "tokens do not divide into 7 micro-batches of a multiple of 16", 1),
    ("--val_tokens=300", "--val_tokens=300 is no multiple of --val_batch_tokens=256", 1),
    ("--doc_slots=100000", "--doc_slots=100000: the longest micro-batch has but 768 tokens", 1),
    ("--num_scheduled_iterations=2000000", "a million steps is the most", 1),
    ("--num_scheduled_iterations=900", "902 steps need|901 steps need", 1),
    ("--batch_unit=1048576", "enough for 0 steps", 1),
    ("--val_tokens=1048576 --val_batch_tokens=1048576", "validation needs 1,048,577 tokens", 1),
    ("--num_heads=2 --head_dim=1048576 --model_dim=2097152", "no model of this size can be made here, lower --model_dim", 1),
    ("--log_dir=/proc/none", "/proc/none", 1),
    ("--log_dir=/dev/null", "/dev/null", 1),
    ("--run_id=../x", "--run_id=../x: is a file's name, without folders", 1),
    ("--resume=/nowhere.pt", "/nowhere.pt: cannot be read: No such file", 1),
    ("--resume=/", "/: cannot be read: Is a directory", 1),
    ("--resume=latest", "--resume=latest: no usable checkpoint in .*/logs/run: start without it", 1),
]  # fmt: skip


@pytest.mark.parametrize("argument, message, code", OPTIONS, ids=[case[0] for case in OPTIONS])
def test_a_bad_option_is_named(shards, tmp_path, capsys, argument, message, code):
    write_shards(tmp_path, shards)
    ends_with(capsys, options(tmp_path) + argument.split(" "), message, code)
    assert not (tmp_path / "logs" / "run.txt").exists()


def test_the_table_of_options_is_about_all_of_them():
    of_type = {kind: {f.name for f in dataclasses.fields(Hyperparameters) if f.type is kind} for kind in (int, float)}
    assert of_type[int] == {*SIGNED, *POSITIVE, "bos_id"} and of_type[float] == {*FLOATS}


# -----------------------------------------------------------------------------
# Environment

GOOD = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="free")
ENVIRONMENT = [  # what differs from a good one, and the message
    (dict(RANK=None), "RANK missing in the environment, which has RANK or WORLD_SIZE: start with torchrun, or unset all"),
    (dict(WORLD_SIZE=None), "WORLD_SIZE missing in the environment"),
    (dict(MASTER_ADDR=None), "MASTER_ADDR missing in the environment"),
    (dict(MASTER_PORT=None, MASTER_ADDR=None), "MASTER_ADDR, MASTER_PORT missing in the environment"),
    (dict(RANK="first"), "RANK='first' in the environment: a number from 0 on belongs there; start with torchrun, or unset it"),
    (dict(RANK="-1"), "RANK='-1' in the environment: a number"),
    (dict(RANK="1"), "RANK=1 of WORLD_SIZE=1, LOCAL_RANK=0 of LOCAL_WORLD_SIZE=1 in the environment cannot be"),
    (dict(RANK=""), "RANK='' in the environment"),
    (dict(WORLD_SIZE="0"), "WORLD_SIZE='0' in the environment: a number from 1 on belongs there"),
    (dict(WORLD_SIZE="two"), "WORLD_SIZE='two' in the environment"),
    (dict(WORLD_SIZE="1.0"), "WORLD_SIZE='1.0' in the environment"),
    (dict(LOCAL_RANK="x"), "LOCAL_RANK='x' in the environment"),
    (dict(LOCAL_RANK="3"), "LOCAL_RANK=3 of LOCAL_WORLD_SIZE=1 in the environment cannot be"),
    (dict(LOCAL_WORLD_SIZE="4"), "of LOCAL_WORLD_SIZE=4 in the environment cannot be"),
    (dict(LOCAL_WORLD_SIZE="0"), "LOCAL_WORLD_SIZE='0' in the environment"),
    (dict(MASTER_PORT="http"), "rank 0 of 1 cannot join the others at 127.0.0.1:http"),
    (dict(MASTER_PORT="99999999"), "rank 0 of 1 cannot join the others at 127.0.0.1:99999999"),
    (dict(MASTER_PORT="taken"), "cannot join .* is the port free. .*EADDRINUSE"),
    (dict(WORLD_SIZE="2"), "rank 0 of 2 cannot join .* are all of them started, once each"),
    (dict(WORLD_SIZE="2", RANK="1"), "rank 1 of 2 cannot join"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", ENVIRONMENT, ids=[str(case[0])[1:-1] for case in ENVIRONMENT])
def test_a_bad_environment_is_named_within_seconds(shards, tmp_path, capfd, monkeypatch, change, message):
    write_shards(tmp_path, shards)
    with socket.socket() as taken, socket.socket() as free:
        for a in (taken, free):
            a.bind(("0.0.0.0", 0))
        taken.listen()
        ports = {"taken": str(taken.getsockname()[1]), "free": str(free.getsockname()[1])}
        free.close()
        for name, value in {**GOOD, **change}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, ports.get(value, value))
        with pytest.raises(SystemExit) as exit_:
            main(options(tmp_path))
    printed = capfd.readouterr().err
    assert exit_.value.code == 1
    assert re.search(rf"train_gpt.py: error: .*{message}", printed), printed
    assert not dist.is_initialized()


# -----------------------------------------------------------------------------
# Checkpoints


@pytest.fixture(scope="module")
def good(shards, tmp_path_factory):
    """A run's folder, with a checkpoint in which gradients wait."""
    folder = tmp_path_factory.mktemp("good")
    write_shards(folder, shards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        main(options(folder, save_every=1, keep_checkpoints=9, dtype="bfloat16"))
    return folder


def leaves(tree: dict, path: tuple = ()) -> list[tuple]:
    """The way to every value, and to every dict, of a nest of them."""
    return [way for key, value in tree.items() for way in [(*path, key), *(leaves(value, (*path, key)) if isinstance(value, dict) else [])]]


def without(tree: dict, way: tuple, replace=None) -> dict:
    """A copy in which what is at the end of the way is missing, or replaced."""
    here = dict(tree)
    if len(way) > 1:
        here[way[0]] = without(here[way[0]], way[1:], replace)
    elif replace is None:
        del here[way[0]]
    else:
        here[way[0]] = replace(here[way[0]])
    return here


def other_kind(value):
    """Of another shape, dtype or type."""
    if isinstance(value, torch.Tensor):
        return value.new_zeros(*value.shape, 1)
    return "text" if not isinstance(value, str) else 7


def test_every_field_of_a_checkpoint_is_missed_and_checked(good):
    """Each in turn missing, and of another type or shape: refused, by its name; some 200 cases."""
    path = good / "logs" / "run" / "step_000001.pt"
    saved = read_checkpoint(path)
    h = Hyperparameters(**saved["hyperparameters"])
    _, manager = train_gpt.build(h, Ranks(0, 1, torch.device("cpu")))

    def check(candidate: dict) -> None:
        train_gpt.check_fits(path, candidate, h)
        train_gpt.check_usable(path, candidate, manager)

    check(saved)
    ways = leaves(saved)
    cases = 0
    for way in ways:
        for replace in (None, other_kind):
            with pytest.raises(CheckpointError) as caught:
                check(without(saved, way, replace))
            message = str(caught.value)
            assert "step_000001.pt cannot be resumed: " in message
            assert str(way[-1]) in message or way[:2] == ("state", "gradients"), (way, message)
            cases += 1
    print(f"{cases} cases")
    assert cases > 200
    for way in [way for way in ways if isinstance(value_at(saved, way), torch.Tensor)]:
        with pytest.raises(CheckpointError, match=str(way[-1])):
            check(without(saved, way, lambda x: x.double() if x.dtype != torch.float64 else x.float()))


def value_at(tree: dict, way: tuple):
    for key in way:
        tree = tree[key]
    return tree


VALUES = {  # of a checkpoint that is complete, and yet cannot be
    "step below": (("step",), lambda _: -1, "step cannot be what it is|missing"),
    "step beyond": (("step",), lambda _: 5, "step cannot be what it is"),
    "step of other gradients": (("step",), lambda _: 2, r"state.gradients.0.\w+ is unknown"),
    "time": (("seconds",), lambda _: float("nan"), "seconds cannot be what it is"),
    "run id": (("run_id",), lambda _: "../x", "run_id cannot be what it is"),
    "log": (("log", "header"), lambda _: "x", "log cannot be what it is"),
    "tied": (("state", "optimizer", "tied"), lambda _: False, "state.optimizer.tied cannot be what it is"),
    "window": (("state", "yarn_window"), lambda _: 17, "state.yarn_window cannot be what it is"),
    "Adam's step": (("state", "optimizer", "state", "ve0", "step"), lambda _: -1, "state.optimizer.state cannot be what it is"),
    "NaN": (("state", "parameters", "mlp"), lambda x: x * torch.nan, "state.parameters.mlp is not finite"),
    "infinite gradient": (("state", "gradients", 0, "ve0"), lambda x: x + torch.inf, "state.gradients.0.ve0 is not finite"),
    "rank numbers": (("state", "gradients"), lambda x: {1: x[0]}, "state.gradients.0 is missing"),
    "no ranks": (("state", "gradients"), lambda _: {}, "state.gradients.0 is missing"),
    "other sizes": (("hyperparameters", "model_dim"), lambda _: 64, "model_dim is 64, here 32"),
    "other vocabulary": (("hyperparameters", "vocab_size"), lambda _: 300, "vocab_size is 300, here 257"),
    "other schedule": (("hyperparameters", "num_scheduled_iterations"), lambda _: 30, "num_scheduled_iterations is 30, here 3"),
    "other shards": (("shards", TRAIN), lambda x: x + 2, r"local_train_000000.bin is \d+, here \d+"),
    "more shards": (("shards",), lambda x: {**x, "local_train_000001.bin": 5}, "shards.local_train_000001.bin is unknown"),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_checkpoint_that_contradicts_itself_or_the_run_is_refused(good, tmp_path, capsys, case):
    way, replace, message = VALUES[case]
    changed = without(read_checkpoint(good / "logs" / "run" / "step_000001.pt"), way, replace)
    path = tmp_path / "step_000001.pt"
    write_checkpoint(path, changed, keep=1)
    arguments = options(good, dtype="bfloat16", resume=path, run_id="again")
    ends_with(capsys, arguments, f"step_000001.pt cannot be resumed: .*({message})", code=1)
    assert not (good / "logs" / "again.txt").exists()


def test_the_first_differences_are_named_and_the_others_counted(good, capsys):
    arguments = options(good, resume=good / "logs" / "run" / "step_000001.pt", model_dim=64, head_dim=32, batch_unit=64, seed=3)
    ends_with(capsys, arguments, "model_dim is 32, here 64; head_dim is 16, here 32; dtype is 'bfloat16', here 'float32'; and 2 more", 1)


FILES = {
    "empty": (lambda _: b"", "not a checkpoint of this version"),
    "text": (lambda _: b"hello", r"not a checkpoint of this version \(begins with b'hello'\)"),
    "of another version": (lambda good: good.replace(b"checkpoint 1", b"checkpoint 2", 1), "not a checkpoint of this version"),
    "magic only": (lambda good: good[:21], "damaged or cut short"),
    "cut short": (lambda good: good[:-1], "damaged or cut short, its SHA-256 is another: resume from an earlier checkpoint"),
    "longer": (lambda good: good + b"\0", "damaged or cut short"),
    "one bit": (lambda good: good[:5000] + bytes([good[5000] ^ 1]) + good[5001:], "damaged or cut short"),
    "a plain torch.save": (lambda good: good[53:], "not a checkpoint of this version"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_checkpoint_stops_the_start(good, tmp_path, capsys, case):
    change, message = FILES[case]
    path = tmp_path / "step_000001.pt"
    path.write_bytes(change((good / "logs" / "run" / "step_000001.pt").read_bytes()))
    ends_with(capsys, options(good, dtype="bfloat16", resume=path), f"step_000001.pt: {message}", code=1)


def test_a_whole_table_is_here():
    assert len(SHARDS) + len(OPTIONS) + len(ENVIRONMENT) + len(VALUES) + len(FILES) >= 60
