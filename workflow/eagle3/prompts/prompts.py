"""data/prompts/NAME.parquet: the prompts of a data set; written by prepare, read by generate.

Columns: `id` (hash of messages and tools), `messages` and `tools` (JSON text, since Arrow would
fill every object with every key), `prompt_ids` (int32 list: the first turn with the generation
prompt), `source_row`."""

import dataclasses
import heapq
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as parquet
import xxhash

from eagle3.core.errors import Reject, UserError
from eagle3.core.files import canonical_json, replacing, write_json, write_jsonl
from eagle3.prompts import rows as conversations
from eagle3.prompts.chat_template import Renderer

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("source_row", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Prompt:
    id: str
    messages: list[dict]
    tools: list
    prompt_ids: list[int]
    source_row: int


def rank(identifier: str) -> int:
    """Place of a row in the order by which caps choose: a hash, so that a raised cap keeps the
    earlier rows."""
    return xxhash.xxh3_64_intdigest(identifier.encode())


class Kept:
    """The chosen prompts in order of rank, each read from a temporary file when its turn comes."""

    def __init__(self, file: IO[bytes], offsets: list[int]):
        self.file, self.offsets = file, offsets

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Prompt]:
        for offset in self.offsets:
            self.file.seek(offset)
            yield Prompt(**json.loads(self.file.readline()))


def select(
    rows: Iterable[tuple[int, dict | Exception]], dataset, limits, renderer: Renderer
) -> tuple[Kept, list, dict]:
    """(prompts in order of rank, rejects, stats). Memory: a small entry per usable row, none of the
    rows themselves.

    `dataset` and `limits` are the sections `datasets.NAME` and `prompts` of params.yaml.
    """
    rejects: list[dict] = []
    reasons: Counter = Counter()
    seen: set[bytes] = set()
    total = duplicates = 0
    cap = dataset.max_samples
    kept: list[
        tuple[int, int, int, int]
    ] = []  # with a cap, a heap whose top is the row that a better one pushes out
    Path(".work/tmp").mkdir(parents=True, exist_ok=True)
    file = tempfile.TemporaryFile(dir=".work/tmp")
    for number, row in rows:
        total += 1
        try:
            prompt = _prompt(number, row, dataset, limits, renderer)
        except Reject as reject:
            reasons[reject.reason] += 1
            rejects.append({"row": number, "reason": reject.reason, "detail": reject.detail})
            continue
        identity = bytes.fromhex(prompt.id)
        if identity in seen:
            duplicates += 1
            continue
        seen.add(identity)
        entry = (-rank(prompt.id), -number, file.tell(), len(prompt.prompt_ids))
        if cap is None or len(kept) < cap:
            heapq.heappush(kept, entry) if cap else kept.append(entry)
        elif entry > kept[0]:
            heapq.heapreplace(kept, entry)
        else:
            continue
        file.write(json.dumps(dataclasses.asdict(prompt)).encode() + b"\n")
    kept.sort(reverse=True)
    stats = {
        "rows": total,
        "usable": len(seen),
        "kept": len(kept),
        "duplicates": duplicates,
        "rejected": sum(reasons.values()),
        "reasons": dict(sorted(reasons.items())),
        "prompt_tokens": sum(tokens for _, _, _, tokens in kept),
    }
    return Kept(file, [offset for _, _, offset, _ in kept]), rejects, stats


def _prompt(number: int, row, dataset, limits, renderer: Renderer) -> Prompt:
    if isinstance(row, Exception):
        raise Reject("unreadable", str(row))
    conversation = conversations.read(row, dataset.format, dataset.columns)
    messages = conversation.messages
    if dataset.answers == "generate":
        messages = conversations.open_turns(messages, dataset.max_turns)
    elif messages[-1]["role"] != "assistant":
        raise Reject("no_answer", "the last turn is not the assistant's")
    if limits.special_tokens_in_text == "reject" and (special := renderer.special_in(messages)):
        raise Reject("special_token_in_text", special)
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    ids = renderer.prompt_ids(messages[:first], conversation.tools)
    if len(ids) > limits.max_prompt_tokens:
        raise Reject("prompt_too_long", f"{len(ids)} tokens")
    identity = conversations.Conversation(messages, conversation.tools).id
    return Prompt(identity, messages, conversation.tools, ids, number)


def check_rejects(name: str, stats: dict, rejects: list[dict], limit: float) -> None:
    """Raises UserError with the reasons and an example when the share of rejected rows passes
    `limit`, or no prompt is left."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in stats["reasons"].items()) or "none"
    if not stats["rows"]:
        raise UserError(
            f"data set {name} is empty: its source has no rows; look at datasets.{name}.source "
            "in params.yaml"
        )
    if not stats["kept"] or stats["rejected"] / stats["rows"] > limit:
        first = rejects[0]
        raise UserError(
            f"data set {name}: {stats['rejected']} of {stats['rows']} rows rejected, more than "
            "prompts.max_reject_rate "
            f"{limit} allows ({reasons}; the first is row {first['row']}: {first['reason']} "
            f"{first['detail']}); set "
            f"datasets.{name}.format or columns, or raise the limit"
        )


def write(path: str | Path, prompts: Iterable[Prompt], rejects: list[dict], stats: dict) -> None:
    """Writes the Parquet file and, beside it, NAME.rejects.jsonl and NAME.stats.json."""
    path, prompts = Path(path), iter(prompts)
    write_jsonl(path.with_suffix(".rejects.jsonl"), rejects)
    write_json(path.with_suffix(".stats.json"), stats)
    with replacing(path) as temporary, parquet.ParquetWriter(temporary, SCHEMA) as writer:
        while batch := list(itertools.islice(prompts, 4096)):
            writer.write_table(
                pa.table(
                    {
                        "id": [p.id for p in batch],
                        "messages": [canonical_json(p.messages) for p in batch],
                        "tools": [canonical_json(p.tools) for p in batch],
                        "prompt_ids": [p.prompt_ids for p in batch],
                        "source_row": [p.source_row for p in batch],
                    },
                    schema=SCHEMA,
                )
            )


def read(path: str | Path) -> Iterator[Prompt]:
    """The prompts in file order, a row group at a time."""
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            yield Prompt(
                row["id"],
                json.loads(row["messages"]),
                json.loads(row["tools"]),
                row["prompt_ids"],
                row["source_row"],
            )


def count(path: str | Path) -> int:
    return parquet.ParquetFile(path).metadata.num_rows
