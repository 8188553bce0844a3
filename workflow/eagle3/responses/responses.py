"""data/responses/NAME/: the answers of a data set; written by generate, read by tokenize.

`raw_responses.jsonl`: one row per prompt in prompt order, {"id", "turns": [{"key", "prompt_ids",
"output_ids", "text", "finish_reason", "usage"}]}. `errors.jsonl`: the prompts without an answer,
{"id", "turn", "reason", "detail", "tries"}.
`fingerprint.json`: what made the answers. Rows of both files together are the prompts, always.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.core.errors import UserError
from eagle3.core.files import read_json, read_jsonl, replacing, write_json

ROWS, ERRORS, FINGERPRINT = "raw_responses.jsonl", "errors.jsonl", "fingerprint.json"


class Writer:
    def __init__(self, folder: Path):
        self.rows = open(folder / ROWS, "w", encoding="utf-8")
        self.errors = open(folder / ERRORS, "w", encoding="utf-8")
        self.causes: Counter = Counter()
        self.answered, self.failed, self.truncated, self.tokens, self.broken = 0, 0, 0, 0, 0

    def answer(self, identifier: str, turns: list[dict]) -> None:
        self.rows.write(json.dumps({"id": identifier, "turns": turns}, ensure_ascii=False) + "\n")
        self.answered += 1
        self.truncated += turns[-1]["finish_reason"] == "length"
        self.tokens += sum(len(turn["output_ids"]) for turn in turns)
        self.broken += any(looks_broken(turn["output_ids"], turn["text"]) for turn in turns)

    def error(self, row: dict) -> None:
        self.errors.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.failed += 1
        self.causes[row["reason"]] += 1

    def reasons(self) -> str:
        """The errors by reason, most frequent first."""
        return ", ".join(f"{reason} {count}" for reason, count in self.causes.most_common())


def looks_broken(output_ids: list[int], text: str) -> bool:
    """Whether an answer ends in a loop (64 tokens with at most 4 different ones) or has unreadable
    characters in it.

    A server whose memory ran out, or whose kernels are wrong, answers so with every sign of
    success; a small model loops by itself now and then. What counts is the share. A character that
    the last token cuts in half is no sign."""
    return "\ufffd" in text.rstrip("\ufffd") or (
        len(output_ids) >= 64 and len(set(output_ids[-65:-1])) <= 4
    )


@contextmanager
def writing(folder: str | Path, fingerprint: dict) -> Iterator[Writer]:
    """Writes the whole folder under a temporary name and puts it in place at the end."""
    with replacing(folder) as temporary:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        writer = Writer(temporary)
        yield writer
        writer.rows.close()
        writer.errors.close()
        write_json(temporary / FINGERPRINT, fingerprint)


def read(folder: str | Path) -> Iterator[dict]:
    """Rows in prompt order. Raises UserError for a row without turns."""
    for row in read_jsonl(Path(folder) / ROWS):
        if not row.get("turns"):
            raise UserError(
                f"{folder}/{ROWS}: row {row.get('id')} has no turns; run `dvc repro -f` for its "
                "stage"
            )
        yield row


def fingerprint(folder: str | Path) -> dict:
    return read_json(Path(folder) / FINGERPRINT)


def made_by(fingerprint: dict[str, Any]) -> str:
    """Who answered, in which numerics, with which sampling, in one line of what is in
    fingerprint.json."""
    numerics, sampling = fingerprint.get("numerics", {}), fingerprint.get("sampling", {})
    makers = {
        _maker(maker): None for maker in fingerprint.get("made_by", []) if isinstance(maker, dict)
    }
    parts = [
        ", ".join(makers) or fingerprint.get("note") or fingerprint.get("engine", ""),
        *(
            f"{name} {plain(numerics[key])}"
            for name, key in (
                ("weights", "weights_digest"),
                ("dtype", "dtype"),
                ("quantization", "quantization"),
                ("KV cache", "kv_cache_dtype"),
            )
            if numerics.get(key)
        ),
        *(
            f"{key} {plain(sampling[key])}"
            for key in ("temperature", "top_p", "max_new_tokens")
            if key in sampling
        ),
    ]
    return ", ".join(part for part in parts if part)


def _maker(maker: dict[str, Any]) -> str:
    """'sglang 0.5.14' or 'transformers 5.24.0 on cpu'."""
    engine = maker.get("engine", "")
    version = maker.get("reported", {}).get("version") or maker.get("versions", {}).get(engine)
    return " ".join(
        filter(None, [engine, version, f"on {maker['device']}" if maker.get("device") else ""])
    )


def plain(value: Any) -> str:
    """Short for people: digests by their first 12 digits."""
    if isinstance(value, dict):
        return (
            "("
            + ", ".join(
                f"{key} {plain(inner)}" for key, inner in value.items() if inner not in (None, {})
            )
            + ")"
        )
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32,64}", value):
        return value[:12]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
