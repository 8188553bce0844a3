"""Capture through real SGLang on the CPU, against transformers. Alone: SGLANG=FOLDER/bin/sglang-cpu
python -m pytest tests/capture/test_sglang_capture.py   (make test-sglang; about 4 minutes)

Of DeepSeek's models the CPU build loads a tiny one and fails in its attention kernel (0.5.23,
torch_native); those run through transformers in test_capture.py."""

import os
import random

import extraction_project
import pytest
import sglang_server
import tiny
import torch
from eagle3.capture import sglang_hooks
from eagle3.capture.sglang_capture import SglangCapture, engine_version
from eagle3.capture.transformers_capture import Job
from eagle3.core.errors import UserError
from eagle3.hidden_states import shards
from eagle3.hidden_states.shards import ShardWriter
from eagle3.records.records import Record
from eagle3.serving.client import Client
from eagle3.target import layers as layer_numbers
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.skipif(
    "SGLANG" not in os.environ, reason="SGLANG names no launcher; see make test-sglang"
)
LAYERS, H = [2, 4, 5], 32


def records(lengths):
    chooser = random.Random(1)
    made = []
    for n, length in enumerate(lengths):
        ids = [chooser.randrange(3, 390) for _ in range(length)]
        made.append(Record(f"r{n}", ids, [True] * length, "train"))
    return made


def reference(model_path, ids):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in LAYERS], -1), states[-1][0]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    model = tiny.make_model(folder / "model")
    ids = layer_numbers.config_ids(LAYERS, layer_numbers.convention_of("LlamaForCausalLM"))
    root = folder / "root"
    root.mkdir()
    flags = sglang_hooks.server_flags(
        engine_version(sglang_server.python()), LAYERS, ids, str(root)
    )
    # A budget of 64 tokens in one pass: longer prompts arrive in chunks.
    with sglang_server.serving(
        model, {**flags, "chunked-prefill-size": 64, "context-length": 512}, folder / "log"
    ) as url:
        yield url, root, model


def test_states_equal_transformers(server):
    """Of short and long (chunked) prompts at once, two of them with a common start; catalogue D01,
    D02, D04."""
    url, root, model = server
    rows = records([30, 7, 150, 64, 65, 12, 90])
    shared = rows[2].input_ids[:40]
    rows.append(Record("shared", shared + [5, 6, 7], [True] * 43, "train"))
    (root / "set").mkdir(exist_ok=True)
    writer = ShardWriter(root / "set", "k", rows, H, "float32")
    finished = []
    SglangCapture([Client(url)], concurrency=16).run(
        (Job(writer, row) for row in range(len(rows))), finished.append
    )
    assert len(finished) == len(rows) and not writer.problems
    for row, record in enumerate(rows):
        aux, last = reference(model, record.input_ids)
        found = writer.read(row)
        torch.testing.assert_close(found["aux"], aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["last"], last, rtol=1e-4, atol=1e-4)
    writer.discard()


def test_a_refused_row_is_its_own_error(server):
    """A row longer than the context fails alone; the row beside it, in the same call, is whole."""
    url, root, _ = server
    rows = records([20, 600, 21])
    (root / "long").mkdir(exist_ok=True)
    writer = ShardWriter(root / "long", "k", rows, H, "float32")
    SglangCapture([Client(url)], concurrency=16, patience=5).run(
        (Job(writer, row) for row in range(3)), lambda job: None
    )
    assert set(writer.problems) == {1} and "refuses the row: http_400" in writer.problems[1]
    assert not writer.missing(0) and not writer.missing(2) and writer.missing(1)
    writer.discard()


def test_a_width_that_is_not_3h_stops_the_run(server):
    """catalogue D08: the shard expects another hidden size than the server delivers."""
    url, root, _ = server
    (root / "wide").mkdir(exist_ok=True)
    writer = ShardWriter(root / "wide", "k", records([9]), 48, "float32")
    with pytest.raises(UserError, match="captured width is .* not 3 x 48"):
        SglangCapture([Client(url)], concurrency=16).run(iter([Job(writer, 0)]), lambda job: None)
    writer.discard()


@pytest.mark.timeout(1500)
def test_the_stage_through_a_lease(tmp_path):
    """extract.py with hidden_states.engine sglang: it starts the server, and its shards hold what
    transformers' hold. The flags of the recipe for the server that answers are no hindrance: SGLang
    refuses the second cache without the first."""
    flags = {**sglang_server.FLAGS, "enable-hierarchical-cache": True, "hicache-size": 1}
    found = {}
    for engine in ("sglang", "transformers"):
        project = extraction_project.make(
            tmp_path / engine, tiny.make_model(tmp_path / f"model-{engine}")
        )
        content = tiny.read_params(project)
        content["hidden_states"] = {"dtype": "bfloat16", "engine": engine, "shard_bytes": 65536}
        content["server"] = {
            "python": sglang_server.python(),
            "flags": flags,
            "idle_timeout": 0,
            "environment": sglang_server.ENVIRONMENT,
            "port": sglang_server.free_port(),
        }
        tiny.write_params(project, content)
        tiny.run(project, "dvc", "repro", "extract@one")
        out = project / "data/hidden_states/one"
        manifest = shards.read_manifest(out)
        assert (
            manifest["engine"] == engine
            and manifest["checks"]["difference_alone_and_batched"] < 0.001
        )
        found[engine] = {row["id"]: row for row in shards.ShardSet([out], "train", {})}
    assert found["sglang"].keys() == found["transformers"].keys() and len(found["sglang"]) == 20
    for identifier, row in found["sglang"].items():
        for name in ("aux", "last"):
            torch.testing.assert_close(
                row[name], found["transformers"][identifier][name], rtol=2**-6, atol=2**-8
            )
