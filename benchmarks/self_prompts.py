"""Prompts by the target itself: sampled continuations of an open user turn, for studies that need
more prompts than packages ship.

    python benchmarks/self_prompts.py --target /models/target --count 20000 --out prompts.jsonl

Writes {"prompt": text} lines: distinct, finished by the model, 8 to 600 characters long. Runs in
process on the GPU."""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MARK = "HERE-STANDS-THE-PROMPT"


def opening(tokenizer) -> list[int]:
    """Ids of everything that the chat template writes before a user's text."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    return tokenizer(text.partition(MARK)[0], add_special_tokens=False)["input_ids"]


def usable(texts: list[str]) -> list[str]:
    kept = dict.fromkeys(text.strip() for text in texts)
    return [text for text in kept if 8 <= len(text) <= 600 and "<|" not in text]


@torch.inference_mode()
def sample(model, tokenizer, count: int, batch: int, max_new_tokens: int) -> list[str]:
    """About `count` texts that end with the model's own end of turn."""
    ids = torch.tensor([opening(tokenizer)] * batch, device=model.device)
    found: list[str] = []
    while len(found) < count:
        answers = model.generate(
            ids,
            do_sample=True,
            temperature=1.0,
            top_p=0.98,
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )[:, ids.shape[1] :]
        ended = [row for row in answers.tolist() if row[-1] == tokenizer.eos_token_id]
        found += tokenizer.batch_decode(ended, skip_special_tokens=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype="auto").to(device).eval()
    started = time.monotonic()
    prompts = usable(
        sample(model, tokenizer, arguments.count, arguments.batch, arguments.max_new_tokens)
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in prompts)
    print(f"{len(prompts)} prompts in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
