"""The peers' own model and loss on the cases of train_throughput.py, one peer per process.

    PYTHONPATH=FOLDER python benchmarks/train_peers.py {specforge|speculators} --folder FOLDER --out
    FILE

FOLDER holds the unpacked wheels specforge-0.2.0 and speculators-0.9.0. Only their model, loss,
attention and optimizer run; modules of their data side that are not installed are replaced by empty
ones. SpecForge pads: its real tokens/s on records as they are is its dense rate times the share of
real tokens in a batch of 8. speculators packs, so it runs batches of such records too, and computes
every position."""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from train_throughput import FULL, LIMIT, TINY, make_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(name: str):
    """A module of a peer. What it imports for reading data and calling servers is not needed
    here."""
    for _ in range(40):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or error.name.split(".")[0] in (
                "specforge",
                "speculators",
                "torch",
                "transformers",
            ):
                raise
            sys.modules[error.name] = mock.MagicMock(__path__=[], __spec__=mock.MagicMock())
            for loaded in [m for m in sys.modules if m.startswith(("specforge", "speculators"))]:
                del sys.modules[loaded]
    raise RuntimeError(f"{name} cannot be imported")


def llama(size: dict):
    from transformers import LlamaConfig

    config = LlamaConfig(
        **{k: v for k, v in size.items() if k not in ("draft", "length", "steps")},
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        num_hidden_layers=1,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    config.draft_vocab_size = size["draft"]
    return config


def specforge(size: dict):
    """(cases, update) of SpecForge: bf16 model, fp32 masters, flex attention, batches of 8. `cases`
    is {name: [(inputs, tokens)]}."""
    model = load("specforge.algorithms.eagle3.model")
    draft = (
        load("specforge.modeling.draft.llama3_eagle")
        .LlamaForCausalLMEagle3(llama(size), attention_backend="flex_attention")
        .to(DEVICE, torch.bfloat16)
    )
    draft.t2d.zero_()
    draft.t2d[: 2 * size["draft"] : 2] = True
    draft.d2t.copy_(torch.arange(size["draft"], device=DEVICE))
    draft.embed_tokens.weight.requires_grad_(False)
    whole = model.OnlineEagle3Model(
        draft, length=size["steps"], attention_backend="flex_attention"
    ).to(DEVICE)
    optimizer = load("specforge.optimizer").BF16Optimizer(draft, lr=1e-4, total_steps=1000)
    batch, length, hidden = 8, size["length"], size["hidden_size"]
    head = (torch.randn(size["vocab_size"], hidden, device=DEVICE) * 0.05).bfloat16()
    inputs = {
        "input_ids": torch.randint(size["vocab_size"], (batch, length), device=DEVICE),
        "attention_mask": torch.ones(batch, length, device=DEVICE, dtype=torch.long),
        "target": None,
        "loss_mask": torch.ones(batch, length, 1, device=DEVICE, dtype=torch.long),
        "hidden_states": torch.randn(batch, length, 3 * hidden, device=DEVICE).bfloat16(),
        "target_head_weight": head,
        "target_hidden_for_compact": torch.randn(batch, length, hidden, device=DEVICE).bfloat16(),
    }

    def update(inputs):
        losses = whole(**inputs)[0]
        sum(0.8**k * loss for k, loss in enumerate(losses)).backward()
        optimizer.step()

    return {"dense": [(inputs, batch * length)]}, update


def speculators(size: dict):
    """The same of speculators: compiled flex attention, 8192 packed tokens, AdamW, eager loss."""
    core, config = load("speculators.models.eagle3.core"), load("speculators.config")
    eager = load("speculators.losses.eager")
    layer = llama(size)
    layer._attn_implementation = "simple_flex_attention" if DEVICE.type == "cuda" else "eager"
    proposal = core.GreedyTokenProposalConfig(speculative_tokens=size["steps"])
    model = core.Eagle3DraftModel(
        core.Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=size["draft"],
            eagle_aux_hidden_state_layer_ids=[2, 15, 28],
            speculators_config=config.SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=config.VerifierConfig(
                    name_or_path=None, architectures=["LlamaForCausalLM"]
                ),
            ),
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02)
    model = model.to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=DEVICE.type == "cuda"
    )
    length, hidden = 4 * size["length"], size["hidden_size"]
    states = torch.randn(1, length, 3 * hidden, device=DEVICE).bfloat16()
    last = torch.randn(1, length, hidden, device=DEVICE).bfloat16()

    def packed(rows: list[dict]):
        """A batch of `length` tokens; what the rows leave free is a document of its own without
        supervision."""
        lengths = [len(row["input_ids"]) for row in rows]
        real = sum(lengths)
        lengths += [length - real] if real < length else []
        mask = torch.zeros(1, length, dtype=torch.bool)
        mask[0, :real] = torch.cat([row["loss_mask"] for row in rows])
        return {
            "hidden_states": states,
            "verifier_last_hidden_states": last,
            "loss_mask": mask.to(DEVICE),
            "input_ids": torch.randint(size["vocab_size"], (1, length), device=DEVICE),
            "document_ids": torch.repeat_interleave(
                torch.arange(len(lengths)), torch.tensor(lengths)
            )[None].to(DEVICE),
            "position_ids": torch.cat([1 + torch.arange(n) for n in lengths])[None].to(DEVICE),
            "ttt_steps": size["steps"],
            "ttt_step_loss_decay": 0.8,
            "loss_config": {"kl_div": (eager.kl_div_loss, 1.0)},
        }, real

    def update(inputs):
        optimizer.zero_grad(set_to_none=True)
        model(**inputs)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        optimizer.step()

    return {
        kind: [
            packed(make_rows(size, length, kind, seed))
            for seed in range(1 if kind == "dense" else 3)
        ]
        for kind in ("dense", "real")
    }, update


def padding(size: dict) -> float:
    """Share of real tokens in padded batches of 8 records as they are."""
    lengths = [len(row["input_ids"]) for row in make_rows(size, 200 * size["length"], "real")]
    groups = [lengths[i : i + 8] for i in range(0, len(lengths) - 7, 8)]
    return sum(map(sum, groups)) / sum(8 * max(g) for g in groups)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=["specforge", "speculators"])
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else FULL
    torch.manual_seed(0)
    wait = torch.cuda.synchronize if DEVICE.type == "cuda" else (lambda: None)
    cases, update = globals()[arguments.peer](size)
    found = []
    for case, batches in cases.items():
        for turn in range(3):
            update(batches[turn % len(batches)][0])
        wait()
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start, done, count = time.perf_counter(), 0, 0
        while time.perf_counter() - start < arguments.seconds:
            inputs, tokens = batches[count % len(batches)]
            update(inputs)
            wait()
            done, count = done + tokens, count + 1
        rate = done / (time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else None
        rates = {case: rate} if "real" in cases else {case: rate, "real": rate * padding(size)}
        found += [
            {
                "case": name,
                "variant": arguments.peer,
                "tokens_per_second": value,
                "share_of_limit": value / LIMIT,
                "peak_gib": peak,
                "tokens_per_update": done / count,
            }
            for name, value in rates.items()
        ]
        arguments.out.write_text(json.dumps(found))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
