"""The examples of docs/routes.md run as they stand, one after the other."""

import re
from pathlib import Path
from typing import Any

import pytest

from replay_patch.routes.responses.engine import engine_named, engine_names

PAGE = Path(__file__).parents[3] / "docs" / "routes.md"


def test_every_example_runs() -> None:
    text = PAGE.read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}

    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)

    for engine in engine_names():
        assert any(f'engine="{engine}"' in example for example in examples)


@pytest.mark.parametrize("name", engine_names())
def test_the_table_has_every_engine(name: str) -> None:
    engine = engine_named(name)
    (row,) = re.findall(rf'^\| `"{name}"` \|.*$', PAGE.read_text(), re.MULTILINE)

    for word in (*engine.fields, engine.switch.partition(",")[0], engine.prompt_field):
        assert word is None or f"`{word}`" in row
