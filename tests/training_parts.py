"""Small real parts of training: a random drafter, shards on disk, a trainer."""

from pathlib import Path

import torch
from eagle3.capture.offload import states_to_store
from eagle3.core.schema import Runtime, Train
from eagle3.drafter import model as drafters
from eagle3.hidden_states import shards
from eagle3.hidden_states.shards import ShardSet, ShardWriter
from eagle3.records import draft_vocab as vocab
from eagle3.records.records import Record
from eagle3.training.checkpoints import Checkpoints
from eagle3.training.trainer import Trainer

SHAPE = {
    "hidden_size": 16,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rope_theta": 50.0,
}
DRAFT = 20


def make_drafter(
    seed: int = 0, spread: float = 0.3, **shape
) -> tuple[drafters.Drafter, torch.Tensor]:
    """(drafter with weights well away from zero, the target's head [V, H])."""
    shape = {**SHAPE, **shape}
    generator = torch.Generator().manual_seed(seed)
    config = drafters.drafter_config(shape, {}, DRAFT, [1, 2, 3], "float32")
    ids = sorted(torch.randperm(shape["vocab_size"], generator=generator)[:DRAFT].tolist())
    maps = vocab.tensors(ids, shape["vocab_size"])
    embedding, head = (
        torch.randn(shape["vocab_size"], shape["hidden_size"], generator=generator)
        for _ in range(2)
    )
    made = drafters.Drafter(config, embedding, maps["d2t"], maps["t2d"]).initialise(head, seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return made, head


def make_row(name: str, mask: list[bool], seed: int, size: int = 16, vocab_size: int = 40) -> dict:
    """A random sequence as a ShardSet gives it."""
    generator, length = torch.Generator().manual_seed(seed), len(mask)
    return {
        "id": name,
        "input_ids": torch.randint(vocab_size, (length,), generator=generator),
        "loss_mask": torch.tensor(mask),
        "aux": torch.randn(length, 3 * size, generator=generator),
        "last": torch.randn(length, size, generator=generator),
    }


def rows() -> list[dict]:
    """Sequences of every kind: an answer, all supervised, two turns with a gap, none supervised,
    too short to draft."""
    masks = [
        [False] * 4 + [True] * 5,
        [True] * 6,
        [False] * 2 + [True] * 2 + [False] * 9 + [True] * 3 + [False] * 2,
        [False] * 5,
        [False, True],
        [False, False, True],
    ]
    return [make_row(f"row-{i}", mask, i) for i, mask in enumerate(masks)]


def write_shards(folder: Path, found: list[dict], validation: int = 2) -> Path:
    """A data set's folder; the last `validation` rows are held out."""
    folder.mkdir(parents=True)
    records = [
        Record(
            id=row["id"],
            input_ids=row["input_ids"].tolist(),
            loss_mask=row["loss_mask"].tolist(),
            split="validation" if i >= len(found) - validation else "train",
        )
        for i, row in enumerate(found)
    ]
    writer = ShardWriter(folder, "shard", records, found[0]["last"].shape[1], "float32")
    for i, row in enumerate(found):
        stored = states_to_store(list(row["aux"].chunk(3, -1)), row["last"], "float32")
        stored["bad"].zero_()  # what is broken is let through here, and must be found by training
        writer.write(i, stored, 0, len(row["last"]))
    shards.write_manifest(folder, {}, [writer.finish()])
    return folder


def make_trainer(
    folder: Path,
    data: Path,
    log=lambda text: None,
    start=None,
    runtime: dict | None = None,
    **params,
):
    """A trainer on shards in `data`, its checkpoints in `folder`."""
    drafter, head = make_drafter(spread=0.0)
    settings = Train(
        **{
            "steps": 2,
            "epochs": 3,
            "batch_tokens": 24,
            "dtype": "float32",
            "lr": 1e-2,
            "fc_steps": "by_size",
            **params,
        }
    )
    around = Runtime(**{"checkpoint_every": 1, "loader_threads": 1, **(runtime or {})})
    checkpoints = Checkpoints(folder, {"params": settings.model_dump()}, around.keep_checkpoints)
    return Trainer(
        drafter,
        head,
        ShardSet([data], "train", {}),
        ShardSet([data], "validation", {}),
        settings,
        around,
        checkpoints,
        log,
        start,
    )


def many_rows(count: int = 10) -> list[dict]:
    return [make_row(f"r{i}", [False] * 3 + [True] * (4 + i % 4), 100 + i) for i in range(count)]
