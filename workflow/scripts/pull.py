"""pull: brings what the DVC remote has of this build into data/. Every byte is hashed, and no file
lands outside of its artifact; what the remote does not have is built when something needs it."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import logging
import sys
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo, lock_repo

from eagle3.build import recording, remote
from eagle3.build.keys import stage_names
from eagle3.build.objects import Guard, used
from eagle3.core import params as parameters
from eagle3.core.errors import UserError


def pull(wanted: list[str], run_cache: bool) -> None:
    """Pulls the outputs of the stages `wanted` ('generate' stands for every 'generate@…'), of all
    without it. Raises UserError if the remote has none of them or sent something damaged."""
    params = parameters.load("params.yaml")
    names = stage_names(parameters.read_yaml("dvc.yaml"), sorted(params.datasets))
    if unknown := set(wanted) - {*names, *(name.partition("@")[0] for name in names)}:
        raise UserError(
            f"{', '.join(sorted(unknown))}: no such stage; there are {', '.join(names)}"
        )
    names = [name for name in names if not wanted or {name, name.partition("@")[0]} & set(wanted)]
    recording.install()
    logging.getLogger("dvc_data").setLevel(
        logging.ERROR
    )  # what is not there is said below, by stage
    there, damaged, lacking = [], [], []
    with Repo() as repo, lock_repo(repo):
        guard = Guard(repo, again=True)
        if run_cache:
            repo.stage_cache.pull(None)
        for name in names:
            (stage,) = repo.stage.collect(name)
            if not all(out.hash_info for out in stage.outs):
                continue  # not in dvc.lock: nobody made it
            guard.damaged(stage)  # what is damaged here is fetched anew
            if bad := remote.fetch_outputs(repo, guard, stage):
                damaged.append(f"{name} ({', '.join(oid[:8] for oid in bad)})")
            elif used(stage) and stage.outs_cached():
                stage.checkout()
                there.append(name)
            else:
                lacking.append(name)
    print(f"here and whole: {', '.join(there) or 'nothing'}", file=sys.stderr)
    if lacking:
        print(
            f"not in the remote: {', '.join(lacking)}; built when something needs it",
            file=sys.stderr,
        )
    if damaged:
        raise UserError(
            f"damaged in the remote, and not taken: {'; '.join(damaged)}; whoever has a good copy "
            "pushes it again after removing the remote's, or build: it is made here"
        )
    if not there:
        raise UserError("the remote has nothing of what dvc.lock names; `make push` fills it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", help="stages (default: all that dvc.lock names)")
    parser.add_argument(
        "--run-cache", action="store_true", help="results of earlier parameters and code as well"
    )
    arguments = parser.parse_args()
    if not Path(".dvc").is_dir():
        sys.exit("error: no .dvc here; run this in the project's folder")
    try:
        pull(arguments.stages, arguments.run_cache)
    except (UserError, DvcException) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
