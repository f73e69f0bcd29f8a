"""The picture of a comparison shows its groups' figures, differences and stages, and every label fits."""

import re

import pytest

pytest.importorskip("scipy", reason="pip install -r records/requirements.txt")
pytest.importorskip("matplotlib", reason="pip install -r records/requirements.txt")

from made_logs import ENVIRONMENT, make_log, step_lines, write_runs

import compare
import plot
import verdict
from groups import gather_all
from runlog import parse_log


@pytest.mark.parametrize(
    "table, starts",
    [
        ("STAGES = (Stage(until=1/3, batch=8), Stage(until=2 / 3, batch=16), Stage(until=1.0, batch=24))", [0, 20, 40, 60]),
        ("STAGES = (Stage(until=1/4, batch=8), Stage(until=1, batch=16))", [0, 15, 60]),
        ("STAGES: tuple[Stage, ...] = (Stage(until=0.2), Stage(until=3/4/1), Stage(until=1))", [0, 12, 45, 60]),
        ("STAGES = (Other(until=1/4), Other(until=1))", [0, 15, 60]),
        ("STAGES = (Stage(1/4, 8), Stage(1, batch=16))", [0, 15, 60]),
        ("STAGES = (Old(batch=8), Old(batch=16), Old(batch=24))", [0, 20, 40, 60]),
        ("STAGES = (Old(8),)", [0, 60]),
        ("STAGES = (Stage(until=1/3), Stage(until=0.9))", [0, 20, 54]),
        ("STAGES = (Stage(until=1/3), Stage(until=1.2))", [0, 20]),
        ("STAGES = ()", [60]),
    ],
)
def test_stages_begin_where_the_one_before_ends(table, starts):
    assert stages(table) == pytest.approx(starts)


@pytest.mark.parametrize(
    "table",
    [
        "STAGES = (Stage(until=THIRD), Stage(until=1))",
        "STAGES = (Stage(until=__import__('os').getpid()), Stage(until=1))",
        "STAGES = (Stage(until=1/0), Stage(until=1))",
        "STAGES = (Stage(until='1'), Stage(until=1))",
        "STAGES = (Stage(until=1/3), Stage(batch=16))",
        "STAGES = (Stage(batch=8), Stage(batch=16))",
        "STAGES = (Stage(until=2/3), Stage(until=1/3))",
        "FIRST = Stage(until=1/3)\nSTAGES = (FIRST, Stage(until=1))",
        "FIRST = Stage(until=1/3)\nSTAGES = (FIRST, FIRST._replace(until=1))",
        "STAGES = (*Stage(until=1/3), Stage(until=1))",
        "STAGES = (Other(0.1), Other(1))",
        "STAGES = TABLE",
        "STAGES = (Stage(until=1),)\nSTAGES += (Stage(until=1.2),)",
        "STAGES = (Stage(until=1),)\nif True:\n    STAGES = (Stage(until=1/2), Stage(until=1))",
        "STAGES = (Stage(until=1),)\nSTAGES = (Stage(until=1/2), Stage(until=1))",
        "OTHERS = (Stage(until=1),)",
        "STAGES = (",
    ],
)
def test_stages_that_cannot_be_told_are_not_guessed(table):
    assert stages(table) == []


def test_stages_of_more_steps_than_a_number_holds_are_not_guessed():
    """A traceback, of one log among others."""
    assert stages("STAGES = (Stage(until=1),)", scheduled=10**400) == []


def stages(table, scheduled=60):
    """The steps at which the stages of a script with this table begin, then its extension; of 64 steps, these are scheduled."""
    environment = ENVIRONMENT.replace("lr=0.5", f"num_scheduled_iterations={scheduled}")
    script = f"class Stage:\n    until: float\n    batch: int = 8\n\nclass Old:\n    batch: int\n\n{table}\n".encode()
    run = parse_log(make_log(script=script, environment=environment, lines=step_lines(64)))
    return [start for _, start in plot.stages(run)]


@pytest.fixture
def drawn(monkeypatch):
    """draw(groups, …): the figure's panels by title, and the figure."""
    kept = []
    save = plot.save
    monkeypatch.setattr(plot, "save", lambda figure, panels, path: kept.append(figure) or save(figure, panels, path))

    def draw(*arguments):
        plot.draw(*arguments)
        figure = kept[-1]
        return {axes.get_title().partition(";")[0]: axes for axes in figure.axes}, figure

    return draw


NAMES = ("baseline", "an idea whose name goes on and on" + " for ever" * 15, "$x^2", "_under", "e", "f", "seventh")


@pytest.fixture
def folders(tmp_path):
    """Seven groups; of "e" the logs have no times."""
    found = [
        write_runs(
            tmp_path / name, [(90 - 3 * i + x) * 1000 for x in (0, 1, 3)], [3.28 - i / 1000 + x for x in (0, 0.001, 0.003)]
        )
        for i, name in enumerate(NAMES)
    ]
    for path in (tmp_path / "e").iterdir():
        text = re.sub(rb"(?m)^step:\d+/\d+ train_time.*\n", b"", path.read_bytes())
        path.write_bytes(re.sub(rb" train_time:\S+ step_avg:\S+", b"", text))
    return found


def test_pairs_are_drawn_and_listed_without_runs_that_have_no_partner(drawn, tmp_path, capsys):
    """The picture had the mean of five beside the difference of four pairs, and the rules five seeds of four runs."""
    a = write_runs(tmp_path / "a", [80_000, 81_000], [3.27, 3.28])
    b = write_runs(tmp_path / "b", [70_000, 71_000, 90_000], [3.25, 3.26, 3.50])
    panels, figure = drawn(verdict.in_pairs(gather_all([a, b])), 3.28, str(tmp_path / "out.png"), True)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a (2 runs)", "b (2 runs)"]
    points = [[*line.get_xdata()] for line in panels["final time, s"].lines if line.get_marker() == "o"]
    assert points == [[80.0, 81.0], [70.0, 71.0]]
    compare.main([a, b, "--pairs", "--rules", "--plot", str(tmp_path / "pairs.png")])
    said = capsys.readouterr().out
    assert "Every run has its own seed: 0, 1\n" in said and "2 runs, 1 set aside" in said
    assert (tmp_path / "pairs.png").read_bytes() == (tmp_path / "out.png").read_bytes()


def test_final_figures_and_differences_are_the_verdicts(drawn, folders, tmp_path):
    groups = gather_all(folders)
    panels, _ = drawn(groups, 3.28, str(tmp_path / "out.png"))
    assert {"final loss", "Δ loss", "final time, s", "Δ time, s"} <= panels.keys()
    rows = verdict.compare(groups, 3.28)
    for what, key in (("Δ loss", "loss"), ("Δ time, s", "time")):
        shown = [row for row in rows[1:] if row[f"{key}_difference"] == row[f"{key}_difference"]]
        bars = panels[what].containers
        assert len(bars) == len(shown) == (5 if key == "time" else 6)
        for bar, row in zip(bars, shown, strict=True):
            (low, high) = bar.lines[2][0].get_segments()[0][:, 0]
            assert (low, high) == pytest.approx((row[f"{key}_low"], row[f"{key}_high"]))
            assert bar.lines[0].get_xdata() == pytest.approx([row[f"{key}_difference"]])
    points = [line.get_xdata() for line in panels["final time, s"].lines if line.get_marker() == "o"]
    assert [*map(list, points)] == [group.times for group in groups if group.name != "e"]
    said = {name: [text.get_text() for text in panels[name].texts] for name in panels}
    assert "no times that compare" in said["final time, s"] and "not comparable" in said["Δ time, s"]
    assert "without times: e" in said["validation loss against time"]
    by_step = [line for line in panels["validation loss against step"].lines if len(line.get_xdata()) > 2]
    assert len(by_step) == sum(len(group.runs) for group in groups)  # those without times too


def test_no_two_labels_collide(drawn, folders, tmp_path):
    panels, figure = drawn(gather_all(folders), 3.28, str(tmp_path / "out.png"))
    renderer = figure.canvas.get_renderer()
    names = [text.get_window_extent(renderer) for text in panels["final loss"].get_yticklabels()]
    legend = [text.get_window_extent(renderer) for text in figure.legends[0].get_texts()]
    frame = figure.bbox
    assert len(names) == len(legend) == len(NAMES)
    for boxes in (names, legend, [axes.get_tightbbox(renderer) for axes in figure.axes]):
        assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert figure.legends[0].get_texts()[2].get_text() == r"\$x^2 (3 runs)"


def test_one_group_and_logs_without_any_time_are_drawn(drawn, folders, tmp_path):
    panels, _ = drawn(gather_all([folders[4]]), 3.28, str(tmp_path / "out.png"))
    assert panels.keys() == {
        "validation loss against step", "validation loss against time", "step time", "final loss", "final time, s",
    }  # fmt: skip
    assert [text.get_text() for text in panels["step time"].texts] == ["no times in the logs"]
