"""Two scripts in alternation; an interrupted race resumes, a changed script or setting ends it.
With --max_pairs it ends with a verdict, and a row in the table of results."""

import fcntl
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import made_logs
from made_logs import ENVIRONMENT, ROOT, SOURCES, make_log, step_lines

import race
import t_tests
from runlog import read_log
from runtime.launch import SIGNALS


class Trainer:
    """In place of race.train: notes each run, and writes a log with the script as it is."""

    def __init__(self, folder):
        self.scripts = [folder / "base.py", folder / "idea.py"]
        self.logs = folder / "logs"
        self.runs, self.code, self.triton, self.edits = [], 0, "3.9.0", False
        self.gain, self.end, self.validates = 0.0, made_logs.END, True
        for i, path in enumerate(self.scripts):
            path.write_text(f"import torch\nx = {i}\n")

    def __call__(self, command):
        _, _, script, *options = command
        given = dict(option[2:].split("=") for option in options)
        self.runs.append((Path(script).stem, given["seed"], given.get("lr", "")))
        random.seed(Path(script).stem + given["seed"])
        text = ENVIRONMENT.replace("seed=0", f"seed={given['seed']}").replace("3.9.0", self.triton)
        loss = random.uniform(3.2, 3.3) - self.gain * (Path(script).stem == "idea")
        lines = step_lines(8, random.uniform(99, 101), loss, every=4 if self.validates else 8)
        lines = lines if self.validates else lines.partition("\n")[2]  # not before step 1 either
        sources = SOURCES | {"train_gpt.py": Path(script).read_bytes()}
        if self.edits:
            self.edit_idea()
        log = Path(given["log_dir"]) / f"{given['run_id']}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(make_log(sources, text, lines, self.end))
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


def test_a_race_started_twice_leaves_the_run_that_trains(trainer):
    trainer.race(2)
    path = trainer.logs / "idea" / "seed1.txt"
    path.write_bytes(path.read_bytes()[:-500])
    before = sorted(trainer.logs.rglob("*")), path.read_bytes()
    lock = path.with_suffix(".lock")
    with open(lock, "ab") as held:  # as runtime/run.py does
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="seed1.txt: this run is training now"):
            trainer.race(2)
        lock.unlink()
        assert (sorted(trainer.logs.rglob("*")), path.read_bytes()) == before
    lock.touch()  # left behind by kill -9
    trainer.race(2)
    assert len(trainer.runs) == 5


RUN = """
import signal, sys, time
def end(number, _):
    for other in NUMBERS:
        signal.signal(other, signal.SIG_IGN)
    print("ended", flush=True)
    sys.exit(128 + number)
for number in NUMBERS:
    signal.signal(number, end)
print("ready", flush=True)
time.sleep(120)  # ends a test in which no signal arrives
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_run_too(number, trainer, tmp_path):
    """The run's own end is waited for. Of kill -9 the run learns by the kernel."""
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("the kernel is Linux")
    run = RUN.replace("NUMBERS", str([*map(int, SIGNALS)]))
    (tmp_path / "launch.py").write_text(run)
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
        if number == signal.SIGINT:  # from a terminal it reaches the whole group
            subprocess.run(["kill", "-INT", "--", f"-{process.pid}"], check=True)
        else:
            process.send_signal(number)
        assert process.communicate()[0] == "ended\n"
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()


def verdict_of(trainer, capsys, *options):
    """(exit code, last line) of a race until there is a verdict."""
    table = f"--results={trainer.logs / 'results.tsv'}"
    arguments = [*map(str, trainer.scripts), f"--logs={trainer.logs}", table, *options]
    with pytest.raises(SystemExit) as stop:
        race.main(arguments)
    return stop.value.code, capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("gain, code, word", [(0.2, 0, "keep"), (-0.2, 10, "discard")])
def test_a_clear_difference_ends_the_race_at_its_first_look(gain, code, word, trainer, capsys):
    trainer.gain = gain
    trainer.end += "---\nval_loss: 3.2\nval_bpb: 0.91234\npeak_memory_MiB: 985\n"
    trainer.end += "total_seconds: 7.5\n"
    ended, line = verdict_of(trainer, capsys, "--max_pairs=12", "--note=a\tb\nc")
    assert ended == code and len(trainer.runs) == 10
    assert line.startswith(f"verdict: {word}, loss {'-+'[gain < 0]}0.")
    assert "99.9% interval" in line and "at level 0.001, 5 of 12 pairs, 75 s" in line
    assert verdict_of(trainer, capsys, "--max_pairs=12") == (code, line)  # nothing more to run
    assert len(trainer.runs) == 10
    head, row, again = (trainer.logs / "results.tsv").read_text().splitlines()
    named = dict(zip(head.split("\t"), row.split("\t"), strict=True))
    assert named["verdict"] == word and named["note"] == "a b c" and again[:50] == row[:50]
    assert (named["val_bpb"], named["peak_memory_MiB"]) == ("0.91234", "985")


@pytest.mark.parametrize("gain, pairs, most", [(0.0, 8, 12), (0.05, 5, 5)])
def test_it_ends_undecided_where_it_is_futile_or_at_the_end(gain, pairs, most, trainer, capsys):
    trainer.gain = gain
    code, line = verdict_of(trainer, capsys, f"--max_pairs={most}")
    assert code == 11 and line.startswith("verdict: undecided, loss ")
    assert f"{pairs} of {most} pairs" in line and len(trainer.runs) == 2 * pairs
    row = (trainer.logs / "results.tsv").read_text().splitlines()[1]
    assert "\t\t" in row  # no bits per byte in these logs


def test_losses_that_do_not_pair_are_judged_by_welchs_test(trainer, capsys, monkeypatch):
    monkeypatch.setattr(race, "LOSSES_PAIR", False)
    trainer.gain = 0.2
    _, line = verdict_of(trainer, capsys, "--max_pairs=5")
    folders = [trainer.logs / "base", trainer.logs / "idea"]
    logs = [[read_log(x / f"seed{i}.txt").loss for i in range(4)] for x in folders]
    assert "4 of 5 pairs" in line
    assert f"p = {t_tests.different(*logs).p:.3g} " in line


def test_the_time_to_equal_loss_needs_a_slope(trainer, capsys):
    trainer.gain = 0.2
    count = "--max_pairs=5", f"--results={trainer.logs}.tsv"
    code, line = verdict_of(trainer, capsys, *count, "--at=equal_loss")
    assert code == 0 and "verdict: keep, equal_loss -0." in line
    made = len(trainer.runs)
    trainer.logs, trainer.validates = trainer.logs.with_name("other"), False
    code, _ = verdict_of(trainer, capsys, *count, "--at=equal_loss")
    assert "no validation shortly before the end" in code and len(trainer.runs) == made + 2


@pytest.mark.parametrize("what", ["0 pairs", "another table", "a folder"])
def test_what_has_no_verdict_or_no_table_ends_before_the_first_run(what, trainer):
    path = trainer.logs.with_name("results.tsv")
    if what == "another table":
        path.write_text("\nname\tscore\n")
    elif what == "a folder":
        path.mkdir()
    count = "--max_pairs=0" if what == "0 pairs" else "--max_pairs=5"
    with pytest.raises(SystemExit, match="^race.py: error: (0 is too few|--results=).*$"):
        race.main(
            [*map(str, trainer.scripts), count, f"--logs={trainer.logs}", f"--results={path}"]
        )
    assert not trainer.runs and not trainer.logs.exists()
    assert what != "another table" or path.read_text() == "\nname\tscore\n"


def test_scripts_of_one_name_have_two_folders(tmp_path):
    assert race.names_of([tmp_path / "x/a.py", tmp_path / "y/a.py"]) == ["a-a", "b-a"]
