"""Where everything lies in a shard file: a safetensors file whose every byte is known before the
first one is written.

So rows can be written in any order, by any process: the file itself says where row r's states go.
The standard library and torch only, because the hook inside the SGLang server imports it too.

Regions, in file order, of S sequences with T tokens in all and hidden size H:
`offsets` int64 [S+1], `input_ids` int32 [T], `aux` [T, 3H], `last` [T, H], with fp8 also
`aux_scales` [T, 3H/block] and
`last_scales` [T, H/block] (uint8: exponents of two, biased by 127), `loss_mask` bool [T].
"""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

KINDS = {"bfloat16": ("BF16", 2), "float32": ("F32", 4), "float8_e4m3fn": ("F8_E4M3", 1)}
NAMES = {kind: name for name, (kind, _) in KINDS.items()}
STATES = ("aux", "last", "aux_scales", "last_scales")
BLOCK = 64
# Bytes in one write: 27 MiB at once took ten times the kernel's time (ext4, Linux 6.18).
PIECE = 1 << 19


def block_of(hidden_size: int) -> int:
    """Numbers that share an fp8 scale: the largest divisor of H up to 64."""
    return next(n for n in range(min(BLOCK, hidden_size), 0, -1) if hidden_size % n == 0)


def bytes_per_token(hidden_size: int, dtype: str) -> int:
    """Bytes that one token takes in a shard: 4H numbers, their scales if any, its id and its mask.

    >>> bytes_per_token(7168, "bfloat16"), bytes_per_token(7168, "float8_e4m3fn")
    (57349, 29125)
    """
    scales = 4 * hidden_size // block_of(hidden_size) if dtype == "float8_e4m3fn" else 0
    return 4 * hidden_size * KINDS[dtype][1] + scales + 5


@dataclass(frozen=True)
class Region:
    """Bytes `begin` to `end` of the file: a tensor of this safetensors kind and shape."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return (self.end - self.begin) // self.shape[0] if self.shape[0] else 0


class Layout:
    """`regions` by name, `header` (the file's first bytes), `size` in bytes, `starts` (first token
    of each row, then T)."""

    def __init__(self, lengths: list[int], hidden_size: int, dtype: str):
        kind, width = KINDS[dtype]
        total, block = sum(lengths), block_of(hidden_size)
        self.starts = [0]
        for length in lengths:
            self.starts.append(self.starts[-1] + length)
        sizes = [
            ("offsets", "I64", (len(lengths) + 1,), 8),
            ("input_ids", "I32", (total,), 4),
            ("aux", kind, (total, 3 * hidden_size), width),
            ("last", kind, (total, hidden_size), width),
        ]
        if dtype == "float8_e4m3fn":
            sizes += [
                ("aux_scales", "U8", (total, 3 * hidden_size // block), 1),
                ("last_scales", "U8", (total, hidden_size // block), 1),
            ]
        sizes.append(("loss_mask", "BOOL", (total,), 1))
        place, entries = 0, {"__metadata__": {"format": "pt"}}
        for name, kind, shape, width in sizes:
            count = width
            for n in shape:
                count *= n
            entries[name] = {
                "dtype": kind,
                "shape": list(shape),
                "data_offsets": [place, place + count],
            }
            place += count
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * ((56 - len(text)) % 64)  # the data begins at a multiple of 64
        self._fill(struct.pack("<Q", len(text)) + text, entries)

    def _fill(self, header: bytes, entries: dict) -> None:
        self.header = header
        self.regions = {
            name: Region(
                e["dtype"], tuple(e["shape"]), *(len(header) + place for place in e["data_offsets"])
            )
            for name, e in entries.items()
            if name != "__metadata__"
        }
        self.size = max(region.end for region in self.regions.values())

    @classmethod
    def of_file(cls, path: str | Path) -> "Layout":
        """The layout of a file, finished or not. Raises ValueError or OSError if it is none."""
        layout = cls.__new__(cls)
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length < 1 << 20:
                raise ValueError(f"{path} is no shard")
            text = file.read(length)
            try:
                layout._fill(prefix + text, json.loads(text))
                offsets = layout.regions["offsets"]
                file.seek(offsets.begin)
                layout.starts = list(
                    struct.unpack(f"<{offsets.shape[0]}q", file.read(offsets.end - offsets.begin))
                )
            except (
                KeyError,
                TypeError,
                IndexError,
                AttributeError,
                OverflowError,
                struct.error,
            ) as error:
                raise ValueError(f"{path} has a broken header: {error}") from None
        return layout

    @property
    def dtype(self) -> str:
        return NAMES[self.regions["aux"].kind]

    @property
    def states(self) -> list[str]:
        """Names of the regions that a capture fills."""
        return [name for name in STATES if name in self.regions]

    def place(self, name: str, row: int, token: int = 0) -> int:
        """Byte of the file where the states of a row's token begin."""
        region = self.regions[name]
        return region.begin + (self.starts[row] + token) * region.row_bytes


def write_tokens(
    path: str, layout: Layout, row: int, token: int, stored: dict[str, torch.Tensor], span: slice
) -> None:
    """Writes the tokens `span` of `stored` (on the CPU) as the tokens of `row` from `token` on, and
    into the rows behind it where there are more of them.

    The file is opened by name each time: once it is finished and renamed, a late write finds
    nothing to spoil."""
    file = os.open(path, os.O_WRONLY)
    try:
        for name in layout.states:
            data = memoryview(stored[name][span].contiguous().view(torch.uint8).numpy()).cast("B")
            place = layout.place(name, row, token)
            while data:
                count = os.pwrite(file, data[:PIECE], place)
                data, place = data[count:], place + count
    finally:
        os.close(file)
