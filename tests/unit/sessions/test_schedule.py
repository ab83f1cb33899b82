"""Without the plugin, `recording()` and `replaying()` say so at once."""

import pytest

import replay_patch
from replay_patch import PatchNotActive


@pytest.mark.parametrize("session", ["recording", "replaying"])
def test_without_the_plugin_it_is_refused(session: str) -> None:
    open_session = getattr(replay_patch, session)

    with pytest.raises(PatchNotActive, match=rf"{session}\(\) is refused .* not active"):
        open_session(object())
