"""Ten times the data takes ten times the time and the same memory.

    PYTHONPATH=workflow python benchmarks/extract_scaling.py --target data/target

Extracts the states of random ids at each size in a process of its own, on the CPU, with a tiny
random model of the target's vocabulary unless --target is given, and prints tokens/s and the
largest memory of the process beyond what it had when the model was loaded."""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

HIDDEN = 64


def worker(options: argparse.Namespace, tokens: int) -> None:
    """One extraction; prints its figures as JSON."""
    import torch
    from eagle3.capture.extraction import Extraction
    from eagle3.capture.transformers_capture import TransformersCapture
    from eagle3.records import records
    from eagle3.records.records import Record
    from eagle3.target.model import Target
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(options.threads)
    if options.target:
        target = Target(options.target)
        model, hidden, vocab, layers = (
            target.load_model(),
            target.hidden_size,
            target.vocab_size,
            target.num_layers,
        )
    else:
        hidden, vocab, layers = HIDDEN, 400, 8
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=hidden,
                intermediate_size=128,
                num_hidden_layers=layers,
                num_attention_heads=4,
                vocab_size=vocab,
                max_position_embeddings=1024,
            )
        ).eval()
    work = options.work / str(tokens)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    chooser, total = random.Random(0), 0

    def made():
        nonlocal total
        count = 0
        while total < tokens:
            length = chooser.randrange(20, 400)
            total, count = total + length, count + 1
            yield Record(
                f"r{count}",
                [chooser.randrange(3, vocab) for _ in range(length)],
                [True] * length,
                "train",
            )

    records.write(
        work / "r.parquet",
        made(),
        Counter(tokens=1, supervised=1),
        SimpleNamespace(min_supervised_share=0, max_supervised_share=1),
        greedy=False,
    )
    capture = TransformersCapture(
        SimpleNamespace(hidden_size=hidden), [2, layers // 2, layers - 3], 2048, [model]
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    one = Extraction(
        work / "r.parquet",
        work / "w",
        hidden,
        {},
        SimpleNamespace(dtype="bfloat16", shard_bytes=options.shard_bytes, max_quarantine_rate=0),
        SimpleNamespace(reserve_bytes=0),
        print,
    )
    one.capture(lambda: contextlib.nullcontext(capture), lambda: None, greedy=False)
    one.publish(work / "out", {})
    seconds = time.monotonic() - started
    shutil.rmtree(work)
    print(
        json.dumps(
            {
                "tokens": total,
                "shards": len(one.plan),
                "seconds": seconds,
                "tokens_per_second": total / seconds,
                "memory_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, help="a target folder of the build")
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--shard-bytes", type=int, default=2**24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path(".work/extract_scaling"))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        worker(options, options.one)
        return
    found = []
    for tokens in options.tokens:
        made = subprocess.run(
            [sys.executable, *sys.argv, "--one", str(tokens)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found.append(json.loads(made.stdout.splitlines()[-1]))
    print("\n    tokens  shards   seconds   tokens/s   memory of the extraction")
    for row in found:
        print(
            f"{row['tokens']:10,} {row['shards']:7} {row['seconds']:9.1f} "
            f"{row['tokens_per_second']:10,.0f} "
            f"{row['memory_mib']:8,.0f} MiB"
        )
    (Path(os.environ.get("OUT", options.work)) / "extract_scaling.json").write_text(
        json.dumps(found, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
