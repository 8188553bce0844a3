"""The page of the report: contrast of its colours, and its width in a real browser. Alone: python
-m pytest tests/bench/test_page.py"""

import os
import re
import shutil
import subprocess

import pytest
from eagle3.bench import page

from tests.bench.test_report import made  # noqa: F401  (a fixture)

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
).split()
PROBE = """<script>
const wide = [...document.querySelectorAll('body *')].filter(
  e => !e.closest('.wide') && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName)
const page = document.documentElement
document.title = 'probe ' + page.scrollWidth + ' ' + innerWidth + ' ' + wide.length
</script></body>"""


def luminance(colour: str) -> float:
    """Relative luminance of #rgb or #rrggbb. Source: WCAG 2.1."""
    digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("palette", [page.LIGHT, page.DARK])
def test_every_text_and_line_stands_out(palette):
    colours = dict(re.findall(r"--(\w+):(#\w+)", palette))
    for text in ("ink", "soft", "c0", "c1", "c2", "c3", "c4", "c5"):
        for ground in ("ground", "panel"):
            bright, dim = sorted(
                (luminance(colours[text]), luminance(colours[ground])), reverse=True
            )
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, f"{text} on {ground}"


@pytest.mark.skipif(
    BROWSER is None and "EAGLEMAKE_BROWSER" not in os.environ, reason="no Chromium here"
)
@pytest.mark.parametrize("width", [500, 1280])
def test_nothing_is_wider_than_the_window(width, made, tmp_path):
    (tmp_path / "page.html").write_text(page.render(made).replace("</body>", PROBE))
    done = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},900",
            "--dump-dom",
            f"file://{tmp_path / 'page.html'}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"<title>probe (\d+) (\d+) (\d+)", done.stdout)
    assert found, done.stderr[-500:]
    assert int(found[1]) <= int(found[2]) and int(found[3]) == 0
