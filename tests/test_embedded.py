"""The embedded target, converted from its GGUF, and its data sets. Alone: python -m pytest
tests/test_embedded.py

The first run fetches 90 MB and converts for about 40 s; the result stays in .work/tests of this
project."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny
from eagle3.core import params, sources
from eagle3.prompts import prompts
from eagle3.prompts.chat_template import Renderer
from eagle3.target.model import Target

PARAMS = params.load(tiny.ROOT / "params.yaml")
ENGLISH = (
    "The town lies on a slow river, an hour from the coast by train. Most of its houses were "
    "built between the two "
    "wars, when the paper mill was at its largest and people moved in from the villages around. "
    "Today the mill is a "
    "museum, and many of those who live here work in the city and come home in the evening. On "
    "Saturdays there is a "
    "market on the square in front of the church, where farmers sell vegetables, cheese and "
    "bread. In summer the river "
    "is low enough to walk across, and children build dams of stones that the first storm of "
    "autumn washes away."
)
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "In 2024, 3.14159 x 10^23 = 42",
    "1234567890",
    "a1b22c333",
    " 007 ",
    "don't we'll I'M",
    "über straße",
    "日本語と中文 123",
    "emoji 😀👍🏽 2x",
    "tabs\tand\nnew\n\nlines  \n  x",
    "½ ² ٣ ௧ Ⅷ",
    "a" * 50,
    "def f(x):\n    return x**2 + 10_000\n",
    "\u00a0\u2003wide",
    "!!!???...---",
    "x=1;y=2",
    "https://example.org/?q=1&p=22",
    "CamelCaseWord HTTPServer2",
]


@pytest.fixture(scope="module")
def embedded() -> Target:
    work = tiny.ROOT / ".work/tests/embedded"
    if not (work / "data/target/target.json").exists():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for name in ("params.yaml", "dvc.yaml"):
            shutil.copy(tiny.ROOT / name, work)
        (work / "workflow").symlink_to(tiny.ROOT / "workflow")
        subprocess.run(
            [sys.executable, "workflow/scripts/target.py", "--out", "data/target"],
            cwd=work,
            check=True,
        )
    return Target(work / "data/target")


@pytest.fixture(scope="module")
def model(embedded):
    return embedded.load_model()


@pytest.fixture(scope="module")
def by_hand(embedded):
    """A slow, obvious tokenizer: byte-level BPE from the GGUF's own merges, split as llama.cpp
    splits for `smollm`: every digit by itself, then GPT-2's pattern."""
    import gguf
    import regex

    source = PARAMS.target.source
    here = Path.cwd()
    os.chdir(tiny.ROOT / ".work/tests/embedded")
    try:
        reader = gguf.GGUFReader(
            str(sources.package_file(source.package, source.file, source.sha256))
        )
    finally:
        os.chdir(here)

    def strings(name):
        field = reader.fields[name]
        return [bytes(field.parts[i]).decode() for i in field.data]

    ids = {token: i for i, token in enumerate(strings("tokenizer.ggml.tokens"))}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(strings("tokenizer.ggml.merges"))}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    pattern = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def encode(text):
        found = []
        for piece in regex.split(r"(\p{N})", text):
            for word in pattern.findall(piece):
                parts = [letters[b] for b in word.encode()]
                while len(parts) > 1:
                    rank, place = min(
                        (ranks.get(pair, math.inf), i)
                        for i, pair in enumerate(zip(parts, parts[1:]))
                    )
                    if rank == math.inf:
                        break
                    parts[place : place + 2] = [parts[place] + parts[place + 1]]
                found += [ids[part] for part in parts]
        return found

    return encode


def rows(name):
    dataset = PARAMS.datasets[name]
    here = Path.cwd()
    os.chdir(tiny.ROOT / ".work/tests/embedded")
    try:
        return list(sources.rows(dataset.source))
    finally:
        os.chdir(here)


def test_tokenisation_is_that_of_the_gguf(embedded, by_hand):
    """The digit rule, lost on transformers' way from a GGUF, changes one text in ten."""
    texts = (
        TEXTS
        + [ENGLISH]
        + [
            json.dumps(row, ensure_ascii=False)[:400]
            for name in ("bfcl", "humaneval")
            for _, row in rows(name)[:150]
        ]
    )
    different = [
        text
        for text in texts
        if embedded.tokenizer(text, add_special_tokens=False)["input_ids"] != by_hand(text)
    ]
    assert not different, different[:3]
    assert embedded.tokenizer("2024", add_special_tokens=False)["input_ids"] == by_hand(
        "2"
    ) + by_hand("0") + by_hand("2") + by_hand("4")
    assert embedded.tokenizer.model_max_length == 8192


def test_chat_template_and_special_tokens(embedded):
    """Catalogue B06: one <|im_start|> opens the prompt, none is doubled."""
    renderer, tokenizer = Renderer(embedded), embedded.tokenizer
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (start, end) == (1, 2) and tokenizer.eos_token_id == end and embedded.stop_ids == [2]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q 12"}]
    ids = renderer.prompt_ids(messages)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(start) == 3 and ids.count(end) == 2
    whole = renderer.full_ids([*messages, {"role": "assistant", "content": "a"}])
    assert whole[: len(ids)] == ids and end in whole[len(ids) :]
    assert set(renderer.specials) >= {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}


def test_perplexity_and_a_coherent_answer(embedded, model):
    """What a wrong dequantisation, a wrong RoPE or a wrong tokenizer would spoil at once. Ordinary
    English: about 24."""
    import torch

    ids = torch.tensor([embedded.tokenizer(ENGLISH)["input_ids"]])
    with torch.inference_mode():
        perplexity = math.exp(model(ids, labels=ids).loss)
    assert 12 < perplexity < 36
    prompt = Renderer(embedded).prompt_ids(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=2,
        )
    assert "Paris" in embedded.tokenizer.decode(answer[0, len(prompt) :])


@pytest.mark.parametrize(
    "name, shape", [("alpaca", 1), ("bfcl", 1), ("glaive", 2), ("humaneval", 1), ("sft_demo", 1)]
)
def test_every_embedded_data_set_is_read(embedded, in_tmp, name, shape):
    """Real rows of five shapes; what is rejected is rejected for a named reason, and a raised cap
    keeps what was there."""
    dataset, renderer = PARAMS.datasets[name], Renderer(embedded)
    some = rows(name)[:160]
    small = dataset.model_copy(update={"max_samples": 5})
    large = dataset.model_copy(update={"max_samples": 20})
    kept = {p.id: p for p in prompts.select(some, small, PARAMS.prompts, renderer)[0]}
    more, rejects, stats = prompts.select(some, large, PARAMS.prompts, renderer)
    more = {p.id: p for p in more}
    assert len(kept) == 5 and len(more) == 20 and kept.items() <= more.items()
    assert set(stats["reasons"]) <= {
        "prompt_too_long",
        "special_token_in_text",
        "empty_message",
        "roles_do_not_alternate",
    }
    assert Counter(r["reason"] for r in rejects) == stats["reasons"]
    open_turns = max(sum(m["role"] == "assistant" for m in p.messages) for p in more.values())
    assert open_turns >= shape
    if name in ("glaive", "bfcl"):
        with_tools = [p for p in more.values() if p.tools]
        assert (
            len(with_tools) == 20 if name == "bfcl" else with_tools
        )  # some real glaive rows come without
        for prompt in with_tools:  # the template drops tools, so they are written into the prompt
            assert prompt.tools[0]["function"]["name"] in embedded.tokenizer.decode(
                prompt.prompt_ids
            )
