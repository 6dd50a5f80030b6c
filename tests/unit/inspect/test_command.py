"""The commands reach the engine from any folder, print tables or JSON, and say what is missing."""

import json

import pytest
from typer.testing import CliRunner

from cli import engine_call
from cli.engine_call import call_engine
from cli.main import app
from cli.sizes import size_of
from fabric.errors import InvalidArgument, StartError


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_tiny_checkpoint_is_made_and_inspected_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run("make-tiny", "v3", "model", "--seed", "5")
    assert made.exit_code == 0, made.output
    shown = run("inspect", "model", "--json", "--tp", "2", "--memory", "1GB")
    report = json.loads(shown.stdout)
    assert (report["family"], report["ranks"][0]["tensor"], report["fits"][0]["memory_bytes"]) == (
        "deepseek_v3",
        2,
        10**9,
    )


def test_the_table_shows_every_part_and_format(tiny_folder, monkeypatch):
    monkeypatch.setattr("cli.inspect.out.width", 200, raising=False)
    shown = run("inspect", tiny_folder("v41"), "--memory", "1GiB")
    assert shown.exit_code == 0
    for words in ("Engram tables", "fp4, fp8 window", "bytes per token", "tp 1, ep 1", "What fits"):
        assert words in shown.stdout


@pytest.mark.parametrize("family", ["v3", "v4", "v41"])
def test_nothing_is_cut_off_on_a_terminal_of_80_columns(family, tiny_folder, monkeypatch):
    monkeypatch.setattr("cli.inspect.out.width", 80, raising=False)
    shown = run("inspect", tiny_folder(family))
    assert shown.exit_code == 0
    assert "…" not in shown.stdout
    assert max(map(len, shown.stdout.splitlines()[1:])) <= 80


def test_without_options_the_usual_ranks_and_memories_are_looked_at(tiny_folder):
    report = json.loads(run("inspect", tiny_folder("v4"), "--json").stdout)
    ranks = [(rank["tensor"], rank["expert"]) for rank in report["ranks"]]
    assert ranks[0] == (1, 1)
    assert {fit["memory_bytes"] for fit in report["fits"]} == {24 * 10**9, 80 * 10**9, 141 * 10**9}
    assert len(report["fits"]) == len(ranks) * 3 * len(report["caches"])


def test_weights_that_do_not_fit_end_with_code_1(tiny_folder, tmp_path):
    config = json.loads((tiny_folder("v3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (tmp_path / "model.safetensors").write_bytes((tiny_folder("v3") / "model.safetensors").read_bytes())
    shown = run("inspect", tmp_path)
    assert shown.exit_code == 1
    assert "unknown" in shown.stdout


def test_a_refusal_of_the_engine_names_its_field(tmp_path):
    with pytest.raises(InvalidArgument) as refused:
        call_engine("engine.inspect", str(tmp_path / "none"), timeout_s=100)
    assert refused.value.field == "checkpoint"


def test_without_torch_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(engine_call.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError) as refused:
        call_engine("engine.inspect", "x", timeout_s=1)
    assert "deepinfer-serve[engine]" in refused.value.fix


def test_an_engine_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(StartError, match="took longer"):
        call_engine("engine.inspect", str(tmp_path), timeout_s=0.01)


def test_an_engine_that_breaks_shows_its_last_words():
    with pytest.raises(StartError, match="No module named"):
        call_engine("engine.no_such_module", timeout_s=100)


@pytest.mark.parametrize(("text", "size"), [("80GB", 80 * 10**9), ("1.5 KiB", 1536), ("12", 12), ("2tb", 2 * 10**12)])
def test_sizes_have_units(text, size):
    assert size_of(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80 parsecs", "0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidArgument) as refused:
        size_of(text, "--memory")
    assert refused.value.field == "--memory"


def test_a_memory_without_its_unit_is_refused_with_the_unit_that_was_meant():
    refused = run("inspect", "model", "--memory", "80")
    assert refused.exit_code == 1
    assert "--memory" in refused.output and "80GB" in refused.output


def test_an_option_that_the_engine_refuses_is_called_as_it_was_typed(tiny_folder):
    refused = run("inspect", tiny_folder("v3"), "--tp", "3")
    assert refused.exit_code == 1 and "--tp: 3 does not divide" in refused.output


def test_a_tiny_checkpoint_that_cannot_be_written_is_told_in_a_line(tmp_path):
    (tmp_path / "file").write_text("x")
    refused = run("make-tiny", "v3", tmp_path / "file" / "model")
    assert refused.exit_code == 1 and "error: folder: cannot write" in refused.output and "Trace" not in refused.output
