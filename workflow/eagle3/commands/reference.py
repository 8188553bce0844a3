"""docs/params.md, generated from the schema: every key with its type, default, limits and meaning.

`make docs` writes it; a test holds the file equal to what this module makes.
"""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from eagle3.core.schema import RUNTIME_SECTIONS, Params

PAGE = Path("docs/params.md")
INTRODUCTION = """# params.yaml, key by key

Generated from `workflow/eagle3/core/schema.py` by `make docs`; do not edit. A key that is not
listed here is an error, and so is a value outside its limits: every command that reads
`params.yaml` checks the whole file first.

Keys of a section belong to the stages that `dvc.yaml` lists the section for: changing one makes
those stages stale, and nothing else. The sections {runtime} are run-time tuning; changing them
makes nothing stale.
"""
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
TYPES = {"bool": "true or false", "int": "whole number", "float": "number", "str": "text"}


def page() -> str:
    """The whole page."""
    runtime = " and ".join(f"`{name}`" for name in RUNTIME_SECTIONS)
    parts = [INTRODUCTION.format(runtime=runtime)]
    for name, field in Params.model_fields.items():
        model = section_model(field.annotation)
        title = f"{name}.NAME" if is_mapping(field.annotation) else name
        parts.append(f"\n## {title}\n\n{first_paragraph(model)}\n\n" + table(model, title))
    return "\n".join(part.rstrip("\n") for part in parts) + "\n"


def table(model: type[BaseModel], prefix: str) -> str:
    """Markdown table of a section's keys, those of nested sections included."""
    rows = ["| key | type | default | limits | meaning |", "|---|---|---|---|---|"]
    rows += [
        f"| `{key}` | {kind_of(field.annotation)} | {default_of(field)} | {limits_of(field)} | "
        f"{cell(field.description or '')} |"
        for key, field in keys(model, prefix)
    ]
    return "\n".join(rows) + "\n"


def keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of a section, nested sections opened; NAME and [] stand for the keys and
    items of several."""
    for name, field in model.model_fields.items():
        nested = section_model(field.annotation)
        if nested is not None:
            item = (
                ".NAME"
                if is_mapping(field.annotation)
                else "[]"
                if get_origin(field.annotation) is list
                else ""
            )
            yield from keys(nested, f"{prefix}.{name}{item}")
        else:
            yield f"{prefix}.{name}", field


def section_model(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation names, also as the value of a mapping or beside None; None for
    plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        if not isinstance(part, (str, int, float)) and (found := section_model(part)):
            return found
    return None


def is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict


def kind_of(annotation: Any) -> str:
    """A type in words: `list[int]` -> 'list of whole number'."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        kinds = [kind_of(part) for part in parts if part is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is list:
        return f"list of {kind_of(parts[0])}"
    if origin is dict:
        names = f" ({kind_of(parts[0])})" if get_origin(parts[0]) is Literal else ""
        return f"mapping{names} to {kind_of(parts[1])}"
    if section_model(annotation):
        return "section"
    return TYPES.get(getattr(annotation, "__name__", ""), str(annotation))


def default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value not in ("", [], {}) else "empty"


def limits_of(field: FieldInfo) -> str:
    """Bounds, pattern and length, of the value or of the items of a list."""
    return cell(
        ", ".join(
            [
                *bounds(field.metadata),
                *(f"each {bound}" for bound in inner_bounds(field.annotation)),
            ]
        )
    )


def inner_bounds(annotation: Any) -> Iterator[str]:
    """Bounds that stand inside a type, as of the items of `list[int] | None`."""
    if get_origin(annotation) is Annotated:
        for info in get_args(annotation)[1:]:
            yield from bounds(getattr(info, "metadata", [info]))
    elif get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from inner_bounds(part)


def bounds(metadata: list) -> Iterator[str]:
    for item in metadata:
        for name, sign in SIGNS.items():
            if (value := getattr(item, name, None)) is not None:
                yield f"{sign} {value:g}" if abs(value) < 1e6 else f"{sign} {value}"
        if (pattern := getattr(item, "pattern", None)) is not None:
            yield f"`{pattern}`"
        if (least := getattr(item, "min_length", None)) is not None:
            yield f"at least {least}"


def cell(text: str) -> str:
    """Text for a table cell: a bar would end it."""
    return text.replace("|", "\\|").replace("\n", " ")


def first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").strip().split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
