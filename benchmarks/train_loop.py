"""The whole training loop, shards on disk to optimizer, on one GPU and on several.

    PYTHONPATH=workflow python benchmarks/train_loop.py --size large --runs one again resumed ddp
    fsdp --out DIR

Every run is the product's own Trainer over the same random shards, an update being two packed
batches. Runs:

    one, again   one process, twice: the noise of the GPU, for scale
    resumed      one process, stopped after half of the updates and continued by a new process
    ddp, fsdp    two processes by torchrun, each with its GPU
    threads-N    one process with N threads that read ahead

Reported: tokens/s of the second half of the updates, the largest relative difference of the loss to
`one`, and how far the final weights lie from those of `one`, relative to how far training moved
them. `--profile` adds where the main thread and the loader's threads are, and the GPU's busy share.
`--tiny` runs on a CPU (gloo) as well."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from eagle3.capture.offload import states_to_store
from eagle3.core.schema import Runtime, Train
from eagle3.hidden_states import shards
from eagle3.records.records import Record
from eagle3.training import parallel
from eagle3.training.checkpoints import Checkpoints
from eagle3.training.trainer import Stop, Trainer
from train_throughput import FULL, TINY, make_drafter, make_rows

EMBEDDED = {
    "hidden_size": 576,
    "vocab_size": 49152,
    "intermediate_size": 4096,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "draft": 16384,
    "length": 600,
    "steps": 4,
}
MEDIUM = {
    "hidden_size": 2048,
    "vocab_size": 32000,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "draft": 16000,
    "length": 2048,
    "steps": 4,
}
SIZES = {"large": FULL, "medium": MEDIUM, "embedded": EMBEDDED, "tiny": TINY}


def make_shards(folder: Path, size: dict, tokens: int) -> None:
    """A training and a validation data set of random records."""
    for split, amount, seed in (("train", tokens, 1), ("validation", size["length"] * 4, 2)):
        rows, entries = make_rows(size, amount, "real", seed), []
        (folder / split).mkdir(parents=True)
        for start in range(0, len(rows), 64):
            part = rows[start : start + 64]
            writer = shards.ShardWriter(
                folder / split,
                f"shard-{start}",
                [
                    Record(r["id"], r["input_ids"].tolist(), r["loss_mask"].tolist(), split)
                    for r in part
                ],
                size["hidden_size"],
                "bfloat16",
            )
            for place, row in enumerate(part):
                writer.write(
                    place,
                    states_to_store(list(row["aux"].chunk(3, -1)), row["last"], "bfloat16"),
                    0,
                    len(row["last"]),
                )
            entries.append(writer.finish())
        shards.write_manifest(folder / split, {}, entries)


class Watched(Trainer):
    """The product's trainer, which also keeps the loss and the end of every update."""

    def watch(self, profile: bool) -> None:
        self.curve, self.ends, self.tokens, self.profile, self.busy = [], [], [], profile, None
        self.sampler = Sampler()

    def _settle(self, waiting, losses, done, bar, trackers):
        fresh = done.update <= waiting[0].number
        super()._settle(waiting, losses, done, bar, trackers)
        if fresh:
            self.curve.append(losses[-1])
            self.ends.append(time.perf_counter())
            self.tokens.append(waiting[0].tokens)

    def _step(self, update):
        half = self.total // 2
        if self.profile and update.number == half:
            self.sampler.start()
        if self.profile and self.device.type == "cuda" and update.number == self.total - 12:
            torch.cuda.synchronize()
            self.kernels = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.kernels.start()
            self.since = time.perf_counter()
        if self.profile and self.device.type == "cuda" and update.number == self.total - 2:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - self.since
            self.kernels.stop()
            events = sorted(
                (
                    (e.self_device_time_total / 1e6, e.count, e.key[:90])
                    for e in self.kernels.key_averages()
                ),
                reverse=True,
            )
            self.busy = {
                "updates": 10,
                "seconds": seconds,
                "in_kernels": sum(e[0] for e in events),
                "kernels": events[:12],
                "launches": sum(e[1] for e in events),
            }
        return super()._step(update)


class Sampler:
    """Where each thread is, a hundred times a second."""

    def __init__(self):
        self.seen: dict[str, Counter] = {}
        self.stopped = threading.Event()

    def start(self) -> None:
        names = {t.ident: t.name.split("_")[0] for t in threading.enumerate()}
        threading.Thread(target=self._run, args=(names,), daemon=True).start()

    def _run(self, names) -> None:
        while not self.stopped.wait(0.01):
            for ident, frame in sys._current_frames().items():
                chain = []
                while frame:
                    if "eagle3" in frame.f_code.co_filename:
                        chain.append(
                            f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}"
                        )
                    frame = frame.f_back
                if ident in names and chain:
                    self.seen.setdefault(names[ident], Counter())[" < ".join(chain[:2])] += 1


def work(options: argparse.Namespace) -> None:
    """One process of one run."""
    size, folder = SIZES[options.size], options.work
    if options.size == "tiny":
        torch.set_num_threads(1)
    processes = parallel.Processes()
    drafter, head = make_drafter(size)
    vocabulary = torch.zeros(size["vocab_size"], size["hidden_size"])
    vocabulary[drafter.draft_ids.cpu()] = head.cpu()
    train, validation = (
        shards.ShardSet([folder / split], split, {}, verify=False)
        for split in ("train", "validation")
    )
    params = Train(
        steps=size["steps"],
        batch_tokens=options.batch_tokens,
        micro_batches=options.micro_batches,
        epochs=1000,
        max_updates=options.updates,
        validate_every=options.updates,
        lr=1e-4,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        matmul=options.matmul,
    )
    runtime = Runtime(
        parallel=options.parallel,
        checkpoint_every=max(1, options.updates // 2),
        loader_threads=options.threads,
    )
    before = {n: p.detach().cpu().clone() for n, p in drafter.named_parameters()}
    checkpoints = Checkpoints(folder / options.name, {"run": options.name}, 1)
    trainer = Watched(
        drafter.cpu(), vocabulary.bfloat16(), train, validation, params, runtime, checkpoints, print
    )
    trainer.watch(options.profile)
    if options.stop:
        trainer.processes.any = lambda flag: len(trainer.ends) >= options.stop - 1
    try:
        trainer.run()
    except Stop:
        pass
    weights = parallel.whole(dict(drafter.named_parameters()))
    if processes.rank == 0:
        half = len(trainer.ends) // 2
        found = {
            "curve": trainer.curve,
            "busy": trainer.busy,
            "seconds": trainer.ends[-1] - trainer.ends[half],
            "tokens_per_second": sum(trainer.tokens[half + 1 :])
            / max(trainer.ends[-1] - trainer.ends[half], 1e-9),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30
            if torch.cuda.is_available()
            else None,
            "stacks": {
                name: counts.most_common(14) for name, counts in trainer.sampler.seen.items()
            },
        }
        (folder / f"{options.name}.json").write_text(json.dumps(found))
        torch.save({n: (w, before[n]) for n, w in weights.items()}, folder / f"{options.name}.pt")
    processes.close()


def run(options: argparse.Namespace, name: str) -> dict:
    """Figures of one run."""
    command = [sys.executable]
    if name in ("ddp", "fsdp"):
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [
        __file__,
        "--size",
        options.size,
        "--work",
        str(options.work),
        "--updates",
        str(options.updates),
        "--batch-tokens",
        str(options.batch_tokens),
        "--micro-batches",
        str(options.micro_batches),
        "--matmul",
        options.matmul,
        "--name",
        name,
    ]
    command += ["--parallel", name] if name in ("ddp", "fsdp") else []
    command += [
        "--threads",
        name.partition("-")[2] if name.startswith("threads") else str(options.threads),
    ]
    command += ["--profile"] if options.profile else []
    started = time.monotonic()
    if name == "resumed":
        subprocess.run([*command, "--stop", str(options.updates // 2)], check=True)
        first = json.loads((options.work / "resumed.json").read_text())["curve"]
    subprocess.run(command, check=True)
    found = json.loads((options.work / f"{name}.json").read_text())
    if name == "resumed":
        found["curve"] = first + found["curve"]
    return {**found, "whole_seconds": time.monotonic() - started}


def distance(folder: Path, name: str, reference: str) -> float:
    """How far the weights of a run lie from those of the reference, over how far the reference
    moved."""
    mine, theirs = (torch.load(folder / f"{n}.pt", weights_only=True) for n in (name, reference))
    apart = sum((mine[n][0] - theirs[n][0]).float().square().sum().item() for n in mine)
    moved = sum((theirs[n][0] - theirs[n][1]).float().square().sum().item() for n in mine)
    return (apart / moved) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="large")
    parser.add_argument("--runs", nargs="+", default=["one", "again", "resumed", "ddp", "fsdp"])
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=120_000, help="in the shards")
    parser.add_argument("--matmul", default="plain")
    parser.add_argument("--threads", type=int, default=Runtime().loader_threads)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".work/train_loop")))
    parser.add_argument("--work", type=Path, default=Path(".work/train_loop"))
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--parallel", default="ddp", help=argparse.SUPPRESS)
    parser.add_argument("--stop", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name:
        return work(options)
    shutil.rmtree(options.work, ignore_errors=True)
    started = time.monotonic()
    make_shards(options.work, SIZES[options.size], options.tokens)
    print(f"shards made in {time.monotonic() - started:.0f} s", flush=True)
    found: dict[str, dict] = {}
    for name in options.runs:
        try:
            found[name] = run(options, name)
        except subprocess.CalledProcessError as error:  # one that fails must not cost the others
            print(f"{name} failed: {error}", flush=True)
            continue
        first = options.runs[0]
        if first not in found:
            continue
        curve, reference = found[name]["curve"], found[first]["curve"]
        found[name]["loss_difference"] = max(
            abs(a - b) / abs(b) for a, b in zip(curve, reference, strict=True)
        )
        found[name]["weight_distance"] = distance(options.work, name, first)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"train_loop_{options.size}.json").write_text(json.dumps(found, indent=1))
        if options.profile:
            print(
                json.dumps(
                    {"busy": found[name]["busy"], "stacks": found[name]["stacks"]}, indent=1
                ),
                flush=True,
            )
    print(
        f"\n{'run':12} {'tokens/s':>10} {'of first':>9} {'loss apart':>11} {'weights apart':>14} "
        f"{'GiB':>6} {'seconds':>8}"
    )
    for name, one in found.items():
        print(
            f"{name:12} {one['tokens_per_second']:10,.0f} "
            f"{one['tokens_per_second'] / found[first]['tokens_per_second']:9.2f} "
            f"{one['loss_difference']:11.2e} {one['weight_distance']:14.2e} "
            f"{one['peak_gib'] or 0:6.1f} {one['whole_seconds']:8.0f}"
        )


if __name__ == "__main__":
    main()
