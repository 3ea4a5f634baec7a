"""What the host says of itself: its authority and promises, whether it lives, whether it may serve."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

import lua
from admission_svc.auth import Desk, Visit, may_open
from admission_svc.http import LONGEST_WAIT_S, Call, Reply
from admission_svc.live import Waits
from admission_svc.messages import (
    MAX_BATCH,
    MAX_PAGE,
    Authority,
    Capabilities,
    Durability,
    Health,
    Limits,
    ProfileOffer,
    encode,
)
from admission_svc.problems import retry_after
from shared.domain.canonical import MAX_FACT_BYTES, MAX_MESSAGE_BYTES, SESSION
from shared.domain.contract import Contract
from shared.domain.errors import Unavailable
from shared.domain.events import source
from shared.store.inspection import Boundary
from shared.store.runtime import Runtime
from shared.store.scripts import CLIENTS_PER_SESSION
from shared.telemetry import METRICS_CONTENT_TYPE, metrics_page

_CHECK_AGAIN_S: Final = 1.0
_OK: Final = encode(Health("ok"))


def _limits() -> Limits:
    payload = SESSION.payload
    assert payload is not None, "session payloads are bounded"
    return Limits(
        message_bytes=MAX_MESSAGE_BYTES,
        update_bytes=MAX_FACT_BYTES,
        string_bytes=payload.string_bytes,
        payload_nesting=payload.nesting,
        payload_entries=payload.entries,
        page_updates=MAX_PAGE,
        batch_commands=MAX_BATCH,
        wait_seconds=LONGEST_WAIT_S,
        cursors_per_session=CLIENTS_PER_SESSION,
        tenant=None,
    )


LIMITS: Final = _limits()


class HostRoutes:
    """Handlers of the routes about the host."""

    def __init__(self, runtime: Runtime, desk: Desk, waits: Waits) -> None:
        self._runtime = runtime
        self._desk = desk
        self._waits = waits
        self._scripts_known = False
        self._reason: str | None = "not looked at yet"
        self._looked_at = -_CHECK_AGAIN_S
        self._looking = asyncio.Lock()

    async def authority(self, call: Call) -> Reply:
        """GET /v1/authority."""
        call.parameters()
        body = await self._desk.serve(call.header(b"authorization"), self._authority)
        return Reply(200, encode(body))

    async def _authority(self, visit: Visit) -> Authority:
        """Told under revisions that hold: a revoked token learns nothing from what was remembered."""
        await visit.handle.reads.check(visit.revisions)
        durability = self._runtime.durability or await self._runtime.refresh()
        contracts = await visit.handle.contracts.every() if "caller" in visit.caller.roles else []
        return Authority(
            tenant=visit.tenant,
            authority=visit.revisions.authority,
            source=source(visit.tenant, visit.revisions.authority),
            core="draft-01",
            durability=msgspec.convert(durability.published(), Durability),
            limits=msgspec.structs.replace(LIMITS, tenant=visit.snapshot.limits),
            usage=await visit.handle.reads.usage(visit.revisions) if visit.caller.operator else None,
            capabilities=Capabilities(
                result_fencing=True,
                effect_fencing=False,
                workflow=False,
                memory=durability.boundary is Boundary.VOLATILE,
            ),
            profiles=[
                _offer(contract)
                for contract in contracts
                if contract.session is not None and may_open(visit, contract.session.id, contract.id)
            ],
        )

    async def health(self, _call: Call) -> Reply:
        """GET /healthz: the process answers."""
        return Reply(200, _OK)

    async def ready(self, _call: Call) -> Reply:
        """GET /readyz: the process may serve, or why it may not."""
        reason = "the process is ending" if self._waits.draining else await self._unready()
        if reason is None:
            return Reply(200, _OK)
        return Reply(503, encode(Health("unready", reason)), retry_after(1))

    async def metrics(self, _call: Call) -> Reply:
        """GET /metrics, where it has no port of its own."""
        return Reply(200, metrics_page(), ((b"content-type", METRICS_CONTENT_TYPE.encode()),))

    async def _unready(self) -> str | None:
        """Why not to serve. The store is asked once a second at most: probes need no token."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now - self._looked_at >= _CHECK_AGAIN_S:
                self._reason = await self._look()
                self._looked_at = now
            return self._reason

    async def _look(self) -> str | None:
        try:
            await self._runtime.refresh()
            if not self._scripts_known:
                for name in lua.NAMES:
                    await self._runtime.connection.load(lua.load(name))
                self._scripts_known = True
        except Unavailable as away:
            return away.description
        if self._runtime.clock.suspect:
            return "the store's clock jumped ahead"
        return await self._runtime.unready()


def _offer(contract: Contract) -> ProfileOffer:
    profile = contract.session
    assert profile is not None, "only profiles are offered"
    return ProfileOffer(
        id=profile.id,
        version=profile.version,
        contract=contract.id,
        contract_version=contract.version,
        contract_digest=contract.digest,
        execution=profile.execution.value,
        commands=sorted(profile.commands),
    )
