"""Edits of outputs, kills, two builds at once, a broken lock. Alone: python -m pytest
tests/scenarios/test_damage.py"""

import os
import signal
import subprocess
import sys
import time

import build_overhead
import pytest
import server_parts as serving
import tiny

from tests.scenarios.conftest import Project, at_once

pytestmark = pytest.mark.timeout(1800)  # stages are real processes; a busy machine takes its time


def start(project: Project, *command: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=project.folder,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for_start(project: Project, stage: str, timeout: float = 300) -> int:
    """Waits until a stage has begun its work; returns its process number."""
    log = project / ".work/started.log"
    before = project.asked
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        for line in log.read_text().splitlines()[before:]:
            if line.split()[2] == stage:
                return int(line.split()[1])
        time.sleep(0.05)
    raise AssertionError(f"{stage} did not start within {timeout:.0f} s")


def processes_in(project: Project) -> list[str]:
    """Command lines of live processes that work in the project's folder."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if os.path.realpath(f"/proc/{entry}/cwd") == str(project.folder):
                    if open(f"/proc/{entry}/stat").read().rpartition(")")[2].split()[0] not in "ZX":
                        found.append(open(f"/proc/{entry}/cmdline").read().replace("\0", " "))
            except OSError:
                pass
    return found


def assert_all_end(project: Project, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while processes_in(project) and time.monotonic() < end:
        time.sleep(0.2)
    assert processes_in(project) == []


@pytest.mark.parametrize(
    "how",
    ["replaced", pytest.param("written through the link", marks=pytest.mark.quick), "deleted"],
)
def test_12_an_output_edited_by_hand_is_restored(copy, how):
    """From the cache, by either tool; not computed, and never taken for the result. Catalogue
    H08."""

    def check(project, tool):
        file = project / "data/records/one.parquet"
        whole = file.read_bytes()
        if how == "written through the link":
            os.chmod(os.path.realpath(file), 0o644)
            with open(file, "r+b") as out:
                out.truncate(len(whole) // 2)
        else:
            file.unlink()
            if how == "replaced":
                file.write_bytes(whole[: len(whole) // 2])
        if (
            how != "written through the link"
        ):  # `dvc status` itself deletes the damaged file, and fails on the link
            assert "tokenize@one" in project.stale()
        assert "tokenize@one" in project.planned()
        project.build(tool)
        assert file.read_bytes() == whole
        assert project.ran() == ([] if how != "written through the link" else ["tokenize@one"])
        project.assert_fresh()

    tools = ("snakemake",) if how == "written through the link" else ("snakemake", "dvc")
    at_once(*(lambda t=tool: check(copy(t), t) for tool in tools))


def test_artifacts_are_stored_once(copy):
    """Built by either tool, a file is in the cache and linked from data/; none is there twice.
    Catalogue H07."""

    def check(project, tool):
        project.edit_params(bench__max_new_tokens=6)
        project.build(tool)
        files = [
            p for p in (project / "data").rglob("*") if not p.is_dir() and p.name != ".gitignore"
        ]
        assert len(files) > 15
        for file in files:
            assert file.is_symlink() and "/.dvc/cache/" in os.readlink(file), file
            assert os.stat(file).st_nlink == 1, f"{file}: a name of the same file is left somewhere"

    at_once(*(lambda t=tool: check(copy(t), t) for tool in ("snakemake", "dvc")))


@pytest.mark.parametrize("tool, other", [("snakemake", "dvc"), ("dvc", "snakemake")])
def test_07_killed_in_the_middle_then_the_other_tool(copy, tool, other):
    """kill -9 of a tool while generate runs: the stage dies, finished stages stay. Catalogue G07,
    H22, H01, G04."""
    project = copy("project")
    project.edit_params(datasets__one__max_samples=9, generate__sampling__temperature=0.5)
    assert project.stale() == {"prepare@one", "generate@one", "vocab"}
    command = ["snakemake", "--cores", "2", "bench"] if tool == "snakemake" else ["dvc", "repro"]
    build = start(project, *command)
    stage = wait_for_start(project, "generate@one")
    build.kill()
    build.wait()
    assert_all_end(project)
    assert serving.gone(stage)
    assert project.ran() == ["prepare@one", "generate@one"]
    assert "generate@one" in project.planned(), (
        "no lock and no mark of the killed run is in the way"
    )
    assert "generate@one" in project.stale() and "prepare@one" not in project.stale()
    project.build(other)
    assert project.ran()[0] == "generate@one" and "prepare@one" not in project.ran()
    project.assert_fresh()


def test_killed_dvc_leaves_no_stage(copy):
    """kill -9 of dvc: between it and the stage stands a shell, which survives. Catalogue H22."""
    project = copy("project")
    project.edit_params(bench__max_new_tokens=6)
    build = start(project, "dvc", "repro")
    wait_for_start(project, "bench")
    build.kill()
    build.wait()
    assert_all_end(project)
    assert project.planned() == {"bench"}
    project.ran()
    project.snakemake()
    assert project.ran() == ["bench"]
    project.assert_fresh()


def test_a_failing_stage_fails_the_build_and_keeps_its_message(copy):
    """Through the pipe to the log as well. Catalogue G01, G05: nothing half is left under a final
    name."""
    project = copy("project")
    before = (project / "params.yaml").read_text()
    project.edit_params(vocab__size=12, vocab__min_coverage=1.0)
    said = project.snakemake(check=False)
    assert "vocab.size" in said
    assert "vocab.size" in (project / "logs/vocab.log").read_text()
    assert not (project / "data/vocab/draft_vocab.safetensors").exists()
    assert project.ran() == ["vocab"]
    assert {"vocab", "train", "bench"} == project.planned()
    (project / "params.yaml").write_text(before)
    project.snakemake()
    assert project.ran() == [], "restored from the run cache"


def test_inputs_and_code_edited_while_a_stage_runs(copy):
    """The stage fails naming the file, and nothing is recorded; parameters of others may be
    edited."""
    project = copy("project")
    project.edit_params(bench__max_new_tokens=6)
    for file in ("data/drafter/config.json", "workflow/eagle3/bench/report.py"):
        build = start(project, "dvc", "repro", "-s", "bench")
        stage = wait_for_start(project, "bench")
        os.kill(stage, signal.SIGSTOP)
        path = project / file
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content + b"\n")
        os.kill(stage, signal.SIGCONT)
        said = build.communicate(timeout=300)[0]
        assert build.returncode != 0 and f"{file} changed while stage bench ran" in said
        assert project.ran() == ["bench"] and "bench" in project.stale()
        path.unlink()
        path.write_bytes(content)
    project.dvc("checkout", check=False)
    build = start(project, "dvc", "repro", "-s", "bench")
    stage = wait_for_start(project, "bench")
    os.kill(stage, signal.SIGSTOP)
    project.edit_params(train__lr=0.5)
    os.kill(stage, signal.SIGCONT)
    assert build.communicate(timeout=300) and build.returncode == 0
    assert project.stale() == {"train"}


def test_13_two_builds_at_once(copy):
    """A second snakemake refuses and names the first; dvc repro beside it refuses; the first ends
    whole."""
    project = copy("project")
    project.edit_params(train__lr=0.002)
    assert project.stale() == {"train"} and project.planned() == {"train", "bench"}
    first = start(project, "snakemake", "--cores", "2", "bench")
    stage = wait_for_start(project, "train")
    os.kill(stage, signal.SIGSTOP)  # so that the first build lasts as long as the others look at it
    second = project.snakemake("bench", check=False)
    assert (
        "another snakemake is building here as process" in second and "cannot be locked" in second
    )
    beside = start(project, "dvc", "repro", "-s", "train")
    said = beside.communicate(timeout=300)[0]
    assert beside.returncode != 0 and (
        "is busy" in said or "already running" in said or "Unable to acquire lock" in said
    )
    os.kill(stage, signal.SIGCONT)
    assert first.communicate(timeout=300) and first.returncode == 0
    ran = project.ran()
    assert ran == ["train", "bench"]
    project.assert_fresh()


def test_parallel_data_sets_never_fail_on_dvcs_lock(tmp_path):
    """Eight gates at once, of stages that take no time of their own: each of them wants DVC's lock
    at any moment."""
    folder = build_overhead.make_project(tmp_path / "project", 6)
    files = [f"data/records/set{i}.parquet" for i in range(6)]
    said = tiny.run(folder, "snakemake", "--cores", "8", *files).stdout
    assert "19 of 19 steps (100%) done" in said and all((folder / file).exists() for file in files)
    stages = tiny.run(folder, "dvc", "status", *(f"tokenize@set{i}" for i in range(6))).stdout
    assert "up to date" in stages, "every one of them is in dvc.lock"


def test_a_lock_file_that_a_kill_cut_off(copy):
    """DVC writes over dvc.lock: what a kill in that moment leaves is refused with the way out, and
    costs nothing."""
    project = copy("project")
    lock = project / "dvc.lock"
    text = lock.read_text()
    for left in (text[: text.index("    md5: ") + 9], ""):
        lock.write_text(left)
        refused = project.snakemake("-n", "bench", check=False)
        assert "dvc.lock is cut off" in refused and "`rm dvc.lock`" in refused, refused
    assert "dvc.lock' validation failed" in project.dvc("status", check=False), (
        "plain DVC names the file as well"
    )
    lock.unlink()
    project.snakemake()
    assert project.ran() == []
    project.assert_fresh()
    assert lock.read_text() == text or sorted(lock.read_text().splitlines()) == sorted(
        text.splitlines()
    )


def test_merge_conflict_in_the_lock_file(copy):
    """Two branches change other stages; what to type is in docs/build.md. Catalogue H13."""
    project = copy("project")
    for branch, edit in (("left", {"bench__steps": 1}), ("right", {"bench__max_difference": 0.6})):
        project.git("checkout", "-q", "main")
        project.git("checkout", "-q", "-b", branch)
        project.dvc("checkout")
        project.edit_params(**edit)
        project.dvc("repro")
        project.git("commit", "-qam", branch)
    project.ran()
    done = subprocess.run(
        ["git", "merge", "left"], cwd=project.folder, capture_output=True, text=True
    )
    assert done.returncode != 0 and "CONFLICT" in done.stdout
    refused = project.snakemake("-n", "bench", check=False)
    assert "dvc.lock has merge conflicts; `git checkout --ours dvc.lock`" in refused, refused
    project.git("checkout", "--ours", "dvc.lock")
    assert "<<<<" not in (project / "params.yaml").read_text()
    project.dvc("checkout", check=False)
    assert project.planned() == {"bench"}
    project.snakemake()
    assert project.ran() == ["bench"], "both edits together were never built"
    project.git("add", "dvc.lock", "params.yaml")
    project.git("commit", "-qm", "merged")
    project.assert_fresh()


def test_why_a_build_failed_stands_at_the_end(copy):
    """Snakemake prints all that it knows of a failed job after the stage's own words."""
    project = copy("project")
    (project / "empty.jsonl").write_text("")
    project.edit_params(datasets__mine={"answers": "generate", "source": {"path": "empty.jsonl"}})
    said = project.snakemake("data/prompts/mine.parquet", check=False).splitlines()
    sentence = (
        "logs/prepare/mine.log: data set mine is empty: its source has no rows; look at "
        "datasets.mine.source"
    )
    (place,) = (i for i, line in enumerate(said) if line.startswith(sentence))
    assert place > next(
        i for i, line in enumerate(said) if line.startswith("Error in rule prepare")
    )
