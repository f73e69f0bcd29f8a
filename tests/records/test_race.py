"""A race alternates two scripts, goes on where it ended, and takes no log that is not its own."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("scipy", reason="pip install -r records/requirements.txt")
pytest.importorskip("rich", reason="pip install -r records/requirements.txt")

from common import run_fresh
from made_logs import ROOT

import race
import tool
from runlog import read_log

# What stands for ./run.sh: script, options; a log of that script at once, slower by its seed, and a line in calls.txt.
TRAINER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from made_logs import ENVIRONMENT, make_log, step_lines
script, options = Path(sys.argv[1]), dict(option[2:].split("=", 1) for option in sys.argv[2:])
seed, slow = int(options["seed"]), script.stem == "before"
calls = Path({calls!r})
if "BANKRUN_CHECK_ALONE" in os.environ:
    sys.exit(Path({calls!r} + ".refused").exists())
with open(calls, "a") as file:
    file.write(f"{{script.stem}}{{seed}} {{' '.join(options)}}\\n")
fails = Path({calls!r} + ".fails")
lines = step_lines(8, (20 + seed % 2 if slow else 10) + seed, 3.27 + seed / 1000)
if fails.exists():
    lines = lines[:200]
environment = ENVIRONMENT.replace("SCRIPT ", f"shards: 'd_train_0.bin' {{Path({calls!r} + '.data').read_text()}}\\nSCRIPT ")
text = make_log(script=script.read_bytes(), lines=lines, environment=environment.replace("seed=0", f"seed={{seed}}"))
path = Path(options["log_dir"], options["run_id"] + ".txt")
assert not path.exists()
path.write_bytes(text)
sys.exit(int(fails.read_text() or 7) if fails.exists() else 0)
"""


@pytest.fixture
def track(tmp_path, monkeypatch):
    """start(more arguments): a race of before.py and after.py, 3 of each; its folder is logs/."""
    for name in ("before", "after"):
        (tmp_path / f"{name}.py").write_text(f"x = '{name}'\ndef step():\n    import package.part\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("x = 1\n")
    (tmp_path / "calls.txt.data").write_text("0000000a")
    (tmp_path / "trainer").mkdir()
    trainer = tmp_path / "trainer" / "run.py"
    trainer.write_text(TRAINER.format(tests=str(ROOT / "tests" / "records"), calls=str(tmp_path / "calls.txt")))
    monkeypatch.setattr(race, "RUN", (sys.executable, str(trainer)))
    scripts = [str(tmp_path / f"{name}.py") for name in ("before", "after")]
    return lambda *more, runs=3: race.main([*scripts, f"{runs}", f"--logs={tmp_path / 'logs'}", *more])


def calls(tmp_path):
    return [line.split()[0] for line in (tmp_path / "calls.txt").read_text().splitlines()]


def test_runs_alternate_and_are_compared_in_pairs(track, tmp_path, capfd):
    track("--", "--val_every=0")
    assert calls(tmp_path) == ["before0", "after0", "after1", "before1", "before2", "after2"]
    assert all(line.endswith(" val_every seed log_dir run_id") for line in (tmp_path / "calls.txt").read_text().splitlines())
    for name in ("before", "after"):
        assert sorted(path.name for path in (tmp_path / "logs" / name).iterdir()) == [f"seed{i}.txt" for i in range(3)]
    out = capfd.readouterr().out
    assert "race: run 6 of 6: after, seed 2" in out and "after: FASTER by 0.083 s" in out and "in pairs" in out
    assert "before losses: 3.2700, 3.2710, 3.2720" in out and "| after  |    3 |" in out
    track("--", "--val_every=0")
    track("--compare")
    assert len(calls(tmp_path)) == 6
    capfd.readouterr()
    scripts = (f"{tmp_path}/{name}.py" for name in ("before", "after"))
    race.main([*scripts, "1", f"--logs={tmp_path / 'logs'}", "--", "--val_every=0"])
    assert len(calls(tmp_path)) == 6 and "in pairs" in capfd.readouterr().out  # of all that are there


def test_an_idea_that_cannot_start_costs_no_run(track, tmp_path, capfd):
    """The baseline's first run was made before, and made again as the idea was mended, which began another race."""
    refused = tmp_path / "calls.txt.refused"
    refused.touch()
    with pytest.raises(SystemExit, match="after, seed 0: ended with code 1. Mend what it says above: then the same command begins"):
        track()
    assert not (tmp_path / "calls.txt").exists()
    refused.unlink()
    (tmp_path / "after.py").write_text("x = 'mended'\n")
    track()
    assert len(calls(tmp_path)) == 6
    refused.touch()
    (tmp_path / "logs" / "before" / "seed0.txt").unlink()
    track()  # the idea's log stands: nothing is checked, nor set aside
    assert calls(tmp_path)[6:] == ["before0"] and "race: after: checked before before's first run" in capfd.readouterr().out


def test_a_reader_that_has_enough_ends_no_race(track, tmp_path, monkeypatch):
    """As of `| head -2`: it ended after its first run, with code 0."""
    receiver, sender = os.pipe()
    os.close(receiver)
    monkeypatch.setattr(sys, "stdout", gone := os.fdopen(sender, "w"))
    track()
    with contextlib.suppress(OSError):
        gone.close()
    assert len(calls(tmp_path)) == 6


def test_a_full_disk_at_its_begin_leaves_nothing(track, tmp_path, monkeypatch):
    """It left empty folders."""
    monkeypatch.setattr(race.tool, "write", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SystemExit, match="No space left"):
        track()
    assert not (tmp_path / "logs").exists()


def test_it_goes_on_where_it_ended(track, tmp_path, capfd):
    track()
    (tmp_path / "logs" / "after" / "._seed0.txt").touch()  # macOS's, on a foreign disk
    for name in ("after/seed1.txt", "before/seed2.txt"):
        (tmp_path / "logs" / name).unlink()
    (tmp_path / "calls.txt.fails").touch()
    with pytest.raises(SystemExit, match="after, seed 1: ended with code 7. The same command goes on from there"):
        track()
    assert read_log(tmp_path / "logs" / "after" / "seed1.txt").fault
    (tmp_path / "calls.txt.fails").unlink()
    track()
    assert calls(tmp_path)[6:] == ["after1", "after1", "before2"]
    assert (tmp_path / "logs" / "after" / "seed1.cut1.txt").exists()
    assert "set aside: " in (out := capfd.readouterr().out) and "seed1.cut1.txt: cut short" in out


def test_the_code_of_a_run_that_a_signal_ended_is_the_races(track, tmp_path, capfd):
    (tmp_path / "calls.txt.fails").write_text("143")
    with pytest.raises(SystemExit) as ended:
        track()
    said = "race.py: before, seed 0: ended by SIGTERM. The same command goes on from there\n"
    assert ended.value.code == 143 and capfd.readouterr().err == said


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 3), (signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 0), (signal.SIGHUP, None)]
)
def test_a_signal_to_a_race_reaches_its_run_and_ends_it(tmp_path, number, code):
    """Also one whose run has ended well all the same, or died of it: no other begins. Twice, as from a service manager."""
    hears = "" if code is None else f"signal.signal(15, lambda *_: (signal.signal(15, signal.SIG_IGN), sys.exit({code})))\n"
    run = f"import signal, sys, time\n{hears}open({f'{tmp_path}/begun'!r}, 'w')\n"
    run += "time.sleep(1 if {0} == 2 else 50)".format(int(number))

    def begin() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        sys.exit(race.run_to_its_end([sys.executable, "-c", run]))

    if not (child := os.fork()):
        try:
            begin()
        except SystemExit as ended:
            os._exit(ended.code)
    deadline = time.monotonic() + 30
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(2):
        os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (code or 128 + number)


def test_a_runs_code_is_known_where_its_signal_is_ignored():
    """By the process that starts the race: the kernel then keeps no child's code, and Python reads 0."""
    source = f"import sys\nsys.path[:0] = ['{ROOT}/records', '{ROOT}']\nimport race\nsys.exit(race.run_to_its_end(['false']))"
    done = subprocess.run([sys.executable, "-c", source], preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert done.returncode == 1


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child that its parent is gone")
def test_kill_9_of_a_race_ends_its_run(tmp_path):
    """As by an OOM kill: it trained on, beside what was started next."""
    script = f"import os, signal, sys\nsys.path[:0] = ['{ROOT}/records', '{ROOT}']\nimport race\n"
    run = f"import signal, sys, time\nsignal.signal(15, lambda *_: (open({f'{tmp_path}/ended'!r}, 'w'), sys.exit()))\n"
    run += f"open({f'{tmp_path}/begun'!r}, 'w')\ntime.sleep(60)\nopen({f'{tmp_path}/late'!r}, 'w')"
    process = subprocess.Popen([sys.executable, "-c", f"{script}race.run_to_its_end([sys.executable, '-c', {run!r}])"])
    for name in ("begun", "ended"):
        deadline = time.monotonic() + 30
        while not (tmp_path / name).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    process.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "ended"]


def test_kill_9_at_its_start_leaves_a_race_that_goes_on(track, tmp_path, monkeypatch):
    """Here an error in its place, before what says which race it is has its name; and one once it has."""
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match="no more"):
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError("no more")))
            track()
        assert not (tmp_path / "logs").exists()
    for name in (".", "before", "after"):
        (tmp_path / "logs" / name).mkdir()
    (tmp_path / "logs" / "race.json.bankrun.tmp").write_text("{")  # as kill -9 leaves it
    track()
    assert len(calls(tmp_path)) == 6
    before = (tmp_path / "logs" / "race.json").read_text()
    monkeypatch.setattr(tool, "write", None)
    track()
    assert (tmp_path / "logs" / "race.json").read_text() == before and len(calls(tmp_path)) == 6


def test_the_log_of_a_run_that_goes_on_is_left_alone(track, tmp_path):
    """Of a second race at once, or after a kill -9 of the first one."""
    (tmp_path / "calls.txt.fails").touch()
    with pytest.raises(SystemExit, match="ended with code 7"):
        track()
    folder = tmp_path / "logs" / "before"
    with open(folder / "seed0.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="before/seed0.txt: its run is under way in another process: wait for its end"):
            track()
    assert sorted(path.name for path in folder.iterdir()) == ["seed0.lock", "seed0.txt"] and calls(tmp_path) == ["before0"]
    (folder / "seed0.lock").unlink()
    os.mkfifo(folder / "seed0.lock")  # is not waited for
    (tmp_path / "calls.txt.fails").unlink()
    (folder / "seed0").mkdir()
    (folder / "seed0" / "step_000001.pt").touch()  # the run made again would delete it
    (folder / "seed0.trace.json").touch()  # and refuse to replace this
    track()
    assert (folder / "seed0.cut1.txt").exists() and (folder / "seed0.cut1" / "step_000001.pt").exists()
    assert (folder / "seed0.cut1.trace.json").exists() and not (folder / "seed0.trace.json").exists()
    assert not (folder / "seed0").exists()


@pytest.mark.parametrize("kept", ["seed0.cut1.txt", "seed0.cut1/step_000001.pt", "seed0.cut1.trace.json"])
def test_what_is_set_aside_takes_no_name_of_what_was(track, tmp_path, monkeypatch, kept):
    """As where seed0.cut1.txt was deleted and its checkpoints were not: the race could never go on, nor beside checkpoints alone.
    An error midway leaves all as it was."""
    folder = tmp_path / "logs" / "before"
    (tmp_path / "calls.txt.fails").touch()
    with pytest.raises(SystemExit, match="ended with code 7"):
        track()
    (tmp_path / "calls.txt.fails").unlink()
    for name in (kept, "seed0/step_000002.pt", "seed0.trace.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    left, rename = sorted(folder.rglob("*")), Path.rename

    def fails(old, new):
        if old.name == "seed0.txt":
            raise OSError("no more")
        return rename(old, new)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="no more"):
        patch.setattr(Path, "rename", fails)
        track()
    assert sorted(folder.rglob("*")) == left
    for log in (folder / "seed0.txt", folder / "seed1.txt"):
        log.with_suffix("").mkdir(exist_ok=True)
    track()
    assert (folder / kept).read_text() in ("", kept) and (folder / "seed0.cut2.txt").exists() and (folder / "seed1.cut1").is_dir()
    assert {path.name for path in (folder / "seed0.cut2").iterdir()} == {"step_000002.pt"} and len(calls(tmp_path)) == 7


def test_a_run_that_would_end_so_again_is_not_said_to_go_on(track, tmp_path, monkeypatch):
    """A whole run was made again at each start, for a second loss that its script writes."""
    for code, said in (("0", "0: ended well, but its log: cut short.*: mend the script, and begin anew, with another --logs"),
                       ("2", "0: ended with code 2. Mend what it says above")):  # fmt: skip
        (tmp_path / "calls.txt.fails").write_text(code)
        with pytest.raises(SystemExit, match=said):
            track()


def test_runs_of_one_script_and_other_sources_are_told_by_file(track, tmp_path):
    """As of a module that a script imports by a name which it computes."""
    track()
    log = tmp_path / "logs" / "after" / "seed1.txt"
    log.write_bytes(log.read_bytes().replace(b"def kernel()", b"def other()"))
    with pytest.raises(SystemExit, match="seed1.txt: made otherwise than .*/after/seed0.txt: sources: triton_kernels.py: move it"):
        track()


def test_a_file_in_the_folders_place_is_named(track, tmp_path):
    (tmp_path / "logs").touch()
    with pytest.raises(SystemExit, match="^race.py: error: .*/logs is no folder, or a link to one that is not there: give another --logs$"):
        track()


def test_a_project_of_another_user_is_named_and_what_to_do(track, tmp_path, monkeypatch):
    """Python's "[Errno 13] Permission denied", of a folder that is not there."""
    monkeypatch.setattr(race.tool.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(SystemExit, match=f"^race.py: error: {tmp_path} may not be written to: give another --logs$"):
        track()
    assert not (tmp_path / "logs").exists()
    (folder := tmp_path / "logs").mkdir()
    monkeypatch.setattr(race.tool.os, "access", lambda path, mode: path != folder)
    with pytest.raises(SystemExit, match=f"^race.py: error: {folder} may not be written to: give another --logs$"):
        track()


def test_a_link_to_a_disk_that_is_not_mounted_is_named(track, tmp_path):
    """The folders of its mount point were made."""
    (tmp_path / "logs").symlink_to(tmp_path / "disk" / "logs")
    with pytest.raises(SystemExit, match="^race.py: error: .*/logs is no folder, or a link to one that is not there: give another --logs$"):
        track()
    assert not (tmp_path / "disk").exists()


def test_two_races_in_one_folder_are_one_too_many(track, tmp_path):
    """Both wrote race.json; the second ended in the loss of its temporary file."""
    (tmp_path / "logs").mkdir()
    with tool.alone(tmp_path / "logs"), pytest.raises(SystemExit, match="another race is at work in .*/logs: wait, or give another"):
        race.main([f"{ROOT}/train_gpt.py"] * 2 + ["1", f"--logs={tmp_path}/logs"])
    assert not [*(tmp_path / "logs").iterdir()]


def test_every_source_of_a_run_is_watched(tmp_path):
    """What a run's log would hold, and what starts it."""
    told = []
    for folder, code in (
        (ROOT, "import train_gpt as t; print(*t.SOURCES.imported(), sep=chr(10))"),
        (ROOT / "records", "import race; print(*race.sources([race.ROOT / 'train_gpt.py']), sep=chr(10))"),
    ):
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {f'{folder}'!r}); {code}"]
        done = run_fresh(command, check=True, cwd=tmp_path)
        told.append({*done.stdout.splitlines()})
    imported, watched = told
    assert len(imported) > 20 and imported | {"launch/start.py"} <= watched


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("user@host.1234:5"), Path.mkdir, os.mkfifo])
def test_what_no_run_can_import_is_not_watched(tmp_path, make):
    """As the link that Emacs makes for a file with unsaved edits, here .#own.py."""
    script, own = tmp_path / "my-idea.py", tmp_path / "own.py"
    script.write_text("import own, other")
    own.touch()
    for name in (".#own.py", "other.py"):
        make(tmp_path / name)
    assert [path for path in race.sources([script]) if path.startswith(f"{tmp_path}")] == [f"{script}", f"{own}"]


def test_files_that_no_script_imports_may_come_and_change(track, tmp_path, monkeypatch):
    """As the next idea, which is written beside those that race: a night was lost to it."""
    real = race.run_to_its_end

    def writes(command):
        with open(tmp_path / "next_idea.py", "a") as file:
            file.write("import after\n")
        return real(command)

    monkeypatch.setattr(race, "run_to_its_end", writes)
    track()
    (tmp_path / "more.py").write_text("x = 1\n")
    track()
    assert len(calls(tmp_path)) == 6 and len((tmp_path / "next_idea.py").read_text().splitlines()) == 7


def test_a_module_of_a_tools_name_is_watched_with_what_it_imports(tmp_path):
    """This process has others of these names."""
    for name, text in (("idea", "import tool"), ("tool", "import own, runtime"), ("own", ""), ("runtime/__init__", "")):
        (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    watched = [path for path in race.sources([tmp_path / "idea.py"]) if path.startswith(f"{tmp_path}")]
    assert watched == [f"{tmp_path}/{name}.py" for name in ("idea", "own", "runtime/__init__", "tool")]


def test_what_this_program_has_imported_hides_no_source_of_a_script(tmp_path):
    """Of a record's sources, as extract.py writes them, launch/ and runtime/ were not watched: whole runs were made in vain."""
    for folder in ("launch", "runtime", "data"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("local", "fineweb*", "__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "__init__.py").touch()
    (tmp_path / "groups" / "core.py").write_text("K = 1\n")  # a name of records/, which this process has imported
    (tmp_path / "idea.py").write_text("import train_gpt\nfrom groups.core import K\n")
    before = {*sys.modules}
    watched = {path.removeprefix(f"{tmp_path}/") for path in race.sources([tmp_path / "idea.py"]) if path.startswith(f"{tmp_path}/")}
    assert watched >= {"launch/machine.py", "launch/console.py", "runtime/run.py", "runtime/ranks.py", "data/loader.py", "groups/core.py"}
    assert before <= {*sys.modules}


@pytest.mark.parametrize(
    "what", ["source", "module", "package", "option", "scripts", "foreign log", "logs without a race", "broken notes", "deep notes"]
)
def test_what_would_mix_two_races_is_refused(track, tmp_path, what):
    track(runs=1)
    more, said = (), "give another --logs"
    if what == "source":
        (tmp_path / "after.py").write_text("x = 2\n")
        said = rf"holds a race of other sources: {tmp_path}/after\.py: put them back"
    elif what == "module":
        (tmp_path / "package.py").write_text("x = 2\n")
        said = rf"holds a race of other sources: {tmp_path}/package\.py \(new\): put them back"
    elif what == "package":
        (tmp_path / "package" / "part.py").write_text("x = 2\n")
        said = rf"holds a race of other sources: {tmp_path}/package/part\.py: put them back"
    elif what == "option":
        more, said = ("--", "--val_every=9"), r"holds a race of other options \(none before, --val_every=9 now\)"
    elif what == "scripts":  # whose folders hold nothing yet: its notes went in the first race's place
        (tmp_path / "before.py").rename(tmp_path / "left.py")
        (tmp_path / "after.py").rename(tmp_path / "right.py")
        with pytest.raises(SystemExit, match="holds a race of other scripts"):
            race.main([f"{tmp_path}/left.py", f"{tmp_path}/right.py", "1", f"--logs={tmp_path / 'logs'}"])
        (tmp_path / "left.py").rename(tmp_path / "before.py")
        (tmp_path / "right.py").rename(tmp_path / "after.py")
        track(runs=1)
        said = None
    elif what == "foreign log":
        (tmp_path / "logs" / "after" / "mine.txt").write_bytes(b"")
        said = r"mine\.txt: not of this race"
    elif what == "logs without a race":
        (tmp_path / "logs" / "race.json").unlink()
        said = r"seed0\.txt: not of this race"
    else:
        (tmp_path / "logs" / "race.json").write_text("[1]" if what == "broken notes" else "[" * 100_000)
        said = "not what a race writes"
    if said:
        with pytest.raises(SystemExit, match=said):
            track(*more, runs=1)
    assert len(calls(tmp_path)) == 2


def test_a_race_goes_on_where_its_project_has_moved(tmp_path, monkeypatch):
    """Renamed, or of another mount: each of its files was gone, and another was new."""
    logs, names = tmp_path / "logs", ["before", "after"]
    (logs / "before").mkdir(parents=True)
    monkeypatch.setattr(race, "named_by", lambda script: frozenset())

    def conditions(project: str) -> dict:
        scripts = [tmp_path / project / "before.py", tmp_path / project / "ideas" / "after.py"]
        scripts[1].parent.mkdir(parents=True, exist_ok=True)
        for script in scripts:
            script.write_text("import json\n")
        monkeypatch.setattr(race, "ROOT", tmp_path / project)
        return race.conditions(scripts, [])

    now = conditions("here")
    assert race.check(logs, names, now)
    (logs / "race.json").write_text(json.dumps(now))
    (logs / "before" / "seed0.txt").touch()
    assert not race.check(logs, names, conditions("there"))
    with_paths = {f"{tmp_path}/there/{name}": digest for name, digest in now["sources"].items()}  # as once it noted them
    scripts = [f"{tmp_path}/there/{script}" for script in now["scripts"]]
    (logs / "race.json").write_text(json.dumps({**now, "scripts": scripts, "sources": with_paths}))
    assert not race.check(logs, names, conditions("there"))
    now = conditions("there")
    now["sources"]["before.py"] = "another"
    with pytest.raises(race.RaceError, match=r"holds a race of other sources: before\.py: put them back"):
        race.check(logs, names, now)


def test_a_race_without_a_log_begins_anew(track, tmp_path, monkeypatch):
    """As after a wrong option, which ended its first run: "put them back" was all it said."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="ended with code 2"):
        patch.setattr(race, "RUN", (sys.executable, "-c", "raise SystemExit(2)"))
        track("--", "--see=3")
    track("--", "--val_every=0")
    assert len(calls(tmp_path)) == 6 and json.loads((tmp_path / "logs" / "race.json").read_text())["options"] == ["--val_every=0"]


def test_runs_are_of_the_python_that_the_race_has(tmp_path, monkeypatch):
    """run.sh takes the first python3 of the PATH, as of a system that has no packages: it made .venv beside an environment that
    was not activated."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(race, "ROOT", tmp_path)  # the tests' own Python may be the project's .venv
    assert race.run_to_its_end(["bash", "-c", f"[ $(command -v python3) = {Path(sys.executable).parent}/python3 ]"]) == 0
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/.venv/bin/python3")
    assert race.with_this_python()["PATH"] == "/usr/bin:/bin"


def test_a_source_that_changes_ends_the_race(track, tmp_path, monkeypatch):
    real = race.run_to_its_end

    def edits(command):
        if command[0] != "env":
            (tmp_path / "after.py").write_text("x = 3\n")
        return real(command)

    monkeypatch.setattr(race, "run_to_its_end", edits)
    with pytest.raises(SystemExit, match=f"changed since the race began: sources: {tmp_path}/after.py: put them back"):
        track()
    assert calls(tmp_path) == ["before0"]


@pytest.mark.parametrize("after", ["before0", "after0"])
def test_a_run_on_other_data_ends_the_race(track, tmp_path, monkeypatch, after):
    """As where --data is relative, and the race goes on from another folder."""
    real, data = race.run_to_its_end, tmp_path / "calls.txt.data"

    def then_other_data(command):
        code = real(command)
        if command[0] != "env" and calls(tmp_path)[-1] == after:
            data.write_text("0000000b")
        return code

    monkeypatch.setattr(race, "run_to_its_end", then_other_data)
    log = tmp_path / "logs" / {"before0": "after/seed0.txt", "after0": "after/seed1.txt"}[after]
    said = f"race.py: error: {log}: made otherwise than {tmp_path}/logs/before/seed0.txt: other tokens in d_train_0.bin: "
    for _ in range(2):
        with pytest.raises(SystemExit, match=re.escape(said)):
            track()
        assert len(calls(tmp_path)) == {"before0": 2, "after0": 3}[after]
        monkeypatch.setattr(race, "run_to_its_end", real)
    log.unlink()
    data.write_text("0000000a")
    track()


def test_a_script_may_read_what_the_other_does_not(track, tmp_path):
    """A configuration beside an idea: the race went on with another one. The baseline reads none."""
    data, after = tmp_path / "calls.txt.data", tmp_path / "logs" / "after"
    track()
    for seed in range(3):
        (after / f"seed{seed}.txt").unlink()
    data.write_text("0000000a\nread by its sources: config.json='CRC-32 00000001'")
    track()
    (after / "seed1.txt").unlink()
    data.write_text("0000000a\nread by its sources: config.json='CRC-32 00000002'")
    with pytest.raises(SystemExit, match="seed0.txt: read by its sources config.json='CRC-32 00000001' → config.json='CRC-32 00000002'"):
        track()


def test_a_run_with_other_variables_ends_the_race(track, tmp_path):
    """It went on seven times slower, under a note. Another script may tell others, as of another version of the project."""
    track()
    (tmp_path / "logs" / "after" / "seed1.txt").unlink()
    data = tmp_path / "calls.txt.data"
    data.write_text("0000000a\nvariables: ATEN_CPU_CAPABILITY='default'")
    said = "after/seed1.txt: made otherwise than .*/after/seed0.txt: variables: none → ATEN_CPU_CAPABILITY='default': move it"
    with pytest.raises(SystemExit, match=said):
        track()
    for seed in range(3):
        (tmp_path / "logs" / "after" / f"seed{seed}.txt").unlink()
    track()


@pytest.mark.parametrize("more", [["--", "--seed=1"], ["--", "--run_id", "x"], ["--target=nan"]])
def test_options_that_are_the_races_own_are_refused(track, more):
    with pytest.raises(SystemExit) as error:
        track(*more)
    assert error.value.code == 2


def test_what_is_no_script_is_refused(tmp_path, capsys):
    """It ended the first run: "the same command goes on from there"."""
    (tmp_path / "notes.md").touch()
    with pytest.raises(SystemExit, match="2"):
        race.main([f"{ROOT}/train_gpt.py", f"{tmp_path}/notes.md", "1", f"--logs={tmp_path}/logs"])
    assert "notes.md: no script: must end in .py" in capsys.readouterr().err and not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        (["--val_every=3", "7"], "--val_every=3: unknown here; options of the runs stand after --, as: -- --val_every=3 7"),
        (["--", "--help"], "--help after -- is the script's: ./run.sh --help"),
        (["--", "--seed=3"], "--seed is the race's to give"),
    ],
)
def test_options_of_the_runs_stand_after_two_hyphens(tmp_path, capsys, options, said):
    with pytest.raises(SystemExit, match="2"):
        race.main([f"{ROOT}/train_gpt.py", f"{ROOT}/sample.py", "1", f"--logs={tmp_path}/logs", *options])
    told = capsys.readouterr().err
    assert said in told and "N [-- --option=value ...]" in told and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("left", [False, True])
def test_a_race_that_is_refused_at_once_leaves_nothing(track, tmp_path, left):
    """Its folders and race.json stayed. What a run leaves, as a log, keeps them."""
    (tmp_path / "calls.txt.refused").touch()
    if left:
        (tmp_path / "logs" / "after").mkdir(parents=True)
        (tmp_path / "logs" / "after" / "notes").touch()
    with pytest.raises(SystemExit, match="after, seed 0: ended with code 1. Mend what it says above"):
        track("--", "--val_every=0")
    assert (tmp_path / "logs" / "race.json").exists() == left == (tmp_path / "logs").exists()


def test_scripts_of_one_name_have_two_folders(tmp_path):
    assert race.names_of([tmp_path / "a" / "idea.py", tmp_path / "b" / "idea.py"]) == ["a-idea", "b-idea"]
    assert tool.ROOT == ROOT and race.RUN[0] == str(ROOT / "run.sh")


def test_a_run_that_ends_with_a_code_that_is_no_signals_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "RUN", [sys.executable, "-c", "import sys; sys.exit(255)"])
    scripts = [tmp_path / "a.py", tmp_path / "b.py"]
    for script in scripts:
        script.write_text("")
    monkeypatch.setattr(race, "conditions", lambda *_: {})
    with pytest.raises(race.RaceError, match="b, seed 0: ended with code 255"):
        race.race(scripts, 1, tmp_path / "logs", [])
