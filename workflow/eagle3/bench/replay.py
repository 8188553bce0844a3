"""What a drafter must do on answers that were served, from states of the target captured anew."""

import contextlib
from dataclasses import dataclass

import torch

from eagle3.bench.figures import Simulated, common_prefix
from eagle3.core.progress import Progress
from eagle3.drafter import acceptance as metrics
from eagle3.drafter import ttt
from eagle3.drafter.model import Drafter
from eagle3.target.hooks import Replica
from eagle3.target.model import Target


@dataclass
class Answered:
    """A prompt and its served answer; `other`: what the other arm said, if it differs."""

    prompt_ids: list[int]
    ids: list[int]
    other: list[int] | None = None


class Simulator:
    """Holds the target's capture and the drafter on one device; bf16 products on a GPU, as a server
    computes."""

    def __init__(
        self, target: Target, drafter: Drafter, layers: list[int], batch_tokens: int = 4096
    ):
        self.replica = Replica(target.load_model(), layers, target.hidden_size)
        self.device = self.replica.model.device
        self.drafter, self.batch_tokens = drafter.to(self.device), batch_tokens
        self.head, self.softcap = target.head().to(self.device), target.softcap

    @torch.no_grad()
    def hits(self, answers: list[Answered], steps: int) -> tuple[list[torch.Tensor], list[float]]:
        """(hits [L, steps] int8 of each answer, in order; logit gaps of the answers with an
        `other`).

        A hit is a draft that equals the token that was served: greedy verification accepts exactly
        those. The first token of an answer comes from the prefill and is never drafted, so it is
        not supervised here. A gap says by how much the target's logit for the served token exceeds
        that for the other arm's token where the two first differ."""
        order = sorted(
            range(len(answers)), key=lambda i: len(answers[i].prompt_ids) + len(answers[i].ids)
        )
        found: dict[int, torch.Tensor] = {}
        gaps: list[float] = []
        with Progress("simulate", len(answers), "answers") as bar:
            for group in _groups(order, answers, self.batch_tokens):
                batch = self._batch([answers[i] for i in group])
                with self._compute():
                    hits = ttt.hits(self.drafter, batch, batch.ids, steps).cpu()
                for i, a, b in zip(group, batch.offsets, batch.offsets[1:]):
                    found[i] = hits[a:b]
                    if answers[i].other is not None:
                        gaps += self._gap(answers[i], batch.last[a:b])
                bar.add(len(group))
        return [found[i] for i in range(len(answers))], gaps

    def _batch(self, answers: list[Answered]) -> ttt.Batch:
        ids = [answer.prompt_ids + answer.ids for answer in answers]
        aux, last = self.replica.states(ids)
        parts = [len(sequence) for sequence in ids]
        rows = []
        for answer, sequence, own_aux, own_last in zip(
            answers, ids, torch.cat(aux, dim=-1).split(parts), last.split(parts)
        ):
            mask = torch.zeros(len(sequence), dtype=torch.bool, device=self.device)
            mask[len(answer.prompt_ids) + 1 :] = True
            rows.append(
                {
                    "input_ids": torch.tensor(sequence, device=self.device),
                    "loss_mask": mask,
                    "aux": own_aux,
                    "last": own_last,
                    "id": "",
                }
            )
        return ttt.collate(rows).to(self.device)

    def _gap(self, answer: Answered, last: torch.Tensor) -> list[float]:
        place = common_prefix(answer.ids, answer.other)
        if place >= min(len(answer.ids), len(answer.other)):
            return []
        state = last[len(answer.prompt_ids) + place - 1].to(self.head)
        logits = self.head[[answer.ids[place], answer.other[place]]] @ state
        served, other = ttt.softcapped(logits, self.softcap).tolist()
        return [served - other]

    def _compute(self):
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()


def _groups(order: list[int], answers: list[Answered], batch_tokens: int):
    """Runs of `order` (rising lengths) whose padded size stays under `batch_tokens`; at least one
    answer each."""
    group: list[int] = []
    for i in order:
        length = len(answers[i].prompt_ids) + len(answers[i].ids)
        if group and (len(group) + 1) * length > batch_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def summary(hits: list[torch.Tensor], answers: list[Answered], steps: int) -> Simulated:
    """The figures of these answers for a chain of `steps`. Walking them counts as a server does:
    the prefill's token is one of the completion tokens, and what a last cycle drafts beyond the end
    of the answer is not."""
    averaged = metrics.summarize(torch.cat(hits), steps)
    walked = [metrics.replay(h, steps) for h in hits]
    return Simulated(
        averaged["accept_length"],
        sum(len(a.ids) for a in answers),
        sum(cycles for _, cycles in walked),
        averaged["conditional"],
    )
