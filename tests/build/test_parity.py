"""Snakefile and dvc.yaml say the same. Alone: python -m pytest tests/build/test_parity.py"""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny
import yaml
from eagle3.build import keys
from eagle3.core import code
from eagle3.core import params as parameters

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = yaml.safe_load((ROOT / "dvc.yaml").read_text())
STAGES = DEFINITIONS["stages"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, dict]:
    """Every job of `snakemake all` on a tiny project, by DVC's stage name: input, output, shell, as
    Snakemake has them."""
    folder = tiny.make_project(
        tmp_path_factory.mktemp("parity") / "p", {"a.b": (3, "generate"), "c": (3, "given")}
    )
    script = folder / "jobs.smk"
    script.write_text("""
include: "Snakefile"
import json, re
found = []
def named(pattern, dataset):
    return re.sub(r"\\{dataset\\b[^}]*\\}", dataset, str(pattern))

for rule in workflow.rules:
    for dataset in (DATASETS if any("{dataset" in str(f) for f in rule.output) else [""]):
        def fill(items):
            lists = {name: v if isinstance(v, list) else [v] for name, v in items}
            return {name: [named(f, dataset) for f in files] for name, files in lists.items()}
        found.append({"rule": rule.name, "dataset": dataset, "input": fill(rule.input.items()),
                      "output": fill(rule.output.items()), "shell": rule.shellcmd or "",
                      "log": [str(f) for f in rule.log]})
open("jobs.json", "w").write(json.dumps(found))
""")
    tiny.run(folder, "snakemake", "-s", "jobs.smk", "-d", str(folder), "-n", "-q", "all")
    found = json.loads((folder / "jobs.json").read_text())
    return {
        f"{job['rule']}@{job['dataset']}" if job["dataset"] else job["rule"]: job
        for job in found
        if job["output"]
    }


def definition(stage: str) -> dict:
    group, _, name = stage.partition("@")
    entry = STAGES[group]
    text = json.dumps(entry.get("do", entry)).replace("${key}", name)
    return json.loads(text)


def test_the_same_stages(jobs):
    expected = keys.stage_names(DEFINITIONS, ["a.b", "c"])
    assert sorted(jobs) == sorted(expected)


def test_shell_log_and_script_share_the_name(jobs):
    for stage, job in jobs.items():
        group = stage.partition("@")[0]
        assert job["shell"].startswith(f"python -m eagle3.build.gate {group}"), stage
        assert all(group in log for log in job["log"]), stage
        assert definition(stage)["cmd"].startswith(f"python workflow/scripts/{group}.py"), stage


def test_the_same_code_files(jobs):
    for stage, job in jobs.items():
        declared = [dep for dep in definition(stage)["deps"] if dep.startswith("workflow/")]
        tracked = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", *declared],
            cwd=ROOT,
            text=True,
            check=True,
            capture_output=True,
        ).stdout.split()
        assert sorted(job["input"]["code"]) == sorted(
            file for file in tracked if (ROOT / file).exists()
        ), stage


def test_every_snakemake_input_lies_in_a_dvc_dependency_and_the_other_way_round(jobs):
    for stage, job in jobs.items():
        deps = [d for d in definition(stage)["deps"] if not d.startswith("workflow/")]
        files = [
            f for name, names in job["input"].items() if name not in ("code", "key") for f in names
        ]
        for file in files:
            assert any(covers(dep, file) for dep in deps), (
                f"{stage}: dvc.yaml has no dependency for {file}"
            )
        for dep in deps:
            assert any(covers(dep, file) for file in files), (
                f"{stage}: the rule has no input in {dep}"
            )


def test_every_snakemake_output_lies_in_a_dvc_output_and_the_other_way_round(jobs):
    for stage, job in jobs.items():
        outs = definition(stage)["outs"]
        outs = [out if isinstance(out, str) else next(iter(out)) for out in outs]
        files = [f for names in job["output"].values() for f in names]
        for file in files:
            assert any(covers(out, file) for out in outs), (
                f"{stage}: dvc.yaml has no output for {file}"
            )
        for out in outs:
            assert any(covers(out, file) for file in files), (
                f"{stage}: the rule has no output in {out}"
            )


def test_key_file_is_the_stages_own(jobs):
    for stage, job in jobs.items():
        assert job["input"]["key"] == [f".build/keys/{stage}.json"]


def test_no_output_persists_and_none_has_a_benchmark():
    """Catalogue H02, G17: nothing outlives its validity, nothing is temporary."""
    assert not re.search(r"persist:|frozen:|always_changed:", (ROOT / "dvc.yaml").read_text())
    rules = "".join(p.read_text() for p in (ROOT / "workflow/rules").glob("*.smk"))
    assert not re.search(r"^\s+benchmark:|temp\(|service\(|directory\(", rules, re.M)


def covers(folder: str, file: str) -> bool:
    return file == folder or file.startswith(folder + "/")


def imported(file: Path, tree: Path) -> set[str]:
    """Modules of the library that a file imports, at the top or inside functions, as paths relative
    to `tree`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((tree / file).read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import is not seen here"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    files = {
        f"workflow/{name.replace('.', '/')}.py" for name in names if name.startswith("eagle3.")
    }
    return {file for file in files if (tree / file).exists()}


def reached(stage: str, tree: Path = ROOT) -> set[str]:
    """Every file of the library that a stage's script imports, directly or not."""
    found, queue = set(), [f"workflow/scripts/{stage}.py"]
    while queue:
        for file in imported(Path(queue.pop()), tree) - found:
            found.add(file)
            queue.append(file)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_script_imports_lies_in_the_folders_of_its_stage(stage):
    folders = [dep for dep in definition(stage)["deps"] if dep.startswith("workflow/eagle3/")]
    files = reached(stage)
    outside = [file for file in files if not any(covers(folder, file) for folder in folders)]
    assert not outside, (
        f"dvc.yaml, stage {stage}: an edit of {outside} would go unseen; add their folders"
    )
    unused = [folder for folder in folders if not any(covers(folder, file) for file in files)]
    assert not unused, f"dvc.yaml, stage {stage}: no import reaches {unused}; remove them"


@pytest.mark.parametrize(
    "statement",
    [
        "import eagle3.core.new_helper\n",
        "from eagle3.core import new_helper\n",
        "from eagle3.core.new_helper import x\n",
        "def f():\n    from eagle3.core import new_helper as n\n",
    ],
)
def test_an_import_is_seen_however_it_is_written(tmp_path, statement):
    shutil.copytree(
        ROOT / "workflow", tmp_path / "workflow", ignore=shutil.ignore_patterns("__pycache__")
    )
    with open(tmp_path / "workflow/scripts/tokenize.py", "a") as file:
        file.write(statement)
    (tmp_path / "workflow/eagle3/core/new_helper.py").write_text("from eagle3.bench import page\n")
    found = reached("tokenize", tmp_path)
    assert "workflow/eagle3/core/new_helper.py" in found
    assert "workflow/eagle3/bench/page.py" in found, "what the helper imports counts too"


def test_bytecode_and_backups_are_no_code(tmp_path):
    shutil.copytree(
        ROOT / "workflow", tmp_path / "workflow", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / ".dvcignore", tmp_path)
    before = code.code_files("train", DEFINITIONS, tmp_path)
    room = tmp_path / "workflow/eagle3/core"
    (room / "__pycache__").mkdir()
    for name in (
        "__pycache__/files.cpython-311.pyc",
        ".files.py.swp",
        "files.py~",
        "#files.py#",
        "files.py.orig",
    ):
        (room / name).write_text("x")
    assert code.code_files("train", DEFINITIONS, tmp_path) == before
    (room / "template.html").write_text("x")
    assert set(code.code_files("train", DEFINITIONS, tmp_path)) - set(before) == {
        "workflow/eagle3/core/template.html"
    }


def test_every_declared_parameter_exists_in_the_schema():
    """Catalogue H05: a typing error in dvc.yaml shows here, not after a day of training."""
    content = parameters.load(ROOT / "params.yaml").model_dump()
    for stage in keys.stage_names(DEFINITIONS, sorted(content["datasets"])):
        for key in parameters.stage_slices(stage, DEFINITIONS, content):
            assert parameters.lookup(content, key) is not None, f"{stage}: params.yaml has no {key}"
