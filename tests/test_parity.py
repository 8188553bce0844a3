"""Snakefile and dvc.yaml say the same. Alone: python -m pytest tests/test_parity.py

`make deps` (or `python tests/test_parity.py`) writes the code files that the scripts import into dvc.yaml.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import tiny
import yaml
from eagle3 import code, keys
from eagle3 import params as parameters
from eagle3.errors import Refusal

ROOT = Path(__file__).resolve().parents[1]
DEFINITIONS = yaml.safe_load((ROOT / "dvc.yaml").read_text())
STAGES = DEFINITIONS["stages"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, dict]:
    """Every job of `snakemake all` on a tiny project, by DVC's stage name: input, output, shell, as Snakemake has them."""
    folder = tiny.make_project(tmp_path_factory.mktemp("parity") / "p", {"a.b": (3, "generate"), "c": (3, "on_policy")})
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
            return {name: [named(f, dataset) for f in (value if isinstance(value, list) else [value])]
                    for name, value in items}
        found.append({"rule": rule.name, "dataset": dataset, "input": fill(rule.input.items()),
                      "output": fill(rule.output.items()), "shell": rule.shellcmd or "", "log": [str(f) for f in rule.log]})
open("jobs.json", "w").write(json.dumps(found))
""")
    tiny.run(folder, "snakemake", "-s", "jobs.smk", "-d", str(folder), "-n", "-q", "all")
    found = json.loads((folder / "jobs.json").read_text())
    return {f"{job['rule']}@{job['dataset']}" if job["dataset"] else job["rule"]: job for job in found if job["output"]}


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
        assert job["shell"].startswith(f"python -m eagle3.gate {group}"), stage
        assert all(group in log for log in job["log"]), stage
        assert definition(stage)["cmd"].startswith(f"python workflow/scripts/{group}.py"), stage


def test_the_same_code_files(jobs):
    for stage, job in jobs.items():
        declared = [d for d in definition(stage)["deps"] if d.startswith("workflow/")]
        assert sorted(job["input"]["code"]) == sorted(declared), f"{stage}: run `make deps`"


def test_every_snakemake_input_lies_in_a_dvc_dependency_and_the_other_way_round(jobs):
    for stage, job in jobs.items():
        deps = [d for d in definition(stage)["deps"] if not d.startswith("workflow/")]
        files = [f for name, names in job["input"].items() if name not in ("code", "key") for f in names]
        for file in files:
            assert any(covers(dep, file) for dep in deps), f"{stage}: dvc.yaml has no dependency for {file}"
        for dep in deps:
            assert any(covers(dep, file) for file in files), f"{stage}: the rule has no input in {dep}"


def test_every_snakemake_output_lies_in_a_dvc_output_and_the_other_way_round(jobs):
    for stage, job in jobs.items():
        outs = definition(stage)["outs"]
        outs = [out if isinstance(out, str) else next(iter(out)) for out in outs]
        files = [f for names in job["output"].values() for f in names]
        for file in files:
            assert any(covers(out, file) for out in outs), f"{stage}: dvc.yaml has no output for {file}"
        for out in outs:
            assert any(covers(out, file) for file in files), f"{stage}: the rule has no output in {out}"


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


def test_dvc_yaml_lists_what_is_imported():
    text = (ROOT / "dvc.yaml").read_text()
    assert code.with_declared_code(text, ROOT) == text, "dvc.yaml is behind the imports; run `make deps`"


def project_with(tmp_path: Path, script: str, helper: str = "") -> Path:
    shutil.copytree(ROOT / "workflow", tmp_path / "workflow", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "workflow/scripts/tokenize.py", "a") as file:
        file.write(script)
    (tmp_path / "workflow/eagle3/new_helper.py").write_text(helper)
    return tmp_path


@pytest.mark.parametrize("statement", [
    "import eagle3.new_helper\n", "from eagle3 import new_helper\n", "from eagle3.new_helper import x\n",
    "def f():\n    from eagle3 import new_helper as n\n"])
def test_a_new_import_is_found_however_it_is_written(tmp_path, statement):
    root = project_with(tmp_path, statement, "from eagle3 import shards\n")
    found = code.code_files("tokenize@x", root)
    assert "workflow/eagle3/new_helper.py" in found
    assert "workflow/eagle3/shards.py" in found, "what the helper imports counts too"
    missing = code.undeclared("tokenize", found, DEFINITIONS)
    assert "workflow/eagle3/new_helper.py" in missing
    added = set(code.with_declared_code((ROOT / "dvc.yaml").read_text(), root).splitlines())
    assert "        - workflow/eagle3/new_helper.py" in added


def test_a_build_refuses_an_undeclared_import(tmp_path, monkeypatch):
    root = project_with(tmp_path, "from eagle3 import new_helper\n")
    shutil.copy(ROOT / "dvc.yaml", root)
    shutil.copy(ROOT / "params.yaml", root)
    monkeypatch.chdir(root)
    with pytest.raises(Refusal, match=r"stage tokenize imports workflow/eagle3/new_helper.py.*make deps"):
        keys.learn(write=False)


def test_every_declared_parameter_exists_in_the_schema():
    """Catalogue H05: a typing error in dvc.yaml shows here, not after a day of training."""
    content = parameters.load(ROOT / "params.yaml").model_dump()
    for stage in keys.stage_names(DEFINITIONS, sorted(content["datasets"])):
        for key in parameters.stage_slices(stage, DEFINITIONS, content):
            assert parameters.lookup(content, key) is not None, f"{stage}: params.yaml has no {key}"


if __name__ == "__main__":
    path = ROOT / "dvc.yaml"
    path.write_text(code.with_declared_code(path.read_text(), ROOT))
