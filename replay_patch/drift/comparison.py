"""What an untested Megatron has changed under the patches, in words.
`known_targets.json` holds the fingerprints (see `fingerprints`) of all that the patches change or
stand on, in each tested release; `compare` says what differs from them. `examination` takes the
fingerprints of the Megatron here."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replay_patch.drift.fingerprints import UNSEEN, Fingerprint, differences
from replay_patch.patching.patch import Patch
from replay_patch.patching.registry import patches

__all__ = [
    "KNOWN",
    "NEEDED",
    "compare",
    "describe",
    "known_targets",
    "patches_compared",
    "watched",
    "without_reason",
]

KNOWN = Path(__file__).with_name("known_targets.json")

NEEDED = "needed:"
"""With the name of a patch behind it, the target that says whether the patch is needed."""


def patches_compared() -> list[Patch]:
    """The patches of Megatron itself, which every job imports."""
    return [patch for patch in patches() if not patch.optional]


def watched() -> dict[str, tuple[str, ...]]:
    """Everything that is compared -> the patches it concerns. Keys are `module:qualname`, `module:`
    (its classes), and `needed:patch` (whether it is needed)."""
    out: dict[str, tuple[str, ...]] = {}
    for patch in patches_compared():
        own = (f"{NEEDED}{patch.name}", *patch.targets, *patch.relies_on)
        for target in dict.fromkeys(own):
            out[target] = (*out.get(target, ()), patch.name)
    return out


def known_targets() -> dict[str, Any]:
    """The content of known_targets.json: `releases`, and `targets`, which for each target has its
    distinct fingerprints (`is`) with the `releases` that have each."""
    data: dict[str, Any] = json.loads(KNOWN.read_text())
    return data


def compare(
    live: Mapping[str, Fingerprint], known: dict[str, Any] | None = None
) -> list[dict[str, str]]:
    """What differs from every tested release, [] if all targets are as in one of them.

    Args:
        live: fingerprints of everything `watched`, by `examination`. Unseen targets are left out.
        known: as `known_targets`, which is the default.

    Returns:
        For each target and patch one item of `patch`, `target`, `what` (in words), and `nearest`,
        the tested release that agrees in most targets, which the words compare with. Targets known
        from another release than the nearest are items too: their combination is not tested.
    """
    known = known_targets() if known is None else known
    tested = {
        target: {release: v["is"] for v in variants for release in v["releases"]}
        for target, variants in known["targets"].items()
    }
    current = {t: without_reason(f) for t, f in live.items() if t in tested and f["kind"] != UNSEEN}

    def agreeing(release: str) -> int:
        return sum(tested[t][release] == f for t, f in current.items())

    nearest = max(reversed(known["releases"]), key=agreeing)  # the newest, among equals
    items = []
    for target, concerned in watched().items():
        if target not in current or tested[target][nearest] == current[target]:
            continue
        same = [r for r in known["releases"] if tested[target][r] == current[target]]
        if target.startswith(NEEDED):
            what = _need_in_words(live[target], nearest if same else "the tested releases")
        else:
            what = "; ".join(differences(tested[target][nearest], live[target], nearest))
        if same:
            what += f" (as on {same[-1]}; the combination is not tested)"
        items += [
            {"patch": patch, "target": target, "what": what, "nearest": nearest}
            for patch in concerned
        ]
    return items


def describe(items: Sequence[Mapping[str, str]]) -> str:
    """The items of `compare` as lines for people; "" if there are none."""
    if not items:
        return ""
    concerned: dict[str, list[str]] = {}
    targets: dict[tuple[str, str], dict[str, None]] = {}
    for item in items:
        concerned.setdefault(item["target"], []).append(item["patch"])
    for item in items:  # a function that another module imports has moved there, too
        concerns = ", ".join(concerned[item["target"]])
        name = item["target"].rstrip(":").replace(NEEDED, "patch ")
        targets.setdefault((item["what"], concerns), {})[name] = None
    lines = [
        f"  - {', '.join(names)}: {what} [{concerns}]"
        for (what, concerns), names in targets.items()
    ]
    head = f"This Megatron differs from the tested releases (the nearest is {items[0]['nearest']}):"
    return "\n".join([head, *lines])


def without_reason(fingerprint: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint as it is compared: without the reason, which holds paths and versions."""
    return {key: value for key, value in fingerprint.items() if key != "reason"}


def _need_in_words(new: Fingerprint, where: str) -> str:
    words = {
        "needed": f"is needed here, and not on {where}",
        "not needed": f"is not needed here, and is on {where}",
    }
    unsure = f"cannot tell whether it is needed: {new['kind']}"
    return f"{words.get(new['kind'], unsure)}: {new['reason']}"
