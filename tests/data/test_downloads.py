"""The tools that download, on a hub of files in memory. One that cannot be reached is a real one."""

import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from common import run_fresh
from data import cached_fineweb10B, fineweb
from data.shards import read_shard, write_shard


class Hub:
    """What the tools call of huggingface_hub. `files`: contents by repository and name."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.announced: dict[str, str] = {}  # in place of a file's SHA-256
        self.fetched: list[str] = []
        self.interrupted_at = ""  # the name of a file at which Ctrl-C comes

    def hf_hub_url(self, repo: str, name: str, **place: object) -> str:
        return f"{repo}/{name}"

    def get_hf_file_metadata(self, url: str) -> SimpleNamespace:
        digest = hashlib.sha256(self.files[url]).hexdigest()
        return SimpleNamespace(etag=self.announced.get(url, digest), commit_hash="0" * 40)

    def hf_hub_download(self, repo: str, name: str, local_dir: Path, **place: object) -> str:
        if name == self.interrupted_at:
            raise KeyboardInterrupt
        self.fetched.append(name)
        path = local_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files[f"{repo}/{name}"])
        return str(path)

    def dataset_info(self, repo: str) -> SimpleNamespace:
        return SimpleNamespace(sha="0" * 40)

    def list_repo_tree(self, repo: str, subset: str, **place: object) -> list[SimpleNamespace]:
        names = [url.removeprefix(f"{repo}/") for url in self.files]
        return [SimpleNamespace(path=name) for name in names if name.startswith(subset)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    for name in ("hf_hub_url", "get_hf_file_metadata", "hf_hub_download"):
        monkeypatch.setattr(cached_fineweb10B, name, getattr(hub, name))
    monkeypatch.setattr(fineweb, "HfApi", lambda: hub)
    return hub


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("fineweb_*.bin"))}


# --------------------------------------------------------------------------------------------------
# cached_fineweb10B.py

VAL, FIRST = "fineweb_val_000000.bin", "fineweb_train_000001.bin"


@pytest.fixture
def shards(hub: Hub, tmp_path: Path, offer_encoding) -> dict[str, bytes]:
    """What the hub serves: validation and two training shards, small ones. tiktoken has a gpt2."""
    offer_encoding("gpt2", end_of_text=303)
    served = {}
    for seed, name in enumerate((VAL, FIRST, "fineweb_train_000002.bin")):
        tokens = np.random.default_rng(seed).integers(0, 50257, 1000 + seed)
        write_shard(tmp_path / "made", tokens)
        served[name] = (tmp_path / "made").read_bytes()
    hub.files = {f"{cached_fineweb10B.REPO}/{name}": content for name, content in served.items()}
    return served


def test_only_the_shards_that_are_asked_for_and_missing_are_fetched(hub, shards, run, out):
    run(cached_fineweb10B, out, "1")
    assert shards_in(out) == {FIRST: shards[FIRST], VAL: shards[VAL]}
    run(cached_fineweb10B, out, "1")
    run(cached_fineweb10B, out, "2")
    assert shards_in(out) == shards
    assert hub.fetched == [VAL, FIRST, "fineweb_train_000002.bin"]
    assert {path.name for path in out.iterdir()} == {*shards, "prefixes_gpt2.bin", "bytes_gpt2.bin"}


def test_shards_are_fetched_where_tiktoken_has_no_vocabulary(
    shards, run, out, offer_encoding, capsys
) -> None:
    """As without network: training then makes the prefix table."""
    offer_encoding("other", end_of_text=303)
    run(cached_fineweb10B, out, "1")
    said = capsys.readouterr().out.splitlines()
    assert sum("no prefix table yet" in line for line in said) == 1 and "2 shards" in said[-1]


def test_a_shard_of_another_hash_never_gets_its_name(hub: Hub, shards, run, out) -> None:
    """As of a hub, or a proxy, that sends damaged bytes."""
    hub.announced = {f"{cached_fineweb10B.REPO}/{FIRST}": "1" * 64}
    with pytest.raises(SystemExit, match=f"{FIRST}: SHA-256 .* announces 1+; .* deleted"):
        run(cached_fineweb10B, out, "1")
    assert list(shards_in(out)) == [VAL]
    hub.announced = {}
    run(cached_fineweb10B, out, "1")
    assert shards_in(out)[FIRST] == shards[FIRST]


def test_a_file_that_is_no_shard_is_not_taken(hub, shards, run, out) -> None:
    hub.files[f"{cached_fineweb10B.REPO}/{VAL}"] = b"<html>" * 400
    with pytest.raises(SystemExit, match="not a token shard"):
        run(cached_fineweb10B, out, "0")
    assert not shards_in(out)
    (out / "manifest.json").write_text("{}")  # as of another tool
    with pytest.raises(SystemExit, match="choose another --output"):
        run(cached_fineweb10B, out, "0")


@pytest.mark.parametrize("tool", ["cached_fineweb10B", "fineweb"])
def test_no_hub_is_one_line(tmp_path: Path, tool: str) -> None:
    """Nobody listens at this address."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": f"{tmp_path}"}
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    script = Path(fineweb.__file__).with_name(f"{tool}.py")
    command = [sys.executable, str(script), "--output", str(tmp_path / "out")]
    done = run_fresh(command, env=environment)
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# fineweb.py

SAMPLE = f"{fineweb.REPO}/sample"
SHARD_TOKENS = 5000
OPTIONS = ("--encoding", "bytes", "--shard_tokens", str(SHARD_TOKENS), "--workers", "2")


def parquet_of(texts: list[str | None]) -> bytes:
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    file = BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=8)
    return file.getvalue()


@pytest.fixture
def stream(hub: Hub) -> list[int]:
    """The tokens of what the hub serves: three parquet files of 60 texts in row groups of 8.

    Beside them lie other files, and another subset.
    """
    random = np.random.default_rng(0)
    tokens = []
    for index in range(3):
        lengths = random.integers(0, 80, 60)
        texts = [f"{index} {k} " + "wörd " * int(n) for k, n in enumerate(lengths)]
        hub.files[f"{SAMPLE}/10BT/00{index}.parquet"] = parquet_of([*texts, None])
        tokens += [token for text in texts for token in (256, *text.encode())]
    hub.files[f"{SAMPLE}/10BT/README.md"] = b"not parquet"
    hub.files[f"{SAMPLE}/100BT/000.parquet"] = parquet_of(["not wanted"])
    return tokens


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads for processes, which take seconds to start."""
    pool = lambda workers, *_, **__: ThreadPoolExecutor(workers)
    monkeypatch.setattr(fineweb, "ProcessPoolExecutor", pool)


def tokens_of(folder: Path, shard_tokens: int = SHARD_TOKENS) -> list[int]:
    """All tokens, validation first; names and sizes of the shards are checked."""
    paths = sorted(folder.glob("fineweb_*.bin"), key=lambda path: path.name[-10:])
    names = [fineweb.name_of(index) for index in range(len(paths))]
    shards = [read_shard(path).tolist() for path in paths]
    assert [path.name for path in paths] == names and names[0] == VAL
    assert all(len(shard) == shard_tokens for shard in shards[:-1])
    return sum(shards, [])


@pytest.mark.parametrize(
    "shard_tokens, limit", [(301, 0), (45_000, 0), (5000, 5001), (5000, 10_000)]
)
def test_shards_are_the_documents_in_order(threads, stream, run, out, shard_tokens, limit) -> None:
    """With a limit, so many of their tokens exactly."""
    sizes = ("--shard_tokens", str(shard_tokens), "--num_tokens", str(limit))
    run(fineweb, out, *OPTIONS, *sizes)
    assert tokens_of(out, shard_tokens) == stream[: limit or None]
    assert [path.name for path in out.iterdir() if path.suffix != ".bin"] == ["manifest.json"]


def test_a_run_that_is_cut_short_continues_and_ends_with_the_same_shards(
    threads, hub: Hub, stream: list[int], run, out: Path
) -> None:
    """Before the second file: by then the first has become shards, the last cut in a document."""
    hub.interrupted_at = "sample/10BT/001.parquet"
    with pytest.raises(KeyboardInterrupt):
        run(fineweb, out, *OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert 0 < len(before) < len(stream) // SHARD_TOKENS
    assert stream[len(before) * SHARD_TOKENS] != 256
    hub.interrupted_at = ""
    run(fineweb, out, *OPTIONS)
    assert tokens_of(out) == stream
    assert {path: path.stat().st_mtime_ns for path in before} == before  # none was made again
    hub.fetched.clear()
    run(fineweb, out, *OPTIONS)
    assert hub.fetched == []
    damaged = out / fineweb.name_of(2)
    damaged.write_bytes(damaged.read_bytes()[:-2])
    run(fineweb, out, *OPTIONS)
    assert tokens_of(out) == stream


def test_a_text_that_fails_names_file_and_row_group(hub, stream, run, out) -> None:
    """Text that is not UTF-8, in a worker process: what it raises must be pickled. A folder takes
    the options that it was begun with, and no others."""
    texts = pyarrow.array([b"a"] * 9 + [b"a\xff"]).view(pyarrow.string())
    hub.files[f"{SAMPLE}/10BT/001.parquet"] = parquet_of(texts)
    with pytest.raises(SystemExit, match="error: .*001.parquet, row group 1: UnicodeDecodeError"):
        run(fineweb, out, *OPTIONS)
    with pytest.raises(SystemExit, match="choose another --output"):
        run(fineweb, out, *OPTIONS, "--subset", "sample/100BT")
