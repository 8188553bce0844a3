"""Answering the prompts of a data set: what is wanted, what is there already, what is to go, and
the final artifact."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3.core.errors import Reject, UserError
from eagle3.prompts import prompts as prompt_files
from eagle3.prompts.chat_template import Renderer
from eagle3.prompts.prompts import Prompt
from eagle3.responses import responses
from eagle3.responses.engines import Request, Result
from eagle3.responses.journal import Journal, answer_key
from eagle3.responses.status import Status


class Answering:
    """The state of one data set. Conversations are answered turn by turn; a turn's prompt holds the
    answers before it.

    Memory: one small entry per prompt that is under way or failed, none per finished answer beyond
    the journal's index."""

    def __init__(
        self,
        path: str | Path,
        renderer: Renderer,
        journal: Journal,
        sampling: dict,
        context_length: int,
        token_budget: int | None = None,
    ):
        self.path, self.renderer, self.journal, self.sampling = path, renderer, journal, sampling
        self.context_length, self.token_budget = context_length, token_budget
        self.errors: dict[str, dict] = {}
        self.under_way: dict[str, Prompt] = {}
        self.tokens = 0
        self.status: Status | None = None

    def _limit(self, prompt_ids: list[int]) -> int:
        """Tokens that the answer to a prompt may have; less than 1 if the context is full."""
        return min(self.sampling["max_new_tokens"], self.context_length - len(prompt_ids))

    def adopt(self, rows: Iterable[dict]) -> int:
        """Takes answers of a published artifact into the journal, those that the present settings
        made. Their number."""

        def fitting():
            for row in rows:
                for place, turn in enumerate(row["turns"]):
                    limit = self._limit(turn["prompt_ids"])
                    if turn["key"] == answer_key(self.journal.stamp, turn["prompt_ids"], limit):
                        yield {
                            **{k: v for k, v in turn.items() if k != "prompt_ids"},
                            "id": row["id"],
                            "turn": place,
                        }

        return self.journal.adopt(fitting())

    def progress_of(self, prompt: Prompt) -> tuple[list[dict], Request | None]:
        """(answered turns, request for the next one or None if the conversation is finished).

        It ends early where an answer was cut (what follows would answer half a sentence) or the
        context is full. Raises Reject when the first turn does not fit or the template fails."""
        turns: list[dict] = []
        messages = [dict(m) for m in prompt.messages]
        for place in [
            i for i, m in enumerate(messages) if m["content"] is None and m["role"] == "assistant"
        ]:
            ids = (
                prompt.prompt_ids
                if not turns
                else self.renderer.prompt_ids(messages[:place], prompt.tools)
            )
            limit = self._limit(ids)
            if limit < 1:
                if not turns:
                    raise Reject(
                        "prompt_too_long", f"{len(ids)} tokens, context {self.context_length}"
                    )
                return turns, None
            key = answer_key(self.journal.stamp, ids, limit)
            answer = self.journal.get(key)
            if answer is None:
                seed = (self.sampling["seed"] * 0x9E3779B1 + int(key[:12], 16)) % 2**31
                return turns, Request(prompt.id, len(turns), key, ids, limit, seed)
            turns.append(
                {
                    "key": key,
                    "prompt_ids": ids,
                    **{
                        name: answer[name]
                        for name in ("output_ids", "text", "finish_reason", "usage")
                    },
                }
            )
            if answer["finish_reason"] == "length":
                return turns, None
            messages[place]["content"] = answer["text"] or " "
        return turns, None

    def count(self) -> tuple[int, int, int]:
        """(prompts wanted, prompts finished, tokens of their answers). With a token budget more may
        be wanted in the end: how many prompts hold it is known when they are answered."""
        wanted = finished = tokens = 0
        for prompt in prompt_files.read(self.path):
            if self.token_budget is not None and tokens >= self.token_budget:
                break
            wanted += 1
            try:
                turns, missing = self.progress_of(prompt)
            except Reject:
                turns, missing = [], None
            finished += missing is None
            tokens += sum(len(turn["output_ids"]) for turn in turns)
        return wanted, finished, tokens

    def requests(self) -> Iterator[Request]:
        """The first missing turn of every prompt, in prompt order, until the token budget is
        reached.

        Answers in flight at that moment finish and count; since all prompts before them have been
        asked too, the cut (the shortest run of prompts from the first that holds the budget) is the
        same whatever the order of arrival."""
        for prompt in prompt_files.read(self.path):
            if self.token_budget is not None and self.tokens >= self.token_budget:
                return
            try:
                turns, request = self.progress_of(prompt)
            except Reject as reject:
                self._fail(prompt.id, 0, reject.reason, reject.detail, 0)
                continue
            self.tokens += sum(len(turn["output_ids"]) for turn in turns)
            if request:
                self.under_way[prompt.id] = prompt
                yield request

    def on_result(self, result: Result) -> Request | None:
        """Records an answer or an error; returns the request for the conversation's next turn, if
        there is one."""
        request = result.request
        if result.error:
            self._fail(request.row_id, request.turn, result.error, result.detail, result.tries)
            return None
        self.journal.append(
            {
                "key": request.key,
                "id": request.row_id,
                "turn": request.turn,
                "output_ids": result.output_ids,
                "text": self.renderer.decode(result.output_ids),
                "finish_reason": result.finish_reason,
                "usage": {
                    "prompt_tokens": len(request.prompt_ids),
                    "completion_tokens": len(result.output_ids),
                },
            }
        )
        self.tokens += len(result.output_ids)
        following = None
        try:
            following = self.progress_of(self.under_way[request.row_id])[1]
        except Reject as reject:
            self._fail(request.row_id, request.turn + 1, reject.reason, reject.detail, 0)
        if following is None:
            self.under_way.pop(request.row_id, None)
        if self.status:
            self.status.answered(
                len(result.output_ids), result.finish_reason == "length", following is None
            )
        return following

    def _fail(self, identifier: str, turn: int, reason: str, detail: str, tries: int) -> None:
        self.errors[identifier] = {
            "id": identifier,
            "turn": turn,
            "reason": reason,
            "detail": detail,
            "tries": tries,
        }
        self.under_way.pop(identifier, None)
        if self.status:
            self.status.failed(reason)

    def publish(self, folder: str | Path, fingerprint: dict[str, Any]) -> responses.Writer:
        """Writes the artifact. Raises UserError if a prompt has neither an answer nor an error."""
        tokens = 0
        with responses.writing(folder, fingerprint) as writer:
            for prompt in prompt_files.read(self.path):
                if self.token_budget is not None and tokens >= self.token_budget:
                    break
                if prompt.id in self.errors:
                    writer.error(self.errors[prompt.id])
                    continue
                turns, missing = self.progress_of(prompt)
                if missing:
                    raise UserError(
                        f"prompt {prompt.id} has neither an answer nor an error; run the same "
                        "command again"
                    )
                writer.answer(prompt.id, turns)
                tokens += sum(len(turn["output_ids"]) for turn in turns)
        return writer


def given_turns(prompt: Prompt, renderer: Renderer, max_answer_tokens: int) -> list[dict]:
    """The turns of a conversation that already has its answers, as if the target had just given
    them.

    An answer is what its rendering adds to the rendered prompt, compared id by id; no text is
    searched. Raises Reject where a template changes the prompt when the answer is added, or an
    answer is too long."""
    turns = []
    for place in [i for i, m in enumerate(prompt.messages) if m["role"] == "assistant"]:
        ids = renderer.prompt_ids(prompt.messages[:place], prompt.tools)
        whole = renderer.full_ids(prompt.messages[: place + 1], prompt.tools)
        if whole[: len(ids)] != ids:
            raise Reject(
                "template_changes_prompt",
                f"turn {len(turns)}: the prompt is no prefix of prompt and answer",
            )
        output = whole[len(ids) :]
        stop = renderer.tokenizer.eos_token_id
        if stop in output:  # templates add a newline after the end token, which no model generates
            output = output[: output.index(stop) + 1]
        if not output:
            raise Reject("empty_message", "the answer adds no token")
        if len(output) > max_answer_tokens:
            raise Reject("answer_too_long", f"{len(output)} tokens")
        turns.append(
            {
                "key": "",
                "prompt_ids": ids,
                "output_ids": output,
                "text": renderer.decode(output),
                "finish_reason": "stop",
                "usage": {"prompt_tokens": len(ids), "completion_tokens": len(output)},
            }
        )
    return turns


def publish_given(
    path: str | Path, folder: str | Path, renderer: Renderer, max_answer_tokens: int
) -> responses.Writer:
    """The artifact of an on-policy data set."""
    note = {"engine": "given", "note": "answers come with the data set; nothing was generated"}
    with responses.writing(folder, note) as writer:
        for prompt in prompt_files.read(path):
            try:
                writer.answer(prompt.id, given_turns(prompt, renderer, max_answer_tokens))
            except Reject as reject:
                writer.error(
                    {
                        "id": prompt.id,
                        "turn": 0,
                        "reason": reject.reason,
                        "detail": reject.detail,
                        "tries": 0,
                    }
                )
    return writer


def check_errors(name: str, writer: responses.Writer, limit: float) -> None:
    """Raises UserError when the share of failed rows passes `limit` or nothing was answered."""
    total = writer.answered + writer.failed
    if not writer.answered or writer.failed / total > limit:
        raise UserError(
            f"data set {name}: {writer.failed} of {total} prompts have no answer, more than "
            "generate.max_error_rate "
            f"{limit} allows; reasons: {writer.reasons()}"
        )
