"""The target model on disk: conversion from GGUF, identity, shape, and reading only the tensors
that are needed."""

import re
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from eagle3.core.errors import UserError
from eagle3.core.files import digest_file, digest_of, read_json
from eagle3.core.progress import Progress
from eagle3.target.configuration import readout, text_config

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
    "chat_template.jinja",
)


class Target:
    """data/target: `target.json` describes the model, whose files are in `model/` beside it or at
    `path`.

    Shapes: `hidden_size` H, `vocab_size` V, `num_layers` N.
    """

    def __init__(self, folder: str | Path, info: dict[str, Any] | None = None):
        """`info` stands in for target.json: of a model folder that has none."""
        self.folder = Path(folder)
        self.info = info or read_json(self.folder / "target.json")
        self.path = Path(self.info["path"]) if self.info.get("path") else self.folder / "model"
        if not (self.path / "config.json").exists():
            raise UserError(
                f"the target's files are not at {self.path}; set target.source in params.yaml"
            )

    @property
    def digest(self) -> str:
        """Identity of weights, tokenizer and configuration."""
        return self.info["digest"]

    @cached_property
    def config(self) -> dict[str, Any]:
        """See `text_config`."""
        return text_config(read_json(self.path / "config.json"))

    @property
    def hidden_size(self) -> int:
        return self.config["hidden_size"]

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    @property
    def num_layers(self) -> int:
        return self.config["num_hidden_layers"]

    @cached_property
    def tokenizer(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            self.path, trust_remote_code=self.info["trust_remote_code"]
        )

    @cached_property
    def stop_ids(self) -> list[int]:
        """Ids that end an answer: of the generation config, the config and the tokenizer."""
        found = []
        generation = self.path / "generation_config.json"
        for config in (read_json(generation) if generation.exists() else {}, self.config):
            ids = config.get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
        found.append(self.tokenizer.eos_token_id)
        return sorted({i for i in found if i is not None})

    def load_model(self, dtype: str | None = None):
        """The whole model through transformers, on the GPU if there is one, in evaluation mode."""
        import torch

        dtype = dtype or self.info["dtype"]
        model = model_class(read_json(self.path / "config.json")).from_pretrained(
            self.path,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=self.info["trust_remote_code"],
        )
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)

    @cached_property
    def _tensor_files(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            files = {n: self.path / file for n, file in read_json(index)["weight_map"].items()}
            if missing := sorted({f.name for f in files.values() if not f.exists()}):
                raise UserError(
                    f"{self.path} lacks {', '.join(missing[:3])}, which its index names; download "
                    "the model again"
                )
            return files
        from safetensors import SafetensorError, safe_open

        file = self.path / "model.safetensors"
        if not file.exists():
            others = sorted(p.name for p in self.path.glob("*.bin")) or ["no other weights"]
            raise UserError(
                f"{self.path} has neither model.safetensors nor an index of it, but "
                f"{', '.join(others[:3])}; save the model anew with save_pretrained of transformers"
            )
        try:
            with safe_open(file, "pt") as tensors:
                return {name: file for name in tensors.keys()}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read: {error}; download it again") from None

    def _find(self, *endings: str) -> str:
        for ending in endings:
            names = [
                n
                for n in self._tensor_files
                if re.search(rf"(^|\.){re.escape(ending)}$", n) and "vision" not in n
            ]
            if names:
                return min(names, key=len)
        raise UserError(f"the target at {self.path} has no tensor named {' or '.join(endings)}")

    def tensor(self, *endings: str):
        """The one tensor whose name ends so, read alone (never the whole target). Raises UserError
        listing the endings."""
        from safetensors import safe_open

        name = self._find(*endings)
        with safe_open(self._tensor_files[name], "pt") as tensors:
            return tensors.get_tensor(name)

    def shape_of(self, *endings: str) -> tuple[tuple[int, ...], str]:
        """(shape, type as safetensors names it) of `tensor`, without its data. Raises UserError if
        the file cannot be read."""
        from safetensors import SafetensorError, safe_open

        name = self._find(*endings)
        try:
            with safe_open(self._tensor_files[name], "pt") as tensors:
                part = tensors.get_slice(name)
                return tuple(part.get_shape()), part.get_dtype()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self._tensor_files[name]} cannot be read: {error}") from None

    def embedding(self):
        """Token embedding [V, H]."""
        return self.tensor("embed_tokens.weight", "wte.weight")

    def head(self):
        """Output projection [V, H], the embedding where they are tied, times the factor that the
        model multiplies its logits with: `softcapped(last @ head().T)` are the model's logits."""
        factor, _ = readout(self.config)
        self.check_head()
        head = self.embedding() if self.head_is_tied else self.tensor("lm_head.weight")
        return head if factor == 1 else (head.float() * factor).to(head.dtype)

    def check_head(self) -> None:
        """Raises UserError if the model does more after its head than `head` and `softcap` say."""
        readout(self.config)
        if any(name.endswith("lm_head.bias") for name in self._tensor_files):
            raise UserError(
                f"the target at {self.path} adds lm_head.bias to its logits, which training does "
                "not; such a target is not supported"
            )

    @property
    def head_is_tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings")) and not any(
            name.endswith("lm_head.weight") for name in self._tensor_files
        )

    @property
    def softcap(self) -> float | None:
        """Bound of the model's logits, None where there is none."""
        return readout(self.config)[1]


def model_class(config: dict[str, Any]):
    """The Auto class of transformers that loads a config.json with its language model's head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    multimodal = kind in CONFIG_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def model_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises UserError if it has none that can be read."""
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} has no config.json; target.source takes a GGUF file or a Hugging Face "
            "directory"
        )
    found = read_json(path / "config.json")
    if not isinstance(found, dict):
        raise UserError(f"{path / 'config.json'} holds no mapping")
    return found


def convert_gguf(file: Path, folder: Path) -> None:
    """Turns a GGUF file into a Hugging Face directory, weights in float32.

    The digit rule of the tokenizer is lost on the way (transformers rebuilds a plain byte-level
    one), so that numbers come out as other tokens than the model was trained with; it is put back
    here and held by a test against llama.cpp's tokenisation. A GGUF stores the pre-tokenizer's name
    only."""
    import gguf
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    # transformers parses the whole file anew for the configuration, the tokenizer and the weights;
    # once is enough.
    with mock.patch.object(gguf, "GGUFReader", lru_cache(gguf.GGUFReader)):
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        pre_tokenizer = _gguf_pre_tokenizer(gguf.GGUFReader(str(file)))
    if pre_tokenizer == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_pre_tokenizer(reader) -> str:
    field = reader.fields.get("tokenizer.ggml.pre")
    return bytes(field.parts[field.data[0]]).decode() if field else ""


def describe(path: Path, params, outside: bool) -> dict[str, Any]:
    """target.json of the model at `path`. `outside`: the files stay where they are and are named by
    absolute path."""
    config = read_json(path / "config.json")
    text = text_config(config)
    weights = {}
    files = sorted(path.glob("*.safetensors"))
    with Progress("target: digest of the weights", len(files), "files") as bar:
        for file in files:
            weights[file.name] = digest_file(file)
            bar.add(1, bytes=file.stat().st_size)
    tokenizer = {
        name: digest_file(path / name) for name in TOKENIZER_FILES if (path / name).exists()
    }
    identity = {
        "weights": weights,
        "tokenizer": tokenizer,
        "config": {
            k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")
        },
    }
    return {
        "path": str(path.resolve()) if outside else None,
        "digest": digest_of(identity),
        "weights_digest": digest_of(weights),
        "tokenizer_digest": digest_of(tokenizer),
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "num_layers": text["num_hidden_layers"],
        "dtype": params.dtype,
        "quantization": params.quantization,
        "kv_cache_dtype": params.kv_cache_dtype,
        "context_length": params.context_length,
        "chat_template_kwargs": dict(params.chat_template_kwargs),
        "template_date": params.template_date,
        "trust_remote_code": params.trust_remote_code,
    }


def numerics(info: dict[str, Any]) -> dict[str, Any]:
    """What decides the target's answers, by name: the fields that a numerics fingerprint
    compares."""
    keys = (
        "weights_digest",
        "tokenizer_digest",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "chat_template_kwargs",
        "template_date",
    )
    return {key: info[key] for key in keys}
