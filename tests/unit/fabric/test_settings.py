"""Settings come from four sources in one order, and nothing misspelt is ignored."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from fabric.settings import SettingsError, load
from tests.support.echo import EchoSettings


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return str(path)

    return write


def settings(*argv: str) -> EchoSettings:
    return load(EchoSettings, argv).settings


def test_each_source_wins_over_the_next(monkeypatch, yaml_file):
    preset = ("--preset", "tiny")
    assert settings().max_sequences == 4
    assert settings(*preset).max_sequences == 2
    file = ("--config", yaml_file("max_sequences: 5\nengine: {num_blocks: 50}\n"))
    assert settings(*preset, *file).max_sequences == 5
    monkeypatch.setenv("DEEPINFER_ECHO_MAX_SEQUENCES", "6")
    assert settings(*preset, *file).max_sequences == 6
    assert settings(*preset, *file, "--max-sequences", "7").max_sequences == 7


def test_sources_merge_inside_a_section(monkeypatch, yaml_file):
    monkeypatch.setenv("DEEPINFER_ECHO_ENGINE__NUM_BLOCKS", "99")
    merged = settings("--config", yaml_file("engine: {batch_invariant: true}"), "--preset", "tiny")
    assert (merged.engine.num_blocks, merged.engine.batch_invariant) == (99, True)


def test_config_and_preset_can_come_from_the_environment(monkeypatch, yaml_file):
    monkeypatch.setenv("DEEPINFER_ECHO_CONFIG", yaml_file("max_sequences: 9"))
    monkeypatch.setenv("DEEPINFER_ECHO_PRESET", "tiny")
    loaded = settings()
    assert (loaded.max_sequences, loaded.engine.num_blocks) == (9, 8)


def test_flags_reach_sections_and_booleans_can_be_turned_off():
    loaded = settings("--engine.num-blocks=3", "--engine.batch-invariant", "--no-reflection")
    assert (loaded.engine.num_blocks, loaded.engine.batch_invariant, loaded.reflection) == (3, True, False)


@pytest.mark.parametrize(
    ("argv", "name", "suggestion"),
    [
        (("--max-sequence", "3"), "--max-sequence", "--max-sequences"),
        (("--engine.num-block=3",), "--engine.num-block", "--engine.num-blocks"),
    ],
)
def test_an_unknown_flag_is_refused_with_a_suggestion(argv, name, suggestion):
    with pytest.raises(SettingsError) as caught:
        settings(*argv)
    assert caught.value.field == name
    assert suggestion in caught.value.fix


def test_an_unknown_variable_is_refused_with_a_suggestion(monkeypatch):
    monkeypatch.setenv("DEEPINFER_ECHO_MAX_SEQENCES", "3")
    with pytest.raises(SettingsError, match="DEEPINFER_ECHO_MAX_SEQENCES") as caught:
        settings()
    assert "DEEPINFER_ECHO_MAX_SEQUENCES" in caught.value.fix


def test_the_common_prefix_of_variables_suggests_none_of_them(monkeypatch):
    monkeypatch.setenv("DEEPINFER_ECHO_BOGUS", "3")
    with pytest.raises(SettingsError) as caught:
        settings()
    assert caught.value.fix == "see --help"


@pytest.mark.parametrize(
    ("text", "field", "suggestion"),
    [("max_seqs: 3", "max_seqs", "max_sequences"), ("engine: {num_blok: 3}", "engine.num_blok", "num_blocks")],
)
def test_an_unknown_yaml_key_is_refused_with_a_suggestion(yaml_file, text, field, suggestion):
    with pytest.raises(SettingsError) as caught:
        settings("--config", yaml_file(text))
    assert caught.value.field == field
    assert suggestion in caught.value.fix


@pytest.mark.parametrize("text", ["- 1\n- 2", "{", "engine: 7"])
def test_yaml_of_the_wrong_shape_is_refused(yaml_file, text):
    with pytest.raises(SettingsError):
        settings("--config", yaml_file(text))


def test_a_missing_file_is_refused():
    with pytest.raises(SettingsError, match="no-such"):
        settings("--config", "no-such.yaml")


def test_wrong_values_are_all_named_with_their_source(monkeypatch):
    monkeypatch.setenv("DEEPINFER_ECHO_MAX_SEQUENCES", "many")
    with pytest.raises(SettingsError) as caught:
        settings("--engine.num-blocks", "-1")
    assert "DEEPINFER_ECHO_MAX_SEQUENCES: " in caught.value.message
    assert "--engine.num-blocks: " in caught.value.message


def test_a_wrong_value_of_a_file_is_named_by_its_path_and_the_file(yaml_file):
    path = yaml_file("engine: {num_blocks: -1}")
    with pytest.raises(SettingsError) as caught:
        settings("--config", path)
    assert f"engine.num_blocks in file {path}: out of range" in caught.value.message


def test_a_setting_is_called_what_whoever_gave_it_called_it(monkeypatch, yaml_file):
    path = yaml_file("engine: {num_blocks: 3}")
    monkeypatch.setenv("DEEPINFER_ECHO_LOG_LEVEL", "debug")
    loaded = load(EchoSettings, ("--config", path, "--max-sequences", "3"))
    called = {field: loaded.spelled(field) for field in ("max_sequences", "log_level", "engine.num_blocks", "listen")}
    assert called == {
        "max_sequences": "--max-sequences",
        "log_level": "DEEPINFER_ECHO_LOG_LEVEL",
        "engine.num_blocks": f"engine.num_blocks in file {path}",
        "listen": "--listen",
    }
    assert loaded.spelled("no setting") == "no setting"
    assert loaded.spelled("max_sequences[0].name") == "--max-sequences[0].name"


def test_a_section_that_is_no_json_is_told_by_its_variable(monkeypatch):
    monkeypatch.setenv("DEEPINFER_ECHO_ENGINE", "{bad")
    with pytest.raises(SettingsError, match="not JSON") as caught:
        settings()
    assert caught.value.field == "DEEPINFER_ECHO_ENGINE" and caught.value.fix


@pytest.mark.parametrize("argv", [("--preset", "nope"), ("-x",), ("extra",), ("--no-reflection=1",), ("--config",)])
def test_a_command_line_that_cannot_be_read_is_told_in_one_line(argv, capsys):
    with pytest.raises(SettingsError) as caught:
        settings(*argv)
    assert caught.value.fix == "see --help" and capsys.readouterr().err == ""


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError):
        settings().max_sequences = 9


def test_secrets_are_masked_in_print():
    text = json.dumps(settings("--api-key", "very-secret").printable())
    assert "very-secret" not in text
    assert "max_sequences" in text


def test_help_names_every_setting_its_default_and_variable(capsys):
    with pytest.raises(SystemExit) as caught:
        settings("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in ("--max-sequences", "--engine.num-blocks", "--listen", "--config", "--preset", "--check"):
        assert name in text
    assert "blocks in the pool (default 64) [env DEEPINFER_ECHO_ENGINE__NUM_BLOCKS]" in text
    assert "hush-hush" not in text
    assert "(default )" not in text and "(default None)" not in text


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--max-sequences", "0", "--max-sequences: out of range, use above 0"),
        ("--max-sequences", "many", "--max-sequences: not a whole number, use a whole number"),
        ("--max-sequences", "99999999999", "--max-sequences: out of range (use at most 2147483647)"),
        ("--drain-s", "inf", "--drain-s: out of range, use a number that is finite"),
        ("--drain-s", "nan", "--drain-s: out of range"),
        ("--drain-s", "1e300", "--drain-s: out of range (use at most 100000000)"),
        ("--log-level", "loud", "--log-level: not an accepted value, use 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_wrong_value_is_told_in_our_words_with_what_is_accepted(option, value, says):
    with pytest.raises(SettingsError) as caught:
        settings(option, value)
    assert says in str(caught.value)
