"""The examples in docs/, run as they stand."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def run(page: str) -> dict[str, Any]:
    """Run all examples of a page, one after the other; returns the names they define."""
    text = (DOCS / page).read_text()
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, page, "exec"), names)
    return names
