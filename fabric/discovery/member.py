"""One instance of a service as others see it. Knows its JSON form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fabric.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """Address and capabilities of an instance. `epoch` rises with every start of the same instance.

    `process` is a packed `processes.ProcessId`: by it others on the same host can see that the instance is gone.
    """

    service: str
    instance: str
    address: str
    epoch: int
    model: str = ""
    revision: str = ""
    layout_fingerprint: str = ""
    record_versions: tuple[str, ...] = ()
    capacity: Mapping[str, int] = field(default_factory=dict)
    process: str = ""

    def at(self, address: str) -> MemberInfo:
        """The same instance at the address that its server took."""
        return dataclasses.replace(self, address=address)

    def dump(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @staticmethod
    def load(packed: bytes) -> MemberInfo:
        """Raises InvalidArgument for bytes that another program wrote; unknown fields are a newer version's."""
        try:
            raw: dict[str, Any] = json.loads(packed)
            known = {item.name: raw[item.name] for item in dataclasses.fields(MemberInfo) if item.name in raw}
            known["record_versions"] = tuple(known.get("record_versions", ()))
            return MemberInfo(**known)
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidArgument("not a member record", field="member") from error
