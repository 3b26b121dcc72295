"""Lines of a log: each is one line, whatever was logged."""

import json
import logging

from specdec.logs import JsonFormatter, json_line, printable


def test_a_record_is_one_json_object():
    record = logging.LogRecord("a.b", logging.WARNING, "", 0, "two\nlines %s", ("é",), None)
    record.fields = {"tokens": 3}
    record.created = 1.5
    line = JsonFormatter().format(record)
    assert "\n" not in line
    expected = {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "message": "two\nlines é",
        "logger": "a.b",
        "tokens": 3,
    }
    assert json.loads(line) == expected


def test_an_exception_is_a_field():
    try:
        raise ValueError("bad")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "x", (), (ValueError, error, error.__traceback__))
    assert json.loads(JsonFormatter().format(record))["exception"].endswith("ValueError: bad")


def test_text_becomes_one_line():
    assert json.loads(json_line("a\nb", service="x"))["message"] == "a\nb"
    assert printable("plain é") == "plain é"
    assert printable("a\n\x1b[31m") == "a\\n\\x1b[31m"
