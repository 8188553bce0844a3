"""Weights to start from: a published drafter, or a fit in closed form to the data."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.core.errors import UserError
from eagle3.core.files import digest_file
from eagle3.drafter import published
from eagle3.drafter.model import Drafter

SELF_SCORE = (
    12.0  # attention score of a position with itself after `least_squares`; others are near 0
)
OTHER_IN_A_WARM_START = ("draft_vocab_size", "max_position_embeddings")


def digest(folder: str | None) -> dict[str, str] | None:
    """What a warm start depends on."""
    if folder is None:
        return None
    return {path.name: digest_file(path) for path in sorted(Path(folder).glob("*.safetensors"))}


def weights(drafter: Drafter, params, data, log) -> dict[str, Tensor] | None:
    """The weights that train.init and train.warm_start ask for, None for those that the drafter
    has."""
    if params.init == "random" and not params.warm_start:
        return None
    start = copy.deepcopy(drafter)
    if params.warm_start:
        known = from_drafter(start, params.warm_start)
        log(
            f"starts from {params.warm_start}; {known} of {len(drafter.draft_ids)} rows of the "
            "head are its"
        )
    else:
        least_squares(start, (data[i] for i in range(len(data))))
    return dict(start.named_parameters())


@torch.no_grad()
def from_drafter(drafter: Drafter, folder: str | Path) -> int:
    """Copies the weights of a drafter in SGLang's layout and returns how many rows of its head were
    of use.

    Row i of a head belongs to target id i + d2t[i]; rows go to the draft id that has the same
    target id here. Ids that it does not draft keep the rows they have. Raises UserError naming
    tensors and every field of config.json that do not fit: the same shapes with another head split,
    RoPE or layers are weights of another function."""
    found, config = published.read_tensors(folder), published.read_config(folder)
    weights = dict(drafter.named_parameters())
    wrong = [f"{name} is missing" for name in weights.keys() - found.keys()]
    wrong += [
        f"{name} is {tuple(found[name].shape)} instead of {tuple(p.shape)}"
        for name, p in weights.items()
        if name in found and name != "lm_head.weight" and found[name].shape != p.shape
    ]
    wrong += published.broken(found) + published.wrong_fields(config)
    if not wrong:
        wrong += published.differences(config, drafter.config, OTHER_IN_A_WARM_START)
    if wrong:
        raise UserError(
            f"train.warm_start: {folder} does not fit this drafter: {'; '.join(sorted(wrong))}; "
            "train.architecture, hidden_states.layers and the target decide what this drafter has"
        )
    rows, theirs = found["lm_head.weight"], torch.arange(len(drafter.t2d))
    if "d2t" in found:
        theirs = published.draft_ids(found["d2t"], len(drafter.t2d))
    if len(rows) != len(theirs) or rows.shape[1:] != weights["lm_head.weight"].shape[1:]:
        raise UserError(
            f"train.warm_start: {folder} has a head of {list(rows.shape)} for {len(theirs)} draft "
            f"tokens{'' if 'd2t' in found else ', as d2t is missing'}"
        )
    for name, parameter in weights.items():
        if name != "lm_head.weight":
            parameter.copy_(found[name])
    place = torch.full((len(drafter.t2d),), -1)
    place[theirs] = torch.arange(len(theirs))
    source = place[drafter.draft_ids.cpu()]
    known = source >= 0
    weights["lm_head.weight"][known.to(drafter.fc.weight.device)] = rows[source[known]].to(
        drafter.fc.weight
    )
    return int(known.sum())


@torch.no_grad()
def least_squares(
    drafter: Drafter, rows: Iterable[dict[str, Any]], ridge: float = 0.1, limit: int = 20_000
) -> None:
    """Fits step 0 in closed form: the state that predicts x_{t+2} as a linear map of aux_t and of
    the embedding of x_{t+1}.

    With few tokens (thousands) this is worth more than all of the training that follows. The map of
    aux goes to `fc`. That of the embedding goes through attention: queries and keys are set so that
    a position looks at itself, values and output hold the map, cut to the rank that the key heads
    allow. `norm` gets the scale of the target's last states. `limit` is the most tokens used.
    Source: ridge regression; nothing here is specific to a target."""
    aux, embeds, last = _pairs(drafter, rows, limit)
    size = embeds.shape[1]
    scale = last.square().mean(0).sqrt().clamp(min=1e-6)
    drafter.norm.weight.copy_(scale)
    x = torch.cat([aux, embeds], dim=1)
    spread = x.square().mean(0).sqrt().clamp(min=1e-6)
    x = x / spread
    gram = x.T @ x + ridge * len(x) * torch.eye(x.shape[1])
    found = torch.linalg.solve(gram, x.T @ (last / scale)) / spread.unsqueeze(1)  # [3H + H, H]
    drafter.fc.weight.copy_(found[:-size].T)
    layer = drafter.midlayer
    _look_at_itself(layer.self_attn, embeds)
    _carry(layer.self_attn, found[-size:].T, embeds)
    layer.mlp.down_proj.weight.mul_(0.1)


def _pairs(
    drafter: Drafter, rows: Iterable[dict[str, Any]], limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """aux_t [N, 3H], normed embedding of x_{t+1} [N, H] and last_{t+1} [N, H], the state that
    predicts x_{t+2}."""
    found, total = [], 0
    for row in rows:
        tokens = row["input_ids"][2:].long()  # position 0 is an outlier in every model: left out
        embeds = drafter.embedding[tokens.to(drafter.embedding.device)].float().cpu()
        embeds = embeds * torch.rsqrt(
            embeds.square().mean(-1, keepdim=True) + drafter.config["rms_norm_eps"]
        )
        found.append((row["aux"][1:-1].float(), embeds, row["last"][2:].float()))
        total += len(tokens)
        if total >= limit:
            break
    return tuple(torch.cat(parts) for parts in zip(*found))


def _look_at_itself(attention, embeds: Tensor) -> None:
    """Queries and keys from the embedding alone, through one random projection per key head: the
    same token at the same place matches best. The mean embedding, which all tokens share, is
    projected out."""
    size, width = embeds.shape[1], attention.head_dim
    group = attention.heads // attention.kv_heads
    mean = torch.nn.functional.normalize(embeds.mean(0), dim=0)
    generator = torch.Generator().manual_seed(0)
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        weight.mul_(0.1)
    for head in range(attention.kv_heads):
        projection = torch.randn(size, width, generator=generator)
        projection -= mean.unsqueeze(1) * (mean @ projection)
        projection = torch.linalg.qr(projection).Q.T  # [d, H]
        score = (embeds @ projection.T).square().sum(-1).mean() * width**-0.5
        projection = projection * (SELF_SCORE / score).sqrt()
        attention.k_proj.weight[head * width : (head + 1) * width, :size] = projection
        for query in range(head * group, (head + 1) * group):
            attention.q_proj.weight[query * width : (query + 1) * width, :size] = projection


def _carry(attention, wanted: Tensor, embeds: Tensor) -> None:
    """Values and output such that a position that looks at itself adds about `wanted` [H, H] @ its
    embedding."""
    size, width, rank = embeds.shape[1], attention.head_dim, attention.v_proj.weight.shape[0]
    root = torch.linalg.cholesky(embeds.T @ embeds / len(embeds) + 1e-3 * torch.eye(size))
    u, s, v = torch.linalg.svd(wanted @ root)
    rank = min(rank, size)
    values = torch.linalg.solve_triangular(root.T, v[:rank].T, upper=True).T  # [rank, H]
    output = u[:, :rank] * s[:rank]  # [H, rank]
    group = attention.heads // attention.kv_heads
    attention.v_proj.weight.mul_(0.1)
    attention.v_proj.weight[:rank, :size] = values
    attention.o_proj.weight.zero_()
    for column in range(rank):
        head, inner = divmod(column, width)
        for query in range(head * group, (head + 1) * group):
            attention.o_proj.weight[:, query * width + inner] = output[:, column] / group
