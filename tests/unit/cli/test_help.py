"""What `--help` says comes from where it is decided."""

import pytest
from typer.testing import CliRunner

from cli.main import app
from engine.families.tiny import WRITERS


def test_make_tiny_names_every_family_that_it_can_write():
    said = CliRunner().invoke(app, ["make-tiny", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert f"One of {', '.join(WRITERS)}." in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--prefill", "0"), "'--prefill': out of range, use at least 1"),
        (("up", "--prefill", "many"), "'--prefill': not a whole number, use a whole number"),
        (("up", "--http-port", "70000"), "'--http-port': out of range, use at most 65535"),
        (("up", "--grace", "soon"), "'--grace': not a number, use a number"),
        (("kv", "list", "--limit", "-1"), "'--limit': out of range, use at least 0"),
    ],
)
def test_a_wrong_value_is_told_in_our_words(arguments, says):
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert ended.exit_code == 2
    assert says in ended.output and "Input should" not in ended.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("doctor", "--transport", "ucx://"), "--transport: nobody is asked about it"),
        (("doctor", "--discovery", "memory://", "--transport", "pigeon"), "--transport: no KV transport for 'pigeon'"),
        (("doctor", "--discovery", "pigeon"), "--discovery: no discovery backend for 'pigeon'"),
        (("kv", "list", "--discovery", "pigeon"), "--discovery: no discovery backend for 'pigeon'"),
    ],
)
def test_what_an_option_cannot_mean_is_told_by_the_options_name(arguments, says):
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 1
    assert f"error: {says}" in ended.output
