"""What a session costs: a schedule with recompute, a router call of it, and the bytes it holds.

    python benchmarks/schedule.py RELEASE [--rounds 20] [--json FILE]

One process, one release, 48 MoE layers, full recompute, tiny tensors: what is measured is Python.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import timing

import replay_patch
from replay_patch.matrix import tiny
from replay_patch.replay import router_call

LAYERS, EXPERTS, TOPK, LENGTHS, MICROBATCHES = 48, 8, 2, (16, 16), 2
CALLS = 20_000
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    timing.on_release(args.release)
    replay_patch.activate()
    tiny.init()
    bench = Bench()
    taken = timing.interleaved(
        {"native": lambda: bench.native, "native again": lambda: bench.native}
        | {"replaying": lambda: bench.replaying},
        args.rounds,
    )
    result = {"release": args.release, "schedule": {}, **bench.python(), "bytes": bench.held()}
    for name in taken:
        ratio = timing.ratios(taken, name, "native")
        result["schedule"][name] = [1e3 * statistics.median(taken[name]), *ratio]
        ms, low, middle, high = result["schedule"][name]
        print(f"  {name:24}{ms:8.1f} ms  {middle:6.3f} x native ({low:.3f} ... {high:.3f})")
    print(f"  Python of a call:  {result['first']:.2f} us, {result['again']:.2f} us in a recompute")
    print(f"  held for a microbatch: {result['bytes']} bytes")
    if args.json:
        args.json.write_text(json.dumps(result))


class Bench:
    """A model of 48 layers, routes for two microbatches, and the ways to run a schedule."""

    def __init__(self) -> None:
        import torch

        self.config = tiny.moe_config(
            num_layers=LAYERS,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOPK,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            recompute_num_layers=1,
            **RECOMPUTE,
        )
        self.model = tiny.gpt_model(self.config)
        self.layout = replay_patch.TokenLayout.padded(LENGTHS, max(LENGTHS))
        self.routes = [
            replay_patch.Routes(torch.rand(n, LAYERS, EXPERTS).topk(TOPK).indices, EXPERTS)
            for n in LENGTHS
        ]
        self.tokens = torch.randint(0, tiny.VOCAB_SIZE, (len(LENGTHS), max(LENGTHS)))
        self.positions = torch.arange(max(LENGTHS)).expand_as(self.tokens)

    def native(self) -> None:
        self.schedule(None)

    def replaying(self) -> None:
        with replay_patch.replaying(self.model, overlap_every=0) as replay:
            self.schedule(replay)

    def schedule(self, replay: Any) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(batches: Any, model: Any) -> Any:
            next(batches)
            more = {} if replay is None else replay.load(model, self.routes, self.layout)
            more.pop("padding_mask", None)  # there is none; the release would pass it on
            losses = model(self.tokens, self.positions, None, labels=self.tokens, **more)
            return losses, lambda out: (out.float().mean(), {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(MICROBATCHES)),
            model=self.model,
            num_microbatches=MICROBATCHES,
            seq_length=max(LENGTHS),
            micro_batch_size=len(LENGTHS),
            forward_only=False,
        )

    def held(self) -> int:
        """Bytes of ids that a session holds for one microbatch."""
        with replay_patch.replaying(self.model) as replay:
            replay.load(self.model, self.routes, self.layout)
            [stage] = replay._stages
            ids = stage.tracker._current.data.ids
            total = sum(some.numel() * some.element_size() for some in ids)
            stage.seen.clear()
        return total

    def python(self) -> dict[str, float]:
        """Microseconds of Python in a router call of a session: tensors that do nothing take the
        place of the logits and ids, and of the release's function only its question is left."""
        nothing = SimpleNamespace(shape=(1, TOPK), device=None)
        nothing.to = nothing.detach = lambda *_: nothing
        nothing.gather = lambda *_: nothing

        class Scores(SimpleNamespace):
            def __len__(self) -> int:
                return sum(LENGTHS)

        scores = Scores(**vars(nothing))

        def original(router: Any) -> Any:
            return router.router_replay.get_replay_topk(scores, TOPK, None, None, lambda *_: None)

        out = {}
        with replay_patch.replaying(self.model, overlap_every=0) as replay:
            replay.load(self.model, self.routes, self.layout)
            [stage] = replay._stages
            load, router = stage.tracker._current, stage.routers[0]
            load.data.ids[:] = [nothing] * LAYERS
            out["first"] = min(_forwards(router, original, load) for _ in range(5))
            # A recompute is found by the number of the node that runs.
            load.span = stage.tracker._forwards.open(load)
            load.span.start = 0
            load.seen.add(0)
            out["again"] = min(_recomputes(router, original) for _ in range(5))
            stage.seen.clear()
        return {name: 1e6 * seconds / CALLS for name, seconds in out.items()}


def _forwards(router: Any, original: Any, load: Any) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        load.seen.clear()
        router_call.run(router, original, (), {})
    return time.perf_counter() - start


def _recomputes(router: Any, original: Any) -> float:
    import torch

    taken = []

    class Timed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with torch.enable_grad():
                start = time.perf_counter()
                for _ in range(CALLS):
                    router_call.run(router, original, (), {})
                taken.append(time.perf_counter() - start)
            return grad

    Timed.apply(torch.ones(1, requires_grad=True)).sum().backward()
    return taken[0]


if __name__ == "__main__":
    main()
