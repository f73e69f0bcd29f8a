"""Makes token shards from text on this machine: `python data/local_text.py`. Needs no network, no GPU and no vocabulary.

The text is, unless told otherwise, the sources of Python's own standard library, its tests included (they are half of it,
and as good a text as the rest), without installed packages. Files that are not UTF-8 text, such as some of those tests', are
left out and counted. Of another --input all text files are taken, except in hidden folders. Symbolic links are followed, and
what several lead to is taken once; a copy, or a hard link, is a file of its own.

A document is a piece of a file, cut at blank lines and at most 2,040 bytes long, so that with its end-of-text token it is
never cut by a loader whose documents end at 2,048 tokens. Its hash says where it goes: one in twenty into validation, and
in the order of the hashes, so that every prefix of a shard is a fair sample. Same text, same shards, on every machine.

Default encoding: a token a byte, and end-of-text = 256. The text is held in memory.

manifest.json in --output lists the shards. What it lists is replaced and deleted, nothing else, and only once the new shards
are all written, in the folder .making beside them: until then the disk needs room for both.
"""

import argparse
import codecs
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.environment import go_on

if __name__ == "__main__":
    go_on("requirements.txt", "numpy", "tqdm")

from data.encodings import load_encoding
from data.shards import (
    MAX_SHARD_TOKENS, READERS, TEMPORARY, DataError, HelpFormatter, ShardError, ShardWriter, check_alone, import_tqdm, locked,
    name_pattern, named, number_between, one_line_errors, open_lock_if_writable, read_json, shard_name, sync_folder, verify_shard,
    without_readers, write_json,
)
from launch.console import Parser, console, user_path

tqdm = import_tqdm()
STDLIB = Path(sysconfig.get_paths()["stdlib"])
INSTALLED = {"site-packages", "dist-packages"}  # folders in it
DOCUMENT_BYTES = 2040  # with end-of-text still below the 2,048 tokens at which training cuts documents
VALIDATION_SHARE = 1 / 20
READ_ANEW = 256 << 20  # bytes of text, half a second: to find out whether it has changed
PROGRAM = (Path(__file__).resolve(), Path(__file__).resolve().with_name("encodings.py"))  # what turns text into tokens

# ----------------------------------------------------------------------------------------------------------------------
# Files


def find_files(source: Path, suffixes: list[str], output: Path) -> tuple[dict[str, Path], list[str]]:
    """The files to read, by their name relative to `source`, in order of that name, and the folders that cannot be read.
    A file is taken once, whatever symbolic links lead to it.

    suffixes: take only files that end in one of them; empty takes all
    output: a folder to pass by, in case the shards are made inside of `source`. Raises DataError if there are no files.
    """
    if source.is_file():
        return {source.name: source}, []
    if not source.is_dir():
        raise DataError(f"{source}: no such file or folder; --input names the text to read")
    if os.path.realpath(source) == os.path.realpath(output):
        raise DataError(f"{output} is the --input too: its shards would be text of the next run; choose another --output")
    files, links, unreadable, seen = {}, [], [], {identity(source)}
    passed_by = INSTALLED if source == STDLIB.resolve() else set()
    note = lambda error: unreadable.append(f"{error.filename}")
    for folder, folders, names in os.walk(source, onerror=note, followlinks=True):
        here = Path(folder)
        folders[:] = [name for name in sorted(folders) if name not in passed_by and wanted_folder(here / name, output, seen)]
        try:
            for name in names:
                path = here / name
                if name.endswith(tuple(suffixes) or "") and path.is_file():  # a pipe or a dead link is none
                    if path.is_symlink():
                        links.append(path)
                    else:
                        files[path.relative_to(source).as_posix()] = path
        except PermissionError:  # it lists its files, and no more
            unreadable.append(folder)
    taken = {path.resolve() for path in files.values()} if links else set()
    for path in sorted(links):
        if (place := path.resolve()) not in taken:
            taken.add(place)
            files[path.relative_to(source).as_posix()] = path
    if not files:
        lost = f"; {complaint(unreadable)}" if unreadable else ""
        raise DataError(f"{source}: no files" + (f" that end in {' or '.join(suffixes)}" if suffixes else "") + lost)
    return dict(sorted(files.items())), sorted(unreadable)


def complaint(folders: list[str]) -> str:
    more = ", …" if len(folders) > 3 else ""
    return f"{len(folders)} folder(s) cannot be read, their text is missing: {', '.join(map(ascii, folders[:3]))}{more}"


def identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def wanted_folder(folder: Path, output: Path, seen: set[tuple[int, int]]) -> bool:
    """Is its text to be taken? By whatever links it is reached, a folder is taken once: then it is added to those seen."""
    if folder.name.startswith(".") or os.path.realpath(folder) == os.path.realpath(output):
        return False
    try:
        number = identity(folder)
    except OSError:  # os.walk tells of it
        return True
    is_new = number not in seen
    seen.add(number)
    return is_new


def read_text(path: Path) -> bytes | None:
    """The bytes of a UTF-8 text file; None if this user may not read it, it has gone, is not UTF-8, or has a NUL byte and so is
    no text, of which no more is read than tells so. Raises OSError for one that cannot be read for another reason, DataError
    for one that memory does not hold."""
    decoder, blocks = codecs.getincrementaldecoder("utf-8")(), []
    try:
        with named(path), path.open("rb") as file:
            while block := file.read(2**20):
                decoder.decode(block)
                if b"\0" in block:
                    return None
                blocks.append(block)
        decoder.decode(b"", final=True)
        return b"".join(blocks)
    except (PermissionError, FileNotFoundError, UnicodeDecodeError):
        return None
    except MemoryError:
        raise DataError(f"{path}: not enough memory, in which all text is held: leave it out") from None


# ----------------------------------------------------------------------------------------------------------------------
# Documents

END_OF_PARAGRAPH = re.compile(rb"\n(?:[ \t\r\f\v]*\n)+")


def cut(text: bytes, limit: int = DOCUMENT_BYTES) -> list[bytes]:
    """Cuts UTF-8 text into pieces of at most `limit` (>= 4) bytes, as few as keep the paragraphs whole that fit into one.

    The pieces put together are the text. Each is valid UTF-8.
    """
    pieces, parts, size = [], [], 0
    for unit in units(text, limit):
        if parts and size + len(unit) > limit:
            pieces.append(b"".join(parts))
            parts, size = [], 0
        parts.append(unit)
        size += len(unit)
    return pieces + [b"".join(parts)] if parts else pieces


def units(text: bytes, limit: int) -> Iterator[bytes]:
    """What `cut` may cut between: paragraphs; the lines of one that is too long; the parts of a line that is too long."""
    ends = [match.end() for match in END_OF_PARAGRAPH.finditer(text)]
    for start, end in zip([0, *ends], [*ends, len(text)]):
        if end - start <= limit:
            if start < end:
                yield text[start:end]
            continue
        for line in text[start:end].splitlines(keepends=True):
            start = 0
            while len(line) - start > limit:
                end = start + limit
                while line[end] & 0xC0 == 0x80:  # in the middle of a character
                    end -= 1
                yield line[start:end]
                start = end
            yield line[start:]


def split(documents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """(training, validation), each in the order of the documents' hashes; the lowest hashes are for validation.

    So equal documents end on the same side, and a document's side does not depend on the others, unless one side would be
    empty: then it gets one document. Raises DataError if there are fewer than two.
    """
    if len(documents) < 2:
        raise DataError(f"{len(documents)} document(s) of at most {DOCUMENT_BYTES} bytes; two splits take two: give more text")
    hashed = sorted((int.from_bytes(blake2b(document, digest_size=8).digest(), "big"), document) for document in documents)
    validation = sum(number < VALIDATION_SHARE * 2**64 for number, _ in hashed)
    validation = min(max(validation, 1), len(documents) - 1)
    ordered = [document for _, document in hashed]
    return ordered[validation:], ordered[:validation]


# ----------------------------------------------------------------------------------------------------------------------
# Shards


def status_of(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        raise DataError(f"{path} has gone since it was found: start again, in a folder that others leave alone") from None


def recipe(args: argparse.Namespace, files: dict[str, Path]) -> dict[str, object]:
    """All that decides what the shards hold: the options, the program, and the files: names and content, wherever they lie; of
    more than READ_ANEW bytes path, sizes and times instead."""
    fingerprint = blake2b(b"".join(path.read_bytes() for path in PROGRAM), digest_size=16)
    read = sum(status_of(path).st_size for path in files.values()) <= READ_ANEW
    for name, path in files.items():
        status, readable = status_of(path), os.access(path, os.R_OK)
        times = () if read else (status.st_mtime_ns, status.st_ctime_ns)  # the second no archive and no copy sets
        facts = status.st_size, readable, times
        fingerprint.update(f"{name}\0{facts}\0".encode(errors="surrogateescape"))
        if read and readable:
            with suppress(OSError):  # which is told where the text is read
                fingerprint.update(path.read_bytes())
    options = {"input": "" if read else str(args.input), "suffixes": args.suffixes}
    return options | {"shard_tokens": args.shard_tokens, "encoding": args.encoding, "fingerprint": fingerprint.hexdigest()}


SHARD_NAME = name_pattern("local")


def load_manifest(output: Path) -> dict | None:
    """The manifest in `output`, if there is one. Raises DataError for one of another origin, or for shards not in it."""
    path = output / "manifest.json"
    advice = "choose another --output, or move it away"
    try:
        manifest = read_json(path)
    except DataError as error:
        raise DataError(f"{error}: choose another --output, or move it and the shards away") from None
    shards = manifest.get("shards") if isinstance(manifest, dict) and "recipe" in manifest else None
    if manifest is not None and not (isinstance(shards, dict) and all(map(SHARD_NAME.fullmatch, shards))):
        raise DataError(f"{path} was not written by this program: {advice}")
    for name in sorted(os.listdir(output)):
        if SHARD_NAME.fullmatch(name) and name not in (shards or ()):
            raise DataError(f"{output / name} is in no manifest.json of this program: {advice}")
    return manifest


def is_present(output: Path, manifest: dict, wanted: dict[str, object]) -> bool:
    """Whether the manifest is of this recipe, and all its shards are there and whole."""
    try:
        counts = {name: verify_shard(output / name) for name in manifest["shards"]}
    except ShardError:
        return False
    return manifest["recipe"] == wanted and manifest["shards"] == counts


@contextmanager
def folder_to_make(folder: Path) -> Iterator[Path]:
    """An empty folder, gone after the block; a killed run's goes first. Raises OSError; DataError for another's."""
    if folder.is_dir() and not folder.is_symlink():
        bare = lambda name: name.removesuffix(TEMPORARY).removesuffix(".tmp")  # the latter: of versions before
        if others := [name for name in os.listdir(folder) if not SHARD_NAME.fullmatch(bare(name))]:
            raise DataError(f"{folder / others[0]} is not this program's, which makes shards there: move it away")
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def make_shards(args: argparse.Namespace, files: dict[str, Path], wanted: dict[str, object], old: list[str]) -> dict:
    """Reads `files`, writes the shards and the manifest into `args.output`; returns the manifest. Raises DataError, OSError.

    old: the shards that an earlier run listed. They stay until the new ones are whole, in a folder of their own; while these
    take their places the manifest lists both and has no recipe: a killed run is never taken for a finished one.
    """
    encoding = load_encoding(args.encoding)
    texts = [read_text(path) for path in tqdm(files.values(), desc="reading", unit=" files", disable=None)]
    if recipe(args, files) != wanted:  # else an edit that is undone later would stay in the shards
        raise DataError(f"{args.input}: a file has changed while all were read: start again")
    readable = sum(text is not None for text in texts)
    documents = [piece for text in texts if text is not None for piece in cut(text)]
    if not documents:
        raise DataError(f"{args.input}: no text in {len(files)} file(s), of which {len(files) - readable} are not UTF-8 text")
    splits = dict(zip(("train", "val"), split(documents)))

    path, shards = args.output / "manifest.json", {}
    with folder_to_make(args.output / ".making") as making:
        with tqdm(total=len(documents), desc="encoding", unit=" documents", disable=None) as bar:
            for name, members in splits.items():
                writer = ShardWriter(making, lambda index: shard_name("local", name, index), args.shard_tokens)
                for document in members:
                    writer.add(encoding.document(document.decode()))
                    bar.update()
                writer.close()
                shards |= writer.written
        write_json(path, {"recipe": None, "shards": dict.fromkeys((*old, *shards), 0)})
        for name in shards:
            os.replace(making / name, args.output / name)
    for name in {*old} - {*shards}:
        (args.output / name).unlink(missing_ok=True)
    sync_folder(args.output)
    manifest = {"encoding": encoding.name, "vocab_size": encoding.vocab_size, "bos_id": encoding.end_of_text}
    manifest |= {"files": readable, "skipped_files": len(files) - readable, "documents": len(documents)}
    manifest |= {"bytes": sum(map(len, documents)), "shards": shards, "recipe": wanted}
    write_json(path, manifest)
    return manifest


def report(manifest: dict, output: Path) -> None:
    files = f"{manifest['files']:,} files ({manifest['skipped_files']} skipped: not readable as UTF-8 text)"
    console(f"{manifest['documents']:,} documents, {manifest['bytes']:,} bytes, of {files}")
    vocabulary = f"encoding {manifest['encoding']}: vocabulary {manifest['vocab_size']:,}, end-of-text {manifest['bos_id']}"
    console(f"{sum(manifest['shards'].values()):,} tokens in {len(manifest['shards'])} shards, {vocabulary}")
    for name, tokens in manifest["shards"].items():
        console(f"  {output / name}  {tokens:,} tokens")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--input", type=user_path, default=STDLIB, help="a text file, or a folder of them")
    default = Path(__file__).resolve().parent / "local"
    parser.add_argument("--output", type=user_path, default=default, help="folder for the shards and their manifest.json")
    parser.add_argument("--encoding", default="bytes", help="bytes, or the name of a tiktoken encoding, such as gpt2")
    suffixes = "take only files of a folder that end so, such as .py,.md; default: .py of the standard library, all of others"
    parser.add_argument("--suffixes", help=suffixes, default=argparse.SUPPRESS)
    size = number_between(1, MAX_SHARD_TOKENS)
    parser.add_argument("--shard_tokens", type=size, default=100_000_000, help="tokens a shard; the last has what is left")
    args = parser.parse_args()
    args.input = Path(os.path.realpath(args.input))
    if os.path.realpath(args.output) == os.path.realpath(default) and args.input not in (STDLIB.resolve(), STDLIB):
        parser.error(f"--output must be given with --input: {default} is the demo's, name another folder")
    chosen = getattr(args, "suffixes", ".py" if args.input == STDLIB.resolve() else "")
    args.suffixes = [suffix.strip() for suffix in chosen.split(",") if suffix.strip()]
    return args


def main() -> None:
    args = parse_arguments()
    with one_line_errors():
        files, unreadable = find_files(args.input, args.suffixes, args.output)
        if unreadable:
            console(f"local_text.py: {complaint(unreadable)}", "stderr")
        with locked(args.output):
            readers = open_lock_if_writable(args.output / READERS)  # for runs to hold
            if readers:
                readers.close()
            wanted = recipe(args, files)
            check_alone(args.output, "local")
            manifest = load_manifest(args.output)
            if manifest and is_present(args.output, manifest, wanted):
                tokens = sum(manifest["shards"].values())
                console(f"{args.output} is up to date: {tokens:,} tokens in {len(manifest['shards'])} shards")
            elif readers:
                with without_readers(args.output):
                    made = make_shards(args, files, wanted, list(manifest["shards"]) if manifest else [])
                report(made, args.output)
            else:
                holds = ", and holds shards of other text, as of another Python, or other options" if manifest else ""
                serves = f"train on them as they are, by --data={args.output}, or " if manifest else ""
                raise DataError(f"{args.output} cannot be written{holds}: {serves}name another folder with --output")


if __name__ == "__main__":
    main()
