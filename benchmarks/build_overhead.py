"""What the build itself costs: a no-op build and a stage's gate, against bare Snakemake and bare
DVC on the same graph.

    python benchmarks/build_overhead.py [--datasets 10] [--repeat 5] [--out build_overhead.json]

The graph is this project's with that many data sets. Every stage's command is replaced by one that
creates its outputs at once, so that what is measured is the build and nothing else. Times are CPU
seconds of the process and its children (user + system), the smallest of the repetitions; a busy
machine changes them little."""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "workflow")]

import tiny  # noqa: E402

MAKE = """import sys
from pathlib import Path
for name in sys.argv[1:]:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
"""


def outputs(folder: Path, stage: str, outs: list[str]) -> list[str]:
    """Files that a stage has to create: of a folder in dvc.yaml, those that its rule names."""
    text = (folder / f"workflow/rules/{stage}.smk").read_text()
    named = [name.replace("{dataset}", "${key}") for name in re.findall(r'"(data/[^"]+)"', text)]
    return sorted(
        {name for name in named for out in outs if name == out or name.startswith(out + "/")}
    )


def cpu(*command: str, folder: Path) -> float:
    """CPU seconds of a command that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def best(repeat: int, *command: str, folder: Path, before=None) -> float:
    times = []
    for turn in range(repeat):
        if before:
            before(turn)
        times.append(cpu(*command, folder=folder))
    return min(times)


def make_project(folder: Path, datasets: int) -> Path:
    """The project with `datasets` data sets and stages that only create their outputs, built."""
    folder.mkdir(exist_ok=True)
    for name in ("workflow", "profiles"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Snakefile", "dvc.yaml", ".dvcignore"):
        shutil.copy(ROOT / name, folder)
    (folder / "make.py").write_text(MAKE)
    definitions = yaml.safe_load((folder / "dvc.yaml").read_text())
    for name, stage in definitions["stages"].items():
        inner = stage.get("do", stage)
        outs = [out if isinstance(out, str) else next(iter(out)) for out in inner["outs"]]
        inner["cmd"] = "python make.py " + " ".join(outputs(folder, name, outs))
    (folder / "dvc.yaml").write_text(yaml.safe_dump(definitions, sort_keys=False, width=1000))
    sources = {f"set{i}": (Path("/nowhere"), "generate") for i in range(datasets)}
    tiny.write_params(folder, tiny.params(Path("/nowhere"), sources))
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=folder, check=True)
    shutil.copy(ROOT / ".dvc/config", folder / ".dvc/config")
    (folder / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {folder}/.site\n")
    return folder


def bare_snakefile(folder: Path) -> Path:
    """The same rules without the bridge: what Snakemake alone costs for this graph."""
    text = "".join(
        (folder / f"workflow/rules/{name}.smk").read_text() + "\n"
        for name in (
            "target",
            "prepare",
            "generate",
            "tokenize",
            "vocab",
            "extract",
            "train",
            "bench",
        )
    )
    known = json.loads((folder / ".build/bridge.json").read_text())
    head = (
        f"DATASETS = {known['datasets']!r}\nCODE = {known['code']!r}\n"
        "def stage_code(stage):\n    return CODE[stage]\n"
        "def half_the_cores(wildcards):\n    return 1\n"
        "def gate(stage):\n    return f'python -m eagle3.build.gate {stage} 2>&1 | tee {{log}}'\n\n"
    )
    target = "rule drafter:\n    input:\n        rules.train.output,\n"
    path = folder / "workflow/rules/bare.smk"
    path.write_text(head + text + target)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--datasets", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ["PATH"] = (
        os.path.dirname(os.path.abspath(sys.executable)) + os.pathsep + os.environ["PATH"]
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_project(Path(temporary), arguments.datasets)
        gate = [sys.executable, "-m", "eagle3.build.gate", "train"]
        smk, dvc = (
            [sys.executable, "-m", "snakemake", "--cores", "2"],
            [sys.executable, "-m", "dvc"],
        )
        whole = cpu(*smk, "bench", folder=folder)
        stages = len(json.loads((folder / ".build/bridge.json").read_text())["stages"])
        bare = bare_snakefile(folder)
        alone = [*smk, "-s", str(bare), "-d", str(folder), "drafter"]
        cpu(*alone[:-1], "--touch", "drafter", folder=folder)
        cpu(
            *smk, "drafter", folder=folder
        )  # the touch above changed times, which the bridge looks into once
        repeat = arguments.repeat

        def other_parameter(turn: int) -> None:
            content = tiny.read_params(folder)
            content["train"]["lr"] = 1e-3 + 1e-5 * (turn + 1)
            tiny.write_params(folder, content)

        rows = {
            "no-op snakemake drafter": best(repeat, *smk, "drafter", folder=folder),
            "  bare Snakemake, same graph": best(repeat, *alone, folder=folder),
            "no-op dvc repro": best(repeat, *dvc, "repro", folder=folder),
            "gate, stage unchanged": best(repeat, *gate, folder=folder),
            "gate, stage runs": best(repeat, *gate, folder=folder, before=other_parameter),
            "  dvc repro --single-item, stage runs": best(
                repeat,
                *dvc,
                "repro",
                "-q",
                "-s",
                "train",
                folder=folder,
                before=lambda turn: other_parameter(turn + 100),
            ),
        }
    rows["whole first build, per stage"] = whole / stages
    ratio = rows["no-op snakemake drafter"] / rows["  bare Snakemake, same graph"]
    print(f"{stages} stages, {arguments.datasets} data sets, CPU seconds")
    for name, seconds in rows.items():
        print(f"{name:42s} {seconds:6.2f}")
    print(f"{'no-op snakemake to bare Snakemake':42s} {ratio:6.2f} x")
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"stages": stages, "cpu_seconds": rows, "ratio": ratio}, indent=2) + "\n"
        )


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT / "workflow")
    main()
