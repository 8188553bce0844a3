"""A grown target computes what the small one does, and its drafter drafts the same. Alone:
python -m pytest tests/benchmarks/test_grown_target.py"""

import sys

import pytest
import tiny
import torch
from eagle3.bench.speculate import Decoder
from eagle3.drafter import export
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(tiny.ROOT / "benchmarks"))
import grown_target

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "num_hidden_layers": 6,
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def models(request, tmp_path_factory):
    """(small, large) models and their folders; norms are far from one, heads are grouped."""
    root = tmp_path_factory.mktemp("grown")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-3,
        tie_word_embeddings=request.param,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.3, 2)
    model.save_pretrained(root / "small")
    grown_target.grow_target(root / "small", root / "large", SHAPE)
    large = AutoModelForCausalLM.from_pretrained(root / "large", dtype=torch.float32).eval()
    return root, model, large


@torch.no_grad()
def test_logits_are_those_of_the_small_target(models):
    _, small, large = models
    assert {key: getattr(large.config, key) for key in SHAPE} == SHAPE
    ids = torch.randint(120, (3, 40), generator=torch.Generator().manual_seed(1))
    wanted, found = small(ids).logits, large(ids).logits
    assert wanted.std() > 0.5  # not all alike
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_drafts_and_answers_are_those_of_the_small_drafter(models):
    from eagle3.drafter import model as drafters
    from eagle3.records import draft_vocab

    root, small, large = models
    maps = draft_vocab.tensors(list(range(0, 120, 2)), 120)
    config = drafters.drafter_config(small.config.to_dict(), {}, 60, [1, 2, 3], "float32")
    made = drafters.Drafter(config, small.get_input_embeddings().weight, maps["d2t"], maps["t2d"])
    made.initialise(small.lm_head.weight.data, 0)
    for name, weight in made.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.3, 2)
    (root / "drafter").mkdir()
    export.write(root / "drafter", made.state_dict(), config)
    grown_target.grow_drafter(root / "drafter", root / "large drafter", root / "large", 64)
    found = []
    for model, folder in ((small, "drafter"), (large, "large drafter")):
        drafter = export.load_drafter(root / folder, model.get_input_embeddings().weight.data)
        decoder, drafts = Decoder(model, [1, 2, 3], [], drafter.eval()), []
        draft = decoder._draft
        decoder._draft = lambda *words, draft=draft, drafts=drafts: (
            drafts.append(draft(*words)) or drafts[-1]
        )
        answer = decoder.speculative(list(range(5, 25)), 24, 3)
        found.append((answer.ids, answer.accepted, drafts))
    assert found[0] == found[1]
    assert len({token for drafts in found[0][2] for token in drafts}) > 3  # not all alike


def test_a_shape_that_does_not_hold_the_small_one_is_refused(models, tmp_path):
    with pytest.raises(SystemExit, match="do not fit"):
        grown_target.grow_target(models[0] / "small", tmp_path, {**SHAPE, "hidden_size": 16})
