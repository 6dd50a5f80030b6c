"""Bad options are refused before any work, with the file or port named."""

import shutil
import socket

import pytest

from cli import checks
from cli.main import NANO
from fabric.errors import StartError


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_folder_is_refused_with_the_missing_file(tmp_path, missing):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if name != missing:
            (tmp_path / name).write_text("{}")
    with pytest.raises(StartError) as caught:
        checks.model_folder(tmp_path)
    assert missing.rpartition(".")[2] in caught.value.message
    assert caught.value.field == "--model"
    assert caught.value.fix


def test_the_embedded_model_passes():
    checks.model_folder(NANO)


def test_a_damaged_shard_is_named_before_any_process_starts(tmp_path):
    folder = shutil.copytree(NANO, tmp_path / "model", ignore=lambda _, names: [n for n in names if n.endswith(".py")])
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StartError) as caught:
        checks.model_folder(folder)
    assert shard.name in caught.value.message
    assert (caught.value.field, "download" in caught.value.fix) == ("--model", True)


@pytest.mark.parametrize("below", ["taken/logs", "taken"])
def test_a_folder_that_cannot_be_written_is_named_with_its_option(tmp_path, below):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StartError) as caught:
        checks.writable_folder(tmp_path / below, "--log-dir")
    assert "taken" in caught.value.message and caught.value.field == "--log-dir" and caught.value.fix


def test_a_missing_folder_is_made_and_left_empty(tmp_path):
    checks.writable_folder(tmp_path / "a" / "b", "--log-dir")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_busy_port_is_named_with_the_option_that_changes_it():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartError) as caught:
            checks.port(port, "--http-port")
    assert str(port) in caught.value.message
    assert caught.value.field == "--http-port"
    assert "with --http-port" in caught.value.fix
    checks.port(port, "--http-port")


def test_one_port_for_both_of_the_gateways_is_refused_and_two_free_ones_are_not():
    with pytest.raises(StartError, match="9123 is --http-port as well") as caught:
        checks.different_ports(9123, 9123)
    assert (caught.value.field, caught.value.fix) == ("--grpc-port", "choose two ports, or 0 for a free one")
    checks.different_ports(0, 0)
    checks.different_ports(8000, 50051)


def test_a_preset_that_no_service_has_is_refused_before_any_of_them_starts():
    for name in ("", "production"):
        checks.preset(name)
    with pytest.raises(StartError, match="no preset called 'prod'") as caught:
        checks.preset("prod")
    assert (caught.value.field, caught.value.fix) == ("--preset", "choose production")


@pytest.mark.parametrize("url", ["ucx://", "ucx://?expect=rdma&missing=warn", "tcp://127.0.0.1:0", "tcp://127.0.0.1"])
def test_transports_between_processes_of_a_host_pass(url):
    checks.transport(url)


@pytest.mark.parametrize(
    "url",
    ["foo://x", "ucx", "", "inproc://", "tcp://127.0.0.1:5000", "tcp://x:port", "ucx://?expect=pigeon", "ucx://?a="],
)
def test_a_transport_that_cannot_be_is_refused_before_any_service_starts(url):
    with pytest.raises(StartError) as caught:
        checks.transport(url)
    assert caught.value.field == "--transport" and caught.value.fix


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", ""])
def test_a_name_of_no_device_is_refused(name):
    with pytest.raises(StartError, match="no device called") as caught:
        checks.device(name)
    assert (caught.value.field, caught.value.fix) == ("--device", "choose cpu, cuda or cuda:N")


def test_a_gpu_needs_its_driver(tmp_path, monkeypatch):
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(checks, "_DRIVER", driver)
    checks.device("cpu")
    with pytest.raises(StartError, match="nvidiactl is missing") as caught:
        checks.device("cuda")
    assert caught.value.field == "--device" and "choose cpu" in str(caught.value.fix)
    driver.touch()
    checks.device("cuda:1")


def test_a_folder_is_no_file_to_write(tmp_path):
    with pytest.raises(StartError, match="is a folder") as caught:
        checks.new_file(tmp_path, "--ready-file")
    assert (caught.value.field, caught.value.fix) == ("--ready-file", "name a file")
    checks.new_file(tmp_path / "new" / "ready.json", "--ready-file")
    assert not (tmp_path / "new" / "ready.json").exists()
