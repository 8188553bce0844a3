"""docs/drafter.md: its table is what SGLang loads, its example is the drafter. Alone: python -m
pytest tests/test_drafter_page.py"""

import re

import pytest
import tiny
import tiny_drafter
import torch
from eagle3.drafter import export, ttt

PAGE = (tiny.ROOT / "docs/drafter.md").read_text()


def test_the_table_has_every_tensor_and_no_other():
    shown = set()
    for cell in re.findall(
        r"^\| (`\S+`(?:, `\S+`)*) \| .*\[", PAGE.partition("## config.json")[0], re.M
    ):
        names = re.findall(r"`(\S+?)`", cell)
        stem = names[0].rpartition(".weight")[0].rpartition(".")[0]
        shown |= {name.replace("…", f"{stem}.") for name in names}
    shape = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), 8
    ) | {"head_dim": 2, "vocab_size": 9, "draft_vocab_size": 5}
    assert shown == set(export.expected_shapes(shape))


@pytest.mark.parametrize("seed", range(3))
def test_the_example_drafts_what_the_drafter_does(seed, tiny_target, tmp_path):
    made = tiny_drafter.random_drafter(tiny_target, seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)
    folder = tiny_drafter.save(made, tmp_path / "drafter")
    code = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
    names = {"folder": str(folder)}
    exec(code, names)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 400, (9,), generator=generator)
    states = torch.randn(8, 96, generator=generator)
    draft, state = names["draft"](made.embedding, tokens, states)
    row = {
        "id": "",
        "input_ids": tokens,
        "loss_mask": torch.ones(9, dtype=torch.bool),
        "aux": torch.cat([states, torch.zeros(1, 96)]),
        "last": torch.zeros(9, 32),
    }
    with torch.no_grad():
        wanted = next(iter(ttt.unroll(made, ttt.collate([row]), 1)))[:8]
        best = made.draft_ids[made.logits(wanted[-1:]).argmax()]
    torch.testing.assert_close(state, wanted, rtol=1e-4, atol=1e-5)
    assert draft == int(best)
