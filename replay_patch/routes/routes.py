"""`Routes`: the expert ids of one trajectory, checked once, on the host.
T tokens (rows), L layers, E experts, K top-k."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from replay_patch.errors import RouteError
from replay_patch.routes import arguments, pieces
from replay_patch.routes.expert_ids import CAUSES, CheckedRoutes, checked_routes
from replay_patch.routes.layer_axis import axis_places
from replay_patch.routes.responses.response_fields import PayloadOptions
from replay_patch.routes.responses.response_routes import response_routes
from replay_patch.routes.wire import dict_form
from replay_patch.routes.wire import message as messages


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Routes(CheckedRoutes):
    """The experts that one trajectory's tokens went through; its fields are never changed.

    A token is *captured* if its row is known in every layer, else it is a hole: a real token that
    routes natively. N tokens have N rows or N - 1, as the last sampled token is never fed forward
    and so has no route; which of the two it is, only a layout can tell.

    Attributes:
        expert_ids: [T, L, K] on the host, contiguous. The dtype follows from `num_experts` alone:
            uint8 to 256, int16 to 32768, then int32. Rows of holes are zeros, and mean nothing.
        captured: bool [T].
        num_experts: E.
        start: tokens of the trajectory before the first row; they are not in this piece.
        layers: what the layer axis means. "moe": all MoE layers of the model, in order. "all": row
            i is layer i + 1, dense layers included. A tuple: these layer numbers (from 1).
        empty_layers: with "all", places on the layer axis that hold nothing but zeros or -1, as
            engines fill dense layers in. They are stored as zeros, and cannot be selected.
        notes: uint8 [T]: why the row given for a token is not here, as a place in
            `expert_ids.CAUSES`; None if there is nothing to say. `rejected` counts it.
    """

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
        """Check, narrow and copy; a RouteError for no integers, a wrong shape, an unclear layer
        axis, or an invalid row.

        Args:
            expert_ids: integers [T, L, K] on the host: tensor, array or nested lists. -1 anywhere
                in a token's row (dense layers apart) makes the token a hole.
            num_experts: E, of the model and not of the data seen.
            captured: bool [T]; None: all that have no -1. Rows of holes are not read.
            start, layers: as the attributes.
            on_invalid: if a captured row has an id out of range, or one twice: "raise", or "hole",
                which makes its token a counted hole.
        """
        checked = checked_routes(expert_ids, num_experts, captured, start, layers, on_invalid)
        vars(self).update(vars(checked))

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

    @property
    def rejected(self) -> dict[str, int]:
        """Tokens whose given row is not here, by cause.

        Holes: "out of range", "repeating" (an expert twice), "unwritten" (a buffer nobody wrote),
        "missing" (the engine returned nothing). Captured: "mismatch" (two pieces disagreed, and
        `append` kept the earlier row). Holes that come from -1 or `captured` are not among them.
        """
        if self.notes is None:
            return {}
        counts = torch.bincount(self.notes, minlength=len(CAUSES)).tolist()
        return {cause: n for cause, n in zip(CAUSES, counts, strict=True) if cause and n}

    def for_layers(
        self,
        layer_numbers: Iterable[int],
        moe_layers: Iterable[int] | None = None,
        num_layers: int | None = None,
    ) -> "Routes":
        """The same tokens in these layers only, in this order: a copy, or self if it is all. A
        RouteError for a layer that is not on the axis, is not known there for sure, or was never
        captured.

        Args:
            layer_numbers: Megatron's, from 1; none for a stage without MoE layers.
            moe_layers: all MoE layers of the model. `layers="moe"` needs it, unless the axis has as
                many rows as layers are asked for, or as the model has layers.
            num_layers: of the model's decoder, if known: what "all" must have on its layer axis.
        """
        wanted = arguments.layer_numbers("layer_numbers", layer_numbers)
        places = self.layer_places(wanted, moe_layers, num_layers)
        if places == list(range(self.num_layers)) and not self.empty_layers:
            return self if self.layers == wanted else self._of(self, layers=wanted)
        selected = self.expert_ids.index_select(1, torch.tensor(places, dtype=torch.int64))
        return self._of(self, expert_ids=selected, layers=wanted, empty_layers=())

    def layer_places(
        self,
        layer_numbers: Iterable[int],
        moe_layers: Iterable[int] | None = None,
        num_layers: int | None = None,
    ) -> list[int]:
        """Where these layers are on the layer axis: places from 0, in the order asked for.
        Arguments and errors are those of `for_layers`."""
        wanted = arguments.layer_numbers("layer_numbers", layer_numbers)
        model = None if moe_layers is None else arguments.layer_numbers("moe_layers", moe_layers)
        places = axis_places(self.layers, self.num_layers, wanted, model, num_layers)
        empty = [n for n, place in zip(wanted, places, strict=True) if place in self.empty_layers]
        if empty and bool(self.captured.any()):
            raise RouteError(
                f"layers {empty} hold zeros or -1 only: expected routes, as these are MoE layers; "
                "they were not captured, or the axis means something else"
            )
        return places

    def append(
        self,
        later: "Routes",
        on_mismatch: str = "raise",
        *,
        on_gap: str = "raise",
        name: str | None = None,
    ) -> "Routes":
        """This piece and a later one of the same trajectory: the next turn, a resumed generation.

        Where both have a token, the earlier row stays, as its pass produced the token; a hole in
        one is filled by the other. A later piece without new rows changes nothing else.

        Args:
            later: rows from its `start` on; it may begin at 0 again and repeat what is known.
            on_mismatch: if both captured a token, with other experts (their order does not matter):
                "raise", or "count" as "mismatch" in `rejected`.
            on_gap: tokens between the pieces. One is always a hole: the last sampled token of the
                earlier piece has no route. More: "raise", or "hole" for all of them.
            name: what error messages begin with, such as "trajectory 3, turn 2".

        Raises:
            RouteError: pieces of different models or layers, a mismatch, a gap.
        """
        return self._of(pieces.append(self, later, on_mismatch, on_gap, name))

    def truncate(self, num_tokens: int) -> "Routes":
        """The routes of the trajectory's first `num_tokens` tokens, those before `start` counted: a
        copy, so that what was cut off is freed; self if there is nothing to cut. A RouteError
        unless `num_tokens` is a host integer from 0 on."""
        end = arguments.integer("num_tokens", num_tokens, 0)
        if end >= self.end:
            return self
        kept = self[: max(0, end - self.start)]
        return self._of(kept, start=min(self.start, end))

    def __getitem__(self, rows: slice) -> "Routes":
        """Some consecutive rows, as a copy; `start` moves along."""
        return self._of(pieces.cut(self, rows))

    def to_wire(self) -> dict[str, Any]:
        """A dict that every JSON library takes; `wire.dict_form` lists its keys. A WireError for
        more tokens or layers than a message may have."""
        return dict_form.to_dict(self)

    @classmethod
    def from_wire(cls, message: Any) -> "Routes":
        """What `to_wire` gave, through JSON or not. Nothing in it is trusted, and anything else is
        a WireError."""
        return cls._of(dict_form.from_dict(message))

    def to_bytes(self) -> bytes:
        """A fixed header and the compact arrays, in the order that `wire.message` says. A WireError
        for more tokens or layers than a message may have."""
        return messages.to_bytes(self)

    @classmethod
    def from_bytes(cls, message: Any) -> "Routes":
        """What `to_bytes` gave: bytes, bytearray or memoryview. Nothing in it is trusted, and
        anything else is a WireError."""
        return cls._of(messages.from_bytes(message))

    @classmethod
    def from_engine(
        cls,
        payload: Any,
        engine: str,
        *,
        num_experts: int,
        num_tokens: int,
        on_invalid: str = "raise",
        topk: int | None = None,
        num_layers: int | None = None,
        layers: str | Iterable[int] | None = None,
        start: int | None = None,
        missing: int | None = None,
        dtype: str | None = None,
        choice: int | None = None,
        max_run: int | None = None,
        name: str | None = None,
    ) -> "Routes":
        """What a rollout engine returned for one trajectory; `docs/routes.md` has all forms.

        Args:
            payload: the response, the completion in it, its field, or None: the engine has none.
            engine: "vllm", "sglang" or "megatron".
            num_experts: E of the model, shared experts not counted.
            num_tokens: N, accepted tokens of the whole trajectory, prompt included.
            on_invalid: of a row that cannot be a route, and of a missing payload: "raise", or
                "hole", which counts it in `rejected`. A wrong shape or number of rows is always an
                error.
            topk: K; flat forms need it.
            num_layers: places on the layer axis, whatever it means; flat forms need it.
            layers: as in the constructor. None: "moe" for Megatron and vLLM's split form, else
                "all".
            start: tokens that the request asked to leave out; None: what the payload says, or 0.
                The number of rows shows whether the server did so; if not, the routes begin at 0.
            missing: tokens at the end that have no row; None: 1, and without `start` also 0. 2 for
                a prefill only, or if the trainer added an end token itself.
            dtype: of raw bytes, little-endian; None: what the payload says, or int32.
            choice: which completion, if the response has several.
            max_run: so many tokens in a row may have the same experts in all layers; more are a
                buffer that nobody wrote. None: by the model's size, at least 15.
            name: what error messages begin with, such as "trajectory 3, turn 2".

        Raises:
            RouteError: it cannot be understood without guessing, or is invalid.
        """
        optional = start, missing, dtype, choice, max_run
        options = PayloadOptions(
            num_experts, num_tokens, on_invalid, topk, num_layers, layers, *optional
        )
        return cls._of(response_routes(payload, engine, options, name))

    @classmethod
    def _of(cls, checked: CheckedRoutes, **fields: Any) -> "Routes":
        """What is checked already as `Routes`, with some fields replaced; itself if none are."""
        if isinstance(checked, Routes) and not fields:
            return checked
        new = cls.__new__(cls)
        vars(new).update(vars(checked) | fields)
        return new

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.expert_ids.shape))
        start = f", start={self.start}" if self.start else ""
        return (
            f"<Routes {shape} of {self.num_experts} experts, layers={self.layers!r}{start}, "
            f"{int(self.captured.sum())} captured>"
        )
