"""Sources that train the same run are one kind, and no others; logs of several kinds are refused, not averaged."""

import shutil
from pathlib import Path

import pytest

from made_logs import ENVIRONMENT, make_log, smi_environment, step_lines, write_runs

import kinds
from groups import InputError, folded, gather, gather_all
from kinds import differing, kind, same_source
from runlog import machines, made_with, parse_log, resumed_at, started

SAME = {
    "a comment": ("x = 1\n", "x = 1  # one\n"),
    "layout": ("f(a, b)\n", "f(\n    a,\n    b,\n)\n"),
    "line breaks": ("x = 1\ny = 2\n", "x = 1\r\ny = 2\r\n"),
    "quotes": ("x = 'a'\n", 'x = "a"\n'),
    "a number's writing": ("x = 1000\n", "x = 1_000\n"),
    "a docstring": ("def f():\n    return 1\n", '"""Doc."""\ndef f():\n    """Doc."""\n    return 1\n'),
    "nothing but a docstring": ("class A:\n    pass\n", 'class A:\n    """Doc."""\n'),
    "a string as a comment": ("if x:\n    y = 1\n", 'if x:\n    "why"\n    y = 1\n'),
    "annotations of a function": ("def f(a, *b, c=1, **d):\n    return a\n",
                                  "def f(a: int, *b: int, c: int = 1, **d: str) -> int:\n    return a\n"),
    "annotations of variables": ("x = 1\ndef f():\n    y = 2\n", "x: int = 1\nz: int\ndef f():\n    y: int = 2\n"),
    "a run id": ("run_id = 'a'\n", "run_id = 'b'\n"),
    "a run id in a dataclass": ("class A:\n    run_id: str = 'a'\n", "class A:\n    run_id: str = 'b'\n"),
    "settings of a run's own": ("class A:\n    seed: int = 0\n    run_id: str = 'a'\n    encoding: str = 'a'\n",
                                "class A:\n    seed: int = 1\n    run_id: str = 'b'\n    encoding: str = 'b'\n"),
    "a run id in an f-string": ("run_id = f'a-{uuid()}'\n", "run_id = f'b-{uuid()}'\n"),
    "a seed as an argument": ("args = Settings(seed=0)\n", "args = Settings(seed=1)\n"),
    "an attribute": ("args.seed = 0\n", "args.seed = 1\n"),
}  # fmt: skip
OTHER = {
    "a number": ("x = 1\n", "x = 2\n"),
    "its type": ("x = 1\n", "x = 1.0\n"),
    "a name": ("x = 1\n", "y = 1\n"),
    "an argument": ("f(lr=1)\n", "f(lr=2)\n"),
    "the order": ("f()\ng()\n", "g()\nf()\n"),
    "code that is not used": ("x = 1\n", "import os\nx = 1\n"),
    "a string that is used": ("x = 'a'\n", "x = 'b'\n"),
    "a field": ("class A:\n    x = 1\n", "class A:\n    x: int = 1\n"),
    "a field's type": ("class A:\n    x: int = 1\n", "class A:\n    x: float = 1\n"),
    "an annotation under a decorator": ("@jit\ndef f(n):\n    pass\n", "@jit\ndef f(n: constexpr):\n    pass\n"),
    "an annotation in what is decorated": ("@jit\ndef f():\n    n = 1\n", "@jit\ndef f():\n    n: constexpr = 1\n"),
    "in a function within it": ("@jit\ndef f():\n def g(n): n\n", "@jit\ndef f():\n def g(n: constexpr): n\n"),
    "what is computed for the run id": ("run_id = f'{a}'\n", "run_id = f'{b}'\n"),
    "a seed that is computed": ("seed = f(0)\n", "seed = f(1)\n"),
    "a tuple with a seed": ("seed, x = 0, 1\n", "seed, x = 0, 2\n"),
    "a comparison": ("if seed == 0:\n    x = 1\n", "if seed == 1:\n    x = 1\n"),
    "a setting's name": ("encoding = 'rotary'\n", "encoding = 'none'\n"),
    "a setting's name as an argument": ("Layer(encoding='rotary')\n", "Layer(encoding='none')\n"),
    "a setting's name in another class": ("class A:\n    encoding: str = 'a'\n", "class A:\n    encoding: str = 'b'\n"),
    "a setting's name beside a seed": ("class Noise:\n    seed: int = 0\n    encoding: str = 'a'\n",
                                       "class Noise:\n    seed: int = 0\n    encoding: str = 'b'\n"),
    "a setting's name in a function": ("def f():\n    encoding: str = 'a'\n", "def f():\n    encoding: str = 'b'\n"),
    "what does not parse": ("x = = 1\n", "x = = 1  # one\n"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_cannot_change_a_run_is_the_same_source(name):
    assert same_source(*(text.encode() for text in SAME[name])) and SAME[name][0] != SAME[name][1]


@pytest.mark.parametrize("name", OTHER)
def test_what_can_change_a_run_is_another_source(name):
    assert not same_source(*(text.encode() for text in OTHER[name]))


def test_an_absent_file_is_not_an_empty_one():
    assert same_source(None, None) and not same_source(None, b"") and not same_source(b"", None)


def test_deep_nesting_is_compared_byte_for_byte():
    deep = b"x = " + b"(" * 150 + b"1" + b")" * 150 + b"\n"
    long = b"x = " + b"+".join([b"1"] * 20_000) + b"\n"
    for source in (deep, long, b"\0", "x = '\\ud800'\n".encode()):
        assert kinds.normalised(source) == kinds.normalised(source) != kinds.normalised(source + b"y = 1\n")


# -----------------------------------------------------------------------------
# Kinds


def write(folder, name, environment=ENVIRONMENT, ms=10.0, steps=8, **parts):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(make_log(environment=environment, lines=step_lines(steps, ms), **parts))


RESUMED = (
    "resumed at step 4 from logs/a/4.pt, with {} source{}\nPython 3.12.3 (main)\nPyTorch 2.13.0+cu130, CUDA 13.0, "
    "Triton 3.9.0\nLinux-6.8-x86_64, 8 ranks\nSCRIPT Hyperparameters(lr=0.5, seed=0, run_id='a')"
)
CHANGED = RESUMED.format("changed", ", 2 lines of difference") + "\n--- script before\n+++ script now\n-x = 1\n+x = 2"
MADE_OTHERWISE = {
    "sources": {"script": b"import torch\nx = 2\n"},
    "--lr 0.5 → 0.6": {"environment": ENVIRONMENT.replace("lr=0.5", "lr=0.6")},
    "number of steps 8 → 9": {"steps": 9},
    "PyTorch 2.13.0+cu130 → 2.14.0": {"environment": ENVIRONMENT.replace("2.13.0+cu130", "2.14.0")},
    "ranks 8 → 1": {"environment": ENVIRONMENT.replace("8 ranks", "1 ranks")},
    "GPUs 2 × NVIDIA H100 80GB HBM3 → 1 × NVIDIA H100 80GB HBM3": {
        "environment": ENVIRONMENT.replace("1: _CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9)\n", "")},
    "attention varlen_attn, FA3 → varlen_attn, FA2": {"environment": ENVIRONMENT.replace("FA3", "FA2")},
    "resumption with changed source": {"environment": f"{ENVIRONMENT}\n{CHANGED}"},
    "shards (none) → a_train_0.bin 1a2b3c4d, a_val_0.bin 00000001": {"environment": ENVIRONMENT.replace(
        "SCRIPT", "shards: 'a_val_0.bin' 00000001, 'a_train_0.bin' 1a2b3c4d\nSCRIPT")},
    "read by its sources (none) → LR='2'": {"environment": ENVIRONMENT.replace("attention", "read by its sources: LR='2'\nattention")},
    "--data 'fineweb10B' → 'mine'": {"environment": ENVIRONMENT.replace("lr=0.5", "lr=0.5, data='data/mine'")},
}  # fmt: skip


@pytest.mark.parametrize("what", MADE_OTHERWISE)
def test_runs_made_otherwise_share_no_mean(tmp_path, what):
    """One of four is set aside, by what it differs in; two and two are refused; nothing is decided by names."""
    base = ENVIRONMENT.replace("lr=0.5", "lr=0.5, data='data/fineweb10B'") if "--data" in what else ENVIRONMENT
    for i in range(3):
        write(tmp_path / "runs", f"{i}.txt", base.replace("seed=0", f"seed={i}"), ms=10 + i)
    write(tmp_path / "runs", "a.txt", ms=20, **MADE_OTHERWISE[what])
    group = gather("runs", str(tmp_path / "runs"))
    assert [run.path.name for run in group.runs] == ["0.txt", "1.txt", "2.txt"]
    assert [reason for _, reason in group.aside] == [f"other than most here: {what}"]
    (tmp_path / "runs" / "2.txt").unlink()
    for name in ("0a.txt", "zz.txt"):
        write(tmp_path / "runs", name, ms=30, **MADE_OTHERWISE[what])
        with pytest.raises(InputError, match="2 kinds of runs.*\n  2 runs in .*\n  2 runs in "):
            gather("runs", str(tmp_path / "runs"))
        (tmp_path / "runs" / name).unlink()


def test_a_tie_is_refused_whatever_the_names(tmp_path):
    """Five logs of a baseline and five of an idea in one folder: the one that sorts first is no more meant than the other."""
    write_runs(tmp_path / "all" / "base", [80, 81, 82, 83, 84], [3.27] * 5)
    write_runs(tmp_path / "all" / "idea", [70, 71, 72, 73, 74], [3.27] * 5, script=b"x = 3\n")
    with pytest.raises(InputError) as error:
        gather("all", str(tmp_path / "all"))
    lines = str(error.value).splitlines()
    assert lines[1] == f"  5 runs in {tmp_path / 'all' / 'base'} (0.txt, 1.txt, 2.txt and 2 more)"
    assert lines[2] == f"  5 runs in {tmp_path / 'all' / 'idea'} (0.txt, 1.txt, 2.txt and 2 more): differs in sources"
    assert "folder" in lines[3] and "--any-source" in lines[3]
    (tmp_path / "all" / "idea" / "4.txt").unlink()  # five of nine are more, and yet not what a folder of a record means
    with pytest.raises(InputError, match="2 kinds of runs"):
        gather("all", str(tmp_path / "all"))
    group = gather("all", str(tmp_path / "all"), any_source=True)
    assert len(group.runs) == 9 and group.notes[0].startswith("the runs of all have 2 different sources (--any-source)")


def test_half_is_not_most(tmp_path):
    """Two runs of one kind and one each of two others, or one and one: none is most of them."""
    for i, script in enumerate((b"x = 1\n", b"x = 2\n", b"x = 3\n", b"x = 1\n")):
        write(tmp_path / "runs", f"{i}.txt", script=script, ms=10 + i)
    for count in (3, 2):
        with pytest.raises(InputError, match=f"{count} kinds of runs"):
            gather("runs", str(tmp_path / "runs"))
        for i in (2, 3):
            (tmp_path / "runs" / f"{i}.txt").unlink(missing_ok=True)


def test_a_copy_of_a_log_counts_once(tmp_path):
    """One mean of four values would else be one of five, with a smaller error."""
    for i in range(4):
        write(tmp_path, f"{i}.txt", ms=10 + i)
    shutil.copy(tmp_path / "2.txt", tmp_path / "again.txt")
    group = gather("runs", str(tmp_path))
    assert [run.path.name for run in group.runs] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert [(log.path.name, reason) for log, reason in group.aside] == [("again.txt", f"the same run as {tmp_path / '2.txt'}")]


@pytest.mark.parametrize("edit", ["BOM", "blanks", "blanks of one line", "empty lines"])
def test_so_does_one_that_an_editor_saved(tmp_path, edit):
    for i in range(3):
        write(tmp_path, f"{i}.txt", ms=10 + i)
        log = (tmp_path / f"{i}.txt").read_bytes()
        copy = {
            "BOM": b"\xef\xbb\xbf" + log,
            "blanks": log.replace(b"ms\n", b"ms \n"),
            "blanks of one line": log.replace(b"ms\n", b"ms\t\n", 1),
            "empty lines": log.replace(b"ms\n", b"ms\r\n\r\n", 2),
        }[edit]
        (tmp_path / f"{i} again.txt").write_bytes(copy)
        assert copy != log
    group = gather("runs", str(tmp_path))
    assert len(group.runs) == 3 and all(reason.startswith("the same run as") for _, reason in group.aside)


def test_comments_annotations_and_run_ids_are_one_kind(tmp_path):
    for i, script in enumerate((b"x = 1\nrun_id = 'a'\n", b"x = 1  # one\nrun_id = 'b'\n", b"x: int = 1\nrun_id = 'c'\n")):
        write(tmp_path, f"{i}.txt", script=script, ms=10 + i)
    group = gather("runs", str(tmp_path))
    assert (len(group.runs), group.aside) == (3, [])


def test_settings_of_a_runs_own_make_no_other_kind():
    own = "seed=3, sample_tokens=9, log_dir='x', encoding='bytes', resume='latest', data='/elsewhere/fineweb10B'"
    a = parse_log(make_log(environment=ENVIRONMENT.replace("seed=0", "seed=0, data='data/fineweb10B'")))
    b = parse_log(make_log(environment=ENVIRONMENT.replace("seed=0", own)))
    assert kind(a) == kind(b) and differing(kind(a), kind(b)) == ""
    c, d = (parse_log(make_log(environment=ENVIRONMENT.replace("seed=0", f"seed=0, trace_steps='{x}'"))) for x in ("", "2:5"))
    assert kind(c) == kind(parse_log(make_log()))  # as one from before there was this setting
    assert "trace_steps" in differing(kind(c), kind(d))  # a tracer works while the clock runs
    line = ENVIRONMENT.splitlines()[-1].replace("seed=0", "seed=0, trace_steps='2:5'")
    e = parse_log(make_log(environment=f"{ENVIRONMENT}\nresumed at step 2 from a.pt, with the same source\n{line}"))
    assert e.recipe_settings == d.recipe_settings != c.recipe_settings


# -----------------------------------------------------------------------------
# Which argument a log belongs to


def test_a_log_belongs_to_the_narrowest_argument(tmp_path):
    """compare.py logs logs/idea: the idea is not compared with itself."""
    logs = tmp_path / "logs"
    write_runs(logs, [80, 81, 82], [3.27] * 3)
    write_runs(logs / "idea", [70, 71], [3.27] * 2, script=b"x = 3\n")
    for order in (1, -1):
        groups = gather_all([str(logs), f"{logs}/../logs/idea"][::order])[::order]
        assert [[run.path.name for run in group.runs] for group in groups] == [["0.txt", "1.txt", "2.txt"], ["0.txt", "1.txt"]]
        assert groups[0].notes == [f"2 of 5 logs of {logs} belong to {logs}/../logs/idea, which names fewer: not counted here"]
        assert groups[1].notes == []
    one, rest = gather_all([str(logs / "1.txt"), f"{logs}/*.txt"])
    assert [run.path.name for run in one.runs] == ["1.txt"] and [run.path.name for run in rest.runs] == ["0.txt", "2.txt"]
    with pytest.raises(InputError, match="name it once"):
        gather_all([str(logs / "idea"), f"{logs}/idea/*"])
    with pytest.raises(InputError, match="name it once"):
        gather_all([f"{logs}/[01].txt", f"{logs}/[12].txt"])
    with pytest.raises(InputError, match="nothing is left"):
        gather_all([f"{logs}/[01].txt", f"{logs}/0.txt", f"{logs}/1.txt"])


def test_lists_are_folded():
    items = [(Path(f"logs/{i}.txt"), f"cut short at step {i}/8") for i in range(37)] + [(Path("x.txt"), "empty")]
    assert folded(items) == [
        "logs/0.txt: cut short at step 0/8 (and 36 more like it: 1.txt, 2.txt, 3.txt and 33 more)", "x.txt: empty",
    ]  # fmt: skip
    assert len(folded([(Path("a"), "the same run as b/c.txt"), (Path("d"), "the same run as e")])) == 1


# -----------------------------------------------------------------------------
# What made a run, and where


def test_what_the_log_tells_of_a_machine():
    log = parse_log(make_log(environment=smi_environment()))
    assert machines(log) == [{
        "driver": "570.10", "GPUs": "NVIDIA H100 80GB HBM3, NVIDIA H100 80GB HBM3",
        "GPU ids": "00000000:61:00.0, 00000000:62:00.0",
    }]  # fmt: skip
    assert made_with(log) == {"PyTorch": "2.10.0", "CUDA": "12.6", "Triton": "3.5.0", "GPUs": "2 × NVIDIA H100 80GB HBM3"}
    assert f"{started(log)}" == "2026-01-05 10:00:00"
    own = ENVIRONMENT.replace("major=9)", "major=9, uuid=AB-1, L2_cache_size=50MB)", 1).replace(
        "run_id='a'", "run_id='20260106-070809-ab'"
    )
    log = parse_log(make_log(environment=f"{own}\nhostname: node7, a name"))
    assert machines(log) == [
        {"host": "node7", "kernel": "Linux-6.8-x86_64", "ranks": "8", "GPUs": "NVIDIA H100 80GB HBM3, NVIDIA H100 80GB HBM3"}
    ]
    log = parse_log(make_log(environment=own.replace("major=9)", "major=9, uuid=cd-2)")))
    assert machines(log)[0]["GPU ids"] == "ab-1, cd-2" and f"{started(log)}" == "2026-01-06 07:08:09"
    cpu = parse_log(
        make_log(environment="Python 3\nLinux-6, 2 ranks\ncpu: Intel(R) X, 1 of 2 cores, 1 threads a rank\nSCRIPT S(seed=0)")
    )
    assert machines(cpu) == [{"kernel": "Linux-6", "CPU": "Intel(R) X, 1 of 2 cores, 1 threads a rank", "ranks": "2"}]
    assert started(cpu) is None


def test_a_resumption_is_a_part_of_its_own():
    elsewhere = RESUMED.format("the same", "").replace("2.13.0+cu130", "2.14.0").replace("6.8", "6.9")
    log = parse_log(make_log(environment=f"{ENVIRONMENT}\n{elsewhere}"))
    assert resumed_at(log) == [4] and made_with(log)["PyTorch"] == "2.13.0+cu130 then 2.14.0"
    assert [machine["kernel"] for machine in machines(log)] == ["Linux-6.8-x86_64", "Linux-6.9-x86_64"]
    assert "resumption with changed source" not in made_with(log)
    log = parse_log(make_log(environment=f"{ENVIRONMENT}\n{CHANGED}\n{CHANGED}"))
    assert resumed_at(log) == [4, 4] and made_with(log)["resumption with changed source"].count("+x = 2") == 2
    assert made_with(log)["PyTorch"] == "2.13.0+cu130"
    log = parse_log(make_log(environment=f"{ENVIRONMENT}\n{CHANGED.replace('step 4 ', 'step ' + '9' * 5000 + ' ')}"))
    assert resumed_at(log) == []  # more digits than Python reads: no line of a run's


def test_a_variable_that_a_resumption_forgot_is_another_kind():
    """Its run shared a mean with those that had it all the time."""
    told = ENVIRONMENT.replace("attention", "read by its sources: LR='2'\nattention")
    told_again = RESUMED.format("the same", "").replace("SCRIPT", "read by its sources: LR='2'\nSCRIPT")
    for environment, said in (
        (f"{told}\n{RESUMED.format('the same', '')}", "LR='2' then none"),
        (f"{ENVIRONMENT}\n{told_again}", "none then LR='2'"),
        (f"{told}\n{told_again}", "LR='2'"),
    ):
        assert made_with(parse_log(make_log(environment=environment)))["read by its sources"] == said
