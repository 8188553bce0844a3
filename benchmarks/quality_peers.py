"""What a recipe makes of the same shards in the same number of updates: SpecForge's model, loss and optimizer, and ours.

    PYTHONPATH=workflow:benchmarks:FOLDER python benchmarks/quality_peers.py --updates 300

FOLDER holds the unpacked wheel specforge-0.2.0. Run it in a built project: it reads data/target, data/vocab and
data/hidden_states, and `train` of params.yaml for what is not the recipe: shape, steps, batches, learning rate, type. All arms
see the same records in the same order, padded where the recipe pads, and are judged by the same validation records at the
same updates; the best state of each counts. Arms:

    specforge       its initial weights, loss, mask and optimizer as they are, in fp32 on a CPU and bf16 on a GPU
    ours            train.init random
    ours, fitted    train.init least_squares
"""

import argparse
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from eagle3 import drafter as drafters
from eagle3 import layers, metrics, parallel, shards, vocab, warm_start
from eagle3 import params as parameters
from eagle3.checkpoints import Checkpoints
from eagle3.files import digest_of, write_json
from eagle3.objective import Objective
from eagle3.packing import packed_epoch
from eagle3.target import Target
from eagle3.trainer import Trainer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Data:
    """What every arm starts from: target, shards, draft vocabulary and the drafter's configuration."""

    def __init__(self, options: argparse.Namespace):
        self.full = parameters.load(options.params)
        self.params = self.full.train.model_copy(update={"max_updates": options.updates, "validate_every": options.every})
        self.target = Target(options.target)
        folders = [options.hidden_states / name for name in sorted(self.full.datasets)]
        first = shards.read_manifest(folders[0])
        self.train, self.validation = (shards.ShardSet(folders, split, {}) for split in ("train", "validation"))
        per_epoch = len(packed_epoch(self.train.lengths, self.params.batch_tokens, self.params.seed, 0))
        self.params = self.params.model_copy(update={"epochs": options.updates // max(1, per_epoch - 1) + 1})
        self.d2t, self.t2d = vocab.read(options.vocab)
        self.config = drafters.drafter_config(
            self.target.config, self.params.architecture.model_dump(), len(self.d2t),
            layers.config_ids(first["layers"], first["convention"]), "float32")
        self.head = self.target.head().to(getattr(torch, self.params.dtype))

    def drafter(self) -> drafters.Drafter:
        made = drafters.Drafter(self.config, self.target.embedding().to(self.head.dtype), self.d2t, self.t2d)
        return made.initialise(self.head.float(), self.params.seed)

    def plan(self) -> list[list[int]]:
        """Records of every update: those of our own training."""
        epochs = (packed_epoch(self.train.lengths, self.params.batch_tokens, self.params.seed, epoch)
                  for epoch in range(self.params.epochs))
        return [batch for epoch in epochs for batch in epoch][: self.params.max_updates]


def ours(data: Data, work: Path, init: str) -> list[dict]:
    """Validations by update."""
    params = data.params.model_copy(update={"init": init})
    drafter = data.drafter()
    start = warm_start.weights(drafter, params, data.train, print)
    checkpoints = Checkpoints(work / digest_of(init), {"benchmark": init, **params.model_dump()}, 1)
    return Trainer(drafter, data.head, data.train, data.validation, params, data.full.runtime, checkpoints, print, start).run().history


def specforge(data: Data) -> list[dict]:
    """The same of SpecForge's training."""
    from train_peers import load
    from transformers import LlamaConfig

    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "rms_norm_eps", "rope_parameters", "max_position_embeddings")
    config = LlamaConfig(**{k: data.config[k] for k in kept}, num_hidden_layers=1, pad_token_id=0)
    config.draft_vocab_size = len(data.d2t)
    backend = "flex_attention" if DEVICE.type == "cuda" else "sdpa"
    compute = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    torch.manual_seed(data.params.seed)
    draft = load("specforge.modeling.draft.llama3_eagle").LlamaForCausalLMEagle3(config, attention_backend=backend)
    draft.t2d.copy_(data.t2d)
    draft.d2t.copy_(data.d2t)
    draft.embed_tokens.weight.data.copy_(data.target.embedding())
    draft.embed_tokens.weight.requires_grad_(False)
    draft = draft.to(DEVICE, compute)
    model = load("specforge.algorithms.eagle3.model")
    if DEVICE.type == "cpu":  # its kernel needs a GPU; beside it stands the same in plain PyTorch
        model.LogSoftmaxLoss = SimpleNamespace(apply=load("specforge.core.loss")._compute_loss)
    whole = model.OnlineEagle3Model(draft, length=data.params.steps, attention_backend=backend).to(DEVICE)
    plan = data.plan()
    optimizer = load("specforge.optimizer").BF16Optimizer(draft, lr=data.params.lr, total_steps=len(plan))
    head, judge, history = data.head.to(DEVICE, compute), Judge(data), []
    for update, indices in enumerate(plan):
        if update % data.params.validate_every == 0:
            history.append({"update": update, "accept_length": judge(draft)})
        losses = whole(**padded([data.train[i] for i in indices], compute), target=None, target_head_weight=head)[0]
        sum(0.8**k * loss for k, loss in enumerate(losses)).backward()
        optimizer.step()
    return [*history, {"update": len(plan), "accept_length": judge(draft)}]


def padded(rows: list[dict], compute: torch.dtype) -> dict[str, torch.Tensor]:
    """A batch as SpecForge's collator and target head make it: ids and states of the target moved left by one, the mask not
    moved, its last position off."""
    length = max(len(row["input_ids"]) for row in rows)

    def stack(values: list[torch.Tensor], left: int) -> torch.Tensor:
        out = torch.zeros(len(values), length, *values[0].shape[1:], dtype=values[0].dtype)
        for place, value in enumerate(values):
            out[place, : len(value) - left] = value[left:]
        return out.to(DEVICE)

    masks = [row["loss_mask"].long() for row in rows]
    for mask in masks:
        mask[-1] = 0
    return {"input_ids": stack([row["input_ids"].long() for row in rows], 1),
            "attention_mask": stack([torch.ones_like(mask) for mask in masks], 0),
            "loss_mask": stack(masks, 0).unsqueeze(-1),
            "hidden_states": stack([row["aux"].to(compute) for row in rows], 0),
            "target_hidden_for_compact": stack([row["last"].to(compute) for row in rows], 1)}


class Judge:
    """Simulated accept length of a peer's weights, measured by the trainer's own validation."""

    def __init__(self, data: Data):
        self.data, self.drafter = data, data.drafter()
        self.objective = Objective(self.drafter, data.head, data.params).to(DEVICE)

    def __call__(self, draft: torch.nn.Module) -> float:
        names = dict(self.drafter.named_parameters())
        parallel.load_weights(self.drafter, {name: tensor.float() for name, tensor in draft.state_dict().items() if name in names})
        found = []
        for group in packed_epoch(self.data.validation.lengths, self.data.params.batch_tokens, 0, 0):
            batch, _ = self.objective.prepare([self.data.validation[i] for i in group], self.data.params.steps, pin=False)
            if batch is not None:
                found.append(self.objective.hits(batch.to(DEVICE)).cpu())
        return metrics.summarize(torch.cat(found))["accept_length"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="updates between validations")
    parser.add_argument("--arms", nargs="+", default=["specforge", "ours", "ours, fitted"])
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    parser.add_argument("--vocab", type=Path, default=Path("data/vocab/draft_vocab.safetensors"))
    parser.add_argument("--hidden-states", type=Path, default=Path("data/hidden_states"))
    parser.add_argument("--work", type=Path, default=Path(".work/quality_peers"))
    options = parser.parse_args()
    data, found = Data(options), {}
    for arm in options.arms:
        if arm == "specforge":
            found[arm] = specforge(data)
        else:
            found[arm] = ours(data, options.work, "least_squares" if arm.endswith("fitted") else "random")
    write_json(Path(os.environ.get("OUT", options.work)) / "quality_peers.json", found)
    updates = sorted({row["update"] for history in found.values() for row in history})
    print(f"\n{len(data.train)} records, {sum(data.train.lengths):,} tokens, {data.params.steps} steps, {options.updates} updates")
    print("arm           " + "".join(f"{update:>8}" for update in updates) + "    best")
    for arm, history in found.items():
        lengths = {row["update"]: row["accept_length"] for row in history}
        print(f"{arm:14}" + "".join(f"{lengths[u]:8.3f}" if u in lengths else " " * 8 for u in updates)
              + f"{max(lengths.values()):8.3f}")


if __name__ == "__main__":
    main()
