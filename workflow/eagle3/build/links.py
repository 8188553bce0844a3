"""Links from data/ into DVC's cache: what an edit through one, or a lost file behind one, leaves
for DVC to stumble over."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3.build.shared import log
from eagle3.core.dvc_cache import object_of


def without_dangling(ask: Callable[[], Any]) -> Any:
    """The answer of a question to DVC about files in data/, asked again without the links that lead
    nowhere.

    DVC deletes a file of its cache that it finds damaged (an output edited through its link), and
    then fails on the link."""
    while True:
        try:
            return ask()
        except FileNotFoundError:
            lost = [
                path
                for path in Path("data").rglob("*")
                if path.is_symlink() and not path.exists() and object_of(path)
            ]
            if not lost:
                raise
        for path in lost:
            log(f"{path}: its file in the cache was damaged and is gone; the build makes it again")
            path.unlink()
