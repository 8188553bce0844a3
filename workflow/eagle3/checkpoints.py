"""Checkpoints of training: whole files, rotated, valid for one key only."""

import re
from pathlib import Path
from typing import Any

import torch

from eagle3.errors import Refusal
from eagle3.files import digest_of, read_json, replacing, write_json


class Checkpoints:
    """`update-N.pt` files in `folder`. `identity` is what the run depends on; files of another are refused by name."""

    def __init__(self, folder: str | Path, identity: dict[str, Any], keep: int):
        self.folder, self.identity, self.keep = Path(folder), identity, keep
        self.key = digest_of(identity)
        self.other: list[str] = []
        known = self.folder / "identity.json"
        if known.exists() and digest_of(earlier := read_json(known)) != self.key:
            self.other = [f"{name} {earlier.get(name)!r}, now {value!r}" for name, value in identity.items()
                          if digest_of(earlier.get(name)) != digest_of(value)]
            for file in self._files():
                file.unlink()
        write_json(known, identity)

    def _files(self) -> list[Path]:
        found = [(int(m[1]), p) for p in self.folder.glob("update-*.pt") if (m := re.search(r"update-(\d+)\.pt$", p.name))]
        return [path for _, path in sorted(found)]

    def save(self, update: int, state: dict[str, Any]) -> None:
        with replacing(self.folder / f"update-{update}.pt") as temporary:
            torch.save({"key": self.key, "update": update, **state}, temporary)
        for old in self._files()[: -self.keep]:
            old.unlink()

    def latest(self) -> dict[str, Any] | None:
        """The newest readable checkpoint, on the CPU. A damaged file is skipped for the one before it."""
        for path in reversed(self._files()):
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except Exception:  # torch raises whatever its unpickler meets
                continue
            if state["key"] != self.key:
                raise Refusal(f"{path} belongs to another run ({state['key'][:12]}, not {self.key[:12]}); delete it")
            return state
        return None
