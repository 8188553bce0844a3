"""The teacher of training is the model: its distributions are those of the model's own forward
pass, for every architecture. Alone: python -m pytest tests/target/test_teacher.py"""

import json
from types import SimpleNamespace

import architectures
import pytest
import tiny_drafter
import torch
import training_parts as training
from eagle3.core.errors import UserError
from eagle3.drafter import ttt
from eagle3.target import layers
from eagle3.target.configuration import readout, text_config
from eagle3.target.hooks import Replica
from eagle3.training.objective import Objective


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_the_teachers_distribution_is_the_models(name, tmp_path):
    model = architectures.make(name, tmp_path / "model")
    target = tiny_drafter.make_target(tmp_path / "target", model)
    loaded = target.load_model("float32")
    replica = Replica(loaded, layers.captured_layers(target.num_layers), target.hidden_size)
    ids = tiny_drafter.prompts(1, 40, target.vocab_size)[0]
    _, last = replica.states([ids])
    places, head = torch.arange(1, len(ids)), target.head().float()
    teacher = ttt.teacher(SimpleNamespace(last=last.clone()), places, head, target.softcap)
    wanted = loaded(torch.tensor([ids])).logits[0, :-1]
    distance = (teacher.softmax(-1) - wanted.softmax(-1)).abs().sum(-1).max() / 2
    assert distance < 1e-3
    uniform = (wanted.softmax(-1) - 1 / wanted.shape[-1]).abs().sum(-1).mean() / 2
    assert uniform > 0.05  # else the test could not fail


def test_the_fast_path_bounds_the_teacher_as_the_readable_one_does():
    drafter, head = training.make_drafter()
    rows, scale = training.rows()[:3], torch.ones(2)
    found = {}
    for path in ("fast", "readable"):
        for softcap in (None, 1.5):
            settings = training.Train(steps=2, dtype="float32", path=path)
            objective = Objective(drafter, head, settings, softcap)
            drafter.zero_grad()
            total, _, hits = objective(objective.prepare(rows, False)[0], scale)
            total.backward()
            gradient = drafter.fc.weight.grad.clone()
            found[path, softcap] = (total.detach(), gradient, hits.float())
    for softcap in (None, 1.5):
        for fast, readable in zip(found["fast", softcap], found["readable", softcap]):
            torch.testing.assert_close(fast, readable, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found["fast", None][0], found["fast", 1.5][0], rtol=1e-2)


def test_a_change_of_the_logits_that_training_does_not_know_is_refused(tmp_path):
    assert readout({"logits_scaling": 8.0, "final_logit_softcapping": 30.0}) == (0.125, 30.0)
    assert readout({"logit_scale": 1.0, "final_logit_softcapping": None}) == (1.0, None)
    assert readout({"attn_logit_softcapping": 50.0, "router_aux_loss_coef": 0.1}) == (1.0, None)
    for key in ("lm_head_multiplier", "output_multiplier_scale", "dim_model_base"):
        with pytest.raises(UserError, match=f"{key}: 0.5"):
            readout({key: 0.5})


def test_keys_that_a_published_configuration_leaves_out_are_those_of_its_class():
    """Gemma-3's files name only what differs from the defaults of transformers."""
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
    }
    found = text_config(json.loads(json.dumps(published)))
    assert (found["num_attention_heads"], found["vocab_size"]) == (8, 262208)
    full = found["rope_parameters"]["full_attention"]
    assert (full["rope_theta"], full["factor"]) == (1e6, 8.0)
    assert found["torch_dtype"] == "bfloat16" and found["hidden_size"] == 2560
