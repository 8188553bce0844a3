"""make push, with a real DVC remote. Alone: python -m pytest tests/commands/test_push.py"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

STAGES = {
    "generate@one": "data/responses/one/raw_responses.jsonl",
    "extract@one": "data/hidden_states/one/manifest.json",
    "train": "data/drafter/training.json",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A project whose answers, states and drafter are in DVC (their content does not matter here),
    and its remote."""
    tmp_path = tmp_path_factory.mktemp("push")
    project = tiny.make_project(tmp_path / "project", {"one": (2, "generate")})
    for stage, file in STAGES.items():
        (project / file).parent.mkdir(parents=True)
        (project / file).write_text(json.dumps({"content of": stage}))
    for folder in ("data/target", "data/prompts", "data/records", "data/vocab"):
        (project / folder).mkdir(parents=True)
        (project / folder / "x").write_text(folder)
    for file in (
        "data/prompts/one.parquet",
        "data/records/one.parquet",
        "data/vocab/draft_vocab.json",
        "data/vocab/draft_vocab.safetensors",
    ):
        (project / file).write_text(file)
    tiny.run(project, "dvc", "commit", "--force", *STAGES)
    tiny.run(project, "dvc", "remote", "add", "-d", "store", str(tmp_path / "remote"))
    return project


def content(folder: Path) -> str:
    """All that a remote or a cache holds, as one text."""
    return " ".join(
        path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    )


def push(project: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "workflow/scripts/push.py"], cwd=project, capture_output=True, text=True
    )


def test_answers_and_drafter_are_pushed_but_states_stay(project):
    done = push(project)
    assert done.returncode == 0, done.stderr
    sent = content(project.parent / "remote")
    assert "generate@one" in sent and '"train"' in sent and "extract@one" not in sent


def test_a_clone_pulls_what_was_pushed(project):
    for command in (["add", "-A"], ["commit", "-qm", "built"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    clone = project.parent / "clone"
    subprocess.run(["git", "clone", "-q", str(project), str(clone)], check=True)
    tiny.run(clone, "dvc", "pull", "train", "generate@one")
    assert json.loads((clone / STAGES["train"]).read_text()) == {"content of": "train"}
    assert (clone / STAGES["generate@one"]).exists()


def test_a_file_that_is_not_there_to_be_sent_is_an_error(project):
    """catalogue H10: the listing of a folder must not arrive without its files in silence."""
    params = tiny.read_params(project)
    params["runtime"]["push"] = ["extract"]
    tiny.write_params(project, params)
    [lost] = [
        path
        for path in (project / ".dvc/cache/files/md5").rglob("*")
        if path.is_file() and path.suffix != ".dir" and "extract@one" in path.read_text()
    ]
    lost.rename(project / "aside")
    done = push(project)
    assert done.returncode != 0 and "error" in (done.stdout + done.stderr).lower()
    (project / "aside").rename(lost)
    assert push(project).returncode == 0
    assert "extract@one" in content(project.parent / "remote")


def test_without_a_remote_dvc_says_how_to_add_one(project):
    tiny.run(project, "dvc", "remote", "remove", "store")
    done = push(project)
    assert done.returncode != 0 and "no remote specified" in done.stdout + done.stderr
