"""The embedded engine draws from the target's own distribution, whatever its generation_config.json
says. Alone: python -m pytest tests/responses/test_transformers_engine.py"""

import json
import random
import shutil
from collections import Counter

import extraction_project
import pytest
import torch
from eagle3.core import schema
from eagle3.responses.engines import Request
from eagle3.responses.transformers_engine import TransformersEngine
from eagle3.target.model import Target

# What files of published models hold, and what a user may have put there; stop ids stay.
FILLED_IN = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 12,
    "min_length": 40,
    "suppress_tokens": list(range(3, 200)),
    "begin_suppress_tokens": list(range(200, 390)),
    "bad_words_ids": [[300]],
    "forced_eos_token_id": 395,
    "encoder_repetition_penalty": 2.0,
    "do_sample": True,
    "temperature": 5.0,
    "top_k": 2,
    "top_p": 0.1,
    "min_p": 0.5,
}


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory) -> Target:
    folder = tmp_path_factory.mktemp("penalized")
    shutil.copytree(tiny_model, folder / "model")
    path = folder / "model/generation_config.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **FILLED_IN}))
    return Target(extraction_project.describe_target(folder / "target", folder / "model"))


def requests(count: int, new: int, same: bool = False) -> list[Request]:
    made = []
    for n in range(count):
        chooser = random.Random(0 if same else n)
        ids = [chooser.randrange(3, 390) for _ in range(chooser.randrange(4, 12))]
        made.append(Request(f"r{n}", 0, f"{n:032x}", ids, new, n))
    return made


def answers(target: Target, asked: list[Request], **sampling) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    engine = TransformersEngine(target, schema.Sampling(**sampling), 64)
    with engine:
        engine.run(iter(asked), lambda r: found.update({r.request.row_id: r.output_ids}))
    return found


@torch.no_grad()
def test_greedy_answers_are_plain_argmax(target):
    asked = requests(10, 24)
    model = target.load_model()
    expected = {}
    for request in asked:
        ids = list(request.prompt_ids)
        while len(ids) < len(request.prompt_ids) + 24:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in target.stop_ids:
                break
        expected[request.row_id] = ids[len(request.prompt_ids) :]
    assert any(len(set(ids)) < len(ids) for ids in expected.values())  # a penalty would show
    assert answers(target, asked, max_new_tokens=24) == expected


@torch.no_grad()
def test_a_temperature_is_what_it_says(target):
    """Total variation between 600 draws and softmax(logits / temperature) of the five likeliest."""
    asked = requests(600, 1, same=True)
    logits = target.load_model()(torch.tensor([asked[0].prompt_ids])).logits[0, -1]
    values, ids = logits.topk(5)
    wanted = dict(zip(ids.tolist(), (values / 0.05).softmax(-1).tolist()))
    drawn = answers(target, asked, max_new_tokens=1, temperature=0.05, top_k=5)
    counted = Counter(answer[0] for answer in drawn.values())
    assert max(wanted.values()) < 0.9 and counted.keys() <= wanted.keys()
    distance = sum(abs(counted[i] / 600 - share) for i, share in wanted.items()) / 2
    assert distance < 0.06
