"""report.html from report.json: one self-contained page, readable on a phone, in print, in light
and dark.

PYTHONPATH=workflow python -m eagle3.bench.page data/bench/report.json report.html
"""

import html
import sys
from typing import Any

from eagle3.bench.figures import LEAST_PROMPTS
from eagle3.bench.plots import Line, plot
from eagle3.core.files import read_json, write_text

LIGHT = (
    "--ink:#1a1c20;--soft:#565c65;--line:#d5d9df;--ground:#fff;--panel:#f4f6f9;--c0:#1a5fb4;--c1:#a8480a;--c2:#1e7145;"
    "--c3:#8a2a8a;--c4:#6b5900;--c5:#b01f3a"
)
DARK = (
    "--ink:#e8eaed;--soft:#a9b1bc;--line:#3a4049;--ground:#14161a;--panel:#1e2127;--c0:#86b6ff;--c1:#ffae70;"
    "--c2:#7fd6a3;--c3:#e3a1e6;--c4:#d9c55c;--c5:#ff9aa9"
)
STYLE = f"""
:root{{color-scheme:light dark;{LIGHT}}}
@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:64rem;padding:1rem;font:16px/1.5 system-ui,sans-serif}}
body{{color:var(--ink);background:var(--ground)}}
h1{{font-size:1.5rem;margin:.2rem 0}}h2{{font-size:1.15rem;margin:2rem 0 .4rem}}p{{margin:.5rem 0}}
.verdict{{font-size:1.1rem;background:var(--panel)}}
.verdict{{border-left:4px solid var(--c0);padding:.5rem .8rem}}
.note,.legend,figcaption,caption{{color:var(--soft);font-size:.9rem}}
.legend span{{display:inline-block;margin-right:1rem}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}}
th,td{{text-align:right;padding:.3rem .5rem;border-bottom:1px solid var(--line);white-space:nowrap}}
th{{color:var(--soft);font-weight:600}}
th:first-child,td:first-child{{text-align:left;white-space:normal;min-width:6rem}}
.plain td{{white-space:normal;overflow-wrap:anywhere;text-align:left}}.plain th{{text-align:left}}
.plain td:first-child{{min-width:9rem}}
figure{{margin:1rem 0;break-inside:avoid}}figcaption{{color:var(--ink);font-weight:600}}
svg{{display:block;width:100%;height:auto}}
svg.key{{display:inline-block;width:22px;height:10px;stroke-width:2.5}}
svg text{{fill:var(--soft);font-size:13px}}
.axis{{stroke:var(--line)}}.mark{{stroke:var(--ink);stroke-dasharray:4 4}}
dt{{font-weight:600}}dd{{margin:0 0 .4rem}}
@media(max-width:40rem){{svg text{{font-size:19px}}}}
@media print{{:root{{color-scheme:light;{LIGHT}}}body{{max-width:none;font-size:11pt}}
h2{{break-after:avoid}}
.wide{{overflow:visible}}table{{font-size:8pt}}th,td{{padding:.15rem .25rem}}
tr{{break-inside:avoid}}}}
"""
SPEED = [
    "variant",
    "at once",
    "baseline tokens/s",
    "drafter tokens/s",
    "speed-up",
    "interval",
    "accept length",
    "break-even",
]
SETS = [
    "data set",
    "prompts",
    "tokens",
    "served",
    "replayed",
    "simulated",
    "speed-up",
    "interval",
    "equal outputs",
]
TIMES = [
    "milliseconds",
    "token or cycle",
    "first token",
    "95 %",
    "between tokens",
    "95 %",
    "errors",
    "cached tokens",
]
TERMS = (
    (
        "Accept length, served",
        "completion tokens over verify cycles, pooled over all answers; the bonus token of each "
        "cycle "
        "and the token of the prefill count. SGLang reports the same.",
    ),
    (
        "Replayed",
        "the same count when the drafter is walked over the very answers that were served, from "
        "states of "
        "the target captured anew. It must equal the served one: if it does not, training and "
        "serving see different states.",
    ),
    (
        "Simulated",
        "one plus the sum of the products of conditional accuracies, averaged over all "
        "positions: what training "
        "reports. Serving visits only the positions where a cycle ends, so this may differ from "
        "the other two.",
    ),
    (
        "Break-even",
        "seconds of a verify cycle over seconds of a plain token: an accept length below it "
        "costs more than it "
        "gains.",
    ),
    ("Interval", "95 %, from resampling prompts and repeats."),
)


def number(value: Any, digits: int = 3) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return (
            f"{value:,.0f}"
            if abs(value) >= 1000
            else f"{value:.1f}"
            if abs(value) >= 100
            else f"{value:.{digits}f}"
        )
    return str(value)


def table(header: list[str], rows: list[list[Any]], kind: str = "") -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(number(v))}</td>" for v in row) + "</tr>"
        for row in rows
    )
    return (
        '<div class="wide"><table '
        f'class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(parts)}</section>"


def milliseconds(value: float | None) -> float | None:
    return None if value is None else 1000 * value


def interval_of(figures: dict) -> str:
    if figures["speed_up_low"] is None:
        return f"none under {LEAST_PROMPTS} prompts"
    return f"{figures['speed_up_low']:.2f} – {figures['speed_up_high']:.2f}"


def cell_rows(cells: list[dict]) -> list[list[Any]]:
    rows = []
    for cell in cells:
        f = cell["all"]
        rows.append(
            [
                cell["variant"],
                cell["concurrency"],
                f["tokens_per_second"]["baseline"],
                f["tokens_per_second"]["speculative"],
                f["speed_up"],
                interval_of(f),
                f["accept_length"]["served"],
                f["accept_length"]["break_even"],
            ]
        )
    return rows


def timing_rows(cells: list[dict]) -> list[list[Any]]:
    rows = []
    for cell in cells:
        f = cell["all"]
        for arm, step in (("baseline", "decode_step"), ("speculative", "verify_cycle")):
            first, inter = f["first_token"][arm] or {}, f["inter_token"][arm] or {}
            rows.append(
                [
                    f"{cell['variant']} at {cell['concurrency']}, {arm}",
                    milliseconds(f["seconds"][step]),
                    milliseconds(first.get("median")),
                    milliseconds(first.get("p95")),
                    milliseconds(inter.get("median")),
                    milliseconds(inter.get("p95")),
                    f["errors"][arm],
                    f["cached_tokens"][arm],
                ]
            )
    return rows


def set_rows(report: dict) -> list[list[Any]]:
    return [
        [
            name,
            f["prompts"],
            f["tokens"]["speculative"],
            f["accept_length"]["served"],
            f["accept_length"]["replayed"],
            f["accept_length"]["simulated"],
            f["speed_up"],
            interval_of(f),
            f"{f['outputs']['equal']} of {f['outputs']['compared']}",
        ]
        for name, f in {"all": report["all"], **report["datasets"]}.items()
    ]


def by_position(values: dict | None) -> list[tuple[float, float]]:
    return [(k + 1, v) for k, v in enumerate((values or {}).values())]


def speed_plots(report: dict) -> str:
    lines, rates = [], []
    for name in dict.fromkeys(cell["variant"] for cell in report["cells"]):
        cells = [cell for cell in report["cells"] if cell["variant"] == name]
        place = [(cell["concurrency"], cell["all"]) for cell in cells]
        lines.append(
            Line(
                name,
                [(c, f["speed_up"]) for c, f in place],
                *(
                    [f[end] for _, f in place] if all(f[end] is not None for _, f in place) else []
                    for end in ("speed_up_low", "speed_up_high")
                ),
            )
        )
        rates.append(Line(name, [(c, f["tokens_per_second"]["speculative"]) for c, f in place]))
    # Last, so that a way of drafting has one colour in both plots.
    rates.append(
        Line(
            "baseline",
            [
                (c["concurrency"], c["all"]["tokens_per_second"]["baseline"])
                for c in report["cells"]
                if c["variant"] == report["cells"][0]["variant"]
            ],
        )
    )
    if max(len(line.points) for line in lines) < 2:
        return ""
    return plot(
        lines, "requests at once", "Speed-up over the baseline", mark=1, logarithmic=True
    ) + plot(rates, "requests at once", "Tokens per second", logarithmic=True)


def acceptance_plots(report: dict) -> str:
    sets = {"all": report["all"], **report["datasets"]}
    drafted = [Line(name, by_position(f["acceptance"])) for name, f in sets.items()]
    right = [Line(name, by_position(f["conditional"])) for name, f in sets.items()]
    return plot(
        drafted, "draft position", "Share of verify cycles that accept the draft at a position"
    ) + plot(right, "draft position", "Share of drafts that are right, given that all before are")


def curve(rows: list[dict], name: str) -> list[tuple[float, float]]:
    return [
        (float(row["update"]), float(row[name])) for row in rows if row.get(name) not in (None, "")
    ]


def learning(report: dict) -> str:
    training, parts = report.get("training") or {}, []
    if "accept_length_untrained" in training:
        parts.append(
            table(
                ["simulated accept length", "value"],
                [
                    ["untrained drafter", training["accept_length_untrained"]],
                    ["trained drafter", training["accept_length"]],
                ],
            )
        )
    for name, label in (
        ("accept_length", "Accept length on the validation split, simulated"),
        ("loss", "Training loss"),
    ):
        if points := curve(report.get("curves") or [], name):
            parts.append(plot([Line(label.split(",")[0], points)], "update", label))
    return section("Learning", *parts) if parts else ""


def study(report: dict) -> str:
    """Accept length over training data, where several drafters were served."""
    rows = report.get("study") or []
    if len(rows) < 2:
        return ""
    header = ["drafter", "records", "tokens", "served", "replayed", "simulated"]
    body = [
        [
            r["drafter"],
            r["records"],
            r["tokens"],
            *(r["accept_length"][k] for k in ("served", "replayed", "simulated")),
        ]
        for r in rows
    ]
    known = [r for r in rows if r["tokens"]]
    lines = [
        Line(
            k,
            [
                (r["tokens"], r["accept_length"][k])
                for r in known
                if r["accept_length"][k] is not None
            ],
        )
        for k in ("served", "replayed", "simulated")
    ]
    return section(
        "Accept length over training data",
        table(header, body),
        plot(lines, "training tokens", "Accept length", logarithmic=True),
    )


def settings(report: dict) -> str:
    arms = report.get("settings") or {}
    keys = sorted({key for found in arms.values() for key in found})
    if not keys:
        return ""
    rows = [[key, *(str(found.get(key, "–")) for found in arms.values())] for key in keys]
    return section("Settings read back from the servers", table(["setting", *arms], rows, "plain"))


def held_out(report: dict) -> str:
    rows = [
        [name, c["source"], c["available"], c["seen_in_training"], c["used"]]
        for name, c in report["held_out"].items()
    ]
    return section(
        "Held-out prompts",
        table(["set", "source", "available", "left out: seen in training", "asked"], rows),
    )


def render(report: dict[str, Any]) -> str:
    """The whole page."""
    terms = "".join(
        f"<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>" for term, text in TERMS
    )
    lineage = table(
        ["made from", "identity"], [[k, str(v)] for k, v in report["lineage"].items()], "plain"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Drafter bench</title><style>{STYLE}</style></head><body><main>
<h1>Drafter bench</h1><p class="verdict">{html.escape(report["verdict"])}</p>
<p class="note">Engine: {html.escape(report["engine"])}. {html.escape(report["differences"])}</p>
{section("Speed", table(SPEED, cell_rows(report["cells"])), speed_plots(report))}
{section("By data set", table(SETS, set_rows(report)))}
{section("Acceptance by position", acceptance_plots(report))}
{study(report)}{learning(report)}
{section("Times", table(TIMES, timing_rows(report["cells"])))}
{held_out(report)}{settings(report)}
{section("Lineage", lineage)}
{section("Terms", f"<dl>{terms}</dl>")}
</main></body></html>
"""


if __name__ == "__main__":
    write_text(sys.argv[2], render(read_json(sys.argv[1])))
