"""Which decoder layers a pipeline stage holds, and which of them are MoE, by the config alone.

Needs no Megatron, no process group and no model. Layer numbers are Megatron's `layer_number`, from
1. A stage is (pp_rank, vp_stage); layers are numbered stage by stage in the order in which
activations flow: all pipeline ranks of virtual stage 0, then all of virtual stage 1, and so on.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from replay_patch.errors import LayoutError


@dataclass(frozen=True)
class Placement:
    """How many decoder layers each stage holds: `counts[pp_rank][vp_stage]`.
    `listed`: the config lists them stage by stage, so no helper needs to be asked."""

    counts: tuple[tuple[int, ...], ...]
    listed: bool = False

    def of(self, pp_rank: int, vp_stage: int) -> tuple[int, int]:
        """(layers before the stage, layers of the stage)."""
        before = sum(
            count
            for rank, stages in enumerate(self.counts)
            for stage, count in enumerate(stages)
            if (stage, rank) < (vp_stage, pp_rank)
        )
        return before, self.counts[pp_rank][vp_stage]


def placement(config: Any) -> Placement:
    """The placement that the config's fields ask for.
    Raises LayoutError if they contradict each other, or do not tell it."""
    sizes = pipeline_size(config), virtual_size(config)
    if getattr(config, "schedules_method", None) == "dualpipev":
        _refuse("schedules_method='dualpipev'", "a placement that the config alone tells")
    if getattr(config, "is_hybrid_model", False):
        _refuse("is_hybrid_model=True", "a decoder of transformer layers; its pattern is not here")
    listed = getattr(config, "pipeline_num_transformer_layers", None)
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if listed:  # MindSpeed's unaligned pipeline
        what, counts = "pipeline_num_transformer_layers", _as_listed(listed)
    elif layout:
        what, counts = "pipeline_model_parallel_layout", _in_layout(layout, sizes[0])
    elif _ends(config) != (None, None):
        what, counts = "num_layers_in_first/last_pipeline_stage", _uneven(config, *sizes)
    else:
        what, counts = "num_layers", _even(config, *sizes)
    if (len(counts), {len(stages) for stages in counts}) != (sizes[0], {sizes[1]}):
        _refuse(f"{what} for {[len(stages) for stages in counts]} stages", f"{sizes} of them")
    total = sum(sum(stages) for stages in counts)
    if total != config.num_layers or min(min(stages) for stages in counts) < 0:
        _refuse(
            f"{what} puts {total} layers on stages {[list(stages) for stages in counts]}",
            f"num_layers={config.num_layers}, and none below 0",
        )
    return Placement(tuple(map(tuple, counts)), listed=bool(listed or layout))


def pipeline_size(config: Any) -> int:
    """Pipeline ranks."""
    return int(getattr(config, "pipeline_model_parallel_size", None) or 1)


def virtual_size(config: Any) -> int:
    """Virtual stages on each pipeline rank; 1 without.
    Raises LayoutError for virtual stages on a single rank, which no Megatron can build."""
    size = int(getattr(config, "virtual_pipeline_model_parallel_size", None) or 1)
    if size > 1 and pipeline_size(config) == 1:
        _refuse(f"{size} virtual stages on one pipeline rank", "pipeline_model_parallel_size > 1")
    return size


def moe_layers(config: Any) -> tuple[int, ...]:
    """All MoE layers of the model's decoder; LayoutError for any `moe_layer_freq` but these:
    an integer n (layers 1, n + 1, 2n + 1, ...), one 0 or 1 for each layer, as models with k dense
    layers in front have it, and None or missing, which means all."""
    layers = int(config.num_layers)
    if getattr(config, "num_moe_experts", None) is None:
        return ()
    frequency: Any = getattr(config, "moe_layer_freq", None)
    if hasattr(frequency, "tolist"):  # an array
        frequency = frequency.tolist()
    if frequency is None:
        pattern = [True] * layers
    elif isinstance(frequency, int) and frequency > 0:
        pattern = [index % frequency == 0 for index in range(layers)]
    elif isinstance(frequency, (list, tuple)) and len(frequency) == layers:
        pattern = [bool(value) for value in frequency]
    else:
        _refuse(
            f"moe_layer_freq={frequency!r}",
            f"an integer from 1 on, or a list of num_layers={layers} zeros and ones",
        )
    # MindSpeed's fields. Its no-op layers are numbered from 0, and have no router.
    first = getattr(config, "first_k_dense_replace", None) or 0
    absent = _noop_layers(config)
    return tuple(
        index + 1
        for index, is_moe in enumerate(pattern)
        if is_moe and index >= first and index not in absent
    )


# --- the layers of each stage, in the four ways that a config can give them ----------------------


def _even(config: Any, pp_size: int, vp_size: int) -> list[list[int]]:
    """The embedding and the loss may take the place of a layer on the first and last stage."""
    embedding = bool(getattr(config, "account_for_embedding_in_pipeline_split", False))
    loss = bool(getattr(config, "account_for_loss_in_pipeline_split", False))
    each = _divide(config.num_layers + embedding + loss, pp_size * vp_size, "layers over stages")
    counts = [[each] * vp_size for _ in range(pp_size)]
    counts[0][0] -= embedding
    counts[-1][-1] -= loss
    return counts


def _uneven(config: Any, pp_size: int, vp_size: int) -> list[list[int]]:
    first, last = _ends(config)
    middle = list(range(first is not None, pp_size - (last is not None)))
    left = config.num_layers - (first or 0) - (last or 0)
    each = _divide(left, len(middle), "the other layers over the other stages") if middle else 0
    ranks = [each] * pp_size
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    return [
        [_divide(rank, vp_size, "a rank's layers over its virtual stages")] * vp_size
        for rank in ranks
    ]


def _in_layout(layout: Any, pp_size: int) -> list[list[int]]:
    """Read from the layout itself: asked through its methods, it answers for its own rank."""
    if isinstance(layout, (str, list)):  # set on the config after it was made
        try:
            from megatron.core.transformer.pipeline_parallel_layer_layout import (
                PipelineParallelLayerLayout,
            )
        except ImportError:
            _refuse(
                f"pipeline_model_parallel_layout={layout!r}, which this Megatron cannot read",
                "none before 0.13.1",
            )
        layout = PipelineParallelLayerLayout(layout, pp_size)
    return [
        [sum(getattr(kind, "name", kind) == "decoder" for kind in stage) for stage in stages]
        for stages in layout.layout
    ]


def _as_listed(listed: Any) -> list[list[int]]:
    """[pp_rank][vp_stage], as listed; a command line gives it as a string."""
    try:
        counts = ast.literal_eval(listed) if isinstance(listed, str) else listed
        return [[int(count) for count in stages] for stages in counts]
    except (SyntaxError, TypeError, ValueError):
        _refuse(f"pipeline_num_transformer_layers={listed!r}", "a list of lists of integers")


def _ends(config: Any) -> tuple[int | None, int | None]:
    """Layers of the first and of the last pipeline rank, where the config gives them."""
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    first, last = (getattr(config, name, None) for name in ends)
    return first, last


def _noop_layers(config: Any) -> set[int]:
    listed = getattr(config, "noop_layers", None)
    if not listed or isinstance(listed, bool):
        return set()
    values: Iterable[Any] = listed.split(",") if isinstance(listed, str) else listed
    return {int(value) for value in values}


def _divide(number: int, by: int, what: str) -> int:
    if number % by:
        _refuse(f"{number} does not divide by {by} ({what})", "even stages, or a layout")
    return number // by


def _refuse(found: str, expected: str) -> NoReturn:
    raise LayoutError(
        f"which layers a pipeline stage holds: found {found}; expected {expected}. Correct the "
        "config, or build the model and look at its layer numbers"
    )
