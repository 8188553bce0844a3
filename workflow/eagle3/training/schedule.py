"""What changes from update to update: the learning rate and the number of steps."""

import math


def learning_rate(
    update: int, total: int, peak: float, warmup_ratio: float, schedule: str = "cosine"
) -> float:
    """Linear rise over the first share of updates, then 'cosine' or 'linear' to zero, 'constant',
    or 'wsd': constant, then linear to zero over the last fifth. A function of `update` (from 0)
    alone, so a resumed run cannot warm up again."""
    warmup = max(1, round(total * warmup_ratio))
    if update < warmup:
        return peak * (update + 1) / warmup
    done = (update - warmup) / max(1, total - warmup)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "linear":
        return peak * (1 - done)
    return peak if schedule == "constant" else peak * min(1.0, (1 - done) / 0.2)


def steps_at(update: int, total: int, steps: int, ramp_share: float) -> int:
    """Steps of training-time test at an update: from 1 to `steps` over the first share of updates.

    >>> [steps_at(u, 8, 4, 0.5) for u in range(6)]
    [1, 2, 3, 4, 4, 4]
    """
    ramp = total * ramp_share
    return steps if ramp < 1 else min(steps, math.ceil(steps * (update + 1) / ramp))
