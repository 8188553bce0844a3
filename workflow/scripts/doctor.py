"""doctor: says whether SGLang will use a drafter rightly, with the reason and the remedy of each
finding.

    python workflow/scripts/doctor.py DRAFTER [--target data/target]

The target is this project's, or any Hugging Face directory. Exit code 1 if something is wrong.
"""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import sys
from pathlib import Path

from eagle3.commands import doctor
from eagle3.core.errors import UserError
from eagle3.target.model import Target, model_config


def open_target(folder: Path) -> Target:
    """data/target, or a plain model folder, whose weights need no digest here."""
    if (folder / "target.json").exists():
        return Target(folder)
    if not (folder / "config.json").exists():
        raise UserError(
            f"there is no target at {folder}: `dvc repro target` brings the one of params.yaml, "
            "and "
            'ARGS="--target FOLDER" names another one'
        )
    return Target(
        folder,
        {
            "path": str(folder),
            "architecture": (model_config(folder).get("architectures") or ["none"])[0],
            "dtype": "auto",
            "trust_remote_code": False,
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    arguments = parser.parse_args()
    try:
        findings = doctor.examine(arguments.drafter, open_target(arguments.target))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for finding in findings:
        print(finding)
    counts = {
        verdict: sum(f.verdict == verdict for f in findings)
        for verdict in (doctor.BAD, doctor.WARNING)
    }
    summary = "; ".join(f"{n} findings: {verdict}" for verdict, n in counts.items() if n)
    print(f"\n{arguments.drafter}: {summary or 'SGLang will use it rightly'}")
    return 1 if counts[doctor.BAD] else 0


if __name__ == "__main__":
    sys.exit(main())
