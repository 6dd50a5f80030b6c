"""Real processes: they end when asked, when killed, and when their parent dies."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil

from cli.child import Child

PARENT = """
import asyncio, pathlib, sys
from cli.child import Child

async def main():
    child = await Child.start((sys.executable, "-c", "import time; time.sleep(60)"), {}, pathlib.Path(sys.argv[1]))
    print(child.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_output_environment_and_exit_code_are_kept(tmp_path):
    log = tmp_path / "log"
    code = "import os, sys; print(os.environ['COLOUR']); sys.exit(3)"
    child = await Child.start((sys.executable, "-c", code), {"COLOUR": "blue"}, log)
    assert await child.wait(timeout_s=30)
    assert child.exit_reason == "exit code 3"
    assert log.read_text() == "blue\n"


async def test_wait_gives_up_on_a_process_that_stays_and_kill_ends_it(tmp_path):
    child = await Child.start((sys.executable, "-c", "import time; time.sleep(60)"), {}, tmp_path / "log")
    assert not await child.wait(timeout_s=0.05)
    assert child.exit_reason is None
    child.kill()
    assert await child.wait(timeout_s=30)
    assert child.exit_reason == "killed by SIGKILL"
    child.terminate()  # nobody is there any more: no error


async def test_kill_ends_grandchildren_as_well(tmp_path):
    told = tmp_path / "told"
    os.mkfifo(told)
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); open(sys.argv[1], 'w').write(str(p.pid))"
    child = await Child.start((sys.executable, "-c", code, str(told)), {}, tmp_path / "log")
    grandchild = psutil.Process(int(await asyncio.to_thread(told.read_text)))
    child.kill()
    await child.wait(timeout_s=30)
    await asyncio.to_thread(psutil.wait_procs, [grandchild], timeout=30)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=30)
    parent.stdout.close()
    gone, _ = psutil.wait_procs([child], timeout=30)
    assert gone or child.status() == psutil.STATUS_ZOMBIE
