"""Disk space: what an artifact will take, with DVC's cache under the configured link type, against
what is free."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from eagle3.core.dvc_cache import cache_config
from eagle3.core.errors import UserError

FICLONE = 0x40049409
GIB = 2**30


def link_type(types: list[str], folder: Path, cache: Path) -> str:
    """The first of DVC's link types that works between `cache` and `folder`, tried with a small
    file."""
    source, destination = cache / f".link-{os.getpid()}", folder / f".link-{os.getpid()}"
    try:
        source.write_bytes(b"x")
        for kind in types:
            with contextlib.suppress(OSError):
                if kind == "reflink":
                    with open(source, "rb") as one, open(destination, "wb") as other:
                        fcntl.ioctl(other.fileno(), FICLONE, one.fileno())
                elif kind == "hardlink":
                    os.link(source, destination)
                elif kind == "symlink":
                    os.symlink(source, destination)
                return kind
            destination.unlink(missing_ok=True)
        return "copy"
    finally:
        source.unlink(missing_ok=True)
        destination.unlink(missing_ok=True)


def needs(size: int, folder: Path) -> tuple[dict[Path, int], str]:
    """({folder on each file system that `size` bytes of a DVC output will occupy: bytes there}, how
    they are linked)."""
    cache, types = cache_config()
    if not Path(".dvc").exists():
        return {folder: size}, "no DVC"
    cache.mkdir(parents=True, exist_ok=True)
    kind = link_type(types, folder, cache)
    if cache.stat().st_dev != folder.stat().st_dev:
        return {folder: size, cache: size}, kind
    # A folder that a stage has just written is linked to the cache only if the first type works;
    # DVC leaves a copy else.
    return {folder: size if kind == types[0] != "copy" else 2 * size}, kind


def check_size(folder: Path, needed: int, reserve: int, tokens: int, smaller: str = "") -> None:
    """Raises UserError with the three numbers and what would fit, before anything is written.

    `needed` bytes are for `tokens` tokens; `smaller` names a cheaper setting in words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places, kind = needs(needed, folder)
    for place, size in places.items():
        free = shutil.disk_usage(place).free
        if size + reserve > free:
            fits = max(0, free - reserve) * tokens // max(size, 1)
            raise UserError(
                f"hidden states need {size:,} bytes ({size / GIB:,.2f} GiB, DVC's cache "
                f"included, linked by {kind}) and "
                f"runtime.reserve_bytes keeps {reserve / GIB:,.2f} GiB, but {free / GIB:,.2f} "
                "GiB are free in "
                f"{place.resolve()}; {fits:,} of {tokens:,} tokens would fit: lower max_samples "
                "or records.max_tokens"
                f"{smaller}, or make room"
            )
