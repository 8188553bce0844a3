"""The documentation: commands, values, links, the graph of stages, the list of failures.

Alone: python -m pytest tests/test_docs.py
"""

import ast
import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from eagle3.commands import reference
from eagle3.core import params as parameters

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GUIDES = [
    DOCS / name
    for name in (
        "index.md",
        "architecture.md",
        "glossary.md",
        "tutorial.md",
        "build.md",
        "cluster.md",
        "troubleshooting.md",
    )
] + sorted((DOCS / "guides").glob("*.md"))
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(kind: str):
    """(file, note, body) of the guides' fenced blocks of a kind."""
    return [
        (path, match["note"] or "", match["body"])
        for path in GUIDES
        for match in BLOCK.finditer(path.read_text())
        if match["kind"] == kind
    ]


@pytest.mark.parametrize("path, note, body", [*blocks("bash"), *blocks("console")])
def test_every_command_is_run_by_a_test_or_says_where_it_was_tried(path, note, body):
    word, _, rest = note.partition(": ")
    assert word in ("run", "tested", "tried", "manual"), f"{path.name}: no note above\n{body}"
    assert word == "run" or rest, f"{path.name}: {word} of what? above\n{body}"
    for name in rest.split(", ") if word == "tested" else []:
        assert (ROOT / name).exists(), f"{path.name}: {name} does not exist"


def test_commands_marked_run_work(tmp_path):
    project = tiny.make_project(tmp_path / "project", {"one": (6, "generate")})
    commands = [
        line for _, note, body in blocks("bash") if note == "run" for line in body.splitlines()
    ]
    assert len(commands) >= 4
    for command in dict.fromkeys(commands):
        program, *arguments = command.split()
        assert program in ("snakemake", "dvc"), command
        tiny.run(project, program, *arguments)


@pytest.mark.parametrize("path, note, body", blocks("yaml"))
def test_values_shown_are_valid(path, note, body, tmp_path):
    assert note == "params", f"{path.name}: no note above\n{body}"
    (tmp_path / "shown.yaml").write_text(body)
    content = copy.deepcopy(parameters.read_yaml(ROOT / "params.yaml"))
    for section, keys in parameters.read_yaml(tmp_path / "shown.yaml").items():
        content.setdefault(section, {}).update(keys)
    content["generate"]["sampling"]["max_new_tokens"] = 64  # whatever context length is shown
    parameters.check(content, path.name)


def test_make_targets_in_the_guides_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in GUIDES:
        for name in re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.MULTILINE):
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"{path.name}: make {name}"


def test_links_lead_somewhere():
    for path in GUIDES:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_keys_named_in_the_guides_exist():
    page = reference.page()
    sections = "|".join(parameters.Params.model_fields)
    for path in GUIDES:
        for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:: [^`]*)?`", path.read_text()):
            assert key.endswith(".py") or f"`{key}" in page, f"{path.name}: {key}"


def test_the_graph_is_what_snakemake_draws():
    made = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", "--rulegraph", "--", "bench"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    drawn = (DOCS / "stages.svg").read_text()
    names = dict(re.findall(r'^\s*(\d+)\[label = "(\w+)"', made, re.MULTILINE))
    edges = {(names[a], names[b]) for a, b in re.findall(r"^\s*(\d+) -> (\d+)", made, re.MULTILINE)}
    shown = dict(re.findall(r"<title>(\d+)</title>.*?<text[^>]*>(\w+)</text>", drawn, re.DOTALL))
    assert set(shown.values()) == set(names.values()), "run `make graph` and commit docs/stages.svg"
    assert {
        (shown[a], shown[b]) for a, b in re.findall(r"<title>(\d+)&#45;&gt;(\d+)</title>", drawn)
    } == edges


def test_every_test_that_failures_md_names_exists():
    named = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(\w+))?")
    missing = []
    for file, name in named.findall((DOCS / "failures.md").read_text()):
        found = list((ROOT / "tests").rglob(Path(file).name))
        if not found or not any(f"def {name}" in path.read_text() for path in found):
            missing.append(f"{file}::{name}")  # a name may be shortened
    assert not missing, missing


def test_architecture_md_lists_the_rooms_and_what_each_stage_uses():
    page = (DOCS / "architecture.md").read_text()
    rooms = re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE)
    library = ROOT / "workflow/eagle3"
    assert sorted(rooms) == sorted(path.parent.name for path in library.glob("*/__init__.py"))
    shown = dict(re.findall(r"^\| `(\w+)` \| `[^`]*` \| ([\w, ]+) \|$", page, re.MULTILINE))
    stages = parameters.read_yaml(ROOT / "dvc.yaml")["stages"]
    listed = {
        name: [
            Path(d).name for d in stage.get("do", stage)["deps"] if d.startswith("workflow/eagle3/")
        ]
        for name, stage in stages.items()
    }
    assert {name: text.split(", ") for name, text in shown.items()} == listed


def test_messages_that_troubleshooting_explains_are_those_of_the_code():
    said = []
    for path in (ROOT / "workflow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", None) for part in node.values)
                said.append("".join(part if isinstance(part, str) else "\0" for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 30
    assert not [piece for piece in messages if not any(piece in text for text in said)]
