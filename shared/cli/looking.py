"""``inspect`` shows one record whole, ``list`` what there is and what needs a person."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import click
import msgspec

from shared.cli.base import (
    Refused,
    chosen_tenant,
    has_form,
    instant,
    json_option,
    opened,
    print_facts,
    print_json,
    print_table,
    redis_url_option,
    run,
    tenant_option,
)
from shared.domain.ids import IdKind
from shared.store.inspecting import (
    DecisionView,
    Found,
    Inspector,
    OperationRow,
    OperationView,
    ParkedView,
    SessionRow,
    SessionView,
    Window,
)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def store_options(command: F) -> F:
    """The options of every command here."""
    return json_option(tenant_option(redis_url_option(command)))


def window_options(command: F) -> F:
    """The options of lists made by a scan."""
    limit = click.option(
        "--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="Rows, about."
    )
    keys = click.option(
        "--scan",
        default=100_000,
        show_default=True,
        type=click.IntRange(1, 100_000_000),
        help="Keys of the store to look at, at most about.",
    )
    cursor = click.option(
        "--cursor", default="0", metavar="CURSOR", help="Go on where a former list stopped."
    )
    return limit(keys(cursor(store_options(command))))


def look(tenant: str | None, redis_url: str | None, work: Callable[[Inspector], Awaitable[T]]) -> T:
    """Run one look at the chosen tenant."""

    async def opened_work() -> T:
        async with opened(redis_url) as connection:
            return await work(Inspector(connection, await chosen_tenant(connection, tenant)))

    return run(opened_work())


@click.group("inspect")
def inspect_group() -> None:
    """Show one record whole."""


@inspect_group.command("session")
@click.argument("session_id", metavar="ID")
@store_options
def inspect_session(session_id: str, as_json: bool, tenant: str | None, redis_url: str | None) -> None:
    """Show session ID with its waiting commands and its clients' cursors.

    Example: lockgate inspect session alice.counter
    """
    view = look(tenant, redis_url, lambda inspector: inspector.session(session_id))
    if view is None:
        raise Refused(f"session {session_id} does not exist: see `lockgate list sessions`")
    if as_json:
        print_json(view)
    else:
        print_facts(_session_facts(view))


def _session_facts(view: SessionView) -> list[tuple[str, object]]:
    row = view.session
    if row.unreadable is not None:
        return [("session", row.session_id), ("unreadable", row.unreadable), *view.fields.items()]
    facts: list[tuple[str, object]] = [
        ("session", row.session_id),
        ("phase", row.phase),
        ("actor", row.actor_id),
        ("profile", f"{row.profile.get('id')} {row.profile.get('version')}"),
        ("owner", row.owner),
    ]
    if row.phase == "closed":
        return [*facts, ("kept", "only that its id and the ids of its commands stay unusable")]
    facts += [
        ("contract", row.contract_digest),
        ("opened", instant(row.opened_at_ms)),
        ("head", row.cursor),
        ("state", _json_text(row.state)),
        ("state revision", row.state_revision),
        ("commands", f"{row.commands}, {row.pending} pending"),
        ("at work on", row.busy),
        ("halted by", row.halted),
        *(("waiting", operation) for operation in view.queue),
        *(("cursor", f"{client} at {at}") for client, at in sorted(view.cursors.items())),
    ]
    if view.turn_at_ms is not None:
        facts.append(("next turn", instant(view.turn_at_ms)))
    return facts


@inspect_group.command("operation")
@click.argument("wanted", metavar="ID")
@store_options
def inspect_operation(wanted: str, as_json: bool, tenant: str | None, redis_url: str | None) -> None:
    """Show the operation ID; ID may also be the id of a session command.

    Example: lockgate inspect operation 0d0c1b9e-6f0e-4f0b-9d3a-2b1f6f0e8a11
    """
    view = look(tenant, redis_url, lambda inspector: _operation(inspector, wanted))
    if view is None:
        raise Refused(f"operation {wanted} does not exist: see `lockgate list operations`")
    _show_operation(view, as_json)


async def _operation(inspector: Inspector, wanted: str) -> OperationView | None:
    """The operation of this id, or of the session command of this id."""
    if not has_form(IdKind.OPERATION, wanted):
        wanted = await inspector.command_operation(wanted)
    return await inspector.operation(wanted)


@inspect_group.command("reservation")
@click.argument("wanted", metavar="ID")
@click.option(
    "--scan",
    default=1_000_000,
    show_default=True,
    type=click.IntRange(1, 100_000_000),
    help="Keys of the store to look at, at most about.",
)
@store_options
def inspect_reservation(
    wanted: str, scan: int, as_json: bool, tenant: str | None, redis_url: str | None
) -> None:
    """Show the key reservation ID, and the operation whose key it is.

    ID is the reservation's UUID (found by a scan), or at once the id of its operation or session command.

    Example: lockgate inspect reservation 5b0f8f0e-3a60-5d35-8b5e-1d8f6f6b7a10
    """

    async def work(inspector: Inspector) -> OperationView | None:
        view = await _operation(inspector, wanted)
        if view is not None or not has_form(IdKind.UUID, wanted):
            return view
        operation, found = await inspector.operation_of_reservation(wanted, Window(keys=scan))
        if operation is None and found.cursor is not None:
            raise Refused(f"not among the first {found.looked_at} keys: repeat with a larger --scan")
        return await inspector.operation(operation) if operation is not None else None

    view = look(tenant, redis_url, work)
    if view is None:
        raise Refused(f"reservation {wanted} does not exist: see `lockgate list operations`")
    if as_json:
        print_json(_reservation_json(view))
        return
    print_facts(
        [
            ("reservation", view.reservation_id),
            ("state", _reservation_text(view)),
            ("operation", view.summary.operation_id),
            ("command", view.summary.command_id),
            ("session", view.summary.session_id),
            ("phase", view.summary.phase),
            ("decision", _decision_text(view.summary.decision)),
        ]
    )


def _reservation_text(view: OperationView) -> str:
    found = _reservation_json(view)
    if found["state"] is None:
        return "gone: the id stays unusable"
    if found["replayUntilMs"] is None:
        return str(found["state"])
    return f"{found['state']} since {instant(found['settledAtMs'])}, until {instant(found['replayUntilMs'])}"


def _reservation_json(view: OperationView) -> dict[str, Any]:
    state, *instants = view.fields.get("reservation", "").split(" ")
    return {
        "reservationId": view.reservation_id,
        "state": state or None,
        "settledAtMs": int(instants[0]) if instants else None,
        "replayUntilMs": int(instants[1]) if len(instants) > 1 else None,
        "operation": view.summary,
    }


def _show_operation(view: OperationView, as_json: bool) -> None:
    if as_json:
        print_json(view)
        return
    print_facts(_operation_facts(view))
    for branch in view.branches:
        lease = f"held by {branch.holder}" if branch.holder else "not held"
        click.echo(
            f"branch {branch.branch_id}: {branch.status}, peer {branch.peer}, attempt {branch.attempt}, "
            f"epoch {branch.epoch}, fence {branch.fence}, {lease}, gate {branch.gate}, claims {branch.claims}"
        )
        until = "lease until" if branch.holder else "claim by"
        more = [
            (until, instant(branch.until_ms)),
            ("not before", instant(branch.next_at_ms)),
            ("outbox entry", branch.outbox_entry),
            ("answer", _json_text(branch.answer)),
        ]
        print_facts([(name, value) for name, value in more if value], indent="  ")


def _operation_facts(view: OperationView) -> list[tuple[str, object]]:
    row = view.summary
    if row.unreadable is not None:
        return [("operation", row.operation_id), ("unreadable", row.unreadable), *view.fields.items()]
    if row.phase == "tombstone":
        kept = f"a tombstone of session {row.session_id}" if row.session_id else "a tombstone"
        return [("operation", row.operation_id), ("kept", f"{kept}: the id stays unusable")]
    facts: list[tuple[str, object]] = [
        ("operation", row.operation_id),
        ("phase", row.phase),
        ("command", row.command_id),
        ("session", row.session_id),
        ("principal", row.principal),
        ("contract", f"{view.contract['id']} {view.contract['version']} {view.contract['digest']}"),
        ("interaction", row.interaction),
        ("input", _json_text(view.input)),
        ("admitted", f"{instant(row.admitted_at_ms)}, sequence {view.sequence or '-'}"),
        ("deadline", instant(row.deadline_ms)),
        ("decision", _decision_text(row.decision)),
        ("outcome", f"sequence {view.outcome_sequence} {_json_text(view.outcome)}" if view.outcome else ""),
        ("reservation", f"{row.reservation}, {view.reservation_id}"),
        ("revision", view.revision),
        ("seat", view.seat),
        ("wakes", instant(view.wakes_at_ms)),
    ]
    if view.parked is not None:
        facts.append(("parked", _parked_text(view.parked)))
    return facts


def _decision_text(decision: DecisionView | None) -> str:
    if decision is None:
        return ""
    return (
        f"{decision.outcome} ({decision.reason}) at {instant(decision.at_ms)}, "
        f"settlement {decision.settlement}"
    )


def _parked_text(item: ParkedView) -> str:
    return f"since {instant(item.since_ms)}, {item.tries} tries, next {instant(item.next_ms)}: {item.reason}"


def _json_text(raw: msgspec.Raw | None) -> str:
    return "" if raw is None else bytes(raw).decode(errors="backslashreplace")


@click.group("list")
def list_group() -> None:
    """List records and what needs a person."""


@list_group.command("sessions")
@window_options
def list_sessions(
    limit: int, scan: int, cursor: str, as_json: bool, tenant: str | None, redis_url: str | None
) -> None:
    """List sessions.

    Example: lockgate list sessions --limit 20
    """
    found = look(tenant, redis_url, lambda inspector: inspector.sessions(_window(limit, scan, cursor)))
    if as_json:
        _print_found("sessions", found)
        return
    print_table(
        ("SESSION", "PHASE", "OWNER", "ACTOR", "PROFILE", "HEAD", "PENDING", "HALTED"),
        [_session_cells(row) for row in found.rows],
        "no session",
    )
    _say_more(found)


def _session_cells(row: SessionRow) -> Sequence[object]:
    if row.unreadable is not None:
        return row.session_id, "UNREADABLE", row.unreadable, "", "", "", "", ""
    profile = f"{row.profile.get('id')} {row.profile.get('version')}"
    halted = "yes" if row.halted else ""
    return row.session_id, row.phase, row.owner, row.actor_id, profile, row.cursor, row.pending, halted


@list_group.command("operations")
@click.option(
    "--phase", type=click.Choice(["admitted", "active", "closed", "settled", "tombstone"]), help="Only these."
)
@click.option("--session", "session_id", metavar="ID", help="Only the commands of this session.")
@window_options
def list_operations(
    phase: str | None,
    session_id: str | None,
    limit: int,
    scan: int,
    cursor: str,
    as_json: bool,
    tenant: str | None,
    redis_url: str | None,
) -> None:
    """List session commands and invocations.

    Example: lockgate list operations --phase active
    """

    def wanted(row: OperationRow) -> bool:
        return (phase is None or row.phase == phase) and (session_id is None or row.session_id == session_id)

    window = _window(limit, scan, cursor)
    found = look(tenant, redis_url, lambda inspector: inspector.operations(window, wanted))
    _print_operations(found, as_json, "no such operation")


@list_group.command("uncertain")
@window_options
def list_uncertain(
    limit: int, scan: int, cursor: str, as_json: bool, tenant: str | None, redis_url: str | None
) -> None:
    """List work that may or may not have been done.

    Nobody repeats it by itself. A person looks at what they acted on and, where needed, sends new work under
    a new id.

    Example: lockgate list uncertain --json
    """
    window = _window(limit, scan, cursor)
    found = look(tenant, redis_url, lambda inspector: inspector.operations(window, lambda row: row.uncertain))
    _print_operations(found, as_json, "nothing is uncertain")


@list_group.command("overdue")
@window_options
def list_overdue(
    limit: int, scan: int, cursor: str, as_json: bool, tenant: str | None, redis_url: str | None
) -> None:
    """List what is past its deadline and not settled.

    Is a settlement process running?

    Example: lockgate list overdue
    """
    found = look(tenant, redis_url, lambda inspector: inspector.overdue(_window(limit, scan, cursor)))
    _print_operations(found, as_json, "nothing is overdue")


@list_group.command("parked")
@store_options
def list_parked(as_json: bool, tenant: str | None, redis_url: str | None) -> None:
    """List what settling failed on.

    Each is tried again by itself, and `lockgate inspect` shows the record.

    Example: lockgate list parked
    """
    found = look(tenant, redis_url, lambda inspector: inspector.parked())
    if as_json:
        rows = [{"member": name, **msgspec.to_builtins(item)} for name, item in sorted(found.items())]
        print_json({"parked": rows})
        return
    print_table(
        ("MEMBER", "SINCE", "TRIES", "NEXT TRY", "REASON"),
        [
            (name, instant(item.since_ms), item.tries, instant(item.next_ms), item.reason)
            for name, item in sorted(found.items())
        ],
        "nothing is parked",
    )


@list_group.command("due")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="Rows.")
@store_options
def list_due(limit: int, as_json: bool, tenant: str | None, redis_url: str | None) -> None:
    """List the next wake-ups, earliest first.

    A late one means that nobody settles.

    Example: lockgate list due --limit 10
    """
    rows = look(tenant, redis_url, lambda inspector: inspector.due(limit))
    if as_json:
        print_json({"due": rows})
        return
    print_table(
        ("MEMBER", "AT", "IN", "PARKED"),
        [(row.member, instant(row.at_ms), f"{row.in_ms} ms", "yes" if row.parked else "") for row in rows],
        "nothing is due",
    )


def _window(limit: int, scan: int, cursor: str) -> Window:
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 20):
        raise click.UsageError("--cursor must be the number that a former list ended with")
    return Window(limit=limit, keys=scan, cursor=cursor)


def _print_operations(found: Found[OperationRow], as_json: bool, nothing: str) -> None:
    if as_json:
        _print_found("operations", found)
        return
    print_table(
        ("OPERATION", "PHASE", "COMMAND", "SESSION", "ADMITTED", "DECISION"),
        [_operation_cells(row) for row in found.rows],
        nothing,
    )
    _say_more(found)


def _operation_cells(row: OperationRow) -> Sequence[object]:
    if row.unreadable is not None:
        return row.operation_id, "UNREADABLE", row.unreadable, "", "", ""
    decision = f"{row.decision.outcome} ({row.decision.reason})" if row.decision else ""
    name = f"{row.interaction} {row.command_id}".strip()
    return row.operation_id, row.phase, name, row.session_id, instant(row.admitted_at_ms), decision


def _print_found(name: str, found: Found[Any]) -> None:
    print_json({name: found.rows, "cursor": found.cursor})


def _say_more(found: Found[Any]) -> None:
    if found.cursor is not None:
        click.echo(f"there may be more: go on with --cursor {found.cursor}", err=True)
