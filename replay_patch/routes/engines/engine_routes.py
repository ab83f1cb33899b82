"""What rollout engines return, as routes. R rows, L layers, E experts, K top-k, N tokens.

Where the ids are in a response is `response_fields`, how they are packed is `packings`; here they
are checked against what the caller knows.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes import expert_ids
from replay_patch.routes.engines import packings
from replay_patch.routes.engines.response_fields import ENGINES, PROMPT, Engine, Form, fields_of
from replay_patch.routes.engines.stale_rows import longest_run, unwritten_rows, unwritten_runs
from replay_patch.routes.expert_ids import MISSING, UNWRITTEN, Parts, integer, policy


def read(
    payload: Any,
    engine: str,
    num_experts: int,
    num_tokens: int,
    on_invalid: str,
    form: Form,
    name: str | None = None,
) -> Parts:
    """See `Routes.from_engine`."""
    try:
        policy("engine", engine, *ENGINES)
        policy("on_invalid", on_invalid, "raise", "hole")
        known = ENGINES[engine]
        tokens = integer("num_tokens", num_tokens, 0)
        integer("num_experts", num_experts, 1)
        found, form, prompt_tokens = fields_of(payload, known, form)
        if form.layers is None:
            form = replace(form, layers="moe" if len(found) > 1 else known.layers)
        if found[-1] is None:
            return _missing(num_experts, tokens, on_invalid, form, known)
        ids = _ids(found, tokens, form, prompt_tokens)
        _check_width(ids, num_experts, form)
        start = _placed(len(ids), tokens, form)
        whole = start + len(ids) == tokens
        made = _without_unwritten(ids, num_experts, start, on_invalid, form, whole)
        return _extended(made, (form.missing or 0) - 1)
    except RouteError as error:
        raise RouteError(f"{name}: {error}" if name else str(error)) from None


def _missing(num_experts: int, tokens: int, on_invalid: str, form: Form, known: Engine) -> Parts:
    """All holes, if the policy says so."""
    what = "no routes were returned (the field is None)"
    if on_invalid == "raise":
        raise RouteError(
            f"{what}: expected some, as the engine was asked for them ({known.switch}). It gives "
            "none for a preempted request; on_invalid='hole' lets the trajectory route natively"
        )
    if form.topk is None or form.num_layers is None:
        raise RouteError(f"{what}: to make holes of all tokens, say topk=... and num_layers=...")
    shape = integer("num_layers", form.num_layers, 0), integer("topk", form.topk, 1)
    start, _ = _ends(tokens, form)
    holes = torch.full((max(tokens - 1 - start, 0), *shape), -1, dtype=torch.int8)
    made = expert_ids.parts(holes, num_experts, None, start, form.layers, on_invalid)
    notes = torch.full((len(holes),), MISSING, dtype=torch.uint8)
    return replace(made, notes=notes if len(holes) else None)


def _ids(found: list[Any], tokens: int, form: Form, prompt_tokens: int | None) -> Tensor:
    """Integers [R, L, K] of all pieces."""
    rows = _ends(tokens, form)[1] if len(found) == 1 else ()
    packing = packings.Packing(form.topk, form.num_layers, form.dtype, rows)
    pieces = [packings.ids_of(piece, packing) for piece in found]
    if prompt_tokens is not None and len(pieces[0]) != prompt_tokens:
        raise RouteError(
            f"{PROMPT} has {len(pieces[0])} rows: expected {prompt_tokens}, one for each prompt "
            "token"
        )
    pieces = [piece for piece in pieces if len(piece)] or pieces[:1]
    shapes = {tuple(piece.shape[1:]) for piece in pieces}
    if len(shapes) > 1:
        raise RouteError(f"prompt and response have [layers, topk] {sorted(shapes)}: expected one")
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _check_width(ids: Tensor, num_experts: int, form: Form) -> None:
    """Refuse more columns or layers than the model has; nothing shows which are the right ones."""
    rows, num_layers, columns = ids.shape
    topk = form.topk
    if topk is not None and integer("topk", topk, 1) != columns:
        more = " Are shared experts among the columns?" if columns > topk else ""
        raise RouteError(f"{columns} columns of ids: expected topk={topk}.{more}")
    if form.num_layers is not None and form.num_layers != num_layers:
        raise RouteError(
            f"{num_layers} layers of ids: expected num_layers={form.num_layers}; layers='all' or "
            "'moe' says whether dense layers are among them"
        )
    if rows * num_layers < 8 or columns < 2:  # so few may be bad rows like any other
        return
    last = ids[..., -1]
    used = (ids != 0).any(2) & (last != -1)
    if bool(used.any()) and bool((last[used] >= num_experts).all()):
        raise RouteError(
            f"the last of {columns} columns is {num_experts} or more in every row: expected ids "
            f"from 0 to {num_experts - 1}. Shared experts have widened the rows; top-k is less"
        )


def _ends(tokens: int, form: Form) -> tuple[int, tuple[int, ...]]:
    """(start, how many rows may be there: first without the prefix, then with it)."""
    start = 0 if form.start is None else integer("start", form.start, 0)
    if start > tokens:
        raise RouteError(f"start is {start}: expected at most num_tokens={tokens}")
    if form.missing is not None:
        ends = [tokens - integer("missing", form.missing, 0)]
    else:
        ends = [tokens - 1] if start else [tokens - 1, tokens]
    ends = [end for end in ends if end >= 0]
    return start, tuple(max(0, end - start) for end in ends) + tuple(ends if start else ())


def _placed(rows: int, tokens: int, form: Form) -> int:
    """The token of the first row, told by the number of rows."""
    start, counts = _ends(tokens, form)
    if rows in counts:
        return 0 if start and rows != counts[0] else start
    what = f"{rows} rows for {tokens} tokens" + (f" from token {start} on" if start else "")
    if rows > tokens:
        why = "rows of draft tokens that were not accepted, or of another trajectory, are there"
    else:
        why = (
            "say start=... if the request left out a prefix, missing=... if more tokens at the end "
            "were never fed forward; vLLM's split form needs prompt_routed_experts, too"
        )
    expected = " or ".join(map(str, counts)) or "none"
    raise RouteError(f"{what}: expected {expected}, as the last sampled token has no route; {why}")


def _without_unwritten(
    ids: Tensor, num_experts: int, start: int, on_invalid: str, form: Form, whole: bool
) -> Parts:
    """Checked routes, in which what nobody wrote is a hole, or an error; `whole`: the last row is
    that of the trajectory's last token."""
    zeros = unwritten_rows(ids)
    known = ~zeros
    if whole and len(ids):
        zeros[-1] = False  # it was never fed forward: zeros there are filling, and nothing is lost
    if on_invalid == "raise" and zeros.any():
        _refuse(zeros, start, "nothing but zeros in every layer")
    made = expert_ids.parts(ids, num_experts, known, start, form.layers, on_invalid)
    longest = form.max_run
    if longest is None:
        live = made.expert_ids.shape[1] - len(made.empty_layers)
        longest = longest_run(num_experts, live, ids.shape[2])
    stale = unwritten_runs(made, integer("max_run", longest, 1))
    if on_invalid == "raise" and stale.any():
        _refuse(stale, start, f"the same experts in all layers for more than {longest} tokens")
    notes = made.notes
    if not (zeros.any() or stale.any()):
        return made
    if stale.any():
        made.expert_ids[stale] = 0
    notes = expert_ids.noted(notes, zeros | stale, UNWRITTEN)
    return replace(made, captured=made.captured & ~stale, notes=notes)


def _refuse(tokens: Tensor, start: int, what: str) -> None:
    first = int(tokens.nonzero()[0])
    raise RouteError(
        f"row {first} (token {start + first}) has {what}: expected what a router chose; this is a "
        f"buffer that was never written. {int(tokens.sum()) - 1} more tokens are like it. "
        "on_invalid='hole' lets such tokens route natively"
    )


def _extended(made: Parts, rows: int) -> Parts:
    """With holes at the end, so that only the last token is without a row."""
    if rows < 1:
        return made
    ids, captured, notes = made.expert_ids, made.captured, made.notes
    if notes is not None:
        notes = torch.cat([notes, notes.new_zeros(rows)])
    return replace(
        made,
        expert_ids=torch.cat([ids, ids.new_zeros(rows, *ids.shape[1:])]),
        captured=torch.cat([captured, captured.new_zeros(rows)]),
        notes=notes,
    )
