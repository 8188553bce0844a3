"""The draft vocabulary. Alone: python -m pytest tests/records/test_draft_vocab.py"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import load_script
from eagle3.core.errors import UserError
from eagle3.records import draft_vocab as vocab
from eagle3.records import records
from eagle3.records.records import Record
from safetensors.torch import save_file
from transformers import AutoTokenizer

V = 400


def test_most_frequent_first_ties_by_id_then_filled_up():
    counts = Counter({50: 3, 60: 9, 70: 3, 80: 1})
    assert vocab.choose(counts, [7], 4, V) == [7, 50, 60, 70]
    assert vocab.choose(counts, [7], 8, V) == [0, 1, 2, 7, 50, 60, 70, 80]
    assert vocab.choose(Counter(), [], V, V) == list(range(V))


def test_impossible_sizes_are_refused():
    with pytest.raises(
        UserError, match="vocab.size is 401, more than the target's vocabulary of 400"
    ):
        vocab.choose(Counter(), [], 401, V)
    with pytest.raises(UserError, match="vocab.size is 2, but 3 special"):
        vocab.choose(Counter(), [1, 2, 3], 2, V)


def test_special_stop_and_byte_tokens_are_always_in(tiny_model):
    """catalogue E21: any text can be drafted, byte by byte."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = vocab.choose(
        Counter({i: 99 for i in range(300, 390)}),
        vocab.required_ids(tokenizer, [2, 399], V),
        350,
        V,
    )
    assert {*tokenizer.all_special_ids, 2, 399} <= set(ids)
    letters = {i for i in range(len(tokenizer)) if len(tokenizer.convert_ids_to_tokens(i)) == 1}
    assert len(letters) == 256 and letters <= set(ids)


def test_the_two_maps_say_the_same(in_tmp):
    """catalogue E03: d2t holds offsets, so that draft id + d2t is the target id; t2d marks exactly
    those."""
    ids = [0, 5, 6, 399]
    vocab.write("v.safetensors", ids, V)
    d2t, t2d = vocab.read("v.safetensors")
    assert [draft + offset for draft, offset in enumerate(d2t.tolist())] == ids
    assert (
        t2d.nonzero().flatten().tolist() == ids and d2t.dtype == torch.int64 and t2d.shape == (V,)
    )


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t.update(d2t=torch.tensor([0, 5, 6, 399])), "offsets, not ids"),  # absolute ids
        (lambda t: t.update(d2t=torch.tensor([0, 0, -1, 300])), "does not rise"),
        (lambda t: t.update(d2t=t["d2t"].int()), "not int64 and bool"),
        (lambda t: t["t2d"].__setitem__(7, True), "both must come from one build"),
        (lambda t: t.update(t2d=torch.zeros(100, dtype=torch.bool)), "offsets, not ids"),
    ],
)
def test_maps_that_disagree_are_refused(in_tmp, change, message):
    """catalogue E03, E04, B13"""
    tensors = vocab.tensors([0, 5, 6, 399], V)
    change(tensors)
    save_file(tensors, "v.safetensors")
    with pytest.raises(UserError, match=message):
        vocab.read("v.safetensors")


def test_only_supervised_tokens_count(in_tmp):
    """Prompt tokens do not; train and validation are counted apart."""
    made = [
        Record("a", [1, 2, 3], [False, True, True], "train"),
        Record("b", [3, 3], [True, False], "validation"),
    ]
    records.write(
        "r.parquet",
        made,
        Counter(tokens=5, supervised=3),
        SimpleNamespace(min_supervised_share=0, max_supervised_share=1),
        greedy=True,
    )
    script = load_script("vocab")
    counts = script.count_supervised(Path("r.parquet"))
    assert counts == {"train": Counter({2: 1, 3: 1}), "validation": Counter({3: 1})}
    assert script.share(counts["train"], {3}) == 0.5 and script.share(Counter(), {3}) == 1.0
