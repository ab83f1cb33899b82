"""What one router call costs: native, with the plugin idle, recording, replaying; and the peers.

    python benchmarks/router.py RELEASE [--verl DIR] [--rounds 60] [--json FILE]

One process, one release, T=4096 tokens, E=128 experts, K=8, forward only, no holes. Peers:
Megatron's own `RouterReplay` (from 0.16 on), and verl's patch (`--verl`: the folder of the package
from PyPI) on the releases where it works.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing

import replay_patch
from replay_patch.matrix import tiny

TOKENS, EXPERTS, TOPK, HIDDEN = 4096, 128, 8, 64
PEERS = ("Megatron's own replay", "verl's replay")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release")
    parser.add_argument("--verl", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    timing.on_release(args.release)
    tiny.init()

    results = {}
    for dtype in ("float32", "bfloat16"):
        print(f"megatron-core {args.release}, {dtype}", flush=True)
        bench = Bench(dtype, args.verl)
        taken = timing.interleaved(bench.variants(), args.rounds)
        bench.reset(plugin=False)
        results[dtype] = rows = [row(taken, name) for name in taken]
        for name, ms, base, (low, middle, high) in rows:
            print(f"  {name:24}{ms:8.2f} ms  {middle:6.3f} x {base} ({low:.3f} ... {high:.3f})")
    if args.json:
        args.json.write_text(json.dumps({"release": args.release, "results": results}))


def row(taken: dict[str, list[float]], name: str) -> tuple[str, float, str, Any]:
    """(name, median ms, what it is compared with, quartiles of the ratio)."""
    base = "replay" if name in PEERS else "native"
    return name, 1e3 * statistics.median(taken[name]), base, timing.ratios(taken, name, base)


class Bench:
    """The routers of one dtype, all with the same weights, and the ways to call them."""

    def __init__(self, dtype: str, verl: Path | None) -> None:
        import torch

        torch.manual_seed(0)
        self.verl, self.undo = verl, lambda: None
        self.dtype = getattr(torch, dtype)
        self.hidden = torch.randn(TOKENS, 1, HIDDEN, dtype=self.dtype)
        self.ids = torch.rand(TOKENS, EXPERTS).topk(TOPK).indices
        self.weight = torch.randn(EXPERTS, HIDDEN, dtype=self.dtype)

    def variants(self) -> dict[str, timing.Variant]:
        from megatron.core.transformer.moe import router as module

        self.reset(plugin=False)
        has_native = "RouterReplay" in vars(module)
        off = self.router()
        self.reset(plugin=True)
        on = self.router(enable_routing_replay=True)
        out = {
            "native": self.variant(off, plugin=False),
            "native again": self.variant(off, plugin=False),
            "plugin on, replay off": self.variant(off),
            "replay on, no action": self.variant(on),
            "record": self.variant(on, "RECORD"),
            "replay": self.variant(on, "REPLAY_FORWARD"),
            "set a target": self.setting(on),
        }
        self.reset(plugin=False)
        if has_native:
            theirs = self.router(moe_enable_routing_replay=True)
            out[PEERS[0]] = self.variant(theirs, "REPLAY_FORWARD", plugin=False)
        if self.verl is not None:
            out[PEERS[1]] = self.verls(self.verl)
        self.reset(plugin=False)
        return out

    def reset(self, plugin: bool) -> None:
        self.undo()
        self.undo = lambda: None
        if plugin:
            replay_patch.activate()
        else:
            replay_patch.deactivate()

    def router(self, **over: Any) -> Any:
        import torch

        config = tiny.moe_config(
            hidden_size=HIDDEN,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOPK,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            params_dtype=self.dtype,
            **over,
        )
        router = tiny.router(config).eval()
        with torch.no_grad():
            router.weight.copy_(self.weight)
        return router

    def variant(
        self, router: Any, action: str | None = None, plugin: bool = True
    ) -> timing.Variant:
        def prepare() -> Callable[[], Any]:
            self.reset(plugin)
            if getattr(router, "router_replay", None) is not None:
                router.router_replay.clear_indices()
                router.router_replay.clear_router_replay_action()
            if action is not None:
                from megatron.core.transformer.moe.router_replay import RouterReplayAction

                router.router_replay.set_target_indices(self.ids)
                router.router_replay.set_router_replay_action(RouterReplayAction[action])
            return lambda: self.call(router)

        return prepare

    def setting(self, router: Any) -> timing.Variant:
        def prepare() -> Callable[[], Any]:
            self.reset(plugin=True)
            router.router_replay.clear_indices()
            fresh = self.ids.clone()  # one that has not been looked at
            return lambda: router.router_replay.set_target_indices(fresh)

        return prepare

    def verls(self, folder: Path) -> timing.Variant:
        """verl's patch, in place for its own calls only: it has no way back of its own."""
        from megatron.core.transformer.moe import router, token_dispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        path = folder / "verl" / "utils" / "megatron" / "router_replay_patch.py"
        spec = importlib.util.spec_from_file_location("verl_router_replay_patch", path)
        assert spec is not None
        assert spec.loader is not None
        verl = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(verl)
        classes = (
            router.TopKRouter,
            TransformerConfig,
            token_dispatcher.MoEAlltoAllTokenDispatcher,
        )
        before = {cls: dict(vars(cls)) for cls in classes}
        verl.apply_router_replay_patch()
        after = {cls: dict(vars(cls)) for cls in classes}

        def put(wanted: dict[Any, dict[str, Any]]) -> None:
            for cls, names in wanted.items():
                for name in before[cls].keys() | after[cls].keys():
                    if name not in names:
                        delattr(cls, name)
                    elif vars(cls).get(name) is not names[name]:
                        setattr(cls, name, names[name])

        put(before)
        vars(TransformerConfig.__init__).pop("__signature__", None)  # it edits the original, too
        theirs = self.router()
        theirs.config.enable_routing_replay = True
        theirs.router_replay = verl.RouterReplay()

        def prepare() -> Callable[[], Any]:
            self.reset(plugin=False)
            put(after)
            self.undo = lambda: put(before)
            theirs.router_replay.clear_indices()
            theirs.router_replay.set_target_indices(self.ids)
            action = verl.RouterReplayAction.REPLAY_FORWARD
            theirs.router_replay.set_router_replay_action(action)
            return lambda: self.call(theirs)

        return prepare

    def call(self, router: Any) -> Any:
        import torch

        with torch.no_grad():
            return router(self.hidden)


if __name__ == "__main__":
    main()
