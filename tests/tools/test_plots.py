"""Axes of pictures are readable: numbers as people write them, and no label over another."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from moelink.tools.plots import log_axis, log_values, new_figure


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    ("values", "some"),
    [([3.0, 80.0], {"2", "5", "10", "20", "50"}), ([0.02, 3000.0], {"0.1", "1", "10", "100", "1,000"})],
)
def test_values_of_a_logarithmic_axis_are_written_out(values: list[float], some: set[str]) -> None:
    figure = new_figure(4.0)
    axes = figure.subplots()
    axes.plot([1, 2], values)
    log_values(axes)
    figure.canvas.draw()
    labels = {label.get_text() for label in axes.get_yticklabels(which="both")}
    assert some <= labels
    assert not any("$" in label for label in labels), "10 to the power of something"


def test_labels_of_ranks_do_not_cover_each_other() -> None:
    figure = new_figure(4.0)
    axes = figure.subplots(1, 2)[0]
    ranks = [*range(2, 65, 2), 128, 1024]
    axes.plot(ranks, ranks)
    log_axis(axes, ranks, [str(count) for count in ranks])
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) >= 8
    assert all(one.x1 < other.x0 for one, other in zip(boxes, boxes[1:], strict=False))
