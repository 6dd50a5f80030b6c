"""The `deepinfer` command line. Knows options and their defaults; every command lives in a module of its own."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cli import backing, knowledge, kv, machine, running, runtime, sums
from cli.chat import ChatOptions
from cli.chat import chat as run_chat
from cli.commands import Commands
from cli.console import reports_errors
from cli.doctor import doctor as run_doctor
from cli.inspect import InspectOptions
from cli.inspect import inspect as run_inspect
from cli.sizes import size_of
from cli.tiny import make_tiny as run_make_tiny
from cli.up import UpOptions
from cli.up import up as run_up
from engine.families import registry
from engine.sizes import GIB, MIB
from fabric.errors import InvalidArgument

NANO = Path(__file__).resolve().parent.parent / "models" / "nano"
HTTP_PORT = 8000
_LEAST_KV = 100 * MIB

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Serves DeepSeek models from separate gateway, recipe, prefill, decode and kvstore processes.",
)
app.add_typer(kv.app, name="kv")


@app.command()
@reports_errors
def up(
    model: Annotated[Path, typer.Option(help="Folder with config.json, tokenizer.json and safetensors.")] = NANO,
    prefill: Annotated[int, typer.Option(min=1, max=64, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")] = 1,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Gateway's HTTP port; 0: a free one.")] = HTTP_PORT,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="Gateway's gRPC port; 0: a free one.")] = 0,
    transport: Annotated[str, typer.Option(help="How KV moves: ucx:// or tcp://127.0.0.1:0.")] = "ucx://",
    device: Annotated[str, typer.Option(help="Where models run: cpu, cuda or cuda:N.")] = "cpu",
    preset: Annotated[str, typer.Option(help="Preset of settings for every service, such as production.")] = "",
    kv_dir: Annotated[Path | None, typer.Option(help="Folder of cached KV that later stacks find again.")] = None,
    kv_gb: Annotated[str, typer.Option(help="GiB of it, or a size such as 500GB.")] = "8",
    smoke: Annotated[bool, typer.Option("--smoke", help="Ask one question, print the answer, drain, exit.")] = False,
    ready_file: Annotated[Path | None, typer.Option(help="JSON file to write once everything serves.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for the logs; default: removed at the end.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for each service to drain.")] = 25.0,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds for a service to come up.")] = 900.0,
) -> int:
    """Start etcd, Redis and all services on this machine, and keep them running until Ctrl-C."""
    return run_up(
        UpOptions(
            model=model,
            prefill=prefill,
            decode=decode,
            http_port=http_port,
            grpc_port=grpc_port,
            transport=transport,
            device=device,
            preset=preset,
            smoke=smoke,
            ready_file=ready_file,
            log_dir=log_dir,
            grace_s=grace,
            start_timeout_s=start_timeout,
            kv_dir=kv_dir,
            kv_gb=size_of(kv_gb, "--kv-gb", least=_LEAST_KV, bare=GIB) / GIB,
        )
    )


@app.command()
@reports_errors
def chat(
    url: Annotated[str, typer.Option(help="Gateway, such as http://127.0.0.1:8000; default: your running stack.")] = "",
    model: Annotated[str, typer.Option(help="Model to talk to; default: the first one served.")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    api_key: Annotated[str, typer.Option(envvar="DEEPINFER_API_KEY", help="Key for the gateway.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
) -> int:
    """Talk to the running stack: answers stream, reasoning is dimmed, figures stand below."""
    return run_chat(ChatOptions(url=url, model=model, system=system, api_key=api_key, max_tokens=max_tokens))


@app.command()
@reports_errors
def doctor(
    model: Annotated[Path, typer.Option(help="Model folder to look at.")] = NANO,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="Port that the gateway would take.")] = HTTP_PORT,
    deep: Annotated[bool, typer.Option("--deep", help="Read the whole model and compare with its SHA256SUMS.")] = False,
    discovery: Annotated[
        str, typer.Option(help="Where services announce themselves, such as etcd://host:2379; default: your stacks.")
    ] = "",
    transport: Annotated[
        str, typer.Option(help="With --discovery: what KV should move over, such as ucx://?expect=rdma.")
    ] = "",
) -> int:
    """Check this machine, and what runs, and say how to fix what is missing. Exit code 1 when something fails."""
    if transport and not discovery:
        fix = "give --discovery as well: your own stacks' transports are known"
        raise InvalidArgument("nobody is asked about it", field="--transport", fix=fix)
    found = running.of_discovery(discovery, transport) if discovery else running.here()
    return run_doctor(
        {
            "python": machine.python,
            "cores": machine.processors,
            "memory": machine.memory,
            "shared memory": machine.shared_memory,
            "scratch space": machine.scratch,
            "open files": machine.open_files,
            "locked memory": machine.locked_memory,
            "clock": machine.clock,
            "GPU": machine.gpu,
            "HTTP port": partial(backing.http_port, http_port),
            "etcd": backing.etcd,
            "Redis": backing.redis,
            "torch": backing.torch,
            "GPU kernels": backing.gpu_kernels,
            "KV transport": backing.transport,
            "model": partial(backing.model, model),
            **running.checks(found),
            **knowledge.checks([] if discovery else runtime.stacks(runtime.folder())),
        },
        {"every byte": partial(sums.verify, model)} if deep else None,
    )


@app.command()
@reports_errors
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder, or a config.json alone.")],
    tp: Annotated[
        list[int] | None, typer.Option(min=1, help="Tensor parallel ranks; may be repeated. Default: usual ones.")
    ] = None,
    ep: Annotated[
        list[int] | None, typer.Option(min=1, help="Expert parallel ranks; may be repeated. Default: usual ones.")
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option(help="Memory of a rank, such as 80GB; may be repeated. Default: usual ones.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that a rank serves at once.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Say what a checkpoint is: parameters, formats, KV bytes, memory per rank, and what fits where."""
    chosen = (tuple(tp or ()), tuple(ep or ()), tuple(memory or ()))
    return run_inspect(InspectOptions(checkpoint, *chosen, sequences=sequences, as_json=as_json))


@app.command()
@reports_errors
def make_tiny(
    family: Annotated[str, typer.Argument(help=f"One of {', '.join(registry.names())}.")],
    folder: Annotated[Path, typer.Argument(help="New or empty folder to write.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    quantized: Annotated[bool, typer.Option("--quantized", help="Store the family's published formats.")] = False,
) -> int:
    """Write a tiny random checkpoint of any family, with a tokenizer, that `up` can serve."""
    return run_make_tiny(family, folder, seed, quantized)


if __name__ == "__main__":
    app()
