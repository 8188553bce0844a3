"""Earlier versions of an artifact, as dvc.lock records them: in the workspace, or in DVC's cache
after a pull."""

import hashlib
import json
from pathlib import Path

from eagle3.core.params import read_yaml


def cached_files(stage: str, out: str) -> dict[str, Path]:
    """Files of the directory `out` that `stage` last published, as far as they are on this machine,
    by relative name.

    DVC and Snakemake delete an output before its stage runs, so the cache is where earlier rows
    survive."""
    found: dict[str, Path] = {}
    if Path("dvc.lock").exists():
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
    """One of `cached_files`, if it is there."""
    return cached_files(stage, out).get(name)


def cache_object(cache: Path, md5: str) -> Path:
    """Where DVC's cache keeps the content with this md5."""
    return cache / "files" / "md5" / md5[:2] / md5[2:]


def remove_if_corrupt(path: Path) -> bool:
    """Removes an object of DVC's cache whose content is not what its name says; DVC would hand it
    out again and again."""
    cache = (cache_config()[0] / "files" / "md5").resolve()
    real = path.resolve()
    if cache not in real.parents:
        return False
    with open(real, "rb") as file:
        if hashlib.file_digest(file, "md5").hexdigest() == real.parent.name + real.name:
            return False
    real.unlink()
    return True


def cache_config() -> tuple[Path, list[str]]:
    """(folder of DVC's cache, link types in order of preference) as .dvc/config says; relative
    paths start at .dvc."""
    import configparser

    config = configparser.ConfigParser(strict=False)
    config.read([".dvc/config", ".dvc/config.local"])
    folder = config.get("cache", "dir", fallback="cache").strip('"')
    types = config.get("cache", "type", fallback="reflink,copy").strip('"')
    return Path(".dvc") / folder, [kind.strip() for kind in types.split(",")]
