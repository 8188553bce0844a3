"""report.json's form and page, and the files for DVC. Alone: python -m pytest
tests/bench/test_report.py"""

import json
from pathlib import Path

import pytest
from eagle3.bench import page, report, report_schema
from eagle3.bench.figures import Arm, Served
from eagle3.bench.statistics import Measured, Variant, cells

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made():
    """Two ways of drafting at two batch sizes, from made-up rows, with a failure and a data set
    with a hostile name."""
    measured = Measured(settings={None: {"dtype": "bfloat16"}, "3-1-4": {"dtype": "bfloat16"}})
    variants = [Variant("3-1-4", Path("d"), 3), Variant("5-4-16", Path("d"), 5, 4, 16)]
    for concurrency in (1, 8):
        for variant, tokens, cycles in ((None, 20, 0), ("3-1-4", 20, 9), ("5-4-16", 20, 6)):
            rows = [
                Served(
                    "<b>set</b>",
                    str(i),
                    r,
                    [7] * tokens,
                    1.0 + 0.1 * cycles,
                    0.1,
                    cycles,
                    [cycles, 0, 0, 0] if cycles else [],
                )
                for i in range(4)
                for r in range(2)
            ]
            rows.append(Served("two", "x", 0, error="500: <script>"))
            measured.arms[variant, concurrency] = Arm(rows, {0: 4.0, 1: 4.0}, rows)
    return report.content(
        measured,
        cells(measured, variants, [], None),
        variants,
        engine="sglang",
        held_out={
            "<b>set</b>": {"source": "validation", "available": 4, "seen_in_training": 1, "used": 4}
        },
        training={"accept_length": 2.0, "accept_length_untrained": 1.0},
        curves=[
            {"update": "0", "accept_length": "1.0", "loss": ""},
            {"update": "5", "accept_length": "2.0", "loss": "3.5"},
        ],
        lineage={"drafter": "abc"},
    )


def test_report_has_the_documented_form(made):
    report_schema.Report.model_validate(json.loads(json.dumps(made)))
    assert set(made) <= {f.alias or n for n, f in report_schema.Report.model_fields.items()}


def test_the_page_of_the_form_is_up_to_date():
    assert (ROOT / report_schema.PAGE).read_text() == report_schema.page(), (
        "run `make docs` and commit docs/report.md"
    )


def test_nothing_from_the_data_becomes_markup(made):
    text = page.render(made)
    assert "<b>set" not in text and "&lt;b&gt;set" in text and "<script" not in text


def test_the_page_shows_every_cell_setting_and_plot(made):
    text = page.render(made)
    for thing in (
        "5-4-16",
        "dtype",
        "Speed-up over the baseline",
        "Training loss",
        "untrained drafter",
        made["verdict"][:30],
    ):
        assert thing in text
    assert text.count('<svg viewBox="0 0 660') == 5


def test_figures_for_dvc(made):
    found = report.metrics(made)
    assert found["accept_length"]["served"] == pytest.approx(20 / 9) and found[
        "datasets"
    ].keys() == {"<b>set</b>", "two"}
    lines = report.cells_csv(made).splitlines()
    assert len(lines) == 5 and lines[1].startswith("3-1-4,1,")
    assert report.acceptance_csv(made).splitlines()[1] == "1,0.0,"


def test_training_figure_where_nothing_was_simulated(made):
    changed = json.loads(json.dumps(made["cells"]))
    report.show_training_figure(
        changed, {"conditional": {"step_0": 0.5, "step_1": 0.5, "step_2": 0.0, "step_3": 0.9}}
    )
    assert changed[0]["all"]["accept_length"]["simulated"] == 1.75
    assert changed[-1]["all"]["accept_length"]["simulated"] is None
