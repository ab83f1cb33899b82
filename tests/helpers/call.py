"""Call a function and print what it returns: what `helpers.interpreters` starts.

python -m helpers.call [--bed] MODULE:FUNCTION '[ARGUMENT, ...]'
"""

import importlib
import json
import sys


def main(bed: bool, name: str, args: str) -> None:
    if bed:
        from replay_patch.matrix import cpu

        cpu.install()
    module, _, function = name.partition(":")
    answer = getattr(importlib.import_module(module), function)(*json.loads(args))
    print(json.dumps(answer))


if __name__ == "__main__":
    main("--bed" in sys.argv, *sys.argv[-2:])
