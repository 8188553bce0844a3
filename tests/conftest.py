"""Fixtures that several test files share."""

import importlib.util
import sys
from pathlib import Path

import pytest

import tiny

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"


def load_script(name: str):
    """A stage's script as a module (it is no package, and its name may be one of Python's own)."""
    sys.modules.setdefault("_path", importlib.util.module_from_spec(
        importlib.util.spec_from_loader("_path", loader=None)))
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face directory with a random Llama of 8 layers and a tokenizer."""
    return tiny.make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def in_tmp(tmp_path, monkeypatch) -> Path:
    """A working directory of its own: the library keeps unfinished work in `.work` of the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
