"""Operations of the fast training path with a hand-written kernel each: Triton on a GPU, plain
PyTorch elsewhere. Those whose names end in _ change their arguments."""

import torch
from torch import Tensor
from torch.nn import functional

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0


def loss_and_gradient_(
    student: Tensor,
    teacher: Tensor,
    teacher_lse: Tensor,
    teacher_best: Tensor,
    teachers: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """(loss [n] fp32, hit [n]) of logits `student` [n, D], which are overwritten by their gradient.

    `teacher` [s, D] logits with `teacher_lse` and `teacher_best` [s]; `teachers` [n] is each row's
    teacher row, or -1: no loss, no gradient. `scale` [] multiplies loss and gradient. With p the
    teacher's and q the student's distribution the loss of a row is the soft cross-entropy
    -sum p log q. Its gradient with respect to the student's logits is q - p, since sum p is 1."""
    if student.is_cuda:
        return _triton_loss(student, teacher, teacher_lse, teacher_best, teachers, scale)
    losses, hits = (
        student.new_zeros(len(student), dtype=torch.float32),
        torch.zeros(len(student), dtype=torch.int32),
    )
    rows = (teachers >= 0).nonzero().flatten()
    sources = teachers[rows].long()
    best = student[rows].argmax(-1)
    log_q = student[rows].float().log_softmax(-1)
    log_p = teacher[sources].float() - teacher_lse[sources].unsqueeze(-1)
    p, q = log_p.exp(), log_q.exp()
    loss, gradient = -(p * log_q).sum(-1), q - p
    losses[rows], hits[rows] = scale * loss, (best == teacher_best[sources]).int()
    student.zero_()
    student[rows] = (scale * gradient).to(student.dtype)
    return losses, hits


def _triton_loss(student, teacher, teacher_lse, teacher_best, teachers, scale):
    from eagle3.training.fused import triton_kernels

    rows, width = student.shape
    losses = torch.empty(rows, dtype=torch.float32, device=student.device)
    hits = torch.empty(rows, dtype=torch.int32, device=student.device)
    triton_kernels.soft_cross_entropy[(rows,)](
        student,
        teacher,
        teacher_lse,
        teacher_best,
        teachers,
        scale,
        losses,
        hits,
        width,
        BLOCK=min(4096, _power(width)),
        num_warps=8,
    )
    return losses, hits


def add_diagonal_(q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Merges the diagonal `keys` and `values` [j, n, kv_heads, d] into `out` [n, heads, d]; `lse`
    [heads, n] is that of the causal part. Returns the log-sum-exp of the whole softmax."""
    if q.is_cuda:
        from eagle3.training.fused import triton_kernels

        total = torch.empty_like(lse)
        rows, heads, width = q.shape
        triton_kernels.add_diagonal[(rows, keys.shape[2])](
            q,
            keys,
            values,
            out,
            lse,
            total,
            rows,
            len(keys),
            width**-0.5,
            **_shape(q, keys),
            num_warps=1,
        )
        return total
    scores = _diagonal_scores(q, keys)  # [j, n, heads]
    total = torch.logsumexp(torch.cat([lse.T.unsqueeze(0), scores]), 0)  # [n, heads]
    weights = torch.exp(scores - total).unsqueeze(-1)
    merged = out.float() * torch.exp(lse.T - total).unsqueeze(-1) + (
        weights * _per_head(values, q)
    ).sum(0)
    out.copy_(merged)
    return total.T.contiguous()


def add_diagonal_backward_(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dq: Tensor,
    dkeys: Tensor,
    dvalues: Tensor,
    first: bool,
) -> None:
    """Adds the diagonal keys' share to `dq`, and to `dkeys` and `dvalues` (fp32, as keys and
    values), which are written instead if `first`. `out` and `lse` are those of the whole
    softmax."""
    if q.is_cuda:
        from eagle3.training.fused import triton_kernels

        rows, heads, width = q.shape
        triton_kernels.add_diagonal_backward[(rows, keys.shape[2])](
            q,
            keys,
            values,
            out,
            dout,
            lse,
            dq,
            dkeys,
            dvalues,
            rows,
            len(keys),
            width**-0.5,
            FIRST=first,
            **_shape(q, keys),
            num_warps=1,
        )
        return
    weights = torch.exp(_diagonal_scores(q, keys) - lse.T).unsqueeze(-1)  # [j, n, heads, 1]
    dy = dout.float()
    delta = (dy * out.float()).sum(-1, keepdim=True)
    ds = weights * ((dy * _per_head(values, q)).sum(-1, keepdim=True) - delta) * q.shape[-1] ** -0.5
    dq.copy_(dq.float() + (ds * _per_head(keys, q)).sum(0))
    group = q.shape[1] // keys.shape[2]
    for total, part in ((dkeys, ds * q.float()), (dvalues, weights * dy)):
        part = part.unflatten(2, (-1, group)).sum(3)
        total.copy_(part if first else total + part)


def silu_product_(out: Tensor, gates: Tensor) -> None:
    """Writes silu(gate) * up to `out` [n, I]; gates [n, 2I] holds gate and up side by side."""
    if gates.is_cuda:
        from eagle3.training.fused import triton_kernels

        triton_kernels.silu_product[(len(gates), -(-out.shape[1] // 1024))](
            gates, out, out.shape[1], BLOCK=1024
        )
        return
    gate, up = gates.float().chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def silu_product_backward_(dout: Tensor, gates: Tensor) -> None:
    """Puts the gradient of gates [n, 2I] in its place; `dout` [n, I]."""
    if gates.is_cuda:
        from eagle3.training.fused import triton_kernels

        width = dout.shape[1]
        triton_kernels.silu_product_backward[(len(gates), -(-width // 1024))](
            dout, gates, width, BLOCK=1024
        )
        return
    gate, up = gates.float().chunk(2, dim=-1)
    dy, sigma = dout.float(), torch.sigmoid(gate)
    gates.copy_(torch.cat([dy * up * sigma * (1 + gate * (1 - sigma)), dy * gate * sigma], dim=-1))


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(fp8 [n, c], scale [n, 1] fp32) of x [n, c]: one scale per row, x is about fp8 * scale."""
    if x.is_cuda:
        from eagle3.training.fused import triton_kernels

        rows, width = x.shape
        out = torch.empty((rows, width), dtype=FP8, device=x.device)
        scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
        triton_kernels.quantize[(rows,)](
            x,
            out,
            scale,
            width,
            x.stride(0),
            LARGEST=FP8_MAX,
            BLOCK=min(4096, _power(width)),
            num_warps=4,
        )
        return out, scale
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (x / scale).to(FP8), scale


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[1] // x.shape[2], 2)


def _diagonal_scores(q: Tensor, keys: Tensor) -> Tensor:
    return (q.float() * _per_head(keys, q)).sum(-1) * q.shape[-1] ** -0.5


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _shape(q: Tensor, keys: Tensor) -> dict[str, int]:
    kv_heads, group, width = keys.shape[2], q.shape[1] // keys.shape[2], q.shape[2]
    return {
        "KV": kv_heads,
        "GROUP": group,
        "D": width,
        "GROUP_P": _power(group),
        "D_P": _power(width),
    }
