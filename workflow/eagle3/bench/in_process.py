"""Measuring a drafter against plain decoding in process, one request at a time."""

import torch

from eagle3.bench.figures import Served
from eagle3.bench.speculate import Answer, Decoder
from eagle3.bench.statistics import Measured, Prompt, Variant
from eagle3.core.progress import Progress
from eagle3.drafter.model import Drafter
from eagle3.target.model import Target

WARM_UP_TOKENS = 8


@torch.inference_mode()
def measure(
    target: Target,
    drafter: Drafter,
    layers: list[int],
    prompts: list[Prompt],
    variant: Variant,
    max_new_tokens: int,
    repeats: int = 1,
) -> Measured:
    """Both arms over `prompts`, after the same warm-up of each. The arms take turns at going
    first, prompt by prompt, and every second repeat turns both round."""
    model = target.load_model()
    decoder = Decoder(model, layers, target.stop_ids, drafter.to(model.device))
    # What the first run of an arm costs (allocations, kernels) must weigh on neither.
    decoder.plain(prompts[0]["prompt_ids"], WARM_UP_TOKENS)
    decoder.speculative(prompts[0]["prompt_ids"], WARM_UP_TOKENS, variant.steps)
    measured = Measured()
    arms = [measured.arm(None, 1), measured.arm(variant.name, 1)]
    with Progress("bench", repeats * len(prompts), "prompts") as bar:
        for repeat in range(repeats):
            for place, prompt in enumerate(prompts[:: -1 if repeat % 2 else 1]):
                for arm in (0, 1) if (place + repeat) % 2 == 0 else (1, 0):
                    if arm:
                        answer = decoder.speculative(
                            prompt["prompt_ids"], max_new_tokens, variant.steps
                        )
                    else:
                        answer = decoder.plain(prompt["prompt_ids"], max_new_tokens)
                    arms[arm].rows.append(
                        row_of(prompt, answer, repeat, variant.steps if arm else 0)
                    )
                bar.add(1, tokens=len(arms[0].rows[-1].ids) + len(arms[1].rows[-1].ids))
    for arm in arms:
        arm.streamed = (
            arm.rows
        )  # the loop knows when the prefill ended, so no run of its own is needed
        arm.walls = {
            r: sum(row.seconds for row in arm.rows if row.repeat == r) for r in range(repeats)
        }
    return measured


def row_of(prompt: Prompt, answer: Answer, repeat: int, steps: int) -> Served:
    accepted = [0] * (steps + 1 if answer.accepted else 0)
    for count in answer.accepted:
        accepted[count] += 1
    return Served(
        prompt["dataset"],
        prompt["id"],
        repeat,
        answer.ids,
        answer.prefill_seconds + answer.seconds,
        answer.prefill_seconds,
        len(answer.accepted),
        accepted,
    )
