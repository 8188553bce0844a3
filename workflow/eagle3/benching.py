"""Measuring a drafter against plain decoding on held-out prompts, in process."""

from pathlib import Path
from typing import Any

import torch

from eagle3 import metrics, prompts, records, ttt
from eagle3.capture import TransformersCapture
from eagle3.drafter import Drafter
from eagle3.errors import Refusal
from eagle3.progress import Progress
from eagle3.speculate import Answer, Decoder
from eagle3.target import Target


def held_out(folder: str | Path, limit: int) -> list[dict[str, Any]]:
    """Up to `limit` prompts of the validation split, taken from the data sets in turn, by hash: {"dataset", "id",
    "prompt_ids"}. Raises Refusal if there is none."""
    queues = []
    for name in records.names(folder):
        rows = [r for r in records.read(Path(folder) / f"{name}.parquet", "validation")]
        rows.sort(key=lambda r: prompts.rank(r.id))
        queues.append([{"dataset": name, "id": r.id, "prompt_ids": r.input_ids[: r.loss_mask.index(True)]} for r in rows])
    chosen: list[dict[str, Any]] = []
    for turn in range(max(map(len, queues), default=0)):
        chosen += [queue[turn] for queue in queues if turn < len(queue)]
    if not chosen:
        raise Refusal("no held-out prompts: records.validation_share keeps none; raise it")
    return chosen[:limit]


def refuse_if_leaking(chosen: list[dict[str, Any]], folder: str | Path) -> None:
    """Raises Refusal if a held-out prompt is also the beginning of a training record."""
    wanted = {tuple(row["prompt_ids"]): row for row in chosen}
    lengths = sorted({len(ids) for ids in wanted})
    for name in records.names(folder):
        for record in records.read(Path(folder) / f"{name}.parquet", "train"):
            for length in lengths:
                if row := wanted.get(tuple(record.input_ids[:length])):
                    if record.loss_mask[: length + 1].count(True) <= 1:
                        raise Refusal(f"held-out prompt {row['id']} of {row['dataset']} is also training record "
                                      f"{record.id} of {name}; remove one of the two from its source")


def measure(target: Target, drafter: Drafter, layers: list[int], chosen: list[dict], steps: int, max_new_tokens: int):
    """[{"dataset", "id", "plain": Answer, "speculative": Answer}]. The arms take turns at going first, after one warm-up."""
    model = target.load_model()
    device = model.device
    decoder = Decoder(model, layers, target.stop_ids, drafter.to(device))
    decoder.speculative(chosen[0]["prompt_ids"], 8, steps)
    found = []
    with Progress("bench", len(chosen), "prompts") as bar:
        for place, row in enumerate(chosen):
            arms = {"plain": lambda ids: decoder.plain(ids, max_new_tokens),
                    "speculative": lambda ids: decoder.speculative(ids, max_new_tokens, steps)}
            order = list(arms) if place % 2 == 0 else list(arms)[::-1]
            answers = {name: arms[name](row["prompt_ids"]) for name in order}
            found.append({**row, **answers})
            bar.add(1, tokens=2 * len(answers["plain"].ids))
    return found


@torch.no_grad()
def simulate(target: Target, drafter: Drafter, layers: list[int], found: list[dict], steps: int) -> list[torch.Tensor]:
    """Hits [L, steps] of the answers that were served, from states captured anew."""
    capture = TransformersCapture(target, layers)
    head = target.head().float()
    drafter.to("cpu")
    all_hits = []
    for row in found:
        ids = row["prompt_ids"] + row["plain"].ids
        aux, last = capture.batch([ids])[0]
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[len(row["prompt_ids"]):] = True
        batch = ttt.collate([{"input_ids": torch.tensor(ids), "loss_mask": mask, "aux": aux.float(), "last": last.float(),
                              "id": row["id"]}])
        all_hits.append(ttt.hits(drafter, batch, ttt.target_choices(batch, head), steps))
    return all_hits


def figures(found: list[dict], all_hits: list[torch.Tensor], steps: int) -> dict[str, Any]:
    """All figures of the report for these answers; pooled from the rows, never averaged over averages.

    `accept_length.served` is tokens made by verify cycles / cycles, the bonus token included, between 1 and steps + 1;
    `with_prefill_token` counts the token of the prefill too, as SGLang's completion_tokens / spec_verify_ct does.
    """
    plain: list[Answer] = [row["plain"] for row in found]
    spec: list[Answer] = [row["speculative"] for row in found]
    cycles = sum(len(a.accepted) for a in spec)
    cycle_tokens = sum(len(a.ids) - 1 for a in spec)
    replayed = [metrics.replay(h, steps) for h in all_hits]
    summary = metrics.summarize(torch.cat(all_hits), steps)
    decode = sum(a.seconds for a in plain) / max(1, sum(len(a.ids) - 1 for a in plain))
    cycle = sum(a.seconds for a in spec) / max(1, cycles)
    rates = {name: sum(len(a.ids) for a in arm) / sum(a.seconds + a.prefill_seconds for a in arm)
             for name, arm in (("plain", plain), ("speculative", spec))}
    served = cycle_tokens / max(1, cycles)
    accepted = [sum(1 for a in spec for n in a.accepted if n > k) for k in range(steps)]
    return {
        "prompts": len(found), "tokens": sum(len(a.ids) for a in plain), "verify_cycles": cycles,
        "accept_length": {
            "served": served, "with_prefill_token": sum(len(a.ids) for a in spec) / max(1, cycles),
            "simulated": summary["accept_length"],
            "replayed": sum(t for t, _ in replayed) / max(1, sum(c for _, c in replayed)),
            "break_even": cycle / decode},
        "acceptance": {f"position_{k}": accepted[k] / max(1, cycles) for k in range(steps)},
        "conditional": {f"step_{k}": a for k, a in enumerate(summary["conditional"])},
        "tokens_per_second": rates, "speed_up": rates["speculative"] / rates["plain"],
        "seconds": {"decode_step": decode, "verify_cycle": cycle},
        "greedy_outputs_equal": sum(p.ids == s.ids for p, s in zip(plain, spec)),
    }


def refuse_unless_sound(report: dict[str, Any], minimum: float, max_difference: float, steps: int) -> None:
    """Raises Refusal, saying what to check, when the figures cannot be what a working drafter gives."""
    length = report["accept_length"]
    if report["greedy_outputs_equal"] != report["prompts"]:
        raise Refusal(f"only {report['greedy_outputs_equal']} of {report['prompts']} greedy outputs equal plain decoding's; "
                      "speculation must never change them")
    if not 1 <= length["served"] <= steps + 1:
        raise Refusal(f"served accept length {length['served']:.3f} is outside 1 to {steps + 1}")
    if length["served"] < minimum:
        raise Refusal(
            f"served accept length is {length['served']:.3f}, under bench.min_accept_length {minimum}; check, in this order: "
            "the speculative algorithm is EAGLE3, the captured layer ids, d2t, lm_head, the final norm, more training")
    difference = abs(length["replayed"] / length["served"] - 1)
    if difference > max_difference:
        raise Refusal(
            f"served accept length {length['served']:.3f} and the {length['replayed']:.3f} that the same answers predict "
            f"differ by {difference:.1%}, more than bench.max_difference {max_difference:.0%}; training and serving do not "
            "see the same states: check layers, RoPE and the norm of the last state")
