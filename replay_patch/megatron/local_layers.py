"""Which MoE layers a pipeline stage holds: what the config means, and what the helpers say.

The helpers are Megatron's `get_transformer_layer_offset` and `get_num_layers_to_build`, by which a
model is built. Other code may have replaced them by the time that they are asked.
"""

import inspect
import sys
from typing import Any

from replay_patch.errors import LayoutError
from replay_patch.megatron.layer_placement import (
    Placement,
    moe_layers,
    pipeline_size,
    placement,
    virtual_size,
)
from replay_patch.patching.wrappers import module_of


def local_layers(
    config: Any, *, pp_rank: int | None = None, vp_stage: int | None = None
) -> tuple[int, ...]:
    """The MoE layers of the decoder that a pipeline stage holds, as `layer_number` counts: from 1.

    Where the config lists the layers of each stage (`pipeline_model_parallel_layout`, MindSpeed's
    `pipeline_num_transformer_layers`) it is read. Otherwise the layers follow from the config's
    fields, and are compared with what the installed `get_transformer_layer_offset` and
    `get_num_layers_to_build` say, as far as these can be asked: other code may have replaced them.

    Args:
        config: a TransformerConfig.
        pp_rank: the pipeline rank in question; None: this process's, which needs process groups.
        vp_stage: the virtual stage, where the config has some.
    Raises:
        LayoutError: the stage is not said, does not exist, or is not known for sure.
    """
    rank, stage = _stage(config, pp_rank, vp_stage)
    before, count = _layers_of(config, rank, stage)
    held = range(before + 1, before + count + 1)
    return tuple(number for number in moe_layers(config) if number in held)


# --- the stage in question ----------------------------------------------------------------------


def _stage(config: Any, pp_rank: int | None, vp_stage: int | None) -> tuple[int, int]:
    if not hasattr(config, "num_layers"):
        raise LayoutError(f"config is a {type(config).__name__}: expected a TransformerConfig")
    for name, number in (("pp_rank", pp_rank), ("vp_stage", vp_stage)):
        if number is not None and not hasattr(number, "__index__"):
            raise LayoutError(f"{name} is {number!r}: expected an integer, or None")
    ranks, stages = pipeline_size(config), virtual_size(config)
    own = _own_stage(config)
    if pp_rank is None:
        if own is None:
            raise LayoutError(
                "local_layers(config) asks for this process's pipeline rank, and parallel_state "
                f"has none of {ranks}: expected initialize_model_parallel() before, with the sizes "
                "of the config; or say pp_rank=..."
            )
        if vp_stage is None and stages > 1:
            vp_stage = own[1]
        pp_rank = own[0]
    if stages > 1 and vp_stage is None:
        raise LayoutError(
            f"pipeline rank {pp_rank} holds {stages} virtual stages: say which, "
            f"vp_stage=0 ... {stages - 1}"
        )
    vp_stage = vp_stage or 0
    if not (0 <= pp_rank < ranks and 0 <= vp_stage < stages):
        raise LayoutError(
            f"there is no stage pp_rank={pp_rank}, vp_stage={vp_stage}: this config has {ranks} "
            f"pipeline ranks with {stages} virtual stages each"
        )
    return pp_rank, vp_stage


def _own_stage(config: Any) -> tuple[int, int | None] | None:
    """(pp_rank, vp_stage) of this process, if its process groups are those of the config.
    `vp_stage` is None where parallel_state does not say it (from 0.13 on nobody sets it)."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        return None
    try:
        # Not 0 with an encoder on pipeline ranks of its own. (The getter of 0.13 warns each time.)
        start = getattr(state, "_PIPELINE_MODEL_PARALLEL_DECODER_START", None)
        virtual = state.get_virtual_pipeline_model_parallel_world_size() or 1
        sizes = state.get_pipeline_model_parallel_world_size(), virtual
        rank = int(state.get_pipeline_model_parallel_rank())
    except (AssertionError, AttributeError, RuntimeError, ValueError):  # not initialised
        return None
    if start or sizes != (pipeline_size(config), virtual_size(config)):
        return None
    return rank, state.get_virtual_pipeline_model_parallel_rank() if virtual > 1 else 0


# --- config and helpers -------------------------------------------------------------------------


def _layers_of(config: Any, rank: int, stage: int) -> tuple[int, int]:
    """(layers before the stage, layers of the stage): what config and helpers agree on."""
    planned, reason = None, ""
    try:
        planned = placement(config)
    except LayoutError as error:
        reason = str(error)
    if planned is not None and planned.listed:
        return planned.of(rank, stage)
    answer = _answer_of_helpers(config, rank, stage)
    if planned is not None and answer in (None, planned.of(rank, stage)):
        return planned.of(rank, stage)
    if answer is not None and _helpers_place_each_layer_once(config):
        return answer
    if planned is None:
        raise LayoutError(reason)
    if _is_known_mistake(config, planned, rank, stage, answer):
        return planned.of(rank, stage)
    raise LayoutError(
        f"pipeline rank {rank}, virtual stage {stage}: the installed helpers "
        f"({_names_of_helpers()}) say (offset, layers) = {answer}, and the config means "
        f"{planned.of(rank, stage)}: expected the same, as the model is built by the "
        "helpers. Remove what replaces them, or list the layers of each stage in "
        "pipeline_model_parallel_layout"
    )


def _answer_of_helpers(config: Any, rank: int, stage: int) -> tuple[int, int] | None:
    """What the installed helpers answer for the stage; None if they cannot be asked about it."""
    offset, layers = (
        None if helper is None else _ask(helper, config, rank, stage) for helper in _helpers()
    )
    return None if offset is None or layers is None else (offset, layers)


def _helpers() -> list[Any]:
    """As they are bound now. Not imported: whoever replaces one, or builds a model, has done so."""
    folder = "megatron.core.transformer"
    return [
        getattr(
            sys.modules.get(f"{folder}.transformer_layer"), "get_transformer_layer_offset", None
        ),
        getattr(sys.modules.get(f"{folder}.transformer_block"), "get_num_layers_to_build", None),
    ]


def _ask(helper: Any, config: Any, rank: int, stage: int) -> int | None:
    """What a helper answers; None if the parameters that it has now cannot ask for this stage
    (MindSpeed's take the config alone)."""
    own = _own_stage(config)
    virtual = virtual_size(config) > 1
    try:
        parameters = _parameters(helper)
        passed: dict[str, int | None] = {}
        if "pp_rank" in parameters:
            passed["pp_rank"] = rank
        elif own is None or own[0] != rank:
            return None
        if "vp_stage" in parameters:
            passed["vp_stage"] = stage if virtual else None
        elif virtual and (own is None or own[1] != stage):
            return None
        return int(helper(config, **passed))
    except Exception:  # noqa: BLE001 - it wants process groups, or more than its signature says
        return None


def _parameters(helper: Any) -> Any:
    """What it takes by name. Another's wrapper has the signature of what it wraps (functools.wraps
    copies it), which is true only if the wrapper hands on any keyword."""
    code = getattr(helper, "__code__", None)
    honest = module_of(helper).partition(".")[0] in ("megatron", "replay_patch")
    if code is None or honest or code.co_flags & inspect.CO_VARKEYWORDS:
        return inspect.signature(helper).parameters
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _helpers_place_each_layer_once(config: Any) -> bool:
    """Whether the helpers, asked about all stages, say where each layer is, once and in order."""
    expected = 0
    for stage in range(virtual_size(config)):
        for rank in range(pipeline_size(config)):
            answer = _answer_of_helpers(config, rank, stage)
            if answer is None or answer[0] != expected or answer[1] < 0:
                return False
            expected += answer[1]
    return expected == int(config.num_layers)


def _is_known_mistake(
    config: Any, planned: Placement, rank: int, stage: int, answer: tuple[int, int] | None
) -> bool:
    """0.12 and 0.13, virtual stages, only the last rank's layers given: offsets overlap there.
    Megatron-LM issue 1584. With the patch `layer_helpers` the helper itself is right."""
    uneven = (
        getattr(config, "num_layers_in_first_pipeline_stage", None) is None
        and getattr(config, "num_layers_in_last_pipeline_stage", None) is not None
    )
    if not uneven or virtual_size(config) == 1 or answer is None:
        return False
    missing = planned.counts[0][0]  # it leaves out the layers of a first rank with a given count
    return (answer[0] + missing, answer[1]) == planned.of(rank, stage)


def _names_of_helpers() -> str:
    names = [
        f"{getattr(h, '__module__', '?')}.{getattr(h, '__qualname__', h)}" for h in _helpers() if h
    ]
    return " and ".join(names)
