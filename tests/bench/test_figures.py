"""Figures from raw rows, with numbers worked out by hand. Alone: python -m pytest
tests/bench/test_figures.py"""

import random

import pytest
from eagle3.bench.figures import (
    LEAST_PROMPTS,
    Arm,
    Served,
    Simulated,
    accept_lengths,
    acceptance,
    common_prefix,
    compare_outputs,
    figures,
    interval,
    spread,
)


def rows_of(counts: list[tuple[int, int]]) -> list[Served]:
    """(tokens, cycles) of each answer."""
    return [
        Served("set", str(i), 0, list(range(tokens)), 1.0, cycles=cycles)
        for i, (tokens, cycles) in enumerate(counts)
    ]


def test_accept_length_is_pooled_and_not_a_mean_of_means():
    """catalogue F01: short requests must not weigh as much as long ones."""
    length = accept_lengths(rows_of([(400, 100), (12, 3), (12, 3), (5, 5)]), None)
    assert length["served"] == pytest.approx(429 / 111)
    assert sum([4, 4, 4, 1]) / 4 != pytest.approx(length["served"], abs=0.3)


def test_the_bonus_token_counts_and_a_drafter_that_is_never_right_has_exactly_one():
    """catalogue F02: with the bonus token; 1 <= per_cycle <= steps + 1."""
    never = [Served("set", "a", 0, [1] * 8, 1.0, cycles=7, accepted=[7, 0, 0, 0])]
    assert accept_lengths(never, None)["per_cycle"] == 1
    always = [Served("set", "a", 0, [1] * 9, 1.0, cycles=2, accepted=[0, 0, 0, 2])]
    assert accept_lengths(always, None)["per_cycle"] == 4
    without_histogram = rows_of([(9, 2)])
    assert accept_lengths(without_histogram, None)["per_cycle"] == 4


def test_every_row_counts_and_not_only_the_last():
    """catalogue F10: two conversations of very different acceptance."""
    rows = [
        Served("set", "a", 0, [1] * 41, 1.0, cycles=10, accepted=[0, 0, 0, 10]),
        Served("set", "b", 0, [1] * 11, 1.0, cycles=10, accepted=[10, 0, 0, 0]),
    ]
    assert accept_lengths(rows, None)["served"] == pytest.approx(52 / 20)
    assert acceptance(rows, 3) == {"position_0": 0.5, "position_1": 0.5, "position_2": 0.5}


def test_failed_requests_are_counted_and_left_out():
    rows = [*rows_of([(10, 5)]), Served("set", "broken", error="500: out of memory")]
    made = figures(Arm(rows_of([(10, 0)]), {0: 1.0}), Arm(rows, {0: 1.0}), 3, None)
    assert made["errors"] == {"baseline": 0, "speculative": 1}
    assert made["accept_length"]["served"] == 2 and made["prompts"] == 1


def test_cell_by_hand():
    """Two answers at once: 30 tokens in 2 s against 20 tokens in 2 s; a decode step 0.1 s, a verify
    cycle 0.25 s."""
    base = [Served("x", "1", 0, [1] * 10, 2.0), Served("y", "2", 0, [1] * 10, 2.0)]
    spec = [
        Served("x", "1", 0, [1] * 15, 2.0, cycles=5),
        Served("y", "2", 0, [1] * 15, 2.0, cycles=5),
    ]
    plain = [Served("x", "1", 0, [1] * 11, 1.5, first=0.5)]
    drafted = [Served("x", "1", 0, [1] * 15, 1.5, first=0.5, cycles=4)]
    simulated = Simulated(2.9, 30, 10, [0.9, 0.8, 0.7])
    made = figures(Arm(base, {0: 2.0}, plain), Arm(spec, {0: 2.0}, drafted), 3, simulated)
    assert made["tokens_per_second"] == {"baseline": 10.0, "speculative": 15.0}
    assert made["speed_up"] == pytest.approx(1.5)
    assert made["seconds"] == {
        "decode_step": pytest.approx(0.1),
        "verify_cycle": pytest.approx(0.25),
    }
    assert made["accept_length"]["break_even"] == pytest.approx(2.5)
    assert made["accept_length"]["replayed"] == 3 and made["accept_length"]["simulated"] == 2.9
    assert made["first_token"]["baseline"] == {"median": 0.5, "p95": 0.5}
    assert made["inter_token"]["baseline"]["median"] == pytest.approx(0.1)
    one = figures(Arm(base, {0: 2.0}, plain), Arm(spec, {0: 2.0}, drafted), 3, simulated, "y")
    assert one["prompts"] == 1 and one["tokens"] == {"baseline": 10, "speculative": 15}
    assert one["inter_token"]["baseline"] is None


def noisy_arms(
    speed_up: float, noise: float, prompts: int, seed: int
) -> tuple[list[Served], list[Served]]:
    chooser, arms = random.Random(seed), ([], [])
    for repeat in range(3):
        for prompt in range(prompts):
            tokens = 20 + 10 * (prompt % 7)
            for arm, rate in zip(arms, (100, 100 * speed_up)):
                seconds = tokens / rate * chooser.lognormvariate(0, noise)
                arm.append(Served("set", str(prompt), repeat, [1] * tokens, seconds))
    return arms


def test_interval_is_a_point_without_noise_and_narrows_with_prompts():
    assert interval(*noisy_arms(1.7, 0, 10, 0)) == (pytest.approx(1), pytest.approx(1))
    few, many = (interval(*noisy_arms(1.7, 0.2, n, 1)) for n in (8, 200))
    assert many[1] - many[0] < 0.5 * (few[1] - few[0])


@pytest.mark.parametrize("prompts", [0, 1, LEAST_PROMPTS - 1])
def test_too_few_prompts_have_no_interval(prompts):
    base, spec = noisy_arms(1.7, 0.2, prompts, 0)
    assert interval(base, spec) is None
    made = figures(Arm(base, {0: 1.0}), Arm(spec, {0: 1.0}), 3, None)
    assert made["speed_up_low"] is made["speed_up_high"] is None
    low, high = interval(*noisy_arms(1.7, 0.2, LEAST_PROMPTS, 0))
    assert low < 1 < high


def test_tokens_behind_a_stop_count_nowhere():
    """Two cycles that accepted three drafts each, of which a stop token let four be emitted in
    all, and a cycle begun after the end: 2.0 a cycle, never 4.0, never under 1."""
    cut = Served("s", "1", 0, [1] * 5, 1.0, cycles=2, accepted=[0, 0, 0, 2])
    assert accept_lengths([cut], None)["per_cycle"] == 2
    late = Served("s", "1", 0, [1] * 2, 1.0, cycles=2, accepted=[2, 0, 0, 0])
    assert accept_lengths([late], None)["per_cycle"] == 1


def test_interval_holds_the_truth_about_as_often_as_it_says():
    held = 0
    for seed in range(60):
        base, spec = noisy_arms(1.3, 0.15, 40, seed)
        value = (sum(len(r.ids) for r in spec) / sum(r.seconds for r in spec)) / (
            sum(len(r.ids) for r in base) / sum(r.seconds for r in base)
        )
        low, high = interval(base, spec, resamples=400)
        held += value * low <= 1.3 <= value * high
    assert held >= 50


def test_outputs_are_compared_and_differences_not_hidden():
    base = [
        Served("s", "a", 0, [1, 2, 3]),
        Served("s", "b", 0, [1, 2, 3, 4]),
        Served("s", "b", 1, [1, 9, 9, 9]),
    ]
    spec = [Served("s", "a", 0, [1, 2, 3]), Served("s", "b", 0, [1, 2, 7, 8])]
    assert compare_outputs(base, spec) == {
        "compared": 2,
        "equal": 1,
        "common_prefix_share": 0.75,
        "equal_to_itself": {"baseline": 1, "speculative": None},
    }
    assert common_prefix([], [1]) == 0 and common_prefix([1, 2], [1, 2]) == 2
    assert spread([]) is None
