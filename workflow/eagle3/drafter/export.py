"""data/drafter/: model.safetensors and config.json as SGLang loads them.

SGLang skips unknown tensors and leaves missing ones random, both in silence, so names and shapes
are checked here, and what was written is read again from a copy."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3.core.errors import UserError
from eagle3.core.files import digest_file, read_json, replacing, write_json
from eagle3.drafter import published
from eagle3.drafter.model import Drafter
from eagle3.records.draft_vocab import check_consistent
from eagle3.target import layers

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a drafter of this configuration has; no others may be
    there."""
    size, inner, draft = (
        config["hidden_size"],
        config["intermediate_size"],
        config["draft_vocab_size"],
    )
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": (size,),
        "hidden_norm": (size,),
        "post_attention_layernorm": (size,),
        "self_attn.q_proj": (q, 2 * size),
        "self_attn.k_proj": (kv, 2 * size),
        "self_attn.v_proj": (kv, 2 * size),
        "self_attn.o_proj": (size, q),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    return {
        "fc.weight": (size, 3 * size),
        **{f"midlayer.{name}.weight": shape for name, shape in layer.items()},
        "norm.weight": (size,),
        "lm_head.weight": (draft, size),
        "d2t": (draft,),
        "t2d": (config["vocab_size"],),
    }


def check_complete(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Raises UserError listing tensors that are missing, unknown or of another shape, or whose
    values are not finite."""
    expected = expected_shapes(config)
    wrong = [f"{name} is missing" for name in expected.keys() - tensors.keys()]
    wrong += [f"{name} is unknown" for name in tensors.keys() - expected.keys()]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    wrong += [
        f"{name} has values that are not finite"
        for name, t in tensors.items()
        if t.is_floating_point() and not torch.isfinite(t).all()
    ]
    if wrong:
        raise UserError(f"the drafter would not load as it was trained: {'; '.join(sorted(wrong))}")
    check_consistent(tensors["d2t"], tensors["t2d"])


def write(folder: str | Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Writes both files in the configuration's dtype and compares a copy of them, read anew, with
    `state`."""
    folder = Path(folder)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {
        name: (t.to(dtype) if t.is_floating_point() else t).cpu().contiguous()
        for name, t in state.items()
    }
    check_complete(tensors, config)
    write_json(folder / CONFIG, config)
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    with tempfile.TemporaryDirectory() as copy:
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(folder / name, Path(copy) / name)
        loaded, _ = read(copy)
    for name, tensor in tensors.items():
        if not torch.equal(loaded[name], tensor):
            raise UserError(
                f"{folder / WEIGHTS}: {name} reads back differently; the disk may be failing"
            )


def read(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, configuration), checked."""
    config = read_json(Path(folder) / CONFIG)
    tensors = load_file(Path(folder) / WEIGHTS)
    check_complete(tensors, config)
    return tensors, config


def check_as_trained(folder: str | Path, config: dict[str, Any]) -> None:
    """Whether config.json and weights are those of the training.json beside them, and the layers
    those of the states. Raises UserError naming what differs, with both values."""
    folder = Path(folder)
    training = read_json(folder / "training.json")
    if not isinstance(training, dict):
        raise UserError(f"{folder / 'training.json'} holds no mapping")
    wrong = []
    if isinstance(trained := training.get("config"), dict):
        wrong = published.differences(config, trained)
    ids = published.layer_ids(config)
    for name, states in (training.get("hidden_states") or {}).items():
        if "layers" in states and "convention" in states:
            wanted = layers.config_ids(states["layers"], states["convention"])
            if ids != wanted:
                wrong.append(
                    f"{published.LAYER_IDS} {ids} instead of {wanted}, since the states of {name} "
                    f"are of layers {states['layers']}"
                )
    digest = training.get("weights_digest")
    if digest and digest != (found := digest_file(folder / WEIGHTS)):
        wrong.append(f"{WEIGHTS} has digest {found[:12]} instead of {digest[:12]}")
    if wrong:
        raise UserError(f"{folder} is not as it was trained: {'; '.join(wrong)}")


def load_drafter(folder: str | Path, embedding: torch.Tensor) -> Drafter:
    """The drafter of a folder, with the target's `embedding` [V, H], in fp32."""
    tensors, config = read(folder)
    drafter = Drafter(config, embedding, tensors["d2t"], tensors["t2d"])
    drafter.load_state_dict(
        {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    )
    return drafter.eval()
