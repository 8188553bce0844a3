"""Matrix products of the fast training path, in the compute type or in fp8 with one scale per row
and output channel."""

import torch
from torch import Tensor

from eagle3.training.fused.step_ops import quantize


class Product:
    """y = x @ weight.T of a weight [out, in], its gradient with respect to x, and
    (`weight_gradient`) to the weight."""

    def __init__(self, weight: Tensor, fp8: bool):
        self.weight, self.fp8 = weight, fp8
        if fp8:
            self.forward8, self.backward8 = quantize(weight), quantize(weight.T.contiguous())

    def __call__(self, x: Tensor, add: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [n, in] -> [n, out]; `add` is added, `out` (which may be `add`) is written to."""
        if self.fp8:
            y = _scaled(x, self.forward8, out if out is not add else None)
            if add is None:
                return y
            return torch.add(y, add, out=y if out is None else out)
        if add is None:
            return (
                torch.mm(x, self.weight.T, out=out)
                if out is not None
                else torch.mm(x, self.weight.T)
            )
        return (
            torch.addmm(add, x, self.weight.T, out=out)
            if out is not None
            else torch.addmm(add, x, self.weight.T)
        )

    def backward(self, dy: Tensor) -> Tensor:
        """[n, out] -> [n, in]. In fp8 with sums in fp32: a Hopper GPU's own fp8 sums have about 14
        bits and drop what is smaller. Of a gradient over the draft vocabulary that is the whole
        tail, on the same side for every token."""
        return (
            _scaled(dy, self.backward8, fast_sums=False) if self.fp8 else torch.mm(dy, self.weight)
        )


def _scaled(
    x: Tensor, weight8: tuple[Tensor, Tensor], out: Tensor | None = None, fast_sums: bool = True
) -> Tensor:
    x8, scale = quantize(x)
    weight, weight_scale = weight8  # [out, in], [out, 1]
    return torch._scaled_mm(
        x8,
        weight.T,
        scale_a=scale,
        scale_b=weight_scale.T,
        out_dtype=x.dtype,
        use_fast_accum=fast_sums,
        out=out,
    )


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy.T @ x in fp32 of dy [n, out] and x [n, in]. All steps lie end to end in n, so that one
    product sums over them in fp32 instead of seven that each round to bf16."""
    if dy.is_cuda and dy.dtype != torch.float32:
        return torch.mm(dy.T, x, out_dtype=torch.float32)
    return torch.mm(dy.T, x).float()
