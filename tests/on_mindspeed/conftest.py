"""Tests beside MindSpeed (see helpers/mindspeed_processes.py).

This folder is not called `mindspeed`: pytest puts its parent on the path, and whoever asks whether
MindSpeed is installed would find it.
"""

import pytest
from helpers import mindspeed_processes

KINDS = ["stand-in", "stand-in init_subclass", *(["real"] if mindspeed_processes.REAL else [])]


@pytest.fixture(params=KINDS)
def mindspeed(request: pytest.FixtureRequest) -> str:
    """Either kind of branch, and the checkout if one is given."""
    return str(request.param)
