"""What the command lines in records/ share: their packages, text that only shows, and one line for an error."""

import argparse
import contextlib
import fcntl
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # a launch of PYTHONPATH, as ROS has one, is another's
from launch import console, environment


def clean(text: object, one_line: bool = False) -> str:
    """Text that only shows: characters that move a cursor, change colours or turn the order of a line round, as escapes.

    Line breaks stay, unless one_line; bytes of a file's name that are no text are escapes too.
    """
    kept = "\t" if one_line else "\n\t"
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in str(text))


def markdown(text: object) -> str:
    """The same for a line of Markdown, in a table or not: neither HTML nor code, nor the markers of what history.py writes."""
    line = clean(" ".join(str(text).split()), one_line=True)
    return re.sub(r"[`|]", r"\\\g<0>", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def fenced(text: str) -> str:
    """A block of code that no line of the text ends, and without comments of HTML."""
    text = clean(text).replace("<!--", "<! --")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


class Parser(console.Parser):
    """A tool's options; its docstring is its help."""

    def __init__(self, name: str, about: str):
        super().__init__(prog=name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def finite(text: str) -> float:
    """An option's number. Raises ValueError for what is none."""
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def above_zero(text: str) -> float:
    """The same of a loss to be below. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if (value := finite(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"{clean(text[:40])!r}: must be a number above 0")


def write(path: Path, text: str) -> None:
    """The old file or the new one, whole, whenever this process ends. Raises OSError."""
    from data.shards import whole_file  # numpy, which not every tool needs

    with whole_file(path) as file:
        file.write(text.encode())


def place_fault(folder: Path) -> str:
    """Why this process can make nothing in a folder that is there, or is made; nothing if it can."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        return f"{there} is no folder, or a link to one that is not there"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written to"


@contextlib.contextmanager
def alone(folder: Path, wait: bool = True) -> Iterator[None]:
    """Keeps others that ask for it out of a folder, which is there, or waits for one inside, with a message; a file system without
    locks keeps none out. Raises BlockingIOError at once if one is inside and not wait."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            print(f"{clean(folder)}: waiting for another tool that works there, as race.py", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def run(main: Callable[[], None], packages: bool = True) -> None:
    """main() as a command: with the packages of records/requirements.txt, its message cleaned, and gone when its reader is.

    packages: this interpreter's, else those of .venv, which is made or filled if need be; training's own stay as they are.
    --help needs none.
    An empty argument is refused: of a shell variable that is not set, it would mean the current folder.
    """
    own = sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]  # what follows is the trainer's, as of race.py
    if empty := [text for text in own if not text or re.fullmatch(r"--[\w-]+=", text)]:
        what = f"{clean(empty[0]) or 'an argument'} is empty: is a shell variable not set?"
        print(f"{Path(sys.argv[0]).name}: error: {what}", file=sys.stderr)
        raise SystemExit(2)
    if packages and not {"--help", "-h"} & {*own}:
        environment.go_on("records/requirements.txt")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # as after nohup

    def undo(number: int, _: object) -> None:
        """What is half written; no second signal, as a hang-up beside SIGTERM, ends that."""
        for other in heeded:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    for number in heeded:
        signal.signal(number, undo)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heeded)  # as a parent may have blocked them
    console.wait_for_readers()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk under stdout
        end(f"{Path(sys.argv[0]).name}: error: {error}")
    except KeyboardInterrupt:
        end("", 130)
    except SystemExit as exit_:
        end(exit_.code) if isinstance(exit_.code, str) else end("", exit_.code or 0)
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def end(message: str, code: int = 1) -> None:
    """Raises SystemExit, with nothing left for the interpreter to write that it cannot."""
    try:
        print(clean(message), file=sys.stderr, end="\n" * bool(message))
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(code)
