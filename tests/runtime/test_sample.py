"""sample.py: text from a checkpoint, and at the end of a run."""

import sys

import pytest
import torch

import sample
from common import ROOT, SCRIPT, options, run_fresh, train_gpt
from runtime.checkpoints import read_checkpoint, write_checkpoint
from sample import keep_nucleus


@pytest.fixture(scope="module")
def logs(shards, tmp_path_factory):
    """The logs of a run that has a sample at its end, and a checkpoint."""
    folder = tmp_path_factory.mktemp("sample")
    train_gpt.main(options(shards, folder, save_every=8, sample_tokens=5))
    return folder / "logs"


def test_a_run_ends_with_three_samples(logs):
    """Each: 64 tokens of a validation document, then what the model makes of them."""
    text = (logs / "run.txt").read_text().rpartition("a prompt from the validation shard:\n")[2]
    assert [f"[{i}] " in text for i in (1, 2, 3, 4)] == [True, True, True, False]
    assert text.count("⟫") == 3


def test_the_command_prints_the_prompt_and_a_text(logs):
    command = [sys.executable, ROOT / "sample.py", "latest", "def f(", "--tokens=9"]
    done = run_fresh([*command, f"--log_dir={logs}", f"--script={SCRIPT}"], timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    prompt, text = done.stdout.split("⟫")
    assert prompt == "def f(" and text


def test_a_document_does_not_end_within_the_text(logs):
    manager, now = sample.load_checkpoint(train_gpt, "latest", logs)
    h = manager.h
    with torch.no_grad():
        manager.model.lm_head[:, h.bos_id] = 1e3  # never drawn all the same
    prompt = [h.bos_id, *[5] * (h.max_tokens - 9)]
    tokens = sample.continue_text(manager, now, prompt, 10_000, temperature=1.0)
    assert len(tokens) == 8
    assert h.bos_id not in tokens and max(tokens) < h.vocab_size


def test_the_nucleus():
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert keep_nucleus(probs, 0.69).tolist() == pytest.approx([0, 0.4, 0, 0.3])
    assert keep_nucleus(probs, 0.71).tolist() == pytest.approx([0, 0.4, 0.2, 0.3])
    assert keep_nucleus(probs, 0.01).tolist() == pytest.approx([0, 0.4, 0, 0])
    assert torch.equal(keep_nucleus(probs, 1.1), probs)


def test_a_checkpoint_of_another_recipe_or_version_is_said(logs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sample, "load_script", lambda _: train_gpt)
    path = tmp_path / "step_000008.pt"
    saved = read_checkpoint(logs / "run/step_000008.pt")
    write_checkpoint(path, saved | {"sources": {"train_gpt.py": "# an earlier one"}}, 9)
    sample.main([str(path), "", "--tokens=0"])
    printed = capsys.readouterr()
    assert printed.out == "⟫\n"
    assert "was trained by another version of the script" in printed.err
    saved["settings"]["an_option_of_another_script"] = 3
    write_checkpoint(path, saved, 9)
    with pytest.raises(SystemExit, match=f"error: {path}: of another recipe"):
        sample.main([str(path), ""])
    with pytest.raises(SystemExit, match="the prompt has 2002 tokens"):
        sample.main(["latest", "x" * 2001, f"--log_dir={logs}"])
