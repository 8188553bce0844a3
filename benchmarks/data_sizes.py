"""Drafters from several amounts of data: records, draft vocabulary, states and training from a folder of responses.

    PYTHONPATH=workflow python benchmarks/data_sizes.py --responses RUN/data/responses --target /models/target --out STUDY

Runs the stages' own scripts. The validation split is whole in every size, so that all are measured on the same held-out
answers. Leaves STUDY/drafter-SHARE and STUDY/records, which benchmarks/serve_gpu.py serves, and prints a table.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from eagle3.records import split_of

HELD_OUT = 0.02


def parameters(options: argparse.Namespace, names: list[str]) -> dict:
    """params.yaml of the study."""
    return {
        "target": {"source": {"path": str(options.target.resolve())}, "dtype": options.dtype, "context_length": 4096},
        "prompts": {}, "generate": {"sampling": {"max_new_tokens": 1}}, "on_policy": {},
        "datasets": {name: {"answers": "generate", "source": {"path": "unused.jsonl"}} for name in names},
        "records": {"max_tokens": 1024, "validation_share": HELD_OUT}, "vocab": {"size": options.vocab},
        "hidden_states": {"dtype": options.states},
        "train": {"steps": options.steps, "epochs": options.epochs, "lr": options.lr, "batch_tokens": options.batch_tokens,
                  "dtype": options.compute, "architecture": {"intermediate_size": options.intermediate},
                  "max_updates": options.max_updates, "validate_every": options.validate_every},
        "bench": {}, "runtime": {"batch_tokens": 65536, "checkpoint_every": 1000000},
    }


def stage(name: str, *arguments: str, params: Path) -> None:
    """Runs a stage's script and prints how long it took."""
    started = time.monotonic()
    subprocess.run([sys.executable, f"workflow/scripts/{name}.py", *arguments, "--params", str(params)], check=True)
    print(f"## {name} {arguments[0] if arguments else ''}: {time.monotonic() - started:.1f} s", flush=True)


def keep_share(source: Path, kept: Path, share: float) -> int:
    """Copies responses: all held-out rows, and the first `share` of the others. Returns the number of the others."""
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(source, kept)
    rows = (source / "raw_responses.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    held_out = [split_of(json.loads(row)["id"], HELD_OUT) == "validation" for row in rows]
    wanted = round(share * held_out.count(False))
    trained = 0
    with open(kept / "raw_responses.jsonl", "w", encoding="utf-8") as file:
        for row, held in zip(rows, held_out):
            if held or trained < wanted:
                file.write(row)
                trained += not held
    return trained


def one_size(options: argparse.Namespace, names: list[str], share: float, params: Path) -> dict:
    """Trains on a share of the data. The states of all of it are extracted once, by the first and largest share."""
    rows = sum(keep_share(options.responses / name, options.out / "responses" / name, share) for name in names)
    for folder in ("records", "hidden_states", "vocab"):
        shutil.rmtree(Path("data") / folder, ignore_errors=True)
    for name in names:
        stage("tokenize", name, "--responses", str(options.out / "responses" / name), "--out", f"data/records/{name}.parquet",
              params=params)
    stage("vocab", params=params)
    for name in names:
        stage("extract", name, "--records", f"data/records/{name}.parquet", "--out", f"data/hidden_states/{name}", params=params)
    drafter = options.out / f"drafter-{share:g}"
    shutil.rmtree(Path(".work/train"), ignore_errors=True)
    started = time.monotonic()
    stage("train", "--out", str(drafter), params=params)
    shutil.rmtree(options.out / "records", ignore_errors=True)
    shutil.copytree("data/records", options.out / "records")
    metrics = json.loads((drafter / "metrics.json").read_text())
    tokens = sum(json.loads(p.read_text())["tokens"] for p in Path("data/hidden_states").glob("*/manifest.json"))
    return {"share": share, "responses": rows, "tokens": tokens, "train_seconds": time.monotonic() - started, **metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=Path, required=True, help="data/responses of a run")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.25, 0.0625])
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--compute", default="bfloat16")
    parser.add_argument("--states", default="bfloat16")
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--max-updates", type=int, default=1200)
    parser.add_argument("--validate-every", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    options = parser.parse_args()
    names = sorted(p.name for p in options.responses.iterdir() if (p / "raw_responses.jsonl").exists())
    options.out.mkdir(parents=True, exist_ok=True)
    params = options.out / "params.yaml"
    params.write_text(yaml.safe_dump(parameters(options, names), sort_keys=False))
    stage("target", params=params)
    rows = [one_size(options, names, share, params) for share in options.shares]
    (options.out / "data_sizes.json").write_text(json.dumps(rows, indent=2) + "\n")
    for row in rows:
        print(f"{row['responses']:>7} responses  {row['tokens']:>10,} tokens  accept length {row['accept_length']:.3f} "
              f"(untrained {row['accept_length_untrained']:.3f}), trained in {row['train_seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
