"""What runs in a matrix environment: import Megatron once, then each check in a process of its own.

    python -m replay_patch.matrix.cells --checks record,replay [--mindspeed] [--timeout 60]

Lines of JSON on stdout: first what was imported, then each finished cell. Importing Megatron takes
seconds, or minutes with many optional packages: cells (`cell_processes`) are forked after it.
"""

import argparse
import importlib
import json
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from replay_patch.matrix.cell_processes import described, run_all
from replay_patch.matrix.checks import CHECKS
from replay_patch.processes import parents_stdout

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the checks asked for; returns 1 if Megatron could not be imported."""
    parser = argparse.ArgumentParser(prog="python -m replay_patch.matrix.cells")
    parser.add_argument("--checks", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0, help="of a check, in seconds")
    parser.add_argument("--mindspeed", action="store_true")
    args = parser.parse_args(argv)
    out = parents_stdout()  # Megatron, MindSpeed and the checks may print
    try:
        imported = _import(args.mindspeed)
    except BaseException as error:  # noqa: BLE001 - whatever an import does is the user's answer
        print(json.dumps({"problem": _import_problem(error)}), file=out)
        return 1
    print(json.dumps(imported), file=out)
    stopped = threading.Event()  # not an exception: one that hits os.fork() is lost
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    checks = [CHECKS[name] for name in args.checks.split(",")]
    with tempfile.TemporaryDirectory(prefix="replay-patch-cells-") as folder:
        for cell in run_all(checks, args.jobs, args.timeout, Path(folder), stopped):
            print(json.dumps(cell), file=out)
    return 0


def _import(mindspeed: bool) -> dict[str, Any]:
    """Import as a job with the plugin on does; returns the versions and where they are from."""
    from replay_patch.matrix import ascend_bed, cpu

    cpu.install()
    import replay_patch
    from replay_patch.patching.registry import megatron_modules

    replay_patch.activate()
    version = None
    if mindspeed:
        # Before Megatron, whose modules bind what it replaces.
        version = str(getattr(ascend_bed.adapt(), "__version__", "unknown"))
    import megatron.core
    from megatron.core.package_info import __version__

    for module in megatron_modules():
        importlib.import_module(module)
    importlib.import_module("megatron.core.models.gpt")
    cpu.patch_megatron()
    folder = Path(str(megatron.core.__file__)).parents[2]
    return {"megatron": str(__version__), "mindspeed": version, "folder": str(folder)}


def _import_problem(error: BaseException) -> str:
    missing = getattr(error, "name", None)
    if missing in ("megatron", "megatron.core"):
        return (
            "there is no Megatron here: megatron.core is not installed and not on the path. "
            "`--megatron latest` downloads one"
        )
    advice = ""
    if isinstance(error, ModuleNotFoundError) and missing:
        ours = missing.startswith("megatron.")
        advice = "(Megatron-core 0.12.0 and later have it)" if ours else f"(install {missing})"
    return f"importing Megatron failed: {described(error)}\n{advice}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
