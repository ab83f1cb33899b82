"""Every order of what can happen around activation, each in a process of its own.

    python -m helpers.import_orders        # prints {"orders": n, "failures": [...]} as JSON

The orders are generated from `NEEDS`. They form a tree, and a process forks for each thing that can
happen next, but for the last, which it does itself: so every order is one line of processes that
has done exactly this order, and what orders have in common (importing torch takes a second) is done
once. What no order is about is done before it is needed (see `warm_up`).
"""

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from replay_patch.megatron import no_triton
from replay_patch.patching.registry import patches

CONFIG = "megatron.core.transformer.transformer_config"
ROUTER = "megatron.core.transformer.moe.router"
UTILS = "megatron.core.transformer.moe.moe_utils"

NEEDS: dict[str, set[str]] = {
    "import torch": set(),
    "import router": set(),
    "import config": set(),
    "activate": set(),
    "deactivate": {"activate"},
    "activate again": {"deactivate"},
    "define subclass": {"import config"},
    "build router": {"import config", "import router"},
}


def orders(done: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """All complete orders that start with `done`."""
    if len(done) == len(NEEDS):
        return [done]
    return [order for event in possible(done) for order in orders((*done, event))]


def possible(done: tuple[str, ...]) -> list[str]:
    return [e for e, needs in NEEDS.items() if e not in done and needs <= set(done)]


class World:
    """What this line of processes has seen."""

    def __init__(self, strangers: Sequence[str]) -> None:
        self.strangers = strangers
        self.warm = False
        self.originals: dict[str, Any] = {}  # taken when the plugin was off

    def do(self, event: str) -> None:
        import replay_patch

        if event == "import torch":
            import torch  # noqa: F401
        elif event.startswith("import"):
            __import__(ROUTER if "router" in event else CONFIG)
        elif event == "deactivate":
            replay_patch.deactivate()
        elif event.startswith("activate"):
            self.originals = objects()
            replay_patch.activate()
        elif event == "define subclass":
            check_subclass(self.active)
        else:
            check_router(self.active)
        if "torch" in sys.modules and not self.warm:
            self.warm = True
            warm_up(self.strangers)

    @property
    def active(self) -> bool:
        import replay_patch

        return replay_patch.status().trigger is not None

    def check(self, done: tuple[str, ...]) -> None:
        import replay_patch

        status = replay_patch.status()
        expected = "activate again" in done or ("activate" in done and "deactivate" not in done)
        assert status.active == expected, status
        assert status.problems == (), status.problems
        modules = {p.name: p.modules for p in patches()}
        for patch in status.patches:
            if any(module in sys.modules for module in modules[patch.name]):
                assert patch.state in ("active", "not needed"), patch
        if not expected:
            for name, found in objects().items():
                assert "replay_patch" not in origin(found), f"{name} is ours after deactivate()"
                if name in self.originals:
                    assert found is self.originals[name], f"{name} is not the original object"
            assert set(objects()) >= set(self.originals)


def objects() -> dict[str, Any]:
    """Every function, class attribute and dataclass field in the modules that we patch."""
    out: dict[str, Any] = {}
    for name in (CONFIG, ROUTER, UTILS):
        module = sys.modules.get(name)
        for key, value in vars(module).items() if module else ():
            out[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                out |= {f"{name}.{key}.{k}": v for k, v in vars(value).items()}
                fields = vars(value).get("__dataclass_fields__", {})
                out |= {f"{name}.{key} field {k}": v for k, v in fields.items()}
    return out


def origin(found: Any) -> str:
    """Where a function was written; wraps() copies all else."""
    return getattr(getattr(found, "__code__", None), "co_filename", "")


def check_subclass(active: bool) -> None:
    import dataclasses

    config = sys.modules[CONFIG].TransformerConfig

    @dataclasses.dataclass(repr=False, eq=False)  # of 200 fields, and not what is checked: slow
    class Provider(config):
        """With a docstring: else dataclass() makes one of all the fields."""

        extra: int = 3

    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    assert Provider(**sizes).extra == 3
    try:
        assert Provider(**sizes, enable_routing_replay=True).enable_routing_replay is True
        assert active
    except TypeError:
        assert not active


def check_router(active: bool) -> None:
    import torch

    # All that a router without auxiliary loss needs of a GPU, of TE and of process groups.
    torch.cuda.current_device = lambda: torch.device("cpu")
    utils, router = sys.modules[UTILS], sys.modules[ROUTER].TopKRouter
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None
    import inspect

    names = inspect.signature(router).parameters.keys() & {"pg_collection", "model_comm_pgs"}
    groups = type("Groups", (), {"__getattr__": lambda self, name: None})()
    config = sys.modules[CONFIG].TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        **({"enable_routing_replay": True} if active else {}),
    )
    built = router(config, **dict.fromkeys(names, groups))
    hidden = torch.randn(3, 1, 8)
    if not active:
        assert getattr(built, "router_replay", None) is None
        assert built(hidden)[1].sum() == 6
        return
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    built.router_replay.set_target_indices(torch.tensor([[3, 0], [1, 2], [0, 1]]))
    built.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    assert built(hidden)[1].int().tolist() == [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]]


def strangers() -> list[str]:
    """The modules that Megatron imports and that are not its own, in the order of import."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            before = set(sys.modules)
            importlib.import_module(ROUTER)
            new = [m for m in sys.modules if m not in before and not m.startswith("megatron")]
            with os.fdopen(writer, "w") as out:
                json.dump(new, out)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        out: list[str] = json.load(found)
    os.wait()
    return out


def warm_up(names: Sequence[str]) -> None:
    """Import what Megatron will import of others, which is ten times slower than its own modules
    (2 s for torch's compiler), and let torch's kernels do what they do at their first call.

    Processes forked from here share both.
    """
    import torch

    for name in names:
        with contextlib.suppress(ImportError):  # a name that exists only after another import
            importlib.import_module(name)
    logits = torch.nn.functional.linear(torch.randn(3, 8), torch.randn(4, 8)).softmax(1)
    torch.zeros_like(logits).scatter(1, logits.topk(2)[1], 1).bool().sum()
    gc.collect()
    gc.freeze()  # so that a collection in a child does not copy every page that it shares with us


def walk(done: tuple[str, ...], world: World, report: int) -> None:
    """Do each possible next thing: the last one here, the others in a child."""
    *others, last = possible(done)
    for event in others:
        child = os.fork()
        if child == 0:
            try:
                step(done, event, world, report)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    step(done, last, world, report)


def step(done: tuple[str, ...], event: str, world: World, report: int) -> None:
    """Do one thing and what can follow it; the end of an order checks the whole again."""
    done = (*done, event)
    try:
        world.do(event)
        world.check(done)
        if len(done) == len(NEEDS):
            check_subclass(True)
            check_router(True)
            write(report, "")
            return
    except Exception:
        write(report, f"{' > '.join(done)}\n{traceback.format_exc()}")
        return
    walk(done, world, report)


def write(report: int, text: str) -> None:
    with os.fdopen(os.dup(report), "w") as out:
        out.write(json.dumps(text) + "\n")


def main() -> None:
    import tempfile

    os.environ["OMP_NUM_THREADS"] = "1"  # a forked child of a process with OpenMP threads hangs
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # tracing the router costs more than all else here
    no_triton.provide()
    with tempfile.TemporaryFile("w+") as report:
        walk((), World(strangers()), report.fileno())
        report.seek(0)
        lines = [json.loads(line) for line in report]
    failures = [line for line in lines if line]
    print(json.dumps({"orders": len(lines) - len(failures), "failures": failures[:5]}))


if __name__ == "__main__":
    main()
