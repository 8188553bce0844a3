"""train: trains the drafter on the hidden states and exports it for SGLang."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import csv
import shutil
import subprocess
from pathlib import Path

import torch
import transformers

from eagle3 import drafter as drafters
from eagle3 import export, layers, shards, vocab
from eagle3.checkpoints import Checkpoints
from eagle3.errors import Refusal
from eagle3.files import digest_file, read_json, replacing, write_json
from eagle3.stage import Stage, main, running
from eagle3.target import Target
from eagle3.trainer import Progressed, Trainer

KEPT = ("target_digest", "hidden_size", "layers", "convention", "last_is", "dtype", "tokenizer_digest", "records_digest",
        "tokens", "rows", "engine")


def build(arguments: argparse.Namespace) -> None:
    inputs = [arguments.target, arguments.vocab, arguments.hidden_states]
    with running("train", arguments.params, inputs) as stage:
        params, target = stage.params.train, Target(arguments.target)
        names = sorted(read_json(arguments.vocab.with_suffix(".json"))["datasets"])
        remove_orphans(stage, arguments.hidden_states, names)
        folders = [arguments.hidden_states / name for name in names]
        first = shards.read_manifest(folders[0])
        expected = {"target_digest": target.digest, "hidden_size": target.hidden_size,
                    **{key: first[key] for key in ("layers", "convention", "last_is", "dtype")}}
        train = shards.ShardSet(folders, "train", expected)
        validation = shards.ShardSet(folders, "validation", expected, verify=False)
        d2t, t2d = vocab.read(arguments.vocab)
        dtype = target_dtype(target)
        config = drafters.drafter_config(target.config, params.architecture.model_dump(), len(d2t),
                                         layers.config_ids(first["layers"], first["convention"]), dtype)
        identity = {"params": params.model_dump(), "config": config, "vocab": digest_file(arguments.vocab),
                    "hidden_states": {n: {k: m.get(k) for k in KEPT} for n, m in train.manifests.items()}}
        checkpoints = Checkpoints(stage.work, identity, stage.params.runtime.keep_checkpoints)
        head = target.head().float()
        drafter = drafters.Drafter(config, target.embedding().float(), d2t, t2d).initialise(head, params.seed)
        stage.say(f"{len(train)} training and {len(validation)} validation sequences, {sum(train.lengths):,} tokens, "
                  f"{sum(p.numel() for p in drafter.parameters()):,} weights")
        trainer = Trainer(drafter, head, train, validation, params, stage.params.runtime, checkpoints, stage.say)
        made_with = origin(stage.work, fresh=checkpoints.latest() is None)
        done = trainer.run()
        write(arguments.out, done, config, identity, made_with)
        stage.say(f"accept length {done.history[0]['accept_length']:.3f} untrained, {done.best_length:.3f} at update "
                  f"{done.best_update} of {done.update} ({params.steps} steps, simulated)")


def target_dtype(target: Target) -> str:
    """The target's compute type by name; the drafter must be served in the same."""
    dtype = target.info["dtype"]
    if dtype == "auto":
        dtype = target.config.get("dtype") or target.config.get("torch_dtype")
    if dtype is None:
        raise Refusal("the target's config.json names no dtype; set target.dtype in params.yaml")
    return str(dtype).removeprefix("torch.")


def origin(work: Path, fresh: bool) -> dict[str, str]:
    """Code and versions at the first update. They are kept with the checkpoints, so that exporting the same weights
    again writes the same bytes."""
    path = work / "origin.json"
    if fresh or not path.exists():
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        write_json(path, {"git_commit": git.stdout.strip(), "torch": torch.__version__,
                          "transformers": transformers.__version__})
    return read_json(path)


def write(out: Path, done: Progressed, config: dict, identity: dict, made_with: dict) -> None:
    """The whole folder: weights, config.json, training.json, metrics.json, curves.csv."""
    with replacing(out) as folder:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        export.write(folder, done.best, config)
        best = next(row for row in done.history if row["update"] == done.best_update)
        write_json(folder / "metrics.json", {
            "accept_length": best["accept_length"], "accept_length_untrained": done.history[0]["accept_length"],
            "accuracy": {f"step_{k}": best[f"accuracy_{k}"] for k in range(identity["params"]["steps"])},
            "conditional": {f"step_{k}": best[f"conditional_{k}"] for k in range(identity["params"]["steps"])},
            "best_update": done.best_update, "updates": done.update})
        write_json(folder / "training.json", {**identity, "made_with": made_with})
        with open(folder / "curves.csv", "w", newline="") as file:
            rows = csv.DictWriter(file, list(done.history[0]), lineterminator="\n")
            rows.writeheader()
            rows.writerows(done.history)


def remove_orphans(stage: Stage, folder: Path, names: list[str]) -> None:
    """Removes states of data sets that the draft vocabulary was not made from: they left params.yaml."""
    for name in set(shards.names(folder)) - set(names):
        shutil.rmtree(folder / name)
        stage.say(f"removed {folder / name}: {name} is no longer in params.yaml")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--vocab", type=Path, default=Path("data/vocab/draft_vocab.safetensors"))
    parser.add_argument("--hidden-states", type=Path, default=Path("data/hidden_states"))
    parser.add_argument("--out", type=Path, default=Path("data/drafter"))
    main(parser, build)
