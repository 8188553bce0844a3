"""Broken drafters of every kind, and what is said about them. Alone: python -m pytest
tests/commands/test_doctor.py"""

import json
import shutil
import subprocess
import sys

import pytest
import tiny
import tiny_drafter
import torch
from eagle3.commands import doctor
from eagle3.core.files import digest_file
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def sound(tiny_target, tmp_path_factory):
    """A drafter as this project exports it, its draft vocabulary a part of the target's."""
    return tiny_drafter.save(
        tiny_drafter.random_drafter(tiny_target), tmp_path_factory.mktemp("sound")
    )


@pytest.fixture
def broken(sound, tmp_path):
    """`broken(config changes, tensors=function that changes them)` -> folder; a value of ...
    removes a key."""

    def make(tensors=None, **config):
        folder = tmp_path / "drafter"
        shutil.copytree(sound, folder)
        found = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(
            json.dumps({k: v for k, v in found.items() if v is not ...})
        )
        if tensors:
            loaded = load_file(folder / "model.safetensors")
            tensors(loaded)
            save_file(loaded, folder / "model.safetensors")
        return folder

    return make


def found(folder, target, subject: str, verdict: str) -> str:
    """The one finding on a subject; everything else must be fine."""
    findings = doctor.examine(folder, target)
    others = [f for f in findings if f.subject != subject and f.verdict != doctor.GOOD]
    assert not others, others
    (finding,) = [f for f in findings if f.subject == subject and f.verdict != doctor.GOOD]
    assert finding.verdict == verdict and finding.remedy
    return f"{finding.reason} {finding.remedy}"


def test_ours_is_sound(sound, tiny_target):
    findings = doctor.examine(sound, tiny_target)
    assert {f.verdict for f in findings} == {doctor.GOOD}
    subjects = [
        "flag",
        "sizes",
        "tensors",
        "draft vocabulary",
        "embedding",
        "layer ids",
        "RoPE",
        "context",
        "dtype",
    ]
    assert [f.subject for f in findings] == subjects
    assert "--speculative-algorithm EAGLE3" in findings[0].reason


def test_published_names_are_known(sound, tiny_target, broken):
    def rename(tensors):
        for name in list(tensors):
            if name.startswith("midlayer."):
                tensors[name.replace("midlayer.", "model.layers.0.")] = tensors.pop(name)

    assert {f.verdict for f in doctor.examine(broken(rename), tiny_target)} == {doctor.GOOD}


def test_missing_head(broken, tiny_target):
    """catalogue E07"""
    text = found(broken(lambda t: t.pop("lm_head.weight")), tiny_target, "tensors", doctor.BAD)
    assert "lm_head.weight missing" in text and "random" in text


def test_square_fc(broken, tiny_target):
    """catalogue E01: an EAGLE-2 drafter under EAGLE-3's name."""

    def narrow(tensors):
        tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()

    assert "3 x 32 wide" in found(broken(narrow), tiny_target, "tensors", doctor.BAD)


def test_unknown_tensor(broken, tiny_target):
    assert "skip" in found(
        broken(lambda t: t.update(extra=torch.ones(2))), tiny_target, "tensors", doctor.WARNING
    )


def test_nan(broken, tiny_target):
    assert "NaN" in found(
        broken(lambda t: t["norm.weight"].fill_(float("nan"))), tiny_target, "tensors", doctor.BAD
    )


def test_d2t_of_target_ids(broken, sound, tiny_target):
    """catalogue E03: offsets, not ids."""
    ids = torch.arange(300) + 50

    def absolute(tensors):
        tensors["d2t"] = ids.clone()
        tensors["t2d"] = torch.zeros(400, dtype=torch.bool).index_fill(0, ids, True)

    assert "holds target ids" in found(
        broken(absolute), tiny_target, "draft vocabulary", doctor.BAD
    )


def test_d2t_arange(broken, tiny_target):
    """catalogue E03: arange instead of zeros sends draft id i to 2i, beyond the vocabulary."""

    def wrong(tensors):
        tensors["d2t"] = torch.arange(300)

    assert "holds target ids" in found(broken(wrong), tiny_target, "draft vocabulary", doctor.BAD)


def test_no_map(broken, tiny_target):
    """catalogue E04"""
    findings = doctor.examine(broken(lambda t: t.pop("d2t")), tiny_target)
    assert any(
        f.subject == "draft vocabulary" and "first 300 ids" in f.reason and f.verdict == doctor.BAD
        for f in findings
    )


def test_map_that_was_never_computed_and_maps_that_disagree(broken, tiny_target):
    """catalogue E04, E12: the first ids, because no map was there; and a map beside the t2d of an
    earlier one."""

    def first_ids(tensors):
        tensors["d2t"] = torch.zeros(300, dtype=torch.int64)

    findings = [
        f for f in doctor.examine(broken(first_ids), tiny_target) if f.verdict != doctor.GOOD
    ]
    assert ["all zeros" in findings[0].reason, "t2d marks 300" in findings[1].reason] == [
        True,
        True,
    ] and len(findings) == 2


def test_stop_token_outside(tiny_target, tmp_path, broken):
    """catalogue E21"""
    ids = torch.arange(300) + 50

    def shifted(tensors):
        tensors["d2t"] = ids - torch.arange(300)
        tensors["t2d"] = torch.zeros(400, dtype=torch.bool).index_fill(0, ids, True)

    assert "end of an answer is never drafted" in found(
        broken(shifted), tiny_target, "draft vocabulary", doctor.WARNING
    )


def test_random_embedding(broken, tiny_target):
    """catalogue E06"""
    text = found(
        broken(lambda t: t.update({"embed_tokens.weight": torch.randn(400, 32)})),
        tiny_target,
        "embedding",
        doctor.WARNING,
    )
    assert "differs from the target's" in text


def test_an_embedding_that_is_a_little_another_is_looked_at(broken, tiny_target):
    """A tolerance of a hundredth let pass what differs by half of a row's size."""
    small = tiny_target.embedding() + 0.0095 * torch.randn(400, 32).sign()
    text = found(
        broken(lambda t: t.update({"embed_tokens.weight": small})),
        tiny_target,
        "embedding",
        doctor.WARNING,
    )
    assert "of its rows differ" in text


def test_what_it_was_trained_as_is_compared_with_both_values(sound, tiny_target, tmp_path):
    """config.json, states and weights against training.json."""
    folder = shutil.copytree(sound, tmp_path / "ours")
    config = json.loads((folder / "config.json").read_text())
    states = {"one": {"layers": [2, 4, 5], "convention": "plus_one"}}
    training = {
        "config": config,
        "hidden_states": states,
        "weights_digest": digest_file(folder / "model.safetensors"),
    }
    (folder / "training.json").write_text(json.dumps(training))
    assert {f.verdict for f in doctor.examine(folder, tiny_target)} == {doctor.GOOD}
    other = {**config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    for changed, said in (
        (other, r"[0, 2, 4] instead of [1, 3, 4], since the states of one are of layers [2, 4, 5]"),
        ({k: v for k, v in config.items() if k != "eagle_config"}, "None instead of [1, 3, 4]"),
        ({**config, "rms_norm_eps": 1e-3}, "rms_norm_eps 0.001 instead of 1e-06"),
    ):
        (folder / "config.json").write_text(json.dumps(changed))
        (verdict,) = [f for f in doctor.examine(folder, tiny_target) if f.subject == "training"]
        assert verdict.verdict == doctor.BAD and said in verdict.reason
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    assert "has digest" in found(folder, tiny_target, "training", doctor.BAD)


def test_own_embedding_is_fine(broken, tiny_target):
    folder = broken(lambda t: t.update({"embed_tokens.weight": tiny_target.embedding().clone()}))
    assert {f.verdict for f in doctor.examine(folder, tiny_target)} == {doctor.GOOD}


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    "config, text, verdict",
    [
        ({"rope_theta": ..., "rope_parameters": ...}, "fall back to 10000", doctor.BAD),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            "instead of 5000",
            doctor.BAD,
        ),
        ({"rope_theta": 10000.0}, "disagree", doctor.BAD),
        ({"rope_theta": ...}, "other form", doctor.WARNING),
        (
            {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 4.0}},
            "disagree",
            doctor.BAD,
        ),
        (
            {
                "rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 4.0},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_type",
            doctor.WARNING,
        ),
        (
            {"rope_parameters": {**YARN, "rope_theta": 5000.0}, "rope_scaling": YARN},
            "SGLang 0.5.14 computes cos and sin 1.139 times those of training",
            doctor.BAD,
        ),
    ],
)
def test_rope(config, text, verdict, broken, tiny_target):
    """catalogue E09"""
    assert text in found(broken(**config), tiny_target, "RoPE", verdict)


def test_short_context(broken, tiny_target):
    assert "is 128, the target's 512" in found(
        broken(max_position_embeddings=128), tiny_target, "context", doctor.BAD
    )


def test_other_dtype(broken, tiny_target):
    """catalogue E10"""
    assert "bfloat16, the target is float32" in found(
        broken(torch_dtype="bfloat16"), tiny_target, "dtype", doctor.BAD
    )


@pytest.mark.parametrize(
    "eagle, text, verdict",
    [
        ({"use_aux_hidden_state": False}, "no states are captured", doctor.BAD),
        ({}, "names none", doctor.WARNING),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "2 layers", doctor.BAD),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}, "has 8", doctor.BAD),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
            "under the other convention",
            doctor.WARNING,
        ),
    ],
)
def test_layer_ids(eagle, text, verdict, broken, tiny_target):
    """catalogue E22: states of other layers than in training. The target has 8 layers: [1, 3, 4]
    captures 2, 4, 5."""
    assert text in found(broken(eagle_config=eagle), tiny_target, "layer ids", verdict)


def test_another_targets_drafter_and_another_architecture(broken, tiny_target):
    findings = doctor.examine(
        broken(hidden_size=64, architectures=["LlamaForCausalLMEagle"]), tiny_target
    )
    wrong = {f.subject for f in findings if f.verdict == doctor.BAD}
    assert {"flag", "sizes"} <= wrong


def test_files_that_cannot_be_read(broken, tiny_target):
    folder = broken()
    (folder / "model.safetensors").write_bytes(b"no tensors")
    assert doctor.examine(folder, tiny_target)[-1].verdict == doctor.BAD
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in doctor.examine(folder, tiny_target)[-1].reason


def test_command(sound, broken, tiny_target):
    """Against a plain model folder; exit code and words."""

    def run(folder):
        return subprocess.run(
            [
                sys.executable,
                "workflow/scripts/doctor.py",
                str(folder),
                "--target",
                str(tiny_target.path),
            ],
            cwd=tiny.ROOT,
            capture_output=True,
            text=True,
        )

    good, bad = run(sound), run(broken(lambda t: t.pop("lm_head.weight")))
    assert good.returncode == 0 and "SGLang will use it rightly" in good.stdout, good.stderr
    assert (
        bad.returncode == 1
        and "lm_head.weight missing" in bad.stdout
        and "1 findings: wrong" in bad.stdout
    )
