"""Text from a model: from a checkpoint by this command, from a run at its end by train_gpt.py.

    python sample.py logs/RUN/step_001547.pt "The meaning of life is"
    python sample.py latest "def main(" --tokens=300 --temperature=0.5      # the newest in logs/

Each token is drawn from the nucleus: the likeliest that have this share of the probability together (arXiv 1904.09751). One
of 0.95 has no way out of an indentation in Python source: after spaces a space is likelier than that.

The model is built by train_gpt.py beside this file; a checkpoint of changed source may need --script=idea.py, one of an older
recipe the sample.py beside its own sources (records/extract.py LOG again; python again/sample.py).
"""

import argparse
import contextlib
import importlib.util
import math
import os
import runpy
import signal
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # also while it imports: there is nothing to undo

launcher: "dict[str, Any]" = {}  # quoted for a Python too old; what launch/start.py defines, if this is started and not imported
if __name__ == "__main__":  # as in a run, a script finds the modules beside it before the project's
    early, root = argparse.ArgumentParser(add_help=False), Path(__file__).resolve().parent
    own, starter = f"{root}/train_gpt.py", f"{root}/launch/start.py"
    if sys.version_info < (3, 11) and os.path.exists(starter):  # it cannot import the rest
        runpy.run_path(f"{root}/launch/environment.py")["go_on"]("requirements.txt")
    early.add_argument("--script", nargs="?", type=os.path.expanduser, const=own, default=own)  # --script=-- is none
    script = Path(os.path.realpath(early.parse_known_args()[0].script))
    if os.path.exists(starter) and os.path.isfile(script) and os.access(script, os.R_OK):  # the sources of a log have no starter
        launcher = runpy.run_path(starter)  # no import: launch may be a folder of the script's
        try:
            launcher["check_standing"]()
            launcher["check_names"](script)
            runpy.run_path(f"{root}/launch/environment.py")["check_names_of_files"]("sample.py")
        except launcher["LaunchError"] as error:
            launcher["tell"]("sample.py", f"error: {error.args[0]}")
            sys.exit(error.args[1])
    sys.path.insert(0, f"{script.parent}")

try:
    # Before PyTorch, whose threads launch tells how to wait.
    from launch.console import Parser, console, option_text, printable, until_reader_leaves, user_path
    from launch.machine import is_lack_of_memory

    from data.encodings import decode, encode
    from data.loader import first_documents
    from runtime import checkpoints
    from runtime.ranks import Ranks
    from triton_kernels import softcap
except ImportError as problem:
    if __name__ == "__main__" and isinstance(problem, ModuleNotFoundError) and problem.name in ("numpy", "torch"):
        # As run.sh does: an import would put environment.py into every log.
        root = os.path.dirname(os.path.realpath(__file__))
        if not os.path.exists(f"{root}/requirements.txt"):  # the sources of a log have none
            fault = f"{sys.executable} lacks {problem.name}, and {root} makes no environment"
            sys.exit(f"sample.py: error: {fault}: run it by one that has it, as .venv/bin/python of the project")
        command = [f"{root}/launch/environment.py", "--for=sample.py", f"{root}/requirements.txt", "--then", *sys.argv]
        os.execv(sys.executable, [sys.executable, *command])
    if launcher and (fault := runpy.run_path(f"{root}/launch/environment.py")["package_fault"](problem)):
        sys.exit(f"sample.py: error: {fault}")
    if __name__ != "__main__" or sys.path[0] == str(Path(__file__).resolve().parent):
        raise
    sys.exit(f"sample.py: error: not of one project with the modules beside --script ({problem}): run {sys.path[0]}/sample.py")
except Exception as problem:
    known = launcher and (isinstance(problem, MemoryError) or launcher["cut_package"](problem))
    if not known and ("torch" in sys.modules or __name__ != "__main__" or not os.path.exists(starter)):  # of ours, not PyTorch's
        raise
    sys.exit(f"sample.py: error: {runpy.run_path(starter)['import_fault'](problem)}")

import torch


@torch.no_grad()
def continue_text(manager: Any, prompt: list[int], count: int, temperature: float = 1.0, nucleus: float = 1.0) -> list[int]:
    """Up to `count` tokens after those of the prompt, which begins with bos_id; the document does not end in between.

    manager: a trainer's TrainingManager. temperature: positive and finite; nucleus: above 0, at most 1. Tokens come from the
    settings' seed: the same prompt, the same text. Prompt and text together have at most max_tokens.
    """
    model, h, tokens = manager.model.eval(), manager.h, list(prompt)
    generator, device = torch.Generator().manual_seed(h.seed), model.embed.device
    for _ in range(min(count, h.max_tokens - len(prompt))):
        inputs, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in (tokens, [0, len(tokens)]))
        x = model.hidden_states(inputs, starts, manager.forward_schedule()._replace(max_doc_len=0))
        logits = softcap(x[-1] @ model.lm_head).float().cpu()[: h.vocab_size]
        logits[h.bos_id] = -math.inf
        heated = ((logits - logits.max()).double() / temperature).float()  # any temperature: the largest is 0
        probs = keep_nucleus(torch.softmax(heated, -1), nucleus)
        tokens.append(int(torch.multinomial(probs, 1, generator=generator)))
    model.train()
    return tokens[len(prompt) :]


def keep_nucleus(probs: torch.Tensor, nucleus: float) -> torch.Tensor:
    """probs (vocab,), those outside of the nucleus 0: of the likeliest as many as it takes to reach its share, at least one."""
    if nucleus >= 1:
        return probs
    ranked, order = probs.sort(descending=True, stable=True)
    outside = order[1:][(ranked.cumsum(0) - ranked)[1:] >= nucleus]  # not the likeliest: fp32 takes 1e-46 for 0
    return probs.index_fill(0, outside, 0)


PROMPTS, PROMPT_TOKENS = 3, 64
LONG = 500  # tokens, from which on a run says before that it writes


def sample_text(manager: Any) -> str:
    """How the model goes on after the first tokens of three validation documents: settings.sample_tokens tokens each, or as many
    as the model takes. The console hears before of many, or of fewer."""
    h, texts = manager.h, []
    count = max(0, min(h.sample_tokens, h.max_tokens - 1 - PROMPT_TOKENS))
    if count > LONG or count < h.sample_tokens:
        cut = f" (not {h.sample_tokens:,}: the model takes {h.max_tokens:,} in all)" if count < h.sample_tokens else ""
        console(f"sample: {PROMPTS} texts of {count:,} tokens{cut}, a forward pass each; the run is through, a signal ends this")
    for i, prompt in enumerate(first_documents(h.data, h.bos_id, 1 + PROMPT_TOKENS, PROMPTS), 1):
        text = continue_text(manager, prompt, count, h.sample_temperature, h.sample_nucleus)
        texts.append(f"[{i}] {decode(prompt[1:], h.encoding)}⟫{decode(text, h.encoding)}")
    return "\n\n".join(texts).replace("\0", "\\x00")  # a young model writes any byte; a NUL would end the log


def load_script(path: Path, name: str = "") -> ModuleType:
    """A training script as a module called `name`, or as its file. It finds the project's own modules by itself."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def other_sources(trainer: ModuleType, saved: dict[str, str]) -> str:
    """The files in use that are not as they were in training; the script, which comes first, whatever its name."""
    now = trainer.SOURCES.imported() if hasattr(trainer, "SOURCES") else saved
    name, here = next(iter(saved), ""), next(iter(now.values()), "")
    differ = [name] * (saved.get(name, "") != here)
    return ", ".join(differ + [x for x in [*now][1:] if x in saved and x != name and saved[x] != now[x]])


def sample(
    trainer: ModuleType, path: str, prompt: str, tokens: int, temperature: float, nucleus: float = 1.0, log_dir: str | Path = "logs"
) -> str:  # fmt: skip
    """What the model writes after the prompt. Raises CheckpointError (a ValueError) if the file does not serve, OSError."""
    place, saved = checkpoints.find_checkpoint(path, log_dir)
    defaults = vars(trainer.Hyperparameters())
    settings = saved.get("hyperparameters")
    if faults := checkpoints.other_settings(settings, defaults):
        checkpoints.check_recipe(place, saved, trainer.PARAM_TABLE)  # says more
        checkpoints.raise_if(place, faults)
    ranks = Ranks(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if ranks.device.type == "cpu" and hasattr(trainer, "use_cpu"):  # products as in the run, whose weights they are
        trainer.use_cpu()
    h = trainer.Hyperparameters(**{**settings, "compile": False})
    h.check(ranks.world_size)
    manager = trainer.build(h, ranks)
    checkpoints.check_recipe(place, saved, manager.own_rows)
    if isinstance(saved.get("sources"), dict) and (other := other_sources(trainer, saved["sources"])):
        advice = "if that makes another model, name its script by --script, beside its own modules"
        fault = f"{place.name} was trained by other source ({other}): {advice}"
        print(printable(f"sample.py: {fault}"), file=sys.stderr)
    checkpoints.check_usable(place, saved, manager, h.total_iterations)
    checkpoints.load_whole_state(manager, saved["state"], ranks)
    manager.advance_schedule(saved["step"])
    try:
        begin = [h.bos_id, *encode(prompt, h.encoding)]
    except Exception as error:  # tiktoken fetches its vocabulary
        raise ValueError(f"the prompt cannot be encoded by {h.encoding!r}: {error}") from error
    if (room := h.max_tokens - len(begin)) < 1:
        raise ValueError(f"the prompt has {len(begin)} tokens, the model takes {h.max_tokens - 1} and writes on: shorten it")
    if tokens > room:
        print(f"sample.py: writes {room} tokens, not {tokens}: the model takes {h.max_tokens} in all", file=sys.stderr)
    if min(tokens, room) > LONG:
        print(f"sample.py: {min(tokens, room):,} tokens, a forward pass each: the text comes at their end", file=sys.stderr)
    return decode(continue_text(manager, begin, tokens, temperature, nucleus), h.encoding)


def main(argv: list[str] | None = None) -> None:
    """Print prompt and text, control characters as escapes. Raises SystemExit, code 1 or 2, after a message on stderr."""
    parser = Parser(description="Text from a checkpoint.")
    known = "a file, or 'latest'"
    parser.add_argument("checkpoint", type=option_text(known), help=f"{known}: the newest of all runs in --log_dir")
    parser.add_argument("prompt", help="how the document begins; may be empty; after all options and -- if it begins with a dash")
    parser.add_argument("--tokens", type=int, default=200, help="to write (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="above 0: near it the likeliest, 1 as trained (0.8)")
    parser.add_argument("--nucleus", type=float, default=0.99, help="share of the probability that is drawn from (0.99)")
    root = Path(__file__).resolve().parent
    parser.add_argument("--script", type=user_path, default=root / "train_gpt.py", help="that trained it")
    parser.add_argument("--log_dir", type=user_path, default=root / "logs", help="where 'latest' looks (the project's logs/)")
    args = parser.parse_args(argv)
    if args.tokens < 1 or not 0 < args.temperature < math.inf:
        parser.error("--tokens and --temperature must be positive and finite")
    if not 0 < args.nucleus <= 1:
        parser.error("--nucleus must be above 0 and at most 1")
    try:
        if not stat.S_ISREG(args.script.stat().st_mode):
            parser.error(f"--script={args.script}: is no file")
        args.script.open("rb").close()
    except OSError as error:
        parser.error(f"--script={args.script}: {error.strerror}")
    try:
        with launcher["modules_beside_told"](Path(os.path.realpath(args.script))) if launcher else contextlib.nullcontext():
            trainer = load_script(args.script) if args.script.suffix == ".py" else None
    except launcher.get("LaunchError", ()) as error:
        raise SystemExit(printable(f"sample.py: error: {error.args[0]}")) from None
    if not hasattr(trainer, "Hyperparameters"):
        parser.error(f"--script={args.script}: is no training script, such as train_gpt.py")
    try:
        text = sample(trainer, args.checkpoint, args.prompt, args.tokens, args.temperature, args.nucleus, args.log_dir)
        with until_reader_leaves():
            sys.stdout.reconfigure(errors="replace")
            print(printable(f"{args.prompt}⟫{text}"))
    except (ValueError, OSError) as error:
        print(printable(f"sample.py: error: {error}"), file=sys.stderr)
        raise SystemExit(1) from None
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        others = ": nvidia-smi shows who else holds the GPU's, with CUDA_VISIBLE_DEVICES= the CPU writes"
        print(f"sample.py: error: {args.checkpoint}: out of memory{others * torch.cuda.is_available()}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    if "end_after" in launcher:
        launcher["end_after"](main)
    else:
        main()
