"""Pages of docs/ that are made from the code: `python -m replay_patch.docs` writes them."""

from pathlib import Path

from replay_patch.patches import PATCHES


def patches_page() -> str:
    """The text of docs/patches.md."""
    parts = [
        "# Patches\n\n"
        "Made from `patches/*.py` by `make docs`; a test compares. Whether one is needed is asked "
        "of the installed objects, never of a version number. `REPLAY_PATCH_SKIP=name,name` leaves "
        "patches out; what then would be wrong is refused where it is used.\n"
    ]
    for patch in PATCHES:
        targets = "\n".join(f"- `{target}`" for target in patch.targets)
        upstream = f"<{patch.upstream}>" if patch.upstream.startswith("http") else patch.upstream
        parts.append(
            f"## {patch.name}\n\n{targets}\n\n**Why.** {patch.why}\n\n**How.** {patch.how}\n\n"
            f"**Upstream.** {upstream}\n\n**Remove when** {patch.remove_when}.\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    Path("docs/patches.md").write_text(patches_page())
