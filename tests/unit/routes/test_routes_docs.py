"""The examples of docs/routes.md run as they stand, one after the other."""

import re
from pathlib import Path
from typing import Any

from replay_patch.routes.responses.engine import engine_names

PAGE = Path(__file__).parents[3] / "docs" / "routes.md"


def test_every_example_runs() -> None:
    text = PAGE.read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}

    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)

    for engine in engine_names():
        assert any(f'engine="{engine}"' in example for example in examples)
