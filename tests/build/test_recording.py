"""The gate's stand-ins for parts of DVC. Alone: python -m pytest tests/build/test_recording.py"""

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import yaml
from eagle3.build import recording
from eagle3.build.recording import replacing_yaml

CONTENT = {
    "schema": "2.0",
    "stages": {
        "prepare@a.b": {
            "cmd": "python workflow/scripts/prepare.py a.b --target data/target --out "
            "data/prompts/a.b.parquet --more and more",
            "deps": [
                {
                    "path": "data/target",
                    "hash": "md5",
                    "md5": "0e1" + "2" * 29 + ".dir",
                    "size": 12,
                    "nfiles": 3,
                },
                {"path": "workflow/x.py", "hash": "md5", "md5": "1" * 32, "size": 0},
            ],
            "params": {
                "params.yaml": OrderedDict(
                    {
                        "lr": 1e-05,
                        "share": 0.0005,
                        "big": 1e22,
                        "whole": 1.0,
                        "count": 7,
                        "yes": True,
                        "none": None,
                        "text": "on",
                        "number": "1e-4",
                        "date": "2025-01-01",
                        "digits": "012",
                        "empty": "",
                        "umlaut": "Größe 模型",
                        "list": [1, 2.5, "x"],
                        "nothing": [],
                        "no": {},
                        "colon": "a: b",
                        "lines": "one\ntwo\n",
                        "spaces": "  x ",
                        "quote": "it's",
                        "long": "word " * 40,
                        "hash": "a #b",
                        "star": "*a",
                        "tilde": "~",
                        "tab": "a\tb",
                    }
                )
            },
            "outs": [
                {"path": "data/prompts/a.b.parquet", "hash": "md5", "md5": "3" * 32, "size": 5}
            ],
        },
        "train": {"cmd": "x"},
    },
}


def test_the_lock_file_is_written_as_dvc_writes_it(tmp_path):
    """`dvc repro` after the gate must not rewrite the file in another form: every build would show
    in `git diff`."""
    from dvc.utils.serialize import dump_yaml, modify_yaml

    dump_yaml(str(tmp_path / "dvc"), CONTENT)
    with modify_yaml(str(tmp_path / "dvc")):  # as it is after DVC's next update
        pass
    with replacing_yaml(str(tmp_path / "gate")) as content:
        content.update(CONTENT)
    assert (tmp_path / "gate").read_text() == (tmp_path / "dvc").read_text()
    for name, stage in (
        ("train", {"cmd": "y " * 80}),
        ("bench", {"cmd": "z", "params": {"params.yaml": {"a": 1e-05}}}),
        ("prepare@a.b", {"cmd": "short"}),
    ):
        for file, writer in (("gate", replacing_yaml), ("dvc", modify_yaml)):
            with writer(str(tmp_path / file)) as content:
                content["stages"].update({name: stage})
        assert (tmp_path / "gate").read_text() == (tmp_path / "dvc").read_text()


FOUR = "schema: '2.0'\nstages:\n    target:\n        cmd: a\n    train:\n        cmd: b\n"
FLOW = '{"schema": "2.0", "stages": {"target": {"cmd": "a"}, "train": {"cmd": "b"}}}\n'
PLAIN = "schema: '2.0'\nstages:\n  target:\n    cmd: a\n  train:\n    cmd: b\n    outs: []\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace("stages:\n", "stages: # do not edit\n"),
        PLAIN.replace("stages:\n", "stages:\n  # built on the big machine\n"),
        PLAIN.replace("    cmd", "        cmd").replace("    outs", "        outs"),
        FOUR,
        FLOW,
        PLAIN.rstrip("\n"),
        PLAIN + "datasets:\n- name: x\n",
        PLAIN.replace("train:", '"train":'),
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("    cmd: a\n", "    cmd: a\n\n    # a note\n    outs:\n    - path: x\n"),
    ],
)
def test_any_form_that_dvc_reads_is_kept(tmp_path, text):
    """A second `stages:` makes the file unreadable for DVC, after the stage has run."""
    path = tmp_path / "dvc.lock"
    path.write_text(text)
    expected = yaml.safe_load(text)
    for name, stage in (
        ("train", {"cmd": "new", "outs": [{"path": "y"}]}),
        ("vocab", {"cmd": "z"}),
    ):
        with replacing_yaml(str(path)) as content:
            content["stages"][name] = stage
        expected["stages"][name] = stage
    assert yaml.safe_load(path.read_text()) == expected
    for line in text.splitlines():
        assert "#" not in line or line.partition("#")[2] in path.read_text(), "a comment is kept"


def test_a_failure_leaves_the_lock_file_as_it_was(tmp_path):
    path = tmp_path / "dvc.lock"
    path.write_text("schema: '2.0'\n")
    with pytest.raises(RuntimeError):
        with replacing_yaml(str(path)) as content:
            content["stages"] = {}
            raise RuntimeError
    assert path.read_text() == "schema: '2.0'\n" and os.listdir(tmp_path) == ["dvc.lock"]


def test_an_input_edited_after_the_stages_last_look_at_it_fails_the_stage(in_tmp):
    """DVC alone records the edited input beside the result of the one before."""
    Path("input").write_text("before")
    Path("dvc.yaml").write_text(
        "stages:\n  made:\n    cmd: cat input > output && echo after > input\n    deps: "
        "[input]\n    outs: [output]\n"
    )
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], check=True)
    gated = [sys.executable, "-m", "eagle3.build.gate", "made"]
    environment = {**os.environ, "PYTHONPATH": str(Path(recording.__file__).parents[2])}
    first = subprocess.run(gated, env=environment, capture_output=True, text=True)
    assert first.returncode == 1 and "input changed while stage made ran" in first.stderr
    assert not Path("dvc.lock").exists() and not Path(".dvc/cache/runs").exists()
    again = subprocess.run(gated, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and Path("output").read_text() == "after\n", again.stderr
