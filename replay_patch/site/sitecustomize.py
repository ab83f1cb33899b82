"""Put first on PYTHONPATH by `replay-patch run`: Python runs it at the start of every process.

It runs the sitecustomize that it hides, if there is one, and activates the plugin.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def run_hidden() -> None:
    """Run the sitecustomize that this one hides."""
    path = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    run_hidden()  # first: it may be what makes the plugin importable
finally:
    try:
        from replay_patch.autoload import load
    except ImportError:
        pass  # another interpreter, without the plugin
    else:
        load("replay-patch run")
