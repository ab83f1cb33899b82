"""Every order of imports, activation, deactivation, subclassing and building (see the helper)."""

import json

import megatron.core
import pytest
from helpers import import_orders, interpreters

from replay_patch.matrix.environments import TESTED_RELEASES


def test_orders_leave_out_only_the_impossible() -> None:
    every = import_orders.orders()

    assert len(set(every)) == len(every) == 1400
    for order in every:
        assert sorted(order) == sorted(import_orders.NEEDS)
        assert order.index("activate") < order.index("deactivate") < order.index("activate again")
        assert order.index("import config") < order.index("define subclass")
        assert order.index("import router") < order.index("build router")


@pytest.mark.exhaustive
@pytest.mark.skipif(
    megatron.core.__version__ != TESTED_RELEASES[0],
    reason="takes minutes: on the oldest release only",
)
def test_every_order_works_and_gives_the_originals_back() -> None:
    done = interpreters.python("-m", import_orders.__name__)

    assert json.loads(done.stdout) == {"orders": 1400, "failures": []}
