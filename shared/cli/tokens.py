"""Bearer tokens."""

from __future__ import annotations

import re
from typing import Any, Final

import click

from shared.cli.base import (
    chosen_tenant,
    instant,
    json_option,
    missing,
    opened,
    print_json,
    print_table,
    redis_url_option,
    run,
    tenant_option,
)
from shared.domain.credentials import PREFIX, TokenRecord, parse_token
from shared.domain.errors import Denied
from shared.store import registry

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S: Final = 100 * 365 * 86_400


@click.group()
def token() -> None:
    """Create, list and revoke bearer tokens."""


@token.command("create")
@click.argument("principal")
@click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE",
    help="caller (the default), operator, local-host or peer:PEER; may be given several times.",
)
@click.option("--expires-in", metavar="TIME", help="For example 90s, 15m, 12h or 30d; without it never.")
@json_option
@tenant_option
@redis_url_option
def token_create(
    principal: str,
    roles: tuple[str, ...],
    expires_in: str | None,
    as_json: bool,
    tenant: str | None,
    redis_url: str | None,
) -> None:
    """Create a token for PRINCIPAL and print it, the only time that it is shown.

    Example: TOKEN=$(lockgate token create alice --tenant acme --expires-in 30d)
    """
    seconds = _seconds(expires_in)

    async def work() -> tuple[str, str, str]:
        async with opened(redis_url) as connection:
            name = await chosen_tenant(connection, tenant)
            made = await registry.create_token(connection, name, principal, roles or ("caller",), seconds)
            return name, made.token_id, made.text()

    name, token_id, text = run(work())
    if as_json:
        print_json({"tenant": name, "tokenId": token_id, "principal": principal, "token": text})
        return
    click.echo(text)
    click.echo(
        f"token {token_id} of {principal}; it is not shown again, the store keeps only its hash", err=True
    )


@token.command("list")
@json_option
@tenant_option
@redis_url_option
def token_list(as_json: bool, tenant: str | None, redis_url: str | None) -> None:
    """List the tokens of a tenant, without their secrets.

    Example: lockgate token list --tenant acme
    """

    async def work() -> tuple[dict[str, TokenRecord], int]:
        async with opened(redis_url) as connection:
            name = await chosen_tenant(connection, tenant)
            return await registry.list_tokens(connection, name), await registry.store_now_ms(connection)

    found, now = run(work())
    rows = sorted(found.items(), key=lambda item: (item[1].principal, item[1].created_ms))
    if as_json:
        print_json([_token_json(token_id, record, now) for token_id, record in rows])
        return
    print_table(
        ("TOKEN", "PRINCIPAL", "ROLES", "CREATED", "EXPIRES"),
        [(i, r.principal, r.roles, instant(r.created_ms), _expiry(r, now)) for i, r in rows],
        "no token yet: create one with `lockgate token create PRINCIPAL`",
    )


def _token_json(token_id: str, record: TokenRecord, now: int) -> dict[str, Any]:
    return {
        "tokenId": token_id,
        "principal": record.principal,
        "roles": list(record.roles),
        "createdAtMs": record.created_ms,
        "expiresAtMs": record.expires_ms or None,
        "expired": 0 < record.expires_ms <= now,
    }


def _expiry(record: TokenRecord, now: int) -> str:
    if not record.expires_ms:
        return "never"
    return instant(record.expires_ms) + (" (expired)" if record.expires_ms <= now else "")


@token.command("revoke")
@click.argument("token_id")
@tenant_option
@redis_url_option
def token_revoke(token_id: str, tenant: str | None, redis_url: str | None) -> None:
    """Revoke the token with this id; every service refuses it from its next use on.

    Example: lockgate token revoke 3f2be1c04e570a11 --tenant acme
    """
    if token_id.startswith(PREFIX + "."):
        try:
            parsed = parse_token(token_id)
        except Denied as error:
            raise click.UsageError(
                "this is not a whole token; give its id, see `lockgate token list`"
            ) from error
        token_id, tenant = parsed.token_id, tenant or parsed.tenant

    async def work() -> None:
        async with opened(redis_url) as connection:
            name = await chosen_tenant(connection, tenant)
            with missing(f"token {token_id}", f"see `lockgate token list --tenant {name}`"):
                await registry.revoke_token(connection, name, token_id)

    run(work())
    click.echo(f"token {token_id} revoked")


def _seconds(text: str | None) -> int:
    if text is None:
        return 0
    match = re.fullmatch(r"([1-9][0-9]{0,9})([smhd])", text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise click.UsageError("--expires-in must be a number and a unit, for example 90s, 15m, 12h or 30d")
    return seconds
