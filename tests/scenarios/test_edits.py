"""What an edit makes stale, in both tools. Alone: python -m pytest tests/scenarios/test_edits.py

The numbers are those of the scenario table in docs/build.md. In every test each tool works on a
copy of its own; what ran is what began its work, by the stages' own record."""

import pytest
import tiny
import yaml

from tests.scenarios.conftest import CHAIN, at_once

pytestmark = pytest.mark.timeout(1800)  # stages are real processes; a busy machine takes its time


def everywhere(pair, check) -> None:
    """Runs `check(project, tool)` for both tools, side by side."""
    at_once(
        *(
            lambda p=project, t=tool: check(p, t)
            for project, tool in zip(pair, ("snakemake", "dvc"))
        )
    )


@pytest.mark.quick
def test_01_nothing_changed(copy):
    project = copy("project")
    project.assert_fresh()
    assert "Nothing to be done" in project.snakemake()
    assert "up to date" in project.dvc("repro")
    assert project.ran() == []


@pytest.mark.quick
def test_04_comment_in_an_early_script_stops_at_that_stage(pair):
    """Catalogue G10, H20."""

    def check(project, tool):
        project.comment("workflow/scripts/prepare.py")
        both = ["prepare@given", "prepare@one"]
        assert project.stale() == set(both)
        assert set(both) < project.planned() and "target" not in project.planned()
        project.build(tool)
        assert sorted(project.ran()) == both
        project.assert_fresh()

    everywhere(pair, check)


def test_05_06_temperature_there_and_back(pair):
    """Built by one tool, the other has nothing to do; put back, nothing executes. Catalogue G11,
    H02."""

    def check(project, tool):
        project.edit_params(generate__sampling__temperature=0.7)
        assert project.stale() == {"generate@one"}
        said = project.snakemake("-n", "bench")
        assert "generate.sampling.temperature 0 -> 0.7 (generate@one)" in said
        project.build(tool)
        ran = project.ran()
        assert ran[:2] == ["generate@one", "tokenize@one"] and set(ran[2:]) == {
            "vocab",
            "extract@one",
            "train",
            "bench",
        }
        project.assert_fresh()
        project.edit_params(generate__sampling__temperature=0)
        assert "generate@one" in project.planned() and project.stale() == {"generate@one"}
        project.build(tool)
        project.assert_fresh()

    everywhere(pair, check)


@pytest.mark.quick
def test_06_there_and_back_while_only_the_drafter_is_built(copy):
    """The report further down is stale in between and fresh again at the end; nothing ran for it,
    so Snakemake must ask."""
    project = copy("project")
    project.edit_params(train__lr=3e-3)
    project.snakemake("drafter")
    assert (
        project.ran() == ["train"]
        and project.stale() == {"bench"}
        and project.planned() == {"bench"}
    )
    project.git("checkout", "-q", "params.yaml")
    project.snakemake("drafter")
    project.assert_fresh()


def test_08_a_data_set_comes_and_goes(pair, tmp_path):
    """Its own chain, then what reads all data sets; removed again, nothing is left of it and
    nothing executes."""
    rows = tiny.make_rows(tmp_path / "more.jsonl", 8, seed=2, answered=True)

    def check(project, tool):
        before = (project / "params.yaml").read_text()
        project.edit_params(
            datasets__more={"answers": "given", "source": {"path": str(rows)}, "max_samples": 4}
        )
        said = project.snakemake("-n", "bench")
        assert "datasets.more added (vocab)" in said and "prepare@more: never run" in said
        assert {"prepare@more", "generate@more", "vocab"} <= project.stale()
        project.build(tool)
        ran = project.ran()
        assert sorted(ran) == sorted(
            [*(f"{stage}@more" for stage in CHAIN), "vocab", "train", "bench"]
        )
        project.assert_fresh()
        (project / "params.yaml").write_text(before)
        assert {"vocab", "train", "bench"} <= project.planned() and "vocab" in project.stale()
        left = ("records/more.parquet", "hidden_states/more", "responses/more")
        assert all((project / "data" / name).exists() for name in left), "a dry run removes nothing"
        project.build(tool)
        assert set(project.ran()) <= (set() if tool == "snakemake" else {"vocab", "train", "bench"})
        assert not any((project / "data" / name).exists() for name in left)
        project.assert_fresh()

    everywhere(pair, check)


def test_09_a_raised_cap_generates_the_difference(pair):
    def check(project, tool):
        rows = (project / "data/responses/one/raw_responses.jsonl").read_text().splitlines()
        project.edit_params(datasets__one__max_samples=9)
        assert project.stale() == {"prepare@one", "generate@one", "vocab"}
        assert {"prepare@one", "generate@one"} <= project.planned()
        said = project.build(tool)
        assert "generate@one: 9 wanted, 6 done, 3 to go" in said
        assert set(project.ran()) == {
            "prepare@one",
            "generate@one",
            "tokenize@one",
            "vocab",
            "extract@one",
            "train",
            "bench",
        }
        more = (project / "data/responses/one/raw_responses.jsonl").read_text().splitlines()
        assert len(more) == 9 and set(rows) <= set(more)
        project.assert_fresh()

    everywhere(pair, check)


@pytest.mark.quick
def test_10_15_tuning_and_form_change_nothing(copy):
    """`server.*`, `runtime.*`, order, layout, comments, 1 -> 1.0, and an edit that was taken back.
    Catalogue G08, H25."""
    project = copy("project")
    content = tiny.read_params(project.folder)
    content["server"] = {"idle_timeout": 7}
    content["runtime"]["batch_size"] = 2
    content["bench"]["min_accept_length"] = 1
    content["train"]["lr"] = 1e-3
    backwards = {key: content[key] for key in reversed(content)}
    text = yaml.safe_dump(backwards, sort_keys=False, default_flow_style=None).replace(
        "lr: 0.001", "lr: 1.0e-3"
    )
    (project / "params.yaml").write_text("# another look\n" + text)
    project.assert_fresh()
    project.edit_params(train__lr=0.5)
    assert project.planned() == {"train", "bench"}
    project.edit_params(train__lr=0.001)
    project.assert_fresh()


def test_16_a_helper_module_reaches_exactly_its_importers(pair):
    """`export` is imported by train and bench only; its comment changes no weight."""

    def check(project, tool):
        project.comment("workflow/eagle3/drafter/export.py")
        assert project.stale() == {"train", "bench"}
        assert project.planned() == {"train", "bench"}
        project.build(tool)
        assert project.ran() == ["train", "bench"]
        project.assert_fresh()

    everywhere(pair, check)
