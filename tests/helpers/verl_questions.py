"""Questions to one verl release on one Megatron, in a process made by `helpers.trainers`.

Each returns what JSON can say. The maps are those that the routers really gave (`watched`), and are
compared with ids made here, or with those of a pass without replay.
"""

import gc
import json
from collections.abc import Callable
from typing import Any

from helpers import verl_engine
from helpers.verl_engine import LAYERS, Actor, Engine, batch, map_of, perturb, real_rows

RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def answer(*questions: str) -> None:
    """Print the answers, one JSON object; an error is an answer, too."""
    verl_engine.install()
    print(json.dumps({name: _asked(globals()[name]) for name in questions}))


def answer_of_rank(**parallel: int) -> None:
    """Print this rank's answer to `ranks`."""
    verl_engine.install()
    print(json.dumps(ranks(**parallel)))


def _asked(question: Callable[..., Any], *args: Any) -> Any:
    from replay_patch.matrix import tiny

    try:
        return question(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        tiny.clear_aux_tracker()  # a backward outside of a schedule leaves a loss scale there
        gc.collect()


def _made(mode: str, **options: Any) -> Any:
    """The engine, or where it has no replay (0.7.0) the actor."""
    return (Engine if _replays() else Actor)(mode, **options)


def _replays() -> bool:
    from verl.workers.config import McoreEngineConfig

    return "router_replay" in McoreEngineConfig.__dataclass_fields__


def _watch(made: Any, run: Callable[[], Any]) -> Any:
    with verl_engine.watched(made) as maps:
        run()
    return maps()


def _native(made: Any, data: Any = None) -> Any:
    return _watch(made, lambda: made.log_probs(data or batch(), replay=False))


def _calls(maps: Any) -> list[int]:
    return sorted({len(calls) for layers in maps for calls in layers})


def _all(maps: Any, expected: Callable[[int, int], Any]) -> bool:
    """Whether each call of each trajectory and layer gave the expected map."""
    import torch

    return all(
        torch.equal(found, expected(row, layer))
        for row, layers in enumerate(maps)
        for layer, calls in enumerate(layers)
        for found in calls
    )


def _differ(one: Any, other: Any) -> bool:
    """Whether in each trajectory and layer there is a token with another choice."""
    both = zip(one, other, strict=True)
    pairs = [(a[0], b[0]) for x, y in both for a, b in zip(x, y, strict=True)]
    return all((a != b).any().item() for a, b in pairs)


# --- routers and verl's helpers, without an engine ---------------------------------------------

LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}


def without_the_plugin() -> Any:
    """What verl's own patch comes to in a call of a router with an auxiliary loss."""
    from megatron.core.transformer.moe.router import TopKRouter

    from replay_patch.matrix import tiny

    before = TopKRouter.routing
    _patched()
    config = tiny.moe_config(**LOSS)
    config.enable_routing_replay = True
    try:
        _call(tiny.moe_layer(config).train().router)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "replaced" if TopKRouter.routing is not before else "as it was"


def names() -> Any:
    """Record and replay by verl's names, with TopKRouter as Megatron has it."""
    from megatron.core.transformer.moe.router import TopKRouter

    methods = ("__init__", "routing", "forward")
    before = [vars(TopKRouter).get(name) for name in methods]
    replay, action = _patched()
    routers = [_router(number) for number in (1, 2)]
    replay.set_global_router_replay_action(action.RECORD)
    maps = [_call(router) for router in routers]
    found = {"recorded": _maps_are(replay.get_recorded_data(), maps)}
    replay.clear_global_indices()
    given = [_ids(1), _ids(2)]
    replay.set_replay_data(given)
    for name in ("REPLAY_FORWARD", "REPLAY_BACKWARD"):
        replay.set_global_router_replay_action(getattr(action, name))
        found[name] = _maps_are(given, [_call(router) for router in routers])
    replay.clear_global_indices()
    replay.clear_global_router_replay_action()
    found["listed"] = len(replay.router_instances)
    found["unchanged"] = before == [vars(TopKRouter).get(name) for name in methods]
    return found


def waits_for_the_device() -> Any:
    """How often one MoE layer reads a value off the device: native, and replaying."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from replay_patch.matrix import tiny

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    replay, action = _patched()
    config = tiny.moe_config(moe_token_dispatcher_type="alltoall")
    config.enable_routing_replay = True
    layer = tiny.moe_layer(config).train()
    hidden = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for replaying in (False, True):
        if replaying:
            replay.router_instances[-1].set_target_indices(_ids(1))
            replay.set_global_router_replay_action(action.REPLAY_FORWARD)
        with Reads() as reads:
            layer(hidden)
        found.append(reads.count)
    replay.clear_global_router_replay_action()
    replay.clear_global_indices()
    return found


def masked_rows() -> Any:
    """verl 0.9's replay_mask, on every release: rows that are to route natively."""
    import torch

    _, action = _patched()
    router = _router()
    native = _call(router)
    ids, mask = _ids(1), torch.arange(12) % 3 > 0
    wanted = torch.zeros(12, 4, dtype=torch.bool).scatter(1, ids, True)
    ids[~mask] = -1
    router.router_replay.set_target_indices(ids, replay_mask=mask)
    found = []
    for name in ("REPLAY_FORWARD", "REPLAY_BACKWARD"):
        router.router_replay.set_router_replay_action(getattr(action, name))
        maps = _call(router)
        found += [torch.equal(maps[mask], wanted[mask]), torch.equal(maps[~mask], native[~mask])]
    return found


def helpers_of_a_stage() -> Any:
    """Dense layers in front, an MTP block behind: which routers the helpers find, set and merge."""
    import torch
    from verl.utils.megatron import router_replay_utils as utils

    from replay_patch.matrix import tiny

    replay, _ = _patched()
    options = {"enable_routing_replay": True, "num_layers": 4, "moe_layer_freq": [0, 0, 1, 1]}
    config = tiny.moe_config(mtp_num_layers=1, **options)
    model = tiny.gpt_model(config)
    ask = utils.RouterReplayHelper.get_micro_batch_router_list
    found: dict[str, Any] = {"one model": [(e.layer_number, e.mtp_depth) for e in ask(config)]}
    found["listed"] = len(replay.router_instances)
    rows = torch.tensor([[0, 1], [1, 2], [2, 3]])
    for layers in ([1, 2, 3, 4], [3, 4]):
        routes = torch.stack([(rows + layer) % 4 for layer in layers], dim=1)[None]
        utils.set_router_replay_data(routes, torch.ones(1, 3, dtype=torch.bool), config)
        got = [(e.layer_number, e.target_topk_idx[:3]) for e in ask(config)]
        expected = [(rows + number) % 4 for number, _ in got]
        found[f"{len(layers)} layers"] = [
            torch.equal(e, g[1]) for e, g in zip(expected, got, strict=True)
        ]
    for entry in ask(config):
        entry.recorded_topk_idx = (rows + entry.layer_number + 1) % 4
    merged: list[Any] = []
    ids, mask = torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
    utils.merge_router_topk_indices(mask, ids, merged, config)
    expected = torch.stack([(rows + number + 1) % 4 for number in (3, 4)], dim=1)
    found["merged"] = torch.equal(merged[0][0].long(), expected)
    off = tiny.moe_config(num_layers=6)
    found["of a model without replay"] = len(ask(off))
    other = tiny.gpt_model(config)
    found["two models"] = _asked(lambda: len(ask(config)))
    del model, other
    return found


def _patched() -> Any:
    from verl.utils.megatron import router_replay_patch

    router_replay_patch.apply_router_replay_patch()
    return router_replay_patch.RouterReplay, router_replay_patch.RouterReplayAction


def _router(number: int = 1) -> Any:
    from replay_patch.matrix import tiny

    return tiny.router(tiny.moe_config(enable_routing_replay=True, **LOSS), number).train()


def _call(router: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    probs, routing_map = router(torch.randn(6, 2, 16, generator=generator, requires_grad=True))
    probs.sum().backward()
    return routing_map


def _ids(seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.rand(12, 4, generator=generator).argsort(1)[:, :2].contiguous()


def _maps_are(given: Any, maps: Any) -> list[bool]:
    import torch

    made = [torch.zeros(12, 4, dtype=torch.bool).scatter(1, ids, True) for ids in given]
    return [torch.equal(*pair) for pair in zip(made, maps, strict=True)]


# --- the passes of a training step -------------------------------------------------------------


def r2() -> Any:
    """Recorded in the old-log-prob pass; used in the update, with other weights and recompute."""
    import torch

    made = _made("R2", override=RECOMPUTE)
    other = Engine(forward_only=True, num_hidden_layers=LAYERS)
    before = _native(other)
    data = batch()
    recorded = _watch(made, lambda: made.log_probs(data))
    held = data.batch["routed_experts"]
    rows = list(held.unbind()) if held.is_nested else real_rows(held)
    perturb(made)
    native, between = _native(made), _native(other, data)
    used = _watch(made, lambda: made.update(data, mini_batch_size=2))
    return {
        "the batch has what the routers did": _all(
            recorded, lambda row, layer: map_of(rows[row][:, layer])
        ),
        "without replay they would differ": _differ(native, recorded),
        "the update uses it": _all(used, lambda row, layer: recorded[row][layer][0]),
        "calls in the update": _calls(used),
        "another model is as before": all(
            torch.equal(a[0], b[0])
            for x, y in zip(before, between, strict=True)
            for a, b in zip(x, y, strict=True)
        ),
    }


def _captured() -> tuple[Any, list[Any]]:
    """Routes as verl puts them into a batch, and the rows that hold one for each trajectory.

    Zeros where nothing was captured: each last token, one in the middle, two prompt tokens. With
    the plugin -1 in one trajectory, as its rollout patch has it.
    """
    import torch

    from replay_patch import status

    routes = verl_engine.other_routes()
    held = [torch.ones(len(rows), dtype=torch.bool) for rows in real_rows(routes)]
    for captured in held:
        captured[-1] = False
    held[1][4], held[2][:2] = False, False
    for number, (rows, captured) in enumerate(zip(real_rows(routes), held, strict=True)):
        rows[~captured] = -1 if number == 1 and status().enabled else 0
    return routes, held


def _is_r3(maps: Any, routes: Any, held: list[Any], native: Any) -> dict[str, bool]:
    """Captured rows are replayed; others have K experts, in the first layer the native ones (later
    layers have other inputs), and in all calls the same."""
    rows = real_rows(routes)

    def each(rule: Callable[[int, int, Any], Any]) -> bool:
        return all(
            bool(rule(row, layer, found))
            for row, layers in enumerate(maps)
            for layer, calls in enumerate(layers)
            for found in calls
        )

    return {
        "captured rows": each(
            lambda row, layer, found: (
                found[held[row]] == map_of(rows[row][:, layer])[held[row]]
            ).all()
        ),
        "the others have K experts": each(
            lambda row, layer, found: (found.sum(1) == verl_engine.TOPK).all()
        ),
        "the others are native": each(
            lambda row, layer, found: (
                layer or (found[~held[row]] == native[row][0][0][~held[row]]).all()
            )
        ),
        "all calls agree": each(lambda row, layer, found: (found == maps[row][layer][0]).all()),
    }


def r3() -> Any:
    """The rollout's routes in both passes."""
    made = _made("R3", override=RECOMPUTE)
    routes, held = _captured()
    native = _native(made)
    data = batch(routes)
    first = _watch(made, lambda: made.log_probs(data))
    kept = bool((data.batch["routed_experts"] == routes).all())
    second = _watch(made, lambda: made.update(data, mini_batch_size=2))
    return {
        "log probs": _is_r3(first, routes, held, native),
        "update": _is_r3(second, routes, held, native),
        "calls": [_calls(first), _calls(second)],
        "the batch keeps the rollout's": kept,
    }


def r3_beside_another() -> Any:
    """A second model with replay on, made later."""
    made, second = _made("R3"), _made("R3")
    routes, held = _captured()
    found = {}
    for name, one in (("first", made), ("second", second)):
        native = _native(one)
        maps = _watch(one, lambda one=one: one.log_probs(batch(routes)))
        found[name] = _is_r3(maps, routes, held, native)
    return found


def ranks(**parallel: int) -> Any:
    """R3 and R2 on two ranks, each with its own rows (sequence parallelism) or layers."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    found: dict[str, Any] = {}
    made = Engine("R3", parallel=parallel)
    model_parallel_cuda_manual_seed(7)
    routes, held = _captured()
    native, data = _native(made), batch(routes)
    passes = {
        "log probs": lambda: made.log_probs(data),
        "update": lambda: made.update(data, mini_batch_size=4),
    }
    for name, run in passes.items():
        found[name] = _is_r3(_watch(made, run), routes, held, native)
    made = Engine("R2", parallel=parallel)
    after: list[Any] = []
    recorded = _watch(made, lambda: after.append(made.log_probs(batch())))
    perturb(made)
    native = _native(made)
    used = _watch(made, lambda: made.update(after[0], mini_batch_size=4))
    layers = [layer for layer in range(LAYERS) if recorded[0][layer]]
    found["layers"] = layers
    found["the update uses what was recorded"] = _all(
        used, lambda row, layer: recorded[row][layer][0]
    )
    found["without replay it would differ"] = all(
        not torch.equal(native[row][layer][0], recorded[row][layer][0])
        for row in range(len(recorded))
        for layer in layers
    )
    return found


def r2_with_a_decoder_built_twice() -> Any:
    """As in Qwen3-VL: the first one and its routers are still there, and do not run."""
    from unittest.mock import patch

    from mbridge.core import llm_bridge

    class Twice(llm_bridge.GPTModel):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, transformer_layer_spec: Any, **kwargs: Any) -> None:
            super().__init__(config, transformer_layer_spec, **kwargs)
            self.thrown_away = [self.decoder]
            stage = {"pre_process": self.pre_process, "post_process": self.post_process}
            self.decoder = type(self.decoder)(config, transformer_layer_spec, **stage)

    with patch.object(llm_bridge, "GPTModel", Twice):
        return r2()


def after_an_exception() -> Any:
    """A pass that dies in its second microbatch, and what the next ones meet."""
    made = _made("R2", override=RECOMPUTE)
    found = {}
    with _dying(made, 2):
        found["recording"] = _asked(made.log_probs, batch())
    first = _watch(made, lambda: made.log_probs(batch()))
    data = batch()
    made.log_probs(data)
    perturb(made)
    with _dying(made, 2):
        found["update"] = _asked(lambda: made.update(data, mini_batch_size=4))
    used = _watch(made, lambda: made.update(data, mini_batch_size=4))
    return found | {"then": _all(used, lambda row, layer: first[row][layer][0])}


def _dying(made: Any, call: int) -> Any:
    """While in the block, this call of the output layer raises."""
    from unittest.mock import patch

    from verl.utils.megatron_utils import unwrap_model

    [model] = unwrap_model(made.module)
    calls = iter(range(1, 100))
    forward = model.output_layer.forward

    def dying(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise MemoryError("no memory")
        return forward(*args, **kwargs)

    return patch.object(model.output_layer, "forward", dying)


def r2_with_many_experts() -> Any:
    """300 experts: more than a byte holds."""
    verl_engine.EXPERTS = 300
    try:
        return r2()
    finally:
        verl_engine.EXPERTS = 8


def r2_padded() -> Any:
    """bshd: two sequences of one length in a microbatch."""
    usual = verl_engine.PROMPTS, verl_engine.RESPONSES
    verl_engine.PROMPTS, verl_engine.RESPONSES = (3, 4, 1, 2), (3, 2, 5, 4)
    try:
        made = Engine("R2")
        made.worker.engine.engine_config.use_remove_padding = False
        import torch

        maps: list[Any] = []
        routers = [m for m in made.module[0].modules() if type(m).__name__ == "TopKRouter"]
        for router in routers:
            router.register_forward_hook(lambda module, args, output: maps.append(output[1]))
        data = batch()
        made.log_probs(data)
        [rows, *_] = data.batch["routed_experts"].unbind()
        return {"first sequence": torch.equal(maps[0][::2], map_of(rows[:, 0]))}
    finally:
        verl_engine.PROMPTS, verl_engine.RESPONSES = usual


def r2_without_recording() -> Any:
    """What bypass_mode comes to: an update without an old-log-prob pass before."""
    return _asked(_made("R2").update, batch())


def r2_with_the_rollouts() -> Any:
    """R2, and the rollout's routes are in the batch."""
    made = Engine("R2")
    routes, held = _captured()
    data = batch(routes)
    maps = _watch(made, lambda: made.log_probs(data))
    return {"captured rows": _is_r3(maps, routes, held, maps)["captured rows"]}


def one_expert() -> Any:
    """K = 1: rows of -1 are native; one of zeros is a route to expert 0, as far as ids can say."""
    from unittest.mock import patch

    import torch
    from mbridge.core import llm_bridge

    build = llm_bridge.LLMBridge._build_base_config

    def pre_softmax(self: Any, **options: Any) -> Any:  # Megatron wants it with one expert
        return build(self, **{**options, "moe_router_pre_softmax": True})

    verl_engine.TOPK = 1
    try:
        with patch.object(llm_bridge.LLMBridge, "_build_base_config", pre_softmax):
            made = Engine("R3")
        routes, held = _captured()
        native = _native(made)
        maps = _watch(made, lambda: made.log_probs(batch(routes)))
    finally:
        verl_engine.TOPK = 2
    rows = real_rows(routes)
    return {
        "captured rows": all(
            torch.equal(calls[0][held[row]], map_of(rows[row][:, layer])[held[row]])
            for row, layers in enumerate(maps)
            for layer, calls in enumerate(layers)
        ),
        "a row of -1 is native": torch.equal(maps[1][0][0][4], native[1][0][0][4]),
        "a row of zeros": [maps[2][layer][0][0].nonzero().tolist() for layer in (0, 1)],
    }


# --- settings ----------------------------------------------------------------------------------


def settings() -> Any:
    """What verl says of its own default settings with R2 or R3, and with what R2 cannot have."""
    return {
        "R3": _asked(_validate, "R3", {"enable_rollout_routing_replay": True}, {}),
        "R2": _asked(_validate, "R2", {}, {}),
        "R2, bypass": _asked(_validate, "R2", {}, {"bypass_mode": True}),
        "R2, rollout": _asked(_validate, "R2", {"enable_rollout_routing_replay": True}, {}),
    }


def _validate(mode: str, rollout: dict[str, Any], correction: dict[str, Any]) -> str:
    from pathlib import Path

    import verl
    from omegaconf import OmegaConf, open_dict
    from verl.utils import config as checks

    folder = Path(verl.__file__).parent / "trainer" / "config"
    config = OmegaConf.load(folder / "_generated_ppo_megatron_trainer.yaml")
    actor = config.actor_rollout_ref.actor
    with open_dict(config):
        place = actor.megatron if _replays() else actor
        place.router_replay = {**(place.get("router_replay") or {}), "mode": mode}
        actor.ppo_micro_batch_size_per_gpu = 1
        for part in (config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref):
            part.log_prob_micro_batch_size_per_gpu = 1
        config.actor_rollout_ref.rollout.update(rollout)
        config.algorithm.rollout_correction = {
            **(config.algorithm.get("rollout_correction") or {}),
            **correction,
        }
    checks.validate_config(config, use_reference_policy=False, use_critic=False)
    return "fine"
