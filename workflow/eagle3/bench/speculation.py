"""SGLang's speculation flags, derived from a drafter's files and never typed; and whether two
servers may be compared.

With the wrong algorithm name a server starts, serves and accepts nothing: it captures no states, so
the drafter reads noise."""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from eagle3.core.errors import UserError
from eagle3.core.files import read_json
from eagle3.drafter import export

ALGORITHMS = {"LlamaForCausalLMEagle3": "EAGLE3"}
# What must be the same in both arms; speculation or memory silently lowers some of these.
EQUAL = (
    "version",
    "model_path",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tp_size",
    "dp_size",
    "ep_size",
    "context_length",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "sampling_backend",
    "schedule_policy",
    "page_size",
    "disable_radix_cache",
    "disable_cuda_graph",
    "max_running_requests",
    "effective_max_running_requests_per_dp",
    "cuda_graph_max_bs",
    "chunked_prefill_size",
    "enable_mixed_chunk",
    "random_seed",
)
SPECULATIVE = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


def algorithm_of(folder: str | Path) -> str:
    """The algorithm that serves the drafter in `folder`. Raises UserError if there is no drafter,
    if its architecture is unknown, or if `fc` does not read three states (its width is not 3H)."""
    folder = Path(folder)
    if not (folder / export.CONFIG).exists():
        raise UserError(
            f"there is no drafter at {folder} ({export.CONFIG} is missing); without one SGLang "
            "would load the "
            "target as its own drafter; `snakemake --cores all drafter` makes it"
        )
    config = read_json(folder / export.CONFIG)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ALGORITHMS:
        raise UserError(
            f"{folder / export.CONFIG} says {architecture}, which is no EAGLE-3 drafter; known: "
            f"{', '.join(ALGORITHMS)}; `make doctor DRAFTER={folder}` says more"
        )
    with safe_open(folder / export.WEIGHTS, "pt") as tensors:
        shape = (
            tuple(tensors.get_slice("fc.weight").get_shape())
            if "fc.weight" in tensors.keys()
            else None
        )
    size = config["hidden_size"]
    if shape != (size, 3 * size):
        raise UserError(
            f"{folder / export.WEIGHTS} has fc.weight {shape}, not {(size, 3 * size)}: it does "
            "not read three "
            "captured states; check the layer ids and `make doctor`"
        )
    return ALGORITHMS[architecture]


def flags(folder: str | Path, steps: int, topk: int, draft_tokens: int) -> dict[str, Any]:
    """launch_server flags that add the drafter in `folder`. Raises UserError for a shape that
    SGLang would change."""
    if topk == 1 and draft_tokens != steps + 1:
        raise UserError(
            f"bench: with topk 1 SGLang verifies steps + 1 = {steps + 1} tokens, not "
            f"draft_tokens {draft_tokens}"
        )
    return {
        "speculative-algorithm": algorithm_of(folder),
        "speculative-draft-model-path": str(Path(folder).resolve()),
        "speculative-num-steps": steps,
        "speculative-eagle-topk": topk,
        "speculative-num-draft-tokens": draft_tokens,
    }


def read_back(info: dict[str, Any]) -> dict[str, Any]:
    """The settings of a server's /server_info that a bench compares or shows, under one name each.

    Versions of SGLang keep the largest captured batch at the top, or within
    `cuda_graph_config.decode`."""
    graphs = (info.get("cuda_graph_config") or {}).get("decode") or {}
    states = (info.get("internal_states") or [{}])[0]
    found = {key: info[key] for key in (*EQUAL, *SPECULATIVE, "mem_fraction_static") if key in info}
    if graphs.get("max_bs") is not None:
        found["cuda_graph_max_bs"] = graphs["max_bs"]
    if "effective_max_running_requests_per_dp" in states:
        found["effective_max_running_requests_per_dp"] = states[
            "effective_max_running_requests_per_dp"
        ]
    if memory := states.get("memory_usage"):
        found["token_capacity"] = memory.get("token_capacity")
    return found


def check_settings(baseline: dict[str, Any], speculative: dict[str, Any]) -> None:
    """Raises UserError naming every setting besides speculation in which the arms differ, with both
    values."""
    differing = [
        f"{key} {baseline.get(key)!r} without and {speculative.get(key)!r} with speculation"
        for key in EQUAL
        if key in baseline or key in speculative
        if baseline.get(key) != speculative.get(key)
    ]
    if differing:
        raise UserError(
            f"the two arms are not comparable: {'; '.join(differing)}; set these in server.flags"
        )


def check_asked(settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises UserError if a server reports other speculation settings than its flags asked for."""
    for flag, value in wanted.items():
        key = flag.replace("-", "_")
        if key in SPECULATIVE and settings.get(key) != value:
            raise UserError(
                f"the server reports {key} {settings.get(key)!r}, but {value!r} was asked for; "
                "another server may "
                "be listening on this port, or this version of SGLang changes the flag"
            )


def check_limits(settings: dict[str, Any], concurrency: int) -> None:
    """Raises UserError if a server runs fewer requests at once than the bench sends."""
    for key in ("max_running_requests", "effective_max_running_requests_per_dp"):
        limit = settings.get(key)
        if limit is not None and limit < concurrency:
            raise UserError(
                f"bench.concurrency asks for {concurrency} requests at once, but the server has "
                f"{key} {limit}; "
                f"set server.flags.max-running-requests to {concurrency} and give it the memory"
            )
