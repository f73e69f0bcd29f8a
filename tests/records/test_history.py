"""Tables and pages come from the logs and record.toml; what others wrote stays."""

import re
import shutil

import pytest

from made_logs import ROOT, write_runs

import history

TIMES, LOSSES = [80_000, 80_400, 79_900], [3.27, 3.28, 3.26]


def make_record(root, name, track="8xH100", **more):
    times = [x + (100 + 10 * i) * len(name) for i, x in enumerate(TIMES)]
    write_runs(root / name, times, LOSSES, **more.pop("parts", {}))
    lines = {"description": f'"About {name}"', "date": '"2026-01-01"', "contributors": '["me"]'}
    lines |= {"track": f'"{track}"', "target": "3.28", **more}
    text = "".join(f"{key} = {value}\n" for key, value in lines.items())
    (root / name / "record.toml").write_text(text)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of records below one with a README that has a table."""
    root = tmp_path / "records"
    root.mkdir()
    begin, end = history.MARKS
    (root / "README.md").write_text(f"# Mine\n\n{begin}\n{end}\n\nStays.\n")
    (tmp_path / "README.md").write_text(f"# Top\n{begin}\n{end}\n")
    return root


def test_tables_a_track_newest_first_and_what_was_not_adopted_apart(root):
    make_record(root, "First")
    make_record(root, "Second", date='"2026-02-01"')
    make_record(root, "Demo", track="demo, 2 CPU cores")
    make_record(root, "Averages", adopted="false")
    history.main([], root)
    text = (root / "README.md").read_text()
    assert text.startswith("# Mine\n") and text.endswith("\nStays.\n")
    rows = re.findall(r"^(?:### (.+)|\| \[(\w+)\]\((\w+)/)", text, re.MULTILINE)
    assert rows == [
        ("8xH100", "", ""), ("", "2", "Second"), ("", "1", "First"),
        ("demo, 2 CPU cores", "", ""), ("", "1", "Demo"),
        ("Tried, not adopted", "", ""), ("", "Averages", "Averages"),
    ]  # fmt: skip
    assert "(records/Second/README.md)" in (root.parent / "README.md").read_text()
    assert "| 80.760 s | 3.2700 | About Second | 2026-02-01 |" in text


def test_public_figures_stand_below_ours_and_ask_for_runs_where_there_are_none(root):
    row = 'record = "public 1"\ntime = "70 s"\nloss = "3.27"\ndescription = "d"\ndate = "2026-01-01"\n'
    row += 'log = "https://x"\nruns = 4\n'
    tracks = ("8xH100", "1xH100")
    parts = [f'["{x}"]\nfill = "./run.sh"\n[["{x}".rows]]\n{row}' for x in tracks]
    (root / history.PUBLIC).write_text("".join(parts))
    make_record(root, "First")
    history.main([], root)
    text = (root / "README.md").read_text()
    one, eight = text.partition("### 8xH100")[::2]
    public = "| public 1 | 70 s | 3.27 | d | 2026-01-01 | [log](https://x), of 4 |"
    assert public in one and "Not run here yet: `./run.sh`" in one
    assert eight.index("[1](First/") < eight.index(public) and "Not run" not in eight


def test_a_page_compares_with_the_baseline_and_keeps_its_authors_text(root):
    make_record(root, "First")
    make_record(root, "Idea", baseline='"First"', pairs="true")
    make_record(root, "Own", parts={"seeds": [4, 5, 6]})
    write_runs(root / "Own" / "baseline", [90_000, 91_000, 90_500], LOSSES, seeds=[7, 8, 9])
    history.main([], root)
    page = root / "Idea" / "README.md"
    assert "in pairs" in page.read_text() and "| First" in page.read_text()
    assert "| baseline" in (root / "Own" / "README.md").read_text()
    assert "./run.sh records/extract.py records/Idea/0.txt again" in page.read_text()
    page.write_text("Above.\n" + page.read_text() + "Below.\n")
    (root / "Idea" / "record.toml").write_text(
        (root / "Idea" / "record.toml").read_text().replace("About Idea", "Another")
    )
    with pytest.raises(SystemExit, match="out of date: .*Idea/README.md"):
        history.main(["--check"], root)
    history.main([], root)
    history.main(["--check"], root)
    text = page.read_text()
    assert text.startswith("Above.\n") and text.endswith("Below.\n") and "Another" in text


def test_a_page_without_marks_is_not_overwritten(root):
    make_record(root, "First")
    (root / "First" / "README.md").write_text("all mine\n")
    with pytest.raises(SystemExit, match="nothing written"):
        history.main([], root)
    assert (root / "First" / "README.md").read_text() == "all mine\n"
    assert "First" not in (root / "README.md").read_text()


@pytest.mark.parametrize("more, said", [
    ({"colour": '"red"'}, "colour"), ({"baseline": '"None"'}, "no record is named None"),
    ({"pairs": "tru"}, "record.toml"),
])  # fmt: skip
def test_a_record_toml_that_is_wrong_is_named(more, said, root):
    make_record(root, "First", **more)
    with pytest.raises(SystemExit, match=said):
        history.main([], root)


def test_foreign_text_stays_text_on_a_page(root):
    evil = "\x1b[2J<script>|`"
    make_record(root, "First", description="'''" + evil[4:] + "'''")
    make_record(
        root, "Second", parts={"changed": {f"a{evil[:4]}<!--.py": b"x = 1\n"}}, baseline='"First"'
    )
    history.main([], root)
    for path in (root / "README.md", root / "First/README.md", root / "Second/README.md"):
        text = path.read_text()
        assert "<script>" not in text and "\x1b" not in text
        assert len(re.findall("<!--", text)) == 2


def test_pictures(root):
    make_record(root, "First")
    history.main(["--picture", "First"], root)
    assert {x.name for x in (root / "First").glob("*.png")} == {"comparison.png", "loss.png"}
    assert "comparison.png" in (root / "First" / "README.md").read_text()
    with pytest.raises(SystemExit, match="no such record"):
        history.main(["--picture", "None"], root)


def test_the_pages_of_this_project_are_up_to_date(tmp_path):
    """Of a copy, as the README above may be at work."""
    shutil.copytree(ROOT / "records", tmp_path / "records", ignore=shutil.ignore_patterns("*.py"))
    history.main(["--check"], tmp_path / "records")
