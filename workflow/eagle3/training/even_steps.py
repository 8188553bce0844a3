"""Steps of `fc` that fit its inputs.

Channels of captured states differ in size by factors of hundreds, and a few tower over all others.
Adam moves every weight by about the learning rate, so a column of `fc` whose channel is a thousand
times larger moves the drafter's state a thousand times further. Here each column moves in inverse
proportion to its channel's size, as if `fc` had been trained on inputs of one size and the sizes
were folded into its weights, which is what the exported ones are."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def factors(rows: Iterable[dict[str, Any]], limit: int = 20_000) -> Tensor:
    """[3H]: for each channel of `aux` the median channel's root mean square over its own, from the
    first `limit` tokens."""
    squares, tokens = 0, 0
    for row in rows:
        aux = row["aux"][1:].double()  # position 0 is an outlier in every model: left out
        squares, tokens = squares + aux.square().sum(0), tokens + len(aux)
        if tokens >= limit:
            break
    size = (squares / max(tokens, 1)).sqrt().float().clamp(min=1e-6)
    return size.median() / size


@contextlib.contextmanager
def of(weight: Tensor, by: Tensor | None) -> Iterator[None]:
    """What the block changes in `weight` [H, 3H] is multiplied column by column with `by` [3H];
    None changes nothing."""
    if by is None:
        yield
        return
    mine = (
        weight.to_local() if hasattr(weight, "to_local") else weight
    )  # FSDP2: whole columns of some rows
    mine = mine.detach()
    before = mine.clone()
    yield
    mine.copy_(torch.lerp(before, mine, by))
