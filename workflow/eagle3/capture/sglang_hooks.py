"""Runs inside the SGLang server, loaded by its public flag `--forward-hooks`: writes hidden states
to shards.

A request whose id is `eaglemake:FOLDER/KEY:ROW:TRY` wants its states in row ROW of
ROOT/FOLDER/KEY.part, a shard that the client has laid out already, so a chunk of a long prompt goes
where its first token's number says. What was written is told by a line of JSON in `written.acks`
beside the shard. Every other request passes untouched. ROOT is in the hook's `config`.

Two ways, by version (server_flags): `captured` is a hook on `logits_processor`, where the engine
hands on what it captured itself (0.5.23); `layer` and `final` are hooks on layers' outputs and on
the final norm (0.5.14).

Needs torch, and nothing of this project that the server's environment might lack. A hook never
raises: that would end the server. What goes wrong is told in the acknowledgement, and the client
makes it that row's error."""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from eagle3.capture.offload import Offload, states_to_store
from eagle3.hidden_states.layout import Layout, write_tokens

PREFIX = "eaglemake"
ACKS = "written.acks"
logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Tokens of one request in one forward pass: `begin` to `end` of the batch are `token` … of its
    row."""

    rid: str
    part: str
    row: int
    token: int
    begin: int
    end: int


def part_of(rid: str, root: str) -> tuple[str, int] | None:
    """(path of the shard, row) that a request's id names; None if it is not one of ours."""
    words = rid.split(":") if isinstance(rid, str) else []
    if len(words) != 4 or words[0] != PREFIX or ".." in words[1]:
        return None
    return os.path.join(root, f"{words[1]}.part"), int(words[2])


class Receiver:
    """All hooks of a server process share one. `take` is called once for each forward pass."""

    def __init__(self, root: str):
        self.root = root
        self.offload: Offload | None = None
        self.layers: dict[int, torch.Tensor] = {}
        self.batch: Any = None
        self.found: list[Piece] = []
        self.writes: bool | None = None

    def wanted(self, batch: Any) -> list[Piece]:
        """`pieces`, found once in a forward pass, which asks for them at every captured layer."""
        if batch is not self.batch or batch is None:
            self.batch, self.found = batch, self.pieces(batch)
        return self.found

    def pieces(self, batch: Any) -> list[Piece]:
        """Our requests in a prefill batch; none in decode steps, warm-up and on ranks that do not
        write."""
        mode = getattr(batch, "forward_mode", None)
        rids, lengths = getattr(batch, "rids", None), getattr(batch, "extend_seq_lens_cpu", None)
        if mode is None or not mode.is_extend() or not rids or lengths is None:
            return []
        if self.writes is None:
            self.writes = first_rank()
        prefixes = getattr(batch, "extend_prefix_lens_cpu", None) or [0] * len(rids)
        found, begin = [], 0
        for rid, length, prefix in zip(rids, map(int, lengths), map(int, prefixes)):
            if self.writes and (target := part_of(rid, self.root)):
                found.append(Piece(rid, *target, prefix, begin, begin + length))
            begin += length
        return found

    def take(self, layers: list[torch.Tensor], last: torch.Tensor, batch: Any) -> None:
        """Sends the states of our requests to their shards: `layers` three [T, H] or one [T, 3H],
        `last` [T, H]."""
        pieces = self.wanted(batch)
        self.batch = None
        try:
            if not pieces:
                return
            # Read anew each time: another shard may have come under an earlier one's name.
            layouts = {part: Layout.of_file(part) for part in {piece.part for piece in pieces}}
            layout = layouts[pieces[0].part]
            hidden = layout.regions["last"].shape[1]
            width, tokens = (
                sum(part.shape[-1] for part in layers),
                min(len(part) for part in (*layers, last)),
            )
            if width != 3 * hidden or last.shape[-1] != hidden:
                acknowledge_all(
                    pieces,
                    fatal=f"captured width is {width} and the last state's {last.shape[-1]}, not "
                    f"3 x {hidden} and "
                    f"{hidden}; check hidden_states.layers and the flags of the server",
                )
                return
            if tokens < pieces[-1].end:
                acknowledge_all(
                    pieces, problem=f"the batch has {pieces[-1].end} tokens but {tokens} states"
                )
                return
            if self.offload is None:
                self.offload = Offload(last.device)
            stored = states_to_store(
                [part[:tokens] for part in layers], last[:tokens], layout.dtype
            )
            self.offload.submit(stored, lambda on_cpu: write(pieces, layouts, on_cpu))
        except Exception as error:
            logger.exception("hidden states were not captured")
            acknowledge_all(pieces, problem=f"{type(error).__name__}: {error}")


def write(pieces: list[Piece], layouts: dict[str, Layout], stored: dict[str, torch.Tensor]) -> None:
    """In a writer thread: the tokens of all requests to their shards, then the acknowledgements.

    Few and large calls: whenever this thread runs Python, the server's scheduler does not.
    """
    try:
        together = list(runs(pieces, layouts))
    except Exception as error:
        acknowledge_all(pieces, problem=f"{type(error).__name__}: {error}")
        return
    told: list[tuple[Piece, dict[str, Any]]] = []
    bad = stored["bad"] if stored["bad"].any() else None
    for run in together:
        first, end = run[0], run[-1].end
        try:
            write_tokens(
                first.part,
                layouts[first.part],
                first.row,
                first.token,
                stored,
                slice(first.begin, end),
            )
            told += [(piece, written(piece, bad)) for piece in run]
        except Exception as error:
            told += [(piece, {"problem": f"{type(error).__name__}: {error}"}) for piece in run]
    acknowledge(told)


def runs(pieces: list[Piece], layouts: dict[str, Layout]) -> Iterator[list[Piece]]:
    """Pieces that lie side by side in the batch and in a shard, together: tokens 0 to 5 of row 2,
    then 0 to 9 of row 3, say."""
    run: list[Piece] = []
    place = ("", 0)  # in which shard, and where, the run ends
    for piece in pieces:
        starts = layouts[piece.part].starts
        start = starts[piece.row] + piece.token
        # A token that was generated has no place in the shard.
        piece = piece._replace(end=min(piece.end, piece.begin + starts[piece.row + 1] - start))
        if piece.end <= piece.begin:
            continue
        if run and (place != (piece.part, start) or run[-1].end != piece.begin):
            yield run
            run = []
        run.append(piece)
        place = (piece.part, start + piece.end - piece.begin)
    if run:
        yield run


def written(piece: Piece, bad: torch.Tensor | None) -> dict[str, Any]:
    """What is said of a piece in its shard; `bad` [T, 4] if the batch has any."""
    told: dict[str, Any] = {"token": piece.token, "count": piece.end - piece.begin, "bad": None}
    if bad is not None and (here := bad[piece.begin : piece.end]).any():
        told |= {
            "bad": here.any(0).tolist(),
            "bad_token": piece.token + int(here.any(1).int().argmax()),
        }
    return told


def acknowledge_all(pieces: list[Piece], **what: Any) -> None:
    """The same acknowledgement for every piece."""
    acknowledge([(piece, what) for piece in pieces])


def acknowledge(told: list[tuple[Piece, dict[str, Any]]]) -> None:
    """Appends acknowledgements, those of a folder at once. A client that is gone, with its folder,
    is no fault of the server's."""
    lines: dict[str, list[bytes]] = {}
    for piece, what in told:
        lines.setdefault(os.path.dirname(piece.part), []).append(
            json.dumps({"rid": piece.rid, **what}).encode() + b"\n"
        )
    for folder, content in lines.items():
        try:
            file = os.open(os.path.join(folder, ACKS), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(file, b"".join(content))
            finally:
                os.close(file)
        except OSError as error:
            logger.warning("no acknowledgements in %s: %s", folder, error)


def first_rank() -> bool:
    """Whether this process writes: of the ranks that hold the same tokens (attention tensor
    parallel), the first."""
    try:
        from sglang.srt.layers.dp_attention import get_attention_tp_rank

        return get_attention_tp_rank() == 0
    except Exception:
        distributed = torch.distributed
        return (
            not (distributed.is_available() and distributed.is_initialized())
            or distributed.get_rank() == 0
        )


_receivers: dict[str, Receiver] = {}
_lock = threading.Lock()


def receiver(config: dict[str, Any]) -> Receiver:
    with _lock:
        return _receivers.setdefault(config["root"], Receiver(config["root"]))


def captured(config: dict[str, Any]) -> Callable:
    """Hook for `logits_processor(input_ids, hidden_states, lm_head, forward_batch,
    aux_hidden_states)`."""
    ours = receiver(config)

    def hook(module, arguments, output):
        aux = arguments[4] if len(arguments) > 4 else None
        if aux is None:
            acknowledge_all(
                ours.pieces(arguments[3]),
                fatal="the server captures no layers; start it with "
                "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3",
            )
        else:
            ours.take(
                [aux] if isinstance(aux, torch.Tensor) else list(aux), arguments[1], arguments[3]
            )

    return hook


def layer(config: dict[str, Any]) -> Callable:
    """Hook for the decoder layer whose output, residual added, is what is captured in place
    `config["place"]` of three."""
    ours, place = receiver(config), config["place"]

    def hook(module, arguments, output):
        pieces = ours.wanted(next((a for a in arguments if hasattr(a, "forward_mode")), None))
        if not pieces:
            return
        states, residual = output[0], output[1]
        if getattr(states, "_sglang_needs_allreduce_fusion", False):
            acknowledge_all(
                pieces,
                fatal="layer outputs are partial sums; start the server without "
                "--enable-flashinfer-allreduce-fusion",
            )
        # Summed at once: the kernels of the next layer overwrite both.
        ours.layers[place] = states + residual

    return hook


def final(config: dict[str, Any]) -> Callable:
    """Hook for the final norm, which ends a forward pass."""
    ours = receiver(config)

    def hook(module, arguments, output):
        layers, batch = ours.layers, ours.batch
        ours.layers = {}
        if batch is not None:
            ours.take(
                [layers[place] for place in sorted(layers)],
                output[0] if isinstance(output, tuple) else output,
                batch,
            )

    return hook


def server_flags(
    version: str, captured_layers: list[int], config_ids: list[int], root: str
) -> dict[str, Any]:
    """Flags with which a server of this version captures the inputs of `captured_layers` into
    shards under `root`.

    `config_ids` are the same layers in the convention of its model class. False takes a flag away
    that was given: a token that a cache of prefixes knows has no states, and SGLang does not start
    with one that is switched off and made larger at once."""
    number = tuple(int(word) for word in version.split(".")[:3] if word.isdigit())
    common = {
        "disable-radix-cache": True,
        "enable-hierarchical-cache": False,
        "enable-lmcache": False,
        "disable-prefill-cuda-graph": True,
    }
    if number >= (0, 5, 23):
        hooks = [_spec("captured", ["logits_processor"], {"root": root})]
        common |= {
            "enable-return-aux-hidden-states": True,
            "speculative-algorithm": "EAGLE3",
            "return-aux-hidden-state-layer-ids": config_ids,
        }
    else:
        hooks = [
            _spec("layer", [f"model.layers.{one - 1}"], {"root": root, "place": place})
            for place, one in enumerate(captured_layers)
        ] + [_spec("final", ["model.norm"], {"root": root})]
    return {**common, "forward-hooks": json.dumps(hooks, separators=(",", ":"))}


def _spec(factory: str, modules: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """One entry of --forward-hooks. Multi-modal models keep their language model under another
    name."""
    patterns = [
        prefix + module
        for module in modules
        for prefix in ("", "language_model.", "model.language_model.")
    ]
    return {
        "name": f"{PREFIX}-{factory}-{config.get('place', 0)}",
        "target_modules": patterns,
        "hook_factory": f"{__name__}:{factory}",
        "config": config,
    }
