"""Command-line options from a dataclass: each field is an option with a default, a meaning and limits."""

import argparse
import dataclasses
import difflib
import math
import os
import re
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

ROOT = Path(__file__).resolve().parent.parent

# Settings that say what is written and where: they do not make another run.
OUTPUT_SETTINGS = frozenset(
    "log_dir run_id save_every save_minutes keep_checkpoints resume sample_tokens".split()
)
# The tokens are compared, and another card may need other kernels.
MAY_CHANGE_ON_RESUME = OUTPUT_SETTINGS | {"data", "flash_attention", "self_check"}
OF_THE_COMMAND = frozenset({"log_dir", "run_id", "resume"})  # say which checkpoint is resumed


def setting(
    default: Any, meaning: str, least: float = 1, choices: tuple = (), path: bool = False
) -> Any:
    """A field of a settings dataclass. least: smallest value of an int; a float must be above 0,
    or at least `least` if that is 0 or less. path: the default is relative to the project."""
    limits = dict(meaning=meaning, least=least, choices=choices, path=path)
    return dataclasses.field(default=default, metadata=limits)


def check_values(settings: Any) -> None:
    """Raise ValueError, naming the option, for a value outside its field's limits."""
    types = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        least = field.metadata.get("least", 1)
        choices = field.metadata.get("choices")
        limit = "positive" if least == 1 else f"at least {least}"
        if types[field.name] is int and not least <= value < 2**32:
            raise ValueError(f"--{field.name}={value}: must be {limit} and below 2**32")
        if types[field.name] is float:
            fits = value > 0 if least == 1 else value >= least
            if not (fits and math.isfinite(value)):
                raise ValueError(f"--{field.name}={value}: must be {limit} and finite")
        if choices and value not in choices:
            allowed = " or ".join(map(str, choices))
            raise ValueError(f"--{field.name}={value}: must be {allowed}")


def is_plain_name(text: str) -> bool:
    """Whether this can be a file's name anywhere, without a meaning to a shell."""
    return re.fullmatch(r"\w[\w.+=@,-]*", text) is not None and len(text.encode()) <= 200


class _Parser(argparse.ArgumentParser):
    """Takes options in full only, and proposes a known one for a typo. Errors exit with code 2."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            name = unknown[0].partition("=")[0].replace("-", "_").replace("__", "--", 1)
            near = difflib.get_close_matches(name, known, 1, 0.7)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unknown option {unknown[0]}{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":  # once for all ranks
            self.exit(2, f"error: {message}\n")
        self.exit(2)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def parse_options(
    settings: type, presets: dict, argv: list[str] | None = None, saved: dict | None = None
) -> Any:
    """The settings of a preset, changed by --name=value. Without --preset: the first one on a GPU,
    else the last. A bad option ends the process with code 2, a bad value raises ValueError later.
    saved: the settings of a checkpoint, which come in the preset's place, unless --preset is given.
    Data that are not where they were are looked for where the preset has them."""
    import torch  # here, because tools that read this module do without

    preset = list(presets)[0 if torch.cuda.is_available() else -1]
    parser = _Parser(
        allow_abbrev=False,
        usage="%(prog)s [--option=value …]",
        description=f"Train by the speedrun's recipe. The preset on this machine is {preset!r}.",
    )
    parser.add_argument("--preset", choices=presets, help="settings to start from")
    types = get_type_hints(settings)
    for field in dataclasses.fields(settings):
        others = [
            f"{name}: {changes[field.name]}"
            for name, changes in presets.items()
            if field.name in changes
        ]
        defaults = "; ".join([repr(field.default), *others])
        kind = types[field.name]
        convert = os.path.expanduser if field.metadata.get("path") else kind
        parser.add_argument(
            f"--{field.name}",
            type=_boolean if kind is bool else convert,
            default=argparse.SUPPRESS,
            metavar=kind.__name__.upper(),
            help=f"{field.metadata.get('meaning', '')} ({defaults})".replace("%", "%%"),
        )
    given = vars(parser.parse_args(argv))
    named = given.pop("preset")
    resumed = {}
    if saved and not named:
        resumed = {name: saved[name] for name in (types.keys() & saved.keys()) - OF_THE_COMMAND}
        if not Path(resumed.get("data", "")).is_dir():  # on another machine
            resumed.pop("data", None)
    found = settings(**{**presets[named or preset], **resumed, **given})
    # A default path is the project's, wherever the user stands. Sources that were extracted from a
    # log are no whole project: they take the current directory's.
    elsewhere = (ROOT / "run.sh").exists() and Path.cwd() != ROOT
    for field in dataclasses.fields(settings):
        name = field.name
        value = getattr(found, name)
        if elsewhere and field.metadata.get("path") and value and name not in resumed | given:
            setattr(found, name, str(ROOT / value))
    return found
