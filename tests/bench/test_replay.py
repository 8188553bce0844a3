"""What a drafter must do on served answers, against serving them. Alone: python -m pytest
tests/bench/test_replay.py"""

import pytest
import tiny_drafter
import torch
from eagle3.bench.replay import Answered, Simulator, summary
from eagle3.drafter import acceptance as metrics
from eagle3.target import layers


@pytest.fixture(scope="module")
def simulator(tiny_target, learnt):
    return Simulator(
        tiny_target, learnt.drafter, layers.captured_layers(tiny_target.num_layers), batch_tokens=64
    )


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_walking_the_answers_gives_every_cycle_that_serving_had(
    steps, tiny_target, learnt, simulator
):
    """Not only the same accept length: the same number of accepted drafts, cycle by cycle
    (catalogue E22)."""
    decoder = tiny_drafter.decoder(tiny_target, learnt.drafter)
    served = [decoder.speculative(prompt, 12, steps) for prompt in learnt.prompts]
    answers = [Answered(prompt, made.ids) for prompt, made in zip(learnt.prompts, served)]
    hits, _ = simulator.hits(answers, steps)
    for answer, made, hit in zip(answers, served, hits):
        position, walked = len(answer.prompt_ids) - 1, []
        while len(walked) < len(made.accepted):
            run = 0
            while run < steps and hit[position, run] == 1:
                run += 1
            walked.append(run)
            position += run + 1
        assert walked == made.accepted
    found = summary(hits, answers, steps)
    assert found.cycles == sum(len(made.accepted) for made in served)
    assert found.tokens == sum(len(made.ids) for made in served)


def test_the_first_token_comes_from_the_prefill_and_is_not_drafted(learnt, simulator):
    hits, _ = simulator.hits([Answered(learnt.prompts[0], learnt.answers[0])], 3)
    drafting = (hits[0][:, 0] >= 0).nonzero().flatten().tolist()
    first = len(learnt.prompts[0]) - 1
    assert drafting == list(range(first, first + len(learnt.answers[0]) - 1))


def test_gap_of_differing_answers_is_the_difference_of_the_targets_logits(
    tiny_target, learnt, simulator
):
    prompt, answer = learnt.prompts[1], learnt.answers[1]
    other = [*answer[:5], (answer[5] + 1) % 400, *answer[6:]]
    _, gaps = simulator.hits([Answered(prompt, answer, other)], 1)
    with torch.no_grad():
        logits = tiny_target.load_model()(torch.tensor([prompt + answer[:5]])).logits[0, -1]
    assert (
        gaps == [pytest.approx((logits[answer[5]] - logits[other[5]]).item(), abs=1e-3)]
        and gaps[0] > 0
    )


def test_replay_of_a_made_up_answer():
    """Hits at positions 0 to 5 of a chain of 2: cycles start at 0 (2 right: 3 tokens), 3 (none: 1),
    4 (1 right: 2)."""
    hits = torch.tensor([[1, 1], [0, 0], [0, 1], [0, 1], [1, 0], [1, -1]], dtype=torch.int8)
    assert metrics.replay(hits, 2) == (6, 3)
