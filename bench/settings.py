"""What the tools of this folder share: settings and model of the recipe, tables."""

import sys
from collections.abc import Iterable
from typing import Any

# No import of torch here: codegen.py must install its fake GPU first.


def settings(argv: list[str]) -> Any:
    """Hyperparameters from options, of the record preset unless they say --preset. Ends the program
    for options that training refuses."""
    from runtime.options import parse_options
    from train_gpt import PRESETS, Hyperparameters

    h = parse_options(Hyperparameters, PRESETS, ["--preset=record", *argv])
    try:
        h.check(1)
    except ValueError as error:
        sys.exit(f"error: {error}")
    return h


def model_of(h: Any, max_tokens: int, fp8_head: bool = False) -> Any:
    """A model of these sizes on the default device, in bf16, with its first weights."""
    from train_gpt import GPT, LAYERS

    sizes = (h.vocab_size, len(LAYERS), h.num_heads, h.head_dim, h.model_dim, max_tokens)
    more = dict(bigram_rows=h.bigram_rows, attention_scale=h.attention_scale, fp8_head=fp8_head)
    return GPT(*sizes, **more)


def synthetic(h: Any, tokens: int) -> tuple:
    """A micro-batch of random documents, on the CPU."""
    from data.loader import synthetic_batch

    sizes = dict(vocab_size=h.vocab_size, max_doc_len=longest_cut(h), doc_slots=h.doc_slots)
    return synthetic_batch(tokens, **sizes)


def longest_cut(h: Any) -> int:
    """The most tokens that a stage leaves of a document."""
    from train_gpt import STAGES

    return max(stage.docs for stage in STAGES) * h.block_size


def largest_batch(h: Any) -> int:
    """Tokens of the schedule's largest step."""
    from train_gpt import step_schedule

    return max(step_schedule(step, h).batch_tokens for step in range(h.total_iterations))


def numbers(text: str) -> list[int]:
    """argparse type: whole numbers, separated by commas."""
    return [int(number) for number in text.split(",")]


def markdown(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table; floats get two digits, five if they are below 0.01."""

    def text(cell: object) -> str:
        if not isinstance(cell, float):
            return str(cell)
        return f"{cell:,.{2 if cell == 0 or abs(cell) >= 0.01 else 5}f}"

    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(text, line)) + " |" for line in lines)
