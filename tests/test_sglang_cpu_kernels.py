"""The stand-ins for SGLang's CPU kernels, which need no SGLang. Alone: python -m pytest
tests/test_sglang_cpu_kernels.py"""

import importlib.util

import pytest
import sglang_server
import torch


@pytest.fixture(scope="module")
def kernels():
    spec = importlib.util.spec_from_file_location(
        "sgl_kernel_standin", sglang_server.KERNELS / "sgl_kernel/__init__.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tree(kernels, parents, chosen, lengths, topk, tokens):
    """(mask, positions, place, next, sibling) of one tree for each sequence."""
    count = len(lengths)
    mask = torch.ones(count * tokens * tokens, dtype=torch.bool)
    positions = torch.empty(count * tokens, dtype=torch.long)
    place, follows, sibling = (torch.full((count, tokens), -1) for _ in range(3))
    kernels.build_tree_kernel_efficient_cpu(
        torch.tensor(parents).view(count, -1),
        torch.tensor(chosen),
        torch.tensor(lengths),
        mask,
        positions,
        place,
        follows,
        sibling,
        topk,
        3,
        tokens,
        1,
    )
    return mask.view(count, tokens, tokens), positions.view(count, tokens), place, follows, sibling


def verify(kernels, candidates, predicted, place, follows, sibling, depth):
    count, tokens = place.shape
    predicts, accepted = (
        torch.zeros(count * tokens, dtype=torch.int32),
        torch.full((count, depth + 1), -1, dtype=torch.int32),
    )
    number = torch.zeros(count, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts,
        accepted,
        number,
        torch.tensor(candidates),
        place,
        follows,
        sibling,
        torch.tensor(predicted),
    )
    return predicts, accepted.tolist(), number.tolist()


def test_a_chain_is_accepted_up_to_the_first_other_token(kernels):
    mask, positions, *links = tree(
        kernels, [[-1, 0, 1], [-1, 0, 1]], [[0, 1, 2], [0, 1, 2]], [7, 9], 1, 4
    )
    assert all(torch.equal(each, torch.ones(4, 4).tril().bool()) for each in mask)
    assert positions.tolist() == [[7, 8, 9, 10], [9, 10, 11, 12]]
    predicts, accepted, number = verify(
        kernels,
        [[50, 51, 52, 53], [50, 51, 52, 53]],
        [[51, 52, 53, 54], [51, 60, 53, 54]],
        *links,
        3,
    )
    assert number == [3, 1] and accepted == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert predicts[:6].tolist() == [51, 52, 53, 54, 51, 60]


def test_a_tree_is_followed_through_siblings(kernels):
    """Candidates 0 and 1 follow the root, 2 and 3 candidate 0, 4 and 5 candidate 1, 6 and 7
    candidate 4."""
    mask, positions, *links = tree(kernels, [[-1, 0, 1, 4, 2]], [[0, 1, 2, 4, 6]], [5], 2, 6)
    ancestors = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    assert [row.nonzero().flatten().tolist() for row in mask[0]] == ancestors
    assert positions.tolist() == [[5, 6, 6, 7, 7, 8]]
    predicts, accepted, number = verify(
        kernels, [[9, 10, 20, 11, 21, 22]], [[20, 0, 21, 0, 22, 30]], *links, 3
    )
    assert (
        number == [3] and accepted == [[0, 2, 4, 5]] and predicts.tolist() == [20, 0, 21, 0, 22, 30]
    )


def test_slots_are_moved_as_they_were_before(kernels):
    buffers = [
        torch.arange(24, dtype=torch.float32).view(6, 4),
        torch.arange(12, dtype=torch.int64).view(6, 2),
    ]
    before = [buffer.clone() for buffer in buffers]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    kernels.copy_all_layer_kv_cache_cpu(
        addresses, torch.tensor([16, 16]), torch.tensor([1, 2]), torch.tensor([2, 4])
    )
    for buffer, old in zip(buffers, before):
        assert torch.equal(buffer, old[[0, 2, 4, 3, 4, 5]])


def test_both_ways_of_attending_agree(kernels):
    """The last tokens at once, or one after another with a cache that grows."""
    torch.manual_seed(0)
    keys, values, query = torch.randn(20, 2, 8), torch.randn(20, 2, 8), torch.randn(6, 4, 8)
    slots, at_once, one_by_one = (
        torch.randperm(20).int().view(2, 10),
        torch.empty(6, 4, 8),
        torch.empty(6, 4, 8),
    )
    requests, lengths, counts = torch.tensor([1, 0]), torch.tensor([9, 7]), torch.tensor([4, 2])
    common = (0.3, 0.0, False, 0, None, None)
    kernels.extend_attention_cpu(
        query,
        None,
        None,
        at_once,
        keys,
        values,
        1,
        1,
        slots,
        requests,
        lengths,
        counts,
        torch.tensor([0, 4]),
        4,
        *common,
        None,
        True,
    )
    for n, (length, count, start) in enumerate(((9, 4, 0), (7, 2, 4))):
        for i in range(count):
            place = slice(start + i, start + i + 1)
            kernels.decode_attention_cpu(
                query[place],
                keys,
                values,
                1,
                1,
                one_by_one[place],
                None,
                None,
                None,
                None,
                slots,
                requests[n : n + 1],
                torch.tensor([length - count + i + 1]),
                *common,
            )
    torch.testing.assert_close(at_once, one_by_one)
    with pytest.raises(NotImplementedError, match="a window"):
        kernels.decode_attention_cpu(
            query,
            keys,
            values,
            1,
            1,
            one_by_one,
            None,
            None,
            None,
            None,
            slots,
            requests,
            lengths,
            0.3,
            0.0,
            False,
            128,
            None,
            None,
        )
