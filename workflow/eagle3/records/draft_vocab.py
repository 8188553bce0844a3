"""data/vocab/draft_vocab.safetensors: which target tokens the drafter can propose; written by
vocab, read by train.

`d2t` int64 [D]: target id minus draft id. `t2d` bool [V]: whether a target token is in the draft
vocabulary. Draft ids rise with target ids, so the two say the same and each can be checked against
the other."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle3.core.errors import UserError
from eagle3.core.files import replacing


def required_ids(tokenizer, stop_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Ids that are always in: special and stop tokens, and the single bytes from which any text can
    be spelled."""
    ids = set(stop_ids) | set(tokenizer.all_special_ids)
    ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for i, token in enumerate(
        tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, len(tokenizer)))))
    ):
        if token and (len(token) == 1 or (len(token) == 6 and token.startswith("<0x"))):
            ids.add(i)
    return sorted(i for i in ids if i < vocab_size)


def choose(counts: Counter, required: list[int], size: int, vocab_size: int) -> list[int]:
    """Target ids of the draft vocabulary, rising. Most frequent first, ties by id, topped up with
    the lowest unused ids where fewer than `size` tokens occur. Raises UserError if `size` is
    impossible."""
    if size > vocab_size:
        raise UserError(
            f"vocab.size is {size}, more than the target's vocabulary of {vocab_size}; lower "
            "vocab.size"
        )
    if len(required) > size:
        raise UserError(
            f"vocab.size is {size}, but {len(required)} special, stop and byte tokens must be in "
            "it; raise it"
        )
    chosen = dict.fromkeys(required)
    by_frequency = sorted(counts, key=lambda i: (-counts[i], i))
    for candidates in (by_frequency, range(vocab_size)):
        for i in candidates:
            if len(chosen) == size:
                break
            chosen.setdefault(i)
    return sorted(chosen)


def tensors(ids: list[int], vocab_size: int) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of the chosen target ids."""
    ids_tensor = torch.tensor(ids, dtype=torch.int64)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids_tensor] = True
    return {"d2t": ids_tensor - torch.arange(len(ids)), "t2d": t2d}


def check_consistent(d2t: torch.Tensor, t2d: torch.Tensor) -> torch.Tensor:
    """The target ids [D] that both tensors name. Raises UserError if they disagree or are out of
    range.

    A map that holds absolute ids instead of offsets, or repeats ids, serves without any error and
    drafts nonsense."""
    ids = d2t + torch.arange(len(d2t))
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise UserError(f"d2t is {d2t.dtype} and t2d {t2d.dtype}, not int64 and bool")
    if (
        len(ids) == 0
        or ids.min() < 0
        or ids.max() >= len(t2d)
        or not bool((ids[1:] > ids[:-1]).all())
    ):
        raise UserError(
            "d2t plus draft id does not rise within the target's vocabulary; d2t holds offsets, "
            "not ids"
        )
    if not torch.equal(ids, t2d.nonzero().flatten()):
        raise UserError(
            f"d2t names {len(ids)} target ids, t2d marks {int(t2d.sum())} others; both must come "
            "from one build"
        )
    return ids


def write(path: str | Path, ids: list[int], vocab_size: int) -> None:
    with replacing(path) as temporary:
        save_file(tensors(ids, vocab_size), temporary)


def read(path: str | Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(`d2t`, `t2d`), checked."""
    found = load_file(path)
    check_consistent(found["d2t"], found["t2d"])
    return found["d2t"], found["t2d"]
