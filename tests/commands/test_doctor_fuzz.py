"""Damaged drafters of every layout: a verdict or a sentence, never a traceback, and never "fine"
for one that drafts otherwise. Alone: python -m pytest tests/commands/test_doctor_fuzz.py
(EAGLEMAKE_SCENARIOS=1 damages 500, otherwise 300)."""

import json
import os
import random
import shutil

import pytest
import tiny_drafter
import torch
import training_parts as training
from eagle3.commands import doctor
from eagle3.core.errors import UserError
from eagle3.core.files import digest_file
from eagle3.drafter import published, rope, ttt
from eagle3.drafter.model import Drafter
from safetensors.torch import load_file, save_file

COUNT = 500 if "EAGLEMAKE_SCENARIOS" in os.environ else 300
JUNK = [None, "x", "7", -1, 0, 1, 1.5, True, [], {}, [1], 1e9, float("nan"), 2**70, {"a": 1}]
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.bool]


def layout(name: str, config: dict, tensors: dict) -> tuple[dict, dict]:
    """The same drafter as others publish it."""
    if name == "eagle":  # EAGLE's own: names of a model of one layer, no layer ids of another sort
        moved = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
        return config, moved
    if name == "speculators":
        outer = {k: config[k] for k in ("architectures", "draft_vocab_size", "eagle_config")}
        inner = {k: v for k, v in config.items() if k not in outer}
        outer |= {"speculators_model_type": "eagle3", "transformer_layer_config": inner}
        outer["torch_dtype"] = config["torch_dtype"]
        moved = {k.replace("midlayer.", "model.layers.0."): v for k, v in tensors.items()}
        return outer, moved
    return config, tensors


@pytest.fixture(scope="module")
def sound(tiny_target, tmp_path_factory):
    """layout -> folder; `ours` has a training.json beside it."""
    root = tmp_path_factory.mktemp("sound")
    base = tiny_drafter.save(tiny_drafter.random_drafter(tiny_target), root / "base")
    config = json.loads((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    for name in ("ours", "specforge", "eagle", "speculators"):
        (root / name).mkdir()
        changed, moved = layout(name, config, tensors)
        (root / name / "config.json").write_text(json.dumps(changed))
        save_file(moved, root / name / "model.safetensors")
    trained = {
        "config": config,
        "weights_digest": digest_file(root / "ours/model.safetensors"),
        "hidden_states": {"one": {"layers": [2, 4, 5], "convention": "plus_one"}},
    }
    (root / "ours/training.json").write_text(json.dumps(trained))
    return root


def damage_config(chooser, folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    place, key = config, chooser.choice(sorted(config))
    while isinstance(place[key], dict) and place[key] and chooser.random() < 0.8:
        place, key = place[key], chooser.choice(sorted(place[key]))
    kind = chooser.random()
    if kind < 0.2:
        del place[key]
    elif kind < 0.5 and type(place[key]) in (int, float):
        place[key] = chooser.choice([place[key] * 2, place[key] + 1, place[key] // 2 or 2])
    elif isinstance(place[key], list) and place[key] and kind < 0.7:
        place[key] = place[key][1:] + chooser.choice([[], [0], [6], ["1"], [2.0]])
    else:
        place[key] = chooser.choice(JUNK)
    path.write_text(json.dumps(config))
    return f"{key} becomes {place.get(key, 'nothing')!r}"


def damage_tensors(chooser, folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = chooser.choice(sorted(tensors))
    tensor = tensors[name]
    kind = chooser.choice(["drop", "rename", "dtype", "nan", "zero", "shape", "cut", "roll", "add"])
    if kind in ("drop", "rename"):
        del tensors[name]
    if kind == "rename":
        tensors[f"{name}.other"] = tensor
    if kind == "dtype":
        tensors[name] = tensor.to(chooser.choice(DTYPES))
    if kind == "nan" and tensor.is_floating_point():
        tensor.view(-1)[0] = chooser.choice([float("nan"), float("inf")])
    if kind == "zero":
        tensor.zero_()
    if kind == "shape":
        tensors[name] = tensor.unsqueeze(0)
    if kind == "cut":
        tensors[name] = tensor[:-1].contiguous()
    if kind == "roll" and name in ("d2t", "t2d"):
        tensors[name] = tensor.roll(1)
    if kind == "add":
        tensors["extra.weight"] = torch.ones(2)
    save_file(tensors, path)
    return f"{kind} {name}"


def damage_bytes(chooser, folder):
    path = folder / chooser.choice(["config.json", "model.safetensors"])
    content = bytearray(path.read_bytes())
    kind = chooser.choice(["cut", "junk", "empty", "list"])
    if kind == "cut":
        content = content[: chooser.randrange(len(content))]
    elif kind == "junk":
        content[: chooser.randrange(1, 40)] = chooser.randbytes(20)
    else:
        content = b"" if kind == "empty" else b"[1]"
    path.write_bytes(content)
    return f"{kind} {path.name}"


def damage_training(chooser, folder):
    """Weights or training.json of another training: only where training.json tells."""
    if not (folder / "training.json").exists():
        return damage_config(chooser, folder)
    if chooser.random() < 0.5:
        tensors = load_file(folder / "model.safetensors")
        tensors["fc.weight"][chooser.randrange(32)] += 1e-3
        save_file(tensors, folder / "model.safetensors")
        return "other weights"
    junk = chooser.choice(["[]", "{", '{"hidden_states": 3}', '{"config": {"hidden_size": "x"}}'])
    (folder / "training.json").write_text(junk)
    return f"training.json {junk}"


def drafts(folder, target) -> torch.Tensor:
    """Logits of two steps as SGLang computes them from these files, and the layers captured."""
    config, tensors = published.read_config(folder), published.read_tensors(folder)
    config.setdefault("hidden_act", "silu")  # the default of the class that SGLang reads it with
    config["rope_parameters"] = rope.rope_parameters(config, config["head_dim"])
    made = Drafter(config, target.embedding().float(), tensors["d2t"], torch.zeros(400).bool())
    weights = {k: v.float() for k, v in tensors.items() if k in dict(made.named_parameters())}
    made.load_state_dict(weights, strict=False)
    batch = ttt.collate([training.make_row("a", [True] * 9, 1, 32, 400)])
    with torch.no_grad():
        logits = [made.logits(state) for state in ttt.unroll(made, batch, 2)]
    ids = published.layer_ids(config) or [1, 3, 4]
    return torch.cat([*(x.flatten() for x in logits), made.draft_ids, torch.tensor(ids)])


def test_a_verdict_or_a_sentence_and_never_fine_for_other_drafts(sound, tiny_target, tmp_path):
    wanted = drafts(sound / "ours", tiny_target)
    for name in ("ours", "specforge", "eagle", "speculators"):
        assert torch.equal(drafts(sound / name, tiny_target), wanted)
        verdicts = {f.verdict for f in doctor.examine(sound / name, tiny_target)}
        assert verdicts == {doctor.GOOD}, name
    seen, fine = {}, 0
    for number in range(COUNT):
        chooser = random.Random(number)
        name = chooser.choice(["ours", "specforge", "eagle", "speculators"])
        folder = shutil.copytree(sound / name, tmp_path / str(number))
        harm = chooser.choice([damage_config] * 3 + [damage_tensors] * 3 + [damage_bytes])
        if chooser.random() < 0.1:
            harm = damage_training
        what = f"{number}, {name}: {harm(chooser, folder)}"
        try:
            findings = doctor.examine(folder, tiny_target)
        except UserError as error:
            assert str(error)
            continue
        worst = {f.verdict for f in findings}
        seen[what] = worst
        if worst == {doctor.GOOD}:
            fine += 1
            torch.testing.assert_close(drafts(folder, tiny_target), wanted, msg=what)
        shutil.rmtree(folder)
    assert sum(doctor.BAD in verdicts for verdicts in seen.values()) > COUNT / 3
    assert fine < COUNT / 2
