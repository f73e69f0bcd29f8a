"""The interpreter that launch/environment.py finds or makes, and the packages that it asks for: those of lines whose markers are
true of this machine; how it ends."""

import fcntl
import itertools
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from numpy._core import _multiarray_umath

from common import HAS_TRITON, ROOT, copy_project, exit_code, forked, text_of, wait_until
from launch import environment, start

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


def test_a_lock_that_is_held_for_a_moment_is_not_told(tmp_path, monkeypatch):
    """By another start that finds .venv whole; nobody makes or fills it then."""
    told, held = [], open(tmp_path / ".venv.lock", "ab")
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(environment, "tell", told.append)
    monkeypatch.setattr(environment.time, "sleep", lambda _: held.close())
    with environment.alone(f"{tmp_path}"):
        assert told == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_folders_of_pips(tmp_path, number):
    work = """
import signal, sys
from launch import environment
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
signal.signal(signal.SIGINT, signal.default_int_handler)
environment.run_quietly(["sh", "-c", 'mkdir "$TMPDIR/pip-unpack"; touch here; exec sleep 600'], "installing")
"""
    (tmp_path / "tmp").mkdir()
    there = {**os.environ, "TMPDIR": f"{tmp_path / 'tmp'}", "PYTHONPATH": environment.ROOT}
    process = subprocess.Popen([sys.executable, "-c", work], cwd=tmp_path, env=there, stderr=subprocess.DEVNULL)
    while not (tmp_path / "here").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    process.wait(60)
    assert not [*(tmp_path / "tmp").iterdir()]


def by_hand(*arguments, **how):
    command = [sys.executable, f"{environment.ROOT}/launch/environment.py", *arguments]
    return subprocess.run(command, **{"capture_output": True, "stdin": subprocess.DEVNULL, "text": True, "timeout": 60} | how)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["/nowhere"], "/nowhere: cannot be read: No such file or directory"),
        (["/"], "/: cannot be read: Is a directory"),
        ([sys.executable], f"{sys.executable}: is no text, as a file of requirements is"),
        (["--then"], "--then names no program to go on as"),
    ],
    ids=["missing", "folder", "binary", "no program"],
)
def test_what_is_no_file_of_requirements_is_named(arguments, said):
    done = by_hand(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"environment.py: error: {said}\n")


def test_by_hand_it_tells_its_use_and_a_full_disk():
    done = by_hand("--help")
    assert (done.returncode, done.stdout, done.stderr) == (0, environment.__doc__, "")
    without = subprocess.run([sys.executable, "-OO", environment.__file__, "--help"], capture_output=True, text=True)
    assert (without.returncode, without.stderr) == (0, "") and "first lines" in without.stdout
    with open("/dev/full", "w") as full:
        done = by_hand(capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "environment.py: error: stdout cannot be written: No space left on device\n")


def test_a_python_that_takes_itself_for_another_installs_nothing():
    """.venv's pip then installed beside the other one, and replaced what was there."""
    done = by_hand("requirements.txt", env={**os.environ, "PYTHONEXECUTABLE": "/x", "PIP_DRY_RUN": "1"})
    said = "environment.py: error: PYTHONEXECUTABLE=/x: every Python takes itself for that one: unset it\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize("home", ["/another", ""])
def test_another_pythons_library_is_named(home):
    """As a module of a cluster sets PYTHONHOME: a traceback of the import."""
    code = f"import runpy, sys; sys.modules['subprocess'] = None\nrunpy.run_path({environment.__file__!r}, run_name='__main__')"
    there = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    work = f"import os\nos.environ['PYTHONHOME'] = {home!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", work], env=there, capture_output=True, text=True, timeout=60)
    said = f"PYTHONHOME={home} is another Python's: unset it" if home else "half a Python: install it again"
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith(f"{sys.executable}: error: import of subprocess")
    assert done.stderr.endswith(f": {said}\n"), done


def test_a_python_that_fails_is_known_where_its_signal_is_ignored(tmp_path):
    """By the process that starts run.sh: the kernel then keeps no child's code, and Python reads 0."""
    shutil.copytree(f"{environment.ROOT}/launch", tmp_path / "launch")
    (tmp_path / "requirements.txt").write_text("nowhere_package")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/false")
    command = [sys.executable, f"{tmp_path}/launch/environment.py", f"{tmp_path}/requirements.txt"]
    ignored = {"preexec_fn": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **ignored)
    assert (done.returncode, done.stdout) == (1, "") and ".venv is no environment of Python: move it away" in done.stderr


def test_what_sends_pip_elsewhere_is_not_heeded(tmp_path):
    """As on a cluster, whose users install into their home. The package is a wheel that the test makes. In a terminal, where
    PYTHONINSPECT waited at prompts that nobody saw, with a start-up file of Python's that prints, and from a folder, as /tmp is,
    where others leave files that are named as Python's: they were run."""
    shutil.copytree(f"{environment.ROOT}/launch", tmp_path / "launch")
    (tmp_path / "requirements.txt").write_text("tiny_package==1.5\n")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "requirements.txt").touch()
    with zipfile.ZipFile(tmp_path / "tiny_package-1.5-py3-none-any.whl", "w") as wheel:
        info = "tiny_package-1.5.dist-info"
        wheel.writestr("tiny_package.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny_package\nVersion: 1.5\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    elsewhere = {name: f"{tmp_path}/elsewhere" for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON")}
    elsewhere |= dict.fromkeys(("PIP_USER", "PIP_DRY_RUN", "PIP_NO_DEPS"), "1")
    there = {**os.environ, **elsewhere, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{tmp_path}"}
    command = [sys.executable, f"{tmp_path}/launch/environment.py", f"{tmp_path}/requirements.txt"]
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text("print('welcome')")
    odd, (ours, terminal) = {"PYTHONINSPECT": "1", "PYTHONPATH": f"{tmp_path}/hook"}, pty.openpty()
    (stands := tmp_path / "shared").mkdir()
    for name in ("logging", "pip", "venv", "ensurepip", "subprocess"):
        (stands / f"{name}.py").write_text(f"open({f'{tmp_path}/ran'!r}, 'a').write(__name__ + ' ')\nraise SystemExit(1)")
    done = subprocess.run(command, env=there | odd, stdin=terminal, capture_output=True, text=True, timeout=100, cwd=stands)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    os.close(ours), os.close(terminal)
    assert (done.returncode, done.stdout) == (0, f"welcome\n{tmp_path}/.venv/bin/python\n"), done.stderr
    assert "welcome" not in done.stderr and not (tmp_path / "elsewhere").exists()
    assert [*tmp_path.glob(".venv/lib/*/site-packages/tiny_package.py")]
    (tmp_path / "requirements.txt").write_text("tiny_package==1.5\nother_package==1.0\n")
    (tmp_path / "pip.conf").write_text(f"[install]\ntarget = {tmp_path}/elsewhere\n")
    done = subprocess.run(command, env={**there, "PIP_CONFIG_FILE": f"{tmp_path}/pip.conf"}, capture_output=True, text=True, timeout=60)
    said = f"elsewhere than in .venv, or not all, by install.target = '{tmp_path}/elsewhere': pip config unset install.target\n"
    assert done.returncode == 1 and done.stderr.endswith(said) and not (tmp_path / "elsewhere").exists(), done.stderr
    (tmp_path / "pip.conf").write_text(f"[global]\npython = {sys.executable}\n")
    done = subprocess.run(command, env={**there, "PIP_CONFIG_FILE": f"{tmp_path}/pip.conf"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.endswith("pip config unset global.python\n"), done.stderr


@pytest.mark.parametrize("file", ["logging.py", "numpy.py", "scipy/__init__.py"])
@pytest.mark.parametrize("command", ["test.sh", "data/local_text.py", "records/compare.py", "bench/order.py", "sample.py"])
def test_a_file_of_the_users_that_hides_a_module_is_named_by_every_tool(tmp_path, command, file):
    """Beside train_gpt.py, where it began: each ended in a traceback. run.sh names it too: tests/faults/test_start.py."""
    root = Path(environment.ROOT)
    for folder in ("launch", "data", "records", "bench"):
        (tmp_path / folder).mkdir()
        for module in root.glob(f"{folder}/*.py"):
            shutil.copy(module, tmp_path / folder)
    for name in ("test.sh", "sample.py", "train_gpt.py", "requirements.txt"):
        shutil.copy(root / name, tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("x = 1")
    assert {*start.MODULES} < {*environment.OURS}
    path, name = tmp_path / file.replace("/__init__.py", ""), re.match(r"\w+", file)[0]
    begin = ["bash"] if command == "test.sh" else [sys.executable]
    done = subprocess.run([*begin, tmp_path / command, "--help"], capture_output=True, text=True, timeout=60)
    said = f"{Path(command).name}: error: {path} hides the module '{name}' that others import: rename it\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("script", ["run.sh", "test.sh"])
def test_its_messages_bear_the_name_of_the_command_that_was_typed(tmp_path, script, shell):
    (tmp_path / "launch").mkdir()
    for name in (script, "launch/environment.py"):
        shutil.copy(Path(environment.ROOT, name), tmp_path / name)
    done = subprocess.run([shell, tmp_path / script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and re.fullmatch(rf"{script}: error: \S*requirements.txt: cannot be read: .*\n", done.stderr)


@pytest.mark.parametrize("arguments, missing", [
    (["tests/nosuch.py"], "tests/nosuch.py"), (["tests", "records"], ""), (["-k", "welch"], ""), (["-kwelch", "tests/b.py::c"], "tests/b.py::c"),
    (["--durations", "9"], ""), (["tests/one.py::two"], ""), (["tests/one.py::two", "--maxfail=1", "nosuch"], "nosuch"),
])  # fmt: skip
def test_tests_that_are_not_there_are_named(tmp_path, arguments, missing):
    """pytest's workers said "no tests ran", and nothing of the path."""
    for folder in ("launch", "tests", "records"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests" / "one.py").touch()
    shutil.copy(Path(environment.ROOT, "test.sh"), tmp_path / "test.sh")
    (tmp_path / "launch" / "environment.py").write_text("import sys; print('python3')")
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(bool)")
    (tmp_path / "pytest.py").write_text("import sys; print(sys.argv[4:], sys.argv[1] == '--numprocesses=0')")
    command = ["bash", tmp_path / "test.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": f"{tmp_path}"})
    said = f"test.sh: error: no such tests: {missing}, in {tmp_path}\n" if missing else ""
    alone = "::" in f"{arguments}"  # pytest's workers say "no tests ran", and not which of these are none
    assert (done.returncode, done.stderr, done.stdout) == (bool(missing), said, "" if missing else f"{arguments} {alone}\n")
    if not missing:  # an idea's are the recipe's alone, unless others are named
        idea = shutil.copy(tmp_path / "pytest.py", tmp_path / "idea.py")
        variables = os.environ | {"PYTHONPATH": f"{tmp_path}", "SCRIPT": f"{idea}"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
        named = any((tmp_path / x.partition("::")[0]).exists() for x in arguments)
        assert done.stdout == f"{arguments if named else [*arguments, 'tests/recipe']} {alone}\n"


@pytest.mark.parametrize("arguments, code", [([], 4), (["tests/recipe/test_pins.py"], 5)])
def test_all_tests_begin_with_room_for_their_files(tmp_path, arguments, code):
    """On a full disk 207 failed, 777 had errors, and few named it."""
    (tmp_path / "little_room.py").write_text(
        "import shutil\nfrom types import SimpleNamespace\nshutil.disk_usage = lambda _: SimpleNamespace(free=1 << 30)\n"
        "pytest_collection = lambda: True  # finds no tests, which takes its time\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "little_room", *arguments]
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}", "TMPDIR": f"{tmp_path}"}
    done = subprocess.run(command, cwd=environment.ROOT, env=environ, capture_output=True, text=True, timeout=60)
    said = f"ERROR: all tests need 2.0 GiB in {tmp_path}, 1.0 GiB are free: make room, or TMPDIR=FOLDER ./test.sh\n\n"
    assert (done.returncode, done.stderr) == (code, said if code == 4 else ""), done.stdout


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


START = """
import os, runpy, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            names = ("OMP_WAIT_POLICY", "OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS", "OMP_NUM_THREADS")
            names += ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME")
            print(*map(os.environ.get, names), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PROGRAMS = [path for folder in (".", "bench") for path in sorted(Path(environment.ROOT, folder).glob("*.py"))]
PROGRAMS = {f"{path.relative_to(environment.ROOT)}": path for path in PROGRAMS if '__name__ == "__main__"' in path.read_text()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_threads_are_told_to_wait_asleep_before_pytorch_loads(program):
    """Beside a busy process those that are not took minutes for what takes seconds. Nor are there fewer than PyTorch asks for: a
    validation loss was nan, or a number of unwritten products. An empty folder of compiled code is none: it would be the current."""
    there = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    there |= {"OMP_DYNAMIC": "true", "OMP_MAX_ACTIVE_LEVELS": "0", "OMP_THREAD_LIMIT": "2", "OMP_NUM_THREADS": "9"}
    there |= {"TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": "", "TRITON_HOME": ""}
    command, how = [sys.executable, "-c", START, f"{PROGRAMS[program]}", "--help"], dict(capture_output=True, text=True, timeout=120)
    found, *others = subprocess.run(command, cwd=environment.ROOT, env=there, **how).stdout.split()
    assert found in ("passive", "usage:")  # the second: a program that loads it later, or not at all
    assert found == "usage:" or others == ["None", "None", "2", "None", "None", "None"]
    if found == "passive":
        assert subprocess.run(command, env={**there, "OMP_WAIT_POLICY": "active"}, **how).stdout.split()[0] == "active"


TOOLS = ["sample.py", *(f"data/{name}.py" for name in ("local_text", "cached_fineweb10B", "fineweb"))]
TOOLS += [f"bench/{name}.py" for name in (
    "codegen", "communication", "cpu_step", "first_minutes", "gpu", "grad_dtype", "kernels", "mutants", "optimizer", "order", "resumes",
    "verdicts")]  # fmt: skip
TOOLS += [f"records/{name}.py" for name in ("compare", "history", "plan", "race")]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The project, with a .venv whose python says what it goes on with, and a Python without packages."""
    root = copy_project(tmp_path_factory.mktemp("bare") / "project")
    for folder in ("bench", "data", "records"):
        (root / folder).mkdir(exist_ok=True)
        for path in (*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("requirements.txt")):
            shutil.copy(path, root / folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{root.parent / 'python'}"], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{root / '.venv'}"], check=True)
    python = root / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text('#!/bin/sh\ncase "$*" in *--missing*) exit 0;; esac\necho "goes on: $*"\n')
    python.chmod(0o755)
    return root, root.parent / "python" / "bin" / "python"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_goes_on_in_the_environment_that_run_sh_has_made(bare, tool):
    """It ended in a traceback, of a module that it lacked."""
    root, python = bare
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([f"{python}", tool, "--x=1"], cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"goes on: {tool} --x=1\n", "")


def test_every_tool_is_among_them():
    programs = {f"{path.relative_to(ROOT)}" for folder in ("bench", "data", "records") for path in (ROOT / folder).glob("*.py")
                if 'if __name__ == "__main__":' in path.read_text()}  # fmt: skip
    others = {"records/extract.py", "bench/order_validation.py"}  # one needs no packages, one is order.py's ranks
    assert programs | {"sample.py"} == {*TOOLS} | others


def package(folder: Path, name: str, version: str, source: str | None = "") -> None:
    """Installed, as pip leaves it; source None: half of it."""
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (folder / name).mkdir()
    if source is not None:
        (folder / name / "__init__.py").write_text(source)


VERSIONS = {"1.0": ["thing_x from 2.0"], "1.26.4": ["thing_x from 2.0"], "2.0": [], "2.13.0+cpu": [], "10.1": []}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_package_serves_from_its_oldest_version_on(tmp_path, monkeypatch, version):
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, "thing_x", version)
    (tmp_path / "requirements.txt").write_text("# needed\nthing_x==2.4.6  # from 2.0\n\n")
    assert environment.missing([f"{tmp_path / 'requirements.txt'}"]) == VERSIONS[version]


def test_a_package_that_is_half_there_is_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("thing_a", "thing_b", "thing_c"):
        package(tmp_path, name, "3.0", None if name == "thing_b" else "")
    shutil.rmtree(tmp_path / "thing_a")
    lines = "".join(f"thing_{x}==3.0  # from 2.0\n" for x in "abcd")
    (tmp_path / "requirements.txt").write_text(lines)
    half = ", which is half installed"
    assert environment.missing([f"{tmp_path / 'requirements.txt'}"]) == [f"thing_a{half}", f"thing_b{half}", "thing_d"]


def test_a_shared_library_that_is_cut_short_is_missing(tmp_path, monkeypatch):
    """As by a power cut: to import it was a bus error, without a word. One that is stripped is shorter as well, and serves."""
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, "thing_s", "3.0")
    whole = Path(_multiarray_umath.__file__).read_bytes()
    (tmp_path / "thing_s" / "lib_s.so.1").write_bytes(whole)
    (tmp_path / "thing_s-3.0.dist-info" / "RECORD").write_text(f"thing_s/lib_s.so.1,sha256=x,{len(whole) + 99}\n")
    (tmp_path / "requirements.txt").write_text("thing_s==3.0  # from 2.0\n")
    asked = [f"{tmp_path / 'requirements.txt'}"]
    assert environment.missing(asked) == []
    os.truncate(tmp_path / "thing_s" / "lib_s.so.1", 100_000)
    assert environment.missing(asked) == ["thing_s, whose lib_s.so.1 is cut short"]
    (tmp_path / "thing_s-3.0.dist-info" / "RECORD").write_bytes(b"\xff")
    assert environment.missing(asked) == []


def test_this_environment_serves_and_the_files_say_from_which_versions_on():
    files = [ROOT / name for name in ("requirements.txt", "records/requirements.txt", "tests/requirements.txt")]
    lines = [line for path in files for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+(; [^#]+)?  # from [\d.]+(, module \w+)?(: .*)?", line) for line in lines), lines
    (asked,) = [environment.LINE.match(line)[2] for line in lines if line.startswith("triton==")]
    lacks = [] if HAS_TRITON or not environment.applies(asked) else ["triton"]
    assert environment.missing([*map(str, files)]) == lacks == environment.missing_there(sys.executable, [*map(str, files)])


def test_another_interpreter_is_asked_what_it_lacks(tmp_path):
    (tmp_path / "requirements.txt").write_text("no_such_package==1.0  # from 1.0\n")
    assert environment.missing_there(sys.executable, [f"{tmp_path / 'requirements.txt'}"]) == ["no_such_package"]
    assert environment.missing_there("/nowhere/python", []) is None is environment.missing_there("/bin/false", [])


def test_a_python_that_is_too_old_never_serves(tmp_path, monkeypatch, capsys):
    """Whatever packages it has."""
    monkeypatch.setattr(environment, "OLDEST", (3, 99))
    assert environment.missing([f"{ROOT / 'requirements.txt'}"]) == ["Python 3.99 or later"]
    with pytest.raises(SystemExit) as exit_:
        environment.ensure([f"{ROOT / 'requirements.txt'}"], f"{tmp_path}")
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert re.search(rf"run.sh: error: .+ is Python {here}: 3.99 or later is needed", exit_.value.code)


TOO_OLD = """
import argparse, builtins, contextlib, importlib.util, pathlib, runpy, sys, typing
run = runpy.run_path
runpy.run_path = lambda path, **how: {"go_on": sys.exit} if path.endswith("environment.py") else run(path, **how)
builtins.dict = type("dict", (dict,), {"__class_getitem__": None})  # before 3.9
sys.version_info = (3, 8, 1)
sys.argv = sys.argv[1:]
run(sys.argv[0], run_name="__main__")
"""
SAID = {"sample.py": "requirements.txt\n", "launch/start.py":
        "start.py: error: needs Python 3.11 or later: start by run.sh, which finds one, or makes .venv\n"}  # fmt: skip


@pytest.mark.parametrize("program", SAID)
def test_a_python_too_old_goes_on_as_another_or_is_told(program):
    """It was a traceback: of an annotation, and of a flag."""
    done = subprocess.run([sys.executable, "-c", TOO_OLD, f"{ROOT}/{program}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", SAID[program])


def test_so_it_is_where_python_lacks_what_we_import():
    """3.6 and 3.7 have no importlib.metadata: a traceback."""
    code = "import runpy, sys; sys.modules['importlib.metadata'] = None; sys.version_info = (3, 7, 1); sys.argv[1:] = ['--missing']\n"
    code += f"runpy.run_path({f'{ROOT}/launch/environment.py'!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("lacks: Python 3.11 or later\n", "")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """ensure() on a requirement that only .venv will have, and the commands that it runs instead of venv and pip."""
    (tmp_path / "requirements.txt").write_text("no_such_package==1.0  # from 1.0\n")
    commands: list = []

    def run_quietly(command, purpose):
        commands.append(command[1:4])
        if "venv" in command:
            python = Path(command[-1], "bin", "python")
            python.unlink(missing_ok=True)
            python.parent.mkdir(parents=True, exist_ok=True)
            python.symlink_to(sys.executable)

    answers = itertools.chain([["no_such_package"]], itertools.repeat([]))  # of the .venv that is made, and once it is filled
    real = environment.missing_there
    exists = lambda python, files: next(answers) if real(python, files) is not None else None
    monkeypatch.setattr(environment, "run_quietly", run_quietly)
    monkeypatch.setattr(environment, "missing_there", exists)
    return lambda: environment.ensure([f"{tmp_path / 'requirements.txt'}"], f"{tmp_path}"), commands, tmp_path / ".venv"


@pytest.mark.parametrize("before", ["nothing", "its python is gone", "made by Windows", "half made"])
def test_an_environment_without_its_python_is_made_again(made, before, capsys):
    """And kept aside, once: its Python may be there outside of a container, where a run trains from it."""
    ensure, commands, venv = made
    if before != "nothing":
        (venv / "bin").mkdir(parents=True)
        (venv / "pyvenv.cfg").touch()
    if before == "half made":
        (venv / "lib").mkdir()
    kept = before in ("its python is gone", "made by Windows")  # in the same checkout, by WSL: bin/python was never there
    if kept:
        python = venv / "bin" / "python"
        if before == "its python is gone":
            python.symlink_to("/nowhere/python3")
        (venv / "Scripts").mkdir()
        (venv / "Scripts" / "python.exe").write_text("MZ")
        (aside := venv.with_name(".venv.gone")).mkdir()
        with pytest.raises(SystemExit, match=f"{venv} has lost its Python, as {aside} before: remove that one"):
            ensure()
        aside.rmdir()
        capsys.readouterr()
    assert ensure() == f"{venv / 'bin' / 'python'}"
    assert commands == [["-m", "venv", "--clear"], ["-m", "pip", "install"]]
    printed = capsys.readouterr()
    told = [line.partition(": ")[2] for line in printed.err.splitlines()]
    assert printed.out == "" and told[0] == f"{sys.executable} lacks no_such_package: making .venv"
    if kept:
        gone = "/nowhere/python3" if before == "its python is gone" else python
        assert told.pop(1) == f"the Python of .venv, {gone}, is not here: it is .venv.gone now, to be removed"
        assert (aside / "pyvenv.cfg").exists() and (aside / "Scripts" / "python.exe").read_text() == "MZ"
    assert told[1] == "installing into .venv, which takes minutes the first time: no_such_package"
    assert re.fullmatch(r".venv is ready \(\d+ s\)", told[2])


@pytest.mark.parametrize("kind", ["a link to a folder", "a folder of files", "a file", "a link to an environment"])
def test_what_is_no_environment_is_not_emptied(made, tmp_path, kind):
    ensure, commands, venv = made
    place = tmp_path / "elsewhere" if "link" in kind else venv
    if kind != "a file":
        (place / "work").mkdir(parents=True)
        place = place / "work" / "thesis.txt"
    place.write_text("mine")
    if "link" in kind:
        venv.symlink_to(tmp_path / "elsewhere")
    if kind == "a link to an environment":
        (venv / "pyvenv.cfg").touch()
    with pytest.raises(SystemExit, match=f"lacks no_such_package, and {venv} is no environment of Python: move it away"):
        ensure()
    assert place.read_text() == "mine" and commands == []


def test_an_environment_whose_python_fails_is_not_emptied(made):
    """As of another processor, by a PYTHONHOME, or killed by the system: it runs elsewhere, or later."""
    ensure, commands, venv = made
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin" / "python").symlink_to("/etc/hostname")
    with pytest.raises(SystemExit, match=f"{venv} does not run here: start where its Python runs, or remove it"):
        ensure()
    assert commands == [] and (venv / "pyvenv.cfg").exists()


def test_the_environment_of_another_user_is_not_emptied(made, monkeypatch):
    """Its Python lies in that user's home, which others may not enter; a run of his goes on."""
    ensure, commands, venv = made
    venv.mkdir()
    (venv / "pyvenv.cfg").touch()
    monkeypatch.setattr(os, "geteuid", lambda: venv.stat().st_uid + 1)
    with pytest.raises(SystemExit, match=f"{venv} is another user's, whose Python does not run for you: work in a copy of the"):
        ensure()
    assert commands == [] and (venv / "pyvenv.cfg").exists()


def test_an_environment_that_may_not_be_filled_is_named(made, monkeypatch):
    """Another user's, made by run.sh alone: ./test.sh ended in pip's "Permission denied", of some file in it."""
    ensure, commands, venv = made
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(SystemExit, match=f"{venv}/bin/python lacks no_such_package, and you may not write {venv}: its owner can, or"):
        ensure()
    assert commands == []


def test_two_first_starts_make_one_environment(made, monkeypatch):
    """The second begins while the first makes it, and waits."""
    (ensure, commands, venv), make, waiting, found = made, environment.run_quietly, threading.Event(), []
    monkeypatch.setattr(environment, "run_quietly", lambda *given: (waiting.wait(60), make(*given)))
    monkeypatch.setattr(environment, "tell", lambda message: "waiting" in message and waiting.set())
    starts = [threading.Thread(target=lambda: found.append(ensure())) for _ in range(2)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join(100)
    assert found == [f"{venv / 'bin' / 'python'}"] * 2 and waiting.is_set()
    assert commands == [["-m", "venv", "--clear"], ["-m", "pip", "install"]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_run_sh_ends_what_makes_the_environment(tmp_path, number):
    project, here = tmp_path / "project", tmp_path / "here"
    (project / "launch").mkdir(parents=True)
    (project / ".venv" / "bin").mkdir(parents=True)
    for name in ("run.sh", "launch/environment.py"):
        shutil.copy(ROOT / name, project / name)
    (project / "requirements.txt").write_text("no_such_package==1.0  # from 1.0\n")
    python = project / ".venv" / "bin" / "python"
    python.write_text(f"#!/bin/sh\nhere={shlex.quote(f'{here}')}\necho $$ > \"$here.tmp\"; mv \"$here.tmp\" \"$here\"; exec sleep 600\n")
    python.chmod(0o755)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    heard = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup
    started = subprocess.Popen(["bash", project / "run.sh"], env={**os.environ, "PATH": path}, preexec_fn=heard)
    wait_until(here.exists)
    started.send_signal(number)
    assert started.wait(60) == 128 + number
    wait_until(lambda: not Path("/proc", here.read_text().strip()).exists())


def test_a_signal_while_a_command_starts_ends_it_too(tmp_path, monkeypatch):
    """The command runs already, but who started it has not come back from that."""
    start, started = subprocess.Popen.__init__, tmp_path / "started"

    def slow_start(process, *args, **options) -> None:
        start(process, *args, **options)
        started.write_text(f"{process.pid}")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

    def work() -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        monkeypatch.setattr(subprocess.Popen, "__init__", slow_start)
        environment.run(["sleep", "600"])

    assert exit_code(forked(work, tmp_path / "output")) == 143, text_of(tmp_path / "output")
    wait_until(lambda: not Path("/proc", started.read_text()).exists())


def test_pip_is_heard_only_if_it_fails(capfd):
    environment.run_quietly([sys.executable, "-c", "print('WARNING: running as root')"], "installing")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(SystemExit) as exit_:
        environment.run_quietly([sys.executable, "-c", "print('no such package'); raise SystemExit(3)"], "installing")
    assert exit_.value.code == "run.sh: error: installing failed, code 3:\nno such package"
    with pytest.raises(SystemExit) as exit_:
        environment.run_quietly([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "installing")
    assert exit_.value.code == "run.sh: error: installing failed, killed by signal 9 (out of memory?):\n"
