"""Artifacts of data sets that left params.yaml.

Some stages depend on a folder of all data sets as a whole, and DVC hashes what lies in it. What is
left of another data set there would be part of that hash here and of none in a clone. It stays in
DVC's cache, and comes back from it."""

import shutil
from collections.abc import Iterable
from pathlib import Path

FOLDERS = ("records", "hidden_states", "responses")


def remove(folders: Iterable[str | Path], datasets: Iterable[str]) -> list[Path]:
    """Clears those of `folders` that hold an entry per data set; returns what it removed. Call it
    before looking at what is in them."""
    names = set(datasets)
    entries = [
        entry
        for folder in map(Path, folders)
        if folder.name in FOLDERS and folder.is_dir()
        for entry in folder.iterdir()
    ]
    removed = [
        entry
        for entry in entries
        if not entry.name.startswith(".") and entry.name.removesuffix(".parquet") not in names
    ]
    for entry in removed:
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return sorted(removed)
