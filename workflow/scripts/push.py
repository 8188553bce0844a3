"""push: sends the artifacts of the stages in runtime.push to the DVC remote, and checks that all of
them arrived."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import subprocess
import sys

from dvc.exceptions import DvcException
from dvc.repo import Repo, lock_repo
from eagle3.core import params as parameters
from eagle3.core.errors import UserError
from eagle3.build.keys import stage_names
from eagle3.build.objects import Guard


def targets(stages: list[str], wanted: list[str]) -> list[str]:
    """DVC targets for the stage names in `wanted`: 'generate' -> every 'generate@…'."""
    return [stage for stage in stages if stage.partition("@")[0] in wanted]


def find_damaged(names: list[str]) -> list[str]:
    """Those of the stages that have a damaged object in DVC's cache; all are hashed."""
    try:
        with Repo() as repo, lock_repo(repo):
            guard = Guard(repo, again=True)
            return [name for name in names if guard.damaged(repo.stage.collect(name)[0])]
    except DvcException as error:
        sys.exit(f"error: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--params", default="params.yaml", help="parameter file (default: params.yaml)"
    )
    parser.add_argument("--remote", help="name of the remote (default: DVC's)")
    arguments = parser.parse_args()
    try:
        params = parameters.load(arguments.params)
        names = targets(
            stage_names(parameters.read_yaml("dvc.yaml"), sorted(params.datasets)),
            params.runtime.push,
        )
    except UserError as error:
        sys.exit(f"error: {error}")
    if damaged := find_damaged(names):
        sys.exit(
            f"error: damaged in DVC's cache, and not sent: {', '.join(damaged)}; build it again "
            "(`snakemake --cores all bench`), then push"
        )
    remote = ["--remote", arguments.remote] if arguments.remote else []
    print(
        f"pushing {', '.join(names)} (runtime.push); everything else stays here",
        file=sys.stderr,
        flush=True,
    )
    dvc = [sys.executable, "-m", "dvc"]
    if code := subprocess.run([*dvc, "push", *remote, *names]).returncode:
        sys.exit(code)
    # A listing can arrive without all of its files; the comparison with the remote tells.
    state = subprocess.run(
        [*dvc, "status", "--cloud", *remote, *names], capture_output=True, text=True
    )
    if state.returncode or "in sync" not in state.stdout + state.stderr:
        sys.exit(
            "error: not everything arrived; run the same command "
            f"again:\n{state.stdout}{state.stderr}"
        )


if __name__ == "__main__":
    main()
