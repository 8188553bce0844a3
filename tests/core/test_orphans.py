"""What is left of data sets that are no longer asked for. Alone: python -m pytest
tests/core/test_orphans.py"""

from pathlib import Path

from eagle3.core import orphans

from tests.core.test_stage import project  # noqa: F401  (a fixture)


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")


def test_entries_of_other_data_sets_go_and_nothing_else(in_tmp):
    touch(
        "data/records/a.b.parquet",
        "data/records/old.parquet",
        "data/records/.keep",
        "data/responses/a.b/rows",
        "data/responses/old/rows",
        "data/prompts/old.parquet",
        "data/target/model/weights",
    )
    Path("data/hidden_states").mkdir()
    Path("elsewhere/old").mkdir(parents=True)
    Path("data/hidden_states/old").symlink_to(in_tmp / "elsewhere/old")
    removed = orphans.remove(Path("data").glob("*"), ["a.b"])
    assert removed == [
        Path("data/hidden_states/old"),
        Path("data/records/old.parquet"),
        Path("data/responses/old"),
    ]
    assert Path("elsewhere/old").exists(), "a link goes, not what it leads to"
    left = sorted(str(path) for path in Path("data").rglob("*") if path.is_file())
    assert left == [
        "data/prompts/old.parquet",
        "data/records/.keep",
        "data/records/a.b.parquet",
        "data/responses/a.b/rows",
        "data/target/model/weights",
    ]
