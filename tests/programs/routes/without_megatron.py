"""For tests/unit/routes/test_wire.py."""

import sys
from typing import Any


def round_trip() -> list[Any]:
    """[the tokens of routes that went through both forms, what was imported of engines for it]."""
    from replay_patch import Routes

    ids = [[[0, 1]], [[2, 3]]]
    routes = Routes.from_engine(ids, engine="vllm", num_experts=8, num_tokens=3)
    again = Routes.from_wire(routes.append(routes).to_wire())
    tokens = Routes.from_bytes(again.to_bytes()).num_tokens
    others = ("megatron", "vllm", "sglang")
    return [tokens, [name for name in sys.modules if name.split(".")[0] in others]]
