"""Accept length by update of several ways to train on the same shards: settings, amounts of data,
and SpecForge's recipe.

    PYTHONPATH=workflow:benchmarks:FOLDER python benchmarks/quality.py --arm
    fitted:init=least_squares \
        --arm "a quarter:init=least_squares,share=0.25" --arm specforge:recipe=specforge

Run it in a built project: it reads data/target, data/vocab and data/hidden_states, and `train` of
params.yaml for what an arm does not name. All arms see the records in the same order and are judged
by the same validation records; the best state of each counts. An arm is NAME:key=value,…, where a
key is one of section `train` (architecture.intermediate_size, say, for one of a section of its
own), or

    share=0.25          a quarter of the training records vocab=FILE          another draft
    vocabulary states=FOLDER       training states from another folder (the validation states stay)
    recipe=specforge    SpecForge's own initial weights, model, loss, mask and optimizer, in bf16 on
    a GPU, fp32 on a CPU;
                        FOLDER on PYTHONPATH holds the unpacked wheel specforge-0.2.0

With --export each of our drafters goes to EXPORT/NAME, as stage `train` writes it.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow/scripts"))

import torch
import train as stage
import yaml
from eagle3.core import params as parameters
from eagle3.core.files import digest_of, read_json, write_json
from eagle3.core.schema import Train
from eagle3.drafter import acceptance as metrics
from eagle3.drafter import model as drafters
from eagle3.hidden_states import shards
from eagle3.records import draft_vocab as vocab
from eagle3.target import layers
from eagle3.target.model import Target
from eagle3.training import parallel, warm_start
from eagle3.training.checkpoints import Checkpoints
from eagle3.training.objective import Objective
from eagle3.training.packing import packed_epoch
from eagle3.training.trainer import Trainer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEPT = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
)


class Arm:
    """What an arm starts from: target, shards, draft vocabulary, the drafter's configuration and
    its settings."""

    def __init__(self, options: argparse.Namespace, text: str):
        self.name, _, settings = text.partition(":")
        found = dict(part.split("=", 1) for part in settings.split(",") if part)
        self.recipe, share = found.pop("recipe", "ours"), float(found.pop("share", 1))
        states = Path(found.pop("states", options.hidden_states))
        vocabulary = Path(found.pop("vocab", options.vocab))
        self.full = parameters.load(options.params)
        own = {
            **self.full.train.model_dump(),
            "max_updates": options.updates,
            "validate_every": options.every,
        }
        for key, value in found.items():
            section, _, name = key.rpartition(".")
            (own[section] if section else own)[name] = yaml.safe_load(value)
        params = Train(**own)
        self.target, names = Target(options.target), sorted(self.full.datasets)
        self.train = shards.ShardSet([states / name for name in names], "train", {}, verify=False)
        self.validation = shards.ShardSet(
            [options.hidden_states / name for name in names], "validation", {}, verify=False
        )
        some = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))[
            : round(share * len(self.train))
        ]
        for field in ("places", "lengths"):
            setattr(
                self.train, field, [getattr(self.train, field)[i] for i in sorted(some.tolist())]
            )
        per_epoch = (
            len(packed_epoch(self.train.lengths, params.batch_tokens, params.seed, 0))
            / params.micro_batches
        )
        self.params = params.model_copy(
            update={"epochs": int(params.max_updates // max(per_epoch - 1, 1)) + 1}
        )
        self.d2t, self.t2d = vocab.read(vocabulary)
        first = shards.read_manifest(options.hidden_states / names[0])
        self.config = drafters.drafter_config(
            self.target.config,
            params.architecture.model_dump(),
            len(self.d2t),
            layers.config_ids(first["layers"], first["convention"]),
            stage.target_dtype(self.target),
        )
        self.head = self.target.head().to(getattr(torch, params.dtype))

    def drafter(self) -> drafters.Drafter:
        made = drafters.Drafter(
            self.config, self.target.embedding().to(self.head.dtype), self.d2t, self.t2d
        )
        return made.initialise(self.head.float(), self.params.seed)

    def plan(self) -> list[list[int]]:
        """Records of every update: those of our own training."""
        epochs = (
            packed_epoch(self.train.lengths, self.params.batch_tokens, self.params.seed, epoch)
            for epoch in range(self.params.epochs)
        )
        return [batch for epoch in epochs for batch in epoch][: self.params.max_updates]


def ours(arm: Arm, work: Path, export: Path | None) -> list[dict]:
    """Validations by update."""
    drafter = arm.drafter()
    start = warm_start.weights(drafter, arm.params, arm.train, print)
    identity = {
        "params": arm.params.model_dump(),
        "hidden_states": {
            "all": {
                "rows": len(arm.train) + len(arm.validation),
                "tokens": sum(arm.train.lengths) + sum(arm.validation.lengths),
            }
        },
    }
    checkpoints = Checkpoints(work / digest_of(arm.name), {"arm": arm.name, **identity}, 1)
    runtime = arm.full.runtime.model_copy(update={"checkpoint_every": arm.params.max_updates})
    done = Trainer(
        drafter, arm.head, arm.train, arm.validation, arm.params, runtime, checkpoints, print, start
    ).run()
    if export:
        stage.write(
            export / arm.name.replace(" ", "-"),
            done,
            arm.config,
            identity,
            {"torch": torch.__version__},
        )
    return done.history


def specforge(arm: Arm) -> list[dict]:
    """The same of SpecForge's training."""
    from train_peers import load
    from transformers import LlamaConfig

    config = LlamaConfig(**{k: arm.config[k] for k in KEPT}, num_hidden_layers=1, pad_token_id=0)
    config.draft_vocab_size = len(arm.d2t)
    backend = "flex_attention" if DEVICE.type == "cuda" else "sdpa"
    compute = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    torch.manual_seed(arm.params.seed)
    draft = load("specforge.modeling.draft.llama3_eagle").LlamaForCausalLMEagle3(
        config, attention_backend=backend
    )
    draft.t2d.copy_(arm.t2d)
    draft.d2t.copy_(arm.d2t)
    draft.embed_tokens.weight.data.copy_(arm.target.embedding())
    draft.embed_tokens.weight.requires_grad_(False)
    draft = draft.to(DEVICE, compute)
    model = load("specforge.algorithms.eagle3.model")
    if DEVICE.type == "cpu":  # its kernel needs a GPU; beside it stands the same in plain PyTorch
        model.LogSoftmaxLoss = SimpleNamespace(apply=load("specforge.core.loss")._compute_loss)
    whole = model.OnlineEagle3Model(draft, length=arm.params.steps, attention_backend=backend).to(
        DEVICE
    )
    plan = arm.plan()
    optimizer = load("specforge.optimizer").BF16Optimizer(
        draft, lr=arm.params.lr, total_steps=len(plan)
    )
    head, judge, history, started = arm.head.to(DEVICE, compute), Judge(arm), [], time.monotonic()
    longest = -(-max(arm.train.lengths) // 128) * 128
    for update, indices in enumerate(plan):
        if update % arm.params.validate_every == 0:
            history.append({"update": update, "accept_length": judge(draft)})
            print(
                f"update {update} of {len(plan)}, {history[-1]['accept_length']:.3f}, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
        batch = padded(
            [arm.train[i] for i in indices], compute, longest if DEVICE.type == "cuda" else None
        )
        losses = whole(**batch, target=None, target_head_weight=head)[0]
        sum(0.8**k * loss for k, loss in enumerate(losses)).backward()
        optimizer.step()
    return [*history, {"update": len(plan), "accept_length": judge(draft)}]


def padded(rows: list[dict], compute: torch.dtype, length: int | None) -> dict[str, torch.Tensor]:
    """A batch as SpecForge's collator and target head make it: ids and states of the target moved
    left by one, the mask not moved, its last position off. `length`: of all batches, and sequences
    of nothing up to a multiple of 16, so that its kernels are compiled for few shapes."""
    count = -(-len(rows) // 16) * 16 if length else len(rows)
    length = length or max(len(row["input_ids"]) for row in rows)

    def stack(values: list[torch.Tensor], left: int, empty: int = 0) -> torch.Tensor:
        out = torch.zeros(count, length, *values[0].shape[1:], dtype=values[0].dtype)
        out[len(values) :] = empty
        for place, value in enumerate(values):
            out[place, : len(value) - left] = value[left:]
        return out.to(DEVICE)

    masks = [row["loss_mask"].long() for row in rows]
    for mask in masks:
        mask[-1] = 0
    return {
        "input_ids": stack([row["input_ids"].long() for row in rows], 1),
        "attention_mask": stack([torch.ones_like(mask) for mask in masks], 0, empty=1),
        "loss_mask": stack(masks, 0).unsqueeze(-1),
        "hidden_states": stack([row["aux"].to(compute) for row in rows], 0),
        "target_hidden_for_compact": stack([row["last"].to(compute) for row in rows], 1),
    }


class Judge:
    """Simulated accept length of a peer's weights, measured as the trainer's own validation
    does."""

    def __init__(self, arm: Arm):
        self.arm, self.drafter = arm, arm.drafter()
        self.objective = Objective(self.drafter, arm.head, arm.params, arm.target.softcap).to(
            DEVICE
        )

    def __call__(self, draft: torch.nn.Module) -> float:
        names = dict(self.drafter.named_parameters())
        parallel.load_weights(
            self.drafter,
            {name: tensor.float() for name, tensor in draft.state_dict().items() if name in names},
        )
        data, found = self.arm.validation, []
        for group in packed_epoch(data.lengths, self.arm.params.batch_tokens, 0, 0):
            batch, _ = self.objective.prepare(
                [data[i] for i in group], self.arm.params.steps, pin=False
            )
            if batch is not None:
                found.append(self.objective.hits(batch.to(DEVICE)).cpu())
        return metrics.summarize(torch.cat(found))["accept_length"]


def one(options: argparse.Namespace, text: str) -> None:
    """Trains an arm in this process and leaves WORK/NAME.json."""
    arm, started = Arm(options, text), time.monotonic()
    history = (
        specforge(arm) if arm.recipe == "specforge" else ours(arm, options.work, options.export)
    )
    write_json(
        options.work / f"{arm.name}.json",
        {
            "arm": text,
            "records": len(arm.train),
            "tokens": sum(arm.train.lengths),
            "seconds": time.monotonic() - started,
            "params": arm.params.model_dump(),
            "history": history,
        },
    )


def start(options: argparse.Namespace, text: str, gpus: list[str]) -> None:
    """An arm in a process of its own, on one of the GPUs that are free; its output goes to
    WORK/NAME.log."""
    name, gpu = text.partition(":")[0], gpus.pop() if gpus else None
    passed = [
        part
        for key in (
            "updates",
            "every",
            "params",
            "target",
            "vocab",
            "hidden_states",
            "work",
            "export",
        )
        if getattr(options, key) is not None
        for part in (f"--{key.replace('_', '-')}", str(getattr(options, key)))
    ]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})}
    print(f"{name} starts" + (f" on GPU {gpu}" if gpu is not None else ""), flush=True)
    with open(options.work / f"{name}.log", "w") as log:
        code = subprocess.run(
            [sys.executable, __file__, "--one", text, *passed],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode
    if gpu is not None:
        gpus.append(gpu)
    if code:
        print(f"{name} failed:\n{(options.work / f'{name}.log').read_text()[-2000:]}", flush=True)
    else:
        found = read_json(options.work / f"{name}.json")
        best = max(row["accept_length"] for row in found["history"])
        print(f"{name}: {best:.3f} at best, {found['seconds']:.0f} s", flush=True)


def table(options: argparse.Namespace) -> None:
    """Prints all arms and writes quality.json."""
    names = [text.partition(":")[0] for text in options.arm]
    found = {
        name: read_json(options.work / f"{name}.json")
        for name in names
        if (options.work / f"{name}.json").exists()
    }
    write_json(options.out / "quality.json", found)
    updates = sorted({row["update"] for one in found.values() for row in one["history"]})
    shown = (
        updates
        if len(updates) <= 12
        else sorted({updates[len(updates) * i // 11 - (i == 11)] for i in range(12)})
    )
    print(
        f"\n{'arm':24}{'records':>9}{'tokens':>12}"
        + "".join(f"{update:>8}" for update in shown)
        + "    best"
    )
    for name, one in found.items():
        lengths = {row["update"]: row["accept_length"] for row in one["history"]}
        print(
            f"{name:24}{one['records']:9,}{one['tokens']:12,}"
            + "".join(f"{lengths[u]:8.3f}" if u in lengths else " " * 8 for u in shown)
            + f"{max(lengths.values()):8.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", action="append", default=[], metavar="NAME:key=value,…")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="updates between validations")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="arms that train beside each other, spread over --gpus",
    )
    parser.add_argument("--gpus", default="", help="for example 0,1")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--vocab", type=Path, default=Path("data/vocab/draft_vocab.safetensors"))
    parser.add_argument("--hidden-states", type=Path, default=Path("data/hidden_states"))
    parser.add_argument("--work", type=Path, default=Path(".work/quality"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".work/quality")))
    parser.add_argument("--export", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.one:
        return one(options, options.one)
    gpus = [gpu for gpu in options.gpus.split(",") if gpu]
    places = (gpus * options.at_once)[: options.at_once][::-1]
    with ThreadPoolExecutor(options.at_once) as pool:
        done = [pool.submit(start, options, text, places) for text in options.arm]
        for future in done:
            future.result()
    table(options)


if __name__ == "__main__":
    main()
