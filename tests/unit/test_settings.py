import pytest

from replay_patch.errors import SettingsError
from replay_patch.settings import Settings, parse_switch, read


@pytest.mark.parametrize("word", ["1", "true", "on", "yes", " On ", "TRUE"])
def test_words_for_on(word: str) -> None:
    assert read({"REPLAY_PATCH": word}) == Settings(enabled=True)


@pytest.mark.parametrize("word", ["", "0", "false", "off", "no", "No"])
def test_words_for_off(word: str) -> None:
    assert read({"REPLAY_PATCH": word}) == Settings()


def test_unset_is_off() -> None:
    assert read({}) == Settings()


def test_a_value_that_is_not_understood_is_a_problem_and_never_off() -> None:
    settings = read({"REPLAY_PATCH": "maybe"})

    assert settings.enabled
    assert "REPLAY_PATCH='maybe' is not understood" in settings.problems[0]


def test_skip_is_a_list_of_names() -> None:
    settings = read({"REPLAY_PATCH_SKIP": "config_fields, mtp_depth,,"})

    assert settings.skip == {"config_fields", "mtp_depth"}


def test_an_unknown_log_level_is_a_problem() -> None:
    assert "REPLAY_PATCH_LOG='LOUD'" in read({"REPLAY_PATCH_LOG": "loud"}).problems[0]


def test_parse_switch_names_the_setting() -> None:
    with pytest.raises(SettingsError, match="moe_router_fusion='perhaps' is not understood"):
        parse_switch("perhaps", "moe_router_fusion")
