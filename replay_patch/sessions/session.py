"""What recording and replaying have in common: routers that belong to a session for a while.

A session gives every decoder router of every chunk a `SessionReplay` in the place of its own replay
object, or of none, and puts that back on leaving, also by an exception.
"""

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import torch

from replay_patch.errors import RouteError
from replay_patch.megatron import parallel_ranks, routers
from replay_patch.megatron.ascend import refuse_features
from replay_patch.patching import activation
from replay_patch.refusals import installed_megatron
from replay_patch.replay import mask_tracker, recompute
from replay_patch.replay.router_call import check_capture
from replay_patch.sessions.microbatch import Microbatch
from replay_patch.sessions.session_replay import SessionReplay, check_router


@dataclass
class Stage:
    """One chunk of the model in a session.

    Attributes:
        layers: the numbers of its MoE layers.
        takes_mask: whether its forward takes `padding_mask`.
        mask_takers: models in it for which the session keeps it instead (before 0.16).
        seen: for each load, the places of the routers that have used it.
    """

    chunk: Any
    config: Any
    device: torch.device
    layers: tuple[int, ...]
    routers: tuple[Any, ...]
    tracker: recompute.Tracker
    takes_mask: bool
    mask_takers: list[Any]
    seen: list[set[int]] = field(default_factory=list)


class Session:
    """The context manager behind `recording` and `replaying`; used once."""

    name = "a session"
    report: Any = None

    def __init__(self, model: Any) -> None:
        activation.require_replay(f"{self.name}()")
        several = isinstance(model, (list, tuple, torch.nn.ModuleList))
        self._chunks = [unwrap(chunk) for chunk in (model if several else [model])]
        for chunk in self._chunks:
            if not (isinstance(chunk, torch.nn.Module) and hasattr(chunk, "config")):
                self._refuse(
                    f"the model is a {type(chunk).__name__} without a config",
                    "a Megatron model, or the list of its virtual pipeline chunks",
                )
        self._stages: list[Stage] = []
        self._thread: int | None = None
        self._state = "not entered"

    def __enter__(self) -> Any:
        if self._state != "not entered":
            self._refuse(f"entered again ({self._state})", "a new one for each schedule")
        if not self._chunks or len({id(chunk) for chunk in self._chunks}) < len(self._chunks):
            self._refuse(
                f"the model is {len(self._chunks)} chunks, some of them the same", "each once"
            )
        try:
            for index, chunk in enumerate(self._chunks):
                self._stages.append(self._enter(chunk, index))
        except BaseException:
            self._leave()
            raise
        self._state = "entered"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._check_complete()
                self._finish()
        finally:
            self._leave()

    # --- for recording and replaying ---

    def _load(self, chunk: Any, layout: Any) -> Stage:
        """The stage of the chunk that a load() names.

        Raises:
            RouteError: outside of the block, in another thread, or not a chunk of this model.
        """
        check_capture()
        if self._state != "entered":
            self._refuse(f"load() in a session that is {self._state}", "load() in its with-block")
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            self._refuse("load() in another thread than the first one", "one thread per session")
        self._thread = thread
        inner = unwrap(chunk)
        for stage in self._stages:
            if stage.chunk is inner:
                parallel_ranks.check_rank(layout, stage.config)
                return stage
        raise self._error(
            f"load() for a {type(inner).__name__} that is no chunk of this session's model",
            "the chunk that forward_step is called with",
        )

    def _loaded(self, stage: Stage, microbatch: Microbatch, layout: Any) -> dict[str, Any]:
        """Hand the microbatch over; returns the keyword arguments of the model call."""
        entry = stage.tracker.load(microbatch)
        stage.seen.append(entry.seen)
        if not stage.takes_mask:
            if stage.mask_takers:
                mask_tracker.hold(stage.mask_takers, layout.padding_mask)
            else:
                why = "takes no padding_mask (is the patch padding_mask in place?)"
                mask_tracker.warn_of_padding(stage.chunk, layout.padding_mask, why)
            return {}
        if getattr(stage.config, "overlap_moe_expert_parallel_comm", False):  # from 0.16 on
            why = "loses padding_mask in Megatron's combined 1F1B"
            mask_tracker.warn_of_padding(stage.chunk, layout.padding_mask, why)
        where = stage.chunk, stage.config, stage.device
        return {"padding_mask": parallel_ranks.mask_of_stage(*where, layout)}

    def _finish(self) -> None:
        """At the end of a block without an exception, before routers are native again."""

    def _drop(self) -> None:
        """Drop every reference that leaving drops."""

    def _refuse(self, found: str, expected: str) -> NoReturn:
        raise self._error(found, expected)

    def _error(self, found: str, expected: str) -> RouteError:
        return RouteError(f"{installed_megatron()}, {self.name}(): {found}; expected {expected}")

    # --- entering and leaving ---

    def _enter(self, chunk: Any, index: int) -> Stage:
        config = chunk.config
        refuse_features(config, chunk)
        found = routers.decoder_routers(chunk)
        self._check_layers(chunk, index, tuple(found))
        for router in found.values():
            check_router(router)
        recomputes = getattr(config, "recompute_granularity", None) is not None
        tracker = recompute.Tracker(chunk, recomputes)
        takes_mask = parallel_ranks.takes_mask(chunk)
        device = next((p.device for p in chunk.parameters()), torch.device("cpu"))
        stage = Stage(
            chunk,
            config,
            device,
            tuple(found),
            tuple(found.values()),
            tracker,
            takes_mask,
            [] if takes_mask else mask_tracker.takers(chunk),
        )
        for place, router in enumerate(stage.routers):
            router.router_replay = SessionReplay(router, place, tracker, self.report)
            if router.router_replay.original is not None:
                router.router_replay.original.in_session = True
        return stage

    def _check_layers(self, chunk: Any, index: int, found: tuple[int, ...]) -> None:
        """The layers that are there are those that the config says are there."""
        config = chunk.config
        if not getattr(config, "num_moe_experts", None):
            self._refuse("the model has no experts (num_moe_experts)", "a mixture of experts")
        expected = [
            routers.local_layers(config, pp_rank=parallel_ranks.pp_rank(), vp_stage=stage)
            for stage in parallel_ranks.vp_stages(chunk, config, index, len(self._chunks))
        ]
        if found not in expected:
            self._refuse(
                f"chunk {index} has routers in the layers {found}",
                f"{' or '.join(map(str, expected))}, as its config says (pipeline rank "
                f"{parallel_ranks.pp_rank()}); expert ids are addressed by layer number",
            )

    def _check_complete(self) -> None:
        """Every router of a chunk has used every microbatch that was loaded for the chunk."""
        for index, stage in enumerate(self._stages):
            for number, seen in enumerate(stage.seen):
                missing = [n for place, n in enumerate(stage.layers) if place not in seen]
                if missing:
                    self._refuse(
                        f"microbatch {number} of chunk {index} had no first forward in the layers "
                        f"{missing}",
                        "one forward of every router for every load()",
                    )
        loads = [len(stage.seen) for stage in self._stages]
        if len(set(loads)) > 1:
            self._refuse(
                f"the chunks had {loads} loads",
                "as many for each: the k-th load of every chunk is the same microbatch",
            )

    def _leave(self) -> None:
        """Native routing again, and no reference left; also half-way through entering."""
        for stage in self._stages:
            for router in stage.routers:
                bound = router.router_replay
                if not isinstance(bound, SessionReplay) or bound.tracker is not stage.tracker:
                    continue
                if bound.was_own:
                    router.router_replay = bound.original
                else:  # the class has None
                    del router.router_replay
                if bound.original is not None:
                    bound.original.in_session = False
            stage.tracker.close()
            mask_tracker.hold(stage.mask_takers, None)
        self._stages, self._chunks = [], []
        self._drop()
        self._state = "over"


def unwrap(model: Any) -> Any:
    """The model inside of DDP, Float16Module and their like."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model
