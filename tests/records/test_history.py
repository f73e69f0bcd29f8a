"""Tables and pages come from the logs and record.toml; what others wrote stays."""

import re

import pytest

from made_logs import write_runs

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
def root(tmp_path):
    """A folder of records whose README has text around the tables."""
    begin, end = history.MARKS
    (tmp_path / "README.md").write_text(f"# Mine\n\n{begin}\n{end}\n\nStays.\n")
    return tmp_path


def test_tables_by_track_newest_first_with_public_figures(root):
    make_record(root, "First")
    make_record(root, "Second", date='"2026-02-01"')
    make_record(root, "Demo", track="demo, 2 CPU cores")
    make_record(root, "Averages", adopted="false")
    row = 'record = "public 1"\ntime = "70 s"\nloss = "3.27"\ndescription = "d"\n'
    row += 'date = "2026-01-01"\nlog = "https://x"\nruns = 4\n'
    (root / history.PUBLIC).write_text(f'[["8xH100"]]\n{row}')
    history.main([], root)
    text = (root / "README.md").read_text()
    assert text.startswith("# Mine\n") and text.endswith("\nStays.\n")
    titles = re.findall(r"^(?:### (.+)|\| \[?(\w[\w ]*)[\]|] ?.*)$", text, re.MULTILINE)
    assert [title or first.strip() for title, first in titles] == [
        *("8xH100", "record", "2", "1", "public 1"),
        *("Versions of the demo, 2 CPU cores", "version", "1"),
        *("Tried, not adopted", "idea", "Averages"),
    ]
    assert "| [2](Second/README.md) | 80.760 s | 3.2700 | About Second | 2026-02-01 |" in text
    assert "| public 1 | 70 s | 3.27 | d | 2026-01-01 | [log](https://x), of 4 |" in text


def test_a_page_compares_with_the_baseline_and_keeps_its_authors_text(root):
    make_record(root, "First")
    make_record(root, "Idea", baseline='"First"', pairs="true")
    make_record(root, "Own")
    write_runs(root / "Own" / "baseline", [90_000, 91_000, 90_500], LOSSES)
    history.main([], root)
    page = root / "Idea" / "README.md"
    assert "in pairs" in page.read_text() and "| First" in page.read_text()
    assert "| baseline" in (root / "Own" / "README.md").read_text()
    assert "./run.sh records/extract.py records/Idea/0.txt again" in page.read_text()
    page.write_text("Above.\n" + page.read_text() + "Below.\n")
    metadata = root / "Idea" / "record.toml"
    metadata.write_text(metadata.read_text().replace("About Idea", "Another"))
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


def test_foreign_text_stays_text_on_a_page(root):
    evil = "\x1b[2J<script>|`"
    make_record(root, "First", description="'''" + evil[4:] + "'''")
    changed = {f"a{evil[:4]}<!--.py": b"x = 1\n"}
    make_record(root, "Second", parts={"changed": changed}, baseline='"First"')
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


def test_the_pages_of_this_project_are_up_to_date():
    history.main(["--check"])
