"""Where the ids are in what an engine returns. No engine is imported: its fields say what it is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes.arguments import integer
from replay_patch.routes.responses.engine import Engine


@dataclass(frozen=True)
class PayloadOptions:
    """What a caller says about a payload: arguments of `Routes.from_engine`."""

    num_experts: int
    num_tokens: int
    on_invalid: str
    topk: int | None
    num_layers: int | None
    layers: str | Iterable[int] | None
    start: int | None
    missing: int | None
    dtype: str | None
    choice: int | None
    max_run: int | None


@dataclass(frozen=True)
class ResponseFields:
    """What a payload holds."""

    response_ids: Any
    """Packed ids; of the whole trajectory, unless they are split. None: the engine has none."""
    prompt_ids: Any = None
    """Packed ids of the prompt, where they are split from the others."""
    prompt_tokens: int | None = None
    """How many rows `prompt_ids` must have, if the payload says so."""


# For all engines: servers and gateways in front of them wrap a completion alike.
_COMPLETIONS = ("outputs", "choices")
_DICTS_OF_A_COMPLETION = ("meta_info", "sglext")


def read_fields(
    payload: Any, engine: Engine, options: PayloadOptions
) -> tuple[ResponseFields, PayloadOptions]:
    """The ids in a payload, and the options with what the payload says about them. A RouteError if
    the engine's field is missing, or it is not clear which completion is meant."""
    if payload is None or not _is_response(payload):
        return ResponseFields(payload), options
    holders = _holders(payload, options.choice)
    names = [n for n in engine.fields if any(_has(holder, n) for holder in holders)]
    if not names:
        raise RouteError(
            f"no field {' or '.join(map(repr, engine.fields))} in the {type(payload).__name__}: "
            "expected the routes that the engine returned. Were they asked for "
            f"({engine.switch}), and is the field in every list of fields on the way here?"
        )
    values = [_first_value(holders, n) for n in names]
    ids = next((value for value in values if value is not None), None)
    start = _first_value(holders, "routed_experts_start_len")
    if start is not None and options.start not in (None, start):
        raise RouteError(
            f"start={options.start}, and the payload has routed_experts_start_len={start}: "
            "expected the same"
        )
    options = replace(
        options,
        start=start if options.start is None else options.start,
        dtype=options.dtype or _first_value(holders, "routed_experts_dtype"),
    )
    prompt = _first_value(holders, engine.prompt_field) if engine.prompt_field else None
    token_ids = None if prompt is None else _first_value(holders, "prompt_token_ids")
    prompt_tokens = None if token_ids is None else len(token_ids)
    return ResponseFields(ids, prompt, prompt_tokens), options


def _is_response(payload: Any) -> bool:
    """Whether it is a response or completion, and not the ids themselves."""
    if isinstance(payload, Mapping):
        return "data" not in payload  # an array as a dict; see `packings`
    if isinstance(payload, list | tuple):
        if payload and (isinstance(payload[0], Mapping) or _has(payload[0], "outputs")):
            raise RouteError(
                f"a list of {len(payload)} responses: expected that of one trajectory, payload[i]"
            )
        return False
    return not (
        isinstance(payload, str | bytes | bytearray | memoryview | Tensor)
        or hasattr(payload, "__array_interface__")
        or hasattr(payload, "__array__")
    )


def _holders(payload: Any, choice: int | None) -> list[Any]:
    """What may have the field, from inside out: dicts of the completion, itself, the response."""
    holders = [payload]
    for name in _COMPLETIONS:
        completions = _value(payload, name)
        if isinstance(completions, list | tuple) and completions:
            if choice is None and len(completions) > 1:
                raise RouteError(
                    f"{len(completions)} {name} in the response: expected one; say choice=..."
                )
            index = 0 if choice is None else integer("choice", choice, 0)
            if index >= len(completions):
                raise RouteError(f"choice is {index}: expected less than {len(completions)} {name}")
            holders.insert(0, completions[index])
    inner = [_value(holder, name) for holder in holders for name in _DICTS_OF_A_COMPLETION]
    return [holder for holder in inner if holder is not None] + holders


def _value(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _has(holder: Any, name: str) -> bool:
    return name in holder if isinstance(holder, Mapping) else hasattr(holder, name)


def _first_value(holders: Iterable[Any], name: str) -> Any:
    values = (_value(holder, name) for holder in holders)
    return next((value for value in values if value is not None), None)
