"""The whole job on a tiny target, through Snakemake. Alone: python -m pytest tests/scenarios/test_pipeline.py"""

import json

import pytest

pytestmark = [pytest.mark.quick, pytest.mark.timeout(1800)]


def test_drafter_and_bench_come_out(template):
    """Catalogue D19."""
    assert (template / "data/drafter/model.safetensors").exists()
    report = json.loads((template / "data/bench/report.json").read_text())
    outputs = report["all"]["outputs"]
    assert outputs["equal"] == outputs["compared"] == report["all"]["prompts"] > 0
