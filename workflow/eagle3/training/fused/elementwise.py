"""Row-wise pieces of the fast training path. On a CPU they run as they stand; on a GPU each is
compiled into one or two kernels, with the number of rows left open, so that no batch makes them
compile again."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

VARIANTS = 64  # compiled forms of one function that may exist at once: one per width it meets


def fused(rows: int = 0) -> Callable:
    """Compiles a function of tensors for the GPU. Dimension `rows` of every tensor of two
    dimensions or more is open."""

    def wrap(function):
        compiled = torch.compile(
            function, dynamic=False
        )  # all but the marked dimension are constants

        @functools.wraps(function)
        def call(*arguments):
            if not arguments[0].is_cuda:
                return function(*arguments)
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, VARIANTS
            )
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.dim() > max(rows, 1):
                    torch._dynamo.mark_dynamic(argument, rows)
            return compiled(*arguments)

        return call

    return wrap


@fused()
def norm_(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Writes the RMS norm of x [n, H], computed in fp32, to `out`."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    out.copy_((weight.float() * y.to(x.dtype).float()).to(x.dtype))


@fused()
def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, extra: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of x plus `extra` [n, H], gradient of the weight [H] in fp32)."""
    x32, dy = x.float(), dy.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    y = x32 * scale
    g = dy * weight.float()
    dx = scale * (g - y * (g * y).mean(-1, keepdim=True))
    return (dx + extra.float()).to(x.dtype), (dy * y).sum(0)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


@fused()
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [n, heads, d] with cos and sin [n, d]; the result is contiguous."""
    return _turn(x.float(), cos.unsqueeze(1).float(), sin.unsqueeze(1).float()).to(x.dtype)


@fused()
def rotate_back_(dx: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """The transpose of `rotate`, written to `out` [n, heads, d]. cos and sin repeat in both halves,
    so a turn by the opposite angle is it."""
    out.copy_(_turn(dx.float(), cos.unsqueeze(1).float(), -sin.unsqueeze(1).float()).to(out.dtype))


@fused(rows=1)
def sum_rows(stacked: Tensor, readers: Tensor) -> Tensor:
    """[w, c]: row i is the sum over k of stacked[k, readers[k, i]], in fp32; nothing where readers
    is -1."""
    total = 0.0
    for k in range(stacked.shape[0]):
        found = stacked[k][readers[k].clamp(min=0)].float()
        total = total + torch.where(readers[k].unsqueeze(-1) >= 0, found, 0.0)
    return total.to(stacked.dtype)


@fused()
def log_sum_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(log-sum-exp fp32 [n], likeliest id [n]) of [n, D]."""
    return torch.logsumexp(logits.float(), -1), logits.argmax(-1)
