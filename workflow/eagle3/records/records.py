"""data/records/NAME.parquet: training sequences; written by tokenize, read by vocab, extract and
bench.

Columns: `id`, `input_ids` (int32 list), `loss_mask` (bool list: the tokens that the target wrote),
`split` ("train" or "validation", by hash of the conversation's id). Ids are the served ones; no
text is tokenised again."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import xxhash

from eagle3.core.errors import UserError
from eagle3.core.files import canonical_json, replacing

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("split", pa.string()),
    ]
)
BYTES = pa.list_(pa.uint8())


@dataclass(frozen=True)
class Record:
    id: str
    input_ids: list[int]
    loss_mask: list[bool]
    split: str


def split_of(identifier: str, validation_fraction: float) -> str:
    """The same side for a conversation in every build, whatever else is in the data set."""
    return (
        "validation"
        if xxhash.xxh3_64_intdigest(identifier.encode(), seed=1) < validation_fraction * 2**64
        else "train"
    )


def sequences(turns: list[dict]) -> list[tuple[list[int], list[bool]]]:
    """(ids, mask) of a conversation. Turns whose prompt extends what came before share a sequence;
    a template that rewrites history (drops earlier reasoning, log) starts a new one, as the server
    saw it.

    prompts [1 2], [1 2 7 3], answers [7], [8] -> one sequence [1 2 7 3 8] with mask [0 0 1 0 1].
    """
    found: list[tuple[list[int], list[bool]]] = []
    for turn in turns:
        prompt, output = turn["prompt_ids"], turn["output_ids"]
        if found and prompt[: len(found[-1][0])] == found[-1][0]:
            ids, mask = found.pop()
            mask = mask + [False] * (len(prompt) - len(ids))
        else:
            mask = [False] * len(prompt)
        found.append((prompt + output, mask + [True] * len(output)))
    return found


def build(rows: Iterable[dict], params, stats: Counter) -> Iterator[Record]:
    """Records of response rows; `params` is the section `records`. What is left out is counted in
    `stats`."""
    for row in rows:
        turns = row["turns"]
        if turns[-1]["finish_reason"] == "length":
            stats["truncated"] += 1
            if params.truncated_answers == "drop":
                turns = turns[:-1]
        made = sequences(turns)
        split = split_of(row["id"], params.validation_fraction)
        for place, (ids, mask) in enumerate(made):
            if len(ids) > params.max_tokens:
                stats["cut"] += 1
                ids, mask = ids[: params.max_tokens], mask[: params.max_tokens]
            if not any(mask):
                stats["without_supervision"] += 1
                continue
            stats["records"] += 1
            stats["tokens"] += len(ids)
            stats["supervised"] += sum(mask)
            yield Record(row["id"] if len(made) == 1 else f"{row['id']}-{place}", ids, mask, split)


def write(
    path: str | Path, records: Iterable[Record], stats: Counter, params, greedy: bool
) -> None:
    """Writes the file, with `stats` and whether the answers are greedy in its metadata.

    Raises UserError if the supervised share is outside its bounds.
    """
    with replacing(path) as temporary:
        with parquet.ParquetWriter(temporary, SCHEMA) as writer:
            batch: list[Record] = []
            for record in records:
                batch.append(record)
                if len(batch) == 2048:
                    writer.write_table(_table(batch))
                    batch = []
            if batch:
                writer.write_table(_table(batch))
            writer.add_key_value_metadata(
                {"eaglemake": canonical_json({**stats, "greedy": greedy})}
            )
        _check_sane(path, stats, params)


def _table(batch: list[Record]) -> pa.Table:
    columns = {name: [getattr(record, name) for record in batch] for name in SCHEMA.names}
    return pa.table(columns, schema=SCHEMA)


def _check_sane(path, stats: Counter, params) -> None:
    share = stats["supervised"] / max(stats["tokens"], 1)
    low, high = params.min_supervised_share, params.max_supervised_share
    if not low <= share <= high:
        raise UserError(
            f"{path}: {share:.1%} of {stats['tokens']} tokens are supervised, outside "
            "records.min_supervised_share "
            f"{low:.1%} to max_supervised_share {high:.1%}; look at the answers, or widen the "
            "bounds"
        )


def read(path: str | Path, split: str | None = None) -> Iterator[Record]:
    """Records in file order, those of one split or all."""
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=512):
        columns = [
            batch["id"].to_pylist(),
            _lists(batch["input_ids"], "i"),
            _lists(batch["loss_mask"].cast(BYTES), "?"),
            batch["split"].to_pylist(),
        ]
        for row in zip(*columns):
            if split is None or row[-1] == split:
                yield Record(*row)


def _lists(column: pa.ListArray, kind: str) -> Iterator[list]:
    """column.to_pylist(), which makes a call for each token; captures would wait. (And to_numpy()
    imports all of pandas.)"""
    values, places = column.values, column.offsets.to_pylist()
    values = memoryview(values.buffers()[1] or b"").cast(kind)[values.offset :]
    for begin, end in zip(places, places[1:]):
        yield values[begin:end].tolist()


def count(path: str | Path) -> int:
    return parquet.ParquetFile(path).metadata.num_rows


def metadata(path: str | Path) -> dict:
    """Counts of the file, and `greedy`: whether the target's likeliest tokens are what the records
    hold."""
    return json.loads(parquet.ParquetFile(path).metadata.metadata[b"eaglemake"])


def names(folder: str | Path) -> list[str]:
    """Data sets that have records in `folder`."""
    return sorted(path.stem for path in Path(folder).glob("*.parquet"))
