"""Two scripts in alternation; an interrupted race resumes, a changed script or setting ends it."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from made_logs import ENVIRONMENT, ROOT, SOURCES, make_log, step_lines

import race
from runlog import read_log


class Trainer:
    """In place of race.train: notes each run, and writes a log with the script as it is."""

    def __init__(self, folder):
        self.scripts = [folder / "base.py", folder / "idea.py"]
        self.logs = folder / "logs"
        self.runs, self.code, self.triton, self.edits = [], 0, "3.9.0", False
        for i, path in enumerate(self.scripts):
            path.write_text(f"import torch\nx = {i}\n")

    def __call__(self, command):
        _, _, script, *options = command
        given = dict(option[2:].split("=") for option in options)
        self.runs.append((Path(script).stem, given["seed"], given.get("lr", "")))
        random.seed(script + given["seed"])
        text = ENVIRONMENT.replace("seed=0", f"seed={given['seed']}").replace("3.9.0", self.triton)
        lines = step_lines(8, random.uniform(99, 101), random.uniform(3.2, 3.3))
        sources = SOURCES | {"train_gpt.py": Path(script).read_bytes()}
        if self.edits:
            self.edit_idea()
        log = Path(given["log_dir"]) / f"{given['run_id']}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(make_log(sources, text, lines))
        return self.code

    def edit_idea(self):
        self.scripts[1].write_text("import torch\nx = 2\n")

    def race(self, count, *options):
        race.main([*map(str, self.scripts), str(count), f"--logs={self.logs}", *options])


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path)
    monkeypatch.setattr(race, "train", trainer)
    return trainer


def test_runs_alternate_with_a_seed_a_pair_and_are_compared_in_pairs(trainer, capsys):
    trainer.race(3, "--", "--lr=0.1")
    turns = ["base 0", "idea 0", "idea 1", "base 1", "base 2", "idea 2"]
    assert trainer.runs == [(*turn.split(), "0.1") for turn in turns]
    assert "in pairs" in capsys.readouterr().out
    trainer.race(4, "--", "--lr=0.1")
    assert len(trainer.runs) == 8  # the six stay


def test_a_run_that_was_cut_short_is_kept_and_made_again(trainer, capsys):
    trainer.race(2)
    path = trainer.logs / "idea" / "seed1.txt"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.find(b"step:6/8")])
    path.with_suffix("").mkdir()  # its checkpoints
    trainer.race(2)
    assert trainer.runs[4:] == [("idea", "1", "")] and not read_log(path).fault
    assert read_log(path.with_name("seed1.cut1.txt")).fault.startswith("cut short at step 5/8")
    assert path.with_name("seed1.cut1").is_dir()
    assert "seed1.cut1.txt: cut short" in capsys.readouterr().out


@pytest.mark.parametrize("when", ["while it runs", "between two starts"])
def test_a_script_that_is_edited_meanwhile_ends_the_race(when, trainer):
    trainer.edits = when == "while it runs"
    if not trainer.edits:
        trainer.race(1)
        trainer.edit_idea()
    made = len(trainer.runs) or 1
    with pytest.raises(SystemExit, match="has changed since|another version"):
        trainer.race(3)
    assert len(trainer.runs) == made


def test_other_settings_or_versions_are_another_race(trainer):
    trainer.race(1)
    with pytest.raises(SystemExit, match="have other options"):
        trainer.race(2, "--", "--lr=0.2")
    trainer.triton = "3.8.0"
    with pytest.raises(SystemExit, match="seed1.txt differs from .*seed0.txt: .*Triton"):
        trainer.race(2)


def test_a_run_that_fails_ends_the_race_with_its_code(trainer):
    trainer.code = 3
    with pytest.raises(SystemExit) as stop:
        trainer.race(2)
    assert stop.value.code == 3 and trainer.runs == [("base", "0", "")]


RUN = """
import signal, sys, time
def end(number, _):
    print("ended", flush=True)
    sys.exit(128 + number)
for number in (2, 15):
    signal.signal(number, end)
print("ready", flush=True)
time.sleep(120)  # ends a test in which no signal arrives
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_too(number, trainer, tmp_path):
    """SIGTERM is passed on; Ctrl-C reaches the whole group. The run's own end is waited for."""
    (tmp_path / "launch.py").write_text(RUN)
    code = (
        f"import sys; sys.path.append({str(ROOT / 'records')!r}); import race\n"
        f"race.LAUNCH = [sys.executable, {str(tmp_path / 'launch.py')!r}]\n"
        f"race.main({[*map(str, trainer.scripts), '2', f'--logs={trainer.logs}']})"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        if number == signal.SIGINT:
            subprocess.run(["kill", "-INT", "--", f"-{process.pid}"], check=True)
        else:
            process.send_signal(number)
        assert process.communicate()[0] == "ended\n" and process.returncode == 128 + number
    finally:
        process.kill()


def test_scripts_of_one_name_have_two_folders(tmp_path):
    assert race.names_of([tmp_path / "x/a.py", tmp_path / "y/a.py"]) == ["a-a", "b-a"]
