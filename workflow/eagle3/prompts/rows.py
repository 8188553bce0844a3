"""Rows of data sets, whatever their shape, as conversations: checked messages with known roles, and
tools."""

import json
from dataclasses import dataclass, field
from typing import Any

from eagle3.core.errors import Reject
from eagle3.core.files import digest_of
from eagle3.prompts import glaive

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
KEPT_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True)
class Conversation:
    """`messages`: role, content and the few other fields that templates read. `id`: hash of
    messages and tools."""

    messages: list[dict]
    tools: list = field(default_factory=list)

    @property
    def id(self) -> str:
        return digest_of([self.messages, self.tools])


def read(row: Any, format: str, columns: dict[str, str]) -> Conversation:
    """The conversation in a row. Raises Reject with the reason if there is none."""
    if not isinstance(row, dict):
        raise Reject("not_an_object", type(row).__name__)
    row = without_none(row)
    shape = "columns" if columns else (detect(row) if format == "auto" else format)
    messages, tools = SHAPES[shape](row) if shape != "columns" else _by_columns(row, columns)
    return Conversation(_checked(_parsed(messages, "messages")), _tools(tools))


def without_none(value: Any) -> Any:
    """Drops None-valued keys at any depth. Arrow gives every object every key that any object ever
    had, filled with None; templates that ask `is defined` would see them, and copies of a row in
    Parquet and JSON would differ."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_none(v) for v in value if v is not None]
    return value


def detect(row: dict) -> str:
    """The shape of a row by its columns. Raises Reject if none fits."""
    if "messages" in row:
        return "messages"
    if "conversations" in row or "conversation" in row:
        return "sharegpt"
    if "instruction" in row:
        return "instruction"
    if "question" in row:
        return "qa"
    if "prompt" in row:
        return "prompt"
    if "chat" in row:
        return "glaive"
    raise Reject("unknown_shape", "columns " + ", ".join(sorted(map(str, row))[:8]))


def _messages(row):
    return row.get("messages"), row.get("tools") or row.get("functions")


def _sharegpt(row):
    turns = row.get("conversations", row.get("conversation"))
    turns = _parsed(turns, "conversations")
    system = row.get("system")
    head = [{"role": "system", "content": system}] if system else []
    return head + turns, row.get("tools")


def _instruction(row):
    instruction, context = row.get("instruction"), row.get("input")
    prompt = f"{instruction}\n\n{context}" if instruction and context else instruction or context
    return _single(row.get("system"), prompt, row.get("output", row.get("response"))), row.get(
        "tools"
    )


def _qa(row):
    question = _parsed_if_list(row.get("question"))
    tools = row.get("function") or row.get("tools")
    if isinstance(question, list):  # turns of messages, as function-calling benchmarks write them
        flat = [m for turn in question for m in (turn if isinstance(turn, list) else [turn])]
        return flat, tools
    return _single(row.get("system"), question, row.get("answer", row.get("response"))), tools


def _prompt(row):
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return prompt, row.get("tools")
    return _single(row.get("system"), prompt, row.get("response", row.get("completion"))), row.get(
        "tools"
    )


def _glaive(row):
    return glaive.conversation(row.get("system"), row.get("chat"))


def _by_columns(row, columns):
    missing = [
        name for key, name in columns.items() if name not in row and key in ("messages", "prompt")
    ]
    if missing:
        raise Reject("missing_column", ", ".join(missing))
    value = {key: row.get(name) for key, name in columns.items()}
    if "messages" in columns:
        turns = _parsed(value["messages"], columns["messages"])
        head = [{"role": "system", "content": value["system"]}] if value.get("system") else []
        return head + turns, value.get("tools")
    prompt = value.get("prompt")
    if prompt and value.get("input"):
        prompt = f"{prompt}\n\n{value['input']}"
    return _single(value.get("system"), prompt, value.get("answer")), value.get("tools")


SHAPES = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "instruction": _instruction,
    "qa": _qa,
    "prompt": _prompt,
    "glaive": _glaive,
}


def _single(system, prompt, answer) -> list[dict]:
    turns = [("system", system), ("user", prompt), ("assistant", answer)]
    return [{"role": role, "content": text} for role, text in turns if text not in (None, "")]


def _parsed_if_list(value):
    return (
        _parsed(value, "question")
        if isinstance(value, str) and value.lstrip().startswith("[")
        else value
    )


def _parsed(value: Any, name: str) -> list:
    """A list, also one that is stored as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise Reject("not_a_list", f"{name} is a text: {value[:40]!r}") from None
    if value is None or value == []:
        raise Reject("empty", name)
    if not isinstance(value, list):
        raise Reject("not_a_list", f"{name} is {type(value).__name__}")
    return value


def _tools(value: Any) -> list:
    if value in (None, "", [], "[]"):
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise Reject("bad_tools", value[:80]) from None
    value = value if isinstance(value, list) else [value]
    if not all(isinstance(tool, dict) for tool in value):
        raise Reject("bad_tools", str(value)[:80])
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in value
    ]


def _checked(messages: list) -> list[dict]:
    clean = []
    for message in messages:
        if not isinstance(message, dict):
            raise Reject("not_a_message", type(message).__name__)
        name = message.get("role", message.get("from"))
        role = ROLES.get(str(name).lower())
        if role is None:
            raise Reject("unknown_role", str(name))
        content = _text(message.get("content", message.get("value")))
        kept = {key: message[key] for key in KEPT_FIELDS if message.get(key)}
        if isinstance(call := message.get("function_call"), dict) and not kept.get("tool_calls"):
            kept["tool_calls"] = [
                {"type": "function", "function": call}
            ]  # the older spelling, one call at most
        if not content.strip() and not kept.get("tool_calls"):
            raise Reject("empty_message", role)
        clean.append({"role": role, "content": content, **kept})
    _number_calls(clean)
    turns = [m["role"] for m in clean if m["role"] != "system"]
    if any(m["role"] == "system" for m in clean[1:]):
        raise Reject("system_not_first")
    if not turns or "user" not in turns:
        raise Reject("no_user_turn")
    if turns[0] == "assistant":
        raise Reject("starts_with_assistant")
    for before, after in zip(turns, turns[1:]):
        if before == after and before != "tool":
            raise Reject("roles_do_not_alternate", f"{before} follows {after}")
        if after == "tool" and before not in ("assistant", "tool"):
            raise Reject("roles_do_not_alternate", f"{after} follows {before}")
    return clean


def _number_calls(messages: list[dict]) -> None:
    """Gives calls without an id one, and tool messages the id of the call that they answer, in
    order.

    Kimi's template prints both, and its ids are functions.NAME:INDEX, counted over the
    conversation."""
    waiting: list[str] = []
    count = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            if not (
                isinstance(calls, list)
                and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
            ):
                raise Reject("bad_tool_call", str(calls)[:80])
            message["tool_calls"] = calls = [
                {"id": f"functions.{call['function'].get('name')}:{count + i}", **call}
                for i, call in enumerate(calls)
            ]
            waiting, count = [call["id"] for call in calls], count + len(calls)
        elif message["role"] == "tool" and waiting:
            identifier = waiting.pop(0)
            message.setdefault("tool_call_id", identifier)


def _text(content: Any) -> str:
    """Text of a message; typed parts are joined. Raises Reject for images, sound and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, dict) and part.get("type", "text") == "text":
                texts.append(str(part.get("text", part.get("value", ""))))
            else:
                raise Reject(
                    "multimodal", str(part.get("type") if isinstance(part, dict) else part)[:40]
                )
        return "".join(texts)
    if isinstance(content, dict):
        return json.dumps(content, ensure_ascii=False)
    return str(content)


def open_turns(messages: list[dict], max_turns: int) -> list[dict]:
    """The conversation with every assistant turn left open (`content` None) for the target to
    answer.

    user, assistant, user -> user, OPEN, user, OPEN. Cut after `max_turns` open turns.
    """
    opened: list[dict] = []
    for message in [*messages, None]:
        role = message["role"] if message else None
        if role == "assistant":
            continue
        if (
            opened
            and role != "system"
            and opened[-1]["role"] in ("user", "tool")
            and role != "tool"
        ):
            opened.append({"role": "assistant", "content": None})
        elif opened and role == "tool" and opened[-1]["role"] == "user":
            opened.append({"role": "assistant", "content": None})
        if message:
            opened.append(message)
    places = [i for i, m in enumerate(opened) if m["role"] == "assistant"][:max_turns]
    return opened[: places[-1] + 1]
