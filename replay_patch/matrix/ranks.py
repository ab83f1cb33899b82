"""Process groups on gloo, and functions run on several ranks of this machine.

Never fork ranks from a process that has made Megatron's process groups, destroyed or not: they
hang, or crash in `new_group`. `launch` refuses where it knows of groups. A test process should only
import and `launch`.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replay_patch.matrix import cpu

__all__ = ["init", "launch", "shutdown"]

_made_groups = False  # in this process, ever


def init(
    world: int = 1, rank: int = 0, init_file: str | None = None, seed: int = 123, **parallel: Any
) -> None:
    """Start torch.distributed on gloo, Megatron's process groups, and Megatron's RNG tracker.

    `init_file` is a path that all ranks share, not existing yet; `launch` hands one to each.
    Several ranks without one are a ValueError. `seed` is that of the RNG tracker, `parallel` are
    arguments of `parallel_state.initialize_model_parallel`.
    """
    global _made_groups
    cpu.install_once()
    import torch
    from megatron.core import parallel_state, tensor_parallel

    cpu.patch_megatron()
    dist: Any = torch.distributed  # its stubs do not name HashStore
    torch.set_num_threads(1)  # several ranks share the cores; also what makes sums reproducible
    where: dict[str, Any]
    if init_file is not None:
        where = {"init_method": "file://" + str(Path(init_file).absolute())}
    elif world == 1:
        where = {"store": dist.HashStore()}
    else:
        raise ValueError(f"init: world={world} needs an init_file, a path that the ranks share")
    _made_groups = True
    dist.init_process_group("gloo", rank=rank, world_size=world, **where)
    parallel_state.initialize_model_parallel(**parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Undo `init`; another one may follow, but forking ranks stays forbidden (see `launch`)."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def launch(
    fn: Callable[..., Any],
    world: int,
    args: tuple[Any, ...] = (),
    timeout: float = 120.0,
    fresh: bool = False,
) -> list[Any]:
    """Run `fn(rank, world, init_file, *args)` on `world` ranks; return their results, in order.

    Ranks are forked, which is cheap when the caller has imported Megatron; with `fresh` they are
    new interpreters (2-3 s each), and `fn` and `args` must be picklable, as results always. After
    `timeout` seconds, or when a rank fails, all are killed: the others would wait for it in gloo.

    Raises:
        RuntimeError: a rank raised (its traceback is in the text), died or was too slow; or this
            process has made process groups, and forking from it is unsafe.
    """
    if not fresh and _has_groups():
        raise RuntimeError(
            "launch: this process has made process groups, and ranks forked from it would hang; "
            "call launch from a process that never called init(), or pass fresh=True"
        )
    context: Any = multiprocessing.get_context("spawn" if fresh else "fork")
    with tempfile.TemporaryDirectory(prefix="replay-patch-ranks-") as folder:
        ranks = [
            context.Process(target=_rank_main, args=(fn, rank, world, folder, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        late = not _wait(ranks, time.monotonic() + timeout)
        _check(fn, ranks, Path(folder), timeout if late else None)
        return [pickle.loads(_outcome(Path(folder), rank).read_bytes()) for rank in range(world)]


def _has_groups() -> bool:
    if _made_groups:
        return True
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _rank_main(
    fn: Callable[..., Any], rank: int, world: int, folder: str, args: tuple[Any, ...]
) -> None:
    status = 1
    trace = _outcome(Path(folder), rank, "trace").open("w")
    faulthandler.register(signal.SIGUSR1, trace)  # where it hangs: see `cell_processes`
    try:
        result = fn(rank, world, os.path.join(folder, "rendezvous"), *args)
        _outcome(Path(folder), rank).write_bytes(pickle.dumps(result))
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            distributed.barrier()  # a rank that leaves early breaks the others' connections
        status = 0
    except BaseException:  # noqa: BLE001 - the parent shows it, whatever it is
        _outcome(Path(folder), rank, "error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a forked child must not run the parent's exit handlers


def _outcome(folder: Path, rank: int, kind: str = "result") -> Path:
    return folder / f"rank{rank}.{kind}"


def _wait(ranks: list[Any], deadline: float) -> bool:
    """Wait for all; kill them when one fails or time is over. False: out of time."""
    in_time = True
    while any(process.is_alive() for process in ranks):
        failed = any(process.exitcode not in (0, None) for process in ranks)
        in_time = time.monotonic() < deadline
        if failed or not in_time:
            time.sleep(0.5)  # so that ranks failing together all leave their traceback
            for process in ranks:
                process.kill()
            break
        time.sleep(0.02)
    for process in ranks:
        process.join()
    return in_time


def _check(fn: Callable[..., Any], ranks: list[Any], folder: Path, timed_out: float | None) -> None:
    codes = [process.exitcode for process in ranks]
    if not any(codes) and timed_out is None:
        return
    name = getattr(fn, "__name__", repr(fn))
    text = f"launch({name}): exit codes by rank {codes}"
    if timed_out is not None:
        text += f", still running after {timed_out:g} s and killed"
    files = [_outcome(folder, rank, "error") for rank in range(len(ranks))]
    shown = [f"--- rank {i}\n{file.read_text()}" for i, file in enumerate(files) if file.exists()]
    raise RuntimeError("\n".join([text, *shown]))
