"""Starting, restarting and draining, on a fake clock with fake processes."""

from dataclasses import replace

import pytest

from cli.member import State
from cli.restarts import RestartPolicy
from cli.supervisor import Supervisor
from cli.task import Endpoints, Task

POLICY = RestartPolicy(first_delay_s=1, longest_delay_s=8, stable_after_s=30, start_limit=2, crash_limit=3)


class FakeProcess:
    def __init__(self, pid: int, log: list[str], name: str, obeys: bool) -> None:
        self.pid = pid
        self.exit_reason: str | None = None
        self._log, self._name, self._obeys = log, name, obeys

    def terminate(self) -> None:
        self._log.append(f"terminate {self._name}")
        if self._obeys:
            self.exit_reason = "exit code 0"

    def kill(self) -> None:
        if self.exit_reason is None:
            self._log.append(f"kill {self._name}")
            self.exit_reason = "killed by SIGKILL"

    async def wait(self, timeout_s: float) -> bool:
        return self.exit_reason is not None


class Stack:
    """A supervisor over fake processes; a test moves time and says which of them answer."""

    def __init__(self, needs: dict[str, tuple[str, ...]], ranks: dict[str, int] | None = None) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.answering: set[str] = set()
        self.disobedient: set[str] = set()
        self.frozen: set[str] = set()
        self.processes: dict[str, FakeProcess] = {}
        tasks = [self._task(name, after, (ranks or {}).get(name, 0)) for name, after in needs.items()]
        self.supervisor = Supervisor(tasks, self._start, lambda: self.now, POLICY, start_timeout_s=60)

    def _task(self, name: str, needs: tuple[str, ...], rank: int) -> Task:
        async def probe() -> Endpoints | None:
            return Endpoints(address=f"{name}:1") if name in self.answering else None

        async def alive(endpoints: Endpoints) -> bool:
            return endpoints.address == f"{name}:1" and name not in self.frozen

        reset = lambda: self.log.append(f"reset {name}")  # noqa: E731
        return Task(name, name, (name,), reset, probe, needs=needs, drain_rank=rank, alive=alive)

    async def _start(self, task: Task) -> FakeProcess:
        self.log.append(f"start {task.name}")
        process = FakeProcess(len(self.log), self.log, task.name, task.name not in self.disobedient)
        self.processes[task.name] = process
        return process

    async def serve(self) -> None:
        self.answering = {row.task.name for row in self.supervisor.rows()}
        for _ in range(3):
            await self.supervisor.tick()
        assert self.supervisor.serving

    async def pass_time(self, duration_s: int) -> None:
        for _ in range(duration_s):
            self.now += 1
            await self.supervisor.tick()

    def states(self) -> dict[str, State]:
        return {row.task.name: row.state for row in self.supervisor.rows()}


async def test_a_task_starts_only_when_what_it_needs_serves():
    stack = Stack({"etcd": (), "decode": ("etcd",)})
    await stack.supervisor.tick()
    assert stack.states() == {"etcd": State.STARTING, "decode": State.WAITING}
    stack.answering = {"etcd", "decode"}
    for _ in range(3):
        await stack.supervisor.tick()
    assert stack.supervisor.serving
    assert stack.log == ["reset etcd", "start etcd", "reset decode", "start decode"]


async def test_a_process_that_is_there_but_serves_nobody_is_started_again():
    stack = Stack({"etcd": (), "decode": ()})
    await stack.serve()
    stack.frozen = {"decode"}
    await stack.pass_time(70)
    assert stack.log.count("kill decode") == 1 and stack.log.count("start decode") == 2
    assert stack.log.count("start etcd") == 1


async def test_a_process_that_serves_again_after_a_while_is_left_alone():
    stack = Stack({"decode": ()})
    await stack.serve()
    for _ in range(3):
        stack.frozen = {"decode"}
        await stack.pass_time(49)
        stack.frozen = set()
        await stack.pass_time(11)
    assert stack.log.count("start decode") == 1


async def test_a_crashed_process_is_started_again_after_its_backoff_and_the_others_stay():
    stack = Stack({"etcd": (), "decode": ()})
    await stack.serve()
    stack.processes["decode"].exit_reason = "killed by SIGKILL"
    await stack.supervisor.tick()
    assert stack.states() == {"etcd": State.SERVING, "decode": State.BACKOFF}
    stack.now = 1.0
    await stack.supervisor.tick()
    assert stack.supervisor.serving
    assert [line for line in stack.log if line.startswith("start")] == ["start etcd", "start decode", "start decode"]


async def test_a_process_whose_settings_are_wrong_is_not_started_a_second_time():
    stack = Stack({"a": ()})
    stack.supervisor._all["a"].task = replace(stack.supervisor._all["a"].task, hopeless=("exit code 2",))
    await stack.supervisor.tick()
    stack.processes["a"].exit_reason = "exit code 2"
    await stack.pass_time(5)
    failed = stack.supervisor.failed
    assert failed is not None and failed.reason == "exit code 2"
    assert stack.log.count("start a") == 1


async def test_a_process_that_never_serves_is_killed_and_named_as_failed():
    stack = Stack({"prefill": ()})
    await stack.supervisor.tick()
    for now in (60.0, 61.0, 121.0):
        stack.now = now
        await stack.supervisor.tick()
    assert stack.supervisor.failed is not None
    assert stack.supervisor.failed.reason == "did not serve in time"
    assert stack.log.count("kill prefill") == 2


async def test_a_program_that_cannot_be_run_is_a_failure_with_its_reason():
    async def start(task: Task) -> FakeProcess:
        raise FileNotFoundError("no such program")

    async def probe() -> Endpoints | None:
        return None

    task = Task("etcd", "etcd", ("etcd",), lambda: None, probe)
    now = 0.0
    supervisor = Supervisor([task], start, lambda: now, POLICY)
    await supervisor.tick()
    now = 1.0
    await supervisor.tick()
    assert supervisor.failed is not None
    assert supervisor.failed.reason == "cannot be run: no such program"


async def test_drain_goes_rank_by_rank_and_kills_what_stays():
    stack = Stack({"etcd": (), "gateway": (), "decode": ()}, ranks={"etcd": 2, "gateway": 0, "decode": 1})
    stack.disobedient = {"decode"}
    await stack.serve()
    stack.log.clear()
    await stack.supervisor.drain(grace_s=1)
    assert stack.log == ["terminate gateway", "terminate decode", "kill decode", "terminate etcd"]
    assert set(stack.states().values()) == {State.STOPPED}


async def test_a_drained_stack_starts_nothing_again():
    stack = Stack({"etcd": ()})
    await stack.serve()
    await stack.supervisor.drain(grace_s=1)
    stack.now = 1e6
    await stack.supervisor.tick()
    assert stack.log.count("start etcd") == 1


@pytest.mark.parametrize("ended", ["etcd", "decode"])
async def test_rows_show_no_process_for_what_has_ended(ended):
    stack = Stack({"etcd": (), "decode": ()})
    await stack.serve()
    stack.processes[ended].exit_reason = "exit code 3"
    await stack.supervisor.tick()
    rows = {row.task.name: row for row in stack.supervisor.rows()}
    assert rows[ended].pid is None
    assert rows[ended].endpoints == Endpoints()
    assert rows[ended].reason == "exit code 3"


async def test_what_had_failed_is_still_named_after_the_drain():
    stack = Stack({"etcd": (), "gateway": ()})
    stack.answering = {"etcd"}
    for now in (0.0, 60.0, 61.0, 121.0):
        stack.now = now
        await stack.supervisor.tick()
    await stack.supervisor.drain(grace_s=1)
    assert stack.states() == {"etcd": State.STOPPED, "gateway": State.FAILED}
    assert stack.supervisor.failed is not None
    assert stack.supervisor.failed.task.name == "gateway"
