"""Services that log in at the store as the users of ``shared.store.acl``, while the test itself stays
administrator. ``tests.restricted`` says for which tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import redis

from shared.domain.credentials import secret_digest
from shared.domain.errors import Unavailable
from shared.store.acl import Role, further_tenant, store_user
from shared.store.address import Address
from shared.store.connection import Connection
from shared.store.inspection import Boundary
from shared.store.keys import SETTLERS, TENANTS
from tests.support.raw import raw_client
from tests.support.world import moved_scripts

PASSWORD: Final = "the-same-in-every-test"
_CLOCK_RULES: Final = ("%R~test:clock", "+get")
_EXPECTED: Final = frozenset(
    {
        *(("command", "config|get", role) for role in Role),
        ("key", TENANTS.decode(), Role.SIDECAR),
        ("key", SETTLERS.decode(), Role.SETTLEMENT),
        ("command", "zremrangebyscore", Role.SETTLEMENT),
    }
)
"""What services ask for and do without: the settings of the server, a sidecar the registry, and a central
process that may not serve every tenant its part in their division.
"""


@dataclass
class _Test:
    """The present test: whether its services are restricted, and what they were refused."""

    restricted: bool = False
    refused: set[str] = field(default_factory=set)


_test = _Test()


@contextlib.contextmanager
def services(restricted: bool) -> Iterator[set[str]]:
    """The services of the block log in as restricted users, or as before; gives what they were refused."""
    _test.restricted, _test.refused = restricted, set()
    try:
        yield _test.refused
    finally:
        _test.restricted = False


def login(url: str, role: Role) -> str:
    """The URL with which a service of this role logs in."""
    if not _test.restricted:
        return url
    parts = urlsplit(url)
    return parts._replace(netloc=f"{role}:{PASSWORD}@{parts.netloc}").geturl()


def declared(word: Boundary | None = None) -> Boundary | None:
    """The operator's word on durability, which a service that may not inspect the store depends on."""
    return word or (Boundary.PROCESS_RESTART if _test.restricted else None)


def _rules(role: Role, tenants: Sequence[str]) -> list[str]:
    """Rules that take nothing back: another service of the test may be logged in as the same user."""
    rules = [rule for rule in store_user(role, tenants[:1]).rules if rule != "resetchannels"]
    for tenant in tenants[1:]:
        rules += further_tenant(role, tenant)
    return ["ACL", "SETUSER", role.value, "on", "#" + secret_digest(PASSWORD), *rules, *_CLOCK_RULES]


async def grant(admin: Connection, role: Role, *tenants: str) -> None:
    """Make the user of a role, or let it serve these tenants too."""
    if not _test.restricted:
        return
    await admin.call(*_rules(role, tenants))
    if (await admin.call("CONFIG", "GET", "aclfile"))[1]:
        await admin.call("ACL", "SAVE")


def introduced(url: str, role: Role, tenant: str) -> str:
    """The URL with which a service logs in that is started before anything else knows its user."""
    if _test.restricted:
        with raw_client(url) as raw:
            client: Any = raw
            client.execute_command(*_rules(role, [tenant]))
    return login(url, role)


def forget(raw: redis.Redis) -> None:
    """Remove what earlier tests granted: every test says itself whom its services serve."""
    client: Any = raw
    client.execute_command("ACL", "DELUSER", *Role)


async def note_refusals(admin: Connection) -> None:
    """Remember what the store refused to services so far: the test fails for it."""
    if not _test.restricted:
        return
    with contextlib.suppress(Unavailable, OSError):
        for entry in await admin.call("ACL", "LOG"):
            facts = {name.decode(): value for name, value in zip(entry[::2], entry[1::2], strict=True)}
            reason, what, user = (facts[name].decode() for name in ("reason", "object", "username"))
            if user in list(Role) and (reason, what, user) not in _EXPECTED:
                _test.refused.add(f"{reason} {what} to {user}")
        await admin.call("ACL", "LOG", "RESET")


def settings(folder: Path) -> dict[str, str]:
    """What a server needs that is restarted in a test: without a file its users would be gone."""
    if not _test.restricted:
        return {}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "users.acl"
    path.touch()
    return {"aclfile": f'"{path}"'}


_AT_THE_DOOR: Final = frozenset({"admit", "lookup", "session_open", "close", "cursor"})


class Divided(Connection):
    """Runs each script as the kind of process that does so, and sends everything else as a sidecar."""

    def __init__(self, admin: Connection) -> None:
        super().__init__(_as(admin, Role.SIDECAR))
        self._door = Connection(_as(admin, Role.ADMISSION))
        self._names = {script.sha: name for name, script in moved_scripts().items()}

    async def call(self, *args: Any) -> Any:
        if args[0] == "EVALSHA":
            name = self._names.get(args[1], "")
            verb = args[3 + int(args[2])] if name == "session" else name
            if verb in _AT_THE_DOOR:
                return await self._door.call(*args)
        return await super().call(*args)

    async def close(self) -> None:
        await self._door.close()
        await super().close()


def _as(admin: Connection, role: Role) -> Address:
    return replace(admin._address, username=role.value, password=PASSWORD)


@contextlib.asynccontextmanager
async def serving(admin: Connection, tenant: str) -> AsyncIterator[Connection]:
    """The connection of services: the test's own unless they are restricted."""
    if not _test.restricted:
        yield admin
        return
    await grant(admin, Role.ADMISSION, tenant)
    await grant(admin, Role.SIDECAR, tenant)
    async with Divided(admin) as divided:
        yield divided
    await note_refusals(admin)
