"""The cells of a matrix as a table for people, JUnit XML and Markdown."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence

from replay_patch.matrix.runner import Cell, Matrix

__all__ = ["failures", "junit", "markdown", "table"]

_NOT_IN_XML = re.compile("[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SHOWN = {"pass": "pass", "fail": "FAIL", "skip": "skip", "error": "ERROR"}


def table(matrix: Matrix) -> str:
    """Checks as rows, environments as columns, and what the words mean."""
    names, columns, status = _grid(matrix.cells)
    width = max((len(name) for name in names), default=0) + 2
    widths = [max(len(_column_name(column)), 5) + 2 for column in columns]
    heads = "".join(f"{_column_name(c):>{w}}" for c, w in zip(columns, widths, strict=True))
    lines = [" " * width + heads]
    for name in names:
        shown = [_SHOWN[status[name, column]] for column in columns]
        row = "".join(f"{word:>{w}}" for word, w in zip(shown, widths, strict=True))
        lines.append(f"{name:{width}}{row}")
    lines += ["", _counts(matrix.cells)]
    if reasons := _grouped(matrix.cells, "skip"):
        lines += ["", "Skipped, which is not counted as passed:", *reasons]
    if red := failures(matrix.cells):
        lines += ["", red]
    return "\n".join(lines)


def failures(cells: Iterable[Cell]) -> str:
    """The red cells with their reasons; those with the same reason stand together."""
    out = []
    for status, head in (("fail", "Failed:"), ("error", "Could not be run:")):
        lines = _grouped(cells, status)
        out += [head, *lines] if lines else []
    return "\n".join(out)


def junit(matrix: Matrix) -> str:
    """JUnit XML: one suite per environment, one test case per cell."""
    root = ET.Element("testsuites", name="replay-patch matrix")
    for column in _grid(matrix.cells)[1]:
        cells = [cell for cell in matrix.cells if (cell.megatron, cell.mindspeed) == column]
        count = {s: str(sum(c.status == s for c in cells)) for s in ("fail", "error", "skip")}
        suite = ET.SubElement(
            root,
            "testsuite",
            name=f"Megatron-core {_column_name(column)}",
            tests=str(len(cells)),
            failures=count["fail"],
            errors=count["error"],
            skipped=count["skip"],
            time=f"{sum(cell.seconds for cell in cells):.2f}",
        )
        for cell in cells:
            where = {"classname": f"replay-patch.{_column_name(column)}", "name": cell.check}
            case = ET.SubElement(suite, "testcase", where, time=f"{cell.seconds:.2f}")
            tag = {"fail": "failure", "error": "error", "skip": "skipped"}.get(cell.status)
            if tag:
                detail = _NOT_IN_XML.sub("", cell.detail)
                ET.SubElement(case, tag, message=detail.partition("\n")[0]).text = detail
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def markdown(matrix: Matrix) -> str:
    """The table for a pull request or a job summary."""
    names, columns, status = _grid(matrix.cells)
    lines = [
        "| check | " + " | ".join(_column_name(column) for column in columns) + " |",
        "| --- |" + " :---: |" * len(columns),
    ]
    for name in names:
        shown = [_SHOWN[status[name, column]] for column in columns]
        marked = [f"**{word}**" if word.isupper() else word for word in shown]
        lines.append(f"| {name} | " + " | ".join(marked) + " |")
    lines += ["", _counts(matrix.cells)]
    if red := failures(matrix.cells):
        lines += ["", "```", red, "```"]
    return "\n".join(lines) + "\n"


_Column = tuple[str, str | None]


def _grid(
    cells: Sequence[Cell],
) -> tuple[list[str], list[_Column], dict[tuple[str, _Column], str]]:
    """(names of checks, columns, status of each)."""
    status = {(cell.check, (cell.megatron, cell.mindspeed)): cell.status for cell in cells}
    names = list(dict.fromkeys(cell.check for cell in cells))
    return names, list(dict.fromkeys((c.megatron, c.mindspeed) for c in cells)), status


def _column_name(column: _Column) -> str:
    megatron, mindspeed = column
    return megatron if mindspeed is None else f"{megatron}+{mindspeed}"


def _counts(cells: Sequence[Cell]) -> str:
    count = {status: sum(cell.status == status for cell in cells) for status in _SHOWN}
    return ", ".join(f"{n} {word}" for word, n in count.items() if n or word == "pass")


def _grouped(cells: Iterable[Cell], status: str) -> list[str]:
    """The details of the cells of a status; cells that say the same, together."""
    cells = list(cells)
    names = {cell.check for cell in cells}
    checks: dict[tuple[str, _Column], list[str]] = {}  # by reason and environment
    for cell in cells:
        if cell.status == status:
            checks.setdefault((cell.detail, (cell.megatron, cell.mindspeed)), []).append(cell.check)
    where: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # by reason and checks
    for (detail, column), of_column in checks.items():
        where.setdefault((detail, tuple(of_column)), []).append(_column_name(column))
    lines = []
    for (detail, grouped), columns in where.items():
        every = len(grouped) == len(names) > 1
        head = f"  {'every check' if every else ', '.join(grouped)} on {', '.join(columns)}:"
        first, *rest = detail.splitlines() or [""]
        lines += [f"{head} {first}", *(f"    {line}" for line in rest)]
    return lines
