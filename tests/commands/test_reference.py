"""docs/params.md. Alone: python -m pytest tests/commands/test_reference.py"""

from pathlib import Path

import yaml
from eagle3.commands import reference
from eagle3.core.schema import Params
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_schema_says():
    found = (ROOT / reference.PAGE).read_text()
    assert found == reference.page(), "docs/params.md is out of date: run `make docs` and commit it"


def leaves(content: dict, path: str = ""):
    """Dotted names of what a params.yaml holds, with NAME for a data set or a question set."""
    for key, value in content.items():
        name = f"{path}.{key}" if path else key
        if path in ("datasets", "bench.questions"):
            name = f"{path}.NAME"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from leaves(value[0], f"{name}[]")
            continue
        if (
            isinstance(value, dict)
            and value
            and not name.endswith(("flags", "environment", "columns", "kwargs"))
        ):
            yield from leaves(value, name)
        elif value != {}:
            yield name


def test_every_key_of_the_project_and_the_recipes_is_on_the_page():
    page = reference.page()
    for path in [ROOT / "params.yaml", *sorted((ROOT / "recipes").glob("*.yaml"))]:
        for name in leaves(yaml.safe_load(path.read_text())):
            assert f"| `{name}` |" in page, f"{path.name}: {name}"


def test_every_key_is_described():
    def models(model: type[BaseModel]):
        yield model
        for field in model.model_fields.values():
            if nested := reference.section_model(field.annotation):
                yield from models(nested)

    for model in models(Params):
        assert model.__doc__ and model.__doc__.strip(), model.__name__
        for name, field in model.model_fields.items():
            assert field.description or reference.section_model(field.annotation), (
                f"{model.__name__}.{name}"
            )


def test_types_limits_and_defaults_are_in_words():
    rows = {
        line.split("|")[1].strip().strip("`"): line
        for line in reference.page().splitlines()
        if line.startswith("| `")
    }
    assert "| whole number | `7` | ≥ 1, ≤ 16 |" in rows["train.steps"]
    assert "| list of whole number | none | each ≥ 0 |" in rows["hidden_states.layers"]
    assert "`generate`, `given` | required" in rows["datasets.NAME.answers"]
    assert "number | `0.8` | > 0, ≤ 1 |" in rows["train.decay"]
