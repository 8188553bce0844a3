"""The doctor's look at a drafter's tensors: names and shapes, draft vocabulary, embedding."""

import torch

from eagle3.commands.findings import BAD, GOOD, WARNING, Finding
from eagle3.core.errors import UserError
from eagle3.drafter import published
from eagle3.drafter.export import expected_shapes
from eagle3.target.model import Target

OPTIONAL = {"embed_tokens.weight", "t2d"}
ROUNDING = 2**-7  # of a row, relative: what storing the target's embedding in bf16 changes


def names_and_shapes(tensors: dict[str, torch.Tensor], config: dict) -> list[Finding]:
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - tensors.keys() - OPTIONAL)
    if config["draft_vocab_size"] == config["vocab_size"]:
        missing = [name for name in missing if name != "d2t"]
    unknown = sorted(tensors.keys() - expected.keys() - OPTIONAL)
    found = []
    if missing:
        found.append(
            Finding(
                "tensors",
                BAD,
                f"{', '.join(missing)} missing; SGLang would leave them random without a word",
                "export them; a head left out by accident is the commonest case",
            )
        )
    if unknown:
        found.append(
            Finding(
                "tensors",
                BAD if missing else WARNING,
                f"{', '.join(unknown)} unknown; SGLang would skip them",
                f"rename them to {', '.join(missing)}"
                if missing
                else "drop them, or find out what trained with them",
            )
        )
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            found.append(_wrong_shape(name, tuple(tensors[name].shape), shape))
    whole = [n for n, t in tensors.items() if n.endswith("weight") and not t.is_floating_point()]
    if broken := [*published.broken(tensors), *(f"{n} holds whole numbers" for n in whole)]:
        found.append(Finding("tensors", BAD, "; ".join(broken), "take an earlier checkpoint"))
    return found or [
        Finding(
            "tensors", GOOD, f"all {len(expected)} names and shapes are as the engine loads them"
        )
    ]


def _wrong_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> Finding:
    what = f"{name} is {found} instead of {wanted}"
    if name == "fc.weight":
        return Finding(
            "tensors",
            BAD,
            f"{what}: fc must read three captured states, 3 x {wanted[0]} wide",
            "a square fc is EAGLE-2's: train with three captured layers",
        )
    return Finding(
        "tensors", BAD, what, "the configuration and the weights are of different drafters"
    )


def vocabulary(tensors: dict[str, torch.Tensor], config: dict, target: Target) -> list[Finding]:
    subject = "draft vocabulary"
    draft, full = config["draft_vocab_size"], target.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and draft == full:
        return [Finding(subject, GOOD, "the drafter has the target's whole vocabulary")]
    if d2t is None:
        return [
            Finding(
                subject,
                BAD,
                f"{draft} draft tokens and no d2t: draft id i would be taken for target "
                f"id i, so only the first {draft} ids could ever be drafted",
                "export d2t (target id minus draft id)",
            )
        ]
    try:
        ids = published.draft_ids(d2t, full)
    except UserError as error:
        return [Finding(subject, BAD, str(error), "take the map of its training")]
    found = []
    if draft < full and bool((d2t == 0).all()):
        found.append(
            Finding(
                subject,
                WARNING,
                f"d2t is all zeros: the draft vocabulary is the first {draft} ids",
                "a map was never computed; the most frequent tokens of the training answers "
                "cover far more",
            )
        )
    if t2d is not None and not (
        t2d.dtype == torch.bool and torch.equal(t2d.nonzero().flatten(), ids)
    ):
        found.append(
            Finding(
                subject,
                BAD,
                f"d2t names {len(ids)} target ids, t2d marks {int(t2d.bool().sum())}, "
                "and they are not the same ones",
                "take both from one build",
            )
        )
    lost = [i for i in target.stop_ids if i not in set(ids.tolist())]
    if lost:
        found.append(
            Finding(
                subject,
                WARNING,
                f"the stop tokens {lost} are outside it, so the end of an answer is never drafted",
                "build it with all special and byte tokens",
            )
        )
    return found or [
        Finding(subject, GOOD, f"d2t maps {len(ids)} draft ids to rising target ids, t2d agrees")
    ]


def embedding(tensors: dict[str, torch.Tensor], target: Target) -> Finding:
    own = tensors.get("embed_tokens.weight")
    if own is None:
        return Finding(
            "embedding",
            GOOD,
            "none in the file: SGLang shares the target's (vLLM needs it in the file)",
        )
    wanted = target.embedding()
    if own.shape == wanted.shape:
        # Row by row, since the rows of rare tokens are far smaller than those of frequent ones.
        gap = (own.float() - wanted.float()).norm(dim=1)
        if bool((gap <= ROUNDING * wanted.float().norm(dim=1)).all()):
            return Finding("embedding", GOOD, "the file's is the target's")
        differing = f"{int((gap > ROUNDING * wanted.float().norm(dim=1)).sum())} of its rows differ"
    else:
        differing = f"it is {list(own.shape)}, the target's {list(wanted.shape)}"
    return Finding(
        "embedding",
        WARNING,
        f"the file's differs from the target's ({differing}): SGLang overwrites it, another "
        "engine would use it",
        "leave it out, unless the drafter was trained with it",
    )
