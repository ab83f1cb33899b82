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
from replay_patch.megatron import parallel_ranks
from replay_patch.megatron.ascend import refuse_features
from replay_patch.megatron.local_layers import local_layers
from replay_patch.megatron.models import takes_mask, unwrap
from replay_patch.megatron.routers import decoder_routers
from replay_patch.patching import activation
from replay_patch.refusals import installed_megatron
from replay_patch.replay import mask_tracker
from replay_patch.replay.microbatch_tracker import Tracker
from replay_patch.replay.router_checks import check_capture
from replay_patch.sessions.microbatch import Microbatch, check_rank, mask_of_stage
from replay_patch.sessions.report import Report
from replay_patch.sessions.session_replay import SessionReplay, check_router


@dataclass
class Stage:
    """One chunk of the model in a session.

    Attributes:
        layers: the numbers of its MoE layers.
        takes_mask: whether its forward takes `padding_mask`.
        masked_models: models in it for which the session keeps it instead (before 0.16).
        seen: for each load, the indices of the routers that have used it.
    """

    chunk: Any
    config: Any
    device: torch.device
    layers: tuple[int, ...]
    routers: tuple[Any, ...]
    tracker: Tracker
    takes_mask: bool
    masked_models: list[Any]
    seen: list[set[int]] = field(default_factory=list)


class Session:
    """The context manager behind `recording` and `replaying`; used once."""

    name = "a session"
    report: Report | None = None

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
        """The stage of the chunk that a load() names. Raises RouteError outside of the block, in
        another thread, or for what is no chunk of this model; LayoutError as `check_rank`."""
        check_capture()
        if self._state != "entered":
            self._refuse(f"load() in a session that is {self._state}", "load() in its with-block")
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            self._refuse("load() in another thread than the first one", "one thread per session")
        self._thread = thread
        inner = unwrap(chunk)
        stage = next((stage for stage in self._stages if stage.chunk is inner), None)
        if stage is None:
            self._refuse(
                f"load() for a {type(inner).__name__} that is no chunk of this session's model",
                "the chunk that forward_step is called with",
            )
        check_rank(layout, stage.config)
        return stage

    def _loaded(self, stage: Stage, microbatch: Microbatch, layout: Any) -> dict[str, Any]:
        """Hand the microbatch over; returns the keyword arguments of the model call."""
        load = stage.tracker.load(microbatch)
        stage.seen.append(load.seen)
        if not stage.takes_mask:
            if stage.masked_models:
                mask_tracker.set_next_mask(stage.masked_models, layout.padding_mask)
            else:
                why = "takes no padding_mask (is the patch padding_mask in place?)"
                mask_tracker.warn_of_padding(stage.chunk, layout.padding_mask, why)
            return {}
        if getattr(stage.config, "overlap_moe_expert_parallel_comm", False):  # from 0.16 on
            why = "loses padding_mask in Megatron's combined 1F1B"
            mask_tracker.warn_of_padding(stage.chunk, layout.padding_mask, why)
        mask = mask_of_stage(stage.chunk, stage.config, stage.device, layout)
        return {"padding_mask": mask}

    def _finish(self) -> None:
        """Called at the end of a block without an exception, before routers are native again."""

    def _drop(self) -> None:
        """Drop what else keeps tensors alive; called on leaving."""

    def _refuse(self, found: str, expected: str) -> NoReturn:
        raise RouteError(f"{installed_megatron()}, {self.name}(): {found}; expected {expected}")

    # --- entering and leaving ---

    def _enter(self, chunk: Any, index: int) -> Stage:
        config = chunk.config
        refuse_features(config, chunk)
        routers = decoder_routers(chunk)
        self._check_layers(chunk, index, tuple(routers))
        for router in routers.values():
            check_router(router)
        recomputes = getattr(config, "recompute_granularity", None) is not None
        masked_itself = takes_mask(chunk)
        stage = Stage(
            chunk=chunk,
            config=config,
            device=next((p.device for p in chunk.parameters()), torch.device("cpu")),
            layers=tuple(routers),
            routers=tuple(routers.values()),
            tracker=Tracker(chunk, recomputes),
            takes_mask=masked_itself,
            masked_models=[] if masked_itself else mask_tracker.models_with_masks(chunk),
        )
        for layer_index, router in enumerate(stage.routers):
            SessionReplay(router, layer_index, stage.tracker, self.report).enter(router)
        return stage

    def _check_layers(self, chunk: Any, index: int, layers: tuple[int, ...]) -> None:
        """Refuse a chunk with routers in other layers than its config says."""
        config = chunk.config
        if not getattr(config, "num_moe_experts", None):
            self._refuse("the model has no experts (num_moe_experts)", "a mixture of experts")
        expected = [
            local_layers(config, pp_rank=parallel_ranks.pp_rank(), vp_stage=stage)
            for stage in parallel_ranks.vp_stages(chunk, config, index, len(self._chunks))
        ]
        if layers not in expected:
            self._refuse(
                f"chunk {index} has routers in the layers {layers}",
                f"{' or '.join(map(str, expected))}, as its config says (pipeline rank "
                f"{parallel_ranks.pp_rank()}); expert ids are addressed by layer number",
            )

    def _check_complete(self) -> None:
        """Refuse to end before every router of a chunk has used every microbatch loaded for it."""
        for index, stage in enumerate(self._stages):
            for number, seen in enumerate(stage.seen):
                missing = [n for index, n in enumerate(stage.layers) if index not in seen]
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
        """Make routing native again, and keep no reference; also half-way through entering."""
        for stage in self._stages:
            for router in stage.routers:
                replay = router.router_replay
                if isinstance(replay, SessionReplay) and replay.tracker is stage.tracker:
                    replay.leave(router)
            stage.tracker.close()
            mask_tracker.set_next_mask(stage.masked_models, None)
        self._stages, self._chunks = [], []
        self._drop()
        self._state = "over"
