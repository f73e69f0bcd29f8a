"""extract.py writes a run's sources back as they were, or nothing; what it wrote runs."""

import os
import sys
import threading
import time

import numpy as np
import pytest

from common import MODULES, run_fresh
from made_logs import ENVIRONMENT, ROOT, SOURCES, make_log, step_lines

import extract
import tool
from runlog import read_log

from data.shards import write_shard


def tree(folder):
    """Every file below a folder: path, content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_source_is_written_to_its_path(tmp_path, capsys):
    sources = {"my ideas/idea.py": b"x = 1\r\n\n", "data/deep/er/loader.py": "y = 'é'".encode(), **SOURCES}
    (tmp_path / "log.txt").write_bytes(make_log(sources))
    folder = tmp_path / "new" / "again"
    extract.main([str(tmp_path / "log.txt"), str(folder)])
    assert tree(folder) == sources
    *paths, how = capsys.readouterr().out.splitlines()
    assert paths == [str(folder / name) for name in sources] and how == f"run it: ./run.sh '{folder}/my ideas/idea.py'"


def test_a_run_that_went_on_with_other_sources_is_told(tmp_path, capsys):
    diff = "--- script before\n+++ script now\n@@ -1 +1 @@\n-x = 1\n+x = 2"
    changed = f"{ENVIRONMENT}\nresumed at step 4 from a.pt, with changed source, 2 lines of difference\n{ENVIRONMENT}\n{diff}"
    for name, environment, told in (("a", ENVIRONMENT, False), ("b", changed, True)):
        (tmp_path / f"{name}.txt").write_bytes(make_log(environment=environment))
        extract.main([str(tmp_path / f"{name}.txt"), str(tmp_path / name)])
        said = "the run began with these sources; it was resumed with others: the log's header has the diff\n"
        assert (said in capsys.readouterr().out) == told


def test_of_what_else_is_there_what_a_script_may_import_is_named(tmp_path, capsys):
    """Not an environment: it was a line of a megabyte."""
    (tmp_path / "log.txt").write_bytes(make_log())
    for name in (".venv/lib/python3.11/site-packages/x/a.py", "own.py", *(f"many{i}.py" for i in range(30))):
        (tmp_path / "again" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "again" / name).touch()
    extract.main([str(tmp_path / "log.txt"), str(tmp_path / "again")])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("not of this log"))
    assert "the script may import them: many0.py, many1.py, " in line and line.endswith(" and 11 more") and "venv" not in line


def test_no_file_is_overwritten_unless_forced(tmp_path):
    log, folder = tmp_path / "log.txt", tmp_path / "again"
    log.write_bytes(make_log())
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "shards.py").write_bytes(b"mine")
    (folder / "other.py").write_bytes(b"other")
    with pytest.raises(SystemExit, match=r"again/data/shards\.py exists: choose another folder, or --force"):
        extract.main([str(log), str(folder)])
    assert tree(folder) == {"data/shards.py": b"mine", "other.py": b"other"}
    extract.main([str(log), str(folder), "--force"])
    assert tree(folder) == SOURCES | {"other.py": b"other"}
    with pytest.raises(SystemExit, match=rf"again/[\w/.]+ and {len(SOURCES) - 1} more exist: choose another folder"):
        extract.main([str(log), str(folder)])


@pytest.mark.parametrize(
    "name, fault",
    [
        ("/tmp/escape.py", "not a relative path"),
        ("//server/share/escape.py", "not a relative path"),
        ("C:escape.py", "not a relative path"),
        ("c:/escape.py", "not a relative path"),
        ("../escape.py", r"empty part, \. or \.\."),
        ("data/../../escape.py", r"empty part, \. or \.\."),
        ("data/..", r"empty part, \. or \.\."),
        ("./escape.py", r"empty part, \. or \.\."),
        ("data//escape.py", r"empty part, \. or \.\."),
        ("data/", r"empty part, \. or \.\."),
        ("data\\escape.py", "backslash"),
        ("..\\escape.py", "backslash"),
        ("escape\x1b[2J.py", "not printable"),
        ("data/escape\u2028.py", "not printable"),
        ("train_gpt.py/escape.py", r"train_gpt\.py is a file of this log too"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_paths_that_leave_the_folder_are_refused(tmp_path, name, fault, first):
    """As the script's, and as another source's."""
    script = name if name.endswith(".py") else f"{name}/idea.py"
    refused(tmp_path, {script: b"x = 1\n", **SOURCES} if first else SOURCES | {name: b"x = 1\n"}, fault)


@pytest.mark.parametrize("name", [".git/config", "data/mine.pth"])
def test_what_is_no_source_is_refused(tmp_path, name):
    """`git status` in the folder ran what stood in .git/config, as its fsmonitor."""
    refused(tmp_path, SOURCES | {name: b"x = 1\n"}, f"names a source '{name}': is no Python file; nothing written")


def test_a_file_that_is_a_folder_of_the_log_is_refused(tmp_path):
    refused(tmp_path, SOURCES | {"data": b"x = 1\n"}, "data is a file of this log too, and cannot be a folder")


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    "obstacle, said",
    [
        (lambda folder, outside: (folder / "data").symlink_to(outside), "data is a link"),
        (lambda folder, outside: (folder / "data").symlink_to(folder / "absent"), "data is a link"),
        (lambda folder, outside: (folder / "data").write_bytes(b""), "data is a file where a folder must be"),
        (lambda folder, outside: (folder / "train_gpt.py").mkdir(), "train_gpt.py is a folder where a file must be"),
    ],
)
def test_what_is_in_the_way_is_refused(tmp_path, obstacle, said, force):
    (tmp_path / "again").mkdir()
    (tmp_path / "outside").mkdir()
    obstacle(tmp_path / "again", tmp_path / "outside")
    refused(tmp_path, SOURCES, said, force)


def test_the_root_of_all_folders_is_refused(tmp_path):
    """As of "$FOLDER/" where the shell has no FOLDER: a traceback."""
    (tmp_path / "run.txt").write_bytes(make_log())
    with pytest.raises(SystemExit, match="^extract.py: error: / is the root of all folders: choose another"):
        extract.main([f"{tmp_path / 'run.txt'}", "/"])


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "again").mkdir()
    (tmp_path / "outside.py").write_bytes(b"mine")
    (tmp_path / "again" / "train_gpt.py").symlink_to(tmp_path / "outside.py")
    (tmp_path / "log.txt").write_bytes(make_log())
    extract.main([str(tmp_path / "log.txt"), str(tmp_path / "again"), "--force"])
    assert (tmp_path / "outside.py").read_bytes() == b"mine" and tree(tmp_path / "again") == SOURCES


@pytest.mark.parametrize(
    "data, said", [(step_lines().encode(), "no sources"), (make_log()[:40], "cut short within its sources")]
)
def test_a_log_without_sources_is_refused(tmp_path, data, said):
    refused(tmp_path, data, said)


def refused(tmp_path, log, said, options=()):
    """extract.py ends with one line that says why and code 1, and no file or folder is another than before."""
    (tmp_path / "log.txt").write_bytes(log if isinstance(log, bytes) else make_log(log))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=said) as error:
        extract.main([str(tmp_path / "log.txt"), str(tmp_path / "again"), *options])
    assert error.value.code.startswith("extract.py: error: ") and len(error.value.code.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("writes", range(len(SOURCES)))
@pytest.mark.parametrize("there", [False, True])
def test_an_error_midway_leaves_everything_as_it_was(tmp_path, monkeypatch, writes, there):
    """The disk takes so many of the files, and no more."""
    (tmp_path / "log.txt").write_bytes(make_log())
    if there:
        (tmp_path / "again" / "data").mkdir(parents=True)
        (tmp_path / "again" / "train_gpt.py").write_bytes(b"mine")
        (tmp_path / "again" / "data" / "shards.py").write_bytes(b"my own")
    before = sorted(tmp_path.rglob("*")), tree(tmp_path)
    replace, targets = os.replace, []

    def fails_once(source, target):
        targets.append(target)
        if len(targets) == writes + 1:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails_once)
    with pytest.raises(SystemExit, match=f"extract.py: error: {tmp_path}/again: .*No space left"):
        extract.main([str(tmp_path / "log.txt"), str(tmp_path / "again"), "--force"])
    first, *others = (tmp_path / "again" / name for name in SOURCES)
    assert targets[: writes + 1] == [*others, first][: writes + 1]
    assert (sorted(tmp_path.rglob("*")), tree(tmp_path)) == before


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_may_not_be_written_to_is_named(tmp_path, monkeypatch, there):
    """In place of a hidden one in it, with Python's words."""
    (tmp_path / "log.txt").write_bytes(make_log(SOURCES))
    (folder := tmp_path / "own" if there else tmp_path).mkdir(exist_ok=True)
    monkeypatch.setattr(tool.os, "access", lambda path, mode: path != folder)
    with pytest.raises(SystemExit, match=f"^extract.py: error: {folder} may not be written to: choose another$"):
        extract.main([f"{tmp_path / 'log.txt'}", f"{tmp_path / 'own'}"])


def test_a_folder_in_a_file_is_refused(tmp_path):
    (log := tmp_path / "log.txt").write_bytes(make_log(SOURCES))
    with pytest.raises(extract.ExtractError, match=f"^{log} is no folder, or a link to one that is not there: choose another$"):
        extract.extract(log, log / "own" / "idea")


def test_two_at_once_do_not_write_into_one_folder(tmp_path, monkeypatch):
    """The second waits, and finds the first one's files; at once, both found the folder empty."""
    (tmp_path / "log.txt").write_bytes(make_log(SOURCES))
    check, results = extract.check_folder, []

    def slow(*given):
        check(*given)
        time.sleep(0.3)

    def work():
        try:
            results.append(len(extract.extract(tmp_path / "log.txt", tmp_path / "again")))
        except extract.ExtractError as error:
            results.append(f"{error}")

    monkeypatch.setattr(extract, "check_folder", slow)
    both = [threading.Thread(target=work) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    done, refused = sorted(results, key=lambda x: isinstance(x, str))
    assert done == len(SOURCES) and "exist: choose another folder, or --force to overwrite" in refused


def test_a_folder_within_one_that_may_not_be_read_can_be_written(tmp_path, monkeypatch):
    """A home below a folder that may be passed alone: its parent was opened, and refused."""
    (tmp_path / "log.txt").write_bytes(make_log())
    (own := tmp_path / "home" / "own").mkdir(parents=True)
    monkeypatch.setattr(extract.os, "access", lambda path, mode: path != own.parent)
    locked, alone = [], tool.alone
    monkeypatch.setattr(tool, "alone", lambda folder: locked.append(folder) or alone(folder))
    assert len(extract.extract(tmp_path / "log.txt", own)) == len(SOURCES) and locked == [tmp_path]


def test_an_extracted_run_runs_and_logs_its_sources(tmp_path):
    """Out of a log, run, and in the run's log the same bytes: of a script with a whole log in a string and foreign line breaks.

    What the run logged is all that it needs: extracted alone, it starts.
    """
    tokens = np.tile(np.frombuffer(b"\0" + SOURCES["train_gpt.py"] * 20, dtype=np.uint8).astype(np.uint16), 40)
    tokens[tokens == 0] = 256
    write_shard(tmp_path / "local_train_000000.bin", tokens)
    write_shard(tmp_path / "local_val_000000.bin", tokens[: len(tokens) // 2])
    script = (ROOT / "train_gpt.py").read_bytes() + f"\nTRAP = '''\n{make_log().decode()}'''\r\n".encode()
    folders = [path for name in ("launch", "runtime", "data") for path in sorted((ROOT / name).glob("*.py"))]
    modules = [*(path for path in MODULES if path.name != "train_gpt.py"), *folders]
    sources = {"idea.py": script, **{str(path.relative_to(ROOT)): path.read_bytes() for path in modules}}
    (tmp_path / "log.txt").write_bytes(make_log(sources))
    path, *_ = extract.extract(tmp_path / "log.txt", tmp_path / "again")
    options = (
        "--preset=demo --run_id=run --model_dim=32 --num_heads=2 --head_dim=16 "
        "--batch_unit=64 --num_scheduled_iterations=1 --num_extension_iterations=0 --val_every=0 --val_tokens=2048 "
        "--val_batch_tokens=1024 --sample_tokens=5 --fp8_head=False"
    )
    how = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}}
    run = run_fresh([sys.executable, path, f"--data={tmp_path}", f"--log_dir={tmp_path}", *options.split()], **how)
    assert run.returncode == 0, run.stderr
    log = read_log(tmp_path / "run.txt")
    assert (log.script, log.fault, log.problems, log.total) == (("idea.py", script), "", [], 1)
    assert log.modules and log.modules.items() <= sources.items()
    assert log.settings["model_dim"] == "32" and {"Python", "PyTorch", "CPU", "ranks"} <= set(log.facts)

    path, *_ = extract.extract(tmp_path / "run.txt", tmp_path / "alone")
    run = run_fresh([sys.executable, path, "--help"], **how)
    assert run.returncode == 0 and "--model_dim" in run.stdout, run.stderr
