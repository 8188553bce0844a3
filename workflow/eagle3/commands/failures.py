"""docs/failures.md: what cannot go wrong here, put together from docs/failures/*.md.

Each part is one kind of failure: a title, perhaps a paragraph, and a table whose rows begin with
the entry's id."""

import re
from pathlib import Path

PARTS, PAGE = Path("docs/failures"), Path("docs/failures.md")
ROW = re.compile(r"^\|\s*`?([A-H][0-9]{2})`?\s*\|", re.MULTILINE)
INTRODUCTION = """# What goes wrong elsewhere, and what happens here

Put together from `docs/failures/` by `make docs`; edit the parts. Each row is a failure that was
reported for a pipeline of this kind, what cannot happen here, and where that is handled or tested.
"""


def ids(folder: str | Path = PARTS) -> list[str]:
    """The ids of all rows, in order of the files and of the rows in them; one that stands twice
    comes twice."""
    return [
        identifier
        for path in parts(folder)
        for identifier in ROW.findall(path.read_text(encoding="utf-8"))
    ]


def parts(folder: str | Path = PARTS) -> list[Path]:
    """The files, in the order of their first row."""

    def first(path: Path) -> str:
        found = ROW.search(path.read_text(encoding="utf-8"))
        return found[1] if found else "Z"

    return sorted(Path(folder).glob("*.md"), key=lambda path: (first(path), path.name))


def page(folder: str | Path = PARTS) -> str:
    """The whole page; the parts' titles go one level down."""
    texts = [
        re.sub(r"^(#+) ", r"#\1 ", path.read_text(encoding="utf-8").strip(), flags=re.MULTILINE)
        for path in parts(folder)
    ]
    return "\n\n".join([INTRODUCTION.strip(), *texts]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}: {len(ids())} entries")
