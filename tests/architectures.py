"""A tiny random target of every architecture that docs/targets.md speaks of, by transformers' own
class: a few hundred kilobytes, weights wide enough that distributions are far from uniform."""

from pathlib import Path

import tiny

COMMON = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "rope_theta": 10000.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Name -> (model type of transformers, what differs from COMMON, published name).
ARCHITECTURES = {
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
        "Llama 3",
    ),
    "qwen2.5": ("qwen2", {**ROPE, "tie_word_embeddings": True}, "Qwen2.5"),
    "qwen3": ("qwen3", {**ROPE, "head_dim": 16}, "Qwen3"),
    "qwen3-moe": ("qwen3_moe", {**ROPE, **EXPERTS, "head_dim": 16}, "Qwen3-MoE"),
    "mistral": ("mistral", {**ROPE, "head_dim": 16, "sliding_window": None}, "Mistral"),
    "phi3": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [1.1, 1.5, 2.0, 4.0],
                "original_max_position_embeddings": 128,
            },
        },
        "Phi-3",
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
            "sliding_window": 64,
            "query_pre_attn_scalar": 8,
        },
        "Gemma-2",
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "sliding_window": 64,
            "query_pre_attn_scalar": 8,
        },
        "Gemma-3",
    ),
    "granite": (
        "granite",
        {
            **ROPE,
            "logits_scaling": 4.0,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.125,
            "tie_word_embeddings": True,
        },
        "Granite",
    ),
    "cohere2": (
        "cohere2",
        {**ROPE, "logit_scale": 0.25, "tie_word_embeddings": True, "sliding_window": 64},
        "Cohere2",
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
        },
        "gpt-oss",
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "DeepSeek-V3",
    ),
    "kimi-k2.5": ("kimi_k25", {}, "Kimi-K2.5"),
    "glm-4.5": (
        "glm4_moe",
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "GLM-4.5",
    ),
}


def make(name: str, folder: Path) -> Path:
    """The model of `name` in a Hugging Face directory, as its own class saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, more, _ = ARCHITECTURES[name]
    if name == "kimi-k2.5":
        import kimi

        return kimi.make_model(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tiny.make_tokenizer(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **more})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder
