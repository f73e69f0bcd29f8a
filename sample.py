"""Text from a model: from a checkpoint by this command, from a run at its end by train_gpt.py.

    ./run.sh sample.py latest "def main("                            # newest checkpoint in logs/
    ./run.sh sample.py logs/RUN/step_001547.pt "The meaning of life" --tokens=300 --temperature=0.5

The model is built by train_gpt.py beside this file; a checkpoint of an idea needs
--script=ideas/idea.py, one of an older recipe the sources in its log (records/extract.py).
"""

import argparse
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent

import torch

from data.encodings import decode, encode
from data.loader import first_documents
from runtime import checkpoints
from runtime.cpu import use_cpu
from runtime.ranks import Ranks
from runtime.sources import printable
from triton_kernels import softcap

PROMPTS = 3
PROMPT_TOKENS = 64
TEMPERATURE = 0.8  # near 0 the likeliest token, 1 as trained
# Tokens are drawn from the nucleus, the likeliest that have this share of the probability together
# (arXiv 1904.09751). One of 0.95 has no way out of an indentation in Python source.
NUCLEUS = 0.99


@torch.no_grad()
def continue_text(
    manager: Any,
    now: Any,
    prompt: list[int],
    count: int,
    temperature: float = TEMPERATURE,
    seed: int = 0,
) -> list[int]:
    """Up to `count` tokens after those of the prompt, which begins with bos_id. The document does not
    end in between; prompt and text together have at most max_tokens.

    manager: a TrainingManager, at the step `now` of its plan. The same prompt and seed give the same text.
    """
    h = manager.h
    model = manager.model.eval()
    device = model.embed.device
    generator = torch.Generator().manual_seed(seed)
    schedule = manager.advance_schedule(now)._replace(max_doc_len=0)
    tokens = list(prompt)
    for _ in range(min(count, h.max_tokens - len(prompt))):
        inputs = torch.tensor(tokens, dtype=torch.int32, device=device)
        starts = torch.tensor([0, len(tokens)], dtype=torch.int32, device=device)
        x = model.trunk(model.look_up(inputs), inputs, starts, schedule)
        logits = softcap(x[-1] @ model.lm_head).float().cpu()[: h.vocab_size]
        logits[h.bos_id] = -math.inf
        heated = ((logits - logits.max()).double() / temperature).float()
        probs = keep_nucleus(torch.softmax(heated, -1), NUCLEUS)
        tokens.append(int(torch.multinomial(probs, 1, generator=generator)))
    model.train()
    return tokens[len(prompt) :]


def keep_nucleus(probs: torch.Tensor, nucleus: float) -> torch.Tensor:
    """probs (vocab,) with zeros outside the nucleus: as many of the likeliest tokens as it takes to
    reach that share of the probability, at least one."""
    ranked, order = probs.sort(descending=True, stable=True)
    before = ranked.cumsum(0) - ranked  # probability of the likelier tokens
    outside = order[1:][before[1:] >= nucleus]
    return probs.index_fill(0, outside, 0)


def sample_text(manager: Any, now: Any) -> str:
    """How the model continues the first tokens of three validation documents."""
    h = manager.h
    texts = []
    prompts = first_documents(h.data, h.bos_id, 1 + PROMPT_TOKENS, PROMPTS)
    for i, prompt in enumerate(prompts, 1):
        text = continue_text(manager, now, prompt, h.sample_tokens, seed=i)
        texts.append(f"[{i}] {decode(prompt[1:], h.encoding)}⟫{decode(text, h.encoding)}")
    return "\n\n".join(texts)


def load_script(path: Path, name: str = "") -> ModuleType:
    """A training script as a module called `name`, or as its file."""
    name = name or path.stem
    sys.path[:0] = [str(path.resolve().parent)]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_checkpoint(trainer: ModuleType, resume: str, log_dir: Path) -> tuple[Any, Any]:
    """The TrainingManager of a checkpoint, on a GPU if there is one, and its step of the plan. Raises
    CheckpointError."""
    path, saved = checkpoints.find_resumed(resume, log_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = Ranks(0, 1, device)
    if device.type == "cpu":
        use_cpu()
    try:
        h = trainer.Hyperparameters(**{**saved["settings"], "compile": False})
    except TypeError as error:
        raise checkpoints.CheckpointError(f"{path}: of another recipe: {error}") from error
    manager = trainer.build(h, ranks)
    checkpoints.check_parameters(path, saved, manager)
    if trainer.SOURCES.script.read_text("utf-8") != next(iter(saved["sources"].values())):
        print(f"{path} was trained by another version of the script", file=sys.stderr)
    checkpoints.load_whole_state(manager, saved["state"], ranks)
    return manager, trainer.make_plan(h)[saved["step"]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Text from a checkpoint.")
    parser.add_argument("checkpoint", help="a file, or 'latest': the newest in --log_dir")
    parser.add_argument("prompt", help="how the document begins; may be empty")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to write (200)")
    parser.add_argument(
        "--temperature", type=float, default=TEMPERATURE, help=f"above 0 ({TEMPERATURE})"
    )
    parser.add_argument(
        "--script", type=Path, default=ROOT / "train_gpt.py", help="the script that trained it"
    )
    parser.add_argument("--log_dir", type=Path, default=ROOT / "logs", help="for 'latest'")
    args = parser.parse_args(argv)
    if args.temperature <= 0:
        parser.error("--temperature must be above 0")
    try:
        manager, now = load_checkpoint(load_script(args.script), args.checkpoint, args.log_dir)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    h = manager.h
    prompt = [h.bos_id, *encode(args.prompt, h.encoding)]
    if len(prompt) >= h.max_tokens:
        sys.exit(f"error: the prompt has {len(prompt)} tokens, the model takes {h.max_tokens - 1}")
    text = decode(continue_text(manager, now, prompt, args.tokens, args.temperature), h.encoding)
    print(printable(f"{args.prompt}⟫{text}"))


if __name__ == "__main__":
    main()
