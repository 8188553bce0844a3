"""Times of files, by which Snakemake decides: never in the future, and before that of the key file
of a stale stage, whatever clocks say and however coarse the times of a file system are."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

APART = 3.0  # seconds; file systems that keep whole seconds round down


def leave_the_future(*folders: str | Path) -> None:
    """Sets times that lie in the future (a clock set back, a copy that kept its times) to now: of
    links, and of what they lead to."""
    now = time.time()
    for path in _files(folders):
        if path.lstat().st_mtime > now:
            os.utime(path, (now, now), follow_symlinks=False)
        with contextlib.suppress(OSError):  # another user's, in a shared cache
            if path.is_symlink() and path.stat().st_mtime > now:
                os.utime(path, (now, now))


def set_back(outputs: Iterable[str], key: Path) -> None:
    """Makes outputs older than their stage's key file."""
    before = key.stat().st_mtime - APART
    for path in _files(outputs):
        if path.lstat().st_mtime > before:
            os.utime(path, (before, before), follow_symlinks=False)


def set_to_now(outputs: Iterable[str]) -> None:
    for path in _files(outputs):
        os.utime(path, follow_symlinks=False)


def _files(places: Iterable[str | Path]) -> Iterator[Path]:
    for place in map(Path, places):
        if place.is_dir() and not place.is_symlink():
            yield from (path for path in place.rglob("*") if path.is_symlink() or path.is_file())
        elif place.is_symlink() or place.exists():
            yield place
