"""What both engines hand to the report: variants of speculation, their rows, and what the drafter
must do on them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.bench import replay as simulation
from eagle3.bench import speculation
from eagle3.bench.figures import Arm, Served, Simulated, figures, spread
from eagle3.bench.replay import Answered

Prompt = dict[str, Any]  # {"dataset", "id", "prompt_ids"}


@dataclass(frozen=True)
class Variant:
    """A drafter served in one way: `steps` drafted tokens deep, `topk` wide, `draft_tokens`
    verified at once."""

    name: str
    drafter: Path
    steps: int
    topk: int = 1
    draft_tokens: int = 0

    def flags(self) -> dict[str, Any]:
        return speculation.flags(
            self.drafter, self.steps, self.topk, self.draft_tokens or self.steps + 1
        )


@dataclass
class Measured:
    """`arms[variant's name, or None for the baseline, concurrency]`; `settings` read back from the
    servers, by name."""

    arms: dict[tuple[str | None, int], Arm] = field(default_factory=dict)
    settings: dict[str | None, dict[str, Any]] = field(default_factory=dict)

    def arm(self, name: str | None, concurrency: int) -> Arm:
        return self.arms.setdefault((name, concurrency), Arm())


Hits = Callable[[list[Answered], int], tuple[list, list[float]]]  # Simulator.hits


def cells(
    measured: Measured,
    variants: list[Variant],
    prompts: list[Prompt],
    hits_of: Callable[[Variant], Hits] | None,
) -> list[dict[str, Any]]:
    """A cell of figures for every variant and concurrency, of all rows and by data set. `hits_of`
    gives what simulates a variant's drafter; None leaves the simulated figures out."""
    made = []
    for variant in variants:
        concurrencies = sorted(c for name, c in measured.arms if name == variant.name)
        arms = {c: (measured.arms[None, c], measured.arms[variant.name, c]) for c in concurrencies}
        replay = (
            Replays(arms, prompts, variant, hits_of(variant))
            if hits_of and variant.topk == 1
            else None
        )
        for concurrency, (baseline, speculative) in arms.items():
            names = sorted({row.dataset for row in speculative.rows})
            made.append(
                {
                    "variant": variant.name,
                    "concurrency": concurrency,
                    "steps": variant.steps,
                    "topk": variant.topk,
                    "draft_tokens": variant.draft_tokens or variant.steps + 1,
                    "all": figures(
                        baseline, speculative, variant.steps, replay and replay.of(speculative.rows)
                    ),
                    "datasets": {
                        name: figures(
                            baseline,
                            speculative,
                            variant.steps,
                            replay and replay.of(speculative.of(name).rows),
                            name,
                        )
                        for name in names
                    },
                    "difference_gaps": replay and spread(replay.gaps),
                }
            )
    return made


class Replays:
    """Hits of every distinct answer of a variant, computed once, whatever repeat and batch size it
    was served in."""

    def __init__(
        self, arms: dict[int, tuple[Arm, Arm]], prompts: list[Prompt], variant: Variant, hits: Hits
    ):
        self.steps = variant.steps
        ids = {prompt["id"]: prompt["prompt_ids"] for prompt in prompts}
        plain = {row.id: row.ids for base, _ in arms.values() for row in base.rows if not row.error}
        wanted: dict[tuple, Answered] = {}
        for row in (row for _, spec in arms.values() for row in spec.rows if not row.error):
            other = plain.get(row.id)
            wanted[_key(row)] = Answered(ids[row.id], row.ids, other if other != row.ids else None)
        found, self.gaps = hits(list(wanted.values()), variant.steps)
        self.known = {key: (answer, hit) for (key, answer), hit in zip(wanted.items(), found)}

    def of(self, rows: list[Served]) -> Simulated | None:
        """For exactly these rows, an answer counted as often as it was served."""
        chosen = [self.known[_key(row)] for row in rows if not row.error]
        if not chosen:
            return None
        return simulation.summary(
            [hit for _, hit in chosen], [answer for answer, _ in chosen], self.steps
        )


def _key(row: Served) -> tuple:
    return row.id, tuple(row.ids)
