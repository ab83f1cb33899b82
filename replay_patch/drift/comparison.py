"""What a Megatron that no one has seen has moved under the patches, told before anything runs.

`known_targets.json` holds the fingerprints (see `fingerprints`) of all that the patches change or
stand on, in each tested release; `compare` says in words what differs from them here.

    python -m replay_patch.drift.comparison [--cpu]     # the fingerprints here, as JSON
    python -m replay_patch.drift.comparison --write     # known_targets.json, from all releases
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replay_patch.drift.fingerprints import ABSENT, UNSEEN, Fingerprint, moved, of_need, of_target
from replay_patch.errors import ReplayPatchError
from replay_patch.matrix import environments
from replay_patch.megatron import no_triton
from replay_patch.patching.patch import Patch
from replay_patch.patching.registry import patches
from replay_patch.refusals import installed_megatron

__all__ = ["compare", "describe", "examine", "known_targets", "live", "watched"]

KNOWN = Path(__file__).with_name("known_targets.json")

_NEEDED = "needed:"


def _of_megatron() -> list[Patch]:
    return [patch for patch in patches() if not patch.optional]


def watched() -> dict[str, tuple[str, ...]]:
    """Everything that is compared -> the patches it concerns.

    Keys are `module:qualname`, `module:` (its classes), and `needed:patch` (whether it is needed).
    """
    out: dict[str, tuple[str, ...]] = {}
    for patch in _of_megatron():
        own = (f"{_NEEDED}{patch.name}", *patch.targets, *patch.relies_on)
        for target in dict.fromkeys(own):
            out[target] = (*out.get(target, ()), patch.name)
    return out


def examine(
    python_path: Sequence[str | os.PathLike[str]] | None = None,
    *,
    cpu: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> dict[str, Any]:
    """Compare the Megatron that a fresh interpreter finds, with the plugin off. Never raises.

    Args:
        python_path: folders to look in before those of this process.
        cpu: install the CPU bed first (`replay_patch.matrix.cpu`).
        env: variables to set; not PYTHONPATH.
        timeout: in seconds; importing Megatron takes about three.

    Returns:
        `megatron` (how it calls itself, or None), `drift` (as `compare` gives it), and `problem`:
        what could not be looked at and why, or None.
    """
    try:
        seen = _look(python_path, cpu, env, timeout)
    except (ReplayPatchError, OSError) as error:
        return {"megatron": None, "drift": [], "problem": str(error)}
    targets = seen["targets"]
    reasons = dict.fromkeys(f["reason"] for f in targets.values() if f["kind"] == UNSEEN)
    problem = f"not all of it can be imported: {'; '.join(reasons)}" if reasons else None
    return {"megatron": seen["megatron"], "drift": compare(targets), "problem": problem}


def live() -> dict[str, Fingerprint]:
    """The fingerprint of everything `watched`, here. Imports Megatron; the plugin must be off."""
    out = {t: of_target(t) for t in watched() if not t.startswith(_NEEDED)}
    return out | {f"{_NEEDED}{patch.name}": of_need(patch) for patch in _of_megatron()}


def known_targets() -> dict[str, Any]:
    """The content of known_targets.json: `releases`, and `targets`, which for each target has its
    distinct fingerprints (`is`) with the `releases` that have each."""
    data: dict[str, Any] = json.loads(KNOWN.read_text())
    return data


def compare(
    live: Mapping[str, Fingerprint], known: dict[str, Any] | None = None
) -> list[dict[str, str]]:
    """What differs from every tested release.

    Args:
        live: as `live` makes it. Unseen targets are left out.
        known: as `known_targets`, which is the default.

    Returns:
        One item per target and patch: `patch`, `target`, `what` (in words), and `nearest`, the
        tested release that agrees in most targets, which the words compare with. Targets that
        are known, but from another release than the nearest, are items too: their combination
        is not tested. A release whose targets are all as in one tested release gives [].
    """
    known = known_targets() if known is None else known
    tested = {
        target: {release: v["is"] for v in variants for release in v["releases"]}
        for target, variants in known["targets"].items()
    }
    here = {t: _bare(f) for t, f in live.items() if t in tested and f["kind"] != UNSEEN}

    def agreeing(release: str) -> int:
        return sum(tested[t][release] == f for t, f in here.items())

    nearest = max(reversed(known["releases"]), key=agreeing)  # the newest, among equals
    items = []
    for target, concerned in watched().items():
        if target not in here or tested[target][nearest] == here[target]:
            continue
        same = [r for r in known["releases"] if tested[target][r] == here[target]]
        if target.startswith(_NEEDED):
            what = _need_in_words(live[target], nearest if same else "the tested releases")
        else:
            what = "; ".join(moved(tested[target][nearest], live[target], nearest))
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
        name = item["target"].rstrip(":").replace(_NEEDED, "patch ")
        targets.setdefault((item["what"], concerns), {})[name] = None
    lines = [
        f"  - {', '.join(found)}: {what} [{concerns}]"
        for (what, concerns), found in targets.items()
    ]
    head = f"This Megatron differs from the tested releases (the nearest is {items[0]['nearest']}):"
    return "\n".join([head, *lines])


def _bare(f: Mapping[str, Any]) -> Fingerprint:
    return {k: v for k, v in f.items() if k != "reason"}


def _need_in_words(new: Fingerprint, where: str) -> str:
    said = {
        "needed": f"is needed here, and not on {where}",
        "not needed": f"is not needed here, and is on {where}",
    }
    unsure = f"cannot tell whether it is needed: {new['kind']}"
    return f"{said.get(new['kind'], unsure)}: {new['reason']}"


# --- a fresh interpreter ------------------------------------------------------------------------


def _look(
    python_path: Sequence[str | os.PathLike[str]] | None,
    cpu: bool,
    env: Mapping[str, str] | None,
    timeout: float,
) -> dict[str, Any]:
    """What `main` prints there.

    Raises:
        ReplayPatchError: no Megatron, a crash, or out of time.
    """
    paths = [os.path.abspath(path) for path in (*(python_path or ()), *sys.path)]
    environ = {**os.environ, **(env or {}), "REPLAY_PATCH": "0"}
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "replay_patch.drift.comparison", *["--cpu"] * cpu]
    # Files and not pipes, which a grandchild could hold open; an empty folder to start in, because
    # it comes first on the path.
    with tempfile.TemporaryDirectory(prefix="replay-patch-drift-") as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            try:
                code = subprocess.run(
                    command,
                    cwd=folder,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    timeout=timeout,
                ).returncode
            except subprocess.TimeoutExpired:
                raise ReplayPatchError(
                    f"importing Megatron was not finished after {timeout:g} s"
                ) from None
        if code == 0 and out.stat().st_size:
            seen: dict[str, Any] = json.loads(out.read_text())
        else:
            last = (err.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise ReplayPatchError(f"importing Megatron ended Python (exit code {code}): {last}")
    if seen["megatron"] is None:
        raise ReplayPatchError("there is no megatron.core on the path")
    return seen


def _known_text() -> str:
    """The text of known_targets.json, from the tested releases."""
    seen = {
        release: _look([environments.environment(release)], True, None, 120.0)["targets"]
        for release in environments.TESTED_RELEASES
    }
    targets: dict[str, list[dict[str, Any]]] = {}
    for target in sorted(watched()):
        variants = targets.setdefault(target, [])
        for release, found in seen.items():
            now = _bare(found[target])
            if now["kind"] == UNSEEN:
                raise ReplayPatchError(f"megatron-core {release}: {found[target]['reason']}")
            same = next((v for v in variants if v["is"] == now), None)
            if same is None:
                variants.append({"releases": [release], "is": now})
            else:
                same["releases"].append(release)
    return json.dumps({"releases": list(seen), "targets": targets}, indent=1) + "\n"


def main() -> None:
    """The fingerprints here, on stdout, or with --write those of the tested releases, to a file."""
    os.environ["REPLAY_PATCH"] = "0"  # before torch, which loads the plugin
    parser = argparse.ArgumentParser(prog="python -m replay_patch.drift.comparison")
    parser.add_argument("--cpu", action="store_true", help="install the CPU bed first")
    parser.add_argument("--write", action="store_true", help=f"make {KNOWN.name} anew")
    args = parser.parse_args()
    if args.write:
        KNOWN.write_text(_known_text())
        return
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Megatron prints
    if args.cpu:
        from replay_patch.matrix import cpu

        cpu.install()
    else:
        import torch

        # This process only reads code: triton need not be there, nor torch's compiler imported.
        no_triton.provide()
        vars(torch)["compile"] = lambda model=None, **_: model or (lambda function: function)
    targets = live()
    there = any(f["kind"] != ABSENT for t, f in targets.items() if not t.startswith(_NEEDED))
    with stdout:
        json.dump({"megatron": installed_megatron() if there else None, "targets": targets}, stdout)


if __name__ == "__main__":
    main()
