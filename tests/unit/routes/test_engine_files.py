"""A file in `routes/engines` is all that an engine takes, and a row in docs/routes.md."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay_patch import Routes
from replay_patch.routes import engines
from replay_patch.routes.responses.engine import engine_named, engine_names

PAGE = Path(__file__).parents[3] / "docs" / "routes.md"
SOURCE = """
from replay_patch.routes.responses.engine import Engine

ENGINE = Engine(fields=("expert_routes",), layers="moe", switch="--return-routes")
"""


@pytest.fixture
def new_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "another.py").write_text(SOURCE)
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    engine_names.cache_clear()
    yield "another"
    engine_names.cache_clear()
    sys.modules.pop(f"{engines.__name__}.another", None)


def test_a_new_file_is_a_new_engine(new_engine: str) -> None:
    payload = {"expert_routes": [[[3, 1], [0, 2]]]}

    routes = Routes.from_engine(payload, new_engine, num_experts=4, num_tokens=2)

    assert routes.expert_ids.tolist() == payload["expert_routes"]
    assert routes.layers == "moe"


@pytest.mark.parametrize("name", engine_names())
def test_the_table_has_every_engine(name: str) -> None:
    engine = engine_named(name)
    (row,) = re.findall(rf'^\| `"{name}"` \|.*$', PAGE.read_text(), re.MULTILINE)

    for word in (*engine.fields, engine.switch.partition(",")[0], engine.prompt_field):
        assert word is None or f"`{word}`" in row
