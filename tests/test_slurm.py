"""profiles/slurm against a real SLURM on this machine. Alone: make test-slurm

Skipped where slurmctld, slurmd and munged are not installed (Debian: slurmctld slurmd slurm-client
munge) or this is not root; SLURM needs root to start jobs. The daemons are this test's own, with
their own ports; their configuration lies in /etc/slurm while the test runs, where `srun` inside a
job looks for it, and the test is skipped if one lies there already."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import yaml

ETC = Path("/etc/slurm")
DAEMONS = ("munged", "slurmctld", "slurmd")
pytestmark = [
    pytest.mark.skipif("EAGLEMAKE_SLURM" not in os.environ, reason="slow; make test-slurm runs it"),
    pytest.mark.skipif(
        not all(shutil.which(d) for d in DAEMONS) or os.geteuid() != 0,
        reason="needs SLURM, munge and root",
    ),
    pytest.mark.skipif((ETC / "slurm.conf").exists(), reason="a SLURM is configured here already"),
]
CONFIG = """ClusterName=loopback
SlurmctldHost=localhost
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
MinJobAge=3600
GresTypes=gpu
NodeName=localhost CPUs={cpus} RealMemory={memory} Gres=gpu:8 State=UNKNOWN
PartitionName=cpu Nodes=localhost Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=localhost MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A running SLURM of one node with eight pretended GPUs."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    memory = int(Path("/proc/meminfo").read_text().split()[1]) // 1024 - 2000
    (folder / "slurm.conf").write_text(
        CONFIG.format(folder=folder, cpus=os.cpu_count(), memory=memory)
    )
    for i in range(8):
        (folder / f"gpu{i}").touch()
    (folder / "gres.conf").write_text(
        f"NodeName=localhost Name=gpu Count=8 File={folder}/gpu[0-7]\n"
    )
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    ETC.mkdir(exist_ok=True)
    for name in ("slurm.conf", "gres.conf"):
        (ETC / name).symlink_to(folder / name)
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder}/key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/seed",
        ],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "localhost"],
    ]
    running = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            time.sleep(1.5)
        for _ in range(30):
            state = subprocess.run(
                ["sinfo", "-h", "-o", "%T"], capture_output=True, text=True
            ).stdout
            if "idle" in state:
                break
            time.sleep(1)
        else:
            pytest.fail(
                f"SLURM did not come up: {state} {(folder / 'slurmctld.log').read_text()[-2000:]}"
            )
        yield
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(30)
        for name in ("slurm.conf", "gres.conf"):
            (ETC / name).unlink()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("job", ["tiny", "embedded"])
def test_the_whole_job_runs_as_slurm_jobs_with_their_resources(job, tmp_path, slurm):
    project = tiny.make_project(tmp_path / "project", {"one": (12, "generate")})
    if job == "embedded":
        shutil.copy(tiny.ROOT / "params.yaml", project)
    names = sorted(tiny.read_params(project)["datasets"])
    profile = yaml.safe_load((project / "profiles/slurm/config.yaml").read_text())
    profile["set-threads"] = {rule: 1 for rule in profile["set-threads"]}  # what this machine has
    for resources in [profile["default-resources"], *profile["set-resources"].values()]:
        resources["mem_mb"] = 4000
    profile.update(
        {
            "seconds-between-status-checks": 3,
            "slurm-init-seconds-before-status-checks": 3,
            "slurm-status-command": "squeue",
        }
    )  # there is no accounting here, and so no sacct
    (project / "profiles/slurm/config.yaml").write_text(yaml.safe_dump(profile))
    before = len(jobs())
    subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", "profiles/slurm", "drafter"],
        cwd=project,
        check=True,
        timeout=1700,
    )
    assert (project / "data/drafter/model.safetensors").exists()
    ran = jobs()[before:]
    assert len(ran) == 3 + 4 * len(
        names
    )  # target, vocab, train; prepare, generate, tokenize, extract of each data set
    assert all(line["JobState"] == "COMPLETED" for line in ran), ran
    on_gpu = [line for line in ran if line["Partition"] == "gpu"]
    assert len(on_gpu) == 1 + 2 * len(names)
    assert all("gpu:8" in line.get("TresPerNode", line.get("TRES", "")) for line in on_gpu)
    again = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", "profiles/slurm", "-n", "drafter"],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert "Nothing to be done" in again.stdout + again.stderr
    assert (
        sorted(json.loads((project / "data/drafter/training.json").read_text())["hidden_states"])
        == names
    )


def jobs() -> list[dict[str, str]]:
    """All jobs that this SLURM has had, in order."""
    shown = subprocess.run(
        ["scontrol", "show", "jobs", "--oneliner"], capture_output=True, text=True
    ).stdout
    found = [
        dict(part.split("=", 1) for part in line.split() if "=" in part)
        for line in shown.splitlines()
    ]
    return sorted((job for job in found if "JobId" in job), key=lambda job: int(job["JobId"]))
