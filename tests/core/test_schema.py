"""params.yaml is checked as a whole, at once. Alone: python -m pytest tests/core/test_schema.py"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from eagle3.core import params
from eagle3.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
GOOD = yaml.safe_load((ROOT / "params.yaml").read_text())


def refusal(edit) -> str:
    """What the check says to the project's own file after `edit` changed it."""
    content = copy.deepcopy(params.read_yaml(ROOT / "params.yaml"))
    edit(content)
    with pytest.raises(UserError) as caught:
        params.check(content)
    return str(caught.value)


def put(path: str, value):
    def edit(content):
        *parents, last = path.split(".")
        for key in parents:
            content = content.setdefault(key, {})
        content[last] = value

    return edit


def test_the_projects_own_file_is_right():
    params.check(params.read_yaml(ROOT / "params.yaml"))


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("train.learning_rate", 1e-4, ["train.learning_rate", "no known key", "lr"]),
        (
            "datasets.alpaca.max_sample",
            3,
            ["datasets.alpaca.max_sample", "max_samples", "token_budget"],
        ),
        ("datasets.alpaca.source.sha", "x", ["datasets.alpaca.source.sha", "sha256"]),
        ("traning", {}, ["traning", "no known key", "train"]),
        ("runtime.concurency", 3, ["runtime.concurency", "concurrency"]),
    ],
)
def test_an_unknown_key_is_named_with_the_known_ones(path, value, words):
    message = refusal(put(path, value))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("train.steps", "seven", ["train.steps", "'seven'", "integer"]),
        ("train.steps", 17, ["train.steps", "17", "less than or equal to 16"]),
        ("train.lr", -1, ["train.lr", "-1", "greater than 0"]),
        ("train.lr", float("nan"), ["train.lr", "finite"]),
        ("generate.engine", "vllm", ["generate.engine", "'vllm'", "transformers", "sglang"]),
        ("hidden_states.dtype", "fp8", ["hidden_states.dtype", "'fp8'", "float8_e4m3fn"]),
        ("datasets", {}, ["datasets", "at least 1"]),
        ("datasets.alpaca.answers", "maybe", ["datasets.alpaca.answers", "'maybe'", "given"]),
        ("datasets.alpaca.answers", "on_policy", ["alpaca.answers: on_policy is now called given"]),
        ("target.template_date", "today", ["target.template_date", "'today'", r"\d{4}"]),
        ("runtime.push", ["everything"], ["runtime.push", "'everything'", "generate"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(path, value, words):
    message = refusal(put(path, value))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("generate.sampling.max_new_tokens", 4000, ["4224", "target.context_length 2048"]),
        ("hidden_states.layers", [2, 30], ["hidden_states.layers", "[2, 30]", "three rising"]),
        ("hidden_states.layers", [30, 2, 58], ["[30, 2, 58]", "three rising"]),
        (
            "records.min_supervised_share",
            1.0,
            ["min_supervised_share 1.0", "max_supervised_share 0.999"],
        ),
        (
            "train.architecture",
            {"num_attention_heads": 9, "num_key_value_heads": 2},
            ["num_attention_heads 9", "2"],
        ),
        (
            "datasets.alpaca.source.path",
            "x.jsonl",
            ["datasets.alpaca.source", "exactly one", "package, path"],
        ),
        ("datasets.alpaca.source", {}, ["datasets.alpaca.source", "exactly one", "none"]),
        ("datasets.alpaca.source", {"package": "a==1"}, ["package needs file and sha256"]),
        ("datasets.alpaca.source", {"hub": "a/b"}, ["hub a/b needs revision", "git ls-remote"]),
        ("datasets.alpaca.source", {"hub": "a/b", "revision": "main"}, ["40 hex digits", "'main'"]),
    ],
)
def test_an_impossible_combination_is_named_with_both_values(path, value, words):
    message = refusal(put(path, value))
    assert all(word in message for word in words), message


def test_a_value_left_to_fill_in_is_refused_until_it_is():
    message = refusal(put("datasets.alpaca.source", {"hub": "a/b", "revision": "FILL-IN"}))
    assert (
        "datasets.alpaca.source" in message
        and "revision of a/b is still FILL-IN" in message
        and "ls-remote" in message
    )
    assert "path of this source is still FILL-IN" in refusal(
        put("target.source", {"path": "FILL-IN"})
    )


def test_a_missing_section_and_several_mistakes_are_all_named():
    def edit(content):
        del content["vocab"]
        content["train"]["steps"] = 0
        content["bench"]["stepps"] = 1

    message = refusal(edit)
    assert len(message.splitlines()) == 3
    assert (
        "vocab is missing" in message
        and "train.steps is 0" in message
        and "bench.stepps" in message
    )


def test_a_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "params.yaml").write_text("train:\n  lr: 1\n  lr: 2\n")
    with pytest.raises(UserError, match=r"params.yaml, line 3.*'lr' stands twice"):
        params.load(tmp_path / "params.yaml")


def test_numbers_are_read_as_dvc_reads_them(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 1e-4\nname: 1e\n")
    assert params.read_yaml(tmp_path / "a.yaml") == {"lr": 1e-4, "name": "1e"}


def test_a_script_says_it_in_its_first_second_without_a_traceback(tmp_path):
    """catalogue H05: a typo shows before any work, not after 27 hours of training."""
    content = copy.deepcopy(GOOD)
    content["train"]["epochs1"] = content["train"].pop("epochs")
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run(
        [sys.executable, "workflow/scripts/vocab.py", "--params", tmp_path / "wrong.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "train.epochs1 is no known key" in done.stderr
