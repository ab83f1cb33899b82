"""The `replay-patch` command."""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_patch import __version__
from replay_patch.errors import ReplayPatchError

if TYPE_CHECKING:
    from replay_patch.matrix.registry import Check

_SITE = Path(__file__).with_name("site")
_LONGEST_SECONDS = 1_000_000  # some more, and timers overflow


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

    matrix = commands.add_parser(
        "matrix",
        help="check that routing replay works on these versions",
        description="Runs every check on the installed Megatron, or on those named, on a CPU. "
        "Exit code 1 if one fails or cannot be run.",
    )
    _add_matrix_options(matrix)

    doctor = commands.add_parser(
        "doctor",
        help="what is installed here, what the plugin did, and what is wrong",
        description="Imports torch and Megatron as a job would. Exit code 1 if replay was asked "
        "for (REPLAY_PATCH=1) and is not fully active.",
    )

    patches = commands.add_parser("patches", help="list the patches and why each exists")

    run = commands.add_parser(
        "run",
        help="run a command and its children with the plugin on",
        description="For torch < 2.5, for TORCH_DEVICE_BACKEND_AUTOLOAD=0 and for scripts that "
        "import torch_npu first: activates the plugin at the start of every Python process.",
    )
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")

    functions = {demo: _demo, matrix: _matrix, doctor: _doctor, patches: _patches, run: _run}
    for command, function in functions.items():
        command.set_defaults(command=function)
        if command is not run:
            command.add_argument(
                "--json",
                nargs="?",
                const="-",
                metavar="FILE",
                help="write JSON to FILE, or to stdout in place of the text",
            )
    return parser


def _add_matrix_options(parser: argparse.ArgumentParser) -> None:
    several: Any = {"action": "append", "default": []}
    parser.add_argument("--list", action="store_true", help="list the checks; run nothing")
    parser.add_argument(
        "--megatron",
        **several,
        metavar="V,V",
        help='releases, downloaded once; "latest" is the newest tested one, "all" are all of them',
    )
    parser.add_argument(
        "--megatron-path",
        **several,
        metavar="DIR",
        help="a source checkout, a fork, a nightly: the folder that holds megatron/ (repeatable)",
    )
    parser.add_argument(
        "--mindspeed-path",
        **several,
        metavar="DIR[=V]",
        help="a MindSpeed checkout, run with the Megatron that it is for: by its branch or folder "
        "name, or said by =V or =MEGATRON_DIR (repeatable)",
    )
    parser.add_argument("--only", metavar="CHECK,CHECK", help="run these checks")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes at once (default: CPUs)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="of one check (default: 60 s)"
    )
    parser.add_argument("--cache", metavar="DIR", help="where releases are kept")
    parser.add_argument("--junit", metavar="FILE", help="also write JUnit XML")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")


def _report(args: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    if args.json == "-":
        print(json.dumps(data, indent=2))
        return
    print(text)
    if args.json is not None:
        _write("JSON", args.json, json.dumps(data, indent=2) + "\n")


def _write(what: str, path: str, text: str | None) -> None:
    """Write a file; with None only make sure that it can be written."""
    try:
        with Path(path).open("a" if text is None else "w", encoding="utf-8") as file:
            file.write(text or "")
    except OSError as error:
        raise ReplayPatchError(f"the {what} cannot be written to {path}: {error}") from error


def _demo(args: argparse.Namespace) -> int:
    from replay_patch.demo import launch, report

    if args.plot and importlib.util.find_spec("matplotlib") is None:  # before the work, not after
        raise ReplayPatchError("--plot needs matplotlib: pip install 'replay-patch[plot]'")
    result = launch.run_demo(args.megatron, args.seed, args.cache, args.megatron_path)
    _report(args, result, report.format_demo(result))
    if args.plot:
        report.plot_demo(result, args.plot)
    return 0


def _comma_separated(text: str) -> list[str]:
    """The parts of "a, b,"."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _matrix(args: argparse.Namespace) -> int:
    from replay_patch.matrix import planning, report, runner
    from replay_patch.matrix.checks import CHECKS

    say = functools.partial(print, file=sys.stderr, flush=True)
    names = list(CHECKS) if args.only is None else _comma_separated(args.only)
    unknown = [name for name in names if name not in CHECKS]
    if unknown or not names:
        known = ", ".join(CHECKS)
        raise ReplayPatchError(f"--only: unknown {', '.join(unknown) or 'nothing'}; known: {known}")
    checks = [check for check in CHECKS.values() if check.name in names]
    if args.list:
        _list_checks(args, checks)
        return 0
    _check_matrix_options(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # how a CI says Ctrl-C
    releases = [release for value in args.megatron for release in _comma_separated(value)]
    paths = (args.megatron_path, args.mindspeed_path)
    environments = planning.plan(releases, *paths, cache=args.cache, say=say)
    if all(check.mindspeed for check in checks) and not any(e.mindspeed for e in environments):
        raise ReplayPatchError("--only names checks of MindSpeed alone: say --mindspeed-path DIR")
    matrix = runner.run(environments, checks, jobs=args.jobs, timeout=args.timeout, say=say)
    with contextlib.ExitStack() as stack:  # what cannot be written keeps nothing else back
        for (what, path), make in zip(_files(args), (report.junit, report.markdown), strict=True):
            if path is not None:
                stack.callback(_write, what, path, make(matrix))
        _report(args, matrix.to_dict(), report.table(matrix))
    return 130 if matrix.interrupted else 0 if matrix.green else 1


def _check_matrix_options(args: argparse.Namespace) -> None:
    """Refuse options that cannot work: before the work, not after."""
    if args.jobs is not None and args.jobs < 1:
        raise ReplayPatchError(f"--jobs {args.jobs}; expected at least 1")
    if not 0 < args.timeout <= _LONGEST_SECONDS:
        raise ReplayPatchError(
            f"--timeout {args.timeout:g}; expected seconds, more than 0 and up to "
            f"{_LONGEST_SECONDS}"
        )
    for what, path in (*_files(args), ("JSON", args.json)):
        if path not in (None, "-"):
            _write(what, path, None)
    for option in ("megatron", "megatron_path", "mindspeed_path"):
        for value in getattr(args, option):
            # An unset variable of a CI does not mean the installed one.
            if not _comma_separated(value):
                name = option.replace("_", "-")
                raise ReplayPatchError(f"--{name} {value!r} is empty; leave it out, or name one")


def _files(args: argparse.Namespace) -> tuple[tuple[str, str | None], ...]:
    """What else is written, and where."""
    return ("JUnit XML", args.junit), ("Markdown", args.markdown)


def _list_checks(args: argparse.Namespace, checks: "Sequence[Check]") -> None:
    rows = [
        {
            "name": check.name,
            "proves": check.sentence,
            "ranks": check.ranks,
            "mindspeed": check.mindspeed,
            "patches": list(check.patches),
        }
        for check in checks
    ]
    shown = [
        textwrap.fill(f"{check.name:17}{check.sentence}", 98, subsequent_indent=" " * 17)
        for check in checks
    ]
    _report(args, {"checks": rows}, "\n".join(shown))


def _doctor(args: argparse.Namespace) -> int:
    from replay_patch import doctor

    with contextlib.redirect_stdout(sys.stderr):  # Megatron prints while it is imported
        report = doctor.examine()
    _report(args, report, doctor.format_report(report))
    return 1 if report["enabled"] and not report["active"] else 0


def _patches(args: argparse.Namespace) -> int:
    from replay_patch import doctor
    from replay_patch.patching.registry import patches

    with contextlib.redirect_stdout(sys.stderr):
        states = {p["name"]: p["state"] for p in doctor.examine_patches()}
    rows = [
        {"name": p.name, "targets": list(p.targets), "why": p.why, "state": states[p.name]}
        for p in patches()
    ]
    lines = []
    for patch in patches():
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
