"""Who calls: API keys to tenants, tenants to cache salts. Knows no request; stores no key, only hashes."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from blake3 import blake3

from fabric.errors import StartError, Unauthenticated

ANONYMOUS = "anonymous"
_HASH_BYTES = 32
_SALT_CONTEXT = "deepinfer gateway tenant salt v1"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client as the rest of the system sees it. Requests of different tenants share no cached prefix."""

    name: str
    salt: bytes


class Tenants:
    """All tenants of one gateway. Without a key file everybody is one anonymous tenant."""

    def __init__(self, hashes: dict[str, bytes], secret: bytes) -> None:
        """`hashes`: blake2b-256 of each tenant's key. `secret`: what salts derive from; never leaves this process."""
        self._hashes = hashes
        self._salt_key = blake3(secret, derive_key_context=_SALT_CONTEXT).digest()

    def identify(self, authorization: str) -> Tenant:
        """The tenant behind an Authorization value, "Bearer KEY".

        Raises:
            Unauthenticated: keys are required and this is not one of them. The time taken tells nothing about keys.
        """
        if not self._hashes:
            return self._tenant(ANONYMOUS)
        scheme, _, key = authorization.partition(" ")
        presented = hash_key(key.strip())
        found = ""
        for name, known in self._hashes.items():
            if hmac.compare_digest(presented, known):
                found = name
        if scheme.lower() != "bearer" or not found:
            raise Unauthenticated("no valid API key", field="authorization", fix="send 'Authorization: Bearer KEY'")
        return self._tenant(found)

    def _tenant(self, name: str) -> Tenant:
        return Tenant(name, blake3(name.encode(), key=self._salt_key).digest())


def hash_key(key: str) -> bytes:
    """What a key file holds, as hex, in place of a key."""
    return blake2b(key.encode(), digest_size=_HASH_BYTES).digest()


def load_hashes(path: Path) -> dict[str, bytes]:
    """Tenants of a key file: `name blake2b-hex` a line, `#` starts a comment.

    Raises:
        StartError: the file is missing, empty or malformed; names the line, never its content.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read {path}", field="keys_file", fix="point it at a readable text file") from error
    hashes: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if words:
            name, digest = _entry(words, number)
            hashes[name] = digest
    if not hashes:
        raise StartError(f"{path} holds no key", field="keys_file", fix="add a line, or drop the setting")
    return hashes


def _entry(words: list[str], number: int) -> tuple[str, bytes]:
    try:
        name, text = words
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != _HASH_BYTES:
        raise StartError(
            f"line {number} is not `name blake2b-hex`",
            field="keys_file",
            fix="hash a key with: python -m services.gateway.tenants",
        )
    return name, digest


def main() -> None:
    """Reads a key from standard input and prints the hash that belongs into a key file."""
    print(hash_key(input().strip()).hex())


if __name__ == "__main__":
    main()
