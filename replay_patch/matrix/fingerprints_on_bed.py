"""The fingerprints of a Megatron that needs the CPU bed to be imported.

python -m replay_patch.matrix.fingerprints_on_bed             # of the one here, as JSON
python -m replay_patch.matrix.fingerprints_on_bed --write     # known_targets.json made anew
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay_patch.drift import examination
from replay_patch.drift.comparison import KNOWN, watched, without_reason
from replay_patch.drift.fingerprints import UNSEEN
from replay_patch.errors import ReplayPatchError
from replay_patch.matrix import cpu, environments

__all__ = ["examine"]

_MODULE = "replay_patch.matrix.fingerprints_on_bed"  # __name__ is another one when it runs


def examine(python_path: Sequence[Path] = (), timeout: float = 120.0) -> dict[str, Any]:
    """`drift.examination.examine`, with the CPU bed."""
    return examination.examine(python_path, module=_MODULE, timeout=timeout)


def _known_text() -> str:
    """The text of known_targets.json, from the tested releases."""
    seen = {
        release: examination.installed_fingerprints(
            [environments.environment(release)], module=_MODULE
        )["targets"]
        for release in environments.TESTED_RELEASES
    }
    targets: dict[str, list[dict[str, Any]]] = {}
    for target in sorted(watched()):
        variants = targets.setdefault(target, [])
        for release, fingerprints in seen.items():
            fingerprint = fingerprints[target]
            if fingerprint["kind"] == UNSEEN:
                raise ReplayPatchError(f"megatron-core {release}: {fingerprint['reason']}")
            bare = without_reason(fingerprint)
            same = next((variant for variant in variants if variant["is"] == bare), None)
            if same is None:
                variants.append({"releases": [release], "is": bare})
            else:
                same["releases"].append(release)
    return json.dumps({"releases": list(seen), "targets": targets}, indent=1) + "\n"


def main() -> None:
    """Print the fingerprints here, or with --write store those of the tested releases."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}")
    parser.add_argument("--write", action="store_true", help=f"make {KNOWN.name} anew")
    if parser.parse_args().write:
        KNOWN.write_text(_known_text())
    else:
        examination.say_fingerprints(cpu.install)


if __name__ == "__main__":
    main()
