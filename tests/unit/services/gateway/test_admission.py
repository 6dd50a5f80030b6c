"""Admission: bounded, fair, and nobody's place is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from fabric.errors import Exhausted
from services.gateway.admission import Admission


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Guests:
    """Requests that stay until told to leave, and the order in which they got in."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.order: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}

    def come(self, tenant: str, name: str) -> asyncio.Task[None]:
        self.leave[name] = asyncio.Event()
        return asyncio.create_task(self._stay(tenant, name))

    async def _stay(self, tenant: str, name: str) -> None:
        async with self._admission.admit(tenant):
            self.order.append(name)
            await self.leave[name].wait()


async def finish(*tasks: Awaitable[None]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_tenants_take_turns_however_many_one_sends() -> None:
    guests = Guests(Admission(lambda: 1, 100, 100))
    tasks = [guests.come("a", f"a{i}") for i in range(4)] + [guests.come("b", "b0"), guests.come("c", "c0")]
    await settle()
    for _ in range(6):
        guests.leave[guests.order[-1]].set()
        await settle()
    await finish(*tasks)
    assert guests.order == ["a0", "a1", "b0", "c0", "a2", "a3"]


async def test_a_full_queue_refuses_at_once_with_a_hint() -> None:
    guests = Guests(admission := Admission(lambda: 1, 1, 1))
    tasks = [guests.come("a", "a0"), guests.come("a", "a1")]
    await settle()
    with pytest.raises(Exhausted) as caught:
        async with admission.admit("b"):
            pass
    assert caught.value.retry_after_s and caught.value.retryable
    for name in ("a0", "a1"):
        guests.leave[name].set()
    await finish(*tasks)
    assert (admission.inflight, admission.queued, admission.served) == (0, 0, 2)


async def test_one_tenant_cannot_fill_the_queue_of_all() -> None:
    guests = Guests(admission := Admission(lambda: 1, 10, 1))
    tasks = [guests.come("a", "a0"), guests.come("a", "a1")]
    await settle()
    with pytest.raises(Exhausted):
        async with admission.admit("a"):
            pass
    tasks.append(guests.come("b", "b0"))
    await settle()
    assert admission.queued == 2
    for event in guests.leave.values():
        event.set()
    await finish(*tasks)


async def test_who_gives_up_while_waiting_leaves_no_trace() -> None:
    guests = Guests(admission := Admission(lambda: 1, 10, 10))
    tasks = [guests.come("a", name) for name in ("a0", "a1", "a2")]
    await settle()
    tasks[1].cancel()
    await settle()
    assert admission.queued == 1
    guests.leave["a0"].set()
    guests.leave["a2"].set()
    await finish(*tasks)
    assert guests.order == ["a0", "a2"] and admission.inflight == 0


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_giving_up_in_the_moment_of_admission_passes_the_place_on(cancel_first: bool) -> None:
    guests = Guests(admission := Admission(lambda: 1, 10, 10))
    tasks = [guests.come("a", name) for name in ("a0", "a1", "a2")]
    await settle()
    if cancel_first:
        tasks[1].cancel()
    guests.leave["a0"].set()
    if not cancel_first:
        await asyncio.sleep(0)
        tasks[1].cancel()
    await settle()
    assert guests.order[-1] == "a2"
    guests.leave["a2"].set()
    await finish(*tasks)
    assert (admission.inflight, admission.queued) == (0, 0)


async def test_room_that_appears_is_filled_with_the_next_departure() -> None:
    room = 1
    guests = Guests(Admission(lambda: room, 10, 10))
    tasks = [guests.come("a", name) for name in ("a0", "a1", "a2")]
    await settle()
    room = 2
    guests.leave["a0"].set()
    await settle()
    assert guests.order == ["a0", "a1", "a2"]
    for event in guests.leave.values():
        event.set()
    await finish(*tasks)
