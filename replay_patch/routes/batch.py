"""`RouteBatch`: the routes of several trajectories, kept together whatever is done to the batch."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes.arguments import check_word, host_list, integer, lengths_of_sequences
from replay_patch.routes.batch_fields import chosen_indices
from replay_patch.routes.router_rows import AlignedRoutes, all_places, routes_in_rows
from replay_patch.routes.routes import Routes
from replay_patch.routes.token_layout import TokenLayout


class RouteBatch(Sequence[Routes]):
    """A list of `Routes` that is not changed. They may differ in length and in layer axis.
    An entry that is no `Routes`, or has another number of experts or another top-k than the first,
    is a RouteError that says which entry."""

    def __init__(self, routes: Iterable[Routes]) -> None:
        self._routes = tuple(routes)
        for number, entry in enumerate(self._routes):
            if not isinstance(entry, Routes):
                raise RouteError(
                    f"trajectory {number} is a {type(entry).__name__}: expected Routes. A rollout "
                    "without routes is a mistake, unless replay is off for all of it"
                )
            first = self._routes[0]
            sizes, expected = ((r.num_experts, r.topk) for r in (entry, first))
            if sizes != expected:
                raise RouteError(
                    f"trajectory {number} has (num_experts, topk) = {sizes}: expected {expected}, "
                    "as trajectory 0 has; a batch is of one model"
                )

    @classmethod
    def from_padded(
        cls,
        ids: Any,
        lengths: Iterable[int],
        num_experts: int,
        *,
        padding_side: str = "right",
        captured_lengths: Iterable[int] | None = None,
        layers: str | Iterable[int] = "moe",
        on_invalid: str = "raise",
    ) -> "RouteBatch":
        """From the dense tensor that trainers hold; padding is not read.

        Args:
            ids: integers [B, S, L, K] on the host: tensor, array or nested lists. A real token with
                a -1 in its row is a hole.
            lengths: real tokens of each sequence, host integers.
            num_experts: E of the model.
            padding_side: "right": tokens begin at position 0; "left": they end at S.
            captured_lengths: how many tokens of each sequence, from its first on, have a route; the
                rest are holes, whose rows (zeros, mostly) are not read. None: all rows without -1.
            layers, on_invalid: as in `Routes`.

        Raises:
            RouteError: another shape or dtype, lengths that do not fit it, or an invalid row; it
                names the trajectory.
        """
        try:
            dense = ids if isinstance(ids, Tensor) else np.asarray(ids)
        except ValueError as error:  # ragged lists
            raise RouteError(f"ids is no array [batch, sequence, layers, topk]: {error}") from None
        if dense.ndim != 4:
            raise RouteError(
                f"ids has shape {list(dense.shape)}: expected [batch, sequence, layers, topk]"
            )
        tokens = _lengths("lengths", lengths, dense, [dense.shape[1]] * len(dense))
        captured_tokens = None
        if captured_lengths is not None:
            captured_tokens = _lengths("captured_lengths", captured_lengths, dense, tokens)
        check_word("padding_side", padding_side, "left", "right")
        axis = layers if isinstance(layers, str) else tuple(layers)
        trajectories = []
        for number, length in enumerate(tokens):
            begin = 0 if padding_side == "right" else dense.shape[1] - length
            rows = dense[number, begin : begin + length]
            options: dict[str, Any] = {"layers": axis, "on_invalid": on_invalid}
            if captured_tokens is not None:
                options["captured"] = np.arange(length) < captured_tokens[number]
            routes = _call_for_trajectory(number, Routes, rows, num_experts, **options)
            trajectories.append(routes)
        return cls(trajectories)

    def select(self, indices: Any) -> "RouteBatch":
        """The chosen trajectories in the chosen order, as often as they are chosen.

        `indices`: places from 0, or one bool for each trajectory; list, array or host tensor. A
        RouteError for a place that does not exist, or another number of bools. Where other fields
        belong to the same trajectories, use `select_fields` on all of them.
        """
        return RouteBatch(self._routes[i] for i in chosen_indices(indices, len(self)))

    def split(self, sizes: Iterable[int]) -> "list[RouteBatch]":
        """Consecutive parts, as microbatches take them: `sizes` are the trajectories of each. A
        RouteError unless they add up to all of the batch."""
        entries = host_list("sizes", sizes, "how many trajectories each part gets")
        parts = [integer(f"sizes[{i}]", size, 0) for i, size in enumerate(entries)]
        if sum(parts) != len(self):
            raise RouteError(
                f"sizes={parts} are {sum(parts)} trajectories: expected {len(self)}, all of the "
                "batch"
            )
        ends = np.cumsum([0, *parts]).tolist()
        return [self[begin:end] for begin, end in itertools.pairwise(ends)]

    def for_layers(
        self,
        layer_numbers: Iterable[int],
        moe_layers: Iterable[int] | None = None,
        num_layers: int | None = None,
    ) -> "RouteBatch":
        """Every trajectory in these layers only; as `Routes.for_layers`, with errors that name the
        trajectory. A pipeline stage does this before anything is moved or widened."""
        wanted = tuple(layer_numbers)
        model = None if moe_layers is None else tuple(moe_layers)
        return RouteBatch(
            _call_for_trajectory(number, routes.for_layers, wanted, model, num_layers)
            for number, routes in enumerate(self._routes)
        )

    def to_rows(
        self,
        layout: TokenLayout,
        layer_numbers: Iterable[int] | None = None,
        moe_layers: Iterable[int] | None = None,
        num_layers: int | None = None,
        *,
        rows: Tensor | None = None,
        ep_size: int = 1,
        first_padding: int = 0,
    ) -> AlignedRoutes:
        """The ids of these layers in the order of the router rows: what `for_layers` and an
        alignment would give, in one copy. It makes R x L x K ids in the dtype of the routes, and
        less than one layer of them beside it.

        Args:
            layout: of the microbatch on this rank; one trajectory for each of its sequences, of N
                or N - 1 rows for N tokens.
            layer_numbers, moe_layers, num_layers: as in `Routes.for_layers`. None: all layers on
                the axis, which must be the same in all trajectories.
            rows: int64 [R], if the routers see other rows than `layout.rows`.
            ep_size, first_padding: of the experts that padding gets, see `padding.fill_padding`.

        Raises:
            RouteError: an empty batch, or routes that do not fit the sequences or the layers.
            LayoutError: `rows` that are not as many as the layout could have.
        """
        if not self._routes:
            raise RouteError("no trajectories: nothing says which experts there are")
        if layer_numbers is None:
            places = all_places(self._routes)
        else:
            wanted = tuple(layer_numbers)
            model = None if moe_layers is None else tuple(moe_layers)
            places = [
                _call_for_trajectory(number, routes.layer_places, wanted, model, num_layers)
                for number, routes in enumerate(self._routes)
            ]
        rows = layout.rows if rows is None else rows
        step = len(layout.input_rows)
        return routes_in_rows(
            self._routes, places, layout.lengths, rows, step, ep_size, first_padding
        )

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[Routes]:
        return iter(self._routes)

    @overload
    def __getitem__(self, index: int) -> Routes: ...

    @overload
    def __getitem__(self, index: slice) -> "RouteBatch": ...

    def __getitem__(self, index: Any) -> Any:
        chosen = self._routes[index]
        return RouteBatch(chosen) if isinstance(index, slice) else chosen

    def __repr__(self) -> str:
        return f"<RouteBatch of {len(self)}>"


def _call_for_trajectory(number: int, function: Any, *args: Any, **options: Any) -> Any:
    """What a function returns for a trajectory; its errors say which one that is."""
    try:
        return function(*args, **options)
    except RouteError as error:
        raise RouteError(f"trajectory {number}: {error}") from None


def _lengths(what: str, lengths: Any, dense: Any, most: Sequence[int]) -> tuple[int, ...]:
    """One host integer for each sequence, at most `most`."""
    counts = lengths_of_sequences(what, lengths)
    if len(counts) != len(dense):
        raise RouteError(
            f"{what} are {len(counts)}, and ids has shape {list(dense.shape)}: expected one for "
            f"each of {len(dense)} sequences"
        )
    for number, (length, limit) in enumerate(zip(counts, most, strict=True)):
        if length > limit:
            raise RouteError(f"{what}[{number}] is {length}: expected at most {limit} tokens")
    return counts
