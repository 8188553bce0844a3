"""The code of a stage: its script and every file in the folders that dvc.yaml lists for it."""

from pathlib import Path
from typing import Any

import pathspec

WORKFLOW = "workflow/"


def code_files(stage: str, definitions: dict[str, Any], root: str | Path = ".") -> list[str]:
    """Files of a stage's code, relative to `root`, sorted; what .dvcignore names is no code."""
    root, definition = Path(root), definitions["stages"][stage.partition("@")[0]]
    ignored = root / ".dvcignore"
    spec = pathspec.GitIgnoreSpec.from_lines(
        ignored.read_text().splitlines() if ignored.exists() else []
    )
    found = set()
    for entry in definition.get("do", definition).get("deps", []):
        if entry.startswith(WORKFLOW):
            path = root / entry
            found |= {
                str(file.relative_to(root))
                for file in ([path] if path.is_file() else path.rglob("*"))
                if file.is_file()
            }
    return sorted(file for file in found if not spec.match_file(file))
