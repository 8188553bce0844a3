"""Prompts that the drafter has not seen: the validation split, and question sets from elsewhere.

Whoever was trained on is known by the content hash of the prompt's ids, so that the same question
under another name, in another data set or with another answer is found too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.core.errors import Reject, UserError
from eagle3.core.files import digest_of
from eagle3.prompts import prompts
from eagle3.prompts import rows as conversations
from eagle3.records import records


def collect(
    folder: str | Path, limit: int, seen: set[str], questions: dict[str, list[dict]] | None = None
) -> tuple[list[dict], dict[str, Any]]:
    """(prompts {"dataset", "id", "prompt_ids"}, counts by set). Up to `limit` of the validation
    splits in `folder` and all
    `questions`, both taken from the sets in turn; what training has `seen` is left out and counted.

    Raises UserError if none is left.
    """
    counts: dict[str, Any] = {}
    queues = {
        name: _unseen(
            name,
            validation_prompts(Path(folder) / f"{name}.parquet", name),
            seen,
            counts,
            "validation",
        )
        for name in records.names(folder)
    }
    chosen = in_turn(list(queues.values()))[:limit]
    asked = {
        name: _unseen(name, rows, seen, counts, "questions")
        for name, rows in (questions or {}).items()
    }
    chosen += in_turn(list(asked.values()))
    if not chosen:
        left_out = sum(count["seen_in_training"] for count in counts.values())
        raise UserError(
            f"no held-out prompts ({left_out} left out because training has seen them); raise "
            "records.validation_fraction, or add bench.questions"
        )
    for row in chosen:
        counts[row["dataset"]]["used"] += 1
    return chosen, counts


def _unseen(
    name: str, rows: Iterator[dict] | list[dict], seen: set[str], counts: dict, source: str
) -> list[dict]:
    rows = list({prompt_hash(row["prompt_ids"]): row for row in rows}.values())
    kept = [row for row in rows if prompt_hash(row["prompt_ids"]) not in seen]
    counts[name] = {
        "source": source,
        "available": len(rows),
        "seen_in_training": len(rows) - len(kept),
        "used": 0,
    }
    return kept


def in_turn(queues: list[list[dict]]) -> list[dict]:
    """One of each queue, then the next of each: every set has its share of whatever is cut off
    later.

    >>> in_turn([[1, 2], [3]])
    [1, 3, 2]
    """
    return [
        queue[turn]
        for turn in range(max(map(len, queues), default=0))
        for queue in queues
        if turn < len(queue)
    ]


def prompt_hash(ids: list[int]) -> str:
    return digest_of(ids)


def first_prompt(record: records.Record) -> list[int]:
    """The ids before the first token that the target wrote."""
    return record.input_ids[: record.loss_mask.index(True)]


def trained_prompts(folder: str | Path) -> set[str]:
    """Content hashes of the prompts of all training records."""
    return {
        prompt_hash(first_prompt(record))
        for name in records.names(folder)
        for record in records.read(Path(folder) / f"{name}.parquet", "train")
    }


def validation_prompts(path: Path, name: str) -> list[dict]:
    """The prompts of a data set's validation records, in order of hash."""
    rows = sorted(records.read(path, "validation"), key=lambda record: prompts.rank(record.id))
    return [{"dataset": name, "id": row.id, "prompt_ids": first_prompt(row)} for row in rows]


def questions(name: str, rows, wanted, renderer, limits, seen: set[str]) -> list[dict]:
    """Prompts of the question set `name` (a section of bench.questions) from its source's `rows`:
    first turns, rendered as everywhere, chosen by hash after those that training has seen are gone.
    Raises UserError if no row is usable."""
    found: dict[str, dict] = {}
    reasons: dict[str, int] = {}
    for _, row in rows:
        try:
            ids = _question_ids(row, wanted, renderer, limits)
        except Reject as reject:
            reasons[reject.reason] = reasons.get(reject.reason, 0) + 1
            continue
        key = prompt_hash(ids)
        found[key] = {"dataset": name, "id": key, "prompt_ids": ids}
    if not found:
        raise UserError(
            f"bench.questions.{name}: no row is usable ({reasons or 'it has none'}); set its "
            "format or columns"
        )
    ordered = sorted(found, key=lambda key: (key in seen, prompts.rank(key)))
    return [found[key] for key in ordered[: wanted.max_samples]]


def _question_ids(row, wanted, renderer, limits) -> list[int]:
    if isinstance(row, Exception):
        raise Reject("unreadable", str(row))
    columns = dict(wanted.columns)
    if "prompt" in columns and isinstance(
        row.get(columns["prompt"]), list
    ):  # turns as plain texts: the first one is asked
        row = {**row, columns["prompt"]: row[columns["prompt"]][0]}
    conversation = conversations.read(row, wanted.format, columns)
    last = next(
        (i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"),
        len(conversation.messages),
    )
    messages = conversation.messages[:last]
    if special := renderer.special_in(messages):
        raise Reject("special_token_in_text", special)
    ids = renderer.prompt_ids(messages, conversation.tools)
    if len(ids) > limits:
        raise Reject("prompt_too_long", f"{len(ids)} tokens")
    return ids
