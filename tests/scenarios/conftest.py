"""A finished build on a tiny target, made once per session; every scenario changes a copy of it.

Alone: EAGLEMAKE_SCENARIOS=1 python -m pytest tests/scenarios. Without the variable only those
marked `quick` run."""

import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny

CHAIN = ("prepare", "generate", "tokenize", "extract")
STAGES = {
    "target",
    "vocab",
    "train",
    "bench",
    *(f"{stage}@{name}" for stage in CHAIN for name in ("one", "given")),
}


def pytest_collection_modifyitems(config, items):
    """`make test` has the quick ones, `make test-scenarios` all."""
    if "EAGLEMAKE_SCENARIOS" not in os.environ:
        left_out = [
            item
            for item in items
            if Path(__file__).parent in item.path.parents and not item.get_closest_marker("quick")
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


class Project:
    """A project folder and the two tools in it; remembers how many stage processes had started at
    the last question."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.asked = len(self._started())

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def snakemake(self, *arguments: str, check: bool = True) -> str:
        return tiny.run(
            self.folder, "snakemake", "--cores", "2", *(arguments or ("bench",)), check=check
        ).stdout

    def dvc(self, *arguments: str, check: bool = True) -> str:
        return tiny.run(self.folder, "dvc", *arguments, check=check).stdout

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout

    def build(self, tool: str) -> str:
        return self.snakemake() if tool == "snakemake" else self.dvc("repro")

    def ran(self) -> list[str]:
        """Stages whose process began its work since the last call, in order."""
        started = self._started()
        new, self.asked = started[self.asked :], len(started)
        return [line.split()[2] for line in new]

    def _started(self) -> list[str]:
        log = self.folder / ".work/started.log"
        return log.read_text().splitlines() if log.exists() else []

    def planned(self) -> set[str]:
        """Jobs that `snakemake -n bench` names."""
        output = self.snakemake("-n", "bench")
        if "Nothing to be done" in output:
            return set()
        jobs = set()
        for line in output.splitlines():
            if line.startswith("Job ") and ": " in line and not line.startswith("Job stats"):
                group, name = (line.split(": ", 1)[1].split(":")[0].split() + [""])[:2]
                jobs.add(f"{group}@{name}" if name else group)
        return jobs

    def stale(self) -> set[str]:
        """Stages that `dvc status` names."""
        output = self.dvc("status")
        return {
            line.rstrip(":").strip()
            for line in output.splitlines()
            if line.endswith(":") and not line.startswith((" ", "\t"))
        }

    def assert_fresh(self) -> None:
        assert self.stale() == set() and self.planned() == set()
        assert self.ran() == []

    def edit_params(self, **changes) -> None:
        """Sets dotted keys (`__` for `.`) of params.yaml; DROP removes one."""
        content = tiny.read_params(self.folder)
        for dotted, value in changes.items():
            *parents, last = dotted.split("__")
            section = content
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        tiny.write_params(self.folder, content)

    def comment(self, file: str) -> None:
        """Adds a comment to a file: other bytes, same meaning."""
        with open(self.folder / file, "a") as out:
            out.write("# a comment\n")


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Path:
    """Built through Snakemake, committed in git. The other tests have copies."""
    folder = tiny.make_project(
        tmp_path_factory.mktemp("template") / "project",
        {"one": (12, "generate"), "given": (8, "given")},
    )
    own_site_cache(folder)
    project = Project(folder)
    project.edit_params(records__validation_fraction=0.5)
    project.git("commit", "-qam", "more held out")
    project.snakemake()
    ran = project.ran()
    assert set(ran) == STAGES and len(ran) == len(STAGES)
    project.git("add", "dvc.lock")
    project.git("commit", "-qm", "built")
    return folder


@pytest.fixture
def copy(template, tmp_path) -> Callable[[str], Project]:
    """Makes a copy of the built project under another name."""
    return lambda name: Project(duplicate(template, tmp_path / name))


@pytest.fixture
def pair(copy) -> tuple[Project, Project]:
    """Two copies: one to build with Snakemake, one with DVC."""
    return copy("snakemake"), copy("dvc")


def duplicate(source: Path, target: Path) -> Path:
    """A copy with its own DVC cache, all times kept; links into the old cache lead into the new
    one."""
    shutil.copytree(
        source, target, symlinks=True, ignore=shutil.ignore_patterns("tmp", "__pycache__")
    )
    for path in (target / "data").rglob("*"):
        if path.is_symlink() and str(source) in os.readlink(path):
            stat, destination = path.lstat(), os.readlink(path).replace(str(source), str(target))
            path.unlink()
            path.symlink_to(destination)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns), follow_symlinks=False)
    own_site_cache(target)
    return target


def own_site_cache(folder: Path) -> None:
    """What DVC remembers of files it keeps beside the project, not in a folder that all users of
    the machine share."""
    (folder / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {folder}-site\n")


def clone(project: Project, name: str, remote: str | None = None) -> Project:
    """`git clone` beside the project, as a colleague has it."""
    folder = project.folder.parent / name
    subprocess.run(["git", "clone", "-q", str(project.folder), str(folder)], check=True)
    own_site_cache(folder)
    other = Project(folder)
    if remote:
        other.dvc("remote", "add", "--local", "-d", "store", remote)
    return other


def at_once(*calls: Callable[[], None]) -> None:
    """Runs calls side by side (both tools on a copy each); raises what one of them raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


__all__ = ["CHAIN", "STAGES", "Project", "at_once", "clone", "duplicate"]
