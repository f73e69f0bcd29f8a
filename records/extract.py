"""Write back the sources of a run from its log: every file at its path, byte for byte.

./run.sh records/extract.py LOG FOLDER [--force]
"""

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runlog import read_log, shown


class ExtractError(Exception):
    """Why the sources cannot be written; the message says what to do."""


def path_fault(name: str) -> str:
    """Why a log's `name` is not the path of a Python file below a folder; "" if it is."""
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or ":" in name:
        return "has a character that no path of a source has"
    if any(part in ("", ".", "..") for part in parts):  # an absolute path has an empty part
        return "leaves the folder"
    if not name.endswith(".py") or any(part.startswith(".") for part in parts):
        return "is no Python file"  # .git/config, for one, names commands that Git runs
    return ""


def extract(log_path: Path, folder: Path, force: bool = False) -> list[Path]:
    """Write the log's sources into `folder`, made if need be; the paths, the script's first.

    Raises ExtractError, before anything is written, if the log has no whole sources, if a path
    leaves the folder or meets a link, or if the folder is not empty and not `force`.
    """
    log = read_log(log_path)
    if not log.sources:
        raise ExtractError(f"{log_path}: {log.fault or 'no sources in this log'}")
    for name in log.sources:
        if fault := path_fault(name):
            raise ExtractError(f"{log_path}: its source {name!r} {fault}: nothing written")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ExtractError(f"{folder} is not empty: name another, or --force to overwrite")
    # All checks come before the first write: a refused log leaves nothing behind.
    paths = [folder / name for name in log.sources]
    for path in paths:
        inside = [path, *path.parents][: len(path.relative_to(folder).parts)]
        for link in filter(Path.is_symlink, inside):
            raise ExtractError(f"{link} is a link, and may lead elsewhere: name another folder")
    for path, source in zip(paths, log.sources.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source)
    return paths


def main(argv: list[str] | None = None) -> None:
    """Raises SystemExit with a message if the sources cannot be written."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to; made if need be")
    parser.add_argument("--force", action="store_true", help="into a folder that is not empty")
    options = parser.parse_args(argv)
    try:
        paths = extract(options.log, options.folder, options.force)
    except ExtractError as error:
        raise SystemExit(f"extract.py: error: {shown(error)}") from None
    for path in paths:
        print(shown(path))
    if read_log(options.log).source_changes:
        print("the run was resumed with changed source: the log's header has the diff")
    command = shlex.join(["./run.sh", str(paths[0])])
    print(f"run it, in the project's folder: {shown(command)}")


if __name__ == "__main__":
    main()
