"""RoPE of a drafter: the target's, written so that every supported SGLang computes what training
does.

Training computes with transformers' LlamaRotaryEmbedding, serving with SGLang's `get_rope`. They
read different keys for the scale of cos and sin, so a target's own keys cannot be copied as they
are. `served` holds SGLang's rules; a test holds it to what SGLang's own classes compute."""

import math
from typing import Any

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.core.errors import UserError

# What each type needs besides its base; everything else but OPTIONAL and the scale is dropped.
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "truncate"), "longrope": ("factor",)}
OTHER_NAMES = {"su": "longrope", "mrope": "default"}
SGLANG = ("0.5.14", "0.5.23")


def read(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE of a configuration in either form, as it stands there, with `rope_theta` and
    `rope_type`. Of models with two kinds of attention it is that of the full one.

    Raises UserError if it names no base (10000 would be a guess)."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise UserError(f"rope_parameters is {found!r}, not a mapping")
    found = dict(found.get("full_attention") or found)
    theta = found.get("rope_theta", config.get("rope_theta"))
    if not _is_number(theta):
        raise UserError(
            "the config.json has no rope_theta, neither at the top nor in rope_parameters"
            if theta is None
            else f"rope_theta is {theta!r}, not a number"
        )
    kind = found.pop("type", None) or found.get("rope_type") or "default"
    return {**found, "rope_theta": theta, "rope_type": OTHER_NAMES.get(kind, kind)}


def rope_parameters(config: dict[str, Any], head_dim: int | None = None) -> dict[str, Any]:
    """The `rope_parameters` of a drafter for a target's text configuration.

    A target that turns a part of each head (partial_rotary_factor), or splits it into sections for
    images (mrope), gets a drafter that turns whole heads: on text positions the base is what they
    share, and a drafter's attention is its own. Raises UserError naming the field if the type is
    unknown, or a key is missing or does not fit heads of `head_dim`."""
    found = read(config)
    kind = found["rope_type"]
    if kind not in NEEDED:
        raise UserError(
            f"the target's RoPE is of type {kind}; training and SGLang agree on "
            f"{', '.join(NEEDED)} only"
        )
    positions = config.get("max_position_embeddings")
    if kind in ("yarn", "longrope") and not found.get("original_max_position_embeddings"):
        found["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", positions
        )
    if kind in ("yarn", "longrope") and not found.get("factor"):
        found["factor"] = positions / found["original_max_position_embeddings"]
    if missing := [key for key in NEEDED[kind] if found.get(key) is None]:
        raise UserError(f"the target's RoPE of type {kind} lacks {', '.join(missing)}")
    keys = ("rope_theta", "rope_type", *NEEDED[kind], *OPTIONAL.get(kind, ()))
    written = {key: found[key] for key in keys if found.get(key) is not None}
    if kind == "yarn":
        # SGLang multiplies attn_factor with a scale of its own, transformers reads
        # attention_factor; mscale keys are read by 0.5.23 and not by 0.5.14.
        scale = trained_scale(found, positions)
        written |= {
            "attention_factor": scale,
            "attn_factor": scale / _yarn_mscale(found["factor"]),
        }
    if kind == "longrope":
        half = head_dim and head_dim // 2
        if half and len(found["short_factor"]) != half:
            raise UserError(
                f"the target's longrope has {len(found['short_factor'])} factors, the drafter's "
                f"heads turn {half} pairs (head_dim {head_dim}); set train.architecture.head_dim "
                f"to {2 * len(found['short_factor'])}"
            )
        scale = trained_scale(found, positions)
        written |= {"attention_factor": scale, "short_mscale": scale, "long_mscale": scale}
    return written


def trained_scale(found: dict[str, Any], positions: int | None) -> float:
    """Scale of cos and sin that transformers computes for `read`'s result.

    Source: `_compute_yarn_parameters` and `_compute_longrope_parameters` of transformers."""
    if found.get("attention_factor") is not None:
        return float(found["attention_factor"])
    if found["rope_type"] == "yarn":
        factor, one, other = found["factor"], found.get("mscale"), found.get("mscale_all_dim")
        if one and other:
            return _yarn_mscale(factor, one) / _yarn_mscale(factor, other)
        return _yarn_mscale(factor)
    if found["rope_type"] == "longrope":
        original = found["original_max_position_embeddings"]
        factor = found.get("factor") or positions / original
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0


def served_scale(parameters: dict[str, Any], positions: int, version: str) -> float:
    """Scale of cos and sin that SGLang `version` computes for a drafter's `rope_parameters`.

    Source: rotary_embedding/factory.py and yarn.py, rope_variant.py of SGLang."""
    if parameters["rope_type"] == "yarn":
        factor = parameters.get("factor") or 1.0
        one, other = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = _yarn_mscale(factor)
        if version != "0.5.14" and one is not None and other is not None:
            scale = _yarn_mscale(factor, one) / _yarn_mscale(factor, other)
        return scale * parameters.get("attn_factor", 1)
    if parameters["rope_type"] == "longrope":
        original = parameters.get("original_max_position_embeddings") or positions
        factor = positions / original
        own = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return parameters.get("short_mscale") or own
    return 1.0


def rotary(config: dict[str, Any]) -> LlamaRotaryEmbedding:
    """The module that training computes cos and sin with, for a drafter's configuration."""
    width = config["head_dim"]
    return LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            rope_parameters=config["rope_parameters"],
            max_position_embeddings=config["max_position_embeddings"],
            head_dim=width,
            hidden_size=width,
            num_attention_heads=1,
        )
    )


def served(config: dict[str, Any], positions: torch.Tensor, version: str) -> torch.Tensor:
    """cos and sin [T, head_dim] side by side, as SGLang `version` computes them for a drafter's
    configuration: the frequencies are the same functions as training's, the scale is not."""
    module = rotary(config)
    cos, sin = module(torch.zeros(1), positions.unsqueeze(0))
    half = config["head_dim"] // 2
    scale = served_scale(config["rope_parameters"], config["max_position_embeddings"], version)
    both = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    return both * (scale / module.attention_scaling)


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
