"""Artifacts of data sets that left params.yaml, and files in data/ that no build made.

Some stages depend on a folder of all data sets as a whole, and DVC hashes what lies in it. What the
build made for another data set, by dvc.lock and by its content, is removed; it stays in DVC's cache
and comes back from it. Anything else is left where it is, and named in data/.dvcignore, so that it
decides nothing."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from eagle3.core.dvc_cache import cache_config, cache_object, object_of

FOLDERS = ("records", "hidden_states", "responses")
IGNORED = Path("data/.dvcignore")


def entries(datasets: Iterable[str], folders: Iterable[str | Path] | None = None) -> list[Path]:
    """What lies in the folders of all data sets (or in those of `folders` that are such) and is of
    none of `datasets`."""
    names = set(datasets)
    chosen = map(Path, folders) if folders is not None else (Path("data") / f for f in FOLDERS)
    return sorted(
        entry
        for folder in chosen
        if folder.name in FOLDERS and folder.is_dir()
        for entry in folder.iterdir()
        if not entry.name.startswith(".") and entry.name.removesuffix(".parquet") not in names
    )


def strangers(datasets: Iterable[str]) -> list[Path]:
    """Those of the entries that no build recorded in dvc.lock; a build removes the others."""
    found = entries(datasets)
    recorded = _recorded() if found else {}
    return [
        entry
        for entry in found
        if any(_digest(file) not in recorded.get(str(entry), ()) for file in _files(entry))
    ]


def remove(found: Iterable[Path]) -> list[Path]:
    """Removes of these entries what a build made, and folders that are then empty; returns the
    entries that are gone."""
    found = list(found)
    recorded = _recorded() if found else {}
    for entry in found:
        digests = recorded.get(str(entry), set())
        for file in list(_files(entry)) if digests else []:
            if _digest(file) in digests:
                file.unlink()
        for folder in sorted([entry, *entry.rglob("*")], reverse=True) if digests else []:
            if folder.is_dir() and not folder.is_symlink():
                with contextlib.suppress(OSError):  # somebody's file is in it
                    folder.rmdir()
    return [entry for entry in found if not entry.exists() and not entry.is_symlink()]


def ignore(found: Iterable[Path]) -> list[Path]:
    """Has DVC look away from these entries of data/ and from no other; returns those that it saw
    till now."""
    noted = IGNORED.read_text().splitlines() if IGNORED.exists() else []
    lines = {f"/{entry.relative_to('data')}": entry for entry in found if entry.parts[0] == "data"}
    if set(lines) != {line for line in noted if line.startswith("/")}:
        from eagle3.core.files import write_text

        write_text(IGNORED, "# Not of this build.\n" + "".join(f"{line}\n" for line in lines))
    return [entry for line, entry in lines.items() if line not in noted]


def _recorded() -> dict[str, set[str]]:
    """Digests of the files of every output in dvc.lock, by the output's path."""
    if not Path("dvc.lock").exists():
        return {}
    from eagle3.core.params import read_yaml

    found, cache = {}, cache_config()[0]
    for stage in (read_yaml("dvc.lock") or {}).get("stages", {}).values():
        for out in stage.get("outs", []):
            md5 = out.get("md5", "")
            listing = cache_object(cache, md5)
            if not md5.endswith(".dir"):
                found[out["path"]] = {md5}
            elif listing.exists():
                found[out["path"]] = {file["md5"] for file in json.loads(listing.read_text())}
    return found


def _files(entry: Path) -> Iterator[Path]:
    if entry.is_symlink() or not entry.is_dir():
        yield entry
    else:
        yield from (path for path in entry.rglob("*") if path.is_symlink() or path.is_file())


def _digest(file: Path) -> str:
    """Of a link into the cache, by its name; of a file, by its content."""
    if file.is_symlink():
        real = object_of(file)
        return real.parent.name + real.name if real else ""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "md5").hexdigest()
