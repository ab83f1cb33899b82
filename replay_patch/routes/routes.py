"""`Routes`: the expert ids of one trajectory, checked once, on the host.

T tokens (rows), L layers, E experts, K top-k.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes import checking
from replay_patch.routes.checking import Layers


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Routes:
    """The experts that one trajectory's tokens went through; its fields are never changed.

    A token is *captured* if its row is known in every layer, else it is a hole: a real token that
    routes natively. N tokens may have N rows or N - 1: the last sampled token is never fed forward,
    so it has no route. Which of the two it is shows where routes meet a layout.

    Attributes:
        expert_ids: [T, L, K] on the host, contiguous. The dtype follows from `num_experts` alone:
            uint8 to 256, int16 to 32768, then int32. Rows of holes are zeros, and mean nothing.
        captured: bool [T].
        num_experts: E.
        start: tokens of the trajectory before the first row; they are not in this piece.
        layers: what the layer axis means. "moe": all MoE layers of the model, in order. "all":
            row i is layer i + 1, dense layers included. A tuple: these layer numbers (from 1).
        empty_layers: with "all", places on the layer axis that hold nothing but zeros or -1, as
            engines fill dense layers in. They are stored as zeros, and cannot be selected.
        rejected: how many tokens `on_invalid="hole"` made holes, by cause.
    """

    expert_ids: Tensor
    captured: Tensor
    num_experts: int
    start: int
    layers: Layers
    empty_layers: tuple[int, ...]
    rejected: dict[str, int]

    def __init__(
        self,
        expert_ids: Any,
        num_experts: int,
        *,
        captured: Any = None,
        start: int = 0,
        layers: str | Iterable[int] = "moe",
        on_invalid: str = "raise",
    ) -> None:
        """Check, narrow and copy.

        Args:
            expert_ids: integers [T, L, K] on the host: tensor, array or nested lists. -1 anywhere
                in a token's row (dense layers apart) makes the token a hole.
            num_experts: E, of the model and not of the data seen.
            captured: bool [T]; None: all that have no -1. Rows of holes are not read.
            start: tokens before the first row.
            layers: see above.
            on_invalid: of a captured row with an id out of range or twice the same: "raise", or
                "hole", which makes a counted hole of its token.

        Raises:
            RouteError: no integers, a wrong shape, an unclear layer axis, or an invalid row.
        """
        num_experts = checking.integer("num_experts", num_experts, 1)
        if num_experts > 2**31:
            raise RouteError(f"num_experts is {num_experts}: expected at most 2**31, int32 ids")
        if on_invalid not in ("raise", "hole"):
            raise RouteError(f"on_invalid={on_invalid!r}: expected 'raise' or 'hole'")
        ids = checking.host_ids(expert_ids)
        topk = ids.shape[2]
        if not 1 <= topk <= num_experts:
            raise RouteError(
                f"expert_ids has shape {list(ids.shape)}, so K is {topk}: expected 1 to "
                f"num_experts={num_experts} on the last axis, [tokens, layers, topk]"
            )
        layers = checking.layer_axis(layers, ids.shape[1])
        known = checking.captured_rows(captured, len(ids))
        empty = checking.empty_layers(ids, known) if layers == "all" else []
        stored, known, rejected = checking.checked(
            ids, known, num_experts, empty, layers, on_invalid
        )
        self._fill(
            stored, known, num_experts, checking.integer("start", start, 0), layers, empty, rejected
        )

    @property
    def num_tokens(self) -> int:
        """T, the rows of this piece."""
        return len(self.expert_ids)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.expert_ids.shape[1]

    @property
    def topk(self) -> int:
        """K."""
        return self.expert_ids.shape[2]

    def for_layers(
        self,
        layer_numbers: Iterable[int],
        moe_layers: Iterable[int] | None = None,
        num_layers: int | None = None,
    ) -> "Routes":
        """The same tokens in these layers only, in this order: a copy, or self if it is all.

        Args:
            layer_numbers: Megatron's, from 1; none for a stage without MoE layers.
            moe_layers: all MoE layers of the model. `layers="moe"` needs it, unless the axis has
                as many rows as layers are asked for, or as the model has layers.
            num_layers: of the model's decoder, if known: what "all" must have on its layer axis.

        Raises:
            RouteError: a layer that is not on the axis, is not known there for sure, or was never
                captured.
        """
        asked = checking.layer_numbers("layer_numbers", layer_numbers)
        model = None if moe_layers is None else checking.layer_numbers("moe_layers", moe_layers)
        strange = sorted(set(asked) - set(model)) if model is not None else []
        if model is not None and strange:
            raise RouteError(f"layers {strange} are no MoE layers: this model has {list(model)}")
        axis = self._axis(asked, model, num_layers)
        if asked == axis and not self.empty_layers:
            return self if self.layers == axis else self._with(self.expert_ids, axis)
        places = {number: place for place, number in enumerate(axis)}
        lacking = [number for number in asked if number not in places]
        if lacking:
            raise RouteError(
                f"no routes for layers {lacking}: layers={self.layers!r} means {list(axis)}; "
                "capture those layers, too, or say which ones the axis holds"
            )
        index = [places[number] for number in asked]
        empty = [axis[i] for i in index if i in self.empty_layers]
        if empty and bool(self.captured.any()):
            raise RouteError(
                f"layers {empty} hold zeros or -1 only: expected routes, as these are MoE layers; "
                "they were not captured, or the axis means something else"
            )
        selected = self.expert_ids.index_select(1, torch.tensor(index, dtype=torch.int64))
        return self._with(selected, asked)

    def _axis(
        self, asked: tuple[int, ...], model: tuple[int, ...] | None, num_layers: int | None
    ) -> tuple[int, ...]:
        """The layer number of each place on the layer axis."""
        rows = self.num_layers
        if isinstance(self.layers, tuple):
            return self.layers
        if self.layers == "all":
            if num_layers not in (None, rows):
                raise RouteError(
                    f"{rows} layers of routes with layers='all', and the model has {num_layers}: "
                    "say which layers they are, layers=(number, ...)"
                )
            return tuple(range(1, rows + 1))
        if model is None and num_layers == rows:
            model = tuple(range(1, rows + 1))
        elif model is None and len(asked) == rows:
            model = tuple(sorted(asked))
        if model is None:
            raise RouteError(
                f"{rows} layers of routes with layers='moe', and {len(asked)} layers asked for: "
                "which MoE layers the model has decides where they are; pass moe_layers="
            )
        if len(model) != rows:
            raise RouteError(
                f"{rows} layers of routes with layers='moe', and the model has {len(model)} MoE "
                f"layers, {list(model)}: say layers='all' if dense layers are among them, or which "
                "they are, layers=(number, ...)"
            )
        return model

    def _with(self, expert_ids: Tensor, layers: tuple[int, ...]) -> "Routes":
        """The same tokens with other ids, which are known to be right."""
        new = Routes.__new__(Routes)
        new._fill(
            expert_ids, self.captured, self.num_experts, self.start, layers, (), self.rejected
        )
        return new

    def _fill(
        self,
        expert_ids: Tensor,
        captured: Tensor,
        num_experts: int,
        start: int,
        layers: Layers,
        empty_layers: Iterable[int],
        rejected: dict[str, int],
    ) -> None:
        vars(self).update(
            expert_ids=expert_ids,
            captured=captured,
            num_experts=num_experts,
            start=start,
            layers=layers,
            empty_layers=tuple(empty_layers),
            rejected=dict(rejected),
        )

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.expert_ids.shape))
        start = f", start={self.start}" if self.start else ""
        return (
            f"<Routes {shape} of {self.num_experts} experts, layers={self.layers!r}{start}, "
            f"{int(self.captured.sum())} captured>"
        )
