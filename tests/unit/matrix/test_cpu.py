"""The CPU bed before any Megatron: it goes in once, in time, and only when asked."""

import pytest
from helpers import interpreters
from programs.matrix import cpu_bed


def test_importing_the_bed_loads_no_torch_and_changes_nothing() -> None:
    assert interpreters.run(cpu_bed.imported) == [True, [], False]


def test_install_goes_in_once() -> None:
    assert interpreters.run(cpu_bed.installed_again) == [True, True, "cpu"]


def test_install_again_with_another_compile_is_refused() -> None:
    error = interpreters.run(cpu_bed.refusal, {"torch_compile": True}, bed=True)

    assert "already installed with torch_compile=False, now asked for torch_compile=True" in error
    assert "use one value per process" in error


def test_the_real_compiler_stays_where_it_is_asked_for() -> None:
    assert interpreters.run(cpu_bed.compiler_stays) is True


@pytest.mark.parametrize("options", [{}, {"torch_compile": True}], ids=["", "torch_compile"])
def test_install_after_megatron_is_refused(options: dict[str, bool]) -> None:
    error = interpreters.run(cpu_bed.refusal, options, True)

    assert "megatron.core is already imported" in error
    assert "call install() first, in a fresh process" in error
