"""Damage, clocks, untrusted remotes, other people's files and stages: what is reused was made by
what is here. Alone: EAGLEMAKE_SCENARIOS=1 python -m pytest tests/scenarios/test_reuse.py"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import yaml

from tests.scenarios.conftest import Project, clone

pytestmark = pytest.mark.timeout(1800)  # stages are real processes; a busy machine takes its time
WEIGHTS = "data/drafter/model.safetensors"
ANSWERS = "data/responses/one/raw_responses.jsonl"


def flip(file: Path, keep_times: bool = False) -> None:
    """Flips a bit near the end of the file that a link leads to, as root would."""
    real = Path(os.path.realpath(file))
    stat, content = real.stat(), bytearray(real.read_bytes())
    content[-3] ^= 1
    os.chmod(real, 0o644)
    with open(real, "r+b") as out:
        out.write(content)
    os.chmod(real, stat.st_mode)
    if keep_times:
        os.utime(real, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def script(project: Project, name: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, f"workflow/scripts/{name}.py", *arguments],
        cwd=project.folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.quick
def test_damage_behind_a_link_is_named_and_rebuilt(copy):
    """Size kept, mode kept, in one file the times put back: DVC alone links the damaged file again
    and calls it clean."""
    project = copy("project")
    whole = {name: (project / name).read_bytes() for name in (WEIGHTS, ANSWERS)}
    project.assert_fresh()
    flip(project / WEIGHTS, keep_times=True)
    flip(project / ANSWERS)
    said = project.snakemake("-n", "bench")
    for name in whole:
        assert f"{name}: its file in the cache was damaged" in said
    assert {"generate@one", "train"} <= project.planned()
    project.snakemake()
    assert project.ran() == ["generate@one", "train"]
    assert whole == {name: (project / name).read_bytes() for name in whole}
    project.assert_fresh()


def test_a_disk_that_flips_a_bit_is_seen_before_it_is_linked_or_sent(copy, tmp_path):
    """No time changes then: what is known of the object is made to say so."""
    project = copy("project")
    store = str(tmp_path / "store")
    project.dvc("remote", "add", "--local", "-d", "store", store)
    project.assert_fresh()
    whole = (project / WEIGHTS).read_bytes()
    known = project / ".build/verified"
    real = Path(os.path.realpath(project / WEIGHTS))

    def rot():
        before = real.stat()
        flip(project / WEIGHTS, keep_times=True)
        line = f"{before.st_ino} {before.st_size} "
        text = known.read_text()
        assert f"{line}{before.st_ctime_ns}" in text
        known.write_text(
            text.replace(f"{line}{before.st_ctime_ns}", f"{line}{real.stat().st_ctime_ns}")
        )

    rot()
    code, said = script(project, "push")
    assert code != 0 and "damaged in DVC's cache, and not sent: train" in said
    assert not Path(store).exists() or not list(Path(store).rglob("*"))
    project.snakemake()
    assert (project / WEIGHTS).read_bytes() == whole
    project.ran()
    project.assert_fresh()
    (project / "data/drafter/config.json").unlink()
    rot()
    said = project.snakemake()
    assert f"{real.parent.name}{real.name}"[:8] + " in DVC's cache is damaged" in said
    assert project.ran() == ["train"] and (project / WEIGHTS).read_bytes() == whole
    assert script(project, "push")[0] == 0


def test_plain_dvc_that_linked_a_damaged_input_is_stopped_by_the_stage(copy):
    project = copy("project")
    whole = (project / "data/records/one.parquet").read_bytes()
    flip(project / "data/records/one.parquet", keep_times=True)
    project.edit_params(hidden_states__dtype="bfloat16")
    said = project.dvc("repro", "extract@one", check=False)
    assert "data/records/one.parquet: the file in DVC's cache was damaged" in said
    project.dvc("repro")
    assert (project / "data/records/one.parquet").read_bytes() == whole
    project.ran()
    project.assert_fresh()


@pytest.mark.parametrize("seconds", [pytest.param(600, marks=pytest.mark.quick), 2 * 86400])
def test_what_is_stale_is_built_whatever_the_clock_says(copy, seconds):
    """Times in the future, of links and of what they lead to: Snakemake alone calls the old drafter
    up to date."""
    project = copy("project")
    project.assert_fresh()
    later = time.time() + seconds
    for path in [*(project / "data").rglob("*"), *(project / ".build/keys").iterdir()]:
        os.utime(path, (later, later), follow_symlinks=False)
        if path.is_symlink():
            os.utime(path, (later, later))
    project.edit_params(train__lr=0.002)
    assert project.planned() == {"train", "bench"}
    project.snakemake("drafter")
    assert project.ran() == ["train"]
    trained = json.loads((project / "data/drafter/training.json").read_text())
    assert trained["params"]["lr"] == 0.002
    assert project.planned() == {"bench"}


def test_times_of_whole_seconds(copy):
    project = copy("project")
    for path in [*(project / "data").rglob("*"), *(project / ".build/keys").iterdir()]:
        whole = int(path.lstat().st_mtime)
        os.utime(path, (whole, whole), follow_symlinks=False)
    project.assert_fresh()
    project.edit_params(bench__max_new_tokens=6)
    project.snakemake()
    assert project.ran() == ["bench"]
    project.assert_fresh()


@pytest.fixture
def pushed(copy, tmp_path):
    """(project, folder of its remote), pushed as README says."""
    project, store = copy("project"), tmp_path / "store"
    project.dvc("remote", "add", "--local", "-d", "store", str(store))
    code, said = script(project, "push")
    assert code == 0, said
    return project, store


def stored(project: Project, store: Path, stage: str, name: str = "") -> Path:
    """The remote's object of a stage's listing, or of a file in it; made writable."""
    md5 = yaml.safe_load((project / "dvc.lock").read_text())["stages"][stage]["outs"][0]["md5"]
    path = store / "files/md5" / md5[:2] / md5[2:]
    if name:
        (md5,) = (e["md5"] for e in json.loads(path.read_text()) if e["relpath"] == name)
        path = store / "files/md5" / md5[:2] / md5[2:]
    os.chmod(path, 0o644)
    return path


@pytest.mark.quick
def test_a_clone_pulls_what_was_pushed_and_has_nothing_to_build(pushed):
    """`make drafter`, `make push`, clone, `make pull`; also DVC's own pull of one stage."""
    project, store = pushed
    colleague = clone(project, "colleague", str(store))
    code, said = script(colleague, "pull")
    assert code == 0 and "here and whole: generate@given, generate@one, train" in said, said
    for _ in range(2):
        assert "Nothing to be done" in colleague.snakemake("-n", "drafter")
    other = clone(project, "other", str(store))
    assert "train" in other.snakemake("-n", "drafter"), "looked at before anything was pulled"
    other.dvc("pull", "train")
    assert "Nothing to be done" in other.snakemake("-n", "drafter")
    other.edit_params(train__lr=0.002)
    assert {"target", "generate@one", "extract@one", "train"} <= other.planned()


def test_what_the_remote_damaged_is_not_taken(pushed):
    project, store = pushed
    flip(stored(project, store, "train", "model.safetensors"))
    colleague = clone(project, "colleague", str(store))
    code, said = script(colleague, "pull")
    assert code != 0 and "damaged in the remote, and not taken: train" in said
    assert not (colleague / WEIGHTS).exists()
    other = clone(project, "other", str(store))
    other.dvc("pull", "train")
    other.snakemake("drafter")
    assert (other / WEIGHTS).read_bytes() == (project / WEIGHTS).read_bytes()


@pytest.mark.parametrize("path", ["../../../workflow/argparse.py", "/tmp/argparse.py", "a/../../x"])
def test_a_listing_that_leads_out_of_its_folder_is_refused(pushed, path):
    """What it plants in workflow/ would be imported by the next stage."""
    project, store = pushed
    code = b"raise SystemExit('code of the remote ran')\n"
    md5 = hashlib.md5(code).hexdigest()
    planted = store / "files/md5" / md5[:2] / md5[2:]
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_bytes(code)
    listing = stored(project, store, "train")
    content = [*json.loads(listing.read_text()), {"md5": md5, "relpath": path}]
    listing.write_text(json.dumps(content))
    colleague = clone(project, "colleague", str(store))
    done, said = script(colleague, "pull")
    assert done != 0 and f"error: a listing names {path!r}" in said and "Traceback" not in said
    assert (
        not (colleague / "workflow/argparse.py").exists() and not Path("/tmp/argparse.py").exists()
    )


def test_a_run_cache_entry_of_other_inputs_or_paths_is_refused(copy, tmp_path):
    """A remote's entry names the paths that its result is written to."""
    project, store = copy("project"), tmp_path / "store"
    project.dvc("remote", "add", "--local", "-d", "store", str(store))
    project.dvc("push", "--run-cache")
    for entry in (store / "runs").rglob("*"):
        if entry.is_file() and "train.py" in entry.read_text():
            os.chmod(entry, 0o644)
            entry.write_text(entry.read_text().replace("path: data/drafter", "path: workflow"))
    colleague = clone(project, "colleague", str(store))
    (colleague / "dvc.lock").unlink()
    said = colleague.snakemake("drafter")
    assert "in the run cache is not what its name says" in said
    assert colleague.ran() == ["train"] and (colleague / "workflow/scripts/train.py").exists()


@pytest.mark.quick
def test_stages_of_other_people_are_left_alone(copy):
    project = copy("project")
    (project / "raw.txt").write_text("somebody's")
    project.dvc("add", "raw.txt")
    definitions = yaml.safe_load((project / "dvc.yaml").read_text())
    definitions["stages"]["own"] = {"cmd": "echo a > own.txt", "outs": ["own.txt"]}
    (project / "dvc.yaml").write_text(yaml.safe_dump(definitions, sort_keys=False))
    (project / "raw").mkdir()
    (project / "raw/dvc.yaml").write_text("stages:\n  train:\n    cmd: echo b > x\n    outs: [x]\n")
    assert project.planned() == set()
    (project / "raw.txt").unlink()
    assert project.planned() == set()
    project.edit_params(bench__max_new_tokens=6)
    assert project.planned() == {"bench"}


def test_a_disk_that_is_not_mounted_stops_the_build(copy, tmp_path):
    project = copy("project")
    states, disk = project / "data/hidden_states", tmp_path / "disk"
    states.rename(disk)
    states.symlink_to(disk)
    assert project.planned() == set()
    disk.rename(tmp_path / "unmounted")
    for command in (("-n", "drafter"), ("drafter",)):
        said = project.snakemake(*command, check=False)
        assert f"data/hidden_states leads to {disk}, which is not there" in said
    assert states.is_symlink() and project.ran() == []


def test_files_of_the_user_in_data_are_left_and_decide_nothing(copy):
    """Beside a data set, inside one that leaves params.yaml, and by either tool."""
    project = copy("project")
    project.assert_fresh()
    mine = ("data/responses/NOTES.md", "data/responses/one.backup/raw.jsonl", "data/records/old/x")
    for name in mine:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("precious")
    said = project.snakemake("-n", "bench")
    assert "data/responses/NOTES.md was made by no build; it is left alone" in said
    project.assert_fresh()
    project.edit_params(bench__max_new_tokens=6)
    project.snakemake()
    assert project.ran() == ["bench"]
    (project / "data/.dvcignore").unlink()
    assert "bench" in project.stale()
    assert "data/records/old: of no data set" in project.dvc("repro", check=False)
    project.dvc("repro")
    project.assert_fresh()
    assert all((project / name).read_text() == "precious" for name in mine)


def test_the_locks_of_a_build_elsewhere_stay(copy):
    """In a container or on another host of a shared file system no process can be looked for."""
    project = copy("project")
    project.assert_fresh()
    lock = project / ".snakemake/locks/0.output.lock"
    lock.parent.mkdir(exist_ok=True)
    running, text = project / ".build/running", "data/drafter/model.safetensors\n"
    host, boot, space = running.read_text().split()[2:5]
    for place, stays in (
        (f"elsewhere {boot} {space}", True),
        (f"{host} {boot} pid:[1]", True),
        (f"{host} another-boot {space}", False),
        (f"{host} {boot} {space}", False),
    ):
        lock.write_text(text)
        running.write_text(f"4000000 1 {place}")
        said = project.snakemake("-n", "bench")
        assert lock.exists() == stays, place
        assert ("its locks stay" in said) == stays


def test_dvc_configuration_of_every_level_counts(copy, tmp_path, monkeypatch):
    project = copy("project")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config").write_text(f"[cache]\n    dir = {tmp_path}/elsewhere\n")
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "from eagle3.core.dvc_cache import cache_config as c; print(c()[0])",
        ],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": str(tiny.ROOT / "workflow")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == f"{tmp_path}/elsewhere"
