"""How errors name the router that they are about."""

from types import SimpleNamespace

import pytest

from replay_patch import RouteError
from replay_patch.refusals import Where, refuse


@pytest.mark.parametrize(
    "where, text",
    [
        (Where(3), "layer 3"),
        (Where(None), "layer ?"),
        (Where(1, 2), "layer 1 of MTP block 2"),
        (Where.of(SimpleNamespace(layer_number=4)), "layer 4"),  # a router knows no depth
        (Where.of(SimpleNamespace(layer_number=1, mtp_depth=1)), "layer 1 of MTP block 1"),
    ],
)
def test_a_router_is_named_by_its_layer_and_block(where: Where, text: str) -> None:
    assert text == str(where)

    with pytest.raises(RouteError, match=rf", router of {text.replace('?', '[?]')}: a; expected b"):
        refuse("a", "b", where)


def test_what_is_about_no_router_names_none() -> None:
    with pytest.raises(RouteError, match=r"^megatron-core \S+( unknown\))?: a; expected b$"):
        refuse("a", "b")
