"""Links from data/ into DVC's cache: what an edit through one, or a lost file behind one, leaves
for DVC to stumble over."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3.build.shared import log


def without_dangling(ask: Callable[[], Any]) -> Any:
    """The answer of a question to DVC about files in data/, asked again without the links that lead
    nowhere.

    DVC deletes a file of its cache that it finds damaged (an output edited through its link), and
    then fails on the link."""
    try:
        return ask()
    except FileNotFoundError:
        for path in Path("data").rglob("*"):
            if path.is_symlink() and not path.exists():
                log(
                    f"{path}: its file in the cache was damaged and is gone; the build makes it "
                    "again"
                )
                path.unlink()
        return ask()


def drop_damaged(repo, stage) -> None:
    """Removes from the cache what no longer is what its name says: an output edited in place,
    through its link.

    DVC takes a read-only file of its cache at its word, would link the damaged one again, and
    record it as the result. Only objects changed since DVC last saw them are read."""
    for out in stage.outs:
        path = Path(out.fs_path)
        for file in [path] if path.is_symlink() else path.rglob("*") if path.is_dir() else []:
            target = Path(os.path.realpath(file))
            if (
                file.is_symlink()
                and target.is_file()
                and Path(repo.cache.local.path) in target.parents
            ):
                _drop_if_damaged(repo, target)


def _drop_if_damaged(repo, path: Path) -> None:
    from dvc_data.hashfile.hash import file_md5

    named = path.parent.name + path.name
    _, known = repo.state.get(str(path), repo.cache.local.fs)
    if known is None and file_md5(str(path), repo.cache.local.fs) != named:
        print(
            f"{path.name[:8]}: changed inside the cache by an edit of the file linked to it; "
            "discarded",
            flush=True,
        )
        path.chmod(0o644)
        path.unlink()
