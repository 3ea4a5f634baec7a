"""What hostile tests feed to readers: bytes, damaged documents, other JSON, costly documents."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from tests.admission.house import COUNTER, NOTES

DEEP = 100_000
MANY = 100_000
MOST = 1_048_576


def harmful() -> dict[str, bytes]:
    """Bodies that cost much where nobody looks first; none is one of ours."""
    return {
        "nested arrays": b"[" * DEEP,
        "nested arrays closed": b"[" * DEEP + b"]" * DEEP,
        "nested objects": b'{"a":' * DEEP,
        "nested inside": b'{"input":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "many members": json.dumps({f"m{i}": 0 for i in range(MANY // 2)}).encode(),
        "many equal members": b"{" + b",".join([b'"a":1'] * MANY) + b"}",
        "many members inside": b'{"input":{' + b",".join(b'"m%d":0' % i for i in range(MANY // 2)) + b"}}",
        "many items": b"[" + b"0," * (MANY * 5) + b"0]",
        "many empty objects": b"[" + b"{}," * (MANY * 3) + b"{}]",
        "long number": b'{"cursor":' + b"9" * 5_000 + b"}",
        "longest number": b'{"cursor":' + b"9" * 1_000_000 + b"}",
        "long fraction": b'{"cursor":0.' + b"9" * 1_000_000 + b"}",
        "long exponent": b'{"cursor":1e' + b"9" * 1_000_000 + b"}",
        "many long numbers": b"[" + b",".join([b"9" * 5_000] * 200) + b"]",
        "many floats": b"[" + b"1e-7," * 200_000 + b"0]",
        "repeated name": b'{"cursor":0,"cursor":0}',
        "lone surrogate": b'{"cursor":"\\ud800"}',
        "lone surrogate name": b'{"\\udfff":0}',
        "many surrogates": b'["' + b"\\ud800" * 170_000 + b'"]',
        "many escapes": b'["' + b"\\u0000" * 170_000 + b'"]',
        "byte order mark": b'\xef\xbb\xbf{"cursor":0}',
        "utf-16": '{"cursor":0}'.encode("utf-16"),
        "utf-32": '{"cursor":0}'.encode("utf-32"),
        "broken utf-8": b'{"cursor":"\xff\xfe"}',
        "overlong utf-8": b'{"cursor":"\xc0\x80"}',
        "zero bytes": b"\x00" * 1_000_000,
        "blanks": b" " * 1_000_000,
        "open text": b'"' + b"a" * 1_000_000,
        "backslashes": b'"' + b"\\" * 1_000_001,
        "long name": b'{"' + b"a" * 1_000_000 + b'":0}',
        "infinity": b'{"cursor":Infinity}',
        "nan": b'{"cursor":NaN}',
        "bidi name": '{"\u202ecursor":0}'.encode(),
        "terminal name": b'{"\\u001b[2J":0}',
        "too large": b"[" + b"0," * MOST,
        "yaml aliases": b"a: &a [x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b]\n",
        "yaml object": b"!!python/object/apply:os.system ['true']\n",
        "nothing": b"",
    }


_pieces = st.sampled_from(
    [
        *(
            b"{",
            b"}",
            b"[",
            b"]",
            b'"',
            b",",
            b":",
            b"\\",
            b"\\u",
            b"\\ud800",
            b"\xff",
            b"\x00",
            b"\xef\xbb\xbf",
        ),
        *(
            b"1e400",
            b"-0",
            b"0.5",
            b"9" * 40,
            b"null",
            b"true",
            b'{"a":1}',
            b"[[[[",
            b'"a":1,"a":2',
            b" ",
            b"\n",
        ),
    ]
)
_damage = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 6), st.one_of(_pieces, st.binary(max_size=4))),
    min_size=1,
    max_size=4,
)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["s1", "c1", "note.write", "counter.add", NOTES["id"], COUNTER["id"], "1"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["command_id", "name", "input", "commands", "actor_id", "profile", "id", "version"]
            )
            | st.sampled_from(["cursor", "rules", "principals", "actions", "effect", "ttlMs", "é", ""])
            | st.text(max_size=5),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


def damaged(body: bytes, damage: list[tuple[int, int, bytes]]) -> bytes:
    """``body`` with pieces put in the place of some of its bytes."""
    changed = bytearray(body)
    for at, length, piece in damage:
        place = at % (len(changed) + 1)
        changed[place : place + length] = piece
    return bytes(changed)


def fed(base: bytes) -> st.SearchStrategy[bytes]:
    """Bytes that never were a document, ``base`` with damage, or other JSON with names we know."""
    return st.one_of(
        st.binary(max_size=64),
        _damage.map(lambda damage: damaged(base, damage)),
        _json.map(lambda value: json.dumps(value, allow_nan=True).encode()),
    )
