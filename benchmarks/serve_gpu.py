"""Serves held-out prompts on real SGLang with and without drafters, on one GPU, and writes the
report of a bench.

    PYTHONPATH=workflow python3 benchmarks/serve_gpu.py --records data/records --out $OUT \
        --drafter small=DIR --drafter large=DIR --python-path FOLDER_WITH_SGLANG --target MODEL_DIR

The last drafter named is the main one: it is measured over all batch sizes and ways of drafting;
those of --matrix over all batch sizes; the others, for the curve of accept length over training
data, at one batch size. All servers start at once and are measured one after the other. Without a
GPU, --command names a stand-in for `python -m sglang.launch_server`, and the whole script can be
tried. """

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import torch
from eagle3.bench import questions as held_out
from eagle3.bench import report
from eagle3.bench import sglang as sglang_bench
from eagle3.bench import statistics as measuring
from eagle3.bench import verdict as judging
from eagle3.bench.replay import Simulator
from eagle3.bench.statistics import Variant
from eagle3.core import params as parameters
from eagle3.core import sources
from eagle3.core.errors import UserError
from eagle3.core.files import read_json, write_json, write_text
from eagle3.core.schema import Questions
from eagle3.drafter import export
from eagle3.prompts.chat_template import Renderer
from eagle3.target import layers
from eagle3.target.model import Target, describe

ROOT = Path(__file__).resolve().parents[1]
COMMON = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-piecewise-cuda-graph": True,
    "mem-fraction-static": 0.5,
    "max-total-tokens": 300000,
    "log-level": "info",
}


class Servers:
    """Servers by their flags. They are started by `start`, waited for when they are first wanted,
    and stopped together."""

    def __init__(
        self, command: list[str], environment: dict[str, str], folder: Path, patience: float
    ):
        self.command, self.environment, self.folder, self.patience = (
            command,
            environment,
            folder,
            patience,
        )
        self.running: dict[str, tuple[subprocess.Popen, int, Path]] = {}

    def start(self, flags: dict) -> str:
        key = json.dumps(flags, sort_keys=True)
        if key in self.running:
            return key
        port = free_port()
        arguments = [
            part
            for name, value in flags.items()
            if value is not False
            for part in (
                [f"--{name}"]
                if value is True
                else [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
            )
        ]
        log = self.folder / f"server-{len(self.running)}.log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                [*self.command, "--port", str(port), *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self.running[key] = process, port, log
        return key

    @contextlib.contextmanager
    def serve(self, flags: dict):
        """Raises UserError with the end of the log if the server dies or gives no token in time."""
        process, port, log = self.running[self.start(flags)]
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + self.patience
        while not ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(
                    f"the server with {flags} did not come up: "
                    f"{log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(1)
        yield url

    def stop(self) -> None:
        for process, _, _ in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """A free port that leaves room above it: SGLang also takes the one 10,000 further on."""
    for port in random.sample(range(20000, 50000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError("100 ports between 20000 and 50000 are taken")


def ready(url: str) -> bool:
    """Whether the server gives a token."""
    body = json.dumps(
        {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    ).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status == 200
    except OSError:
        return False


def open_target(folder: Path, work: Path, dtype: str) -> Target:
    """The target in `folder`: one that this project built, or any Hugging Face directory."""
    if (folder / "target.json").exists():
        return Target(folder)
    settings = SimpleNamespace(
        dtype=dtype,
        quantization=None,
        kv_cache_dtype="auto",
        context_length=2048,
        chat_template_kwargs={},
        template_date="2025-01-01",
        trust_remote_code=False,
    )
    write_json(work / "target.json", describe(folder, settings, outside=True))
    return Target(work)


def questions(name: str, data: Path, target: Target, count: int, seen: set[str]) -> list[dict]:
    """Up to `count` prompts of a question set of params.yaml, from its file in `data`."""
    given = parameters.load(ROOT / "params.yaml").bench.questions[name]
    source = {"path": str(data / Path(given.source.file).name)}
    wanted = Questions(**given.model_dump(exclude={"source", "max_samples"}), source=source)
    wanted = wanted.model_copy(update={"max_samples": count})
    rows = sources.rows(wanted.source)
    return held_out.questions(name, rows, wanted, Renderer(target), 1024, seen)


def simulators(target: Target, drafters: dict[str, Path]):
    """What simulates a variant: the drafter's layers are those that SGLang reads from its
    config."""
    convention = layers.convention_of(target.info["architecture"])
    embedding = target.embedding().float()
    known: dict[Path, Simulator] = {}

    def hits_of(variant: Variant):
        if variant.drafter not in known:
            drafter = export.load_drafter(variant.drafter, embedding)
            ids = drafter.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            known[variant.drafter] = Simulator(
                target, drafter, layers.served_layers(ids, convention), batch_tokens=16384
            )
        return known[variant.drafter].hits

    return hits_of


def trained_on(folder: Path) -> dict:
    """Records and tokens behind a drafter, from its training.json, as far as it says."""
    path = folder / "training.json"
    states = (read_json(path).get("hidden_states") or {}).values() if path.exists() else []
    return {
        name: sum(s.get(key) or 0 for s in states) or None
        for name, key in (("records", "rows"), ("tokens", "tokens"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument(
        "--records",
        type=Path,
        required=True,
        help="folder of records; their validation split is asked",
    )
    parser.add_argument(
        "--target", type=Path, required=True, help="the target's Hugging Face directory"
    )
    parser.add_argument(
        "--questions",
        action="append",
        default=[],
        metavar="NAME",
        help="a set of bench.questions in params.yaml, whose file lies in --data",
    )
    parser.add_argument("--data", type=Path, help="folder of the files of --questions")
    parser.add_argument("--python-path", default="", help="PYTHONPATH of the servers")
    parser.add_argument("--command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument(
        "--flags",
        type=json.loads,
        default={},
        help="of all servers, as JSON, before those of COMMON",
    )
    parser.add_argument(
        "--environment", type=json.loads, default={}, help="variables of all servers, as JSON"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["3,1,4", "5,1,6"],
        help="steps,topk,draft tokens of the main drafter",
    )
    parser.add_argument(
        "--matrix",
        nargs="*",
        default=[],
        help="names of further drafters to measure at every batch size",
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of the servers and of the simulation")
    parser.add_argument("--patience", type=float, default=300, help="seconds for a server to start")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    drafters = {
        name: Path(folder) for name, _, folder in (d.partition("=") for d in arguments.drafter)
    }
    *others, main_name = drafters
    others = [name for name in others if name not in arguments.matrix]
    shapes = [tuple(map(int, shape.split(","))) for shape in arguments.shapes]

    def variant(name: str, shape: tuple[int, ...]) -> Variant:
        return Variant(f"{name} {'-'.join(map(str, shape))}", drafters[name], *shape)

    main_variants = [
        *(variant(main_name, shape) for shape in shapes),
        *(variant(name, shapes[0]) for name in arguments.matrix),
    ]
    other_variants = [variant(name, shapes[0]) for name in others]
    plan = sglang_bench.Plan(
        main_variants, arguments.concurrency, arguments.max_new_tokens, arguments.repeats
    )
    middle = arguments.concurrency[len(arguments.concurrency) // 2]
    curve = sglang_bench.Plan(other_variants, [middle], arguments.max_new_tokens, repeats=1)
    environment = (
        {"PYTHONPATH": arguments.python_path, "HF_HUB_OFFLINE": "1"}
        if arguments.python_path
        else {}
    )
    environment |= arguments.environment
    most = max(arguments.concurrency)
    common = {
        **COMMON,
        "model-path": str(arguments.target),
        "dtype": arguments.dtype,
        "max-running-requests": most,
        "cuda-graph-max-bs-decode": most,
        **arguments.flags,
    }
    with tempfile.TemporaryDirectory() as work:
        target = open_target(arguments.target, Path(work), arguments.dtype)
        seen = held_out.trained_prompts(arguments.records)
        asked = {
            name: questions(name, arguments.data, target, arguments.prompts, seen)
            for name in arguments.questions
        }
        prompts, counts = held_out.collect(arguments.records, arguments.prompts, seen, asked)
        servers = Servers(
            shlex.split(arguments.command), environment, arguments.out, arguments.patience
        )
        try:
            for wanted in (None, *main_variants, *other_variants):
                servers.start(plan.flags(wanted, common))
            measured = sglang_bench.measure(servers.serve, prompts, plan, common)
            extra = sglang_bench.measure(servers.serve, prompts, curve, common) if others else None
        finally:
            servers.stop()
        hits_of = simulators(target, drafters)
        cells = measuring.cells(measured, main_variants, prompts, hits_of)
        curve_cells = measuring.cells(extra, other_variants, prompts, hits_of) if extra else []
    main_cell = next(
        c for c in cells if c["variant"] == main_variants[0].name and c["concurrency"] == middle
    )
    study = [
        {
            "drafter": name,
            **trained_on(drafters[name]),
            "accept_length": cell["all"]["accept_length"],
        }
        for name, cell in zip([*others, main_name], [*curve_cells, main_cell])
    ]
    metrics = drafters[main_name] / "metrics.json"
    content = report.content(
        measured,
        cells,
        main_variants,
        engine="sglang",
        held_out=counts,
        study=study,
        curves=[],
        training=read_json(metrics) if metrics.exists() else {},
        curve_cells=curve_cells,
        lineage={"target": target.digest, "card": card(), "torch": torch.__version__},
    )
    write_json(arguments.out / "report.json", content)
    write_text(arguments.out / "cells.csv", report.cells_csv(content))
    show(cells, curve_cells, content)


def card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def show(cells: list[dict], curve_cells: list[dict], content: dict) -> None:
    print(
        f"{'variant':24} {'batch':>5} {'base t/s':>9} {'spec t/s':>9} {'speed-up':>22} "
        f"{'served':>7} {'replay':>7} "
        f"{'diff':>6} {'simul':>7} {'even':>6} {'equal':>9}"
    )
    for cell in [*curve_cells, *cells]:
        f = cell["all"]
        length, rates, outputs = f["accept_length"], f["tokens_per_second"], f["outputs"]
        replayed = length["replayed"] or float("nan")
        low, high = (f[end] or float("nan") for end in ("speed_up_low", "speed_up_high"))
        print(
            f"{cell['variant']:24} {cell['concurrency']:5} {rates['baseline']:9.0f} "
            f"{rates['speculative']:9.0f} "
            f"{f['speed_up']:7.3f} [{low:.3f}, {high:.3f}] "
            f"{length['served']:7.3f} "
            f"{replayed:7.3f} {replayed / length['served'] - 1:6.1%} "
            f"{length['simulated'] or float('nan'):7.3f} "
            f"{length['break_even'] or float('nan'):6.2f} "
            f"{outputs['equal']:4}/{outputs['compared']}"
        )
    print(content["verdict"])
    print(content["differences"])
    for cell in [*curve_cells, *cells]:
        try:
            judging.check_sound(cell, 1.05, 0.02, exact=False)
        except UserError as error:
            print(f"NOT SOUND: {error}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
