"""Attention of the training-time test in two parts, for the fast path: a fused kernel over the
step-0 keys, and the one diagonal key of each later step merged in by log-sum-exp.

Backward, the fused kernel gets the merged output and the merged log-sum-exp: its probabilities
exp(qk - lse) and its row sums of dout * out are then those of the whole softmax, so dq, dk and dv
of the causal part come out right; the diagonal keys' share is a few products per position."""

import torch
from torch import Tensor

from eagle3.training.fused.plan import Layout

aten = torch.ops.aten


class CausalAttention:
    """Queries of the active rows against the step-0 keys of their own sequence up to their place.

    q [n, heads, d], k and v [m, kv_heads, d]; log-sum-exp is fp32 [heads, n]. Padded rows give
    zeros. `kind`: 'flash' (FlashAttention 2 as PyTorch ships it) or 'plain' (loops over
    sequences, any device)."""

    def __init__(self, layout: Layout, kind: str):
        self.layout, self.kind = layout, kind
        self.active, self.context = layout.sizes["active"], layout.sizes["positions"]

    def _spread(self, x: Tensor) -> Tensor:
        """Rows [n, …] of active positions as query rows: between two supervised turns there are
        gaps."""
        x = x[: self.active]
        if self.layout.span is None:
            return x
        return x.new_zeros((self.layout.sizes["queries"], *x.shape[1:])).index_copy_(
            0, self.layout.span, x
        )

    def _collect(self, x: Tensor, rows: int) -> Tensor:
        """The reverse of `_spread`, with zeros in padded rows."""
        if self.layout.span is not None:
            x = x[self.layout.span]
        return _padded(x, rows)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out [n, heads, d], log-sum-exp [heads, n])."""
        x, k, v = self._spread(q), k[: self.context], v[: self.context]
        out, lse = getattr(self, f"_{self.kind}")(x, k, v)
        return self._collect(out, len(q)), self._collect(lse.T, len(q)).T.contiguous()

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor):
        """(dq [n, …], dk, dv [m, …]) of the causal part, given the output and log-sum-exp of the
        whole softmax."""
        rows, keys = len(q), len(k)
        dout, q, out, lse = (self._spread(x) for x in (dout, q, out, lse.T))
        if self.layout.span is not None or self.active < rows:
            lse = lse.T.contiguous()
        else:
            lse = lse.T
        k, v = k[: self.context], v[: self.context]
        dq, dk, dv = getattr(self, f"_{self.kind}_backward")(
            dout.contiguous(), q, k, v, out.contiguous(), lse
        )
        return self._collect(dq, rows), _padded(dk, keys), _padded(dv, keys)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor):
        borders, longest = (self.layout.query_borders, self.layout.key_borders), self.layout.longest
        out, lse, self.random, self.unused, _ = aten._flash_attention_forward(
            q, k, v, *borders, *longest, 0.0, True, False
        )
        return out, lse

    def _flash_backward(self, dout, q, k, v, out, lse):
        borders, longest = (self.layout.query_borders, self.layout.key_borders), self.layout.longest
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse, *borders, *longest, 0.0, True, self.random, self.unused
        )

    def _plain(self, q: Tensor, k: Tensor, v: Tensor):
        out, lse = torch.empty_like(q), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        for a, b, c, d in self._sequences():
            scores = self._scores(q[a:b], k[c:d])
            lse[:, a:b] = total = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - total.unsqueeze(-1)).to(v.dtype)
            out[a:b] = (weights @ self._wide(v[c:d], q)).transpose(0, 1)
        return out, lse

    def _plain_backward(self, dout, q, k, v, out, lse):
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        for a, b, c, d in self._sequences():
            weights = torch.exp(
                self._scores(q[a:b], k[c:d]) - lse[:, a:b].unsqueeze(-1)
            )  # [heads, queries, keys]
            dy = dout[a:b].transpose(0, 1).float()
            delta = (dy * out[a:b].transpose(0, 1).float()).sum(-1, keepdim=True)
            keys, values = self._wide(k[c:d], q).float(), self._wide(v[c:d], q).float()
            ds = weights * (dy @ values.transpose(1, 2) - delta) * q.shape[-1] ** -0.5
            dq[a:b] = (ds @ keys).transpose(0, 1).to(q.dtype)
            dk[c:d] = (
                (ds.transpose(1, 2) @ q[a:b].transpose(0, 1).float())
                .unflatten(0, (-1, group))
                .sum(1)
                .transpose(0, 1)
            )
            dv[c:d] = (
                (weights.transpose(1, 2) @ dy).unflatten(0, (-1, group)).sum(1).transpose(0, 1)
            )
        return dq, dk, dv

    def _sequences(self):
        queries, keys = self.layout.query_borders.tolist(), self.layout.key_borders.tolist()
        return zip(queries, queries[1:], keys, keys[1:])

    @staticmethod
    def _wide(x: Tensor, q: Tensor) -> Tensor:
        """[heads, keys, d] of [keys, kv_heads, d]."""
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[heads, queries, keys]; the last query sees every key, the one before it all but the
        last, and so on."""
        scores = (q.transpose(0, 1) @ self._wide(k, q).transpose(1, 2)).float() * q.shape[
            -1
        ] ** -0.5
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(
            1 + len(k) - len(q)
        )
        return scores.masked_fill(hidden, float("-inf"))


def _padded(x: Tensor, rows: int) -> Tensor:
    """x with zero rows up to `rows`. What the kernels leave in rows that belong to no sequence may
    be anything."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros((rows - len(x), *x.shape[1:]))])
