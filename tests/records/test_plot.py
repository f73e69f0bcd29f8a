"""Pictures show the figures of the comparison."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from made_logs import ENVIRONMENT, make_log, write_runs

import compare
import plot
from groups import gather_all


@pytest.fixture
def drawn(monkeypatch):
    """The figure that was saved last."""
    figures = []
    save = Figure.savefig

    def keep(figure, *arguments, **options):
        figures.append(figure)
        return save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_a_comparison(drawn, tmp_path, capsys):
    a = write_runs(tmp_path / "a", [80_000, 80_400], [3.27, 3.28])
    b = write_runs(tmp_path / "b$x$", [72_000, 72_800], [3.25, 3.24])
    path = tmp_path / "out.png"
    compare.main([a, b, "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    by_step, by_time, pace, losses, loss_change, times, time_change = drawn[0].axes
    curve = by_step.lines[0]
    assert [*curve.get_xdata()] == [0, 4, 8] and curve.get_ydata()[-1] == 3.27
    assert [*by_time.lines[0].get_xdata()] == [0, 40, 80]
    assert np.allclose(pace.patches[0].get_data().values, (80_000 + 80_400) / 16)
    assert {3.25, 3.24} <= {x for line in losses.lines for x in line.get_xdata()}
    texts = [text.get_text() for axes in (loss_change, time_change) for text in axes.texts]
    assert texts == ["-0.03", "-7.8"]
    assert r"b\$x\$ (2 runs)" in [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert times.get_title().startswith("final time")


@pytest.mark.parametrize("name", ["out.txt", "out"])
def test_a_picture_has_a_pictures_name(name, tmp_path, capsys):
    a = write_runs(tmp_path / "a", [80_000, 80_400], [3.27, 3.28])
    with pytest.raises(SystemExit):
        compare.main([a, "--plot", str(tmp_path / name)])
    assert not (tmp_path / name).exists()


def test_one_run_and_times_that_do_not_compare(drawn, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(make_log())
    other = ENVIRONMENT.replace("0bbfd16a", "22222222")
    (tmp_path / "b.txt").write_bytes(make_log(environment=other))
    groups = gather_all([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    plot.draw(groups, 3.28, tmp_path / "out.svg")
    plot.draw_loss(groups, 3.28, tmp_path / "loss.png")
    assert "not comparable" in [text.get_text() for text in drawn[0].axes[6].texts]
    assert len(drawn[1].axes) == 1
