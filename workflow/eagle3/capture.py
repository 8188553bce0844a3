"""Hidden states of the target through transformers: forward hooks, batches of similar length bounded by tokens."""

from typing import Iterator

import torch

from eagle3.errors import Refusal
from eagle3.records import Record
from eagle3.shards import States
from eagle3.target import Target


def decoder_of(model):
    """(list of decoder layers, final norm) of a transformers model. Raises Refusal if they cannot be found."""
    for path in ("model", "model.language_model", "language_model.model", "transformer", "language_model"):
        module = model
        for name in path.split("."):
            module = getattr(module, name, None)
        if module is not None and hasattr(module, "layers") and hasattr(module, "norm"):
            return module.layers, module.norm
    raise Refusal(f"no decoder layers found in {type(model).__name__}; expected model.layers and model.norm")


class TransformersCapture:
    """Captures the inputs of `layers` and the output of the final norm.

    `last` is after the final norm: transformers applies it inside the model, and `lm_head(last)` are the logits.
    """

    last_is = "after_final_norm"

    def __init__(self, target: Target, layers: list[int]):
        self.model = target.load_model()
        self.captured: dict[str | int, torch.Tensor] = {}
        decoder, norm = decoder_of(self.model)
        for layer in layers:
            decoder[layer].register_forward_pre_hook(self._keep_input(layer), with_kwargs=True)
        norm.register_forward_hook(lambda module, inputs, output: self.captured.__setitem__("last", output))
        self.layers, self.hidden_size = layers, target.hidden_size

    def _keep_input(self, layer: int):
        def hook(module, inputs, kwargs):
            self.captured[layer] = inputs[0] if inputs else kwargs["hidden_states"]

        return hook

    @torch.inference_mode()
    def batch(self, ids: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(`aux` [L, 3H], `last` [L, H]) of each sequence, on the CPU in the model's type. Padding is on the right,
        where causal attention keeps it from being seen."""
        longest = max(map(len, ids))
        tokens = torch.zeros((len(ids), longest), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, sequence in enumerate(ids):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        device = self.model.device
        arguments = {} if len(ids) == 1 else {"attention_mask": mask.to(device)}
        # logits_to_keep=1: the output projection over all positions would cost more than the capture.
        self.model(input_ids=tokens.to(device), use_cache=False, logits_to_keep=1, **arguments)
        aux = torch.cat([self.captured[layer] for layer in self.layers], dim=-1)  # [B, L, 3H]
        if aux.shape[-1] != 3 * self.hidden_size:
            raise Refusal(f"captured width is {aux.shape[-1]}, not 3 x {self.hidden_size}; check hidden_states.layers")
        aux, last = aux.cpu(), self.captured["last"].cpu()
        return [(aux[row, : len(s)], last[row, : len(s)]) for row, s in enumerate(ids)]

    def run(self, group: list[Record], batch_tokens: int) -> Iterator[States]:
        """States of `group`, in its order. Records of similar length share a forward pass."""
        order = sorted(range(len(group)), key=lambda i: len(group[i].input_ids))
        found: dict[int, States] = {}
        batch: list[int] = []
        for i in [*order, None]:
            if batch and (i is None or (len(batch) + 1) * len(group[i].input_ids) > batch_tokens):
                for place, (aux, last) in zip(batch, self.batch([group[b].input_ids for b in batch])):
                    found[place] = States(group[place], aux, last)
                batch = []
            if i is not None:
                batch.append(i)
        for i in range(len(group)):
            yield found.pop(i)
