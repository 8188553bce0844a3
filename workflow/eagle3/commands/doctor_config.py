"""The doctor's look at config.json: layer ids, RoPE and context of a drafter."""

from typing import Any

import torch

from eagle3.commands.findings import BAD, GOOD, WARNING, Finding
from eagle3.core.errors import UserError
from eagle3.drafter import published, rope
from eagle3.target import layers
from eagle3.target.model import Target

FORMS = {"rope_theta": ("rope_theta", "rope_scaling"), "rope_parameters": ("rope_parameters",)}


def layer_ids(config: dict, target: Target, told: bool) -> Finding:
    """`told`: a training.json says which layers it was trained on, and is compared elsewhere."""
    eagle = config.get("eagle_config") or {}
    convention = layers.convention_of(target.info["architecture"])
    ids = published.layer_ids(config)
    try:
        default = layers.captured_layers(target.num_layers)
        written = f"{layers.config_ids(default, convention)}"
    except UserError:  # the target is too small for the default
        default, written = None, "none"
    if eagle.get("use_aux_hidden_state", True) is not True:
        return Finding(
            "layer ids",
            BAD,
            f"eagle_config.use_aux_hidden_state is {eagle['use_aux_hidden_state']}, so no states "
            "are captured",
            "set it to true: fc reads three states",
        )
    if ids is None:
        top = published.LAYER_IDS in config
        return Finding(
            "layer ids",
            WARNING,
            "config.json names none"
            + (" within eagle_config, where alone SGLang reads them" if top else "")
            + f"; SGLang captures the inputs of layers {default}",
            "write the ids that it was trained with into eagle_config." + published.LAYER_IDS,
        )
    served = layers.served_layers(ids, convention)
    if sorted(set(served)) != served or served[0] < 0 or served[-1] >= target.num_layers:
        return Finding(
            "layer ids",
            BAD,
            f"{ids} make {target.info['architecture']} capture the inputs of layers {served}, "
            f"but the target has {target.num_layers}",
            f"the defaults {default} are written {written} for it",
        )
    shifted = layers.PLUS_ONE if convention != layers.PLUS_ONE else layers.IF_FIRST_IS_ONE
    if served != default and layers.served_layers(ids, shifted) == default:
        return Finding(
            "layer ids",
            WARNING,
            f"{ids} make {target.info['architecture']} capture the inputs of layers "
            f"{served}; under the other convention they would be the defaults {default}",
            f"if it was trained on {default}, write {written}",
        )
    if served != default and not told:
        return Finding(
            "layer ids",
            WARNING,
            f"{ids} make {target.info['architecture']} capture the inputs of layers {served}, not "
            f"the defaults {default}, and no training.json says that it was trained on them",
            "compare with the configuration of its training",
        )
    return Finding(
        "layer ids",
        GOOD,
        f"{ids} make {target.info['architecture']} capture the inputs of layers {served} "
        f"(convention {convention})",
    )


def rotary(config: dict, target: Target) -> list[Finding]:
    """Both forms against one another, training's side against SGLang's, and the target's."""
    forms = {
        name: {k: v for k, v in config.items() if not k.startswith("rope_") or k in keys}
        for name, keys in FORMS.items()
        if config.get(name) is not None
    }
    wanted = rope.rope_parameters(target.config)
    if not forms or not any(_names_a_base(form) for form in forms.values()):
        return [
            Finding(
                "RoPE",
                BAD,
                "config.json names no rope_theta; readers fall back to 10000, the target has "
                f"{wanted['rope_theta']:g}",
                f"write rope_theta {wanted['rope_theta']:g}, if it was trained with it",
            )
        ]
    read = {name: rope.rope_parameters(form, config["head_dim"]) for name, form in forms.items()}
    if len(read) == 2 and read["rope_theta"] != read["rope_parameters"]:
        return [
            Finding(
                "RoPE",
                BAD,
                f"the two forms disagree: {read}; old and new readers would use different ones",
                "write the one of training in both",
            )
        ]
    return _served(config) or [_against_target(next(iter(read.values())), wanted, list(read))]


def _names_a_base(form: dict[str, Any]) -> bool:
    try:
        return bool(rope.read(form))
    except UserError:
        return False


def _served(config: dict) -> list[Finding]:
    """What each SGLang computes for this configuration against what transformers does."""
    # The keys as they stand there, since a rewritten copy would hide what SGLang makes of them.
    parameters = rope.read(config)
    if not config.get("original_max_position_embeddings") and parameters["rope_type"] != "default":
        parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    mine = {**config, "rope_parameters": parameters}
    module, positions = rope.rotary(mine), torch.tensor([0, 1, 7, 100, 1000])
    cos, sin = module(torch.zeros(1), positions.unsqueeze(0))
    half = config["head_dim"] // 2
    trained = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    found = []
    for version in rope.SGLANG:
        served = rope.served(mine, positions, version)
        if (served - trained).abs().max() > 1e-3:
            times = served[0].abs().max() / trained[0].abs().max()
            found.append(
                Finding(
                    "RoPE",
                    BAD,
                    f"SGLang {version} computes cos and sin {times:.3f} times those of training "
                    f"(transformers), so q·k {times**2:.3f} times",
                    f"write {rope.rope_parameters(config, config['head_dim'])}",
                )
            )
    return found


def _against_target(found: dict, wanted: dict, forms: list[str]) -> Finding:
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
    if len(forms) < 2:
        return Finding(
            "RoPE",
            WARNING,
            f"only {forms[0]} is written; readers of the other form fall back to 10000",
            "write both rope_theta and rope_parameters",
        )
    return Finding(
        "RoPE",
        GOOD,
        f"base {wanted['rope_theta']:g}, type {wanted['rope_type']} as the target's, in both "
        f"forms; SGLang {' and '.join(rope.SGLANG)} compute what training does",
    )


def context(config: dict, target: Target) -> Finding:
    own, wanted = config["max_position_embeddings"], target.config.get("max_position_embeddings")
    if wanted and own < wanted:
        return Finding(
            "context",
            BAD,
            f"max_position_embeddings is {own}, the target's {wanted}; past it drafts are noise, "
            "or the server refuses to start",
            f"write {wanted}",
        )
    return Finding("context", GOOD, f"{own} positions, enough for the target's {wanted}")
