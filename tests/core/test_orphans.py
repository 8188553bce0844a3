"""What is left of data sets that are no longer asked for. Alone: python -m pytest
tests/core/test_orphans.py"""

import hashlib
import json
from pathlib import Path

from eagle3.core import orphans


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)


def md5(name: str) -> str:
    return hashlib.md5(name.encode()).hexdigest()


def test_only_what_a_build_made_goes(in_tmp):
    """A data set that left params.yaml, with a note of the user's in its folder, beside a backup, a
    note and a link to elsewhere."""
    made = ("data/records/old.parquet", "data/responses/old/rows")
    kept = (
        "data/records/a.b.parquet",
        "data/records/.keep",
        "data/records/mine.parquet",
        "data/responses/NOTES.md",
        "data/responses/a.b.backup/rows",
        "data/responses/old/NOTES.md",
        "data/prompts/old.parquet",
        "elsewhere/states",
    )
    touch(*made, *kept)
    Path("data/hidden_states").mkdir()
    Path("data/hidden_states/linked").symlink_to(in_tmp / "elsewhere")
    listing = json.dumps([{"md5": md5(made[1]), "relpath": "rows"}])
    directory = md5(listing)
    Path(f".dvc/cache/files/md5/{directory[:2]}").mkdir(parents=True)
    Path(f".dvc/cache/files/md5/{directory[:2]}/{directory[2:]}.dir").write_text(listing)
    outs = [
        {"path": made[0], "md5": md5(made[0])},
        {"path": "data/responses/old", "md5": f"{directory}.dir"},
        {"path": kept[2], "md5": "0" * 32},
    ]
    Path("dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {"x": {"outs": outs}}}))
    removed = orphans.remove(orphans.entries(["a.b"]))
    assert removed == [Path(made[0])] and not Path(made[1]).exists()
    assert all(Path(name).read_text() == name for name in kept)
    assert Path("data/hidden_states/linked").is_symlink()
    strangers = orphans.strangers(["a.b"])
    assert [str(path) for path in strangers] == [
        "data/hidden_states/linked",
        "data/records/mine.parquet",
        "data/responses/NOTES.md",
        "data/responses/a.b.backup",
        "data/responses/old",
    ]
    assert orphans.ignore(strangers) == strangers and orphans.ignore(strangers) == []
    assert "/responses/NOTES.md" in Path("data/.dvcignore").read_text().splitlines()
