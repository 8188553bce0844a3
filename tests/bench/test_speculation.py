"""Flags from a drafter, and when two servers may be compared. Alone: python -m pytest
tests/bench/test_speculation.py"""

import json
import shutil

import pytest
from eagle3.bench import speculation
from eagle3.core.errors import UserError
from safetensors.torch import load_file, save_file


def copy_with(learnt, tmp_path, change=None, **config):
    folder = tmp_path / "drafter"
    shutil.copytree(learnt.folder, folder)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | config)
    )
    if change:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_flags_follow_from_the_drafter(learnt):
    """catalogue E01: the algorithm is derived, never typed."""
    assert speculation.flags(learnt.folder, 3, 1, 4) == {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": str(learnt.folder.resolve()),
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
    }


def test_no_drafter_is_refused_before_a_server_starts(tmp_path):
    """catalogue E18: without a draft path SGLang loads the target as its own drafter."""
    with pytest.raises(UserError, match="no drafter at"):
        speculation.flags(tmp_path, 3, 1, 4)


def test_another_architecture_is_refused(learnt, tmp_path):
    with pytest.raises(UserError, match="LlamaForCausalLMEagle,"):
        speculation.algorithm_of(
            copy_with(learnt, tmp_path, architectures=["LlamaForCausalLMEagle"])
        )


def test_a_drafter_that_does_not_read_three_states_is_refused(learnt, tmp_path):
    def narrow(tensors):
        tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()

    with pytest.raises(UserError, match=r"\(32, 64\), not \(32, 96\)"):
        speculation.algorithm_of(copy_with(learnt, tmp_path, narrow))


def test_a_chain_whose_tokens_sglang_would_change_is_refused(learnt):
    with pytest.raises(UserError, match="verifies steps \\+ 1 = 4"):
        speculation.flags(learnt.folder, 3, 1, 8)


INFO = {
    "version": "0.5.14",
    "dtype": "bfloat16",
    "max_running_requests": 64,
    "random_seed": 0,
    "cuda_graph_config": {"decode": {"max_bs": 64}},
    "speculative_algorithm": None,
    "internal_states": [
        {"effective_max_running_requests_per_dp": 64, "memory_usage": {"token_capacity": 300000}}
    ],
}


def test_settings_are_found_where_versions_keep_them():
    found = speculation.read_back(INFO)
    assert found["cuda_graph_max_bs"] == 64 and found["token_capacity"] == 300000
    assert speculation.read_back({"cuda_graph_max_bs": 8})["cuda_graph_max_bs"] == 8


@pytest.mark.parametrize(
    "change",
    [
        {"max_running_requests": 48},
        {"dtype": "float16"},
        {"cuda_graph_config": {"decode": {"max_bs": 8}}},
        {"internal_states": [{"effective_max_running_requests_per_dp": 48}]},
    ],
)
def test_arms_with_other_settings_are_refused_with_both_values(change):
    """catalogue F04: speculation silently limits the requests at once to 48."""
    same, other = speculation.read_back(INFO), speculation.read_back({**INFO, **change})
    speculation.check_settings(same, dict(same))
    with pytest.raises(UserError, match="not comparable.*without and.*with speculation"):
        speculation.check_settings(same, other)


def test_a_server_that_runs_fewer_at_once_is_refused():
    with pytest.raises(UserError, match="128 requests at once.*64"):
        speculation.check_limits(speculation.read_back(INFO), 128)
