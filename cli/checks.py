"""What must hold before a stack is started. Knows folders, ports and names; failures name option and fix."""

import re
import tempfile
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from cli.ports import LOOPBACK
from engine.errors import EngineError
from engine.families.check import check_folder
from fabric.errors import StartError
from fabric.kvlink.lanes import Expectation
from fabric.lifecycle import check_port_free
from fabric.settings import ServiceSettings

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


def new_file(path: Path, option: str) -> None:
    """Makes the file's folder if need be. Raises StartError where no file can be written at that path."""
    if path.is_dir():
        raise StartError(f"{path} is a folder", field=option, fix="name a file")
    writable_folder(path.parent, option)


def device(name: str) -> None:
    """Raises StartError where `name` is no device, or one of a GPU on a machine without NVIDIA's driver.

    Whether torch can use that GPU is the workers' to say.
    """
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise StartError(f"no device called {name!r}", field="--device", fix="choose cpu, cuda or cuda:N")
    if name != "cpu" and not _DRIVER.exists():
        raise StartError(f"{name} is asked for, and {_DRIVER} is missing", field="--device",
                         fix="load NVIDIA's driver, or choose cpu")  # fmt: skip


def preset(name: str) -> None:
    """Raises StartError for a name that no service knows. An empty one stands for none."""
    known = sorted(ServiceSettings.presets)
    if name and name not in known:
        raise StartError(f"no preset called {name!r}", field="--preset", fix=f"choose {' or '.join(known)}")


def transport(url: str) -> None:
    """Raises StartError for a transport that several processes of one host cannot move KV over."""
    fix = "use ucx:// or tcp://127.0.0.1:0"
    try:
        parts = urlsplit(url)
        fixed_port = parts.port
        Expectation.parse(dict(parse_qsl(parts.query, keep_blank_values=True)))
    except ValueError as error:
        raise StartError(f"{url!r}: {error}", field="--transport", fix=fix) from error
    except StartError as error:
        raise StartError(error.message, field="--transport", fix=error.fix) from error
    if parts.scheme not in ("ucx", "tcp"):
        raise StartError(f"no KV transport for {url!r}", field="--transport", fix=fix)
    if parts.scheme == "tcp" and fixed_port:
        message = f"port {fixed_port} cannot be that of several processes"
        raise StartError(message, field="--transport", fix="give port 0: each takes a free one")


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
