"""Who calls: API keys to tenants, tenants to what their cached KV is keyed and counted by. Knows no request.

Stores no key, only hashes.
"""

from __future__ import annotations

import argparse
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from blake3 import blake3

from fabric.errors import StartError, Unauthenticated
from fabric.retention import OWNER_BYTES, RetentionClass
from services.gateway.regions import Region, RegionSettings

ANONYMOUS = "anonymous"
_HASH_BYTES = 32
_SALT_CONTEXT = "deepinfer gateway tenant salt v1"
_OWNER_CONTEXT = "deepinfer gateway tenant owner v1"
_REGION_CONTEXT = "deepinfer gateway region salt v1"


@dataclass(frozen=True, slots=True)
class Account:
    """A line of the key file: the hash of a key, and what the tenant's requests belong to where they do not say."""

    digest: bytes
    retention: RetentionClass | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client as the rest of the system sees it.

    Requests of different tenants share no cached prefix, but for the `regions` that both take part in. `owner` stands
    for the tenant wherever the name shall not be known.
    """

    name: str
    salt: bytes
    owner: bytes = b""
    retention: RetentionClass | None = None
    regions: tuple[Region, ...] = ()


class Tenants:
    """All tenants of one gateway. Without a key file everybody is one anonymous tenant."""

    def __init__(self, accounts: Mapping[str, Account], secret: bytes, regions: Sequence[RegionSettings] = ()) -> None:
        """`secret`: what salts and owners derive from; never leaves this process.

        Raises:
            StartError: a region names a tenant that there is not.
        """
        self._accounts = accounts
        self._keys = {context: blake3(secret, derive_key_context=context).digest() for context in _CONTEXTS}
        _require_known(regions, accounts)
        self._regions = [(frozenset(each.tenants), self._region(each)) for each in regions]

    def identify(self, authorization: str) -> Tenant:
        """The tenant behind an Authorization value, "Bearer KEY".

        Raises:
            Unauthenticated: keys are required and this is not one of them. The time taken tells nothing about keys.
        """
        if not self._accounts:
            return self._tenant(ANONYMOUS, None)
        scheme, _, key = authorization.partition(" ")
        presented = hash_key(key.strip())
        found = ""
        for name, account in self._accounts.items():
            if hmac.compare_digest(presented, account.digest):
                found = name
        if scheme.lower() != "bearer" or not found:
            raise Unauthenticated("no valid API key", field="authorization", fix="send 'Authorization: Bearer KEY'")
        return self._tenant(found, self._accounts[found].retention)

    def _tenant(self, name: str, retention: RetentionClass | None) -> Tenant:
        return Tenant(
            name,
            salt=self._derived(_SALT_CONTEXT, name),
            owner=self._derived(_OWNER_CONTEXT, name)[:OWNER_BYTES],
            retention=retention,
            regions=tuple(region for members, region in self._regions if name in members),
        )

    def _region(self, settings: RegionSettings) -> Region:
        return Region(settings.name, self._derived(_REGION_CONTEXT, settings.name), settings.opening)

    def _derived(self, context: str, name: str) -> bytes:
        return blake3(name.encode(), key=self._keys[context]).digest()


_CONTEXTS = (_SALT_CONTEXT, _OWNER_CONTEXT, _REGION_CONTEXT)


def hash_key(key: str) -> bytes:
    """What a key file holds, as hex, in place of a key."""
    return blake2b(key.encode(), digest_size=_HASH_BYTES).digest()


def load_accounts(path: Path) -> dict[str, Account]:
    """Tenants of a key file: `name blake2b-hex [chat|agent|default]` a line, `#` starts a comment.

    Raises:
        StartError: the file is missing, empty or malformed; names the line, never its content.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read {path}", field="keys_file", fix="point it at a readable text file") from error
    accounts: dict[str, Account] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if words and words[0] in accounts:
            fix = "give every tenant one line"
            raise StartError(f"line {number} names a tenant of a former line", field="keys_file", fix=fix)
        if words:
            accounts[words[0]] = _account(words[1:], number)
    if not accounts:
        raise StartError(f"{path} holds no key", field="keys_file", fix="add a line, or drop the setting")
    return accounts


def _account(words: Sequence[str], number: int) -> Account:
    try:
        digest, *retention = words
        account = Account(bytes.fromhex(digest), *map(RetentionClass, retention))
    except (ValueError, TypeError):
        account = Account(b"")
    if len(account.digest) != _HASH_BYTES:
        raise StartError(
            f"line {number} is not `name blake2b-hex` or `name blake2b-hex {'|'.join(RetentionClass)}`",
            field="keys_file",
            fix="hash a key with: python -m services.gateway.tenants",
        )
    return account


def _require_known(regions: Sequence[RegionSettings], accounts: Mapping[str, Account]) -> None:
    names = [region.name for region in regions]
    for index, region in enumerate(regions):
        if region.name in names[:index]:
            fix = "give every region its own name: salts derive from it"
            raise StartError("there are two of this name", field=f"regions[{index}].name", fix=fix)
        for tenant in region.tenants:
            if tenant not in accounts:
                fix = "name tenants of keys_file"
                raise StartError(f"there is no tenant {tenant!r}", field=f"regions[{index}].tenants", fix=fix)


def main() -> None:
    """Reads a key from standard input and prints the hash that belongs into a key file."""
    argparse.ArgumentParser(prog="python -m services.gateway.tenants", description=main.__doc__).parse_args()
    print(hash_key(input().strip()).hex())


if __name__ == "__main__":
    main()
