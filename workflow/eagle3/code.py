"""The code of a stage: its script and every file of this project that it imports, directly or not."""

import ast
import re
from functools import cache
from pathlib import Path

SCRIPTS, LIBRARY = Path("workflow/scripts"), Path("workflow")


def code_files(stage: str, root: str | Path = ".") -> list[str]:
    """Files of a stage's code, relative to `root`, sorted. Imports inside functions count as well."""
    root = Path(root)
    found: set[Path] = set()
    queue = [SCRIPTS / f"{stage.partition('@')[0]}.py"]
    while queue:
        file = queue.pop()
        if file not in found:
            found.add(file)
            queue += _imported(root, file)
    return sorted(map(str, found))


def _imported(root: Path, file: Path) -> list[Path]:
    path = root / file
    return _parse(path, path.stat().st_mtime_ns, root, file.parent == SCRIPTS)


@cache
def _parse(path: Path, _changed: int, root: Path, is_script: bool) -> list[Path]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    files = {LIBRARY / f"{name.replace('.', '/')}.py" for name in names if name.startswith("eagle3.")}
    files |= {LIBRARY / "eagle3/__init__.py"} if any(name.partition(".")[0] == "eagle3" for name in names) else set()
    if is_script and "_path" in names:
        files.add(SCRIPTS / "_path.py")
    return [file for file in files if (root / file).exists()]


def undeclared(group: str, files: list[str], definitions: dict) -> list[str]:
    """Code files of a stage that dvc.yaml (`definitions`) does not list among its deps."""
    definition = definitions["stages"][group]
    return sorted(set(files) - set(definition.get("do", definition).get("deps", [])))


def with_declared_code(text: str, root: str | Path = ".") -> str:
    """The text of dvc.yaml with every stage's code files as they are imported now; comments and order stay."""
    lines: list[str] = []
    stage = indent = ""
    in_deps = False
    for line in [*text.splitlines(), ""]:
        if match := re.match(r"  ([a-z_]+):$", line):
            stage = match[1]
        if in_deps and not line.lstrip().startswith("- "):
            lines += [f"{indent}  - {file}" for file in code_files(stage, root)]
            in_deps = False
        if match := re.match(r"( +)deps:$", line):
            in_deps, indent = True, match[1]
        if not (in_deps and line.lstrip().startswith(f"- {LIBRARY}/")):
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    path = Path("dvc.yaml")
    path.write_text(with_declared_code(path.read_text()))
