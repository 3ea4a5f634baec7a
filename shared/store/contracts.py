"""Registered contracts: immutable once registered, pinned by digest, compiled once per process."""

from __future__ import annotations

from shared.domain.contract import Contract, parse_bundle
from shared.domain.errors import Conflict
from shared.store.connection import Connection
from shared.store.keys import Keys


def _field(contract_id: str, version: str) -> str:
    return f"{contract_id}@{version}"


class Contracts:
    """The contracts of one tenant, cached for ever: what a digest names never changes.

    A miss reads the registry once; contracts registered after that are found by the next miss.
    """

    def __init__(self, tenant: str, connection: Connection) -> None:
        self._key = Keys(tenant).contracts
        self._connection = connection
        self._by_field: dict[str, Contract] = {}
        self._by_digest: dict[str, Contract] = {}
        self._by_profile: dict[tuple[str, str], Contract] = {}

    async def register(self, contract: Contract) -> bool:
        """Store a contract; False where the same one is registered already.

        Raises Conflict where its id and version, or its session profile's, already name other content.
        """
        await self._load()
        if contract.session is not None:
            named = self._by_profile.get((contract.session.id, contract.session.version))
            if named is not None and named.digest != contract.digest:
                raise Conflict(
                    f"profile {contract.session.id} {contract.session.version} is registered otherwise"
                )
        field = _field(contract.id, contract.version)
        if await self._connection.call("HSETNX", self._key, field, contract.document):
            self._remember(field, contract)
            return True
        if await self._connection.call("HGET", self._key, field) != contract.document:
            raise Conflict(
                f"{contract.id} {contract.version} is registered with other content; give it another version"
            )
        return False

    async def every(self) -> list[Contract]:
        """All registered contracts, by id and version."""
        await self._load()
        return [self._by_field[field] for field in sorted(self._by_field)]

    async def by_digest(self, digest: str) -> Contract | None:
        """The contract a record is pinned to."""
        if digest not in self._by_digest:
            await self._load()
        return self._by_digest.get(digest)

    async def by_profile(self, profile_id: str, version: str) -> Contract | None:
        """The contract whose session section is this profile."""
        if (profile_id, version) not in self._by_profile:
            await self._load()
        return self._by_profile.get((profile_id, version))

    async def _load(self) -> None:
        names = {name.decode() for name in await self._connection.call("HKEYS", self._key)}
        missing = sorted(names - self._by_field.keys())
        if not missing:
            return
        documents = await self._connection.call("HMGET", self._key, *missing)
        for field, document in zip(missing, documents, strict=True):
            if document is not None:
                self._remember(field, parse_bundle(document))

    def _remember(self, field: str, contract: Contract) -> None:
        self._by_field[field] = contract
        self._by_digest[contract.digest] = contract
        if contract.session is not None:
            self._by_profile[contract.session.id, contract.session.version] = contract
