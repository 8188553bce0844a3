"""Capture through transformers, against output_hidden_states. Alone: python -m pytest
tests/capture/test_transformers_capture.py"""

import random
import threading
from types import SimpleNamespace

import pytest
import torch
from eagle3.capture.transformers_capture import (
    Job,
    TransformersCapture,
    batches,
    pieces,
)
from eagle3.core.errors import UserError
from eagle3.hidden_states.shards import ShardWriter
from eagle3.records.records import Record
from eagle3.target.hooks import Replica, decoder_of
from eagle3.target.layers import captured_layers
from transformers import AutoModelForCausalLM

H, LAYERS = 32, [2, 4, 5]


def records(lengths, seed=0):
    chooser = random.Random(seed)
    return [
        Record(
            f"r{n}", [chooser.randrange(3, 390) for _ in range(length)], [True] * length, "train"
        )
        for n, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def model(tiny_model):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def capture(*models, batch_tokens=256):
    return TransformersCapture(SimpleNamespace(hidden_size=H), LAYERS, batch_tokens, list(models))


def reference(model, record):
    """(inputs of the captured layers side by side, state after the final norm), from the library's
    own outputs."""
    with torch.no_grad():
        states = model(torch.tensor([record.input_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in LAYERS], -1), states[-1][0]


@pytest.mark.parametrize("piece", [1, 20_000, 1 << 27])
def test_states_equal_output_hidden_states(in_tmp, model, monkeypatch, piece):
    """Of lengths that share batches and of one longer than a batch, written in pieces; catalogue
    D01, D04."""
    monkeypatch.setattr("eagle3.capture.transformers_capture.PIECE", piece)
    rows = records([5, 60, 7, 61, 300, 6, 40, 5, 12])
    writer, finished = ShardWriter(in_tmp, "k", rows, H, "float32"), []
    capture(model).run((Job(writer, row) for row in range(len(rows))), finished.append)
    assert sorted(job.row for job in finished) == list(range(len(rows)))
    for row, record in enumerate(rows):
        aux, last = reference(model, record)
        found = writer.read(row)
        torch.testing.assert_close(found["aux"], aux, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["last"], last, rtol=1e-5, atol=1e-5)
    writer.discard()


def test_twice_in_one_process_is_the_same(in_tmp, model):
    """catalogue D01: nothing of an earlier call is left."""
    rows, one = records([9, 30, 31]), capture(model)
    writers = [ShardWriter(in_tmp, name, rows, H, "float32") for name in ("a", "b")]
    for writer in writers:
        one.run((Job(writer, row) for row in range(3)), lambda job: None)
    digests = [writer.finish()["digest"] for writer in writers]
    assert digests[0] == digests[1]


def test_head_of_last_reproduces_greedy_answers(in_tmp, model):
    """catalogue D07: `last` is after the final norm, so that argmax(lm_head(last)) is what greedy
    decoding wrote."""
    prompt = records([8])[0].input_ids
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 8, dtype=torch.long),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    writer = ShardWriter(
        in_tmp, "k", [Record("r", ids, [False] * 8 + [True] * 20, "train")], H, "float32"
    )
    capture(model).run(iter([Job(writer, 0)]), lambda job: None)
    predicted = (writer.read(0)["last"] @ model.lm_head.weight.T).argmax(-1)
    assert predicted[7:-1].tolist() == ids[8:]
    writer.discard()


def test_several_devices_share_the_jobs(in_tmp, model, tiny_model):
    """Two replicas (here both on the CPU), every job once."""
    other = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    rows = records([random.Random(n).randrange(5, 50) for n in range(40)])
    writer, finished, threads = ShardWriter(in_tmp, "k", rows, H, "float32"), [], set()

    def jobs():
        for row in range(len(rows)):
            threads.add(threading.current_thread().name)
            yield Job(writer, row)

    capture(model, other, batch_tokens=10).run(jobs(), finished.append)
    assert sorted(job.row for job in finished) == list(range(40))
    assert not any(writer.missing(row) for row in range(40))
    writer.discard()


def test_an_error_ends_the_run_and_reaches_the_caller(in_tmp, model):
    """From the iterator of jobs and from a writer thread (the shard is gone: a full disk looks the
    same)."""
    rows = records([20, 20])
    writer = ShardWriter(in_tmp, "k", rows, H, "float32")

    def jobs():
        yield Job(writer, 0)
        raise UserError("disk full")

    with pytest.raises(UserError, match="disk full"):
        capture(model, batch_tokens=1).run(jobs(), lambda job: None)
    writer.discard()
    with pytest.raises(FileNotFoundError):
        capture(model).run(iter([Job(writer, 0)]), lambda job: None)


def test_a_width_that_is_not_3h_is_refused(in_tmp, model):
    """catalogue D08"""
    replica = Replica(model, [2, 4], H)
    with pytest.raises(
        UserError, match="captured width is 64, not 3 x 32; check hidden_states.layers"
    ):
        replica.states([[5, 6, 7]])
    for hook in replica.hooks:
        hook.remove()


def test_batches_keep_to_the_budget_without_much_padding():
    rows = records([random.Random(n).randrange(10, 500) for n in range(300)])
    writer = SimpleNamespace(records=rows)
    made = list(batches([Job(writer, row) for row in range(300)], 4096))
    padded = sum(len(batch) * len(batch[0].record.input_ids) for batch in made)
    assert sorted(job.row for batch in made for job in batch) == list(range(300))
    assert all(len(batch) * len(batch[0].record.input_ids) <= 4096 for batch in made)
    # Unsorted batches of this data would be padding to 45 %.
    assert 1 - sum(len(r.input_ids) for r in rows) / padded < 0.08
    assert [len(batch) for batch in batches([Job(writer, 0)], 1)] == [1]


def test_pieces_of_a_batch():
    assert list(pieces([5, 4, 3, 9, 1], 9)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(pieces([5, 4, 3], 100)) == [(0, 3)] and list(pieces([7], 1)) == [(0, 1)]


def make_deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(3)
    return (
        DeepseekV3ForCausalLM(
            DeepseekV3Config(
                hidden_size=H,
                intermediate_size=64,
                moe_intermediate_size=16,
                num_hidden_layers=8,
                num_attention_heads=2,
                num_key_value_heads=2,
                n_routed_experts=4,
                n_shared_experts=1,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_nope_head_dim=8,
                qk_rope_head_dim=8,
                v_head_dim=8,
                vocab_size=400,
                max_position_embeddings=512,
                initializer_range=0.1,
            )
        )
        .float()
        .eval()
    )


def test_deepseek_style_targets(in_tmp):
    """Latent attention and experts: the same layers, the same states, alone and in a batch."""
    model, rows = make_deepseek(), records([30, 12, 25, 31])
    writer = ShardWriter(in_tmp, "k", rows, H, "float32")
    capture(model).run((Job(writer, row) for row in range(4)), lambda job: None)
    for row, record in enumerate(rows):
        aux, last = reference(model, record)
        torch.testing.assert_close(writer.read(row)["aux"], aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(writer.read(row)["last"], last, rtol=1e-4, atol=1e-4)
    writer.discard()


def test_models_of_another_shape_are_refused():
    with pytest.raises(UserError, match="no decoder layers found in Linear"):
        decoder_of(torch.nn.Linear(2, 2))
    assert captured_layers(8) == [2, 4, 5]
