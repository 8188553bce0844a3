"""Training sequences from served answers. Alone: python -m pytest tests/records/test_records.py"""

from collections import Counter
from types import SimpleNamespace

import pytest
from eagle3.core.errors import UserError
from eagle3.records import records
from eagle3.records.records import build, sequences, split_of


def params(**more):
    return SimpleNamespace(
        **{
            "max_tokens": 100,
            "validation_fraction": 0.2,
            "truncated_answers": "train",
            "min_supervised_share": 0.01,
            "max_supervised_share": 0.99,
            **more,
        }
    )


def turn(prompt, output, reason="stop"):
    return {"prompt_ids": prompt, "output_ids": output, "finish_reason": reason}


def row(*turns, id="one"):
    return {"id": id, "turns": list(turns)}


def test_turns_that_extend_share_a_sequence():
    """The tokens between an answer and the next one are the user's: not supervised; the answers'
    last tokens are."""
    assert sequences([turn([1, 2], [7]), turn([1, 2, 7, 3], [8, 9])]) == [
        ([1, 2, 7, 3, 8, 9], [False, False, True, False, True, True])
    ]


def test_history_that_was_rewritten_starts_anew():
    """A template that drops earlier reasoning: both sequences are what the server saw."""
    made = sequences([turn([1, 2], [7, 8]), turn([1, 2, 8, 3], [9])])
    assert made == [
        ([1, 2, 7, 8], [False, False, True, True]),
        ([1, 2, 8, 3, 9], [False] * 4 + [True]),
    ]


def test_two_sequences_of_a_row_have_two_ids_and_one_split():
    stats = Counter()
    made = list(
        build([row(turn([1, 2], [7, 8]), turn([1, 2, 8, 3], [9]), id="x")], params(), stats)
    )
    assert [r.id for r in made] == ["x-0", "x-1"] and len({r.split for r in made}) == 1
    assert stats == Counter(records=2, tokens=9, supervised=3)


def test_long_records_are_cut_and_empty_ones_left_out():
    stats = Counter()
    rows = [row(turn([1] * 5, [2] * 10)), row(turn([1] * 12, [2] * 3), id="two")]
    made = list(build(rows, params(max_tokens=8), stats))
    assert [(len(r.input_ids), sum(r.loss_mask)) for r in made] == [(8, 3)]
    assert stats["cut"] == 2 and stats["without_supervision"] == 1


@pytest.mark.parametrize("choice,expected", [("train", [[1, 7, 2, 8]]), ("drop", [[1, 7]])])
def test_truncated_answers(choice, expected):
    """Trained on as they are, without an end token that the target did not write, or dropped."""
    stats = Counter()
    made = list(
        build(
            [row(turn([1], [7]), turn([1, 7, 2], [8], "length"))],
            params(truncated_answers=choice),
            stats,
        )
    )
    assert [r.input_ids for r in made] == expected and stats["truncated"] == 1


def test_split_is_by_id_alone_and_near_the_share():
    sides = [split_of(f"id{n}", 0.2) for n in range(5000)]
    assert sides == [split_of(f"id{n}", 0.2) for n in range(5000)]
    assert 0.18 < sides.count("validation") / 5000 < 0.22
    moved = [a != b for a, b in zip(sides, (split_of(f"id{n}", 0.3) for n in range(5000)))]
    assert all(side == "train" for side, one in zip(sides, moved) if one), (
        "a larger share only adds to it"
    )
    assert {split_of("x", 0.0), split_of("x", 0.999999999)} == {"train", "validation"}


def test_file_round_trip(in_tmp):
    stats = Counter()
    made = list(
        build([row(turn([1, 2], [300000, 4]), id=f"r{n}") for n in range(5000)], params(), stats)
    )
    records.write("r.parquet", made, stats, params(), greedy=True)
    assert list(records.read("r.parquet")) == made
    assert list(records.read("r.parquet", "validation")) == [
        r for r in made if r.split == "validation"
    ]
    assert records.metadata("r.parquet") == {**stats, "greedy": True} and records.names(".") == [
        "r"
    ]


@pytest.mark.parametrize("supervised,tokens", [(0, 100), (100, 100), (0, 0)])
def test_an_odd_share_of_supervised_tokens_is_refused(in_tmp, supervised, tokens):
    """A mask that is all zeros or all ones, or no record at all; no file is left behind."""
    with pytest.raises(
        UserError, match="tokens are supervised, outside records.min_supervised_share"
    ):
        records.write(
            "r.parquet", [], Counter(tokens=tokens, supervised=supervised), params(), greedy=False
        )
    assert records.names(".") == []
