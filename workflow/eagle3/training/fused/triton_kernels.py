"""Triton kernels of the fast training path; only imported where there is a GPU. The functions in
`step_ops` choose between these and plain PyTorch, and hold the contracts."""

import triton
import triton.language as tl


@triton.jit
def soft_cross_entropy(
    student,
    teacher,
    teacher_lse,
    teacher_best,
    teachers,
    scale,
    losses,
    hits,
    width,
    BLOCK: tl.constexpr,
):
    """One program per row of `student` [n, width]: its loss and hit, and the gradient in place of
    the logits. With p the teacher's and q the student's distribution the loss is -sum p log q, its
    gradient q - p."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(teachers + row).to(tl.int64)
    student += row * width
    columns = tl.arange(0, BLOCK)
    if source < 0:
        for start in range(0, width, BLOCK):
            tl.store(
                student + start + columns,
                tl.zeros([BLOCK], student.dtype.element_ty),
                mask=start + columns < width,
            )
        tl.store(losses + row, 0.0)
        tl.store(hits + row, 0)
    else:
        weight = tl.load(scale)
        lse_t = tl.load(teacher_lse + source)
        teacher += source * width
        # One pass for the student's log-sum-exp, for sum p * logit and for the argmax. The sum of
        # exponentials is kept relative to the largest logit so far, so it cannot overflow.
        top, mass, cross, best = float("-inf"), 0.0, 0.0, 0
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            s = tl.load(student + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            t = tl.load(teacher + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            here, where = tl.max(s, axis=0, return_indices=True)
            best = tl.where(here > top, start + where, best)
            higher = tl.maximum(top, here)
            mass = mass * tl.exp(top - higher) + tl.sum(tl.exp(s - higher), axis=0)
            top = higher
            cross += tl.sum(tl.where(inside, tl.exp(t - lse_t) * s, 0.0), axis=0)
        lse = top + tl.log(mass)
        # -sum p log q = lse - sum p * logit, since sum p is 1
        tl.store(losses + row, weight * (lse - cross))
        tl.store(hits + row, (best == tl.load(teacher_best + source)).to(tl.int32))
        tl.debug_barrier()
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            s = tl.load(student + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            t = tl.load(teacher + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            q, p = tl.exp(s - lse), tl.exp(t - lse_t)
            tl.store(
                student + start + columns,
                (weight * (q - p)).to(student.dtype.element_ty),
                mask=inside,
            )


@triton.jit
def add_diagonal(
    q,
    keys,
    values,
    out,
    lse,
    total,
    n,
    count,
    scale,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    GROUP_P: tl.constexpr,
    D_P: tl.constexpr,
):
    """One program per row and key head: merges `count` diagonal keys into `out` [n, heads, d] and
    lse [heads, n]."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d = tl.arange(0, GROUP_P), tl.arange(0, D_P)
    inside = (g < GROUP)[:, None] & (d < D)[None, :]
    place = row * KV * GROUP * D + (head * GROUP + g)[:, None] * D + d[None, :]
    heads = (head * GROUP + g) * n.to(tl.int64) + row
    x = tl.load(q + place, mask=inside, other=0.0).to(tl.float32) * scale
    sums = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    top = tl.load(lse + heads, mask=g < GROUP, other=0.0)
    mass = tl.full([GROUP_P], 1.0, tl.float32)
    for j in range(0, count):
        key = ((j * n.to(tl.int64) + row) * KV + head) * D + d
        k = tl.load(keys + key, mask=d < D, other=0.0).to(tl.float32)
        v = tl.load(values + key, mask=d < D, other=0.0).to(tl.float32)
        score = tl.sum(x * k[None, :], axis=1)
        higher = tl.maximum(top, score)
        old, new = tl.exp(top - higher), tl.exp(score - higher)
        mass = mass * old + new
        sums = sums * old[:, None] + new[:, None] * v[None, :]
        top = higher
    tl.store(out + place, (sums / mass[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(total + heads, top + tl.log(mass), mask=g < GROUP)


@triton.jit
def add_diagonal_backward(
    q,
    keys,
    values,
    out,
    dout,
    lse,
    dq,
    dkeys,
    dvalues,
    n,
    count,
    scale,
    FIRST: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    GROUP_P: tl.constexpr,
    D_P: tl.constexpr,
):
    """Adds the diagonal keys' share to dq, and to dkeys and dvalues fp32 (which FIRST writes
    instead)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d = tl.arange(0, GROUP_P), tl.arange(0, D_P)
    inside = (g < GROUP)[:, None] & (d < D)[None, :]
    place = row * KV * GROUP * D + (head * GROUP + g)[:, None] * D + d[None, :]
    x = tl.load(q + place, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    dx = tl.load(dq + place, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(
        lse + (head * GROUP + g) * n.to(tl.int64) + row, mask=g < GROUP, other=float("inf")
    )
    delta = tl.sum(dy * y, axis=1)
    for j in range(0, count):
        key = ((j * n.to(tl.int64) + row) * KV + head) * D + d
        k = tl.load(keys + key, mask=d < D, other=0.0).to(tl.float32)
        v = tl.load(values + key, mask=d < D, other=0.0).to(tl.float32)
        p = tl.exp(tl.sum(x * k[None, :], axis=1) * scale - total)
        ds = p * (tl.sum(dy * v[None, :], axis=1) - delta) * scale
        dx += ds[:, None] * k[None, :]
        dk, dv = tl.sum(ds[:, None] * x, axis=0), tl.sum(p[:, None] * dy, axis=0)
        if not FIRST:
            dk += tl.load(dkeys + key, mask=d < D, other=0.0)
            dv += tl.load(dvalues + key, mask=d < D, other=0.0)
        tl.store(dkeys + key, dk, mask=d < D)
        tl.store(dvalues + key, dv, mask=d < D)
    tl.store(dq + place, dx.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def silu_product(gates, out, width, BLOCK: tl.constexpr):
    """out [n, width] = silu(gate) * up of gates [n, 2 * width]; one program per row and block."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gates + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * width + columns,
        (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def silu_product_backward(dout, gates, width, BLOCK: tl.constexpr):
    """Puts the gradient of gates [n, 2 * width] in its place."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gates + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dout + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(gate)
    dgate, dup = dy * up * sigma * (1 + gate * (1 - sigma)), dy * gate * sigma
    tl.store(gates + row * 2 * width + columns, dgate.to(gates.dtype.element_ty), mask=inside)
    tl.store(gates + row * 2 * width + width + columns, dup.to(gates.dtype.element_ty), mask=inside)


@triton.jit
def quantize(x, out, scales, width, stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """x [n, width] as fp8 with one scale per row; one program per row. The second pass reads from
    the cache."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    top = 1e-12
    for start in range(0, width, BLOCK):
        here = tl.load(
            x + row * stride + start + columns, mask=start + columns < width, other=0.0
        ).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(here), axis=0))
    tl.store(scales + row, top / LARGEST)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        here = tl.load(x + row * stride + start + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(
            out + row * width + start + columns,
            (here * (LARGEST / top)).to(out.dtype.element_ty),
            mask=inside,
        )
