"""The REPLAY_PATCH* environment variables, read once at activation.

| variable | meaning |
| --- | --- |
| `REPLAY_PATCH` | 1, true, on, yes: enable. 0, false, off, no, empty, unset: leave off |
| `REPLAY_PATCH_SKIP` | names of patches to leave out, separated by commas |
| `REPLAY_PATCH_STRICT` | like `REPLAY_PATCH`: a failed or lost patch, or a row of expert ids that cannot be replayed, is an error at first use |
| `REPLAY_PATCH_LOG` | DEBUG, INFO, WARNING or ERROR: log to stderr from this level on |
"""  # noqa: E501 - a table row cannot be broken

import os
from collections.abc import Mapping
from dataclasses import dataclass

from replay_patch import OFF
from replay_patch.errors import SettingsError

ON = frozenset({"1", "true", "on", "yes"})
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True)
class Settings:
    """What was asked for. `problems` says which values were not understood, in words."""

    enabled: bool = False
    skip: frozenset[str] = frozenset()
    strict: bool = False
    log: str | None = None
    problems: tuple[str, ...] = ()


PREFIX = "REPLAY_PATCH"


def variables() -> dict[str, str]:
    """Ours among the variables of this process: for processes that it starts elsewhere."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the variables; never raises, because `import torch` may be the caller."""
    env = os.environ if environ is None else environ
    problems: list[str] = []

    def switch(name: str) -> bool:
        try:
            return parse_switch(env.get(name, ""), name)
        except SettingsError as error:
            problems.append(str(error))
            return True  # never silently "off": what uses replay raises this problem

    log = env.get("REPLAY_PATCH_LOG", "").strip().upper()
    if log and log not in LOG_LEVELS:
        problems.append(f"REPLAY_PATCH_LOG={log!r} is not one of {', '.join(LOG_LEVELS)}")
        log = ""
    skip = frozenset(filter(None, (s.strip() for s in env.get("REPLAY_PATCH_SKIP", "").split(","))))
    return Settings(
        enabled=switch("REPLAY_PATCH"),
        strict=switch("REPLAY_PATCH_STRICT"),
        skip=skip,
        log=log or None,
        problems=tuple(problems),
    )


def parse_switch(value: str, name: str) -> bool:
    """The value of an on/off setting; SettingsError for a word that is neither for on nor off."""
    word = value.strip().lower()
    if word in ON or word in OFF:
        return word in ON
    raise SettingsError(
        f"{name}={value!r} is not understood: use one of {', '.join(sorted(ON))} for on, "
        f"{', '.join(sorted(OFF - {''}))} for off"
    )
