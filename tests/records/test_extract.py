"""Sources come back byte for byte, at their paths, and nothing is written elsewhere."""

import pytest

from made_logs import SOURCES, make_log

from extract import ExtractError, extract, main


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.txt"
    path.write_bytes(make_log())
    return path


def files(folder):
    paths = (x for x in folder.rglob("*") if x.is_file())
    return {x.relative_to(folder).as_posix(): x.read_bytes() for x in paths}


def test_every_source_comes_back_at_its_path(log, tmp_path, capsys):
    main([str(log), str(tmp_path / "again")])
    assert files(tmp_path / "again") == SOURCES
    assert f"./run.sh {tmp_path}/again/train_gpt.py" in capsys.readouterr().out


NAMES = ["../evil.py", "/tmp/evil.py", "a/../../evil.py", "a//b.py", "./a.py", "C:/evil.py"]
NAMES += ["a\\b.py", ".git/hooks/x.py", "a\x1b[2Jb.py", "~/\u202eevil.py"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_leaves_the_folder_is_refused(name, tmp_path, capsys):
    log = tmp_path / "run.txt"
    log.write_bytes(make_log(SOURCES | {name: b"x = 1\n"}))
    with pytest.raises(SystemExit) as stop:
        main([str(log), str(tmp_path / "again")])
    assert "nothing written" in str(stop.value) and str(stop.value).isprintable()
    assert not (tmp_path / "again").exists() and [*tmp_path.iterdir()] == [log]


def test_what_lies_in_the_folder_stays_unless_asked(log, tmp_path):
    folder = tmp_path / "again"
    folder.mkdir()
    (folder / "train_gpt.py").write_bytes(b"mine\n")
    (folder / "notes.txt").write_bytes(b"mine\n")
    with pytest.raises(ExtractError, match="not empty"):
        extract(log, folder)
    assert files(folder) == {"train_gpt.py": b"mine\n", "notes.txt": b"mine\n"}
    extract(log, folder, force=True)
    assert files(folder) == {**SOURCES, "notes.txt": b"mine\n"}


@pytest.mark.parametrize("place", ["data", "train_gpt.py"])
def test_a_link_in_the_folder_leads_nowhere(place, log, tmp_path):
    (tmp_path / "again").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "again" / place).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExtractError, match="is a link"):
        extract(log, tmp_path / "again", force=True)
    assert not files(tmp_path / "elsewhere")


def test_a_log_without_whole_sources_is_refused(tmp_path):
    (tmp_path / "run.txt").write_bytes(make_log()[:80])
    with pytest.raises(ExtractError, match="within its sources"):
        extract(tmp_path / "run.txt", tmp_path / "again")
