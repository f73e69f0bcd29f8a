"""What compare.py prints, for people at any width and for programs, and how it ends where there is nothing to compare."""

import contextlib
import errno
import io
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

scipy_stats = pytest.importorskip("scipy.stats", reason="pip install -r records/requirements.txt")

from made_logs import ENVIRONMENT, ROOT, SOURCES, make_log, smi_environment, step_lines, write_runs
from rich.console import Console

import changes
import compare
import groups
import rules
import runlog
from runlog import Effort, RunLog, parse_log


@pytest.fixture
def two_groups(tmp_path):
    a = write_runs(tmp_path / "a", [80_000, 81_000, 82_500], [3.2772, 3.2791, 3.2785])
    b = write_runs(tmp_path / "b", [70_000, 71_000, 72_000], [3.2752, 3.2771, 3.2785], script=b"import torch\nx = 2\n",
                   environment=ENVIRONMENT.replace("2.13.0", "2.14.0").replace("lr=0.5", "lr=0.6"))  # fmt: skip
    return a, b


def test_table_diff_and_picture(two_groups, tmp_path, capsys):
    picture = tmp_path / "out.png"
    compare.main([*two_groups, "--source", "--plot", str(picture)])
    out = capsys.readouterr().out
    assert "| a " in out and "| b " in out and "3.27827 | 0.00097" in out and "81.167 | 1.258" in out and "-10.167" in out
    assert "a losses: 3.2772, 3.2791, 3.2785" in out and "b times, s: 70.000, 71.000, 72.000" in out
    assert "b changes: train_gpt.py +1 −1; PyTorch 2.13.0+cu130 → 2.14.0+cu130; --lr 0.5 → 0.6" in out
    assert "\nb ms a step (Δ ± its standard error): all steps 10145.83 → 8875.00, -1270.83 ± 116.00; first third" in out
    assert "\n-x = 1\n+x = 2\n" in out and "\x1b" not in out
    assert "\nb: FASTER by 10.167 s (12.53%), 95% interval " in out
    assert "\n  but: the logs do not tell their machines" in out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def shown(arguments, width):
    """What a terminal of this width shows, without its colours."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    compare.report(groups.gather_all(arguments), 3.28, console)
    return console.file.getvalue()


def test_a_terminal_that_says_it_has_no_columns_is_shown_the_table(two_groups):
    """As by COLUMNS=0 of a shell that is odd: nothing was printed."""
    reader, terminal = os.openpty()
    command = [sys.executable, str(ROOT / "records" / "compare.py"), *two_groups]
    process = subprocess.Popen(command, env={**os.environ, "COLUMNS": "0"}, stdout=terminal, stderr=subprocess.STDOUT)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # its end
        while part := os.read(reader, 1 << 16):
            shown += part
    os.close(reader)
    assert process.wait(60) == 0 and b"FASTER" in shown


def test_a_users_settings_change_neither_table_nor_picture(two_groups, tmp_path):
    """Markdown on a pipe where a shell asks for colours; a picture without LaTeX, to which a name may be no text."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    environment = {**os.environ, "FORCE_COLOR": "1", "MPLCONFIGDIR": str(tmp_path), "MPLBACKEND": "absent"}
    command = [sys.executable, str(ROOT / "records" / "compare.py"), *two_groups, "--plot", str(tmp_path / "a_$b.png")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and "| a " in done.stdout and "\x1b" not in done.stdout
    assert (tmp_path / "a_$b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [80, 95, 130])
def test_every_name_and_figure_is_shown_at_any_width(two_groups, tmp_path, width):
    long = write_runs(tmp_path / "2026-01-31_an_idea_of_some_length", [70_500, 71_500], [3.2752, 3.2771], script=b"x = 3\n")
    out = shown([*two_groups, long], width)
    table = out.partition("a losses")[0]
    figures = ("81.167", "1.258", "-10.167", "3.27827", "0.00097", "-0.00133", "0.043", "3.27615")
    assert all(figure in table for figure in figures) and "…" not in table
    tables = len(re.findall(r"^ a ", table, re.MULTILINE))
    names = "".join(re.findall(r"^ (\S+)(?: |$)", table, re.MULTILINE))
    assert names.count("2026-01-31_an_idea_of_some_length") == tables == (2 if width < 120 else 1)
    assert max(map(len, out.splitlines())) <= width


@pytest.mark.parametrize("width", [12, 20, 31, 40, 47, 52, 53, 54, 66])
def test_a_narrow_terminal_cuts_no_figure(two_groups, tmp_path, width):
    """At 52 columns a p of 4.5e-08 read 4.5e-0."""
    pieces = lambda columns: {*re.split(r"[\s,]+", shown(two_groups, columns).partition("a losses")[0])}
    figures = {text for text in pieces(150) if re.fullmatch(r"[-+]?\d[\d.e-]*", text)}
    assert {"81.167", "-10.167", "3.27827", "0.00097"} < figures and len(figures) > 12 and figures <= pieces(width)


def test_json_is_for_programs(two_groups, tmp_path, capsys):
    single = write_runs(tmp_path / "c", [75_000], [3.27])
    compare.main([*two_groups, single, "--json"])
    a, b, single = json.loads(capsys.readouterr().out)["groups"]
    assert a["times"] == [80, 81, 82.5] and b["losses"] == [3.2752, 3.2771, 3.2785] and a["steps"] == 8
    assert b["time_p"] == pytest.approx(scipy_stats.ttest_ind(a["times"], b["times"], equal_var=False).pvalue)
    assert b["loss_p"] == pytest.approx(scipy_stats.ttest_ind(a["losses"], b["losses"], equal_var=False).pvalue)
    assert b["seeds"] == ["0", "1", "2"] and b["equal_loss"]["over"] == 4 and b["paces"][0]["difference"]["mean"] < 0
    assert single["runs"] == 1 and single["time_sigma"] is None and single["time_p"] is None and single["equal_loss"] is None
    assert {change["what"] for change in b["environment_changes"]} == {"PyTorch", "--lr"}


def test_what_was_set_aside_is_folded(tmp_path, two_groups, capsys):
    for i in range(37):
        (tmp_path / "b" / f"cut{i:02}.txt").write_bytes(make_log(lines=step_lines(1 + i % 7, total=8)))
    compare.main([*two_groups])
    out = capsys.readouterr().out
    assert out.count("set aside: /") == 1 and "(and 36 more like it: cut01.txt, cut02.txt, cut03.txt and 33 more)" in out
    assert "b (3 of 40 logs; set aside: 37 cut short): FASTER" in out


def test_wrong_input_ends_with_a_message(tmp_path, two_groups):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.txt").write_bytes(make_log(lines=step_lines(4, total=8)))
    for argument, said in (
        ("absent", "no such log or folder"),
        ("empty", "no *.txt or *.log"),
        ("cut.txt", "cut short at step 4/8"),
    ):
        with pytest.raises(SystemExit, match=r"compare\.py: error: ") as error:
            compare.main([two_groups[0], str(tmp_path / argument)])
        assert said in error.value.code
    with pytest.raises(SystemExit, match="error: .*nowhere"):
        compare.main([*two_groups, "--plot", str(tmp_path / "nowhere" / "x.png")])


@pytest.mark.parametrize(
    "groups, options, said",
    [
        *((1, [option], f"{option} takes a baseline and") for option in ("--source", "--rules", "--snippet", "--pairs")),
        (1, ["--json", "--pairs"], "--pairs takes a baseline and another group of LOGS: name both"),
        (1, ["--plot=idea.py"], "argument --plot: idea.py: must end in .png or .svg or "),
        *((2, ["--json", "--pairs", option], f"--json goes without {option}") for option in ("--source", "--rules", "--snippet")),
    ],
)
def test_options_that_would_do_nothing_are_refused(two_groups, capsys, groups, options, said):
    with pytest.raises(SystemExit) as exit_:
        compare.main([*two_groups[:groups], *options])
    said_so = capsys.readouterr()
    assert exit_.value.code == 2 and f"compare.py: error: {said}" in said_so.err and not said_so.out


def test_a_full_disk_leaves_the_old_picture(two_groups, tmp_path, monkeypatch):
    picture = tmp_path / "out.png"
    picture.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(SystemExit, match=r"compare\.py: error: .*No space left"):
        compare.main([*two_groups, "--plot", str(picture)])
    assert picture.read_bytes() == b"old" and {path.name for path in tmp_path.iterdir()} == {"a", "b", "out.png"}


def test_a_folder_within_another_and_a_folder_of_both(tmp_path, capsys):
    """`compare.py logs logs/idea` compares the rest with the idea; `compare.py logs` alone has two kinds, and says so."""
    logs = tmp_path / "logs"
    write_runs(logs, [80_000, 81_000], [3.27, 3.28])
    write_runs(logs / "idea", [70_000, 71_000], [3.27, 3.28], script=b"x = 3\n")
    compare.main([str(logs), str(logs / "idea")])
    out = capsys.readouterr().out
    assert f"note: 2 of 4 logs of {logs} belong to {logs / 'idea'}, which names fewer: not counted here" in out
    assert "idea: FASTER by 10.000 s" in out and re.search(r"\| logs +\|    2 \|", out)
    with pytest.raises(SystemExit, match="2 kinds of runs"):
        compare.main([str(logs)])
    compare.main([str(logs), "--any-source"])


def test_hidden_files_are_no_logs(tmp_path):
    """As macOS leaves beside each file on a foreign disk; one that is named is read."""
    write_runs(folder := tmp_path / "runs", [80_000, 81_000], [3.27, 3.28])
    logs = groups.find_logs(f"{folder}")
    (folder / "._seed0.txt").write_bytes(b"\0\5\26\7")
    assert groups.find_logs(f"{folder}") == logs and len(logs) == 2
    assert groups.find_logs(f"{folder}/._seed0.txt") == [folder / "._seed0.txt"]


def test_a_link_to_a_folder_is_followed_once(tmp_path):
    for name in ("idea", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").touch()
    (tmp_path / "idea" / "more").symlink_to("../more")
    (tmp_path / "more" / "back").symlink_to("../idea")
    assert groups.find_logs(f"{tmp_path / 'idea'}") == [tmp_path / "idea" / "idea.txt", tmp_path / "idea" / "more" / "more.txt"]
    assert [log.name for log in groups.find_logs(f"{tmp_path}")] == ["idea.txt", "more.txt"]


def test_a_folder_of_logs_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    (tmp_path / "idea" / "more").mkdir(parents=True)
    scandir = os.scandir

    def refusing(path):
        if f"{path}".endswith("more"):
            raise PermissionError(13, "Permission denied", f"{path}")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(groups.InputError, match="idea/more: cannot be read: Permission denied"):
        groups.find_logs(f"{tmp_path / 'idea'}")


def test_globs_and_names_that_tell_groups_apart(tmp_path, capsys):
    for name in ("x", "y"):
        write_runs(tmp_path / name / "logs", [80, 81], [3.27, 3.28])
    compare.main([str(tmp_path / "x" / "logs"), str(tmp_path / "y" / "*" / "[01].txt")])
    compare.main([str(tmp_path / "x" / "logs"), str(tmp_path / "y" / "logs")])
    out = capsys.readouterr().out
    assert "| *.txt" not in out and "| x/logs |    2" in out and "| y/logs |    2" in out


def test_a_glob_below_a_folder_whose_name_has_brackets(tmp_path, monkeypatch):
    (folder := tmp_path / "bankrun [1]" / "logs").mkdir(parents=True)
    logs = [folder / f"seed{seed}.txt" for seed in range(3)]
    for log in logs:
        log.touch()
    assert groups.find_logs(f"{folder}/*.txt") == logs and groups.find_logs(f"{tmp_path}/bank*/logs/seed[01].txt") == logs[:2]
    monkeypatch.chdir(tmp_path)
    assert groups.find_logs("./bankrun [1]/**/*2.txt") == [Path("bankrun [1]/logs/seed2.txt")]
    with pytest.raises(groups.InputError, match="nothing matches it as a glob"):
        groups.find_logs(f"{folder}/[9].txt")
    (other := tmp_path / "bankrun 1" / "logs").mkdir(parents=True)
    (other / "seed0.txt").touch()
    assert groups.find_logs(f"{folder}/*0.txt") == logs[:1]


def test_pairs(two_groups, capsys):
    compare.main([*two_groups, "--pairs"])
    test = scipy_stats.ttest_rel([70, 71, 72], [80, 81, 82.5])
    assert (
        f"FASTER by 10.167 s (12.53%), 95% interval 9.450 to 10.884 s, p = {test.pvalue:.2g}, in pairs"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_reader_that_leaves_is_no_error(two_groups, options):
    command = [sys.executable, str(ROOT / "records" / "compare.py"), *two_groups, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_the_tools_run_from_any_folder(tmp_path):
    """Also beside other packages of the project's names, as ROS has a launch, whose setup puts it on PYTHONPATH."""
    (tmp_path / "log.txt").write_bytes(make_log())
    for name in ("launch", "runtime", "data"):
        (tmp_path / "path" / name).mkdir(parents=True)
        (tmp_path / "path" / name / "__init__.py").write_text("print('foreign')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}/path"}
    for tool, options, said in (
        ("records/compare.py", ["log.txt"], "log.txt: mean loss below 3.28"),
        ("records/extract.py", ["log.txt", "x y"], "run it: ./run.sh 'x y/train_gpt.py'"),
        ("records/history.py", ["--help"], "--add"),
        ("records/plan.py", ["0.001"], "48 runs of each"),
        ("bench/verdicts.py", ["--help"], "--comparisons"),
    ):
        command = [sys.executable, ROOT / tool, *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
        assert said in done.stdout and "foreign" not in done.stdout


# -----------------------------------------------------------------------------
# Changes


def test_sources_are_compared_by_path():
    before = SOURCES | {"data/loader.py": b"a = 1\nb = 2\n", "runtime/log.py": b"c = 3\n"}
    after = {"ideas/idea.py": b"import torch\nx = 3\n", "data/loader.py": b"a = 1\nb = 3\n", "data/log.py": b"c = 3\n",
             "runtime/__init__.py": b"", "data/shards.py": SOURCES["data/shards.py"],
             "data/__init__.py": b"", "triton_kernels.py": SOURCES["triton_kernels.py"].replace(b"\n", b"\r\n")}  # fmt: skip
    a, b = parse_log(make_log(before), Path("a.txt")), parse_log(make_log(after), Path("b.txt"))
    diffs = dict(changes.source_diffs(a, b))
    assert {name: [line for line in lines if line[0] in "+-"] for name, lines in diffs.items()} == {
        "ideas/idea.py": ["--- a.txt: train_gpt.py", "+++ b.txt: ideas/idea.py", "-x = 1", "+x = 3"],
        "data/loader.py": ["--- a.txt: data/loader.py", "+++ b.txt: data/loader.py", "-b = 2", "+b = 3"],
        "data/log.py": ["--- a.txt: (none)", "+++ b.txt: data/log.py", "+c = 3"],
        "runtime/log.py": ["--- a.txt: runtime/log.py", "+++ b.txt: (none)", "-c = 3"],
        "runtime/__init__.py": ["--- a.txt: (none)", "+++ b.txt: runtime/__init__.py"],
        "triton_kernels.py": ["--- a.txt: triton_kernels.py", "+++ b.txt: triton_kernels.py"],
    }
    said = changes.changed(groups.Group("a", [a]), groups.Group("b", [b]))
    assert said == (
        "b changes: ideas/idea.py +1 −1; data/loader.py +1 −1; data/log.py +1 −0; runtime/__init__.py +0 −0; "
        "runtime/log.py +0 −1; triton_kernels.py +0 −0"
    )


# -----------------------------------------------------------------------------
# The rules, and the public speedrun's README


BASE = """\
from data.loader import batches
from runtime.run import Run
import torch
lr = 1
def mean(x):
    return x / 8
def validate():
    return mean(0)
def prepare(run):
    return warm_up()
def warm_up():
    return run
def step(x):
    return x
def stream(n):
    return batches(n)
PARTS = batches(2)
SIZES = PARTS.sizes
def half(x):
    return SIZES[0]
def train(run):
    model = prepare(run)
    with Run(1) as run:
        run.start_clock()
        for x in stream(x):
            with run.paused(1):
                validate()
            step(x)
"""
SCRIPTS = {
    "base": BASE,
    "idea": BASE.replace("lr = 1", "lr = 2").replace("    return x\n", "    return lr * x\n"),
    "data": BASE.replace("batches(2)", "batches(8)"),
    "skips": BASE.replace("in stream(x)", "in list(stream(x))[7:]"),
    "fewer": BASE.replace("SIZES[0]", "SIZES[0] // 2"),
    "module": BASE.replace("import torch", "import torch\nimport data.loader as other"),
    "pass": BASE.replace("def train", "class GPT:\n    def forward(self, x):\n        return 0.9 * x\ndef train"),
    "loss": BASE.replace("def train", "def head_loss(x):\n    return 0.9 * x\ndef train"),
    "lossless": BASE.replace("validate", "look"),
    "pause": BASE.replace("validate()\n            step", "validate(step)\n            step"),
    "matched": BASE.replace("            step(x)", f"            match run:\n{' ' * 13}case A(clock=c):\n{' ' * 14}step(c, x)"),
    "by name": BASE.replace("            step(x)", "            step(getattr(run, 'cl' + 'ock'), x)"),
    "got": BASE.replace("            step(x)", "            step(operator.attrgetter('clock')(run), x)"),
    "stopped": BASE.replace("            step(x)", "            run.clock.stop()\n            step(x)\n            run.clock.start()"),
    "before": BASE.replace("        run.start_clock()", "        step(0)\n        run.start_clock()"),
    "validation": BASE.replace("x / 8", "x / 16"),
    "warm-up": BASE.replace("return run", "return step(run)"),
    "run": BASE.replace("def train", "class Own(Run):\n    pass\ndef train").replace("Run(1)", "Own(1)"),
    "other run": BASE.replace("Run(1)", "Other(1)"),
    "patch": BASE.replace("lr = 1", "import time\ntime.perf_counter = step"),
    "patch in a step": BASE.replace("def step(x):", "def step(x):\n    torch.__dict__['x'] = 1"),
    "patch in a list": BASE.replace("def step(x):", "def step(x):\n    [0 for torch.x in [int]]"),
    "mock patch": BASE.replace("def step(x):", "def step(x):\n    from unittest import mock\n    mock.patch('data.x', 1).start()"),
    "referrers": BASE.replace("def step(x):", "def step(x):\n    import gc\n    gc.get_referrers(torch.ones)[0].update(x=1)"),
    "by modules": BASE.replace("def step(x):", "def step(x):\n    [0 for x in [sys.modules['data'].x]]"),
    "hidden patch": BASE.replace("lr = 1", "setattr(torch, 'x', 1)"),
    "flag": BASE.replace("lr = 1", "torch._inductor.config.max_autotune = True"),
    "mode": BASE.replace("lr = 1", "model.compile(fullgraph=True, mode='max-autotune')"),
    "decorated": BASE.replace("def mean", "@torch.compile\ndef mean"),
    "renamed": BASE.replace("import torch", "import torch\nfrom torch import compile as build"),
    "hidden": BASE.replace("lr = 1", "setattr(torch, name, 1)"),
    "option": BASE.replace("lr = 1", "if h.compile:\n    packages = {'functorch'}"),
    "pattern": BASE.replace("lr = 1", "words = re.compile('a')"),
}
OUTSIDE = {
    "bound again": "def easy(n):\n    return [1]\nstream = easy",
    "imported again": "from own import stream",
    "in a branch": "if lr:\n    def warm_up():\n        return step(run)",
    "in a dictionary": "globals()['warm_up'] = step",
    "swapped": "prepare, before = (lambda run: before(run) or 1), prepare",
    "loaded": "MADE = torch.load('made.pt')",
    "made": "def make():\n    return 1\nMADE = make()",
    "default": "def more(made=torch.load('made.pt')):\n    pass",
    "in a class": "class More:\n    made = torch.load('made.pt')",
    "a loop's": "import time\nfor time.perf_counter in [int]:\n    pass",
    "a block's": "import time\nwith open('x') as time.perf_counter:\n    pass",
    "updated": "import time\ntime.__dict__.update(perf_counter=int)",
    "set": "import time\nobject.__setattr__(time, 'perf_counter', int)",
    "a list's": "import time\n[0 for time.perf_counter in [int]]",
    "twice": "def validate():\n    return 3",
}
SCRIPTS |= {name: BASE.replace("def train", f"{text}\ndef train") for name, text in OUTSIDE.items()}
SCRIPTS["longer"] = BASE.replace("lr = 1\n", "lr = 1\nfrom faster import longer\n").replace("def train", "warm_up = longer\ndef train")
ROWS = "class Row:\n    size: int = 1\nROWS = {'a': Row(2), 'b': (Row(3),)}"
SCRIPTS["tables"] = BASE.replace("def train", f"{ROWS}\ndef train")
HERE = ENVIRONMENT.replace("=9)", "=9, uuid=a)").replace("1: _Cuda", "host: node0\n1: _Cuda")
SHARDS = "shards: 'd_train_0.bin' 0000000a, 'd_train_1.bin' 0000000b, 'd_val_0.bin' 0000000c"
TOLD = HERE.replace("SCRIPT ", f"{SHARDS}\nSCRIPT ").replace("lr=0.5", "lr=0.5, val_tokens=8")
CHANGED = (
    f"{TOLD}\nresumed at step 4 from a.pt, with changed source, 2 lines of difference\n{TOLD}\n"
    "--- train_gpt.py, before\n+++ train_gpt.py, now\n@@ -1 +1 @@\n-x = 1\n+x = 2"
)
ON_OTHER_TERMS = (
    f"{TOLD}\nresumed at step 4 from a.pt, with the same source\n"
    + TOLD.replace("attention:", "variables: TORCHINDUCTOR_MAX_AUTOTUNE='1'\nattention:")
)
SET_ALONE = TOLD.replace("attention:", "variables: TORCHINDUCTOR_FX='1'\nattention:")
SET_BEFORE = f"{SET_ALONE}\nresumed at step 4 from a.pt, with the same source\n" + SET_ALONE.replace(
    "TORCHINDUCTOR", "NCCL_DEBUG='INFO', TORCHINDUCTOR"
)
MODULES = {"data/loader.py": b"a = 1\n", "runtime/log.py": b"c = 3\n"}


def rule_marks(
    tmp_path, name, capsys, times=(70_000, 70_500, 71_000), modules=MODULES, base_modules=MODULES, environment=TOLD,
    base_environment=TOLD,
):  # fmt: skip
    losses = [3.2752, 3.2751, 3.2755]
    folders = []
    for script, times, files, text in (
        ("base", [80_000, 80_400, 80_200], base_modules, base_environment),
        (name, times, modules, environment),
    ):
        sources = {"train_gpt.py": SCRIPTS[script].encode(), **files}
        folders.append(write_runs(tmp_path / f"{len(folders)}", times, losses, sources=sources, environment=text))
    compare.main([*folders, "--rules"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- [")]
    return "".join(line[3] for line in lines), lines


def test_the_rules_are_filled_in_with_what_logs_prove(tmp_path, capsys):
    marks, lines = rule_marks(tmp_path, "idea", capsys)
    assert marks == "xxxxxxx x" and lines[1].startswith("- [x] Mean loss below 3.28 at p < 0.01: 3.27527, p = ")
    assert len(lines) == 9 and "logs cannot tell of others" in lines[-2]


@pytest.mark.parametrize(
    "rule, mark, options",
    [
        (0, " ", {"name": "data"}),
        (0, " ", {"name": "skips"}),
        (0, " ", {"modules": {**MODULES, "helper.py": b"import data.loader\ndata.loader.batches = list\n"}}),
        (0, " ", {"modules": {**MODULES, "helper.py": b"import data.loader\ndef f():\n    data.loader.batches = list\n"}}),
        (0, "x", {"modules": {**MODULES, "helper.py": b"import torch\nx = 1\ndef f():\n    return torch.zeros(1)\n"}}),
        (0, " ", {"modules": {**MODULES, "helper.py": b"import torch\nx = torch.zeros(1)\n"}}),
        (2, " ", {"modules": {**MODULES, "helper.py": b"from runtime.log import Clock\nClock.read = int\n"}}),
        (2, " ", {"modules": {**MODULES, "attention.py": b"import time\ntime.perf_counter = int\n"}}),
        (2, "x", {"modules": {**MODULES, "attention.py": b"import time\nx = lambda: 1\n"}}),
        *((rule, " ", {"name": name}) for rule in (0, 2) for name in OUTSIDE),
        (2, " ", {"name": "longer", "modules": {**MODULES, "faster.py": b"def longer(): pass\n"}}),
        *((rule, "x", {"name": "tables"}) for rule in (0, 2)),
        *((rule, " ", {"name": name}) for rule in (0, 2) for name in ("patch in a list", "mock patch", "referrers", "by modules")),
        (0, " ", {"name": "fewer"}),
        (0, " ", {"name": "module"}),
        (0, "!", {"modules": MODULES | {"data/loader.py": b"a = 2\n"}}),
        (0, "x", {"modules": MODULES | {"data/loader.py": b"a = 1  # one\n"}}),
        (0, " ", {"modules": {}, "base_modules": {}}),
        (0, " ", {"environment": TOLD.replace(f"{SHARDS}\n", "")}),
        (0, " ", {"base_environment": TOLD.replace(f"{SHARDS}\n", "")}),
        (0, "!", {"environment": TOLD.replace("0000000c", "0000000d")}),
        (0, "!", {"environment": TOLD.replace("0000000a", "?").replace("0000000b", "0000000a").replace("?", "0000000b")}),
        (0, "x", {"environment": TOLD.replace("'d_train_1.bin' 0000000b, ", "")}),
        (0, "!", {"environment": TOLD.replace("val_tokens=8", "val_tokens=16")}),
        (0, " ", {"environment": CHANGED}),
        (0, " ", {"base_environment": CHANGED}),
        (2, " ", {"environment": CHANGED}),
        (3, " ", {"environment": CHANGED}),
        (4, " ", {"environment": CHANGED}),
        *((8, " ", {"name": name}) for name in ("pass", "loss", "lossless")),
        (8, " ", {"modules": {**MODULES, "own.py": b"def cross_entropy(x):\n    return x\n"}}),
        (8, " ", {"environment": CHANGED}),
        (8, "!", {"environment": TOLD.replace("val_tokens=8", "val_tokens=16")}),
        *(
            (8, mark, {"environment": TOLD.replace("=8", "=8, val_batch_tokens=8, micro_batches=1"), "base_environment": before})
            for mark, batch in (("x", 16), (" ", 8))
            for before in (TOLD.replace("=8", f"=8, val_batch_tokens={batch}, micro_batches=2"),)
        ),
        (2, " ", {"name": "pause"}),
        (2, " ", {"name": "run"}),
        (2, " ", {"name": "other run"}),
        (2, " ", {"name": "patch"}),
        (2, " ", {"name": "hidden patch"}),
        (0, " ", {"name": "patch"}),
        *((rule, " ", {"name": "patch in a step"}) for rule in (0, 2)),
        *((2, " ", {"name": name}) for name in ("stopped", "matched", "by name", "got")),
        (2, " ", {"name": "before"}),
        (2, " ", {"name": "validation"}),
        (2, " ", {"name": "warm-up"}),
        (2, "!", {"modules": MODULES | {"runtime/log.py": b"c = 4\n"}}),
        (3, "!", {"name": "flag"}),
        (3, "!", {"name": "mode"}),
        (3, "!", {"name": "decorated"}),
        (3, " ", {"name": "renamed"}),
        (3, " ", {"name": "hidden"}),
        (3, " ", {"name": "option"}),
        (3, "x", {"name": "pattern"}),
        (3, "!", {"environment": ON_OTHER_TERMS}),
        (3, "!", {"environment": TOLD.replace("attention:", "variables: TORCHINDUCTOR_MAX_AUTOTUNE='1'\nattention:")}),
        (3, "!", {"environment": TOLD.replace("attention:", "variables: TORCHDYNAMO_VERBOSE='1'\nattention:")}),
        (3, "x", {"environment": SET_BEFORE, "base_environment": SET_ALONE}),
        (3, "x", {"environment": TOLD.replace("attention:", "variables: NCCL_DEBUG='INFO'\nattention:")}),
        (5, "!", {"times": (90_000, 90_500, 91_000)}),
        (5, "!", {"environment": TOLD.replace("6.8", "6.9")}),
        (6, "!", {"environment": TOLD.replace("seed=0", "seed= 0")}),
        (6, " ", {"environment": TOLD.replace("seed=0", "x=0")}),
    ],
)
def test_what_is_not_proven_or_broken_is_marked(tmp_path, capsys, rule, mark, options):
    marks, lines = rule_marks(tmp_path, **{"name": "idea", "capsys": capsys, **options})
    assert marks[rule] == mark, lines[rule]


def test_what_any_run_was_made_with_is_told(tmp_path, capsys):
    """Also of a run that is not its group's first, and of what held from a resumption on."""
    set_at_start = ON_OTHER_TERMS.partition("source\n")[2]
    for environment, told in ((ON_OTHER_TERMS, "none then "), (set_at_start, "")):
        folders = []
        for name, time, of_run in (("a", 80_000, TOLD), ("b", 70_000, TOLD), ("c", 70_000, environment)):
            times, losses = [time, time + 400, time + 200], [3.2752, 3.2751, 3.2755]
            folders.append(write_runs(tmp_path / f"{len(told)}" / name, times, losses, environment=of_run))
        os.replace(f"{folders.pop()}/2.txt", f"{folders[1]}/2.txt")
        compare.main([*folders, "--rules"])
        out = capsys.readouterr().out
        assert "note: the runs of b differ in variables\n" in out
        assert f"b changes: variables (none) → (none) or {told}TORCHINDUCTOR_MAX_AUTOTUNE='1'\n" in out
        assert "- [!] No extra compiler flags: not in the baseline: TORCHINDUCTOR_MAX_AUTOTUNE='1'\n" in out


def test_a_machine_that_no_log_tells_is_not_proven_to_be_one(tmp_path, capsys):
    """Nor is one of pairs, which are each of one machine."""
    unknown = TOLD.replace("host: node0\n", "").replace(", uuid=a", "")
    marks, lines = rule_marks(tmp_path / "unknown", "idea", capsys, environment=unknown, base_environment=unknown)
    assert marks[5] == " " and lines[5].endswith("; the logs do not tell their machines")
    folders = [write_runs(tmp_path / name, times, [3.2752, 3.2751, 3.2755], environment=TOLD)
               for name, times in (("a", [80_000, 81_000, 82_000]), ("b", [70_000, 70_900, 72_100]))]  # fmt: skip
    for log in tmp_path.glob("[ab]/1.txt"):
        log.write_bytes(log.read_bytes().replace(b"host: node0", b"host: node1"))
    compare.main([*folders, "--rules", "--snippet", "--pairs"])
    out = capsys.readouterr().out
    assert "\n- [x] Faster than the baseline at p < 0.01, each pair on one machine: " in out and "]  # each pair on one machine" in out


def test_sources_that_would_take_minutes_are_compared_without_pairing_line_with_line():
    before, after = [f"{i}" for i in range(9)], ["0", "1", "2", "x", "4", "y", "z", "7", "8"]
    whole, cut = (changes.line_diff(before, after, "a", "b", effort=Effort(most)) for most in (10**6, 0))
    assert cut == ["--- a", "+++ b", "@@ -4,4 +4,4 @@ too long to be compared line by line", *"-3 -4 -5 -6 +x +4 +y +z".split()]
    assert whole[:2] == cut[:2] and {line for line in whole[3:] if line[0] != " "} < {*cut}
    for a, b in ((before, before * 2), (before * 2, before), (before, before + before[-1:])):
        _, _, ranges, *lines = changes.line_diff(a, b, "a", "b", effort=Effort(0))
        assert len(lines) == abs(len(a) - len(b)) and {line[0] for line in lines} == {"+" if len(b) > len(a) else "-"}, ranges


def test_sources_whose_lines_stand_again_and_again_are_compared_in_seconds(monkeypatch):
    """Four minutes for two logs of 58 KB, and again for each further file: a match of one line at a time, each looked for anew."""
    before = [f"x{i % 55}=0" for i in range(1998)]
    after = [f"{name}{i % 55}=0" for i in range(999) for name in "xy"]
    whole = Effort(10**9)
    changes.line_diff(before[:500], after[:500], "a", "b", effort=whole)
    for most, lines, cut in ((10**6, 1998, [True, True]), (10**9 - whole.left, 500, [False, True]), (10**9, 500, [False, False])):
        monkeypatch.setattr(changes, "MOST_PAIRS", most)
        sides = ["\n".join(side[:lines]).encode() for side in (before, after)]
        logs = [RunLog(Path("log"), sources={"script.py": b"", "a.py": side, "b.py": side}) for side in sides]
        diffs = changes.source_diffs(*logs)
        assert [diff[2].endswith("too long to be compared line by line") for _, diff in diffs] == cut


def test_a_log_of_many_sources_is_compared_in_proportion_to_their_number(monkeypatch):
    """Minutes for 50,000: each name built the dict of all."""
    logs = [RunLog(Path("log"), sources={f"{i}.py": b"" for i in range(3000)}) for _ in range(2)]
    assert len(changes.source_pairs(*logs)) == 3000
    built = []
    monkeypatch.setattr(runlog, "islice", lambda *of: built.append(of) or itertools.islice(*of))
    changes.source_pairs(*[replace(log) for log in logs])
    assert len(built) == 2


def test_no_picture_takes_the_place_of_a_log(tmp_path):
    (log := tmp_path / "log.png").write_bytes(make_log())
    (tmp_path / "link.png").symlink_to(log)
    for path in (log, tmp_path / "link.png"):
        with pytest.raises(SystemExit, match="is one of the logs: name another file"):
            compare.main([str(log), f"--plot={path}"])
    assert log.read_bytes() == make_log()


def test_the_rule_of_the_clock_names_what_to_read(tmp_path, capsys):
    _, lines = rule_marks(tmp_path, "stopped", capsys)
    assert lines[2].endswith("what runs while the clock stands is not: read the diff of the loop")
    _, lines = rule_marks(tmp_path / "two", "validation", capsys)
    assert lines[2].endswith("read the diff of mean")


def test_runs_that_went_on_with_changed_source_say_so(tmp_path, capsys):
    folders = [write_runs(tmp_path / name, [80_000, 80_400], [3.27, 3.28], environment=environment)
               for name, environment in (("a", TOLD), ("b", CHANGED))]  # fmt: skip
    compare.main([*folders, "--source"])
    out = capsys.readouterr().out
    assert "b changes: resumed with changed source, 2 lines of difference" in out
    assert "2 runs of b went on with changed source: the first steps are not its own" in out
    assert f"{folders[1]}/0.txt: resumed with changed source\n--- train_gpt.py, before\n" in out and "\n+x = 2\n" in out
    compare.main(folders[::-1])
    assert "a changes: b was resumed with changed source, 2 lines of difference" in capsys.readouterr().out
    for at in (8, 4):  # all steps up to 4 were the first source's
        compare.main([*folders, f"--at={at}"])
        assert ("went on with changed source" in capsys.readouterr().out) == (at == 8)


def test_the_snippet_runs_and_prints_its_own_comments(two_groups, capsys):
    compare.main([*two_groups, "--snippet"])
    out = capsys.readouterr().out
    code = out.partition("```python\n")[2].partition("```")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    expected = re.findall(r'print\("(.*?):".*#(.*)', code)
    assert printed.getvalue().splitlines() == [f"{what}:{value}" for what, value in expected] and len(expected) == 5
    assert "| <number> | 1.183 minutes | <description> |" in out and "losses = [3.2752, 3.2771, 3.2785]" in code


@pytest.mark.parametrize("code", ["import os", "[x] 9. p"])
@pytest.mark.parametrize("line_break", ["\n", "\r", "\x0c"])
@pytest.mark.parametrize("names", [runlog.CUDA_DEVICE, re.compile("Properties\\(name='([^']+)'(?:uuid=([\\w-]+))?")], ids=["now", "then"])
def test_a_logs_text_adds_no_line_to_what_is_pasted_and_run(tmp_path, capsys, monkeypatch, code, line_break, names):
    """A GPU's name with a line break in it was code of --snippet, and a rule of --rules. then: by what was taken for a name."""
    monkeypatch.setattr(runlog, "CUDA_DEVICE", names)
    odd = f"B{line_break}{code}#"
    folders = [
        write_runs(tmp_path / name, times, [3.2752, 3.2771, 3.2785], environment=ENVIRONMENT.replace("NVIDIA H100 80GB HBM3", gpu))
        for name, times, gpu in (("a", [80_000, 81_000, 82_500], "A"), ("b", [70_000, 71_000, 72_000], odd))
    ]
    compare.main([*folders, "--snippet", "--rules"])
    out = capsys.readouterr().out
    pasted = out.partition("```python\n")[2].partition("```")[0]
    assert [line.partition(" ")[0] for line in pasted.splitlines()[:5]] == ["import", "", "losses", "times", "baseline_times"]
    assert not re.search(r"^\s*(import os|\[x\] 9)", out, re.MULTILINE)


NO_PYTHON = "\nx = = 1\n"  # as what a later one reads
TOO_LONG = "\nLONG = (" + " +\n".join(['"a"'] * 400) + ")\n"
TOO_DEEP = "\ndef forward(x):\n    if x: pass\n" + "".join(f"    elif x == {i}: return\n" for i in range(300))


@pytest.mark.parametrize("text", [NO_PYTHON, TOO_LONG, TOO_DEEP], ids=["no Python", "too long", "too deep"])
@pytest.mark.parametrize("both", [True, False])
def test_of_a_source_that_this_python_cannot_read_nothing_is_proven(tmp_path, capsys, monkeypatch, text, both):
    """It was taken for empty, and so for the baseline's; or ended the tool."""
    monkeypatch.setitem(SCRIPTS, "idea", SCRIPTS["idea"] + text)
    monkeypatch.setitem(SCRIPTS, "base", SCRIPTS["base"] + text * both)
    marks, lines = rule_marks(tmp_path, "idea", capsys)
    assert marks == " x  xxx  " and all("cannot read train_gpt.py: read it yourself" in lines[i] for i in (0, 2, 3, 8))
    flag = TOLD.replace("attention:", "variables: TORCHINDUCTOR_FX='1'\nattention:")
    assert rule_marks(tmp_path / "flag", "idea", capsys, environment=flag)[0][3] == "!"


@pytest.mark.parametrize("mixed", ["a", "b"])
def test_each_source_of_a_group_counts_for_the_rules(tmp_path, capsys, mixed):
    """With --any-source the first run's proved them."""
    folders, sources = [], {"train_gpt.py": BASE.encode(), **MODULES}
    for name, times in (("a", [80_000, 80_400, 80_200]), ("b", [70_000, 70_500, 71_000])):
        folders.append(write_runs(tmp_path / name, times, [3.2752, 3.2751, 3.2755], sources=sources, environment=TOLD))
    log = tmp_path / mixed / "1.txt"
    log.write_bytes(log.read_bytes().replace(b"x / 8", b"x / 9").replace(b"def step", b"def losses(x):\n    pass\ndef step"))
    compare.main([*folders, "--any-source", "--rules"])
    out = capsys.readouterr().out
    assert "b changes (sources: of the first runs): nothing: the same sources, settings and environment\n" in out
    which = {"a": "0.txt against 1.txt", "b": "1.txt against 0.txt"}[mixed]
    assert f"- [ ] Time is training alone, by the same clock: {which}: runtime/*.py are" in out
    assert f"- [ ] The validation loss is computed as the baseline's: {which}: read the diff of losses\n" in out


def test_rules_without_sources_are_left_open():
    bare, whole = parse_log(step_lines().encode()), parse_log(make_log())
    for check in (rules.data_stream, rules.clock):
        assert check(whole, bare) == (rules.OPEN, "logs hold no sources")
    assert rules.compiler_flags(groups.Group("a", [whole]), groups.Group("b", [bare]))[0] == rules.OPEN
    assert rules.sources(groups.Group("bare", [bare]))[0] == rules.BROKEN


def test_logs_of_the_public_speedrun_on_two_machines(tmp_path, capsys):
    """Byte-identical sources, two nodes: not "slower", and a loss all the same."""
    a = write_runs(tmp_path / "a", [100_000, 100_100, 100_050], [3.277, 3.278, 3.2775], environment=smi_environment())
    b = write_runs(tmp_path / "b", [101_200, 101_300, 101_250], [3.276, 3.279, 3.2772], environment=smi_environment("560.2"))
    compare.main([a, b])
    out = capsys.readouterr().out
    assert "b: times not comparable: different machines (driver 570.10 and 560.2);\n  not shown to have another loss: " in out
    assert re.search(r"\| b +\|    3 \|     8 \| 101.250 \| 0.050 \|   \|   \| 3.27740 ", out)
