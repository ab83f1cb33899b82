"""The `replay-patch` command."""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay_patch import __version__
from replay_patch.errors import ReplayPatchError

_SITE = Path(__file__).with_name("site")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except ReplayPatchError as error:
        print(f"replay-patch: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (`| head`) has gone; Python would complain at exit, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("replay-patch: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay-patch",
        description="Routing replay for MoE reinforcement learning on any Megatron-core from 0.12.",
    )
    parser.add_argument("--version", action="version", version=f"replay-patch {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="show on a real Megatron-core, on a CPU, what replay changes"
    )
    demo.add_argument(
        "--megatron",
        default="latest",
        metavar="VERSION",
        help="the release to run on, downloaded once (default: the newest tested)",
    )
    demo.add_argument(
        "--megatron-path", metavar="DIR", help="a checkout to run on, in place of a download"
    )
    demo.add_argument("--seed", type=int, default=0, help="of weights, tokens and sampling")
    demo.add_argument("--cache", metavar="DIR", help="where releases are kept")
    demo.add_argument("--plot", metavar="FILE.png", help="also draw the figures (extra: plot)")
    _add_json(demo)
    demo.set_defaults(command=_demo)

    doctor = commands.add_parser(
        "doctor",
        help="what is installed here, what the plugin did, and what is wrong",
        description="Imports torch and Megatron as a job would. Exit code 1 if replay was asked "
        "for (REPLAY_PATCH=1) and is not fully active.",
    )
    _add_json(doctor)
    doctor.set_defaults(command=_doctor)

    patches = commands.add_parser("patches", help="list the patches and why each exists")
    _add_json(patches)
    patches.set_defaults(command=_patches)

    run = commands.add_parser(
        "run",
        help="run a command and its children with the plugin on",
        description="For torch < 2.5, for TORCH_DEVICE_BACKEND_AUTOLOAD=0 and for scripts that "
        "import torch_npu first: activates the plugin at the start of every Python process.",
    )
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    run.set_defaults(command=_run)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON to FILE, or to stdout in place of the text",
    )


def _report(args: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    if args.json == "-":
        print(json.dumps(data, indent=2))
        return
    print(text)
    if args.json is not None:
        try:
            Path(args.json).write_text(json.dumps(data, indent=2) + "\n")
        except OSError as error:
            raise ReplayPatchError(f"the JSON cannot be written to {args.json}: {error}") from error


def _demo(args: argparse.Namespace) -> int:
    from replay_patch import demo

    if args.plot and importlib.util.find_spec("matplotlib") is None:  # before the work, not after
        raise ReplayPatchError("--plot needs matplotlib: pip install 'replay-patch[plot]'")
    result = demo.run_demo(args.megatron, args.seed, args.cache, args.megatron_path)
    _report(args, result, demo.format_demo(result))
    if args.plot:
        demo.plot_demo(result, args.plot)
    return 0


def _examine() -> dict[str, Any]:
    from replay_patch import doctor

    with contextlib.redirect_stdout(sys.stderr):  # Megatron prints while it is imported
        return doctor.examine()


def _doctor(args: argparse.Namespace) -> int:
    from replay_patch import doctor

    report = _examine()
    _report(args, report, doctor.format_report(report))
    return 1 if report["enabled"] and not report["active"] else 0


def _patches(args: argparse.Namespace) -> int:
    from replay_patch.patches import PATCHES

    states = {p["name"]: p["state"] for p in _examine()["patches"]}
    rows = [
        {"name": p.name, "targets": list(p.targets), "why": p.why, "state": states[p.name]}
        for p in PATCHES
    ]
    lines = []
    for patch in PATCHES:
        why = textwrap.fill(patch.why, 96, initial_indent="    ", subsequent_indent="    ")
        lines.append(f"{patch.name} ({states[patch.name]})\n{why}")
    _report(args, {"patches": rows}, "\n\n".join(lines))
    return 0


def _run(args: argparse.Namespace) -> int:
    command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not command:
        raise ReplayPatchError("nothing to run: replay-patch run -- COMMAND ...")
    path = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "REPLAY_PATCH": "1", "PYTHONPATH": os.pathsep.join(path)}
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        print(f"replay-patch: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
