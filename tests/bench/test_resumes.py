"""bench/resumes.py: a script that resumes to the same bits is said to, one that keeps what no checkpoint holds is not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import resumes
from common import ROOT, SCRIPT, options, run_fresh, run_script

KEEPS = """        if self.training:
            CALLS.append(1)
            return len(CALLS) / 4 * """


@pytest.fixture
def tell(monkeypatch, capfd, shards, tmp_path):
    """tell(script, …): the exit code, and what is said; the runs are one rank's, without the launcher."""

    def run(script: Path, *arguments: str) -> tuple[int, list[str]]:
        given = [x for x in options(shards, tmp_path) if x.partition("=")[0][2:] not in resumes.OWN]
        code = resumes.main([f"{script}", *arguments, "--", *given])
        out, err = capfd.readouterr()
        return code, (out + err).splitlines()

    monkeypatch.setattr(resumes, "run_to_end", lambda command, **_: one_text(run_script(Path(command[1]), *command[2:])))
    return run


def one_text(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    return subprocess.CompletedProcess([], done.returncode, done.stdout + done.stderr)


def test_the_recipe_resumes_to_the_same_bits(tell):
    code, lines = tell(SCRIPT)
    said = r": 8 steps, resumed after 4 and 5: the same bits, \d\d entries and 3 validation losses"
    assert code == 0 and len(lines) == 1 and re.fullmatch(re.escape(f"{SCRIPT}") + said, lines[0])


def test_an_idea_that_counts_its_passes_does_not(tell, tmp_path):
    source, returns = SCRIPT.read_text(), "        if self.training:\n            return "
    assert source.count(returns) == 1
    (idea := tmp_path / "idea.py").write_text("CALLS = []\n" + source.replace(returns, KEEPS))
    code, (caution, *differ, last) = tell(idea, "--steps=5")
    assert code == 1 and "caution: passes or updates change idea.CALLS[" in caution
    said = r"resumed after step {}: \d\d of \d\d entries of the state differ at the end; same\.\S+( 5/5 val_loss:\S+ → 5/5 val_loss:\S+)?"
    assert len(differ) == 2 and all(re.fullmatch(said.format(step), line) for step, line in zip((2, 3), differ)), differ
    assert last == f"{idea} keeps what no checkpoint holds, or is another run each time: docs/reliability.md, Checkpoints"


def test_an_idea_that_does_something_at_every_third_update_does_not(tell, tmp_path):
    """Resumed after 3 and 6 it had the same bits: twice where it had begun."""
    source, sets = SCRIPT.read_text(), "        self.optimizer.lr_mul, self.optimizer.momentum = "
    assert source.count(sets) == 1
    line = next(line for line in source.splitlines() if line.startswith(sets))
    thirds = "\n        self.calls = getattr(self, 'calls', 0) + 1\n        self.optimizer.lr_mul *= 0.5 if self.calls % 3 == 0 else 1"
    (idea := tmp_path / "third.py").write_text(source.replace(line, line + thirds))
    code, (_, *differ, _) = tell(idea, "--steps=6")
    assert code == 1 and [line.partition(":")[0] for line in differ] == ["resumed after step 4"]


def test_a_run_that_fails_is_told_with_what_it_said(tell, tmp_path, capfd):
    (idea := tmp_path / "idea.py").write_text("import sys\nsys.exit('no such thing')")
    assert tell(idea) == (1, ["resumes.py: error: no such thing", "the run ended with code 1"])
    idea.write_text("")
    assert tell(idea) == (1, ["resumes.py: error: the run has written no log: does it train?"])


@pytest.mark.parametrize("arguments, said", [
    (["idea"], "idea: no training script, such as train_gpt.py"),
    (["--steps=3"], "argument --steps: 3 is not in 4..1000000"),
    (["--", "--save_every=2"], "--save_every is given by this tool: --steps says how many there are"),
])  # fmt: skip
def test_what_it_cannot_do_is_an_error_of_use(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        resumes.main(arguments)
    assert exit_.value.code == 2 and f": error: {said}\n" in capsys.readouterr().err


def test_it_starts_run_sh():
    done = run_fresh([sys.executable, ROOT / "bench" / "resumes.py", "nosuch.py"])
    said = "resumes.py: error: start.py: error: no such script: nosuch.py, in "
    assert done.returncode == 1 and done.stderr.startswith(said) and done.stderr.endswith("the run ended with code 1\n"), done
