"""The trainer's options and model, as every measurement takes them."""

import sys
from pathlib import Path

import torch
from torch import nn

from runtime.options import parse_options
from train_gpt import GPT, LAYERS, PRESETS, Hyperparameters, step_schedule


def trainer_settings(argv: list[str] | None = None, preset: str = "") -> Hyperparameters:
    """Settings by the trainer's own options: of argv, or of the process. preset: what they start from unless told.
    Raises SystemExit, after a message, for options and for sizes of which there is no model."""
    preset = preset or ("record" if torch.cuda.is_available() else "demo")
    h = parse_options(Hyperparameters, PRESETS, preset, argv)
    try:
        with torch.device("meta"):
            model_of(h, max_tokens=16)
    except ValueError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: error: {error}") from None
    return h


def model_of(h: Hyperparameters, max_tokens: int, fp8_head: bool = False) -> nn.Module:
    """A model of these sizes, as built: in bf16, on the current device."""
    sizes = (h.vocab_size, len(LAYERS), h.num_heads, h.head_dim, h.model_dim, max_tokens)
    return GPT(*sizes, bigram_rows=h.bigram_rows, attention_scale=h.attention_scale, fp8_head=fp8_head)


def largest_batch(h: Hyperparameters) -> int:
    """Tokens of the schedule's largest step."""
    return max(step_schedule(step, h).batch_tokens for step in range(h.total_iterations))
