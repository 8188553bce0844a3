"""The whole job on a tiny target, through Snakemake. Alone: python -m pytest tests/test_pipeline.py"""

import json

import tiny


def test_drafter_and_bench_come_out(tmp_path):
    project = tiny.make_project(tmp_path / "project")
    tiny.run(project, "snakemake", "--cores", "2", "bench")
    assert (project / "data/drafter/model.safetensors").exists()
    report = json.loads((project / "data/bench/report.json").read_text())
    outputs = report["all"]["outputs"]
    assert outputs["equal"] == outputs["compared"] == report["all"]["prompts"] > 0
    again = tiny.run(project, "snakemake", "-n", "bench").stdout
    assert "Nothing to be done" in again
