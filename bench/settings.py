"""The trainer's options and model, as every measurement takes them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launch.console import RunError, printable
from launch.nests import leaves
from runtime.options import parse_options
from train_gpt import GPT, LAYERS, PRESETS, Hyperparameters, step_schedule


def trainer_settings(argv: list[str] | None = None, preset: str = "") -> Hyperparameters:
    """Settings by the trainer's own options: of argv, or of the process. preset: what they start from unless told.
    Raises SystemExit, after a message, for options that the trainer would refuse."""
    preset = preset or ("record" if torch.cuda.is_available() else "demo")
    h = parse_options(Hyperparameters, PRESETS, preset, argv)
    with refused_in_a_line(RuntimeError), torch.device("meta"):  # PyTorch's, for sizes beyond 2**63
        h.check(1)
        model_of(h, max_tokens=16)
    return h


@contextmanager
def refused_in_a_line(other: type[Exception] = RunError) -> Iterator[None]:
    """For a check of what a user gives, in options, environment or files: what it refuses ends the program with its message."""
    try:
        yield
    except (ValueError, OSError, other) as error:
        raise SystemExit(printable(f"{Path(sys.argv[0]).name}: error: {error}")) from None


def model_of(h: Hyperparameters, max_tokens: int, fp8_head: bool = False) -> nn.Module:
    """A model of these sizes, as built: in bf16, on the current device."""
    sizes = (h.vocab_size, len(LAYERS), h.num_heads, h.head_dim, h.model_dim, max_tokens)
    return GPT(*sizes, bigram_rows=h.bigram_rows, attention_scale=h.attention_scale, fp8_head=fp8_head)


def torchrun(ranks: int, folder: str | Path) -> list[str]:
    """The command that starts so many ranks of the script whose path follows. folder: for torchrun's logs, to be deleted with it;
    otherwise it makes one in the system's, and leaves it."""
    return [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", f"--log-dir={folder}"]


def unequal(a: Any, b: Any) -> list[str]:
    """Dotted names of what is not the same in two nests of dicts, lists and tuples, tensors to the bit."""
    found, other = dict(leaves(a)), dict(leaves(b))
    lacking = found.keys() ^ other.keys()
    return [name for name in found | other if name in lacking or not is_same(found[name], other[name])]


def is_same(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and a == b
    as_bytes = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))  # bits, so that NaN equals NaN
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def largest_batch(h: Hyperparameters) -> int:
    """Tokens of the schedule's largest step."""
    return max(step_schedule(step, h).batch_tokens for step in range(h.total_iterations))
