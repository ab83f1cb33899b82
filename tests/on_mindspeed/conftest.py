"""Tests beside MindSpeed (see helpers/mindspeeds.py).

This folder is not called `mindspeed`: pytest puts its parent on the path, and whoever asks whether
MindSpeed is installed would find it.
"""

import pytest
from helpers import mindspeeds


@pytest.fixture(params=["stand-in", "stand-in init_subclass", "real"])
def mindspeed(request: pytest.FixtureRequest) -> str:
    """Either kind of branch, and a checkout if one is given."""
    if request.param == "real" and mindspeeds.REAL is None:
        pytest.skip("MINDSPEED_PATH names no checkout")
    return str(request.param)
