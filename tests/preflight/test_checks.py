"""What is refused about a target before anything is answered. Alone: python -m pytest
tests/preflight"""

import json
import shutil
import subprocess
import sys

import architectures
import pytest
import tiny
import yaml
from eagle3.core import params as parameters
from eagle3.core.errors import UserError
from eagle3.preflight import capturing, checks
from eagle3.target.model import model_config
from safetensors.torch import load_file, save_file


def whole(**more):
    """Parameters of a tiny project; a key of `more` is a section with what changes in it."""
    content = tiny.params(tiny.ROOT / "nowhere", {"one": (tiny.ROOT / "rows", "generate")})
    for section, values in more.items():
        content[section] = {**content[section], **values}
    return parameters.check(content)


def check(config, **more):
    checks.check_config(config, whole(**more), lambda text: None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> config.json of every tiny architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: model_config(architectures.make(name, folder / name))
        for name in architectures.ARCHITECTURES
    }


@pytest.fixture
def config(tiny_target):
    return model_config(tiny_target.path)


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_every_architecture_of_the_table_works_embedded(name, models):
    check(models[name])


SGLANG = {section: {"engine": "sglang"} for section in ("generate", "hidden_states", "bench")}


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_sglang_is_asked_whether_it_captures(name, models):
    refused = {"gemma2", "granite", "cohere2"}
    said = []
    python = {"server": {"python": "/nowhere/python"}}
    config = models[name]
    if name == "kimi-k2.5":  # its folder on the hub spells the class as SGLang does
        config = {**config, "architectures": ["KimiK25ForConditionalGeneration"]}
    if name in refused:
        with pytest.raises(UserError, match="cannot capture states of .*engine: transformers"):
            check(config, **SGLANG, **python)
        return
    checks.check_config(config, whole(**SGLANG, **python), said.append)
    assert "SGLang 0.5.23 is taken" in said[0]


def test_the_classes_of_an_installed_sglang_are_read_not_imported(tmp_path):
    """A class captures if one that it inherits from does, in whichever file."""
    package = tmp_path / "sglang/srt/models"
    package.mkdir(parents=True)
    (tmp_path / "sglang/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "sglang-9.9.9.dist-info").mkdir()
    (tmp_path / "sglang-9.9.9.dist-info/METADATA").write_text("Name: sglang\nVersion: 9.9.9\n")
    (package / "base.py").write_text(
        "class Base:\n    def set_eagle3_layers_to_capture(self): pass\n"
        "class Plain: pass\nEntryClass = Plain\n"
    )
    (package / "other.py").write_text(
        "import nothing_that_exists\nfrom .base import Base\n"
        "class Middle(Base): pass\nclass Able(Middle): pass\nclass Base(Base): pass\n"
        "EntryClass = [Able, Base]\n"
    )
    done = subprocess.run(
        [sys.executable, capturing.__file__],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert json.loads(done.stdout) == {
        "version": "9.9.9",
        "architectures": {"Able": True, "Base": True, "Plain": False},
    }
    assert capturing.ask("/nowhere/python") is None


@pytest.mark.parametrize(
    "change, sections, said",
    [
        ({"num_hidden_layers": 4}, {}, r"layers \[2, 2, 1\] do not fit a target of 4 layers"),
        ({}, {"hidden_states": {"layers": [2, 5, 8]}}, r"\[2, 5, 8\].* from 0 to 7"),
        ({}, {"vocab": {"size": 401}}, "vocab.size is 401, more than .* 400"),
        ({}, {"target": {"context_length": 4096}}, "context_length is 4096, .* has 512 positions"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {},
            "type dynamic",
        ),
        ({"hidden_size": None}, {}, "no hidden_size"),
        ({"output_multiplier_scale": 0.5}, {}, "output_multiplier_scale: 0.5"),
        ({"model_type": "new_thing"}, {}, "no model type 'new_thing'.*engine: sglang"),
        (
            {},
            {"train": {"architecture": {"num_key_value_heads": 3}}},
            "4 query heads, 3 key and value heads",
        ),
        (
            {},
            {**SGLANG, "train": {"architecture": {"head_dim": 56}}},
            "head_dim is 56; attention kernels have 64",
        ),
    ],
)
def test_what_a_later_stage_would_refuse_is_refused(change, sections, said, config):
    changed = {k: v for k, v in {**config, **change}.items() if v is not None}
    with pytest.raises(UserError, match=said):
        check(changed, **sections)


def test_the_stage_ends_with_the_sentence(folder, in_tmp):
    """Before a digest, an answer or a folder."""
    for name in ("dvc.yaml", "workflow"):
        (in_tmp / name).symlink_to(tiny.ROOT / name)
    content = tiny.params(folder, {"one": (folder / "rows", "generate")})
    (in_tmp / "params.yaml").write_text(yaml.safe_dump(content))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    command = [sys.executable, "workflow/scripts/target.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "do not fit a target of 4 layers" in done.stderr
    assert "Traceback" not in done.stderr and not (in_tmp / "data/target").exists()


def test_scaled_positions_count(config):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
    yarn["original_max_position_embeddings"] = 512
    check({**config, "rope_parameters": yarn}, target={"context_length": 4096})


def test_lengths_that_exceed_the_context_are_refused_in_params():
    with pytest.raises(UserError, match="bench.max_new_tokens 600 after a prompt of 128 tokens"):
        whole(bench={"max_new_tokens": 600})


@pytest.fixture
def folder(tiny_target, tmp_path):
    return shutil.copytree(tiny_target.path, tmp_path / "model")


def drop_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lose_a_shard(folder):
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)


def rewrite(change):
    def act(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return act


def bias(tensors):
    import torch

    tensors["lm_head.bias"] = torch.ones(400)


def packed_head(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].char()


def shorter(tensors):
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:300].clone()


@pytest.mark.parametrize(
    "harm, said",
    [
        (drop_weights, "neither model.safetensors nor an index of it, but pytorch_model.bin"),
        (lose_a_shard, "lacks model-00001-of-00002.safetensors, which its index names"),
        (damage, "model.safetensors"),
        (rewrite(bias), "adds lm_head.bias"),
        (rewrite(lambda tensors: tensors.pop("lm_head.weight")), "no tensor named lm_head.weight"),
        (rewrite(packed_head), "stored as I8"),
        (rewrite(shorter), r"is \(300, 32\), but config.json says vocab_size 400"),
    ],
)
def test_weights_that_a_later_stage_cannot_read_are_refused(harm, said, folder):
    checks.check_files(folder, whole())
    harm(folder)
    with pytest.raises(UserError, match=said):
        checks.check_files(folder, whole())


def test_a_tokenizer_of_another_model_is_refused(folder):
    tiny.make_tokenizer(folder, 390)
    checks.check_files(folder, whole())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 280}))
    with pytest.raises(UserError, match="ids up to ..., the target's vocabulary ends at 280"):
        checks.check_files(folder, whole())


def test_the_draft_vocabulary_must_hold_what_it_always_holds(folder):
    with pytest.raises(UserError, match="vocab.size is 20, but .* must be in it"):
        checks.check_files(folder, whole(vocab={"size": 20}))
