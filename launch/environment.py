"""Print the interpreter that has the packages of the given requirements files: the active one, or that of .venv.

    python3 launch/environment.py --for=test.sh requirements.txt [records/requirements.txt …]     # what test.sh does first
    python3 launch/environment.py --for=run.sh requirements.txt --then PROGRAM [ARGUMENT …]       # goes on as that program

.venv is made if need be, and filled. What happens is told on stderr, with its seconds; pip is heard only if it fails. A line
of the files says what .venv gets, and the oldest version that serves an active environment:

    numpy==2.4.6  # from 2.0

Runs on any Python 3, so that one that is too old can be told.
"""

import sys

if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path != __file__.rpartition("/")[0]]  # a copy.py beside it is not the library's

import os

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
OURS = ("bench", "data", "launch", "records", "runtime", "tests")  # folders, whatever else is installed
OURS += ("attention", "cpu", "no_triton", "sample", "tail_averages", "tracer", "train_gpt", "triton_kernels")


def check_names_of_files(tool):
    """Raises SystemExit for a file or package in the project's root with the name of one of Python's modules, or of an installed
    one: tools, and pytest, would import it."""
    library = getattr(sys, "stdlib_module_names", ())  # from 3.10 on
    sites = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    for name in sorted(os.listdir(ROOT)) if os.access(ROOT, os.R_OK) else ():
        module = name[:-3] if name.endswith(".py") else name
        path = os.path.join(ROOT, name)
        if module in OURS or not (name.endswith(".py") or os.path.isfile(os.path.join(path, "__init__.py"))):
            continue
        installed = (os.path.join(site, module + end) for site in sites for end in (".py", "/__init__.py"))
        if module in library or any(map(os.path.isfile, installed)):
            sys.exit("{}: error: {} hides the module {!r} that others import: rename it".format(tool, path, module))


if __name__ == "launch.environment":  # a tool imports it first
    check_names_of_files(os.path.basename(sys.argv[0]))

import signal

if __name__ == "__main__" and os.environ.pop("PYTHONINSPECT", None):  # Python has read it, and would end in a prompt
    os.execv(sys.executable, [sys.executable, __file__] + sys.argv[1:])


def interrupt_quietly():
    """Ctrl-C ends this process at once, without a traceback, as while it imports; what is ignored stays so."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))


if __name__ == "__main__":
    interrupt_quietly()

try:
    import contextlib
    import glob
    import importlib.util
    import itertools
    import platform
    import re
    import shutil
    import subprocess
    import tempfile
    import threading
    import time
except ImportError as error:
    home = os.environ.get("PYTHONHOME")
    sys.exit("{}: error: {}: {}".format(
        sys.executable, error, "PYTHONHOME={} is another Python's: unset it".format(home) if home else "half a Python: install it again"
    ))  # fmt: skip

try:
    from importlib.metadata import PackageNotFoundError, distribution, version
except ImportError:  # before 3.8, which is told below
    PackageNotFoundError = distribution = version = None

OLDEST = (3, 11)
ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON")  # where pip would install what .venv lacks
ELSEWHERE += ("PIP_DRY_RUN", "PIP_NO_DEPS")  # or not, or not all
SETTING = re.compile(rb"((?:global|install)\.(?:target|prefix|root|python|dry-run|no-deps))=(.*)")  # the same in a file of pip's
LACKS = "lacks: "  # begins a line of another interpreter's answer, which start-up files of its own may print into
TOOLS = os.path.join(ROOT, "records", "requirements.txt")  # .venv gets what the tools in records/ need too
PROGRAM = "run.sh"  # that asks, in messages
LOOKS = 40  # tries, of 0.05 s, that one who only looks at .venv may take
HELD = []  # descriptor of .venv.lock, while it is held: pip has it too, and goes on writing .venv if this process is killed
LINE = re.compile(r"([A-Za-z0-9][\w.-]*)[^#;]*(?:;([^#]*))?(?:# from ([\d.]+)(?:, module (\w+))?)?")
MARKER = re.compile(r"""\s*(\w+)\s*(==|!=)\s*["']([^"']*)["']\s*""")
HERE = {"platform_system": platform.system(), "platform_machine": platform.machine(), "sys_platform": sys.platform}


def fail(message):
    sys.exit("{}: error: {}".format(PROGRAM, message))


def tell(message):
    print("{}: {}".format(PROGRAM, message), file=sys.stderr, flush=True)


def numbers(text):
    """2.13.0+cpu as (2, 13, 0)."""
    return tuple(map(int, re.match(r"\d+(\.\d+)*", text)[0].split(".")))


def applies(marker):
    """Whether a line with this marker is for this machine: comparisons of HERE, joined by and, then by or."""
    def holds(comparison):
        found = MARKER.fullmatch(comparison)
        if not found or found[1] not in HERE:
            fail("the requirements' marker {!r} is none that is understood here".format(comparison.strip()))
        return (HERE[found[1]] == found[3]) == (found[2] == "==")

    return any(all(map(holds, re.split(r"\band\b", each))) for each in re.split(r"\bor\b", marker))


def missing(files):
    """What this interpreter lacks of the files: a list of words."""
    if sys.version_info < OLDEST:
        return ["Python {}.{} or later".format(*OLDEST)]
    lacks = []
    for path in files:
        for name, marker, oldest, module in (match.groups() for match in map(LINE.match, lines_of(path)) if match):
            if marker and not applies(marker):
                continue
            try:
                there = version(name)
                spec = importlib.util.find_spec(module or name)
                whole = spec is not None and spec.origin is not None  # a folder without __init__.py has none
                cut = cut_library(name)
                if not whole or numbers(there) < numbers(oldest or "0"):
                    lacks.append(name + (" from " + oldest if whole else ", which is half installed"))
                elif cut:
                    lacks.append("{}, whose {} is cut short".format(name, cut))
            except (PackageNotFoundError, TypeError, ValueError):
                lacks.append(name)
    return lacks


def cut_library(name):
    """A shared library of an installed package that ends before its own table of sections, as after a power cut; empty if there is
    none. To import it is a bus error. One that is stripped is shorter, too, than the package's RECORD says, and whole."""
    there, lines = distribution(name), ""
    with contextlib.suppress(OSError, ValueError):
        lines = there.read_text("RECORD") or ""
    for file, size in re.findall(r"(?m)^(.+\.so(?:\.[^,\n]*)?),[^,\n]*,(\d+)$", lines):  # name,sha256=digest,bytes
        with contextlib.suppress(OSError), open(str(there.locate_file(file)), "rb") as library:
            length = os.fstat(library.fileno()).st_size
            head = library.read(64) if length < int(size) else b""
            if head[:5] == b"\x7fELF\2" and int.from_bytes(head[40:48], sys.byteorder) > length > 64:
                return os.path.basename(file)
    return ""


def lines_of(path):
    """Raises SystemExit for what is no text, or cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except OSError as error:
        fail("{}: cannot be read: {}".format(path, error.strerror))
    except ValueError:
        fail("{}: is no text, as a file of requirements is".format(path))


def run(command, **options):
    """subprocess.run, whose command ends with this process also by a signal that comes while it starts."""
    late, process = [], None
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] if threading.current_thread() is threading.main_thread() else []
    before = {x: signal.signal(x, lambda x, _: late.append(x)) for x in numbers if callable(signal.getsignal(x))}
    try:
        process = subprocess.Popen(command, pass_fds=HELD, **{"stdin": subprocess.DEVNULL, **options})
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in late:
            os.kill(os.getpid(), number)
        out, _ = process.communicate()
    except BaseException:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process:
            process.kill()
            process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out)


def missing_there(python, files):
    """The same of another interpreter; None if it does not run."""
    try:
        done = run(
            [python, os.path.realpath(__file__), "--missing"] + files, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    said = done.stdout.decode(errors="replace").splitlines()
    return [line[len(LACKS) :] for line in said if line.startswith(LACKS)] if done.returncode == 0 else None


def pip_environment():
    """Without what would send its packages elsewhere than into .venv; and modules of the current folder are not Python's."""
    return dict({name: value for name, value in os.environ.items() if name not in ELSEWHERE}, PYTHONSAFEPATH="1")


def run_quietly(command, purpose):
    """Raises SystemExit with the last lines of what a command said, if it fails."""
    try:
        with tempfile.TemporaryDirectory() as folder:  # pip leaves what it has there if a signal ends it
            there = dict(pip_environment(), TMPDIR=folder)
            done = run(command, env=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        fail("{}: {}".format(purpose, error))
    if done.returncode:
        said = done.stdout.decode(errors="replace").strip().splitlines()[-12:]
        code = "code {}".format(done.returncode)
        if done.returncode < 0:
            code = "killed by signal {}{}".format(-done.returncode, " (out of memory?)" * (done.returncode == -signal.SIGKILL))
        fail("{} failed, {}:\n{}".format(purpose, code, "\n".join(said)))


def new_python():
    """An interpreter that is new enough to make .venv: this one, or another on the PATH. Raises SystemExit."""
    names = ["python3.{}".format(minor) for minor in range(OLDEST[1] + 4, OLDEST[1] - 1, -1)]
    found = [sys.executable] if sys.version_info >= OLDEST else list(filter(None, map(shutil.which, names)))
    for python in found:  # a version manager's stand-in may lead nowhere
        try:
            if run([python, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
                return python
        except OSError:
            pass
    fail("{} is Python {}.{}: {}.{} or later is needed".format(sys.executable, *(sys.version_info[:2] + OLDEST)))


def ensure(files, root=ROOT):
    """The interpreter. Raises SystemExit, with a message and code 1, if there is none and none can be made."""
    if os.environ.get("PYTHONEXECUTABLE"):  # pip of .venv would install beside that one
        fail("PYTHONEXECUTABLE={}: every Python takes itself for that one: unset it".format(os.environ["PYTHONEXECUTABLE"]))
    lacks = missing(files)
    if not lacks:
        return sys.executable
    with alone(root):
        return fill(os.path.join(root, ".venv"), files, lacks)


@contextlib.contextmanager
def alone(root):
    """Waits for another process that makes or fills .venv; a file system without locks keeps none away."""
    try:
        import fcntl

        file = open(os.path.join(root, ".venv.lock"), "ab")
    except (ImportError, OSError):
        yield
        return
    with file:
        for tries in itertools.count():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if tries == LOOKS:
                    tell("waiting for another process, which makes or fills .venv")
                time.sleep(0.05)
            except OSError:
                break
        HELD.append(file.fileno())
        try:
            yield
        finally:
            HELD.clear()


def is_environment(folder):
    """Or nothing that anybody would miss: then it may be emptied, as one half made. A link leads elsewhere."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        return False
    return os.path.isfile(os.path.join(folder, "pyvenv.cfg")) or not any(names for _, _, names in os.walk(folder))


def holds_files(folder):
    """Any beside what `venv` writes before it makes bin/python, where it was killed."""
    return any({*names} - {"pyvenv.cfg", ".gitignore"} for _, _, names in os.walk(folder))


def in_the_way(folder, python, aside):
    """Why what stands there is neither emptied nor moved aside, and what to do; None if it may be."""
    if not is_environment(folder):
        return "is no environment of Python: move it away"
    if os.stat(folder).st_uid != os.geteuid():  # whose Python lies in a home, as pyenv's does
        return "is another user's, whose Python does not run for you: work in a copy of the project of your own"
    if os.path.exists(python):  # as of another processor, or by a PYTHONHOME
        return "does not run here: start where its Python runs, or remove it"
    if holds_files(folder) and os.path.lexists(aside):
        return "has lost its Python, as {} before: remove that one".format(aside)
    return None


def fill(folder, files, lacks):
    """The interpreter of the environment in folder, which has what the files ask for. lacks: what the active one does not."""
    begun = time.time()
    python = os.path.join(folder, "bin", "python")
    there = missing_there(python, files)
    if there == []:
        return python
    if there is None:
        aside, gone = folder + ".gone", holds_files(folder) and os.path.realpath(python)
        why = os.path.lexists(folder) and in_the_way(folder, python, aside)
        if why:
            fail("{} lacks {}, and {} {}".format(sys.executable, ", ".join(lacks), folder, why))
        tell("{} lacks {}: making .venv".format(sys.executable, ", ".join(lacks)))
        if gone:  # or is not in this container, and runs outside
            os.rename(folder, aside)
            tell("the Python of .venv, {}, is not here: it is .venv.gone now, to be removed".format(gone))
        run_quietly([new_python(), "-m", "venv", "--clear", folder], "making .venv")
        there = missing_there(python, files)
    elif not os.access(folder, os.W_OK):
        fail("{} lacks {}, and you may not write {}: its owner can, or work in a copy".format(python, ", ".join(there), folder))
    if there and there[0].startswith("Python "):
        fail("{} is older than {}: remove {}".format(python, there[0].replace(" or later", ""), folder))
    tell("installing into .venv, which takes minutes the first time: " + ", ".join(there or ["packages"]))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if run([python, "-c", "import pip"], env=pip_environment(), **quiet).returncode:
        run_quietly([python, "-m", "ensurepip"], "installing pip into .venv")
    settings = [python, "-m", "pip", "config", "list"]
    told = run(settings, env=pip_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    for name, value in SETTING.findall(told):
        why = "pip's configuration would install elsewhere than in .venv, or not all, by {} = {}: pip config unset {}"
        fail(why.format(name.decode(), value.decode(errors="replace").strip(), name.decode()))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-user"]
    install += ["--require-virtualenv"]
    every = files if TOOLS in files else files + [TOOLS]
    run_quietly(install + ["--requirement=" + path for path in every], "installing into .venv")
    there = missing_there(python, files)
    if there != []:
        fail("{} still lacks {}: remove {} and start again".format(python, ", ".join(there or ["all"]), folder))
    tell(".venv is ready ({:.0f} s)".format(time.time() - begun))
    return python


@contextlib.contextmanager
def ended_by_signals():
    """Ctrl-C, SIGTERM and SIGHUP, unless ignored, end a command that is running too, then this process with 128 + signal."""
    numbers = [x for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(x) != signal.SIG_IGN]
    before = {x: signal.signal(x, lambda x, _: sys.exit(128 + x)) for x in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def go_on(requirements, *modules):
    """For a tool, before its imports: starts it again in the interpreter that has the packages of this file, if this one lacks
    a module of these, or, if none is named, a package. Ctrl-C then ends the tool at once, until it says otherwise, and a package
    that cannot be imported is one line. Raises SystemExit."""
    global PROGRAM
    interrupt_quietly()
    sys.excepthook = tell_package_fault
    try:
        os.getcwd()
    except OSError:  # PyTorch's import would end this process, with the words of a library that cannot be loaded
        sys.exit("{}: error: the current folder is gone or may not be searched: change into another".format(os.path.basename(sys.argv[0])))
    if modules and all(map(importlib.util.find_spec, modules)):
        return
    PROGRAM = os.path.basename(sys.argv[0])
    with ended_by_signals():
        python = ensure([os.path.join(ROOT, requirements)])
    if python != sys.executable:
        os.execv(python, [python] + getattr(sys, "orig_argv", [""] + sys.argv)[1:])  # before 3.10 without -u and the like


def broken_package(name, error):
    """What to say of a package that cannot be imported: of which folder it is, if not of this interpreter's."""
    said = str(error.__cause__ or error).splitlines()  # NumPy's own is a page
    why = next(filter(None, said), type(error).__name__)
    spec, named = importlib.util.find_spec(name), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    there = os.path.dirname(os.path.dirname(spec and spec.origin or ""))  # which the path names, not one above, as of .venv
    for folder in filter(None, named):
        if os.path.abspath(folder) == there:
            fault = "it is that of {}, which PYTHONPATH names, for another Python, say: unset it".format(folder)
            return "{} cannot be imported: {}: {}".format(name, why, fault)
    libraries = os.environ.get("LD_LIBRARY_PATH")
    if "failed to map segment" in why:
        return "{} cannot be imported: {}: raise ulimit -v, or see that its disk is not mounted noexec".format(name, why)
    theirs = any(why.startswith(os.path.join(folder, "")) for folder in filter(None, (libraries or "").split(os.pathsep)))
    if libraries and ("undefined symbol" in why or "version `" in why or theirs):
        fault = "LD_LIBRARY_PATH={} may have another library of that name: unset it".format(libraries)
        return "{} cannot be imported: {}: {}".format(name, why, fault)
    ours = os.path.join(ROOT, ".venv")
    again = "delete {}, ./run.sh makes it again".format(ours) if sys.prefix == ours else "install it again"
    return "{}: {}: {} lacks a package, or has half of one: {}".format(name, why, sys.executable, again)


def package_of(file):
    """The package that a file is of, by its path; empty if of none that is installed, or that PYTHONPATH names."""
    file, named = os.path.abspath(file), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    within = lambda folder: file.startswith(os.path.join(os.path.abspath(folder), ""))
    folders = [] if within(ROOT) else [os.path.abspath(folder) for folder in filter(None, named) if within(folder)]
    _, installed, inside = file.rpartition("/site-packages/")
    inside = inside if installed else os.path.relpath(file, max(folders, key=len)) if folders else ""
    return inside.partition("/")[0].partition(".")[0]


def package_fault(error):
    """What to say of an ImportError out of a package, which is broken then; empty of one of ours."""
    trace, package = error.__traceback__, ""
    while trace:
        package = package_of(trace.tb_frame.f_code.co_filename) or package  # the last: SciPy's import may fail in NumPy
        trace = trace.tb_next
    return broken_package(package, error) if package else cut_package(error)


def is_cut(file):
    """Is it an installed package's, and shorter than the package's RECORD says? Many are empty on purpose."""
    site, _, name = file.rpartition("/site-packages/")
    for record in glob.glob(glob.escape(site) + "/site-packages/*.dist-info/RECORD"):  # name,sha256=digest,bytes
        with contextlib.suppress(OSError, ValueError), open(record, encoding="utf-8") as lines:
            for line in lines:
                if line.startswith(name + ","):
                    return os.path.getsize(file) < int(line.rpartition(",")[2])
    return False


def cut_package(error):
    """What to say of an error by a file of a package, or a compiled one, that is cut short, as a power cut leaves it; empty of
    others."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if isinstance(error, EOFError) and trace and trace.tb_frame.f_locals.get("bytecode_path"):  # of Python's importer
        return "{} is cut short: delete it, Python makes it again".format(trace.tb_frame.f_locals["bytecode_path"])
    place = getattr(error, "filename", "") if isinstance(error, SyntaxError) else getattr(error, "path", "")
    module = getattr(error, "obj", None)  # of an AttributeError
    place = place or isinstance(module, type(sys)) and getattr(module, "__file__", "") or ""
    places = [place, trace.tb_frame.f_code.co_filename if trace else ""]  # the last: a name may be cut, too
    cut = [x for x in places if isinstance(x, str) and is_cut(x)]
    return broken_package(package_of(cut[0]), error) if cut else ""


def import_fault(error):
    """What to say where PyTorch's own import fails, as by what it reads in the environment."""
    fault = cut_package(error)
    if fault:
        return fault
    given = ["{}={}".format(name, value) for name, value in sorted(os.environ.items()) if name.startswith(("TORCH", "PYTORCH", "TRITON"))]
    named = [x for x in given if x.partition("=")[0] in str(error)]
    said = ", ".join(named) or "one of " * (len(given) > 1) + ", ".join(given) or "a variable of the environment, or half a package"
    why = " ".join(str(error).split())[:150] or repr(error)
    return "PyTorch cannot be imported, by {}: {}".format(said[:300], why)


def of_torch(trace):
    """Is it an error of PyTorch's own import?"""
    files = []
    while trace:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return "torch" not in sys.modules and "torch" in map(package_of, files)


def tell_package_fault(kind, error, trace):
    """An excepthook: one line for a package that is there and cannot be imported."""
    fault = package_fault(error) if issubclass(kind, ImportError) else cut_package(error)
    if not fault and of_torch(trace) and issubclass(kind, Exception):
        fault = import_fault(error)
    if not fault:
        return sys.__excepthook__(kind, error, trace)
    sys.stderr.write("{}: error: {}\n".format(os.path.basename(sys.argv[0]), fault))


def say(text):
    """On stdout, at once: at the interpreter's end a full disk would be its message. Raises SystemExit."""
    try:
        sys.stdout and sys.stdout.flush()  # of what Python's start-up files have printed
        os.write(1, os.fsencode(text))
    except OSError as error:
        fail("stdout cannot be written: {}".format(error.strerror))


def main(argv):
    global PROGRAM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])  # as a parent may have blocked them
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or ignored this one: a failed child's code would read 0
    PROGRAM, argv = (argv[0][6:], argv[1:]) if argv[:1] and argv[0].startswith("--for=") else ("environment.py", argv)
    if PROGRAM == "test.sh":  # run.sh's next program looks for more
        check_names_of_files(PROGRAM)
    with ended_by_signals():
        if argv[:1] == ["--missing"]:
            say("".join(LACKS + lack + "\n" for lack in missing(argv[1:])))
        elif argv[:1] in (["--help"], ["-h"]):
            say(__doc__ or "its options stand in its first lines, which python -OO leaves out\n")
        elif "--then" in argv:
            end = argv.index("--then")
            if not argv[end + 1 :]:
                fail("--then names no program to go on as")
            python = ensure(argv[:end])
            os.execv(python, [python] + argv[end + 1 :])
        else:
            say(ensure(argv) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
