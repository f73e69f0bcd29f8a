"""Downloads FineWeb as ready-made GPT-2 token shards: `./run.sh data/cached_fineweb10B.py 9`.

The shards are those of the dataset kjj0/fineweb10B-gpt2 on the Hugging Face hub: one for validation
and 103 for training, of 100M tokens (200 MB) each. Nine are more than the record preset reads.
HF_ENDPOINT names a mirror. Beside them comes the prefix table of GPT-2's tokens, if tiktoken can
load them.

A shard gets its name once its SHA-256 is the one that the hub announces. Shards that are there
stay, so the same command continues after an interruption.
"""

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

from data.encodings import save_tables
from data.shards import UNFINISHED, DataError, shard_name, verify_shard

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn whatever huggingface_hub raises into a DataError of one line."""
    try:
        yield
    except Exception as error:  # the errors of its HTTP library differ between versions
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"cannot fetch {what} from {constants.ENDPOINT}: {reason}") from error


def fetch(repo: str, name: str, folder: Path, revision: str | None = None) -> Path:
    """Download the file `name` of a dataset into `folder`, compare its SHA-256, return its path.

    huggingface_hub retries, resumes a broken connection, and locks. Raises DataError.
    """
    with hub_errors(f"{repo}/{name}"):
        place = {"repo_type": "dataset", "revision": revision}
        announced = get_hf_file_metadata(hf_hub_url(repo, name, **place))
        place = {"repo_type": "dataset", "revision": announced.commit_hash}
        path = Path(hf_hub_download(repo, name, local_dir=folder, **place))
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    if found != announced.etag:
        path.unlink()
        hashes = f"SHA-256 {found}, but {constants.ENDPOINT} announces {announced.etag}"
        raise DataError(f"{repo}/{name}: {hashes}; the download was deleted, try again")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("N", nargs="?", type=int, default=9, help=f"training shards, 0 to {TRAIN_SHARDS}")
    default = Path(__file__).resolve().parent / "fineweb10B"
    add("--output", type=Path, default=default, help="folder for the shards")
    args = parser.parse_args()
    if not 0 <= args.N <= TRAIN_SHARDS:
        parser.error(f"N must be 0 to {TRAIN_SHARDS}, not {args.N}")

    names = [shard_name("fineweb", "train" if i else "val", i) for i in range(args.N + 1)]
    parts = args.output / UNFINISHED
    tokens = 0
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        if (args.output / "manifest.json").exists():
            raise DataError(f"{args.output} has shards of another tool: choose another --output")
        for i, name in enumerate(names, 1):
            if not (args.output / name).exists():
                print(f"fetching {name} ({i} of {len(names)})", flush=True)
                path = fetch(REPO, name, parts)
                verify_shard(path)
                os.replace(path, args.output / name)
            tokens += verify_shard(args.output / name)
        shutil.rmtree(parts, ignore_errors=True)
        try:
            save_tables(args.output, "gpt2")
        except DataError as error:  # the shards are whole without it
            print(f"no prefix table yet, training will make it: {error}")
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{args.output}: {len(names)} shards, {tokens:,} tokens")


if __name__ == "__main__":
    main()
