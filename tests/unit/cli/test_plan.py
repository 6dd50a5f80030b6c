"""The processes behind a wish."""

import pytest

from cli.plan import Wanted, plan
from fabric.errors import StartError


@pytest.fixture
def tasks(tmp_path):
    wanted = Wanted(model=tmp_path, prefill=2, decode=1, http_port=8123, grpc_port=8124)
    return {task.name: task for task in plan(wanted, tmp_path, available_cores=6)}


def test_every_service_is_planned_with_as_many_workers_as_wanted(tasks):
    assert list(tasks) == ["etcd", "redis", "kvstore", "recipe", "prefill-0", "prefill-1", "decode-0", "gateway"]


def test_services_wait_for_etcd_and_redis_and_for_nothing_else(tasks):
    assert {task.needs for name, task in tasks.items() if name not in ("etcd", "redis")} == {("etcd", "redis")}
    assert tasks["etcd"].needs == tasks["redis"].needs == ()


def test_the_gateway_drains_first_and_the_backends_last(tasks):
    ranks = {name: task.drain_rank for name, task in tasks.items()}
    assert ranks["gateway"] < min(ranks["prefill-0"], ranks["decode-0"], ranks["kvstore"], ranks["recipe"])
    assert min(ranks["etcd"], ranks["redis"]) > max(ranks["prefill-0"], ranks["kvstore"])


def test_a_worker_is_told_its_threads_twice_the_same(tasks):
    task = tasks["prefill-0"]
    told = task.command[task.command.index("--threads") + 1]
    assert told == task.environment["OMP_NUM_THREADS"] == "2"


def test_no_password_stands_on_a_command_line_or_in_a_readable_file(tasks, tmp_path):
    config = tmp_path / "redis.conf"
    password = next(line.split()[1] for line in config.read_text().splitlines() if line.startswith("requirepass"))
    assert config.stat().st_mode & 0o077 == 0
    assert not any(password in part for task in tasks.values() for part in task.command)
    assert password in tasks["kvstore"].environment["DEEPINFER_KVSTORE_INDEX"]
    assert not any(password in value for value in tasks["recipe"].environment.values())


def test_two_plans_share_no_port(tmp_path):
    plans = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        plans.append(plan(Wanted(tmp_path, 1, 1, 1, 2), folder, available_cores=2))
    first, second = ({part for part in tasks[0].command if "http://" in part} for tasks in plans)
    assert first.isdisjoint(second)


def test_a_salt_given_by_the_operator_wins(tmp_path, monkeypatch):
    wanted = Wanted(model=tmp_path, prefill=1, decode=1, http_port=1, grpc_port=2)
    drawn = {plan(wanted, tmp_path, 2)[-1].environment["DEEPINFER_GATEWAY_SALT_SECRET"] for _ in range(2)}
    assert len(drawn) == 2
    monkeypatch.setenv("DEEPINFER_GATEWAY_SALT_SECRET", "mine")
    assert plan(wanted, tmp_path, 2)[-1].environment["DEEPINFER_GATEWAY_SALT_SECRET"] == "mine"


def test_stacks_of_one_kv_dir_share_its_salt_and_its_disk(tmp_path):
    kept, option = tmp_path / "kept", "DEEPINFER_GATEWAY_SALT_SECRET"
    kept.mkdir()
    wanted = Wanted(tmp_path, prefill=1, decode=1, http_port=1, grpc_port=2, kv_dir=kept, kv_gb=1.5)
    first, second = ({task.name: task for task in plan(wanted, tmp_path, 2)} for _ in range(2))
    assert first["gateway"].environment[option] == second["gateway"].environment[option]
    assert (kept / "salt").stat().st_mode & 0o777 == 0o600 and [path.name for path in kept.iterdir()] == ["salt"]
    command = first["kvstore"].command
    assert command[command.index("--nvme-dir") + 1] == str(kept / "blocks")
    assert command[command.index("--nvme-gb") + 1] == "1.5"
    assert not any(first["gateway"].environment[option] in part for part in command)


@pytest.mark.parametrize(("content", "mode", "told"), [("secret", 0o644, "others may read"), ("", 0o600, "empty")])
def test_a_salt_that_is_none_of_the_users_own_is_refused(tmp_path, content, mode, told):
    (tmp_path / "salt").write_text(content)
    (tmp_path / "salt").chmod(mode)
    with pytest.raises(StartError, match=told) as caught:
        plan(Wanted(tmp_path, 1, 1, 1, 2, kv_dir=tmp_path), tmp_path, 2)
    assert caught.value.field == "--kv-dir" and caught.value.fix


def test_the_transport_reaches_every_process_that_moves_kv(tmp_path):
    wanted = Wanted(tmp_path, prefill=1, decode=1, http_port=1, grpc_port=2, transport="tcp://127.0.0.1:0")
    told = {task.name for task in plan(wanted, tmp_path, 2) if "tcp://127.0.0.1:0" in task.command}
    assert told == {"kvstore", "prefill-0", "decode-0"}


def test_the_device_reaches_every_process_that_runs_a_model(tmp_path):
    wanted = Wanted(tmp_path, prefill=1, decode=1, http_port=1, grpc_port=2, device="cuda:1")
    told = {task.name for task in plan(wanted, tmp_path, 2) if "cuda:1" in task.command}
    assert told == {"prefill-0", "decode-0"}
