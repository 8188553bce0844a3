"""Speed and fidelity of hidden-state capture on a GPU: through SGLang's hooks and through
transformers.

    PYTHONPATH=workflow python benchmarks/extract_gpu.py --target /models/target --site SITE

SITE is a folder with SGLang for PYTHONPATH. Arms, all over the same records and all with shards on
disk:

    plain      prefill of the records on the server, by the same client, no states wanted capture
    the same, states written to bf16 shards by the hooks (goal: 0.95 of plain) fp8        the same
    into fp8 shards bare       transformers' forward passes alone, the same batches offload
    transformers capture into bf16 shards (goal: 0.9 of bare), and `offload fp8` into fp8 shards

Once for the target (--arms sglang transformers), once for a random Llama of 8B (8b-sglang, 8b). An
arm that fails is recorded and the others go on. Speeds are of whole extractions; beside them is
what they are without the self-check, whose four requests one after the other cost the same before
any number of tokens.

Then a few records' states against transformers in fp32, next to what transformers in bf16 differs
from it. Records are random ids, or a records file (--records); with --out the bf16 shards become a
data set's folder that `train` reads."""

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from eagle3.capture import extraction, sglang_hooks
from eagle3.capture.extraction import Extraction, self_check
from eagle3.capture.sglang_capture import SglangCapture, engine_version
from eagle3.capture.transformers_capture import TransformersCapture, batches
from eagle3.core.errors import UserError
from eagle3.core.files import digest_file, write_json
from eagle3.hidden_states import shards
from eagle3.hidden_states.layout import bytes_per_token
from eagle3.records import records
from eagle3.records.records import Record
from eagle3.serving.client import Client
from eagle3.target import layers as layer_numbers
from eagle3.target.model import Target, describe
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FLAGS = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.5,
    "cuda-graph-max-bs-decode": 8,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
ARMS = {
    "capture": "bfloat16",
    "fp8": "float8_e4m3fn",
    "offload": "bfloat16",
    "offload fp8": "float8_e4m3fn",
}


@dataclass(frozen=True)
class PlainJob:
    """A record that is only sent through the server."""

    record: Record


class PlainClient(SglangCapture):
    """The same client, wanting no states: its requests' ids are foreign to the hooks."""

    async def _send(self, client, pending, folders):
        body = {
            "input_ids": [p.job.record.input_ids for p in pending],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        assert not await self._post(client, body)
        for one in pending:
            one.complete.set()


def open_target(path: Path, work: Path, dtype: str) -> Target:
    """A target folder of the build, or a Hugging Face directory that is described as one."""
    if (path / "target.json").exists():
        return Target(path)
    params = SimpleNamespace(
        dtype=dtype,
        quantization=None,
        kv_cache_dtype="auto",
        context_length=2048,
        chat_template_kwargs={},
        template_date="2025-01-01",
        trust_remote_code=False,
    )
    write_json(work / "target/target.json", describe(path, params, outside=True))
    return Target(work / "target")


def random_records(path: Path, tokens: int, vocab_size: int, longest: int) -> Path:
    """A records file of random ids, of log-normal lengths around 500."""
    chooser, made, total = random.Random(0), [], 0
    while total < tokens:
        length = max(16, min(longest, int(chooser.lognormvariate(6.2, 0.6))))
        made.append(
            Record(
                f"r{len(made):06}",
                [chooser.randrange(10, vocab_size) for _ in range(length)],
                [False] + [True] * (length - 1),
                "train",
            )
        )
        total += length
    stats = Counter(tokens=total, supervised=total - len(made))
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write(
        path,
        made,
        stats,
        SimpleNamespace(min_supervised_share=0, max_supervised_share=1),
        greedy=False,
    )
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
def serving(model: Path, options, flags: dict, log: Path):
    """URL of a server with our hooks; gone when the block ends, with its memory on the GPU."""
    command = [
        options.server_python,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model.resolve()),
        "--port",
        str(options.port),
    ]
    for name, value in {**json.loads(options.flags), **flags}.items():
        if value is not False:
            command += [
                f"--{name}",
                *([] if value is True else map(str, value if isinstance(value, list) else [value])),
            ]
    path = os.pathsep.join([str(Path("workflow").resolve()), *filter(None, [options.site])])
    before = free_memory()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
    url, started = f"http://127.0.0.1:{options.port}", time.monotonic()
    try:
        while True:
            if process.poll() is not None or time.monotonic() - started > 400:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-6000:]}")
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
        end = time.monotonic() + 30
        while free_memory() < before - 2**30 and time.monotonic() < end:
            time.sleep(0.5)


def free_memory() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class Subject:
    """A model whose states are captured, and the records."""

    label: str
    path: Path
    shape: dict  # of its config.json
    digest: str
    file: Path
    rows: list[Record]
    turns: int

    @property
    def hidden_size(self) -> int:
        return self.shape["hidden_size"]

    @property
    def layers(self) -> list[int]:
        return layer_numbers.captured_layers(self.shape["num_hidden_layers"])

    @property
    def tokens(self) -> int:
        return sum(len(r.input_ids) for r in self.rows)


class Bench:
    def __init__(self, options):
        self.options, self.work = options, options.work
        self.results: dict = {
            "errors": {},
            "disk_bytes_per_second": disk_speed(options.work, options.disk_bytes),
        }

    @contextlib.contextmanager
    def arm(self, label: str):
        """What fails is on record, and costs nothing but itself."""
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.results["errors"][label] = f"{type(error).__name__}: {error}"
        write_json(
            self.options.results / "extract_gpu.json", self.results
        )  # now: the time of a call may run out
        print(f"{label} took {time.monotonic() - started:.0f} s", flush=True)

    def extract(
        self, subject: Subject, capture, dtype: str, engine: str, out: Path | None = None
    ) -> dict[str, float]:
        """Seconds of an extraction from nothing, and those of its self-check. What it says of a
        random model is on record and no reason to measure nothing."""
        params = SimpleNamespace(
            dtype=dtype, shard_bytes=self.options.shard_bytes, max_quarantine_rate=0.01
        )
        shutil.rmtree(self.work / "extract", ignore_errors=True)
        identity = {
            "target_digest": subject.digest,
            "hidden_size": subject.hidden_size,
            "layers": subject.layers,
            "architecture": subject.shape["architectures"][0],
            "last_is": "after_final_norm",
            "dtype": dtype,
            "convention": layer_numbers.convention_of(subject.shape["architectures"][0]),
            "engine": engine,
        }
        one = Extraction(
            subject.file,
            self.work / "extract",
            subject.hidden_size,
            identity,
            params,
            SimpleNamespace(reserve_bytes=2**30),
            print,
        )
        one.check_disk()
        checked: dict[str, float] = {}

        def check(*arguments):
            begun = time.monotonic()
            try:
                return self_check(*arguments)
            except UserError as error:
                self.results["errors"][f"{subject.label} {engine} {dtype}: self-check"] = str(error)
                return {}
            finally:
                checked["seconds"] = time.monotonic() - begun

        extraction.self_check = check
        started = time.monotonic()
        one.capture(lambda: contextlib.nullcontext(capture), None, False)
        seconds = time.monotonic() - started
        if out:
            one.publish(
                out,
                {
                    "records_digest": digest_file(subject.file),
                    "tokenizer_digest": self.options.tokenizer_digest,
                },
            )
        return {"seconds": seconds, "check": checked["seconds"]}

    def record(
        self, label: str, subject: Subject, found: dict[str, list[dict[str, float]]], **more
    ) -> None:
        """Results of the arms in `found`, the first of which is the reference of the others."""
        tokens, reference = subject.tokens, None
        arms = self.results[label] = {
            "tokens": tokens,
            "records": len(subject.rows),
            "layers": subject.layers,
            "arms": {},
            **more,
        }
        for name, turns in found.items():
            speeds = [tokens / turn["seconds"] for turn in turns]
            aside = max(tokens / (turn["seconds"] - turn.get("check", 0)) for turn in turns)
            reference = reference or max(speeds)
            one = {
                "tokens_per_second": speeds,
                "best": max(speeds),
                "of_reference": max(speeds) / reference,
            }
            if dtype := ARMS.get(name):
                size = bytes_per_token(subject.hidden_size, dtype)
                one |= {
                    "check_seconds": [turn["check"] for turn in turns],
                    "best_without_check": aside,
                    "of_reference_without_check": aside / reference,
                    "bytes_per_token": size,
                    "of_disk": aside * size / self.results["disk_bytes_per_second"],
                }
            arms["arms"][name] = one

    def sglang(self, label: str, subject: Subject, out: Path | None = None, **more_flags) -> None:
        options = self.options
        version = engine_version(options.server_python, environment={"PYTHONPATH": options.site})
        convention = layer_numbers.convention_of(subject.shape["architectures"][0])
        flags = sglang_hooks.server_flags(
            version,
            subject.layers,
            layer_numbers.config_ids(subject.layers, convention),
            str(self.work.resolve()),
        )
        print(f"{label}: SGLang {version}", flush=True)
        log = self.work / f"{label.replace(' ', '_')}_server.log"
        try:
            with serving(subject.path, options, {**flags, **more_flags}, log) as url:
                plain, capture = (
                    PlainClient([url], options.concurrency),
                    SglangCapture([Client(url)], options.concurrency),
                )

                def prefill(rows) -> dict[str, float]:
                    started = time.monotonic()
                    plain.run(iter([PlainJob(r) for r in rows]), lambda job: None)
                    return {"seconds": time.monotonic() - started}

                prefill(subject.rows[:200])
                self.extract(
                    subject, capture, "bfloat16", "sglang"
                )  # pinned buffers, first kernels
                found: dict[str, list[dict]] = {"plain": [], "capture": [], "fp8": []}
                for turn in range(subject.turns):
                    found["plain"].append(prefill(subject.rows))
                    found["fp8"].append(self.extract(subject, capture, ARMS["fp8"], "sglang"))
                    last = turn == subject.turns - 1
                    found["capture"].append(
                        self.extract(
                            subject, capture, ARMS["capture"], "sglang", out if last else None
                        )
                    )
                    print(
                        label,
                        {
                            name: round(subject.tokens / turns[-1]["seconds"])
                            for name, turns in found.items()
                        },
                        flush=True,
                    )
        finally:
            with contextlib.suppress(OSError):
                shutil.copy(log, options.results / log.name)
        self.record(label, subject, found, version=version)

    def transformers(self, label: str, subject: Subject, model) -> None:
        """bare against offload for one model."""
        budget = self.options.batch_tokens
        groups = [
            [job.record.input_ids for job in batch]
            for start in range(0, len(subject.rows), 512)
            for batch in batches([PlainJob(r) for r in subject.rows[start : start + 512]], budget)
        ]
        padded = sum(len(ids) * max(map(len, ids)) for ids in groups)

        def capturing():
            return TransformersCapture(
                SimpleNamespace(hidden_size=subject.hidden_size), subject.layers, budget, [model]
            )

        def bare(limit=None) -> dict[str, float]:
            capture = capturing()
            for hook in capture.replicas[0].hooks:
                hook.remove()
            started = time.monotonic()
            for ids in groups[:limit]:
                capture.replicas[0].forward(ids)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return {"seconds": time.monotonic() - started}

        def offload(dtype: str) -> dict[str, float]:
            capture = capturing()
            try:
                return self.extract(subject, capture, dtype, "transformers")
            finally:
                for hook in capture.replicas[0].hooks:
                    hook.remove()

        bare(3)
        offload("bfloat16")
        found: dict[str, list[dict]] = {"bare": [], "offload": [], "offload fp8": []}
        for _ in range(subject.turns):
            found["bare"].append(bare())
            for name in ("offload", "offload fp8"):
                found[name].append(offload(ARMS[name]))
            print(
                label,
                {
                    name: round(subject.tokens / turns[-1]["seconds"])
                    for name, turns in found.items()
                },
                flush=True,
            )
        self.record(
            label,
            subject,
            found,
            padding=1 - subject.tokens / padded,
            specforge_bytes_per_token=8 * subject.hidden_size + 16,
        )

    def fidelity(self, target: Target, layers: list[int], folder: Path) -> None:
        """Relative error to transformers in fp32 of the captured states and of transformers in
        bf16."""
        data = shards.ShardSet([folder], "train", {})
        chosen = [data[i] for i in range(0, len(data), max(1, len(data) // 8))][:8]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        reference = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = AutoModelForCausalLM.from_pretrained(target.path, dtype=dtype).to(device)
            with torch.no_grad():
                for row in chosen:
                    states = model(
                        row["input_ids"].long().to(device)[None], output_hidden_states=True
                    ).hidden_states
                    reference[dtype, row["id"]] = [
                        *(states[i][0].float().cpu() for i in layers),
                        states[-1][0].float().cpu(),
                    ]
        errors: dict[str, list[list[float]]] = {"captured": [], "transformers in bf16": []}
        for row in chosen:
            exact = reference[torch.float32, row["id"]]
            ours = [*row["aux"].float().chunk(3, -1), row["last"].float()]
            for name, found in (
                ("captured", ours),
                ("transformers in bf16", reference[torch.bfloat16, row["id"]]),
            ):
                errors[name].append(
                    [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)]
                )
        self.results["relative_error_to_fp32"] = {
            name: [sum(column) / len(column) for column in zip(*rows)]
            for name, rows in errors.items()
        }


def random_model(config: dict, folder: Path):
    """A random Llama of this configuration, on the device, and in `folder`."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(LlamaConfig(**config)).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return model


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True, help="a model folder")
    parser.add_argument("--records", type=Path, help="a records file; without it, random ids")
    parser.add_argument(
        "--out", type=Path, help="where the bf16 states are kept, e.g. data/hidden_states/own"
    )
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--tokens-8b", type=int, default=200_000)
    parser.add_argument("--config-8b", type=json.loads, default=LLAMA_8B)
    parser.add_argument("--longest", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--turns-8b", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--shard-bytes", type=int, default=2**30)
    parser.add_argument(
        "--disk-bytes", type=int, default=4 * 2**30, help="size of the file that measures the disk"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--site", default="")
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument(
        "--flags", default=json.dumps(FLAGS), help="flags of launch_server, as JSON"
    )
    parser.add_argument("--port", type=int, default=30010)
    parser.add_argument("--arms", nargs="+", default=["sglang", "transformers", "8b", "8b-sglang"])
    parser.add_argument("--work", type=Path, default=Path(".work/extract_gpu"))
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    options.results = Path(os.environ.get("OUT", options.work))
    target = open_target(options.target, options.work, options.dtype)
    options.tokenizer_digest = target.info["tokenizer_digest"]
    file = options.records or random_records(
        options.work / "random.parquet", options.tokens, target.vocab_size, options.longest
    )
    small = Subject(
        "target",
        target.path,
        {**target.config, "architectures": [target.info["architecture"]]},
        target.digest,
        file,
        list(records.read(file)),
        options.turns,
    )
    bench, out = Bench(options), options.out or options.work / "states"
    try:
        if "sglang" in options.arms:
            with bench.arm("sglang"):
                bench.sglang("sglang", small, out)
                bench.fidelity(target, small.layers, out)
        free()
        if "transformers" in options.arms:
            with bench.arm("transformers"):
                bench.transformers("transformers", small, target.load_model())
        free()
        if {"8b", "8b-sglang"} & set(options.arms):
            with bench.arm("8b model"):
                file = random_records(
                    options.work / "large.parquet",
                    options.tokens_8b,
                    options.config_8b["vocab_size"],
                    options.longest,
                )
                large = Subject(
                    "8b",
                    options.work / "8b",
                    {**options.config_8b, "architectures": ["LlamaForCausalLM"]},
                    "random",
                    file,
                    list(records.read(file)),
                    options.turns_8b,
                )
                model = random_model(options.config_8b, large.path)
                if "8b" in options.arms:
                    with bench.arm("8b"):
                        bench.transformers("8b", large, model)
                del model
                free()
                if "8b-sglang" in options.arms:
                    with bench.arm("8b sglang"):
                        bench.sglang("8b sglang", large, **{"skip-tokenizer-init": True})
    finally:
        write_json(options.results / "extract_gpu.json", bench.results)
        for folder in ("extract", "8b"):
            shutil.rmtree(options.work / folder, ignore_errors=True)
    show(bench.results)


def show(results: dict) -> None:
    print(
        "\narm                         tokens/s   of its reference   self-check aside   of the disk"
    )
    for label, one in results.items():
        for name, arm in one.get("arms", {}).items() if isinstance(one, dict) else ():
            more = (
                f"{arm['of_reference_without_check']:19.3f} {arm['of_disk']:13.2f}"
                if "of_disk" in arm
                else ""
            )
            print(f"{label + ' ' + name:24} {arm['best']:12,.0f} {arm['of_reference']:18.3f}{more}")
    for name, errors in results.get("relative_error_to_fp32", {}).items():
        print(f"relative error to fp32, {name}: " + ", ".join(f"{e:.4f}" for e in errors))
    print(f"disk, written and synced: {results['disk_bytes_per_second'] / 1e9:.2f} GB/s")
    for label, error in results["errors"].items():
        print(f"FAILED {label}: {error[:300]}")


if __name__ == "__main__":
    main()
