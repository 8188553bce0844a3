"""Earlier versions of an artifact, as dvc.lock records them: in the workspace, or in DVC's cache after a pull."""

import json
from pathlib import Path

from eagle3.params import read_yaml


def cached_file(stage: str, out: str, name: str) -> Path | None:
    """The file `name` of the directory `out` that `stage` last published, if it is on this machine.

    DVC and Snakemake delete an output before its stage runs, so the cache is where earlier rows survive.
    """
    here = Path(out) / name
    if here.exists():
        return here
    if not Path("dvc.lock").exists():
        return None
    recorded = (read_yaml("dvc.lock") or {}).get("stages", {}).get(stage, {}).get("outs", [])
    cache = _cache_folder()
    for entry in recorded:
        if entry["path"] == out and entry.get("md5", "").endswith(".dir"):
            listing = _object(cache, entry["md5"])
            for member in json.loads(listing.read_text()) if listing.exists() else []:
                if member["relpath"] == name and _object(cache, member["md5"]).exists():
                    return _object(cache, member["md5"])
    return None


def _object(cache: Path, md5: str) -> Path:
    return cache / "files" / "md5" / md5[:2] / md5[2:]


def _cache_folder() -> Path:
    """`.dvc/cache`, or `cache.dir` of the DVC configuration (relative to .dvc)."""
    import configparser

    config = configparser.ConfigParser(strict=False)
    config.read([".dvc/config", ".dvc/config.local"])
    return Path(".dvc") / config.get("cache", "dir", fallback="cache").strip('"')
