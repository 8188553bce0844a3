"""The EAGLE-3 drafter: one decoder layer that reads the target's states and drafts the tokens after
the next.

T: tokens of a packed batch. H: hidden size. D: draft vocabulary. Layout and names are those that
SGLang loads. Source: EAGLE-3, arXiv 2503.01840."""

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from eagle3.core.errors import UserError
from eagle3.drafter import rope

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
    # Whatever the target's is: SGLang's Llama MLP has no other.
    "hidden_act": "silu",
}
COPIED = (
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
)
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
MLA_HEAD_DIM = 128  # latent attention has no head size that a Llama layer could take over


def drafter_config(
    target: dict[str, Any],
    architecture: dict[str, int | None],
    draft_vocab_size: int,
    layer_ids: list[int],
    dtype: str,
) -> dict[str, Any]:
    """config.json of a drafter for a target's text configuration.

    Context length and the norms' epsilon are the target's, RoPE is (see `rope`); heads are the
    target's unless `architecture` says otherwise. RoPE is written in the old and the new form,
    because readers of either fall back to a base of 10000 in silence. Raises UserError naming a
    field that the target lacks."""
    epsilon = next((target[key] for key in EPSILONS if target.get(key) is not None), None)
    wanted = [key for key in COPIED if not key.endswith("token_id")]
    wanted += [
        key for key in ("num_attention_heads", "intermediate_size") if architecture.get(key) is None
    ]
    missing = [key for key in wanted if target.get(key) is None]
    missing += ["rms_norm_eps"] if epsilon is None else []
    if missing:
        raise UserError(f"the target's config.json lacks {', '.join(missing)}")
    heads, kv_heads, head_dim = _heads(target, architecture)
    parameters = rope.rope_parameters(target, head_dim)
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
    return {
        **OWN,
        **{key: target[key] for key in COPIED if key in target},
        "rms_norm_eps": epsilon,
        "intermediate_size": architecture.get("intermediate_size") or target["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "draft_vocab_size": draft_vocab_size,
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if parameters["rope_type"] == "default" else scaling,
        "torch_dtype": dtype,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layer_ids,
        },
    }


def _heads(target: dict[str, Any], architecture: dict[str, int | None]) -> tuple[int, int, int]:
    """(query heads, key and value heads, head size). Raises UserError if they do not divide."""
    size, latent = target["hidden_size"], bool(target.get("kv_lora_rank"))
    own = target.get("num_attention_heads")
    if latent:
        head_dim = architecture.get("head_dim") or MLA_HEAD_DIM
        heads = architecture.get("num_attention_heads") or max(1, size // head_dim)
        kv_heads = architecture.get("num_key_value_heads") or math.gcd(heads, 8)
    else:
        heads = architecture.get("num_attention_heads") or own
        head_dim = architecture.get("head_dim") or target.get("head_dim") or size // (own or heads)
        kv_heads = architecture.get("num_key_value_heads") or math.gcd(
            heads, target.get("num_key_value_heads") or heads
        )
    if heads % kv_heads or head_dim % 2:
        raise UserError(
            f"a drafter with {heads} query heads, {kv_heads} key and value heads of size "
            f"{head_dim} cannot be built; set num_attention_heads to a multiple of "
            "num_key_value_heads and head_dim to an even number in train.architecture"
        )
    return heads, kv_heads, head_dim


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
        self.rotary = rope.rotary(config)

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
