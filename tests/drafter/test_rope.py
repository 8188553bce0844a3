"""RoPE of drafters: what training computes is what SGLang computes. The sample of SGLang's side is
written by tests/sglang_rope.py with SGLang's own classes. Alone: python -m pytest
tests/drafter/test_rope.py"""

import json
from pathlib import Path

import pytest
import torch
from eagle3.core.errors import UserError
from eagle3.drafter import rope
from sglang_rope import HEAD_DIM, LATE, MAX_POSITIONS, POSITIONS, SAMPLE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 128,
}
# The target's RoPE, as published configurations write it.
CASES = {
    "plain": {"rope_type": "default"},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "mrope": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": YARN,
    "yarn, no truncation": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn, mscale of DeepSeek-V3": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, mscale of DeepSeek-V2-Lite": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.9},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.0},
    "yarn, attn_factor": {**YARN, "attn_factor": 0.7},
    "longrope": LONG,
    "longrope, beyond the short positions": LONG,
    "longrope, attention_factor": {**LONG, "attention_factor": 1.3},
}


def written(name: str) -> dict:
    given = {"rope_theta": 5000.0, "max_position_embeddings": MAX_POSITIONS}
    return rope.rope_parameters({**given, "rope_scaling": CASES[name]}, HEAD_DIM)


def trained(parameters: dict, positions: list[int]) -> torch.Tensor:
    module = rope.rotary(
        {
            "rope_parameters": parameters,
            "max_position_embeddings": MAX_POSITIONS,
            "head_dim": HEAD_DIM,
        }
    )
    cos, sin = module(torch.zeros(1), torch.tensor([positions]))
    return torch.cat([cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]], dim=-1)


@pytest.mark.parametrize("version", rope.SGLANG)
@pytest.mark.parametrize("name", CASES)
def test_sglang_computes_what_training_does(name, version):
    case = json.loads(SAMPLE.read_text())[name]
    parameters = written(name)
    assert case["rope_parameters"] == parameters, "write the sample anew: tests/sglang_rope.py"
    positions = LATE if case["late"] else POSITIONS
    theirs = torch.tensor(case[version])
    torch.testing.assert_close(trained(parameters, positions), theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "name", ["yarn, mscale of DeepSeek-V3", "yarn, attention_factor", "longrope, attention_factor"]
)
def test_copied_keys_would_be_served_with_another_scale(name):
    """What a drafter with the target's own keys is, and what `served_scale` says of it: SGLang
    0.5.14 of no mscale, neither version of attention_factor."""
    own = rope.read({"rope_theta": 5000.0, "rope_scaling": CASES[name]})
    scale = rope.trained_scale(own, MAX_POSITIONS)
    assert abs(rope.served_scale(own, MAX_POSITIONS, "0.5.14") / scale - 1) > 0.05
    for version in rope.SGLANG:
        served = rope.served_scale(written(name), MAX_POSITIONS, version)
        assert served == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1e4}, "type dynamic"),
        ({"rope_scaling": {"type": "linear"}, "rope_theta": 1e4}, "lacks factor"),
        ({}, "no rope_theta"),
        ({"rope_theta": "many"}, "'many', not a number"),
        ({"rope_scaling": LONG, "rope_theta": 1e4}, "head_dim to 16"),
    ],
)
def test_what_training_and_serving_cannot_agree_on_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        rope.rope_parameters({"max_position_embeddings": MAX_POSITIONS, **given}, 32)


def test_of_two_kinds_of_attention_the_full_one_counts():
    """Gemma-3."""
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    found = rope.rope_parameters({"rope_parameters": both, "max_position_embeddings": 512})
    assert found == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


if __name__ == "__main__":  # the cases of the sample, without SGLang's side
    late = "longrope, beyond the short positions"
    Path(SAMPLE).write_text(
        json.dumps({n: {"late": n == late, "rope_parameters": written(n)} for n in CASES})
    )
