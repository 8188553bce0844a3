"""Whether SGLang will use a drafter rightly, from its files and the target's alone; for ours and
for published ones.

SGLang skips tensors that it does not know, leaves missing ones random, and falls back to defaults,
all in silence: a drafter that is not right serves, and accepts nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3.bench.speculation import ALGORITHMS
from eagle3.commands import doctor_config, doctor_tensors
from eagle3.commands.findings import BAD, GOOD, WARNING, Finding
from eagle3.core.errors import UserError
from eagle3.drafter import export, published
from eagle3.target.model import Target

__all__ = ["BAD", "GOOD", "WARNING", "Finding", "examine"]


def examine(folder: str | Path, target: Target) -> list[Finding]:
    """All findings about the drafter in `folder` for `target`, in the order in which to mend them.
    Raises UserError if the folder has no readable config.json."""
    folder = Path(folder)
    config = published.read_config(folder)
    findings = [_algorithm(config)]
    try:
        tensors = published.read_tensors(folder)
    except UserError as error:
        reason, _, remedy = str(error).rpartition("; ")
        return [*findings, Finding("weights", BAD, reason or remedy, remedy or "copy it again")]
    if wrong := published.wrong_fields(config):
        remedy = "copy them from the config.json of its training"
        return [*findings, Finding("sizes", BAD, "; ".join(wrong), remedy)]
    sizes = _sizes(config, target)
    findings += sizes
    if all(finding.verdict != BAD for finding in sizes):
        findings += _guarded("tensors", lambda: doctor_tensors.names_and_shapes(tensors, config))
    told = (folder / "training.json").exists()
    for subject, examination in (
        ("draft vocabulary", lambda: doctor_tensors.vocabulary(tensors, config, target)),
        ("embedding", lambda: [doctor_tensors.embedding(tensors, target)]),
        ("layer ids", lambda: [doctor_config.layer_ids(config, target, told)]),
        ("RoPE", lambda: doctor_config.rotary(config, target)),
        ("context", lambda: [doctor_config.context(config, target)]),
        ("dtype", lambda: [_dtype(tensors, config, target)]),
        ("training", lambda: _training(folder, config, tensors, target)),
    ):
        findings += _guarded(subject, examination)
    return findings


def _guarded(subject: str, examination: Callable[[], list[Finding]]) -> list[Finding]:
    """What an examination refuses, or a file holds that nobody thought of, is a verdict as well."""
    try:
        return examination()
    except UserError as error:
        return [Finding(subject, BAD, str(error), "write what it was trained with")]
    except Exception as error:
        reason = f"it cannot be judged ({type(error).__name__}: {error})"
        return [Finding(subject, BAD, reason, "compare the files with docs/drafter.md")]


def _algorithm(config: dict) -> Finding:
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    algorithm = ALGORITHMS.get(architecture) if isinstance(architecture, str) else None
    if algorithm:
        return Finding(
            "flag",
            GOOD,
            f"{architecture} is served with --speculative-algorithm {algorithm}; with EAGLE it "
            "would start, capture no states and accept nothing",
        )
    return Finding(
        "flag",
        BAD,
        f"config.json names the architecture {architecture!r}; known: {', '.join(ALGORITHMS)}",
        "if it is an EAGLE-3 drafter of one Llama layer, set architectures to "
        f"{list(ALGORITHMS)}; other layouts (EAGLE-2, MLA layers) need another engine class and "
        "are not judged here",
    )


def _sizes(config: dict, target: Target) -> list[Finding]:
    found = [
        Finding(
            "sizes",
            BAD,
            f"{key} is {config[key]}, the target's {target.config[key]}",
            "this drafter belongs to another target",
        )
        for key in ("hidden_size", "vocab_size")
        if config[key] != target.config[key]
    ]
    if odd := published.odd_switches(config):
        found.append(
            Finding(
                "sizes",
                WARNING,
                f"{'; '.join(odd)}: SGLang builds another layer than the plain one",
                "write the plain values, unless it was trained as such a layer",
            )
        )
    return found or [Finding("sizes", GOOD, "hidden size and vocabulary are the target's")]


def _training(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], target: Target
) -> list[Finding]:
    """Against training.json, which this project writes beside its drafters; without one, whether
    the layer is one that this project would build for the target."""
    if (folder / "training.json").exists():
        try:
            export.check_as_trained(folder, config)
        except UserError as error:
            return [
                Finding("training", BAD, str(error), "take config.json and weights of one training")
            ]
        return [Finding("training", GOOD, "config.json and weights are those of training.json")]
    own = {key: target.config.get(key) for key in ("rms_norm_eps",)}
    differing = [
        f"{key} {config.get(key)!r} instead of {value!r}"
        for key, value in own.items()
        if value is not None and config.get(key) != value
    ]
    head_dim = target.config.get("head_dim")
    if head_dim and not target.config.get("kv_lora_rank") and config["head_dim"] != head_dim:
        differing.append(f"head_dim {config['head_dim']} instead of {head_dim}")
    if differing:
        return [
            Finding(
                "training",
                WARNING,
                f"{'; '.join(differing)} (the target's), and no training.json says that it was "
                "trained so",
                "compare with the configuration of its training",
            )
        ]
    return []


def _dtype(tensors: dict[str, torch.Tensor], config: dict[str, Any], target: Target) -> Finding:
    stored = sorted(
        {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}
    )
    named = str(config.get("torch_dtype") or config.get("dtype") or "none").removeprefix("torch.")
    wanted = target.info["dtype"]
    if wanted == "auto":
        wanted = str(target.config.get("dtype") or target.config.get("torch_dtype")).removeprefix(
            "torch."
        )
    if named != wanted:
        return Finding(
            "dtype",
            BAD,
            f"config.json says {named}, the target is {wanted}; kernels reject mixed types while "
            "graphs are captured",
            f"export in {wanted}, or serve with --dtype {wanted}",
        )
    if stored != [named]:
        return Finding(
            "dtype",
            WARNING,
            f"the weights are stored as {', '.join(stored)}, config.json says {named}",
            f"they are cast on loading; export in {named} to be sure of what is served",
        )
    return Finding("dtype", GOOD, f"{named}, as the target")
