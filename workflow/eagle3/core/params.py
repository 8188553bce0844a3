"""params.yaml as the stages see it: checked as a whole, readable only in the slices that dvc.yaml
declares."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from eagle3.core import secrets
from eagle3.core.errors import UserError
from eagle3.core.files import canonical_json
from eagle3.core.schema import Params, is_runtime

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(LOADER):
    """YAML 1.2 numbers, as DVC reads them (PyYAML alone takes 1e-4 for a text), and no key
    twice."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?|\.inf|\.nan)$"
    ),
    list("-+0123456789."),
)


def read_yaml(path: str | Path) -> Any:
    """Raises UserError with line and column if the file is no YAML."""
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.load(file, _Loader)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; run this in the project's folder, or copy one from recipes/"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{place}: {getattr(error, 'problem', error)}") from None


def load(path: str | Path = "params.yaml") -> Params:
    """The whole file, checked. Raises UserError naming each wrong key, its value and what is
    allowed."""
    return _load(str(path), Path(path).stat().st_mtime_ns if Path(path).exists() else 0)


@lru_cache(maxsize=4)
def _load(path: str, _changed: int) -> Params:
    return check(read_yaml(path), path)


# Keys of earlier versions: what they are called now.
RENAMED = {
    "on_policy": "given",
    "records.validation_share": "records.validation_fraction",
    "train.clip": "train.max_grad_norm",
    "train.warmup_share": "train.warmup_ratio",
    "bench.batch_sizes": "bench.concurrency",
    "runtime.max_tries": "runtime.max_attempts",
    "runtime.processes": "runtime.nproc_per_node",
}

# Keys of earlier versions that are gone, and why.
GONE = {
    "train.ema": "a moving average of the weights gained nothing",
    "train.loss": "the soft cross-entropy is the only loss; the others learned slower",
    "train.ramp_share": "every update trains all steps; fewer at the start cost accept length",
    "train.schedule: linear": "use cosine or wsd",
}


def check(content: Any, path: str | Path = "params.yaml") -> Params:
    try:
        return Params.model_validate(content)
    except ValidationError as error:
        raise UserError("\n".join(_explain(path, item) for item in error.errors())) from None


def _explain(path, item: dict) -> str:
    key = ".".join(str(part) for part in item["loc"] if part != "[key]") or "the file"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden" and (now := RENAMED.get(key)):
        return f"{path}: {key} is now called {now}"
    if item["type"] == "extra_forbidden" and (why := GONE.get(key)):
        return f"{path}: {key} is gone: {why}; take the line out"
    if item["type"] == "extra_forbidden":
        known = _keys_beside(item["loc"])
        return f"{path}: {key} is no known key; known here: {', '.join(known)}"
    if item["type"] == "missing":
        return f"{path}: {key} is missing"
    value = item.get("input")
    if item["type"] == "string_pattern_mismatch" and item["loc"][-1] == "[key]":
        return (
            f"{path}: {key}: names of data sets hold letters, digits, _ . - and begin with a "
            "letter or a digit"
        )
    if item["type"] == "literal_error" and value in RENAMED:
        return f"{path}: {key}: {value} is now called {RENAMED[value]}"
    if item["type"] == "literal_error" and (why := GONE.get(f"{key}: {value}")):
        return f"{path}: {key}: {value} is gone: {why}"
    hidden = isinstance(value, (dict, BaseModel)) or any(
        secrets.is_secret(str(part), value) for part in item["loc"]
    )
    shown = "" if hidden else f" is {value!r}"
    return f"{path}: {key}{shown}: {message[0].lower() + message[1:]}"


def _keys_beside(loc: tuple) -> list[str]:
    model = Params
    for part in loc[:-1]:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        model = field.annotation if field else model
        if not hasattr(model, "model_fields"):  # dict[Name, Dataset]: the next part is a name
            from eagle3.core.schema import Dataset

            model = Dataset
    return sorted(getattr(model, "model_fields", {}))


def lookup(content: Any, dotted: str) -> Any:
    """The value of 'datasets.alpaca' in nested dicts or models; None when it is not there."""
    for key in dotted.split("."):
        content = content.get(key) if isinstance(content, dict) else getattr(content, key, None)
        if content is None:
            return None
    return content


def stage_slices(stage: str, definitions: dict, params: dict) -> list[str]:
    """The parameter keys that dvc.yaml lists for a stage, with `${key}` and `${item.…}` filled in.

    `stage` is 'train' or 'prepare@alpaca'. Raises UserError if dvc.yaml has no such stage.
    """
    group, _, key = stage.partition("@")
    definition = definitions.get("stages", {}).get(group)
    if definition is None:
        raise UserError(
            f"dvc.yaml has no stage {group}; it has {', '.join(definitions.get('stages', {}))}"
        )
    definition = definition.get("do", definition)
    item = lookup(params, f"datasets.{key}") if key else None

    def fill(match):
        if match[1] == "key":
            return key
        return str(lookup(item, match[1].removeprefix("item.")))

    return [
        re.sub(r"\$\{([a-z_.]+)\}", fill, entry)
        for entry in definition.get("params", [])
        if isinstance(entry, str)
    ]


def slice_text(params: dict, slices: list[str]) -> str:
    """Canonical JSON of a stage's slices: what its key file holds."""
    return canonical_json({key: lookup(params, key) for key in slices})


class Declared:
    """params.yaml behind a gate: reading a key that the stage does not declare raises UserError
    with the line to add.

    Run-time keys (`server.*` and others marked so in the schema) may always be read.
    """

    def __init__(self, value: Any, stage: str, slices: list[str], path: str = ""):
        self._value, self._stage, self._slices, self._path = value, stage, slices, path

    def __getattr__(self, name: str) -> Any:
        return self._open(name, getattr(self._value, name))

    def __getitem__(self, name: str) -> Any:
        return self._open(name, self._value[name])

    def _open(self, name: str, value: Any) -> Any:
        path = f"{self._path}.{name}" if self._path else name
        if any(
            path == known or path.startswith(known + ".") for known in self._slices
        ) or is_runtime(path):
            return value
        if any(known.startswith(path + ".") for known in self._slices) or isinstance(
            value, BaseModel
        ):
            return Declared(value, self._stage, self._slices, path)
        raise UserError(
            f"stage {self._stage} reads {path}, which dvc.yaml does not list for it, so an edit "
            "of it would go unseen; "
            f"add `- {path}` under stages.{self._stage.partition('@')[0]}.params"
        )
