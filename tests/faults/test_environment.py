"""Which packages launch/environment.py asks for: those of lines whose markers are true of this machine."""

import fcntl
import os
import subprocess
import sys
import time

import pytest

from launch import environment

LINUX = {"platform_system": "Linux", "platform_machine": "x86_64", "sys_platform": "linux"}
MAC = {"platform_system": "Darwin", "platform_machine": "arm64", "sys_platform": "darwin"}


@pytest.mark.parametrize(
    "marker, on_linux, on_mac",
    [
        ('platform_system == "Linux"', True, False),
        ("platform_system=='Linux'", True, False),
        (' platform_system != "Linux" ', False, True),
        ('platform_system == "Linux" and platform_machine == "x86_64"', True, False),
        ('platform_system == "Linux" and platform_machine == "aarch64"', False, False),
        ('platform_machine == "x86_64" or sys_platform == "darwin"', True, True),
    ],
)
def test_markers(monkeypatch, marker, on_linux, on_mac):
    for machine, holds in ((LINUX, on_linux), (MAC, on_mac)):
        monkeypatch.setattr(environment, "HERE", machine)
        assert environment.applies(marker) == holds


@pytest.mark.parametrize("marker", ['python_version >= "3.11"', "platform_system", '(platform_system == "Linux")'])
def test_a_marker_that_is_not_understood_is_named(marker):
    with pytest.raises(SystemExit) as exit_:
        environment.applies(marker)
    assert marker in str(exit_.value)


def test_what_a_killed_start_was_installing_keeps_others_out(tmp_path):
    """kill -9 leaves its pip, which goes on writing .venv; a second one wrote it at the same time."""
    work = f"from launch import environment\nwith environment.alone({str(tmp_path)!r}):\n    environment.run(['sleep', '1.5'])\n"
    process = subprocess.Popen([sys.executable, "-c", work], cwd=environment.ROOT)

    def is_free() -> bool:
        with open(tmp_path / ".venv.lock", "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    children = f"/proc/{process.pid}/task/{process.pid}/children"
    while not open(children).read():
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not is_free()
    with environment.alone(f"{tmp_path}"):  # waits for its end
        assert environment.HELD
    assert is_free() and not environment.HELD


def test_only_lines_that_apply_are_asked_for(monkeypatch, tmp_path):
    path = tmp_path / "requirements.txt"
    path.write_text('# all\nnumpy==9.9  # from 2.0\nabsent==1; platform_system == "Linux"  # from 0.9, module absent_too\n')
    monkeypatch.setattr(environment, "HERE", MAC)
    assert environment.missing([f"{path}"]) == []
    monkeypatch.setattr(environment, "HERE", LINUX)
    assert environment.missing([f"{path}"]) == ["absent"]


def test_triton_is_asked_for_where_it_has_a_wheel(monkeypatch):
    monkeypatch.setattr(environment, "version", lambda name: (_ for _ in ()).throw(environment.PackageNotFoundError(name)))
    for machine, asked in ((LINUX, True), (MAC, False)):
        monkeypatch.setattr(environment, "HERE", machine)
        assert ("triton" in environment.missing([f"{environment.ROOT}/requirements.txt"])) == asked


IMPORT = """
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
import train_gpt
"""


@pytest.mark.parametrize("given, found", [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_threads_are_told_to_wait_asleep_before_pytorch_loads(given, found):
    there = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command, how = [sys.executable, "-c", IMPORT], dict(capture_output=True, text=True, timeout=120)
    done = subprocess.run(command, cwd=environment.ROOT, env={**there, **given}, **how)
    assert done.stdout.split()[0] == found, done.stderr
