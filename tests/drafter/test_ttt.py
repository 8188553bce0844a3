"""Training-time test against a slow, obvious, unpacked implementation. Alone: python -m pytest
tests/drafter/test_ttt.py"""

import math
from dataclasses import replace

import pytest
import torch
import training_parts as training
from eagle3.drafter import ttt
from eagle3.training.fused import plan as layouts
from eagle3.training.fused import unrolled

STEPS, DECAY = 3, 0.8


def rms(x, weight, eps):
    return weight * x / (x.square().mean() + eps).sqrt()


def turned(x, place, theta):
    """RoPE of one head, number by number: pair (i, i + d/2) turns by place * theta**(-2i/d)."""
    half, out = len(x) // 2, []
    angles = [place * theta ** (-2 * i / len(x)) for i in range(half)]
    out += [x[i] * math.cos(a) - x[i + half] * math.sin(a) for i, a in enumerate(angles)]
    out += [x[i + half] * math.cos(a) + x[i] * math.sin(a) for i, a in enumerate(angles)]
    return torch.stack(out)


def reference(w, config, embedding, rows, head):
    """Mean loss per step, position by position: w maps a weight's short name to it. `head` [D,
    H]."""
    eps, heads, kv = (
        config["rms_norm_eps"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    width, theta = config["head_dim"], config["rope_theta"]
    sums, counts = [torch.zeros(()) for _ in range(STEPS)], [0] * STEPS
    for row in rows:
        ids, mask, length = (
            row["input_ids"].tolist(),
            row["loss_mask"].tolist(),
            len(row["input_ids"]),
        )
        states = {t: w["fc"] @ row["aux"][t] for t in range(length)}
        keys, values = [], []
        for step in range(STEPS):
            places = [t for t in range(length) if t + 1 + step < length]
            queries, step_keys, step_values = {}, {}, {}
            for t in places:
                x = torch.cat(
                    [
                        rms(embedding[ids[t + 1 + step]], w["input_layernorm"], eps),
                        rms(states[t], w["hidden_norm"], eps),
                    ]
                )
                split = {n: (w[f"{n}_proj"] @ x).reshape(-1, width) for n in "qkv"}
                queries[t] = [turned(head_q, t + step, theta) for head_q in split["q"]]
                step_keys[t] = [turned(head_k, t + step, theta) for head_k in split["k"]]
                step_values[t] = list(split["v"])
            keys.append(step_keys)
            values.append(step_values)
            after = {}
            for t in places:
                seen = [(0, j) for j in range(t + 1)] + [(later, t) for later in range(1, step + 1)]
                outs = []
                for h in range(heads):
                    group = h // (heads // kv)
                    scores = torch.stack(
                        [queries[t][h] @ keys[k][j][group] / math.sqrt(width) for k, j in seen]
                    )
                    chances = scores.softmax(0)
                    outs.append(sum(c * values[k][j][group] for c, (k, j) in zip(chances, seen)))
                x = states[t] + w["o_proj"] @ torch.cat(outs)
                y = rms(x, w["post_attention_layernorm"], eps)
                gate = w["gate_proj"] @ y
                after[t] = x + w["down_proj"] @ (gate * torch.sigmoid(gate) * (w["up_proj"] @ y))
                target = t + 2 + step
                if target < length and mask[target]:
                    q = (w["lm_head"] @ rms(after[t], w["norm"], eps)).log_softmax(0)
                    p = (head @ row["last"][target - 1]).softmax(0)
                    sums[step] = sums[step] + -(p * q).sum()
                    counts[step] += 1
            states = after
    return [total / max(1, count) for total, count in zip(sums, counts)]


def expected(drafter, head, rows):
    """(loss per step, gradient by full name) of the reference."""
    short = {
        name.removesuffix(".weight").split(".")[-1]: name for name, _ in drafter.named_parameters()
    }
    w = {
        key: dict(drafter.named_parameters())[name].detach().clone().requires_grad_()
        for key, name in short.items()
    }
    losses = reference(w, drafter.config, drafter.embedding, rows, head[drafter.draft_ids])
    sum(DECAY**k * loss for k, loss in enumerate(losses)).backward()
    return [loss.item() for loss in losses], {name: w[key].grad for key, name in short.items()}


def check(drafter, gradients):
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5), name


def test_packed_losses_and_gradients_equal_the_slow_ones():
    drafter, head = training.make_drafter()
    rows = training.rows()
    losses, gradients = expected(drafter, head, rows)
    loss, figures = ttt.loss(drafter, ttt.collate(rows), head[drafter.draft_ids], STEPS, DECAY)
    loss.backward()
    assert figures["loss"] == pytest.approx(losses, rel=1e-5)
    check(drafter, gradients)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_fast_path_equals_the_slow_reference(kv_heads):
    drafter, head = training.make_drafter(num_key_value_heads=kv_heads)
    rows = training.rows()
    losses, gradients = expected(drafter, head, rows)
    layout = layouts.plan(rows, STEPS)
    scale = DECAY ** torch.arange(STEPS) / layout.counts
    recipe = unrolled.Recipe(STEPS, torch.float32)
    loss, shares, _ = unrolled.loss(drafter, layout, head[drafter.draft_ids], recipe, scale)
    loss.backward()
    assert (shares / DECAY ** torch.arange(STEPS)).tolist() == pytest.approx(losses, rel=1e-5)
    check(drafter, gradients)


def test_gradients_follow_what_comes_after_the_loss():
    drafter, head = training.make_drafter()
    layout, recipe = layouts.plan(training.rows(), STEPS), unrolled.Recipe(STEPS, torch.float32)
    found = []
    for factor in (1.0, 3.0):
        drafter.zero_grad()
        (
            factor
            * unrolled.loss(drafter, layout, head[drafter.draft_ids], recipe, torch.ones(STEPS))[0]
        ).backward()
        found.append({name: p.grad.clone() for name, p in drafter.named_parameters()})
    assert all(
        torch.allclose(3 * found[0][name], found[1][name], rtol=1e-4, atol=1e-5)
        for name in found[0]
    )


def test_the_paths_hit_the_same_tokens():
    drafter, head = training.make_drafter()
    rows = training.rows()
    batch = ttt.collate(rows)
    slow = ttt.hits(drafter, batch, ttt.target_choices(batch, head), STEPS)
    fast = unrolled.hits(
        drafter, layouts.plan(rows, STEPS), head, unrolled.Recipe(STEPS, torch.float32)
    )
    some = (slow >= 0).any(1)
    assert (slow == 1).any() and torch.equal(slow[some], fast[(fast >= 0).any(1)])


def test_the_first_token_after_prefill_is_supervised():
    """With a prompt of p tokens position p - 1 drafts x_{p+1}; an unshifted mask would lose it.
    (Catalogue D04.)"""
    batch = ttt.collate([training.make_row("a", [False] * 4 + [True] * 3, 0)])
    _, positions = ttt.align_for_step(batch, ttt.supervised_targets(batch), 0)
    assert positions.tolist() == [2, 3, 4]


def test_packed_sequences_do_not_see_each_other():
    drafter, head = training.make_drafter()
    rows = training.rows()[:2]
    other = [rows[0], training.make_row("other", [True] * 6, 99)]
    states = [next(iter(ttt.unroll(drafter, ttt.collate(pair), 1)))[:9] for pair in (rows, other)]
    # the last position reads the token after the end of its sequence, and nothing there is
    # supervised
    assert torch.equal(states[0][:8], states[1][:8])


def test_nothing_supervised_is_a_zero_that_hangs_on_the_weights():
    """Catalogue E13: neither an error in the backward pass nor a NaN."""
    drafter, head = training.make_drafter()
    empty = training.rows()[3]
    assert layouts.plan([empty], STEPS) is None
    loss, _ = ttt.loss(drafter, ttt.collate([empty]), head[drafter.draft_ids], STEPS, DECAY)
    loss.backward()
    assert loss.item() == 0 and all(p.grad.abs().sum() == 0 for p in drafter.parameters())


def test_active_rows_are_as_the_layout_module_says():
    layout = layouts.plan([training.make_row("a", [False] * 4 + [True] * 4, 0)], 2)
    assert layout.rows[: layout.sizes["active"]].tolist() == [1, 2, 3, 4, 5]
    assert layout.sizes["positions"] == 6 and layout.sizes["tokens"] == 7
    assert replace(layout, names=[]).counts.tolist() == [4, 4]
