"""Command-line options from a dataclass: a field is an option, its row says default, meaning and limits."""

import argparse
import dataclasses
import math
import re
from typing import Any, get_type_hints

from launch.console import OptionParser, RunError, boolean, option_text, raise_first

# Settings that say what is written, and where: they do not make another run.
OUTPUT_SETTINGS = frozenset({"log_dir", "run_id", "save_every", "keep_checkpoints", "resume", "trace_steps"})
OUTPUT_SETTINGS |= {"sample_tokens", "sample_temperature", "sample_nucleus"}
MAY_CHANGE_ON_RESUME = OUTPUT_SETTINGS | {"data", "encoding"}  # shards may move: their tokens are compared
MAY_DIFFER_BETWEEN_RUNS = OUTPUT_SETTINGS | {"seed", "encoding"}  # of one experiment, whose mean is taken


def setting(default: Any, meaning: str, least: float = 1, choices: tuple[Any, ...] = (), path: bool = False) -> Any:
    """A field of a settings dataclass. least: of a number; a float is above 0, unless that is 0 or less; choices: all its
    values; path: a text that is a path: a ~ is the home folder, and launch/start.py makes it the project's where none is given."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "least": least, "choices": choices, "path": path})


def check_values(settings: Any) -> None:
    """Raise ValueError, naming the option, for a value that is outside of its field's limits."""
    types = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, least, choices = getattr(settings, field.name), field.metadata.get("least", 1), field.metadata.get("choices")
        kind, limit, must = types[field.name], "positive" if least == 1 else f"{least} or more", f"--{field.name}={value}: must be"
        raise_first(
            (kind is int and value < least, f"{must} {limit}"),
            (kind is int and value >= 2**32, f"{must} below 2**32"),  # of a seed PyTorch takes no more bits on a CPU
            (kind is float and not (0 < value < math.inf or least < 1 and least <= value < math.inf), f"{must} {limit} and finite"),
            (choices and value not in choices, f"{must} {' or '.join(map(str, choices or ()))}"),
        )


def is_plain_name(text: str) -> bool:
    """Can this be a file's name anywhere, short enough for an ending, without a meaning to a shell, glob or terminal?"""
    return re.fullmatch(r"\w[\w.+=@,:~ ()-]*", text) is not None and text.isprintable() and len(text.encode()) <= 200


def parse_options(settings: type, presets: dict[str, dict], preset: str, argv: list[str] | None = None) -> Any:
    """The preset's settings, changed by --name=value in argv, or the process's own: what is wrong ends it, with code 2.
    No preset: the first one on a GPU, else the last."""
    import torch  # not above: the tools in records/ need none
    preset = preset or [*presets][0 if torch.cuda.is_available() else -1]
    parser = OptionParser(f"Train by the speedrun's recipe. The preset here is {preset!r}; options override its settings.")
    parser.add_argument("--preset", choices=presets, default=preset, help="sizes and schedule to start from")
    for field in dataclasses.fields(settings):
        others = "".join(f"; {name}: {changes[field.name]}" for name, changes in presets.items() if field.name in changes)
        meaning = f"{field.metadata.get('meaning', '')} ({field.default!r}{others})".replace("%", "%%")
        kind = get_type_hints(settings)[field.name]
        taken = {bool: boolean, str: option_text(field.metadata.get("meaning", ""), bool(field.metadata.get("path")))}
        how = dict(type=taken.get(kind, kind if callable(kind) else str), metavar=getattr(kind, "__name__", f"{kind}").upper())
        parser.add_argument(f"--{field.name}", **how, default=argparse.SUPPRESS, help=meaning)
    given = vars(parser.parse_args(argv))
    found = settings(**{**presets[given.pop("preset")], **given})
    if other := [x for x, value in vars(dataclasses.replace(found)).items() if f"{value!r}" != f"{getattr(found, x)!r}"]:
        raise RunError(f"the setting {other[0]} changes when settings are copied, as by __post_init__: derive it where it is used")
    return found
