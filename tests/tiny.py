"""Small real parts for tests: a random Llama with a trained tokenizer, data sets of its size, and a
whole project."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
# For a child process that imports our code and tests. Never a part of sys.path, whose order depends
# on what other tests of the session have put there.
PATHS = [str(ROOT), str(ROOT / "workflow"), str(ROOT / "tests")]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "the a river stone house green walks runs to from with and count seven blue bird sings "
    "code print loop list"
).split()


def text(seed: int, words: int = 8) -> str:
    """A line of words that depends on `seed` alone."""
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) for _ in range(words))


def make_tokenizer(folder: Path, vocab_size: int = 400) -> None:
    """A byte-level BPE tokenizer with ChatML tokens and template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([text(i, 30) for i in range(60)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        model_max_length=512,
    )
    tokenizer.save_pretrained(folder)


def make_model(
    folder: Path, layers: int = 8, hidden: int = 32, seed: int = 0, vocab_size: int = 400, **more
) -> Path:
    """A random Llama in a Hugging Face directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, vocab_size)
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        vocab_size=vocab_size,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        **more,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def make_rows(path: Path, count: int, seed: int = 0, answered: bool = False) -> Path:
    """A JSONL data set of distinct short prompts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for i in range(count):
            messages = [{"role": "user", "content": f"{i} {text(seed * 1000 + i)}"}]
            if answered:
                messages.append({"role": "assistant", "content": text(seed * 1000 + i + 500, 12)})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def params(model: Path, sources: dict[str, tuple[Path, str]]) -> dict:
    """A params.yaml for a tiny target. `sources`: name -> (JSONL file, "generate" or
    "given")."""
    return {
        "target": {"source": {"path": str(model)}, "dtype": "float32", "context_length": 256},
        "prompts": {"max_prompt_tokens": 128},
        "datasets": {
            name: {"answers": kind, "source": {"path": str(path)}, "max_samples": 6}
            for name, (path, kind) in sources.items()
        },
        "generate": {
            "engine": "transformers",
            "sampling": {"max_new_tokens": 12, "temperature": 0},
        },
        "given": {"max_answer_tokens": 64},
        "records": {"max_tokens": 128, "validation_fraction": 0.3},
        "vocab": {"size": 300},
        "hidden_states": {"dtype": "float32", "shard_bytes": 65536},
        "train": {"steps": 2, "epochs": 1, "batch_tokens": 256, "dtype": "float32", "lr": 1e-3},
        "bench": {
            "steps": 2,
            "max_prompts": 2,
            "max_new_tokens": 8,
            "min_accept_length": 1.0,
            "max_difference": 0.5,
        },
        "server": {},
        "runtime": {"batch_size": 8, "batch_tokens": 1024, "reserve_bytes": 0},
    }


def make_project(folder: Path, sources: dict[str, tuple[int, str]] | None = None) -> Path:
    """A copy of this project with a tiny target, under git and DVC; returns its folder.

    `sources`: name -> (rows in its file, "generate" or "given"); default two of one kind and
    one of the other."""
    sources = sources or {
        "one": (12, "generate"),
        "two": (12, "generate"),
        "given": (8, "given"),
    }
    shutil.copytree(
        ROOT,
        folder,
        symlinks=True,
        ignore=shutil.ignore_patterns(
            ".git",
            ".venv",
            ".work",
            ".build",
            ".snakemake",
            "logs",
            "cache",
            "tmp",
            "__pycache__",
            "dvc.lock",
            ".gpu",
        ),
    )
    for artifact in (folder / "data").iterdir():
        if artifact.name != ".gitignore":
            shutil.rmtree(
                artifact
            ) if artifact.is_dir() and not artifact.is_symlink() else artifact.unlink()
    inputs = folder.parent / f"{folder.name}-inputs"
    model = make_model(inputs / "model")
    files = {
        name: (make_rows(inputs / f"{name}.jsonl", rows, seed, kind == "given"), kind)
        for seed, (name, (rows, kind)) in enumerate(sources.items())
    }
    write_params(folder, params(model, files))
    for command in (
        ["git", "init", "-q", "-b", "main"],
        ["git", "config", "user.email", "t@example.org"],
        ["git", "config", "user.name", "t"],
        ["git", "add", "-A"],
        ["git", "commit", "-qm", "start"],
    ):
        subprocess.run(command, cwd=folder, check=True)
    return folder


def write_params(folder: Path, content: dict) -> None:
    (folder / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def read_params(folder: Path) -> dict:
    return yaml.safe_load((folder / "params.yaml").read_text())


def run(
    folder: Path, *command: str, check: bool = True, timeout: float = 600
) -> subprocess.CompletedProcess:
    """Runs `snakemake …` or `dvc …` with this interpreter's environment; output is captured, both
    streams together."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        text=True,
        timeout=timeout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if check and done.returncode:
        raise AssertionError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        )
    return done
