"""Hostile and damaged logs, names and options: the tools in records/ name them, and show nothing but text."""

import importlib
import io
import itertools
import os
import re
import signal
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import run_fresh

sys.path.append(str(Path(__file__).resolve().parents[1] / "records"))
pytest.importorskip("scipy", reason="pip install -r records/requirements.txt")
pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")
pytest.importorskip("rich", reason="pip install -r records/requirements.txt")

from made_logs import (
    BANNER, ENVIRONMENT, ROOT, RULE, SOURCES, make_log, records_folder, smi_environment, step_lines, write_runs,
)  # fmt: skip

import compare
import extract
import history
import plot
import race
import runlog
import tool
from launch import environment
from runlog import at_step, parse_log

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\r"
SHOWN = "\x1b\x07\x9b\u202e\r"  # none of these, ever


def command(tool_name, *arguments, **how):
    """A tool in a process of its own."""
    how = {"capture_output": True, "timeout": 120, "check": False} | how
    return subprocess.run([sys.executable, str(ROOT / "records" / tool_name), *map(str, arguments)], **how)


@pytest.fixture
def root(tmp_path, monkeypatch):
    return records_folder(tmp_path, monkeypatch)


def add(root, name, *logs, **more):
    """history.py --add."""
    given = {"description": "what it does", "contributors": "Ann", "date": "2026-01-01"} | more
    options = [f"--{option.replace('_', '-')}{'=' if value else ''}{value}" for option, value in given.items()]
    history.main(["--add", name, *map(str, logs), *options], root)


# -----------------------------------------------------------------------------
# What is shown


def hostile_log():
    """Escapes wherever a log's text is shown: settings, facts, a source's name and text, a bad line, an error."""
    settings = ENVIRONMENT.replace("lr=0.5", "lr='\\x1b[31m'").replace("varlen_attn", f"varlen{ESCAPES[:-1]}:smile:")
    sources = SOURCES | {"train_gpt.py": b"x = 2\n", f"e{ESCAPES[:-1]}.py": f"y = '{ESCAPES[:-1]}'\n".encode()}
    return make_log(sources, environment=settings, lines=f"step:{ESCAPES}:smile:\n" + step_lines())


def test_no_log_writes_to_the_terminal_but_text(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(make_log())
    (tmp_path / f"b{ESCAPES}[bold]:smile:\nb: FASTER.txt").write_bytes(hostile_log())
    (tmp_path / "cut.txt").write_bytes(make_log(lines=step_lines(3, total=8), end=f"RuntimeError: {ESCAPES}\n"))
    paths = sorted(map(str, tmp_path.iterdir()))
    compare.main([*paths[:2], "--source", "--rules", "--snippet"])
    out = capsys.readouterr().out
    assert not set(SHOWN) & set(out)
    assert r"\x1b[2J" in out and ":smile:" in out and "[bold]" in out and r"\u202e" in out
    assert "\nb: FASTER.txt" not in out and r"\nb: FASTER.txt" in out  # nor a line of its own


def test_nor_does_a_message(tmp_path):
    (tmp_path / "cut.txt").write_bytes(make_log(lines=step_lines(3, total=8), end=f"RuntimeError: {ESCAPES}\n"))
    for name, arguments in (
        ("compare.py", [tmp_path / "cut.txt"]),
        ("compare.py", [tmp_path / f"absent{ESCAPES}"]),
        ("extract.py", [tmp_path / f"absent{ESCAPES}", tmp_path / "x"]),
    ):
        done = command(name, *arguments, text=True, encoding="utf-8")
        assert done.returncode == 1 and done.stderr.startswith(f"{name}: error: "), done.stderr
        assert r"\x1b[2J" in done.stderr and not set(SHOWN) & set(done.stderr.replace("\r\n", "\n"))


@pytest.mark.parametrize("name, arguments", [("race.py", ["x{}", "y", "1"]), ("plan.py", ["1", "--no{}"]), ("history.py", ["--no{}"])])
def test_nor_does_a_refusal_of_options(name, arguments):
    done = command(name, *(x.format(ESCAPES) for x in arguments), text=True, encoding="utf-8")
    assert done.returncode == 2 and f"\n{name}: error: " in done.stderr
    assert r"\x1b[2J" in done.stderr and not set(SHOWN) & set(done.stderr)


def test_nor_does_the_name_of_the_folder_that_was_written(tmp_path, capsys):
    (tmp_path / "log.txt").write_bytes(make_log())
    extract.main([str(tmp_path / "log.txt"), str(tmp_path / "again\x1b[2J")])
    assert r"run it: ./run.sh" in (out := capsys.readouterr().out) and r"\x1b[2J" in out and not set(SHOWN) & set(out)


HTML = "<script>alert(1)</script> <!-- record ends --> <!-- history ends --> ``` | `code` &lt;"


def test_neither_log_nor_description_writes_html_or_marks_into_a_page(tmp_path, root):
    runs = tmp_path / "runs"
    write_runs(runs, [80_000, 81_000], [3.27, 3.28])
    problem = f"step:{HTML}\n```\n{history.PAGE_END}\n{history.END}\n"
    (runs / "0.txt").write_bytes(make_log(lines=problem + step_lines(8, 10_000.0, 3.27)))
    (runs / "9.txt").write_bytes(make_log(lines=step_lines(3, total=8), end=f"RuntimeError: {HTML}\n"))
    (runs / "````.txt").write_bytes(make_log(lines=step_lines(3, total=8)))
    add(root, "1_A", runs, description=f"first {HTML}", contributors=f"Ann {HTML}, [Bob](https://b.example)", keep_aside="")
    text, table = (path.read_text() for path in (root / "1_A" / "README.md", root / "README.md"))
    history.main(["--check"], root)
    history.main([], root)
    assert (text, table) == ((root / "1_A" / "README.md").read_text(), (root / "README.md").read_text())
    outside = re.sub(r"^(`{3,})\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    for page, marks in ((outside, (history.PAGE_BEGIN, history.PAGE_END)), (table, (history.BEGIN, history.END))):
        assert all(page.count(mark) == 1 for mark in marks) and "<script" not in page
        assert page.replace("p(<3.28)", "").count("<") == page.count("<!--") == 2
        assert "&lt;script&gt;" in page and r"\`\`\`" in page and "[Bob](https://b.example)" in page
    assert "9.txt: crashed at step 3/8: RuntimeError: <script>" in text and "`````" in text
    assert re.search(r"^\| \[1\]", table, re.MULTILINE) and table.count("\n| ") == 2


def test_dollars_underscores_and_undecodable_names_are_drawn(tmp_path, capsys):
    names = ["$x^2", "_under", "a" * 80, os.fsdecode(b"\xff\xfe"), ":smile:"]
    folders = [write_runs(tmp_path / name, [80, 81], [3.27, 3.28 + i / 1000]) for i, name in enumerate(names)]
    compare.main([*folders, "--plot", str(tmp_path / "out.png")])
    out = capsys.readouterr().out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "| $x^2 " in out and "| :smile: " in out and r"\udcff\udcfe losses: 3.27" in out
    assert plot.label("a$b") == r"a\$b" and len(plot.label("a" * 80)) == plot.LONGEST


def test_a_record_of_undecodable_names_and_spaces_has_links_that_lead_to_its_logs(tmp_path, root):
    runs = tmp_path / "runs"
    write_runs(runs, [80_000, 81_000], [3.27, 3.28])
    for i, name in enumerate((os.fsdecode(b"a \xff(1).txt"), "b $(touch x).txt")):
        (runs / f"{i}.txt").rename(runs / name)
    add(root, "1_A", runs)
    assert "[log](1_A/a%20%FF%281%29.txt)" in (root / "README.md").read_text()
    page = (root / "1_A" / "README.md").read_text(encoding="utf-8")
    assert "python records/extract.py 'records/1_A/a " in page
    history.main(["--check"], root)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_an_encoding_lacks_is_an_escape(tmp_path, encoding):
    a, b = (write_runs(tmp_path / name, [80, 81], [3.27, 3.28]) for name in ("a", "é"))
    done = command("compare.py", a, b, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert done.returncode == 0 and done.stderr == b"" and (r"\u0394" if encoding == "ascii" else "Δ").encode() in done.stdout


def test_output_that_nobody_takes_is_no_traceback(tmp_path):
    a, b = (write_runs(tmp_path / name, [80, 81], [3.27, 3.28]) for name in ("a", "é"))
    how = {"env": {**os.environ, "PYTHONIOENCODING": "utf-8"}}
    line = shlex.join(map(str, (sys.executable, ROOT / "records" / "compare.py", a, b)))
    for redirection, code, said in ((">&-", 0, ""), ("> /dev/full", 1, "No space left"), ("2>&- >&-", 0, "")):
        done = subprocess.run(f"{line} {redirection}", shell=True, capture_output=True, text=True, check=False, **how)
        assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr, (redirection, done)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{line} --source | true"], capture_output=True, text=True, check=False, **how
    )
    assert (done.returncode, done.stderr) == (0, "")


# -----------------------------------------------------------------------------
# What logs say


def tangled(shape, count):
    """A log whose sources hold so many things that look like a file's beginning."""
    banner = f"{BANNER}\n# m{{}}.py\n{BANNER}\n"
    header = f"{RULE}\nPython 3\n"
    opening, each = {
        "banners in a bracket": ("x = (\n", banner),
        "files in a bracket": ("x = (\n", banner + "y = (\n"),
        "headers": ("x = (\n", header + banner + "y = (\n"),
        "headers in strings": ("x = '''\n", header + banner + "'''\ny = '''\n"),
        "banners in strings": ("x = (\n", "y = '''\n" + banner + "'''\n"),
    }[shape]
    return make_log(script=(opening + "".join(each.format(i) for i in range(count))).encode())


SHAPES = ("banners in a bracket", "files in a bracket", "headers", "headers in strings", "banners in strings")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_thousand_banners_are_read_in_proportion_to_their_size(shape, monkeypatch):
    spent = []
    parses = runlog.parses
    monkeypatch.setattr(runlog, "parses", lambda source: spent.append(len(source)) or parses(source))
    data = tangled(shape, 1000)
    log = parse_log(data)
    most = 8 * len(data) + (1 << 20)
    assert sum(spent) <= most and len(spent) <= most / 500
    assert log.sources and log.loss == 3.27 or "cut short within its sources" in log.fault


LAST = "step:40/40 val_loss:3.2700 train_time:400ms"


@pytest.mark.parametrize(
    "time, said",
    [
        ("nanms", "wrong time: nan ms at step 40"),
        ("infms", "wrong time: inf ms at step 40"),
        ("1e300ms", r"wrong time: 1e\+300 ms at step 40"),
        ("-5ms", "wrong time: -5 ms at step 40"),
        ("100ms", "wrong time: 100 ms at step 40, after 390 ms at step 39"),
    ],
)
def test_a_time_that_no_clock_shows_sets_a_run_aside(tmp_path, capsys, time, said):
    """It made means of nan, or a false FASTER."""
    folder = Path(write_runs(tmp_path / "runs", [400, 404, 408], [3.27, 3.28, 3.29], steps=40))
    lines = step_lines(40).replace(LAST, LAST.replace("400ms", time))
    (folder / "bad.txt").write_bytes(make_log(lines=lines))
    assert lines != step_lines(40) and re.match(said, runlog.read_log(folder / "bad.txt").fault)
    compare.main([str(folder), "--plot", str(tmp_path / "out.png")])
    out = capsys.readouterr().out
    assert re.search(rf"set aside: .*bad\.txt: {said}", out) and "runs times, s: 0.400, 0.404, 0.408" in out


def test_times_that_start_again_after_ten_steps_are_the_oldest_public_runs():
    times = [f"step:{i}/100 train_time:{ms}ms step_avg:nanms\n" for i, ms in ((9, 9000), (10, 9500), (11, 300), (12, 600))]
    lines = "".join(times) + "step:100/100 val_loss:3.2 train_time:30000ms step_avg:300ms\n"
    assert parse_log(make_log(lines=lines)).fault == ""
    assert "step 11" in parse_log(make_log(lines=lines.replace("/100", "/16").replace("step:100", "step:16"))).fault


@pytest.mark.parametrize("edit, said", [
    (lambda log: b"\xef\xbb\xbf" + log, "begins with a byte order mark, an editor's or its script's own: given back with its script"),
    (lambda log: log.replace(b"\n", b"\r\n"), "every line ends as Windows ends it: read, and its sources given back, with line breaks"),
], ids=["BOM", "CRLF"])  # fmt: skip
def test_what_an_editor_did_to_the_sources_of_a_log_is_told(tmp_path, capsys, edit, said):
    (tmp_path / "log.txt").write_bytes(edit(make_log()))
    extract.main([f"{tmp_path / 'log.txt'}", f"{tmp_path / 'x'}"])
    assert f"\nnote: {said}" in capsys.readouterr().out


def test_a_log_with_windows_line_ends_keeps_its_facts():
    log = parse_log(make_log().replace(b"\n", b"\r\n"))
    unix = parse_log(make_log())
    assert (log.facts, log.settings, log.sources) == (unix.facts, unix.settings, SOURCES)
    assert (log.times, log.validations, log.fault) == (unix.times, unix.validations, "") and len(log.problems) == 1


def test_processes_of_nvidia_smi_are_no_gpus():
    log = parse_log(make_log(environment=smi_environment()))
    assert log.facts["GPUs"] == "2 × NVIDIA H100 80GB HBM3" and log.facts["driver"] == "570.10"


def test_a_ranks_last_words_are_a_crash():
    end = "[rank3]:[W] noise\n[rank3]: Traceback (most recent call last):\n[rank3]: torch.OutOfMemoryError: CUDA\n"
    assert parse_log(make_log(lines=step_lines(3, total=8), end=end)).fault == (
        "crashed at step 3/8: [rank3]: torch.OutOfMemoryError: CUDA"
    )


def test_runs_that_stopped_early_are_compared_at_a_step(tmp_path, capsys):
    """Track 3 lets a run end before its last step."""
    early = parse_log(make_log(lines=step_lines(7, total=12, every=3)))
    assert early.fault.startswith("cut short at step 7/12") and at_step(early, 6).fault == ""
    cut = at_step(early, 6)
    assert (cut.validations[-1][0], max(cut.times), cut.total, early.total) == (6, 6, 6, 12)
    assert at_step(early, 5).fault == "not validated at step 5, but at 0, 3, 6"
    assert at_step(early, 9).fault == "it has no step 9"
    twice = parse_log(make_log(lines=step_lines() + step_lines()))
    assert at_step(twice, 4).fault == twice.fault
    for name, steps, seed in (("0", 7, 0), ("1", 12, 1)):
        lines = step_lines(steps, total=12, every=3, ms=10 + seed)
        (tmp_path / f"{name}.txt").write_bytes(make_log(lines=lines))
    compare.main([str(tmp_path), "--at", "6"])
    out = capsys.readouterr().out
    assert "times, s: 0.060, 0.066" in out and "note: " in out and "read up to step 6 alone" in out


# -----------------------------------------------------------------------------
# Options, metadata, files


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "three", "-1", "0"])
def test_a_target_that_no_loss_can_be_below_is_refused(tmp_path, text, capsys):
    runs = write_runs(tmp_path / "runs", [80], [3.27])
    for main in (compare.main, lambda options: history.main([*options, "--add=x"]), lambda options: race.main([*options, "1"])):
        with pytest.raises(SystemExit) as error:
            main([runs, f"--target={text}"])
        assert error.value.code == 2 and f"argument --target: {text!r}: must be a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["1e300"], ["0.1", "--sigma=1e300"], ["1e-300"], ["0.1", "--sigma=0"], ["-1"]])
def test_a_plan_of_numbers_that_cannot_be_squared_is_refused(arguments):
    done = command("plan.py", *(["--", *arguments] if arguments == ["-1"] else arguments), text=True)
    assert done.returncode == 1 and done.stderr.startswith("plan.py: error: the difference and σ must be ") and not done.stdout
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/kmsg"])
@pytest.mark.parametrize("name, more", [("compare.py", []), ("extract.py", ["out"]), ("plan.py", [])])
def test_what_never_ends_or_makes_its_reader_wait_is_no_log(tmp_path, path, name, more):
    arguments = ["0.1", path] if name == "plan.py" else [path, *more]
    done = command(name, *arguments, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and f"{name}: error: {path}" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("line", ["shards: " + "\\'" * 150_000, "a" + ".py a(" * 680 + ")" * 2_000_000 + "x"], ids=["shards", "settings"])
def test_no_line_of_the_environment_is_searched_from_each_of_its_characters(tmp_path, line):
    """Minutes each: 60 KB of the one took 16 s, in proportion to its square, a MB of the other 53 s."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(make_log(environment=f"{line}\n{ENVIRONMENT}"))
    done = command("compare.py", tmp_path / "a.txt", tmp_path / "b.txt", "--rules", text=True, timeout=60)
    assert done.returncode == 0 and "loss" in done.stdout, done.stderr


GOOD = {"description": '"x"', "date": '"2026-01-01"', "contributors": '["Ann"]', "track": '"t"', "target": "3.28"}


@pytest.mark.parametrize(
    "field, value",
    [
        ("description", "3"),
        ("description", '"a\\nb"'),
        ("description", '" "'),
        ("date", "2026-01-01"),
        ("date", '"20260101"'),
        ("date", '"2026-13-01"'),
        ("contributors", '"Ann"'),
        ("contributors", "[]"),
        ("contributors", '["Ann", 3]'),
        ("track", "[]"),
        ("target", '"3.28"'),
        ("target", "true"),
        ("target", "nan"),
        pytest.param("target", "1" + 400 * "0", id="target-endless"),
        ("target", "-inf"),
        ("baseline", "3"),
        ("baseline", '["1_A"]'),
        ("unknown", "1"),
    ],
)
def test_metadata_of_a_wrong_type_is_named(tmp_path, root, field, value):
    add(root, "1_A", write_runs(tmp_path / "runs", [80, 81], [3.27, 3.28]))
    toml = "".join(f"{name} = {text}\n" for name, text in (GOOD | {field: value}).items())
    (root / "1_A" / "record.toml").write_text(toml)
    with pytest.raises(SystemExit, match=rf"history\.py: error: .*record\.toml: .*{field}"):
        history.main([], root)


@pytest.mark.parametrize("content", [b"\xff", b"a = ", b"a = " + b"[" * 5000, b"a = 1\na = 2"])
def test_metadata_that_is_no_toml_is_named(tmp_path, root, content):
    add(root, "1_A", write_runs(tmp_path / "runs", [80, 81], [3.27, 3.28]))
    (root / "1_A" / "record.toml").write_bytes(content)
    with pytest.raises(SystemExit, match=r"history\.py: error: .*record\.toml: "):
        history.main([], root)


@pytest.mark.parametrize("name", ["../x", "a b", "<b>", ".x", "a/b", "", "x" * 200, "a\nb"])
def test_a_records_name_is_plain(tmp_path, root, name):
    runs = write_runs(tmp_path / "runs", [80, 81], [3.27, 3.28])
    with pytest.raises(SystemExit):
        add(root, name, runs)
    assert sorted(path.name for path in root.iterdir()) == ["README.md"]


@pytest.mark.parametrize("length", [201, 300, 4000])
def test_a_source_with_a_name_that_no_file_has_is_refused_in_a_line(tmp_path, length):
    (tmp_path / "log.txt").write_bytes(make_log(SOURCES | {f"{'n' * length}.py": b"x = 1\n"}))
    with pytest.raises(SystemExit) as error:
        extract.main([str(tmp_path / "log.txt"), str(tmp_path / "again")])
    assert "longer than 200 characters; nothing written" in error.value.code and len(error.value.code) < 300
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("second", [0, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_half_of_an_extraction(tmp_path, monkeypatch, number, second):
    """Nor do two, as at a logout, of which the second comes while the first is obeyed."""
    (tmp_path / "log.txt").write_bytes(make_log())
    (tmp_path / "again").mkdir()
    for name in ("train_gpt.py", "triton_kernels.py"):
        (tmp_path / "again" / name).write_bytes(b"mine")
    before = {path: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    replace, done = os.replace, []

    def is_ended(source, target):
        done.append(target)
        if len(done) == 2:
            os.kill(os.getpid(), number)
        if len(done) == 3:
            os.kill(os.getpid(), second)
        replace(source, target)

    handlers = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGHUP)}  # maybe under nohup
    monkeypatch.setattr(os, "replace", is_ended)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO()))
    try:
        with pytest.raises(SystemExit) as exit_:
            tool.run(lambda: extract.main([str(tmp_path / "log.txt"), str(tmp_path / "again"), "--force"]), packages=False)
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)
    assert exit_.value.code == 128 + number and len(done) >= 2
    assert {path: path.read_bytes() for path in (tmp_path / "again").iterdir()} == before


def test_what_nohup_ignores_ends_no_tool():
    handlers = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tool.run(lambda: [os.kill(os.getpid(), n) for n in handlers], packages=False)
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)


STEP = '{"operations": [{"name": "a update", "lane": "compute", "seconds": 1.0, "after": [], "bytes": 0}]}'


@pytest.mark.parametrize("command, made", [
    ("records/compare.py logs/a logs/b --plot=a.png", ["a.png"]),
    ("bench/order.py simulate step.json --picture=a.png --chrome=a.json", ["a.png", "a.json"]),
    ("history", ["records/1_A/README.md", "records/README.md", "README.md"]),
])  # fmt: skip
def test_who_asks_for_files_gets_them_though_nobody_reads_what_is_printed(tmp_path, command, made):
    """| head: the code was 0, and an earlier picture passed for the new one. matplotlib's settings of a user's do not count."""
    for name in "ab":
        write_runs(tmp_path / "logs" / name, [80_000, 81_000], [3.27, 3.28])
    (tmp_path / "step.json").write_text(STEP)
    os.mkfifo(tmp_path / "matplotlibrc")  # of the current folder: it was waited for
    for page in (tmp_path / "README.md", tmp_path / "records" / "README.md"):
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"{history.BEGIN}\n{history.END}\n")
    program = [str(ROOT / command.split()[0]), *command.split()[1:]]
    if command == "history":
        options = ["--add", "1_A", "logs/a", "--description=d", "--date=2026-01-01", "--contributors=Ann"]
        source = f"import sys; sys.path[:0] = ['{ROOT}/records']; import tool, history, pathlib\n"
        program = ["-c", f"{source}tool.run(lambda: history.main({options}, pathlib.Path('{tmp_path}/records')))"]
    reader, writer = os.pipe()
    os.close(reader)
    variables = {"PYTHONUNBUFFERED": "1", "MPLBACKEND": "Qt4Agg", "MATPLOTLIBRC": f"{tmp_path}"}
    how = {"cwd": tmp_path, "env": {**os.environ, **variables}, "stdout": writer, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run([sys.executable, *program], timeout=120, **how)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "") and all((tmp_path / name).exists() for name in made), done


@pytest.mark.parametrize("block", ["tool.run(lambda: {}, packages=False)", "with console.until_reader_leaves(): {}"])
def test_a_slow_reader_of_a_pipe_that_waits_for_nobody_gets_all(block):
    """As Node.js makes them: most was lost, with code 0."""
    source = f"import sys\nsys.path[:0] = ['{ROOT}/records']\nimport tool\nfrom launch import console\n"
    source += block.format("[print('x' * 999) for _ in range(1000)]")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen([sys.executable, "-c", source], stdout=writer) as process, open(reader, "rb") as pipe:
        os.close(writer)
        time.sleep(0.5)
        assert len(pipe.read()) == 1_000_000
    assert process.returncode == 0


@pytest.mark.parametrize("block", ["tool.run(lambda: {}, packages=False)", "with console.ended_by_signals(): {}"])
def test_what_a_parent_has_blocked_ends_a_tool(block):
    wait = "print(flush=True) or time.sleep(60)"
    source = f"import sys, time\nsys.path[:0] = ['{ROOT}/records']\nimport tool\nfrom launch import console\n{block.format(wait)}"
    blocked = {"preexec_fn": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])}
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, **blocked) as process:
        process.stdout.readline()
        process.terminate()
        try:
            assert process.wait(30) == 143
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["compare", "extract", "history", "plan", "race"])
def test_help_needs_no_packages(tmp_path, name):
    """It made .venv first, which no machine without a network can."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules |= dict.fromkeys(['scipy', 'matplotlib', 'rich', 'numpy', 'torch'])\n"
        f"sys.path[:0] = [{str(ROOT)!r}]\nfrom launch import environment\nenvironment.go_on = lambda *_: sys.exit('made')\n"
    )
    command = [sys.executable, f"{ROOT}/records/{name}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": f"{tmp_path}"})
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"usage: {name}.py"), done


@pytest.mark.parametrize("path", ["sample.py", *(f"records/{name}.py" for name in ("compare", "extract", "history", "plan", "race"))])
def test_an_old_python_goes_on_in_the_environment(path):
    """Before it imports what it cannot: each ended in a traceback of Python 3.8 or 3.9. Here it is told of one, which lacks some of
    the library."""
    code = (
        "import itertools, runpy, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}]\nfrom launch import environment\n"
        "run, environment.go_on = runpy.run_path, lambda *files: sys.exit(f'goes on with {files}')\n"
        "runpy.run_path = lambda path, *more, **how: vars(environment) if path == environment.__file__ else run(path, *more, **how)\n"
        "sys.version_info = (3, 9, 18, 'final', 0)\ndel itertools.pairwise, sys.orig_argv\nsys.modules['tomllib'] = None\n"
        f"sys.argv = ['{path}', 'latest', 'x']\nrun({f'{ROOT}/{path}'!r}, run_name='__main__')"
    )
    done = run_fresh([sys.executable, "-c", code])
    asked = "requirements.txt" if path == "sample.py" else "records/requirements.txt"
    assert (done.returncode, done.stderr) == (1, f"goes on with ('{asked}',)\n"), done


def test_kill_9_leaves_no_mixture_that_starts(tmp_path, monkeypatch):
    """Before any of its renames: the script is there with all of its files, or not at all; the same command then goes on."""
    (tmp_path / "log.txt").write_bytes(make_log())
    replace = os.replace
    for last in range(len(SOURCES) + 1):
        folder, renames = tmp_path / f"again{last}", []
        for name in SOURCES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"old")

        def replace_or_die(source, target, last=last, renames=renames):
            if len(renames) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            renames.append(target)
            replace(source, target)

        monkeypatch.setattr(os, "replace", replace_or_die)
        child = os.fork()
        if not child:
            extract.extract(tmp_path / "log.txt", folder, force=True)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        monkeypatch.setattr(os, "replace", replace)
        assert ended == (0 if last == len(SOURCES) else -signal.SIGKILL)
        there = {name: (folder / name).read_bytes() for name in SOURCES if (folder / name).exists()}
        assert there == SOURCES if last == len(SOURCES) else "train_gpt.py" not in there
        extract.extract(tmp_path / "log.txt", folder, force=True)
        assert {name: (folder / name).read_bytes() for name in SOURCES} == SOURCES


def test_files_that_are_not_of_the_log_are_named_when_a_folder_is_written_over(tmp_path, capsys):
    """The script could import them: it would be half of another run."""
    (tmp_path / "log.txt").write_bytes(make_log())
    (tmp_path / "again" / "data").mkdir(parents=True)
    (tmp_path / "again" / "data" / "old.py").write_bytes(b"x = 1\n")
    extract.main([str(tmp_path / "log.txt"), str(tmp_path / "again"), "--force"])
    assert "not of this log, but there, and the script may import them: data/old.py\n" in capsys.readouterr().out


def test_files_that_the_run_read_and_no_log_holds_are_named(tmp_path, capsys):
    """The extracted script ended in FileNotFoundError."""
    read = "read by its sources: B='x', LR='2', config.json='CRC-32 0000000a', my own, old.toml='CRC-32 0000000b'"
    sources = {"ideas/idea.py": b"import torch\n"}
    environment = ENVIRONMENT.replace("attention", f"{read}\nattention")
    (tmp_path / "log.txt").write_bytes(make_log(sources, environment))
    extract.main([str(tmp_path / "log.txt"), str(tmp_path / "again")])
    where = f"if the script looks for them in its folder, they belong in {tmp_path}/again/ideas"
    assert f"no log holds what the run has read, config.json, my own, old.toml: {where}\n" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# The packages


def test_a_tool_goes_on_in_the_environment_that_has_its_packages(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda python, command: started.append((python, command)))
    monkeypatch.setattr(sys, "orig_argv", ["python3", "records/compare.py", "a", "b c"])
    monkeypatch.setattr(sys, "argv", ["records/compare.py", "a", "b c"])
    monkeypatch.setattr(environment, "ensure", lambda files: asked.extend(files) or sys.executable)
    monkeypatch.setattr(environment, "PROGRAM", "run.sh")
    asked = []
    environment.go_on("records/requirements.txt")
    assert started == [] and asked == [str(ROOT / "records" / "requirements.txt")]
    monkeypatch.setattr(environment, "ensure", lambda files: "/there/python")
    environment.go_on("records/requirements.txt")
    assert started == [("/there/python", ["/there/python", "records/compare.py", "a", "b c"])]
    assert environment.PROGRAM == "compare.py"
    monkeypatch.delattr(sys, "orig_argv")  # as before Python 3.10
    environment.go_on("records/requirements.txt")
    assert started[1:] == started[:1]


def test_the_tools_need_no_package_of_training(tmp_path):
    """compare.py in an interpreter to which torch, numpy's users and the like are not there."""
    a = write_runs(tmp_path / "a", [80, 81], [3.27, 3.28])
    code = (
        "import sys\n"
        "class No:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'triton'): raise ModuleNotFoundError(name)\n"
        f"sys.meta_path.insert(0, No()); sys.path.insert(0, {str(ROOT / 'records')!r})\n"
        f"import compare, history, extract, plan, race; compare.main([{a!r}, '--plot', {str(tmp_path / 'x.png')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_training_needs_no_package_of_the_tools_and_venv_gets_them(monkeypatch, tmp_path):
    commands = []
    lacks = iter([None, ["torch"], []])
    monkeypatch.setattr(environment, "missing", lambda files: ["torch"])
    monkeypatch.setattr(
        environment, "missing_there", lambda python, files: next(lacks) if commands.append(files) is None else 0
    )
    monkeypatch.setattr(environment, "run_quietly", lambda command, purpose: commands.append(command))
    monkeypatch.setattr(environment, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, b""))
    wanted = [str(ROOT / "requirements.txt")]
    environment.ensure(wanted, str(tmp_path))
    asked = [command for command in commands if command == wanted]
    assert len(asked) == 3  # what it must have: training's alone
    install = commands[-2]
    assert [option for option in install if option.startswith("--requirement=")] == [
        f"--requirement={ROOT / name}" for name in ("requirements.txt", "records/requirements.txt")
    ]


@pytest.mark.parametrize("name", ["compare", "extract", "history", "plan", "race"])
def test_a_tool_finds_its_modules_where_python_looks_in_no_folder_of_scripts(name, tmp_path):
    done = command(f"{name}.py", "--help", env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": ""}, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(b"usage: ") and not done.stderr


def test_a_home_folder_in_an_option_is_meant_as_such(tmp_path):
    """Shells leave --output=~/mine as it is: no folder is called ~."""
    how = dict(env={**os.environ, "HOME": f"{tmp_path}"}, cwd=tmp_path)
    (tmp_path / "text").write_text("one\n\ntwo\n" * 999)
    making = [sys.executable, f"{ROOT / 'data' / 'local_text.py'}", "--input=~/text", "--output=~/mine"]
    done = run_fresh(making, timeout=120, **how)
    assert done.returncode == 0 and (tmp_path / "mine" / "local_val_000000.bin").exists(), done.stderr
    a, b = (write_runs(tmp_path / name, [80, 81], [3.27, 3.28]) for name in ("a", "b"))
    done = command("compare.py", a, b, "--plot=~/picture.png", **how)
    assert done.returncode == 0 and (tmp_path / "picture.png").exists(), done.stderr
    assert not (tmp_path / "~").exists()


EMPTY = {  # of an unset variable of a shell: each took the logs of the current folder, or wrote there
    "compare.py": ([[], ""], [[], "--plot="]),
    "plan.py": (["0.01", ""],),
    "extract.py": ([[], ""], ["", "x"]),
    "history.py": (["--add", "x", "", "--description=d", "--contributors=c"], ["--picture="]),
    "race.py": (["", "x", "1"], [[], [], "1", "--logs="]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_argument_is_not_the_current_folder(tmp_path, name):
    (tmp_path / "0.txt").write_bytes(make_log())
    for arguments in EMPTY[name]:
        said = next((f"{x} is empty" for x in arguments if x and x[-1] == "="), "an argument is empty")
        done = command(name, *(x if x != [] else tmp_path / "0.txt" for x in arguments), cwd=tmp_path, text=True)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr == f"{name}: error: {said}: is a shell variable not set?\n"
    assert [path.name for path in tmp_path.iterdir()] == ["0.txt"]


VALUES = {  # a tool, its arguments: an option that takes a text, a number or a path
    "compare.py": ["x", "--plot"], "plan.py": ["1", "--sigma"], "history.py": ["--picture"], "race.py": ["x", "x", "1", "--logs"],
    "sample": ["x", "y", "--script"], "data.local_text": ["--input"], "data.fineweb": ["--subset"],
    "data.cached_fineweb10B": ["--output"], "bench.codegen": ["--output"], "bench.communication": ["--seed"],
    "bench.first_minutes": ["--runs"], "bench.gpu": ["--only"], "bench.grad_dtype": ["--data"], "bench.optimizer": ["--data"],
    "bench.order": ["search", "--machine"], "bench.verdicts": ["--comparisons"],
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_the_end_of_options_is_no_value_of_one(name, monkeypatch, capsys):
    """argparse, which takes it away, finds none, and raised ValueError, or took the default."""
    *_, option = arguments = VALUES[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments[:-1], f"{option}=--"])
    main = importlib.import_module(name.removesuffix(".py")).main
    with pytest.raises(SystemExit) as exit_:
        tool.run(main, packages=False) if name.endswith(".py") else main()
    assert exit_.value.code == 2 and capsys.readouterr().err.endswith(f"error: {option}=--: -- is no value\n")


def test_nor_is_it_one_of_a_command():
    done = run_fresh([sys.executable, f"{ROOT}/sample.py", "x", "y", "--script=--"])
    assert done.returncode == 2 and done.stderr.endswith("sample.py: error: --script=--: -- is no value\n")


@pytest.mark.parametrize("name", ["local_text", "fineweb", "cached_fineweb10B"])
def test_a_path_in_a_folder_that_is_gone_is_one_message(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", [name, "--output=here", "--input=there"][: 3 if name == "local_text" else 2])
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(f"data.{name}").main()
    said = "argument --output: here: the current folder is gone: change into another\n"
    assert exit_.value.code == 2 and capsys.readouterr().err.endswith(said)


def test_a_tool_runs_through_a_link(tmp_path):
    """As of ~/bin: its own project's files were looked for beside the link."""
    (tmp_path / "text").write_text("one\n\ntwo\n" * 999)
    for path in ("sample.py", "data/local_text.py"):
        (tmp_path / Path(path).name).symlink_to(ROOT / path)
    done = run_fresh([sys.executable, tmp_path / "local_text.py", "--input=text", "--output=made"], cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "made" / "local_val_000000.bin").exists(), done.stderr
    done = run_fresh([sys.executable, tmp_path / "sample.py", "latest", "x", f"--log_dir={tmp_path}"])
    assert done.returncode == 1 and f"no usable checkpoint in {tmp_path}" in done.stderr, done.stderr


LOOPS = {
    "records/compare.py": ["loop"], "records/extract.py": ["LOG", "loop/x"], "records/race.py": ["loop", "x.py", "1"],
    "records/history.py": ["--add=x", "LOG", "--description=d", "--contributors=c", "--baseline=loop"],
    "data/local_text.py": ["--input=loop", "--output=x"], "data/local_text.py ": ["--input=.", "--output=loop"],
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_links_is_one_message(name, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "LOG").write_bytes(make_log())
    done = run_fresh([sys.executable, f"{ROOT}/{name.strip()}", *LOOPS[name]], cwd=tmp_path)
    assert done.returncode in (1, 2) and f"{Path(name).name.strip()}: error: " in done.stderr and "loop" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "x").exists()


OUTPUTS = [
    "bench/codegen.py x --output", "bench/order.py simulate x --chrome", "bench/order.py show x --picture",
    "records/compare.py x --plot",
]  # fmt: skip
TAKEN = [*itertools.product(OUTPUTS[-1:], [".", "/", "folder", "/dev/null"]), *itertools.product(OUTPUTS, ["link"])]


@pytest.mark.parametrize("tool, output", TAKEN)
def test_what_cannot_be_a_file_is_no_output_before_the_work(tmp_path, tool, output):
    """The work would be lost, and a link replaced; its inputs here are not there, which would be told next."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    name, *arguments = tool.split()
    done = run_fresh([sys.executable, f"{ROOT}/{name}", *arguments, output], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"argument {arguments[-1]}: {output}: is no regular file, and is not replaced: name another\n")


@pytest.mark.parametrize("tool, option", [("data/local_text.py", "input"), ("data/fineweb.py", "output"), ("sample.py x y", "log_dir")])
def test_nor_is_an_empty_option_of_other_tools(tmp_path, tool, option):
    name, *arguments = tool.split()
    done = run_fresh([sys.executable, f"{ROOT}/{name}", *arguments, f"--{option}="], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith(f"--{option}: is empty: is a shell variable not set?\n")
