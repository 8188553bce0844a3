"""The whole job on a tiny target, through Snakemake. Alone: python -m pytest
tests/scenarios/test_pipeline.py"""

import json
import zipfile

import pytest

pytestmark = [pytest.mark.quick, pytest.mark.timeout(1800)]


def test_drafter_and_bench_come_out(template):
    """Catalogue D19."""
    assert (template / "data/drafter/model.safetensors").exists()
    report = json.loads((template / "data/bench/report.json").read_text())
    outputs = report["all"]["outputs"]
    assert outputs["equal"] == outputs["compared"] == report["all"]["prompts"] > 0


def test_snakemakes_report_has_the_results_and_plots(copy):
    project = copy("project")
    project.snakemake("--report", "report.zip", "bench")
    with zipfile.ZipFile(project / "report.zip") as archive:
        files = {
            name.rpartition("/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if not name.endswith("report/report.html")
        }
        page = archive.read("report/report.html").decode()
    assert set(files) == {
        "report.html",
        "metrics.json",
        "acceptance.csv",
        "cells.csv",
        "curves.csv",
    }
    assert files["report.html"].count("<svg") >= 2 and "accept_length" in files["curves.csv"]
    assert "held-out prompts answered with and without it" in page, "the captions are in it"
