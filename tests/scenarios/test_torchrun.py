"""Training over several machines, as docs/cluster.md says: two torchruns meet, in one folder. Here
both are on this machine.

Alone: python -m pytest tests/scenarios/test_torchrun.py
"""

import json
import re
import subprocess
import sys

import pytest
import server_parts as serving
import tiny

pytestmark = pytest.mark.timeout(900)


def documented() -> list[str]:
    """The words of the torchrun command in docs/cluster.md."""
    page = (tiny.ROOT / "docs/cluster.md").read_text()
    return re.search(r"^torchrun (.*)$", page, re.MULTILINE)[1].split()


def test_two_torchruns_train_one_drafter_and_dvc_takes_it_over(copy):
    project = copy("project")
    project.edit_params(train__micro_batches=2)
    assert "train" in project.stale()
    words = [
        f"localhost:{serving.free_port()}" if word == "FIRST-MACHINE:29500" else word
        for word in documented()
    ]
    words[words.index("--nproc-per-node") + 1] = "1"
    assert words[:2] == ["--nnodes", "2"] and words[-1] == "workflow/scripts/train.py"
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=project.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]
    said = [one.communicate(timeout=600)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], "\n".join(said)[-4000:]
    assert (
        sum("accept length" in text for text in said) == 1
    )  # the first process alone speaks and writes
    assert (
        json.loads((project / "data/drafter/training.json").read_text())["params"]["micro_batches"]
        == 2
    )
    project.dvc("commit", "--force", "train")
    assert "train" not in project.planned()
