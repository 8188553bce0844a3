"""Speculative decoding on a tiny real model. Alone: python -m pytest
tests/bench/test_speculate.py"""

import pytest
import tiny_drafter
import torch
from eagle3.bench.speculate import CachedAttention


@pytest.fixture(scope="module")
def chance(tiny_target):
    return tiny_drafter.random_drafter(tiny_target, seed=3)


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("which", ["chance", "learnt"])
def test_output_equals_plain_decoding_token_for_token(which, steps, tiny_target, chance, learnt):
    """The reference is a loop without a cache that runs the whole sequence for every token."""
    decoder = tiny_drafter.decoder(tiny_target, chance if which == "chance" else learnt.drafter)
    for prompt, answer in zip(learnt.prompts[:4], learnt.answers):
        assert decoder.plain(prompt, 12).ids == answer
        assert decoder.speculative(prompt, 12, steps).ids == answer


def test_a_drafter_that_knows_the_answers_comes_near_the_maximum(tiny_target, learnt):
    decoder = tiny_drafter.decoder(tiny_target, learnt.drafter)
    counts = [
        n for prompt in learnt.prompts for n in decoder.speculative(prompt, 12, 3).accepted[:-1]
    ]  # the last one is cut
    assert 1 + sum(counts) / len(counts) > 2.8


def test_accepted_counts_add_up_to_the_tokens(tiny_target, learnt):
    """Every cycle gives its accepted drafts and one token of the target's own; a last one that
    the limit cuts counts no draft that was not emitted."""
    decoder = tiny_drafter.decoder(tiny_target, learnt.drafter)
    for prompt in learnt.prompts:
        for limit in (9, 10, 11, 12):
            made = decoder.speculative(prompt, limit, 3)
            assert all(0 <= n <= 3 for n in made.accepted)
            whole = 1 + sum(n + 1 for n in made.accepted[:-1])
            last = len(made.ids) - whole
            assert made.accepted[-1] in (last - 1, last) and len(made.ids) <= limit


def test_a_stop_token_inside_a_cycle_ends_the_answer(tiny_target, learnt):
    decoder = tiny_drafter.decoder(tiny_target, learnt.drafter)
    prompt, answer = learnt.prompts[0], learnt.answers[0]
    decoder.stop_ids = {answer[6]}
    end = answer.index(answer[6]) + 1
    made = decoder.speculative(prompt, 12, 3)
    assert made.ids == answer[:end] == decoder.plain(prompt, 12).ids
    # Tokens drafted behind the stop are emitted by nobody.
    assert sum(n + 1 for n in made.accepted[:-1]) + 1 + made.accepted[-1] <= end


@pytest.mark.parametrize("tokens", [1, 2])
def test_answers_of_one_and_two_tokens(tokens, tiny_target, learnt):
    made = tiny_drafter.decoder(tiny_target, learnt.drafter).speculative(
        learnt.prompts[0], tokens, 3
    )
    assert made.ids == learnt.answers[0][:tokens] and len(made.accepted) == tokens - 1


def test_cached_attention_equals_attention_over_everything():
    """Forgetting leaves exactly what was there before."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, heads, 8, generator=generator) for heads in (4, 2, 2))
    attend = CachedAttention()
    attend(q[:3], k[:3], v[:3])
    attend(q[:2], k[3:5] + 1, v[3:5] - 1)
    attend.keep(3)
    found = attend(q[3:], k[3:], v[3:])
    for row, t in enumerate(range(3, 7)):
        for head in range(4):
            scores = torch.stack(
                [q[t, head] @ k[s, head // 2] / 8**0.5 for s in range(t + 1)]
            ).softmax(0)
            expected = sum(weight * v[s, head // 2] for s, weight in enumerate(scores))
            assert torch.allclose(found[row, head], expected, atol=1e-5)
