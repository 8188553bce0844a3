"""Every architecture of docs/targets.md, tiny and whole: prepare to bench with the embedded engine,
and its states through a real SGLang where SGLANG names one. Writes the page.

Alone: make test-targets (14 builds of 8 stages; 16 minutes on two busy cores, and a minute more for
each architecture with SGLANG="FOLDER/bin/sglang-cpu"). `make test` holds the page against what
stage target asks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import architectures
import pytest
import tiny
import tiny_drafter
import torch
import yaml
from eagle3.preflight import capturing
from eagle3.target import layers
from eagle3.target.hooks import Replica
from eagle3.target.model import Target, model_config

PAGE = tiny.ROOT / "docs/targets.md"
HEAD = """# Targets

Which architectures a drafter can be built for. `make test-targets` writes this page: it builds a
tiny random model of each with every stage, and counts an architecture as working when the bench's
outputs equal the target's own, token for token. Every target is looked at by stage `target` and by
`make plan` before anything is answered, so one that is not in this table is refused in seconds or
works.

The third column is what SGLang {version} says of its own model classes. Another version is asked
itself: the one of `server.python`. The fourth says what its CPU build, started with the tiny model,
handed out against what transformers computes: the largest difference, relative to the largest
state. The CPU build cannot run every model; that says nothing about a GPU.

| target | embedded, prepare to bench | SGLang {version} serves a drafter | states through SGLang |
|---|---|---|---|
"""
TAIL = """
What the drafter is, whatever the target: one Llama layer with silu, since SGLang's Llama layer has
no other activation; the target's RoPE base and scaling, written so that SGLang 0.5.14 and 0.5.23
compute what training does; whole heads turned, also where the target turns a part of each; heads of
128 where the target's attention is latent (MLA). The teacher is the target with all that it does to
its logits: Granite's and Cohere's factors and Gemma's bound are applied, any other is refused.

Refused, with the field and what helps: dynamic and other scalings of RoPE than plain, linear,
llama3, yarn and longrope; a bias of lm_head; weights that are not safetensors, or whose embedding
or head is quantized; fewer than seven layers without `hidden_states.layers`; a context longer than
the target's positions.
"""
slow = pytest.mark.skipif(
    "EAGLEMAKE_TARGETS" not in os.environ, reason="slow; make test-targets runs it"
)
STAGES = ("target", "prepare", "generate", "tokenize", "vocab", "extract", "train", "bench")


def rows() -> dict[str, list[str]]:
    """Published name -> cells of the page as it stands."""
    found = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    return {cells[0]: list(cells[1:]) for cells in found if cells[0] != "target"}


def write(name: str, column: int, text: str) -> None:
    table = rows() if PAGE.exists() else {}
    published = architectures.ARCHITECTURES[name][2]
    table.setdefault(published, ["", serves(name), "not tried"])[column] = text
    order = [each[2] for each in architectures.ARCHITECTURES.values()]
    lines = [f"| {n} | {' | '.join(table[n])} |\n" for n in order if n in table]
    version = json.loads(capturing.KNOWN.read_text())["version"]
    PAGE.write_text(HEAD.format(version=version) + "".join(lines) + TAIL)


def serves(name: str) -> str:
    known = json.loads(capturing.KNOWN.read_text())["architectures"]
    if name == "kimi-k2.5":
        return "yes" if known["KimiK25ForConditionalGeneration"] else "no"
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = architectures.ARCHITECTURES[name][0]
    with torch.device("meta"):
        config = AutoConfig.for_model(kind)
    return "yes" if known.get(AutoModelForCausalLM._model_mapping[type(config)].__name__) else "no"


def test_the_page_says_what_stage_target_does():
    table = rows()
    assert list(table) == [published for _, _, published in architectures.ARCHITECTURES.values()]
    for name, (_, _, published) in architectures.ARCHITECTURES.items():
        assert table[published][0].startswith("works") and table[published][1] == serves(name)


def build(folder: Path, name: str) -> Path:
    """All stages by their own command lines, in `folder`."""
    for entry in ("dvc.yaml", "workflow"):
        (folder / entry).symlink_to(tiny.ROOT / entry)
    model = architectures.make(name, folder / "model")
    source = tiny.make_rows(folder / "rows.jsonl", 12)
    content = tiny.params(model, {"one": (source, "generate")})
    content["datasets"]["one"]["max_samples"] = 12
    content["train"]["max_updates"] = 4
    content["hidden_states"]["shard_bytes"] = 1 << 20
    (folder / "params.yaml").write_text(yaml.safe_dump(content))
    definitions = yaml.safe_load((tiny.ROOT / "dvc.yaml").read_text())["stages"]
    for stage in STAGES:
        command = definitions[stage].get("do", definitions[stage])["cmd"].replace("${key}", "one")
        done = subprocess.run(
            [sys.executable, *command.split()[1:]], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{stage} of {name}: {done.stderr[-2000:]}"
    return folder


@slow
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_an_architecture_goes_through_every_stage(name, tmp_path):
    report = json.loads((build(tmp_path, name) / "data/bench/report.json").read_text())
    outputs = report["all"]["outputs"]
    assert outputs["equal"] == outputs["compared"] == report["all"]["prompts"] > 0
    write(name, 0, "works")


@slow
@pytest.mark.skipif("SGLANG" not in os.environ, reason="SGLANG names no launcher")
@pytest.mark.parametrize("name", [n for n in architectures.ARCHITECTURES if serves(n) == "yes"])
def test_sglang_hands_out_the_states_that_transformers_computes(name, tmp_path):
    import sglang_server
    from eagle3.capture import sglang_hooks
    from eagle3.capture.sglang_capture import SglangCapture, engine_version
    from eagle3.capture.transformers_capture import Job
    from eagle3.hidden_states.shards import ShardWriter
    from eagle3.records.records import Record

    model = architectures.make(name, tmp_path / "model")
    target: Target = tiny_drafter.make_target(tmp_path / "target", model)
    if name == "kimi-k2.5":
        spelled = {**model_config(model), "architectures": ["KimiK25ForConditionalGeneration"]}
        (model / "config.json").write_text(json.dumps(spelled))
    captured = layers.captured_layers(target.num_layers)
    architecture = model_config(model)["architectures"][0]
    ids = layers.config_ids(captured, layers.convention_of(architecture))
    (root := tmp_path / "root").mkdir()
    flags = sglang_hooks.server_flags(
        engine_version(sglang_server.python()), captured, ids, str(root)
    )
    asked = tiny_drafter.prompts(4, 30, target.vocab_size)
    records = [Record(f"r{i}", p, [True] * len(p), "train") for i, p in enumerate(asked)]
    (root / "set").mkdir()
    writer = ShardWriter(root / "set", "k", records, target.hidden_size, "float32")
    try:
        with sglang_server.serving(
            model, {**flags, "context-length": 256}, tmp_path / "log"
        ) as url:
            jobs = (Job(writer, row) for row in range(len(records)))
            SglangCapture([url], concurrency=4).run(jobs, lambda job: None)
    except Exception as error:
        write(name, 2, "the CPU build cannot run it")
        log = (tmp_path / "log").read_text()[-3000:] if (tmp_path / "log").exists() else ""
        pytest.skip(f"SGLang's CPU build does not run it: {error}\n{log}")
    replica, worst = Replica(target.load_model("float32"), captured, target.hidden_size), 0.0
    for row, record in enumerate(records):
        aux, last = replica.states([record.input_ids])
        found = writer.read(row)
        for wanted, got in ((torch.cat(aux, -1), found["aux"]), (last, found["last"])):
            worst = max(worst, ((wanted - got).abs().max() / wanted.abs().max()).item())
    assert worst < 1e-3, worst
    write(name, 2, f"equal ({worst:.0e})" if worst else "equal (0)")
