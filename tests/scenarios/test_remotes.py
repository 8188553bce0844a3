"""Clones, branches and remote storage: a folder, and a real S3 server on loopback.

Alone: python -m pytest tests/scenarios/test_remotes.py
"""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.scenarios.conftest import clone

pytestmark = pytest.mark.timeout(1800)  # stages are real processes; a busy machine takes its time


@pytest.fixture
def pushed(copy, tmp_path):
    """A built project whose results lie in a remote folder. Returns (project, the folder)."""
    project, store = copy("project"), str(tmp_path / "store")
    project.dvc("remote", "add", "--local", "-d", "store", store)
    project.dvc("push", "--run-cache")
    return project, store


@pytest.mark.quick
@pytest.mark.parametrize("tool", ["snakemake", "dvc"])
def test_02_03_clone_pull_and_edit(pushed, tool):
    """A clone has none of Snakemake's records and arbitrary times. Catalogue G02, G14, G16, H11."""
    colleague = clone(pushed[0], "colleague", pushed[1])
    assert {"target", "train", "bench"} <= colleague.planned(), "nothing is there yet"
    colleague.dvc("pull")
    colleague.assert_fresh()
    colleague.edit_params(train__lr=0.002)
    assert "train.lr 0.001 -> 0.002 (train)" in colleague.snakemake("-n", "bench")
    assert colleague.planned() == {"train", "bench"} and colleague.stale() == {"train"}
    colleague.build(tool)
    assert colleague.ran() == ["train", "bench"]
    colleague.assert_fresh()


@pytest.mark.parametrize("tool", ["snakemake", "dvc"])
def test_11_another_branch_and_back(copy, tool):
    """Times change, contents do not. Catalogue G10."""
    project = copy("project")
    project.git("checkout", "-q", "-b", "other")
    project.edit_params(bench__max_new_tokens=6)
    project.comment("workflow/eagle3/bench/report.py")
    assert project.stale() == {"bench"} and project.planned() == {"bench"}
    project.build(tool)
    assert project.ran() == ["bench"]
    project.assert_fresh()
    project.git("commit", "-qam", "shorter answers")
    for branch in ("main", "other"):
        project.git("checkout", "-q", branch)
        project.dvc("checkout")
        project.assert_fresh()


@pytest.mark.parametrize("tool", ["snakemake", "dvc"])
def test_14_a_colleagues_result_is_pulled_not_computed(pushed, tool):
    """Their dvc.lock is unknown here: the run cache in the remote finds it by its inputs."""
    project, store = pushed
    colleague = clone(project, "colleague", store)
    colleague.dvc("pull")
    colleague.edit_params(bench__max_new_tokens=6)
    colleague.snakemake()
    assert colleague.ran() == ["bench"]
    colleague.dvc("push", "--run-cache")
    project.edit_params(bench__max_new_tokens=6)
    assert project.stale() == {"bench"} and project.planned() == {"bench"}
    if tool == "snakemake":
        assert "bench: fetching a result of the same inputs from the remote" in project.snakemake()
    else:
        project.dvc("repro", "--pull")
    project.assert_fresh()
    assert (project / "data/bench/report.json").read_text() == (
        colleague / "data/bench/report.json"
    ).read_text()


def test_a_clone_without_pull_fetches_instead_of_computing(pushed):
    """Catalogue H11: an expensive stage is not started while its recorded output lies in the
    remote."""
    colleague = clone(pushed[0], "colleague", pushed[1])
    said = colleague.snakemake()
    assert "train: fetching the recorded result from the remote" in said
    colleague.assert_fresh()


def test_earlier_rows_come_from_the_remote(pushed):
    """Scenario 9 on a clone that pulled nothing: what a colleague generated is not generated
    again."""
    colleague = clone(pushed[0], "colleague", pushed[1])
    colleague.edit_params(datasets__one__max_samples=8)
    said = colleague.snakemake("data/responses/one/raw_responses.jsonl")
    assert "generate@one: fetching its earlier rows from the remote" in said
    assert "generate@one: 8 wanted, 6 done, 2 to go" in said
    assert colleague.ran() == ["prepare@one", "generate@one"]


@pytest.mark.parametrize("tool", ["snakemake", "dvc"])
def test_17_an_unreachable_remote_is_a_warning(copy, tool):
    """Catalogue H19: the message says what the remote said."""
    project = copy("project")
    project.dvc("remote", "add", "--local", "-d", "store", "s3://nowhere/store")
    project.dvc(
        "remote", "modify", "--local", "store", "endpointurl", f"http://127.0.0.1:{free_port()}"
    )
    project.dvc("remote", "modify", "--local", "store", "access_key_id", "a")
    project.dvc("remote", "modify", "--local", "store", "secret_access_key", "b")
    project.edit_params(bench__max_new_tokens=6)
    assert project.stale() == {"bench"} and project.planned() == {"bench"}
    said = project.build(tool)
    assert project.ran() == ["bench"]
    if tool == "snakemake":
        assert "warning: bench: the remote gave nothing" in said and "building without it" in said
    project.assert_fresh()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def s3():
    """A real S3 server on loopback. Yields its address."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/moto-api/", timeout=1).read()
                break
            except OSError:
                assert server.poll() is None, "the S3 server ended"
                time.sleep(0.2)
        urllib.request.urlopen(
            urllib.request.Request(f"{address}/store", method="PUT"), timeout=10
        ).read()
        yield address
    finally:
        server.terminate()
        server.wait()


def test_s3_push_pull_and_run_cache(copy, s3):
    def use(project):
        project.dvc("remote", "add", "--local", "-d", "store", "s3://store/drafter")
        for key, value in {
            "endpointurl": s3,
            "access_key_id": "a",
            "secret_access_key": "b",
        }.items():
            project.dvc("remote", "modify", "--local", "store", key, value)

    project = copy("project")
    use(project)
    assert "pushed" in project.dvc("push", "--run-cache")
    assert "in sync" in project.dvc("status", "-c"), "catalogue H10: what was pushed is all there"
    colleague = clone(project, "colleague")
    use(colleague)
    said = colleague.snakemake("drafter")
    assert "train: fetching the recorded result from the remote" in said and colleague.ran() == []
    colleague.dvc("pull", "--run-cache")
    colleague.assert_fresh()
    # Nobody's dvc.lock has it any more, the run cache does.
    shutil.rmtree(colleague / "data/bench")
    (colleague / "dvc.lock").unlink()
    colleague.dvc("repro")
    colleague.assert_fresh()
