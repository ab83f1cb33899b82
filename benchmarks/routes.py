"""What it costs to bring routes to the routers: ours and the peers in one process.

    python benchmarks/routes.py [--release 0.19.2] [--rounds 15] [--json FILE]

S=8192, L=48, K=8, E=128; B sequences of S/2 to S tokens, packed; no parallelism. One thread, as
torchrun sets it. Peers: SkyRL's and verl's public replay paths, from PyPI. The rows that reach the
routers are compared first: all give the same.
"""

import argparse
import base64
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import timing

from replay_patch.matrix import tiny
from replay_patch.matrix.environments import NEWEST

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

BATCHES, SEQUENCE, LAYERS, TOPK, EXPERTS = (1, 4, 16), 8192, 48, 8, 128
STAGE = LAYERS // 4  # of four pipeline stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", default=NEWEST)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    timing.on_release(args.release, OMP_NUM_THREADS="1")
    tiny.init()

    result = {
        "release": args.release,
        "set-up": [setting_up(batch, args.rounds) for batch in BATCHES],
        "checking": checking(args.rounds),
        "codec": codec(args.rounds),
        "row map": [row_map(batch, args.rounds) for batch in BATCHES],
    }
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result))


# --- the set-up of a microbatch ---------------------------------------------------------------


def setting_up(batch: int, rounds: int) -> dict[str, Any]:
    """Times in ms, what the routers keep in bytes, and ratios to ours."""
    bench = Bench(batch)
    bench.compare()
    taken = timing.interleaved(bench.variants(), rounds)
    return {
        "batch": batch,
        "tokens": sum(bench.lengths),
        "ms": {name: 1e3 * statistics.median(times) for name, times in taken.items()},
        "ratio": {name: timing.ratios(taken, name, "ours") for name in taken},
        "held": {name: held(call()) for name, call in bench.calls.items()},
        "int32": sum(bench.lengths) * LAYERS * TOPK * 4,
    }


class Bench:
    """The same routes in the form that each implementation's trainer has them in."""

    def __init__(self, batch: int) -> None:
        import torch
        from helpers import peer_packages

        from replay_patch import RouteBatch, Routes

        self.lengths = lengths(batch)
        each = [some_ids(length) for length in self.lengths]
        self.routes = RouteBatch(Routes(ids, EXPERTS) for ids in each)
        self.dense = torch.zeros(batch, SEQUENCE, LAYERS, TOPK, dtype=torch.uint8)
        self.mask = torch.zeros(batch, SEQUENCE, dtype=torch.int64)
        for place, ids in enumerate(each):  # SkyRL pads on the left
            self.dense[place, SEQUENCE - len(ids) :] = ids
            self.mask[place, SEQUENCE - len(ids) :] = 1
        self.nested = torch.nested.as_nested_tensor(each, layout=torch.jagged)
        self.config = tiny.moe_config(
            num_layers=LAYERS, num_moe_experts=EXPERTS, moe_router_topk=TOPK
        )
        self.skyrl = peer_packages.skyrl("backends.skyrl_train.utils.replay_utils")
        self.verl = peer_packages.verl("utils.megatron.router_replay_utils")
        self.routers = {"skyrl": self._megatrons(), "verl": self._verls()}
        self.calls: dict[str, Callable[[], list[Any]]] = {
            "ours": self.ours,
            "ours, one of 4 stages": self.stage,
            "ours, and every layer's index": self.widened,
            "skyrl": lambda: self.skyrls(self.dense.to(torch.int32)),
            "skyrl, given int32": self.given_int32,
            "verl": self.verls,
        }
        self.int32: Any = None

    def _megatrons(self) -> list[Any]:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.global_router_replay_instances.clear()
        return [RouterReplay() for _ in range(LAYERS)]

    def _verls(self) -> list[Any]:
        self.verl.RouterReplay.router_instances.clear()
        return [self.verl.RouterReplay() for _ in range(LAYERS)]

    def ours(self) -> list[Any]:
        from replay_patch import TokenLayout

        layout = TokenLayout.packed(self.lengths)
        return list(self.routes.to_rows(layout).expert_ids.unbind())

    def stage(self) -> list[Any]:
        from replay_patch import TokenLayout

        layout, numbers = TokenLayout.packed(self.lengths), range(1, LAYERS + 1)
        rows = self.routes.to_rows(layout, range(STAGE + 1, 2 * STAGE + 1), numbers)
        return list(rows.expert_ids.unbind())

    def widened(self) -> list[Any]:
        """One after the other, as the routers are called; none is kept."""
        kept = self.ours()
        for ids in kept:
            ids.long()
        return kept

    def skyrls(self, dense: Any) -> list[Any]:
        """With the cast that its worker makes of each microbatch."""
        self.skyrl.setup_per_microbatch_replay_forward(
            dense, self.mask, self.config, remove_microbatch_padding=True
        )
        return [router.target_topk_idx for router in self.routers["skyrl"]]

    def given_int32(self) -> list[Any]:
        if self.int32 is None:
            import torch

            self.int32 = self.dense.to(torch.int32)
        return self.skyrls(self.int32)

    def verls(self) -> list[Any]:
        self.verl.set_router_replay_data(self.nested, None, self.config)
        return [router.target_topk_idx for router in self.routers["verl"]]

    def forget(self) -> None:
        for routers in self.routers.values():
            for router in routers:
                router.clear_indices()

    def compare(self) -> None:
        """All implementations hand the same ids to each router."""
        import torch

        wanted = self.ours()
        for name in ("skyrl", "verl"):
            for found, ids in zip(self.calls[name](), wanted, strict=True):
                assert torch.equal(found.long(), ids.long()), name

    def variants(self) -> dict[str, timing.Variant]:
        def variant(call: Callable[[], Any]) -> timing.Variant:
            def prepare() -> Callable[[], Any]:
                self.forget()
                return call

            return prepare

        return {name: variant(call) for name, call in self.calls.items()}


def checking(rounds: int) -> float:
    """ms of making `Routes` of one sequence of S tokens."""
    from replay_patch import Routes

    ids = some_ids(SEQUENCE)
    taken = timing.interleaved({"Routes": lambda: lambda: Routes(ids, EXPERTS)}, rounds)
    return 1e3 * statistics.median(taken["Routes"])


def held(ids: Iterable[Any]) -> int:
    """Bytes of the storages behind these tensors."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in ids}
    return sum(storages.values())


# --- on the wire ------------------------------------------------------------------------------


def codec(rounds: int) -> dict[str, Any]:
    """Encoding and decoding one sequence of S tokens, there and back, in ms and bytes."""
    import numpy as np

    from replay_patch import Routes

    ids = some_ids(SEQUENCE)
    array, routes = ids.numpy(), Routes(ids, EXPERTS)

    def nested_lists() -> Any:
        text = json.dumps(array.tolist())
        return text, np.array(json.loads(text), dtype=np.uint8)

    def plain_base64() -> Any:
        text = json.dumps(base64.b64encode(array.tobytes()).decode())
        return text, np.frombuffer(base64.b64decode(json.loads(text)), np.uint8).reshape(ids.shape)

    def checked_base64() -> Any:
        text, found = plain_base64()
        return text, Routes(found, EXPERTS).expert_ids

    def wire() -> Any:
        text = json.dumps(routes.to_wire())
        return text, Routes.from_wire(json.loads(text)).expert_ids

    def binary() -> Any:
        data = routes.to_bytes()
        return data, Routes.from_bytes(data).expert_ids

    calls = {
        "to_wire, JSON, from_wire": wire,
        "to_bytes, from_bytes": binary,
        "base64, JSON; unchecked": plain_base64,
        "base64, JSON; into Routes": checked_base64,
        "JSON lists": nested_lists,
    }
    made = {name: call() for name, call in calls.items()}
    for name, (_, found) in made.items():
        assert np.array_equal(np.asarray(found), array), name
    fast = {name: lambda call=call: call for name, call in calls.items() if name != "JSON lists"}
    taken = timing.interleaved(fast, rounds)
    slow = timing.interleaved({"JSON lists": lambda: nested_lists}, 3)["JSON lists"]
    taken_ms = {name: 1e3 * statistics.median(times) for name, times in taken.items()}
    return {
        "ms": taken_ms | {"JSON lists": 1e3 * statistics.median(slow)},
        "bytes": {name: len(message) for name, (message, _) in made.items()},
        "ratio": {name: timing.ratios(taken, name, "base64, JSON; unchecked") for name in taken},
    }


# --- the row map ------------------------------------------------------------------------------


def row_map(batch: int, rounds: int) -> dict[str, Any]:
    """Nanoseconds per token of making a layout, plain and cut over ranks."""
    from replay_patch import TokenLayout

    given = lengths(batch)
    cut = {"tp_size": 2, "sequence_parallel": True, "cp_size": 2}
    makes = {
        "packed": lambda: TokenLayout.packed(given),
        "packed, TP2 SP CP2": lambda: TokenLayout.packed(given, **cut),
        "padded": lambda: TokenLayout.padded(given, SEQUENCE),
    }
    found = {}
    for name, make in makes.items():
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            make()
            times.append(time.perf_counter() - start)
        found[name] = 1e9 * statistics.median(times[1:]) / sum(given)
    return {"batch": batch, "tokens": sum(given), "ns per token": found}


# --- inputs and output ------------------------------------------------------------------------


def lengths(batch: int) -> list[int]:
    """The longest first; the rest is spread over S/2 to S."""
    return [SEQUENCE - (place * 2657) % (SEQUENCE // 2) for place in range(batch)]


def some_ids(tokens: int) -> Any:
    """uint8 [tokens, L, K], distinct in a row."""
    import torch

    generator = torch.Generator().manual_seed(tokens)
    first = torch.randint(0, EXPERTS, (tokens, LAYERS, 1), generator=generator)
    step = torch.randint(0, EXPERTS // TOPK, (tokens, LAYERS, TOPK), generator=generator)
    return ((first + torch.arange(TOPK) * (EXPERTS // TOPK) + step) % EXPERTS).to(torch.uint8)


def show(result: dict[str, Any]) -> None:
    for row in result["set-up"]:
        print(f"B={row['batch']}, {row['tokens']} tokens: set-up of a microbatch")
        for name, ms in row["ms"].items():
            low, middle, high = row["ratio"][name]
            share = row["held"][name] / row["int32"]
            print(
                f"  {name:30}{ms:9.2f} ms  {middle:6.2f} x ours ({low:.2f} ... {high:.2f})  "
                f"{share:.3f} x int32"
            )
    print(f"Routes of one sequence, checked: {result['checking']:.2f} ms")
    print("one sequence, encoded and decoded")
    for name, ms in result["codec"]["ms"].items():
        print(f"  {name:30}{ms:9.2f} ms  {result['codec']['bytes'][name] / 1e6:7.2f} MB")
    for row in result["row map"]:
        made = ", ".join(f"{name} {ns:.1f} ns" for name, ns in row["ns per token"].items())
        print(f"row map, {row['tokens']} tokens: {made} per token")


if __name__ == "__main__":
    main()
