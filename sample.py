"""Text from a checkpoint, to see what was trained: the document that begins with the prompt, continued.

    python sample.py logs/RUN/step_001765.pt "The meaning of life is"
    python sample.py latest "def main(" --tokens=300 --temperature=0.5      # the newest in logs/

The model is built by train_gpt.py beside this file; a checkpoint of changed source may want --script=idea.py.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def encode(text: str, encoding: str) -> list[int]:
    """Tokens of a text: its UTF-8 bytes, or by tiktoken's encoding of that name."""
    if encoding == "bytes":
        return list(text.encode())
    import tiktoken

    return tiktoken.get_encoding(encoding).encode(text, disallowed_special=())


def load_script(path: Path) -> ModuleType:
    """The training script as a module; triton_kernels.py must stand beside it."""
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample(trainer: ModuleType, path: str, prompt: str, tokens: int, temperature: float, log_dir: str = "logs") -> str:
    """What the model writes after the prompt. Raises CheckpointError (a ValueError) if the file does not serve."""
    import torch

    place, saved = trainer.find_checkpoint(trainer.Hyperparameters(resume=path, log_dir=log_dir))
    settings, defaults = saved.get("hyperparameters"), trainer.dataclasses.asdict(trainer.Hyperparameters())
    trainer.refuse(place, trainer.differences(settings, defaults, "hyperparameters."))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = trainer.Ranks(0, 1, device)
    h = trainer.Hyperparameters(**{**settings, "compile": False})
    h.check(ranks.world_size)
    _, manager = trainer.build(h, ranks)
    trainer.check_usable(place, saved, manager)
    trainer.load_whole_state(manager, saved["state"], ranks)
    manager.advance_schedule(saved["step"])
    try:
        begin = [h.bos_id, *encode(prompt, h.encoding)]
    except Exception as error:  # tiktoken fetches its vocabulary
        raise ValueError(f"the prompt cannot be encoded by {h.encoding!r}: {error}") from error
    text = trainer.continue_text(manager.model, manager, device, begin, tokens, temperature)
    return trainer.decode(text, h.encoding)


def main(argv: list[str] | None = None) -> None:
    """Print prompt and text. Raises SystemExit, with code 1 or 2, after a message on stderr."""
    parser = argparse.ArgumentParser(description="Text from a checkpoint.")
    parser.add_argument("checkpoint", help="a file, or 'latest': the newest of all runs in --log_dir")
    parser.add_argument("prompt", help="how the document begins; may be empty")
    parser.add_argument("--tokens", type=int, default=200, help="to write (200)")
    parser.add_argument("--temperature", type=float, default=0.7, help="above 0: near it the likeliest, 1 as trained (0.7)")
    parser.add_argument("--script", type=Path, default=Path(__file__).with_name("train_gpt.py"), help="that trained it")
    parser.add_argument("--log_dir", default="logs", help="where 'latest' looks")
    args = parser.parse_args(argv)
    if args.tokens < 1 or not args.temperature > 0:
        parser.error("--tokens and --temperature must be positive")
    if not args.script.is_file():
        parser.error(f"--script={args.script}: no such file")
    try:
        text = sample(load_script(args.script), args.checkpoint, args.prompt, args.tokens, args.temperature, args.log_dir)
    except (ValueError, OSError) as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"{args.prompt}⟫{text}")


if __name__ == "__main__":
    main()
