"""make trace. Alone: python -m pytest tests/commands/test_trace.py"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from eagle3.commands import trace as lineage
from eagle3.core.errors import UserError
from eagle3.core.files import digest_file, write_json

ROOT = Path(__file__).resolve().parents[2]
# The stages of one data set, each writing what its real counterpart writes about itself; run by
# real DVC.
MAKE = """
import json, sys
from pathlib import Path
from eagle3.core.files import digest_file, write_json
stage = sys.argv[1]
temperature = Path("params.yaml").read_text()
if stage == "target":
    about = {"architecture": "LlamaForCausalLM", "digest": "d1", "dtype": "float32"}
    write_json("data/target/target.json", about)
elif stage == "prepare":
    Path("data/prompts").mkdir(parents=True, exist_ok=True)
    Path("data/prompts/a.parquet").write_text("prompts")
    write_json("data/prompts/a.stats.json", {"rows": 9, "kept": 7, "rejected": 1, "duplicates": 1})
elif stage == "generate":
    server = {"engine": "sglang", "versions": {"sglang": "0.5.14"}}
    write_json("data/responses/a/fingerprint.json", server)
    Path("data/responses/a/raw_responses.jsonl").write_text(temperature)
elif stage == "tokenize":
    Path("data/records").mkdir(parents=True, exist_ok=True)
    answers = Path("data/responses/a/raw_responses.jsonl").read_text()
    Path("data/records/a.parquet").write_text("records of " + answers)
elif stage == "train":
    write_json("data/drafter/training.json", {
        "params": {"lr": 1e-4},
        "made_with": {"git_commit": "c0de", "torch": "2", "transformers": "5"},
        "hidden_states": {
            "a": {"records_digest": digest_file("data/records/a.parquet"), "rows": 7, "tokens": 70}
        },
    })
    records = Path("data/records/a.parquet").read_text()
    Path("data/drafter/model.safetensors").write_text("weights of " + records)
"""
STAGES = {
    "target": ([], ["data/target"], ["target"]),
    "prepare@a": (
        ["data/target"],
        ["data/prompts/a.parquet", "data/prompts/a.stats.json"],
        ["datasets.a"],
    ),
    "generate@a": (["data/prompts/a.parquet"], ["data/responses/a"], ["generate"]),
    "tokenize@a": (["data/responses/a"], ["data/records/a.parquet"], []),
    "train": (["data/records", "data/target"], ["data/drafter"], ["train"]),
}


def dvc(folder: Path, *command: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "dvc", *command],
        cwd=folder,
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "workflow")},
    )


def git(folder: Path, *command: str) -> str:
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *command],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A repository in which DVC built a drafter, and then another one with other answers; both are
    committed."""
    folder = tmp_path_factory.mktemp("lineage") / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "make.py").write_text(MAKE)
    params = {
        "target": {"source": {"path": "/models/x"}},
        "generate": {"temperature": 0},
        "train": {"lr": 1},
        "datasets": {"a": {"source": {"hub": "someone/set", "revision": "0123456789abcdef"}}},
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    stages: dict = {}
    for name, (deps, outs, slices) in STAGES.items():
        group, _, key = name.partition("@")
        body = {
            "cmd": f"{sys.executable} make.py {group}",
            "deps": deps,
            "outs": outs,
            "params": slices,
        }
        stages[group] = {"foreach": [key], "do": body} if key else body
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    git(folder, "init", "-q", "-b", "main")
    dvc(folder, "init", "-q")
    dvc(folder, "repro", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    shutil.copytree(folder / "data/drafter", folder.parent / "first")
    params["generate"]["temperature"] = 1
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    dvc(folder, "repro", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "second")
    return folder


def stages_of(found: dict) -> list[str]:
    return [entry["stage"] for entry in found["artifacts"]]


def test_the_folder_md5_is_dvcs(built, monkeypatch):
    monkeypatch.chdir(built)
    _, stages = next(lineage.locks())
    assert stages["train"]["outs"][0]["md5"] == lineage.folder_md5("data/drafter")


def test_the_present_drafter_is_followed_to_rows_source_and_server(built, monkeypatch):
    monkeypatch.chdir(built)
    found = lineage.trace("data/drafter")
    assert found["recorded_in"] == "the working tree"
    assert stages_of(found) == ["target", "prepare@a", "generate@a", "tokenize@a", "train"]
    said = {entry["stage"]: entry["about"] for entry in found["artifacts"]}
    assert said["prepare@a"] == {
        "source": "hub someone/set at 0123456789ab",
        "rows": 9,
        "kept": 7,
        "rejected": 1,
        "duplicates": 1,
    }
    assert said["generate@a"]["versions"] == {"sglang": "0.5.14"}
    assert said["target"]["source"] == "path /models/x"
    assert said["tokenize@a"] == {
        "digest": digest_file("data/records/a.parquet"),
        "as_trained": True,
    }
    assert all(entry["here"] for entry in found["artifacts"])
    assert "MISSING" not in lineage.page(found)


def test_an_older_drafter_copied_elsewhere_is_found_in_gits_history(built, monkeypatch):
    monkeypatch.chdir(built)
    found = lineage.trace(built.parent / "first")
    assert found["recorded_in"] == git(built, "rev-parse", "HEAD~1")
    assert all(entry["here"] for entry in found["artifacts"])  # DVC's cache still has both versions


def test_what_is_missing_is_named_with_the_command_that_brings_it(built, tmp_path, monkeypatch):
    """Two clones without data: one of the second commit, asked for both drafters."""
    git(tmp_path, "clone", "-q", str(built), "clone")
    monkeypatch.chdir(tmp_path / "clone")
    shutil.copytree(built / "data/drafter", "data/drafter", symlinks=False)
    found = lineage.trace("data/drafter")
    assert found["recorded_in"] == "the working tree" and not any(
        entry["here"] for entry in found["artifacts"]
    )
    assert "dvc pull generate@a" in lineage.page(
        found
    ) and "5 of 5 artifacts are not on this machine" in lineage.page(found)
    older = lineage.trace(built.parent / "first")
    commit = git(built, "rev-parse", "HEAD~1")
    assert {entry["stage"]: entry["get"] for entry in older["artifacts"]}["generate@a"] == (
        f"git checkout {commit[:12]} && dvc pull generate@a"
    )


def test_data_sets_that_left_params_yaml_are_no_part_of_the_drafter(built, tmp_path, monkeypatch):
    """dvc.lock keeps their stages, with outputs in the folders that train depends on."""
    folder = tmp_path / "project"
    shutil.copytree(built, folder, symlinks=True)
    monkeypatch.chdir(folder)
    content = yaml.safe_load(Path("dvc.lock").read_text())
    gone = json.loads(json.dumps(content["stages"]["tokenize@a"]).replace("/a", "/gone"))
    content["stages"]["tokenize@gone"] = gone
    Path("dvc.lock").write_text(yaml.safe_dump(content))
    found = lineage.trace(Path("data/drafter"))
    assert "tokenize@a" in stages_of(found) and "tokenize@gone" not in stages_of(found)


def test_a_drafter_that_no_lock_knows_is_matched_by_its_records(built, tmp_path, monkeypatch):
    monkeypatch.chdir(built)
    shutil.copytree("data/drafter", tmp_path / "edited")
    write_json(tmp_path / "edited/config.json", {"edited": True})
    found = lineage.trace(tmp_path / "edited")
    assert found["recorded_in"] is None and [entry["here"] for entry in found["artifacts"]] == [
        True
    ]
    training = json.loads((tmp_path / "edited/training.json").read_text())
    training["hidden_states"]["a"]["records_digest"] = "other"
    write_json(tmp_path / "edited/training.json", training)
    text = lineage.page(lineage.trace(tmp_path / "edited"))
    assert "MISSING" in text and "another version is in the working tree" in text


def test_a_folder_that_is_no_drafter_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no training.json"):
        lineage.trace(tmp_path)
