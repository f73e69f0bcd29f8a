"""Two scripts in alternation; what was interrupted goes on, what has changed meanwhile is said."""

import signal
import subprocess
import sys
import time

import pytest

from made_logs import ROOT

import race
from runlog import read_log

# In place of runtime/launch.py: it notes the run, and writes the log of the script as it is.
TRAINER = """
import pathlib, random, sys
sys.path[:0] = [{tests!r}]
from made_logs import ENVIRONMENT, SOURCES, make_log, step_lines
script, *options = sys.argv[1:]
given = dict(option[2:].split("=") for option in options)
folder = pathlib.Path(given["log_dir"])
folder.mkdir(parents=True, exist_ok=True)
with open({runs!r}, "a") as file:
    print(pathlib.Path(script).stem, given["seed"], given.get("lr", ""), file=file)
source = pathlib.Path(script).read_bytes()
random.seed(script + given["seed"])
seed = f"seed={{given['seed']}}"
environment = ENVIRONMENT.replace("seed=0", seed).replace("lr=0.5", f"lr={{given.get('lr', 0.5)}}")
lines = step_lines(8, random.uniform(99, 101), random.uniform(3.2, 3.3))
{extra}
log = folder / (given["run_id"] + ".txt")
log.write_bytes(make_log(SOURCES | {{"train_gpt.py": source}}, environment, lines))
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Two scripts, and a trainer that takes no time; trainer(extra) has further lines."""
    paths = [tmp_path / "base.py", tmp_path / "idea.py"]
    for i, path in enumerate(paths):
        path.write_text(f"import torch\nx = {i}\n")

    def trainer(extra=""):
        path = tmp_path / "launch.py"
        tests = str(ROOT / "tests/records")
        path.write_text(TRAINER.format(tests=tests, runs=str(tmp_path / "runs"), extra=extra))
        monkeypatch.setattr(race, "LAUNCH", [sys.executable, str(path)])
        return path

    trainer()
    return [str(path) for path in paths], tmp_path / "logs", trainer


def runs(folder):
    path = folder.parent / "runs"
    return path.read_text().splitlines() if path.exists() else []


def start(scripts, count, *options):
    paths, folder, _ = scripts
    race.main([*paths, str(count), f"--logs={folder}", *options])
    return folder


def test_runs_alternate_with_a_seed_a_pair_and_are_compared_in_pairs(scripts, capsys):
    folder = start(scripts, 3, "--", "--lr=0.1")
    expected = ["base 0 0.1", "idea 0 0.1", "idea 1 0.1", "base 1 0.1", "base 2 0.1", "idea 2 0.1"]
    assert runs(folder) == expected
    assert {x.name for x in (folder / "idea").iterdir()} == {f"seed{i}.txt" for i in range(3)}
    assert "in pairs" in capsys.readouterr().out
    start(scripts, 4, "--", "--lr=0.1")
    assert len(runs(folder)) == 8  # the six stay


def test_a_run_that_was_cut_short_is_kept_and_made_again(scripts, capsys):
    folder = start(scripts, 2)
    path = folder / "idea" / "seed1.txt"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.find(b"step:6/8")])
    (folder / "idea" / "seed1").mkdir()  # its checkpoints
    start(scripts, 2)
    assert runs(folder)[4:] == ["idea 1 "] and not read_log(path).fault
    assert read_log(folder / "idea" / "seed1.cut1.txt").fault.startswith("cut short at step 5/8")
    assert (folder / "idea" / "seed1.cut1").is_dir()
    assert "seed1.cut1.txt: cut short" in capsys.readouterr().out


@pytest.mark.parametrize("which", ["while it runs", "between two starts"])
def test_a_script_that_is_edited_meanwhile_ends_the_race(which, scripts):
    paths, folder, trainer = scripts
    if which == "while it runs":
        trainer(f"open({paths[1]!r}, 'a').write('y = 1\\n')")
    else:
        start(scripts, 1)
        with open(paths[1], "a") as file:
            file.write("y = 1\n")
    with pytest.raises(SystemExit, match="sources|has changed since|another version"):
        start(scripts, 3)
    made = ["base 0 "] if which == "while it runs" else ["base 0 ", "idea 0 "]
    assert runs(folder) == made


def test_other_settings_or_versions_are_another_race(scripts):
    start(scripts, 1)
    with pytest.raises(SystemExit, match="have other options"):
        start(scripts, 2, "--", "--lr=0.2")
    scripts[2]("environment = environment.replace('Triton 3.9.0', 'Triton 3.8.0')")
    with pytest.raises(SystemExit, match="seed1.txt differs from .*seed0.txt: .*Triton"):
        start(scripts, 2)


def test_a_run_that_fails_ends_the_race_with_its_code(scripts):
    scripts[2]("sys.exit(3)")
    with pytest.raises(SystemExit) as stop:
        start(scripts, 2)
    assert stop.value.code == 3 and runs(scripts[1]) == ["base 0 "]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_too(number, scripts, tmp_path):
    """SIGTERM is passed on; Ctrl-C reaches the whole group. The run's own end is waited for."""
    paths, folder, trainer = scripts
    program = trainer(
        "import signal, time\n"
        "def end(number, _):\n    time.sleep(0.3); open(__file__ + '.ended', 'w'); sys.exit(128 + number)\n"
        "for number in (2, 15): signal.signal(number, end)\n"
        "open(__file__ + '.ready', 'w'); time.sleep(60)"
    )
    code = (
        f"import sys; sys.path.append({str(ROOT / 'records')!r}); import race\n"
        f"race.LAUNCH = [sys.executable, {str(program)!r}]\n"
        f"race.main({[*paths, '2', f'--logs={folder}']})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "launch.py.ready").exists() and time.monotonic() < end:
            time.sleep(0.05)
        if number == signal.SIGINT:
            subprocess.run(["kill", "-INT", "--", f"-{process.pid}"], check=True)
        else:
            process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert (tmp_path / "launch.py.ended").exists()
    finally:
        process.kill()


def test_names_of_the_folders(tmp_path):
    assert race.names_of([tmp_path / "a.py", tmp_path / "b.py"]) == ["a", "b"]
    assert race.names_of([tmp_path / "x/a.py", tmp_path / "y/a.py"]) == ["a-a", "b-a"]
    assert race.order(3) == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]
