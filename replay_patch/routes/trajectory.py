"""`Trajectory`: the pieces of one trajectory that have token ids, put at the tokens that were kept.

An agent loop makes several generate calls: turns of a tool loop, generations that were aborted and
resumed. Each returns rows for the whole sequence, for all tokens or all but the last, or none at
all; and the trajectory may be cut or retokenised afterwards. So a token takes a call's row if all
tokens up to it are the same in the call and in the trajectory. Of several calls the first counts,
the one that sampled the next token (`pieces.fill_holes`, as for `Routes`). The last token of a call
was never fed forward: a row for it is filling, as is one of zeros only.

The result is an array for the trainer's own tensors, and no `Routes`, as the model's number of
experts is not known here.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay_patch.errors import RouteError
from replay_patch.routes.pieces import fill_holes
from replay_patch.routes.stale_rows import zero_rows

HOLE = -1
"""The ids of a token that no call has routes for."""


class _Piece(NamedTuple):
    """One call: the tokens that it ended with, and rows for all of them or all but the last."""

    token_ids: NDArray[np.int64]
    rows: NDArray[Any]


@dataclass
class Trajectory:
    """The calls of one trajectory so far. `name` says which it is, in errors."""

    name: str = "trajectory"
    unwanted: bool = False
    """Nothing is trained on it (validation)."""
    merged_by_caller: bool = False
    """The caller puts rows of several calls together by their number: it is to get none."""
    _pieces: list[_Piece] = field(default_factory=list)

    def add(self, prompt_ids: Any, token_ids: Any, routes: Any) -> None:
        """Note one generate call; a RouteError for another shape or another number of rows.

        Args:
            prompt_ids, token_ids: what it was given and what it generated, in any form that `flat`
                takes.
            routes: integers [N or N - 1, layers, topk], N the number of both kinds of tokens. None
                or no row, as of a request that was aborted before it began, is not noted.
        """
        rows = np.asarray(routes)
        if routes is None or not rows.size:
            return
        prompt, new = flat(prompt_ids), flat(token_ids)
        tokens = np.concatenate([prompt, new])
        where = f"{self.name}, generate call {len(self._pieces) + 1}"
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
        self._keep(_Piece(tokens, rows))

    def extend(self, later: "Trajectory") -> None:
        """Take over the calls of a part of this trajectory, in order; a RouteError if their routes
        have other layers or another top-k than those of the calls before."""
        for piece in later._pieces:
            self._keep(piece)

    def _keep(self, piece: _Piece) -> None:
        shape = piece.rows.shape[1:]
        if self._pieces and shape != self._pieces[0].rows.shape[1:]:
            raise RouteError(
                f"{self.name}, generate call {len(self._pieces) + 1}: routes of {list(shape)} "
                "layers and experts; the calls before have "
                f"{list(self._pieces[0].rows.shape[1:])}"
            )
        self._pieces.append(piece)

    def routes(self, token_ids: Sequence[int]) -> NDArray[np.int32] | None:
        """int32 [tokens, layers, topk] for these tokens: signed, and of a type that NCCL has. A
        token is all `HOLE` if no call has a row for it that a router can have chosen. None if no
        call has routes."""
        if not self._pieces:
            return None
        kept = flat(token_ids)
        rows = np.full((len(kept), *self._pieces[0].rows.shape[1:]), HOLE, dtype=np.int32)
        captured = np.zeros(len(kept), dtype=np.bool_)
        for piece in self._pieces:
            usable = min(
                _common_prefix(piece.token_ids, kept), len(piece.rows), len(piece.token_ids) - 1
            )
            later = piece.rows[:usable]
            fill_holes(rows[:usable], captured[:usable], later, _can_be_chosen(later))
        return rows


current: ContextVar[Trajectory | None] = ContextVar("trajectory", default=None)
"""The trajectory of this task. Tasks that it starts have the same one."""


def flat(token_ids: Any) -> NDArray[np.int64]:
    """Token ids of one sequence as int64 [tokens], from what verl's servers take: a list, an array
    or a tensor, also [1, tokens]; or a mapping with "input_ids", as a tokenizer returns."""
    ids = token_ids["input_ids"] if isinstance(token_ids, Mapping) else token_ids
    return np.asarray(ids, dtype=np.int64).reshape(-1)


def _can_be_chosen(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """bool [tokens]: a router can have chosen this row [layers, topk]."""
    negative: NDArray[np.bool_] = np.any(rows < 0, axis=(1, 2))
    return ~(negative | zero_rows(rows))


def _common_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens are the same from the start."""
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter
