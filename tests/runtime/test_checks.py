"""runtime/checks.py: a preset's data, memory. Settings: tests/faults; the tables: tests/recipe."""

import subprocess
from types import SimpleNamespace

import pytest

from common import train_gpt
from runtime import checks
from runtime.ranks import RunError


def test_a_presets_data_are_made_whole(tmp_path, monkeypatch):
    """By its tool, which has said what is wrong if it fails. After Ctrl-C the rest is made."""
    commands = []

    def run(command):
        commands.append(command[1])
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(checks.subprocess, "run", run)
    monkeypatch.setitem(checks.DATA_TOOLS, tmp_path, "data/local_text.py")
    checks.make_default_data(str(tmp_path))
    with pytest.raises(RunError, match="data/local_text.py failed: .*--data and --log_dir"):
        checks.make_default_data(str(tmp_path))
    left = ("x_train_000000.bin", ".fetching", "x_val_000000.bin")
    for name, runs in zip(left, (3, 4, 5)):
        with pytest.raises(RunError):
            (tmp_path / name).touch()
            checks.make_default_data(str(tmp_path))
        assert len(commands) == runs
    (tmp_path / ".fetching").unlink()
    checks.make_default_data(str(tmp_path))
    assert commands == [str(checks.ROOT / "data/local_text.py")] * 5


GIB = 2**30
PROPOSALS = {80: "", 23: "--micro_batches=16 needs about 19.2 GiB", 5: "no --micro_batches needs"}


@pytest.mark.parametrize("free", PROPOSALS)
def test_micro_batches_are_proposed_that_fit_the_card(monkeypatch, free):
    """On no GPU, by what is counted above the state with 8: 27.28 GiB, the training pass 20.63."""
    monkeypatch.setattr(checks, "state_bytes", lambda _: int(5.53 * GIB))
    h = train_gpt.Hyperparameters()
    training = train_gpt.Hyperparameters(val_batch_tokens=16)
    found = [checks.memory(x, 0, 393_216) / GIB for x in (h, training)]
    assert found == pytest.approx([27.28, 20.63], rel=0.01)
    advice = checks.memory_advice(h, SimpleNamespace(), 393_216, 1, free * GIB)
    assert bool(advice) == bool(PROPOSALS[free]) and PROPOSALS[free] in advice
