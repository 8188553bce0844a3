"""What every stage does around its work. Alone: python -m pytest tests/core/test_stage.py"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from eagle3.core import stage as stages
from eagle3.core.errors import UserError
from eagle3.core.stage import running

WORKFLOW = Path(stages.__file__).resolve().parents[2]

CODE = """stages:
  train:
    params:
      - train
    deps:
      - input
      - workflow/eagle3/core
      - workflow/scripts/train.py
"""


@pytest.fixture
def project(in_tmp) -> Path:
    """A folder with params.yaml, dvc.yaml, one script and its helper, and an input."""
    tiny.write_params(in_tmp, tiny.params(Path("/m"), {"one": (Path("/r.jsonl"), "generate")}))
    (in_tmp / "dvc.yaml").write_text(CODE)
    (in_tmp / "workflow/scripts").mkdir(parents=True)
    (in_tmp / "workflow/eagle3/core").mkdir(parents=True)
    (in_tmp / "workflow/eagle3/core/helper.py").write_text("A = 1\n")
    (in_tmp / "workflow/scripts/train.py").write_text("from eagle3.core import helper\n")
    (in_tmp / "input").mkdir()
    (in_tmp / "input/file").write_text("content")
    return in_tmp


def test_the_start_of_a_stage_is_recorded(project):
    with running("train", "params.yaml", ["input"]) as stage:
        assert stage.params.train.lr == 1e-3 and stage.work == Path(".work/train")
        seconds, pid, name = (project / ".work/started.log").read_text().split()
    assert (int(pid), name) == (os.getpid(), "train") and abs(time.time() - int(seconds)) < 60


def test_a_missing_input_names_the_command_that_makes_it(project):
    with pytest.raises(
        UserError, match="nowhere is missing; `snakemake --cores all nowhere` builds it"
    ):
        with running("train", "params.yaml", ["nowhere"]):
            pass


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: (p / "input/file").write_text("other text"),
        lambda p: (p / "input/file").unlink(),
        lambda p: (p / "input/more").write_text(""),
        lambda p: (p / "workflow/eagle3/core/helper.py").write_text("A = 2\n"),
        lambda p: (p / "workflow/scripts/train.py").write_text(
            "from eagle3.core import helper  # changed\n"
        ),
    ],
)
def test_an_input_or_the_code_changed_during_the_run_fails_the_stage(project, edit):
    with pytest.raises(
        UserError,
        match="changed while stage train ran, so its result would belong to neither version",
    ):
        with running("train", "params.yaml", ["input"]):
            edit(project)


def test_code_edited_while_it_was_imported_fails_the_stage_at_once(project, monkeypatch):
    """The imports of a stage take seconds: what stands in the file then is not what was
    imported."""
    monkeypatch.setitem(sys.modules, "_path", SimpleNamespace(BEGAN=time.time_ns() - 10**9))
    with pytest.raises(
        UserError,
        match="eagle3/core/helper.py, workflow/scripts/train.py changed while stage train ran",
    ):
        with running("train", "params.yaml", ["input"]):
            raise AssertionError("the body ran")


def test_code_that_comes_back_as_it_was_is_no_change(project):
    with running("train", "params.yaml", ["input"]):
        helper = project / "workflow/eagle3/core/helper.py"
        helper.write_text("A = 2\n")
        helper.write_text("A = 1\n")


def test_parameters_of_others_may_be_edited_during_the_run_its_own_not(project):
    content = tiny.read_params(project)
    content["bench"]["steps"] = 1
    with running("train", "params.yaml", ["input"]):
        tiny.write_params(project, content)
    content["train"]["lr"] = 0.5
    with pytest.raises(UserError, match="params.yaml changed while stage train ran"):
        with running("train", "params.yaml", ["input"]):
            tiny.write_params(project, content)


def test_a_params_file_broken_during_the_run_fails_the_stage(project):
    with pytest.raises(UserError, match="params.yaml changed"):
        with running("train", "params.yaml", ["input"]):
            (project / "params.yaml").write_text("a: [")


def test_what_a_build_left_of_other_data_sets_goes_first_and_is_no_change(project, capsys):
    records = project / "data/records"
    records.mkdir(parents=True)
    for name in ("one", "old", "mine"):
        (records / f"{name}.parquet").write_text("")
    made = {"path": "data/records/old.parquet", "md5": "d41d8cd98f00b204e9800998ecf8427e"}
    lock = {"schema": "2.0", "stages": {"tokenize@old": {"outs": [made]}}}
    (project / "dvc.lock").write_text(json.dumps(lock))
    with pytest.raises(UserError, match="mine.parquet: of no data set .* made by no build"):
        with running("train", "params.yaml", ["data/records"]):
            pass
    assert (records / "mine.parquet").exists() and not (records / "old.parquet").exists()
    assert "train: removed data/records/old.parquet" in capsys.readouterr().err
    with pytest.raises(UserError, match="records/one.parquet changed"):
        with running("train", "params.yaml", ["data/records"]):
            (records / "one.parquet").unlink()


def script(body: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import argparse, time\nfrom eagle3.core.errors import UserError\n"
        "from eagle3.core.stage import main\ndef body(arguments):\n    "
        f"{body}\nmain(argparse.ArgumentParser(), body)\n",
    ]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(WORKFLOW)}


def test_a_refusal_is_one_sentence_and_exit_code_1():
    done = subprocess.run(
        script("raise UserError('a is 1, not 2; do b')"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 1 and done.stderr == "error: a is 1, not 2; do b\n" and done.stdout == ""
    )


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_says_that_work_is_kept(sent):
    running_script = subprocess.Popen(
        script("print('on', flush=True); time.sleep(300)"),
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running_script.stdout.readline() == "on\n"
    running_script.send_signal(sent)
    _, said = running_script.communicate(timeout=30)
    assert (
        running_script.returncode == 130
        and "finished work is kept, the same command continues it" in said
    )


def test_every_script_sets_the_environment_before_it_loads_a_library():
    """OpenMP and tqdm read their variables once, while they are loaded."""
    for script in (WORKFLOW / "scripts").glob("[a-z]*.py"):
        first = next(
            line
            for line in script.read_text().splitlines()
            if line.startswith(("import ", "from "))
        )
        assert first.startswith("import _path"), script.name
    code = (
        "import _path, sys, os; print('torch' in sys.modules, 'tqdm' in sys.modules, "
        "os.environ['GOMP_SPINCOUNT'])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=WORKFLOW / "scripts",
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{WORKFLOW}/scripts:{WORKFLOW}"},
    )
    assert said.stdout.split() == ["False", "False", "1000"], said.stderr


def test_the_parameter_file_can_be_named():
    parser = argparse.ArgumentParser()
    seen = []
    old = sys.argv
    sys.argv = ["x", "--params", "other.yaml"]
    try:
        stages.main(parser, lambda arguments: seen.append(arguments.params))
    finally:
        sys.argv = old
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert seen == ["other.yaml"]
