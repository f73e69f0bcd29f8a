"""Every bad option has a message that names it and says what to do, and an exit code, before any file is written."""

import dataclasses
import itertools
import math
import sys
import types

import pytest

from common import ends_with, options, tiny_settings
from launch.console import RunError
from runtime.options import check_values, parse_options, setting
from train_gpt import PRESETS, Hyperparameters, main

SIGNED = (
    "doc_slots", "seed", "num_extension_iterations", "momentum_warmup", "momentum_cooldown", "val_every", "sample_tokens",
    "save_every",
)  # fmt: skip
POSITIVE = (
    "vocab_size", "model_dim", "num_heads", "head_dim", "num_scheduled_iterations", "batch_unit", "micro_batches", "block_size",
    "val_tokens", "val_batch_tokens", "keep_checkpoints",
)  # fmt: skip
FROM_TWO = ("max_doc_len", "bigram_rows")
FLOATS = ("attention_scale", "adam_lr_mul", "muon_lr_mul", "sample_temperature", "sample_nucleus")
HUGE = 10**30
OPTIONS = [  # arguments, message, exit code
    *((f"--{name}=-1", f"--{name}=-1: must be 0 or more", 1) for name in SIGNED),
    *((f"--{name}=0", f"--{name}=0: must be positive", 1) for name in POSITIVE),
    *((f"--{name}=1", f"--{name}=1: must be 2 or more", 1) for name in FROM_TWO),
    *((f"--{name}={HUGE}", f"--{name}={HUGE}: must be below 2..32", 1) for name in (*SIGNED, *POSITIVE, *FROM_TWO)),
    *((f"--{name}=1.5", f"argument --{name}: invalid int value: '1.5'", 2) for name in ("batch_unit", "seed", "save_every")),
    *((f"--{name}=", f"argument --{name}: invalid int value: ''", 2) for name in ("val_every", "keep_checkpoints")),
    *((f"--{name}={x}", f"--{name}={float(x)}: must be positive and finite", 1)
      for name in FLOATS for x in ("0", "-1", "nan", "inf")),
    ("--adam_lr_mul=fast", "argument --adam_lr_mul: invalid float value: 'fast'", 2),
    ("--compile=perhaps", "argument --compile: 'perhaps' is neither true nor false", 2),
    ("--fp8_head=", "argument --fp8_head: '' is neither true nor false", 2),
    ("--preset=laptop", "argument --preset: invalid choice: 'laptop'", 2),
    ("--batch_unit", "argument --batch_unit: expected one argument", 2),
    ("--batch", "unrecognized arguments: --batch", 2),
    ("--learning_rate=1", "unrecognized arguments: --learning_rate=1", 2),
    ("stray", "unrecognized arguments: stray", 2),
    ("--bos_id=-1", "--bos_id=-1: must be 0 or more", 1),
    ("--bos_id=99 --vocab_size=100", r"holds token \d+, but the vocabulary ends at 100", 1),
    ("--bos_id=257", "--bos_id=257 is outside the vocabulary, --vocab_size=257", 1),
    ("--vocab_size=65537", "--vocab_size=65537: shards hold uint16 tokens", 1),
    ("--num_heads=3", "num_heads=3: must be even", 1),
    ("--head_dim=18 --model_dim=36", "head_dim=18: must be a multiple of 4", 1),
    ("--model_dim=33", "model_dim=33 is not num_heads \\* head_dim", 1),
    ("--sample_nucleus=1.1", "--sample_nucleus=1.1: a share is at most 1", 1),
    ("--dtype=fp8", "--dtype=fp8: must be bfloat16 or float32", 1),
    ("--comms=both", "--comms=both: must be sharded or replicated", 1),
    ("--grad_dtype=float16", "--grad_dtype=float16: must be param or float32", 1),
    ("--batch_unit=3", "--batch_unit=3 .stage 1.: 24 tokens do not divide into 2 micro-batches", 1),
    ("--micro_batches=7", "tokens do not divide into 7 micro-batches of a multiple of 16", 1),
    ("--val_tokens=300", "--val_tokens=300 is no multiple of --val_batch_tokens=256", 1),
    ("--block_size=4294967295", "--block_size=4294967295: the most tokens are 384", 1),
    ("--seed=4294967296", "--seed=4294967296: must be below 2..32", 1),  # on a CPU it was seed 0 again
    ("--encoding=klingon", "no encoding is called 'klingon'; there are: bytes, ", 1),
    ("--doc_slots=100000", "--doc_slots=100000: the most tokens are 384", 1),
    ("--trace_steps=8:9", "--trace_steps=8:9: the last step is 7", 1),
    ("--num_scheduled_iterations=2000000", "2000002 steps: a million is the most", 1),
    ("--num_scheduled_iterations=900", r"902 steps need [\d,]+ tokens .* used up in step \d+", 1),
    ("--batch_unit=1048576", "used up in step 1", 1),
    ("--val_tokens=1048576 --val_batch_tokens=1048576", "validation needs 1,048,577 tokens", 1),
    ("--num_heads=2 --head_dim=1048576 --model_dim=2097152", "no such model can be made; if for its size, lower --model_dim", 1),
    ("--data=/nowhere", "no shard matches /nowhere/.*_val_.*data/local_text.py", 1),
    ("--log_dir=/proc/none", "/proc/none", 1),
    ("--log_dir=/dev/null", "/dev/null", 1),
    ("--run_id=../x", "--run_id=../x: must be a file's name, alone", 1),
    ("--resume=/nowhere.pt", "/nowhere.pt: cannot be read: No such file or directory: name a step_….pt, or latest", 1),
    ("--resume=/", "/: cannot be read: Is a directory: name a step_….pt, or latest", 1),
    ("--resume=latest", "latest: no usable checkpoint in .*/logs/run: --save_every writes them", 1),
]  # fmt: skip


@pytest.mark.parametrize("argument, message, code", OPTIONS, ids=[case[0] for case in OPTIONS])
def test_a_bad_option_is_named(shards, tmp_path, capsys, argument, message, code):
    ends_with(capsys, options(shards, tmp_path) + argument.split(" "), message, code)
    assert not (tmp_path / "logs" / "run.txt").exists()


def test_more_ranks_than_micro_batches_are_named(shards, tmp_path):
    with pytest.raises(ValueError, match="--micro_batches=2 cannot be shared by 3 ranks: use a multiple of 3, or start"):
        tiny_settings(shards, tmp_path).check(3)


def test_every_number_has_its_limits_tried():
    of_type = {kind: {f.name for f in dataclasses.fields(Hyperparameters) if f.type is kind} for kind in (int, float)}
    assert of_type[int] == {*SIGNED, *POSITIVE, *FROM_TWO, "bos_id"} and of_type[float] == {*FLOATS}


def test_help_lists_every_setting_with_its_meaning(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = "".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(Hyperparameters):
        kind = {int: "INT", float: "FLOAT", str: "STR", bool: "BOOL"}[field.type]
        assert f"--{field.name}{kind}{''.join(field.metadata['meaning'].split())}" in printed


def test_a_float_may_be_as_low_as_its_row_says():
    """As dropout that is off."""

    @dataclasses.dataclass
    class Settings:
        dropout: float = setting(0.0, "share", least=0)
        rate: float = setting(1.0, "x")
        start: float = setting(-1.0, "of a gate", least=-2)

    check_values(Settings())
    with pytest.raises(ValueError, match="^--dropout=-0.1: must be 0 or more and finite$"):
        check_values(Settings(dropout=-0.1))
    check_values(Settings(start=-1.5))
    for value in (-2.5, math.inf, math.nan):
        with pytest.raises(ValueError, match=rf"^--start={value}: must be -2 or more and finite$"):
            check_values(Settings(start=value))
    with pytest.raises(ValueError, match="^--rate=0.0: must be positive and finite$"):
        check_values(Settings(rate=0.0))


def test_choices_may_be_numbers():
    @dataclasses.dataclass
    class Settings:
        kind: int = setting(1, "of the rate: 1 linear, 2 cosine", choices=(1, 2))

    check_values(Settings())
    with pytest.raises(ValueError, match="^--kind=3: must be 1 or 2$"):
        check_values(Settings(kind=3))


def test_help_is_shown_for_a_setting_that_no_run_may_have(capsys):
    @dataclasses.dataclass
    class Settings:
        width: float | None = setting(None, "width")

    with pytest.raises(SystemExit, match="0"):
        parse_options(Settings, {"small": {}}, "small", ["--help"])
    assert "--width FLOAT | NONE" in capsys.readouterr().out


def test_an_idea_may_postpone_its_annotations(capsys):
    """from __future__ import annotations leaves texts in place of a dataclass's types."""
    source = """
from __future__ import annotations
from dataclasses import dataclass
from runtime.options import setting

@dataclass
class Settings:
    steps: int = setting(3, "steps")
    rate: float = setting(0.5, "rate")
    loud: bool = setting(False, "loud")
    plain: int = 4
"""
    module = types.ModuleType("idea")
    sys.modules["idea"] = module
    exec(source, module.__dict__)
    found = parse_options(module.Settings, {"record": {}}, "record", ["--steps=7", "--rate=0.25", "--loud=true"])
    assert (found.steps, found.rate, found.loud, found.plain) == (7, 0.25, True, 4)
    found.steps = 0
    with pytest.raises(ValueError, match="--steps=0: must be positive"):
        check_values(found)
    with pytest.raises(SystemExit):
        parse_options(module.Settings, {"record": {}}, "record", ["--steps=many"])
    assert "invalid int value: 'many'" in capsys.readouterr().err


def test_settings_that_change_when_they_are_copied_are_refused():
    """The run trained on one batch, and its log and rate were those of the batch after."""

    @dataclasses.dataclass
    class Settings(Hyperparameters):
        def __post_init__(self):
            self.batch_unit *= 2

    with pytest.raises(RunError, match="^the setting batch_unit changes when settings are copied, as by __post_init__: derive"):
        parse_options(Settings, PRESETS, "demo", [])
    Settings.__post_init__ = lambda self: setattr(self, "batch_unit", max(self.batch_unit, 512))
    assert parse_options(Settings, PRESETS, "demo", ["--batch_unit=1"]).batch_unit == 512


@pytest.mark.parametrize("texts, meant", [(("true", "True", "1"), True), (("false", "FALSE", "0"), False)])
def test_true_and_false_may_be_numbers(texts, meant):
    for preset, text in itertools.product(PRESETS, texts):
        assert parse_options(Hyperparameters, PRESETS, preset, [f"--fp8_head={text}"]).fp8_head is meant
