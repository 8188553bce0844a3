"""train: trains the drafter on the hidden states and exports it for SGLang."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import csv
import os
import shutil
import sys
from pathlib import Path

import torch
import transformers

from eagle3.drafter import model as drafters
from eagle3.drafter import export
from eagle3.target import layers
from eagle3.training import parallel
from eagle3.hidden_states import shards
from eagle3.records import draft_vocab as vocab
from eagle3.training import warm_start
from eagle3.training.checkpoints import Checkpoints
from eagle3.core.errors import UserError
from eagle3.core.files import digest_file, read_json, replacing, write_json
from eagle3.core.process import git, watch_ancestors
from eagle3.core.stage import Stage, main, running
from eagle3.target.model import Target
from eagle3.training.trainer import Progressed, Trainer

KEPT = (
    "target_digest",
    "hidden_size",
    "layers",
    "convention",
    "last_is",
    "dtype",
    "tokenizer_digest",
    "records_digest",
    "tokens",
    "rows",
    "engine",
)


def build(arguments: argparse.Namespace) -> None:
    if "RANK" in os.environ:  # one of several processes, started below
        watch_ancestors()
        train(Stage("train", arguments.params), arguments)
        return
    with running(
        "train", arguments.params, [arguments.target, arguments.vocab, arguments.hidden_states]
    ) as stage:
        processes = stage.params.runtime.nproc_per_node
        if processes > 1:
            parallel.launch(__file__, sys.argv[1:], processes)
        else:
            train(stage, arguments)


def dataset_names(arguments: argparse.Namespace) -> list[str]:
    return sorted(read_json(arguments.vocab.with_suffix(".json"))["datasets"])


def train(stage: Stage, arguments: argparse.Namespace) -> None:
    """Trains in this process, which may be one of several; the first of them writes the result."""
    params, target, processes = stage.params.train, Target(arguments.target), parallel.Processes()
    leader = processes.rank == 0
    log = stage.log if leader else (lambda text: None)
    folders = [arguments.hidden_states / name for name in dataset_names(arguments)]
    first = shards.read_manifest(folders[0])
    expected = {
        "target_digest": target.digest,
        "hidden_size": target.hidden_size,
        **{key: first[key] for key in ("layers", "convention", "last_is", "dtype")},
    }
    training = shards.ShardSet(folders, "train", expected, verify=leader)
    validation = shards.ShardSet(folders, "validation", expected, verify=False)
    d2t, t2d = vocab.read(arguments.vocab)
    config = drafters.drafter_config(
        target.config,
        params.architecture.model_dump(),
        len(d2t),
        layers.config_ids(first["layers"], first["convention"]),
        target_dtype(target),
    )
    identity = {
        "params": params.model_dump(),
        "config": config,
        "vocab": digest_file(arguments.vocab),
        "hidden_states": {n: {k: m.get(k) for k in KEPT} for n, m in training.manifests.items()},
        "warm_start": warm_start.digest(params.warm_start),
    }
    if not leader:
        processes.wait()  # the first process alone clears away checkpoints of another run
    checkpoints = Checkpoints(stage.work, identity, stage.params.runtime.keep_checkpoints)
    if leader:
        processes.wait()
    compute = getattr(torch, params.dtype)
    head = target.head().to(compute)
    drafter = drafters.Drafter(config, target.embedding().to(compute), d2t, t2d).initialise(
        head.float(), params.seed
    )
    log(
        f"{len(training)} training and {len(validation)} validation sequences, "
        f"{sum(training.lengths):,} tokens, "
        f"{sum(p.numel() for p in drafter.parameters()):,} weights"
    )
    fresh = checkpoints.latest() is None
    made_with = origin(checkpoints.folder, fresh) if leader else {}
    start = warm_start.weights(drafter, params, training, log) if fresh else None
    trainer = Trainer(
        drafter,
        head,
        training,
        validation,
        params,
        stage.params.runtime,
        checkpoints,
        log,
        start,
        target.softcap,
    )
    done = trainer.run()
    processes.close()
    if leader:
        write(arguments.out, done, config, identity, made_with)
        best = (
            f"at update {done.best_update} of {done.update}"
            if done.best_update
            else (f"at its start, which {done.update} updates did not improve")
        )
        log(
            f"accept length {done.history[0]['accept_length']:.3f} untrained, "
            f"{done.best_length:.3f} {best} "
            f"({params.steps} steps, simulated)"
        )


def target_dtype(target: Target) -> str:
    """The target's compute type by name; the drafter must be served in the same."""
    dtype = target.info["dtype"]
    if dtype == "auto":
        dtype = target.config.get("dtype") or target.config.get("torch_dtype")
    if dtype is None:
        raise UserError("the target's config.json names no dtype; set target.dtype in params.yaml")
    return str(dtype).removeprefix("torch.")


def origin(folder: Path, fresh: bool) -> dict[str, str]:
    """Code and versions at the first update. They are kept with the checkpoints, so that exporting
    the same weights again writes the same bytes."""
    path = folder / "origin.json"
    if fresh or not path.exists():
        write_json(
            path,
            {
                "git_commit": git("rev-parse", "HEAD").strip(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        )
    return read_json(path)


def write(out: Path, done: Progressed, config: dict, identity: dict, made_with: dict) -> None:
    """The whole folder: weights, config.json, training.json, metrics.json, curves.csv."""
    with replacing(out) as folder:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        export.write(folder, done.best, config)
        best = max(
            (row for row in done.history if row["update"] == done.best_update),
            key=lambda row: row["accept_length"],
        )
        write_json(
            folder / "metrics.json",
            {
                "accept_length": best["accept_length"],
                "accept_length_untrained": done.history[0]["accept_length"],
                "accuracy": {
                    f"step_{k}": best[f"accuracy_{k}"] for k in range(identity["params"]["steps"])
                },
                "conditional": {
                    f"step_{k}": best[f"conditional_{k}"]
                    for k in range(identity["params"]["steps"])
                },
                "best_update": done.best_update,
                "updates": done.update,
            },
        )
        digest = digest_file(folder / export.WEIGHTS)
        write_json(
            folder / "training.json",
            {**identity, "weights_digest": digest, "made_with": made_with},
        )
        with open(folder / "curves.csv", "w", newline="") as file:
            rows = csv.DictWriter(file, list(done.history[0]), lineterminator="\n")
            rows.writeheader()
            rows.writerows(done.history)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--vocab", type=Path, default=Path("data/vocab/draft_vocab.safetensors"))
    parser.add_argument("--hidden-states", type=Path, default=Path("data/hidden_states"))
    parser.add_argument("--out", type=Path, default=Path("data/drafter"))
    main(parser, build)
