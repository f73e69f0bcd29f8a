"""Write back the sources of a run from its log, byte for byte.

python records/extract.py LOG FOLDER [--force]
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from runlog import read_log


class ExtractError(Exception):
    """Why the sources cannot be written; the message names the log or the file and says what to do."""


def extract(log_path: Path, folder: Path, force: bool = False) -> list[Path]:
    """Write the log's sources into `folder`, made if need be; the paths, the script's first.

    On error nothing is written. Raises ExtractError if the log has no whole sources, if a file's name is not plain, or if a
    file exists and not `force`; OSError if the folder cannot be written to.
    """
    log = read_log(log_path)
    if not log.sources:
        raise ExtractError(f"{log_path}: no sources in this log ({log.fault or 'it begins with step lines'})")
    for name in log.sources:
        if Path(name).name != name or name in ("", ".", "..") or not name.isprintable():
            raise ExtractError(f"{log_path}: names a source {name!r}: not a plain file name, nothing written")
    paths = [folder / name for name in log.sources]
    existing = [str(path) for path in paths if os.path.lexists(path)]
    if existing and not force:
        raise ExtractError(f"{', '.join(existing)} exists: choose another folder, or --force to overwrite")
    if folder.exists() and not folder.is_dir():
        raise ExtractError(f"{folder}: not a folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".extract-", dir=folder if folder.is_dir() else folder.parent))
    try:
        for name, source in log.sources.items():
            (staging / name).write_bytes(source)
        folder.mkdir(exist_ok=True)
        for path in paths:
            os.replace(staging / path.name, path)
    finally:
        shutil.rmtree(staging)
    return paths


def main(argv: list[str] | None = None) -> None:
    """The command line. Raises SystemExit with code 1 after a message if the sources cannot be written."""
    parser = argparse.ArgumentParser(
        prog="extract.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to; made if need be")
    parser.add_argument("--force", action="store_true", help="overwrite files of the same names")
    options = parser.parse_args(argv)
    try:
        paths = extract(options.log, options.folder, options.force)
    except (ExtractError, OSError) as error:
        raise SystemExit(f"extract.py: error: {error}") from None
    for path in paths:
        print(path)
    print(f"run it: ./run.sh {paths[0]}")


if __name__ == "__main__":
    main()
