"""The pages in records/ are made from the logs and the metadata beside them."""

from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="pip install -r records/requirements.txt")
pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")

from made_logs import write_runs

import history


def test_history_is_made_from_the_records(tmp_path, capsys):
    (tmp_path / "README.md").write_text(f"before\n{history.BEGIN}\nold\n{history.END}\nafter\n")
    runs = write_runs(tmp_path / "runs" / "a", [80_000, 81_000], [3.27, 3.28])
    faster = write_runs(tmp_path / "runs" / "b", [70_000, 71_000], [3.27, 3.28])
    more = ["--contributors", "Ann, Bob", "--track", "test"]
    history.main(["--add", "1_A", runs, "--description", "first | one", "--date", "2026-01-01", *more], tmp_path)
    history.main(
        ["--add", "2_B", faster, "--description", "second", "--date", "2026-01-02", "--baseline", "1_A", *more], tmp_path
    )
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert rows == [
        "| [2](2_B/README.md) | 70.5 s | 3.2750 | second | 2026-01-02 | [log](2_B/0.txt), of 2 | Ann, Bob |",
        "| [1](1_A/README.md) | 80.5 s | 3.2750 | first \\| one | 2026-01-01 | [log](1_A/0.txt), of 2 | Ann, Bob |",
    ]
    assert (tmp_path / "2_B" / "0.txt").read_bytes() == Path(faster, "0.txt").read_bytes()
    page = (tmp_path / "2_B" / "README.md").read_text()
    assert "| 1_A " in page and "2_B: FASTER by 10.000 s" in page and "comparison.png" in page and str(tmp_path) not in page
    history.main(["--check"], tmp_path)
    (tmp_path / "2_B" / "README.md").write_text("edited")
    with pytest.raises(SystemExit, match="out of date: .*2_B"):
        history.main(["--check"], tmp_path)

    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SystemExit, match="exists"):
        history.main(["--add", "1_A", runs, "--description", "x", *more], tmp_path)
    with pytest.raises(SystemExit, match="no such log"):
        history.main(["--add", "3_C", str(tmp_path / "absent"), "--description", "x", *more], tmp_path)
    with pytest.raises(SystemExit, match=r"nowhere.record\.toml"):
        history.main(["--add", "3_C", runs, "--description", "x", "--baseline", "nowhere", *more], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "1_A" / "record.toml").write_text('date = "2026-01-01"\n')
    with pytest.raises(SystemExit, match=r"1_A.record\.toml: description, contributors, track, target: missing"):
        history.main([], tmp_path)


def test_the_readme_above_has_the_same_table_with_links_that_lead_to_the_records(tmp_path):
    root = tmp_path / "records"
    runs = write_runs(tmp_path / "runs", [80_000, 81_000], [3.27, 3.28])
    for readme in (root / "README.md", tmp_path / "README.md"):
        readme.parent.mkdir(exist_ok=True)
        readme.write_text(f"before\n{history.BEGIN}\n{history.END}\nafter\n")
    history.main(["--add", "1_A", runs, "--description", "first", "--date", "2026-01-01", "--contributors", "Ann"], root)
    above, own = ((folder / "README.md").read_text() for folder in (tmp_path, root))
    assert "| [1](1_A/README.md) | 80.5 s | 3.2750 " in own
    assert above == own.replace("](1_A/", "](records/1_A/") != own
    (tmp_path / "README.md").write_text(history.BEGIN)
    with pytest.raises(SystemExit, match="README.md: the lines .* are not there"):
        history.main(["--check"], root)
    (tmp_path / "README.md").write_text("no table\n")
    history.main(["--check"], root)


def test_a_records_picture_is_drawn_with_it_and_anew(tmp_path):
    (tmp_path / "README.md").write_text(f"{history.BEGIN}\n{history.END}\n")
    for name, time, more in (("1_A", 80_000, []), ("2_B", 70_000, ["--baseline", "1_A"])):
        runs = write_runs(tmp_path / "runs" / name, [time, time + 1000], [3.27, 3.28])
        history.main(["--add", name, runs, "--description", "x", "--contributors", "Ann", *more], tmp_path)
    picture = tmp_path / "2_B" / "loss.png"
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG") and (tmp_path / "1_A" / "loss.png").read_bytes() != drawn
    picture.unlink()
    history.main(["--picture", "2_B"], tmp_path)
    assert picture.read_bytes() == drawn
    with pytest.raises(SystemExit, match="3_C"):
        history.main(["--picture", "3_C"], tmp_path)


def test_the_pages_in_records_are_up_to_date():
    history.main(["--check"])
