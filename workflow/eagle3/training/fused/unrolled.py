"""The fast training path: training-time test with a backward pass written out by hand.

The numbers are those of `ttt.loss`. What makes it fast:
- only active rows go through the steps (see layout);
- the embedding half of q, k and v depends on the token alone: it is computed once per token and
  shifted by one row per
  step, forward and backward;
- the gradient of each weight is one product over the rows of all steps;
- logits become their own gradient in place; teacher logits exist once per supervised token, not
  once per step;
- attention: a fused kernel for the step-0 keys, a few dot products for the later ones (see
  fused_attention).

All weights enter as one autograd function, so DDP, FSDP2, accumulation and clipping work as they do
for any module."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eagle3.drafter.model import Drafter
from eagle3.drafter.ttt import softcapped
from eagle3.training.fused import elementwise as ew
from eagle3.training.fused.attention import CausalAttention
from eagle3.training.fused.matmul import Product, weight_gradient
from eagle3.training.fused.plan import Layout
from eagle3.training.fused.step_ops import (
    add_diagonal_,
    add_diagonal_backward_,
    loss_and_gradient_,
    silu_product_,
    silu_product_backward_,
)

LAYER = (
    "input_layernorm",
    "hidden_norm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
WEIGHTS = (
    "fc.weight",
    *(f"midlayer.{name}.weight" for name in LAYER),
    "norm.weight",
    "lm_head.weight",
)


@dataclass(frozen=True)
class Recipe:
    """How the steps are computed: compute type, `fp8` products, `attention` kernel ('auto': the
    device's), bound of the target's logits."""

    steps: int
    dtype: torch.dtype
    fp8: bool = False
    attention: str = "auto"
    softcap: float | None = None


def loss(
    drafter: Drafter, layout: Layout, head: Tensor, recipe: Recipe, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [], its share per step [K], hits per step [K]) of a layout on the drafter's device.

    `head` [D, H]: the target's rows of the draft vocabulary. `scale` [K]: weight of one supervised
    position of each step, decay**k / supervised positions. Sums, not means, so that parts of a
    batch add up."""
    named = dict(drafter.named_parameters())
    return _Unrolled.apply(drafter, layout, head, recipe, scale, *(named[name] for name in WEIGHTS))


@torch.no_grad()
def hits(drafter: Drafter, layout: Layout, head: Tensor, recipe: Recipe) -> Tensor:
    """[active rows, K] int8 as `ttt.hits` has them: whether step k drafts what the target's whole
    vocabulary prefers, -1 where it is not supervised. `head` [V, H]. A choice outside the draft
    vocabulary is never hit."""
    choices = torch.cat(
        [(part.to(head.dtype) @ head.T).argmax(-1) for part in layout.last.split(1024)]
    )  # [s]
    place = torch.full((len(head),), -1, device=head.device)
    place[drafter.draft_ids] = torch.arange(len(drafter.draft_ids), device=head.device)
    scale = torch.ones(recipe.steps, device=head.device)
    found = _forward(
        drafter,
        layout,
        head[drafter.draft_ids],
        recipe,
        scale,
        dict(drafter.named_parameters()),
        place[choices],
    ).hits
    return torch.where(layout.teachers >= 0, found, -1).T.to(torch.int8)


class _Saved:
    """What the backward pass needs of the forward pass; stacks are [K, n, …], one row block per
    step."""


class _Unrolled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, drafter, layout, head, recipe, scale, *weights):
        ctx.saved = s = _forward(drafter, layout, head, recipe, scale, dict(zip(WEIGHTS, weights)))
        ctx.mark_non_differentiable(s.hits)
        return s.losses.sum(), s.losses.clone(), s.hits.sum(1)

    @staticmethod
    def backward(ctx, dloss, *_):
        gradients = _backward(ctx.saved, dloss)
        ctx.saved = None
        return None, None, None, None, None, *(gradients[name] for name in WEIGHTS)


@torch.no_grad()
def _forward(
    drafter: Drafter,
    layout: Layout,
    head: Tensor,
    recipe: Recipe,
    scale: Tensor,
    w: dict[str, Tensor],
    best: Tensor | None = None,
) -> _Saved:
    s, dtype = _Saved(), recipe.dtype
    config = drafter.config
    s.drafter, s.layout, s.recipe, s.eps = drafter, layout, recipe, config["rms_norm_eps"]
    s.heads, s.kv_heads, s.width = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    size, q_size, kv_size = config["hidden_size"], s.heads * s.width, s.kv_heads * s.width
    steps, n = recipe.steps, len(layout.rows)
    cast = {name: t.to(dtype) for name, t in w.items()}
    s.norms = {name: cast[f"midlayer.{name}.weight"] for name in LAYER if name.endswith("norm")}
    s.norms["norm"] = cast["norm.weight"]
    qkv = torch.cat([cast[f"midlayer.self_attn.{x}_proj.weight"] for x in "qkv"])  # [q + 2 kv, 2H]
    s.fc = Product(cast["fc.weight"], recipe.fp8)
    s.embed_qkv = Product(qkv[:, :size].contiguous(), recipe.fp8)
    state_qkv = qkv[:, size:].contiguous()
    s.state_qkv = Product(state_qkv, recipe.fp8)
    s.state_q, s.state_kv = (
        Product(state_qkv[:q_size], recipe.fp8),
        Product(state_qkv[q_size:], recipe.fp8),
    )
    s.o = Product(cast["midlayer.self_attn.o_proj.weight"], recipe.fp8)
    s.gate_up = Product(
        torch.cat([cast["midlayer.mlp.gate_proj.weight"], cast["midlayer.mlp.up_proj.weight"]]),
        recipe.fp8,
    )
    s.down = Product(cast["midlayer.mlp.down_proj.weight"], recipe.fp8)
    s.head = Product(cast["lm_head.weight"], recipe.fp8)

    teacher = softcapped(layout.last.to(dtype) @ head.to(dtype).T, recipe.softcap)  # [s, D]
    teacher_lse, teacher_best = ew.log_sum_exp(teacher)
    teacher_best = teacher_best if best is None else best
    cos, sin = drafter.rope(torch.arange(layout.longest[1] + steps, device=layout.rows.device))
    kind = (
        recipe.attention if recipe.attention != "auto" else "flash" if teacher.is_cuda else "plain"
    )
    s.attention = CausalAttention(layout, kind)

    s.embeds = functional.embedding(layout.tokens, drafter.embedding).to(dtype)  # [w, H]
    s.embed_x = torch.empty_like(s.embeds)
    ew.norm_(s.embed_x, s.embeds, s.norms["input_layernorm"], s.eps)
    embedded = s.embed_qkv(s.embed_x)  # [w, q + 2 kv]

    new = teacher.new_empty
    s.state_x, s.attended, s.mlp_x, s.head_x = (
        new(steps, n, c) for c in (size, q_size, size, size)
    )
    s.dqkv = new(steps, n, q_size + 2 * kv_size)  # holds qkv until its gradient takes the place
    s.gates, s.acted, s.logits = (
        new(steps, n, c)
        for c in (s.gate_up.weight.shape[0], s.down.weight.shape[1], s.head.weight.shape[0])
    )
    s.keys, s.values = (new(steps - 1, n, s.kv_heads, s.width) for _ in range(2))
    s.states, s.queries, s.middles, s.outs, s.lses, losses, hits = [], [], [], [], [], [], []

    s.context_state = s.fc(layout.aux.to(dtype))  # [m, H]
    s.context_x = torch.empty_like(s.context_state)
    ew.norm_(s.context_x, s.context_state, s.norms["hidden_norm"], s.eps)
    kv = s.state_kv(s.context_x, add=embedded[layout.context_tokens, q_size:])
    s.context_turn = cos[layout.positions], sin[layout.positions]
    s.first_keys = ew.rotate(kv[:, :kv_size].unflatten(1, (s.kv_heads, s.width)), *s.context_turn)
    s.first_values = kv[:, kv_size:].unflatten(1, (s.kv_heads, s.width))
    s.turns = []
    state = s.context_state[layout.rows]
    positions = layout.positions[layout.rows]
    for k in range(steps):
        s.states.append(state)
        turn = cos[positions + k], sin[positions + k]
        s.turns.append(turn)
        if k == 0:
            torch.index_select(s.context_x, 0, layout.rows, out=s.state_x[0])
            q = s.state_q(s.state_x[0], add=embedded[layout.step_tokens[0], :q_size])
        else:
            ew.norm_(s.state_x[k], state, s.norms["hidden_norm"], s.eps)
            q = embedded[layout.step_tokens[k]]
            q = s.state_qkv(s.state_x[k], add=q, out=q)
            s.keys[k - 1] = ew.rotate(
                q[:, q_size:-kv_size].unflatten(1, (s.kv_heads, s.width)), *turn
            )
            s.values[k - 1] = q[:, -kv_size:].unflatten(1, (s.kv_heads, s.width))
        q = ew.rotate(q[:, :q_size].unflatten(1, (s.heads, s.width)), *turn)
        out, lse = s.attention.forward(q, s.first_keys, s.first_values)
        out = out.contiguous()
        if k:
            lse = add_diagonal_(q, s.keys[:k], s.values[:k], out, lse)
        s.attended[k] = out.flatten(1)
        middle = s.o(s.attended[k], add=state)
        ew.norm_(s.mlp_x[k], middle, s.norms["post_attention_layernorm"], s.eps)
        s.gate_up(s.mlp_x[k], out=s.gates[k])
        silu_product_(s.acted[k], s.gates[k])
        state = s.down(s.acted[k], add=middle)
        ew.norm_(s.head_x[k], state, s.norms["norm"], s.eps)
        s.head(s.head_x[k], out=s.logits[k])
        lost, hit = loss_and_gradient_(
            s.logits[k],
            teacher,
            teacher_lse,
            teacher_best,
            layout.teachers[k],
            scale[k],
        )
        losses.append(lost.sum())
        hits.append(hit)
        s.queries.append(q)
        s.lses.append(lse)
        s.middles.append(middle)
    s.states.append(state)
    s.losses, s.hits = torch.stack(losses), torch.stack(hits)
    return s


@torch.no_grad()
def _backward(s: _Saved, dloss: Tensor) -> dict[str, Tensor]:
    """Gradients of all weights, fp32, by name."""
    layout, eps, steps = s.layout, s.eps, s.recipe.steps
    q_size, kv_size = s.heads * s.width, s.kv_heads * s.width
    gain: dict[str, Tensor] = {}

    def through_norm(name: str, dy: Tensor, x: Tensor, extra: Tensor) -> Tensor:
        dx, dweight = ew.norm_backward(dy, x, s.norms[name], eps, extra)
        gain[name] = gain[name] + dweight if name in gain else dweight
        return dx

    dkeys, dvalues = (
        torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (s.keys, s.values)
    )
    dfirst_keys, dfirst_values = (
        torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for x in (s.first_keys, s.first_values)
    )
    dmiddles = torch.empty_like(s.head_x)
    dstates = torch.empty_like(s.head_x)
    dstate = torch.zeros_like(s.states[0])
    for k in reversed(range(steps)):
        dstates[k] = through_norm(
            "norm", s.head.backward(s.logits[k]) * dloss, s.states[k + 1], dstate
        )
        dstate = dstates[k]
        silu_product_backward_(s.down.backward(dstate), s.gates[k])
        dmiddles[k] = through_norm(
            "post_attention_layernorm", s.gate_up.backward(s.gates[k]), s.middles[k], dstate
        )
        dout = s.o.backward(dmiddles[k]).unflatten(1, (s.heads, s.width))
        q, out = s.queries[k], s.attended[k].unflatten(1, (s.heads, s.width))
        dq, dk, dv = s.attention.backward(dout, q, s.first_keys, s.first_values, out, s.lses[k])
        dfirst_keys += dk
        dfirst_values += dv
        dqkv, turn = s.dqkv[k], s.turns[k]
        if k:
            dq = dq.contiguous()
            add_diagonal_backward_(
                q,
                s.keys[:k],
                s.values[:k],
                out,
                dout,
                s.lses[k],
                dq,
                dkeys[:k],
                dvalues[:k],
                first=k == steps - 1,
            )
            ew.rotate_back_(
                dkeys[k - 1], *turn, dqkv[:, q_size:-kv_size].unflatten(1, (s.kv_heads, s.width))
            )
            dqkv[:, -kv_size:] = dvalues[k - 1].flatten(1)
        ew.rotate_back_(dq, *turn, dqkv[:, :q_size].unflatten(1, (s.heads, s.width)))
        if k:
            dstate = through_norm(
                "hidden_norm", s.state_qkv.backward(dqkv), s.states[k], dmiddles[k]
            )
    dkv = torch.empty(
        (len(layout.positions), 2 * kv_size), dtype=dstate.dtype, device=dstate.device
    )
    ew.rotate_back_(
        dfirst_keys, *s.context_turn, dkv[:, :kv_size].unflatten(1, (s.kv_heads, s.width))
    )
    dkv[:, kv_size:] = dfirst_values.flatten(1)
    dx = s.state_kv.backward(dkv)
    real = layout.sizes["active"]
    dx.index_add_(
        0, layout.rows[:real], s.state_q.backward(s.dqkv[0, :, :q_size].contiguous())[:real]
    )
    residual = torch.zeros_like(dx).index_copy_(0, layout.rows[:real], dmiddles[0, :real])
    dcontext = through_norm("hidden_norm", dx, s.context_state, residual)

    s.dqkv[0, :, q_size:] = 0  # step 0 has its keys and values in dkv, one row per context row
    dembedded = ew.sum_rows(s.dqkv, layout.step_readers)
    dembedded[:, q_size:] += ew.sum_rows(dkv.unsqueeze(0), layout.context_readers.unsqueeze(0))
    through_norm(
        "input_layernorm", s.embed_qkv.backward(dembedded), s.embeds, torch.zeros_like(s.embeds)
    )

    def over_steps(dy: Tensor, x: Tensor) -> Tensor:
        return weight_gradient(dy.flatten(0, 1), x.flatten(0, 1))

    by_embedding = weight_gradient(dembedded, s.embed_x)
    by_state = torch.cat(
        [over_steps(s.dqkv[..., :q_size], s.state_x), weight_gradient(dkv, s.context_x)]
    )
    if steps > 1:
        by_state[q_size:] += over_steps(s.dqkv[1:, :, q_size:], s.state_x[1:])
    q, k, v = torch.cat([by_embedding, by_state], dim=1).split([q_size, kv_size, kv_size])
    gate, up = over_steps(s.gates, s.mlp_x).chunk(2)
    aux = layout.aux.to(dcontext.dtype)
    found = {
        "fc": weight_gradient(dcontext, aux),
        "norm": gain["norm"],
        "lm_head": over_steps(s.logits, s.head_x) * dloss,
        "midlayer.self_attn.q_proj": q,
        "midlayer.self_attn.k_proj": k,
        "midlayer.self_attn.v_proj": v,
        "midlayer.self_attn.o_proj": over_steps(dmiddles, s.attended),
        "midlayer.mlp.gate_proj": gate,
        "midlayer.mlp.up_proj": up,
        "midlayer.mlp.down_proj": over_steps(dstates, s.acted),
        **{f"midlayer.{name}": gain[name] for name in LAYER if name.endswith("norm")},
    }
    return {f"{name}.weight": gradient for name, gradient in found.items()}
