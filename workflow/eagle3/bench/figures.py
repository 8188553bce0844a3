"""Figures of a bench from its raw rows: pooled, with intervals. The same for every engine; nothing
here runs a model.

An arm is one way of serving ("baseline" or "speculative") under one setting. Figures are sums over
sums, never averages of averages: a mean of per-request accept lengths gives short answers the
weight of long ones."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy

RESAMPLES = 2000
LEVEL = 0.95
# Fewer prompts than this vary too little among themselves to show how far off a speed-up may be:
# one prompt resampled is always itself.
LEAST_PROMPTS = 4


@dataclass
class Served:
    """One answer of one repeat.

    `ids` with the stop token, if one came; `seconds` from sending to the end; `first` seconds to
    the first token (None if the answer was not streamed); `cycles` verify cycles (0 without
    speculation); `accepted[n]`: cycles that accepted n drafts (empty if the server does not log);
    `cached` prompt tokens found in the prefix cache; `error`: why there is no answer."""

    dataset: str
    id: str
    repeat: int = 0
    ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    first: float | None = None
    cycles: int = 0
    accepted: list[int] = field(default_factory=list)
    cached: int = 0
    error: str = ""


@dataclass
class Arm:
    """`rows` of all repeats and the wall time of each repeat; `streamed`: rows of separate runs
    that were timed token by token."""

    rows: list[Served] = field(default_factory=list)
    walls: dict[int, float] = field(default_factory=dict)
    streamed: list[Served] = field(default_factory=list)

    @property
    def parallelism(self) -> float:
        """Requests in flight, on average: request seconds per second of wall time."""
        wall = sum(self.walls.values())
        return sum(row.seconds for row in self.rows if not row.error) / wall if wall else 1.0

    def of(self, dataset: str) -> "Arm":
        """The rows of one data set; the walls stay, since all sets share them."""
        return Arm(
            [r for r in self.rows if r.dataset == dataset],
            self.walls,
            [r for r in self.streamed if r.dataset == dataset],
        )


@dataclass
class Simulated:
    """What the drafter would do on the very answers that were served. `average`: one plus the sum
    of products of conditional accuracies, over all positions; `tokens` and `cycles` of walking the
    answers as a server does;
    `conditional` accuracy of each step."""

    average: float
    tokens: int
    cycles: int
    conditional: list[float]


def figures(
    baseline: Arm,
    speculative: Arm,
    steps: int,
    simulated: Simulated | None,
    name: str | None = None,
) -> dict[str, Any]:
    """The figures of one cell, of all its rows or of data set `name`. `simulated` belongs to the
    same rows."""
    scale = {"baseline": baseline.parallelism, "speculative": speculative.parallelism}
    arms = {"baseline": baseline, "speculative": speculative}
    if name is not None:
        arms = {arm: rows.of(name) for arm, rows in arms.items()}
    rates = {arm: _rate(rows.rows) * scale[arm] for arm, rows in arms.items()}
    speed_up = rates["speculative"] / rates["baseline"] if rates["baseline"] else 0.0
    low, high = interval(arms["baseline"].rows, arms["speculative"].rows) or (None, None)
    length = accept_lengths(arms["speculative"].rows, simulated)
    times = step_times(arms["baseline"], arms["speculative"])
    length["break_even"] = (
        times["verify_cycle"] / times["decode_step"] if times["decode_step"] else None
    )
    good = [row for row in arms["speculative"].rows if not row.error]
    return {
        "prompts": len({row.id for row in good}),
        "tokens": {arm: sum(len(r.ids) for r in rows.rows) for arm, rows in arms.items()},
        "cached_tokens": {arm: sum(r.cached for r in rows.rows) for arm, rows in arms.items()},
        "errors": {arm: sum(bool(r.error) for r in rows.rows) for arm, rows in arms.items()},
        "verify_cycles": sum(r.cycles for r in good),
        "tokens_per_second": rates,
        "speed_up": speed_up,
        "speed_up_low": None if low is None else speed_up * low,
        "speed_up_high": None if high is None else speed_up * high,
        "accept_length": length,
        "acceptance": acceptance(good, steps),
        "conditional": {f"step_{k}": a for k, a in enumerate(simulated.conditional)}
        if simulated
        else None,
        "seconds": times,
        "first_token": {
            arm: spread([r.first for r in rows.streamed if r.first is not None])
            for arm, rows in arms.items()
        },
        "inter_token": {
            arm: spread([t for r in rows.streamed if (t := token_time(r)) is not None])
            for arm, rows in arms.items()
        },
        "outputs": compare_outputs(arms["baseline"].rows, arms["speculative"].rows),
    }


def _rate(rows: list[Served]) -> float:
    """Tokens per second of a request's time."""
    seconds = sum(row.seconds for row in rows if not row.error)
    return sum(len(row.ids) for row in rows if not row.error) / seconds if seconds else 0.0


def accept_lengths(rows: list[Served], simulated: Simulated | None) -> dict[str, float | None]:
    """`served`: completion tokens / verify cycles, the server's own convention; the prefill's token
    is among them.
    `per_cycle` leaves it out, so that a drafter which is never right has exactly 1 and none has
    over steps + 1.
    `replayed` counts as `served` does."""
    good = [row for row in rows if not row.error]
    tokens, cycles = sum(len(row.ids) for row in good), sum(row.cycles for row in good)
    emitted = sum(len(row.ids) - 1 for row in good if row.ids)  # by verify cycles
    known = [row for row in good if row.accepted]
    accepted = sum(n * count for row in known for n, count in enumerate(row.accepted))
    counted = sum(sum(row.accepted) for row in known)
    if not cycles:
        per_cycle = None
    elif counted == cycles:
        # Some servers count drafts behind a stop token, and cycles begun after it: neither may
        # raise or lower what was emitted.
        per_cycle = min(1 + accepted / cycles, max(1.0, emitted / cycles))
    else:
        per_cycle = emitted / cycles
    return {
        "served": tokens / cycles if cycles else None,
        "per_cycle": per_cycle,
        "simulated": simulated.average if simulated else None,
        "replayed": simulated.tokens / simulated.cycles if simulated and simulated.cycles else None,
    }


def acceptance(rows: list[Served], steps: int) -> dict[str, float] | None:
    """Share of verify cycles that accept the draft at each position, by position; None if the
    server gives no histogram."""
    cycles = sum(sum(row.accepted) for row in rows)
    if not cycles:
        return None
    return {
        f"position_{k}": sum(sum(row.accepted[k + 1 :]) for row in rows) / cycles
        for k in range(steps)
    }


def step_times(baseline: Arm, speculative: Arm) -> dict[str, float | None]:
    """Seconds of a decode step and of a verify cycle, prefill left out, from the rows that know
    when it ended."""
    plain = [r for r in baseline.streamed if not r.error and r.first is not None and len(r.ids) > 1]
    drafted = [r for r in speculative.streamed if not r.error and r.first is not None and r.cycles]
    return {
        "decode_step": sum(r.seconds - r.first for r in plain) / sum(len(r.ids) - 1 for r in plain)
        if plain
        else None,
        "verify_cycle": sum(r.seconds - r.first for r in drafted) / sum(r.cycles for r in drafted)
        if drafted
        else None,
    }


def token_time(row: Served) -> float | None:
    """Seconds per token after the first, as the reader of a stream sees them on average."""
    if row.error or row.first is None or len(row.ids) < 2:
        return None
    return (row.seconds - row.first) / (len(row.ids) - 1)


def spread(values: list[float]) -> dict[str, float] | None:
    """Median and 95th percentile, or None without values."""
    if not values:
        return None
    return {"median": float(numpy.median(values)), "p95": float(numpy.percentile(values, 95))}


def interval(
    baseline: list[Served], speculative: list[Served], resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """95 % interval of the speed-up, relative to it: (0.97, 1.02) means from 3 % under to 2 % over.
    None for fewer than LEAST_PROMPTS prompts.

    Bootstrap over prompts and repeats at once; a prompt keeps both arms' times together, so that
    long answers cancel. Only answers that both arms gave count. Source: two-way bootstrap of a
    ratio estimator."""
    times = [
        {
            (row.id, row.repeat): (len(row.ids), row.seconds)
            for row in rows
            if not row.error and row.seconds > 0
        }
        for rows in (baseline, speculative)
    ]
    both = times[0].keys() & times[1].keys()
    prompts, repeats = sorted({p for p, _ in both}), sorted({r for _, r in both})
    if len(prompts) < LEAST_PROMPTS:
        return None
    sums = numpy.zeros((4, len(repeats), len(prompts)))
    for prompt, repeat in both:
        place = repeats.index(repeat), prompts.index(prompt)
        for arm, known in enumerate(times):
            sums[2 * arm, *place], sums[2 * arm + 1, *place] = known[prompt, repeat]
    generator = numpy.random.default_rng(0)

    def draws(count: int):  # [resamples, count]: how often each is drawn
        return generator.multinomial(count, numpy.full(count, 1 / count), size=resamples)

    drawn = numpy.einsum("br,arp,bp->ab", draws(len(repeats)), sums, draws(len(prompts)))
    drawn = drawn[:, (drawn[1] > 0) & (drawn[3] > 0) & (drawn[0] > 0)]
    ratios = numpy.log(drawn[2] / drawn[3]) - numpy.log(drawn[0] / drawn[1])
    total = sums.sum((1, 2))
    centre = math.log(total[2] / total[3]) - math.log(total[0] / total[1])
    tail = (1 - LEVEL) / 2
    low, high = numpy.quantile(ratios - centre, [tail, 1 - tail])
    return float(math.exp(low)), float(math.exp(high))


def compare_outputs(baseline: list[Served], speculative: list[Served]) -> dict[str, Any]:
    """How greedy answers of the arms agree, prompt by prompt in their first common repeat, and how
    each arm agrees with itself: where an arm's own repeats differ, so do its numerics with the
    batch, and the arms may differ for that reason."""
    answers = [_by_prompt(rows) for rows in (baseline, speculative)]
    both = sorted(answers[0].keys() & answers[1].keys())
    pairs = [(answers[0][p][0], answers[1][p][0]) for p in both]
    prefixes = [common_prefix(a, b) / max(len(a), len(b), 1) for a, b in pairs]
    return {
        "compared": len(pairs),
        "equal": sum(a == b for a, b in pairs),
        "common_prefix_share": sum(prefixes) / len(prefixes) if prefixes else None,
        "equal_to_itself": {
            arm: sum(all(a == found[0] for a in found) for found in known.values())
            if any(len(found) > 1 for found in known.values())
            else None
            for arm, known in zip(("baseline", "speculative"), answers)
        },
    }


def _by_prompt(rows: list[Served]) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for row in sorted((r for r in rows if not r.error), key=lambda r: r.repeat):
        found.setdefault(row.id, []).append(row.ids)
    return found


def common_prefix(a: list[int], b: list[int]) -> int:
    """
    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
