"""The journal: keys, torn tails, other settings. Alone: python -m pytest
tests/responses/test_journal.py"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from eagle3.responses.journal import Journal, answer_key, is_success

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"temperature": 0, "dtype": "bfloat16", "kv_cache_dtype": "auto"}


def row(i: int, **more) -> dict:
    return {
        "key": f"{i:032x}",
        "id": f"row{i}",
        "turn": 0,
        "output_ids": [5, 6, i],
        "text": f"word\u2028{i}",
        "finish_reason": "stop",
        "usage": {},
        **more,
    }


@pytest.fixture
def folder(in_tmp):
    with Journal(in_tmp / "work", SETTINGS) as journal:
        for i in range(5):
            journal.append(row(i))
    return in_tmp / "work"


def test_what_was_appended_is_found_after_reopening(folder):
    with Journal(folder, SETTINGS) as journal:
        assert len(journal) == 5 and journal.torn == journal.broken == 0
        for i in range(5):
            assert row(i).items() <= journal.get(f"{i:032x}").items()
        assert journal.get("f" * 32) is None and "f" * 32 not in journal


def test_an_answer_is_there_at_once_for_whoever_kills_the_process(in_tmp):
    script = (
        "import os, sys; from eagle3.responses.journal import Journal; j = Journal('work', {});"
        "j.append({'key': '0' * 32, 'output_ids': [1], 'finish_reason': 'stop'}); "
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": str(ROOT / "workflow")})
    with Journal(in_tmp / "work", {}) as journal:
        assert journal.get("0" * 32)["output_ids"] == [1]


def test_any_torn_tail_is_repaired_and_continued(folder):
    """Catalogue C03: a kill between write and newline, at every possible byte of the last line."""
    path = folder / "journal.jsonl"
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for cut in range(last + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(folder, SETTINGS) as journal:
            assert journal.torn == cut - last and len(journal) == 4
            journal.append(row(4))
        assert path.read_bytes() == whole


def test_a_tail_longer_than_a_block_is_repaired(folder):
    path = folder / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)
    with Journal(folder, SETTINGS) as journal:
        assert journal.torn == 200_000 and len(journal) == 5
    path.write_bytes(b"y" * 70_000)  # not one whole line
    with Journal(folder, SETTINGS) as journal:
        assert journal.torn == 70_000 and len(journal) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"finish_reason": "abort"},
        {"finish_reason": None},
        {"output_ids": []},
        {"output_ids": None},
        {"output_ids": [1, None]},
        {"output_ids": [1, "2"]},
        {"output_ids": [1.0]},
        {"output_ids": [True]},
        {"key": None},
    ],
)
def test_only_verified_successes_count(folder, bad):
    """Catalogue C15: an empty or doubtful answer is none."""
    assert not is_success(row(9, **bad))
    with Journal(folder, SETTINGS) as journal:
        with pytest.raises(ValueError, match="not a finished answer"):
            journal.append(row(9, **bad))
    with open(
        folder / "journal.jsonl", "a"
    ) as file:  # as an older or damaged version might have left it
        file.write(json.dumps(row(9, **bad)) + "\n" + "\x00\x00\n[]\n")
    with Journal(folder, SETTINGS) as journal:
        assert len(journal) == 5 and journal.broken == 3


def test_an_answer_is_written_once(folder):
    before = (folder / "journal.jsonl").read_bytes()
    with Journal(folder, SETTINGS) as journal:
        journal.append(row(3, output_ids=[9, 9]))
        assert journal.get(f"{3:032x}")["output_ids"] == [5, 6, 3]
    assert (folder / "journal.jsonl").read_bytes() == before


def test_other_settings_are_named_kept_and_return(folder):
    """Catalogue C04."""
    with Journal(folder, {**SETTINGS, "kv_cache_dtype": "fp8_e4m3"}) as journal:
        assert len(journal) == 0
        [reason] = journal.foreign_reasons()
        assert reason.startswith(
            "5 answers were made under other settings (kv_cache_dtype 'auto', now 'fp8_e4m3'); they"
        )
        journal.append(row(1, output_ids=[7]))
    with Journal(folder, SETTINGS) as journal:
        assert len(journal) == 5 and journal.get(f"{1:032x}")["output_ids"] == [5, 6, 1]
        assert journal.foreign_reasons()[0].startswith("1 answers")


def test_the_key_depends_on_everything_that_decides_an_answer():
    keys = {
        answer_key(*a)
        for a in [
            ("s", [1, 2], 8),
            ("t", [1, 2], 8),
            ("s", [1, 2], 9),
            ("s", [2, 1], 8),
            ("s", [1], 8),
            ("s", [8, 1, 2], 1),
            ("s", [1, 2, 8], 8),
        ]
    }
    assert len(keys) == 7 and all(len(key) == 32 for key in keys)


def test_makers_are_listed_once_in_order(folder):
    with Journal(folder, SETTINGS) as journal:
        for version in ("1", "2", "1"):
            journal.note_maker({"version": version})
        assert journal.made_by() == [{"version": "1"}, {"version": "2"}]
