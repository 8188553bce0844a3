"""Choosing prompts: identity, duplicates, caps, rejects. Alone: python -m pytest
tests/prompts/test_prompts.py"""

import json
import random
from types import SimpleNamespace

import pytest
from eagle3.core import schema
from eagle3.core.errors import Reject, UserError
from eagle3.prompts import prompts

LIMITS = schema.Prompts(max_prompt_tokens=6)


class Words:
    """A renderer whose ids are the lengths of words."""

    def prompt_ids(self, messages, tools=None):
        text = " ".join(m["content"] for m in messages)
        if "explode" in text:
            raise Reject("template_error", "boom")
        return [len(word) for word in text.split()] + [1]

    def special_in(self, messages):
        return "<|x|>" if any("<|x|>" in (m["content"] or "") for m in messages) else None


def dataset(cap=None, **more):
    return SimpleNamespace(
        **{
            "format": "auto",
            "columns": {},
            "answers": "generate",
            "max_turns": 8,
            "max_samples": cap,
            **more,
        }
    )


def rows(count):
    return [(i, {"prompt": f"row {i}"}) for i in range(count)]


def select(rows, cap=None, limits=LIMITS, **more):
    kept, rejects, stats = prompts.select(rows, dataset(cap, **more), limits, Words())
    return list(kept), rejects, stats


@pytest.fixture(autouse=True)
def work(in_tmp):
    return in_tmp


def test_a_raised_cap_keeps_the_earlier_rows_and_their_order():
    whole = select(rows(300))[0]
    for cap in (1, 7, 100, 299, 300, 1000):
        assert select(rows(300), cap)[0] == whole[:cap]


def test_the_choice_does_not_depend_on_the_order_of_the_source():
    """Catalogue A14, C01: identity is the content, never the place in the file."""
    shuffled = rows(100)
    random.Random(0).shuffle(shuffled)
    assert [p.id for p in select(shuffled, 20)[0]] == [p.id for p in select(rows(100), 20)[0]]
    fewer = [row for row in rows(100) if row[0] not in (3, 4, 5)]
    chosen = {p.id for p in select(rows(100))[0]}
    assert {p.id for p in select(fewer)[0]} < chosen


def test_exact_duplicates_are_dropped_and_counted():
    """Catalogue A17."""
    kept, _, stats = select(
        [*rows(5), (5, {"prompt": "row 2", "id": "another"}), (6, {"instruction": "row 3"})]
    )
    assert len(kept) == 5 and stats["duplicates"] == 2 and stats["usable"] == 5
    assert sorted(p.source_row for p in kept) == [0, 1, 2, 3, 4]


def test_bad_rows_are_counted_by_reason_and_the_rest_is_kept():
    """Catalogue A01, A10, B12."""
    bad = [
        (10, {"conversations": []}),
        (11, {"prompt": "one two three four five six seven"}),
        (12, {"prompt": "hi <|x|>"}),
        (13, {"prompt": "explode"}),
        (14, ValueError("line 15, byte 99: no JSON")),
        (15, 7),
    ]
    kept, rejects, stats = select([*rows(4), *bad])
    assert len(kept) == 4
    assert {r["row"]: r["reason"] for r in rejects} == {
        10: "empty",
        11: "prompt_too_long",
        12: "special_token_in_text",
        13: "template_error",
        14: "unreadable",
        15: "not_an_object",
    }
    assert rejects[4]["detail"] == "line 15, byte 99: no JSON"
    assert stats["rejected"] == 6 and sum(stats["reasons"].values()) == 6 and stats["rows"] == 10
    assert (
        len(
            select(
                [*rows(4), bad[2]],
                limits=LIMITS.model_copy(update={"special_tokens_in_text": "keep"}),
            )[0]
        )
        == 5
    )


def test_too_many_rejects_fail_the_stage_with_a_histogram():
    """Catalogue A01, B16: a filter that drops everything is no success."""
    _, rejects, stats = select([(0, {"prompt": "fine"}), (1, {"text": "a"}), (2, []), (3, [])])
    with pytest.raises(
        UserError,
        match=r"3 of 4 rows rejected.*0.5 allows \(not_an_object 2, unknown_shape 1; the first is "
        "row 1: unknown_shape columns text",
    ):
        prompts.check_rejects("own", stats, rejects, 0.5)
    prompts.check_rejects("own", stats, rejects, 0.75)
    _, rejects, stats = select([])
    with pytest.raises(UserError, match="own is empty"):
        prompts.check_rejects("own", stats, rejects, 1.0)
    _, rejects, stats = select([(0, {}), (1, {})])
    with pytest.raises(UserError, match="2 of 2 rows rejected"):
        prompts.check_rejects("own", stats, rejects, 1.0)


def test_on_policy_needs_an_answer_at_the_end():
    rows = [
        (0, {"messages": [{"role": "user", "content": "q"}]}),
        (1, {"prompt": "q", "completion": "a"}),
    ]
    kept, rejects, _ = select(rows, answers="given")
    assert [p.source_row for p in kept] == [1] and rejects[0]["reason"] == "no_answer"
    assert kept[0].messages[-1] == {"role": "assistant", "content": "a"}


def test_what_is_written_is_read_back(work):
    """Messages and tools survive Parquet as they are (catalogue A04, A05), in row groups."""
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}},
        }
    ]
    made = [
        prompts.Prompt(
            f"{i:032x}",
            [{"role": "user", "content": f"ü\u2028{i}"}, {"role": "assistant", "content": None}],
            tools if i % 2 else [],
            [i, i + 1],
            i,
        )
        for i in range(5000)
    ]
    prompts.write(
        work / "p.parquet", iter(made), [{"row": 1, "reason": "empty", "detail": ""}], {"rows": 1}
    )
    assert (
        list(prompts.read(work / "p.parquet")) == made and prompts.count(work / "p.parquet") == 5000
    )
    assert json.loads((work / "p.rejects.jsonl").read_text()) == {
        "row": 1,
        "reason": "empty",
        "detail": "",
    }
    assert json.loads((work / "p.stats.json").read_text()) == {"rows": 1}
    first = (work / "p.parquet").read_bytes()
    prompts.write(work / "p.parquet", made, [], {})
    assert (work / "p.parquet").read_bytes() == first
