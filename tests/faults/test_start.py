"""run.sh, runtime/launch.py and torchrun: what they start, and what stops a start with one line."""

import os
import shutil
import sys
import zipfile
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from common import ROOT, run_fresh

TRAIN = f"{ROOT / 'train_gpt.py'}"
SHOW = """
import os, sys
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"
os.write(1, f"{sys.argv[1:]} {[os.environ[name] for name in names]} {sys.path[0]}\\n".encode())
sys.exit(int(os.environ.get("CODE", 0)) if os.environ["RANK"] == "1" else 0)
"""


def launch(*arguments: str, **how) -> CompletedProcess:
    return run_fresh([sys.executable, f"{ROOT / 'runtime/launch.py'}", *arguments], **how)


def with_variables(**variables: str) -> dict[str, str]:
    """The environment, in which `python3` is this interpreter: it has the packages."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    without = ("RANKS", "GLOO_SOCKET_IFNAME", "SCRIPT")
    given = {name: value for name, value in os.environ.items() if name not in without}
    return {**given, "PATH": path, **variables}


@pytest.fixture
def show(tmp_path: Path) -> Path:
    """A script that prints what a rank is given."""
    path = tmp_path / "ideas" / "show.py"
    path.parent.mkdir()
    path.write_text(SHOW)
    return path


# run.sh


def test_run_sh_starts_two_ranks_of_a_script_from_any_folder(show):
    """Found in the current folder, with its own folder first on the path, as an extracted log's."""
    command = [f"{ROOT / 'run.sh'}", "show.py", "--a=1", "b c"]
    done = run_fresh(command, cwd=show.parent, env=with_variables())
    expected = [
        f"['--a=1', 'b c'] ['{rank}', '{rank}', '2', '2', '127.0.0.1', 'lo'] {show.parent}"
        for rank in (0, 1)
    ]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    assert (done.returncode, done.stderr) == (0, "")


def test_run_sh_starts_a_tool_as_it_is(tmp_path):
    command = [f"{ROOT / 'run.sh'}", "data/local_text.py", "--help"]
    done = run_fresh(command, cwd=tmp_path, env=with_variables())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: local_text.py")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that needs one package, torch 99.1, beside a wheel of it; a launcher prints its
    interpreter."""
    folder = tmp_path / "project"
    (folder / "runtime").mkdir(parents=True)
    shutil.copy(ROOT / "run.sh", folder)
    (folder / "requirements.txt").write_text("torch==99.1  # from 99.0\n")
    (folder / "runtime/requirements-hopper.txt").write_text("flash_attn_4==99.1\n")
    launcher = "import sys, torch; print(sys.executable, *sys.argv[1:])"
    (folder / "runtime/launch.py").write_text(launcher)
    with zipfile.ZipFile(tmp_path / "torch-99.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", "")
        info = "Metadata-Version: 2.1\nName: torch\nVersion: 99.1\n"
        wheel.writestr("torch-99.1.dist-info/METADATA", info)
        info = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("torch-99.1.dist-info/WHEEL", info)
        wheel.writestr("torch-99.1.dist-info/RECORD", "")
    return folder


def test_run_sh_makes_an_environment_once_and_needs_no_flash_attention(project):
    """On a Hopper GPU: where FlashAttention 4 cannot be installed, one line says so."""
    tools = project / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 9.0\n")
    (tools / "nvidia-smi").chmod(0o755)
    variables = with_variables(
        PIP_FIND_LINKS=f"{project.parent}", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull
    )
    variables["PATH"] = f"{tools}{os.pathsep}{variables['PATH']}"
    said = []
    for _ in range(2):
        done = run_fresh(["./run.sh", "--a=1"], cwd=project, env=variables, timeout=300)
        assert done.stdout == f"{project}/.venv/bin/python --a=1\n", done.stderr
        said += done.stderr.splitlines()
    assert "lacks torch 99.0: installing into .venv" in said[0]
    assert len(said) == 2 and said[1].startswith("run.sh: no FlashAttention 4, steps take ")


# runtime/launch.py


def test_a_missing_script_is_one_line():
    done = launch("nowhere.py", env=with_variables())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: nowhere.py: no such script")
    assert done.stderr.count("\n") == 1


def test_the_number_of_ranks_is_chosen_and_a_failed_ones_exit_code_is_the_runs(show):
    done = launch(f"{show}", env=with_variables(RANKS="3", CODE="143"))
    assert (done.returncode, done.stderr) == (143, "")
    assert done.stdout.count("'3', '3', '127.0.0.1'") == 3
    done = launch(f"{show}", env=with_variables(RANKS="100000"))
    assert done.stderr.startswith("error: RANKS=100000: more than ") and done.stdout == ""


# The training script


def test_an_unknown_option_is_one_line_from_one_rank(tmp_path):
    done = launch(TRAIN, "--num_schedule_iterations=3", cwd=tmp_path, env=with_variables())
    assert done.returncode == 2
    message = "error: unknown option --num_schedule_iterations=3; did you mean"
    assert done.stderr == f"{message} --num_scheduled_iterations?\n"
    assert list(tmp_path.iterdir()) == []
