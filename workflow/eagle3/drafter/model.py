"""The EAGLE-3 drafter: one decoder layer that reads the target's states and drafts the tokens after
the next.

T: tokens of a packed batch. H: hidden size. D: draft vocabulary. Layout and names are those that
SGLang loads. Source: EAGLE-3, arXiv 2503.01840."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from eagle3.core.errors import UserError

Attend = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d]
OWN = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "architectures": ["LlamaForCausalLMEagle3"],
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
COPIED = (
    "hidden_size",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
)


def drafter_config(
    target: dict[str, Any],
    architecture: dict[str, int | None],
    draft_vocab_size: int,
    layer_ids: list[int],
    dtype: str,
) -> dict[str, Any]:
    """config.json of a drafter for a target's text configuration.

    RoPE, context length and norms are the target's: a drafter with another RoPE base loads and
    drafts badly. RoPE is written in the old and the new form, because readers of either fall back
    to a base of 10000 in silence. Raises UserError naming a field that the target lacks."""
    missing = [key for key in COPIED if key not in target and not key.endswith("token_id")]
    if missing:
        raise UserError(f"the target's config.json lacks {', '.join(missing)}")
    heads = architecture.get("num_attention_heads") or target["num_attention_heads"]
    rope = rope_parameters(target)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        **OWN,
        **{key: target[key] for key in COPIED if key in target},
        "intermediate_size": architecture.get("intermediate_size") or target["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": architecture.get("num_key_value_heads")
        or min(target.get("num_key_value_heads", heads), heads),
        "head_dim": architecture.get("head_dim")
        or target.get("head_dim")
        or target["hidden_size"] // heads,
        "draft_vocab_size": draft_vocab_size,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "torch_dtype": dtype,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layer_ids,
        },
    }


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE of a configuration in either form. Raises UserError if it names no base (10000 would be
    a guess), or turns a part of each head only."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = found.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise UserError(
            "the target's config.json has no rope_theta, neither at the top nor in rope_parameters"
        )
    found["rope_theta"] = theta
    found["rope_type"] = found.pop("type", None) or found.get("rope_type", "default")
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise UserError(
            f"the target turns {partial:.0%} of each head (partial_rotary_factor), a Llama "
            "drafter all of it; such "
            "targets are not supported"
        )
    return found


class Norm(nn.Module):
    """RMS norm, computed in fp32 as the target's is."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Attention(nn.Module):
    """Projections and RoPE; what attends to what is the caller's `attend`."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        size, self.head_dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(2 * size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))  # [T, heads, d]
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        cos, sin = (part.to(q.dtype).unsqueeze(1) for part in rope)  # [T, 1, d]
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        return self.o_proj(attend(q, k, v).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.act = transformers.activations.ACT2FN[config["hidden_act"]]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Midlayer(nn.Module):
    """The decoder layer: attention over [embedding, state], 2H wide, then an MLP."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.hidden_norm = Norm(size, eps), Norm(size, eps)
        self.post_attention_layernorm = Norm(size, eps)
        self.self_attn, self.mlp = Attention(config), Mlp(config)

    def forward(
        self, embeds: Tensor, state: Tensor, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        x = torch.cat(
            [self.input_layernorm(embeds), self.hidden_norm(state)], dim=-1
        )  # [T, 2H], embedding first
        x = state + self.self_attn(x, rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """`embedding` [V, H] is the target's, never trained and never saved: SGLang shares it."""

    def __init__(self, config: dict[str, Any], embedding: Tensor, d2t: Tensor, t2d: Tensor):
        super().__init__()
        size = config["hidden_size"]
        self.config = config
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = Norm(size, config["rms_norm_eps"])
        self.lm_head = nn.Linear(size, config["draft_vocab_size"], bias=False)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer(
            "draft_ids", d2t + torch.arange(len(d2t)), persistent=False
        )  # [D] target ids
        width = config["head_dim"]
        self.rotary = LlamaRotaryEmbedding(
            transformers.LlamaConfig(
                rope_parameters=config["rope_parameters"],
                max_position_embeddings=config["max_position_embeddings"],
                head_dim=width,
                hidden_size=width,
                num_attention_heads=1,
            )
        )

    def initialise(self, head: Tensor, seed: int) -> "Drafter":
        """Random weights of width 0.02, from `seed` alone; the head starts as the target's rows of
        the draft ids (`head` [V, H]) and the norms as ones."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _name, parameter in sorted(self.named_parameters()):
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            self.lm_head.weight.copy_(head[self.draft_ids.cpu()])
        return self

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, head_dim], of integer positions [T]."""
        cos, sin = self.rotary(self.fc.weight, positions.unsqueeze(0))
        return cos[0], sin[0]

    def fuse(self, aux: Tensor) -> Tensor:
        """The step-0 state [T, H] of captured states [T, 3H]."""
        return self.fc(aux)

    def step(self, tokens: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next state [T, H], before the norm: it feeds back as the following step's `state`."""
        return self.midlayer(
            functional.embedding(tokens, self.embedding), state, self.rope(positions), attend
        )

    def logits(self, state: Tensor) -> Tensor:
        """[T, D] over the draft vocabulary."""
        return self.lm_head(self.norm(state))
