"""The generate calls of one trajectory, and the routes they returned, put at its tokens.

A trajectory comes from several calls: turns of a tool loop, generations that were aborted and
resumed. An engine returns rows for the whole sequence at each call, for one token less than there
are, or none at all, and the trajectory may be cut or retokenised afterwards. So a row is taken by
what it belongs to: it is a token's if the tokens up to that one are the same in the call and in the
trajectory. Of several calls the first counts, which is the one that sampled the next token.
"""

from collections.abc import Sequence
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

    def add(self, prompt_ids: Sequence[int], token_ids: Sequence[int], routes: Any) -> None:
        """One call: what it was given, what it generated, and routes [N or N-1, layers, topk].

        N is the number of both kinds of tokens; `routes` may be None.

        Raises:
            RouteError: another shape, or another number of rows.
        """
        if routes is None:
            return
        tokens = np.concatenate([_ints(prompt_ids), _ints(token_ids)])
        rows = np.asarray(routes)
        where = f"{self.name}, generate call {len(self._rows) + 1}"
        if rows.ndim != 3 or not np.issubdtype(rows.dtype, np.integer):
            raise RouteError(
                f"{where}: routed_experts is {rows.dtype} {list(rows.shape)}; expected integers "
                "[tokens, layers, topk]"
            )
        if len(rows) not in (len(tokens), len(tokens) - 1):
            raise RouteError(
                f"{where}: {len(rows)} rows of routed_experts for {len(prompt_ids)} prompt and "
                f"{len(token_ids)} generated tokens; expected {len(tokens) - 1} or {len(tokens)}. "
                "Does the engine return generated tokens only, or leave out what was cached?"
            )
        if self._rows and rows.shape[1:] != self._rows[0].shape[1:]:
            raise RouteError(
                f"{where}: routes of {list(rows.shape[1:])} layers and experts; the calls before "
                f"have {list(self._rows[0].shape[1:])}"
            )
        self._tokens.append(tokens)
        self._rows.append(rows)

    def extend(self, later: "Trajectory") -> None:
        """Take over the calls of a part."""
        self._tokens += later._tokens
        self._rows += later._rows

    def routes(self, token_ids: Sequence[int]) -> NDArray[np.int32] | None:
        """int32 [tokens, layers, topk] for these tokens: signed, and of a type that NCCL has.

        A token whose row no call has, or has with a negative id, is all `HOLE`. None if no call
        has routes.
        """
        if not self._rows:
            return None
        wanted = _ints(token_ids)
        out = np.full((len(wanted), *self._rows[0].shape[1:]), HOLE, dtype=np.int32)
        held = np.zeros(len(wanted), dtype=bool)
        for tokens, rows in zip(self._tokens, self._rows, strict=True):
            usable = min(_common(tokens, wanted), len(rows))
            new = ~held[:usable] & (rows[:usable] >= 0).all(axis=(1, 2))
            out[:usable][new] = rows[:usable][new]
            held[:usable] |= new
        return out


current: ContextVar[Trajectory | None] = ContextVar("trajectory", default=None)
"""The trajectory of this task. Tasks that it starts have the same one."""


def _ints(values: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens are the same from the start."""
    both = min(len(a), len(b))
    differing = np.flatnonzero(a[:both] != b[:both])
    return int(differing[0]) if len(differing) else both
