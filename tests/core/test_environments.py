"""The lists of packages say the same. Alone: python -m pytest tests/core/test_environments.py"""

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def pins() -> dict[str, str]:
    """Name -> version of requirements.txt."""
    lines = [
        line.partition("#")[0].strip()
        for line in (ROOT / "requirements.txt").read_text().splitlines()
    ]
    return dict(line.split("==") for line in lines if line)


def test_the_conda_environment_has_the_pinned_packages():
    content = yaml.safe_load((ROOT / "workflow/environment.yaml").read_text())
    listed = next(entry["pip"] for entry in content["dependencies"] if isinstance(entry, dict))
    assert dict(line.split("==") for line in listed) == pins()


def test_the_pins_lie_in_the_ranges_of_pyproject():
    ranges = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = {name.lower(): version for name, version in pins().items()}
    for requirement in map(Requirement, ranges):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement
