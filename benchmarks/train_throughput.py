"""Training throughput on one GPU, at the dimensions of Llama-3.1-8B, and what each part of it
costs.

    PYTHONPATH=workflow python benchmarks/train_throughput.py --out DIR [--peers DIR] [--sections
    correct,dense,…]

Checks first that the fast path gives the numbers of the readable one. Then forward + backward +
clipping + AdamW of whole updates: dense sequences of 2048, all tokens supervised, and records as
they really are (log-normal lengths around 900, cap 2048, 55 % of tokens supervised). The limit is
16.3 GFLOP per token of the dense case against 790 TFLOP/s, which a large bf16 product reaches on an
H200. A table comes last, JSON goes to DIR. `--tiny` runs everything small, on a CPU too."""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from eagle3.capture.offload import states_to_store
from eagle3.drafter import ttt
from eagle3.drafter.model import Drafter, drafter_config
from eagle3.hidden_states import shards
from eagle3.records import draft_vocab as vocab
from eagle3.records.records import Record
from eagle3.training import loader
from eagle3.training.fused import plan as layouts
from eagle3.training.fused import unrolled
from eagle3.training.packing import packed_epoch

LIMIT = 790e12 / 16.3e9  # tokens/s
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FULL = {
    "hidden_size": 4096,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "draft": 32000,
    "length": 2048,
    "steps": 7,
}
TINY = {
    "hidden_size": 64,
    "vocab_size": 300,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "draft": 100,
    "length": 32,
    "steps": 2,
}
COMPUTE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
SMALL = {
    "hidden_size": 256,
    "vocab_size": 2000,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "draft": 512,
    "length": 96,
    "steps": 4,
}


def make_drafter(size: dict, seed: int = 0) -> tuple[Drafter, torch.Tensor]:
    """(drafter on the device, the target's head rows [D, H])."""
    torch.manual_seed(seed)
    config = drafter_config(
        {
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            **{k: v for k, v in size.items() if k not in ("draft", "length", "steps")},
        },
        {},
        size["draft"],
        [2, 15, 28],
        "bfloat16",
    )
    maps = vocab.tensors(list(range(0, 2 * size["draft"], 2)), size["vocab_size"])
    with torch.device(DEVICE):
        embedding = torch.randn(size["vocab_size"], size["hidden_size"]).bfloat16()
        drafter = Drafter(config, embedding, maps["d2t"].to(DEVICE), maps["t2d"].to(DEVICE)).to(
            DEVICE
        )
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, 0.02)
        head = torch.randn(size["draft"], size["hidden_size"]) * 0.05
    return drafter, head


def make_rows(size: dict, tokens: int, kind: str, seed: int = 0) -> list[dict]:
    """Random sequences of about `tokens` tokens in all; 'dense' or 'real'. States are slices of one
    random block."""
    chooser = torch.Generator().manual_seed(seed)
    block = torch.randn(size["length"], 3 * size["hidden_size"], generator=chooser).bfloat16()
    rows, total = [], 0
    while total < tokens:
        length = size["length"]
        mask = torch.ones(length, dtype=torch.bool)
        if kind == "real":
            mean = math.log(length * 900 / 2048) - 0.18
            length = max(
                16,
                min(length, int(math.exp(mean + 0.6 * torch.randn((), generator=chooser).item()))),
            )
            share = min(0.95, max(0.1, 0.55 + 0.2 * torch.randn((), generator=chooser).item()))
            mask = torch.arange(length) >= length - round(share * length)
        if total + length > tokens:
            break
        rows.append(
            {
                "id": str(len(rows)),
                "input_ids": torch.randint(size["vocab_size"], (length,), generator=chooser),
                "loss_mask": mask,
                "aux": block[:length],
                "last": block[:length, : size["hidden_size"]],
            }
        )
        total += length
    return rows


def scale_of(counts: torch.Tensor) -> torch.Tensor:
    return 0.8 ** torch.arange(len(counts), device=counts.device) / counts.clamp(min=1)


# --- sections
# --------------------------------------------------------------------


def check_correct(report: dict, size: dict) -> None:
    """Gradients of the fast path and of the plain one in bf16, both against the plain one in
    fp32."""
    for name, heads, kv, width in (
        ("group of 4, width 64", 8, 2, 64),
        ("group of 3, width 64", 6, 2, 64),
        ("width 128", 4, 4, 128),
    ):
        shape = {
            **(SMALL if size is FULL else size),
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": width,
        }
        drafter, head = make_drafter(shape)
        rows = make_rows(shape, 16 * shape["length"], "real") + make_rows(
            shape, 2 * shape["length"], "dense"
        )
        turns = torch.arange(len(rows[0]["input_ids"])) % 23 < 5
        gaps = {**rows[0], "id": "gaps", "loss_mask": rows[0]["loss_mask"] & turns}
        layout = layouts.plan([*rows, gaps], shape["steps"]).to(DEVICE)
        batch = ttt.collate([*rows, gaps]).to(DEVICE)
        batch = ttt.Batch(**{**vars(batch), "aux": batch.aux.float(), "last": batch.last.float()})
        drafter.embedding = drafter.embedding.float()
        truth = gradients(
            drafter,
            lambda d=drafter, b=batch, h=head, s=shape: ttt.loss(d, b, h, s["steps"], 0.8)[0],
        )
        variants = {
            "plain bf16": None,
            "fast fp32": unrolled.Recipe(shape["steps"], torch.float32, attention="plain"),
        }
        if DEVICE.type == "cuda":
            variants |= {
                "fast bf16": unrolled.Recipe(shape["steps"], torch.bfloat16),
                "fast fp8": unrolled.Recipe(shape["steps"], torch.bfloat16, fp8=True),
            }
        errors = {}
        for variant, recipe in variants.items():

            def compute(
                recipe=recipe, drafter=drafter, batch=batch, head=head, layout=layout, shape=shape
            ):
                if recipe is None:
                    with torch.autocast(DEVICE.type, torch.bfloat16):
                        return ttt.loss(drafter, batch, head, shape["steps"], 0.8)[0]
                return unrolled.loss(drafter, layout, head, recipe, scale_of(layout.counts))[0]

            found = gradients(drafter, compute)
            errors[variant] = max(
                ((found[n] - truth[n]).norm() / truth[n].norm()).item() for n in truth
            )
        report.setdefault("gradient_error", {})[name] = errors
        print(
            f"gradient error, {name}: " + ", ".join(f"{k} {v:.2e}" for k, v in errors.items()),
            flush=True,
        )
        assert errors["fast fp32"] < (2e-3 if DEVICE.type == "cuda" else 1e-4), errors
        assert errors.get("fast bf16", 0) < 1.5 * errors["plain bf16"], errors
        assert errors.get("fast fp8", 0) < 0.3, errors


def gradients(drafter, compute) -> dict[str, torch.Tensor]:
    drafter.zero_grad(set_to_none=True)
    loss = compute()
    loss.backward()
    return {
        "loss": loss.detach(),
        **{n: p.grad.float().clone() for n, p in drafter.named_parameters()},
    }


def check_curves(report: dict, size: dict) -> None:
    """200 updates of the fast and of the plain path, bf16, from the same start on the same data."""
    size = SMALL if size is FULL else size
    curves, updates = {}, 200 if size is SMALL else 5
    rows = make_rows(size, 40 * size["length"], "real", seed=3)
    for path in ("fast", "plain"):
        drafter, head = make_drafter(size)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95))
        batches = [
            [rows[i] for i in chosen]
            for e in range(100)
            for chosen in packed_epoch(
                [len(r["input_ids"]) for r in rows], 6 * size["length"], 0, e
            )
        ][:updates]
        curve = []
        for chosen in batches:
            optimizer.zero_grad()
            if path == "fast":
                layout = layouts.plan(chosen, size["steps"]).to(DEVICE)
                loss = unrolled.loss(
                    drafter,
                    layout,
                    head,
                    unrolled.Recipe(size["steps"], COMPUTE),
                    scale_of(layout.counts),
                )[0]
            else:
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
                    loss = ttt.loss(
                        drafter, ttt.collate(chosen).to(DEVICE), head, size["steps"], 0.8
                    )[0]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
            optimizer.step()
            curve.append(loss.detach())
        curves[path] = torch.stack(curve).float().cpu()
    difference = ((curves["fast"] - curves["plain"]).abs() / curves["plain"]).max().item()
    report["curves"] = {
        "updates": updates,
        "largest_difference": difference,
        "first": curves["plain"][0].item(),
        "last": curves["plain"][-1].item(),
    }
    print(
        f"loss curves over {updates} updates: {curves['plain'][0]:.3f} to "
        f"{curves['plain'][-1]:.3f}, paths differ by at "
        f"most {difference:.2%}",
        flush=True,
    )
    assert difference < 0.02, difference


class Run:
    """Whole updates of one configuration."""

    def __init__(self, size: dict, recipe: unrolled.Recipe, fused_optimizer: bool = True):
        self.size, self.recipe = size, recipe
        self.drafter, self.head = make_drafter(size)
        self.head = self.head.to(recipe.dtype)
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=fused_optimizer
        )

    def update(self, layout) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss, _, _ = unrolled.loss(
            self.drafter, layout, self.head, self.recipe, scale_of(layout.counts)
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 0.5, foreach=True)
        self.optimizer.step()
        return loss


def plain_update(run: Run, batch) -> None:
    run.optimizer.zero_grad(set_to_none=True)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
        loss, _ = ttt.loss(run.drafter, batch, run.head, run.size["steps"], 0.8)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.drafter.parameters(), 0.5, foreach=True)
    run.optimizer.step()


def timed(update, batches: list, tokens: list[int], seconds: float) -> float:
    """Tokens/s of `update` over the batches in turn, after each ran once."""
    for batch in batches:
        update(batch)
    synchronize()
    start, done, count = time.perf_counter(), 0, 0
    while time.perf_counter() - start < seconds:
        update(batches[count % len(batches)])
        done += tokens[count % len(batches)]
        count += 1
        synchronize()
    return done / (time.perf_counter() - start)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measure(
    report: dict, size: dict, name: str, recipe, kind: str, tokens: int, count: int, seconds: float
) -> None:
    """One line of the table. A variant that cannot run is reported as such."""
    release()
    try:
        rows = [make_rows(size, tokens, kind, seed) for seed in range(count)]
        lengths = [sum(len(r["input_ids"]) for r in chosen) for chosen in rows]
        run = Run(size, recipe if recipe is not None else unrolled.Recipe(size["steps"], COMPUTE))
        if recipe is None:
            batches = [ttt.collate(chosen).to(DEVICE) for chosen in rows]
            rate = timed(lambda batch: plain_update(run, batch), batches, lengths, seconds)
        else:
            batches = [layouts.plan(chosen, size["steps"]).to(DEVICE) for chosen in rows]
            rate = timed(run.update, batches, lengths, seconds)
        row = {
            "case": kind,
            "variant": name,
            "tokens_per_second": rate,
            "share_of_limit": rate / LIMIT,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30
            if DEVICE.type == "cuda"
            else None,
            "tokens_per_update": sum(lengths) / len(lengths),
        }
    except Exception as error:  # a variant that this machine lacks must not cost the others
        traceback.print_exc()
        row = {"case": kind, "variant": name, "failed": f"{type(error).__name__}: {error}"[:200]}
    report["rows"].append(row)
    print(json.dumps(row), flush=True)


def release() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def loaded(report: dict, size: dict, tokens: int, updates: int) -> None:
    """The same updates with shards read from disk, threads ahead of the device, against batches
    that lie there."""
    release()
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(size, 4 * tokens, "real", seed=9)
        place = Path(folder) / "set"
        place.mkdir()
        entries = []
        for start in range(0, len(rows), 64):
            part = rows[start : start + 64]
            writer = shards.ShardWriter(
                place,
                f"shard-{start}",
                [
                    Record(
                        id=r["id"],
                        input_ids=r["input_ids"].tolist(),
                        loss_mask=r["loss_mask"].tolist(),
                        split="train",
                    )
                    for r in part
                ],
                size["hidden_size"],
                "bfloat16",
            )
            for i, r in enumerate(part):
                writer.write(
                    i,
                    states_to_store(list(r["aux"].chunk(3, -1)), r["last"], "bfloat16"),
                    0,
                    len(r["last"]),
                )
            entries.append(writer.finish())
        shards.write_manifest(place, {}, entries)
        data = shards.ShardSet([place], "train", {}, verify=False)
        reader, run = loader.Reader(data), Run(size, unrolled.Recipe(size["steps"], COMPUTE))
        groups = [g for e in range(99) for g in packed_epoch(data.lengths, tokens, 0, e)][:updates]

        def work(indices):
            count = sum(data.lengths[i] for i in indices)
            return count, layouts.plan(
                reader.rows(indices), size["steps"], pin=DEVICE.type == "cuda"
            )

        rates, warm = {}, min(8, updates // 2)
        for name in ("resident", "from disk"):
            source = loader.on_device(loader.ahead(work, groups, 4), DEVICE)
            if name == "resident":
                source = list(source)
            else:
                source = iter(source)
                for _ in range(warm):  # threads start and memory gets pinned, once in a long run
                    run.update(next(source)[1])
            synchronize()
            if name == "resident":
                for _, layout in source:
                    run.update(layout)
                source = source[warm:]
                synchronize()
            start, done = time.perf_counter(), 0
            for count, layout in source:
                run.update(layout)
                done += count
            synchronize()
            rates[name] = done / (time.perf_counter() - start)
            del source
            release()
    report["loader"] = {**rates, "cost": 1 - rates["from disk"] / rates["resident"]}
    print("loader", json.dumps(report["loader"]), flush=True)


def profiled(report: dict, size: dict, tokens: int, recipe, name: str, kind: str) -> None:
    """Where the time of one update goes, by kernel."""
    release()
    run = Run(size, recipe)
    layout = layouts.plan(make_rows(size, tokens, kind), size["steps"]).to(DEVICE)
    for _ in range(2):
        run.update(layout)
    synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run.update(layout)
        synchronize()
    field = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    events = sorted(
        ((getattr(e, field), e.count, e.key) for e in profile.key_averages()), reverse=True
    )
    total = sum(time_ for time_, _, _ in events)
    report.setdefault("profile", {})[name] = [
        {"milliseconds": t / 1e3, "calls": c, "kernel": key[:120]} for t, c, key in events[:40]
    ]
    print(f"\nprofile of {name}: {total / 1e3:.1f} ms in kernels")
    for t, count, key in events[:28]:
        print(f"  {t / 1e3:8.2f} ms {t / max(total, 1e-9):6.1%} {count:5d} × {key[:100]}")
    sys.stdout.flush()


def peers(report: dict, folder: Path, out: Path, seconds: float, patience: float) -> None:
    """The peers' own models and losses, each in its own process: one that fails does not stop the
    rest."""
    for name in ("speculators", "specforge"):
        target = out / f"peer-{name}.json"
        command = [
            sys.executable,
            str(Path(__file__).with_name("train_peers.py")),
            name,
            "--folder",
            str(folder),
            "--out",
            str(target),
            "--seconds",
            str(seconds),
        ]
        paths = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
        log = out / f"peer-{name}.log"
        with (
            open(log, "w") as file,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):  # what it has measured by then counts
            subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": paths},
                timeout=patience,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        print(log.read_text()[-3000:], flush=True)
        report["rows"] += (
            json.loads(target.read_text())
            if target.exists()
            else [{"case": "dense", "variant": name, "failed": log.read_text()[-200:]}]
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "throughput")))
    parser.add_argument("--peers", type=Path, help="folder with the peers' unpacked wheels")
    parser.add_argument("--sections", default="correct,curves,dense,real,loader,profile,peers")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring per variant")
    parser.add_argument(
        "--patience", type=float, default=240, help="seconds for a peer, its compilation included"
    )
    parser.add_argument(
        "--variants", default="", help="only those whose name has one of these words, divided by |"
    )
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    size = TINY if arguments.tiny else FULL
    unit = 64 if arguments.tiny else 8192
    steps, wanted = size["steps"], arguments.sections.split(",")
    report: dict = {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "limit_tokens_per_second": LIMIT,
        "size": size,
        "rows": [],
    }
    bf16 = unrolled.Recipe(steps, COMPUTE)
    fp8 = unrolled.Recipe(steps, torch.bfloat16, fp8=True)
    began = time.perf_counter()

    def section(name, work, *args) -> None:
        if name not in wanted:
            return
        try:
            work(report, *args)
        except Exception as error:
            traceback.print_exc()
            report.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
        report.setdefault("seconds", {})[name] = time.perf_counter() - began
        (arguments.out / "train_throughput.json").write_text(json.dumps(report, indent=1))

    section("correct", check_correct, size)
    section("curves", check_curves, size)
    seconds = 0.2 if arguments.tiny else arguments.seconds
    on_gpu = DEVICE.type == "cuda"
    if arguments.peers:
        section("peers", peers, arguments.peers, arguments.out, seconds, arguments.patience)
    for kind, variants in (
        (
            "dense",
            [
                ("readable path", None, unit // 2),
                ("fast bf16", bf16, unit),
                ("fast bf16", bf16, 2 * unit),
                ("fast bf16", bf16, 4 * unit),
                ("fast fp8", fp8, 2 * unit),
                ("fast fp8", fp8, 4 * unit),
            ],
        ),
        (
            "real",
            [
                ("fast bf16", bf16, 2 * unit),
                ("fast bf16", bf16, 4 * unit),
                ("fast bf16", bf16, 8 * unit),
                ("fast fp8", fp8, 2 * unit),
                ("fast fp8", fp8, 4 * unit),
            ],
        ),
    ):
        for name, recipe, tokens in variants:
            name = f"{name}, {tokens} tokens"
            if (not on_gpu and recipe is fp8) or not any(
                word in name for word in arguments.variants.split("|")
            ):
                continue
            count = 1 if kind == "dense" else 3
            section(kind, measure, size, name, recipe, kind, tokens, count, seconds)
    section("loader", loaded, size, 2 * unit, 4 if arguments.tiny else 40)
    section("profile", profiled, size, 2 * unit, bf16, "dense bf16", "dense")
    if on_gpu:
        section("profile", profiled, size, 2 * unit, fp8, "dense fp8", "dense")

    print(f"\n{report['device']}, torch {report['torch']}, limit {LIMIT:,.0f} tokens/s")
    print(f"{'case':6} {'variant':44} {'tokens/s':>9} {'limit':>6} {'GiB':>6}")
    for row in report["rows"]:
        if "failed" in row:
            print(f"{row['case']:6} {row['variant']:44} failed: {row['failed'][:80]}")
        else:
            print(
                f"{row['case']:6} {row['variant']:44} {row['tokens_per_second']:9,.0f} "
                f"{row['share_of_limit']:6.1%} "
                f"{row['peak_gib'] or 0:6.1f}"
            )
    for name, reason in report.get("failed", {}).items():
        print(f"section {name} failed: {reason}")


if __name__ == "__main__":
    main()
