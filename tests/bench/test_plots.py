"""SVG plots. Alone: python -m pytest tests/bench/test_plots.py"""

import re
import xml.etree.ElementTree as xml

from eagle3.bench.plots import HEIGHT, WIDTH, Line, nice_ticks, plot


def test_plot_is_well_formed_and_stays_inside():
    lines = [
        Line("a <b>", [(1, 0.5), (8, 1.5), (64, 0.7)], [0.4, 1.2, 0.5], [0.6, 1.9, 0.9]),
        Line("c", [(1, 1.0), (64, 3.0)]),
    ]
    text = plot(lines, "requests at once", "Speed-up", mark=1, logarithmic=True)
    root = xml.fromstring(text)
    assert "a <b>" in "".join(root.itertext())
    svg = root.find("svg")
    for element in svg.iter("circle"):
        assert 0 <= float(element.get("cx")) <= WIDTH and 0 <= float(element.get("cy")) <= HEIGHT
    assert [t.text for t in svg.iter("text")].count("64") == 1


def test_heights_follow_the_values():
    text = plot([Line("a", [(0, 0.0), (1, 0.5), (2, 1.0)])], "x", "y")
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', text)]
    assert abs((heights[0] + heights[2]) / 2 - heights[1]) < 0.2 and heights[0] > heights[2]


def test_no_points_and_one_point():
    assert "No data" in plot([Line("a", [])], "x", "y")
    assert "circle" in plot([Line("a", [(3, 2.0)])], "x", "y")


def test_ticks_surround_the_values():
    for low, high in ((0.13, 0.92), (-3, 17), (1e-5, 3e-5), (2, 2), (900, 52600)):
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low and ticks[-1] >= high and 3 <= len(ticks) <= 9
