"""Both arms of a bench on SGLang servers: same flags but for speculation, same prompts, empty
cache, repeats turned round.

Servers come from `serve(flags) -> context manager of a URL`; flags are launch_server's without the
dashes in front."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from eagle3.bench import speculation
from eagle3.bench.bench_client import BenchClient
from eagle3.bench.statistics import Measured, Prompt, Variant
from eagle3.core.errors import UserError
from eagle3.core.progress import Progress

Serve = Callable[[dict[str, Any]], AbstractContextManager[str]]


@dataclass(frozen=True)
class Plan:
    """`variants` times `concurrencies` is the matrix. A round starts every server once; every
    second round goes through them backwards, and so does every second repeat within a server
    through the concurrencies and prompts."""

    variants: list[Variant]
    concurrencies: list[int]
    max_new_tokens: int
    repeats: int = 3
    rounds: int = 1
    timeout: float = 3600

    def flags(self, variant: Variant | None, common: dict[str, Any]) -> dict[str, Any]:
        """launch_server flags of a variant, or of the baseline. What SGLang would choose by itself,
        and differently once it speculates, is always given."""
        most = max(self.concurrencies)
        chosen = {
            "max-running-requests": most,
            "cuda-graph-max-bs-decode": most,
            "random-seed": 0,
            **common,
        }
        return chosen | variant.flags() if variant else chosen


def measure(
    serve: Serve, prompts: list[Prompt], plan: Plan, common: dict[str, Any] | None = None
) -> Measured:
    """Runs the whole matrix; `common` flags go to every server.

    Raises UserError if a drafter is none, there are fewer prompts than requests at once, the arms'
    settings differ, a server limits concurrency, or one with speculation counts no verify cycles.
    """
    most = max(plan.concurrencies)
    if len(prompts) < most:
        raise UserError(
            f"bench.concurrency goes to {most}, but there are {len(prompts)} held-out prompts; "
            "raise "
            "bench.max_prompts or records.validation_fraction, or lower concurrency"
        )
    flags = {
        variant: plan.flags(variant, common or {}) for variant in (None, *plan.variants)
    }  # refused before a start
    measured = Measured()
    with Progress(
        "bench", plan.rounds * len(flags) * len(plan.concurrencies) * plan.repeats, "runs"
    ) as bar:
        for number in range(plan.rounds):
            for variant in list(flags)[:: -1 if number % 2 else 1]:
                with serve(flags[variant]) as url:
                    client = BenchClient(url, plan.timeout)
                    settings = speculation.read_back(client.settings())
                    speculation.check_asked(settings, flags[variant])
                    speculation.check_limits(settings, most)
                    measured.settings[variant.name if variant else None] = settings
                    _compare_settings(measured.settings)
                    _run(measured, variant, client, prompts, plan, number, bar)
    return measured


def _compare_settings(settings: dict[str | None, dict]) -> None:
    baseline = settings.get(None)
    if baseline is None:
        return
    if baseline.get("speculative_algorithm"):
        raise UserError(
            "the baseline server reports speculative_algorithm "
            f"{baseline['speculative_algorithm']!r}; remove "
            "speculative flags from server.flags, the bench adds its own"
        )
    for name, other in settings.items():
        if name is not None:
            speculation.check_settings(baseline, other)


def _run(
    measured: Measured,
    variant: Variant | None,
    client: BenchClient,
    prompts,
    plan: Plan,
    number: int,
    bar,
) -> None:
    for (
        concurrency
    ) in plan.concurrencies:  # warm-up: every batch size is seen once, and none of it is counted
        client.answers(prompts[:concurrency], concurrency, min(16, plan.max_new_tokens))
    for place in range(plan.repeats):
        turn = slice(None, None, -1 if place % 2 else 1)
        for concurrency in plan.concurrencies[turn]:
            arm = measured.arm(variant and variant.name, concurrency)
            repeat = number * plan.repeats + place
            client.flush()
            rows, wall = client.answers(prompts[turn], concurrency, plan.max_new_tokens, repeat)
            _check_counted(rows, variant)
            arm.rows += rows
            arm.walls[repeat] = wall
            bar.add(1, tokens=sum(len(row.ids) for row in rows))
            if place == 0:  # streaming costs time of its own, so it has a run of its own
                client.flush()
                arm.streamed += client.answers(
                    prompts, concurrency, plan.max_new_tokens, repeat, stream=True
                )[0]


def _check_counted(rows: list, variant: Variant | None) -> None:
    good = [row for row in rows if not row.error]
    if not good:
        raise UserError(
            f"all {len(rows)} requests failed: {rows[0].error}; look at the server's log"
        )
    if variant and not any(row.cycles for row in good) and any(len(row.ids) > 1 for row in good):
        raise UserError(
            "the server's meta_info has no spec_verify_ct, so it does not speculate; check that "
            "its command line "
            "has --speculative-algorithm EAGLE3 and that the log says so"
        )
