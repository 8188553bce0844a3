"""Answers in process through transformers: batches of similar length, every row with its own random
draws."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from eagle3.responses.engines import Request, Result
from eagle3.target.model import Target

WINDOW = 8  # batches that are sorted by length together


class RowSampling(transformers.LogitsProcessor):
    """Sampling whose draws depend on a row's own seed and position only, not on its batch.

    Adding Gumbel noise to log-probabilities and taking the largest draws from the distribution
    (Gumbel-max), so greedy search over these scores samples."""

    def __init__(self, seeds: list[int], sampling, prompt_length: int):
        self.seeds, self.prompt_length = seeds, prompt_length
        self.warpers = [transformers.TemperatureLogitsWarper(float(sampling.temperature))]
        if sampling.top_k:
            self.warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(transformers.TopPLogitsWarper(sampling.top_p))

    def __call__(self, input_ids, scores):  # [B, L], [B, V]
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        position = input_ids.shape[1] - self.prompt_length
        noise = torch.empty(scores.shape, dtype=torch.float32)
        for row, seed in enumerate(self.seeds):
            generator = torch.Generator().manual_seed(
                (seed + 0x9E3779B97F4A7C15 * (position + 1)) % 2**63
            )
            noise[row].exponential_(generator=generator)
        return scores.log_softmax(-1) - noise.log().to(scores.device)


class TransformersEngine:
    """The target in this process, on the GPU if there is one."""

    def __init__(self, target: Target, sampling, batch_size: int):
        self.target, self.sampling, self.batch_size = target, sampling, batch_size
        self.model = None

    def __enter__(self) -> dict[str, Any]:
        self.model = self.target.load_model()
        # What the request does not say is filled in from here: penalties, suppressed and forced
        # tokens, and whatever else generation_config.json holds would change the answers.
        self.model.generation_config = transformers.GenerationConfig()
        return {
            "engine": "transformers",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "device": self.model.device.type,
        }

    def __exit__(self, *_) -> None:
        self.model = None

    def run(
        self, requests: Iterator[Request], on_result: Callable[[Result], Request | None]
    ) -> None:
        waiting: list[Request] = []
        requests = iter(requests)
        while True:
            waiting += itertools.islice(requests, max(0, WINDOW * self.batch_size - len(waiting)))
            if not waiting:
                return
            waiting.sort(key=lambda request: len(request.prompt_ids))
            batch, waiting = waiting[-self.batch_size :], waiting[: -self.batch_size]
            for result in self._answer(batch):
                if following := on_result(result):
                    waiting.append(following)

    @torch.inference_mode()
    def _answer(self, batch: list[Request]) -> list[Result]:
        longest = max(len(request.prompt_ids) for request in batch)
        pad = self.target.stop_ids[0]
        ids = torch.full((len(batch), longest), pad)
        attention = torch.zeros_like(ids)
        for row, request in enumerate(
            batch
        ):  # padding on the left, so that all answers begin at one place
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            attention[row, longest - len(request.prompt_ids) :] = 1
        processors = transformers.LogitsProcessorList()
        if self.sampling.temperature > 0:
            processors.append(
                RowSampling([request.seed for request in batch], self.sampling, longest)
            )
        output = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=attention.to(self.model.device),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=max(request.max_new_tokens for request in batch),
                eos_token_id=self.target.stop_ids,
                pad_token_id=pad,
            ),
            logits_processor=processors,
        )
        return [
            self._cut(request, answer)
            for request, answer in zip(batch, output[:, longest:].tolist())
        ]

    def _cut(self, request: Request, ids: list[int]) -> Result:
        ids = ids[: request.max_new_tokens]
        for place, token in enumerate(ids):
            if token in self.target.stop_ids:
                return Result(request, ids[: place + 1], "stop")
        return Result(request, ids, "length")
