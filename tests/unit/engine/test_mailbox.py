"""Events on their way to one reader: joined, in order, and in portions where it asked for them."""

import asyncio

import pytest

from engine.errors import UnknownRequest
from engine.events import Event, Failed, Finished, TokensOut, Usage
from engine.mailbox import Mailbox
from engine.stops import FinishReason

LONG_S = 3600.0  # no test waits for it
END = Finished("r", FinishReason.LENGTH, Usage(3, 0, 3), None)


def token(index: int) -> TokensOut:
    return TokensOut("r", index, (10 + index,), None)


async def taken(mailbox: Mailbox) -> Event:
    async with asyncio.timeout(10.0):
        return await mailbox.get()


async def test_without_portions_each_token_leaves_at_once() -> None:
    mailbox = Mailbox(8)
    for index in range(3):
        mailbox.put(token(index))
        assert await taken(mailbox) == token(index)


@pytest.mark.parametrize("last", [END, Failed("r", UnknownRequest("r"))])
async def test_the_end_waits_for_no_portion_and_takes_the_tokens_before_it_along(last: Event) -> None:
    mailbox = Mailbox(8, gather_s=LONG_S)
    for event in (token(0), token(1), last):
        mailbox.put(event)
    assert await taken(mailbox) == TokensOut("r", 0, (10, 11), None)
    assert await taken(mailbox) == last


async def test_tokens_wait_until_a_portion_is_due() -> None:
    mailbox = Mailbox(8, gather_s=LONG_S)
    reading = asyncio.ensure_future(mailbox.get())
    for index in range(3):
        mailbox.put(token(index))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not reading.done()
    mailbox.put(END)
    assert await reading == TokensOut("r", 0, (10, 11, 12), None)


async def test_a_portion_that_no_further_step_takes_along_leaves_by_itself() -> None:
    mailbox = Mailbox(8, gather_s=0.02)
    mailbox.put(token(0))
    assert await taken(mailbox) == token(0)


async def test_an_early_reader_of_one_portion_does_not_open_the_next() -> None:
    mailbox = Mailbox(8, gather_s=LONG_S)
    mailbox.put(token(0))
    mailbox.put(END)
    assert await taken(mailbox) == token(0)
    assert await taken(mailbox) == END
    mailbox.put(token(1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await mailbox.get()
