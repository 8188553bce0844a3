"""What SGLang's CPU path of EAGLE calls of its compiled kernels, in plain PyTorch; for tests, slow,
one sequence at a time.

The packaged `sgl_kernel` is for GPUs. With this folder first on PYTHONPATH and
`--prefill-attention-backend intel_amx
--decode-attention-backend intel_amx`, SGLang 0.5.23 drafts and verifies on a CPU: its own worker,
scheduler and backend do all of it, these functions only move rows, walk trees and attend. Any other
kernel can be imported, but not called. Trees work too; sliding windows, sinks, logit caps and cross
attention do not, and are refused."""

import ctypes

import torch
from torch.nn.functional import scaled_dot_product_attention

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError("sgl_kernel." + name)

    return missing


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """In each buffer, given by address and bytes per row: rows `src_loc` to `tgt_loc`, which may
    overlap."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist()):
        rows = [ctypes.string_at(address + size * source, size) for source in sources]
        for target, row in zip(targets, rows):
            ctypes.memmove(address + size * target, row, size)


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """New slots, all requests' one after another, into each request's places from start to end."""
    done = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    ):
        req_to_token[request, start:end] = out_cache_loc[done : done + end - start].to(
            req_to_token.dtype
        )
        done += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """The slots of each request's places from start to end, one request after another."""
    done = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    ):
        out_cache_loc[done : done + end - start] = req_to_token[request, start:end]
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """The slots of the `topk * num_steps` places that follow each sequence."""
    count = topk * num_steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + count, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(
    req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len
):
    """A row of slots for each candidate: those of the sequence, then its own `num_steps`."""
    found = req_to_token.new_zeros(len(req_pool_indices) * topk, pool_len)
    for n, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        for k in range(topk):
            begin, row = length + k * num_steps, found[n * topk + k]
            row[:length] = req_to_token[request, :length]
            row[length : length + num_steps] = req_to_token[request, begin : begin + num_steps]
    return found


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Links, depths and ancestors of the drafted tokens. Node 0 of each tree is the token already
    accepted."""
    assert int(tree_mask_mode) == 1, "only QLEN_ONLY masks, which SGLang uses on a CPU"
    mask = tree_mask.view(-1, draft_token_num, draft_token_num)
    for b, length in enumerate(verified_seq_len.tolist()):
        chosen, parents = selected_index[b].tolist(), parent_list[b].tolist()
        depths, last_child = [0] * draft_token_num, {}
        mask[b] = torch.eye(draft_token_num, dtype=mask.dtype)
        for i in range(1, draft_token_num):
            group = (
                chosen[i - 1] // topk
            )  # candidates come in groups of topk, one for each token that was expanded
            parent = 1 + chosen.index(parents[group]) if group else 0
            depths[i] = depths[parent] + 1
            mask[b, i] |= mask[b, parent]
            if parent in last_child:
                retrive_next_sibling[b, last_child[parent]] = i
            else:
                retrive_next_token[b, parent] = i
            last_child[parent] = i
        places = slice(b * draft_token_num, (b + 1) * draft_token_num)
        positions[places] = length + torch.tensor(depths)
        retrive_index[b] = torch.arange(places.start, places.stop)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follows from the root the child that the target predicts, as long as there is one."""
    for b in range(len(candidates)):
        node, accepted = 0, 0
        accept_index[b, 0] = retrive_index[b, 0]
        while True:
            wanted, child = target_predict[b, node].item(), -1
            predicts[retrive_index[b, node]] = wanted
            if accepted + 1 < accept_index.shape[1]:
                child = retrive_next_token[b, node].item()
                while child != -1 and candidates[b, child].item() != wanted:
                    child = retrive_next_sibling[b, child].item()
            if child == -1:
                break
            node, accepted = child, accepted + 1
            accept_index[b, accepted] = retrive_index[b, node]
        accept_token_num[b] = accepted


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request."""
    rows = torch.arange(len(accept_lens)) * accept_stride
    bonus_tokens.copy_(accept_tokens.flatten()[rows + accept_lens - 1])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc, size=None):
    """The slots of the accepted tokens, without gaps."""
    accepted = accept_index.flatten()[:size]
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: len(slots)] = slots


def _attend(query, output, keys, values, slots, scale, mask):
    """One sequence: `query` [tokens, heads, size] on the cache's `slots`."""
    heads = (
        each.movedim(0, 1)[None]
        for each in (query, keys[slots].to(query.dtype), values[slots].to(query.dtype))
    )
    made = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
    output.copy_(made[0].movedim(0, 1))


def _refuse(logit_cap, is_cross_attn, sliding_window_size, sinks):
    if logit_cap or is_cross_attn or sliding_window_size > 0 or sinks is not None:
        raise NotImplementedError("attention with a cap, a window, sinks or an encoder")


def decode_attention_cpu(
    query,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    output,
    key,
    value,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    sm_scale,
    logit_cap,
    is_cross_attn,
    sliding_window_size,
    encoder_lens,
    sinks,
):
    """Writes keys and values to the cache at `loc`; then one token of each sequence attends to the
    whole of it."""
    _refuse(logit_cap, is_cross_attn, sliding_window_size, sinks)
    if key is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    for n, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        _attend(
            query[n : n + 1],
            output[n : n + 1],
            k_cache,
            v_cache,
            req_to_token[request, :length],
            sm_scale,
            None,
        )


def extend_attention_cpu(
    query,
    key,
    value,
    output,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_extend_len,
    sm_scale,
    logit_cap,
    is_cross_attn,
    sliding_window_size,
    encoder_lens,
    sinks,
    tree_mask,
    is_causal,
):
    """The last `extend_seq_lens` tokens of each sequence attend to what is before them, or among
    themselves by `tree_mask`.

    Their keys and values are in the cache already.
    """
    _refuse(logit_cap, is_cross_attn, sliding_window_size, sinks)
    for n, (request, length, count, start) in enumerate(
        zip(
            *(
                each.tolist()
                for each in (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)
            )
        )
    ):
        mask = torch.ones(count, length, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, length - count :] = tree_mask.view(-1, count, count)[n]
        elif is_causal:
            mask = mask.tril(length - count)
        _attend(
            query[start : start + count],
            output[start : start + count],
            k_cache,
            v_cache,
            req_to_token[request, :length],
            sm_scale,
            mask,
        )


for _operator in (
    decode_attention_cpu,
    extend_attention_cpu,
):  # the backend takes these from torch, not from here
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)
