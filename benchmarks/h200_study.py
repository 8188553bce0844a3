"""A drafter for the embedded target on a GPU, from prompts to the served accept length, for several data sizes.

    python benchmarks/h200_study.py answer    # server, prompts by the target itself, answers
    python benchmarks/h200_study.py train     # records, draft vocabulary, hidden states, one drafter per data size

The drafters land in .work/study/drafter-SHARE; benchmarks/serve_gpu.py serves them.

Every step runs the stages' own scripts, with parameters written to .work/study/params.yaml. It needs SGLang (its
interpreter's PYTHONPATH in --site), the target as a Hugging Face directory, and the packages' data files in a folder.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import yaml

STUDY = Path(".work/study")
PORT = 30000
FLAGS = {"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
         "disable-piecewise-cuda-graph": True}
FILES = {"alpaca": "alpaca_en_demo.json", "bfcl": "BFCL_v4_simple_python.json", "humaneval": "HumanEval.jsonl.gz"}


def parameters(options: argparse.Namespace, share: float = 1.0) -> dict:
    """params.yaml of the study; `share` of the prompts the target made itself."""
    own = {"answers": "generate", "source": {"path": str((STUDY / "own.jsonl").resolve())}, "format": "prompt",
           "max_samples": max(1, int(options.prompts * share))}
    shipped = {name: {"answers": "generate", "source": {"path": str((options.data / file).resolve())}}
               for name, file in FILES.items()}
    return {
        "target": {"source": {"path": str(options.target)}, "dtype": "bfloat16", "context_length": 2048},
        "prompts": {"max_prompt_tokens": 512, "max_reject_rate": 0.5},
        "datasets": {"own": own, **shipped},
        "generate": {"engine": "sglang", "sampling": {"max_new_tokens": options.max_new_tokens, "temperature": 0}},
        "on_policy": {}, "records": {"max_tokens": 1024, "validation_share": 0.02},
        "vocab": {"size": options.vocab}, "hidden_states": {"dtype": "bfloat16"},
        "train": {"steps": options.steps, "epochs": options.epochs, "lr": options.lr, "batch_tokens": options.batch_tokens,
                  "dtype": "bfloat16", "architecture": {"intermediate_size": options.intermediate},
                  "max_updates": options.max_updates},
        "bench": {"engine": "sglang", "steps": 3}, "server": {"endpoints": [f"http://127.0.0.1:{PORT}"]},
        "runtime": {"concurrency": options.concurrency, "batch_tokens": 65536, "checkpoint_every": 100000},
    }


def stage(name: str, *arguments: str, params: Path) -> None:
    """Runs a stage's script and prints how long it took."""
    started = time.monotonic()
    subprocess.run([sys.executable, f"workflow/scripts/{name}.py", *arguments, "--params", str(params)], check=True)
    print(f"## {name} {' '.join(arguments[:1])}: {time.monotonic() - started:.1f} s", flush=True)


def write_params(options, path: Path, share: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(parameters(options, share), sort_keys=False))
    return path


def start_server(options, port: int = PORT, *more: str, memory: float = 0.3) -> subprocess.Popen:
    """Starts SGLang in a session of its own, so that it outlives the step that started it."""
    flags = [f"--{k}" if v is True else f"--{k}={v}" for k, v in FLAGS.items()]
    log = open(STUDY / f"server-{port}.log", "w")
    return subprocess.Popen(
        [options.python, "-m", "sglang.launch_server", "--model-path", str(options.target), "--port", str(port),
         f"--mem-fraction-static={memory}", f"--cuda-graph-max-bs={options.concurrency}",
         f"--max-running-requests={options.concurrency}", "--dtype=bfloat16", *flags, *more],
        stdout=log, stderr=log, start_new_session=True, env={**os.environ, "PYTHONPATH": str(options.site)})


def wait_for(server: subprocess.Popen, port: int, timeout: float = 400) -> None:
    """Until a generated token comes back."""
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}).encode()
    started = time.monotonic()
    while time.monotonic() - started < timeout:
        if server.poll() is not None:
            sys.exit((STUDY / f"server-{port}.log").read_text()[-3000:])
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=60).read()
            print(f"## server on {port} ready after {time.monotonic() - started:.0f} s", flush=True)
            return
        except OSError:
            time.sleep(1)
    sys.exit(f"no token from port {port} within {timeout} s:\n" + (STUDY / f"server-{port}.log").read_text()[-3000:])


def answer(options) -> None:
    STUDY.mkdir(parents=True, exist_ok=True)
    server = start_server(options)
    params = write_params(options, STUDY / "params.yaml")
    stage("target", params=params)
    wait_for(server, PORT)
    subprocess.run([sys.executable, "benchmarks/self_prompts.py", "--url", f"http://127.0.0.1:{PORT}", "--target",
                    str(options.target), "--count", str(int(options.prompts * 1.25)), "--out", str(STUDY / "own.jsonl")],
                   check=True)
    for name in parameters(options)["datasets"]:
        stage("prepare", name, "--out", f"data/prompts/{name}.parquet", params=params)
        stage("generate", name, "--prompts", f"data/prompts/{name}.parquet", "--out", f"data/responses/{name}",
              params=params)


def train(options) -> None:
    for share in options.shares:
        params = write_params(options, STUDY / f"params-{share}.yaml", share)
        names = list(parameters(options)["datasets"])
        _keep_share(options, share)
        for folder in ("records", "hidden_states", "vocab", "drafter"):
            shutil.rmtree(Path("data") / folder, ignore_errors=True)
        for name in names:
            stage("tokenize", name, "--responses", f"{STUDY}/responses/{name}", "--out", f"data/records/{name}.parquet",
                  params=params)
        stage("vocab", params=params)
        for name in names:
            stage("extract", name, "--records", f"data/records/{name}.parquet", "--out", f"data/hidden_states/{name}",
                  params=params)
        stage("train", "--out", f"{STUDY}/drafter-{share}", params=params)
        shutil.rmtree(STUDY / f"records-{share}", ignore_errors=True)
        shutil.copytree("data/records", STUDY / f"records-{share}")


def _keep_share(options, share: float) -> None:
    """The responses of the study, cut to a share of the prompts that the target made; the validation split stays whole,
    so that every data size is measured on the same held-out answers."""
    sys.path.insert(0, "workflow")
    from eagle3.records import split_of

    for name in parameters(options)["datasets"]:
        source, kept = Path("data/responses") / name, STUDY / "responses" / name
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(source, kept)
        rows = (source / "raw_responses.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        trained = 0
        with open(kept / "raw_responses.jsonl", "w", encoding="utf-8") as file:
            for row in rows:
                held_out = split_of(json.loads(row)["id"], 0.02) == "validation"
                trained += not held_out
                if held_out or trained <= share * len(rows):
                    file.write(row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["answer", "train"])
    parser.add_argument("--target", type=Path, default=Path("/tmp/target"))
    parser.add_argument("--site", type=Path, default=Path("/tmp/site"))
    parser.add_argument("--python", default="python3", help="interpreter that has SGLang")
    parser.add_argument("--data", type=Path, default=Path(".gpu/data"))
    parser.add_argument("--prompts", type=int, default=32000)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0625, 0.25, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--max-updates", type=int, default=1500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    arguments = parser.parse_args()
    {"answer": answer, "train": train}[arguments.step](arguments)
