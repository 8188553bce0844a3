"""Which layers are captured, and how a drafter's config.json must number them so that SGLang
captures the same.

Captured numbers mean: the *input* of decoder layer i, residual added, 0-based; so i = 2 is what
layer 1 hands on."""

from eagle3.core.errors import UserError

PLUS_ONE, IF_FIRST_IS_ONE = "plus_one", "plus_one_if_first_is_one"
# SGLang's model classes that add 1 to explicit ids only when the first of them is 1.
CONDITIONAL = ("DeepseekV2", "DeepseekV3", "KimiK2", "KimiK25", "Kimi_K2")


def captured_layers(num_layers: int, wanted: list[int] | None = None) -> list[int]:
    """The three captured layers: `wanted`, or SGLang's default 2, N//2, N-3. Raises UserError if
    one does not exist.

    >>> captured_layers(61)
    [2, 30, 58]
    """
    layers = list(wanted) if wanted is not None else [2, num_layers // 2, num_layers - 3]
    if (
        len(layers) != 3
        or sorted(set(layers)) != layers
        or layers[0] < 0
        or layers[-1] >= num_layers
    ):
        raise UserError(
            f"hidden_states.layers {layers} do not fit a target of {num_layers} layers: three "
            "rising numbers from 0 to "
            f"{num_layers - 1} are needed{'; set them in params.yaml' if wanted is None else ''}"
        )
    return layers


def convention_of(architecture: str, wanted: str = "auto") -> str:
    """How SGLang reads ids for this architecture; `wanted` overrides."""
    if wanted != "auto":
        return wanted
    return IF_FIRST_IS_ONE if architecture.startswith(CONDITIONAL) else PLUS_ONE


def config_ids(captured: list[int], convention: str) -> list[int]:
    """`eagle_aux_hidden_state_layer_ids` for captured layers.

    >>> config_ids([2, 30, 58], "plus_one_if_first_is_one")
    [1, 29, 57]
    >>> config_ids([4, 30, 58], "plus_one_if_first_is_one")
    [4, 30, 58]
    """
    if convention == PLUS_ONE or captured[0] == 2:
        ids = [layer - 1 for layer in captured]
    else:
        ids = list(captured)
    if ids[0] < 0 or served_layers(ids, convention) != captured:
        raise UserError(
            f"captured layers {captured} cannot be written in the convention {convention}; "
            "choose others"
        )
    return ids


def served_layers(ids: list[int], convention: str) -> list[int]:
    """The layers whose input SGLang captures for the ids of a config: the reading side of
    `config_ids`."""
    if convention == PLUS_ONE or ids[0] == 1:
        return [i + 1 for i in ids]
    return list(ids)
