"""DVC's own commands on the whole build: experiments, queue, comparisons, clearing away.

Alone: python -m pytest tests/scenarios/test_experiments.py
"""

import json

import pytest
import tiny

pytestmark = pytest.mark.timeout(1800)  # stages are real processes; a busy machine takes its time


def test_experiments_are_run_compared_and_applied(copy):
    """In the workspace, and queued in a copy of the project. Catalogue H17."""
    project = copy("project")
    project.dvc("exp", "run", "-S", "train.lr=0.01")
    assert project.ran() == ["train", "bench"]
    changed = json.loads(project.dvc("params", "diff", "--json"))
    assert changed["params.yaml"].keys() == {"train.lr"}
    assert (
        changed["params.yaml"]["train.lr"]["old"],
        changed["params.yaml"]["train.lr"]["new"],
    ) == (0.001, 0.01)
    assert "speed_up" in project.dvc("metrics", "diff")
    assert "index.html" in project.dvc("plots", "diff", "--out", ".work/plots")
    page = (project / ".work/plots/index.html").read_text()
    assert "accept length over training" in page and "acceptance by position" in page
    project.assert_fresh()

    project.dvc("exp", "run", "--queue", "--name", "slower", "-S", "train.lr=0.0001")
    project.dvc("exp", "run", "--run-all")
    assert project.ran() == [], "a queued experiment runs in a folder of its own"
    assert project.stale() == set() and tiny.read_params(project.folder)["train"]["lr"] == 0.01
    project.dvc("exp", "apply", "slower")
    assert tiny.read_params(project.folder)["train"]["lr"] == 0.0001
    project.assert_fresh()


def test_clearing_the_cache_keeps_what_the_workspace_needs(copy):
    project = copy("project")
    before = (project / "params.yaml").read_text()
    project.edit_params(bench__max_new_tokens=6)
    project.dvc("repro")
    assert project.ran() == ["bench"]
    assert "Removed" in project.dvc("gc", "--workspace", "--force")
    project.assert_fresh()
    (project / "params.yaml").write_text(before)
    project.snakemake()
    assert project.ran() == ["bench"], "what no commit was asked to keep is gone"
    project.assert_fresh()
