"""A target's config.json: the text part of it, with the defaults of its class, and what the model
does to its logits after lm_head."""

from typing import Any

from eagle3.core.errors import UserError

INHERITED = (
    "torch_dtype",
    "dtype",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# Published configurations leave out what equals the default of their class in transformers.
FILLED_IN = (
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "tie_word_embeddings",
)
# Names under which models change their logits. The first three are done in `readout`.
SCALES = {"logit_scale": lambda x: x, "logits_scaling": lambda x: 1 / x}
SOFTCAP = "final_logit_softcapping"
UNKNOWN = ("logit", "lm_head_", "output_multiplier", "final_logit", "dim_model_base", "mup_")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's configuration. Of multi-modal models it is the part `text_config`, with
    what it inherits from the top. Keys that the file leaves out have the value that transformers
    gives them, if it knows the model type."""
    if isinstance(inner := config.get("text_config"), dict):
        config = {**{k: config[k] for k in INHERITED if k in config}, **inner}
    # An old file names RoPE in two places; the class brings them together.
    known = _with_defaults(config) if any(key not in config for key in FILLED_IN) else {}
    return {**{k: known[k] for k in FILLED_IN if known.get(k) is not None}, **config}


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING_NAMES or config.get("auto_map"):
        return {}
    try:
        return AutoConfig.for_model(**config).to_dict()
    except Exception:  # what a damaged file makes of a class; who needs a key that lacks names it
        return {}


def readout(config: dict[str, Any]) -> tuple[float, float | None]:
    """(factor, softcap) that the model applies to the product of its last state with lm_head: the
    logits are `softcap * tanh(factor * x / softcap)`, or `factor * x` without a softcap.

    Raises UserError naming a key that looks like another such change: a teacher that leaves it out
    has another distribution with the same argmax, so that no later check would see it."""
    factor, softcap = 1.0, None
    for key, value in config.items():
        if value in (None, 1, False) or isinstance(value, str | list | dict):
            continue
        if key in SCALES:
            factor = SCALES[key](float(value))
        elif key == SOFTCAP:
            softcap = float(value)
        elif key.startswith(UNKNOWN):
            raise UserError(
                f"the target's config.json has {key}: {value}, which may change its logits in a "
                "way that training does not know; such a target is not supported"
            )
    return factor, softcap
