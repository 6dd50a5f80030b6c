"""States of one supervised process."""

from cli.member import Member, State
from cli.restarts import RestartPolicy

POLICY = RestartPolicy(first_delay_s=1, longest_delay_s=8, stable_after_s=30, start_limit=2, crash_limit=3)


def serving_member(now: float = 0.0) -> Member:
    member = Member("decode-0", POLICY, start_timeout_s=60)
    member.started(now)
    member.served(now)
    return member


def test_a_crash_is_followed_by_a_backoff_and_another_start():
    member = serving_member()
    member.ended(10, "exit code 1")
    assert (member.state, member.reason) == (State.BACKOFF, "exit code 1")
    assert not member.due(10.9)
    assert member.due(11)
    member.started(11)
    assert (member.state, member.restarts) == (State.STARTING, 1)


def test_a_crash_loop_fails_for_good():
    member = serving_member()
    for now in (1, 2):
        member.ended(now, "exit code 1")
        member.started(now)
        member.served(now)
    member.ended(3, "exit code 1")
    assert member.state is State.FAILED
    assert not member.due(1e9)


def test_the_end_of_a_drained_process_is_no_crash():
    member = serving_member()
    member.drained(5)
    member.ended(6, "exit code 0")
    assert (member.state, member.restarts, member.reason) == (State.STOPPED, 0, "")
    assert not member.due(1e9)


def test_a_start_that_takes_too_long_is_overdue():
    member = Member("prefill-0", POLICY, start_timeout_s=60)
    member.started(100)
    assert not member.overdue(159.9)
    assert member.overdue(160)
    member.served(160)
    assert not member.overdue(1e9)
