"""make plan. Alone: python -m pytest tests/commands/test_plan.py"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from eagle3.commands import plan, planpage
from eagle3.commands.plan import Rates
from eagle3.core import params as parameters
from eagle3.core.errors import UserError
from eagle3.core.files import write_json
from eagle3.hidden_states import shards
from eagle3.records import records

ROOT = Path(__file__).resolve().parents[2]
# The dimensions of Kimi-K2.5's config.json, nested as there.
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "vocab_size": 163840,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
    },
}
RATES = Rates(generate=3000, extract=10000, train=10000)


def kimi_params(folder: Path, **edits):
    """The Kimi recipe, filled in, with a target folder that holds the real dimensions."""
    write_json(folder / "model/config.json", KIMI)
    recipe = parameters.read_yaml(ROOT / "recipes/kimi-k2.5.yaml")
    recipe["target"]["source"]["path"] = str(folder / "model")
    for dataset in recipe["datasets"].values():
        if dataset["source"].get("path") == "FILL-IN":
            dataset["source"]["path"] = "/nowhere.jsonl"
    for section, keys in edits.items():
        recipe[section].update(keys)
    return parameters.check(recipe)


def test_the_reference_case_comes_out(in_tmp):
    """57,344 bytes per token in bf16, so 9.2 TB are about 160 million tokens; eight sets of 10
    million, 83,000 prompts."""
    found = plan.make(
        kimi_params(in_tmp, hidden_states={"dtype": "bfloat16"}), RATES, free=9_200_000_000_000
    )
    assert found["hidden_states"]["bytes_per_token_of_states"]["bfloat16"] == 57_344
    assert round(found["disk"]["tokens_that_fit"]["bfloat16"] / 1e6) == 160
    assert round(found["disk"]["tokens_that_fit"]["float8_e4m3fn"] / 1e6) == 316  # scales included
    generated = [d for d in found["datasets"] if d["answers"] == "generate"]
    assert sum(d["rows"] for d in generated) == 83_000
    assert all(d["answer_tokens"] == 10_000_000 for d in generated)
    one = next(d for d in generated if d["name"] == "B1_glaive")
    assert one["hours"]["generate"] == pytest.approx(10e6 / 3000 / 3600)
    assert one["bytes_states"] == one["tokens"] * (57_344 + 5)
    text = planpage.page(found)
    assert (
        "57,344 bytes in bfloat16" in text
        and "9.2 TB hold 160.4 million tokens in bfloat16" in text
    )
    assert "longest path: generate@B1_glaive 55.6 min, then extract@B1_glaive" in text


def test_fp8_halves_the_bytes_and_shard_size_changes_their_number(in_tmp):
    found = plan.make(kimi_params(in_tmp), RATES, free=10**13)
    cases = {
        row["change"].partition(":")[0] + ":" + row["change"].partition(": ")[2]: row
        for row in found["what_if"]
    }
    now = found["what_if"][0]
    wide = next(row for name, row in cases.items() if "bfloat16" in name)
    assert wide["bytes_states"] / now["bytes_states"] == pytest.approx(
        57_349 / 29_125
    )  # fp8 with its scales
    smaller, larger = (row for name, row in cases.items() if "shard_bytes" in name)
    assert smaller["shards"] / now["shards"] == pytest.approx(4, rel=0.01)
    assert larger["seconds_lost"] == pytest.approx(4 * now["seconds_lost"])
    half = next(row for name, row in cases.items() if "half" in name)
    assert half["tokens"] == pytest.approx(now["tokens"] / 2, rel=0.01)
    assert (
        now["fits"] and half["fits"] and not wide["fits"]
    )  # 10.2 TB in bfloat16 are more than the 10 TB


def test_hours_of_training_stop_at_max_updates(in_tmp):
    params = kimi_params(in_tmp, train={"max_updates": 9, "batch_tokens": 1000, "micro_batches": 4})
    assert plan.make(params, RATES, free=10**13)["total"]["hours_train"] == pytest.approx(
        9 * 4000 / 10000 / 3600
    )


@pytest.mark.parametrize(
    "hours, text",
    [(0, "0"), (3 / 3600, "3.0 s"), (0.926, "55.6 min"), (9.68, "9.7 h"), (72, "3.0 d")],
)
def test_a_time_names_its_unit(hours, text):
    assert planpage.time(hours) == text


def test_too_little_disk_is_said(in_tmp):
    found = plan.make(kimi_params(in_tmp), RATES, free=10**12)
    assert not found["disk"]["enough"] and "NOT ENOUGH" in planpage.page(found)
    assert found["total"]["bytes_to_write"] > 10**12


def test_dvc_that_copies_counts_twice(in_tmp):
    """catalogue H07, H16: the estimate includes DVC's cache under its link type."""
    (in_tmp / ".dvc").mkdir()
    (in_tmp / ".dvc/config").write_text("[cache]\n    type = copy\n")
    twice = plan.make(kimi_params(in_tmp), RATES, free=10**13)["total"]
    (in_tmp / ".dvc/config").write_text("[cache]\n    type = symlink\n")
    once = plan.make(kimi_params(in_tmp), RATES, free=10**13)["total"]
    assert twice["bytes_to_write"] == 2 * once["bytes_to_write"] and twice["bytes"] == once["bytes"]


def test_memory_of_training_is_counted_from_the_drafters_shapes(in_tmp):
    found = plan.make(kimi_params(in_tmp), RATES, free=10**13)["memory"]
    h, heads = 7168, 64 * 128
    weights = 3 * h * h + 3 * heads * 2 * h + heads * h + 3 * 18432 * h + 4 * h + 32000 * h
    assert found["needed_by_train"] == 16 * weights + 2 * 4 * 163840 * h


def test_a_target_that_stage_target_would_refuse_is_refused(in_tmp):
    with pytest.raises(UserError, match="layers .2, 30, 61. do not fit a target of 61 layers"):
        plan.make(kimi_params(in_tmp, hidden_states={"layers": [2, 30, 61]}), RATES, free=10**13)


def test_finished_data_sets_refine_the_others(in_tmp):
    params = kimi_params(in_tmp)
    rows = [
        records.Record(f"r{i}", [1] * 300, [False] * 100 + [True] * 200, "train") for i in range(50)
    ]
    counts = Counter(records=50, tokens=15_000, supervised=10_000)
    Path("data/records").mkdir(parents=True)
    records.write(
        "data/records/B2_opencodeinstruct.parquet", rows, counts, params.records, greedy=False
    )
    found = {d["name"]: d for d in plan.make(params, RATES, free=10**13)["datasets"]}
    measured = found["B2_opencodeinstruct"]
    assert (measured["basis"], measured["rows"], measured["answer_tokens"]) == (
        "measured",
        50,
        10_000,
    )
    like = found["B3_magicoder"]
    assert like["basis"] == "like the others" and like["rows"] == 10_000
    assert like["answer_tokens"] == 10_000 * 200 and like["prompt_tokens"] == 10_000 * 100
    assert (
        found["A1_kimi_k2_trajectories"]["basis"] == "assumed"
    )  # other kind of answers: nothing is known of it


def test_a_run_under_way_counts_with_its_torn_line_left_out(in_tmp):
    params = kimi_params(in_tmp)
    journal = Path(".work/generate/B1_glaive/journal.jsonl")
    journal.parent.mkdir(parents=True)
    rows = [
        json.dumps({"key": str(i), "usage": {"prompt_tokens": 40, "completion_tokens": 400}})
        for i in range(5)
    ]
    journal.write_text("\n".join(rows) + '\n{"key": "6", "usa')
    found = {d["name"]: d for d in plan.make(params, RATES, free=10**13)["datasets"]}["B1_glaive"]
    assert (
        found["basis"] == "journal"
        and found["rows"] == 14_000
        and found["answer_tokens"] == 14_000 * 400
    )


def test_what_is_done_costs_no_hours(in_tmp):
    params = kimi_params(in_tmp)
    write_json("data/hidden_states/B1_glaive/manifest.json", {})
    before = plan.make(params, RATES, free=10**13)
    found = {d["name"]: d for d in before["datasets"]}["B1_glaive"]
    assert found["hours"]["extract"] == 0 and found["hours"]["generate"] > 0
    assert before["total"]["hours_train"] > 0
    write_json("data/drafter/training.json", {})
    assert plan.make(params, RATES, free=10**13)["total"]["hours_train"] == 0


def test_the_longest_path_is_the_slowest_chain_then_training(in_tmp):
    found = plan.make(kimi_params(in_tmp), RATES, free=10**13)
    slowest = max(sum(d["hours"].values()) for d in found["datasets"])
    assert found["longest_path"]["hours"] == pytest.approx(slowest + found["total"]["hours_train"])
    assert found["longest_path"]["hours"] < found["total"]["hours_on_one_machine"]


def test_before_the_target_is_here_all_but_bytes_of_states_is_told(in_tmp):
    params = parameters.load(ROOT / "params.yaml")
    found = plan.make(params, RATES)
    text = planpage.page(found)
    assert (
        found["total"]["rows"] == 54
        and "--hidden-size" in text
        and "hidden_states.dtype" not in text
    )
    assert all(
        line.split()[7] == "?"
        for line in text.splitlines()
        if line.startswith(tuple(params.datasets))
    )
    found = plan.make(params, RATES, hidden_size=576)["hidden_states"]
    assert found["bytes_per_token"] == shards.bytes_per_token(576, "bfloat16")


def test_the_command_prints_a_table_or_json(in_tmp):
    kimi_params(in_tmp)
    (in_tmp / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    command = [
        sys.executable,
        str(ROOT / "workflow/scripts/plan.py"),
        "--hidden-size",
        "576",
        "--disk",
        "9.2TB",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert json.loads(found)["disk"]["free"] == 9_200_000_000_000
    wrong = subprocess.run(
        [*command, "--disk", "a lot"], capture_output=True, text=True, env=environment
    )
    assert wrong.returncode == 2 and "'a lot' is no size" in wrong.stderr
