"""Weights to start from. Alone: python -m pytest tests/training/test_warm_start.py"""

import json

import pytest
import torch
import training_parts as training
from eagle3.core.errors import UserError
from eagle3.drafter import export, ttt
from eagle3.drafter.model import Drafter
from eagle3.records import draft_vocab as vocab
from eagle3.training import warm_start
from safetensors.torch import load_file, save_file


def published(folder, seed=3):
    made, _ = training.make_drafter(seed=seed)
    export.write(folder, made.state_dict(), made.config)
    return made


def test_the_same_vocabulary_gives_the_same_drafter(in_tmp):
    theirs = published(in_tmp / "theirs")
    ours, _ = training.make_drafter(seed=3)
    ours.initialise(torch.randn(40, 16), 9)
    assert warm_start.from_drafter(ours, in_tmp / "theirs") == training.DRAFT
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))


def test_another_vocabulary_keeps_each_row_with_its_token(in_tmp):
    """Catalogue E03: rows follow target ids, never draft ids."""
    theirs = published(in_tmp / "theirs")
    ours, head = training.make_drafter(seed=4)
    ours.initialise(head, 0)
    known = warm_start.from_drafter(ours, in_tmp / "theirs")
    rows = {int(i): row for i, row in zip(theirs.draft_ids, theirs.lm_head.weight)}
    assert known == len(set(rows) & set(ours.draft_ids.tolist())) and 0 < known < training.DRAFT
    for i, row in zip(ours.draft_ids.tolist(), ours.lm_head.weight):
        assert torch.equal(row, rows.get(i, head[i]))


def test_what_does_not_fit_is_refused_by_name(in_tmp):
    published(in_tmp / "theirs")
    with pytest.raises(
        UserError, match=r"midlayer.mlp.down_proj.weight is \(16, 24\) instead of \(16, 28\)"
    ):
        warm_start.from_drafter(training.make_drafter(intermediate_size=28)[0], in_tmp / "theirs")
    tensors = load_file(in_tmp / "theirs/model.safetensors")
    config = (in_tmp / "theirs/config.json").read_text()
    for dropped, said in (("fc.weight", "fc.weight is missing"), ("d2t", "d2t is missing")):
        (in_tmp / dropped).mkdir()
        (in_tmp / dropped / "config.json").write_text(config)
        save_file(
            {k: v for k, v in tensors.items() if k != dropped},
            in_tmp / dropped / "model.safetensors",
        )
        with pytest.raises(UserError, match=said):
            warm_start.from_drafter(training.make_drafter()[0], in_tmp / dropped)
    (in_tmp / "empty").mkdir()
    with pytest.raises(UserError, match="no .safetensors"):
        warm_start.from_drafter(training.make_drafter()[0], in_tmp / "empty")


def nan(tensors):
    tensors["norm.weight"][3] = float("nan")


def negative(tensors):
    tensors["d2t"][0] = -1


@pytest.mark.parametrize(
    "config, tensors, said",
    [
        ({"rope_theta": 60.0, "rope_parameters": ...}, None, "rope_theta 60.0 instead of 50.0"),
        (
            {"rope_parameters": {"rope_theta": 50.0, "rope_type": "linear", "factor": 2.0}},
            None,
            "RoPE's rope_type 'linear' instead of 'default'",
        ),
        ({"num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 1}, None, "head_dim 8 i"),
        ({"rms_norm_eps": 1e-3}, None, "rms_norm_eps 0.001 instead of 1e-05"),
        ({"norm_output": True}, None, "norm_output is True"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
            None,
            r"layer_ids \[0, 1, 2\] instead of \[1, 2, 3\]",
        ),
        ({"eagle_config": ...}, None, r"layer_ids None instead of \[1, 2, 3\]"),
        ({}, nan, "norm.weight holds NaN"),
        ({}, negative, "does not rise"),
    ],
)
def test_other_functions_of_the_same_shapes_are_refused(config, tensors, said, in_tmp):
    published(in_tmp / "theirs")
    found = json.loads((in_tmp / "theirs/config.json").read_text()) | config
    found = {key: value for key, value in found.items() if value is not ...}
    (in_tmp / "theirs/config.json").write_text(json.dumps(found))
    if tensors:
        loaded = load_file(in_tmp / "theirs/model.safetensors")
        tensors(loaded)
        save_file(loaded, in_tmp / "theirs/model.safetensors")
    with pytest.raises(UserError, match=said):
        warm_start.from_drafter(training.make_drafter()[0], in_tmp / "theirs")


def test_least_squares_finds_a_linear_target():
    """States that are a linear map of aux and of the next token's embedding: the fit predicts what
    random weights cannot."""
    size, words = 16, 40
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(words, size, generator=generator) for _ in range(2))
    by_aux, by_token = (
        torch.randn(3 * size, size, generator=generator) * 0.3,
        torch.randn(size, size, generator=generator),
    )
    rows = []
    for i in range(60):
        row = training.make_row(str(i), [True] * 20, i)
        tokens = embedding[row["input_ids"][2:]]
        row["last"][2:] = (
            row["aux"][1:-1] @ by_aux
            + tokens * torch.rsqrt(tokens.square().mean(-1, keepdim=True)) @ by_token
        )
        rows.append(row)
    config = training.make_drafter(num_key_value_heads=4)[0].config
    maps = vocab.tensors(list(range(words)), words)
    drafter = Drafter(
        {**config, "draft_vocab_size": words}, embedding, maps["d2t"], maps["t2d"]
    ).initialise(head, 0)
    batch = ttt.collate(rows[50:])

    def accuracy():
        found = ttt.hits(drafter, batch, ttt.target_choices(batch, head), 1)
        return (found == 1).sum().item() / (found >= 0).sum().item()

    before = accuracy()
    warm_start.least_squares(drafter, rows[:50])
    assert before < 0.2 and accuracy() > 0.5
