"""Cells as a table, as JUnit XML and as Markdown."""

import re
import xml.etree.ElementTree as ET

import pytest

from replay_patch.matrix import report
from replay_patch.matrix.runner import Cell, Matrix

MATRIX = Matrix(
    [
        Cell("0.12.1", None, "activation", "pass", 1.5, ""),
        Cell("0.12.1", None, "record", "skip", 0.1, "nothing to record"),
        Cell("0.12.1", None, "replay", "fail", 0.25, "AssertionError: two\nat routing.py:3"),
        Cell("0.19.2", "core_r0.16.0", "activation", "pass", 1.0, ""),
        Cell("0.19.2", "core_r0.16.0", "record", "pass", 1.0, ""),
        Cell("0.19.2", "core_r0.16.0", "replay", "error", 60.0, "still running after 60 s"),
    ]
)


def of(*statuses: str, detail: str = "") -> Matrix:
    return Matrix([Cell("0.12.1", None, f"c{i}", s, 0.0, detail) for i, s in enumerate(statuses)])


# --- the table --------------------------------------------------------------------------------


def test_the_table() -> None:
    assert report.table(MATRIX).splitlines() == [
        "              0.12.1  0.19.2+core_r0.16.0",
        "activation      pass                 pass",
        "record          skip                 pass",
        "replay          FAIL                ERROR",
        "",
        "3 pass, 1 fail, 1 skip, 1 error",
        "",
        "Skipped, which is not counted as passed:",
        "  record on 0.12.1: nothing to record",
        "",
        "Failed:",
        "  replay on 0.12.1: AssertionError: two",
        "    at routing.py:3",
        "Could not be run:",
        "  replay on 0.19.2+core_r0.16.0: still running after 60 s",
    ]


def test_cells_with_one_reason_stand_together() -> None:
    cells = [Cell(v, None, c, "fail", 0.0, "one reason") for v in ("1", "2") for c in "ab"]
    others = [Cell(v, None, "c", "pass", 0.0, "") for v in ("1", "2")]

    assert report.failures([*cells, *others]) == "Failed:\n  a, b on 1, 2: one reason"


def test_an_environment_that_failed_as_a_whole_is_one_line() -> None:
    cells = [Cell("fork", None, c, "error", 0.0, "no Megatron") for c in "abc"]

    assert report.failures(cells) == "Could not be run:\n  every check on fork: no Megatron"


def test_every_check_is_said_of_no_environment_that_has_other_results() -> None:
    one = [Cell("1", None, "a", "fail", 0.0, "no"), Cell("1", None, "b", "error", 0.0, "stopped")]
    two = [Cell("2", None, check, "error", 0.0, "stopped") for check in "ab"]

    assert report.failures([*one, *two]).splitlines()[2:] == [
        "Could not be run:",
        "  b on 1: stopped",
        "  every check on 2: stopped",
    ]


def test_a_reason_without_words() -> None:
    assert report.failures(of("fail").cells) == "Failed:\n  c0 on 0.12.1: "


def test_a_skip_is_never_counted_as_a_pass() -> None:
    matrix = of("skip", "skip")

    assert "0 pass, 2 skip" in report.table(matrix).splitlines()
    assert "0 pass, 2 skip" in report.markdown(matrix).splitlines()
    assert not matrix.green


@pytest.mark.parametrize(
    "statuses, green",
    [
        ((), False),
        (("pass",), True),
        (("pass", "skip"), True),
        (("pass", "fail"), False),
        (("pass", "error"), False),
    ],
)
def test_green_is_a_pass_and_nothing_red(statuses: tuple[str, ...], green: bool) -> None:
    assert of(*statuses).green is green


def test_an_empty_matrix_can_be_shown() -> None:
    assert "0 pass" in report.table(Matrix())
    assert "0 pass" in report.markdown(Matrix())
    assert ET.fromstring(report.junit(Matrix()).encode()).findall("*") == []


def test_as_json() -> None:
    assert of("skip", detail="why").to_dict() == {
        "schema": 1,
        "cells": [
            {
                "megatron": "0.12.1",
                "mindspeed": None,
                "check": "c0",
                "status": "skip",
                "seconds": 0.0,
                "detail": "why",
            }
        ],
        "drift": [],
    }


# --- JUnit ------------------------------------------------------------------------------------


def test_junit() -> None:
    root = ET.fromstring(report.junit(MATRIX).encode())

    suites = [suite.attrib for suite in root]
    assert suites == [
        {
            "name": "Megatron-core 0.12.1",
            "tests": "3",
            "failures": "1",
            "errors": "0",
            "skipped": "1",
            "time": "1.85",
        },
        {
            "name": "Megatron-core 0.19.2+core_r0.16.0",
            "tests": "3",
            "failures": "0",
            "errors": "1",
            "skipped": "0",
            "time": "62.00",
        },
    ]
    cases = [(c.get("classname"), c.get("name"), [(e.tag, e.text) for e in c]) for c in root[0]]
    assert cases == [
        ("replay-patch.0.12.1", "activation", []),
        ("replay-patch.0.12.1", "record", [("skipped", "nothing to record")]),
        ("replay-patch.0.12.1", "replay", [("failure", "AssertionError: two\nat routing.py:3")]),
    ]
    assert root[0][2][0].get("message") == "AssertionError: two"
    assert [e.tag for e in root[1][2]] == ["error"]


@pytest.mark.parametrize(
    "detail, read",
    [
        ("<a> & 'b' \"c\" ]]> <![CDATA[", None),
        ("é\n\t漢字 😀", None),
        ("\x1b[31mred\x00\x08\x7f", "[31mred\x7f"),
        ("\ufffe and \uffff", " and "),
        ("a lone \ud800 surrogate", "a lone  surrogate"),
    ],
)
def test_junit_holds_any_text(detail: str, read: str | None) -> None:
    root = ET.fromstring(report.junit(of("fail", detail=detail)).encode())

    [failure] = root.iter("failure")
    assert failure.text == (detail if read is None else read)


# --- Markdown ---------------------------------------------------------------------------------


def test_markdown() -> None:
    assert report.markdown(MATRIX).splitlines() == [
        "| check | 0.12.1 | 0.19.2+core_r0.16.0 |",
        "| --- | :---: | :---: |",
        "| activation | pass | pass |",
        "| record | skip | pass |",
        "| replay | **FAIL** | **ERROR** |",
        "",
        "3 pass, 1 fail, 1 skip, 1 error",
        "",
        "```",
        "Failed:",
        "  replay on 0.12.1: AssertionError: two",
        "    at routing.py:3",
        "Could not be run:",
        "  replay on 0.19.2+core_r0.16.0: still running after 60 s",
        "```",
    ]


def test_markdown_of_a_green_matrix_is_the_table_and_the_counts() -> None:
    assert report.markdown(of("pass")) == (
        "| check | 0.12.1 |\n| --- | :---: |\n| c0 | pass |\n\n1 pass\n"
    )


def test_the_text_of_a_failure_does_not_end_the_code_block() -> None:
    lines = report.markdown(of("fail", detail="a\n```\nb")).splitlines()

    fences = [line for line in lines if re.match(r" {0,3}```", line)]
    assert len(fences) == 2
