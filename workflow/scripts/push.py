"""push: sends the artifacts of the stages in runtime.push to the DVC remote, and checks that all of
them arrived."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import subprocess
import sys

from eagle3.core import params as parameters
from eagle3.core.errors import UserError
from eagle3.build.keys import stage_names


def targets(stages: list[str], wanted: list[str]) -> list[str]:
    """DVC targets for the stage names in `wanted`: 'generate' -> every 'generate@…'."""
    return [stage for stage in stages if stage.partition("@")[0] in wanted]


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
