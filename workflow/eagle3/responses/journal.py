"""The journal of a data set: one line per finished answer, appended as it finishes, found again by
its key.

The key is a digest of what determines an answer: prompt ids, room for the answer, sampling with
seed, and the target's numerics. Lines made under other numerics stay in the file and are simply not
found, until those parameters return."""

import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from eagle3.core.files import digest_of, read_json, write_json

FINISHED = ("stop", "length")
SYNC_EVERY = 5.0  # seconds of answers that a power cut may cost; a killed process costs none


def answer_key(stamp: str, prompt_ids: list[int], max_new_tokens: int) -> str:
    """32 hex digits. `stamp`: digest of sampling and numerics. The longest possible answer counts
    too: where the context is nearly full it is shorter than the sampling says."""
    digest = xxhash.xxh3_128(stamp.encode())
    digest.update(array("q", [max_new_tokens, *prompt_ids]).tobytes())
    return digest.hexdigest()


def is_success(row: Any) -> bool:
    """Whether a line is a whole, usable answer: known finish reason, ids that are ints and not none
    at all."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("key"), str)
        and row.get("finish_reason") in FINISHED
        and isinstance(row.get("output_ids"), list)
        and len(row["output_ids"]) > 0
        and all(type(i) is int for i in row["output_ids"])
    )


class Journal:
    """`journal.jsonl` in `folder`, open for appending. Holds one offset per key in memory (about
    160 bytes), never the answers. One process at a time: the stage's lock sees to that.

    `settings` (sampling and numerics) are kept beside it in `settings/DIGEST.json`, so that a
    change can be named, and what answered under them in `made_by/DIGEST.json`."""

    def __init__(self, folder: str | Path, settings: dict[str, Any]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "journal.jsonl"
        self.settings, self.stamp = settings, digest_of(settings)
        write_json(self.folder / "settings" / f"{self.stamp}.json", settings)
        self.offsets: dict[bytes, int] = {}
        self.foreign: Counter = Counter()
        self.broken = 0
        self.torn = self._repair()
        self.synced = time.monotonic()
        self._scan()
        self.file = open(self.path, "ab")
        self.reader = open(self.path, "rb")

    def _repair(self) -> int:
        """Cuts a last line that a kill left unfinished, so that the next append does not continue
        it. Bytes cut."""
        if not self.path.exists():
            return 0
        with open(self.path, "rb+") as file:
            end = size = file.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - 65536)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    end = start + found + 1
                    break
                end = start
            file.truncate(end)
            return size - end

    def _scan(self) -> None:
        if not self.path.exists():
            return
        offset = 0
        with open(self.path, "rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not is_success(row):
                    self.broken += 1
                elif row.get("settings") == self.stamp:
                    self.offsets.setdefault(bytes.fromhex(row["key"]), offset)
                else:
                    self.foreign[row.get("settings")] += 1
                offset += len(line)

    def __contains__(self, key: str) -> bool:
        return bytes.fromhex(key) in self.offsets

    def __len__(self) -> int:
        return len(self.offsets)

    def get(self, key: str) -> dict | None:
        """The answer with this key."""
        if (offset := self.offsets.get(bytes.fromhex(key))) is None:
            return None
        self.reader.seek(offset)
        row = json.loads(self.reader.readline())
        assert row["key"] == key, (
            f"{self.path} changed under its owner: {row['key']} at the place of {key}"
        )
        return row

    def append(self, row: dict) -> None:
        """Adds a finished answer: one write of one whole line. Answers that are there already are
        not added again.

        Raises ValueError for a row that is no success.
        """
        if not is_success(row):
            raise ValueError(f"not a finished answer: {row}")
        if row["key"] in self:
            return
        line = json.dumps({**row, "settings": self.stamp}, ensure_ascii=False).encode() + b"\n"
        offset = self.file.tell()
        self.file.write(line)
        self.file.flush()
        self.offsets[bytes.fromhex(row["key"])] = offset
        if time.monotonic() - self.synced > SYNC_EVERY:
            os.fsync(self.file.fileno())
            self.synced = time.monotonic()

    def made_by(self) -> list[dict]:
        """What answered under these settings, each once, in order of appearance."""
        path = self.folder / "made_by" / f"{self.stamp}.json"
        return read_json(path) if path.exists() else []

    def note_maker(self, maker: dict) -> None:
        known = self.made_by()
        if maker not in known:
            write_json(self.folder / "made_by" / f"{self.stamp}.json", [*known, maker])

    def adopt(self, rows: Iterable[dict]) -> int:
        """Takes over answers of a published artifact whose key belongs to these settings. Returns
        their number."""
        before = len(self.offsets)
        for row in rows:
            if is_success(row):
                self.append({k: v for k, v in row.items() if k != "settings"})
        return len(self.offsets) - before

    def foreign_reasons(self) -> list[str]:
        """For each other settings in the file: how many answers, and the fields that differ with
        both values."""
        lines = []
        for stamp, count in self.foreign.items():
            path = self.folder / "settings" / f"{stamp}.json"
            other = read_json(path) if path.exists() else {}
            differing = [
                f"{name} {other.get(name)!r}, now {value!r}"
                for name, value in self.settings.items()
                if other.get(name) != value
            ]
            lines.append(
                f"{count} answers were made under other settings "
                f"({'; '.join(differing) or 'unknown'}); they are "
                "not used, and kept for the day these settings return"
            )
        return lines

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.reader.close()
