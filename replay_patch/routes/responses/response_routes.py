"""What rollout engines return, as routes. R rows, L layers, E experts, K top-k, N tokens.
`response_fields` finds the ids in a response, and `packings` unpacks them; here they are checked
against what the caller knows."""

from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes import expert_ids
from replay_patch.routes.arguments import check_word, integer
from replay_patch.routes.expert_ids import CheckedRoutes
from replay_patch.routes.responses.engine import Engine, engine_named
from replay_patch.routes.responses.packings import unpacked_ids
from replay_patch.routes.responses.response_fields import (
    PayloadOptions,
    ResponseFields,
    read_fields,
)
from replay_patch.routes.stale_rows import longest_run, repeated_rows, zero_rows


def response_routes(
    payload: Any, engine_name: str, options: PayloadOptions, name: str | None = None
) -> CheckedRoutes:
    """What an engine returned for one trajectory; `Routes.from_engine` has arguments and errors."""
    try:
        engine = engine_named(engine_name)
        check_word("on_invalid", options.on_invalid, "raise", "hole")
        options = replace(options, num_tokens=integer("num_tokens", options.num_tokens, 0))
        integer("num_experts", options.num_experts, 1)
        fields, options = read_fields(payload, engine, options)
        if options.layers is None:
            layers = engine.layers if fields.prompt_ids is None else engine.layers_if_split
            options = replace(options, layers=layers)
        if fields.response_ids is None:
            return _all_missing(options, engine)
        if fields.prompt_ids is None:
            ids = unpacked_ids(fields.response_ids, options, _row_counts(options)[1])
        else:
            ids = _joined_ids(fields, engine, options)
        _check_width(ids, options)
        routes = _without_unwritten(ids, _first_token(len(ids), options), options)
        return _with_holes_at_end(routes, (options.missing or 0) - 1)
    except RouteError as error:
        raise RouteError(f"{name}: {error}" if name else str(error)) from None


def _all_missing(options: PayloadOptions, engine: Engine) -> CheckedRoutes:
    """All holes if `on_invalid` is "hole", else a RouteError."""
    what = "no routes were returned (the field is None)"
    if options.on_invalid == "raise":
        raise RouteError(
            f"{what}: expected some, as the engine was asked for them ({engine.switch}). It gives "
            "none for a preempted request; on_invalid='hole' lets the trajectory route natively"
        )
    if options.topk is None or options.num_layers is None:
        raise RouteError(f"{what}: to make holes of all tokens, say topk=... and num_layers=...")
    shape = integer("num_layers", options.num_layers, 0), integer("topk", options.topk, 1)
    start, _ = _row_counts(options)
    holes = torch.full((max(options.num_tokens - 1 - start, 0), *shape), -1, dtype=torch.int8)
    routes = _checked(holes, None, start, options)
    notes = torch.full((len(holes),), expert_ids.MISSING, dtype=torch.uint8)
    return replace(routes, notes=notes if len(holes) else None)


def _checked(
    ids: Tensor, captured: Tensor | None, start: int, options: PayloadOptions
) -> CheckedRoutes:
    layers: Any = options.layers  # not None: the engine's, if the caller did not say
    return expert_ids.checked_routes(
        ids, options.num_experts, captured, start, layers, options.on_invalid
    )


def _joined_ids(fields: ResponseFields, engine: Engine, options: PayloadOptions) -> Tensor:
    """Integers [R, L, K], those of the prompt first."""
    prompt = unpacked_ids(fields.prompt_ids, options)
    response = unpacked_ids(fields.response_ids, options)
    if fields.prompt_tokens is not None and len(prompt) != fields.prompt_tokens:
        raise RouteError(
            f"{engine.prompt_field} has {len(prompt)} rows: expected {fields.prompt_tokens}, one "
            "for each prompt token"
        )
    pieces = [piece for piece in (prompt, response) if len(piece)] or [prompt]
    shapes = {tuple(piece.shape[1:]) for piece in pieces}
    if len(shapes) > 1:
        raise RouteError(f"prompt and response have [layers, topk] {sorted(shapes)}: expected one")
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _check_width(ids: Tensor, options: PayloadOptions) -> None:
    """Refuse more columns or layers than the model has; nothing shows which are the right ones."""
    rows, num_layers, columns = ids.shape
    topk, num_experts = options.topk, options.num_experts
    if topk is not None and integer("topk", topk, 1) != columns:
        more = " Are shared experts among the columns?" if columns > topk else ""
        raise RouteError(f"{columns} columns of ids: expected topk={topk}.{more}")
    if options.num_layers is not None and options.num_layers != num_layers:
        raise RouteError(
            f"{num_layers} layers of ids: expected num_layers={options.num_layers}; layers='all' "
            "or 'moe' says whether dense layers are among them"
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


def _row_counts(options: PayloadOptions) -> tuple[int, tuple[int, ...]]:
    """(start, how many rows may be there: first without the prefix, then with it)."""
    tokens = options.num_tokens
    start = 0 if options.start is None else integer("start", options.start, 0)
    if start > tokens:
        raise RouteError(f"start is {start}: expected at most num_tokens={tokens}")
    if options.missing is not None:
        ends = [tokens - integer("missing", options.missing, 0)]
    else:
        ends = [tokens - 1] if start else [tokens - 1, tokens]
    ends = [end for end in ends if end >= 0]
    return start, tuple(max(0, end - start) for end in ends) + tuple(ends if start else ())


def _first_token(rows: int, options: PayloadOptions) -> int:
    """The token of the first row, told by the number of rows."""
    tokens = options.num_tokens
    start, counts = _row_counts(options)
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


def _without_unwritten(ids: Tensor, start: int, options: PayloadOptions) -> CheckedRoutes:
    """Checked routes, in which what nobody wrote is a hole, or an error."""
    on_invalid, max_run = options.on_invalid, options.max_run
    zeros = torch.from_numpy(zero_rows(ids.numpy()))
    captured = ~zeros
    if len(ids) and start + len(ids) == options.num_tokens:
        zeros[-1] = False  # it was never fed forward: zeros there are filling, and nothing is lost
    if on_invalid == "raise" and zeros.any():
        _refuse_unwritten(zeros, start, "nothing but zeros in every layer")
    routes = _checked(ids, captured, start, options)
    if max_run is None:
        live = routes.expert_ids.shape[1] - len(routes.empty_layers)
        max_run = longest_run(options.num_experts, live, ids.shape[2])
    stale = repeated_rows(routes, integer("max_run", max_run, 1))
    if on_invalid == "raise" and stale.any():
        what = f"the same experts in all layers for more than {max_run} tokens"
        _refuse_unwritten(stale, start, what)
    if not (zeros.any() or stale.any()):
        return routes
    if stale.any():
        routes.expert_ids[stale] = 0
    notes = expert_ids.with_cause(routes.notes, zeros | stale, expert_ids.UNWRITTEN)
    return replace(routes, captured=routes.captured & ~stale, notes=notes)


def _refuse_unwritten(tokens: Tensor, start: int, what: str) -> NoReturn:
    first = int(tokens.nonzero()[0])
    raise RouteError(
        f"row {first} (token {start + first}) has {what}: expected what a router chose; this is a "
        f"buffer that was never written. {int(tokens.sum()) - 1} more tokens are like it. "
        "on_invalid='hole' lets such tokens route natively"
    )


def _with_holes_at_end(routes: CheckedRoutes, rows: int) -> CheckedRoutes:
    """With holes at the end, so that only the last token is without a row."""
    if rows < 1:
        return routes
    ids, captured, notes = routes.expert_ids, routes.captured, routes.notes
    if notes is not None:
        notes = torch.cat([notes, notes.new_zeros(rows)])
    return replace(
        routes,
        expert_ids=torch.cat([ids, ids.new_zeros(rows, *ids.shape[1:])]),
        captured=torch.cat([captured, captured.new_zeros(rows)]),
        notes=notes,
    )
