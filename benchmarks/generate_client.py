"""How many rows per second the client can take, and how much memory a million of them needs; no
GPU.

    python benchmarks/generate_client.py --rows 20000              # the client alone: rows/s, CPU,
    memory python benchmarks/generate_client.py --rows 1000000 --stages   # prepare, generate,
    tokenize: peak memory of each

The server is the tests' own, at full speed, as a process of its own on the same cores; its share of
the CPU is shown. Prompts are short and all different; answers have up to 24 ids. The tokenizer is a
small byte-level BPE."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "workflow"), str(ROOT / "tests")]
WORDS = (
    "the a river stone house green walks runs to from with and count seven blue bird sings "
    "code print loop"
).split()


def write_rows(path: Path, count: int) -> None:
    with open(path, "w") as file:
        for i in range(count):
            text = f"{i} {WORDS[i % 19]} {WORDS[i // 19 % 19]} {WORDS[i // 361 % 19]}"
            file.write(json.dumps({"prompt": text}) + "\n")


def lay_out(work: Path, rows: int, port: int, concurrency: int) -> None:
    """A project with one data set, whose engine is the tests' server."""
    import server_parts as serving
    import tiny
    import yaml

    work.mkdir(parents=True, exist_ok=True)
    if not (work / "model/model.safetensors").exists():
        tiny.make_model(work / "model")
    write_rows(work / "rows.jsonl", rows)
    content = tiny.params(work / "model", {"own": (work / "rows.jsonl", "generate")})
    content["datasets"]["own"]["max_samples"] = None
    content["generate"] = {"engine": "sglang", "sampling": {"max_new_tokens": 32, "temperature": 0}}
    content["server"] = {"command": serving.COMMAND, "port": port, "start_timeout": 120}
    content["runtime"] = {"concurrency": concurrency, "reserve_bytes": 0}
    (work / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    (work / "dvc.yaml").write_text((ROOT / "dvc.yaml").read_text())
    shutil.rmtree(work / "workflow", ignore_errors=True)
    shutil.copytree(
        ROOT / "workflow", work / "workflow", ignore=shutil.ignore_patterns("__pycache__")
    )


def stage(work: Path, script: str, *words: str) -> dict:
    """Runs a stage; seconds, CPU seconds and peak memory of its process."""
    begun = time.monotonic()
    process = subprocess.Popen([sys.executable, f"workflow/scripts/{script}.py", *words], cwd=work)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{script} ended with {process.returncode}")
    return {
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mib": round(usage.ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--port", type=int, default=31900)
    parser.add_argument("--work", type=Path, default=Path(".work/generate_client"))
    parser.add_argument("--stages", action="store_true", help="also tokenize")
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmarks/results"))
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    lay_out(work, arguments.rows, arguments.port, arguments.concurrency)
    found = {
        "rows": arguments.rows,
        "concurrency": arguments.concurrency,
        "cores": len(os.sched_getaffinity(0)),
    }
    stage(work, "target")
    found["prepare"] = stage(work, "prepare", "own", "--out", "data/prompts/own.parquet")
    found["generate"] = stage(
        work,
        "generate",
        "own",
        "--prompts",
        "data/prompts/own.parquet",
        "--out",
        "data/responses/own",
    )
    state = json.loads((work / ".work/generate/own/status.json").read_text())
    found["rows_per_s"] = round(state["answers"] / state["seconds"], 1)
    if arguments.stages:
        found["tokenize"] = stage(
            work,
            "tokenize",
            "own",
            "--responses",
            "data/responses/own",
            "--out",
            "data/records/own.parquet",
        )
    print(f"\n{'stage':<10}{'seconds':>10}{'CPU s':>10}{'peak MiB':>10}")
    for name in ("prepare", "generate", "tokenize"):
        if name in found:
            print(
                f"{name:<10}{found[name]['seconds']:>10}{found[name]['cpu_seconds']:>10}{found[name]['peak_mib']:>10}"
            )
    print(f"client: {found['rows_per_s']} rows/s")
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    (Path(arguments.out) / f"generate_client_{arguments.rows}.json").write_text(
        json.dumps(found, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
