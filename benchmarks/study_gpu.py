"""A whole study on one or two GPUs: prompts, answers of a real server, states, drafters of several
kinds and sizes, serving.

    PYTHONPATH=workflow:benchmarks python benchmarks/study_gpu.py --target /models/target --site
    SITE --data FOLDER --out DIR

Lays a project out in --work and runs the product's own stages in it; SGLang answers. FOLDER holds
the source files of params.yaml's data sets (their base names). Beside the server, which has the
first GPU, the last one makes the prompts (self_prompts.py) and measures what is in --beside. Then
quality.py trains --arms of ARMS, and serve_gpu.py serves --served. Every phase prints when it
began; DIR gets what each benchmark writes."""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from serve_gpu import COMMON, Servers, ready

ROOT = Path(__file__).resolve().parents[1]
# name -> settings (see quality.py); U is --updates, P the updates of the comparison, N a vocabulary
# of that size.
ARMS = {
    "all": "init=least_squares,max_updates=U",
    "quarter": "init=least_squares,share=0.25,max_updates=U",
    "sixteenth": "init=least_squares,share=0.0625,max_updates=U",
    "all random": "max_updates=U",
    "gain": "steps=5,schedule=wsd,max_updates=U",
    "narrow": "architecture.intermediate_size=1024,max_updates=U",
    "wide": "architecture.intermediate_size=8192,max_updates=U",
    "few words": "vocab=4096,max_updates=U",
    "narrow few words": "architecture.intermediate_size=1024,vocab=4096,max_updates=U",
    "specforge": "recipe=specforge,max_updates=P",
    "specforge 1e-4": "recipe=specforge,max_updates=P,lr=1e-4",
    "random": "max_updates=P",
    "fitted": "init=least_squares,max_updates=P",
    "fitted by_size": "init=least_squares,fc_steps=by_size,max_updates=P",
    "fp8 states": "init=least_squares,states=STATES8,max_updates=P",
    "new seed": "seed=1,max_updates=P",
    "fp8 products": "matmul=fp8,max_updates=P",
    "by_size": "fc_steps=by_size,max_updates=P",
    "decay 1": "decay=1.0,max_updates=P",
    "7 steps": "steps=7,max_updates=P",
    "wsd": "schedule=wsd,max_updates=P",
    "lr 2e-3": "lr=2e-3,max_updates=P",
}


class Study:
    def __init__(self, options: argparse.Namespace):
        self.options, self.started = options, time.monotonic()
        self.work, self.out = options.work.resolve(), options.out.resolve()
        self.gpus = [gpu for gpu in options.gpus.split(",") if gpu]
        self.names: list[str] = []

    def log(self, text: str) -> None:
        print(f"## {time.monotonic() - self.started:5.0f} s  {text}", flush=True)

    def environment(self, gpu: int) -> dict[str, str]:
        """Of a process on one GPU of ours (-1: the last)."""
        return {**os.environ, **({"CUDA_VISIBLE_DEVICES": self.gpus[gpu]} if self.gpus else {})}

    def run(
        self, script: str, *words: object, gpu: int = 0, log: str | None = None, cwd: Path = ROOT
    ) -> None:
        """A script of ours; its output goes to DIR/LOG.log."""
        path = self.out / f"{log}.log" if log else None
        with open(path or os.devnull, "a") as file:
            subprocess.run(
                [sys.executable, script, *map(str, words)],
                check=True,
                cwd=cwd,
                env=self.environment(gpu),
                stdout=file if log else None,
                stderr=subprocess.STDOUT if log else None,
            )

    def stage(self, script: str, *words: object, gpu: int = 0) -> None:
        self.run(f"workflow/scripts/{script}.py", *words, gpu=gpu, cwd=self.work, log="stages")

    def lay_out(self, url: str) -> None:
        """The project: the package sets of params.yaml whose files are there, and one set for each
        file of own prompts."""
        options = self.options
        shutil.copytree(
            ROOT / "workflow", self.work / "workflow", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(ROOT / "dvc.yaml", self.work)
        sets = {}
        for name, dataset in yaml.safe_load((ROOT / "params.yaml").read_text())["datasets"].items():
            path = Path(options.data or "", Path(dataset["source"].get("file", "")).name)
            if dataset["answers"] == "generate" and options.data and path.is_file():
                sets[name] = {
                    **dataset,
                    "source": {"path": str(path.resolve())},
                    "max_samples": options.cap,
                }
        for number in range(options.sets):
            sets[f"own-{number}"] = {
                "answers": "generate",
                "format": "prompt",
                "max_samples": None,
                "source": {"path": str(self.work / f"own-{number}.jsonl")},
            }
        content = {
            "target": {
                "source": {"path": str(options.target.resolve())},
                "dtype": options.dtype,
                "context_length": 2048,
            },
            "prompts": {"max_prompt_tokens": 1024, "max_reject_rate": 0.9},
            "datasets": sets,
            "generate": {
                "engine": "sglang",
                "sampling": {"max_new_tokens": options.max_new_tokens, "temperature": 0},
            },
            "given": {},
            "records": {"max_tokens": 1024, "validation_fraction": options.held_out},
            "vocab": {"size": options.vocab},
            "hidden_states": {"dtype": options.dtype if options.dtype == "float32" else "bfloat16"},
            "train": {
                "steps": options.steps,
                "lr": options.lr,
                "batch_tokens": options.batch_tokens,
                "dtype": options.dtype,
                "architecture": {"intermediate_size": options.intermediate},
            },
            "bench": {},
            "server": {"endpoints": [url]},
            "runtime": {
                "concurrency": options.concurrency,
                "batch_tokens": 65536 if self.gpus else 2048,
            },
        }
        (self.work / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        content["hidden_states"]["dtype"] = "float8_e4m3fn"
        (self.work / "params-fp8.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        self.names = list(sets)

    def each(
        self, at_once: int, work: Callable[[str, int], None], names: list[str] | None = None
    ) -> None:
        """`work` for every data set, spread over the GPUs."""
        with ThreadPoolExecutor(at_once) as pool:
            for future in [
                pool.submit(work, name, i % max(len(self.gpus), 1))
                for i, name in enumerate(names or self.names)
            ]:
                future.result()

    def prompts(self) -> None:
        options, file = self.options, self.work / "own.jsonl"
        self.run(
            "benchmarks/self_prompts.py",
            "--target",
            options.target,
            "--count",
            options.prompts,
            "--batch",
            options.prompt_batch,
            "--out",
            file,
            gpu=-1,
            log="prompts",
        )
        lines = file.read_text().splitlines(keepends=True)
        for number in range(options.sets):
            (self.work / f"own-{number}.jsonl").write_text("".join(lines[number :: options.sets]))
        self.log(f"{len(lines)} prompts")

    def answers(self) -> None:
        """Own prompts and packages' prompts, answered by a server on the first GPU."""
        options = self.options
        flags = {
            **json.loads(options.flags),
            "model-path": str(options.target.resolve()),
            "dtype": options.dtype,
            "context-length": 2048,
            "max-running-requests": options.concurrency,
        }
        environment = {"PYTHONPATH": options.site, "HF_HUB_OFFLINE": "1"} if options.site else {}
        gpu = {"CUDA_VISIBLE_DEVICES": self.gpus[0]} if self.gpus else {}
        servers = Servers(shlex.split(options.command), {**environment, **gpu}, self.out, 400)
        try:
            key = servers.start(flags)
            url = f"http://127.0.0.1:{servers.running[key][1]}"
            self.prompts()
            self.lay_out(url)
            beside = self.beside()
            self.stage("target")
            self.each(
                8,
                lambda name, gpu: self.stage(
                    "prepare", name, "--out", f"data/prompts/{name}.parquet"
                ),
            )
            self.log("prompts prepared")
            with servers.serve(flags):
                assert ready(url)
                self.log("server ready")
                self.each(
                    4,
                    lambda name, gpu: self.stage(
                        "generate",
                        name,
                        "--prompts",
                        f"data/prompts/{name}.parquet",
                        "--out",
                        f"data/responses/{name}",
                    ),
                    sorted(self.names, reverse=True),
                )
        finally:
            servers.stop()
        self.log("answers")
        for one in beside:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on beside what follows
                one.wait(self.options.patience)
        self.log("what ran beside")

    def beside(self) -> list[subprocess.Popen]:
        """Benchmarks for the last GPU while the first one answers."""
        found = []
        for number, line in enumerate(self.options.beside):
            with open(self.out / f"beside-{number}.log", "w") as log:
                found.append(
                    subprocess.Popen(
                        ["bash", "-c", line],
                        cwd=ROOT,
                        env={**self.environment(-1), "OUT": str(self.out)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        return found

    def states(self) -> None:
        self.each(
            8,
            lambda name, gpu: self.stage(
                "tokenize",
                name,
                "--responses",
                f"data/responses/{name}",
                "--out",
                f"data/records/{name}.parquet",
            ),
        )
        self.stage("vocab")
        for size in {
            self.words_of(arm)["vocab"]
            for arm in self.options.arms
            if "vocab" in self.words_of(arm)
        }:
            content = yaml.safe_load((self.work / "params.yaml").read_text())
            (self.work / f"params-{size}.yaml").write_text(
                yaml.safe_dump({**content, "vocab": {"size": int(size)}}, sort_keys=False)
            )
            self.stage(
                "vocab",
                "--params",
                f"params-{size}.yaml",
                "--out",
                f"vocab-{size}/draft_vocab.safetensors",
            )
        self.log("records")

        def extract(name: str, gpu: int) -> None:
            words = (name, "--records", f"data/records/{name}.parquet", "--out")
            self.stage("extract", *words, f"data/hidden_states/{name}", gpu=gpu)
            if "fp8 states" in self.options.arms:
                self.stage(
                    "extract", *words, f"states-fp8/{name}", "--params", "params-fp8.yaml", gpu=gpu
                )

        self.each(8 if self.gpus else 1, extract)
        tokens = sum(
            json.loads(p.read_text())["tokens"]
            for p in (self.work / "data/hidden_states").glob("*/manifest.json")
        )
        self.log(f"states of {tokens:,} tokens")

    def train(self) -> None:
        """The drafters to serve on the first GPU, and beside them the comparison on the last one,
        which `compared` waits for."""
        options = self.options
        served = [name for name in options.arms if ARMS[name].endswith("=U")]
        others = [name for name in options.arms if name not in served]
        with ThreadPoolExecutor(1) as pool:
            self.comparison = pool.submit(self.quality, others, -1, "compared")
            if len(self.gpus) < 2:
                self.comparison.result()
            self.quality(served, 0, "trained")
            self.log("trained")
            if options.served:
                self.serve()
        self.comparison.result()
        self.log("compared")

    @staticmethod
    def words_of(arm: str) -> dict[str, str]:
        return dict(part.split("=") for part in ARMS[arm].split(","))

    def quality(self, arms: list[str], gpu: int, name: str) -> None:
        options = self.options
        if not arms:
            return
        marks = {"U": options.updates, "P": options.peer_updates, "STATES8": "states-fp8"}
        words = []
        for arm in arms:
            settings = {key: marks.get(value, value) for key, value in self.words_of(arm).items()}
            if "vocab" in settings:
                settings["vocab"] = f"vocab-{settings['vocab']}/draft_vocab.safetensors"
            words += [
                "--arm",
                f"{arm}:" + ",".join(f"{key}={value}" for key, value in settings.items()),
            ]
        words += ["--gpus", self.gpus[gpu]] if self.gpus else []
        self.run(
            str(ROOT / "benchmarks/quality.py"),
            *words,
            "--every",
            options.every,
            "--at-once",
            options.at_once,
            "--out",
            self.out / name,
            "--export",
            self.work / "drafters",
            cwd=self.work,
        )

    def serve(self) -> None:
        options = self.options
        drafters = [
            word
            for name in options.served
            for word in ("--drafter", f"{name}={self.work / 'drafters' / name.replace(' ', '-')}")
        ]
        self.run(
            "benchmarks/serve_gpu.py",
            *drafters,
            "--records",
            self.work / "data/records",
            "--target",
            options.target,
            "--python-path",
            options.site,
            "--command",
            options.command,
            "--out",
            self.out,
            "--dtype",
            options.dtype,
            *shlex.split(options.serve),
        )
        self.log("served")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--site", default="", help="PYTHONPATH of the servers")
    parser.add_argument("--command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument(
        "--flags",
        help="of that server, as JSON",
        default=json.dumps(
            {**COMMON, "max-total-tokens": 1_000_000, "cuda-graph-max-bs-decode": 1024}
        ),
    )
    parser.add_argument("--data", help="folder with the source files of params.yaml's data sets")
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--prompts", type=int, default=22000)
    parser.add_argument("--prompt-batch", type=int, default=4096)
    parser.add_argument(
        "--sets", type=int, default=4, help="data sets that the own prompts are shared out to"
    )
    parser.add_argument("--cap", type=int, help="prompts of each package data set")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=1024)
    parser.add_argument(
        "--beside", nargs="*", default=[], help="commands that measure on the last GPU meanwhile"
    )
    parser.add_argument("--held-out", type=float, default=0.02)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument(
        "--served",
        nargs="*",
        default=["sixteenth", "quarter", "all"],
        help="arms; the last one over all batch sizes",
    )
    parser.add_argument("--updates", type=int, default=2500)
    parser.add_argument("--peer-updates", type=int, default=600)
    parser.add_argument("--every", type=int, default=250)
    parser.add_argument("--at-once", type=int, default=4, help="arms on one GPU")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds to wait for --beside after the answers"
    )
    parser.add_argument("--serve", default="", help="further words for serve_gpu.py")
    parser.add_argument(
        "--phases",
        nargs="+",
        default=["answers", "states", "train"],
        choices=["answers", "states", "train", "serve"],
    )
    parser.add_argument("--work", type=Path, default=Path(".work/study"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".work/study-out")))
    options = parser.parse_args()
    study = Study(options)
    if "answers" in options.phases:
        shutil.rmtree(study.work, ignore_errors=True)
    for folder in (study.work, study.out):
        folder.mkdir(parents=True, exist_ok=True)
    if (study.work / "params.yaml").exists():
        study.names = list(yaml.safe_load((study.work / "params.yaml").read_text())["datasets"])
    for phase in options.phases:
        getattr(study, phase)()


if __name__ == "__main__":
    main()
