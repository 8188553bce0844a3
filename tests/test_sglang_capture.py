"""Capture through real SGLang on the CPU, against transformers. Alone:
SGLANG=FOLDER/bin/sglang-cpu python -m pytest tests/test_sglang_capture.py   (make test-sglang; about 3 minutes)"""

import os
import random

import pytest
import sglang_server
import tiny
import torch
from eagle3 import layers as layer_numbers
from eagle3 import sglang_hooks
from eagle3.capture import Job
from eagle3.errors import Refusal
from eagle3.records import Record
from eagle3.sglang_capture import SglangCapture, engine_version
from eagle3.shards import ShardWriter
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.skipif("SGLANG" not in os.environ, reason="SGLANG names no launcher; see make test-sglang")
LAYERS = [2, 4, 5]


def make_deepseek(folder):
    """A tiny random DeepSeek-V3: latent attention, one dense layer, then experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tiny.make_tokenizer(folder)
    torch.manual_seed(3)
    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, moe_layer_freq=1, topk_method="noaux_tc",
        scoring_func="sigmoid", q_lora_rank=32, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        vocab_size=400, max_position_embeddings=2048, bos_token_id=None, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False, initializer_range=0.1, norm_topk_prob=True,
        # The CPU build has this kind of rotary embedding only.
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
                         "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 512})
    DeepseekV3ForCausalLM(config).float().save_pretrained(folder)
    return folder


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


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.make_model(folder / "model") if request.param == "llama" else make_deepseek(folder / "model")
    architecture = "LlamaForCausalLM" if request.param == "llama" else "DeepseekV3ForCausalLM"
    ids = layer_numbers.config_ids(LAYERS, layer_numbers.convention_of(architecture))
    root = folder / "root"
    root.mkdir()
    flags = sglang_hooks.server_flags(engine_version(sglang_server.python()), LAYERS, ids, str(root))
    # A budget of 64 tokens in one pass: longer prompts arrive in chunks.
    with sglang_server.serving(model, {**flags, "chunked-prefill-size": 64, "context-length": 512}, folder / "log") as url:
        yield url, root, model


def test_states_equal_transformers(server):
    """Of short and long (chunked) prompts at once, two of them with a common start; catalogue D01, D02, D04."""
    url, root, model = server
    rows = records([30, 7, 150, 64, 65, 12, 90])
    shared = rows[2].input_ids[:40]
    rows.append(Record("shared", shared + [5, 6, 7], [True] * 43, "train"))
    (root / "set").mkdir(exist_ok=True)
    writer = ShardWriter(root / "set", "k", rows, 32 if "llama" in str(model) else 64, "float32")
    finished = []
    SglangCapture([url], concurrency=16).run((Job(writer, row) for row in range(len(rows))), finished.append)
    assert len(finished) == len(rows) and not writer.problems
    for row, record in enumerate(rows):
        aux, last = reference(model, record.input_ids)
        found = writer.read(row)
        torch.testing.assert_close(found["aux"], aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["last"], last, rtol=1e-4, atol=1e-4)
    writer.discard()


def test_a_refused_row_is_its_own_error(server):
    """A row longer than the context fails alone; the row beside it, in the same call, is whole."""
    url, root, model = server
    rows = records([20, 600, 21])
    (root / "long").mkdir(exist_ok=True)
    writer = ShardWriter(root / "long", "k", rows, 32 if "llama" in str(model) else 64, "float32")
    SglangCapture([url], concurrency=16, patience=5).run((Job(writer, row) for row in range(3)), lambda job: None)
    assert set(writer.problems) == {1} and "refuses the row: 400" in writer.problems[1]
    assert not writer.missing(0) and not writer.missing(2) and writer.missing(1)
    writer.discard()


def test_a_width_that_is_not_3h_stops_the_run(server):
    """catalogue D08: the shard expects another hidden size than the server delivers."""
    url, root, _ = server
    (root / "wide").mkdir(exist_ok=True)
    writer = ShardWriter(root / "wide", "k", records([9]), 48, "float32")
    with pytest.raises(Refusal, match="captured width is .* not 3 x 48"):
        SglangCapture([url], concurrency=16).run(iter([Job(writer, 0)]), lambda job: None)
    writer.discard()
