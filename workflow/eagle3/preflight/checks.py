"""What stage `target` and `make plan` ask of a target, in seconds: the later stages' own code runs
on meta tensors, which have shapes and no memory.

It reads keys of any section of params.yaml, but only to refuse: data/target is the same whatever
they say, and each later stage checks its own part again."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3.core.errors import UserError
from eagle3.core.schema import Params
from eagle3.drafter import export
from eagle3.drafter.model import Drafter, drafter_config
from eagle3.preflight import capturing
from eagle3.records import draft_vocab
from eagle3.target import layers
from eagle3.target.configuration import readout, text_config
from eagle3.target.hooks import Replica
from eagle3.target.model import Target, model_class

SHAPES = ("hidden_size", "vocab_size", "num_hidden_layers")
WEIGHT_TYPES = ("F32", "F16", "BF16")
# Head sizes that attention kernels of GPUs have; the target's own is served in any case.
KERNEL_HEADS = (64, 80, 96, 128, 192, 256)


def check_config(config: dict[str, Any], params: Params, log: Callable[[str], None]) -> None:
    """Whether every stage can work with a target of this config.json. Raises UserError naming the
    field, the values and what helps."""
    text = text_config(config)
    if missing := [key for key in SHAPES if not _positive(text.get(key))]:
        raise UserError(
            f"the target's config.json has no {', '.join(missing)}; it is not a language model "
            "that can be drafted for"
        )
    architecture = (config.get("architectures") or ["unknown"])[0]
    captured = layers.captured_layers(text["num_hidden_layers"], params.hidden_states.layers)
    convention = layers.convention_of(architecture, params.hidden_states.convention)
    ids = layers.config_ids(captured, convention)
    readout(text)
    draft_vocab.choose(Counter(), [], params.vocab.size, text["vocab_size"])
    drafter = drafter_config(
        text, params.train.architecture.model_dump(), params.vocab.size, ids, "bfloat16"
    )
    _check_drafter(drafter)
    _check_context(text, params)
    if _embedded(params):
        _check_embedded(config, captured, text["hidden_size"])
    if "sglang" in (params.hidden_states.engine, params.bench.engine):
        _check_head_size(drafter, text)
        capturing.check_captures(architecture, params.server, log)


def check_files(path: Path, params: Params) -> None:
    """Whether weights and tokenizer in the folder `path` can be read by every stage; reads names
    and shapes, never a whole tensor."""
    target = Target(path, {"path": str(path), **params.target.model_dump()})
    size, vocab = target.hidden_size, target.vocab_size
    readable = ["embed_tokens.weight", "wte.weight"]
    target.check_head()
    for names in [readable] if target.head_is_tied else [readable, ["lm_head.weight"]]:
        shape, kind = target.shape_of(*names)
        if kind not in WEIGHT_TYPES:
            raise UserError(
                f"{names[0]} of the target is stored as {kind}; training reads "
                f"{', '.join(WEIGHT_TYPES)}, so take a variant whose embedding and head are not "
                "quantized"
            )
        if len(shape) != 2 or shape[0] < vocab or shape[1] != size:
            raise UserError(
                f"{names[0]} of the target is {shape}, but config.json says vocab_size {vocab} "
                f"and hidden_size {size}"
            )
    tokenizer = target.tokenizer
    added = tokenizer.added_tokens_decoder
    beyond = [i for i in target.stop_ids if i >= vocab]
    beyond += [i for i in tokenizer.get_vocab().values() if i >= vocab and i not in added]
    if beyond:
        raise UserError(
            f"the tokenizer gives ids up to {max(beyond)}, the target's vocabulary ends at "
            f"{vocab}; the folder holds the tokenizer of another model"
        )
    required = draft_vocab.required_ids(tokenizer, target.stop_ids, vocab)
    draft_vocab.choose(Counter(), required, params.vocab.size, vocab)


def _check_drafter(config: dict[str, Any]) -> None:
    """Builds the drafter and its RoPE, and holds its tensors against those that SGLang loads."""
    draft, full = config["draft_vocab_size"], config["vocab_size"]
    with torch.device("meta"):
        embedding = torch.empty(full, config["hidden_size"])
        maps = torch.empty(draft, dtype=torch.int64), torch.empty(full, dtype=torch.bool)
        drafter = Drafter(config, embedding, *maps)
        found = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    if found != export.expected_shapes(config):
        raise UserError(f"the drafter of this target has other tensors than SGLang loads: {found}")


def _check_context(text: dict[str, Any], params: Params) -> None:
    """Positions that the target was never trained on give answers and states that mean nothing."""
    positions, wanted = text["max_position_embeddings"], params.target.context_length
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    scaling = scaling.get("full_attention") or scaling
    original = scaling.get("original_max_position_embeddings") or 0
    covered = max(positions, int((scaling.get("factor") or 1) * original))
    if wanted > covered:
        raise UserError(
            f"target.context_length is {wanted}, the target has {covered} positions "
            f"(max_position_embeddings {positions}); set target.context_length to {covered} or less"
        )


def _embedded(params: Params) -> bool:
    generated = any(one.answers == "generate" for one in params.datasets.values())
    engines = [params.hidden_states.engine, params.bench.engine]
    return "transformers" in engines + ([params.generate.engine] if generated else [])


def _check_embedded(config: dict[str, Any], captured: list[int], hidden_size: int) -> None:
    """The class of the model is built from config.json and hooked as capture does it."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = config.get("model_type")
    if config.get("auto_map"):
        return  # the model's own code: it runs only where target.trust_remote_code allows it
    if kind not in CONFIG_MAPPING_NAMES:
        raise UserError(
            f"transformers knows no model type {kind!r}, so it can neither answer nor be captured "
            "with engine transformers; set engine: sglang in generate, hidden_states and bench"
        )
    try:
        with torch.device("meta"):
            model = model_class(config).from_config(AutoConfig.for_model(**config))
        model = model.eval()
    except Exception as error:  # whatever the class makes of these values
        raise UserError(
            f"transformers cannot build the target from its config.json: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from None
    Replica(model, captured, hidden_size)


def _check_head_size(drafter: dict[str, Any], text: dict[str, Any]) -> None:
    found = drafter["head_dim"]
    own = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if found not in KERNEL_HEADS and (found != own or text.get("kv_lora_rank")):
        raise UserError(
            f"train.architecture.head_dim is {found}; attention kernels have "
            f"{', '.join(map(str, KERNEL_HEADS))}, so set it to one of them"
        )


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
