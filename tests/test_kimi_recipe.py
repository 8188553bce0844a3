"""The whole Kimi recipe, all ten data sets through every stage, on a tiny model of its
architecture.

Alone: make test-recipe (44 stages; nine minutes on two busy cores, five of CPU time; `make test`
leaves it out)."""

import json
import os
import re
from pathlib import Path

import kimi
import pytest
import tiny
from eagle3.core.params import read_yaml

pytestmark = pytest.mark.skipif(
    "EAGLEMAKE_RECIPE" not in os.environ, reason="slow; make test-recipe runs it"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    project = kimi.make_project(tmp_path_factory.mktemp("recipe") / "project")
    (project / "build.txt").write_text(
        tiny.run(project, "snakemake", "--cores", "2", "bench", timeout=3000).stdout
    )
    return project


@pytest.mark.timeout(3100)
def test_every_data_set_goes_through_every_stage(project):
    names = read_yaml(project / "params.yaml")["datasets"]
    assert sorted(names) == sorted(kimi.SETS) and len(names) == 10
    for name, dataset in names.items():
        rows = [
            json.loads(line)
            for line in open(project / f"data/responses/{name}/raw_responses.jsonl")
        ]
        errors = (project / f"data/responses/{name}/errors.jsonl").read_text().splitlines()
        stats = json.loads((project / f"data/prompts/{name}.stats.json").read_text())
        assert len(rows) + len(errors) == stats["kept"] == 6
        manifest = json.loads((project / f"data/hidden_states/{name}/manifest.json").read_text())
        assert (
            manifest["architecture"] == "Kimi_K25ForConditionalGeneration"
            and manifest["hidden_size"] == 32
        )
        assert manifest["rows"] >= len(rows) and manifest["dtype"] == "float8_e4m3fn"
        assert stats["rejected"] == sum(bool(reason) for _, reason in kimi.SETS[name][2])
        engine = json.loads((project / f"data/responses/{name}/fingerprint.json").read_text())[
            "engine"
        ]
        assert engine == ("given" if dataset["answers"] == "given" else "transformers")


def test_all_answers_come_before_the_first_states(project):
    """Two stages at a time, and the server would be loaded anew for each change."""
    ran = re.findall(r"^Running stage '(\w+)@", (project / "build.txt").read_text(), re.MULTILINE)
    assert ran.count("generate") == ran.count("extract") == 10
    assert max(n for n, stage in enumerate(ran) if stage == "generate") < ran.index("extract")


def test_the_drafter_is_numbered_as_sglang_reads_it_for_this_family(project):
    config = json.loads((project / "data/drafter/config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [
        1,
        3,
        4,
    ]  # captured 2, 4, 5
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["head_dim"] == 8
    assert config["rope_theta"] == 50000.0 and config["rope_parameters"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == 4096 and config["draft_vocab_size"] == 400


def test_the_bench_agrees_with_plain_decoding(project):
    report = json.loads((project / "data/bench/report.json").read_text())
    outputs = report["all"]["outputs"]
    assert outputs["equal"] == outputs["compared"] == report["all"]["prompts"] > 0


def test_nothing_is_left_to_do(project):
    assert "Nothing to be done" in tiny.run(project, "snakemake", "-n", "bench").stdout
