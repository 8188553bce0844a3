"""Drafters of any origin in the layouts that SGLang loads: this project's and SpecForge's
(`midlayer.`), EAGLE's own (`layers.0.`) and speculators' (the layer's configuration nested).

Everything that a file of somebody else can hold is a sentence here, never a traceback."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3.core.errors import UserError
from eagle3.core.files import read_json
from eagle3.drafter import rope

COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)
# What else SGLang's drafter reads, and the value with which it computes what these tensors are for.
PLAIN = {
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "model_type": "llama",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "partial_rotary_factor": 1,
    "rope_is_neox_style": True,
    "norm_output": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "use_aux_norm": False,
    "num_aux_hidden_states": 3,
    "quantization_config": None,
    "original_max_position_embeddings": None,
}
LARGEST = 2**31
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json with the nested layer configuration of speculators laid open, and `head_dim`.
    Raises UserError if it is missing or no mapping."""
    config = read_json(Path(folder) / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{Path(folder) / 'config.json'} holds no mapping")
    nested = config.get("transformer_layer_config")
    config = {**(nested if isinstance(nested, dict) else {}), **config}
    if "head_dim" not in config and not wrong_fields(config, ("hidden_size", COUNTS[2])):
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def wrong_fields(config: dict[str, Any], counts: tuple[str, ...] = COUNTS) -> list[str]:
    """Fields of `counts` that are no positive whole number, and a rms_norm_eps that is none."""
    wrong = [
        f"{key} is {config[key]!r}" if key in config else f"{key} is missing"
        for key in counts
        if type(config.get(key)) is not int or not 1 <= config[key] < LARGEST
    ]
    if counts is COUNTS:
        epsilon = config.get("rms_norm_eps")
        if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
            wrong.append(f"rms_norm_eps is {epsilon!r}")
        head_dim = config.get("head_dim")
        if type(head_dim) is int and (head_dim % 2 or head_dim > 2**16):
            wrong.append(f"head_dim is {head_dim}, no size of a head")
        if not wrong and config["num_attention_heads"] % config["num_key_value_heads"]:
            wrong.append(
                f"num_attention_heads {config['num_attention_heads']} is no multiple of "
                f"num_key_value_heads {config['num_key_value_heads']}"
            )
    return wrong


def read_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Tensors by name, `midlayer.` for the one layer whatever the file calls it. Raises UserError
    saying why they cannot be read."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
        raise UserError(
            f"there is no .safetensors file in {folder}, only "
            f"{', '.join(path.name for path in others) or 'nothing'}; convert the weights with "
            "safetensors.torch.save_file"
        )
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():
                    if usual(name) in found:
                        raise UserError(f"{file.name} has {usual(name)} under two names")
                    found[usual(name)] = tensors.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file.name} cannot be read ({error}); copy the file again") from None
    return found


def usual(name: str) -> str:
    """SGLang takes the layer as `midlayer.` and as `layers.0.`, and names with and without `model.`
    in front.

    >>> usual("model.layers.0.mlp.up_proj.weight")
    'midlayer.mlp.up_proj.weight'
    """
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def broken(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors with NaN or inf, or of zeros alone: no training leaves these."""
    wrong = []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            largest = tensor.float().abs().max().item()
            if not math.isfinite(largest):
                wrong.append(f"{name} holds NaN or inf")
            elif largest == 0:
                wrong.append(f"{name} holds zeros only")
    return sorted(wrong)


def draft_ids(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Target ids [D] of offsets `d2t`. Raises UserError if they are no offsets of rising ids."""
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.dim() != 1 or not len(d2t):
        raise UserError(
            f"d2t is {str(d2t.dtype).removeprefix('torch.')} {list(d2t.shape)}; it holds one whole "
            "number for each draft id"
        )
    ids = d2t.long() + torch.arange(len(d2t))
    if not is_map(ids, vocab_size):
        raise UserError(
            "d2t holds target ids; SGLang adds the draft id to it, so that every draft would be "
            "another token; store d2t - arange(len(d2t))"
            if is_map(d2t.long(), vocab_size)
            else f"d2t plus draft id does not rise within the target's {vocab_size} ids; the map "
            "is of another tokenizer, or damaged"
        )
    return ids


def is_map(ids: torch.Tensor, vocab_size: int) -> bool:
    return bool(
        len(ids) and ids.min() >= 0 and ids.max() < vocab_size and (ids[1:] > ids[:-1]).all()
    )


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    """The layer ids that SGLang reads, None where the configuration names none. Raises UserError if
    they are not three whole numbers."""
    eagle = config.get("eagle_config")
    if eagle is not None and not isinstance(eagle, dict):
        raise UserError(f"eagle_config is {eagle!r}, not a mapping")
    ids = (eagle or {}).get(LAYER_IDS)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise UserError(f"{LAYER_IDS} is {ids!r}, not a list of layer numbers")
    if len(ids) != 3:
        raise UserError(f"{LAYER_IDS} names {ids}: {len(ids)} layers, and fc reads three")
    return ids


def odd_switches(config: dict[str, Any]) -> list[str]:
    """Keys with which SGLang computes something else than a plain EAGLE-3 layer."""
    eagle = config["eagle_config"] if isinstance(config.get("eagle_config"), dict) else {}
    return [
        f"{key} is {value!r} instead of {plain!r}"
        for key, plain in PLAIN.items()
        for value in [eagle[key] if key in eagle else config.get(key, plain)]
        if value != plain and not (value is None and not plain)
    ]


def differences(
    found: dict[str, Any], wanted: dict[str, Any], ignored: tuple[str, ...] = ()
) -> list[str]:
    """Fields by which two drafters of the same tensors compute differently, each with both values;
    `ignored` ones are left out. Raises UserError if the RoPE of one cannot be read."""
    keys = [key for key in (*COUNTS, "rms_norm_eps") if key not in ignored]
    named = {key: (found.get(key), wanted.get(key)) for key in keys}
    ropes = [rope.rope_parameters(c, c.get("head_dim")) for c in (found, wanted)]
    for key in sorted(ropes[0].keys() | ropes[1].keys()):
        named[f"RoPE's {key}"] = (ropes[0].get(key), ropes[1].get(key))
    named[LAYER_IDS] = (layer_ids(found), layer_ids(wanted))
    return [f"{key} {a!r} instead of {b!r}" for key, (a, b) in named.items() if not _same(a, b)] + [
        text for text in odd_switches(found) if text not in odd_switches(wanted)
    ]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        numbers = all(type(x) in (int, float) for x in (a, b))
        return numbers and math.isclose(a, b, rel_tol=1e-9)
    return a == b
