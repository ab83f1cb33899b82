"""Where the ids are in what an engine returns. No engine is imported: its fields say what it is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes.expert_ids import integer


@dataclass(frozen=True)
class Form:
    """What a caller knows about a payload; see `Routes.from_engine`."""

    topk: int | None
    num_layers: int | None
    layers: str | Iterable[int] | None
    start: int | None
    missing: int | None
    dtype: str | None
    choice: int | None
    max_run: int | None


@dataclass(frozen=True)
class Engine:
    fields: tuple[str, ...]
    """Names of the field with the ids, of which a payload has one."""
    layers: str
    """What the layer axis means, unless the caller says so."""
    switch: str
    """How the engine is told to return routes."""


ENGINES = {
    "vllm": Engine(("routed_experts",), "all", "enable_return_routed_experts"),
    "sglang": Engine(
        ("routed_experts",),
        "all",
        "--enable-return-routed-experts, and return_routed_experts in the request",
    ),
    "megatron": Engine(("routing_indices", "moe_topk_indices"), "moe", "moe_enable_routing_replay"),
}
PROMPT = "prompt_routed_experts"  # vLLM 0.21: the prompt's rows by themselves
_LISTS = ("outputs", "choices")  # of completions
_INNER = ("meta_info", "sglext")  # dicts in a completion


def fields_of(payload: Any, known: Engine, form: Form) -> tuple[list[Any], Form, int | None]:
    """(the pieces of the ids in a payload, the form with what the payload says about them, how many
    rows the first of two pieces must have)."""
    if payload is None or not _has_fields(payload):
        return [payload], form, None
    holders = _holders(payload, form.choice)
    names = [n for n in known.fields if any(_has(holder, n) for holder in holders)]
    if not names:
        raise RouteError(
            f"no field {' or '.join(map(repr, known.fields))} in the {type(payload).__name__}: "
            "expected the routes that the engine returned. Were they asked for "
            f"({known.switch}), and is the field in every list of fields on the way here?"
        )
    values = [_first(holders, n) for n in names]
    value = next((v for v in values if v is not None), None)
    prompt = _first(holders, PROMPT) if known is ENGINES["vllm"] else None
    said = _first(holders, "routed_experts_start_len")
    if said is not None and form.start not in (None, said):
        raise RouteError(
            f"start={form.start}, and the payload has routed_experts_start_len={said}: expected "
            "the same"
        )
    form = replace(
        form,
        start=said if form.start is None else form.start,
        dtype=form.dtype or _first(holders, "routed_experts_dtype"),
    )
    if prompt is None:
        return [value], form, None
    token_ids = _first(holders, "prompt_token_ids")
    return [prompt, value], form, None if token_ids is None else len(token_ids)


def _has_fields(payload: Any) -> bool:
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
        isinstance(payload, str | bytes | bytearray | memoryview | Tensor) or _array(payload)
    )


def _array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") or hasattr(value, "__array__")


def _holders(payload: Any, choice: int | None) -> list[Any]:
    """What may have the field, from inside out."""
    found = [payload]
    for name in _LISTS:
        inner = _get(payload, name)
        if isinstance(inner, list | tuple) and inner:
            if choice is None and len(inner) > 1:
                raise RouteError(
                    f"{len(inner)} {name} in the response: expected one; say choice=..."
                )
            place = 0 if choice is None else integer("choice", choice, 0)
            if place >= len(inner):
                raise RouteError(f"choice is {place}: expected less than {len(inner)} {name}")
            found.insert(0, inner[place])
    nested = [_get(holder, name) for holder in found for name in _INNER]
    return [inner for inner in nested if inner is not None] + found


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _has(holder: Any, name: str) -> bool:
    return name in holder if isinstance(holder, Mapping) else hasattr(holder, name)


def _first(holders: Iterable[Any], name: str) -> Any:
    return next((v for v in (_get(holder, name) for holder in holders) if v is not None), None)
