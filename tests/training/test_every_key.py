"""Every key of `train` has its effect or is refused. Alone: python -m pytest
tests/training/test_every_key.py"""

import pytest
import torch
import training_parts as training
from eagle3.core.schema import Train
from eagle3.drafter import export, model
from eagle3.training import warm_start

# A value of each key under which another drafter comes out. A key that the schema does not have is
# passed over, one that stands here without a value fails.
OTHER = {
    "steps": 3,
    "decay": 0.5,
    "epochs": 2,
    "max_updates": 1,
    "lr": 2e-2,
    "fc_steps": "even",
    "schedule": "constant",
    "warmup_ratio": 0.5,
    "weight_decay": 0.5,
    "max_grad_norm": 1e-2,
    "batch_tokens": 64,
    "micro_batches": 2,
    "dtype": "bfloat16",
    "precision": "bf16",
    "seed": 1,
}
ELSEWHERE = {"architecture", "init", "warm_start", "matmul"}  # tested below
WHEN_TO_LOOK = {"validate_every"}
SAME_NUMBERS = {"path"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return training.write_shards(tmp_path_factory.mktemp("data") / "one", training.many_rows())


def trained(folder, data, **params) -> torch.Tensor:
    """The last weights, whatever validation thinks of them."""
    trainer = training.make_trainer(folder, data, **{"epochs": 1, **params})
    trainer.run()
    return torch.cat([p.detach().flatten() for p in trainer.drafter.parameters()])


def test_every_key_stands_in_one_of_the_lists():
    keys = set(Train.model_fields)
    assert keys <= set(OTHER) | ELSEWHERE | WHEN_TO_LOOK | SAME_NUMBERS


def test_a_changed_key_gives_another_drafter(data, in_tmp):
    plain = trained(in_tmp / "plain", data)
    assert torch.equal(trained(in_tmp / "again", data), plain)
    idle = [
        key
        for key, value in OTHER.items()
        if key in Train.model_fields
        and torch.equal(trained(in_tmp / key, data, **{key: value}), plain)
    ]
    assert not idle


@pytest.mark.skipif("matmul" not in Train.model_fields, reason="products follow the precision")
def test_fp8_products_give_another_drafter(data, in_tmp):
    found = [
        trained(in_tmp / kind, data, dtype="bfloat16", matmul=kind) for kind in ("plain", "fp8")
    ]
    assert not torch.equal(*found)


def test_keys_that_say_when_to_look_change_no_weight(data, in_tmp):
    plain = trained(in_tmp / "plain", data)
    assert torch.equal(trained(in_tmp / "often", data, validate_every=1), plain)


def test_the_shape_and_the_start_follow_their_keys(data, in_tmp):
    for key in Train.model_fields["architecture"].annotation.model_fields:
        configs = [
            model.drafter_config(training.SHAPE, architecture, 20, [1, 2, 3], "float32")
            for architecture in ({}, {key: 2})
        ]
        assert configs[0][key] != configs[1][key] == 2 or training.SHAPE[key] == 2
    made, _ = training.make_drafter(seed=5)
    export.write(in_tmp / "theirs", made.state_dict(), made.config)
    rows = training.many_rows()
    drafter, _ = training.make_drafter(spread=0.0)
    starts = [
        warm_start.weights(drafter, Train(**settings), rows, lambda text: None)
        for settings in (
            {"init": "least_squares"},
            {"warm_start": str(in_tmp / "theirs")},
        )
    ]
    own = torch.cat([p.flatten() for p in drafter.parameters()])
    for start in starts:
        assert not torch.equal(torch.cat([p.flatten() for p in start.values()]), own)
