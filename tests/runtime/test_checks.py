"""runtime/checks.py: settings that cannot run, and a preset's data. The tables: tests/recipe."""

import subprocess

import pytest

from common import train_gpt
from runtime import checks
from runtime.ranks import RunError

SETTINGS = {
    r"--batch_unit=100 \(stage 1\): \d+ tokens do not divide": dict(batch_unit=100),
    "steps: at most a million": dict(num_scheduled_iterations=10**6),
    "--doc_slots=999999": dict(doc_slots=999_999),
    "--block_size=999999": dict(block_size=999_999),
    "must be a multiple of --val_batch_tokens": dict(val_tokens=2_097_153),
    "--bos_id=60000: must be below": dict(bos_id=60_000),
    "so at most 65536": dict(vocab_size=70_000),
    "unknown encoding 'klingon'; there are: bytes, ": dict(encoding="klingon"),
}


@pytest.mark.parametrize("message", SETTINGS)
def test_settings_that_cannot_run(message):
    with pytest.raises(ValueError, match=message):
        train_gpt.Hyperparameters(**SETTINGS[message]).check(1)


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
