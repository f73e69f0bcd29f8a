"""run.sh, runtime/launch.py and torchrun: what they start, and what stops a start with one line."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from common import ROOT

LOOP = f"{Path(__file__).with_name('step_loop.py')}"
TRAIN = f"{ROOT / 'train_gpt.py'}"
SHOW = """
import os, sys
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"
os.write(1, f"{sys.argv[1:]} {[os.environ[name] for name in names]} {sys.path[0]}\\n".encode())
sys.exit(int(os.environ.get("CODE", 0)) if os.environ["RANK"] == "1" else 0)
"""


def run(command: list[str], **how) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **how)


def launch(*arguments: str, **how) -> subprocess.CompletedProcess:
    return run([sys.executable, f"{ROOT / 'runtime/launch.py'}", *arguments], **how)


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
    done = run(command, cwd=show.parent, env=with_variables())
    expected = [
        f"['--a=1', 'b c'] ['{rank}', '{rank}', '2', '2', '127.0.0.1', 'lo'] {show.parent}"
        for rank in (0, 1)
    ]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    assert (done.returncode, done.stderr) == (0, "")


def test_run_sh_starts_a_tool_as_it_is(tmp_path):
    command = [f"{ROOT / 'run.sh'}", "data/local_text.py", "--help"]
    done = run(command, cwd=tmp_path, env=with_variables())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: local_text.py")


def make_wheel(folder: Path, name: str) -> None:
    """A package of version 99.1 with one empty module."""
    info = f"{name}-99.1.dist-info"
    with zipfile.ZipFile(folder / f"{name}-99.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.1\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with run.sh, a launcher that prints its interpreter, and torch as its one package."""
    folder = tmp_path / "project"
    (folder / "runtime").mkdir(parents=True)
    shutil.copy(ROOT / "run.sh", folder)
    (folder / "runtime/launch.py").write_text(
        "import sys, torch; print(sys.executable, *sys.argv[1:])"
    )
    make_wheel(tmp_path, "torch")
    return folder


def test_run_sh_makes_an_environment_once_with_flash_attention_on_hopper(project):
    """Where that cannot be installed, one line says so, with pip's reason. Other GPUs do not try."""
    (project / "requirements.txt").write_text("torch==99.1  # from 99.0\n")
    (project / "runtime/requirements-hopper.txt").write_text("flash_attn_4==99.1\n")
    nvidia_smi = project.parent / "tools/nvidia-smi"
    nvidia_smi.parent.mkdir()
    variables = with_variables(
        PIP_FIND_LINKS=f"{project.parent}", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull
    )
    variables["PATH"] = f"{nvidia_smi.parent}{os.pathsep}{variables['PATH']}"

    def said(capability: str) -> list[str]:
        """On stderr, on a GPU of that capability."""
        nvidia_smi.write_text(f"#!/bin/sh\necho {capability}\n")
        nvidia_smi.chmod(0o755)
        done = run(["./run.sh", "--a=1"], cwd=project, env=variables)
        assert done.stdout == f"{project}/.venv/bin/python --a=1\n", done.stderr
        return done.stderr.splitlines()

    def forget_torch() -> None:
        for path in (project / ".venv").rglob("torch-*"):
            shutil.rmtree(path)

    (line,) = said("8.9")
    assert "lacks torch 99.0: installing into .venv" in line
    assert said("8.9") == []
    forget_torch()
    _, line = said("9.0")
    without = "run.sh: no FlashAttention 4, steps take an estimated 4 to 8 % longer: "
    assert line.startswith(without + "ERROR: No matching distribution found for flash")
    make_wheel(project.parent, "flash_attn_4")
    forget_torch()
    assert len(said("9.0")) == 1
    assert len(list((project / ".venv").rglob("flash_attn_4.py"))) == 1


# runtime/launch.py


WRONG = {
    "no script": (["nowhere.py"], {}, "nowhere.py: no such script"),
    "no number": ([LOOP], {"RANKS": "two"}, "RANKS=two: must be a whole number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_start_that_cannot_be_is_one_line(case):
    arguments, variables, message = WRONG[case]
    done = launch(*arguments, env=with_variables(**variables))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_the_number_of_ranks_is_chosen_and_a_failed_ones_exit_code_is_the_runs(show):
    done = launch(f"{show}", env=with_variables(RANKS="3", CODE="143"))
    assert (done.returncode, done.stderr) == (143, "")
    assert done.stdout.count("'3', '3', '127.0.0.1'") == 3


# The training script


def test_an_unknown_option_is_one_line_from_one_rank(tmp_path):
    done = launch(TRAIN, "--num_schedule_iterations=3", cwd=tmp_path, env=with_variables())
    assert done.returncode == 2
    message = "error: unknown option --num_schedule_iterations=3; did you mean"
    assert done.stderr == f"{message} --num_scheduled_iterations?\n"
    assert list(tmp_path.iterdir()) == []
