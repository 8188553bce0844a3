"""Attention of the training-time test over packed sequences, in plain PyTorch: the readable form
and the reference of faster ones."""

import torch
from torch import Tensor


class PackedAttention:
    """Called once per step, in order, with that step's q [T, heads, d], k and v [T, kv_heads, d].

    A query of position t sees the step-0 keys of its own sequence up to t and, of every later step
    up to its own, the one key at t; all in one softmax. `offsets` [S+1] are the borders of the S
    sequences.

    Example, one sequence of 3, step 2, position 1: step-0 keys 0 and 1, step-1 key 1, step-2 key 1.
    """

    def __init__(self, offsets: list[int]):
        self.offsets = offsets
        self.first: tuple[Tensor, Tensor] | None = None
        self.later: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.first is None:
            self.first = (k, v)
        else:
            self.later.append((k, v))
        return torch.cat([self._sequence(q, a, b) for a, b in zip(self.offsets, self.offsets[1:])])

    def _sequence(self, q: Tensor, a: int, b: int) -> Tensor:
        length, kv_heads = b - a, self.first[0].shape[1]
        q = q[a:b].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv, group, L, d]
        q = q * q.shape[-1] ** -0.5
        k, v = (x[a:b].transpose(0, 1).unsqueeze(1) for x in self.first)  # [kv, 1, L, d]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, float("-inf"))  # [kv, group, L, L]
        later = [
            (x[a:b].transpose(0, 1).unsqueeze(1), y[a:b].transpose(0, 1).unsqueeze(1))
            for x, y in self.later
        ]
        diagonals = [(q * x).sum(-1, keepdim=True) for x, _ in later]  # [kv, group, L, 1] each
        weights = (
            torch.cat([scores, *diagonals], dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)
        )
        out = weights[..., :length] @ v
        for place, (_, y) in enumerate(later):
            out = out + weights[..., length + place, None] * y
        return out.permute(2, 0, 1, 3).flatten(1, 2)  # [L, heads, d]
