"""Chain speculative decoding of one request, greedy, with key-value caches: what a server does, in
readable form.

Also plain decoding over the same model calls, so that the two can be compared token for token and
second for second."""

import inspect
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from eagle3.drafter.model import Drafter
from eagle3.target.hooks import decoder_of


@dataclass
class Answer:
    """`ids` with the stop token, if one came; `accepted`: draft tokens accepted and emitted in
    each verify cycle; seconds spent in prefill, in verify cycles (drafting included) or decode
    steps; `last` and `aux` are not kept."""

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: float = 0.0


class CachedAttention:
    """Causal attention of new tokens over all before them. `keep(n)` forgets what lies behind the
    first n tokens."""

    def __init__(self):
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = 0 if self.k is None else len(self.k)
        self.k = k if self.k is None else torch.cat([self.k, k])
        self.v = v if self.v is None else torch.cat([self.v, v])
        group = q.shape[1] // k.shape[1]
        keys, values = (
            x.repeat_interleave(group, 1).transpose(0, 1) for x in (self.k, self.v)
        )  # [heads, T, d]
        seen = torch.ones(len(q), len(self.k), dtype=torch.bool, device=q.device).tril(before)
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, attn_mask=seen
        )
        return out.transpose(0, 1)

    def keep(self, length: int) -> None:
        self.k, self.v = self.k[:length], self.v[:length]


class Decoder:
    """A target model and, for speculation, a drafter whose states are the inputs of `layers`."""

    def __init__(
        self, model, layers: list[int], stop_ids: list[int], drafter: Drafter | None = None
    ):
        self.model, self.layers, self.stop_ids, self.drafter = model, layers, set(stop_ids), drafter
        self.captured: dict[int, Tensor] = {}
        # transformers has renamed it and warns of the older name, which is the only one that older
        # models' own code knows.
        self.cache_name = (
            "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        )
        decoder, _ = decoder_of(model)
        for layer in layers:
            decoder[layer].register_forward_pre_hook(self._keep(layer), with_kwargs=True)

    def _keep(self, layer: int):
        def hook(module, inputs, kwargs):
            self.captured[layer] = inputs[0] if inputs else kwargs["hidden_states"]

        return hook

    def _forward(
        self, ids: list[int], cache: DynamicCache, keep: int = 0
    ) -> tuple[list[int], Tensor | None]:
        """(likeliest next tokens, aux [n, 3H]) for new tokens; `keep=1` gives the next token of the
        last one only. Without layers, aux is None."""
        output = self.model(
            input_ids=torch.tensor([ids], device=self.model.device),
            use_cache=True,
            logits_to_keep=keep,
            **{self.cache_name: cache},
        )
        aux = (
            torch.cat([self.captured[layer] for layer in self.layers], dim=-1)[0]
            if self.layers
            else None
        )
        return output.logits[0].argmax(-1).tolist(), aux

    @torch.inference_mode()
    def plain(self, prompt: list[int], max_new_tokens: int) -> Answer:
        """One token per forward pass."""
        answer, cache = Answer(), DynamicCache()
        start = time.perf_counter()
        token = self._forward(prompt, cache, keep=1)[0][-1]
        answer.prefill_seconds = time.perf_counter() - start
        answer.ids.append(token)
        start = time.perf_counter()
        while token not in self.stop_ids and len(answer.ids) < max_new_tokens:
            token = self._forward([token], cache)[0][-1]
            answer.ids.append(token)
        answer.seconds = time.perf_counter() - start
        return answer

    @torch.inference_mode()
    def speculative(self, prompt: list[int], max_new_tokens: int, steps: int) -> Answer:
        """`steps` tokens drafted, then all verified in one forward pass; the target's own next
        token comes as a bonus."""
        answer, cache, attend = Answer(), DynamicCache(), CachedAttention()
        start = time.perf_counter()
        following, aux = self._forward(prompt, cache, keep=1)
        token = following[-1]
        answer.prefill_seconds = time.perf_counter() - start
        answer.ids.append(token)
        start = time.perf_counter()
        tokens, length = (
            [*prompt[1:], token],
            len(prompt),
        )  # position t of the drafter reads token t + 1
        while token not in self.stop_ids and len(answer.ids) < max_new_tokens:
            drafted = self._draft(aux, tokens, length - len(tokens), attend, steps)
            following, aux = self._forward([token, *drafted], cache)
            accepted = 0
            while accepted < steps and drafted[accepted] == following[accepted]:
                accepted += 1
            tokens = [*drafted[:accepted], following[accepted]]
            aux = aux[: accepted + 1]
            attend.keep(length)
            if accepted < steps:
                cache.crop(accepted - steps)  # forgets the rejected ones
            length += accepted + 1
            emitted = self._take(answer, tokens, max_new_tokens)
            token = answer.ids[-1]
            # Drafts behind a stop token or the limit are emitted by nobody and count nowhere.
            answer.accepted.append(min(accepted, emitted))
        answer.seconds = time.perf_counter() - start
        return answer

    def _take(self, answer: Answer, tokens: list[int], max_new_tokens: int) -> int:
        """Adds tokens up to a stop token or the limit; returns how many."""
        before = len(answer.ids)
        for token in tokens:
            answer.ids.append(token)
            if token in self.stop_ids or len(answer.ids) == max_new_tokens:
                break
        return len(answer.ids) - before

    def _draft(
        self, aux: Tensor, tokens: list[int], start: int, attend: CachedAttention, steps: int
    ) -> list[int]:
        """Drafts `steps` tokens after `tokens`, whose positions in the drafter begin at `start`."""
        drafter, device = self.drafter, aux.device
        positions = torch.arange(start, start + len(tokens), device=device)
        state = drafter.fuse(aux.to(drafter.fc.weight.dtype))
        state = drafter.step(torch.tensor(tokens, device=device), state, positions, attend)[-1:]
        drafted = []
        for step in range(steps):
            if step:
                position = torch.tensor([start + len(tokens) - 1 + step], device=device)
                state = drafter.step(
                    torch.tensor([drafted[-1]], device=device), state, position, attend
                )
            drafted.append(drafter.draft_ids[drafter.logits(state).argmax(-1)].item())
        return drafted
