"""What a log holds is read back exactly, and what is wrong with it is named."""

import ast
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from made_logs import BANNER, ENVIRONMENT, RULE, SOURCES, make_log, step_lines

import runlog
from curves import stages
from kinds import same_source
from rules import analysed
from runlog import at_step, parse_log, read_log

SCRIPT, KERNELS = SOURCES["train_gpt.py"], SOURCES["triton_kernels.py"]
NAMES = ("my ideas/idea 2.py", "train_gpt.py", "triton_kernels.py", "data/__init__.py", "data/shards.py", "runtime/log.py")

TRAPS = (
    RULE, BANNER, "# triton_kernels.py", f"{BANNER}\n# runtime/log.py\n{BANNER}", f"{BANNER}\r\n# absent.py\n{BANNER}",
    "Python 3.12", "Running Python 3.12", "step:1/2 val_loss:3.0 train_time:1ms step_avg:1ms",
    "step:7/9 train_time:1ms step_avg:1.00ms", "sample, after a prompt from x:", "peak memory allocated: 7 MiB",
    "", "é ⟫", "\r", make_log().decode(),
)  # fmt: skip
STATEMENTS = ("x = 1", "import os", "# ----", "# it's", "", "if x:\n    y = 2", 'q = \'"""\'')


@st.composite
def python_sources(draw):
    """Statements and strings; the strings hold whatever a log may hold. Some are empty, some end without a line break."""
    pieces = draw(st.lists(st.one_of(st.sampled_from(STATEMENTS), trap_strings()), max_size=5))
    text = "\n".join(pieces) + draw(st.sampled_from(["", "\n", "\n\n"])) * bool(pieces)
    return (text.replace("\n", "\r\n") if draw(st.booleans()) else text).encode()


def trap_strings():
    """Assignments of triple-quoted strings of such lines."""
    lines = st.lists(st.one_of(st.sampled_from(TRAPS), st.text("abc =-#:/'\t", max_size=12)), max_size=6)
    return st.tuples(lines, st.sampled_from(["'''", '"""'])).map(
        lambda pair: f"x = {pair[1]}\n" + "\n".join(pair[0]).replace("''", "'").replace(pair[1], "") + f"\n{pair[1]}"
    )


def test_a_shards_name_may_hold_quotes():
    names = ("it's_val_0.bin", 'a"b_train_0.bin', "both'\"_train_1.bin", "plain_train_2.bin")
    line = "shards: " + ", ".join(f"{name!a} {i:08x}" for i, name in enumerate(names))
    found = parse_log(make_log(environment=ENVIRONMENT.replace("SCRIPT", f"{line}\nSCRIPT"))).shards
    assert [*found.values()] == [f"{i:08x}" for i in range(4)] and {names[0], names[1], names[3]} < {*found}


@settings(max_examples=150)
@given(names=st.permutations(NAMES), count=st.integers(1, len(NAMES)), data=st.data())
def test_any_log_reads_back_as_it_was_written(names, count, data):
    sources = {name: data.draw(python_sources()) for name in names[:count]}
    sources[names[0]] = sources[names[0]] or b"x = 1\n"
    total = data.draw(st.integers(1, 12))
    stop = data.draw(st.integers(0, total))
    lines, times, validations, clock = [], {}, [], 0
    for step in range(stop + 1):
        if step:
            clock += data.draw(st.integers(0, 10**6))
            times[step] = clock
            lines.append(f"step:{step}/{total} train_time:{clock}ms step_avg:{clock / step:.2f}ms\n")
        if step == total or data.draw(st.booleans()):
            loss = data.draw(st.integers(0, 200_000)) / 10_000
            times[step] = clock
            validations.append((step, loss, clock))
            lines.append(
                f"step:{step}/{total} val_loss:{loss:.4f} train_time:{clock}ms step_avg:{clock / max(step, 1):.2f}ms\n"
            )
    tail = (
        data.draw(st.sampled_from(["", "sample, after a prompt from x:\nstep:1/1 val_loss:0.1\n⟫step:0\n"]))
        + "peak memory resident: 9 MiB\n"
    )
    log = parse_log(make_log(sources, lines="".join(lines), end=tail))
    assert [*log.sources.items()] == [*sources.items()]
    assert (log.environment, log.times, log.validations) == (ENVIRONMENT.replace("SCRIPT", names[0]), times, validations)
    assert (log.total, log.peak_memory, log.problems) == (total if lines else None, "peak memory resident: 9 MiB", [])
    assert bool(log.fault) == (stop < total)


@pytest.mark.parametrize("kernels", [None, KERNELS])
def test_logs_of_the_public_speedrun_read_exactly(kernels):
    """Its script prints its files with empty lines around the banner, then nvidia-smi's table."""
    code = SCRIPT.decode() + (f"\n\n{BANNER}\n# triton_kernels.py\n{BANNER}\n\n{kernels.decode()}" if kernels else "")
    smi = "\n".join(
        f"|   {i}  NVIDIA H100 80GB HBM3          On  |   00000000:61:00.0 Off |                    0 |" for i in range(8)
    )
    environment = (
        "Running Python 3.12.7 (main) [GCC 13.2.0]\nRunning PyTorch 2.10.0.dev compiled for CUDA 12.6\n"
        "Running Triton version 3.5.0\n"
        f"Mon Jan  1 00:00:00 2026\n| NVIDIA-SMI 560  Driver Version: 560.35  CUDA Version: 12.6 |\n|=====+====|\n{smi}\n\n"
    )
    lines = "step:0/2 val_loss:10.8 train_time:0ms step_avg:nanms\n" + step_lines(2).partition("\n")[2]
    log = parse_log(f"{code}\n{RULE}\n{environment}\n{RULE}\n{lines}".encode())
    assert log.sources == {"train_gpt.py": SCRIPT, **({"triton_kernels.py": kernels} if kernels else {})}
    assert log.facts == {
        "Python": "3.12.7", "PyTorch": "2.10.0.dev", "CUDA": "12.6", "Triton": "3.5.0", "driver": "560.35",
        "GPUs": "8 × NVIDIA H100 80GB HBM3",
    }  # fmt: skip
    assert (log.validations, log.fault, log.problems) == ([(0, 10.8, 0.0), (2, 3.27, 20.0)], "", [])


@pytest.mark.parametrize(
    "line, loss, seconds",
    [
        ("step:125/125 val_loss:4.35 train_time:1000ms step_avg:8ms", 4.35, 1.0),
        ("step:125/125 val_loss:4.35 train_time:1.5s", 4.35, 1.5),
        ("step:125/125 val_loss:4.35", 4.35, None),
        ("step:125/125 val_loss:4.35 step_avg:8ms", 4.35, None),
        ("s:125 tel:4.35", 4.35, None),
        ("step 125/125 | val loss 4.35 | train time: 2 s", 4.35, 2.0),
        ("step:125/125 val_loss:4.35 train_time:1000ms step_avg:8ms\r", 4.35, 1.0),
    ],
)
@pytest.mark.parametrize("opening", ["", RULE + "\n"])
def test_older_formats(line, loss, seconds, opening):
    """The oldest logs open with a rule and write the code without a line break of their own."""
    environment = "Running pytorch 2.6.0.dev compiled for CUDA 12.4\nnvidia-smi:"
    log = parse_log(f"{opening}{SCRIPT.decode()}{RULE}\n{environment}\n{RULE}\n{line}\n".encode())
    assert (log.sources, log.environment, log.fault) == ({"train_gpt.py": SCRIPT}, environment, "")
    assert (log.loss, log.seconds) == (loss, seconds)


@pytest.mark.parametrize("line", [
    "step:8/8 ema_val_loss:2.9000 eval_time:7ms", "step:8/8 ema val_loss:2.9000", "step:8/8 best_val_loss:2.8 train_time:80ms",
    "step:8/8 wall time:6322ms, with warm-up", "step 3 had the largest gradient", "s: 3 skipped tokens", "step = 2 time: 9 s",
])  # fmt: skip
def test_what_a_script_writes_beside_the_trainers_lines_is_no_figure(line):
    """A loss of averaged weights, written before the validation's, was the run's; a wall time made steps of another length; a
    remark on step 3 made two runs of one."""
    before, _, after = step_lines().partition("step:8/8 val_loss")
    for lines in (f"{line}\n{step_lines()}", f"{before}{line}\nstep:8/8 val_loss{after}", f"{step_lines()}{line}\n"):
        plain, log = parse_log(make_log()), parse_log(make_log(lines=lines))
        assert (log.validations, log.times, log.total, log.fault) == (plain.validations, plain.times, plain.total, "")
        assert log.problems == [f"lines of steps that are not the trainer's are not read: 1, such as {line!r}"]


def test_older_lines_with_a_training_loss_are_the_trainers():
    """Of the public speedrun's first scripts, which wrote one at each step; a line that an editor has indented is one too."""
    older = re.sub(r"^(step:\d+/8) (train_time)", r"\1 train_loss:4.1234 \2", step_lines(), flags=re.MULTILINE)
    for lines in (older, step_lines().replace("step:4/8 val", " step:4/8 val")):
        plain, log = parse_log(make_log()), parse_log(make_log(lines=lines))
        assert (log.times, log.validations, log.fault, log.problems) == (plain.times, plain.validations, "", [])


def test_a_step_with_two_losses_has_none():
    """Of averaged weights, say, in the trainer's form: the run's may be either. In older logs the first counts, which is told."""
    log = parse_log(make_log(lines=step_lines() + "step:8/8 val_loss:2.9 train_time:80ms step_avg:10.00ms\n"))
    assert log.fault == "step 8 has two validation losses, 3.27 and 2.9: which is the run's cannot be told"
    older = "s:0 tel:9\ns:8 ema_tel:1\ns:8 tel:3.27\ns:8 tel:2.9\n"
    log = parse_log(make_log(lines=older))
    assert log.loss == 3.27 and log.problems[0] == "step 8 has two validation losses, 3.27 and 2.9: the first counts"


def test_other_rules_and_none():
    for rule in ("-" * 80, "*" * 60):
        log = parse_log(make_log().replace(RULE.encode(), rule.encode()))
        assert (log.sources["train_gpt.py"], log.loss, log.fault) == (SCRIPT, 3.27, "")
    log = parse_log(step_lines().encode())
    assert (log.sources, log.loss, log.fault) == ({}, 3.27, "") and "no sources" in log.problems[0]


BANNERS = f"{BANNER}\n# absent.py\n{BANNER}\n"
TRICKS = {
    "a log in a string": f"x = '''\n{make_log().decode()}'''\n",
    "quotes in quotes": f"quotes = '\"\"\"'\nx = '''\n{make_log().decode()}'''\n",
    "quotes in quotes, once": f'quotes = \'"""\'\nx = """\n{BANNERS}"""\n',
    "quotes in a comment": f"# '''\nx = '''\n{BANNERS}'''  # '''\n",
    "an escaped quote": f"x = '''\\'''\n{BANNERS}{make_log().decode()}'''\n",
    "a bracket": f"x = (1\n{BANNERS}- 1)\n",
}


@pytest.mark.parametrize("source", TRICKS.values(), ids=TRICKS)
@pytest.mark.parametrize("name", SOURCES)
def test_lines_of_a_log_within_a_source_do_not_end_it(source, name):
    """A source ends where it parses, not where some count of quotes is even: the first, one between and the last."""
    sources = SOURCES | {name: source.encode()}
    log = parse_log(make_log(sources))
    assert (log.sources, log.fault, log.loss) == (sources, "", 3.27)


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_of_another_version_of_python_ends_outside_of_its_strings(name):
    sources = SOURCES | {name: b"y = = 1\n" + TRICKS["quotes in quotes"].encode()}
    assert parse_log(make_log(sources)).sources == sources


def test_an_idea_that_imports_train_gpt():
    """The script has its own name then, and train_gpt.py is a source like others."""
    sources = {"ideas/idea.py": b"from train_gpt import *\n", "train_gpt.py": SCRIPT, "ideas/__init__.py": b""}
    log = parse_log(make_log(sources))
    assert (log.script, log.modules) == (("ideas/idea.py", sources.pop("ideas/idea.py")), sources)
    assert log.settings["lr"] == "0.5"


def test_nothing_but_whole_sources_is_parsed(monkeypatch):
    """Or large logs would take minutes: a banner in a string is no reason to parse what is before it."""
    parsed, parses = set(), runlog.parses
    monkeypatch.setattr(runlog, "parses", lambda source: parsed.add(source) or parses(source))
    sources = {f"module{i}.py": f"x{i} = 1\ny = '''\n{BANNERS * 20}'''\n".encode() for i in range(20)}
    assert parse_log(make_log(sources)).sources == sources
    assert parsed == set(sources.values())


def test_a_source_of_megabytes_is_read_and_not_parsed(monkeypatch):
    """A log of 6 MB took 5 GB of memory: a tree is 900 times as large as its text."""
    parse, parsed = ast.parse, [0]
    monkeypatch.setattr(ast, "parse", lambda source, *how, **more: parsed.append(len(source)) or parse(source, *how, **more))
    huge = b"x = 1\n" + b"a\n" * (runlog.MAX_SOURCE // 2)
    log = parse_log(make_log({"train_gpt.py": huge}))
    assert log.sources == {"train_gpt.py": huge} and not log.fault
    assert not same_source(huge, huge[:-1]) and analysed(huge) is None and stages(log) == []
    assert max(parsed) <= runlog.MAX_SOURCE
    assert same_source(huge[: runlog.MAX_SOURCE], huge[: runlog.MAX_SOURCE] + b"") and runlog.parses(huge[: runlog.MAX_SOURCE])


@pytest.mark.parametrize("text", [rb"'\'\'\'\'", rb'''"\'\'\'\'"''', rb"""'''\'\'\'""" + b"\\", rb'''"""x"""y"\'''', b"'a\nb'#'", b"\"'''\n'''"])
def test_no_quote_is_looked_at_twice(text):
    """A log of 40 KB whose quotes nothing ends took 5 s, and 25 times that for five times its length."""
    between, at = b"", 0
    for string in runlog.COMMENT_OR_STRING.finditer(text):
        between, at = between + text[at : string.start()], string.end()
    assert at and not {*b"'\"#"} & {*between, *text[at:]}


def test_every_truncation_reads_and_none_invents_a_figure():
    """A log cut at any byte, as a run that still writes it leaves it: never an error, and only whole figures."""
    data = make_log()
    whole = parse_log(data)
    for size in range(len(data)):
        log = parse_log(data[:size])
        assert set(log.validations) <= set(whole.validations) and log.times.items() <= whole.times.items()
        assert log.sources in ({}, whole.sources)
        assert bool(log.fault) == (not log.validations or log.loss != whole.loss)


@settings(max_examples=100)
@given(st.binary(max_size=300), st.integers(0, 10**6), st.booleans())
def test_no_bytes_break_the_parser(junk, where, within):
    log = parse_log(junk)
    assert log.fault or log.validations
    data = make_log()
    where %= len(data)
    parse_log(data[:where] + junk + data[where if within else where + len(junk) :]).recipe_settings  # noqa: B018


@pytest.mark.parametrize(
    "data, fault",
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\0" * 4096, "binary"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "no log"),
        (b"x" * 5_000_000, "no log"),
        (b"=" * 5_000_000, "no log"),
        (b"step:" + b"9" * 5_000_000, "cut short before its first step"),
        (make_log(lines="step:1/9 val_loss:" + "1" * 1_000_000 + "\n"), "wrong loss: 1.11111e+39 at step 1"),
        (make_log()[:30], "cut short within its sources"),
        (make_log(lines="", end=""), "cut short before its first step"),
        (make_log(lines=step_lines(5, total=9)), "cut short at step 5/9"),
        (make_log(lines=step_lines(5, total=9), end="Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA\n"),
         "crashed at step 5/9: torch.OutOfMemoryError"),
        (make_log(lines=step_lines(8, loss=math.nan)), "crashed: the validation loss is nan at step 0"),
        (make_log(lines=step_lines(8, loss=-3.3)), "wrong loss: -2.5 at step 0: a cross-entropy is between 0 and"),
        (make_log(lines=step_lines(8, loss=1e9)), "wrong loss: 1e+09 at step 0: a cross-entropy is between 0 and, of any run"),
        (make_log(lines=step_lines(8) + step_lines(8)), "step 0 comes after step 8: more than one run"),
        (make_log(lines=step_lines(8).replace("step:5/8", "step:4/8 train_time:45ms step_avg:11.25ms\nstep:5/8", 1)),
         "step 4 stands twice: it was made again"),
        (make_log(lines=re.sub("(val_loss:3.27.*time:)200ms", r"\g<1>191ms", step_lines(20))),
         "wrong time: 191 ms at the validation of step 20, which had ended at 200 ms"),
        (make_log(script=TRICKS["a log in a string"].encode()).rpartition(b"# triton")[0], "cut short within its sources"),
        (make_log(lines=step_lines(8).replace("step:5/8", "sample, after a prompt:\na b\nstep:5/8")),
         "cut short at step 4/8: there a sample begins, behind which nothing is read"),
        (make_log(lines=step_lines(8).replace("step:8/8 val", "# ")), "cut short at step 8/8: no validation loss"),
        (make_log(lines=step_lines(8).replace("step:5/8", "a text: \0\nstep:5/8")),
         f"cut short at step 4/8; read up to byte {len(make_log(lines=step_lines(8)).partition(b'step:5/8')[0]) + 8}: there begin NUL bytes"),
    ],
    ids=lambda part: part[:40] if isinstance(part, str) else "log",
)  # fmt: skip
def test_what_is_no_complete_run_is_named(data, fault):
    assert parse_log(data).fault.startswith(fault)


def test_malformed_lines_are_named_with_their_number():
    lines = step_lines().replace("step:3/8 train_time:30ms", "step:3/8 train_time:3oms").replace("step:5/", "step:five/")
    log = parse_log(make_log(lines=lines))
    first = make_log().decode().split("\n").index("step:3/8 train_time:30ms step_avg:10.00ms") + 1
    assert [problem.partition(" train")[0] for problem in log.problems] == [
        f"line {first}: no time in 'step:3/8",
        f"line {first + 3}: no step in 'step:five/8",
    ]
    assert 3 not in log.times and not log.fault


@pytest.mark.parametrize("mark", [",", "_", "'"])
def test_a_number_of_another_country_is_none(mark):
    """A decimal comma made a loss of 3.0 of 3,27, one between thousands 1 s of 1,234,567 ms."""
    lines = re.sub(r"(val_loss:\d)\.", rf"\1{mark}", step_lines())
    log = parse_log(make_log(lines=lines))
    assert log.fault.startswith("cut short at step 8/8: no validation loss") and "no validation loss in" in log.problems[0]
    log = parse_log(make_log(lines=re.sub(r"(train_time:\d+)(\dms)", rf"\1{mark}\2", step_lines())))
    assert {*log.times} <= {0} and "no time in" in log.problems[0] and log.seconds is None


@pytest.mark.parametrize(
    "time, seconds",
    [("8.3 sec", 8.3), ("8.3 seconds", 8.3), ("8.3 (s)", 8.3), ("8300 (ms)", 8.3), ("8.3s", 8.3), ("8300ms", 8.3), ("8300", 8.3),
     ("8.3 min", None), ("2.1 h", None), ("2 hours", None), ("8 300 ms", None), ("8.3min", None), ("1:23", None)],
)  # fmt: skip
def test_a_time_in_other_units_is_none(time, seconds):
    """Minutes were read as milliseconds."""
    log = parse_log(f"step 4/4 | val loss 3.2 | train time {time}\n".encode())
    assert log.seconds == seconds and any("no time" in x for x in log.problems) == (seconds is None), log.problems


def test_unreadable_paths(tmp_path):
    assert read_log(tmp_path).fault == "not a file"
    assert read_log(tmp_path / "absent").fault == "not a file"


def test_a_step_without_a_validation_is_told_as_such(tmp_path):
    """Of a whole run it said "cut short"."""
    (tmp_path / "a.txt").write_bytes(make_log())
    log = read_log(tmp_path / "a.txt")
    assert at_step(log, 4).fault == "" and at_step(log, 5).fault == "not validated at step 5, but at 0, 4, 8"
