"""The drafter and its configuration. Alone: python -m pytest tests/drafter/test_model.py"""

import pytest
import torch
import training_parts as training
from eagle3.core.errors import UserError
from eagle3.drafter import model as drafters
from eagle3.drafter import ttt
from eagle3.target import model as targets
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

BASE = {
    "hidden_size": 64,
    "vocab_size": 100,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def config_of(**more):
    return drafters.drafter_config({**BASE, **more}, {}, 50, [1, 2, 3], "bfloat16")


def frequencies(config):
    maps = (
        torch.arange(config["draft_vocab_size"]),
        torch.ones(config["vocab_size"], dtype=torch.bool),
    )
    return drafters.Drafter(config, torch.zeros(config["vocab_size"], 64), *maps).rotary


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN])
@pytest.mark.parametrize("new_form", [False, True])
def test_rope_is_the_targets_in_both_forms(scaling, new_form):
    """Catalogue E09: base and scaling are those of the module that trains, whoever reads whichever
    form."""
    plain = dict(scaling or {"rope_type": "default"})
    kind = plain.get("rope_type") or plain.get("type")
    given = (
        {
            "rope_parameters": {
                **{k: v for k, v in plain.items() if k != "type"},
                "rope_type": kind,
                "rope_theta": 5e5,
            }
        }
        if new_form
        else {"rope_theta": 5e5, "rope_scaling": scaling}
    )
    config = config_of(**given)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    assert (config["rope_scaling"] is None) == (scaling is None)
    if scaling:
        assert (
            config["rope_scaling"]["rope_type"] == kind
            and config["rope_scaling"]["factor"] == scaling["factor"]
        )
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            max_position_embeddings=4096,
            rope_parameters={
                **{k: v for k, v in plain.items() if k != "type"},
                "rope_type": kind,
                "rope_theta": 5e5,
            },
        )
    )
    ours = frequencies(config)
    assert (
        torch.equal(ours.inv_freq, theirs.inv_freq)
        and ours.attention_scaling == theirs.attention_scaling
    )


def test_a_drafter_is_what_sglangs_llama_layer_can_be():
    """Its MLP has silu only; and latent attention has no head size to take over."""
    assert config_of(rope_theta=1e4, hidden_act="gelu_pytorch_tanh")["hidden_act"] == "silu"
    latent = {"rope_theta": 1e4, "kv_lora_rank": 512, "hidden_size": 7168}
    many = {"num_attention_heads": 128, "num_key_value_heads": 128}
    config = config_of(**latent, **many)
    assert [config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [
        56,
        8,
        128,
    ]
    own = {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64}
    config = drafters.drafter_config({**BASE, **latent}, own, 50, [1, 2, 3], "float32")
    assert {k: config[k] for k in own} == own
    with pytest.raises(UserError, match="4 query heads, 3 key and value heads"):
        drafters.drafter_config(
            {**BASE, "rope_theta": 1e4}, {"num_key_value_heads": 3}, 50, [1, 2, 3], "float32"
        )


def test_what_cannot_be_copied_is_refused():
    """Catalogue E09 and E22."""
    with pytest.raises(UserError, match="no rope_theta"):
        config_of()
    with pytest.raises(UserError, match="lacks rms_norm_eps"):
        drafters.drafter_config(
            {k: v for k, v in BASE.items() if k != "rms_norm_eps"}, {}, 50, [1, 2, 3], "float32"
        )


@pytest.mark.parametrize(
    "kind, more",
    [
        ("llama", {}),
        ("qwen3", {"head_dim": 32}),
        (
            "deepseek_v3",
            {
                "num_key_value_heads": 4,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "moe_intermediate_size": 16,
                "n_routed_experts": 4,
            },
        ),
    ],
)
def test_configurations_of_other_families_give_a_valid_drafter(kind, more):
    given = AutoConfig.for_model(
        kind, **{**BASE, "rope_theta": 1e5, "num_hidden_layers": 8, **more}
    ).to_dict()
    config = drafters.drafter_config(given, {}, 50, [1, 2, 3], "bfloat16")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (
        config["hidden_size"] == 64
        and config["torch_dtype"] == "bfloat16"
        and config["rope_theta"] == 1e5
    )
    assert (
        LlamaConfig(**{k: v for k, v in config.items() if k != "torch_dtype"}).head_dim
        == config["head_dim"]
    )
    frequencies(config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_head_and_embedding_are_found_and_nothing_else_is_read(in_tmp, tied, sharded, prefix):
    from eagle3.core.files import write_json

    outer = prefix.removesuffix("model.")
    tensors = {
        f"{prefix}embed_tokens.weight": torch.randn(10, 4),
        f"{prefix}norm.weight": torch.randn(4),
        "vision_tower.embed_tokens.weight": torch.zeros(3, 4),
    }
    if not tied:
        tensors[f"{outer}lm_head.weight"] = torch.randn(10, 4)
    inner = {
        "hidden_size": 4,
        "vocab_size": 10,
        "num_hidden_layers": 6,
        "tie_word_embeddings": tied,
    }
    write_json(
        "model/config.json", {"text_config": inner, "torch_dtype": "bfloat16"} if outer else inner
    )
    write_json("target.json", {"path": str(in_tmp / "model")})
    if sharded:
        for i, (name, tensor) in enumerate(tensors.items()):
            save_file({name: tensor}, f"model/part-{i}.safetensors")
        (in_tmp / "model/part-99.safetensors").write_bytes(b"an expert's weights: never opened")
        write_json(
            "model/model.safetensors.index.json",
            {
                "weight_map": {
                    **{name: f"part-{i}.safetensors" for i, name in enumerate(tensors)},
                    "expert": "part-99.safetensors",
                }
            },
        )
    else:
        save_file(tensors, "model/model.safetensors")
    target = targets.Target(in_tmp)
    assert torch.equal(target.embedding(), tensors[f"{prefix}embed_tokens.weight"])
    assert torch.equal(
        target.head(), tensors[f"{prefix}embed_tokens.weight" if tied else f"{outer}lm_head.weight"]
    )
    assert torch.equal(
        target.tensor("model.norm.weight", "norm.weight"), tensors[f"{prefix}norm.weight"]
    )
    assert target.config["hidden_size"] == 4


def test_the_state_feeds_back_before_the_norm_and_the_head_reads_it_after():
    """Catalogue E19."""
    drafter, _ = training.make_drafter()
    batch = ttt.collate([training.make_row("a", [True] * 6, 0)])
    seen, step = [], drafter.step
    drafter.step = lambda tokens, state, *rest: seen.append(state) or step(tokens, state, *rest)
    states = list(ttt.unroll(drafter, batch, 2))
    assert torch.equal(seen[1], states[0])
    state = states[0].double()
    normed = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + 1e-5) * drafter.norm.weight
    assert torch.allclose(
        drafter.logits(states[0]), (normed @ drafter.lm_head.weight.T.double()).float(), atol=1e-4
    )


def test_initial_weights_depend_on_the_seed_alone():
    made = [training.make_drafter()[0].initialise(torch.ones(40, 16), seed) for seed in (1, 1, 2)]
    same = [
        [torch.equal(a, b) for a, b in zip(made[0].parameters(), other.parameters())]
        for other in made[1:]
    ]
    assert all(same[0]) and not all(same[1])
