"""Users of the store for Lockgate's processes, as lines to paste. Nothing here is sent to the store: who may
do what there is for the person who administers it.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from shared.cli.base import chosen_tenant, opened, redis_url_option, run, store_url, told
from shared.domain.errors import InvalidInput
from shared.store.acl import Role, StoreUser, check_user, further_tenant, make_password, store_user
from shared.store.address import Address

acl_option = click.option(
    "--acl", is_flag=True, help="Also print store users that reach this tenant only (see `tenant acl`)."
)


@click.command("acl")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice([role.value for role in Role]),
    help="Only users for this kind of process; may be repeated.",
)
@click.option("--user", default="", metavar="NAME", help="Another name for the user; needs one --role.")
@click.option("--add", is_flag=True, help="Let the existing --user serve NAME... too; its password stays.")
@click.option("--file", "as_file", is_flag=True, help="Print lines for the store's ACL file, not commands.")
@redis_url_option
def tenant_acl(
    names: Sequence[str],
    roles: Sequence[str],
    user: str,
    add: bool,
    as_file: bool,
    redis_url: str | None,
) -> None:
    """Print store users for the processes that serve tenants NAME.

    \b
    admission   the door: its tenants' keys; tokens, contracts and peers are read-only
    sidecar     one tenant's worker: no tokens, no registry of tenants, no change of policy
    settlement  the central process of these tenants

    Each is limited to its tenants' keys and channels and to the commands it sends. A user is replaced by
    what is printed; with --add it keeps what it has. The lines hold a password's hash only; the password
    itself is told once, apart from them.

    Example: lockgate tenant acl acme --role sidecar
    """
    chosen = [Role(role) for role in roles] or list(Role)
    if (user or add) and len(chosen) != 1:
        raise click.UsageError("--user and --add need exactly one --role")
    if add and (as_file or not user):
        raise click.UsageError(
            "--add changes an existing user by a command: name it with --user, without --file"
        )

    async def work() -> list[str]:
        async with opened(redis_url) as connection:
            return [await chosen_tenant(connection, name) for name in names]

    tenants = run(work())
    with told():
        if add:
            if chosen[0] is Role.SIDECAR:
                raise InvalidInput("--add", "a sidecar serves one tenant")
            rules = [rule for name in tenants for rule in further_tenant(chosen[0], name)]
            click.echo(f"ACL SETUSER {check_user(user)} {' '.join(rules)}")
        else:
            print_users(_users(chosen, tenants, user, _database(redis_url)), as_file=as_file)


def print_tenant_acl(name: str, redis_url: str | None) -> None:
    """The commands for a tenant of its own, for ``--acl``."""
    print_users(_users(list(Role), [name], "", _database(redis_url)), as_file=False)


def print_users(users: Sequence[StoreUser], *, as_file: bool) -> None:
    """Lines on standard output, each user's password once on standard error."""
    told_once = []
    for user in users:
        password, digest = make_password()
        click.echo(user.line(digest) if as_file else user.command(digest))
        told_once.append((user.name, password))
    for name, password in told_once:
        click.echo(f"password of {name}: {password}", err=True)
    click.echo(
        "the passwords are not shown again, the lines hold their hashes; a process logs in with "
        "LOCKGATE_REDIS_URL=redis://USER:PASSWORD@HOST and, as it may not read the store's settings, "
        "LOCKGATE_DECLARED_DURABILITY. They protect nothing while the default user may do everything.",
        err=True,
    )


def _users(roles: Sequence[Role], tenants: Sequence[str], name: str, db: int) -> list[StoreUser]:
    """One user per role; sidecars serve one tenant, so each has its own."""
    found = []
    for role in roles:
        served = [[tenant] for tenant in tenants] if role is Role.SIDECAR else [tenants]
        if name and len(served) > 1:
            raise InvalidInput("--user", "a sidecar serves one tenant: name one")
        found += [store_user(role, group, name=name, db=db) for group in served]
    return found


def _database(redis_url: str | None) -> int:
    return Address.parse(store_url(redis_url)).db
