"""Whole runs of `replay-patch matrix`. They choose their releases themselves."""

import pytest
from helpers import matrices


@pytest.fixture(scope="session")
def clean() -> matrices.Done:
    """Every check on the oldest and the newest release, and on some between."""
    return matrices.run("--megatron", ",".join(matrices.RELEASES))
