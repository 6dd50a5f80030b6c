"""Checks of what a stack runs on: its ports, etcd, Redis, torch, the KV transport, the model. Starts no service."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from cli import checks, runtime
from cli.doctor import Finding, Health
from cli.engine_call import call_engine
from fabric import binaries
from fabric.errors import InvalidArgument, StartError

_DRIVER = Path("/dev/nvidiactl")
# In a process of its own: it loads a native library, and a broken one must not take the doctor along.
_LINK_PROBE = (sys.executable, "-m", "cli.linkprobe", "ucx://")


def http_port(port: int) -> Finding:
    """The one port with a fixed default."""
    try:
        checks.port(port, "--http-port")
    except StartError as error:
        running = runtime.stacks(runtime.folder())
        if any(stack.http.endswith(f":{port}") for stack in running):
            return Finding(Health.OK, f"{port}: a stack of yours serves here")
        return Finding(Health.FAIL, f"{port} is taken, by another program or a stack still starting", error.fix)
    return Finding(Health.OK, f"{port} is free")


def etcd() -> Finding:
    return _server(binaries.etcd)


def redis() -> Finding:
    return _server(binaries.redis_server)


def torch() -> Finding:
    """Found without loading it: only prefill and decode do that."""
    if find_spec("torch") is None:
        return Finding(Health.FAIL, "not installed", "make setup (TORCH_INDEX_URL names the index to take it from)")
    return Finding(Health.OK, metadata.version("torch"))


def gpu_kernels() -> Finding:
    """What prefill and decode would run on this machine's GPUs, asked of torch in a process of its own."""
    if not _DRIVER.exists():
        return Finding(Health.OK, "no GPU")
    try:
        found = call_engine("kernels.available", timeout_s=120.0)
    except (StartError, InvalidArgument) as error:
        return Finding(Health.WARN, error.message, error.fix)
    devices = {device: facts for device, facts in found["devices"].items() if device != "cpu"}
    if not devices:
        return Finding(
            Health.WARN, f"torch {found['torch']} sees no GPU", "install a CUDA build of torch, or serve on the CPU"
        )
    chosen = "; ".join(f"{device}: {facts['auto']}" for device, facts in devices.items())
    slow = [f"{device}: {facts['missing']['cuda']}" for device, facts in devices.items() if "cuda" in facts["missing"]]
    if slow:
        return Finding(Health.WARN, chosen, f"the fastest kernels are missing; {'; '.join(slow)}")
    return Finding(Health.OK, f"{chosen} (python -m kernels.available says where each is used)")


def transport() -> Finding:
    """Moves a few bytes between two ends over ucx:// and tells the lane that was chosen."""
    if find_spec("nixl_cu12") is None:
        return Finding(Health.FAIL, "nixl-cu12 is not installed", "pip install --no-deps nixl-cu12==1.5.1")
    try:
        done = subprocess.run(_LINK_PROBE, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Finding(
            Health.FAIL, "a transfer to this machine itself did not end", "run with --transport tcp://127.0.0.1:0"
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding(Health.FAIL, last[:160], "run with --transport tcp://127.0.0.1:0, or mend UCX_TLS")
    lane = json.loads(done.stdout.strip().splitlines()[-1])["lane"]
    return Finding(Health.OK, f"UCX over {lane}")


def model(folder: Path) -> Finding:
    try:
        checks.model_folder(folder)
    except StartError as error:
        return Finding(Health.FAIL, error.message, error.fix)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Finding(Health.OK, f"{folder.name}, {size / 1e6:.1f} MB of weights")


def _server(find: Callable[[], Path]) -> Finding:
    try:
        program = find()
    except StartError as error:
        return Finding(Health.FAIL, error.message, error.fix)
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        return Finding(Health.FAIL, f"{program} does not run: {done.stderr.strip()[:100]}", "install another build")
    version = re.search(r"\d+(\.\d+)+", done.stdout)
    origin = "from its wheel" if "site-packages" in program.parts else f"at {program}"
    return Finding(Health.OK, f"{version.group() if version else 'unknown version'} {origin}")
