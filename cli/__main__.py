"""`python -m cli` is the `deepinfer` command."""

from cli.main import app

app()
