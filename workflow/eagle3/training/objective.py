"""The loss of a packed batch as one module, so that DDP and FSDP2 can wrap it."""

from typing import Any

import torch
from torch import Tensor, nn

from eagle3.drafter import ttt
from eagle3.drafter.model import Drafter
from eagle3.training.fused import plan as layouts
from eagle3.training.fused import unrolled


class Objective(nn.Module):
    """`drafter` against the target's output projection `head` [V, H], its logits
    bounded by `softcap`, in the fast or the readable
    implementation."""

    def __init__(self, drafter: Drafter, head: Tensor, params, softcap: float | None = None):
        super().__init__()
        self.drafter, self.readable = drafter, params.path == "readable"
        self.recipe = unrolled.Recipe(
            params.steps,
            getattr(torch, params.dtype),
            params.matmul == "fp8",
            softcap=softcap,
        )
        self.register_buffer("head", head, persistent=False)
        self.register_buffer(
            "draft_head", head[drafter.draft_ids].to(self.recipe.dtype), persistent=False
        )

    def prepare(self, rows: list[dict[str, Any]], pin: bool):
        """(batch for `forward`, its supervised positions per step [steps]); on the CPU, in a
        loader's thread. The batch is None where nothing is supervised."""
        layout = layouts.plan(rows, self.recipe.steps, pin and not self.readable)
        if layout is None:
            return None, torch.zeros(self.recipe.steps)
        return (ttt.collate(rows) if self.readable else layout), layout.counts

    def forward(self, batch, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(loss [], its share per step, hits per step); `scale` [steps] is the weight of one
        supervised position.

        Without a batch the loss is a zero that hangs on the weights: in a group of processes each
        must take part in the exchange of gradients."""
        if batch is None:
            nothing = torch.zeros_like(scale)
            return sum(p.sum() for p in self.drafter.parameters()) * 0.0, nothing, nothing
        if not self.readable:
            return unrolled.loss(self.drafter, batch, self.draft_head, self.recipe, scale)
        with self._autocast(batch.ids.device):
            return ttt.scaled_loss(self.drafter, batch, self.draft_head, scale, self.recipe.softcap)

    @torch.no_grad()
    def hits(self, batch) -> Tensor:
        """[positions, steps] of a validation batch, see ttt.hits."""
        if batch is None:
            return torch.empty((0, self.recipe.steps), dtype=torch.int8)
        if not self.readable:
            return unrolled.hits(self.drafter, batch, self.head, self.recipe)
        with self._autocast(batch.ids.device):
            return ttt.hits(
                self.drafter, batch, ttt.target_choices(batch, self.head), self.recipe.steps
            )

    def _autocast(self, device):
        return torch.autocast(
            device.type, torch.bfloat16, enabled=self.recipe.dtype == torch.bfloat16
        )
