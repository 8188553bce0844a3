"""report.html: one self-contained page from report.json, readable on a phone, in print, in light and dark."""

import html
from typing import Any

STYLE = """
:root{color-scheme:light dark;--ink:#1a1c20;--soft:#5b6068;--line:#d9dce1;--ground:#fff;--one:#1f5fbf;--two:#b4530a}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#a4abb5;--line:#3a3f47;--ground:#15171a;--one:#7fb0ff;--two:#ffb066}}
body{margin:0 auto;max-width:52rem;padding:1.2rem;font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground)}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}.verdict{font-size:1.1rem;border-left:4px solid var(--one);padding-left:.8rem}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line)}th:first-child,td:first-child{text-align:left}
svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}.axis{stroke:var(--line)}code{overflow-wrap:anywhere}
@media print{body{max-width:none}h2{break-after:avoid}}
"""


def table(header: list[str], rows: list[list[Any]]) -> str:
    def cell(value):
        return html.escape(f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value))

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell(v)}</td>" for v in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def line_plot(series: dict[str, list[tuple[float, float]]], x_label: str, y_label: str) -> str:
    """An SVG of named lines; no script, no font, no file besides."""
    points = [p for line in series.values() for p in line]
    if not points:
        return "<p>No points.</p>"
    left, right = min(p[0] for p in points), max(p[0] for p in points)
    low, high = min(p[1] for p in points), max(p[1] for p in points)
    right, high = right + (right == left), high + (high == low)

    def place(x, y):
        return 60 + 560 * (x - left) / (right - left), 215 - 190 * (y - low) / (high - low)

    parts = ['<svg viewBox="0 0 660 260" role="img" aria-label="' + html.escape(f"{y_label} over {x_label}") + '">']
    for step in range(5):
        value = low + (high - low) * step / 4
        y = place(left, value)[1]
        parts.append(f'<line class="axis" x1="60" x2="620" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text x="54" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        value = left + (right - left) * step / 4
        parts.append(f'<text x="{place(value, low)[0]:.1f}" y="232" text-anchor="middle">{value:.4g}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour = f"var(--{'one' if number % 2 == 0 else 'two'})"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in line))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in (place(*p) for p in line)]
        parts.append(f'<text x="{66 + 180 * number}" y="14" style="fill:{colour}">{html.escape(name)}</text>')
    parts.append(f'<text x="340" y="252" text-anchor="middle">{html.escape(x_label)}</text></svg>')
    return f"<figure>{''.join(parts)}<figcaption>{html.escape(y_label)}</figcaption></figure>"


def verdict(report: dict[str, Any]) -> str:
    """The result in one sentence."""
    length, speed = report["all"]["accept_length"], report["all"]["speed_up"]
    gain = f"{speed:.2f} times as fast as" if speed >= 1 else f"slower than ({speed:.2f} times the speed of)"
    return (f"Served accept length {length['served']:.2f} of at most {report['steps'] + 1}; {gain} the baseline. "
            f"A verify cycle takes as long as {length['break_even']:.2f} decode steps, so that many tokens per cycle break even.")


def page(report: dict[str, Any], curves: list[dict[str, str]]) -> str:
    """The whole page; `curves` are the rows of the drafter's curves.csv."""
    everything = report["all"]
    length = everything["accept_length"]
    names = {"all": everything, **report["datasets"]}
    per_set = table(
        ["data set", "prompts", "tokens", "served", "simulated", "replayed", "speed-up", "equal outputs"],
        [[name, f["prompts"], f["tokens"], f["accept_length"]["served"], f["accept_length"]["simulated"],
          f["accept_length"]["replayed"], f["speed_up"], f["greedy_outputs_equal"]] for name, f in names.items()])
    learning = table(["simulated accept length", "value"], [["untrained drafter", report["training"]["accept_length_untrained"]],
                                                            ["trained drafter", report["training"]["accept_length"]]])
    speed = table(["arm", "tokens/s", "milliseconds"], [
        ["baseline, per token", everything["tokens_per_second"]["plain"], 1000 * everything["seconds"]["decode_step"]],
        ["drafter, per verify cycle", everything["tokens_per_second"]["speculative"], 1000 * everything["seconds"]["verify_cycle"]]])
    accept = {"validation accept length": [(float(r["update"]), float(r["accept_length"])) for r in curves]}
    losses = {"training loss": [(float(r["update"]), float(r["loss"])) for r in curves if r["loss"]]}
    acceptance = {"accepted at this position": [(k + 1, v) for k, v in enumerate(everything["acceptance"].values())],
                  "right, given all before": [(k + 1, v) for k, v in enumerate(everything["conditional"].values())]}
    lineage = table(["made from", "identity"], [[k, v] for k, v in report["lineage"].items()])
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Drafter bench</title><style>{STYLE}</style>
<h1>Drafter bench</h1><p class="verdict">{html.escape(verdict(report))}</p>
<p>Accept lengths count the bonus token. <b>Served</b>: tokens of verify cycles over verify cycles, pooled. <b>Simulated</b>:
one plus the sum of products of conditional accuracies over all positions. <b>Replayed</b>: what serving these very answers
must give, position by position. Break-even: {length['break_even']:.2f}.</p>
<h2>By data set</h2>{per_set}<h2>Speed</h2>{speed}<h2>Acceptance by position</h2>{line_plot(acceptance, 'draft position', 'share')}
<h2>Learning</h2>{learning}{line_plot(accept, 'update', 'accept length')}{line_plot(losses, 'update', 'loss')}
<h2>Lineage</h2>{lineage}</html>
"""
