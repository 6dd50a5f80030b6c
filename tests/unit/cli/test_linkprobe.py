"""The doctor's transfer moves real bytes between two processes."""

import json

import pytest

from cli import linkprobe


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "ucx://"])
def test_bytes_arrive_and_the_lane_is_told(url, capsys):
    assert linkprobe.main(url) == 0
    *_, last = capsys.readouterr().out.splitlines()  # logs are nowhere sent in a test
    assert json.loads(last)["lane"]


def test_a_transport_that_does_not_exist_is_one_line_with_a_fix(capsys):
    assert linkprobe.main("quic://") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "quic://" in line
    assert "ucx://" in line
