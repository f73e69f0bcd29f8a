"""Pictures show the figures of the comparison."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from made_logs import ENVIRONMENT, write_runs

import compare


def test_a_comparison_is_drawn_from_its_figures(tmp_path, monkeypatch, capsys):
    drawn = []
    save = Figure.savefig

    def keep(figure, path):
        drawn.append(figure)
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", keep)
    other = ENVIRONMENT.replace("0bbfd16a", "22222222")
    a = write_runs(tmp_path / "a", [80_000, 80_400], [3.27, 3.28])
    b = write_runs(tmp_path / "b$x$", [72_000, 72_800], [3.25, 3.24])
    c = write_runs(tmp_path / "c", [9_000], [3.2], environment=other)
    path = tmp_path / "out.png"
    compare.main([a, b, c, "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    by_step, by_time, pace, losses, loss_change, _, time_change = drawn[0].axes
    curve = by_step.lines[0]
    assert [*curve.get_xdata()] == [0, 4, 8] and curve.get_ydata()[-1] == 3.27
    assert [*by_time.lines[0].get_xdata()] == [0, 40, 80]
    assert np.allclose(pace.patches[0].get_data().values, (80_000 + 80_400) / 16)
    assert {3.25, 3.24} <= {x for line in losses.lines for x in line.get_xdata()}
    texts = [text.get_text() for axes in (loss_change, time_change) for text in axes.texts]
    assert texts == ["-0.03", "-0.075", "-7.8", "not comparable"]
    with pytest.raises(SystemExit):
        compare.main([a, "--plot", str(tmp_path / "out.txt")])
