"""What each kind of process may do at the store, as the store's own access rules.

A user is limited twice: to the keys of the tenants it serves, each kind read-only where nothing of the
process writes it, and to the commands that its calls and its scripts use. The store judges both again inside
a script, so neither a bug nor a stolen password reaches another tenant's keys. A script's declared keys count
as read and written whatever the script does with them: a key that a script of the role names is granted
whole.

Nothing here is a pattern of what callers send: a tenant id holds no character that a pattern gives a meaning
(``* ? [ ] \\``), and the brace that closes its tag keeps ``a`` apart from ``acme`` and that from ``acme-2``.
"""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

import lua
from shared.domain.credentials import secret_digest
from shared.domain.errors import InvalidInput
from shared.store.keys import TENANTS, Keys
from shared.store.scripts import GUARD_KEYS


class Role(enum.StrEnum):
    """A kind of process that logs in at the store."""

    ADMISSION = "admission"
    SIDECAR = "sidecar"
    SETTLEMENT = "settlement"


_CALLED: Final = re.compile(rb"redis\.p?call\(\s*'([A-Za-z]+)'")
_ALWAYS: Final = (
    "ping",
    "time",
    # The replication id decides whether acknowledged writes were lost. INFO tells numbers of the whole
    # server, never a key or a value.
    "info",
    "script|load",
    "evalsha",
    # Where the store forgets scripts again and again their text goes along; it reaches no further than a
    # loaded one.
    "eval",
    "evalsha_ro",
    "eval_ro",
    "subscribe",
    "unsubscribe",
)
_READS: Final = ("hget", "hmget", "hvals", "hkeys", "xrange")
_SETTLES: Final = (
    *_READS,
    "hset",
    "hdel",
    "hscan",
    "zadd",
    "zcount",
    "zrange",
    "zrangebyscore",
    "zscan",
    "zscore",
    "zmscore",
)
_SCRIPTS: Final[dict[Role, tuple[str, ...]]] = {
    Role.ADMISSION: ("admit", "lookup", "session", "session_open", "registry", "epoch"),
    Role.SIDECAR: ("lease", "replace", "session", "epoch", "lookup"),
    Role.SETTLEMENT: ("replace", "session", "epoch", "lookup"),
}
_CALLS: Final[dict[Role, tuple[str, ...]]] = {
    # Batches run as transactions.
    Role.ADMISSION: (*_READS, "multi", "exec"),
    Role.SIDECAR: (*_SETTLES, "exists", "xreadgroup", "xgroup|delconsumer", "xinfo|consumers"),
    Role.SETTLEMENT: _SETTLES,
}


class StoreUser(msgspec.Struct, frozen=True):
    """A user of the store: its name and the rules that follow its password."""

    name: str
    rules: tuple[str, ...]

    def command(self, password_sha256: str) -> str:
        """The command that makes the user exactly this, whatever it was before."""
        return f"ACL SETUSER {self.name} reset on #{password_sha256} {' '.join(self.rules)}"

    def line(self, password_sha256: str) -> str:
        """The same as a line of the store's ACL file."""
        return f"user {self.name} on #{password_sha256} {' '.join(self.rules)}"


def make_password() -> tuple[str, str]:
    """A fresh password of 256 random bits and its SHA-256 in hex, the form the store keeps."""
    password = secrets.token_urlsafe(32)
    return password, secret_digest(password)


def store_user(role: Role, tenants: Sequence[str], name: str = "", db: int = 0) -> StoreUser:
    """The user for processes of ``role`` that serve exactly ``tenants``.

    ``db`` is the database of the store's URL. Raises InvalidInput for no tenant, an id that is none, a
    sidecar of several tenants, or a name the store would read otherwise.
    """
    if not tenants:
        raise InvalidInput("tenant", "name at least one")
    if role is Role.SIDECAR and len(tenants) > 1:
        raise InvalidInput("tenant", "a sidecar serves one")
    names = sorted(set(tenants))
    if not name:
        name = f"lockgate-{role}-{names[0]}" if len(names) == 1 else f"lockgate-{role}"
    rules = [*_keys(role, names), *_channels(names), "-@all", *(f"+{verb}" for verb in commands(role))]
    # Limited to one first argument: the keys of another database carry the same names.
    return StoreUser(check_user(name), (*rules, f"+select|{db}") if db else tuple(rules))


def check_user(name: str) -> str:
    """Accept a name that is one word wherever it is pasted. Raises InvalidInput."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is None:
        raise InvalidInput("user", "must be 1 to 128 letters, digits, dots, underscores or hyphens")
    return name


def further_tenant(role: Role, tenant: str) -> tuple[str, ...]:
    """The rules that let an existing user of ``role`` serve one tenant more."""
    return (*_keys(role, [tenant]), f"&{Keys(tenant).wake.decode()}")


def commands(role: Role) -> list[str]:
    """What a process of this role sends itself and what its scripts call, sorted."""
    called = {
        verb.decode().lower() for name in _SCRIPTS[role] for verb in _CALLED.findall(lua.load(name).source)
    }
    return sorted({*_ALWAYS, *_CALLS[role], *called})


def _channels(tenants: Sequence[str]) -> list[str]:
    """Literal channels: a pattern in their place would open those of other tenants."""
    return ["resetchannels", *(f"&{Keys(tenant).wake.decode()}" for tenant in tenants)]


def _keys(role: Role, tenants: Sequence[str]) -> list[str]:
    found = [f"%R~{key.decode()}" for key in GUARD_KEYS]
    if role is not Role.SIDECAR:
        found.append(f"%R~{TENANTS.decode()}")
    for tenant in tenants:
        k = Keys(tenant)
        found += [f"%R~{key.decode()}" for key in _read_only(role, k)]
        found += [f"~{key.decode()}" for key in _whole(role, k)]
    return found


def _read_only(role: Role, k: Keys) -> Iterator[bytes]:
    yield k.contracts
    yield k.peers
    if role is Role.ADMISSION:
        yield k.tokens
    else:
        yield k.policy


def _whole(role: Role, k: Keys) -> Iterator[bytes]:
    yield k.meta
    yield k.due
    yield from (kind("*") for kind in (k.op, k.session, k.updates, k.queue, k.cursors, k.outbox))
    if role is Role.ADMISSION:
        yield k.policy
    else:
        yield k.parked
