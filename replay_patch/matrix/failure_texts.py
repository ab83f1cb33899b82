"""What is told of a check that fails, hangs or dies, in a few lines."""

import os
import re
import traceback
from pathlib import Path

__all__ = ["described", "innermost_frames", "last_lines"]

_LINES_SHOWN = 12
_FRAMES_SHOWN = 6  # of each process
# In what `ranks.launch` raises: the end of a rank's traceback, which says what went wrong there.
_RANK_FAILED = re.compile(r"^[\w.]*(?:Error|NotActive)\b.*", re.M)


def described(error: BaseException) -> str:
    """Its text, and where it was raised: the last place in a check, and the very last one."""
    if on_ranks := dict.fromkeys(_RANK_FAILED.findall(str(error))):
        causes = [text for text in on_ranks if "gloo" not in text]  # the others lost their peer
        return _shortened("\n".join(causes or on_ranks))
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}checks{os.sep}" in frame.filename]
    lines = [
        f"at {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in (*ours[-1:], *frames[-1:])
    ]
    text = _shortened(f"{type(error).__name__}: {error}")
    return "\n".join([text, *(line[:500] for line in dict.fromkeys(lines))])


def innermost_frames(folder: Path) -> str:
    """Where the check and its ranks are: what each has written into a `.trace` file there."""
    out = []
    for trace in sorted(folder.rglob("*.trace")):
        text = trace.read_text(errors="replace").splitlines()
        frames = [line.strip() for line in text if line.startswith("  File ")][:_FRAMES_SHOWN]
        out += [f"{trace.stem}:", *(f"  {frame}" for frame in frames)] if frames else []
    return "\n".join(out)


def last_lines(path: Path) -> str:
    """Of a file, if there is one."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.strip().splitlines()[-_LINES_SHOWN:])


def _shortened(text: str) -> str:
    lines = [line[:500] for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[:_LINES_SHOWN])
