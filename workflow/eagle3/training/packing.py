"""Order and grouping of training sequences: a pure function of seed and epoch, so that a resumed
run sees the same."""

import torch


def packed_epoch(lengths: list[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the sequences of each batch. Sequences are shuffled, then taken in order while
    they fit; one that is longer than `batch_tokens` is a batch of its own.

    >>> [sum([2, 2, 2, 2][i] for i in batch) for batch in packed_epoch([2, 2, 2, 2], 4, 0, 0)]
    [4, 4]
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batches: list[list[int]] = []
    filled = 0
    for index in torch.randperm(len(lengths), generator=generator).tolist():
        if not batches or filled + lengths[index] > batch_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += lengths[index]
    return batches
