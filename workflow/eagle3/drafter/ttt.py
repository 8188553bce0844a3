"""Training-time test: the drafter is unrolled over its own states, as it will be when it serves.

Position t sees (aux_t, embedding of x_{t+1}) and predicts x_{t+2}. At step k everything about
tokens lies k further on: position t reads x_{t+1+k} and predicts x_{t+2+k}; its state is the
drafter's own of step k-1 at t; its RoPE position is t + k. So with a prompt of p tokens position
p-1, which drafts the first token after prefill, is supervised."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.drafter.attention import PackedAttention
from eagle3.drafter.model import Drafter


@dataclass(frozen=True)
class Batch:
    """Sequences end to end: `ids` [T], `mask` [T], `aux` [T, 3H], `last` [T, H], `offsets` [S+1],
    `relative` [T] (position within the sequence), `names` of the records."""

    ids: Tensor
    mask: Tensor
    aux: Tensor
    last: Tensor
    offsets: list[int]
    relative: Tensor
    names: list[str]

    def to(self, device) -> "Batch":
        moved = {
            k: getattr(self, k).to(device, non_blocking=True)
            for k in ("ids", "mask", "aux", "last", "relative")
        }
        return Batch(**moved, offsets=self.offsets, names=self.names)


def collate(rows: list[dict]) -> Batch:
    """Packs rows of a ShardSet."""
    lengths = [len(row["input_ids"]) for row in rows]
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return Batch(
        ids=torch.cat([row["input_ids"] for row in rows]).long(),
        mask=torch.cat([row["loss_mask"] for row in rows]),
        aux=torch.cat([row["aux"] for row in rows]),
        last=torch.cat([row["last"] for row in rows]),
        offsets=offsets,
        relative=torch.cat([torch.arange(n) for n in lengths]),
        names=[row["id"] for row in rows],
    )


def supervised_targets(batch: Batch) -> Tensor:
    """Positions u [n] of the tokens x_u that step 0 can draft: supervised, and at least two from
    the start."""
    return (batch.mask & (batch.relative >= 2)).nonzero().flatten()


def align_for_step(batch: Batch, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """(which of `targets` step k can draft, as a mask [n]; the positions that draft them).

    x_u is drafted at step k from position u - 2 - k, if that lies in the same sequence.
    """
    reachable = batch.relative[targets] >= 2 + step
    return reachable, targets[reachable] - 2 - step


def unroll(drafter: Drafter, batch: Batch, steps: int, attention: Callable = PackedAttention):
    """Yields the drafter's state [T, H] of each step; all positions, supervised or not."""
    attend = attention(batch.offsets)
    state = drafter.fuse(batch.aux.to(drafter.fc.weight.dtype))
    end = len(batch.ids) - 1
    place = torch.arange(len(batch.ids), device=batch.ids.device)
    for step in range(steps):
        # Past the end of a sequence the token is some other one; nothing is supervised there, and
        # the diagonal keys keep it from every other position.
        tokens = batch.ids[(place + 1 + step).clamp(max=end)]
        state = drafter.step(tokens, state, batch.relative + step, attend)
        yield state


@torch.no_grad()
def teacher(batch: Batch, targets: Tensor, head: Tensor, softcap: float | None = None) -> Tensor:
    """The target's logits [n, D] for the tokens at `targets`: x_u is predicted by the state at u -
    1.

    `head` [D, H] holds the rows of the draft vocabulary; `last` is after the final norm.
    """
    return softcapped(batch.last[targets - 1].to(head.dtype) @ head.T, softcap)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits as a model with `final_logit_softcapping` gives them; the order stays. In place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def loss(
    drafter: Drafter, batch: Batch, head: Tensor, steps: int, decay: float
) -> tuple[Tensor, dict[str, list[float]]]:
    """(loss, per-step figures). Soft cross-entropy to the target's distribution over the draft
    vocabulary, a mean over the supervised tokens of each step, weighted by decay**k.

    A batch without a supervised token gives a zero that still hangs on the weights. Source:
    EAGLE-3, section 3.2."""
    targets = supervised_targets(batch)
    counts = torch.stack([align_for_step(batch, targets, step)[0].sum() for step in range(steps)])
    weights = decay ** torch.arange(steps, device=counts.device)
    total, shares, right = scaled_loss(drafter, batch, head, weights / counts.clamp(min=1))
    seen = (counts > 0).nonzero().flatten()
    return total, {
        "loss": (shares / weights)[seen].tolist(),
        "accuracy": (right / counts)[seen].tolist(),
    }


def scaled_loss(
    drafter: Drafter, batch: Batch, head: Tensor, scale: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, its share per step [K], hits per step [K]): sums over supervised tokens, one of step k
    weighing scale[k]."""
    targets = supervised_targets(batch)
    logits = teacher(batch, targets, head, softcap).float()  # [n, D]
    total = sum(p.sum() for p in drafter.parameters()) * 0.0
    shares, right = torch.zeros_like(scale), torch.zeros_like(scale)
    for step, state in enumerate(unroll(drafter, batch, len(scale))):
        reachable, positions = align_for_step(batch, targets, step)
        if not len(positions):
            continue
        drafted = drafter.logits(state[positions]).float()
        probabilities = logits[reachable].softmax(-1)
        part = -(probabilities * drafted.log_softmax(-1)).sum() * scale[step]
        total = total + part
        shares[step], right[step] = (
            part.detach(),
            (drafted.argmax(-1) == logits[reachable].argmax(-1)).sum(),
        )
    return total, shares, right


@torch.no_grad()
def hits(drafter: Drafter, batch: Batch, best: Tensor, steps: int) -> Tensor:
    """[T, steps] int8: whether step k from position t drafts what the target's whole vocabulary
    prefers; -1 where it drafts nothing that is supervised. `best` [T] is the target's choice for
    the token at each position.

    A token outside the draft vocabulary can never be hit, so misses of the vocabulary count as
    misses."""
    targets = supervised_targets(batch)
    found = torch.full((len(batch.ids), steps), -1, dtype=torch.int8, device=batch.ids.device)
    for step, state in enumerate(unroll(drafter, batch, steps)):
        reachable, positions = align_for_step(batch, targets, step)
        drafted = drafter.draft_ids[drafter.logits(state[positions]).argmax(-1)]
        found[positions, step] = (drafted == best[targets[reachable]]).to(torch.int8)
    return found


@torch.no_grad()
def target_choices(batch: Batch, head: Tensor, chunk: int = 1024) -> Tensor:
    """[T] the target's likeliest token at each position, by the state before it; `head` [V, H].
    Position 0 has none."""
    choices = [(part.to(head.dtype) @ head.T).argmax(-1) for part in batch.last.split(chunk)]
    return torch.cat([choices[0].new_zeros(1), torch.cat(choices)[:-1]])
