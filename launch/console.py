"""What a user is told, on a console that may be closed, full or of another encoding, and the errors that end a run."""

import argparse
import difflib
import os
import sys
from pathlib import Path


class RunError(RuntimeError):
    """A run that cannot go on; its message is all that the user needs."""


class AgreedError(RunError):
    """A RunError that every rank raises; the first one tells."""


class Stopped(RunError):
    """A signal, obeyed by all ranks: Stopped(message, exit code)."""


class OptionParser(argparse.ArgumentParser):
    """Options in full; one that is unknown is told with the known one that looks most like it."""

    def __init__(self, about: str):
        super().__init__(allow_abbrev=False, description=about, usage="%(prog)s [--option=value …], listed by --help")

    def parse_args(self, args: list[str] | None = None, namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = [option.partition("=")[0].replace("-", "_") for option in unknown]
            known = {name.replace("-", "_"): name for name in self._option_string_actions}
            near = [known[match[0]] for name in names if (match := difflib.get_close_matches(name, known, 1))]
            hint = f" (did you mean {' and '.join(dict.fromkeys(near))}?)" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found


def guard_console() -> None:
    """Let stdin, stdout and stderr lead nowhere where they are closed: the next file would take their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")


def console(text: str, stream: str = "stdout", end: str = "\n") -> None:
    """Text for who looks on, ? for what its encoding lacks. A stream that takes nothing is given up: the log is the record."""
    file = getattr(sys, stream)
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), end=end, file=file, flush=True)
    except (OSError, ValueError) as error:  # full or gone; closed
        setattr(sys, stream, open(os.devnull, "w"))
        if stream == "stdout":
            tell(f"stdout cannot be written and is given up: {error}")


def encoded(text: str) -> bytes:
    """UTF-8; names of files may hold what it does not have."""
    return text.encode(errors="backslashreplace")


def tell(message: str) -> None:
    """A message on stderr, led by the program's name; names of files in it cannot move the cursor."""
    console(printable(f"{Path(sys.argv[0]).name}: {message}"), "stderr")


def printable(text: str) -> str:
    """Control characters but line breaks and tabs as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def leave(message: str, code: int) -> None:
    """Tell, if anything, and end this process at once: a broken process group would wait for the ranks that have gone."""
    if message:
        tell(message)
    os._exit(code)
