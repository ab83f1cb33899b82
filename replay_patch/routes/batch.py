"""`RouteBatch`: the routes of several trajectories, kept together whatever is done to the batch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from replay_patch.errors import RouteError
from replay_patch.routes.routes import Routes


class RouteBatch(Sequence[Routes]):
    """A list of `Routes` that is not changed. They may differ in length and in layer axis.

    Raises:
        RouteError: an entry is no `Routes` (it says which), or has another number of experts or
            another top-k than the first.
    """

    def __init__(self, routes: Iterable[Routes]) -> None:
        self._routes = tuple(routes)
        for place, entry in enumerate(self._routes):
            if not isinstance(entry, Routes):
                raise RouteError(
                    f"trajectory {place} is a {type(entry).__name__}: expected Routes. A rollout "
                    "without routes is a mistake, unless replay is off for all of it"
                )
            first = self._routes[0]
            found, expected = ((r.num_experts, r.topk) for r in (entry, first))
            if found != expected:
                raise RouteError(
                    f"trajectory {place} has (num_experts, topk) = {found}: expected {expected}, "
                    "as trajectory 0 has; a batch is of one model"
                )

    def for_layers(
        self,
        layer_numbers: Iterable[int],
        moe_layers: Iterable[int] | None = None,
        num_layers: int | None = None,
    ) -> "RouteBatch":
        """Every trajectory in these layers only; see `Routes.for_layers`.

        Do this before anything is moved or widened: a pipeline stage needs its own layers only.

        Raises:
            RouteError: as there, naming the trajectory.
        """
        asked = tuple(layer_numbers)
        model = None if moe_layers is None else tuple(moe_layers)
        chosen = []
        for place, routes in enumerate(self._routes):
            try:
                chosen.append(routes.for_layers(asked, model, num_layers))
            except RouteError as error:
                raise RouteError(f"trajectory {place}: {error}") from None
        return RouteBatch(chosen)

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[Routes]:
        return iter(self._routes)

    @overload
    def __getitem__(self, index: int) -> Routes: ...

    @overload
    def __getitem__(self, index: slice) -> "RouteBatch": ...

    def __getitem__(self, index: Any) -> Any:
        found = self._routes[index]
        return RouteBatch(found) if isinstance(index, slice) else found

    def __repr__(self) -> str:
        return f"<RouteBatch of {len(self)}>"
