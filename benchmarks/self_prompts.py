"""Prompts by the target itself: sampled continuations of an open user turn, for studies that need more prompts than
packages ship.

    python benchmarks/self_prompts.py --url http://127.0.0.1:30000 --target /models/target --count 40000 --out prompts.jsonl

Writes {"prompt": text} lines, distinct, stripped, 8 to 600 characters long. The server must be SGLang's.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

MARK = "HERE-STANDS-THE-PROMPT"


def opening(tokenizer) -> list[int]:
    """Ids of everything that the chat template writes before a user's text."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before = text.partition(MARK)[0]
    return tokenizer(before, add_special_tokens=False)["input_ids"]


async def sample(url: str, ids: list[int], count: int, batch: int) -> list[str]:
    """`count` sampled texts."""
    found: list[str] = []

    async def one(session, size):
        body = {"input_ids": [ids] * size, "sampling_params": {"temperature": 1.0, "top_p": 0.98, "max_new_tokens": 96}}
        async with session.post(f"{url}/generate", json=body) as answer:
            answer.raise_for_status()
            found.extend(row["text"] for row in await answer.json()
                         if row["meta_info"]["finish_reason"]["type"] == "stop")

    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        # A few large requests at a time keep the server full without one response of gigabytes.
        for _ in range(0, count, 8 * batch):
            await asyncio.gather(*(one(session, batch) for _ in range(8)))
    return found


def usable(texts: list[str]) -> list[str]:
    kept = dict.fromkeys(text.strip() for text in texts)
    return [text for text in kept if 8 <= len(text) <= 600 and "<|" not in text]


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--target", required=True)
    parser.add_argument("--count", type=int, default=40000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    ids = opening(AutoTokenizer.from_pretrained(arguments.target))
    started = time.monotonic()
    prompts = usable(asyncio.run(sample(arguments.url, ids, arguments.count, arguments.batch)))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in prompts)
    print(f"{len(prompts)} prompts in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
