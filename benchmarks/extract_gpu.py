"""Speed and fidelity of hidden-state capture on a GPU: through SGLang's hooks and through transformers.

    PYTHONPATH=workflow python benchmarks/extract_gpu.py --target /models/target --site SITE

SITE is a folder with SGLang for PYTHONPATH. Arms, all over the same records and all with shards on disk:

    plain      prefill of the records on the server, by the same client, no states wanted
    capture    the same, states written to bf16 shards by the hooks (goal: 0.95 of plain)
    fp8        the same into fp8 shards
    bare       transformers' forward passes alone, the same batches; once for the target, once for a random Llama of 8B
    offload    transformers capture into shards (goal: 0.9 of bare)

Then a few records' states against transformers in fp32, next to what transformers in bf16 differs from it. Records are
random ids, or a records file (--records); with --out the bf16 shards become a data set's folder that `train` reads.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from eagle3 import layers as layer_numbers
from eagle3 import records, sglang_hooks, shards
from eagle3.capture import TransformersCapture, batches
from eagle3.extraction import Extraction
from eagle3.files import digest_file, write_json
from eagle3.records import Record
from eagle3.sglang_capture import SglangCapture, engine_version
from eagle3.shard_layout import bytes_per_token
from eagle3.target import Target, describe
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FLAGS = {"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
         "mem-fraction-static": 0.5, "cuda-graph-max-bs-decode": 8}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}


@dataclass(frozen=True)
class PlainJob:
    """A record that is only sent through the server."""

    record: Record


class PlainClient(SglangCapture):
    """The same client, wanting no states: its requests' ids are foreign to the hooks."""

    async def _send(self, session, url, pending, folders):
        body = {"input_ids": [p.job.record.input_ids for p in pending],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        assert not await self._post(session, url, body)
        for one in pending:
            one.complete.set()


def open_target(path: Path, work: Path, dtype: str) -> Target:
    """A target folder of the build, or a Hugging Face directory that is described as one."""
    if (path / "target.json").exists():
        return Target(path)
    params = SimpleNamespace(dtype=dtype, quantization=None, kv_cache_dtype="auto", context_length=2048,
                             chat_template_kwargs={}, template_date="2025-01-01", trust_remote_code=False)
    write_json(work / "target/target.json", describe(path, params, outside=True))
    return Target(work / "target")


def random_records(path: Path, tokens: int, vocab_size: int, longest: int) -> Path:
    """A records file of random ids, of log-normal lengths around 500."""
    chooser, made, total = random.Random(0), [], 0
    while total < tokens:
        length = max(16, min(longest, int(chooser.lognormvariate(6.2, 0.6))))
        made.append(Record(f"r{len(made):06}", [chooser.randrange(10, vocab_size) for _ in range(length)],
                           [False] + [True] * (length - 1), "train"))
        total += length
    stats = Counter(tokens=total, supervised=total - len(made))
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write(path, made, stats, SimpleNamespace(min_supervised_share=0, max_supervised_share=1), greedy=False)
    return path


def disk_speed(folder: Path, size: int) -> float:
    """Bytes/s of writing a file of `size` and having it on the disk, which no capture can pass."""
    block, started = os.urandom(1 << 24), time.monotonic()
    with open(folder / "speed", "wb") as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    (folder / "speed").unlink()
    return size / seconds


@contextlib.contextmanager
def serving(target: Target, options, flags: dict, log: Path):
    """URL of a server with our hooks; gone when the block ends."""
    command = [options.server_python, "-m", "sglang.launch_server", "--model-path", str(target.path.resolve()), "--port",
               str(options.port)]
    for name, value in {**json.loads(options.flags), **flags}.items():
        command += [f"--{name}", *([] if value is True else map(str, value if isinstance(value, list) else [value]))]
    path = os.pathsep.join([str(Path("workflow").resolve()), *filter(None, [options.site])])
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                   env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"})
    url, started = f"http://127.0.0.1:{options.port}", time.monotonic()
    try:
        while True:
            if process.poll() is not None or time.monotonic() - started > 400:
                sys.exit(f"the server did not start:\n{log.read_text()[-6000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health_generate", timeout=30)
                break
            time.sleep(1)
        print(f"server ready after {time.monotonic() - started:.0f} s", flush=True)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Bench:
    def __init__(self, options, target: Target, file: Path):
        self.options, self.target, self.file = options, target, file
        self.work = options.work
        self.layers = layer_numbers.captured_layers(target.num_layers)
        self.convention = layer_numbers.convention_of(target.info["architecture"])
        self.rows = list(records.read(file))
        self.tokens = sum(len(r.input_ids) for r in self.rows)
        self.results: dict = {"records": len(self.rows), "tokens": self.tokens, "layers": self.layers}

    def identity(self, dtype: str, engine: str) -> dict:
        return {"target_digest": self.target.digest, "hidden_size": self.target.hidden_size,
                "architecture": self.target.info["architecture"], "layers": self.layers, "convention": self.convention,
                "last_is": "after_final_norm", "dtype": dtype, "engine": engine}

    def extract(self, capture, dtype: str, engine: str, out: Path | None = None, file: Path | None = None,
                hidden_size: int | None = None) -> tuple[float, int]:
        """(tokens/s, bytes per token) of an extraction from nothing, self-checks and background fsync included."""
        params = SimpleNamespace(dtype=dtype, shard_bytes=self.options.shard_bytes, max_quarantine_rate=0.01)
        runtime = SimpleNamespace(reserve_bytes=2**30)
        shutil.rmtree(self.work / "extract", ignore_errors=True)
        one = Extraction(file or self.file, self.work / "extract", hidden_size or self.target.hidden_size,
                         self.identity(dtype, engine), params, runtime, print)
        one.refuse_if_disk_too_small()
        tokens, size = sum(p.tokens for p in one.plan), sum(p.size for p in one.plan)
        started = time.monotonic()
        one.capture(lambda: contextlib.nullcontext(capture), self.target.head, records.metadata(file or self.file)["greedy"])
        seconds = time.monotonic() - started
        if out:
            one.publish(out, {"records_digest": digest_file(self.file),
                              "tokenizer_digest": self.target.info["tokenizer_digest"]})
        return tokens / seconds, size / tokens

    def sglang(self) -> None:
        options = self.options
        root = self.work.resolve()
        version = engine_version(options.server_python, environment={"PYTHONPATH": options.site})
        flags = sglang_hooks.server_flags(version, self.layers, layer_numbers.config_ids(self.layers, self.convention),
                                          str(root))
        print(f"SGLang {version}", flush=True)
        with serving(self.target, options, flags, self.work / "server.log") as url:
            plain, capture = PlainClient([url], options.concurrency), SglangCapture([url], options.concurrency)

            def prefill(rows) -> float:
                started = time.monotonic()
                plain.run(iter([PlainJob(r) for r in rows]), lambda job: None)
                return sum(len(r.input_ids) for r in rows) / (time.monotonic() - started)

            prefill(self.rows[:200])
            self.extract(capture, "bfloat16", "sglang")  # pinned buffers, first kernels
            speeds: dict[str, list[float]] = {"plain": [], "capture": [], "fp8": []}
            for turn in range(options.turns):
                speeds["plain"].append(prefill(self.rows))
                speeds["fp8"].append(self.extract(capture, "float8_e4m3fn", "sglang")[0])
                last = turn == options.turns - 1
                speeds["capture"].append(self.extract(capture, "bfloat16", "sglang", options.out or self.work / "states"
                                                      if last else None)[0])
                print({name: round(values[-1]) for name, values in speeds.items()}, flush=True)
            best = {name: max(values) for name, values in speeds.items()}
        self.results["sglang"] = {"version": version, "tokens_per_second": speeds, "best": best,
                                  "capture_of_plain": best["capture"] / best["plain"],
                                  "fp8_of_plain": best["fp8"] / best["plain"]}

    def transformers(self, label: str, model, hidden_size: int, file: Path, rows: list[Record], layers: list[int]) -> None:
        """bare against offload for one model."""
        tokens, budget = sum(len(r.input_ids) for r in rows), self.options.batch_tokens
        groups = [[job.record.input_ids for job in batch]
                  for start in range(0, len(rows), 512)
                  for batch in batches([PlainJob(r) for r in rows[start:start + 512]], budget)]
        padded = sum(len(ids) * max(map(len, ids)) for ids in groups)

        def bare(limit=None) -> float:
            capture = TransformersCapture(SimpleNamespace(hidden_size=hidden_size), layers, budget, [model])
            for hook in capture.replicas[0].hooks:
                hook.remove()
            started = time.monotonic()
            for ids in groups[:limit]:
                capture.replicas[0].forward(ids)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return tokens / (time.monotonic() - started)

        def offload() -> float:
            capture = TransformersCapture(SimpleNamespace(hidden_size=hidden_size), layers, budget, [model])
            try:
                return self.extract(capture, "bfloat16", "transformers", file=file, hidden_size=hidden_size)[0]
            finally:
                for hook in capture.replicas[0].hooks:
                    hook.remove()

        bare(3)
        offload()
        speeds = {"bare": [], "offload": []}
        for _ in range(self.options.turns):
            speeds["bare"].append(bare())
            speeds["offload"].append(offload())
            print(label, {name: round(values[-1]) for name, values in speeds.items()}, flush=True)
        best = {name: max(values) for name, values in speeds.items()}
        self.results[label] = {"tokens_per_second": speeds, "best": best, "offload_of_bare": best["offload"] / best["bare"],
                               "padding": 1 - tokens / padded, "bytes_per_token": bytes_per_token(hidden_size, "bfloat16"),
                               "specforge_bytes_per_token": 8 * hidden_size + 16}

    def fidelity(self, folder: Path) -> None:
        """Relative error to transformers in fp32 of the captured states and of transformers in bf16."""
        data = shards.ShardSet([folder], "train", {})
        chosen = [data[i] for i in range(0, len(data), max(1, len(data) // 8))][:8]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        reference = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = AutoModelForCausalLM.from_pretrained(self.target.path, dtype=dtype).to(device)
            with torch.no_grad():
                for row in chosen:
                    states = model(row["input_ids"].long().to(device)[None], output_hidden_states=True).hidden_states
                    reference[dtype, row["id"]] = [*(states[i][0].float().cpu() for i in self.layers),
                                                   states[-1][0].float().cpu()]
        errors: dict[str, list[list[float]]] = {"captured": [], "transformers in bf16": []}
        for row in chosen:
            exact = reference[torch.float32, row["id"]]
            ours = [*row["aux"].float().chunk(3, -1), row["last"].float()]
            for name, found in (("captured", ours), ("transformers in bf16", reference[torch.bfloat16, row["id"]])):
                errors[name].append([((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)])
        self.results["relative_error_to_fp32"] = {
            name: [sum(column) / len(column) for column in zip(*rows)] for name, rows in errors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a model folder")
    parser.add_argument("--records", type=Path, help="a records file; without it, random ids")
    parser.add_argument("--out", type=Path, help="where the bf16 states are kept, e.g. data/hidden_states/own")
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--tokens-8b", type=int, default=200_000)
    parser.add_argument("--config-8b", type=json.loads, default=LLAMA_8B)
    parser.add_argument("--longest", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--shard-bytes", type=int, default=2**30)
    parser.add_argument("--disk-bytes", type=int, default=4 * 2**30, help="size of the file that measures the disk")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--site", default="")
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument("--flags", default=json.dumps(FLAGS), help="flags of launch_server, as JSON")
    parser.add_argument("--port", type=int, default=30010)
    parser.add_argument("--arms", nargs="+", default=["sglang", "transformers", "8b"])
    parser.add_argument("--work", type=Path, default=Path(".work/extract_gpu"))
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    target = open_target(options.target, options.work, options.dtype)
    file = options.records or random_records(options.work / "random.parquet", options.tokens, target.vocab_size,
                                             options.longest)
    bench = Bench(options, target, file)
    folder = Path(os.environ.get("OUT", options.work))
    bench.results["disk_bytes_per_second"] = disk_speed(options.work, options.disk_bytes)
    try:
        if "sglang" in options.arms:
            try:
                bench.sglang()
            finally:
                with contextlib.suppress(OSError):
                    shutil.copy(options.work / "server.log", folder / "extract_server.log")
            bench.fidelity(options.out or options.work / "states")
        if "transformers" in options.arms:
            bench.transformers("transformers", target.load_model(), target.hidden_size, file, bench.rows, bench.layers)
        if "8b" in options.arms:
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                torch.set_default_dtype(torch.bfloat16)
                model = LlamaForCausalLM(LlamaConfig(**options.config_8b)).eval().requires_grad_(False)
                torch.set_default_dtype(torch.float32)
            large = random_records(options.work / "large.parquet", options.tokens_8b, options.config_8b["vocab_size"],
                                   options.longest)
            bench.transformers("8b", model, options.config_8b["hidden_size"], large, list(records.read(large)),
                               layer_numbers.captured_layers(options.config_8b["num_hidden_layers"]))
    finally:
        write_json(folder / "extract_gpu.json", bench.results)
        shutil.rmtree(options.work / "extract", ignore_errors=True)
    print("\narm                         tokens/s   of its reference")
    for label, one in bench.results.items():
        if isinstance(one, dict) and "best" in one:
            reference = next(iter(one["best"].values()))
            for name, speed in one["best"].items():
                print(f"{label + ' ' + name:24} {speed:12,.0f}   {speed / reference:6.3f}")
    for name, errors in bench.results.get("relative_error_to_fp32", {}).items():
        print(f"relative error to fp32, {name}: " + ", ".join(f"{e:.4f}" for e in errors))
    print(f"disk, written and synced: {bench.results['disk_bytes_per_second'] / 1e9:.2f} GB/s")
    for dtype in ("bfloat16", "float8_e4m3fn"):
        print(f"bytes per token in {dtype}: {bytes_per_token(target.hidden_size, dtype)}, SpecForge's 8H+16: "
              f"{8 * target.hidden_size + 16}")


if __name__ == "__main__":
    main()
