"""Verdicts and refusals. Alone: python -m pytest tests/bench/test_verdict.py"""

import pytest
from eagle3.bench import verdict as judging
from eagle3.core.errors import UserError


def cell(**changes) -> dict:
    """A sound cell of 3 steps; changes go into its figures, dotted."""
    made = {
        "variant": "3-1-4",
        "concurrency": 1,
        "steps": 3,
        "topk": 1,
        "draft_tokens": 4,
        "difference_gaps": None,
        "all": {
            "accept_length": {
                "served": 2.5,
                "per_cycle": 2.45,
                "replayed": 2.5,
                "simulated": 2.6,
                "break_even": 2.0,
            },
            "speed_up": 1.2,
            "speed_up_low": 1.1,
            "speed_up_high": 1.3,
            "outputs": {
                "compared": 4,
                "equal": 4,
                "common_prefix_share": 1.0,
                "equal_to_itself": {"baseline": 4},
            },
        },
    }
    for key, value in changes.items():
        place = made["all"]
        *parents, last = key.split("__")
        for parent in parents:
            place = place[parent]
        place[last] = value
    return made


def refusal(made: dict, exact: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        judging.check_sound(made, 1.05, 0.05, exact)
    return str(caught.value)


def test_a_sound_cell_passes():
    judging.check_sound(cell(), 1.05, 0.05, exact=True)


def test_accept_length_of_one_fails_with_a_checklist():
    """catalogue E01: a server with the wrong algorithm accepts nothing and says nothing."""
    text = refusal(
        cell(accept_length__per_cycle=1.0, accept_length__served=1.02, accept_length__replayed=1.02)
    )
    for thing in ("EAGLE3", "layer ids", "d2t", "lm_head", "norm", "RoPE", "1.05"):
        assert thing in text


def test_served_and_replayed_that_disagree_fail():
    """catalogue E22: offline and served accept lengths must agree."""
    text = refusal(cell(accept_length__replayed=2.8))
    assert "2.500" in text and "2.800" in text and "12.0%" in text


@pytest.mark.parametrize("value", [0.9, 4.2])
def test_impossible_accept_lengths_fail(value):
    """catalogue F02"""
    assert "outside 1 to 4" in refusal(cell(accept_length__per_cycle=value))


def test_outputs_must_be_equal_in_process_only():
    different = cell(outputs__equal=3)
    assert "3 of 4" in refusal(different, exact=True)
    judging.check_sound(different, 1.05, 0.05, exact=False)


def test_slower_is_said_in_words_with_the_break_even():
    """catalogue F08: under 1.0 is shown as a result, not hidden."""
    text = judging.verdict(
        cell(speed_up=0.6, speed_up_low=0.5, speed_up_high=0.7, accept_length__break_even=3.7)
    )
    assert "slower than the baseline" in text and "3.70" in text and "0.60" in text


def test_faster_and_undecided_are_told_apart():
    assert "1.20 times as fast as the baseline" in judging.verdict(cell())
    assert "at once the drafter is" in judging.verdict(cell())
    assert "at once variant 3-1-4 is" in judging.verdict(cell(), one_of_several=True)
    assert "as fast as the baseline within" in judging.verdict(
        cell(speed_up=1.01, speed_up_low=0.9, speed_up_high=1.1)
    )


def test_without_an_interval_no_verdict_leans_on_one():
    text = judging.verdict(cell(speed_up=0.6, speed_up_low=None, speed_up_high=None))
    assert "0.60 times as fast as the baseline (no interval: it takes at least 4 prompts" in text


def test_differences_are_explained_with_what_was_measured():
    made = cell(
        outputs__equal=3, outputs__common_prefix_share=0.9, outputs__equal_to_itself={"baseline": 3}
    )
    made["difference_gaps"] = {"median": 0.02, "p95": 0.1}
    text = judging.explain_differences(made)
    assert "1 of 4" in text and "3 of 4 prompts" in text and "0.020" in text
    assert judging.explain_differences(cell()) == "All 4 greedy outputs of both arms are equal."


def test_the_best_cell_is_the_fastest():
    cells = [cell(speed_up=s) for s in (1.1, 1.4, 0.9)]
    assert judging.best_cell(cells) is cells[1]
