"""Whether an installed SGLang can hand out the states of a target: its model classes are read,
never imported, since that takes a minute and a GPU's libraries.

Run by another interpreter as `python capturing.py`, it prints its version and the architectures as
JSON, so it needs the standard library only."""

import ast
import importlib.util
import json
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

CAPTURES = "set_eagle3_layers_to_capture"
KNOWN = Path(__file__).with_name("sglang_models.json")  # of the version that is tested


def architectures(models: Path) -> dict[str, bool]:
    """Architecture -> whether its class, or one that it inherits from, can capture states for
    EAGLE-3, of the files in SGLang's `models` folder."""
    bases: dict[str, list[str]] = {}
    able: set[str] = set()
    entries: set[str] = set()
    for file in sorted(models.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                named = [b.id for b in node.bases if isinstance(b, ast.Name) and b.id != node.name]
                bases.setdefault(node.name, []).extend(named)
                if any(isinstance(x, ast.FunctionDef) and x.name == CAPTURES for x in node.body):
                    able.add(node.name)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                entries |= {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}

    def captures(name: str, seen: frozenset[str] = frozenset()) -> bool:
        return name in able or any(
            captures(base, seen | {name}) for base in bases.get(name, []) if base not in seen
        )

    return {name: captures(name) for name in sorted(entries)}


def installed() -> dict:
    """{version, architectures} of this interpreter's SGLang. Raises ImportError without one."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        raise ImportError("no sglang here")
    folder = Path(spec.submodule_search_locations[0])
    return {
        "version": metadata.version("sglang"),
        "architectures": architectures(folder / "srt/models"),
    }


def ask(python: str) -> dict | None:
    """`installed` of another interpreter; None where it has none, or where it is not here."""
    try:
        done = subprocess.run(
            [python, __file__], capture_output=True, text=True, check=True, timeout=120
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def check_captures(architecture: str, settings, log: Callable[[str], None]) -> None:
    """Raises UserError if the configured SGLang cannot capture for `architecture`. `settings`:
    server.*. Where it is not installed here, the tested version answers."""
    from eagle3.core.errors import UserError

    found = None if settings.endpoints or settings.command else ask(settings.python)
    if found is None:
        found = json.loads(KNOWN.read_text())
        why = "server.endpoints" if settings.endpoints else "server.command"
        why = f"{why} may serve another version"
        if not (settings.endpoints or settings.command):
            why = f"{settings.python} has no SGLang here"
        log(f"SGLang {found['version']} is taken as the one that will serve, since {why}")
    if found["architectures"].get(architecture):
        return
    can = [name for name, able in found["architectures"].items() if able]
    raise UserError(
        f"SGLang {found['version']} "
        + ("cannot capture states of" if architecture in found["architectures"] else "has no model")
        + f" {architecture}, so it can serve no EAGLE-3 drafter for it; with engine: transformers "
        "in generate, hidden_states and bench a drafter can be trained and measured. It can "
        f"capture for {', '.join(can)}"
    )


if __name__ == "__main__":
    print(json.dumps(installed(), indent=1))
