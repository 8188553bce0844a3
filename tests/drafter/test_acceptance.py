"""Accept lengths from hits. Alone: python -m pytest tests/drafter/test_acceptance.py"""

import pytest
import torch
from eagle3.drafter import acceptance as metrics

HITS = torch.tensor(
    [[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, -1, -1], [-1, -1, -1]], dtype=torch.int8
)


def test_marginal_and_conditional_accuracies_by_hand():
    found = metrics.summarize(HITS)
    assert found["accuracy"] == [4 / 5, 3 / 4, 3 / 4]
    assert found["conditional"] == [4 / 5, 2 / 3, 1 / 2]
    assert found["supervised"] == 5
    assert found["accept_length"] == pytest.approx(1 + 4 / 5 + 4 / 5 * 2 / 3 + 4 / 5 * 2 / 3 / 2)


def test_a_shorter_chain_counts_fewer_steps():
    assert metrics.summarize(HITS, 1)["accept_length"] == pytest.approx(1.8)


def test_nothing_supervised_is_an_accept_length_of_one():
    assert metrics.summarize(torch.full((4, 2), -1, dtype=torch.int8))["accept_length"] == 1


def test_replay_walks_as_a_server_does():
    hits = torch.tensor(
        [[-1, -1], [1, 1], [0, 0], [0, 0], [1, 0], [1, 1], [0, 0]], dtype=torch.int8
    )
    # cycles at 1 (two right, three tokens), 4 (one right, two tokens), 6 (none right, one token)
    assert metrics.replay(hits, 2) == (6, 3)
    assert metrics.replay(torch.full((3, 2), -1, dtype=torch.int8), 2) == (0, 0)
