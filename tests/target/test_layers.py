"""Which layers, and how SGLang numbers them. Alone: python -m pytest tests/target/test_layers.py"""

import doctest
import itertools

import pytest
from eagle3.core.errors import UserError
from eagle3.target import layers

CONVENTIONS = (layers.PLUS_ONE, layers.IF_FIRST_IS_ONE)


def sglang_llama(ids):
    """What LlamaForCausalLM.set_eagle3_layers_to_capture does with ids from a config."""
    return [i + 1 for i in ids]


def sglang_deepseek(ids):
    """The same of DeepseekV2ForCausalLM and what builds on it (Kimi-K2)."""
    return [i + 1 for i in ids] if ids[0] == 1 else list(ids)


def test_examples():
    assert doctest.testmod(layers).failed == 0


@pytest.mark.parametrize(
    "number,expected", [(61, [2, 30, 58]), (32, [2, 16, 29]), (30, [2, 15, 27])]
)
def test_default_is_that_of_sglang(number, expected):
    assert layers.captured_layers(number) == expected == [2, number // 2, number - 3]


@pytest.mark.parametrize(
    "wanted,number",
    [([2, 2, 5], 8), ([5, 4, 6], 8), ([1, 2], 8), ([1, 2, 8], 8), ([-1, 2, 3], 8), (None, 4)],
)
def test_impossible_layers_are_refused(wanted, number):
    """catalogue D08: a layer past the last one, or fewer than three, would make another width than
    3H."""
    with pytest.raises(UserError, match=f"do not fit a target of {number} layers"):
        layers.captured_layers(number, wanted)


@pytest.mark.parametrize(
    "architecture,convention",
    [
        ("LlamaForCausalLM", layers.PLUS_ONE),
        ("Qwen3ForCausalLM", layers.PLUS_ONE),
        ("DeepseekV3ForCausalLM", layers.IF_FIRST_IS_ONE),
        ("DeepseekV2ForCausalLM", layers.IF_FIRST_IS_ONE),
        ("KimiK25ForConditionalGeneration", layers.IF_FIRST_IS_ONE),
    ],
)
def test_convention_follows_the_architecture(architecture, convention):
    assert layers.convention_of(architecture) == convention
    assert layers.convention_of(architecture, layers.PLUS_ONE) == layers.PLUS_ONE


def test_every_choice_is_served_as_captured_or_refused():
    """catalogue D04, D05: for all layers of a small target, SGLang's own rule gives back what was
    captured."""
    served = {layers.PLUS_ONE: sglang_llama, layers.IF_FIRST_IS_ONE: sglang_deepseek}
    written = 0
    for captured, convention in itertools.product(itertools.combinations(range(9), 3), CONVENTIONS):
        captured = list(captured)
        try:
            ids = layers.config_ids(captured, convention)
        except UserError:
            # Layer 0 is before every id + 1; a first id of 1 always means 2 in the conditional
            # convention.
            assert captured[0] in (0, 1)
            continue
        written += 1
        assert served[convention](ids) == layers.served_layers(ids, convention) == captured
    assert written > 100


def test_the_reference_case():
    assert layers.config_ids([2, 30, 58], layers.IF_FIRST_IS_ONE) == [1, 29, 57]
