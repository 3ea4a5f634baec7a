"""The estimate of the store's clock: a lower bound that no jump moves far, on a clock that jumps."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.errors import Unavailable
from shared.store.clock import StoreClock, boot_ms, keep_sampled, sample_clock
from shared.store.connection import Connection
from shared.store.embedded import EmbeddedStore
from tests.support.polling import wait_until

HOUR = 3_600_000
START = 1_800_000_000_000.0


class Machines:
    """A store and a process: two clocks over one true time, and requests that take time both ways."""

    def __init__(self) -> None:
        self.true_ms = 5_000.0
        self.store_offset = START
        self.clock = StoreClock(lambda: self.true_ms)

    @property
    def store_ms(self) -> float:
        return self.true_ms + self.store_offset

    @property
    def off_by(self) -> float:
        """Estimate minus store time (ms)."""
        return self.clock.lower_ms() - self.store_ms

    def suspect(self) -> bool:
        """A method, so that the type checker expects another answer after a jump."""
        return self.clock.suspect

    def wait(self, ms: float) -> None:
        self.true_ms += ms

    def jump(self, ms: float) -> None:
        """Somebody sets the store's clock."""
        self.store_offset += ms

    def request(self, there_ms: float = 0.3, back_ms: float = 0.3) -> None:
        sent = self.true_ms
        self.wait(there_ms)
        read = int(self.store_ms)
        self.wait(back_ms)
        self.clock.observe(read, sent, self.true_ms)


@pytest.fixture
def machines() -> Machines:
    made = Machines()
    made.request()
    return made


delays = st.floats(0, 3_000)


@given(st.lists(st.tuples(delays, delays, st.floats(0, 100_000)), min_size=1, max_size=40))
def test_the_estimate_is_a_lower_bound_and_as_near_as_the_quickest_reply(
    requests: list[tuple[float, float, float]],
) -> None:
    machines = Machines()
    for there, back, pause in requests:
        machines.request(there, back)
        machines.wait(pause)
        assert machines.off_by <= 0
        assert not machines.suspect()
    quickest_way_back = min(back for _, back, _ in requests)
    assert machines.off_by >= -quickest_way_back - 2.01


@given(st.lists(st.tuples(st.floats(-3_999, 3_999), delays), max_size=20))
def test_small_steps_are_followed_both_ways(steps: list[tuple[float, float]]) -> None:
    machines = Machines()
    machines.request()
    for step, back in steps:
        machines.jump(step)
        machines.request(back_ms=back)
        machines.request()
        assert -3 < machines.off_by <= 1
        assert not machines.suspect()


@given(st.floats(8_000, 50 * HOUR), st.lists(delays, min_size=1, max_size=10))
def test_a_jump_ahead_never_moves_the_estimate(jump: float, replies: list[float]) -> None:
    machines = Machines()
    machines.request()
    machines.jump(jump)
    for back in replies:
        machines.request(back_ms=back)
        assert machines.clock.not_after() <= machines.store_ms - jump + 4_000


def test_an_hour_ahead_and_back_is_suspect_and_then_believed_again(machines: Machines) -> None:
    machines.jump(HOUR)
    machines.request()
    assert machines.suspect()
    assert machines.clock.not_after() < machines.store_ms, "every guard fails on the jumped clock"
    machines.wait(60_000)
    machines.request()
    assert machines.suspect()
    machines.jump(-HOUR)
    machines.request()
    assert not machines.suspect()
    assert -3 < machines.off_by <= 0


def test_four_seconds_ahead_are_corrected_and_more_are_not(machines: Machines) -> None:
    machines.jump(4_000)
    machines.request()
    assert not machines.suspect()
    assert -3 < machines.off_by <= 0
    machines.jump(4_003)
    machines.request()
    assert machines.suspect()


def test_a_step_back_of_30_ms_is_followed(machines: Machines) -> None:
    machines.jump(-30)
    machines.request()
    assert not machines.suspect()
    assert -3 < machines.off_by <= 0


def test_ten_seconds_back_for_good_are_followed_and_forgotten_once_caught_up(machines: Machines) -> None:
    machines.jump(-10_000)
    machines.request()
    assert -3 < machines.off_by <= 0
    machines.wait(10_001)
    machines.request()
    machines.jump(10_000)
    machines.request()
    assert machines.suspect(), "after time has caught up, the former line is a jump like any other"


def test_ten_seconds_back_and_forth_is_no_jump(machines: Machines) -> None:
    machines.jump(-10_000)
    machines.request()
    machines.jump(10_000)
    machines.request()
    assert not machines.suspect()
    assert -3 < machines.off_by <= 0


def test_a_slow_reply_tells_that_the_former_line_holds_again(machines: Machines) -> None:
    machines.jump(-10_000)
    machines.request()
    machines.jump(10_000)
    machines.request(back_ms=3_000)
    assert -3 < machines.off_by <= 0


@pytest.mark.parametrize("step", [3_000, 10_000])
def test_two_steps_back_and_their_return_is_no_jump(machines: Machines, step: float) -> None:
    for _ in range(2):
        machines.jump(-step)
        machines.request()
    machines.jump(2 * step)
    machines.request()
    assert not machines.suspect()
    assert -3 < machines.off_by <= 0


def test_back_and_then_far_ahead_is_suspect(machines: Machines) -> None:
    machines.jump(-10_000)
    machines.request()
    machines.jump(HOUR)
    machines.request()
    assert machines.suspect()
    assert machines.clock.not_after() < machines.store_ms


def test_a_reply_from_before_the_jump_does_not_move_the_estimate(machines: Machines) -> None:
    sent, read = machines.true_ms, int(machines.store_ms)
    machines.jump(HOUR)
    machines.request()
    machines.clock.observe(read, sent, machines.true_ms)
    assert machines.clock.not_after() < machines.store_ms


def test_an_accepted_jump_is_the_new_time(machines: Machines) -> None:
    machines.jump(HOUR)
    machines.request()
    accepted = int(machines.store_ms)
    machines.wait(5_000)
    assert machines.clock.accept(accepted)
    assert not machines.suspect()
    machines.request()
    assert not machines.suspect()
    assert -3 < machines.off_by <= 0


def test_an_acceptance_covers_no_other_jump(machines: Machines) -> None:
    machines.jump(HOUR)
    accepted = int(machines.store_ms)
    machines.jump(HOUR)
    machines.request()
    assert not machines.clock.accept(accepted)
    assert machines.suspect()


def test_an_acceptance_counts_once(machines: Machines) -> None:
    accepted = int(machines.store_ms)
    assert machines.clock.accept(accepted), "nothing was wrong: agreed, and used up"
    machines.jump(30_000)
    machines.request()
    assert not machines.clock.accept(accepted)
    assert machines.suspect()


def test_an_old_acceptance_is_no_longer_fresh(machines: Machines) -> None:
    machines.jump(HOUR)
    accepted = int(machines.store_ms)
    machines.wait(61_000)
    machines.request()
    assert not machines.clock.accept(accepted)
    assert machines.suspect()


def test_an_acceptance_may_come_before_the_sample_it_is_about(machines: Machines) -> None:
    machines.jump(HOUR)
    accepted = int(machines.store_ms)
    assert not machines.clock.accept(accepted)
    machines.request()
    assert machines.suspect()
    assert machines.clock.accept(accepted)
    assert not machines.suspect()


def test_an_accepted_step_back_makes_its_return_a_jump(machines: Machines) -> None:
    machines.jump(-10_000)
    machines.request()
    assert machines.clock.accept(int(machines.store_ms))
    machines.jump(10_000)
    machines.request()
    assert machines.suspect()


def test_a_request_start_is_read_off_the_estimate_afterwards(machines: Machines) -> None:
    arrived = machines.true_ms
    store_then = machines.store_ms
    machines.wait(700)
    machines.request()
    assert store_then - 3 < machines.clock.lower_ms(arrived) <= store_then


def test_upper_bounds_reach_as_far_as_asked(machines: Machines) -> None:
    assert machines.clock.not_after() == machines.clock.lower_ms() + 4_000
    assert machines.clock.not_after(10_000) == machines.clock.lower_ms() + 10_000


def test_before_the_first_sample_there_is_no_time() -> None:
    clock = StoreClock(lambda: 1.0)
    assert not clock.known
    with pytest.raises(Unavailable):
        clock.lower_ms()
    with pytest.raises(Unavailable):
        clock.not_after()
    assert not clock.accept(1)


async def test_a_small_step_back_is_waited_out_and_a_larger_one_refused() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    clock = StoreClock(sleep=sleep)
    await clock.wait_out(30)
    await clock.wait_out(250)
    assert slept == [0.031, 0.251]
    with pytest.raises(Unavailable, match="251 ms"):
        await clock.wait_out(251)
    assert len(slept) == 2


def test_local_time_goes_on() -> None:
    first = boot_ms()
    assert first > 0
    assert boot_ms() >= first


async def test_a_sample_is_taken_from_the_store(redis_url: str) -> None:
    clock = StoreClock()
    async with Connection(redis_url) as connection:
        await sample_clock(connection, clock)
        lower = clock.lower_ms()
        seconds, micros = await connection.call("TIME")
    assert 0 <= int(seconds) * 1000 + int(micros) // 1000 - lower < 60_000


async def test_sampling_goes_on_after_the_store_was_away(own_store: EmbeddedStore) -> None:
    samples = 0

    class Counting(StoreClock):
        def observe(self, store_ms: int, sent_at: float, received_at: float) -> None:
            nonlocal samples
            samples += 1

    async with Connection(own_store.url, connect_s=0.05) as connection:
        sampling = asyncio.create_task(keep_sampled(connection, Counting(), every_s=0.01))
        await wait_until(lambda: samples > 2)
        own_store.kill()
        await wait_until(lambda: not connection.connected)
        before = samples
        own_store.start()
        await wait_until(lambda: samples > before + 2)
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling
