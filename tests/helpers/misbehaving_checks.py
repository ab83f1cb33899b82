"""Checks that misbehave, run as the matrix runs its own.

    python -m helpers.misbehaving_checks [--timeout 3] [CHECK ...]     # a line of JSON for each cell

It needs neither torch nor Megatron.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from replay_patch.matrix import ranks
from replay_patch.matrix.cell_processes import run_all
from replay_patch.matrix.registry import Check, Skip

TIMEOUT = 3.0


def works() -> None:
    pass


def asserts() -> None:
    raise AssertionError("two and two are five\n\n" + "\n".join(f"line {i}" for i in range(100)))


def does_not_apply() -> None:
    raise Skip("there is nothing to check")


def leaves_by_exception() -> None:
    sys.exit("enough")


def hangs() -> None:
    deeper(30)


def deeper(levels: int) -> None:
    if levels:
        deeper(levels - 1)
    else:
        sleeps_here()


def sleeps_here() -> None:
    time.sleep(600)


def ignores_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sleeps_here()


def ranks_hang() -> None:
    ranks.launch(waits_for_a_peer, 2)


def waits_for_a_peer(rank: int, world: int, init_file: str) -> None:
    sleeps_here()


def leaves_a_child_behind() -> None:
    if os.fork() == 0:
        sleeps_here()


def dies_by_a_signal() -> None:
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def exits_with_3() -> None:
    os._exit(3)


def exits_with_0() -> None:
    os._exit(0)


def prints_what_looks_like_a_cell() -> None:
    print(json.dumps({"check": "works", "status": "fail", "seconds": 0, "detail": "forged"}))
    os.write(1, b"\xff\xfe\x00 no text\n")


def prints_ten_megabytes() -> None:
    for _ in range(10_000):
        print("x" * 1023)
    raise AssertionError("after ten megabytes")


def says_what_is_no_text() -> None:
    raise AssertionError(os.fsdecode(b"a file named \xff"))


CHECKS = [
    Check(function.__name__, "", (), 2 if "ranks" in function.__name__ else 1, function)
    for function in (
        works,
        asserts,
        does_not_apply,
        leaves_by_exception,
        hangs,
        ignores_signals,
        ranks_hang,
        leaves_a_child_behind,
        dies_by_a_signal,
        exits_with_3,
        exits_with_0,
        prints_what_looks_like_a_cell,
        prints_ten_megabytes,
        says_what_is_no_text,
    )
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=TIMEOUT)
    parser.add_argument("checks", nargs="*")
    args = parser.parse_args()
    wanted = [check for check in CHECKS if check.name in args.checks or not args.checks]
    with tempfile.TemporaryDirectory() as folder:
        for cell in run_all(wanted, 4, args.timeout, Path(folder), threading.Event()):
            print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    main()
