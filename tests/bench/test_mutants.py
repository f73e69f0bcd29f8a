"""bench/mutants.py: every change can be made, and a few are; what no test notices, and what hangs, is told."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from bench import mutants
from bench.mutants import MUTANTS, Mutant, changed, main, path_of
from common import text_of, wait_until

ROOT = Path(mutants.ROOT)
PAGE = ROOT / "tests" / "README.md"


def test_every_change_stands_once_in_its_file_and_is_python():
    assert len(MUTANTS) > 130 and len({(mutant.file, mutant.what) for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text()
        assert changed(mutant, text) != text
        compile(changed(mutant, text), f"{mutant.file}, {mutant.what}", "exec")


def test_every_change_has_tests_and_its_file_a_name_here():
    assert {path_of(tests).partition("::")[0] for mutant in MUTANTS for tests in mutant.tests.split()} <= {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")
    }
    for path, _, name in {path_of(tests).partition("::") for mutant in MUTANTS for tests in mutant.tests.split()}:
        assert f"def {name}" in (ROOT / path).read_text(), name
    of_folders = {mutant.file.rpartition("/")[0] for mutant in MUTANTS}
    assert of_folders == {"", "bench", "data", "launch", "records", "runtime"}


def test_the_page_lists_every_change_as_noticed_or_harmless():
    rows = re.findall(r"^\| `(\S+)`, (\d+) \| (`test_\w+\.py`|changes nothing: .+?) \| (.+) \|$", PAGE.read_text(), re.M)
    assert sorted((file, what) for file, _, _, changes in rows for what in changes.split("; ")) == sorted(
        (mutant.file, mutant.what) for mutant in MUTANTS
    )
    assert {(file, int(count)) for file, count, _, _ in rows} == {*Counter(mutant.file for mutant in MUTANTS).items()}


A_FEW = {
    ("train_gpt.py", "bigrams learn ten times slower"): "test_pins.py",
    ("records/t_tests.py", "one side of p where two are meant"): "test_t_tests.py",
}


def test_a_few_are_noticed():
    few = [mutant for mutant in MUTANTS if (mutant.file, mutant.what) in A_FEW]
    noticed = mutants.run(few, baseline=False)
    assert [test.partition("::")[0] for test in noticed] == [A_FEW[mutant.file, mutant.what] for mutant in few]


# -----------------------------------------------------------------------------
# The tool, on a project of one function

TESTS = "from thing import double\ndef test_double(): assert double(2) == 4\ndef test_again(): assert double(0) == 0\n"
CHANGES = {
    "noticed": Mutant("thing.py", "a third", "small/double", "2 * x", "3 * x"),
    "missed": Mutant("thing.py", "a sum of squares", "small/double", "2 * x", "x * x"),
    "harmless": Mutant("thing.py", "the other way round", "small/double", "2 * x", "x * 2", "a product commutes"),
    "no Python": Mutant("thing.py", "half a line", "small/double", "2 * x", "2 *"),
    "hangs": Mutant("thing.py", "a loop", "small/double", "    return", "    import time\n    time.sleep(600)\n    return"),
    "not there": Mutant("thing.py", "another", "small/double", "4 * x", "x"),
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "project" / "tests" / "small").mkdir(parents=True)
    (tmp_path / "project" / "thing.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "project" / "tests" / "small" / "test_double.py").write_text("import sys\nsys.path.insert(0, '.')\n" + TESTS)
    monkeypatch.setattr(mutants, "ROOT", tmp_path / "project")
    return tmp_path / "project"


def choose(monkeypatch, *names):
    monkeypatch.setattr(mutants, "MUTANTS", [CHANGES[name] for name in names])


def test_the_table_tells_what_noticed_each_change(project, monkeypatch, capsys):
    choose(monkeypatch, "noticed", "missed", "harmless", "no Python")
    assert main(["--jobs=2"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "| file, changes | noticed by | what is changed |",
        "|---|---|---|",
        "| `thing.py`, 4 | `test_double.py` | a third; half a line |",
        "| `thing.py`, 4 | **not noticed** | a sum of squares |",
        "| `thing.py`, 4 | changes nothing: a product commutes | the other way round |",
        "",
        "4 changes, 1 not noticed.",
    ]
    assert (project / "thing.py").read_text() == "def double(x):\n    return 2 * x\n"


def test_results_are_kept_and_what_was_missed_is_tried_again(project, monkeypatch, capsys):
    choose(monkeypatch, "noticed", "missed")
    results = project.parent / "results"
    assert main(["--no-baseline", f"--results={results}"]) == 1
    assert [json.loads(line)[1] for line in results.read_text().splitlines()] == ["test_double.py::test_double", ""]
    choose(monkeypatch, "noticed")
    monkeypatch.setattr(mutants, "run", None)
    assert main([f"--results={results}"]) == 0
    assert mutants.known(results) == {CHANGES["noticed"]: "test_double.py::test_double"}


def test_options_that_cannot_be_meant_are_told_before_the_tests(project, capsys):
    for option, message in (("--jobs=0", "0 is not in 1..16"), (f"--results={project}", "a folder, and no file in one")):
        with pytest.raises(SystemExit, match="2"):
            main([option])
        assert message in capsys.readouterr().err


def test_tests_that_hang_are_no_answer(project, monkeypatch, capsys):
    """And are ended."""
    choose(monkeypatch, "hangs")
    killed, kill = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda *given: (killed.append(given), kill(*given)))
    monkeypatch.setattr(mutants, "TIMEOUT", 1)
    assert main(["--no-baseline"]) == 1
    said = capsys.readouterr()
    assert "thing.py, a loop: pytest tests/small/test_double.py did not end within 1 s\n" in said.err
    assert "| **not noticed** | a loop |\n" in said.out
    assert [number for _, number in killed] == [signal.SIGKILL]


def test_tests_that_a_signal_ends_are_no_answer(project, monkeypatch, capsys, tmp_path):
    choose(monkeypatch, "noticed")
    (project / "tests" / "small" / "test_double.py").write_text("import os\ndef test_one(): os.kill(os.getpid(), 9)\n")
    with pytest.raises(InterruptedError, match="test_double.py was ended by SIGKILL"):
        main(["--no-baseline", "--results", f"{tmp_path / 'results'}"])
    assert "not noticed" not in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_ctrl_c_ends_the_tests_that_run(project, monkeypatch):
    choose(monkeypatch, "hangs")
    here = project.parent / "here"
    tests = project / "tests" / "small" / "test_double.py"
    tests.write_text(f"open({f'{here}'!r}, 'w')\n" + tests.read_text())
    threading.Thread(target=lambda: (wait_until(here.exists), os.kill(os.getpid(), signal.SIGINT))).start()
    with pytest.raises(KeyboardInterrupt):
        main(["--no-baseline"])
    assert not mutants.RUNNING


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_neither_tests_that_run_nor_a_copy(tmp_path, number):
    """Of the command itself; its tests are in a session of their own."""
    command = [sys.executable, f"{ROOT / 'bench/mutants.py'}", "--only=an empty shard is whole", "--no-baseline"]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": f"{tmp_path}"}, stderr=subprocess.PIPE, text=True)
    tasks = Path(f"/proc/{process.pid}/task")
    started = lambda: [child for task in tasks.iterdir() for child in text_of(task / "children").split()]
    wait_until(started)
    (tests,) = started()
    if number == signal.SIGTERM:  # in the middle of a test, whose files go too
        wait_until(lambda: [*tmp_path.glob("bankrun-mutants-*/*/pytest-of-*")])
    process.send_signal(number)
    assert "Traceback" not in process.communicate(timeout=60)[1] and process.returncode == 128 + number
    assert not Path("/proc", tests).exists() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["junk", "{}", '[["a"], "b"]', '[["a", "b'])
def test_a_file_that_holds_no_results_is_named(tmp_path, line):
    results = tmp_path / "results"
    results.write_text(f'{json.dumps([CHANGES["noticed"], "test_a.py::test_b"])}\n{line}\n')
    with pytest.raises(ValueError, match=f"{results}: line 2 is no result: delete it, or name another file"):
        mutants.known(results)


def test_tests_that_fail_without_a_change_prove_nothing(project, monkeypatch):
    choose(monkeypatch, "noticed")
    (project / "tests" / "small" / "test_double.py").write_text("def test_one(): assert False\n")
    said = r"without any change, .*: test_double.py::test_one fails \(pytest -n0 tests/small/test_double.py\)"
    with pytest.raises(RuntimeError, match=said):
        main([])


def test_a_change_that_is_nowhere_is_named(project, monkeypatch):
    choose(monkeypatch, "not there")
    with pytest.raises(ValueError, match=r"thing.py, another: stands there 0 times, must be once: '4 \* x'"):
        main(["--no-baseline"])
    choose(monkeypatch, "noticed")
    with pytest.raises(SystemExit):
        main(["--only=nothing"])
