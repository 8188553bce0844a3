"""A small Llama target, and its EAGLE-3 drafter, in the body of a larger one: the same function at
the larger one's cost, so that a drafter's gain can be measured without the larger model's weights.

    python benchmarks/grown_target.py target SMALL OUT
    python benchmarks/grown_target.py drafter DRAFTER OUT --grown-target DIR --intermediate 4096

SMALL is a Hugging Face directory; the shape options are of the larger model and default to one of
7.2 billion weights with heads of 64 channels. How the function stays the same:

- Hidden channels past the small size are always zero: the embedding, `o_proj`, `down_proj` and the
  drafter's `fc` write nothing there. What reads them has random weights, since hardware may compute
  zeros faster.
- An RMS norm over h of H channels divides by sqrt(H/h) too little, so its weights are multiplied by
  sqrt(h/H) and its epsilon by h/H.
- Heads keep their width. Added query heads lie at the end of each group, added key and value heads
  and their groups behind all others; `o_proj` multiplies what they give by zero, as `down_proj`
  does for added neurons. Added layers add zero to the residual stream."""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SCALE = 0.02  # standard deviation of random weights, that of Llama's own initialization
Tensors = dict[str, Tensor]


def read(folder: Path, device: str) -> tuple[Tensors, dict[str, Any]]:
    """Weights and config.json, with the head size written out."""
    config = json.loads((folder / "config.json").read_text())
    config["head_dim"] = config.get("head_dim") or (
        config["hidden_size"] // config["num_attention_heads"]
    )
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file, device=device)
    return tensors, config


class Body:
    """Places of a small model's weights in those of a larger one. `small` and `large` are configs
    that differ in sizes alone. Raises SystemExit if the small one does not fit."""

    def __init__(self, small: dict[str, Any], large: dict[str, Any], device: str, seed: int = 0):
        self.h, self.H, self.head = small["hidden_size"], large["hidden_size"], small["head_dim"]
        self.inner = large["intermediate_size"]
        self.heads, self.kv_heads = large["num_attention_heads"], large["num_key_value_heads"]
        heads, kv_heads = small["num_attention_heads"], small["num_key_value_heads"]
        group, grown = heads // kv_heads, self.heads // self.kv_heads
        if (
            self.H < self.h
            or grown < group
            or self.kv_heads < kv_heads
            or self.heads % self.kv_heads
        ):
            raise SystemExit(
                f"error: {heads} query and {kv_heads} key heads, hidden size {self.h}, do not fit "
                f"into {self.heads} and {self.kv_heads} heads, hidden size {self.H}"
            )
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)
        self.queries = self._channels([i // group * grown + i % group for i in range(heads)])
        self.keys = self._channels(range(kv_heads))

    def _channels(self, heads) -> Tensor:
        """The channels of these heads, in their order."""
        first = torch.tensor(list(heads), device=self.device)[:, None] * self.head
        return (first + torch.arange(self.head, device=self.device)).flatten()

    def place(self, weight: Tensor, shape: tuple[int, int], rows=None, columns=None) -> Tensor:
        """[rows, columns] among random weights; without places the first ones."""
        noise = torch.randn(shape, generator=self.generator, device=self.device) * SCALE
        return self._put(noise.to(weight.dtype), weight, rows, columns)

    def among_zeros(self, weight: Tensor, shape: tuple[int, int], columns=None) -> Tensor:
        """The same where every added row or column must give nothing."""
        zeros = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        return self._put(zeros, weight, None, columns)

    def _put(self, made: Tensor, weight: Tensor, rows, columns) -> Tensor:
        rows = torch.arange(weight.shape[0], device=self.device) if rows is None else rows
        columns = torch.arange(weight.shape[1], device=self.device) if columns is None else columns
        made[rows[:, None], columns[None]] = weight
        return made

    def blocks(self, count: int) -> Tensor:
        """Columns of `count` hidden states side by side."""
        first = torch.arange(count, device=self.device)[:, None] * self.H
        return (first + torch.arange(self.h, device=self.device)).flatten()

    def norm(self, weight: Tensor) -> Tensor:
        grown = torch.ones(self.H, dtype=weight.dtype, device=self.device)
        grown[: self.h] = (weight.float() * math.sqrt(self.h / self.H)).to(weight.dtype)
        return grown

    def layer(self, get, states: int) -> Tensors:
        """Attention and MLP; `get(name)` gives the small layer's weights; queries, keys and values
        read `states` hidden states side by side: 1 in a target, 2 in a drafter."""
        read_from, width = self.blocks(states), states * self.H
        places = {
            "q_proj": (self.queries, self.heads),
            "k_proj": (self.keys, self.kv_heads),
            "v_proj": (self.keys, self.kv_heads),
        }
        made = {
            f"self_attn.{name}.weight": self.place(
                get(f"self_attn.{name}.weight"), (heads * self.head, width), rows, read_from
            )
            for name, (rows, heads) in places.items()
        }
        output = "self_attn.o_proj.weight"
        made[output] = self.among_zeros(get(output), (self.H, self.heads * self.head), self.queries)
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            made[name] = self.place(get(name), (self.inner, self.H))
        made["mlp.down_proj.weight"] = self.among_zeros(
            get("mlp.down_proj.weight"), (self.H, self.inner)
        )
        return made


def grow_target(small: Path, out: Path, shape: dict[str, int], device: str = "cpu") -> None:
    """Writes the target in `small` with the sizes of `shape` (keys of config.json) to `out`."""
    tensors, config = read(small, device)
    biases = [name for name in tensors if name.endswith("proj.bias")]
    if config["model_type"] != "llama" or biases:
        raise SystemExit(f"error: {small} is no Llama without biases: {biases[:1]}")
    epsilon = config["rms_norm_eps"] * config["hidden_size"] / shape["hidden_size"]
    large = {**config, **shape, "rms_norm_eps": epsilon}
    body, count = Body(config, large, device), config["num_hidden_layers"]
    embedding = tensors["model.embed_tokens.weight"]
    made = {
        "model.embed_tokens.weight": body.among_zeros(embedding, (len(embedding), body.H)),
        "model.norm.weight": body.norm(tensors["model.norm.weight"]),
    }
    if not config.get("tie_word_embeddings"):
        head = tensors["lm_head.weight"]
        made["lm_head.weight"] = body.place(head, (len(head), body.H))
    for number in range(large["num_hidden_layers"]):
        source = f"model.layers.{min(number, count - 1)}."
        layer = body.layer(lambda name, source=source: tensors[source + name], states=1)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            layer[name] = body.norm(tensors[source + name])
        if number >= count:
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                layer[name].zero_()
        made |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    write(out, made, large)
    for file in small.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != "config.json":
            shutil.copy(file, out)


def grow_drafter(
    small: Path, out: Path, grown_target: Path, intermediate: int, device: str = "cpu"
) -> None:
    """Writes the drafter in `small` for the target that `grow_target` wrote."""
    tensors, config = read(small, device)
    grown = json.loads((grown_target / "config.json").read_text())
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    large = {**config, **{key: grown[key] for key in sizes}, "intermediate_size": intermediate}
    body = Body(config, large, device)
    made = {
        "fc.weight": fused(body, tensors["fc.weight"]),
        "norm.weight": body.norm(tensors["norm.weight"]),
        "lm_head.weight": body.place(
            tensors["lm_head.weight"], (config["draft_vocab_size"], body.H)
        ),
        **{name: tensors[name] for name in ("d2t", "t2d")},
    }
    layer = body.layer(lambda name: tensors[f"midlayer.{name}"], states=2)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        layer[f"{name}.weight"] = body.norm(tensors[f"midlayer.{name}.weight"])
    made |= {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    write(out, made, large)


def fused(body: Body, weight: Tensor) -> Tensor:
    """`fc` [H, 3H]: added rows give nothing, added columns read zeros."""
    made = body.place(weight, (body.H, 3 * body.H), columns=body.blocks(3))
    made[body.h :] = 0
    return made


def write(out: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """A Hugging Face directory of one file."""
    out.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1))
    print(f"{out}: {sum(t.numel() for t in kept.values()) / 1e9:.3f} billion weights")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["target", "drafter"])
    parser.add_argument("small", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--grown-target", type=Path, help="for a drafter, which takes its sizes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.what == "target":
        shape = {
            "hidden_size": options.hidden,
            "intermediate_size": options.intermediate,
            "num_attention_heads": options.heads,
            "num_key_value_heads": options.kv_heads,
            "num_hidden_layers": options.layers,
        }
        return grow_target(options.small, options.out, shape, options.device)
    if not options.grown_target:
        parser.error("a drafter needs --grown-target")
    grow_drafter(
        options.small, options.out, options.grown_target, options.intermediate, options.device
    )


if __name__ == "__main__":
    main()
