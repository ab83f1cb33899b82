"""The generate calls of one trajectory, and the routes they returned, put at its tokens.

A trajectory comes from several calls: turns of a tool loop, generations that were aborted and
resumed. An engine returns rows for the whole sequence at each call, for one token less than there
are, or none at all, and the trajectory may be cut or retokenised afterwards. So a row is taken by
what it belongs to: it is a token's if the tokens up to that one are the same in the call and in the
trajectory. Of several calls the first counts, which is the one that sampled the next token. The
last token of a call was never fed forward: a row for it is filling, as is one of zeros only.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_patch.errors import RouteError

HOLE = -1
"""The ids of a token that no call has routes for."""


@dataclass
class Trajectory:
    """The calls of one trajectory so far. `name` says which it is, in errors."""

    name: str = "trajectory"
    unwanted: bool = False
    """Nothing is trained on it (validation)."""
    merged_by_caller: bool = False
    """The caller puts rows of several calls together by their number: it is to get none."""
    _tokens: list[NDArray[np.int64]] = field(default_factory=list)
    _rows: list[NDArray[Any]] = field(default_factory=list)

    def add(self, prompt_ids: Any, token_ids: Any, routes: Any) -> None:
        """One call: what it was given, what it generated, and routes [N or N-1, layers, topk].

        N is the number of both kinds of tokens; `routes` may be None, or have no row, as that of a
        request which was aborted before it began.

        Raises:
            RouteError: another shape, or another number of rows.
        """
        rows = np.asarray(routes)
        if routes is None or not rows.size:
            return
        prompt, new = flat(prompt_ids), flat(token_ids)
        tokens = np.concatenate([prompt, new])
        where = f"{self.name}, generate call {len(self._rows) + 1}"
        if rows.ndim != 3 or not np.issubdtype(rows.dtype, np.integer):
            raise RouteError(
                f"{where}: routed_experts is {rows.dtype} {list(rows.shape)}; expected integers "
                "[tokens, layers, topk]"
            )
        if len(rows) not in (len(tokens), len(tokens) - 1):
            raise RouteError(
                f"{where}: {len(rows)} rows of routed_experts for {len(prompt)} prompt and "
                f"{len(new)} generated tokens; expected {len(tokens) - 1} or {len(tokens)}. "
                "Does the engine return generated tokens only, or leave out what was cached?"
            )
        self._keep(tokens, rows)

    def extend(self, later: "Trajectory") -> None:
        """Take over the calls of a part."""
        for tokens, rows in zip(later._tokens, later._rows, strict=True):
            self._keep(tokens, rows)

    def _keep(self, tokens: NDArray[np.int64], rows: NDArray[Any]) -> None:
        if self._rows and rows.shape[1:] != self._rows[0].shape[1:]:
            raise RouteError(
                f"{self.name}, generate call {len(self._rows) + 1}: routes of "
                f"{list(rows.shape[1:])} layers and experts; the calls before have "
                f"{list(self._rows[0].shape[1:])}"
            )
        self._tokens.append(tokens)
        self._rows.append(rows)

    def routes(self, token_ids: Sequence[int]) -> NDArray[np.int32] | None:
        """int32 [tokens, layers, topk] for these tokens: signed, and of a type that NCCL has.

        A token is all `HOLE` if its row is in no call, or in none without negative ids. None if no
        call has routes.
        """
        if not self._rows:
            return None
        wanted = flat(token_ids)
        out = np.full((len(wanted), *self._rows[0].shape[1:]), HOLE, dtype=np.int32)
        held = np.zeros(len(wanted), dtype=bool)
        for tokens, rows in zip(self._tokens, self._rows, strict=True):
            usable = min(_common(tokens, wanted), len(rows), len(tokens) - 1)
            new = ~held[:usable] & _chosen(rows[:usable])
            out[:usable][new] = rows[:usable][new]
            held[:usable] |= new
        return out


current: ContextVar[Trajectory | None] = ContextVar("trajectory", default=None)
"""The trajectory of this task. Tasks that it starts have the same one."""


def flat(token_ids: Any) -> NDArray[np.int64]:
    """Token ids of one sequence in any form that verl's servers take: a list, an array or tensor,
    also [1, tokens], or what a tokenizer returns."""
    ids = token_ids["input_ids"] if isinstance(token_ids, Mapping) else token_ids
    return np.asarray(ids, dtype=np.int64).reshape(-1)


def _chosen(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """bool [tokens]: a router can have chosen this row. None takes an expert twice."""
    places = (1, 2)
    written = np.asarray((rows >= 0).all(axis=places))
    return written & rows.any(axis=places) if rows.shape[2] > 1 else written


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens are the same from the start."""
    both = min(len(a), len(b))
    differing = np.flatnonzero(a[:both] != b[:both])
    return int(differing[0]) if len(differing) else both
