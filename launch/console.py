"""What a user is told, on a console that may be closed, full or of another encoding, and the errors that end a run."""

import argparse
import atexit
import contextlib
import ctypes
import difflib
import gc
import importlib.util
import io
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO


class RunError(RuntimeError):
    """A run that cannot go on; its message is all that the user needs."""


def raise_first(*rules: tuple[Any, str]) -> None:
    """Raise ValueError with the message of the first (fault, message) whose fault is true."""
    for fault, message in rules:
        if fault:
            raise ValueError(message)


class AgreedError(RunError):
    """A RunError that every rank raises; the first one tells."""


class Stopped(RunError):
    """A signal, obeyed by all ranks: Stopped(message, exit code)."""


class Parser(argparse.ArgumentParser):
    """A tool's: what a message quotes only shows, and --option=-- is refused, which Python's takes for an option without a
    value, and fails, or ignores."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))

    def refuse_replacing(self, read: Iterable[Path | None], written: Iterable[Path | None]) -> None:
        """End with code 2 if one of the files to write is one of those to read."""
        places = {os.path.realpath(path) for path in written if path}
        for path in read:
            if path and os.path.realpath(path) in places:
                self.error(f"{path} is what is read, and would be replaced: name another file")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else [*args]
        options = given[: given.index("--")] if "--" in given else given
        if bad := [text for text in options if text.startswith("-") and text.endswith("=--")]:
            self.error(f"{bad[0]}: -- is no value")
        return super().parse_known_args(given, namespace)


class OptionParser(Parser):
    """Options in full; one that is unknown is told with the only one that begins so, or that looks most like it."""

    def __init__(self, about: str):
        super().__init__(allow_abbrev=False, description=about, usage="%(prog)s [--option=value …], listed by --help")

    def parse_args(self, args: list[str] | None = None, namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = [option.partition("=")[0].replace("-", "_") for option in unknown]
            known = {name.replace("-", "_"): name for name in self._option_string_actions}
            begun = [[option for option in known if option.startswith(name)] for name in names]
            like = [x if len(x) == 1 else difflib.get_close_matches(name, known, 1) for name, x in zip(names, begun)]
            near = [known[x[0]] for x in like if x]
            hint = f" (did you mean {' and '.join(dict.fromkeys(near))}?)" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found


def option_text(meaning: str, path: bool = False) -> Callable[[str], str]:
    """An argparse type: a text, empty only if its meaning says what "empty:" is, as --resume=$FILE without a FILE would begin anew;
    of a path from the home folder, as no shell expands the ~ of --name=~/folder."""

    def text(given: str) -> str:
        if not given and "empty:" not in meaning:
            raise argparse.ArgumentTypeError(f"is empty: leave the option out, or give a value ({meaning})")
        return at_home(given) if path else given

    return text


def boolean(text: str) -> bool:
    """An argparse type."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def guard_console() -> None:
    """Let stdin, stdout and stderr lead nowhere where they are closed: the next file would take their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")


PATIENCE = 0.2  # seconds for a stream that has stopped to take more: once, until it goes on
_left: dict[str, bytes] = {}  # by stream that has stopped: the rest of what it took a part of
_lost: dict[str, int] = {}  # texts since then
_terminals: dict[str, int] = {}  # by path: open, without waiting


def console(text: str, stream: str = "stdout", end: str = "\n") -> None:
    """Text for who looks on, ? for what its encoding lacks. A stream that is full or gone is given up: the log is the record.
    One that stops, as by Ctrl-S or a pager, does not stop the run: it lacks what is said meanwhile, and is told so."""
    file = getattr(sys, stream)
    encoding = getattr(file, "encoding", None) or "utf-8"
    escapes = getattr(file, "errors", "") == "backslashreplace"  # the data tools' choice
    data = f"{text}{end}".encode(encoding, "backslashreplace" if escapes else "replace")
    try:
        if (number := _may_stop(file)) is None:
            print(data.decode(encoding), end="", file=file, flush=True)
            return
        if stream in _left and not (rest := _put(number, _left[stream], 0)):
            del _left[stream]
            if lost := _lost.pop(stream, 0):
                data = f"({lost} more are in the log alone, as nothing was taken here)\n".encode() + data
        if stream in _left:
            _left[stream], _lost[stream] = rest, _lost.get(stream, 0) + 1
        elif rest := _put(number, data, PATIENCE):
            _left[stream] = rest
    except (OSError, ValueError) as error:  # full or gone; closed
        setattr(sys, stream, open(os.devnull, "w"))
        _left.pop(stream, None)
        if stream == "stdout":
            tell(f"stdout cannot be written and is given up: {error}")


def live_line(text: str) -> None:
    """On a terminal, in the place of the one before: no more than a row, as only the cursor's is cleared."""
    console(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="")


def _may_stop(file: TextIO) -> int | None:
    """The number of a pipe, a socket or a terminal, which can leave a writer waiting; None for others."""
    try:
        number = file.fileno()
    except (AttributeError, OSError, ValueError):  # no file, or closed
        return None
    if not os.isatty(number):
        mode = os.fstat(number).st_mode
        return number if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None
    with contextlib.suppress(OSError):  # without a name here, or another user's: then as a pipe
        path = os.ttyname(number)
        if path not in _terminals:
            _terminals[path] = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)  # this opening alone never waits
        return _terminals[path]
    return number


def _put(number: int, data: bytes, seconds: float) -> bytes:
    """Write what is taken while the stream does not stop for so long; the rest. A pipe that is ready takes 512 bytes."""
    ready = select.poll()
    ready.register(number, select.POLLOUT)
    while data and ready.poll(1000 * seconds):
        try:
            data = data[os.write(number, data[:512]) :]
        except BlockingIOError:  # a terminal that is ready, but without room
            if seconds <= 0:
                break
            time.sleep(0.01)
            seconds -= 0.01
    return data


def at_home(text: str) -> str:
    """A path whose ~ is a user's home folder. Raises argparse.ArgumentTypeError where nobody has that name."""
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise argparse.ArgumentTypeError(f"{text}: no user of this machine has that name; a file of it is ./{text}")
    return path


def user_path(text: str) -> Path:
    """argparse type. A ~ is the home folder, which shells expand in `--output ~/x`, and leave as it is in `--output=~/x`."""
    if not text:  # which Path takes for the current folder
        raise argparse.ArgumentTypeError("is empty: is a shell variable not set?")
    path = Path(at_home(text))
    try:
        path.is_absolute() or os.getcwd()
    except OSError:
        raise argparse.ArgumentTypeError(f"{text}: the current folder is gone: change into another") from None
    return path


PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps")  # that matplotlib writes


@contextlib.contextmanager
def without_matplotlibrc() -> Iterator[None]:
    """For matplotlib's import, which reads the matplotlibrc of the current folder, whatever that is, or else the user's: meanwhile
    the current folder is the package's, with the file that it comes with."""
    spec = importlib.util.find_spec("matplotlib")
    there = os.path.join(os.path.dirname(spec.origin), "mpl-data") if spec and spec.origin else "."
    os.environ["MPLBACKEND"] = "agg"  # none that a user asks for, which may not be there
    with contextlib.chdir(there if os.path.isdir(there) else "."):
        yield


def output_file(*suffixes: str) -> Callable[[str], Path]:
    """An argparse type: user_path of a file to write, known before the work to be none that cannot be replaced, as a folder, and
    to end in one of these: by a slip of the hand, or of a shell that completes names, it would be a script."""

    def path_of(text: str) -> Path:
        path = user_path(text)
        if os.path.exists(path) and not os.path.isfile(path):
            raise argparse.ArgumentTypeError(f"{text}: is no regular file, and is not replaced: name another")
        if path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{text}: must end in {' or '.join(suffixes)}")
        return path

    return path_of


def numbers_between(least: int, most: int) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers from `least` to `most`, by comma."""

    def numbers(text: str) -> list[int]:
        parts = text.split(",")
        if not all(part.isascii() and part.isdigit() and len(part) < 10 and least <= int(part) <= most for part in parts):
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be whole numbers from {least} to {most}, by comma")
        return [*map(int, parts)]

    return numbers


def wait_for_readers() -> None:
    """Of what a parent has made non-blocking, as Node.js does its pipes, Python would lose what they do not take at once."""
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed
            os.set_blocking(number, True)


@contextlib.contextmanager
def until_reader_leaves() -> Iterator[None]:
    """For what a tool prints, which may be more than its reader wants, or hold what its encoding lacks: `| head` and LC_ALL=C are
    no fault, a full disk is one: SystemExit with a line."""
    guard_console()
    wait_for_readers()
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", "") in ("strict", "surrogateescape"):  # the second: LC_ALL=C's
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left for the interpreter to write
        if not isinstance(error, BrokenPipeError):
            raise SystemExit(printable(f"{os.path.basename(sys.argv[0])}: error: {error}")) from None


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """For a whole tool: Ctrl-C, SIGTERM and SIGHUP are a KeyboardInterrupt, so that what it has started and made goes with it,
    and its exit code is 128 + signal. A second one ends it at once, but for SIGHUP, and for one within a second, as a terminal
    and a parent send it; what is ignored at the start stays so."""
    first = 0.0
    heeded = [x for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(x) != signal.SIG_IGN]

    def interrupt(number: int, _: Any) -> None:
        if _late is not None:
            _late.append(number)
            return
        nonlocal first
        if first:
            if number != signal.SIGHUP and time.monotonic() > first + 1:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        first = time.monotonic()
        raise KeyboardInterrupt(number)

    for number in heeded:
        signal.signal(number, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heeded)  # as a parent may have blocked them
    try:
        yield
    except KeyboardInterrupt as interrupted:
        sys.exit(128 + (interrupted.args or (signal.SIGINT,))[0])  # a library raises it without


_late: list[int] | None = None  # the signals while a child starts: heard once it can be ended


_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it; looked up here: a child after a fork does the least


def end_with_parent() -> None:
    """For a child, before its program: SIGTERM when the thread that has started it is gone, as by an OOM kill."""
    if _prctl:
        _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def ended_with_block(command: list, **options: Any) -> Iterator[subprocess.Popen]:
    """A child that an error in the block ends, and waits for: by SIGTERM, which a launcher hands on to its ranks. So ends a
    child whose parent is killed."""
    global _late
    _late = []
    try:
        process = subprocess.Popen(command, preexec_fn=end_with_parent, **options)
    except BaseException:
        _late = None
        raise
    try:
        late, _late = _late, None
        for number in late[:1]:
            signal.raise_signal(number)
        yield process
    except BaseException:
        process.terminate()
        process.communicate()  # not wait: it may be writing
        raise


def run_to_end(command: list, timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess:
    """subprocess.run, which kills the child alone, but as ended_with_block ends it."""
    with ended_with_block(command, **options) as process:
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def encoded(text: str) -> bytes:
    """UTF-8; names of files may hold what it does not have."""
    return text.encode(errors="backslashreplace")


def tell(message: str) -> None:
    """A message on stderr, led by the program's name; names of files in it cannot move the cursor."""
    console(printable(f"{Path(sys.argv[0]).name}: {message}"), "stderr")


def reason(error: OSError) -> str:
    """Why a folder cannot be made or written to."""
    no_folder = isinstance(error, FileExistsError | NotADirectoryError) and error.filename
    return f"{error.filename} is no folder, or a link to one that is not there" if no_folder else f"{error.strerror}"


def printable(text: str) -> str:
    """Control characters but line breaks and tabs as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


LONG_WAIT = 5.0  # seconds at a process's end, after which it says what it waits for, or gives a console up
CLOSED_BY_PYTHON = (  # as it ends, whoever holds them: what only their close() writes; those that write to others first
    ("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"), ("zipfile", "_ZipWriteFile"), ("zipfile", "ZipFile"),
    ("shelve", "Shelf"),
)  # fmt: skip


def leave(message: str, code: int) -> None:
    """Tell, if anything, and end this process at once, with the daemons that multiprocessing has started: a broken process group
    would wait for the ranks that have gone. After a good end (code 0) return, for the script to end as any other, up to end_well:
    its threads are waited for, by name if that takes long, and a profiler that runs it has its turn."""
    if message:
        tell(message)
    if code == 0:
        flush_console()
        atexit.register(end_well, getattr(sys, "last_value", None))
        with contextlib.suppress(RuntimeError):  # no thread is to be had
            threading.Thread(target=tell_of_wait, daemon=True).start()
        return
    with contextlib.suppress(Exception):  # whatever state the main thread, which may be anywhere, has left them in
        for child in workers():
            child.daemon and child.terminate()
    os._exit(code)


def workers() -> list[Any]:
    """The processes that an idea has started with multiprocessing."""
    return sys.modules["multiprocessing"].active_children() if "multiprocessing" in sys.modules else []


def tell_of_wait() -> None:
    """And wait for no longer than a launcher does, if there is one: a rank whose launcher is gone ends."""
    launcher = int(os.environ.get("BANKRUN_LAUNCHER", os.getppid()))
    time.sleep(LONG_WAIT)
    threads = [x for x in threading.enumerate() if not x.daemon and x is not threading.main_thread()]
    names = ", ".join(x.name for x in [*threads, *workers()]) or "its open files and its functions of atexit"
    tell(f"rank {os.environ.get('RANK', 0)} is through, and waits for {names}")
    while "TORCHELASTIC_RUN_ID" in os.environ:
        if os.getppid() != launcher:
            os._exit(128 + signal.SIGTERM)
        time.sleep(1)


def end_well(before: BaseException | None) -> None:
    """The last that Python calls as it ends, in place of what then takes the interpreter apart: a thread inside PyTorch can abort
    that. What was registered with atexit is called, and what is open written. before: the last error before the good end."""
    try:
        atexit.unregister(end_well)
        atexit._run_exitfuncs()
        write_open_files()
        flush_console()
    finally:
        os._exit(getattr(sys, "last_value", None) is not before)  # of an error since, as a profiler's


def write_open_files() -> None:
    """All but the console."""
    closed = ((getattr(sys.modules.get(module), name, ()), "close") for module, name in CLOSED_BY_PYTHON)
    kinds = [(io.TextIOWrapper, "flush"), *closed, ((io.BufferedWriter, io.BufferedRandom), "flush")]
    held = gc.get_objects()
    number = object.__hash__  # as id, which would wake audit hooks a million times
    types = {number(type(x)): type(x) for x in held}  # few: to ask each object would take most of a second
    wanted = {place for place, x in types.items() if any(issubclass(x, kind) for kind, _ in kinds)}
    files = [x for x in held if number(type(x)) in wanted]
    for kind, write in kinds:
        for file in files:
            with contextlib.suppress(Exception):  # closed, a full disk, an idea's own
                if issubclass(type(file), kind) and (write == "close" or not is_console(file)):
                    getattr(file, write)()


def is_console(file: Any) -> bool:
    try:
        return file.fileno() <= 2
    except (AttributeError, OSError, ValueError):  # of no file, or closed
        return False


def flush_console() -> None:
    """Write what print() has left in a buffer; a stream that does not take it is given up after a while."""
    for name in ("stdout", "stderr") if sys.stdout is sys.__stdout__ else ("stdout", "__stdout__", "stderr"):
        def flush(file: Any = getattr(sys, name)) -> None:
            with contextlib.suppress(Exception):  # full, gone, closed, an idea's own
                file.flush()

        thread = threading.Thread(target=flush, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had
            flush()
        else:
            thread.join(LONG_WAIT)
        if thread.is_alive():  # and holds the stream
            setattr(sys, name, open(os.devnull, "w"))
