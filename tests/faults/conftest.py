"""Runs of tiny settings in this process: their ends, their logs, and data made for them."""

import shutil
from pathlib import Path

import pytest

from common import options, train_gpt
from data.shards import read_shard, write_shard
from runtime.ranks import RunError
from steps import lines_of, train_idea


@pytest.fixture
def train(shards, tmp_path):
    """train(**options) runs to the end, and returns the log's lines; see steps.lines_of."""

    def run(**given) -> str:
        train_idea(options(shards, tmp_path, **given))
        return lines_of(tmp_path / "logs/run.txt")

    return run


@pytest.fixture
def error_of(train):
    """error_of(**options) is the one line of the error that ends the run."""

    def run(**given) -> str:
        with pytest.raises(RunError) as error:
            train(**given)
        message = str(error.value.args[0])
        assert message and "\n" not in message
        return message

    return run


@pytest.fixture
def early_error_of(error_of, monkeypatch):
    """The same of a run that must end before the warm-up."""
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: pytest.fail("training has begun"))
    return error_of


@pytest.fixture(scope="session")
def finished(shards, tmp_path_factory):
    """The log folder of a finished run with checkpoints of steps 3, 6 and 8."""
    folder = tmp_path_factory.mktemp("finished")
    train_idea(options(shards, folder, save_every=3, keep_checkpoints=3))
    return folder / "logs"


@pytest.fixture
def checkpoint(finished, tmp_path):
    """That of step 3, in a copy of this folder."""
    shutil.copytree(finished, tmp_path / "logs")
    return tmp_path / "logs/run/step_000003.pt"


@pytest.fixture
def make_data(shards, tmp_path):
    """make_data(train shards, tokens of each, tokens for validation) is a folder with such shards."""

    def make(count: int = 1, tokens: int = 4096, val_tokens: int = 1024) -> Path:
        source = read_shard(shards / "local_train_000000.bin")
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for i in range(count):
            part = source[i * tokens : (i + 1) * tokens]
            write_shard(folder / f"own_train_{i:06d}.bin", part)
        write_shard(folder / "own_val_000000.bin", source[-val_tokens:])
        return folder

    return make
