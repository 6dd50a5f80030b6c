"""How the command speaks."""

import io
from collections.abc import Iterator

import pytest
import structlog
import typer
from rich.console import Console

from cli import console
from fabric.errors import StartError


def test_model_output_cannot_command_the_terminal():
    assert console.harmless("a\x1b[2Jb\x9b2Jc\rd\n\te\u00e9") == "a\ufffd[2Jb\ufffd2Jc\ufffdd\n\te\u00e9"


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0123, "12 ms"), (1.26, "1.3 s"), (125.0, "2 min 05 s"), (7_300.0, "2 h 01 min")]
)
def test_durations_read_in_the_unit_that_fits(value, expected):
    assert console.seconds(value) == expected


@pytest.mark.parametrize(
    ("size", "expected"), [(0, "0 kB"), (399_360, "399 kB"), (1_500_000, "2 MB"), (2_340_000_000, "2.34 GB")]
)
def test_sizes_read_in_the_unit_that_fits(size, expected):
    assert console.megabytes(size) == expected


def test_an_error_is_one_message_with_its_fix_and_exit_code_1(monkeypatch):
    said = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(console, "err", said)

    @console.reports_errors
    def command() -> int:
        raise StartError("port [8000] is taken", field="--http-port", fix="use --http-port 0")

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 1
    assert said.file.getvalue() == "error: --http-port: port [8000] is taken\n  fix: use --http-port 0\n"


@pytest.fixture
def logs_to_stdout() -> Iterator[None]:
    """What no service has configured; one that ran in this process before may have sent logs elsewhere."""
    before = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**before)


@pytest.mark.usefixtures("logs_to_stdout")
def test_libraries_do_not_log_into_the_answer_and_speak_again_after_it(capsys):
    log = structlog.get_logger()
    with console.silent_logs():
        log.warning("nobody answers")
    assert capsys.readouterr() == ("", "")
    log.warning("nobody answers")
    said = capsys.readouterr()
    assert "nobody answers" in said.out + said.err


def test_success_ends_without_a_word():
    assert console.reports_errors(lambda: 0)() is None
