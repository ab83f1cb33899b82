"""Whole runs of `replay-patch matrix`. They choose their releases themselves."""

import pytest
from helpers import matrix_runs


@pytest.fixture(scope="session")
def clean() -> matrix_runs.Done:
    """Every check on the oldest and the newest release, and on some between."""
    return matrix_runs.run("--megatron", ",".join(matrix_runs.RELEASES))
