"""Whole runs of `replay-patch matrix`. They choose their releases themselves."""

import pytest
from helpers import matrices

from replay_patch.matrix.environments import NEWEST, TESTED_RELEASES

BOTH = (TESTED_RELEASES[0], NEWEST)


@pytest.fixture(scope="session")
def clean() -> matrices.Done:
    """Every check on the oldest and the newest release."""
    return matrices.run("--megatron", ",".join(BOTH))
