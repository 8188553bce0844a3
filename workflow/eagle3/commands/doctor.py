"""Whether SGLang will use a drafter rightly, from its files and the target's alone; for ours and
for published ones.

SGLang skips tensors that it does not know, leaves missing ones random, and falls back to defaults,
all in silence: a drafter that is not right serves, and accepts nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3.bench.speculation import ALGORITHMS
from eagle3.core.errors import UserError
from eagle3.core.files import read_json
from eagle3.drafter.export import expected_shapes
from eagle3.drafter.rope import rope_parameters
from eagle3.target import layers
from eagle3.target.model import Target

BAD, WARNING, GOOD = "wrong", "look", "fine"
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class Finding:
    """`verdict` of one examination: wrong (it will not work), look (it may not), fine. `remedy` is
    empty if fine."""

    subject: str
    verdict: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:5}  {self.subject}: {self.reason}" + (
            f"\n       -> {self.remedy}" if self.remedy else ""
        )


def examine(folder: str | Path, target: Target) -> list[Finding]:
    """All findings about the drafter in `folder` for `target`, in the order in which to mend them.
    Raises UserError if the folder has no readable config.json."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    findings = [_algorithm(config)]
    tensors, unreadable = _open(folder)
    if unreadable:
        return [*findings, unreadable]
    config = {**config, "head_dim": config.get("head_dim") or _head_dim(config)}
    findings += _sizes(config, target)
    if not any(f.verdict == BAD and f.subject == "sizes" for f in findings):
        findings += _names_and_shapes(tensors, config)
    findings += _vocabulary(tensors, config, target)
    findings += [
        _embedding(tensors, target),
        _layer_ids(config, target),
        _rope(config, target),
        _context(config, target),
        _dtype(tensors, config, target),
    ]
    return findings


def _head_dim(config: dict) -> int | None:
    return (
        config["hidden_size"] // config["num_attention_heads"]
        if config.get("num_attention_heads")
        else None
    )


def _open(folder: Path) -> tuple[dict[str, torch.Tensor], Finding | None]:
    """Tensors by name, `midlayer.` for the one layer whatever the file calls it; or why they cannot
    be read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = (
            ", ".join(p.name for p in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt")))
            or "nothing"
        )
        return {}, Finding(
            "weights",
            BAD,
            f"there is no .safetensors file in {folder}, only {other}",
            "convert the weights with safetensors.torch.save_file",
        )
    found = {}
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                found |= {_usual(name): tensors.get_tensor(name) for name in tensors.keys()}
        except (SafetensorError, OSError) as error:
            return {}, Finding(
                "weights", BAD, f"{file.name} cannot be read ({error})", "copy the file again"
            )
    return found, None


def _usual(name: str) -> str:
    """SGLang takes the layer as `midlayer.` and as `layers.0.`, and names with and without `model.`
    in front.

    >>> _usual("model.layers.0.mlp.up_proj.weight")
    'midlayer.mlp.up_proj.weight'
    """
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _algorithm(config: dict) -> Finding:
    architecture = (config.get("architectures") or ["none"])[0]
    if algorithm := ALGORITHMS.get(architecture):
        return Finding(
            "flag",
            GOOD,
            f"{architecture} is served with --speculative-algorithm {algorithm}; with EAGLE it "
            "would start, capture no states and accept nothing",
        )
    return Finding(
        "flag",
        BAD,
        f"config.json names the architecture {architecture}; known: {', '.join(ALGORITHMS)}",
        "if it is an EAGLE-3 drafter of one Llama layer, set architectures to "
        f"{list(ALGORITHMS)}; other layouts "
        "(EAGLE-2, MLA layers) need another engine class and are not judged here",
    )


def _sizes(config: dict, target: Target) -> list[Finding]:
    missing = [
        key for key in (*SHAPE_KEYS, "draft_vocab_size", "rms_norm_eps") if not config.get(key)
    ]
    if missing:
        return [
            Finding(
                "sizes",
                BAD,
                f"config.json lacks {', '.join(missing)}",
                "copy them from the one of training",
            )
        ]
    found = []
    for key in ("hidden_size", "vocab_size"):
        if config[key] != target.config[key]:
            found.append(
                Finding(
                    "sizes",
                    BAD,
                    f"{key} is {config[key]}, the target's {target.config[key]}",
                    "this drafter belongs to another target",
                )
            )
    if config.get("num_hidden_layers") != 1:
        found.append(
            Finding(
                "sizes",
                WARNING,
                f"num_hidden_layers is {config.get('num_hidden_layers')}",
                "an EAGLE-3 drafter has one layer; the engine would build more and leave them "
                "random",
            )
        )
    return found or [Finding("sizes", GOOD, "hidden size and vocabulary are the target's")]


def _names_and_shapes(tensors: dict[str, torch.Tensor], config: dict) -> list[Finding]:
    expected = expected_shapes(config)
    optional = {"embed_tokens.weight", "t2d"}
    missing = sorted(expected.keys() - tensors.keys() - optional)
    if config["draft_vocab_size"] == config["vocab_size"]:
        missing = [name for name in missing if name != "d2t"]
    unknown = sorted(tensors.keys() - expected.keys() - optional)
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
        remedy = (
            f"rename them to {', '.join(missing)}"
            if missing
            else "drop them, or find out what trained with them"
        )
        found.append(
            Finding(
                "tensors",
                BAD if missing else WARNING,
                f"{', '.join(unknown)} unknown; SGLang would skip them",
                remedy,
            )
        )
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            what = f"{name} is {tuple(tensors[name].shape)} instead of {shape}"
            if name == "fc.weight":
                found.append(
                    Finding(
                        "tensors",
                        BAD,
                        f"{what}: fc must read three captured states, 3 x {shape[0]} wide",
                        "a square fc is EAGLE-2's: train with three captured layers",
                    )
                )
            else:
                found.append(
                    Finding(
                        "tensors",
                        BAD,
                        what,
                        "the configuration and the weights are of different drafters",
                    )
                )
    broken = [
        name for name, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()
    ]
    if broken:
        found.append(
            Finding(
                "tensors", BAD, f"{', '.join(broken)} hold NaN or inf", "take an earlier checkpoint"
            )
        )
    return found or [
        Finding(
            "tensors", GOOD, f"all {len(expected)} names and shapes are as the engine loads them"
        )
    ]


def _vocabulary(tensors: dict[str, torch.Tensor], config: dict, target: Target) -> list[Finding]:
    draft, full = config.get("draft_vocab_size"), target.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if draft == full:
            return [
                Finding("draft vocabulary", GOOD, "the drafter has the target's whole vocabulary")
            ]
        return [
            Finding(
                "draft vocabulary",
                BAD,
                f"{draft} draft tokens and no d2t: draft id i would be taken for target "
                f"id i, so only the first {draft} ids could ever be drafted",
                "export d2t (target id minus draft id)",
            )
        ]
    d2t = d2t.long()
    ids = d2t + torch.arange(len(d2t))
    if not _is_map(ids, full):
        if _is_map(d2t, full):
            return [
                Finding(
                    "draft vocabulary",
                    BAD,
                    "d2t holds target ids; SGLang adds the draft id to it, so that every "
                    "draft would be another token",
                    "store d2t - arange(len(d2t))",
                )
            ]
        return [
            Finding(
                "draft vocabulary",
                BAD,
                f"d2t plus draft id does not rise within the target's {full} ids",
                "the map is of another tokenizer, or damaged; build it anew",
            )
        ]
    found = []
    if draft is not None and draft < full and bool((d2t == 0).all()):
        found.append(
            Finding(
                "draft vocabulary",
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
                "draft vocabulary",
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
                "draft vocabulary",
                WARNING,
                f"the stop tokens {lost} are outside it, so the end of an answer is never drafted",
                "build it with all special and byte tokens",
            )
        )
    return found or [
        Finding(
            "draft vocabulary",
            GOOD,
            f"d2t maps {len(ids)} draft ids to rising target ids, t2d agrees",
        )
    ]


def _is_map(ids: torch.Tensor, vocab_size: int) -> bool:
    return bool(
        len(ids) and ids.min() >= 0 and ids.max() < vocab_size and (ids[1:] > ids[:-1]).all()
    )


def _embedding(tensors: dict[str, torch.Tensor], target: Target) -> Finding:
    own = tensors.get("embed_tokens.weight")
    if own is None:
        return Finding(
            "embedding",
            GOOD,
            "none in the file: SGLang shares the target's (vLLM needs it in the file)",
        )
    wanted = target.embedding()
    if own.shape == wanted.shape and torch.allclose(
        own.float(), wanted.float(), atol=1e-2, rtol=1e-2
    ):
        return Finding("embedding", GOOD, "the file's is the target's")
    return Finding(
        "embedding",
        WARNING,
        "the file's differs from the target's: SGLang overwrites it, another engine would use it",
        "leave it out, unless the drafter was trained with it",
    )


def _layer_ids(config: dict, target: Target) -> Finding:
    eagle = config.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    default = layers.captured_layers(target.num_layers)
    convention = layers.convention_of(target.info["architecture"])
    if eagle.get("use_aux_hidden_state") is False:
        return Finding(
            "layer ids",
            BAD,
            "eagle_config.use_aux_hidden_state is false, so no states are captured",
            "set it to true: fc reads three states",
        )
    if ids is None:
        return Finding(
            "layer ids",
            WARNING,
            f"config.json names none; SGLang captures the inputs of layers {default}",
            "write the ids that it was trained with into "
            "eagle_config.eagle_aux_hidden_state_layer_ids",
        )
    if len(ids) != 3:
        return Finding(
            "layer ids",
            BAD,
            f"{ids} are {len(ids)} layers; fc reads three",
            "write the three of training",
        )
    served = layers.served_layers(ids, convention)
    if sorted(set(served)) != served or served[0] < 0 or served[-1] >= target.num_layers:
        return Finding(
            "layer ids",
            BAD,
            f"{ids} make {target.info['architecture']} capture the inputs of layers {served}, "
            f"but the target has {target.num_layers}",
            f"the defaults {default} are written {layers.config_ids(default, convention)} for it",
        )
    shifted = layers.PLUS_ONE if convention != layers.PLUS_ONE else layers.IF_FIRST_IS_ONE
    if served != default and layers.served_layers(ids, shifted) == default:
        return Finding(
            "layer ids",
            WARNING,
            f"{ids} make {target.info['architecture']} capture the inputs of layers "
            f"{served}; under the other convention they would be the defaults {default}",
            f"if it was trained on {default}, write {layers.config_ids(default, convention)}",
        )
    return Finding(
        "layer ids",
        GOOD,
        f"{ids} make {target.info['architecture']} capture the inputs of layers {served} "
        f"(convention {convention})",
    )


def _rope(config: dict, target: Target) -> Finding:
    wanted = rope_parameters(target.config)
    try:
        found = rope_parameters(config)
    except UserError:
        return Finding(
            "RoPE",
            BAD,
            "config.json names no rope_theta; readers fall back to 10000, the target has "
            f"{wanted['rope_theta']:g}",
            f"write rope_theta {wanted['rope_theta']:g}, if it was trained with it",
        )
    forms = {
        "rope_theta": config.get("rope_theta"),
        "rope_parameters.rope_theta": (config.get("rope_parameters") or {}).get("rope_theta"),
    }
    given = {name: value for name, value in forms.items() if value is not None}
    if len(set(given.values())) > 1:
        return Finding(
            "RoPE",
            BAD,
            f"the two forms disagree: {given}; old and new readers would use different ones",
            "write the one of training in both",
        )
    differing = [
        f"{key} {found.get(key)!r} instead of {wanted.get(key)!r}"
        for key in sorted(wanted.keys() | found.keys())
        if found.get(key) != wanted.get(key)
    ]
    if differing:
        verdict = BAD if any(text.startswith("rope_theta") for text in differing) else WARNING
        return Finding(
            "RoPE",
            verdict,
            f"{'; '.join(differing)} (the target's)",
            "copy the target's, unless the drafter was trained with its own: then leave it",
        )
    if len(given) < 2:
        return Finding(
            "RoPE",
            WARNING,
            f"only {next(iter(given))} is written; readers of the other form fall back to 10000",
            "write both rope_theta and rope_parameters",
        )
    return Finding(
        "RoPE",
        GOOD,
        f"base {wanted['rope_theta']:g}, type {wanted['rope_type']} as the target's, in both forms",
    )


def _context(config: dict, target: Target) -> Finding:
    own, wanted = (
        config.get("max_position_embeddings"),
        target.config.get("max_position_embeddings"),
    )
    if own is None or (wanted and own < wanted):
        return Finding(
            "context",
            BAD,
            f"max_position_embeddings is {own}, the target's {wanted}; past it drafts are noise, "
            "or the server refuses to start",
            f"write {wanted}",
        )
    return Finding("context", GOOD, f"{own} positions, enough for the target's {wanted}")


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
