"""Order and grouping of sequences. Alone: python -m pytest tests/training/test_packing.py"""

from eagle3.training.packing import packed_epoch

LENGTHS = [3, 9, 4, 4, 2, 12, 1, 6, 5, 5]


def test_every_sequence_comes_once_and_batches_keep_their_budget():
    for epoch in range(3):
        batches = packed_epoch(LENGTHS, 10, 0, epoch)
        assert sorted(i for batch in batches for i in batch) == list(range(len(LENGTHS)))
        assert all(sum(LENGTHS[i] for i in batch) <= 10 or len(batch) == 1 for batch in batches)


def test_the_order_depends_on_seed_and_epoch_alone():
    assert packed_epoch(LENGTHS, 10, 1, 2) == packed_epoch(LENGTHS, 10, 1, 2)
    orders = {
        str(packed_epoch(LENGTHS, 10, seed, epoch)) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9


def test_a_sequence_longer_than_the_budget_stands_alone():
    assert [5] in packed_epoch(LENGTHS, 10, 0, 0)
