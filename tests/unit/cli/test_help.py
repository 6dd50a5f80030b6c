"""What `--help` says comes from where it is decided."""

from typer.testing import CliRunner

from cli.main import app
from engine.families.tiny import WRITERS


def test_make_tiny_names_every_family_that_it_can_write():
    said = CliRunner().invoke(app, ["make-tiny", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert f"One of {', '.join(WRITERS)}." in said
