"""Run a real Megatron-core, 0.12 to 0.19, on a CPU-only PyTorch.

    from replay_patch.matrix import cpu
    cpu.install()          # before the first import of megatron.core
    import megatron.core
    cpu.patch_megatron()   # after it

`replay_patch.matrix.tiny` does all of it. Router, dispatchers, experts, attention, schedules, p2p,
recompute, RNG tracker, DDP and optimizers stay the release's own code, and parallel runs on gloo
reproduce the one-process model. What is replaced is torch as Megatron sees it:

1. "cuda" as a device means the CPU: Megatron has `device='cuda'`, `tensor.cuda()` and
   `torch.cuda.current_device()` in schedules, mappings, p2p buffers, masks, trackers.
2. The CUDA random generator is the CPU's, so the RNG tracker and recompute work unchanged.
3. Streams and events do nothing: on a CPU the work is done when the call returns.
4. `torch.compile` returns the function as it is (importing its compiler costs 1-2 s a process).
5. gloo's `all_to_all_single` takes tensors as split sizes.
6. triton is a stub for the two modules that import it without a guard (`no_triton`).

Importing this module does nothing and loads no torch. `install` cannot be undone, as Megatron keeps
some of these names: use a process that does nothing else.

Two traps. Pipeline size 2 with virtual stages and the default p2p flags *finishes with wrong
numbers*: `tiny.model_chunks` insists on `tiny.VPP_P2P`. Ranks forked from a process that ever made
Megatron's process groups, destroyed or not, hang or crash: `ranks.launch` refuses.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from replay_patch.megatron import no_triton

__all__ = ["install", "install_once", "installed", "patch_megatron"]

_installed_with: bool | None = None  # the torch_compile of the first install()


def installed() -> bool:
    """Whether `install` has run in this process."""
    return _installed_with is not None


def install(torch_compile: bool = False) -> None:
    """Make torch look to Megatron like a machine whose GPU is the CPU. A second call does nothing.
    `torch_compile=True` leaves the real `torch.compile`, which is Megatron's `jit_fuser`.
    RuntimeError: an earlier call had another value, or megatron.core has bound what is replaced."""
    global _installed_with
    if _installed_with is not None:
        if _installed_with is not torch_compile:
            raise RuntimeError(
                "replay_patch.matrix.cpu.install: already installed with "
                f"torch_compile={_installed_with}, now asked for torch_compile={torch_compile}; "
                "use one value per process"
            )
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "replay_patch.matrix.cpu.install: megatron.core is already imported and holds torch "
            "names by value; call install() first, in a fresh process"
        )
    import torch

    _redirect_devices(torch)
    _replace_cuda(torch)
    if not torch_compile:
        torch.compile = _no_compile
    no_triton.provide()
    _accept_tensor_splits(torch)
    _installed_with = torch_compile


def install_once() -> None:
    """`install`, unless that has been called, with whatever arguments."""
    if not installed():
        install()


def patch_megatron() -> None:
    """Repair what Megatron cannot do without Transformer Engine and apex, on any device.
    Call it after `import megatron.core`; a second call does nothing."""
    from megatron.core.transformer import multi_latent_attention, torch_norm
    from megatron.core.transformer.moe import moe_utils

    # 0.13.0-0.16.1: the gating says `if te_general_gemm is not None` of a name that only a
    # successful import of Transformer Engine binds.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # 0.16.0, 0.16.1: `isinstance(x, TELinear)` where TELinear is None.
    if not isinstance(getattr(multi_latent_attention, "TELinear", object), type):
        multi_latent_attention.TELinear = type("TELinear", (), {})

    # WrappedTorchNorm refuses sequence_parallel, since nothing marks its weight for the all-reduce
    # of finalize_model_grads: mark it, in `__new__`, as other modules hold the class by value.
    norm = torch_norm.WrappedTorchNorm
    if getattr(norm.__new__, "__module__", None) != __name__:
        norm.__new__ = staticmethod(_norm_for_sequence_parallel(norm.__new__))


def _norm_for_sequence_parallel(new: Callable[..., Any]) -> Callable[..., Any]:
    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        wanted, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = new(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = wanted
        for parameter in norm.parameters():
            parameter.sequence_parallel = wanted
        return norm

    return __new__


# -------------------------------------------------------------------------------------- 1. devices

# The releases above call the first three, the next one may call the others. Plain wrappers, since a
# TorchFunctionMode is per thread, and would sit on top of the modes of the code under test.
_FACTORIES = ("ones", "zeros", "tensor", "empty", "full", "arange")


def _redirect_devices(torch: Any) -> None:
    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(torch, kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):  # pinning needs an accelerator runtime
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return wrapper

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))

    tensor = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self  # schedules of 0.12 and 0.13
    tensor.record_stream = lambda self, stream: None  # overlapped expert parallelism

    # Megatron's optimizers compare `tensor.type()` with 'torch.cuda.FloatTensor' and the like.
    original_type = tensor.type

    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original_type(self, dtype, *args, **kwargs)

    tensor.type = type_


def _is_cuda(torch: Any, device: object) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


# -------------------------------------------------------------------------------- 2, 3. torch.cuda


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...


class _Event:
    """An event that has always happened."""

    __init__ = record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Stream:
    """A stream that is always idle."""

    cuda_stream = stream_id = priority = 0
    __init__ = wait_stream = wait_event = synchronize = __exit__ = _nothing

    def record_event(self, event: _Event | None = None) -> _Event:
        return event if event is not None else _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self


class _SameForEveryDevice:
    """`torch.cuda.default_generators`, whatever the device index."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __getitem__(self, device: object) -> Any:
        return self._generator

    def __len__(self) -> int:
        return 1


def _replace_cuda(torch: Any) -> None:
    cuda, generator, stream = torch.cuda, torch.default_generator, _Stream()

    # A torch.device rather than an index: valid as `device=` and for tensor.to() on a CPU build.
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *args, **kwargs: stream
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: 0

    # `_lazy_call` and `manual_seed` would not fail on a CPU build but queue their work for a
    # CUDA initialisation that never comes, so that the named RNG states are never seeded.
    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    def get_rng_state(device: object = "cuda") -> Any:
        return generator.get_state()

    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.default_generators = _SameForEveryDevice(generator)
    cuda.manual_seed = manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = get_rng_state


def _no_compile(model: Any = None, **kwargs: Any) -> Any:
    """`torch.compile` as a function and as a decorator with arguments, doing nothing."""
    return (lambda function: function) if model is None else model


# ----------------------------------------------------------------------------------------- 5. gloo


def _accept_tensor_splits(torch: Any) -> None:
    """The alltoall dispatcher turns its split sizes into lists only `if tensor.is_cuda`."""
    original = torch.distributed.all_to_all_single

    def as_ints(splits: Any) -> list[int] | None:
        return None if splits is None else [int(size) for size in splits]

    @functools.wraps(original)
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        outs, ins = as_ints(output_split_sizes), as_ints(input_split_sizes)
        return original(output, input, outs, ins, *args, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_single
