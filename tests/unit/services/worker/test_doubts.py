"""A landing in doubt returns on its writer's word or on the proof of its death, a while later, and on nothing else."""

from __future__ import annotations

from fabric.deaths import Deaths, Incarnation
from fabric.processes import ProcessId
from services.worker.doubts import Doubts

PROCESS = ProcessId("boot@a", "net:1", "pid:1", 40, 1000)
STORE = Incarnation("kvstore", 5, PROCESS.pack())


class World:
    def __init__(self) -> None:
        self.now, self.dead, self.settled = 0.0, False, set[str]()
        self.freed: list[str] = []
        deaths = Deaths(lambda process: self.dead)
        self.doubts = Doubts(deaths, lambda: self.now, self.settled.__contains__, self.freed.append, linger_s=2.0)

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.doubts.sweep()


def test_silence_alone_frees_nothing() -> None:
    world = World()
    world.doubts.add("l", STORE)
    world.pass_s(3600)
    assert world.freed == [] and len(world.doubts) == 1


def test_a_proven_death_frees_a_landing_after_what_was_under_way_has_arrived() -> None:
    world = World()
    world.doubts.add("l", STORE)
    world.pass_s(1)
    world.dead = True
    world.pass_s(1.5)
    assert world.freed == []
    world.pass_s(1)
    assert world.freed == ["l"] and len(world.doubts) == 0


def test_a_writer_that_spoke_is_no_longer_waited_for() -> None:
    world = World()
    world.doubts.add("l", STORE)
    world.settled.add("l")
    world.pass_s(1)
    world.dead = True
    world.pass_s(5)
    assert world.freed == [] and len(world.doubts) == 0


def test_a_writer_whose_process_is_unknown_can_be_proven_nothing() -> None:
    world = World()
    world.doubts.add("l", Incarnation("kvstore", 5))
    world.dead = True
    world.pass_s(10)
    assert world.freed == []
