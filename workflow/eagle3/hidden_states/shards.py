"""data/hidden_states/NAME/: shards of hidden states and their manifest; written by extract, read by
train.

A shard is a safetensors file with S sequences laid end to end; `shard_layout.py` has its regions.
`manifest.json` comes last; a folder without it is unfinished. Its `shards` list has one entry per
file: rows, tokens, bytes, digest, and per row its id, length and split ("train", "validation", or
"quarantined": the bytes are there, nobody reads them).

The digest is xxh3-128 over the head of the file and the xxh3-64 of each row's states, so that it
grows with the rows, in whatever order they come."""

import array
import mmap
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from eagle3.core.errors import UserError
from eagle3.core.files import digest_of, read_json, write_json
from eagle3.core.progress import Progress
from eagle3.hidden_states import fp8
from eagle3.hidden_states.layout import KINDS, Layout, bytes_per_token, write_tokens
from eagle3.records.records import Record

MANIFEST = "manifest.json"
QUARANTINED = "quarantined"
TYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
DTYPES = {
    name: TYPES[kind] for name, (kind, _) in KINDS.items()
}  # storage types by their name in params.yaml
NO_SPACE = (27, 28, 122)  # file too large, no space left, over quota


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
    return digest_of(
        [identity, [[r.id, r.input_ids, [int(m) for m in r.loss_mask], r.split] for r in group]]
    )


class ShardWriter:
    """A shard being filled: `KEY.part`, already as large as it will be. Rows come in any order and
    in pieces.

    Raises UserError at once when the disk cannot hold the shard; what is finished stays.
    """

    def __init__(
        self, folder: str | Path, key: str, group: list[Record], hidden_size: int, dtype: str
    ):
        self.path, self.key, self.records = Path(folder) / f"{key}.part", key, group
        self.layout = Layout([len(r.input_ids) for r in group], hidden_size, dtype)
        self.problems: dict[int, str] = {}
        self.digests: list[bytes] = [b""] * len(group)
        self._covered: list[list[tuple[int, int]]] = [[] for _ in group]
        self._lock = threading.Lock()
        self.path.unlink(missing_ok=True)
        with open(self.path, "wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, self.layout.size)
            except OSError as error:
                self.path.unlink()
                if error.errno not in NO_SPACE:
                    raise
                free = shutil.disk_usage(folder).free
                raise UserError(
                    f"{self.path} needs {self.layout.size / 2**20:,.1f} MiB and "
                    f"{free / 2**20:,.1f} MiB are free "
                    f"({os.strerror(error.errno)}); finished shards are kept: make room and run "
                    "the same "
                    "command again"
                ) from error
            file.write(self.layout.header)
            for name, values in {
                "offsets": [array.array("q", self.layout.starts)],
                "input_ids": (array.array("i", r.input_ids) for r in group),
                "loss_mask": (bytes(r.loss_mask) for r in group),
            }.items():
                file.seek(self.layout.regions[name].begin)
                file.writelines(values)
        self._file = open(self.path, "r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)

    def write(self, row: int, stored: dict[str, torch.Tensor], begin: int, end: int) -> None:
        """Writes tokens `begin` to `end` of `stored` (see offload.states_to_store), which are the
        whole row."""
        write_tokens(str(self.path), self.layout, row, 0, stored, slice(begin, end))
        bad = stored["bad"][begin:end]
        self.cover(row, 0, end - begin, bad_of(bad) if bad.any() else "")

    def cover(self, row: int, token: int, count: int, problem: str = "") -> bool:
        """Notes that `count` tokens from `token` on are written; says whether the row is complete.
        It is hashed then, and sent on to the disk, or the disk would idle until the shard is full
        and everybody wait for it at the end."""
        with self._lock:
            if problem:
                self.problems.setdefault(row, problem)
            self._covered[row] = merged([*self._covered[row], (token, token + count)])
        complete = self._covered[row] == [(0, len(self.records[row].input_ids))]
        if complete:
            self.digests[row] = _row_digest(self._map, self.layout, row)
            for name in self.layout.states:
                place = self.layout.place(name, row)
                # What Linux does on this advice with pages that are not on the disk: it begins to
                # write them.
                os.posix_fadvise(
                    self._file.fileno(),
                    place,
                    self.layout.place(name, row + 1) - place,
                    os.POSIX_FADV_DONTNEED,
                )
        return complete

    def missing(self, row: int) -> str:
        """Which tokens of a row have no states, in words; empty if none."""
        covered, length = self._covered[row], len(self.records[row].input_ids)
        if covered == [(0, length)]:
            return ""
        return f"{sum(end - start for start, end in covered)} of {length} tokens have states" + (
            f", the first from token {covered[0][0]} on" if covered else ""
        )

    def finish(self) -> dict[str, Any]:
        """Puts the file in place, on the disk, and returns its manifest entry. Rows with problems
        are quarantined."""
        for row in range(len(self.records)):
            if self.missing(row):
                self.problems.setdefault(row, self.missing(row))
                self.digests[row] = _row_digest(self._map, self.layout, row)
        digest = _combined(self._map, self.layout, self.digests)
        self._map.close()
        with self._file:
            os.fsync(self._file.fileno())
        final = self.path.with_suffix(".safetensors")
        os.replace(self.path, final)
        splits = [
            QUARANTINED if row in self.problems else r.split for row, r in enumerate(self.records)
        ]
        tokens = sum(
            len(r.input_ids) for r, split in zip(self.records, splits) if split != QUARANTINED
        )
        return {
            "file": final.name,
            "rows": len(splits) - len(self.problems),
            "tokens": tokens,
            "bytes": self.layout.size,
            "digest": digest,
            "ids": [r.id for r in self.records],
            "splits": splits,
            "lengths": [len(r.input_ids) for r in self.records],
            QUARANTINED: [
                {"id": self.records[row].id, "reason": self.problems[row]}
                for row in sorted(self.problems)
            ],
        }

    def read(self, row: int) -> dict[str, torch.Tensor]:
        """A row as the reader will see it, in memory of its own."""
        return {name: tensor.clone() for name, tensor in _row(self._map, self.layout, row).items()}

    def discard(self) -> None:
        with self._lock:
            self._map.close()
            self._file.close()
            self.path.unlink(missing_ok=True)


def bad_of(bad: torch.Tensor) -> str:
    """Words for `bad` [n, 4]: which captured layers have NaN or inf, and from which token on."""
    parts = [
        name
        for name, one in zip(
            ("first layer", "second layer", "third layer", "last"), bad.any(0).tolist()
        )
        if one
    ]
    return f"NaN or inf in {', '.join(parts)} from token {int(bad.any(1).nonzero()[0])} on"


def merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pieces [start, end) in order, joined where they touch: [(4, 6), (0, 4), (8, 9)] -> [(0, 6),
    (8, 9)]."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _row_digest(mapped: mmap.mmap, layout: Layout, row: int) -> bytes:
    digest = xxhash.xxh3_64()
    with memoryview(mapped) as view:
        for name in layout.states:
            with view[layout.place(name, row) : layout.place(name, row + 1)] as part:
                digest.update(part)
    return digest.digest()


def _combined(mapped: mmap.mmap, layout: Layout, rows: list[bytes]) -> str:
    """Digest of the whole file: what surrounds the states, then the digests of the rows."""
    digest = xxhash.xxh3_128()
    with memoryview(mapped) as view:
        states = [layout.regions[name] for name in layout.states]
        for part in (slice(0, states[0].begin), slice(states[-1].end, len(view))):
            with view[part] as piece:
                digest.update(piece)
    for row in rows:
        digest.update(row)
    return digest.hexdigest()


def _row(mapped: mmap.mmap, layout: Layout, row: int) -> dict[str, torch.Tensor]:
    """The tensors of a row as views of the mapping (fp8: made bf16)."""
    found = {}
    for name, region in layout.regions.items():
        if name != "offsets":
            length = layout.starts[row + 1] - layout.starts[row]
            shape = (length, *region.shape[1:])
            found[name] = torch.frombuffer(
                mapped,
                dtype=TYPES[region.kind],
                count=length * (region.row_bytes // TYPES[region.kind].itemsize),
                offset=layout.place(name, row),
            ).view(shape)
    for name in ("aux", "last"):
        if (scales := found.pop(f"{name}_scales", None)) is not None:
            found[name] = fp8.dequantise(found[name], scales)
    return found


def write_manifest(
    folder: str | Path, identity: dict[str, Any], shards: list[dict], **more: Any
) -> None:
    write_json(
        Path(folder) / MANIFEST,
        {
            **identity,
            **more,
            "tokens": sum(s["tokens"] for s in shards),
            "rows": sum(s["rows"] for s in shards),
            "shards": shards,
        },
    )


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Raises UserError when the folder is unfinished."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise UserError(
            f"{folder} has no {MANIFEST}, so its shards are unfinished; `snakemake --cores all "
            f"{path}`"
        )
    return read_json(path)


def damaged(folder: str | Path, entry: dict[str, Any]) -> str:
    """Why a shard is not what its manifest entry says; empty if it is. Reads the whole file."""
    path = Path(folder) / entry["file"]
    if not path.exists():
        return "missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path.stat().st_size} bytes instead of {entry['bytes']}"
    try:
        layout = Layout.of_file(path)
        expected = Layout(entry["lengths"], layout.regions["last"].shape[1], layout.dtype)
        if layout.header != expected.header or layout.starts != expected.starts:
            return f"its header or row offsets are not those of {len(entry['lengths'])} rows"
    except (ValueError, KeyError, IndexError, OSError) as error:
        return f"unreadable header ({error})"
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        found = _combined(
            mapped,
            layout,
            [_row_digest(mapped, layout, row) for row in range(len(layout.starts) - 1)],
        )
    return "" if found == entry["digest"] else f"digest {found} instead of {entry['digest']}"


class ShardSet:
    """The sequences of several data sets' shards, one after the other, read through memory maps as
    they are asked for.

    Any order costs the same, so a shuffle goes across all shards. At most `open_files` are mapped
    at a time in each process; DataLoader workers map their own. With `verify` every file's digest
    is checked once, here."""

    def __init__(
        self,
        folders: Iterable[str | Path],
        split: str,
        expected: dict[str, Any],
        verify: bool = True,
        open_files: int = 64,
    ):
        self.places: list[tuple[Path, int, str]] = []  # file, row in it, record id
        self.lengths: list[int] = []
        self.open_files, self._maps = open_files, OrderedDict()
        self.manifests = {}
        self._sizes: dict[Path, int] = {}
        for folder in map(Path, folders):
            manifest = read_manifest(folder)
            check_fit(folder, manifest, expected)
            self.manifests[folder.name] = manifest
            for entry in manifest["shards"]:
                self._sizes[folder / entry["file"]] = entry["bytes"]
                for row, (identifier, kept, length) in enumerate(
                    zip(entry["ids"], entry["splits"], entry["lengths"])
                ):
                    if kept == split:
                        self.places.append((folder / entry["file"], row, identifier))
                        self.lengths.append(length)
            if verify:
                check_damage(folder, manifest)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`input_ids` [L], `loss_mask` [L], `aux` [L, 3H], `last` [L, H], `id` of a sequence. Not
        to be written to."""
        path, row, identifier = self.places[index]
        return {**_row(*self._open(path), row), "id": identifier}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}

    def _open(self, path: Path) -> tuple[mmap.mmap, Layout]:
        if path in self._maps:
            self._maps.move_to_end(path)
            return self._maps[path]
        try:
            # A file that is shorter than its layout would end this process with SIGBUS at the first
            # missing page.
            if path.stat().st_size != self._sizes[path]:
                raise ValueError(f"{path.stat().st_size} bytes instead of {self._sizes[path]}")
            with open(path, "rb") as file:
                # Private: torch takes no read-only memory, and nothing that is written here reaches
                # the file.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[path] = mapped, Layout.of_file(path)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path} is damaged: {error}; {repair(path.parent)}") from None
        if len(self._maps) > self.open_files:
            self._maps.popitem(last=False)  # rows that are still in use keep their mapping alive
        return self._maps[path]


def check_damage(folder: Path, manifest: dict[str, Any], threads: int = 4) -> None:
    """Reads every shard once. Raises UserError naming the damaged ones and how to rebuild them
    alone."""
    entries = manifest["shards"]
    with (
        ThreadPoolExecutor(threads) as pool,
        Progress(f"checking {folder}", len(entries), "shards") as bar,
    ):
        reasons = []
        for entry, reason in zip(entries, pool.map(lambda entry: damaged(folder, entry), entries)):
            bar.add(1, bytes=entry["bytes"])
            if reason:
                reasons.append(f"{folder / entry['file']} is damaged: {reason}")
    if reasons:
        raise UserError(
            f"{'; '.join(reasons[:5])}; {len(reasons)} of {len(entries)} shards; {repair(folder)}"
        )


def repair(folder: Path) -> str:
    return (
        f"`dvc repro --force --single-item extract@{folder.name}` rebuilds what is damaged "
        "and nothing else"
    )


def check_fit(folder: str | Path, manifest: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises UserError naming the first field in which a manifest differs from what is expected,
    with both values."""
    for field, value in expected.items():
        if manifest.get(field) != value:
            raise UserError(
                f"{folder}/{MANIFEST} has {field} {manifest.get(field)!r}, but {value!r} is "
                "needed; "
                f"`dvc repro extract@{Path(folder).name}` makes it so"
            )


def link(source: Path, destination: Path) -> None:
    """The same file under another name; copied only where the two lie on different file systems."""
    destination.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source), destination)
    except OSError:
        shutil.copyfile(source, destination)


__all__ = [
    "DTYPES",
    "ShardSet",
    "ShardWriter",
    "bytes_per_token",
    "damaged",
    "link",
    "plan",
    "read_manifest",
    "shard_key",
    "write_manifest",
]
