"""The whole job of params.yaml with SGLang the engine of every stage that has one: what each stage
took, what is stale after it.

    PYTHONPATH=workflow:benchmarks python benchmarks/whole_job.py --target MODEL_DIR --site SITE
    --data FOLDER --out DIR

Lays a project out in --work: the Snakefile, dvc.yaml and workflow of this one, and params.yaml with
the engines, sizes and sources of the options, which are a GPU's. Then runs `snakemake --cores all
bench`, asks Snakemake and DVC what is stale after it (nothing must be), edits bench.max_difference
and asks again (the bench alone must be). FOLDER holds the source files of params.yaml's data sets
and questions by their base names; SITE is the servers' PYTHONPATH. It needs no git: without one the
project is `no_scm`."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from serve_gpu import COMMON

ROOT = Path(__file__).resolve().parents[1]
STAGE = re.compile(r"^Running stage '(.+)':")


def with_file(source: dict, data: Path) -> dict:
    """The source as a file that lies in `data`."""
    return {"path": str((data / Path(source["file"]).name).resolve())}


def params(options: argparse.Namespace) -> dict:
    """params.yaml of the embedded job, changed to what a GPU does in minutes."""
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    content["target"] |= {"source": {"path": str(options.target.resolve())}, "dtype": options.dtype}
    content["prompts"]["max_prompt_tokens"] = 1024
    for one in content["datasets"].values():
        one |= {"source": with_file(one["source"], options.data), "max_samples": options.cap}
    for one in content["bench"]["questions"].values():
        one |= {"source": with_file(one["source"], options.data), "max_samples": options.questions}
    content["generate"] |= {"engine": "sglang"}
    content["generate"]["sampling"]["max_new_tokens"] = options.max_new_tokens
    content["records"] |= {"max_tokens": 1024, "validation_fraction": options.held_out}
    content["vocab"]["size"] = options.vocab
    content["hidden_states"] = {
        "engine": "sglang",
        "dtype": "bfloat16" if options.dtype == "bfloat16" else "float32",
    }
    content["train"] = {
        "init": options.init,
        "steps": options.steps,
        "lr": options.lr,
        "batch_tokens": options.batch_tokens,
        "dtype": options.dtype,
        "epochs": 1000,
        "max_updates": options.updates,
        "validate_every": max(1, options.updates // 5),
        "architecture": {"intermediate_size": options.intermediate},
    }
    content["bench"] |= {
        "engine": options.bench_engine,
        "concurrency": options.bench_concurrency,
        "repeats": 2,
        "max_prompts": options.held_out_prompts,
        "max_new_tokens": options.bench_tokens,
        "max_prompt_tokens": 1024,
        "speculation": [
            dict(zip(("steps", "topk", "draft_tokens"), map(int, shape.split(","))))
            for shape in options.shapes
        ],
    }
    content["server"] = {"flags": json.loads(options.flags), "environment": {"HF_HUB_OFFLINE": "1"}}
    content["server"] |= (
        {"command": options.command} if options.command else {"python": sys.executable}
    )
    if options.site:
        content["server"]["environment"]["PYTHONPATH"] = options.site
    content["runtime"] = {"concurrency": options.concurrency, "batch_tokens": 65536}
    return content


def lay_out(options: argparse.Namespace) -> Path:
    work = options.work
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(
        ROOT / "workflow", work / "workflow", ignore=shutil.ignore_patterns("__pycache__")
    )
    (work / ".dvc").mkdir()
    config = (ROOT / ".dvc/config").read_text()
    if not shutil.which("git"):
        config = config.replace("[core]", "[core]\n    no_scm = true")
    else:
        subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    (work / ".dvc/config").write_text(config)
    for name in ("Snakefile", "dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, work)
    (work / "params.yaml").write_text(yaml.safe_dump(params(options), sort_keys=False))
    return work


def build(work: Path, log: Path) -> dict[str, float]:
    """Seconds that each stage took, and the whole. Raises SystemExit with the end of the log if the
    build fails."""
    started, running, seconds = time.monotonic(), {}, {}
    process = subprocess.Popen(
        ["snakemake", "--cores", "all", "bench"],
        cwd=work,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with open(log, "w") as file:
        for line in process.stdout:
            now = time.monotonic() - started
            file.write(f"{now:7.1f} {line}")
            file.flush()
            if found := STAGE.match(line):
                running[found[1]] = now
            for name in [name for name in running if line.startswith(f"{name}: done in")]:
                seconds[name] = now - running.pop(name)
    if process.wait():
        sys.exit(f"the build failed:\n{log.read_text()[-4000:]}")
    return {**seconds, "all": time.monotonic() - started}


def stale(work: Path) -> dict[str, list[str]]:
    """What Snakemake and DVC would run."""
    dry = subprocess.run(["snakemake", "-n", "bench"], cwd=work, text=True, capture_output=True)
    status = subprocess.run(
        ["dvc", "status", "--json"], cwd=work, text=True, capture_output=True, check=True
    )
    return {
        "snakemake": re.findall(r"^Job \d+: ([^:]+):", dry.stdout + dry.stderr, re.MULTILINE),
        "dvc": sorted(json.loads(status.stdout)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", type=Path, required=True, help="the target's Hugging Face directory"
    )
    parser.add_argument("--site", default="", help="PYTHONPATH of the servers")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--flags", default=json.dumps(COMMON), help="server.flags, as JSON")
    parser.add_argument("--command", type=json.loads, help="server.command, as JSON")
    parser.add_argument("--bench-engine", default="sglang")
    parser.add_argument("--cap", type=int, help="prompts of each data set; all without it")
    parser.add_argument("--questions", type=int, default=8, help="of each public question set")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--held-out", type=float, default=0.06)
    parser.add_argument("--held-out-prompts", type=int, default=56)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--init", default="random")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--bench-concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--shapes", nargs="+", default=["3,1,4"])
    parser.add_argument("--bench-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--work", type=Path, default=Path(".work/job"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".work/job-out")))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    work = lay_out(options)
    try:
        found: dict = {
            "seconds": build(work, options.out / "job.log"),
            "stale": {"after the build": stale(work)},
        }
        content = yaml.safe_load((work / "params.yaml").read_text())
        content["bench"]["max_difference"] = 0.04
        (work / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        found["stale"]["after an edit of bench"] = stale(work)
        (options.out / "job.json").write_text(json.dumps(found, indent=1))
        print(json.dumps(found, indent=1))
    finally:
        for name in (
            "data/bench",
            "data/drafter/metrics.json",
            "data/drafter/training.json",
            "params.yaml",
            "logs",
            "dvc.lock",
        ):
            if (work / name).is_dir():
                shutil.copytree(work / name, options.out / Path(name).name, dirs_exist_ok=True)
            elif (work / name).exists():
                shutil.copy(work / name, options.out)


if __name__ == "__main__":
    main()
