"""What is said of a remote that gives nothing. Alone: python -m pytest
tests/build/test_remote.py"""

from eagle3.build import remote


def test_an_error_is_shown_by_its_first_words():
    outer = ValueError("")
    outer.__cause__ = OSError("no route to host\nmore")
    assert remote._first_line(outer) == "no route to host"
    assert remote._first_line(KeyError()) == "KeyError"
