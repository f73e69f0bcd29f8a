"""The log holds every source that took part, exactly; what is extracted from it runs to the same bits. ./run.sh starts it."""

import ast
import importlib
import json
import os
import py_compile
import shlex
import shutil
import subprocess
import sys
import types
import zipfile
import zlib
from pathlib import Path

import pytest

import train_gpt
from common import MODULES, ROOT, SCRIPT, copy_project, ends_with, lines_of, options, run_fresh, unequal
from launch import sources as launch_sources
from runtime.checkpoints import read_checkpoint
from runtime.log import log_header
from launch.sources import Sources, python_files
from sample import load_script
from train_gpt import main

CPU = min(os.sched_getaffinity(0))
HELPER = "SCALE = 1.0  # é\r\n\n"
END = "step_000008.pt"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project as users have it, with an idea in a folder of its own that has its own kernels; its parent is no part, and
    named as if only installed packages were in it."""
    root = copy_project(tmp_path_factory.mktemp("place") / "dist-packages" / "project")
    shutil.copy(SCRIPT, root / "train_gpt.py")
    write_idea(root / "ideas", "idea.py", "my_kernels")
    return root


def write_idea(folder: Path, script: str, helper: str) -> None:
    """A copy of the script that imports a helper beside it."""
    folder.mkdir()
    (folder / script).write_text(f"import {helper}\n{SCRIPT.read_text()}")
    (folder / f"{helper}.py").write_bytes(HELPER.encode())


def run_sh(project: Path, standing_in: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """./run.sh of the project, on one rank and one core."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "RANKS": "1", "PYTHONPATH": ""}
    return subprocess.run(
        [f"{project / 'run.sh'}", *arguments], cwd=standing_in, env=environment, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: os.sched_setaffinity(0, {CPU}),
    )  # fmt: skip


def start_py(project: Path, standing_in: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What run.sh ends in, the same without the seconds that PyTorch's import takes."""
    return run_fresh(
        [sys.executable, project / "launch" / "start.py", *arguments],
        cwd=standing_in, env={**os.environ, "RANKS": "1", "PYTHONPATH": ""}, preexec_fn=lambda: os.sched_setaffinity(0, {CPU}),
    )  # fmt: skip


def sources_of(log: Path) -> dict[str, bytes]:
    """What a log holds, by path; the script's, which has none there, is that of the settings' line."""
    sources, environment, _ = log.read_bytes().split(b"\n" + b"=" * 100 + b"\n", 2)
    line = b"\n" + b"-" * 40 + b"\n"
    script, *others = sources.split(line)
    name = environment.splitlines()[-1].partition(b" ")[0].decode()
    paths = [path.decode().removeprefix("# ") for path in others[::2]]
    return {name: script, **dict(zip(paths, others[1::2], strict=True))}


@pytest.fixture(scope="module")
def idea(project, shards, tmp_path_factory):
    """The folder of a run of ideas/idea.py, started from elsewhere by its path in the project."""
    folder = tmp_path_factory.mktemp("idea")
    result = start_py(project, folder, "ideas/idea.py", *options(shards, folder, save_every=4))
    assert result.returncode == 0, result.stderr
    return folder


def test_the_log_holds_every_file_that_was_imported(idea, project):
    found = sources_of(idea / "logs" / "run.txt")
    runtime = {f"runtime/{path.name}" for path in (project / "runtime").glob("*.py")}
    data = {"data/__init__.py", "data/encodings.py", "data/loader.py", "data/shards.py"}
    launch = {f"launch/{name}.py" for name in ("__init__", "console", "machine", "nests", "signals", "sources", "steps", "unsaved")}
    others = {"ideas/idea.py", "ideas/my_kernels.py", *(path.name for path in MODULES)}
    others -= {"train_gpt.py"}  # the idea
    assert {*found} == others | launch | data | runtime
    assert next(iter(found)) == "ideas/idea.py" and list(found)[1:] == sorted(found.keys() - {"ideas/idea.py"})
    assert {name: (project / name).read_bytes() for name in found} == found


def test_a_checkpoint_holds_the_same_sources(idea):
    saved = read_checkpoint(idea / "logs" / "run" / END)["sources"]
    assert {name: text.encode() for name, text in saved.items()} == sources_of(idea / "logs" / "run.txt")


@pytest.fixture(scope="module")
def again(idea, project, shards, tmp_path_factory):
    """The folder of the same run of what was extracted from the log, into the project, which stands in its way; there, the
    runtime says that it is another."""
    folder = tmp_path_factory.mktemp("again")
    extract = [sys.executable, f"{ROOT / 'records' / 'extract.py'}", f"{idea / 'logs' / 'run.txt'}", f"{project / 'again'}"]
    printed = subprocess.run(extract, check=True, capture_output=True, text=True, timeout=60).stdout
    assert printed.endswith(f"run it: ./run.sh {shlex.quote(f'{project}/again/ideas/idea.py')}\n")
    with open(project / "again" / "runtime" / "options.py", "a") as file:
        file.write('print("another runtime")\n')
    result = start_py(project, project, "again/ideas/idea.py", *options(shards, folder, save_every=4))
    assert result.returncode == 0, result.stderr
    assert "another runtime" in result.stdout
    return folder


def test_what_is_extracted_from_a_log_runs_to_the_same_bits(idea, again):
    a, b = (read_checkpoint(folder / "logs" / "run" / END)["state"] for folder in (idea, again))
    assert unequal(a, b) == []
    assert lines_of(idea / "logs" / "run.txt") == lines_of(again / "logs" / "run.txt")


def test_what_is_extracted_uses_its_own_trees_files_and_logs_them(idea, again):
    before, now = (sources_of(folder / "logs" / "run.txt") for folder in (idea, again))
    assert list(before) == list(now)
    assert [name for name in before if before[name] != now[name]] == ["runtime/options.py"]
    assert now["runtime/options.py"] == before["runtime/options.py"] + b'print("another runtime")\n'


def test_a_script_outside_of_the_project_runs_with_the_helper_beside_it(project, shards):
    """By its path from where the user stands; logged by its file's name."""
    elsewhere = project.parent / "elsewhere"
    write_idea(elsewhere, "mine.py", "helper")
    result = run_sh(project, elsewhere, "mine.py", *options(shards, elsewhere, val_every=0, num_scheduled_iterations=3))
    assert result.returncode == 0, result.stderr
    found = sources_of(elsewhere / "logs" / "run.txt")
    assert next(iter(found)) == "mine.py" and found["mine.py"] == (elsewhere / "mine.py").read_bytes()
    assert found["helper.py"] == HELPER.encode() and "runtime/run.py" in found and not any("ideas" in name for name in found)


@pytest.mark.parametrize("place", ["elsewhere", "data/mine", "ideas/.mine", "ideas/linked"])
def test_a_changed_copy_of_our_module_beside_a_script_is_the_one_that_runs(project, tmp_path, place):
    """Where the project's files are not looked for: outside of it, below data/, in a hidden folder, by a link. The project's ran,
    in silence, and the log held it: a package's and one that its folder's module hides, too."""
    folder = tmp_path / "mine" if place in ("elsewhere", "ideas/linked") else project / place
    folder.mkdir(parents=True)
    if place == "ideas/linked":
        (project / place).symlink_to(folder)
    for name in ("attention.py", "runtime/__init__.py", "runtime/options.py", "tracer/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("MINE = 1\n")
    (folder / "idea.py").write_text(
        f"import sys\nsys.path[1:1] = [{f'{project}'!r}]\nfrom launch.sources import Sources\nSOURCES = Sources(__file__)\n"
        "import attention, runtime.options, tracer\n"
        "held = SOURCES.of_run()\nprint([module.__file__ for module in (attention, runtime.options, tracer)])\n"
        "print([held[name] for name in held if name.endswith(('attention.py', 'options.py', 'tracer/__init__.py'))])\n"
    )
    done = subprocess.run([sys.executable, f"{folder}/idea.py"], capture_output=True, text=True)
    names = [f"{folder}/{name}" for name in ("attention.py", "runtime/options.py", "tracer/__init__.py")]
    assert (done.stdout, done.stderr) == (f"{names}\n{['MINE = 1' + chr(10)] * 3}\n", "")


FOREIGN = ["", "import mine", "from mine import X", "from spaces.part import X", "def late():\n    import mine", "import mine.part as p",
           "def late():\n    word = __import__('mine.part')  # 'log'"]


@pytest.mark.parametrize("how", FOREIGN)
def test_a_module_from_elsewhere_is_refused(project, tmp_path, how):
    """By PYTHONPATH, say: the run's log did not hold it, and two runs by two of its states were of the same sources. What is
    imported by nobody of ours, as a debugger is, and packages are none."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("X = 1\n")
    (tmp_path / "mine" / "part.py").write_text("")
    (tmp_path / "spaces").mkdir()  # a namespace package
    (tmp_path / "spaces" / "part.py").write_text("X = 1\n")
    # All but the first: no module that is imported, but names, a comment's words, and those of ours that import by a text.
    for name in ("debugger", "Path", "log", "word", "name", "late"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import debugger\n")
    (tmp_path / "target" / "other-1.0.dist-info").mkdir(parents=True)  # as pip install --target leaves
    for file in ("site-packages/package.py", "target/other/__init__.py", "target/other/part.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    path = f"{tmp_path}:{tmp_path}/site-packages:{tmp_path}/target"
    script, before = project / "ideas" / "foreign.py", {**os.environ, "PYTHONPATH": path}
    script.write_text(
        f"import sys\nsys.path[1:1] = [{f'{project}'!r}]\nfrom launch.sources import Sources\nSOURCES = Sources(__file__)\n"
        "from pathlib import Path\nimport package, other.part, runtime.log as log  # import word\n"
        f"{how}\nassert 'debugger' in sys.modules\nSOURCES.of_run()\n"
    )
    done = run_fresh([sys.executable, f"{script}"], env=before)
    which = "spaces" if "spaces" in how else "mine"
    said = f"ideas/foreign.py imports {which} from {tmp_path}/{which}, which no log would hold: move it beside"
    assert (said in done.stderr) if how else not done.stderr, done.stderr


def test_a_file_where_the_user_stands_comes_before_the_projects(project):
    """Both folders have ideas/idea.py; --help says whose it is, and starts nothing."""
    here = project.parent / "here"
    (here / "ideas").mkdir(parents=True)
    (here / "ideas" / "idea.py").write_text("import sys\nprint(__file__, sys.argv[1:])\n")
    result = run_sh(project, here, "ideas/idea.py", "--help")
    assert result.stdout == f"{here}/ideas/idea.py ['--help']\n", result.stderr


def test_no_script_is_the_projects_own(project):
    """Not one of the same name where the user stands, which may be another project's."""
    here = project.parent / "another"
    here.mkdir()
    (here / "train_gpt.py").write_text("print('foreign')\n")
    assert run_sh(project, here, "--help").stdout.startswith("usage: train_gpt.py ")
    assert run_sh(project, here, "train_gpt.py", "--help").stdout == "foreign\n"


def test_an_unknown_script_is_one_message(project, tmp_path):
    for here, places in ((tmp_path, f"{tmp_path} or {project}"), (project, f"{project}")):
        result = run_sh(project, here, "nowhere/idea.py", "--num_scheduled_iterations=3")
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr == f"start.py: error: no such script: nowhere/idea.py, in {places}\n"


# -----------------------------------------------------------------------------
# Sources


def test_an_edit_during_a_run_does_not_reach_its_log_or_its_checkpoints(shards, tmp_path, monkeypatch, no_warm_up):
    script, build = tmp_path / "idea.py", train_gpt.build
    script.write_text("before\n")
    monkeypatch.setattr(train_gpt, "SOURCES", Sources(script))

    def edit_and_build(*args):
        script.write_text("after\n")
        return build(*args)

    monkeypatch.setattr(train_gpt, "build", edit_and_build)
    main(options(shards, tmp_path, save_every=8))
    assert (tmp_path / "logs" / "run.txt").read_text().startswith("before\n\n" + "-" * 40 + "\n# ")
    assert read_checkpoint(tmp_path / "logs" / "run" / END)["sources"]["idea.py"] == "before\n"


def test_an_edit_during_a_run_does_not_reach_a_later_import(tmp_path):
    """Every rank imports what the log holds, also within a step; a process that only imports the script does not."""
    script = tmp_path / "idea.py"
    (tmp_path / "pack").mkdir()
    for name in ("helper.py", "pack/__init__.py", "pack/part.py"):
        (tmp_path / name).write_text("SCALE = 1.0\n")
    script.write_text(
        f"import sys\nsys.path[:0] = [{f'{ROOT}'!r}]\nfrom pathlib import Path\nfrom launch.sources import Sources\n"
        "sources = Sources(__file__)\ndef step():\n    import helper, pack.part\n    return helper.SCALE, pack.part.SCALE\n"
        "before = sources.imported()\nfor name in ('helper.py', 'pack/part.py'):\n"
        "    Path(__file__).parent.joinpath(name).write_text('SCALE = 0.3\\n')\n"
        "print(*step(), sources.imported() == before, sources in sys.meta_path)\n"
    )
    done = subprocess.run([sys.executable, f"{script}"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1.0 1.0 True True\n", "")
    assert all((tmp_path / name).read_text() == "SCALE = 0.3\n" for name in ("helper.py", "pack/part.py"))
    done = subprocess.run([sys.executable, "-c", "import idea"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("0.3 0.3 True False\n", "")


LATER = {  # what happens to late.py before it is imported
    "deleted": "here.joinpath('late.py').unlink()",
    "renamed to a package": "here.joinpath('late').mkdir(); here.joinpath('late.py').rename(here / 'late/__init__.py')",
    "hidden by a package": "here.joinpath('late').mkdir(); here.joinpath('late/__init__.py').write_text('X = 2')",
    "a folder is left": "here.joinpath('late').mkdir(); here.joinpath('late.py').unlink()",
    "hidden by a nearer file": "here.joinpath('ideas/late.py').write_text('X = 2')",
}


@pytest.mark.parametrize("change", LATER)
def test_what_comes_or_goes_during_a_run_reaches_no_later_import(tmp_path, change):
    """As of git's checkout beside a run: another file ran than the log held, or none was there any more."""
    (tmp_path / "ideas").mkdir()
    (tmp_path / "late.py").write_text("X = 1")
    (tmp_path / "ideas" / "idea.py").write_text(
        f"import sys\nsys.path[:0] = [{f'{ROOT}'!r}]\nfrom pathlib import Path\nfrom launch import sources\n"
        "here = sources.ROOT = Path(__file__).parents[1]\nsys.path[1:1] = [f'{here}']\n"
        "held = sources.Sources(__file__)\ndef step():\n    import late\n    return late.X\n"
        f"before = held.imported()\nsys.path_importer_cache.clear()\n{LATER[change]}\nprint(step(), before['late.py'])\n"
    )
    done = subprocess.run([sys.executable, f"{tmp_path}/ideas/idea.py"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1 X = 1\n", "")


def test_a_rank_by_hand_runs_no_stale_compiled_form(tmp_path):
    """Its module had been replaced by one of the same size and second: the log held one, and the other ran."""
    (tmp_path / "idea.py").write_text(
        f"import sys\nsys.path[:0] = [{f'{ROOT}'!r}]\nfrom launch.sources import Sources\n"
        "sources = Sources(__file__)\nimport helper\nprint(helper.SCALE, sources.imported()['helper.py'], end='')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for scale in (1, 2):
        (tmp_path / "new").write_text(f"SCALE = {scale}\n")
        os.utime(tmp_path / "new", (10**9, 10**9))
        os.replace(tmp_path / "new", tmp_path / "helper.py")
        done = subprocess.run([sys.executable, f"{tmp_path}/idea.py"], capture_output=True, text=True, env=environment)
        assert (done.stdout, done.stderr) == (f"{scale} SCALE = {scale}\n", "")
        assert list((tmp_path / "__pycache__").glob("helper.*"))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small project: its root, and a function that imports one of its files for the length of a test."""
    root = tmp_path / "tree"
    monkeypatch.setattr(launch_sources, "ROOT", root)
    for name in ("idea.py", "empty/__init__.py", "empty/used.py", "unused.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("" if "__init__" in name else f"# {name}\n")

    def load(path: Path, name: str = "") -> None:
        name = name or f"loaded_{path.stem}"
        monkeypatch.setitem(sys.modules, name, None)
        load_script(path, name)

    return root, load


def test_files_are_held_as_they_were_at_the_start(tree):
    """Edited, emptied or deleted since: also one that was empty."""
    root, load = tree
    sources = Sources(root / "idea.py")
    for name in ("empty/__init__.py", "empty/used.py"):
        (root / name).write_text("# after\n")
        load(root / name)
    (root / "idea.py").unlink()
    (root / "empty/used.py").unlink()
    assert sources.imported() == {"idea.py": "# idea.py\n", "empty/__init__.py": "", "empty/used.py": "# empty/used.py\n"}


def test_a_file_that_cannot_be_read_is_none_but_the_script(tree, monkeypatch):
    """A note of another user's in ideas/; no import takes it."""
    root, load = tree
    read = Path.read_bytes
    denied = lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied", f"{path}"))
    monkeypatch.setattr(Path, "read_bytes", lambda path: denied(path) if path.name == "unused.py" else read(path))
    sources = Sources(root / "idea.py")
    load(root / "empty" / "used.py")
    assert [*sources.imported()] == ["idea.py", "empty/used.py"]
    with pytest.raises(PermissionError, match="unused.py"):
        Sources(root / "unused.py")


@pytest.mark.parametrize("end, said", [(b"\xe9", "is not UTF-8: save it as UTF-8"), (b"\0", "a NUL byte, which no text holds")])
def test_a_source_that_no_log_can_hold_is_named(tree, end, said):
    """Python reads the one by its first line; a log would hold another program. The other, of a disk's fault, ends a log."""
    root, load = tree
    (root / "idea.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '" + end + b"'\n")
    sources, said = Sources(root / "idea.py"), f"idea.py, byte 31: {said}"
    with pytest.raises(ValueError, match=rf"{root}/{said}"):
        sources.imported()


def test_a_module_without_its_source_is_refused(tree):
    """Left of one that was moved away, say: it took part, and the log held nothing of it."""
    root, load = tree
    sources = Sources(root / "idea.py")
    for folder, refused in ((root.parent / "site-packages", False), (root, True)):
        folder.mkdir(exist_ok=True)
        py_compile.compile(f"{root / 'unused.py'}", cfile=f"{folder / 'secret.pyc'}")
        load(folder / "secret.pyc", f"secret_{refused}")
        if refused:
            with pytest.raises(ValueError, match=f"^{folder}/secret.pyc is a module without its source, which a log would hold: "):
                sources.imported()
        else:
            assert [*sources.imported()] == ["idea.py"]


def test_a_module_from_an_archive_is_refused(tree, monkeypatch):
    root, _ = tree
    sources = Sources(root / "idea.py")
    for folder, refused in ((root.parent / "site-packages", False), (root, True)):
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / "packed.zip", "w") as archive:
            archive.writestr(f"packed_{refused}.py", "FLOOR = 0.3\n")
        monkeypatch.syspath_prepend(f"{folder}/packed.zip")
        assert importlib.import_module(f"packed_{refused}").FLOOR == 0.3
        monkeypatch.delitem(sys.modules, f"packed_{not refused}", raising=False)
        if refused:
            with pytest.raises(ValueError, match=f"^{folder}/packed.zip/packed_True.py is a module without its source, which a log"):
                sources.imported()
        else:
            assert [*sources.imported()] == ["idea.py"]


def test_a_script_that_is_edited_between_pythons_reading_and_ours_is_refused(tree):
    """Python runs what it read; the log would hold what came after."""
    root, _ = tree
    text = "from launch.sources import Sources\nFOUND = Sources(__file__)\nx = lambda: 1\n"
    text += "y, z = 1e999 - 1e999, lambda: (0.0, 1e999 - 1e999)\n"  # no NaN is equal to another
    code, module = compile(text, f"{root}/idea.py", "exec"), {"__file__": f"{root}/idea.py"}
    for now, refused in ((text, False), (f"{text}# a remark\n", False), (text.replace("1\n", "2\n"), True), (text.replace("0.0", "-0.0"), True), ("(", True)):
        (root / "idea.py").write_text(now)
        exec(code, module)
        assert module["FOUND"].edited == refused
    with pytest.raises(ValueError, match=rf"^{root}/idea.py was edited while it started: start again$"):
        module["FOUND"].imported()


def test_a_script_that_runs_anothers_main_is_refused_by_its_ranks_too(tree, monkeypatch):
    """As torchrun, or python, starts them."""
    root, _ = tree
    for name in ("idea.py", "wrap.py"):
        (root / name).write_text("")
    sources = Sources(root / "idea.py")
    other = launch_sources.ROOT
    installed = root.parent / "site-packages" / "pytest" / "__main__.py"
    cases = (root / "wrap.py", True), (root / "idea.py", False), (installed, False), (other / "bench" / "wrap.py", True)
    for running, refused in cases:
        monkeypatch.setattr(sys.modules["__main__"], "__file__", f"{running}", raising=False)
        if refused:
            with pytest.raises(ValueError, match=rf"^wrap.py runs the main\(\) of {root}/idea.py, whose log would not hold wrap.py"):
                sources.of_run()
        else:
            assert "idea.py" in sources.of_run()


@pytest.mark.parametrize("how", ["-c", "a pipe", "a file without .py"])
def test_code_that_no_log_would_hold_trains_nothing(tmp_path, how):
    """Of a sweep by `python -c`, whose runs had other losses, "the same sources, settings and environment"."""
    code = f"import sys\nsys.path.insert(0, {f'{ROOT}'!r})\nimport train_gpt\ntrain_gpt.LR_FLOOR = 0.9\ntrain_gpt.SOURCES.of_run()\n"
    (tmp_path / "sweep").write_text(code)
    command = {"-c": ["-c", code], "a pipe": ["-"], "a file without .py": [f"{tmp_path}/sweep"]}[how]
    environment = {name: value for name, value in os.environ.items() if name != "SCRIPT"}
    start = subprocess.run if how == "a pipe" else run_fresh
    done = start([sys.executable, *command], input=code, env=environment, capture_output=True, text=True)
    name = {"-c": "code without a file", "a pipe": "<stdin>"}.get(how, "sweep")
    assert done.returncode == 1 and f"ValueError: {name} runs the main() of {ROOT}/train_gpt.py, whose log would not hold" in done.stderr


def test_so_does_a_script_from_a_pipe():
    text = "from launch.sources import Sources\nSources(__file__)\n"
    done = subprocess.run([sys.executable, "-"], input=f"__file__ = '<stdin>'\n{text}", cwd=ROOT, capture_output=True, text=True)
    said = "error: <stdin> is no file, and a log would lack it: save the script as one, and start that\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_so_it_is_by_a_rank_that_torchrun_starts(shards, tmp_path, monkeypatch, capsys):
    (tmp_path / "idea.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(train_gpt, "SOURCES", Sources(tmp_path / "idea.py"))
    ends_with(capsys, options(shards, tmp_path), f"error: {tmp_path}/idea.py, byte 2: is not UTF-8: save it as UTF-8\n", 1)
    assert not (tmp_path / "logs").exists()


def test_a_helper_of_a_script_outside_is_held_as_it_was_first_seen(tree, tmp_path):
    root, load = tree
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("script.py", "helper.py"):
        (mine / name).write_text(f"# {name}\n")
    sources = Sources(mine / "script.py")
    load(mine / "helper.py")
    first = sources.imported()
    (mine / "helper.py").write_text("# after\n")
    assert sources.imported() == first == {"script.py": "# script.py\n", "helper.py": "# helper.py\n"}


@pytest.mark.parametrize(
    "text",
    [b"import math\ndef f():\n    import later\n", b"import math\rdef f():\r    import later\r", b"def f(): \\\nimport later\n",
     b"def f(): \\\r\nimport later\r\n"],
)  # fmt: skip
def test_what_a_loaded_file_imports_later_is_held_however_its_lines_end(tree, text):
    root, load = tree
    (root / "later.py").write_text("# later\n")
    (root / "helper.py").write_bytes(text)
    sources = Sources(root / "idea.py")
    load(root / "helper.py")
    assert [*sources.imported()] == ["idea.py", "helper.py", "later.py"]


def test_what_a_step_imports_later_is_held_too(tree, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    texts = {
        "script.py": "import os, first\ndef step():\n    from package.part import f\n    import torch as t, second as x\n    import later\n",
        "first.py": "if True: import third\npass; import fourth\n"
        "try:\n    1\nexcept OSError:\n    from \\\n        fifth import x\n",
        "second.py": "# import unused\nfrom other import (\n    g)\n'''\nimport unused\n'''\n",
        "third.py": "match 1:\n    case 1:\n        from package import (\n            listed,\n        )\n",
        "fourth.py": "\n",
        "fifth.py": "import unused.py = no Python\n",
        "later.py": 'def draw(rows):\n    """Draws the rows.\n    return rows\n',  # its quotes would hold the rest of a log
        "other.py": "\n",
        "package/__init__.py": "\n",
        "package/part.py": "if True:\n\tfrom . import neighbour\n\tfrom .inner.deep import x\n",
        "package/neighbour.py": "\n",
        "package/listed.py": "\n",
        "package/inner/deep.py": "from .. import up\n",
        "package/up.py": "\n",
        "unused.py": "\n",
    }
    for name, text in texts.items():
        (mine / name).parent.mkdir(exist_ok=True)
        (mine / name).write_text(text)
    never = {"unused.py", "fifth.py", "later.py"}  # what Python cannot parse it cannot import
    assert Sources(mine / "script.py").imported() == {name: text for name, text in texts.items() if name not in never}


IN_A_STEP = ["from mine import GAIN", 'importlib.import_module("mine")', '__import__("mine")']


@pytest.mark.parametrize("folder", [".", "lib"])
@pytest.mark.parametrize("statement", IN_A_STEP)
def test_so_is_what_it_imports_from_a_folder_that_the_script_adds_and_by_a_text(tree, monkeypatch, statement, folder):
    """Two values of GAIN were the same sources to compare.py, to a resumption and to a race."""
    root, _ = tree
    (root / "lib").mkdir()
    (root / folder / "mine.py").write_text("GAIN = 1.0\n")
    (root / "idea.py").write_text(f"import importlib\n\ndef step():\n    {statement}\n")
    monkeypatch.setattr(sys, "path", [*sys.path, f"{root / 'lib'}"])
    assert [*Sources(root / "idea.py").imported()] == ["idea.py", "mine.py" if folder == "." else "lib/mine.py"]


@pytest.mark.parametrize("place", ["a_before_the_project", "z_after_it"])
def test_of_two_files_of_a_name_the_log_holds_the_one_that_takes_part(tree, tmp_path, place):
    """Beside a script outside of the project, and in it: loaded already, imported later, in a package that one of them has."""
    root, load = tree
    mine = tmp_path / place
    for name in ("early.py", "late.py", "package/__init__.py", "package/part.py", "folder/x.py", "folder/y.py"):
        for folder in (root, mine):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"# {folder.name}\n")
    (mine / "package" / "__init__.py").unlink()  # so that the project's package is found
    (mine / "folder" / "y.py").unlink()
    text = "def step():\n    import early, late, package.part, folder.x, folder.y\n"
    (mine / "script.py").write_text(text)
    load(root / "early.py", "early")
    of_project = ("early.py", "package/__init__.py", "package/part.py", "folder/y.py")
    expected = {name: f"# {root.name}\n" for name in of_project} | {name: f"# {place}\n" for name in ("late.py", "folder/x.py")}
    found = Sources(mine / "script.py")
    assert found.imported() == {"script.py": text, **dict(sorted(expected.items()))}
    load(root / "late.py", "under_another_name")
    with pytest.raises(ValueError, match="late.py both take part, and a log has one late.py: rename one"):
        found.imported()


def test_a_link_beside_the_script_is_held_wherever_it_leads(tree, tmp_path):
    """A file, a folder, and both of a project that is itself reached by a link."""
    root, load = tree
    (tmp_path / "shared").mkdir()
    for name in ("helper.py", "part.py"):
        (tmp_path / "shared" / name).write_text(f"# shared {name}\n")
    (root / "helper.py").symlink_to(tmp_path / "shared" / "helper.py")
    (root / "linked").symlink_to(tmp_path / "shared")
    (tmp_path / "way").symlink_to(root)
    expected = {"idea.py": "# idea.py\n", "helper.py": "# shared helper.py\n", "linked/part.py": "# shared part.py\n"}
    load(root / "helper.py")
    load(root / "linked" / "part.py")
    assert Sources(root / "idea.py").imported() == expected
    load(tmp_path / "way" / "helper.py")
    load(tmp_path / "shared" / "part.py")
    assert Sources(root / "idea.py").imported() == {name: text for name, text in expected.items() if name != "linked/part.py"}


def test_installed_packages_and_generated_code_are_no_sources(tree, tmp_path, monkeypatch):
    """Both may lie below a script's folder, if that is the user's home."""
    script = tmp_path / "idea.py"
    script.write_text("# idea\n")
    for place in (".local/lib/python3.12/site-packages", "dist-packages"):
        package = tmp_path / place / f"in_{place[-13:].replace('-', '_')}.py"
        package.parent.mkdir(parents=True)
        package.write_text("# a package\n")
        tree[1](package)
    generated = types.ModuleType("generated")
    generated.__file__ = f"{tmp_path / 'generated.py'}"
    (tmp_path / "generated.py").write_text("# by a compiler\n")
    monkeypatch.setitem(sys.modules, "generated", generated)
    assert Sources(script).imported() == {"idea.py": "# idea\n"}


def test_hidden_folders_and_environments_are_not_read(tree):
    root = tree[0]
    for name in (".git/hook.py", "ideas/.cache/x.py", "env/pyvenv.cfg", "env/lib/y.py", "conda/conda-meta/z", "conda/lib/y.py",
                 "vendor/site-packages/torch/z.py", "data/text/x.py"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    found = {path.relative_to(root).as_posix() for path in python_files(root)}
    assert found == {"idea.py", "empty/__init__.py", "empty/used.py", "unused.py"}


def test_a_corpus_in_the_project_is_not_held_in_memory(tree, monkeypatch):
    """Each rank held all of it. What the script imports of its folder is in the log all the same."""
    root, _ = tree
    (root / "corpus" / "deep").mkdir(parents=True)
    for i in range(3):
        (root / "corpus" / "deep" / f"x{i}.py").write_text("#" * 1000)
    assert sum(path.parent.name == "deep" for path in python_files(root)) == 3
    monkeypatch.setattr(launch_sources, "CORPUS", 2900)
    assert not [path for path in python_files(root) if path.parent.name == "deep"] and root / "empty" / "used.py" in python_files(root)
    (root / "idea.py").write_text("import corpus.deep.x1\n" + "#" * 5000)
    assert [*Sources(root / "idea.py").imported()] == ["idea.py", "corpus/deep/x1.py"]
    assert root / "idea.py" in python_files(root)


def test_a_header_can_be_split_back():
    texts = {"ideas/idea.py": "x = 1\r\n\n", "data/a.py": "", "runtime/é.py": "'é'"}
    header = log_header(texts, ["Python 3", "settings"])
    rule, banner = "=" * 100, "-" * 40
    assert header.split(f"\n{rule}")[1:] == ["\nPython 3\nsettings", ""]
    script, *others = header.split(f"\n{rule}")[0].split(f"\n{banner}\n")
    assert script == "x = 1\r\n\n" and dict(zip(others[::2], others[1::2])) == {"# data/a.py": "", "# runtime/é.py": "'é'"}


READS = """
import dataclasses, json, os, sys, types, torch
sys.path.insert(0, {root!r})
from launch.sources import Sources
sources = Sources(__file__)
for name in {names!r}:
    open(name, "rb").read()
open(os.path.join({folder!r}, "out.json"), "w").write("1")
os.environ["TRITON_CACHE_DIR"] = os.path.join({folder!r}, "cache")
Settings = dataclasses.make_dataclass("Settings", ["data", "log_dir", "resume"])
settings = Settings({shards!r}, os.path.join({folder!r}, "logs"), "")
print(json.dumps(sources.facts({{"idea.py": "os.environ['LR']"}}, types.SimpleNamespace(device=torch.device("cpu"), world_size=1),
    settings, ["more"])))
"""


def test_the_files_that_a_script_reads_are_told_by_their_checksums(tmp_path, monkeypatch):
    """A configuration beside it: runs of two learning rates had one log, and one mean."""
    folder, elsewhere, stands = tmp_path / "own", tmp_path / "elsewhere", tmp_path / "stands"
    read = ["config.json", "conf/a.yaml", "shards/x.bin", "logs/a.txt", "cache/b", ".hidden", "mine.py", "site-packages/p.json", "gone"]
    for path in (*(folder / name for name in read), elsewhere / "far.json", stands / "rel.toml", folder / "unread.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    names = [*(f"{folder / name}" for name in read), f"{elsewhere / 'far.json'}", "rel.toml"]
    script = READS.format(root=f"{ROOT}", names=names, folder=f"{folder}", shards=f"{folder / 'shards'}")
    (folder / "idea.py").write_text(script + f"os.remove({names[8]!r})\nprint(sources.read(settings))\n")
    monkeypatch.setenv("LR", "2")
    done = run_fresh([sys.executable, folder / "idea.py"], cwd=stands, timeout=60)
    assert done.returncode == 0, done.stderr
    facts, later = done.stdout.splitlines()
    crc = lambda name: f"CRC-32 {zlib.crc32(name.encode()):08x}"
    told = {"conf/a.yaml": crc("a.yaml"), "config.json": crc("config.json"), "gone": crc("gone"), "rel.toml": crc("rel.toml")}
    (line,) = [fact for fact in json.loads(facts) if fact.startswith("read by")]
    assert line == f"read by its sources: LR='2', {', '.join(f'{name}={text!r}' for name, text in told.items())}"
    assert json.loads(facts)[-2] == "more" and ast.literal_eval(later) == {name: told[name] for name in told if name != "gone"}


def test_two_files_of_one_name_that_a_script_reads_are_told_apart(tmp_path):
    """One beside it, and one where it was started: of two learning rates in the latter the runs shared a mean."""
    folder, stands = tmp_path / "own", tmp_path / "stands"
    for path in (folder / "config.json", stands / "config.json", folder / "b" / "c.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{path.parent.name}")
    names = [f"{folder / 'config.json'}", "config.json", f"{folder / 'b' / 'c.json'}"]
    script = READS.format(root=f"{ROOT}", names=names, folder=f"{folder}", shards=f"{folder / 'shards'}")
    (folder / "idea.py").write_text(script + "print(sources.read(settings))\n")
    done = run_fresh([sys.executable, folder / "idea.py"], cwd=stands, timeout=60)
    assert done.returncode == 0, done.stderr
    crc = lambda name: f"CRC-32 {zlib.crc32(name.encode()):08x}"
    told = {"config.json": crc("own"), "../stands/config.json": crc("stands"), "b/c.json": crc("b")}
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == told


MOVES = """
import os, sys, types
sys.path.insert(0, {root!r})
from launch.signals import Signals
from launch.sources import Sources
sources, settings = Sources(__file__), types.SimpleNamespace(data={data!r}, log_dir={log_dir!r})
os.chdir("/")
with Signals():
    os.chdir("/tmp")
    sources.keep_folder(settings)
    if os.fork() == 0:  # a worker's own folder is nobody else's
        os.chdir("/")
        os._exit(0)
    if os.waitstatus_to_exitcode(os.wait()[1]):
        os._exit(9)
    try:
        os.chdir("/")
    except RuntimeError as error:
        print(error)
os.chdir("/")
print(os.getcwd())
"""


def test_a_python_without_pytorch_is_told_what_starts_a_script():
    """`python train_gpt.py --help`, as the script's own first lines have it, was a ModuleNotFoundError."""
    done = subprocess.run([sys.executable, "-S", f"{SCRIPT}", "--help"], capture_output=True, text=True, timeout=60)
    fault = f"train_gpt.py: error: {sys.executable} has no torch: start it with ./run.sh train_gpt.py, or the project's .venv"
    assert done.returncode == 1 and done.stderr.startswith(fault) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("data, log_dir", [("/s", "/l"), ("shards", "logs"), ("/s", "logs")])
def test_a_run_with_relative_paths_stays_in_its_folder(tmp_path, data, log_dir):
    """What an idea made by os.chdir was a second log, checkpoints elsewhere, and shards that were not there."""
    (tmp_path / "idea.py").write_text(MOVES.format(root=f"{ROOT}", data=data, log_dir=log_dir))
    done = run_fresh([sys.executable, tmp_path / "idea.py"], timeout=60)
    named = ", ".join(f"--{name}={path}" for name, path in (("data", data), ("log_dir", log_dir)) if path[0] != "/")
    said = f"the current folder cannot change during a run whose paths begin in it, {named}: name files by absolute paths, or give "
    assert done.returncode == 0 and done.stdout == (f"{said}these so\n" if named else "") + "/\n", done


def test_a_log_is_never_written_over(shards, tmp_path, capsys, no_warm_up):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main(options(shards, tmp_path))
    assert "run.txt is another run's log: move it, or give another --run_id or --log_dir" in capsys.readouterr().err
    assert (tmp_path / "logs" / "run.txt").read_text() == "mine"
