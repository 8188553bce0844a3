"""What long work says of itself. Alone: python -m pytest tests/core/test_progress.py"""

import io

import pytest
from eagle3.core.progress import Progress, counted, duration


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_durations():
    assert [duration(s) for s in (0, 61, 3599.9, 3600, 90061)] == [
        "0:00",
        "1:01",
        "59:59",
        "1:00:00",
        "1 d 1:01:01",
    ]


def test_a_log_gets_whole_lines_with_rate_and_time_left():
    stream = io.StringIO()
    with Progress("work", 4, "rows", done=1, every=0, stream=stream) as bar:
        bar.start -= 2  # two seconds ago
        bar.add(1, {"loss": "1.5"}, tokens=100)
        bar.add(2, tokens=100)
    first, _, last = lines(stream)
    # 1 row in 2 s, 2 to go; what was done before counts for the share only.
    assert (
        first
        == "work [██████████··········]  50%  2/4 rows, 0.5 rows/s, 50 tokens/s, loss 1.5, 0:04 "
        "left"
    )
    assert last.startswith("work [████████████████████] 100%  4/4 rows") and last.endswith(
        "took 0:02"
    )


def test_without_a_total_there_is_no_bar():
    stream = io.StringIO()
    with Progress("work", None, "rows", every=0, stream=stream) as bar:
        bar.start -= 10
        bar.add(1000)
    assert lines(stream) == [
        "work  1,000 rows, 100.0 rows/s",
        "work  1,000 rows, 100.0 rows/s, took 0:10",
    ]


def test_work_that_is_quickly_done_leaves_one_line():
    stream = io.StringIO()
    with Progress("work", 3, "rows", stream=stream) as bar:
        bar.add(3)
    assert len(lines(stream)) == 1


def test_a_terminal_has_its_line_redrawn():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress("work", 2, "rows", every=0, stream=stream) as bar:
        bar.add()
    assert stream.getvalue().count("\r\x1b[2K") == 3 and stream.getvalue().count("\n") == 1


def test_counted_items_come_through_and_a_failure_ends_the_line(capsys):
    def items():
        yield from (1, 2)
        raise KeyError("third")

    with pytest.raises(KeyError, match="third"):
        list(counted(items(), "read", 3, "rows"))
    assert "2/3 rows" in capsys.readouterr().err
