"""Workers die with whoever drives them; one writer per work folder. Alone: python -m pytest
tests/core/test_process.py"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eagle3.core import process
from eagle3.core.errors import UserError

WORKFLOW = Path(process.__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    return process._stat(pid) is not None


def wait_until(condition, timeout: float = 20) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def start(code: str, *arguments: str, **more) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(WORKFLOW)},
        **more,
    )


def driver(tmp_path: Path, worker: str) -> subprocess.Popen:
    """A program named dvc that runs a worker through a shell, as DVC does; prints the worker's
    number."""
    script = tmp_path / "dvc"
    script.write_text(f"""import subprocess, sys
subprocess.run(["/bin/sh", "-c", "{sys.executable} {tmp_path}/worker.py; true"])
""")
    (tmp_path / "worker.py").write_text(worker)
    return subprocess.Popen(
        [sys.executable, str(script)],
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(WORKFLOW)},
    )


def test_a_worker_and_its_children_die_when_the_driver_is_killed(tmp_path):
    """Catalogue H22. The shell between them survives the kill; the worker must not wait for it."""
    parent = driver(
        tmp_path,
        """
import os, subprocess, time
from eagle3.core.process import watch_ancestors
child = subprocess.Popen(["sleep", "300"])
watch_ancestors(0.1)
print(os.getpid(), child.pid, flush=True)
time.sleep(300)
""",
    )
    worker, child = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    try:
        assert wait_until(lambda: not alive(worker) and not alive(child))
    finally:
        for pid in (worker, child):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_run_by_hand_nothing_is_watched():
    assert process.driving_ancestors() == [] or "pytest" not in str(process.driving_ancestors())
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from eagle3.core.process import *; watch_ancestors(); print('ran')",
        ],
        env={**os.environ, "PYTHONPATH": str(WORKFLOW)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "ran\n"


def test_die_with_parent():
    parent = start("""
import subprocess, sys, time
from eagle3.core.process import die_with_parent
print(subprocess.Popen(["sleep", "300"], preexec_fn=die_with_parent).pid, flush=True)
time.sleep(300)
""")
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not alive(child))


def test_the_second_writer_is_refused_by_the_firsts_number_and_a_kill_frees_the_lock(tmp_path):
    holder = start(
        """
import sys, time
from eagle3.core.process import exclusive
with exclusive(sys.argv[1], "stage x"):
    print("held", flush=True)
    time.sleep(300)
""",
        str(tmp_path / "work"),
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(
        UserError, match=f"stage x is already running as process {holder.pid}; wait for it"
    ):
        with process.exclusive(tmp_path / "work", "stage x"):
            pass
    holder.kill()
    holder.wait()
    with process.exclusive(tmp_path / "work", "stage x"):
        assert (tmp_path / "work/lock").read_text() == str(os.getpid())


def test_children_are_found_deepest_first():
    parent = start("""
import subprocess, time
print(subprocess.Popen(["/bin/sh", "-c", "sleep 300; true"]).pid, flush=True)
time.sleep(300)
""")
    shell = int(parent.stdout.readline())
    try:
        assert wait_until(lambda: len(process.children(parent.pid)) == 2)
        found = process.children(parent.pid)
        assert found[-1] == shell and found[0] != shell
    finally:
        for pid in [*process.children(parent.pid), parent.pid]:
            os.kill(pid, signal.SIGKILL)
        parent.wait()


def test_a_zombie_is_not_alive():
    child = subprocess.Popen(["true"])
    assert wait_until(
        lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )
    assert not alive(child.pid)
    child.wait()


def test_without_git_there_is_no_commit(monkeypatch, tmp_path):
    assert process.git("--version").startswith("git version")
    monkeypatch.chdir(tmp_path)
    assert process.git("rev-parse", "HEAD") == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process.git("rev-parse", "HEAD") == ""
