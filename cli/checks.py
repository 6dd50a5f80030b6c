"""What must hold before a stack is started. Knows folders and ports; every failure names its option and the fix."""

import re
import tempfile
from pathlib import Path

from cli.ports import LOOPBACK
from engine.errors import EngineError
from engine.families.check import check_folder
from fabric.errors import StartError
from fabric.lifecycle import check_port_free

_DRIVER = Path("/dev/nvidiactl")


def model_folder(model: Path) -> None:
    """Raises StartError naming the file that a model folder lacks, or the tensor or key that does not fit the others.

    Headers, index, config and tokenizer are read, and no weight: a broken download is named before a process starts.
    """
    if not model.is_dir():
        raise StartError(f"{model} is not a folder", field="--model", fix="name a folder with a model's files")
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            raise StartError(
                f"{model / name} is missing", field="--model", fix="copy the model's complete folder, with this file"
            )
    try:
        check_folder(model)
    except EngineError as error:
        raise StartError(f"{error.field}: {error.message}", field="--model", fix=error.fix) from error


def writable_folder(path: Path, option: str) -> None:
    """Makes the folder if need be. Raises StartError where that fails or nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"probe")
    except OSError as error:
        fix = "name a folder that is writable and has room"
        raise StartError(f"cannot write in {path}: {error.strerror}", field=option, fix=fix) from error


def device(name: str) -> None:
    """Raises StartError where `name` is no device, or one of a GPU on a machine without NVIDIA's driver.

    Whether torch can use that GPU is the workers' to say.
    """
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise StartError(f"no device called {name!r}", field="--device", fix="choose cpu, cuda or cuda:N")
    if name != "cpu" and not _DRIVER.exists():
        raise StartError(f"{name} is asked for, and {_DRIVER} is missing", field="--device",
                         fix="load NVIDIA's driver, or choose cpu")  # fmt: skip


def port(number: int, option: str) -> None:
    """Raises StartError when another process holds the port. 0 is always free. option: such as --http-port."""
    try:
        check_port_free(f"{LOOPBACK}:{number}", option.removeprefix("--"))
    except StartError as error:
        raise StartError(error.message, field=option, fix=error.fix) from error


def different_ports(http: int, grpc: int) -> None:
    """Raises StartError where both of the gateway's ports are the same one. 0 stands for a free one of its own."""
    if http and http == grpc:
        raise StartError(
            f"{grpc} is --http-port as well", field="--grpc-port", fix="choose two ports, or 0 for a free one"
        )
