"""runtime/options.py: a dataclass becomes options with types, presets, limits and paths."""

import os
from dataclasses import dataclass

import pytest
import torch

from common import ROOT
from runtime.options import is_plain_name, parse_options, setting


@dataclass
class Settings:
    data: str = setting("data/here", "folder", path=True)
    steps: int = setting(7, "number of steps")
    every: int = setting(0, "steps between saves; 100 % untimed", least=0)
    rate: float = setting(0.5, "of learning")
    fast: bool = setting(True, "or slow")
    dtype: str = setting("bfloat16", "of matrices", choices=("bfloat16", "float32"))


PRESETS = {"large": {}, "small": {"steps": 2, "fast": False}}


def parse(*arguments: str) -> Settings:
    return parse_options(Settings, PRESETS, list(arguments))


def test_a_preset_by_the_machine_or_by_name(monkeypatch):
    """The first one with a GPU, the last one without. Options have their fields' types."""
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        assert parse().steps == (7 if has_gpu else 2)
    assert parse("--preset=large").steps == 7
    assert parse("--steps=9", "--preset=small") == Settings(parse().data, 9, fast=False)
    found = parse("--rate", "1e-3", "--fast=TRUE", "--dtype=float32")
    assert (found.rate, found.fast, found.dtype) == (0.001, True, "float32")


def test_a_checkpoints_settings_are_the_runs_but_for_what_is_given(tmp_path):
    """Data that are gone are the preset's; a preset that is given counts as all of its settings."""
    saved = {"data": str(tmp_path), "steps": 9, "rate": 0.7, "fast": False, "dropped": 1}

    def resume(*arguments: str) -> Settings:
        return parse_options(Settings, PRESETS, list(arguments), saved)

    assert resume("--rate=0.5") == Settings(str(tmp_path), 9, rate=0.5, fast=False)
    saved["data"] = "gone"
    assert resume() == Settings(parse().data, 9, rate=0.7, fast=False)
    assert resume("--preset=large") == parse("--preset=large")


BAD = {
    "--steps=1.5": "argument --steps: invalid int value",
    "--fast=perhaps": "argument --fast: 'perhaps' is neither true nor false",
}


@pytest.mark.parametrize("argument", BAD)
def test_a_bad_option_is_one_line_and_code_2(argument, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(argument)
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {BAD[argument]}") and printed.count("\n") == 1


def test_help_names_every_option_with_its_meaning_and_defaults(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert exit_.value.code == 0
    assert "--every INT steps between saves; 100 % untimed (0)" in text
    assert "--steps INT number of steps (7; small: 2)" in text


def test_paths(tmp_path, monkeypatch):
    """A default is the project's, a given path the current directory's."""
    monkeypatch.chdir(tmp_path)
    assert parse().data == str(ROOT / "data/here")
    assert parse("--data=mine").data == "mine"
    assert parse("--data=~/mine").data == os.path.expanduser("~/mine")
    monkeypatch.chdir(ROOT)
    assert parse().data == "data/here"


def test_names_of_runs_are_no_path_and_no_option():
    assert all(map(is_plain_name, ("run", "2025-11-28_a.b", "ü", "x=1,y@2+3")))
    assert not any(map(is_plain_name, ("", ".", "..", "a/b", "-x", ".x", "a b", "a\n", "x" * 201)))
