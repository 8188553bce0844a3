"""Checkpoints of training: whole files, rotated, valid for one key only."""

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from eagle3.core.errors import UserError
from eagle3.core.files import digest_of, read_json, replacing, write_json


class Checkpoints:
    """`update-N.pt` files of one run, in a folder of `root` that is named by the digest of
    `identity`: all that it depends on.

    Another identity is another run with a folder of its own, so that an edit that is put back goes
    on where it was. Of all other runs only the last one is kept, with its newest file. `other` says
    how it differs from this one."""

    def __init__(self, root: str | Path, identity: dict[str, Any], keep: int):
        self.identity, self.keep = identity, keep
        self.key = digest_of(identity)
        self.folder = Path(root) / self.key[:16]
        others = sorted(
            (p.parent for p in Path(root).glob("*/identity.json") if p.parent != self.folder),
            key=lambda folder: (folder / "identity.json").stat().st_mtime_ns,
        )
        self.other = (
            differences(read_json(others[-1] / "identity.json"), identity) if others else []
        )
        for folder in others[:-1]:
            shutil.rmtree(folder)
        for folder in others[-1:]:
            for file in _files(folder)[:-1]:
                file.unlink()
        write_json(self.folder / "identity.json", identity)
        os.utime(self.folder / "identity.json")  # the last one used, even if it was written before

    def save(self, update: int, state: dict[str, Any]) -> None:
        with replacing(self.folder / f"update-{update}.pt") as temporary:
            torch.save({"key": self.key, "update": update, **state}, temporary)
        for old in _files(self.folder)[: -self.keep]:
            old.unlink()

    def latest(self) -> dict[str, Any] | None:
        """The newest readable checkpoint, on the CPU. A damaged file is skipped for the one before
        it."""
        for path in reversed(_files(self.folder)):
            try:
                with zipfile.ZipFile(path) as archive:  # torch itself compares no checksum
                    damaged = archive.testzip()
                state = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises whatever its unpickler meets
                damaged = type(error).__name__
            if damaged:
                print(f"{path} is damaged ({damaged}); the one before it is taken", file=sys.stderr)
                continue
            if state["key"] != self.key:
                raise UserError(
                    f"{path} belongs to another run ({state['key'][:12]}, not {self.key[:12]}); "
                    "delete it"
                )
            return state
        return None


def _files(folder: Path) -> list[Path]:
    found = [
        (int(m[1]), p)
        for p in folder.glob("update-*.pt")
        if (m := re.search(r"update-(\d+)\.pt$", p.name))
    ]
    return [path for _, path in sorted(found)]


def differences(earlier: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two nested values, key by key: 'params.lr 0.0001, now 0.0002'."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        return [
            line
            for key in dict.fromkeys([*now, *earlier])
            for line in differences(
                earlier.get(key), now.get(key), f"{name}.{key}" if name else str(key)
            )
        ]
    return [] if digest_of(earlier) == digest_of(now) else [f"{name} {earlier!r}, now {now!r}"]
