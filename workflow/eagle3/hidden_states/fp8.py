"""Hidden states in fp8 e4m3: one power-of-two scale for every block of a token's channels. Needs
torch only.

Powers of two keep the mantissa as it is, so that quantising twice changes nothing, and they take
one byte."""

import torch

LARGEST = 448.0  # of e4m3
BIAS = 127
CHUNK = 1 << 26  # numbers that are converted at a time


def quantise(states: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers e4m3 [T, W], exponents uint8 [T, W/block]) of states [T, W].

    A block's scale is the smallest power of two that is no less than its largest magnitude / 448.
    """
    tokens, width = states.shape
    numbers = torch.empty((tokens, width), dtype=torch.float8_e4m3fn, device=states.device)
    exponents = torch.empty((tokens, width // block), dtype=torch.uint8, device=states.device)
    step = max(1, CHUNK // width)
    for start in range(
        0, tokens, step
    ):  # the fp32 copies of a whole prefill batch would take gigabytes
        rows = slice(start, start + step)
        blocks = states[rows].float().unflatten(-1, (-1, block))  # [t, W/block, block]
        largest = blocks.abs().amax(-1, keepdim=True)
        mantissa, exponent = torch.frexp(largest / LARGEST)
        exponent = (exponent - (mantissa == 0.5).int()).clamp(-BIAS, BIAS - 1)
        numbers[rows] = (
            torch.ldexp(blocks, -exponent)
            .clamp(-LARGEST, LARGEST)
            .flatten(-2)
            .to(torch.float8_e4m3fn)
        )
        exponents[rows] = (exponent.squeeze(-1) + BIAS).to(torch.uint8)
    return numbers, exponents


def dequantise(numbers: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """States [T, W] in bf16, which holds every e4m3 number times a power of two exactly."""
    block = numbers.shape[-1] // exponents.shape[-1]
    blocks = numbers.to(torch.bfloat16).unflatten(-1, (-1, block))
    scales = torch.ldexp(
        torch.ones_like(exponents, dtype=torch.float32), exponents.int() - BIAS
    ).to(torch.bfloat16)
    return (blocks * scales.unsqueeze(-1)).flatten(-2)


def stored(
    states: torch.Tensor, dtype: str, block: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(states in the storage type `dtype`, their scales if it has any)."""
    if dtype == "float8_e4m3fn":
        return quantise(states, block)
    return states.to(getattr(torch, dtype)), None
