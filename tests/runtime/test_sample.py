"""Text from a checkpoint: by sample.py, with the weights that were saved."""

import pytest
import torch

import sample
import train_gpt
import triton_kernels
from common import SCRIPT, options
from runtime.checkpoints import read_checkpoint
from runtime.ranks import Ranks
from train_gpt import Hyperparameters, main


@pytest.fixture(scope="module")
def logs(shards, tmp_path_factory):
    """The logs' folder of a run in bf16 that saves step 7, with the third stage's windows, and its end."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "warm_up", lambda *_: None)
        main(options(shards, folder, dtype="bfloat16", save_every=7))
    return folder / "logs"


def test_a_checkpoint_writes_text(logs, capsys):
    path, texts = f"{logs / 'run' / 'step_000008.pt'}", []
    for checkpoint in (path, path, "latest"):
        sample.main([checkpoint, "def ", "--tokens=12", f"--log_dir={logs}", f"--script={SCRIPT}"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and texts[0].startswith("def ⟫") and len(texts[0]) > 8


def test_sampling_computes_with_the_saved_weights(logs, monkeypatch):
    """The first token's probabilities are those of the saved model at its step."""
    seen = []
    monkeypatch.setattr(torch, "multinomial", lambda p, *_, **__: (seen.append(p.clone()), p.argmax()[None])[1])
    path = logs / "run" / "step_000007.pt"
    sample.sample(train_gpt, f"{path}", "abc", 1, 1.0)
    saved = read_checkpoint(path)
    manager = train_gpt.build(Hyperparameters(**saved["hyperparameters"]), Ranks(0, 1, torch.device("cpu")))
    model = manager.model.eval()
    for label, param in model.named_parameters():
        param.data.copy_(saved["state"]["same"]["parameters"][label])
    manager.advance_schedule(7)
    with torch.no_grad():
        tokens, cu_seqlens = (torch.tensor(x, dtype=torch.int32) for x in ([256, *b"abc"], [0, 4]))
        x = model.hidden_states(tokens, cu_seqlens, manager.forward_schedule())
        logits = triton_kernels.softcap(x[-1] @ model.lm_head).float()[:257]
    logits[256] = -torch.inf
    assert torch.equal(seen[0], torch.softmax(logits, -1))


@pytest.mark.parametrize(
    "arguments, message, code",
    [
        (["/nowhere.pt", "x"], "/nowhere.pt: cannot be read: No such file", 1),
        (["latest", "x", "--log_dir=/nowhere"], "no usable checkpoint in /nowhere", 1),
        (["x"], "required: prompt", 2),
        (["x", "y", "--tokens=0"], "--tokens and --temperature must be positive", 2),
        (["x", "y", "--script=/nowhere.py"], "/nowhere.py: no such file", 2),
    ],
)
def test_sampling_refuses_clearly(capsys, arguments, message, code):
    with pytest.raises(SystemExit) as exit_:
        sample.main(arguments)
    assert exit_.value.code == code and message in capsys.readouterr().err
