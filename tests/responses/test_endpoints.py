"""Several servers for one data set, through the real stage. Alone: python -m pytest
tests/responses/test_endpoints.py"""

import json
import subprocess
import sys

import pytest
import server_parts as serving
import tiny
from eagle3.target.model import Target
from misbehaving_server import answer_ids

ROWS = 60


def script(project, name, *arguments):
    done = subprocess.run(
        [sys.executable, f"workflow/scripts/{name}.py", *arguments],
        cwd=project,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def generate(project):
    return script(
        project,
        "generate",
        "one",
        "--prompts",
        "data/prompts/one.parquet",
        "--target",
        "data/target",
        "--out",
        "data/responses/one",
    )


@pytest.fixture
def project(tmp_path):
    """A project whose prompts are ready; the target's answers are what the servers say."""
    project = tiny.make_project(tmp_path / "project", {"one": (ROWS, "generate")})
    content = tiny.read_params(project)
    content["datasets"]["one"]["max_samples"] = ROWS
    content["generate"].update(engine="sglang", sampling={"max_new_tokens": 24, "temperature": 0})
    content["runtime"].update(concurrency=4, max_attempts=60)
    tiny.write_params(project, content)
    script(project, "target", "--out", "data/target")
    script(
        project, "prepare", "one", "--target", "data/target", "--out", "data/prompts/one.parquet"
    )
    return project


def name_endpoints(project, *urls):
    tiny.write_params(project, {**tiny.read_params(project), "server": {"endpoints": list(urls)}})


def assert_all_answered_rightly(project):
    rows = [json.loads(line) for line in open(project / "data/responses/one/raw_responses.jsonl")]
    assert len(rows) == ROWS and (project / "data/responses/one/errors.jsonl").read_text() == ""
    for row in rows:
        (turn,) = row["turns"]
        assert turn["output_ids"] == answer_ids(turn["prompt_ids"], 24)


def asked(events) -> list[str]:
    return events.read_text().split()


def test_two_servers_share_a_data_set_and_one_may_misbehave(project, tmp_path):
    target = Target(project / "data/target")
    with (
        serving.started(target, events=tmp_path / "good", late=0.05) as (good, _),
        serving.started(
            target,
            events=tmp_path / "bad",
            late=0.05,
            refuse=0.2,
            cut=0.1,
            garbage=0.1,
            wrong_row=0.1,
            status=[500, 503],
        ) as (bad, _),
    ):
        name_endpoints(project, good, bad)
        generate(project)
    assert_all_answered_rightly(project)
    assert asked(tmp_path / "good") and asked(tmp_path / "bad")
    made_by = json.loads((project / "data/responses/one/fingerprint.json").read_text())["made_by"]
    assert "0.0.test" in json.dumps(made_by)


def test_a_server_that_dies_leaves_its_share_to_the_other(project, tmp_path):
    target = Target(project / "data/target")
    with (
        serving.started(target, events=tmp_path / "lasting", late=0.05) as (lasting, _),
        serving.started(target, events=tmp_path / "dying", late=0.05, die_at=10) as (
            dying,
            process,
        ),
    ):
        name_endpoints(project, lasting, dying)
        generate(project)
        assert process.wait(1) == 137
    assert_all_answered_rightly(project)
    assert (
        len(asked(tmp_path / "dying")) == 9 and len(asked(tmp_path / "lasting")) == ROWS - 9
    )  # no row twice


def test_a_second_server_in_other_numerics_is_refused_before_it_answers(project, tmp_path):
    target = Target(project / "data/target")
    with (
        serving.started(target, late=0.2) as (right, _),
        serving.started(target, kv_cache_dtype="fp8_e5m2", events=tmp_path / "other") as (other, _),
    ):
        name_endpoints(project, right, other)
        with pytest.raises(AssertionError, match=f"{other} reports kv_cache_dtype 'fp8_e5m2'"):
            generate(project)
    assert not asked(tmp_path / "other") and not (project / "data/responses/one").exists()
