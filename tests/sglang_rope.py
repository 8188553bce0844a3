"""Writes what SGLang's own classes compute for the RoPE of drafters, as the sample that
tests/drafter/test_rope.py compares with training. Run with the Python of an environment that has
SGLang, once for each version:

    python tests/sglang_rope.py VERSION [FOLDER]

FOLDER: the `rotary_embedding` package of another version than the installed one."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

SAMPLE = Path(__file__).parent / "drafter/sglang_rope.json"
POSITIONS = [0, 1, 7, 100, 127]
LATE = [0, 1, 100, 300]  # beyond the 128 positions of longrope's short factors
HEAD_DIM, MAX_POSITIONS = 16, 512


def get_rope(folder: str | None):
    """SGLang's factory; of `folder` in place of the installed package, if given."""
    name = "sglang.srt.layers.rotary_embedding"
    if folder:
        # Names that moved between versions; the caches are computed without them.
        import sglang.srt.layers.utils as utils
        import sglang.srt.server_args as server_args

        utils.__dict__.setdefault("MultiPlatformOp", torch.nn.Module)
        sys.modules["vllm"] = sys.modules["vllm._custom_ops"] = ModuleType("vllm")
        sys.modules["vllm"].rotary_embedding = None
        settings = SimpleNamespace(rl_on_policy_target=None)
        server_args.get_global_server_args = lambda: settings
        spec = importlib.util.spec_from_file_location(
            name, f"{folder}/__init__.py", submodule_search_locations=[folder]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    from sglang.srt.layers.rotary_embedding.factory import get_rope as found

    assert not folder or found.__code__.co_filename.startswith(folder)
    return found


def computed(parameters: dict, positions: list[int], factory) -> list[list[float]]:
    """cos and sin side by side, by the call of SGLang's Llama attention."""
    module = factory(
        HEAD_DIM,
        rotary_dim=HEAD_DIM,
        max_position=MAX_POSITIONS,
        base=parameters["rope_theta"],
        rope_scaling=parameters,
        is_neox_style=True,
        dtype=torch.float32,
    )
    if hasattr(module, "long_short_cos_sin_cache"):
        late = max(positions) > module.original_max_position_embeddings
        cache = module.long_cos_sin_cache if late else module.short_cos_sin_cache
    else:
        cache = module.cos_sin_cache
    return [[round(x, 6) for x in row] for row in cache[torch.tensor(positions)].tolist()]


if __name__ == "__main__":
    version, folder = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    factory = get_rope(folder)
    sample = json.loads(SAMPLE.read_text())
    for case in sample.values():
        positions = LATE if case["late"] else POSITIONS
        case[version] = computed(case["rope_parameters"], positions, factory)
    SAMPLE.write_text(
        "{\n" + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in sample.items()) + "\n}\n"
    )
