"""`Engine`: what is known of a rollout engine; each is a file in `replay_patch.routes.engines`."""

import functools
import importlib
import pkgutil
from dataclasses import dataclass

from replay_patch.routes.arguments import check_word

_PACKAGE = "replay_patch.routes.engines"  # by name: its files import `Engine` from here


@dataclass(frozen=True)
class Engine:
    """How an engine returns routes. A file of the folder has one as `ENGINE`."""

    fields: tuple[str, ...]
    """Names of the field with the ids, of which a payload has one."""
    layers: str
    """What the layer axis means, "all" or "moe", unless the caller says so."""
    switch: str
    """How the engine is told to return routes; errors name it."""
    prompt_field: str | None = None
    """The field with the rows of the prompt, if they may be split from those of the response."""
    layers_if_split: str = "moe"
    """`layers` of a payload that has `prompt_field`."""


def engine_named(name: str) -> Engine:
    """The engine in the file of this name; a RouteError if there is none."""
    check_word("engine", name, *engine_names())
    engine: Engine = importlib.import_module(f"{_PACKAGE}.{name}").ENGINE
    return engine


@functools.cache
def engine_names() -> tuple[str, ...]:
    """What `engine=` can be. There is no list: a new file is a new engine."""
    path = importlib.import_module(_PACKAGE).__path__
    names = (module.name for module in pkgutil.iter_modules(path))
    return tuple(sorted(names, reverse=True))  # vLLM first
