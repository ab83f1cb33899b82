"""SkyRL's schedules replay each microbatch in the chunk that runs it, and leave nothing behind."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.patches.skyrl.skyrl_replay_setup import check_form, microbatch
from replay_patch.patching import probe
from replay_patch.patching.patch import Patch
from replay_patch.patching.transaction import Transaction

_MODULE = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
_WRAPPER = f"{_MODULE}:MegatronModelWrapper"
_SCHEDULES = ("forward", "forward_backward_mini_batch")
_FIELD = "rollout_expert_indices"

_log = logging.getLogger(__name__)


def _needed() -> tuple[bool, str]:
    names = {
        name
        for schedule in _SCHEDULES
        for code in inspect.unwrap(probe.find(f"{_WRAPPER}.{schedule}")).__code__.co_consts
        for name in getattr(code, "co_names", ())
    }
    if "setup_per_microbatch_replay_forward" not in names:
        return False, "its forward steps set up no replay"
    check_form()
    return True, "its forward steps set up replay for all chunks, and only where there are routes"


def _apply(transaction: Transaction) -> None:
    for name in _SCHEDULES:
        transaction.wrap(probe.find(_WRAPPER), name, _replaying)


def _replaying(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch import refusals, replaying
    from replay_patch.megatron import routers
    from replay_patch.megatron.config import replay_enabled
    from replay_patch.megatron.models import unwrap

    def schedule(self: Any, micro_batches: list[Any], *args: Any, **kwargs: Any) -> Any:
        routes = [batch.get(_FIELD) for batch in micro_batches]
        if not any(given is not None for given in routes):
            if replay_enabled(unwrap(self.actor_module[0]).config):
                refusals.warn_once(
                    "SkyRL, %s: replay is on in the config, and no microbatch has %s: all of "
                    "them route natively",
                    original.__name__,
                    _FIELD,
                )
            return original(self, micro_batches, *args, **kwargs)

        def begin(numbers: list[int]) -> Callable[..., Any]:
            def before(chunk: Any, given: Any, named: dict[str, Any]) -> Any:
                number = len(numbers)
                if number == len(routes):
                    raise RouteError(
                        f"SkyRL, {original.__name__}: forward {number} of a chunk in a schedule "
                        f"of {len(routes)} microbatches; expected one for each"
                    )
                numbers.append(number)
                batch, inner = micro_batches[number], unwrap(chunk)
                lengths = batch.get("sub_seq_lengths")
                found = microbatch(
                    routes[number],
                    batch["attention_mask"],
                    inner.config,
                    self.remove_microbatch_padding,
                    tuple(routers.decoder_routers(inner)),
                    None if lengths is None else [each.tolist() for each in lengths],
                )
                return given, {**session.load(chunk, *found), **named}

            return before

        # SkyRL's own steps then leave the routers alone, and with virtual stages no chunk takes
        # the routes away from the next.
        rest = [{**batch, _FIELD: None} for batch in micro_batches]
        with replaying(self.actor_module, overlap_every=0) as session:  # nobody reads it
            hooks = [
                chunk.register_forward_pre_hook(begin([]), prepend=True, with_kwargs=True)
                for chunk in self.actor_module
            ]
            try:
                done = original(self, rest, *args, **kwargs)
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
        return done

    return schedule


PATCH = Patch(
    name="skyrl_replay_schedule",
    library="skyrl",
    targets=tuple(f"{_WRAPPER}.{name}" for name in _SCHEDULES),
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
    apply=_apply,
)
