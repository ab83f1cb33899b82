"""Real releases, as they are."""

import pytest
from helpers import matrix_runs
from helpers.matrix_runs import OF_MEGATRON, RELEASES


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", RELEASES)
def test_every_check_passes_or_says_why_it_does_not_apply(
    release: str, clean: matrix_runs.Done
) -> None:
    assert clean.code == 0
    assert list(clean.of(release)) == OF_MEGATRON
    reasons = {check: cell["detail"] for check, cell in clean.of(release).items() if cell["detail"]}
    skipped = {check for check, status in clean.statuses(release).items() if status != "pass"}
    assert set(clean.statuses(release).values()) <= {"pass", "skip"}
    assert reasons.keys() == skipped


@pytest.mark.exhaustive
def test_the_json_has_this_form(clean: matrix_runs.Done) -> None:
    assert len(clean.cells) == len(RELEASES) * len(OF_MEGATRON)
    for cell in clean.cells:
        types = {key: type(value) for key, value in cell.items()}
        assert types == {
            "megatron": str,
            "mindspeed": type(None),
            "check": str,
            "status": str,
            "seconds": float,
            "detail": str,
        }
    assert clean.drift == []


@pytest.mark.exhaustive
def test_the_table_says_the_same(clean: matrix_runs.Done) -> None:
    head, *rows = clean.out.split("\n\n")[0].splitlines()

    assert head.split() == list(RELEASES)
    assert [row.split() for row in rows] == [
        [check, *(clean.statuses(release)[check] for release in RELEASES)] for check in OF_MEGATRON
    ]


def test_without_transformer_engine_and_with_torchs_autoload_off_in_the_users_shell() -> None:
    """Cases D8 (0.16.1 has a name that only Transformer Engine binds) and 94."""
    checks = ("activation", "router-objects", "replay")

    done = matrix_runs.run(
        *("--megatron", "0.16.1", "--only", ",".join(checks)), TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )

    assert done.statuses("0.16.1") == dict.fromkeys(checks, "pass")
    assert done.code == 0
