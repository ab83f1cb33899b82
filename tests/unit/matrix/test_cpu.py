"""The CPU bed before any Megatron: it goes in once, in time, and only when asked."""

import pytest
from helpers import interpreters

REFUSED = """
import json
try:
    cpu.install({})
except RuntimeError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps("no error"))
"""


def test_importing_the_bed_loads_no_torch_and_changes_nothing() -> None:
    code = """
import json, os, sys
before = list(sys.meta_path), list(sys.path_hooks), dict(os.environ)
from replay_patch.matrix import cpu, ranks, tiny
same = before == (sys.meta_path, sys.path_hooks, dict(os.environ))
loaded = {"torch", "numpy", "wrapt", "megatron"} & set(sys.modules)
print(json.dumps([same, sorted(loaded), cpu.installed()]))
"""

    assert interpreters.run(code) == [True, [], False]


def test_install_goes_in_once() -> None:
    code = """
import json, sys
from replay_patch.matrix import cpu
cpu.install()
import torch

def state():
    return [id(f) for f in (torch.ones, torch.Tensor.type, torch.compile, *sys.meta_path)]

before = state()
cpu.install()
cpu.install_once()
print(json.dumps([before == state(), cpu.installed(), str(torch.ones(1, device="cuda").device)]))
"""

    assert interpreters.run(code) == [True, True, "cpu"]


def test_install_again_with_another_compile_is_refused() -> None:
    error = interpreters.run(REFUSED.format("torch_compile=True"), bed=True)

    assert "already installed with torch_compile=False, now asked for torch_compile=True" in error
    assert "use one value per process" in error


def test_the_real_compiler_stays_where_it_is_asked_for() -> None:
    code = """
import json, torch
from replay_patch.matrix import cpu
compile = torch.compile
cpu.install(torch_compile=True)
cpu.install_once()
print(json.dumps(torch.compile is compile))
"""

    assert interpreters.run(code) is True


@pytest.mark.parametrize("options", ["", "torch_compile=True"])
def test_install_after_megatron_is_refused(options: str) -> None:
    late = "import sys; sys.modules['megatron.core'] = sys\nfrom replay_patch.matrix import cpu\n"

    error = interpreters.run(late + REFUSED.format(options))

    assert "megatron.core is already imported" in error
    assert "call install() first, in a fresh process" in error
