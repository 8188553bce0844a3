"""Earlier versions of an artifact, as dvc.lock records them: in the workspace, or in DVC's cache
after a pull."""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from eagle3.core.errors import UserError


def cached_files(stage: str, out: str) -> dict[str, Path]:
    """Files of the directory `out` that `stage` last published, as far as they are on this machine,
    by relative name.

    DVC and Snakemake delete an output before its stage runs, so the cache is where earlier rows
    survive."""
    found: dict[str, Path] = {}
    if Path("dvc.lock").exists():
        from eagle3.core.params import read_yaml

        cache, _ = cache_config()
        for entry in (read_yaml("dvc.lock") or {}).get("stages", {}).get(stage, {}).get("outs", []):
            if entry["path"] == out and entry.get("md5", "").endswith(".dir"):
                listing = cache_object(cache, entry["md5"])
                for member in json.loads(listing.read_text()) if listing.exists() else []:
                    if (file := cache_object(cache, member["md5"])).exists():
                        found[member["relpath"]] = file
    here = (
        {str(p.relative_to(out)): p for p in Path(out).rglob("*") if p.is_file()}
        if Path(out).is_dir()
        else {}
    )
    return {**found, **here}


def cached_file(stage: str, out: str, name: str) -> Path | None:
    """One of `cached_files`, if it is there and whole."""
    file = cached_files(stage, out).get(name)
    real = object_of(file) if file else None
    return None if real and not Verified().is_whole(real, again=True) else file


def cache_object(cache: Path, md5: str) -> Path:
    """Where DVC's cache keeps the content with this md5."""
    return cache / "files" / "md5" / md5[:2] / md5[2:]


class Verified:
    """Objects of DVC's cache that were hashed as they lie here, in `.build/verified`: a line each
    of the digest that names it, inode, size and time of the inode's last change.

    A write in place, through a link, with its times set back, or by a copy of the folder changes
    one of these, and the object is hashed again. A line that was damaged matches nothing."""

    def __init__(self, path: str | Path = ".build/verified"):
        self.path = Path(path)
        self._lines: set[str] | None = None

    def is_whole(self, file: Path, again: bool = False) -> bool:
        """Whether the content of a cache object is what its name says; `again` hashes it whatever
        is known, since a disk changes bytes and no time. Raises FileNotFoundError."""
        line = _line(file)
        if not again and line in self._known():
            return True
        with open(file, "rb") as opened:
            whole = hashlib.file_digest(opened, "md5").hexdigest() == _name(file)
        if whole and line == _line(file):
            self.add(file)
        return whole

    def add(self, file: Path) -> None:
        """Notes an object that was just hashed. One that changed a moment ago is not noted, as its
        time would not tell a change that follows at once."""
        line, changed = _line(file), file.stat().st_ctime_ns
        coarse = changed % 1_000_000_000 == 0  # a file system that keeps whole seconds
        settled = time.time_ns() - changed > (2_000_000_000 if coarse else 20_000_000)
        if settled and line not in self._known():
            self._known().add(line)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as out:
                out.write(f"{line}\n")

    def _known(self) -> set[str]:
        if self._lines is None:
            text = self.path.read_text(errors="replace") if self.path.exists() else ""
            self._lines = set(text.splitlines())
        return self._lines


def _name(file: Path) -> str:
    return (file.parent.name + file.name).removesuffix(".dir")


def _line(file: Path) -> str:
    stat = file.stat()
    return f"{_name(file)} {stat.st_ino} {stat.st_size} {stat.st_ctime_ns}"


def object_of(path: Path) -> Path | None:
    """The object of DVC's cache that a path is or leads to, whether it is there or not."""
    real = Path(os.path.realpath(path))
    named = re.fullmatch(r".*/files/md5/[0-9a-f]{2}/[0-9a-f]{30}(\.dir)?", str(real))
    return real if named else None


def check_mounted(path: str | Path) -> None:
    """Raises UserError for a link that leads nowhere and was not made by DVC."""
    if os.path.islink(path) and not os.path.exists(path) and not object_of(Path(path)):
        raise UserError(
            f"{path} leads to {os.readlink(path)}, which is not there; mount it or remove the "
            "link, then run the same command again"
        )


def drop_damaged(paths: Iterable[str | Path]) -> list[Path]:
    """Hashes what the links in `paths` (folders are walked) lead to and could have changed since.
    Removes damaged objects, with the links; returns the links."""
    verified, dropped = Verified(), []
    for path in map(Path, paths):
        for link in [path] if path.is_symlink() else sorted(path.rglob("*")):
            real = object_of(link) if link.is_symlink() else None
            if real and real.is_file() and not verified.is_whole(real):
                real.unlink()
                dropped.append(link)
    for link in dropped:
        link.unlink()
    return dropped


def remove_if_corrupt(path: Path) -> bool:
    """Removes an object of DVC's cache whose content is not what its name says; DVC would hand it
    out again and again."""
    cache = (cache_config()[0] / "files" / "md5").resolve()
    real = path.resolve()
    if cache not in real.parents or Verified().is_whole(real, again=True):
        return False
    real.unlink()
    return True


def cache_config() -> tuple[Path, list[str]]:
    """(folder of DVC's cache, link types in order of preference), from DVC's configuration at all
    of its levels."""
    from dvc.config import Config

    cache = Config(os.path.abspath(".dvc"))["cache"]
    return Path(cache.get("dir", ".dvc/cache")), cache.get("type", ["reflink", "copy"])
