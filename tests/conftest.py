"""Fixtures that several test files share."""

import importlib.util
import signal
import sys
from pathlib import Path

import pytest
import tiny
from eagle3.core import environment  # noqa: F401  (before torch is loaded, as in the scripts)

# A shell starts background jobs with interrupts ignored, and their children inherit it; here
# interrupts are tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"


def load_script(name: str):
    """A stage's script as a module (it is no package, and its name may be one of Python's own)."""
    sys.modules.setdefault(
        "_path",
        importlib.util.module_from_spec(importlib.util.spec_from_loader("_path", loader=None)),
    )
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
    """A working directory of its own: the library keeps unfinished work in `.work` of the current
    one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny_target(tiny_model, tmp_path_factory):
    """The tiny model as a Target."""
    import tiny_drafter

    return tiny_drafter.make_target(tmp_path_factory.mktemp("tiny-target"), tiny_model)


@pytest.fixture(scope="session")
def learnt(tiny_target, tmp_path_factory):
    """A drafter that knows some answers of the tiny target by heart: folder, drafter, prompts and
    their greedy answers."""
    from types import SimpleNamespace

    import tiny_drafter
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    asked = tiny_drafter.prompts(8)
    answers = tiny_drafter.greedy_answers(tiny_target, asked, 12)
    drafter = tiny_drafter.overfit_drafter(tiny_target, asked, answers)
    torch.set_num_threads(before)
    folder = tiny_drafter.save(drafter, tmp_path_factory.mktemp("learnt") / "drafter")
    return SimpleNamespace(folder=folder, drafter=drafter, prompts=asked, answers=answers)
