"""kill -9 at random moments. Alone: python -m pytest tests/scenarios/test_kills.py

50 kills, 8 of them in `make test`; EAGLEMAKE_KILLS sets another number, EAGLEMAKE_SEED repeats a
run. Every fourth hits a whole build, through Snakemake and through DVC in turn; the others one
quick stage, whose start, hashing, commit and recording are then as likely to be hit as its work.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from eagle3.build import keys
from eagle3.core import process
from eagle3.core.errors import UserError
from safetensors import safe_open

from tests.scenarios.conftest import Project, at_once
from tests.scenarios.test_damage import assert_all_end

KILLS = int(os.environ.get("EAGLEMAKE_KILLS", "50" if "EAGLEMAKE_SCENARIOS" in os.environ else "8"))
SEED = int(os.environ.get("EAGLEMAKE_SEED", time.time_ns() % 10**6))
EDIT = {"datasets__one__max_samples": 8, "generate__sampling__temperature": 0.5}


@pytest.mark.quick
@pytest.mark.timeout(1200 + 30 * KILLS)
def test_killed_at_random_the_build_ends_as_if_undisturbed(copy, monkeypatch):
    """Catalogue G01, G07, H22."""
    print(f"EAGLEMAKE_SEED={SEED}")
    calm, project = copy("calm"), copy("killed")
    calm.edit_params(**EDIT)
    project.edit_params(**EDIT)
    monkeypatch.setenv("PYTHONPATH", str(project / "workflow"))
    at_once(calm.snakemake, lambda: kill_often(project, random.Random(SEED)))
    project.edit_params(records__max_tokens=128)
    project.snakemake()
    project.ran()
    project.assert_fresh()
    assert outputs(project) == outputs(calm)


def kill_often(project: Project, chance: random.Random) -> None:
    quick, whole = (
        [sys.executable, "-m", "eagle3.build.gate", "tokenize@one"],
        [
            [sys.executable, "-m", "snakemake", "--cores", "2", "bench"],
            [sys.executable, "-m", "dvc", "repro"],
        ],
    )
    started = time.monotonic()
    subprocess.run(quick, cwd=project.folder, check=True, capture_output=True)
    usual = time.monotonic() - started
    for turn in range(KILLS):
        if turn % 4 == 0:
            command, longest = whole[turn // 4 % 2], 8 * usual
        else:
            # Longer than any record: another parameter, the same records, so what comes after is
            # not disturbed.
            project.edit_params(records__max_tokens=129 + turn)
            command, longest = quick, 1.2 * usual
        build = subprocess.Popen(
            command,
            cwd=project.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(chance.uniform(0, longest))
        victim = chance.choice([build.pid, *process.children(build.pid)])
        try:
            os.kill(victim, 9)
        except ProcessLookupError:
            pass
        if victim != build.pid and chance.random() < 0.5:
            time.sleep(chance.uniform(0, 0.5))
            build.kill()
        build.wait()
        assert_all_end(project)
        check_whole(project.folder / "data")
        recover(project)


def recover(project: Project) -> None:
    """Does what the refusal says where DVC was killed in the moment of writing dvc.lock; nothing
    else is ever needed."""
    before = os.getcwd()
    try:
        os.chdir(project.folder)
        keys.read_lock()
    except UserError as error:
        assert "rm dvc.lock" in str(error)
        os.unlink("dvc.lock")
    finally:
        os.chdir(before)


def check_whole(data: Path) -> None:
    """Every file under a final name is whole: it parses to its end."""
    for path in data.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            if path.suffix == ".parquet":
                parquet.ParquetFile(path).read()
            elif path.suffix == ".safetensors":
                with safe_open(path, "numpy") as tensors:
                    assert list(tensors.keys())
            elif path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                assert all(json.loads(line) for line in path.read_text().splitlines())


def outputs(project: Project) -> dict[str, str]:
    """Digest of every output that dvc.lock records, but for the bench, which measures time."""
    before = os.getcwd()
    try:
        os.chdir(project.folder)
        stages = keys.read_lock()
    finally:
        os.chdir(before)
    return {
        out["path"]: out["md5"]
        for name, stage in stages.items()
        if name != "bench"
        for out in stage["outs"]
    }


@pytest.mark.quick
@pytest.mark.timeout(600)
def test_ctrl_c_ends_with_what_is_kept_and_training_goes_on(copy):
    """An interrupt reaches every process of the terminal. Catalogue G07."""
    project = copy("project")
    project.edit_params(train__epochs=150, runtime__checkpoint_every=5)
    before = set((project / ".work/train").rglob("update-*.pt"))
    build = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "2", "drafter"],
        cwd=project.folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    while set((project / ".work/train").rglob("update-*.pt")) <= before:
        assert build.poll() is None, build.communicate()[0]
        time.sleep(0.1)
    os.killpg(build.pid, signal.SIGINT)
    said, _ = build.communicate()
    assert (
        build.returncode
        and "logs/train.log: interrupted; finished work is kept, the same command continues it"
        in said
    ), said
    assert "continues at update" in project.snakemake("drafter")
