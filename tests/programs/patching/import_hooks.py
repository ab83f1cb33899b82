"""For tests/unit/patching/test_import_hooks.py: what the modules `m` on disk do when imported.

    python import_hooks.py FUNCTION

A script, because `m` asks its `__main__` to be told, too.
"""

import os
import sys

from replay_patch.patching.import_hooks import when_imported


def told(name: str) -> None:
    def complete() -> None:
        print("complete:", sorted(vars(sys.modules[name]).keys() & {"a", "z"}))

    when_imported(name, complete)


def imported_before() -> None:
    import m

    told("m")


def imported_later() -> None:
    told("m")
    print("waiting")
    import m


def told_by_the_module() -> None:
    import m

    print(type(m.__spec__).__mro__[0].__module__)


def told_before_a_failure() -> None:
    told("m")
    failing_first()


def failing_first() -> None:
    try:
        import m
    except ImportError as error:
        print(error)
    os.environ["FIXED"] = "1"
    import m


if __name__ == "__main__":
    globals()[sys.argv[1]]()
