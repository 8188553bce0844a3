"""The one place where messages become token ids: the target's chat template, the same for every
stage."""

import re
from datetime import date
from typing import Any

from eagle3.core.errors import Reject, UserError
from eagle3.target.model import Target

THINK, END_THINK = "<think>", "</think>"
TOOLS_SENTENCE = (
    "You can call these tools; answer with a JSON object of name and arguments to call one:\n"
)


class Renderer:
    """Renders conversations of one target. Ids are plain lists of int."""

    def __init__(self, target: Target):
        self.tokenizer = target.tokenizer
        self.kwargs = target.info["chat_template_kwargs"]
        day = date.fromisoformat(target.info["template_date"])
        # Templates that print today's date would give other ids tomorrow; these are the two ways in
        # which they ask for it.
        self.clock = {"date_string": day.strftime("%d %b %Y")}
        if not self.tokenizer.chat_template:
            raise UserError(
                f"the tokenizer at {target.path} has no chat template; add chat_template.jinja "
                "to that folder"
            )
        self.tokenizer.chat_template = with_date(self.tokenizer.chat_template, day)
        self.specials = sorted(
            {t for t in self.tokenizer.all_special_tokens}
            | {t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special}
        )
        template = self.tokenizer.chat_template
        self.splits_reasoning = "reasoning_content" in (
            template if isinstance(template, str) else str(template)
        )
        self.uses_tools = self._uses_tools()

    def prompt_ids(self, messages: list[dict], tools: list | None = None) -> list[int]:
        """Ids of the conversation so far, with the generation prompt: what the target is asked to
        continue."""
        return self._ids(messages, tools, generation_prompt=True)

    def full_ids(self, messages: list[dict], tools: list | None = None) -> list[int]:
        """Ids of the whole conversation, which ends with an assistant turn."""
        return self._ids(messages, tools, generation_prompt=False)

    def decode(self, ids: list[int]) -> str:
        """The text of ids without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def special_in(self, messages: list[dict]) -> str | None:
        """A special string of the tokenizer that stands in some message's text, if any: it would
        become a control token, and text could open or close turns."""
        for message in messages:
            for special in self.specials:
                if special in (message.get("content") or ""):
                    return special
        return None

    def _ids(self, messages, tools, generation_prompt) -> list[int]:
        text = self._text(messages, tools, generation_prompt)
        # The template writes BOS itself, so nothing is added here.
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
            raise UserError(
                f"the tokenizer returned {type(ids).__name__} instead of a flat list of ids"
            )
        bos = self.tokenizer.bos_token_id
        if len(ids) > 1 and ids[0] == ids[1] == bos:
            raise UserError(
                f"the chat template writes the token {self.tokenizer.bos_token} twice at the start"
            )
        return ids

    def _text(self, messages, tools, generation_prompt) -> str:
        if tools and not self.uses_tools:
            messages, tools = with_tools_in_system(messages, tools), None
        if self.splits_reasoning:
            messages = [with_reasoning_apart(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.clock,
                **self.kwargs,
            )
        except Exception as error:  # templates raise whatever their authors chose
            raise Reject("template_error", str(error)) from None

    def _uses_tools(self) -> bool:
        """Whether the template prints the tools it is given. Many small models' templates silently
        drop them."""
        self.uses_tools = True
        probe = [
            {
                "type": "function",
                "function": {"name": "probe_tool", "description": "d", "parameters": {}},
            }
        ]
        message = [{"role": "user", "content": "hi"}]
        try:
            return "probe_tool" in self._text(message, probe, True)
        except Reject:
            return False


def with_date(template: Any, day: date) -> Any:
    """The template (or templates by name) with every `strftime_now("format")` replaced by that date
    as a text.

    transformers offers the function to templates as a global that no argument overrides. Raises
    UserError where the format is not a plain text, since the date would then be today's."""
    if isinstance(template, dict):
        return {name: with_date(text, day) for name, text in template.items()}
    fixed = re.sub(
        r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""",
        lambda match: repr(day.strftime(match[2])),
        template,
    )
    if re.search(r"strftime_now\s*\(", fixed):
        raise UserError(
            "the chat template prints today's date in a form that cannot be fixed to "
            "target.template_date; put "
            "the date into chat_template.jinja by hand"
        )
    return fixed


def with_reasoning_apart(message: dict) -> dict:
    """An answer as templates of reasoning models want it: what stands before </think> in its own
    field.

    Served text has it in one piece, often without the opening tag, which was part of the prompt;
    left in the content it would come out as a second, empty thought followed by the first one as
    plain text."""
    content = message.get("content") or ""
    if (
        message["role"] != "assistant"
        or END_THINK not in content
        or message.get("reasoning_content")
    ):
        return message
    thought, _, answer = content.partition(END_THINK)
    return {
        **message,
        "reasoning_content": thought.partition(THINK)[2] if THINK in thought else thought,
        "content": answer,
    }


def with_tools_in_system(messages: list[dict], tools: list) -> list[dict]:
    """The same conversation with the tools as JSON in the system message."""
    from eagle3.core.files import canonical_json

    text = TOOLS_SENTENCE + "\n".join(canonical_json(tool) for tool in tools)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def probe(renderer: Renderer) -> dict[str, Any]:
    """Whether prompts of later turns extend earlier ones, checked on a two-turn conversation; for
    the stats files."""
    turns: list[dict] = []
    for text in ("one", "two"):
        turns += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": f"answer {text}"},
        ]
    first = renderer.full_ids(turns[:2])
    return {
        "history_is_kept": renderer.full_ids(turns)[: len(first)] == first,
        "uses_tools": renderer.uses_tools,
    }
