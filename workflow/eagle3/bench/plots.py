"""Plots as SVG text: no script, no font and no file besides, in the colours of the page they stand
in."""

import html
import math
from dataclasses import dataclass, field

WIDTH, HEIGHT = 660, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 644, 16, 236
COLOURS = 6  # --c0 to --c5 of the page
DASHES = ("", "7 4", "2 4")


@dataclass
class Line:
    """A named line. `low` and `high` are the ends of the interval at each point, if there are
    any."""

    name: str
    points: list[tuple[float, float]]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


def plot(
    lines: list[Line],
    x_label: str,
    y_label: str,
    mark: float | None = None,
    logarithmic: bool = False,
) -> str:
    """A figure with its legend. `mark` draws a level across; `logarithmic` spaces x by ratio, and
    ticks stand at the points. Returns a sentence if there is no point."""
    lines = [line for line in lines if line.points]
    if not lines:
        return f"<p>No data for {html.escape(y_label)}.</p>"
    scale = (lambda x: math.log2(max(x, 1e-9))) if logarithmic else (lambda x: x)
    xs = [scale(x) for line in lines for x, _ in line.points]
    ys = [y for line in lines for y in (*(y for _, y in line.points), *line.low, *line.high)]
    ys += [] if mark is None else [mark]
    ticks = nice_ticks(min(ys), max(ys))
    low, high = min(ticks[0], min(ys)), max(ticks[-1], max(ys))
    first, last = min(xs), max(xs)
    if first == last:
        first, last = first - 0.5, last + 0.5

    def at(x, y):
        return (
            LEFT + 14 + (RIGHT - LEFT - 28) * (scale(x) - first) / (last - first),
            BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low),
        )

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT - 20}" role="img" '
        f'aria-label="{html.escape(f"{y_label} over {x_label}")}">'
    ]
    for value in ticks:
        y = at(lines[0].points[0][0], value)[1]
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>'
        )
    for x in x_ticks(lines, logarithmic):
        parts.append(
            f'<text x="{at(x, low)[0]:.1f}" y="{BOTTOM + 18}" '
            f'text-anchor="middle">{short(x)}</text>'
        )
    if mark is not None:
        y = at(lines[0].points[0][0], mark)[1]
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for number, line in enumerate(lines):
        parts.append(_drawn(line, number, at))
    middle = (LEFT + RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{BOTTOM + 38}" '
        f'text-anchor="middle">{html.escape(x_label)}</text></svg>'
    )
    legend = "".join(
        f'<span style="color:var(--c{n % COLOURS})">{_sample(n)} {html.escape(line.name)}</span> '
        for n, line in enumerate(lines)
    )
    return (
        f"<figure><figcaption>{html.escape(y_label)}</figcaption>{''.join(parts)}<p "
        f'class="legend">{legend}</p></figure>'
    )


def _style(number: int) -> str:
    dash = DASHES[number // COLOURS % len(DASHES)]
    return f'stroke="var(--c{number % COLOURS})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _sample(number: int) -> str:
    line = f'<line x1="0" x2="22" y1="5" y2="5" {_style(number)}/>'
    return f'<svg class="key" viewBox="0 0 22 10" aria-hidden="true">{line}</svg>'


def _drawn(line: Line, number: int, at) -> str:
    points = [at(*point) for point in line.points]
    colour = f"var(--c{number % COLOURS})"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline fill="none" stroke-width="2" {_style(number)} points="{path}"/>']
    if len(points) <= 40:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    for (x, _), low, high in zip(line.points, line.low, line.high):
        (place, bottom), (_, top) = at(x, low), at(x, high)
        side = place - 4
        parts.append(
            f'<path stroke="{colour}" fill="none" d="M{side:.1f} {top:.1f}h8M{place:.1f} '
            f"{top:.1f}V{bottom:.1f}"
            f'M{side:.1f} {bottom:.1f}h8"/>'
        )
    return "".join(parts)


def short(value: float) -> str:
    """
    >>> short(1500000), short(52600), short(0.25)
    ('1.5M', '52.6k', '0.25')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:g}"


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from under `low` to over `high`, about `wanted` of them.

    >>> nice_ticks(0.13, 0.92)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high <= low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(start, end + 1)]


def x_ticks(lines: list[Line], logarithmic: bool) -> list[float]:
    """The points themselves where they are few or unevenly spaced, else round numbers between
    them."""
    xs = sorted({x for line in lines for x, _ in line.points})
    if logarithmic or len(xs) <= 8:
        return xs
    return [x for x in nice_ticks(xs[0], xs[-1]) if xs[0] <= x <= xs[-1]]
