"""What may be recorded as built. Alone: python -m pytest tests/build/test_sync.py"""

from collections import namedtuple
from types import SimpleNamespace

import networkx
from eagle3.build import sync

Stage = namedtuple("Stage", "addressing")


def graph(*edges: tuple[str, str]):
    """A graph of stages; an edge leads from a stage to one that it needs, as in DVC."""
    nodes = {name: Stage(name) for edge in edges for name in edge}
    made = networkx.DiGraph()
    made.add_edges_from((nodes[a], nodes[b]) for a, b in edges)
    return made


CHAIN = graph(("b", "a"), ("c", "b"), ("d", "c"), ("x", "a"))


def test_clean_means_clean_with_everything_upstream():
    """Catalogue G16: a touch covers what is upstream of its target as well, so nothing above may be
    stale."""
    assert sync.sort_out({}, CHAIN) == (["a", "b", "c", "d", "x"], [])
    assert sync.sort_out({"b": ["changed deps"]}, CHAIN) == (["a", "x"], ["b"])
    assert sync.sort_out({"a": [], "d": []}, CHAIN) == ([], ["a", "d"])


def test_reasons_are_one_line():
    status = [
        {"changed deps": {"file": "modified", "params.yaml": {"train.lr": "modified"}}},
        "changed command",
    ]
    assert (
        sync.describe(status)
        == "changed deps: file modified, params.yaml train.lr; changed command"
    )


def test_one_output_per_job_is_named():
    rules = [
        SimpleNamespace(
            name="tokenize", output=[r"data/records/{dataset,one|a\.b}.parquet", "more"]
        ),
        SimpleNamespace(name="train", output=["data/drafter/model.safetensors"]),
        SimpleNamespace(name="all", output=[]),
    ]
    assert sync.first_outputs(rules, ["tokenize@a.b", "train", "old"]) == [
        "data/records/a.b.parquet",
        "data/drafter/model.safetensors",
    ]
