"""A real etcd and a real Redis, as a local stack starts them."""

import os
import time
from pathlib import Path

import pytest

from cli import backends, ports
from cli.child import Child
from cli.member import State
from cli.restarts import RestartPolicy
from cli.supervisor import Supervisor
from cli.task import Task

PASSWORD = "correct-horse"


async def serving(tasks: list[Task], logs: Path) -> Supervisor:
    """A supervisor whose tasks all serve."""

    async def start(task: Task) -> Child:
        return await Child.start(task.command, task.environment, logs / f"{task.name}.log")

    supervisor = Supervisor(tasks, start, time.monotonic, RestartPolicy(), start_timeout_s=30)
    while not supervisor.serving:
        await supervisor.tick()
        assert supervisor.failed is None, (logs / f"{tasks[0].name}.log").read_text()
    return supervisor


@pytest.mark.parametrize("backend", ["etcd", "redis"])
async def test_a_backend_serves_and_leaves_no_process_when_drained(tmp_path, backend):
    port = ports.free()
    task = backends.etcd(tmp_path, port) if backend == "etcd" else backends.redis(tmp_path, port, PASSWORD)
    supervisor = await serving([task], tmp_path)
    [row] = supervisor.rows()
    assert row.endpoints.address == f"127.0.0.1:{port}"
    assert row.pid is not None
    await supervisor.drain(grace_s=20)
    assert supervisor.rows()[0].state is State.STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(row.pid, 0)
    assert await task.probe() is None


async def test_redis_refuses_whoever_lacks_its_password(tmp_path):
    port = ports.free()
    supervisor = await serving([backends.redis(tmp_path, port, PASSWORD)], tmp_path)
    try:
        stranger = tmp_path / "stranger"
        stranger.mkdir()
        assert await backends.redis(stranger, port, "wrong").probe() is None
    finally:
        await supervisor.drain(grace_s=20)
