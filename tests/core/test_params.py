"""params.yaml as the stages see it. Alone: python -m pytest tests/core/test_params.py"""

from pathlib import Path

import pytest
import tiny
import yaml
from eagle3.build import keys
from eagle3.core import params as parameters
from eagle3.core.errors import UserError
from eagle3.core.files import canonical_json

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = {
    "stages": {
        "train": {"params": ["train"]},
        "prepare": {
            "foreach": "x",
            "do": {"params": ["prompts", "datasets.${key}", "${item.answers}"]},
        },
    }
}


def content() -> dict:
    return tiny.params(
        Path("/m"), {"one": (Path("/r.jsonl"), "generate"), "two": (Path("/s.jsonl"), "given")}
    )


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("5.0e-4", 5e-4),
        ("-2e3", -2000.0),
        (".5", 0.5),
        ("1", 1),
        ("1.0", 1.0),
        ("'1e-4'", "1e-4"),
        ("1e", "1e"),
        ("0o17", "0o17"),
        ("nan", "nan"),
    ],
)
def test_numbers_are_what_dvc_reads(tmp_path, text, value):
    from dvc.utils.serialize import load_yaml

    path = tmp_path / "params.yaml"
    path.write_text(f"lr: {text}\n")
    assert parameters.read_yaml(path) == {"lr": value}
    if text != "0o17":  # octal in YAML 1.2; no parameter is written so
        assert load_yaml(str(path)) == {"lr": value}


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 1\na: 2\n", "line 2, column 1: the key 'a' stands twice"),
        ("a: [1\nb: 2\n", "line 2"),
        ("a: b: c\n", "line 1"),
        ("\ta: 1\n", "line 1"),
    ],
)
def test_broken_yaml_is_refused_with_its_place(tmp_path, text, message):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        parameters.read_yaml(path)


def test_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match="missing; run this in the project's folder"):
        parameters.read_yaml(tmp_path / "params.yaml")


def test_wrong_keys_are_named_with_value_and_what_is_allowed():
    """Catalogue H05: in the first second of every stage, not after it."""
    wrong = content()
    wrong["train"]["epochs1"] = 3
    wrong["train"]["lr"] = "fast"
    del wrong["datasets"]["one"]["answers"]
    with pytest.raises(UserError) as error:
        parameters.check(wrong)
    said = str(error.value)
    assert "train.epochs1 is no known key; known here: " in said and "epochs" in said
    assert "train.lr is 'fast'" in said and "datasets.one.answers is missing" in said


def test_a_data_set_with_a_space_in_its_name_is_refused_in_words():
    wrong = content()
    wrong["datasets"]["my data"] = wrong["datasets"]["one"]
    with pytest.raises(
        UserError,
        match="datasets.my data: names of data sets hold letters, digits, _ . - and begin with a "
        "letter",
    ):
        parameters.check(wrong, "params.yaml")


def test_slices_are_filled_in_per_data_set():
    assert parameters.stage_slices("prepare@one", DEFINITIONS, content()) == [
        "prompts",
        "datasets.one",
        "generate",
    ]
    assert parameters.stage_slices("prepare@two", DEFINITIONS, content())[-1] == "given"
    with pytest.raises(UserError, match="dvc.yaml has no stage trian; it has train, prepare"):
        parameters.stage_slices("trian", DEFINITIONS, content())


def declared(*slices: str) -> parameters.Declared:
    return parameters.Declared(parameters.check(content()), "prepare@one", list(slices))


def test_a_declared_parameter_is_read_as_it_is():
    assert declared("train").train.lr == 1e-3
    assert declared("datasets.one").datasets["one"].max_samples == 6
    assert declared("datasets").datasets["two"].answers == "given"
    assert declared("train.lr").train.lr == 1e-3


@pytest.mark.parametrize(
    "slices, read, named",
    [
        (["prompts"], lambda p: p.train.lr, "train.lr"),
        (["train.lr"], lambda p: p.train.epochs, "train.epochs"),
        (["datasets.one"], lambda p: p.datasets["two"].answers, r"datasets.two"),
        (
            ["generate.engine"],
            lambda p: p.generate.sampling.temperature,
            "generate.sampling.temperature",
        ),
    ],
)
def test_an_undeclared_parameter_is_refused_with_the_line_to_add(slices, read, named):
    """Catalogue H04: it would be a silent staleness bug."""
    with pytest.raises(
        UserError, match=rf"reads {named}.*add `- {named}.*` under stages.prepare.params"
    ):
        read(declared(*slices))


def test_run_time_tuning_may_always_be_read():
    assert declared("prompts").runtime.batch_size == 8


@pytest.mark.parametrize(
    "one, other",
    [
        ({"a": 1, "b": [1.0, 2]}, {"b": [1, 2.0], "a": 1.0}),
        ({"lr": 1e-4}, {"lr": 0.0001}),
        ({1: "x"}, {"1": "x"}),
    ],
)
def test_equal_meanings_have_one_text(one, other):
    """Catalogue H25: what DVC calls equal must not look changed to Snakemake."""
    assert canonical_json(one) == canonical_json(other)


@pytest.mark.parametrize(
    "one, other", [({"a": 1}, {"a": 2}), ({"a": None}, {}), ({"a": "1"}, {"a": 1})]
)
def test_other_meanings_have_another_text(one, other):
    assert canonical_json(one) != canonical_json(other)


def test_changes_are_named_by_key_with_both_values():
    recorded = {
        "train": {"params": {"params.yaml": {"train": {"lr": 0.0005, "epochs": 4, "old": 1}}}},
        "vocab": {
            "params": {"params.yaml": {"datasets": {"one": {"max_samples": 5}, "gone": {"x": 1}}}}
        },
    }
    now = {
        "train": {"train": {"lr": 0.0001, "epochs": 4.0, "new": 2}},
        "vocab": {"datasets": {"one": {"max_samples": 5}, "come": {"x": 1}}},
        "bench": {"bench": {"steps": 3}},
    }
    assert keys.changes(recorded, now) == [
        "train.lr 0.0005 -> 0.0001 (train)",
        "train.new (not set) -> 2 (train)",
        "train.old 1 -> (not set) (train)",
        "datasets.come added (vocab)",
        "datasets.gone removed (vocab)",
    ]


def test_a_key_file_is_written_only_when_its_slice_changes(in_tmp):
    slices = {"train": {"lr": 1e-3, "epochs": 1}}
    keys._write_key("train", slices)
    path = keys.KEYS / "train.json"
    first = path.stat().st_mtime_ns
    keys._write_key("train", {"train": {"epochs": 1.0, "lr": 0.001}})
    assert path.stat().st_mtime_ns == first
    keys.mark_stale("train", "changed deps")
    marked = path.stat().st_mtime_ns
    assert marked > first
    keys._write_key("train", slices)
    assert path.stat().st_mtime_ns == marked, "the mark stays until the slice changes"
    keys._write_key("train", {"train": {"lr": 2e-3, "epochs": 1}})
    assert path.stat().st_mtime_ns > marked and "stale" not in path.read_text()


@pytest.mark.parametrize(
    "text, said",
    [
        ("schema: '2.0'\nstages:\n<<<<<<< HEAD\n  a: 1\n=======\n", "git checkout --ours dvc.lock"),
        ("schema: '2.0'\nstages:\n  train:\n    cmd: [\n", "rm dvc.lock"),
        (
            "schema: '2.0'\nstages:\n  train:\n    cmd: a\n    outs:\n    - path: x\n      md5: 0",
            "rm dvc.lock",
        ),
        ("", "rm dvc.lock"),
    ],
)
def test_a_broken_lock_file_is_refused_with_the_way_out(in_tmp, text, said):
    Path("dvc.lock").write_text(text)
    with pytest.raises(UserError, match=said):
        keys.read_lock()


def test_the_projects_own_file_is_right():
    assert parameters.load(ROOT / "params.yaml").datasets
    assert (
        yaml.safe_load((ROOT / "params.yaml").read_text()).keys()
        <= parameters.Params.model_fields.keys()
    )


@pytest.mark.parametrize("old, new", parameters.RENAMED.items())
def test_an_old_key_is_refused_with_the_name_of_the_new_one(old, new):
    wrong = content()
    *sections, key = old.split(".")
    inner = wrong
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = 1
    with pytest.raises(UserError) as error:
        parameters.check(wrong)
    assert f"params.yaml: {old} is now called {new}" in str(error.value)


@pytest.mark.parametrize("old, why", parameters.GONE.items())
def test_a_key_that_is_gone_is_refused_with_the_reason(old, why):
    key, _, value = old.partition(": ")
    wrong = content()
    wrong.setdefault("train", {})[key.removeprefix("train.")] = value or 1
    with pytest.raises(UserError) as error:
        parameters.check(wrong)
    assert f"params.yaml: {old} is gone: {why}" in str(error.value)
