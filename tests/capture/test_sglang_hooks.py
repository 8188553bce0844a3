"""The hooks inside a SGLang server, on real torch modules called as SGLang calls its own. Alone:
python -m pytest tests/capture/test_sglang_hooks.py

Real SGLang is in test_sglang_capture.py; here are the versions and batches that it cannot be made
to produce on a CPU."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eagle3.capture import sglang_hooks
from eagle3.hidden_states.shards import ShardWriter
from eagle3.records.records import Record
from torch import nn

H, LAYERS = 16, [2, 4, 5]
ROOT = Path(__file__).resolve().parents[2]


class Layer(nn.Module):
    """Hands on (what it adds, residual) and overwrites its inputs, as fused kernels do."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, positions, hidden, batch, residual):
        total = hidden.clone() if residual is None else hidden + residual
        hidden.fill_(float("nan"))
        if residual is not None:
            residual.fill_(float("nan"))
        return total * 0.5 + self.number, total


class Norm(nn.Module):
    def forward(self, hidden, residual):
        total = hidden + residual
        return total / total.norm(dim=-1, keepdim=True), residual


class Model(nn.Module):
    """The module tree and calls of a Llama in SGLang 0.5.14; remembers what went into the captured
    layers."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(n) for n in range(8))
        self.model.norm = Norm()
        self.vision_tower = nn.Module()
        self.vision_tower.layers = nn.ModuleList(Layer(n) for n in range(8))
        self.seen = {}

    def forward(self, embedded, batch):
        hidden, residual = embedded.clone(), None
        for number, layer in enumerate(self.model.layers):
            if number in LAYERS:
                self.seen[number] = hidden + residual
            hidden, residual = layer(None, hidden, batch, residual)
        return self.model.norm(hidden, residual)[0]


class Processor(nn.Module):
    """`logits_processor` as 0.5.23 calls it."""

    def forward(self, ids, hidden, head, batch, aux=None):
        return hidden


def batch_of(rids, lengths, prefixes=None, extend=True):
    return SimpleNamespace(
        rids=rids,
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=prefixes,
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
    )


def register(model, flags):
    """Does what SGLang's hook manager does with --forward-hooks, patterns included."""
    import fnmatch
    import importlib

    matched = []
    for spec in json.loads(flags["forward-hooks"]):
        module, _, name = spec["hook_factory"].partition(":")
        hook = getattr(importlib.import_module(module), name)(spec["config"])
        for path, one in model.named_modules():
            if any(fnmatch.fnmatch(path, pattern) for pattern in spec["target_modules"]):
                one.register_forward_hook(hook)
                matched.append(path)
    return matched


def shard(folder, lengths):
    (folder / "set").mkdir(exist_ok=True)
    rows = [
        Record(f"r{n}", list(range(length)), [True] * length, "train")
        for n, length in enumerate(lengths)
    ]
    return ShardWriter(folder / "set", "k", rows, H, "float32")


def acknowledgements(folder):
    for receiver in sglang_hooks._receivers.values():
        if receiver.offload:
            receiver.offload.drain()
    path = folder / "set" / sglang_hooks.ACKS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rid(row, attempt="x"):
    return f"eaglemake:set/k:{row}:{attempt}"


def test_older_servers_layer_outputs(in_tmp):
    """0.5.14: the sums that went into the captured layers, of each request by its id, others left
    out; catalogue D04."""
    model, writer = Model(), shard(in_tmp, [3, 5])
    matched = register(model, sglang_hooks.server_flags("0.5.14", LAYERS, [1, 3, 4], str(in_tmp)))
    assert matched == ["model.layers.1", "model.layers.3", "model.layers.4", "model.norm"]
    embedded = torch.randn(12, H)
    last = model(embedded, batch_of([rid(1), "HEALTH_CHECK", rid(0)], [5, 4, 3]))
    acks = acknowledgements(in_tmp)
    assert [(a["rid"], a["token"], a["count"], a["bad"]) for a in acks] == [
        (rid(1), 0, 5, None),
        (rid(0), 0, 3, None),
    ]
    for row, tokens in ((1, slice(0, 5)), (0, slice(9, 12))):
        found = writer.read(row)
        assert torch.equal(found["aux"], torch.cat([model.seen[n][tokens] for n in LAYERS], -1))
        assert torch.equal(found["last"], last[tokens])
    writer.discard()


@pytest.mark.parametrize("packed", [False, True])
def test_newer_servers_capture_themselves(in_tmp, packed):
    """0.5.23: a list of three or one packed tensor; a prompt in two chunks is put together by its
    first token's number."""
    processor, writer = nn.ModuleDict({"logits_processor": Processor()}), shard(in_tmp, [9, 2])
    assert register(
        processor, sglang_hooks.server_flags("0.5.23", LAYERS, [1, 3, 4], str(in_tmp))
    ) == ["logits_processor"]
    aux, last = torch.randn(9, 3 * H), torch.randn(9, H)

    def forward(span, batch):
        states = aux[span] if packed else list(aux[span].chunk(3, -1))
        processor["logits_processor"](None, last[span], None, batch, states)

    forward(slice(0, 6), batch_of([rid(0)], [6]))
    forward(slice(6, 9), batch_of([rid(0)], [3], [6]))
    forward(
        slice(0, 1), batch_of([rid(0)], [1], [9])
    )  # a token that was generated, in a mixed batch
    assert sorted((a["token"], a["count"]) for a in acknowledgements(in_tmp)) == [(0, 6), (6, 3)]
    assert torch.equal(writer.read(0)["aux"], aux) and torch.equal(writer.read(0)["last"], last)
    writer.discard()


def test_decode_steps_and_warm_up_are_left_alone(in_tmp):
    processor, writer = nn.ModuleDict({"logits_processor": Processor()}), shard(in_tmp, [4])
    register(processor, sglang_hooks.server_flags("0.5.24", LAYERS, [1, 3, 4], str(in_tmp)))
    for batch in (
        batch_of([rid(0)], [4], extend=False),
        batch_of(None, [4]),
        batch_of([rid(0)], None),
        SimpleNamespace(),
        batch_of(["", "other:set/k:0:x", "eaglemake:../k:0:x", "eaglemake:set/k:0"], [1] * 4),
    ):
        processor["logits_processor"](None, torch.zeros(4, H), None, batch, torch.zeros(4, 3 * H))
    assert acknowledgements(in_tmp) == []
    writer.discard()


def test_what_goes_wrong_is_told_and_never_raised(in_tmp):
    """catalogue D02, D08: no capture, another width, fewer states than tokens, a shard that is
    gone, NaN."""
    processor, writer = nn.ModuleDict({"logits_processor": Processor()}), shard(in_tmp, [4])
    register(processor, sglang_hooks.server_flags("0.5.23", LAYERS, [1, 3, 4], str(in_tmp)))

    def forward(aux, hidden=H, rows=4, name=None):
        processor["logits_processor"](
            None, torch.zeros(rows, hidden), None, batch_of([name or rid(0)], [4]), aux
        )
        return acknowledgements(in_tmp)[-1]

    assert "--enable-return-aux-hidden-states" in forward(None)["fatal"]
    assert "captured width is 32" in forward(torch.zeros(4, 2 * H))["fatal"]
    assert "4 tokens but 3 states" in forward(torch.zeros(3, 3 * H), rows=3)["problem"]
    assert (
        "FileNotFoundError"
        in forward(torch.zeros(4, 3 * H), name="eaglemake:set/gone:0:x")["problem"]
    )
    states = torch.zeros(4, 3 * H)
    states[2, H] = float("nan")
    told = forward(states)
    assert told["bad"] == [False, True, False, False] and told["bad_token"] == 2
    writer.discard()


def test_partial_sums_are_refused(in_tmp):
    """0.5.14 with fused all-reduce: the layer's output is this rank's share only."""
    model, writer = Model(), shard(in_tmp, [4])
    register(model, sglang_hooks.server_flags("0.5.14", LAYERS, [1, 3, 4], str(in_tmp)))
    original = Layer.forward

    def fused(self, *arguments):
        states, residual = original(self, *arguments)
        states._sglang_needs_allreduce_fusion = True
        return states, residual

    Layer.forward = fused
    try:
        model(torch.randn(4, H), batch_of([rid(0)], [4]))
    finally:
        Layer.forward = original
    assert "partial sums" in acknowledgements(in_tmp)[0]["fatal"]
    writer.discard()


def test_only_one_rank_writes(in_tmp):
    processor, writer = nn.ModuleDict({"logits_processor": Processor()}), shard(in_tmp, [4])
    register(processor, sglang_hooks.server_flags("0.5.23", LAYERS, [1, 3, 4], str(in_tmp)))
    sglang_hooks.receiver({"root": str(in_tmp)}).writes = False
    processor["logits_processor"](
        None, torch.zeros(4, H), None, batch_of([rid(0)], [4]), torch.zeros(4, 3 * H)
    )
    assert acknowledgements(in_tmp) == []
    writer.discard()


def test_servers_environment_needs_nothing_but_torch():
    """The module is imported where neither xxhash nor anything else of this project's requirements
    is."""
    code = (
        "import sys\nclass No:\n    def find_spec(self, name, *a):\n"
        "        if name.split('.')[0] in ('xxhash', 'pyarrow', 'pydantic', 'aiohttp', "
        "'transformers', 'yaml'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, No())\nimport eagle3.capture.sglang_hooks\n"
        "print(sorted(m for m in sys.modules if m.startswith('eagle3.')))"
    )
    made = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "workflow"), "PATH": ""},
    )
    assert made.stdout.strip() == str(
        [
            "eagle3.capture",
            "eagle3.capture.offload",
            "eagle3.capture.sglang_hooks",
            "eagle3.hidden_states",
            "eagle3.hidden_states.fp8",
            "eagle3.hidden_states.layout",
        ]
    ), made.stderr
