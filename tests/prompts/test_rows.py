"""Rows of every shape become conversations, or are rejected by name. Alone: python -m pytest
tests/prompts/test_rows.py"""

import json

import pytest
from eagle3.core.errors import Reject
from eagle3.prompts import rows as conversations

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def read(row, format="auto", **columns):
    return conversations.read(row, format, columns)


def reason(row, format="auto", **columns) -> str:
    with pytest.raises(Reject) as caught:
        read(row, format, **columns)
    return caught.value.reason


SHAPES = [
    {"messages": [USER, ASSISTANT]},
    {"messages": json.dumps([USER, ASSISTANT])},  # A11: a list stored as text
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"conversation": [{"from": "User", "value": "q"}, {"from": "model", "value": "a"}]},
    {"instruction": "q", "input": "", "output": "a"},
    {"instruction": "", "input": "q", "response": "a"},
    {"question": "q", "answer": "a"},
    {"question": [[USER, ASSISTANT]]},
    {"prompt": "q", "completion": "a"},
    {"prompt": [USER, ASSISTANT]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "bot", "content": ["a"]},
        ]
    },
]


@pytest.mark.parametrize("row", SHAPES)
def test_every_shape_gives_the_same_conversation(row):
    """Catalogue A02 (aliases of roles), A08 (typed parts), A11 (lists as text)."""
    found = read(row)
    assert found.messages == [USER, ASSISTANT] and found.id == read(SHAPES[0]).id


def test_columns_of_any_name():
    row = {"q": "q", "ctx": "more", "a": "a", "sys": "s"}
    found = read(row, prompt="q", input="ctx", answer="a", system="sys").messages
    assert found == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q\n\nmore"},
        ASSISTANT,
    ]
    assert read({"chat": [USER, ASSISTANT]}, messages="chat").messages == [USER, ASSISTANT]
    assert reason({"chat": []}, messages="turns") == "missing_column"


@pytest.mark.parametrize(
    "row, expected",
    [
        ("text", "not_an_object"),
        ([], "not_an_object"),
        ({"x": 1}, "unknown_shape"),
        ({"conversations": []}, "empty"),
        ({"messages": "[]"}, "empty"),
        ({"messages": "hello"}, "not_a_list"),
        ({"messages": {"role": "user"}}, "not_a_list"),
        ({"messages": ["hello"]}, "not_a_message"),
        ({"messages": [{"role": "wizard", "content": "q"}]}, "unknown_role"),
        ({"messages": [{"content": "q"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty_message"),
        ({"messages": [{"role": "user", "content": None}]}, "empty_message"),
        (
            {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "q"}]},
            "starts_with_assistant",
        ),
        ({"messages": [{"role": "system", "content": "s"}]}, "no_user_turn"),
        ({"messages": [USER, ASSISTANT, {"role": "system", "content": "s"}]}, "system_not_first"),
        ({"messages": [USER, ASSISTANT, USER, USER]}, "roles_do_not_alternate"),
        ({"messages": [USER, {"role": "tool", "content": "t"}]}, "roles_do_not_alternate"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "q"}, {"type": "image", "image": "x"}],
                    }
                ]
            },
            "multimodal",
        ),
        ({"messages": [USER], "tools": "{no json"}, "bad_tools"),
        ({"messages": [USER], "tools": [1]}, "bad_tools"),
    ],
)
def test_bad_rows_are_rejected_by_name(row, expected):
    """Catalogue A01, A02, A08, A10, A11."""
    assert reason(row) == expected


def test_none_valued_keys_are_dropped_at_any_depth(tmp_path):
    """Catalogue A04, A05: Arrow gives every object every key; hash and rendering must not see
    them."""
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from eagle3.core import schema, sources

    def tool(**properties):
        return {"name": "f", "parameters": {"type": "object", "properties": properties}}

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {
            "messages": [USER, {**ASSISTANT, "tool_calls": [call]}],
            "tools": [tool(a={"type": "string"})],
        },
        {"messages": [USER, ASSISTANT], "tools": [tool(b={"type": "integer"})]},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read_from = {
        name: [read(row) for _, row in sources.rows(schema.Source(path=str(tmp_path / name)))]
        for name in ("rows.parquet", "rows.jsonl")
    }
    assert read_from["rows.parquet"] == read_from["rows.jsonl"]
    assert "tool_calls" not in read_from["rows.parquet"][1].messages[1]
    assert list(read_from["rows.parquet"][1].tools[0]["function"]["parameters"]["properties"]) == [
        "b"
    ]


def test_extra_columns_are_ignored_and_change_no_identity():
    """Catalogue A07, A17: the source's own ids are not identities."""
    assert (
        read({"id": 9, "messages": [USER], "score": 1}).id
        == read({"messages": [USER], "lang": "en"}).id
    )


def test_the_identity_is_the_content():
    assert (
        read({"messages": [USER]}).id != read({"messages": [{"role": "user", "content": "q "}]}).id
    )
    assert read({"messages": [USER], "tools": [{"name": "f"}]}).id != read({"messages": [USER]}).id


TOOL = {"role": "tool", "content": "t"}
SYSTEM = {"role": "system", "content": "s"}
OPEN = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    "messages, opened",
    [
        ([USER], [USER, OPEN]),
        ([USER, ASSISTANT], [USER, OPEN]),
        (
            [SYSTEM, USER, ASSISTANT, USER],
            [SYSTEM, USER, OPEN, USER, OPEN],
        ),  # a trailing user turn is the prompt (A10)
        ([USER, ASSISTANT, TOOL, ASSISTANT, USER], [USER, OPEN, TOOL, OPEN, USER, OPEN]),
        ([USER, ASSISTANT, TOOL, TOOL, ASSISTANT], [USER, OPEN, TOOL, TOOL, OPEN]),
    ],
)
def test_every_assistant_turn_is_opened(messages, opened):
    assert conversations.open_turns(messages, 8) == opened


def test_turns_are_cut_at_the_limit():
    assert conversations.open_turns([USER, ASSISTANT] * 5, 2) == [USER, OPEN, USER, OPEN]
