"""Write back the sources of a run from its log: every file at its path, byte for byte.

python records/extract.py LOG FOLDER [--force]
"""

import os
import re
import shlex
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path, PurePosixPath, PureWindowsPath

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # also where Python leaves it out: PYTHONSAFEPATH

import older  # noqa: F401, first of all
import tool
from launch.sources import python_files
from runlog import read_log, resumed_with_changes

NAMED = 20  # files at most, in a message
LONGEST_NAME = 200  # characters of a path: what any file system takes


class ExtractError(Exception):
    """Why the sources cannot be written; the message names the log or the file and says what to do."""


def extract(log_path: Path, folder: Path, force: bool = False) -> list[Path]:
    """Write the log's sources into `folder`, made if need be; the paths, the script's first.

    On error everything is as it was. An old script goes first and the new one comes last: a process that is killed midway
    leaves none, and no mixture of two runs that starts. Raises ExtractError if the log has no whole sources, if a file's path
    leaves the folder, or if a file exists and not `force`; OSError if the folder cannot be written to.
    """
    log = read_log(log_path)
    if not log.sources:
        raise ExtractError(f"{log_path}: no sources in this log ({log.fault or 'it begins with step lines'})")
    for name in log.sources:
        if fault := path_fault(name, log.sources):
            raise ExtractError(f"{log_path}: names a source {shortened(name)!r}: {fault}; nothing written")
    parents = (parent for parent in folder.absolute().parents if os.access(parent, os.R_OK | os.X_OK) and parent.is_dir())
    with tool.alone(next(parents, folder)):  # two would find folder empty
        return write(log.sources, folder, force)


def write(sources: dict[str, bytes], folder: Path, force: bool) -> list[Path]:
    """See extract."""
    check_folder(folder, sources, force)
    paths = [folder / name for name in sources]
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    with tempfile.TemporaryDirectory(prefix=".extract-", dir=existing) as staging, ExitStack() as undo:
        new, old = ([Path(staging, f"{age}{i}") for i in range(len(paths))] for age in ("new", "old"))
        for path, source in zip(new, sources.values(), strict=True):
            path.write_bytes(source)
        if os.path.lexists(paths[0]):
            shutil.copy2(paths[0], old[0], follow_symlinks=False)
            undo.callback(os.replace, old[0], paths[0])
            paths[0].unlink()
        for i in (*range(1, len(paths)), 0):
            path = paths[i]
            for parent in reversed(path.parents):
                if not parent.is_dir():
                    parent.mkdir()
                    undo.callback(parent.rmdir)
            if os.path.lexists(path):
                shutil.copy2(path, old[i], follow_symlinks=False)
                undo.callback(os.replace, old[i], path)
            else:
                undo.callback(path.unlink, missing_ok=True)
            os.replace(new[i], path)
        undo.pop_all()
    return paths


def shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:60]}…"


def strangers(folder: Path, paths: list[Path]) -> list[str]:
    """Python files of the folder that are not of `paths`: the script could import them."""
    found = {path.relative_to(folder).as_posix() for path in python_files(folder)}
    return sorted(found - {path.relative_to(folder).as_posix() for path in paths})


def path_fault(name: str, names: dict[str, bytes]) -> str:
    """Why `name`, one of `names`, is not the path of a file below a folder, on any system; "" if it is."""
    windows = PureWindowsPath(name)
    if not name.isprintable():
        return "not printable"
    if len(name) > LONGEST_NAME:
        return f"longer than {LONGEST_NAME} characters"
    if "\\" in name:
        return "has a backslash"
    if windows.drive or windows.root:
        return "not a relative path"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "has an empty part, . or .."
    if files := [str(parent) for parent in PurePosixPath(name).parents if str(parent) in names]:
        return f"{files[0]} is a file of this log too, and cannot be a folder"
    if not name.endswith(".py"):  # such as .git/config, by which Git runs commands
        return "is no Python file"
    return ""


def check_folder(folder: Path, names: dict[str, bytes], force: bool) -> None:
    """Raise ExtractError if files of these names cannot be written into the folder, or are there and not `force`."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise ExtractError(f"{folder}: not a folder")
    if (place := os.path.realpath(folder)) == os.path.dirname(place):
        raise ExtractError(f"{folder} is the root of all folders: choose another (is a shell variable not set?)")
    if fault := tool.place_fault(folder):
        raise ExtractError(f"{fault}: choose another")
    for parent in sorted({folder / parent for name in names for parent in PurePosixPath(name).parents} - {folder}):
        if parent.is_symlink():
            raise ExtractError(f"{parent} is a link: choose another folder, or remove it")
        if parent.exists() and not parent.is_dir():
            raise ExtractError(f"{parent} is a file where a folder must be: choose another folder, or remove it")
    existing = [folder / name for name in names if os.path.lexists(folder / name)]
    if folders := [str(path) for path in existing if path.is_dir() and not path.is_symlink()]:
        raise ExtractError(f"{', '.join(folders)} is a folder where a file must be: choose another folder, or remove it")
    if existing and not force:
        there = f"{existing[0]} exists" if len(existing) == 1 else f"{existing[0]} and {len(existing) - 1} more exist"
        raise ExtractError(f"{there}: choose another folder, or --force to overwrite")


def files_read(fact: str) -> list[str]:
    """The files among what a log's sources have read, variables and files: A='1', a file='CRC-32 0000000a', …"""
    parts = re.split(r"='CRC-32 [\da-f]{8}'(?:, | then |$)", fact)[:-1]
    return [*dict.fromkeys(re.sub(r"^(?:\w+='[^']*'(?:, | then )|none then )*", "", part) for part in parts)]


def main(argv: list[str] | None = None) -> None:
    """The command line. Raises SystemExit with code 1 after a message if the sources cannot be written."""
    parser = tool.Parser("extract.py", __doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to; made if need be")
    parser.add_argument("--force", action="store_true", help="overwrite files of the same paths")
    options = parser.parse_args(argv)
    try:
        paths = extract(options.log, options.folder, options.force)
    except BrokenPipeError:  # for tool.run
        raise
    except (ExtractError, OSError) as error:
        where = "" if isinstance(error, ExtractError) or error.filename else f"{options.folder}: "
        raise SystemExit(f"extract.py: error: {where}{error}") from None
    for path in paths:
        print(tool.clean(path, one_line=True))
    if others := strangers(options.folder, paths):
        some = ", ".join(others[:NAMED]) + f" and {len(others) - NAMED} more" * (len(others) > NAMED)
        print(f"not of this log, but there, and the script may import them: {tool.clean(some, one_line=True)}")
    log = read_log(options.log)
    if read := files_read(log.facts.get("read by its sources", "")):
        where = f"if the script looks for them in its folder, they belong in {paths[0].parent}"
        print(tool.clean(f"no log holds what the run has read, {', '.join(read)}: {where}", one_line=True))
    for problem in log.problems:
        print(f"note: {tool.clean(problem, one_line=True)}")
    if resumed_with_changes(log):
        print("the run began with these sources; it was resumed with others: the log's header has the diff")
    print(f"run it: {tool.clean(shlex.join(['./run.sh', str(paths[0])]), one_line=True)}")


if __name__ == "__main__":
    tool.run(main, packages=False)
