"""Store URLs: what they may say, and that a refusal never repeats a password."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import pytest

from shared.store.address import Address
from shared.store.connection import Connection, StoreUnavailable
from tests.support.proxy import FaultProxy

TLS: Final = Path(__file__).parent.parent / "support" / "tls"
CERTIFICATE: Final = TLS / "loopback.pem"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://store", Address("store", 6379, None, 0, None)),
        ("redis://store:6380/3", Address("store", 6380, None, 3, None)),
        ("redis://store?db=4", Address("store", 6379, None, 4, None)),
        ("redis://:p%40ss@store", Address("store", 6379, None, 0, None, None, "p@ss")),
        ("redis://ann:pw@[::1]:1", Address("::1", 1, None, 0, None, "ann", "pw")),
        ("rediss://store/1", Address("store", 6379, None, 1, {})),
        (
            "rediss://store?ssl_ca_certs=/ca.pem&ssl_cert_reqs=none",
            Address("store", 6379, None, 0, {"ssl_ca_certs": "/ca.pem", "ssl_cert_reqs": "none"}),
        ),
        ("unix:///run/a%20b.sock?db=2", Address("localhost", 6379, "/run/a b.sock", 2, None)),
        ("unix://ann:pw@/run/s", Address("localhost", 6379, "/run/s", 0, None, "ann", "pw")),
    ],
)
def test_urls_are_read(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("", "must be redis://"),
        ("http://:secret@store", "must be redis://"),
        ("redis://:secret@store:port", "numeric port"),
        ("redis://:secret@store/zero", "by a number"),
        ("redis://:secret@store/1/2", "by a number"),
        ("redis://:secret@store?db=x", "known options"),
        ("redis://:secret@store?db=-1", "by a number"),
        ("redis://:secret@store?socket_timeout=1", "unknown option: socket_timeout"),
        ("redis://:secret@store?ssl_ca_certs=/ca.pem", "needs rediss://: ssl_ca_certs"),
        ("unix://", "path of its unix socket"),
    ],
)
def test_other_urls_are_refused_without_being_repeated(url: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule) as caught:
        Address.parse(url)
    assert "secret" not in str(caught.value)
    # A parser's own error may repeat the URL: it must not be told along with ours.
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_password_is_not_printed() -> None:
    assert "secret" not in repr(Address.parse("redis://:secret@store"))


def server_side() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, TLS / "loopback.key")
    return context


async def test_a_store_behind_tls_is_verified_and_used(redis_url: str) -> None:
    async with FaultProxy(redis_url, tls=server_side()) as proxy:
        trusting = f"{proxy.url}?ssl_ca_certs={CERTIFICATE}"
        async with Connection(trusting) as connection:
            value = b"x" * 200_000
            assert await connection.call("SET", "k", value) == b"OK"
            assert await connection.call("GET", "k") == value
        async with Connection(f"{proxy.url}?ssl_cert_reqs=none") as connection:
            assert await connection.call("PING") == b"PONG"


async def test_a_store_with_an_unknown_certificate_is_not_spoken_to(redis_url: str) -> None:
    async with (
        FaultProxy(redis_url, tls=server_side()) as proxy,
        Connection(proxy.url, connect_s=0.3) as connection,
    ):
        with pytest.raises(StoreUnavailable):
            await connection.call("SET", "k", "v")
    async with Connection(redis_url) as direct:
        assert await direct.call("EXISTS", "k") == 0
