"""docs/failures: every known failure is listed once, with where it is handled. Alone: python -m
pytest tests/commands/test_failures.py"""

import re
from pathlib import Path

from eagle3.commands import failures

ROOT = Path(__file__).resolve().parents[2]
# Failures of data sets, tokenisation, generation, hidden states, training, benchmark, Snakemake and
# DVC that were collected from the issues of such projects.
KNOWN = """
A01 A02 A04 A05 A07 A08 A10 A11 A13 A14 A16 A17 A19 A20
B01 B03 B04 B06 B07 B09 B10 B12 B13 B15 B16 B18 B19
C01 C03 C04 C06 C07 C09 C10 C12 C13 C15 C16 C18 C19
D01 D02 D04 D05 D07 D08 D10 D11 D13 D14 D16 D17 D19 D20 D22
E01 E03 E04 E06 E07 E09 E10 E12 E13 E15 E16 E18 E19 E21 E22
F01 F02 F04 F05 F07 F08 F10 F11
G01 G02 G04 G05 G07 G08 G10 G11 G13 G14 G16 G17
H01 H02 H04 H05 H07 H08 H10 H11 H13 H14 H16 H17 H19 H20 H22 H23 H25
""".split()
TESTS = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(\w+))?")


def test_every_part_has_a_title():
    assert all(path.read_text().startswith("# ") for path in failures.parts(ROOT / failures.PARTS))


def test_no_failure_is_listed_twice():
    found = failures.ids(ROOT / failures.PARTS)
    assert sorted(found) == sorted(set(found))


def test_every_failure_is_listed():
    assert len(KNOWN) == len(set(KNOWN)) == 107
    found = set(failures.ids(ROOT / failures.PARTS))
    assert not set(KNOWN) - found, "not listed in docs/failures/*.md"
    assert not found - set(KNOWN), "listed, but unknown"


def test_the_page_is_put_together_from_its_parts():
    assert (ROOT / failures.PAGE).read_text() == failures.page(ROOT / failures.PARTS), (
        "run `make docs` and commit docs/failures.md"
    )


def test_every_test_that_a_row_names_exists():
    missing = []
    for path in failures.parts(ROOT / failures.PARTS):
        for file, name in TESTS.findall(path.read_text()):
            found = [p for p in (ROOT / "tests").rglob(Path(file).name)]
            if not found or (
                name and not any(f"def {name}" in p.read_text() for p in found)
            ):  # a name may be shortened
                missing.append(f"{path.name}: {file}::{name}")
    assert not missing, missing
