"""Free TCP ports of the loopback interface. Knows sockets, not who asks."""

import socket

LOOPBACK = "127.0.0.1"


def free() -> int:
    """A port that is free now. Whoever binds it later may lose a race, and is then restarted."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
