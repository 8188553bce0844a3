"""Shards: written in any order, read by any, every damage found. Alone: python -m pytest
tests/hidden_states/test_shards.py"""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from eagle3.capture.offload import states_to_store
from eagle3.core.errors import UserError
from eagle3.hidden_states import shards
from eagle3.hidden_states.shards import ShardSet, ShardWriter
from eagle3.records.records import Record
from safetensors.torch import load_file
from torch.utils.data import DataLoader

H = 32
IDENTITY = {
    "target_digest": "t",
    "layers": [2, 4, 5],
    "last_is": "after_final_norm",
    "hidden_size": H,
}


def records(count, seed=0, longest=40):
    chooser = random.Random(seed)
    made = []
    for n in range(count):
        ids = [chooser.randrange(400) for _ in range(chooser.randrange(4, longest))]
        made.append(
            Record(
                f"{seed}-{n}",
                ids,
                [i % 2 == 0 for i in ids],
                "validation" if n % 5 == 4 else "train",
            )
        )
    return made


def states(record):
    """Random states [L, 4H] that depend on the record alone."""
    return torch.randn(
        len(record.input_ids),
        4 * H,
        generator=torch.Generator().manual_seed(hash(record.id) % 2**31),
    )


def fill(writer, dtype, order=None):
    for row in order or range(len(writer.records)):
        made = states(writer.records[row])
        stored = states_to_store(list(made[:, : 3 * H].chunk(3, -1)), made[:, 3 * H :], dtype)
        writer.write(row, stored, 0, len(made))


def make_folder(folder: Path, seed=0, count=12, per_shard=4, dtype="bfloat16") -> Path:
    folder.mkdir(parents=True)
    rows, entries = records(count, seed), []
    for n in range(0, count, per_shard):
        writer = ShardWriter(folder, f"{seed}{n}", rows[n : n + per_shard], H, dtype)
        fill(writer, dtype)
        entries.append(writer.finish())
    shards.write_manifest(folder, {**IDENTITY, "dtype": dtype}, entries)
    return folder


@pytest.mark.parametrize(
    "dtype,tolerance", [("float32", 0), ("bfloat16", 2**-8), ("float8_e4m3fn", 2**-4)]
)
def test_what_is_read_is_what_was_written(in_tmp, dtype, tolerance):
    folder = make_folder(in_tmp / "set", dtype=dtype)
    found = [
        row
        for split in ("train", "validation")
        for row in ShardSet([folder], split, {"hidden_size": H})
    ]
    assert {row["id"] for row in found} == {r.id for r in records(12)}
    by_id = {r.id: r for r in records(12)}
    for row in found:
        record = by_id[row["id"]]
        made = states(record)
        assert (
            row["input_ids"].tolist() == record.input_ids
            and row["loss_mask"].tolist() == record.loss_mask
        )
        torch.testing.assert_close(
            row["aux"].float(), made[:, : 3 * H], rtol=tolerance, atol=tolerance / 8
        )
        torch.testing.assert_close(
            row["last"].float(), made[:, 3 * H :], rtol=tolerance, atol=tolerance / 8
        )


def test_order_of_writing_does_not_matter(in_tmp):
    """Rows in another order give the same bytes and the same digest."""
    group, entries = records(6), []
    for name, order in (("a", None), ("b", [5, 0, 3, 1, 4, 2])):
        writer = ShardWriter(in_tmp, name, group, H, "bfloat16")
        fill(writer, "bfloat16", order)
        entries.append(writer.finish())
    assert (in_tmp / "a.safetensors").read_bytes() == (in_tmp / "b.safetensors").read_bytes()
    assert entries[0]["digest"] == entries[1]["digest"]
    assert load_file(in_tmp / "a.safetensors")["input_ids"].tolist() == [
        i for r in group for i in r.input_ids
    ]


def test_a_row_comes_in_pieces(in_tmp):
    """Chunks of a long prompt cover the row in any order, also overlapping; before that it is not
    complete."""
    writer = ShardWriter(
        in_tmp, "k", [Record("r", list(range(10)), [True] * 10, "train")], H, "float32"
    )
    assert not writer.cover(0, 4, 3)
    assert not writer.cover(0, 6, 4)
    assert writer.missing(0) == "6 of 10 tokens have states, the first from token 4 on"
    assert writer.cover(0, 0, 4) and writer.missing(0) == ""
    assert shards.merged([(4, 6), (0, 4), (8, 9)]) == [(0, 6), (8, 9)]


def test_rows_with_nan_or_without_states_are_quarantined(in_tmp):
    """catalogue D16, D17: the row is named with its layer and token, the others stay; D01: never a
    shifted row."""
    group = records(4)
    writer = ShardWriter(in_tmp, "k", group, H, "bfloat16")
    for row in (0, 1, 2):
        made = states(group[row])
        if row == 1:
            made[3, H + 4] = float("inf")
        writer.write(
            row,
            states_to_store(list(made[:, : 3 * H].chunk(3, -1)), made[:, 3 * H :], "bfloat16"),
            0,
            len(made),
        )
    entry = writer.finish()
    assert (
        entry["splits"] == ["train", "quarantined", "train", "quarantined"] and entry["rows"] == 2
    )
    assert [q["id"] for q in entry["quarantined"]] == [group[1].id, group[3].id]
    assert entry["quarantined"][0]["reason"] == "NaN or inf in second layer from token 3 on"
    assert "0 of" in entry["quarantined"][1]["reason"]
    shards.write_manifest(in_tmp, IDENTITY, [entry])
    assert [row["id"] for row in ShardSet([in_tmp], "train", {})] == [group[0].id, group[2].id]


def damage_flip(path):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size - 100)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))


def damage_head(path):
    with open(path, "r+b") as file:
        file.seek(20)
        file.write(b"X")


def damage_swap(path):
    other = next(p for p in path.parent.glob("*.safetensors") if p != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    "damage",
    [
        damage_flip,
        damage_head,
        damage_swap,
        os.unlink,
        lambda p: os.truncate(p, p.stat().st_size // 2),
        lambda p: os.truncate(p, 0),
    ],
    ids=["bit flip", "header", "another shard", "missing", "half", "empty"],
)
def test_every_damage_is_found_and_named(in_tmp, damage):
    """catalogue D11, D14: with the file's name and the command that rebuilds it."""
    folder = make_folder(in_tmp / "set")
    bad = sorted(folder.glob("*.safetensors"))[1]
    damage(bad)
    with pytest.raises(UserError) as error:
        ShardSet([folder], "train", {})
    assert f"{bad} is damaged" in str(error.value) and "1 of 3 shards" in str(error.value)
    assert "dvc repro --force --single-item extract@set" in str(error.value)


def test_every_byte_is_under_the_digest(in_tmp):
    """A flip anywhere in the file is found: header, ids, mask, states, scales."""
    folder = make_folder(in_tmp / "set", count=2, per_shard=2, dtype="float8_e4m3fn")
    entry = shards.read_manifest(folder)["shards"][0]
    path = folder / entry["file"]
    content = path.read_bytes()
    for place in range(0, len(content), 37):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert shards.damaged(folder, entry), f"byte {place}"
    path.write_bytes(content)
    assert not shards.damaged(folder, entry)


def test_a_file_truncated_while_open_set_exists_is_refused_not_a_crash(in_tmp):
    """catalogue D20: the size is looked at before the file is mapped; a missing page would be
    SIGBUS."""
    folder = make_folder(in_tmp / "set")
    data = ShardSet([folder], "train", {})
    os.truncate(folder / data.places[0][0].name, 5000)
    with pytest.raises(UserError, match="5000 bytes instead of"):
        data[0]


@pytest.mark.parametrize(
    "field,value",
    [("target_digest", "other"), ("layers", [1, 2, 3]), ("last_is", "before the norm")],
)
def test_a_manifest_that_does_not_fit_is_refused(in_tmp, field, value):
    """catalogue D07, D13: naming the field and both values."""
    folder = make_folder(in_tmp / "set")
    with pytest.raises(UserError) as error:
        ShardSet([folder], "train", {**IDENTITY, field: value})
    assert (
        field in str(error.value)
        and repr(IDENTITY[field]) in str(error.value)
        and repr(value) in str(error.value)
    )


def test_an_unfinished_folder_is_refused(in_tmp):
    folder = make_folder(in_tmp / "set")
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="unfinished"):
        ShardSet([folder], "train", {})


def test_a_flip_is_harmless_to_the_file(in_tmp):
    """The mapping is private: who writes to a row by mistake does not write to the shard."""
    folder = make_folder(in_tmp / "set")
    data = ShardSet([folder], "train", {})
    data[0]["aux"].zero_()
    assert not any(
        shards.damaged(folder, entry) for entry in shards.read_manifest(folder)["shards"]
    )


def test_workers_shuffle_across_shards_with_few_maps(in_tmp):
    """Several processes, random order, more shards than open maps; catalogue D20."""
    folders = [make_folder(in_tmp / f"set{n}", seed=n, count=10, per_shard=1) for n in range(2)]
    data = ShardSet(folders, "train", {}, open_files=3)
    data[0]
    loader = DataLoader(
        data,
        batch_size=None,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(0),
    )
    found = [row for row in loader]
    assert sorted(row["id"] for row in found) == sorted(
        identifier for _, _, identifier in data.places
    )
    for row in found:
        record = next(r for n in range(2) for r in records(10, n) if r.id == row["id"])
        assert row["input_ids"].tolist() == record.input_ids
    assert all(len(data._maps) <= 3 for _ in (data[i] for i in range(len(data))))


def test_rows_outlive_their_map(in_tmp):
    """A row that is still held when its map was dropped keeps its content."""
    folder = make_folder(in_tmp / "set", count=6, per_shard=1)
    data = ShardSet([folder], "train", {}, open_files=1)
    row = data[0]
    before = row["aux"].clone()
    for index in range(len(data)):
        data[index]
    assert torch.equal(row["aux"], before)


def test_no_space_is_known_before_the_first_byte(in_tmp):
    """A file size limit stands for a full disk; finished files stay, no half file is left."""
    done = make_folder(in_tmp / "set")
    code = f"""
import resource, signal, sys
sys.path[:0] = {tiny.PATHS!r}
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
from tests.hidden_states.test_shards import H, records
from eagle3.core.errors import UserError
from eagle3.hidden_states.shards import ShardWriter
try:
    ShardWriter({str(done)!r}, "large", records(40, 3), H, "float32")
except UserError as error:
    print(error)
"""
    made = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
    )
    assert "File too large" in made.stdout and "finished shards are kept" in made.stdout, (
        made.stderr
    )
    assert not list(done.glob("large*"))
    ShardSet([done], "train", {})


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting needs root")
def test_a_full_disk_loses_nothing_finished(in_tmp):
    """On a real small file system."""
    folder = in_tmp / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        first = ShardWriter(folder, "one", records(20), H, "float32")
        fill(first, "float32")
        entry = first.finish()
        with pytest.raises(UserError, match="No space left on device"):
            ShardWriter(folder, "two", records(200, 5), H, "float32")
        assert [p.name for p in folder.iterdir()] == ["one.safetensors"] and not shards.damaged(
            folder, entry
        )
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_key_depends_on_everything_that_matters():
    group = records(3)
    key = shards.shard_key(group, IDENTITY)
    assert key == shards.shard_key(records(3), dict(reversed(IDENTITY.items())))
    changed = [
        shards.shard_key(group, {**IDENTITY, "layers": [1, 4, 5]}),
        shards.shard_key(group[::-1], IDENTITY),
        shards.shard_key(
            [
                *group[:2],
                Record(
                    group[2].id,
                    group[2].input_ids,
                    [True] * len(group[2].input_ids),
                    group[2].split,
                ),
            ],
            IDENTITY,
        ),
    ]
    assert len({key, *changed}) == 4


def test_plan_never_divides_a_record():
    group = list(shards.plan(records(30), 100 * 10, 10))
    assert [r.id for part in group for r in part] == [r.id for r in records(30)]
    assert all(sum(len(r.input_ids) for r in part) <= 100 or len(part) == 1 for part in group)
