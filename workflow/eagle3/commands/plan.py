"""What a build will cost before it runs: rows, tokens, bytes and hours of every data set, against
disk and memory.

Nothing is built or downloaded. A number is *measured* where an artifact says it, taken from the
*journal* of a run that is under way, *like* the other data sets where some are known, and *assumed*
otherwise; the table says which."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from eagle3.capture import disk
from eagle3.core import sources
from eagle3.core.files import read_json, read_jsonl
from eagle3.core.schema import Dataset, Params
from eagle3.drafter import export
from eagle3.drafter.model import drafter_config
from eagle3.hidden_states import shards
from eagle3.preflight import checks
from eagle3.target import layers
from eagle3.target.configuration import text_config
from eagle3.target.model import model_config

# A row of raw_responses.jsonl: a prompt id as text with its comma, an answer id and its share of
# the text.
BYTES_PER_PROMPT_TOKEN, BYTES_PER_ANSWER_TOKEN = 8, 12
OPTIMIZER_BYTES = 16  # of a trained weight: fp32 master, gradient and two moments


@dataclass(frozen=True)
class Rates:
    """Tokens per second. The defaults are round figures for 2 CPU cores (transformers) or an 8-GPU
    machine (sglang)."""

    generate: float
    extract: float
    train: float

    @classmethod
    def assumed(cls, params: Params) -> "Rates":
        big = params.generate.engine == "sglang"
        return cls(
            3000 if big else 60,
            10000 if params.hidden_states.engine == "sglang" else 300,
            10000 if big else 400,
        )


@dataclass
class Estimate:
    """One data set. Tokens are those of all its rows together; `basis` says where they come
    from."""

    name: str
    answers: str
    rows: int
    prompt_tokens: int
    answer_tokens: int
    basis: str
    bytes_responses: int = 0
    bytes_states: int = 0
    hours: dict[str, float] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


def known_tokens(name: str, data: Path, work: Path) -> tuple[str, int, int, int] | None:
    """(basis, rows, prompt tokens, answer tokens) of a data set as far as artifacts or the journal
    tell."""
    record_file = data / f"records/{name}.parquet"
    stats_file = data / f"prompts/{name}.stats.json"
    response_file = data / f"responses/{name}/raw_responses.jsonl"
    journal = work / f"generate/{name}/journal.jsonl"
    if record_file.exists():
        counts = json.loads(parquet.ParquetFile(record_file).metadata.metadata[b"eaglemake"])
        return (
            "measured",
            counts["records"],
            counts["tokens"] - counts["supervised"],
            counts["supervised"],
        )
    if response_file.exists():
        last = [row["turns"][-1] for row in read_jsonl(response_file)]
        return (
            "measured",
            len(last),
            sum(len(turn["prompt_ids"]) for turn in last),
            sum(len(turn["output_ids"]) for turn in last),
        )
    if journal.exists() and (found := _journalled(journal)):
        return "journal", *found
    if stats_file.exists():
        stats = read_json(stats_file)
        return "prompts", stats["kept"], stats["prompt_tokens"], 0
    return None


def _journalled(path: Path) -> tuple[int, int, int] | None:
    """(rows, prompt tokens, answer tokens) of the answers that a run has so far; a torn last line
    is skipped."""
    rows = prompt = answer = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                usage = json.loads(line)["usage"]
            except (ValueError, KeyError, TypeError):
                continue
            rows, prompt, answer = (
                rows + 1,
                prompt + usage["prompt_tokens"],
                answer + usage["completion_tokens"],
            )
    return (rows, prompt, answer) if rows else None


def rows_wanted(name: str, dataset: Dataset, data: Path) -> int | None:
    """Prompts of a data set: counted if it is prepared, else its cap, else the rows of its local
    file; None if unknown."""
    stats = data / f"prompts/{name}.stats.json"
    if stats.exists():
        return read_json(stats)["kept"]
    if dataset.source.path and Path(dataset.source.path).is_file():
        count = sum(1 for _ in sources.rows(dataset.source))
        return min(count, dataset.max_samples or count)
    return dataset.max_samples


def target_config(params: Params, data: Path) -> dict[str, Any]:
    """The target's config.json, from data/target, the local folder that params.yaml names or the
    hub; may be empty."""
    for folder in (
        data / "target/model",
        _described(data),
        Path(params.target.source.path or "/nowhere"),
    ):
        if folder and (folder / "config.json").exists():
            return model_config(folder)
    return sources.hub_config(params.target.source) if params.target.source.hub else {}


def _described(data: Path) -> Path | None:
    file = data / "target/target.json"
    return Path(read_json(file)["path"]) if file.exists() and read_json(file).get("path") else None


def make(
    params: Params,
    rates: Rates,
    hidden_size: int | None = None,
    free: int | None = None,
    data: Path = Path("data"),
    work: Path = Path(".work"),
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The plan as plain values. `free`: bytes of disk; what the disk of `data` has if not given.

    Where neither data/target, the target's folder nor `hidden_size` tells how wide the states are,
    `width_known` is false, states count no bytes, and nothing is said of other settings. Raises
    UserError for a target that stage `target` would refuse."""
    config = target_config(params, data)
    if config:
        checks.check_config(config, params, log)
        config = {**text_config(config), "architectures": config.get("architectures")}
    elif params.target.source.hub:
        log(f"the hub does not give config.json of {params.target.source.hub}: target not checked")
    width = hidden_size or config.get("hidden_size") or 0
    sets = estimates(params, data, work)
    token_bytes = {
        kind: shards.bytes_per_token(width, kind) if width else 0 for kind in shards.DTYPES
    }
    stored = token_bytes[params.hidden_states.dtype]
    for one in sets:
        _cost(one, params, rates, stored)
    copies = cache_copies(data)
    needed = sum(one.bytes_responses + one.bytes_states for one in sets)
    missing = (
        sum(
            (one.bytes_responses if "generate" not in one.done else 0)
            + (one.bytes_states if "extract" not in one.done else 0)
            for one in sets
        )
        * copies
    )
    free = shutil.disk_usage(data if data.exists() else ".").free if free is None else free
    trained = (data / "drafter/training.json").exists()
    training = 0.0 if trained else train_hours(sum(one.tokens for one in sets), params, rates)
    path = longest_path(sets, training)
    # What states may take: the free disk and what is written already, less the answers.
    room = (free - params.runtime.reserve_bytes - missing) // copies + sum(
        one.bytes_states for one in sets
    )
    return {
        "datasets": [{**asdict(one), "tokens": one.tokens} for one in sets],
        "rates": asdict(rates),
        "hidden_states": {
            "width_known": width > 0,
            "hidden_size": width,
            "dtype": params.hidden_states.dtype,
            "numbers_per_token": 4 * width,
            "bytes_per_token": stored,
            "bytes_per_token_of_states": {
                k: 4 * width * shards.DTYPES[k].itemsize for k in shards.DTYPES
            },
        },
        "total": {
            "rows": sum(one.rows for one in sets),
            "prompt_tokens": sum(one.prompt_tokens for one in sets),
            "answer_tokens": sum(one.answer_tokens for one in sets),
            "tokens": sum(one.tokens for one in sets),
            "bytes": needed,
            "bytes_to_write": missing,
            "copies": copies,
            "hours_on_one_machine": sum(sum(one.hours.values()) for one in sets) + training,
            "hours_train": training,
        },
        "disk": {
            "free": free,
            "reserved": params.runtime.reserve_bytes,
            "enough": missing + params.runtime.reserve_bytes <= free,
            "tokens_that_fit": {
                kind: free // each if each else None for kind, each in token_bytes.items()
            },
        },
        "memory": memory(params, config),
        "longest_path": path,
        "what_if": what_if(sets, params, rates, token_bytes, room) if width else [],
    }


def estimates(params: Params, data: Path, work: Path) -> list[Estimate]:
    """Rows and tokens of every data set; what is known of some stands in for the others."""
    known = {name: found for name in params.datasets if (found := known_tokens(name, data, work))}
    answered = {
        kind: [k for name, k in known.items() if k[3] and params.datasets[name].answers == kind]
        for kind in ("generate", "given")
    }
    found = []
    for name, dataset in params.datasets.items():
        basis, rows, prompt, answer = known.get(name, ("assumed", 0, 0, 0))
        limit = (
            params.generate.sampling.max_new_tokens
            if dataset.answers == "generate"
            else params.given.max_answer_tokens
        )
        alike = answered[dataset.answers]
        per_prompt = (
            prompt / rows
            if rows
            else _mean(alike, 2) or min(params.prompts.max_prompt_tokens / 4, 512)
        )
        per_answer = answer / rows if answer else _mean(alike, 3) or _assumed_answer(dataset, limit)
        if basis == "measured":
            wanted, answer_tokens, prompt_tokens = rows, answer, prompt
        else:
            wanted = rows_wanted(name, dataset, data)
            if wanted is None:
                wanted = int(dataset.token_budget / per_answer) if dataset.token_budget else 0
                basis = "budget" if dataset.token_budget else "unknown"
            if dataset.token_budget and wanted * per_answer > dataset.token_budget:
                wanted = int(-(-dataset.token_budget // per_answer))
            answer_tokens, prompt_tokens = round(wanted * per_answer), round(wanted * per_prompt)
            if basis in ("assumed", "prompts", "budget") and alike:
                basis = "like the others"
        room = params.records.max_tokens * max(wanted, 1)
        prompt_tokens = min(prompt_tokens, room)
        found.append(
            Estimate(
                name,
                dataset.answers,
                wanted,
                prompt_tokens,
                min(answer_tokens, room - prompt_tokens),
                basis,
            )
        )
        found[-1].done = [
            stage
            for stage, file in (
                ("prepare", f"prompts/{name}.parquet"),
                ("generate", f"responses/{name}/raw_responses.jsonl"),
                ("tokenize", f"records/{name}.parquet"),
                ("extract", f"hidden_states/{name}/manifest.json"),
            )
            if (data / file).exists()
        ]
    return found


def _assumed_answer(dataset: Dataset, limit: int) -> float:
    """Tokens of an answer when nothing is known: half of the longest, or what makes the budget last
    for all samples."""
    if dataset.token_budget and dataset.max_samples:
        return min(limit / 2, dataset.token_budget / dataset.max_samples)
    return limit / 2


def _mean(known: list[tuple], place: int) -> float:
    rows = sum(k[1] for k in known)
    return sum(k[place] for k in known) / rows if rows else 0


def _cost(one: Estimate, params: Params, rates: Rates, token_bytes: int) -> None:
    one.bytes_responses = (
        BYTES_PER_PROMPT_TOKEN * one.prompt_tokens + BYTES_PER_ANSWER_TOKEN * one.answer_tokens
    )
    one.bytes_states = token_bytes * one.tokens
    generate = one.answer_tokens / rates.generate / 3600 if one.answers == "generate" else 0.0
    one.hours = {
        "generate": 0.0 if "generate" in one.done else generate,
        "extract": 0.0 if "extract" in one.done else one.tokens / rates.extract / 3600,
    }


def longest_path(sets: list[Estimate], train_hours: float) -> dict[str, Any]:
    """What a build takes with a machine for every data set: the slowest chain, then training."""
    slowest = max(sets, key=lambda one: sum(one.hours.values()))
    stages = {f"{stage}@{slowest.name}": hours for stage, hours in slowest.hours.items()}
    stages["train"] = train_hours
    return {"stages": stages, "hours": sum(stages.values())}


def what_if(
    sets: list[Estimate], params: Params, rates: Rates, token_bytes: dict[str, int], room: int
) -> list[dict[str, Any]]:
    """Bytes and hours under other settings, and whether `room` bytes hold the states."""
    tokens = sum(one.tokens for one in sets)
    halved = sum(one.prompt_tokens // 2 + one.answer_tokens // 2 for one in sets if one.rows > 1)
    dtype, shard = params.hidden_states.dtype, params.hidden_states.shard_bytes
    cases = [
        (f"as it is: {dtype}, shards of {size(shard)}", tokens, dtype, shard),
        ("half of max_samples and token_budget", halved, dtype, shard),
        *(
            (f"hidden_states.dtype: {kind}", tokens, kind, shard)
            for kind in ("float8_e4m3fn", "bfloat16")
            if kind != dtype
        ),
        *(
            (f"hidden_states.shard_bytes: {other}", tokens, dtype, other)
            for other in (shard // 4, shard * 4)
        ),
    ]
    return [
        {
            "change": change,
            **_case(count, token_bytes[kind], each, params, rates),
            "fits": count * token_bytes[kind] <= room,
        }
        for change, count, kind, each in cases
    ]


def _case(
    tokens: int, token_bytes: int, shard_bytes: int, params: Params, rates: Rates
) -> dict[str, Any]:
    """`seconds_lost`: work that a kill costs at most, one shard's."""
    return {
        "tokens": tokens,
        "bytes_states": tokens * token_bytes,
        "shards": max(1, -(-tokens * token_bytes // shard_bytes)),
        "seconds_lost": min(shard_bytes / token_bytes, tokens) / rates.extract,
        "hours_train": train_hours(tokens, params, rates),
    }


def train_hours(tokens: int, params: Params, rates: Rates) -> float:
    hours = (
        tokens * (1 - params.records.validation_fraction) * params.train.epochs / rates.train / 3600
    )
    longest = (
        (params.train.max_updates or float("inf"))
        * params.train.batch_tokens
        * params.train.micro_batches
    )
    return min(hours, longest / rates.train / 3600)


def cache_copies(data: Path) -> int:
    """How often an artifact's bytes lie on this disk: once where DVC's cache may link them, twice
    where it copies."""
    folder = data if data.exists() else Path(".")
    return disk.needs(1, folder)[0][folder]


def memory(params: Params, config: dict[str, Any]) -> dict[str, Any]:
    """Bytes that training keeps: trained weights with gradient and moments, the target's embedding
    and head in fp32.

    `needed` is None where the target's configuration is not here. Activations come on top; they
    follow train.batch_tokens."""
    needed = None
    if config:
        captured = layers.captured_layers(config["num_hidden_layers"], params.hidden_states.layers)
        convention = layers.convention_of(
            (config.get("architectures") or [""])[0], params.hidden_states.convention
        )
        shape = drafter_config(
            config,
            params.train.architecture.model_dump(),
            params.vocab.size,
            layers.config_ids(captured, convention),
            "bfloat16",
        )
        weights = sum(
            _product(s)
            for name, s in export.expected_shapes(shape).items()
            if name.endswith("weight")
        )
        needed = OPTIMIZER_BYTES * weights + 2 * 4 * config["vocab_size"] * config["hidden_size"]
    return {"needed_by_train": needed, "available": available_memory(), "gpu": gpu_memory()}


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for extent in shape:
        result *= extent
    return result


def available_memory() -> int:
    """MemAvailable of this machine, in bytes."""
    for line in (
        Path("/proc/meminfo").read_text().splitlines() if os.path.exists("/proc/meminfo") else []
    ):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def gpu_memory() -> int:
    """Bytes of all GPUs together; 0 without one."""
    import torch

    return (
        sum(torch.cuda.mem_get_info(i)[1] for i in range(torch.cuda.device_count()))
        if torch.cuda.is_available()
        else 0
    )


def size(count: float) -> str:
    """1234567 -> '1.2 MB', in powers of 1000, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError
