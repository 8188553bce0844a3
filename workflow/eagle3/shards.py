"""data/hidden_states/NAME/: shards of hidden states and their manifest; written by extract, read by train.

A shard is a safetensors file with S sequences laid end to end, T tokens in all, H the target's hidden size:
`input_ids` int32 [T], `loss_mask` bool [T], `offsets` int64 [S+1], `aux` [T, 3H] (inputs of the captured layers, side by
side), `last` [T, H] (final hidden state), both in the storage type. `manifest.json` comes last; a folder without it is
unfinished.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eagle3.errors import Refusal
from eagle3.files import digest_file, digest_of, read_json, replacing, write_json
from eagle3.records import Record

MANIFEST = "manifest.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8_e4m3fn": torch.float8_e4m3fn}


def bytes_per_token(hidden_size: int, dtype: str) -> int:
    """Bytes that one token takes in a shard: 4H numbers, its id and its mask.

    >>> bytes_per_token(7168, "bfloat16") - 5
    57344
    """
    return 4 * hidden_size * DTYPES[dtype].itemsize + 5


@dataclass(frozen=True)
class States:
    """Captured states of one sequence of L tokens: `aux` [L, 3H], `last` [L, H]."""

    record: Record
    aux: torch.Tensor
    last: torch.Tensor


def plan(records: Iterable[Record], shard_bytes: int, token_bytes: int) -> Iterator[list[Record]]:
    """Groups records, in order, into shards of about `shard_bytes`. A record is never divided."""
    group: list[Record] = []
    size = 0
    for record in records:
        added = len(record.input_ids) * token_bytes
        if group and size + added > shard_bytes:
            yield group
            group, size = [], 0
        group.append(record)
        size += added
    if group:
        yield group


def shard_key(group: list[Record], identity: dict[str, Any]) -> str:
    """What a shard's bytes depend on. A shard with an unchanged key is used again."""
    return digest_of([identity, [[r.id, r.input_ids, [int(m) for m in r.loss_mask], r.split] for r in group]])


def write_shard(path: str | Path, states: list[States], dtype: str) -> dict[str, Any]:
    """Writes a shard and returns its manifest entry."""
    kind = DTYPES[dtype]
    lengths = torch.tensor([0] + [len(s.record.input_ids) for s in states])
    tensors = {
        "input_ids": torch.tensor([i for s in states for i in s.record.input_ids], dtype=torch.int32),
        "loss_mask": torch.tensor([m for s in states for m in s.record.loss_mask], dtype=torch.bool),
        "offsets": lengths.cumsum(0),
        "aux": torch.cat([s.aux for s in states]).to(kind),  # [T, 3H]
        "last": torch.cat([s.last for s in states]).to(kind),  # [T, H]
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary)
        digest, size = digest_file(temporary), temporary.stat().st_size
    return {"file": Path(path).name, "rows": len(states), "tokens": len(tensors["input_ids"]), "bytes": size,
            "digest": digest, "ids": [s.record.id for s in states], "splits": [s.record.split for s in states],
            "lengths": lengths[1:].tolist()}


def write_manifest(folder: str | Path, identity: dict[str, Any], shards: list[dict], **more: Any) -> None:
    write_json(Path(folder) / MANIFEST, {**identity, **more, "tokens": sum(s["tokens"] for s in shards),
                                         "rows": sum(s["rows"] for s in shards), "shards": shards})


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Raises Refusal when the folder is unfinished."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise Refusal(f"{folder} has no {MANIFEST}, so its shards are unfinished; `snakemake --cores all {path}`")
    return read_json(path)


def damaged(folder: str | Path, entry: dict[str, Any]) -> str:
    """Why a shard is not what its manifest entry says; empty if it is. Reads the whole file."""
    path = Path(folder) / entry["file"]
    if not path.exists():
        return "missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path.stat().st_size} bytes instead of {entry['bytes']}"
    found = digest_file(path)
    return "" if found == entry["digest"] else f"digest {found} instead of {entry['digest']}"


class ShardSet:
    """The sequences of several data sets' shards, one after the other, read through a memory map as they are asked for.

    At most `open_files` shards are mapped at a time.
    """

    def __init__(self, folders: Iterable[str | Path], split: str, expected: dict[str, Any], verify: bool = True,
                 open_files: int = 64):
        self.places: list[tuple[Path, int, int, str]] = []  # file, first token, end token, record id
        self.lengths: list[int] = []
        self.open_files, self.handles = open_files, OrderedDict()
        self.manifests = {}
        for folder in map(Path, folders):
            manifest = read_manifest(folder)
            refuse_unless_fitting(folder, manifest, expected)
            self.manifests[folder.name] = manifest
            for entry in manifest["shards"]:
                if verify and (reason := damaged(folder, entry)):
                    raise Refusal(f"{folder / entry['file']} is damaged: {reason}; delete it and run "
                                  f"`dvc repro extract@{folder.name}`, which rebuilds this shard only")
                start = 0
                for identifier, kept, length in zip(entry["ids"], entry["splits"], entry["lengths"]):
                    if kept == split:
                        self.places.append((folder / entry["file"], start, start + length, identifier))
                        self.lengths.append(length)
                    start += length

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`input_ids` [L], `loss_mask` [L], `aux` [L, 3H], `last` [L, H], `id` of a sequence."""
        path, start, end, identifier = self.places[index]
        tensors = self._open(path)
        row = {name: tensors.get_slice(name)[start:end] for name in ("input_ids", "loss_mask", "aux", "last")}
        return {**row, "id": identifier}

    def _open(self, path: Path):
        if path in self.handles:
            self.handles.move_to_end(path)
        else:
            try:
                self.handles[path] = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise Refusal(f"{path} cannot be read: {error}; run `dvc repro extract@{path.parent.name}`") from None
            if len(self.handles) > self.open_files:
                self.handles.popitem(last=False)
        return self.handles[path]


def refuse_unless_fitting(folder: str | Path, manifest: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises Refusal naming the first field in which a manifest differs from what is expected, with both values."""
    for field, value in expected.items():
        if manifest.get(field) != value:
            raise Refusal(f"{folder}/{MANIFEST} has {field} {manifest.get(field)!r}, but {value!r} is needed; "
                          f"`dvc repro extract@{Path(folder).name}` makes it so")


def names(folder: str | Path) -> list[str]:
    """Data sets that have finished states in `folder`."""
    return sorted(path.parent.name for path in Path(folder).glob(f"*/{MANIFEST}"))


def link(source: Path, destination: Path) -> None:
    """The same file under another name, without copying where the file system allows."""
    destination.unlink(missing_ok=True)
    os.link(os.path.realpath(source), destination)
