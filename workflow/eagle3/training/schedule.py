"""What changes from update to update: the learning rate."""

import math


def learning_rate(
    update: int, total: int, peak: float, warmup_ratio: float, schedule: str = "cosine"
) -> float:
    """Linear rise over the first share of updates, then 'cosine' to zero, 'constant',
    or 'wsd': constant, then linear to zero over the last fifth. A function of `update` (from 0)
    alone, so a resumed run cannot warm up again."""
    warmup = max(1, round(total * warmup_ratio))
    if update < warmup:
        return peak * (update + 1) / warmup
    done = (update - warmup) / max(1, total - warmup)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak if schedule == "constant" else peak * min(1.0, (1 - done) / 0.2)
