"""What a running transformers model computes on its way: the inputs of chosen layers and the final
state, by forward hooks."""

import torch

from eagle3.core.errors import UserError


def decoder_of(model):
    """(list of decoder layers, final norm) of a transformers model. Raises UserError if they cannot
    be found."""
    for path in (
        "model",
        "model.language_model",
        "language_model.model",
        "transformer",
        "language_model",
    ):
        module = model
        for name in path.split("."):
            module = getattr(module, name, None)
        if module is not None and hasattr(module, "layers") and hasattr(module, "norm"):
            return module.layers, module.norm
    raise UserError(
        f"no decoder layers found in {type(model).__name__}; expected model.layers and model.norm"
    )


class Replica:
    """A model on one device, with hooks that keep the inputs of `layers` and the output of the
    final norm."""

    def __init__(self, model, layers: list[int], hidden_size: int):
        self.model, self.layers, self.hidden_size = model, layers, hidden_size
        self.captured: dict[int | str, torch.Tensor] = {}
        decoder, norm = decoder_of(model)
        self.hooks = [
            decoder[layer].register_forward_pre_hook(self._keep_input(layer), with_kwargs=True)
            for layer in layers
        ]
        self.hooks.append(
            norm.register_forward_hook(
                lambda module, inputs, output: self.captured.__setitem__("last", output)
            )
        )

    def _keep_input(self, layer: int):
        def hook(module, inputs, kwargs):
            self.captured[layer] = inputs[0] if inputs else kwargs["hidden_states"]

        return hook

    @torch.inference_mode()
    def forward(self, ids: list[list[int]]) -> None:
        """One pass over sequences padded on the right, where causal attention keeps padding from
        being seen: no mask is needed, and without one the fast attention kernels run."""
        tokens = torch.zeros((len(ids), max(map(len, ids))), dtype=torch.long)
        for row, sequence in enumerate(ids):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
        # logits_to_keep=1: the output projection over all positions would cost more than the
        # capture.
        self.model(
            input_ids=tokens.to(self.model.device, non_blocking=True),
            use_cache=False,
            logits_to_keep=1,
        )

    @torch.inference_mode()
    def states(self, ids: list[list[int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(three captured layers [T, H], final state [T, H]) of sequences end to end, without
        padding, on the device.

        Raises UserError if the width is not 3H.
        """
        self.forward(ids)
        longest = max(map(len, ids))
        real = torch.cat([torch.arange(len(s)) + row * longest for row, s in enumerate(ids)]).to(
            self.model.device
        )

        def packed(states):  # [B, L, H] -> [T, H]
            return states.flatten(0, 1).index_select(0, real)

        layers, last = (
            [packed(self.captured[layer]) for layer in self.layers],
            packed(self.captured["last"]),
        )
        self.captured.clear()
        width = sum(part.shape[-1] for part in layers)
        if width != 3 * self.hidden_size:
            raise UserError(
                f"captured width is {width}, not 3 x {self.hidden_size}; check hidden_states.layers"
            )
        return layers, last
