"""fp8 with power-of-two scales. Alone: python -m pytest tests/hidden_states/test_fp8.py"""

import torch
from eagle3.hidden_states import fp8


def states(tokens=64, width=192):
    """Like hidden states: a few channels a thousand times as large as the rest."""
    made = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    made[:, 5] *= 3000
    return made * torch.logspace(-2, 2, tokens).unsqueeze(1)


def test_error_is_that_of_three_mantissa_bits():
    """At most 1/16 of each number, or of the smallest step of its block."""
    x = states()
    y = fp8.dequantise(*fp8.quantise(x, 64)).float()
    largest = x.unflatten(-1, (-1, 64)).abs().amax(-1, keepdim=True).expand(-1, -1, 64).flatten(1)
    assert ((y - x).abs() <= x.abs() / 16 + largest * 2**-17).all()


def test_quantising_twice_changes_nothing():
    once = fp8.dequantise(*fp8.quantise(states(), 64))
    assert torch.equal(fp8.dequantise(*fp8.quantise(once, 64)), once)


def test_extremes():
    """Zeros stay zeros, a bf16-sized 1e38 comes back, and NaN does not raise (the row is
    quarantined elsewhere)."""
    x = torch.tensor(
        [[0.0] * 4, [1e38, -1e38, 1.0, 0.0], [1e-38] * 4, [float("nan")] * 4, [float("inf")] * 4]
    )
    y = fp8.dequantise(*fp8.quantise(x, 4)).float()
    assert torch.equal(y[0], x[0]) and torch.allclose(y[1, :2], x[1, :2], rtol=1 / 16)
    assert torch.isfinite(y[2]).all()


def test_stored_keeps_other_types():
    numbers, scales = fp8.stored(states(), "bfloat16", 64)
    assert scales is None and torch.equal(numbers, states().to(torch.bfloat16))
