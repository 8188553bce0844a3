"""What the number of bits in which fp8 products are summed does to the gradient that goes through
the drafter's head.

    PYTHONPATH=workflow python benchmarks/fp8_sums.py --drafter data/drafter

Run it in a built project. The gradient of real logits [n, D] times the head [D, H], by row: exact;
in fp8 with exact sums; with sums of 14 bits, as a Hopper GPU keeps them by itself (an addend
smaller than 2**-13 of the largest is dropped, truncation); and with such sums carried over to fp32
every 128 addends. Emulated on the CPU. Printed: the relative error, and that of the mean over the
rows, where errors on the same side add up and others do not."""

import argparse
import json
from pathlib import Path

import torch
from eagle3.drafter import export
from eagle3.hidden_states import shards
from eagle3.target.model import Target
from eagle3.training.fused import plan as layouts
from eagle3.training.fused import unrolled
from eagle3.training.fused.step_ops import quantize

STEPS = 3


def logit_gradients(
    folder: Path, target: Target, states: list[Path], rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradients of the loss by the logits [n, D], head [D, H]) of a trained drafter on some
    training records."""
    drafter = export.load_drafter(folder, target.embedding().float()).float()
    data = shards.ShardSet(states, "train", {}, verify=False)
    layout = layouts.plan([data[i] for i in range(8)], STEPS)
    found = []

    class Watched(unrolled.Product):
        def backward(self, dy):
            if dy.shape[1] == len(drafter.draft_ids) and len(self.weight) == dy.shape[1]:
                found.append(dy.detach().clone())
            return super().backward(dy)

    unrolled.Product, kept = Watched, unrolled.Product
    loss, _, _ = unrolled.loss(
        drafter,
        layout,
        target.head().float()[drafter.draft_ids],
        unrolled.Recipe(STEPS, torch.float32),
        0.8 ** torch.arange(STEPS) / layout.counts,
    )
    loss.backward()
    unrolled.Product = kept
    gradients = found[-1]  # of step 0
    return gradients[gradients.abs().sum(1) > 0][:rows], drafter.lm_head.weight.detach()


def truncated(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    step = torch.exp2(exponent - 13)
    return torch.trunc(x / step) * step


def short_sums(a: torch.Tensor, b: torch.Tensor, promote: int | None = None) -> torch.Tensor:
    """a [n, K] @ b [out, K].T, summed 32 at a time in 14 bits; after every `promote` such blocks
    carried over to fp32."""
    short, total = (torch.zeros(len(a), len(b)) for _ in range(2))
    for block in range(-(-a.shape[1] // 32)):
        part = slice(32 * block, 32 * block + 32)
        products = a[:, None, part] * b[None, :, part]
        largest = torch.maximum(products.abs().amax(-1), short.abs()).clamp(min=1e-30)
        exponent = largest.log2().floor()
        short = truncated(products, exponent.unsqueeze(-1)).sum(-1) + truncated(short, exponent)
        if promote and (block + 1) % promote == 0:
            total, short = total + short, torch.zeros_like(short)
    return total + short


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", type=Path, default=Path("data/drafter"))
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--hidden-states", type=Path, default=Path("data/hidden_states"))
    parser.add_argument("--rows", type=int, default=96)
    options = parser.parse_args()
    states = sorted(path.parent for path in options.hidden_states.glob("*/manifest.json"))
    gradients, head = logit_gradients(options.drafter, Target(options.target), states, options.rows)
    exact = gradients @ head
    (a, a_scale), (b, b_scale) = (
        (x.float(), scale) for x, scale in (quantize(gradients), quantize(head.T.contiguous()))
    )
    found = {}
    for name, product in (
        ("exact sums", a @ b.T),
        ("14 bits", short_sums(a, b)),
        ("14 bits, fp32 every 128", short_sums(a, b, 4)),
    ):
        wrong = product * a_scale * b_scale.T - exact
        found[name] = {
            "error": (wrong.norm() / exact.norm()).item(),
            "error_of_mean": (wrong.mean(0).norm() / exact.mean(0).norm()).item(),
            "to_chance": (wrong.mean(0).norm() * len(wrong) / wrong.norm()).item(),
        }
        print(
            f"{name:26} error {found[name]['error']:.3f}, of the mean over {len(wrong)} rows "
            f"{found[name]['error_of_mean']:.3f}, "
            f"{found[name]['to_chance']:.1f} times chance",
            flush=True,
        )
    print(json.dumps({"D": gradients.shape[1], **found}))


if __name__ == "__main__":
    main()
