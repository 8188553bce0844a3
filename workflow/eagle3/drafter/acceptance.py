"""Accept lengths and accuracies from hits: what a drafter's steps got right, position by
position."""

import torch
from torch import Tensor


def summarize(hits: Tensor, draft_steps: int | None = None) -> dict:
    """Figures of `hits` [n, steps] (1 right, 0 wrong, -1 not supervised).

    `accuracy`: share right per step. `conditional`: share right among positions where all earlier
    steps were right.
    `accept_length`: 1 + sum over k of the product of conditional accuracies up to k, the bonus
    token included (chain of `draft_steps` tokens; default all). `supervised`: positions of step 0.
    """
    steps = hits.shape[1]
    marginal, conditional = [], []
    alive = torch.ones(len(hits), dtype=torch.bool, device=hits.device)
    for step in range(steps):
        valid, right = hits[:, step] >= 0, hits[:, step] == 1
        marginal.append(_share(right, valid))
        conditional.append(_share(right & alive, valid & alive))
        alive = alive & right
    return {
        "accuracy": marginal,
        "conditional": conditional,
        "supervised": int((hits[:, 0] >= 0).sum()),
        "accept_length": accept_length(conditional[: draft_steps or steps]),
    }


def accept_length(conditional: list[float]) -> float:
    """Expected tokens per verify cycle of a chain.

    >>> accept_length([0.5, 0.5])
    1.75
    """
    length, product = 1.0, 1.0
    for accuracy in conditional:
        product *= accuracy
        length += product
    return length


def replay(hits: Tensor, draft_steps: int) -> tuple[int, int]:
    """(tokens, verify cycles) of serving one answer with a chain of `draft_steps`, given its `hits`
    [L, steps].

    Serving visits only the positions where a cycle ends; the average over all positions can differ
    from it. From a position with r right steps in a row a cycle yields r + 1 tokens."""
    places = (hits[:, 0] >= 0).nonzero().flatten().tolist()
    if not places:
        return 0, 0
    position, last, tokens, cycles = places[0], places[-1], 0, 0
    while position <= last:
        run = 0
        while run < draft_steps and hits[position, run] == 1:
            run += 1
        # The answer may end within the cycle; what lies behind its end is not counted.
        step = min(run + 1, last - position + 1)
        tokens, cycles, position = tokens + step, cycles + 1, position + step
    return tokens, cycles


def _share(part: Tensor, whole: Tensor) -> float:
    total = int(whole.sum())
    return int(part.sum()) / total if total else 0.0
