"""Without this patch Megatron's helpers that say which layers a pipeline stage holds answer for the
current stage only, or wrongly."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from replay_patch.megatron.layer_placement import placement
from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.rebinding import Instead, with_globals
from replay_patch.refusals import installed_megatron

_LAYER = "megatron.core.transformer.transformer_layer"
_BLOCK = "megatron.core.transformer.transformer_block"
_HELPERS = {"get_transformer_layer_offset": _LAYER, "get_num_layers_to_build": _BLOCK}
_LAYOUT = "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout"
_ARGUMENTS = ("vp_stage", "pp_rank")


def _needed() -> tuple[bool, str]:
    lacking = [
        f"{name} takes no {argument}"
        for name, module in _HELPERS.items()
        for argument in _ARGUMENTS
        if argument not in probe.parameters(f"{module}:{name}")
    ]
    if not lacking and not _asks_layout_of_other_stages():
        lacking = ["get_num_layers_to_build takes pp_rank, and does not tell a pipeline layout"]
    return bool(lacking), "; ".join(lacking) or "both helpers answer for any stage"


def _asks_layout_of_other_stages() -> bool:
    """Whether a pipeline layout is asked about the stage in question; MindSpeed's wrapper, whatever
    is below it, asks about the stage of its process."""

    class Layout:
        def get_num_layers_to_build(self, pp_rank: int = -1, **others: Any) -> int:
            return {0: 1, 1: 2}.get(pp_rank, 0)

    helper = probe.find(f"{_BLOCK}:get_num_layers_to_build")
    config = types.SimpleNamespace(
        pipeline_model_parallel_size=2, pipeline_model_parallel_layout=Layout()
    )
    try:
        return [helper(config, pp_rank=rank) for rank in range(2)] == [1, 2]
    except Exception:  # noqa: BLE001 - it asks for process groups, or for more of the config
        return False


def _apply(transaction: Transaction) -> None:
    for name, module in _HELPERS.items():
        original = probe.find(f"{module}:{name}")
        if original is None:
            raise LookupError(f"{module} has no {name}: {installed_megatron()} is not supported")
        with_globals(original, {})  # raises here, and not when it is asked, if it cannot be done
        # As a global name: what a function imports for itself cannot be bound differently.
        asks = "parallel_state" in probe.globals_used(original)
        if not asks and "pp_rank" not in probe.parameters(f"{module}:{name}"):
            raise LookupError(f"{module}.{name} does not say how it knows its stage")
        listed = name == "get_transformer_layer_offset" and _counts_by_list()
        helper = _helper_for_any_stage(original, _overlaps(original), listed)
        transaction.set_everywhere(name, original, helper)


def _counts_by_list() -> bool:
    """Whether MindSpeed's list of lists, [pp][vp], says how many layers a stage has. Its unaligned
    pipeline replaces this helper and not the one of the offsets: layer numbers then overlap."""
    count = probe.find(f"{_BLOCK}:get_num_layers_to_build")
    fields = {
        "num_layers": 4,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_num_transformer_layers": [[3], [1]],
        "num_layers_in_last_pipeline_stage": None,
    }
    return [_answer(count, fields, pp_rank=rank) for rank in range(2)] == [3, 1]


def _overlaps(original: Callable[..., int]) -> bool:
    """Whether ranks 0 and 1 of 3 begin at one layer, with 3, 3 and 1 layers per virtual stage."""
    fields = {
        "num_layers": 14,
        "pipeline_model_parallel_size": 3,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers_in_last_pipeline_stage": 2,
    }
    return _answer(original, fields, vp_stage=0, pp_rank=1) == 0


def _answer(original: Callable[..., int], fields: dict[str, Any], **stage: int) -> int | None:
    """A helper's answer for a stage and a config of these fields; None if it needs other ones."""
    config = types.SimpleNamespace(
        num_layers_in_first_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_model_parallel_layout=None,
        **fields,
    )
    try:
        return _helper_for_any_stage(original)(config, **stage)
    except Exception:  # noqa: BLE001 - whatever it wants: it is none of the helpers meant
        return None


def _helper_for_any_stage(
    original: Callable[..., int], overlaps: bool = False, listed: bool = False
) -> Callable[..., int]:
    signature = inspect.signature(original)
    takes = frozenset(signature.parameters)
    by_config = "vp_stage" in takes  # before 0.13 global state says if there are virtual stages

    @functools.wraps(original, updated=())
    def helper(
        config: Any,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        passed = {"vp_stage": vp_stage, "pp_rank": pp_rank}
        known = {k: v for k, v in passed.items() if k in takes} | kwargs
        if listed and getattr(config, "pipeline_num_transformer_layers", None):
            stage = _Stage(config, vp_stage, pp_rank)
            virtual = stage.get_virtual_pipeline_model_parallel_rank() or 0
            return placement(config).of(stage.rank, virtual)[0]
        if pp_rank is None and (vp_stage is None or "vp_stage" in takes):
            answer = original(config, *args, **known)
            return answer + _left_out(config, by_config) if overlaps else answer
        stage = _Stage(config, vp_stage, pp_rank)
        for_stage: Callable[..., int] = with_globals(original, {"parallel_state": stage})
        answer = for_stage(_config_for(config, stage), *args, **known)
        return answer + _left_out(config, by_config, stage) if overlaps else answer

    new = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in _ARGUMENTS
        if name not in takes
    ]
    parameters = [*signature.parameters.values(), *new]
    helper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return helper


def _left_out(config: Any, by_config: bool, stage: Any = None) -> int:
    """What the offsets of 0.12 and 0.13 lack with virtual stages, if only the last rank has a count
    of its own: they leave out the layers of one more rank, as if the first had one, too."""
    from megatron.core import parallel_state

    state = parallel_state if stage is None else stage
    virtual = config.virtual_pipeline_model_parallel_size
    if not by_config:
        virtual = state.get_virtual_pipeline_model_parallel_world_size()
    first = config.num_layers_in_first_pipeline_stage
    last = config.num_layers_in_last_pipeline_stage
    others = config.pipeline_model_parallel_size - 1
    listed = getattr(config, "pipeline_model_parallel_layout", None)
    if virtual is None or first is not None or last is None or not others or listed:
        return 0
    if state.get_pipeline_model_parallel_rank() == 0:
        return 0
    return int((config.num_layers - last) // virtual // others)


class _Stage:
    """`parallel_state` as a process of that stage would see it, with or without process groups."""

    def __init__(self, config: Any, vp_stage: int | None, pp_rank: int | None) -> None:
        from megatron.core import parallel_state

        self.real, self.config = parallel_state, config
        if pp_rank is None:
            pp_rank = int(parallel_state.get_pipeline_model_parallel_rank())
        self.rank = pp_rank
        self.vp_stage = vp_stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return int(self.config.pipeline_model_parallel_size)

    def get_virtual_pipeline_model_parallel_rank(self) -> int | None:
        return self._vp_stage(self.vp_stage)

    def get_virtual_pipeline_model_parallel_world_size(self) -> int | None:
        size: int | None = self.config.virtual_pipeline_model_parallel_size
        return size

    def is_inside_encoder(self, rank: int | None = None) -> bool:
        start = self.real.get_pipeline_model_parallel_decoder_start()
        return (self.rank if rank is None else rank) < (start or 0)

    # Before 0.13 these count virtual stages unless told otherwise, later only if told so.
    def is_pipeline_first_stage(
        self, ignore_virtual: bool = False, vp_stage: int | None = None
    ) -> bool:
        return self.rank == 0 and (ignore_virtual or not self._vp_stage(vp_stage))

    def is_pipeline_last_stage(
        self, ignore_virtual: bool = False, vp_stage: int | None = None
    ) -> bool:
        last = (self.get_virtual_pipeline_model_parallel_world_size() or 1) - 1
        return self.rank == self.get_pipeline_model_parallel_world_size() - 1 and (
            ignore_virtual or (self._vp_stage(vp_stage) or 0) == last
        )

    def _vp_stage(self, asked: int | None) -> int | None:
        if self.get_virtual_pipeline_model_parallel_world_size() is None:
            return None
        stage = self.vp_stage if asked is None else asked
        if stage is None:
            stage = self.real.get_virtual_pipeline_model_parallel_rank()
        if stage is None:
            raise ValueError("this config has virtual pipeline stages: say which (vp_stage=...)")
        return int(stage)


def _config_for(config: Any, stage: _Stage) -> Any:
    """The config; a pipeline layout in it answers for the stage."""
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if not layout:
        return config
    return Instead(config, pipeline_model_parallel_layout=_LayoutFor(layout, stage))


class _LayoutFor:
    def __init__(self, layout: Any, stage: _Stage) -> None:
        self._layout, self._stage = layout, stage

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layout, name)
        function = getattr(value, "__func__", None)
        if function is None:
            return value
        for_stage = with_globals(function, {"parallel_state": self._stage})
        return functools.partial(for_stage, self._layout)


PATCH = Patch(
    name="layer_helpers",
    library="megatron",
    targets=tuple(f"{module}:{name}" for name, module in _HELPERS.items()),
    requires=_BLOCK,
    relies_on=(f"{_LAYOUT}.get_num_layers_to_build", f"{_LAYOUT}.get_layer_offset"),
    checks=("layer-map", "npu-unaligned"),
    why=(
        "Trainers ask which layers a stage holds. 0.12 answers for the current stage only, 0.13 "
        "and 0.14 take `vp_stage` but no `pp_rank`: callers written for 0.15 get a TypeError. "
        "Later releases take both, but ask a pipeline layout about their own rank. With virtual "
        "stages and only `num_layers_in_last_pipeline_stage`, the offsets of 0.12 and 0.13 "
        "overlap: two layers of a model have the same number, and others are missing. MindSpeed "
        "replaces one or both by functions that take the config and nothing else."
    ),
    how=(
        "A wrapper that takes both, set wherever the helper is bound. Asked about another stage, "
        "the release's own code runs with `parallel_state` answering for that stage; no process "
        "group is needed then. Otherwise it is the original. Where a probe finds overlapping "
        "offsets they are corrected, also for the model that is built, as in Megatron 0.14 (its "
        "pull request 1583). With MindSpeed's unaligned pipeline the offsets follow its list."
    ),
    upstream="https://github.com/volcengine/verl/pull/5298",
    remove_when="every supported release answers for any stage",
    needed=_needed,
    apply=_apply,
    still_works=_asks_layout_of_other_stages,
)
