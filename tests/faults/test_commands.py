"""Promises 1, 6 and 7, through the commands that users type: any folder, any console, whole logs."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from common import ROOT, SCRIPT, options, run_fresh
from runtime.sources import RULE

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
}


IMPORT_LATE = """
forward = GPT.forward


def import_late(*batch):
    import parts.late
    return forward(*batch)


GPT.forward = import_late
for path in (__file__, own_part.__file__):  # as an editor while the run starts
    open(path, "a").write("# too late")
"""


def test_an_idea_runs_from_any_folder_and_its_log_holds_every_source(shards, tmp_path):
    """With a module beside it, and one that the first step imports, in a copy of the project. What is
    edited while the run starts is logged as it ran."""
    project = tmp_path / "project"
    ideas = project / "ideas"
    (ideas / "parts").mkdir(parents=True)
    for path in (*ROOT.glob("*.py"), ROOT / "run.sh", ROOT / "requirements.txt"):
        shutil.copy(path, project)
    for name in ("runtime", "data"):
        only_files = lambda _, names: [x for x in names if not x.endswith(".py")]
        shutil.copytree(ROOT / name, project / name, ignore=only_files)
    script = (ROOT / "train_gpt.py").read_text()
    script = script.replace("\nimport torch\n", "\nimport own_part\nimport torch\n", 1)
    main = '\nif __name__ == "__main__":\n'
    script = script.replace(main, IMPORT_LATE + main)
    (ideas / "idea.py").write_text(script)
    (ideas / "own_part.py").write_text("# own part\n")
    (ideas / "unused.py").write_text("# not imported\n")
    (ideas / ".#idea.py").symlink_to("me@host.1234")  # Emacs' lock of an edited file
    (ideas / "parts/late.py").write_text("# imported late\n")
    given = [x for x in options(shards, tmp_path) if not x.startswith("--log_dir")]
    command = [project / "run.sh", "ideas/idea.py", *given]
    done = run_fresh(command, cwd=tmp_path, env=ENVIRONMENT | {"RANKS": "1"}, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    log = (project / "logs/run.txt").read_text()
    sources, environment, lines, end = log.split(f"\n{RULE}\n")
    assert sources.startswith(f"{script}\n{'-' * 40}\n# data/")
    for name in ("runtime/run.py", "data/loader.py", "triton_kernels.py"):
        text = (project / name).read_text()
        assert f"\n# {name}\n{'-' * 40}\n{text}" in sources
    assert f"\n# ideas/own_part.py\n{'-' * 40}\n# own part\n" in sources
    assert "# too late" not in sources[len(script) :] and "# not imported" not in sources
    assert "\nshards: 'local_train_000000.bin' " in environment
    assert "step:8/8 val_loss:" in lines
    assert end.startswith("peak memory resident: ")
    assert lines.endswith(f"\n# ideas/parts/late.py\n{'-' * 40}\n# imported late\n")
    shown = [line for line in done.stdout.splitlines() if line.startswith("step:")]
    assert shown == [line for line in lines.splitlines() if line.startswith("step:")]


def test_torchrun_by_hand(shards, tmp_path):
    """From another folder, on two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc_per_node=2", SCRIPT, *options(shards, tmp_path)]
    done = run_fresh(command, cwd=tmp_path, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "\nstep:8/8 val_loss:" in (tmp_path / "logs/run.txt").read_text()


@pytest.mark.slow
def test_torchrun_restarts_ranks_after_a_fault(tmp_path):
    """Its store stays: the addresses in it are those of dead ranks."""
    first = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    fault = f"if step == 2: os._exit(ranks.rank if {first} else 0)"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command = [*torchrun, "--nproc_per_node=2", ROOT / "tests/faults/step_loop.py"]
    done = run_fresh(command, cwd=tmp_path, env=ENVIRONMENT | {"FAULT": fault}, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tool", ["train_gpt.py", "records/compare.py", "data/local_text.py"])
def test_a_console_that_has_not_all_characters(tmp_path, tool):
    """Help with an ellipsis, and errors that name a folder."""
    folder = tmp_path / "Ω"
    arguments = {"train_gpt.py": ["--help"], "records/compare.py": [folder]}
    command = [ROOT / tool, *arguments.get(tool, [f"--input={folder}", f"--output={folder}"])]
    variables = ENVIRONMENT | {"PYTHONIOENCODING": "ascii:strict"}
    done = run_fresh([sys.executable, *command], env=variables)
    assert "Traceback" not in done.stderr and re.search(r"\\u[02]", done.stdout + done.stderr)


@pytest.mark.parametrize("console", ["| head -n1", ">/dev/full 2>&1", ">&-"])
def test_a_console_that_takes_no_more_ends_nothing(shards, tmp_path, console):
    arguments = " ".join(options(shards, tmp_path))
    launch = f'"{sys.executable}" "{ROOT}/runtime/launch.py" "{SCRIPT}" {arguments} {console}'
    command = ["bash", "-o", "pipefail", "-c", launch]
    done = subprocess.run(command, env=ENVIRONMENT | {"RANKS": "1"}, capture_output=True, text=True)
    log = tmp_path / "logs/run.txt"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (f"log: {log}\n" if "head" in console else "")
    assert log.read_text().splitlines()[-1].startswith("peak_memory_MiB: ")
