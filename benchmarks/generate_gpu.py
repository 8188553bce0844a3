"""Tokens/s of `generate` against the server's own best, on the same prompts, in one call.

    PYTHONPATH=workflow python benchmarks/generate_gpu.py --target /models/target --data FOLDER
    --server-pythonpath SITE

FOLDER holds the source files of params.yaml's data sets (their base names) and, with --prompts,
there is one more data set of {"prompt": text} lines. A project is laid out in --work and the real
stages run in it: target, prepare, generate. Arms, each after a flush of the server's prefix cache,
over the first --compare prompts of every data set:

    ours    the stage `generate`: streaming, checks, journal, status loop    a bare asyncio loop
    that posts the same ids, --concurrency at once, and throws the answers away batch   one request
    that holds all prompts: no client at all

Then the caps are raised and `generate` makes the difference. The answers stay in
WORK/data/responses for training."""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "workflow"))

from eagle3.prompts import prompts as prompt_files  # noqa: E402
from eagle3.serving.server import FOLDER  # noqa: E402

FLAGS = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-piecewise-cuda-graph": True,
    "mem-fraction-static": 0.5,
    "cuda-graph-max-bs-decode": 128,
}


def write_params(work: Path, arguments, cap: int | None) -> list[str]:
    """params.yaml of the project, from the repository's own; returns the names of the data sets."""
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    content["target"] = {
        "source": {"path": str(Path(arguments.target).resolve())},
        "dtype": arguments.dtype,
        "context_length": arguments.context_length,
    }
    content["prompts"] = {
        "max_prompt_tokens": arguments.context_length - arguments.max_new_tokens,
        "max_reject_rate": 0.9,
    }
    sets = {}
    for name, dataset in content["datasets"].items():
        path = Path(arguments.data or "", Path(dataset["source"].get("file", "")).name)
        if dataset["answers"] == "generate" and arguments.data and path.is_file():
            sets[name] = {**dataset, "source": {"path": str(path.resolve())}}
    if arguments.prompts:
        sets["own"] = {
            "answers": "generate",
            "source": {"path": str(Path(arguments.prompts).resolve())},
            "format": "prompt",
        }
    for dataset in sets.values():
        dataset["max_samples"] = cap
    content["datasets"] = sets
    content["generate"] = {
        "engine": "sglang",
        "sampling": {"max_new_tokens": arguments.max_new_tokens, "temperature": 0},
    }
    content["server"] = {
        "port": arguments.port,
        "command": arguments.command.split() if arguments.command else None,
        "python": arguments.server_python,
        "start_timeout": 540,
        "idle_timeout": 3600,
        "flags": {}
        if arguments.command
        else {**FLAGS, "max-running-requests": arguments.concurrency},
        "environment": {"PYTHONPATH": arguments.server_pythonpath}
        if arguments.server_pythonpath
        else {},
    }
    content["runtime"] = {"concurrency": arguments.concurrency}
    (work / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return list(sets)


def stage(work: Path, script: str, *words: str) -> None:
    subprocess.run([sys.executable, f"workflow/scripts/{script}.py", *words], cwd=work, check=True)


def ours(work: Path, name: str) -> dict:
    """Runs the stage; its own count of tokens and of seconds between the ready server and the last
    answer."""
    status = work / f".work/generate/{name}/status.json"
    status.unlink(missing_ok=True)
    stage(
        work,
        "generate",
        name,
        "--prompts",
        f"data/prompts/{name}.parquet",
        "--out",
        f"data/responses/{name}",
    )
    if not status.exists():  # nothing was missing
        return {"tokens": 0, "seconds": 0.0, "rows": 0}
    state = json.loads(status.read_text())
    return {"tokens": state["tokens_made"], "seconds": state["seconds"], "rows": state["answers"]}


async def flush(session, url: str) -> None:
    async with session.post(f"{url}/flush_cache") as answer:
        await answer.read()


async def loop(url: str, prompts: list[list[int]], concurrency: int, params: dict) -> int:
    """Tokens that a bare loop gets."""
    tokens, waiting = 0, iter(prompts)

    async def worker(session):
        nonlocal tokens
        for ids in waiting:
            async with session.post(
                f"{url}/generate", json={"input_ids": ids, "sampling_params": params}
            ) as answer:
                tokens += len((await answer.json())["output_ids"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        await asyncio.gather(*[worker(session) for _ in range(concurrency)])
    return tokens


async def batch(url: str, prompts: list[list[int]], params: dict) -> int:
    """Tokens of one request with every prompt in it."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 24) as session:
        async with session.post(
            f"{url}/generate", json={"input_ids": prompts, "sampling_params": params}
        ) as answer:
            return sum(len(row["output_ids"]) for row in await answer.json())


def reference(url: str, prompts: list[list[int]], arm: str, arguments) -> dict:
    params = {"max_new_tokens": arguments.max_new_tokens, "temperature": 0}

    async def run():
        async with aiohttp.ClientSession() as session:
            await flush(session, url)
        start = time.monotonic()
        tokens = await (
            loop(url, prompts, arguments.concurrency, params)
            if arm == "loop"
            else batch(url, prompts, params)
        )
        return {"tokens": tokens, "seconds": time.monotonic() - start, "rows": len(prompts)}

    return asyncio.run(run())


def measure(work: Path, names: list[str], url: str, arguments) -> list[dict]:
    """A row per data set and arm. Every round runs all arms, so that a drift of the machine hits
    each of them."""
    rows = []
    arms = ["loop", "ours"] + (["batch"] if arguments.batch else [])
    for number, name in itertools.product(range(arguments.rounds), names):
        prompts = [p.prompt_ids for p in prompt_files.read(work / f"data/prompts/{name}.parquet")]
        for arm in arms if number % 2 == 0 else arms[::-1]:
            if arm == "ours":
                shutil.rmtree(work / f".work/generate/{name}", ignore_errors=True)
                shutil.rmtree(work / f"data/responses/{name}", ignore_errors=True)
                reference(url, [], "loop", arguments)  # flushes
                found = ours(work, name)
            else:
                found = reference(url, prompts, arm, arguments)
            rows.append({"round": number, "dataset": name, "arm": arm, **found})
            print(
                f"{name} {arm}: {found['rows']} rows, {found['tokens'] / found['seconds']:,.0f} "
                "tokens/s",
                flush=True,
            )
    return rows


def table(rows: list[dict]) -> dict:
    """Tokens/s of each arm: all tokens over all seconds, by data set and in all."""
    print(
        f"\n{'data set':<12}"
        + "".join(f"{arm:>12}" for arm in ("ours", "loop", "batch"))
        + f"{'ours/best':>12}"
    )
    found = {}
    for name in [*dict.fromkeys(row["dataset"] for row in rows), "all"]:
        speeds = {}
        for arm in ("ours", "loop", "batch"):
            mine = [row for row in rows if row["arm"] == arm and name in (row["dataset"], "all")]
            if mine:
                speeds[arm] = sum(row["tokens"] for row in mine) / sum(
                    row["seconds"] for row in mine
                )
        ratio = speeds["ours"] / max(speed for arm, speed in speeds.items() if arm != "ours")
        found[name] = {**speeds, "ratio": ratio}
        print(
            f"{name:<12}"
            + "".join(
                f"{speeds.get(arm, float('nan')):>12,.0f}" for arm in ("ours", "loop", "batch")
            )
            + f"{ratio:>12.3f}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="Hugging Face directory")
    parser.add_argument("--data", help="folder with the source files of params.yaml's data sets")
    parser.add_argument("--prompts", help="JSONL file of one more data set")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(".work/generate_gpu"),
        help="where the project is laid out",
    )
    parser.add_argument(
        "--out", default=os.environ.get("OUT", "benchmarks/results"), help="folder for the figures"
    )
    parser.add_argument("--server-python", default="python3")
    parser.add_argument("--server-pythonpath", default="")
    parser.add_argument(
        "--command", default="", help="another server's command line, for a try without a GPU"
    )
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument(
        "--compare", type=int, default=6000, help="prompts of each data set in the comparison"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cap", type=int, help="prompts of each data set afterwards; default: all")
    parser.add_argument(
        "--batch", action="store_true", help="also time one request with all prompts"
    )
    arguments = parser.parse_args()

    work = arguments.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copytree(
        ROOT / "workflow", work / "workflow", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "dvc.yaml", work)
    names = write_params(work, arguments, arguments.compare)
    stage(work, "target")
    started = time.monotonic()
    server = subprocess.Popen([sys.executable, "workflow/scripts/server.py", "run"], cwd=work)
    try:
        for name in names:  # while the server starts
            stage(work, "prepare", name, "--out", f"data/prompts/{name}.parquet")
        state_path, url = work / FOLDER / "state.json", f"http://127.0.0.1:{arguments.port}"
        while not (state_path.exists() and json.loads(state_path.read_text())["phase"] == "ready"):
            if server.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.5)
        ready = time.monotonic() - started
        print(f"server ready after {ready:.0f} s", flush=True)
        warm = [p.prompt_ids for p in prompt_files.read(work / f"data/prompts/{names[0]}.parquet")][
            :256
        ]
        reference(url, warm, "loop", arguments)  # no arm pays for the first use of a kernel
        speeds = table(rows := measure(work, names, url, arguments))
        write_params(work, arguments, arguments.cap)
        rest = {}
        for name in names:
            stage(work, "prepare", name, "--out", f"data/prompts/{name}.parquet")
            rest[name] = ours(work, name)
        made = sum(row["rows"] for row in rest.values())
        print(
            f"\ncaps raised: {made} more rows, {sum(row['tokens'] for row in rest.values()):,} "
            "tokens; answers are in "
            f"{work / 'data/responses'}"
        )
        Path(arguments.out).mkdir(parents=True, exist_ok=True)
        (Path(arguments.out) / "generate_gpu.json").write_text(
            json.dumps(
                {
                    "server_ready_s": ready,
                    "concurrency": arguments.concurrency,
                    "max_new_tokens": arguments.max_new_tokens,
                    "speeds": speeds,
                    "rows": rows,
                    "after_raising_caps": rest,
                },
                indent=2,
            )
            + "\n"
        )
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


if __name__ == "__main__":
    main()
