"""Rows of glaive-function-calling-v2: a whole conversation as one text, its functions as JSON
inside the system text.

system: 'SYSTEM: You are a helpful assistant with access to the following functions. Use them if
required -\\n{…}\\n{…}' chat:   'USER: …\\n\\n\\nASSISTANT: <functioncall> {"name": "f",
"arguments": \\'{"a": 1}\\'} <|endoftext|>\\n\\n\\n
         FUNCTION RESPONSE: {"x": 1}\\n\\n\\nASSISTANT: … <|endoftext|>'
"""

import json
import re

from eagle3.core.errors import Reject

TURN = re.compile(r"(?:^|\n)[ \t]*(USER|ASSISTANT|FUNCTION RESPONSE):")
ROLE = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
END, CALL = "<|endoftext|>", "<functioncall>"
QUOTED_ARGUMENTS = re.compile(r"(\"arguments\"\s*:\s*)'(.*)'\s*}\s*$", re.DOTALL)


def conversation(system: str, chat: str) -> tuple[list[dict], list[dict]]:
    """(messages, tools). Raises Reject where the text has no turns or a call or function is no
    JSON."""
    system = (system or "").removeprefix("SYSTEM:").strip()
    start = system.find("{")
    tools = functions(system[start:]) if start >= 0 else []
    instruction = (system[:start] if start >= 0 else system).strip().rstrip("-").strip()
    messages = [{"role": "system", "content": instruction}] if instruction else []
    names: list[str] = []  # functions that were called and have not returned yet
    parts = TURN.split(chat or "")
    for label, text in zip(parts[1::2], parts[2::2]):
        role, text = ROLE[label], text.replace(END, "").strip()
        message = {"role": role, "content": text}
        if role == "assistant" and CALL in text:
            before, _, call = text.partition(CALL)
            call = function_call(call)
            names.append(call["name"])
            message = {"role": role, "content": before.strip(), "function_call": call}
        elif role == "tool" and names:
            message["name"] = names.pop(0)
        messages.append(message)
    if len(parts) < 3:
        raise Reject("empty", "chat has no USER: turn")
    return messages, tools


def functions(text: str) -> list[dict]:
    """The JSON objects that stand one after another in `text`."""
    decoder, found, place = json.JSONDecoder(), [], 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError as error:
            raise Reject("bad_tools", str(error)) from None
        found.append(value)
    return found


def function_call(text: str) -> dict:
    """`{"name": …, "arguments": '{…}'}`: JSON but for the single quotes around the arguments."""
    text = QUOTED_ARGUMENTS.sub(lambda match: match[1] + json.dumps(match[2]) + "}", text.strip())
    try:
        call = json.loads(text)
        return {"name": call["name"], "arguments": call.get("arguments", {})}
    except (ValueError, KeyError, TypeError) as error:
        raise Reject("bad_tool_call", f"{error}: {text[:60]}") from None
