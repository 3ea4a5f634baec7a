"""What one process knows of a store tells an older copy from the store, and never the store from itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.store.continuity import Continuity, Progress, Standing

STANDING = Standing("a" * 32, "r", "process-restart", 3, Progress(1, 5, 7, 1_000), Progress(1, 4, 7, 900))


def changed(found: Standing, epoch: int | None = None, **progress: Any) -> Standing:
    at = msgspec.structs.replace(found.progress, **progress)
    return msgspec.structs.replace(found, epoch=epoch or found.epoch, progress=at)


def knowing(found: Standing) -> Continuity:
    continuity = Continuity()
    continuity.saw(found)
    return continuity


@pytest.mark.requirement("DASP-CORE-012g")
@pytest.mark.parametrize(
    "older",
    [
        changed(STANDING, epoch=2),
        changed(STANDING, clocks=0),
        changed(STANDING, policy=4),
        changed(STANDING, directory=6),
        changed(STANDING, last_ms=999),
        # It went on under another policy, as a copy does that somebody used since.
        changed(STANDING, policy=6, last_ms=999),
    ],
)
def test_whatever_is_lower_is_older(older: Standing) -> None:
    assert knowing(STANDING).is_older(older)


def test_the_same_and_the_newer_are_the_store() -> None:
    continuity = knowing(STANDING)
    for newer in (STANDING, changed(STANDING, policy=6, directory=8, last_ms=1_001)):
        assert not continuity.is_older(newer)
    # A clock that an operator accepted may have gone back.
    assert not continuity.is_older(changed(STANDING, clocks=2, last_ms=1))


def test_who_knows_nothing_or_another_authority_judges_nothing() -> None:
    older = changed(STANDING, last_ms=1)
    assert not Continuity().is_older(older)
    assert not knowing(msgspec.structs.replace(STANDING, authority="b" * 32)).is_older(older)


@pytest.mark.requirement("DASP-CORE-012g")
def test_an_epoch_that_was_given_to_an_older_copy_is_told_by_what_it_began_with() -> None:
    """The copy was used since and is ahead of everything this process knows."""
    ahead = changed(STANDING, epoch=4, last_ms=5_000)
    for since, older in ((Progress(1, 5, 7, 999), True), (Progress(1, 5, 7, 1_000), False)):
        assert knowing(STANDING).is_older(msgspec.structs.replace(ahead, since=since)) is older
    assert not knowing(STANDING).is_older(msgspec.structs.replace(ahead, since=None))


@pytest.mark.requirement("DASP-CORE-012g")
def test_a_commit_that_was_acknowledged_is_known() -> None:
    continuity = knowing(STANDING)
    continuity.committed(1_500)
    assert continuity.is_older(changed(STANDING, last_ms=1_499))
    assert not continuity.is_older(changed(STANDING, last_ms=1_500))
    continuity.committed(1_200)
    assert continuity.is_older(changed(STANDING, last_ms=1_499)), (
        "replies come in the order of the calls only"
    )


def test_a_commit_of_a_new_epoch_is_not_held_against_what_the_epoch_began_with() -> None:
    """The epoch was raised by somebody else: this process hears of it with its own next commit."""
    continuity = knowing(STANDING)
    continuity.committed(1_500, 4)
    began = msgspec.structs.replace(changed(STANDING, epoch=4, last_ms=1_600), since=Progress(1, 5, 7, 1_000))
    assert not continuity.is_older(began)
    continuity.committed(1_550, 3)
    assert not continuity.is_older(began), "of a server that is no more"


def test_who_knows_nothing_learns_nothing_from_a_commit() -> None:
    continuity = Continuity()
    continuity.committed(5)
    assert not continuity.is_older(changed(STANDING, last_ms=1))
    assert continuity.overdue_ms(changed(STANDING, last_ms=1)) is None


def test_what_is_only_behind_by_its_last_commit_is_told_apart() -> None:
    continuity = knowing(STANDING)
    assert continuity.overdue_ms(changed(STANDING, last_ms=999)) == 1_000
    assert continuity.overdue_ms(changed(STANDING, policy=4, last_ms=999)) is None
    assert continuity.overdue_ms(STANDING) is None


@st.composite
def histories(draw: st.DrawFn) -> list[Standing]:
    """A store as its readers find it, one after the other: commits, policies, other clocks, restarts."""
    found = [STANDING]
    for step in draw(st.lists(st.sampled_from(["commit", "policy", "directory", "clock", "restart"]))):
        last, at = found[-1], found[-1].progress
        if step == "restart":
            found.append(msgspec.structs.replace(last, epoch=last.epoch + 1, since=at))
            continue
        moves = {
            "commit": {"last_ms": at.last_ms + draw(st.integers(1, 50))},
            "policy": {"policy": at.policy + 1},
            "directory": {"directory": at.directory + 1},
            "clock": {"clocks": at.clocks + 1, "last_ms": draw(st.integers(1, at.last_ms + 50))},
        }
        found.append(changed(last, **moves[step]))
    return found


@pytest.mark.requirement("DASP-CORE-012g")
@given(histories(), st.data())
def test_of_one_history_what_comes_later_is_never_older_and_what_came_before_always_is(
    history: list[Standing], data: st.DataObject
) -> None:
    known = data.draw(st.integers(0, len(history) - 1))
    for place, found in enumerate(history):
        assert knowing(history[known]).is_older(found) is (place < known)


@pytest.mark.requirement("DASP-CORE-012g")
@given(histories(), st.data())
def test_own_commits_tell_what_came_before_them_and_never_condemn_what_comes_after(
    history: list[Standing], data: st.DataObject
) -> None:
    """Other processes raise epochs, accept clocks and commit in between; some replies tell no epoch."""
    start = data.draw(st.integers(0, len(history) - 1))
    continuity, newest, last = knowing(history[start]), start, start
    for place in range(start + 1, len(history)):
        before, after = history[place - 1], history[place]
        committed = after.progress.last_ms != before.progress.last_ms
        if not committed or after.progress.clocks != before.progress.clocks or data.draw(st.booleans()):
            continue
        epoch = after.epoch if data.draw(st.booleans()) else None
        continuity.committed(after.progress.last_ms, epoch)
        last = place
        if after.progress.clocks == history[start].progress.clocks:
            newest = place
    for place, found in enumerate(history):
        # In between another clock was accepted, which nobody told: what is from before it may show.
        if not newest <= place < last:
            assert continuity.is_older(found) is (place < newest)
