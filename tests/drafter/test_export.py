"""The exported folder. Alone: python -m pytest tests/drafter/test_export.py"""

import json

import pytest
import torch
import training_parts as training
from eagle3.core.errors import UserError
from eagle3.drafter import export
from safetensors import safe_open
from safetensors.torch import load_file, save_file

LAYER = [
    "input_layernorm",
    "hidden_norm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]
NAMES = {
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
    *(f"midlayer.{name}.weight" for name in LAYER),
}


@pytest.fixture
def exported(in_tmp):
    made, _ = training.make_drafter()
    config = {**made.config, "torch_dtype": "bfloat16"}
    export.write("out", made.state_dict(), config)
    return made, in_tmp / "out"


def test_names_shapes_and_types_are_those_that_sglang_loads(exported):
    """Catalogue E06, E07 and E10: every tensor, no embedding, in the target's type."""
    made, folder = exported
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert set(tensors.keys()) == NAMES
        assert (
            tensors.get_tensor("fc.weight").shape == (16, 48)
            and tensors.get_tensor("fc.weight").dtype == torch.bfloat16
        )
        assert tensors.get_tensor("midlayer.self_attn.q_proj.weight").shape == (16, 32)
        assert tensors.get_tensor("midlayer.self_attn.k_proj.weight").shape == (8, 32)
        assert tensors.get_tensor("lm_head.weight").shape == (training.DRAFT, 16)
        d2t, t2d = tensors.get_tensor("d2t"), tensors.get_tensor("t2d")
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert (
        (d2t + torch.arange(training.DRAFT)).tolist()
        == t2d.nonzero().flatten().tolist()
        == made.draft_ids.tolist()
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    assert (
        config["num_hidden_layers"] == 1
        and config["torch_dtype"] == "bfloat16"
        and not config["tie_word_embeddings"]
    )


def test_it_loads_with_the_weights_that_were_trained(exported):
    made, folder = exported
    again = export.load_drafter(folder, made.embedding)
    for mine, theirs in zip(again.parameters(), made.parameters()):
        assert torch.equal(mine, theirs.bfloat16().float())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_missing_or_misshapen_tensor_is_refused_by_name(exported, name):
    """Catalogue E07."""
    _, folder = exported
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} is missing"):
        export.read(folder)
    save_file({**tensors, name: tensors[name][:-1].clone()}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} is .* instead of"):
        export.read(folder)


def test_unknown_tensors_broken_values_and_wrong_maps_are_refused(exported):
    """Catalogue E03 and E06."""
    made, folder = exported
    tensors = load_file(folder / "model.safetensors")
    fc = tensors["fc.weight"].clone()
    fc[0, 0] = float("nan")
    ids = made.draft_ids
    for changed, said in (
        ({"embed_tokens.weight": torch.zeros(4, 16)}, "embed_tokens.weight is unknown"),
        ({"fc.weight": fc}, "fc.weight has values that are not finite"),
        ({"d2t": ids.clone()}, "offsets, not ids"),
        ({"t2d": ~tensors["t2d"]}, "t2d marks"),
    ):
        save_file({**tensors, **changed}, folder / "model.safetensors")
        with pytest.raises(UserError, match=said):
            export.read(folder)
