"""Where everything lies in a shard, against the safetensors library. Alone: python -m pytest
tests/hidden_states/test_layout.py"""

import doctest

import pytest
import torch
from eagle3.hidden_states import layout as shard_layout
from eagle3.hidden_states.layout import Layout, block_of, bytes_per_token
from safetensors.torch import load_file, save


def test_examples():
    assert doctest.testmod(shard_layout).failed == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_any_safetensors_reader_understands_the_file(tmp_path, dtype):
    """The header describes every byte: the library that owns the format reads an empty file of this
    layout."""
    made = Layout([3, 5, 1], 96, dtype)
    file = tmp_path / "one.safetensors"
    file.write_bytes(made.header + bytes(made.size - len(made.header)))
    found = load_file(file)
    assert set(found) == set(made.regions)
    assert found["aux"].shape == (9, 288) and found["aux"].dtype == getattr(torch, dtype)
    assert found["last"].shape == (9, 96) and found["offsets"].dtype == torch.int64
    assert made.regions["aux"].begin % 4 == 0 and len(made.header) % 64 == 0


def test_size_is_known_before_writing():
    """Against the library's own size for the same tensors; the header may be padded by less than 64
    bytes."""
    tensors = {
        "offsets": torch.zeros(4, dtype=torch.int64),
        "input_ids": torch.zeros(9, dtype=torch.int32),
        "aux": torch.zeros(9, 288, dtype=torch.bfloat16),
        "last": torch.zeros(9, 96, dtype=torch.bfloat16),
        "loss_mask": torch.zeros(9, dtype=torch.bool),
    }
    size = Layout([3, 5, 1], 96, "bfloat16").size
    assert abs(size - len(save(tensors))) < 128
    assert (
        size - len(Layout([3, 5, 1], 96, "bfloat16").header)
        == 9 * bytes_per_token(96, "bfloat16") + 32
    )


def test_a_token_has_its_place(tmp_path):
    made = Layout([3, 5], 32, "bfloat16")
    assert made.place("last", 1, 2) == made.regions["last"].begin + 5 * 64
    file = tmp_path / "one"
    file.write_bytes(made.header + torch.tensor(made.starts).numpy().tobytes() + bytes(made.size))
    again = Layout.of_file(file)
    assert again.starts == [0, 3, 8] and again.regions == made.regions and again.dtype == "bfloat16"


@pytest.mark.parametrize(
    "content", [b"", b"123", b"\xff" * 100, (5).to_bytes(8, "little") + b"hello"]
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError):
        Layout.of_file(tmp_path / "bad")


def test_blocks_divide_the_hidden_size():
    assert [block_of(n) for n in (7168, 576, 2880, 32, 50)] == [64, 64, 64, 32, 50]
