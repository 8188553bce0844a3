"""Checkpoints: whole, rotated, keyed. Alone: python -m pytest tests/training/test_checkpoints.py"""

import json

import pytest
import torch
from eagle3.core.errors import UserError
from eagle3.training.checkpoints import Checkpoints

IDENTITY = {"params": {"lr": 1e-4}, "vocab": "abc", "hidden_states": {"one": {"layers": [2, 4, 5]}}}


def test_the_newest_come_back_and_old_ones_go(in_tmp):
    kept = Checkpoints("run", IDENTITY, keep=2)
    for update in (1, 2, 10):
        kept.save(update, {"weights": {"w": torch.full((2,), float(update))}})
    assert sorted(p.name for p in kept.folder.glob("*.pt")) == ["update-10.pt", "update-2.pt"]
    found = Checkpoints("run", IDENTITY, keep=2).latest()
    assert found["update"] == 10 and found["weights"]["w"].tolist() == [10, 10]


def test_a_damaged_file_is_skipped_for_the_one_before_it(in_tmp):
    kept = Checkpoints("run", IDENTITY, keep=2)
    kept.save(1, {})
    kept.save(2, {})
    path = kept.folder / "update-2.pt"
    path.write_bytes(path.read_bytes()[:100])
    assert kept.latest()["update"] == 1


@pytest.mark.parametrize(
    "name, other, said",
    [
        ("params", {"lr": 2e-4}, "params.lr 0.0001, now 0.0002"),
        ("vocab", "abd", "vocab 'abc', now 'abd'"),
        (
            "hidden_states",
            {"one": {"layers": [2, 4, 6]}},
            "hidden_states.one.layers [2, 4, 5], now [2, 4, 6]",
        ),
    ],
)
def test_those_of_other_data_vocabulary_or_configuration_are_not_used_and_named(
    in_tmp, name, other, said
):
    """Catalogue E12 and E15: nothing is picked up that was not made from the same inputs."""
    Checkpoints("run", IDENTITY, keep=2).save(5, {})
    now = Checkpoints("run", {**IDENTITY, name: other}, keep=2)
    assert now.latest() is None
    assert now.other == [said]


def test_put_back_a_run_goes_on_and_only_the_last_other_one_is_kept(in_tmp):
    first = Checkpoints("run", IDENTITY, keep=2)
    first.save(4, {})
    first.save(5, {})
    Checkpoints("run", {**IDENTITY, "vocab": "abd"}, keep=2).save(1, {})
    assert (
        Checkpoints("run", IDENTITY, keep=2).latest()["update"] == 5
        and len(list(first.folder.glob("*.pt"))) == 1
    )
    Checkpoints("run", {**IDENTITY, "vocab": "abe"}, keep=2)
    assert sorted(
        json.loads(p.read_text())["vocab"] for p in (in_tmp / "run").glob("*/identity.json")
    ) == ["abc", "abe"]


def test_a_file_carried_in_from_another_run_is_refused(in_tmp):
    other = Checkpoints("other", {**IDENTITY, "vocab": "xyz"}, keep=2)
    other.save(7, {})
    mine = Checkpoints("run", IDENTITY, keep=2)
    (other.folder / "update-7.pt").rename(mine.folder / "update-7.pt")
    with pytest.raises(UserError, match="update-7.pt belongs to another run"):
        mine.latest()


def test_numbers_that_mean_the_same_are_the_same_run(in_tmp):
    Checkpoints("run", {"lr": 1, "b": 2}, keep=1).save(3, {})
    assert Checkpoints("run", {"b": 2.0, "lr": 1.0}, keep=1).latest()["update"] == 3
