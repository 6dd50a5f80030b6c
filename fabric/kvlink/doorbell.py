"""Notices between links of one host: datagrams that wake their receiver at once. Knows sockets, no memory and no NIXL.

NIXL must be polled for notices; a datagram ends the receiver's sleep. Every link has one socket under an abstract name
that nobody can guess. What cannot be said there is said the usual way: nothing here waits or keeps anything.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Iterable

from fabric.kvlink.inbox import Inbox
from fabric.kvlink.link import Notice
from fabric.kvlink.shared import boot
from fabric.telemetry import logs

_log = logs.get("kvlink")
_HEAD = struct.Struct("<QH")
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the sender, by the kernel
_SCM_CREDENTIALS = 2  # of linux/socket.h
_MOST_BYTES = 1 << 18
_AT_ONCE = 64  # datagrams taken before the event loop has another turn
_ROOM_AGAIN_S = 0.005


class Doorbell:
    """Takes datagrams of the same user, or root, into an inbox, and sends them; in the event loop that made it."""

    def __init__(self, name: str, epoch: int, inbox: Inbox) -> None:
        """Raises OSError where the host gives no socket. `name` and `epoch` are what receivers are told."""
        self._sender = _HEAD.pack(epoch, len(name.encode())) + name.encode()
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(_MOST_BYTES))
        self._users = {0, os.getuid()}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        label = secrets.token_hex(16)
        self._socket.bind(_at(label))
        self._host = f"{boot().hex()}/"
        self.where = self._host + label
        self._open = True
        self._loop.add_reader(self._socket.fileno(), self._take)

    def reaches(self, where: str) -> bool:
        """Whether the doorbell at `where` is one of this host."""
        return self._open and where.startswith(self._host) and len(where) > len(self._host)

    def ring(self, where: str, payload: bytes) -> bool:
        """Delivers a notice to the doorbell at `where`; False where that is of another host, gone, or full, and for one
        that it would cut: what a socket may hold is the host's setting."""
        if not self.reaches(where) or len(self._sender) + len(payload) > _MOST_BYTES:
            return False
        try:
            self._socket.sendto(self._sender + payload, _at(where[len(self._host) :]))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Safe to repeat."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _take(self) -> None:
        """As much as there is and the inbox has room for; the rest waits in the socket, then at its senders."""
        notices = []
        for _ in range(min(_AT_ONCE, self._inbox.room)):
            try:
                count, credentials, flags, _ = self._socket.recvmsg_into([self._buffer], 64)
            except BlockingIOError:
                break
            if flags & socket.MSG_TRUNC or not self._is_trusted(credentials):
                _log.warning("datagram dropped", bytes=count)
            elif (notice := _notice(bytes(self._buffer[:count]))) is not None:
                notices.append(notice)
        if notices:
            self._inbox.put_now(notices)
        if self._inbox.room <= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(_ROOM_AGAIN_S, self._resume)

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._socket.fileno(), self._take)
            self._take()

    def _is_trusted(self, credentials: Iterable[tuple[int, int, bytes]]) -> bool:
        for level, kind, value in credentials:
            if (level, kind) == (socket.SOL_SOCKET, _SCM_CREDENTIALS):
                return _CREDENTIALS.unpack(value[: _CREDENTIALS.size])[1] in self._users
        return False


def _at(label: str) -> bytes:
    return b"\0deepinfer-" + label.encode()


def _notice(datagram: bytes) -> Notice | None:
    """None for bytes that are no notice."""
    try:
        epoch, length = _HEAD.unpack_from(datagram)
        name = datagram[_HEAD.size : _HEAD.size + length].decode()
    except (struct.error, UnicodeDecodeError):
        return None
    payload = datagram[_HEAD.size + length :]
    return Notice(name, epoch, payload) if name and payload else None
