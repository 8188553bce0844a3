"""Random damage with a fixed seed: after a build every artifact is what it was, or the build says
in a sentence why it stopped; none is silently different.

Alone: EAGLEMAKE_SCENARIOS=1 python -m pytest -s tests/scenarios/test_random_damage.py.
EAGLEMAKE_DAMAGES=N sets their number."""

import collections
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.scenarios.conftest import Project

pytestmark = pytest.mark.timeout(7200)
TOGETHER = 5  # damages that share a build
KINDS = ("flipped", "cut", "swapped", "back-dated", "removed")
PLACES = ("data", ".dvc/cache", ".work", ".build", "dvc.lock", "store")
TIMED = ("bench/", "drafter/training.json")  # hold seconds: equal only where nothing ran


def artifacts(project: Project) -> dict[str, bytes]:
    root = project / "data"
    return {
        name: path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
        if not (name := str(path.relative_to(root))).startswith(TIMED)
    }


def candidates(project: Project, store: Path, place: str) -> list[Path]:
    root = store if place == "store" else project / place
    files = [root] if root.is_file() else [p for p in sorted(root.rglob("*")) if p.is_file()]
    return [path for path in files if path.stat().st_size]


def damage(file: Path, kind: str, other: Path, chooser: random.Random) -> None:
    if kind == "removed":
        file.unlink()
        return
    real = Path(os.path.realpath(file))
    stat, content = real.stat(), bytearray(real.read_bytes())
    if kind == "cut":
        del content[chooser.randrange(len(content)) :]
    elif kind == "swapped":
        content = bytearray(other.read_bytes())
    else:
        content[chooser.randrange(len(content))] ^= 1 << chooser.randrange(8)
    os.chmod(real, 0o644)
    with open(real, "r+b") as out:
        out.write(content)
        out.truncate()
    os.chmod(real, stat.st_mode)
    if kind == "back-dated":
        os.utime(real, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def refusal(said: str) -> str | None:
    """The sentence with which a build stopped."""
    sentences = ("error: ", "dvc.lock", "is damaged", "was damaged", "params.yaml")
    lines = [line for line in said.splitlines() if any(word in line for word in sentences)]
    return None if "Traceback" in said or not lines else lines[-1]


def test_none_is_silently_different(copy, tmp_path):
    count = int(os.environ.get("EAGLEMAKE_DAMAGES", 300))
    chooser, figures = random.Random(20), collections.Counter()
    first, store = copy("first"), tmp_path / "store"
    first.dvc("remote", "add", "--local", "-d", "store", str(store))
    first.dvc("push", "--run-cache")
    expected = artifacts(first)
    shutil.copytree(store, tmp_path / "kept")
    shutil.rmtree(first.folder)
    for turn in range(count // TOGETHER):
        project = copy(f"turn-{turn}")
        shutil.rmtree(store)
        shutil.copytree(tmp_path / "kept", store)
        if turn % 2:
            project.dvc("remote", "add", "--local", "-d", "store", str(store))
        project.planned()  # what lies here is known
        done = []
        for _ in range(TOGETHER):
            place, kind = chooser.choice(PLACES), chooser.choice(KINDS)
            files = candidates(project, store, place)
            file, other = chooser.choice(files), chooser.choice(files)
            damage(file, kind, other, chooser)
            done.append((place, kind, str(file)))
        for _ in range(2):  # a stage that finds its input damaged asks for a second run
            said = project.snakemake("bench", check=False)
            if "Exiting because" not in said and "Error" not in said:
                break
        else:
            assert refusal(said), f"stopped without a sentence after {done}:\n{said[-3000:]}"
            figures.update(("refused", *entry[:2]) for entry in done)
            print(f"{turn}: refused: {refusal(said)}", flush=True)
            shutil.rmtree(project.folder)
            continue
        after = artifacts(project)
        different = [name for name in expected if after.get(name) != expected[name]]
        assert not different, f"silently different after {done}: {different}\n{said[-3000:]}"
        figures.update(("repaired", *entry[:2]) for entry in done)
        shutil.rmtree(project.folder)
    for line, number in sorted(figures.items()):
        print(*line, number)
