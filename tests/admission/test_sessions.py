"""Opening, viewing and closing sessions."""

from __future__ import annotations

import pytest

from tests.admission.house import NOTES, Client


@pytest.mark.requirement("DASPX-11", "DASP-CORE-011a")
async def test_open_is_201_once_then_200_and_adds_nothing(alice: Client) -> None:
    first = await alice.open("s1")
    again = await alice.open("s1")
    assert (first.status_code, again.status_code) == (201, 200)
    expected = {"session_id": "s1", "actor_id": "a1", "profile": NOTES, "cursor": 0}
    assert first.json() == again.json() == expected
    await alice.submit("s1", "c1")
    assert (await alice.open("s1")).json()["cursor"] == 1
    assert (await alice.page("s1")).json()["head"] == 1
