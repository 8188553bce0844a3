"""Small real drafters for the tiny target: random ones, and one that has learnt a few answers by
heart."""

from pathlib import Path
from types import SimpleNamespace

import torch
from eagle3.bench.speculate import Decoder
from eagle3.core.files import write_json
from eagle3.drafter import export, ttt
from eagle3.drafter import model as drafters
from eagle3.records import draft_vocab as vocab
from eagle3.records import records
from eagle3.target import layers
from eagle3.target.hooks import Replica
from eagle3.target.model import Target, describe

SETTINGS = SimpleNamespace(
    dtype="float32",
    quantization=None,
    kv_cache_dtype="auto",
    context_length=256,
    chat_template_kwargs={},
    template_date="2025-01-01",
    trust_remote_code=False,
)


def make_target(folder: Path, model: Path) -> Target:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "target.json", describe(model, SETTINGS, outside=True))
    return Target(folder)


def random_drafter(
    target: Target, seed: int = 0, draft_ids: list[int] | None = None
) -> drafters.Drafter:
    """An untrained drafter with the target's shapes. `draft_ids`: target ids of its vocabulary;
    default 300 of them."""
    draft_ids = draft_ids or [*range(100), *range(150, 350)]
    tensors = vocab.tensors(draft_ids, target.vocab_size)
    ids = layers.config_ids(layers.captured_layers(target.num_layers), layers.PLUS_ONE)
    config = drafters.drafter_config(target.config, {}, len(draft_ids), ids, "float32")
    made = drafters.Drafter(config, target.embedding().float(), tensors["d2t"], tensors["t2d"])
    return made.initialise(target.head().float(), seed).eval()


def prompts(count: int, length: int = 12, vocab_size: int = 400, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(10, vocab_size, (length + i % 3,), generator=generator).tolist()
        for i in range(count)
    ]


def greedy_answers(target: Target, asked: list[list[int]], tokens: int) -> list[list[int]]:
    """The target's own greedy answers, a plain loop without a cache: the independent reference."""
    model, answers = target.load_model(), []
    with torch.no_grad():
        for prompt in asked:
            ids = list(prompt)
            while len(ids) < len(prompt) + tokens:
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
                if ids[-1] in target.stop_ids:
                    break
            answers.append(ids[len(prompt) :])
    return answers


def overfit_drafter(
    target: Target,
    asked: list[list[int]],
    answers: list[list[int]],
    steps: int = 3,
    updates: int = 180,
) -> drafters.Drafter:
    """A drafter that has learnt these answers."""
    made = random_drafter(target, draft_ids=list(range(target.vocab_size))).train()
    captured = layers.captured_layers(target.num_layers)
    replica = Replica(target.load_model(), captured, target.hidden_size)
    states = [
        (torch.cat(aux, -1), last.clone())
        for aux, last in (replica.states([p + a]) for p, a in zip(asked, answers))
    ]
    rows = [
        {
            "input_ids": torch.tensor(p + a),
            "loss_mask": torch.tensor([False] * len(p) + [True] * len(a)),
            "aux": aux.float(),
            "last": last.float(),
            "id": str(i),
        }
        for i, (p, a, (aux, last)) in enumerate(zip(asked, answers, states))
    ]
    batch, head = ttt.collate(rows), target.head().float()
    optimizer = torch.optim.AdamW(made.parameters(), lr=2e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2e-2, total_steps=updates, pct_start=0.07
    )
    for _ in range(updates):
        loss, _ = ttt.loss(made, batch, head, steps, 0.9)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return made.eval()


def save(drafter: drafters.Drafter, folder: Path, **training) -> Path:
    """The folder as SGLang loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    export.write(folder, drafter.state_dict(), drafter.config)
    if training:
        write_json(folder / "training.json", training)
    return folder


def write_records(
    folder: Path, name: str, asked: list[list[int]], answers: list[list[int]], split: str
) -> Path:
    """A records file of one split."""
    from collections import Counter

    rows = [
        records.Record(f"{name}{i}", p + a, [False] * len(p) + [True] * len(a), split)
        for i, (p, a) in enumerate(zip(asked, answers))
    ]
    stats = Counter(
        tokens=sum(len(r.input_ids) for r in rows), supervised=sum(sum(r.loss_mask) for r in rows)
    )
    limits = SimpleNamespace(min_supervised_share=0, max_supervised_share=1)
    records.write(folder / f"{name}.parquet", rows, stats, limits, True)
    return folder / f"{name}.parquet"


def decoder(target: Target, drafter=None) -> Decoder:
    captured = layers.captured_layers(target.num_layers) if drafter is not None else []
    return Decoder(target.load_model(), captured, target.stop_ids, drafter)
