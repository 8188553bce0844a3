"""Steps of fc by the size of its inputs. Alone: python -m pytest
tests/training/test_even_steps.py"""

import pytest
import torch
from eagle3.training import even_steps


def test_factors_are_the_median_size_over_the_channels():
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"aux": torch.randn(500, 3, generator=generator) * torch.tensor([1.0, 10.0, 1000.0])}
        for _ in range(4)
    ]
    rows[0]["aux"][0] = 1e6  # the first position does not count
    found = even_steps.factors(rows)
    torch.testing.assert_close(found, torch.tensor([10.0, 1.0, 0.01]), rtol=0.1, atol=0)
    torch.testing.assert_close(even_steps.factors(rows, limit=499), even_steps.factors(rows[:1]))


def test_it_is_training_on_inputs_of_one_size():
    """W on x with scaled steps, against W' on x' = x f with W = W' f: the same outputs after every
    step."""
    generator = torch.Generator().manual_seed(1)
    size = torch.tensor([0.5, 3.0, 200.0, 7.0])
    x, wanted = (
        torch.randn(64, 4, generator=generator) * size,
        torch.randn(64, 5, generator=generator),
    )
    by = size.median() / size
    start = torch.randn(5, 4, generator=generator) * 0.1
    weight, twin = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start / by)
    optimizers = [
        torch.optim.AdamW([w], lr=1e-2, weight_decay=0, eps=1e-20) for w in (weight, twin)
    ]
    for _ in range(20):
        for w, inputs, optimizer, factors in (
            (weight, x, optimizers[0], by),
            (twin, x * by, optimizers[1], None),
        ):
            optimizer.zero_grad()
            (inputs @ w.T - wanted).square().mean().backward()
            with even_steps.of(w, factors):
                optimizer.step()
        torch.testing.assert_close(weight, twin * by, rtol=1e-4, atol=1e-6)
    assert (weight - start).abs().max() > 0.01


def test_an_error_inside_passes_through_and_changes_nothing():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with pytest.raises(KeyError), even_steps.of(weight, torch.full((3,), 0.5)):
        raise KeyError("x")
    assert torch.equal(weight, torch.ones(2, 3))
