"""Which rows of a packed batch the fast training path computes, worked out once, on the CPU, while the batch is loaded.

K: steps of training-time test. A position is *active* if any step k supervises it (see ttt). Only active positions are
carried through the steps; the positions before them, in their sequence, are *context*: they give step-0 keys and values
and nothing else. Positions after the last active one, and sequences without any, are dropped.

Example, K = 2, a sequence of 8 tokens, the last 4 supervised (u = 4..7). Step 0 drafts u from u - 2, step 1 from u - 3,
so positions 1..5 are active, 0..5 are context, and tokens 1..7 are read.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

ALIGN = 16  # rows are padded to a multiple of it: fp8 products need that, and bf16 ones like it


@dataclass(frozen=True)
class Layout:
    """w token rows, m context rows, n active rows, s teacher rows; each padded to a multiple of ALIGN. `sizes` has the
    numbers before padding. Padded rows are supervised nowhere and attend to nothing."""

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
    span: Tensor | None  # [n before padding] query row of an active row, None if they are the same rows
    longest: tuple[int, int]  # most queries and most keys of a sequence
    sizes: dict[str, int]
    names: list[str]

    def to(self, device) -> "Layout":
        """A copy on a device; from pinned memory the copies overlap with what the device is doing."""
        moved = {f.name: value.to(device, non_blocking=True) for f in fields(self)
                 if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **moved)


def plan(rows: list[dict[str, Any]], steps: int, pin: bool = False) -> Layout | None:
    """The layout of sequences of a ShardSet; None if nothing in them is supervised."""
    parts = [part for row in rows if (part := _sequence(row, steps)) is not None]
    if not parts:
        return None
    sizes = {name: sum(len(p[name]) for p in parts) for name in ("tokens", "positions", "active", "targets")}
    sizes["queries"] = sum(int(p["active"][-1] - p["active"][0]) + 1 for p in parts)
    w, m, n, s = (-(-sizes[name] // ALIGN) * ALIGN for name in ("tokens", "positions", "active", "targets"))
    first = parts[0]["row"]
    found = {
        "tokens": torch.zeros(w, dtype=torch.int64), "positions": torch.zeros(m, dtype=torch.int64),
        "aux": torch.empty((m, first["aux"].shape[1]), dtype=first["aux"].dtype, pin_memory=pin),
        "last": torch.empty((s, first["last"].shape[1]), dtype=first["last"].dtype, pin_memory=pin),
        "context_tokens": torch.zeros(m, dtype=torch.int64), "rows": torch.zeros(n, dtype=torch.int64),
        "step_tokens": torch.zeros((steps, n), dtype=torch.int64),
        "step_readers": torch.full((steps, w), -1), "context_readers": torch.full((w,), -1),
        "teachers": torch.full((steps, n), -1, dtype=torch.int32)}
    for name, used in (("aux", sizes["positions"]), ("last", sizes["targets"])):
        found[name][used:].zero_()
    span, later = torch.empty(sizes["active"], dtype=torch.int64), torch.arange(steps).unsqueeze(1)  # [K, 1]
    borders = {"query": [0], "key": [0]}
    w0 = m0 = n0 = s0 = 0
    for part in parts:
        row, active, targets = part["row"], part["active"], part["targets"]
        w1, m1, n1, s1 = w0 + len(part["tokens"]), m0 + len(part["positions"]), n0 + len(active), s0 + len(targets)
        length, context = len(part["tokens"]), len(part["positions"])
        found["tokens"][w0:w1] = part["tokens"]
        found["positions"][m0:m1] = part["positions"]
        found["aux"][m0:m1] = row["aux"][:context]
        found["last"][s0:s1] = row["last"][targets - 1] if len(targets) else row["last"][:0]
        found["context_tokens"][m0:m1] = w0 + part["positions"]
        found["context_readers"][w0:w0 + context] = m0 + part["positions"]
        found["rows"][n0:n1] = m0 + active
        place = torch.full((steps + length,), -1)  # active row of position i - steps
        place[steps + active] = torch.arange(n0, n1)
        teacher = torch.full((len(row["input_ids"]) + steps + 2,), -1, dtype=torch.int32)
        teacher[targets] = torch.arange(s0, s1, dtype=torch.int32)
        found["step_tokens"][:, n0:n1] = w0 + (active + later).clamp(max=length - 1)
        found["step_readers"][:, w0:w1] = place[steps + torch.arange(length) - later]
        found["teachers"][:, n0:n1] = teacher[active + 2 + later]
        span[n0:n1] = borders["query"][-1] + active - active[0]
        borders["query"].append(borders["query"][-1] + int(active[-1] - active[0]) + 1)
        borders["key"].append(m1)
        w0, m0, n0, s0 = w1, m1, n1, s1
    longest = tuple(max(b - a for a, b in zip(x, x[1:])) for x in borders.values())
    layout = Layout(
        **found, counts=(found["teachers"] >= 0).sum(1).float(), span=None if sizes["queries"] == n0 else span,
        query_borders=torch.tensor(borders["query"], dtype=torch.int32),
        key_borders=torch.tensor(borders["key"], dtype=torch.int32), longest=longest, sizes=sizes,
        names=[part["row"]["id"] for part in parts])
    return _pinned(layout) if pin else layout


def _sequence(row: dict[str, Any], steps: int) -> dict[str, Any] | None:
    """Active and context positions of one sequence."""
    mask = row["loss_mask"].bool()
    length = len(mask)
    targets = mask.nonzero().flatten()
    targets = targets[targets >= 2]
    drafting = targets - 2 - torch.arange(steps).unsqueeze(1)  # [K, targets] position that drafts it at each step
    alive = torch.zeros(length, dtype=torch.bool)
    alive[drafting[drafting >= 0]] = True
    active = alive.nonzero().flatten()
    if not len(active):
        return None
    context = int(active[-1]) + 1
    read = min(context - 1 + steps, length - 1)  # tokens 1..read
    return {"row": row, "active": active, "targets": targets, "positions": torch.arange(context),
            "tokens": row["input_ids"][1:read + 1].long()}


def _pinned(layout: Layout) -> Layout:
    """Small index tensors pinned as well, so that no copy of the batch waits for the device."""
    tensors = {f.name: value.pin_memory() for f in fields(layout)
               if isinstance(value := getattr(layout, f.name), Tensor) and not value.is_pinned()}
    return replace(layout, **tensors)
