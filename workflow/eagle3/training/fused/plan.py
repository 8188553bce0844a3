"""Which rows of a packed batch the fast training path computes, worked out once, on the CPU, while
the batch is loaded.

K: steps of training-time test. A position is *active* if any step k supervises it (see ttt). Only
active positions are carried through the steps; the positions before them, in their sequence, are
*context*: they give step-0 keys and values and nothing else. Positions after the last active one,
and sequences without any, are dropped.

Example, K = 2, a sequence of 8 tokens, the last 4 supervised (u = 4..7). Step 0 drafts u from u -
2, step 1 from u - 3, so positions 1..5 are active, 0..5 are context, and tokens 1..7 are read."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ALIGN = 16  # rows are padded to a multiple of it: fp8 products need that, and bf16 ones like it


@dataclass(frozen=True)
class Layout:
    """w token rows, m context rows, n active rows, s teacher rows; each padded to a multiple of
    ALIGN. `sizes` has the numbers before padding. Padded rows are supervised nowhere and attend to
    nothing."""

    tokens: Tensor  # [w] token ids
    aux: Tensor  # [m, 3H] captured states
    last: Tensor  # [s, H] final states that predict the supervised tokens
    positions: Tensor  # [m] place in the sequence
    context_tokens: Tensor  # [m] token row that a context row reads at step 0
    rows: Tensor  # [n] context row of an active row
    step_tokens: Tensor  # [K, n] token row that an active row reads at step k
    step_readers: Tensor  # [K, w] the reverse: active row that reads a token row at step k, or -1
    context_readers: Tensor  # [w] context row that reads a token row at step 0, or -1
    teachers: Tensor  # [K, n] teacher row, or -1 where step k is not supervised
    counts: Tensor  # [K] supervised positions of each step
    query_borders: Tensor  # [S+1] int32: queries of each sequence lie between two borders
    key_borders: Tensor  # [S+1] int32: context rows likewise
    span: (
        Tensor | None
    )  # [n before padding] query row of an active row, None if they are the same rows
    longest: tuple[int, int]  # most queries and most keys of a sequence
    sizes: dict[str, int]
    names: list[str]

    def to(self, device) -> "Layout":
        """A copy on a device; from pinned memory the copies overlap with what the device is
        doing."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def plan(rows: list[dict[str, Any]], steps: int, pin: bool = False) -> Layout | None:
    """The layout of sequences of a ShardSet; None if nothing in them is supervised.

    It works on all tokens of the batch at once, a few dozen operations however many sequences there
    are: Python code here holds back the thread that launches the device's kernels."""
    if not any(row["loss_mask"][2:].any() for row in rows):
        return None
    batch = _Batch(rows, steps)
    sequence, position, active = batch.sequence, batch.position, batch.active
    later = torch.arange(steps).unsqueeze(1)  # [K, 1]
    tokens, context, targets = (
        kept.nonzero().flatten() for kept in (batch.is_token, batch.is_context, batch.is_target)
    )
    sizes = {
        "tokens": len(tokens),
        "positions": len(context),
        "active": len(active),
        "targets": len(targets),
    }
    w, m, n, s = (-(-size // ALIGN) * ALIGN for size in sizes.values())
    token_row, context_row, target_row = (
        _numbered(kept) for kept in (batch.is_token, batch.is_context, batch.is_target)
    )
    active_row = _numbered(batch.is_active)

    # At step k an active row reads the token k + 1 places on, or the last one that its sequence
    # has.
    read = torch.minimum(active + 1 + later, batch.last_token[sequence[active]])
    reader = tokens - 1 - later
    drafted = active + 2 + later
    exists = position[active] + 2 + later < batch.lengths[sequence[active]]
    query_borders, span = _queries(active, sequence, len(rows))
    keys = batch.context_lengths[batch.context_lengths > 0]
    key_borders = functional.pad(keys.cumsum(0), (1, 0))
    sizes["queries"] = int(query_borders[-1])
    aux = torch.empty((m, rows[0]["aux"].shape[1]), dtype=rows[0]["aux"].dtype, pin_memory=pin)
    last = torch.empty((s, rows[0]["last"].shape[1]), dtype=rows[0]["last"].dtype, pin_memory=pin)
    m0 = s0 = 0
    for row, length, mine in zip(rows, batch.context_lengths.tolist(), batch.targets_by_row):
        aux[m0 : m0 + length] = row["aux"][:length]
        torch.index_select(row["last"], 0, mine - 1, out=last[s0 : s0 + len(mine)])
        m0, s0 = m0 + length, s0 + len(mine)
    aux[m0:].zero_()
    last[s0:].zero_()
    layout = Layout(
        tokens=_padded(torch.cat([row["input_ids"] for row in rows])[tokens].long(), w),
        aux=aux,
        last=last,
        positions=_padded(position[context], m),
        context_tokens=_padded(token_row[context + 1], m),
        rows=_padded(context_row[active], n),
        step_tokens=_padded(token_row[read], n),
        step_readers=_padded(
            torch.where(position[tokens] - 1 >= later, active_row[reader.clamp(min=0)], -1), w, -1
        ),
        context_readers=_padded(context_row[tokens - 1], w, -1),
        teachers=_padded(
            torch.where(exists, target_row[drafted.clamp(max=len(position) - 1)], -1), n, -1
        ).int(),
        counts=torch.empty(0),
        query_borders=query_borders.int(),
        key_borders=key_borders.int(),
        span=None if sizes["queries"] == len(active) else span,
        longest=(int(query_borders.diff().max()), int(keys.max())),
        sizes=sizes,
        names=[row["id"] for row, length in zip(rows, batch.context_lengths.tolist()) if length],
    )
    layout = replace(layout, counts=(layout.teachers >= 0).sum(1).float())
    return _pinned(layout) if pin else layout


class _Batch:
    """What the N tokens of all sequences are: [N] flags, and where in the batch each sequence's
    tokens lie."""

    def __init__(self, rows: list[dict[str, Any]], steps: int):
        self.lengths = torch.tensor([len(row["loss_mask"]) for row in rows])  # [sequences]
        total = int(self.lengths.sum())
        starts = self.lengths.cumsum(0) - self.lengths
        self.sequence = torch.repeat_interleave(self.lengths, output_size=total)
        self.position = torch.arange(total) - starts[self.sequence]
        supervised = torch.cat([row["loss_mask"].bool() for row in rows])
        self.is_target = supervised & (self.position >= 2)
        targets = self.is_target.nonzero().flatten()
        self.is_active = torch.zeros(total, dtype=torch.bool)
        for k in range(steps):  # step k drafts target u from u - 2 - k
            self.is_active[(targets - 2 - k)[self.position[targets] >= 2 + k]] = True
        self.active = self.is_active.nonzero().flatten()
        # A sequence's context ends with its last active position; it reads `steps` tokens more, as
        # far as there are any.
        self.context_lengths = torch.zeros_like(self.lengths)
        self.context_lengths.scatter_reduce_(
            0, self.sequence[self.active], self.position[self.active] + 1, "amax"
        )
        self.is_context = self.position < self.context_lengths[self.sequence]
        last_token = torch.minimum(self.context_lengths - 1 + steps, self.lengths - 1)
        self.last_token = starts + last_token
        self.is_token = (
            (self.position >= 1)
            & (self.position <= last_token[self.sequence])
            & (self.context_lengths[self.sequence] > 0)
        )
        counts = torch.bincount(self.sequence[targets], minlength=len(rows))
        self.targets_by_row = self.position[targets].split(counts.tolist())


def _numbered(kept: Tensor) -> Tensor:
    """[N] number of a token among those that are kept, else -1."""
    return torch.where(kept, kept.cumsum(0) - 1, -1)


def _padded(values: Tensor, size: int, filler: int = 0) -> Tensor:
    """`values` [.., n] as [.., size]."""
    return functional.pad(values, (0, size - values.shape[-1]), value=filler)


def _queries(active: Tensor, sequence: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(borders [S+1] of the query rows of sequences that have any, query row [n] of an active
    token).

    A sequence's queries are the positions from its first active one to its last.
    """
    first, found = torch.full((count,), torch.iinfo(torch.int64).max), torch.full((count,), -1)
    first.scatter_reduce_(0, sequence[active], active, "amin")
    found.scatter_reduce_(0, sequence[active], active, "amax")
    lengths = torch.where(found >= 0, found - first + 1, 0)
    starts = lengths.cumsum(0) - lengths
    return functional.pad(lengths[lengths > 0].cumsum(0), (1, 0)), starts[
        sequence[active]
    ] + active - first[sequence[active]]


def _pinned(layout: Layout) -> Layout:
    """Small index tensors pinned as well, so that no copy of the batch waits for the device."""
    tensors = {
        f.name: value.pin_memory()
        for f in fields(layout)
        if isinstance(value := getattr(layout, f.name), Tensor) and not value.is_pinned()
    }
    return replace(layout, **tensors)
