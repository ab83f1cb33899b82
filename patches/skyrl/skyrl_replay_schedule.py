"""Without this patch SkyRL's virtual pipeline stages, and its microbatches without routes, replay
what another one has left behind; so does the schedule after one that failed."""

import logging
from collections.abc import Callable
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.patches.skyrl._batches import FIELD, REPLAY_FORWARD, check_form, microbatch
from replay_patch.patching import Patch, probe, wrappers_at

_MODULE = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
_WRAPPER = f"{_MODULE}:MegatronModelWrapper"
_SCHEDULES = ("forward", "forward_backward_mini_batch")
_TARGETS = tuple(f"{_WRAPPER}.{name}" for name in _SCHEDULES)

_log = logging.getLogger(__name__)


def _needed() -> tuple[bool, str]:
    schedules = [*map(probe.find, _TARGETS)]
    if None in schedules:
        raise LookupError(f"MegatronModelWrapper has not both of {', '.join(_SCHEDULES)}")
    if not any(REPLAY_FORWARD in probe.names_used(schedule) for schedule in schedules):
        return False, "its forward steps set up no replay"
    check_form()
    return True, "its forward steps set up replay for all chunks, and only where there are routes"


def _replaying_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch import refusals, replaying
    from replay_patch.megatron import routers
    from replay_patch.megatron.config import replay_enabled
    from replay_patch.megatron.models import unwrap

    def schedule(self: Any, micro_batches: list[Any], *args: Any, **kwargs: Any) -> Any:
        routes = [batch.get(FIELD) for batch in micro_batches]
        if not any(of_batch is not None for of_batch in routes):
            if replay_enabled(unwrap(self.actor_module[0]).config):
                refusals.warn_once(
                    "SkyRL, %s: replay is on in the config, and no microbatch has %s: all of "
                    "them route natively",
                    original.__name__,
                    FIELD,
                )
            return original(self, micro_batches, *args, **kwargs)

        def loading_hook(numbers: list[int]) -> Callable[..., Any]:
            def before_forward(chunk: Any, inputs: Any, named: dict[str, Any]) -> Any:
                number = len(numbers)
                if number == len(routes):
                    raise RouteError(
                        f"SkyRL, {original.__name__}: forward {number} of a chunk in a schedule "
                        f"of {len(routes)} microbatches; expected one for each"
                    )
                numbers.append(number)
                batch, inner = micro_batches[number], unwrap(chunk)
                lengths = batch.get("sub_seq_lengths")
                routes_and_layout = microbatch(
                    routes[number],
                    batch["attention_mask"],
                    inner.config,
                    self.remove_microbatch_padding,
                    tuple(routers.decoder_routers(inner)),
                    None if lengths is None else [each.tolist() for each in lengths],
                )
                return inputs, {**session.load(chunk, *routes_and_layout), **named}

            return before_forward

        # So SkyRL's own steps leave the routers alone, and no chunk takes the next one's routes.
        without_routes = [{**batch, FIELD: None} for batch in micro_batches]
        with replaying(self.actor_module, overlap_every=0) as session:  # nobody reads it
            hooks = [
                chunk.register_forward_pre_hook(loading_hook([]), prepend=True, with_kwargs=True)
                for chunk in self.actor_module
            ]
            try:
                result = original(self, without_routes, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
        report = session.report
        _log.debug(
            "SkyRL, %s: tokens x layers: %d replayed, %d without a route, %d padding",
            original.__name__,
            report.replayed,
            report.holes,
            report.padding,
        )
        return result

    return schedule


PATCH = Patch(
    name="skyrl_replay_schedule",
    library="skyrl",
    targets=_TARGETS,
    modules=(_MODULE,),
    requires="skyrl",
    why=(
        "With virtual stages the first chunk takes the routes out of the batch, and the others "
        "run in the state that it left behind. So do microbatches without routes: they take what "
        "is queued for a recompute. The queue holds the whole schedule, int32, also without "
        "recompute, and what an exception leaves behind goes into the next schedule."
    ),
    how=(
        "Each schedule runs in a `replaying(model)` block, which gets the routes of the k-th "
        "microbatch at the k-th forward of each chunk, and finds those of a recompute by "
        "autograd. The model gets the padding mask, if it takes one. The forward steps are "
        "SkyRL's own, and see batches without routes."
    ),
    upstream="none known for 0.3.0, the release that this was written for",
    remove_when="SkyRL replays by chunk and by schedule itself",
    needed=_needed,
    apply=wrappers_at(dict.fromkeys(_TARGETS, _replaying_schedule)),
)
