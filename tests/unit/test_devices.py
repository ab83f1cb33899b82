"""The product knows no kind of device: it must work on CUDA, on NPUs, and under transfer_to_npu."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replay_patch import RouteError
from replay_patch.device_copies import to_device
from replay_patch.replay.router_checks import check_capture

ROOT = Path(__file__).parents[2]
# The matrix is a CPU bed that stands in for torch.cuda: it is no part of a job.
SOURCES = [
    *(p for p in sorted((ROOT / "replay_patch").rglob("*.py")) if "matrix" not in p.parts),
    *sorted((ROOT / "patches").rglob("*.py")),
]
KINDS = ("cuda", "npu")
ALLOWED = {
    ("router_checks.py", "backends.cuda"): "check_capture: is_built() answers in any torch",
    ("router_checks.py", "torch.cuda"): "check_capture: only in a torch that is built with CUDA",
    ("router_checks.py", "'npu'"): "check_capture: only where torch_npu has put torch.npu",
}
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "reduce"),
    *("recv", "irecv", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "isend"),
}


def of_a_kind(tree: ast.AST) -> Iterator[str]:
    """What names a kind of device: torch.cuda, `.cuda()`, "cuda:0", the same of NPUs; imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in (*KINDS, "is_cuda", "is_npu"):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.partition(":")[0] in KINDS:
                yield repr(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            yield from (n for n in names if {*n.split(".")} & {*KINDS, "torch_npu"})


def collectives(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = ast.unparse(node.value)
            if owner == "dist" or owner.endswith("distributed"):
                yield node.attr


@pytest.mark.parametrize(
    "code, found",
    [
        ("x = torch.cuda.current_device()", ["torch.cuda"]),
        ("tensor.cuda()", ["tensor.cuda"]),
        ("torch.zeros(1, device='cuda:0')", ["'cuda:0'"]),
        ("if tensor.is_cuda: tensor.npu()", ["tensor.is_cuda", "tensor.npu"]),
        ("import torch_npu.contrib", ["torch_npu.contrib"]),
        ("from torch import cuda", ["torch.cuda"]),
        ("config.cuda_graph_impl = 'cuda graph'", []),
    ],
)
def test_kinds_of_devices_are_found(code: str, found: list[str]) -> None:
    assert list(of_a_kind(ast.parse(code))) == found


def test_no_module_names_a_kind_of_device() -> None:
    found = {(p.name, name) for p in SOURCES for name in of_a_kind(ast.parse(p.read_text()))}

    assert found == ALLOWED.keys()


def test_our_collectives_are_those_whose_dtypes_are_tested() -> None:
    """In tests/distributed/sessions/test_collectives.py."""
    found = {(p.name, name) for p in SOURCES for name in collectives(ast.parse(p.read_text()))}

    assert found == {("gather.py", "all_gather"), ("padding_rows.py", "all_reduce")}


# --- copies to a device -----------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of each `Tensor.to`."""
    calls: list[dict[str, Any]] = []
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return calls


def test_a_pinned_tensor_is_copied_without_waiting(
    monkeypatch: pytest.MonkeyPatch, copies: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)

    assert to_device(torch.ones(2), torch.device("meta")).device.type == "meta"
    assert copies == [{"non_blocking": True}]


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, NotImplementedError])
def test_where_nothing_can_be_pinned_the_copy_waits(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, copies: list[dict[str, Any]]
) -> None:
    """torch_npu would read the memory later, when it may be another tensor's."""

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        raise error("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)

    assert to_device(torch.ones(2), torch.device("meta")).device.type == "meta"
    assert copies == [{}]


# --- graphs that are being captured -----------------------------------------------------------


def accelerator(capturing: bool | None, initialized: bool = True) -> Any:
    """A torch.cuda or torch.npu; None: an older one, which has no such function."""
    out = SimpleNamespace(is_initialized=lambda: initialized)
    if capturing is not None:
        out.is_current_stream_capturing = lambda: capturing
    return out


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_capture_on_any_accelerator_is_seen(
    name: str, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    for capturing in (None, False):
        monkeypatch.setattr(torch, name, accelerator(capturing), raising=False)
        check_capture()
    monkeypatch.setattr(torch, name, accelerator(True, initialized=False), raising=False)
    check_capture()
    monkeypatch.setattr(torch, name, accelerator(True), raising=False)

    if name == "npu" or built:
        with pytest.raises(RouteError, match="a CUDA or NPU graph is being captured"):
            check_capture()
    else:
        check_capture()  # there is no CUDA that could capture


@pytest.mark.parametrize("capturing", [None, False, True])
def test_transfer_to_npu_in_effect(capturing: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies the names that torch.npu has into torch.cuda, where the others stay."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    npu = accelerator(capturing)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    for name, value in vars(npu).items():
        monkeypatch.setattr(torch.cuda, name, value)

    if capturing:
        with pytest.raises(RouteError, match="being captured"):
            check_capture()
    else:
        check_capture()
