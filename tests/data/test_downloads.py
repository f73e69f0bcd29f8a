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
from data.encodings import load_prefixes, prefix_table
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


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """run(tool, *options): its main, in this process, with the output tmp_path / "out"."""

    def run(tool, *options: str) -> None:
        command = [tool.__name__, "--output", str(tmp_path / "out"), *options]
        monkeypatch.setattr(sys, "argv", command)
        tool.main()

    return run


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


def test_only_the_shards_that_are_asked_for_and_missing_are_fetched(hub, shards, run, tmp_path):
    run(cached_fineweb10B, "1")
    assert shards_in(tmp_path / "out") == {FIRST: shards[FIRST], VAL: shards[VAL]}
    run(cached_fineweb10B, "1")
    run(cached_fineweb10B, "2")
    assert shards_in(tmp_path / "out") == shards
    assert hub.fetched == [VAL, FIRST, "fineweb_train_000002.bin"]
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {*shards, "prefixes_gpt2.bin"}


def test_shards_are_fetched_where_tiktoken_has_no_vocabulary(
    shards, run, tmp_path, offer_encoding, capsys
) -> None:
    """As without network: training then makes the prefix table."""
    offer_encoding("other", end_of_text=303)
    run(cached_fineweb10B, "1")
    said = capsys.readouterr().out.splitlines()
    assert sum("no prefix table yet" in line for line in said) == 1 and "2 shards" in said[-1]
    offer_encoding("gpt2", end_of_text=303)
    run(cached_fineweb10B, "1")
    assert (load_prefixes(tmp_path / "out", "gpt2", 304) == prefix_table("gpt2", 304)).all()


def test_a_shard_of_another_hash_never_gets_its_name(hub: Hub, shards, run, tmp_path) -> None:
    """As of a hub, or a proxy, that sends damaged bytes."""
    hub.announced = {f"{cached_fineweb10B.REPO}/{FIRST}": "1" * 64}
    with pytest.raises(SystemExit, match=f"{FIRST}: SHA-256 .* announces 1+; .* deleted"):
        run(cached_fineweb10B, "1")
    assert list(shards_in(tmp_path / "out")) == [VAL]
    hub.announced = {}
    run(cached_fineweb10B, "1")
    assert shards_in(tmp_path / "out")[FIRST] == shards[FIRST]


def test_a_file_that_is_no_shard_is_not_taken(hub, shards, run, tmp_path) -> None:
    hub.files[f"{cached_fineweb10B.REPO}/{VAL}"] = b"<html>" * 400
    with pytest.raises(SystemExit, match="not a token shard"):
        run(cached_fineweb10B, "0")
    assert not shards_in(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(SystemExit, match="choose another --output"):
        run(cached_fineweb10B, "0")


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


@pytest.mark.parametrize("shard_tokens", [301, 45_000])
def test_shards_are_the_documents_in_order(threads, stream, run, tmp_path, shard_tokens) -> None:
    run(fineweb, *OPTIONS, "--shard_tokens", str(shard_tokens))
    assert tokens_of(tmp_path / "out", shard_tokens) == stream
    left = [path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".bin"]
    assert left == ["manifest.json"]


@pytest.mark.parametrize("limit", [SHARD_TOKENS + 1, 2 * SHARD_TOKENS])
def test_a_limit_on_the_tokens_is_kept_exactly(
    threads, stream, run, tmp_path, offer_encoding, limit
) -> None:
    """And the prefix table lies beside the shards. No text here has a token of more than one byte."""
    offer_encoding("toy", end_of_text=303)
    run(fineweb, *OPTIONS, "--encoding", "toy", "--num_tokens", str(limit))
    found = [256 if token == 303 else token for token in tokens_of(tmp_path / "out")]
    assert found == stream[:limit]
    assert (tmp_path / "out" / "prefixes_toy.bin").exists()


def test_a_run_that_is_cut_short_continues_and_ends_with_the_same_shards(
    threads, hub: Hub, stream: list[int], run, tmp_path: Path
) -> None:
    """Before the second file: by then the first has become shards, the last cut in a document."""
    hub.interrupted_at = "sample/10BT/001.parquet"
    with pytest.raises(KeyboardInterrupt):
        run(fineweb, *OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    assert 0 < len(before) < len(stream) // SHARD_TOKENS
    assert stream[len(before) * SHARD_TOKENS] != 256
    hub.interrupted_at = ""
    run(fineweb, *OPTIONS)
    assert tokens_of(tmp_path / "out") == stream
    assert {path: path.stat().st_mtime_ns for path in before} == before  # none was made again
    hub.fetched.clear()
    run(fineweb, *OPTIONS)
    assert hub.fetched == []
    damaged = tmp_path / "out" / fineweb.name_of(2)
    damaged.write_bytes(damaged.read_bytes()[:-2])
    run(fineweb, *OPTIONS)
    assert tokens_of(tmp_path / "out") == stream


def test_a_text_that_fails_names_file_and_row_group(hub, stream, run) -> None:
    """Text that is not UTF-8, in a worker process: what it raises must be pickled."""
    texts = pyarrow.array([b"a"] * 9 + [b"a\xff"]).view(pyarrow.string())
    hub.files[f"{SAMPLE}/10BT/001.parquet"] = parquet_of(texts)
    with pytest.raises(SystemExit, match="error: .*001.parquet, row group 1: UnicodeDecodeError"):
        run(fineweb, *OPTIONS)


def test_what_leaves_nothing_to_train_on_is_refused(threads, hub, stream, run, tmp_path) -> None:
    with pytest.raises(SystemExit, match="no parquet files in sample/7"):
        run(fineweb, *OPTIONS, "--subset", "sample/7")
    with pytest.raises(SystemExit, match="make no training shard: lower --shard_tokens"):
        run(fineweb, *OPTIONS, "--subset", "sample/100BT")
    with pytest.raises(SystemExit, match="choose another --output"):
        run(fineweb, *OPTIONS, "--subset", "sample/10BT")
