"""API keys: where they come from, who is admitted, and that no key is ever shown."""

import hmac
import logging
import os
import re
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.errors import ConfigError
from server.errors import Unauthorized
from server.settings.api_keys import ApiKeys

FIRST, SECOND, THIRD = "first-key-0001", "second=key/0002", "third#key+0003"


def passes(keys: ApiKeys, authorization: str | None) -> bool:
    try:
        keys.check(authorization)
    except Unauthorized:
        return False
    return True


def key_file(directory: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = directory / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_keys_from_the_file_and_the_variable_are_combined(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"\ufeff# of the team\n{FIRST}\r\n\n  {THIRD}\t\n#{SECOND}\n   # {SECOND}\n")
    keys = ApiKeys.read(path, {})
    assert keys and keys.required
    assert [passes(keys, f"Bearer {key}") for key in (FIRST, SECOND, THIRD)] == [True, False, True]
    keys = ApiKeys.read(path, {"ORCA_API_KEYS": f"{SECOND}, {FIRST},\n"})
    assert all(passes(keys, f"Bearer {key}") for key in (FIRST, SECOND, THIRD))
    assert keys.notes == ()
    keys = ApiKeys.read(None, {"ORCA_API_KEYS": f"{SECOND}\n{FIRST}", "ORCA_API_KEY": THIRD})
    assert [passes(keys, f"Bearer {key}") for key in (FIRST, SECOND, THIRD)] == [True, True, False]


def test_a_key_s_weight_is_its_owner_s(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"{FIRST}\n{SECOND} weight=2.5\n{FIRST}\n")
    keys = ApiKeys.read(path, {"ORCA_API_KEYS": f"{THIRD}\tweight=0.5,{FIRST}"})
    assert keys.weights == {"key 2": 2.5, "key 3": 0.5}
    assert keys.check(f"Bearer {SECOND}") == "key 2"
    assert keys.check(f"Bearer {THIRD}") == "key 3"
    assert not passes(keys, f"Bearer {SECOND} weight=2.5")


@pytest.mark.parametrize("weight", ["", "0", "nan", "inf", "-1", "2x", "1001", SECOND])
def test_an_invalid_weight_is_refused_without_showing_a_key(tmp_path: Path, weight: str) -> None:
    path = key_file(tmp_path, f"{FIRST}\n{THIRD} weight={weight}\n")
    with pytest.raises(ConfigError, match=r"keys, line 2: .*must be a number from 0\.001 to 1000") as end:
        ApiKeys.read(path, {})
    assert THIRD not in str(end.value) and SECOND not in str(end.value)


@pytest.mark.parametrize("environ", [{}, {"ORCA_API_KEYS": ""}])
def test_without_keys_everyone_is_admitted(environ: dict[str, str]) -> None:
    keys = ApiKeys.read(None, environ)
    assert not keys and not keys.required
    for authorization in (None, "", "Bearer x", "Basic eDp5"):
        keys.check(authorization)
    notes = ("ORCA_API_KEYS is empty and counts as not set",)
    assert keys.notes == (notes if environ else ())


@pytest.mark.parametrize(
    ("authorization", "passed"),
    [
        (f"Bearer {FIRST}", True),
        (f"bearer {FIRST}", True),
        (f"BEARER  {FIRST} ", True),
        (None, False),
        ("", False),
        ("Bearer", False),
        ("Bearer ", False),
        (FIRST, False),
        (f"Basic {FIRST}", False),
        (f"Bearer:{FIRST}", False),
        (f"Bearer {FIRST}x", False),
        (f"Bearer {FIRST[:-1]}", False),
        (f"Bearer {FIRST.upper()}", False),
        (f"Bearer {FIRST} {FIRST}", False),
        (f"Bearer {FIRST},{SECOND}", False),
        ("Bearer \xfc\udcff\u2603", False),
        ("Bearer " + "x" * 1_000_000, False),
    ],
)
def test_only_a_bearer_header_with_a_key_passes(authorization: str | None, passed: bool) -> None:
    assert passes(ApiKeys([FIRST, SECOND]), authorization) is passed


KEY = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40)


@given(st.lists(KEY.filter(lambda key: "," not in key), min_size=1, max_size=5), KEY)
def test_only_known_keys_are_accepted(keys: list[str], other: str) -> None:
    known = ApiKeys.read(None, {"ORCA_API_KEYS": ",".join(keys)})
    assert all(passes(known, f"Bearer {key}") for key in keys)
    assert passes(known, f"Bearer {other}") is (other in keys)


@pytest.mark.parametrize("given_key", [FIRST, SECOND, THIRD, "no-such-key"])
def test_every_key_is_compared_in_constant_time(given_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = list[tuple[int, int]]()
    compare = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    passes(ApiKeys([FIRST, SECOND, THIRD]), f"Bearer {given_key}")
    assert lengths == [(32, 32)] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys has no API key, which would let everyone in"),
        ("# none yet\n\n", "keys has no API key"),
        (f"{FIRST}\nshort-7\n", "keys, line 2: an API key must have at least 8 characters"),
        (f"{FIRST} # of a friend", "keys, line 1: an API key must have"),
        ("schlüssel-0001", "keys, line 1: an API key must have"),
        (f"{FIRST}\x00", "keys, line 1: an API key must have"),
        (b"secret-\xff-secret", "keys is not UTF-8: a wrong byte at 7"),
        ("x" * 1_000_001, "keys has more than 1000000 bytes"),
        ("".join(f"key-{n:06}\n" for n in range(1025)), "there are 1025 API keys; at most 1024 are allowed"),
    ],
)
def test_a_bad_file(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ApiKeys.read(key_file(tmp_path, text), {})


@pytest.mark.parametrize("value", [",", " \n ", "short", f"{FIRST} {SECOND}", f"{FIRST},{SECOND[:7]}"])
def test_a_bad_variable(value: str) -> None:
    with pytest.raises(ConfigError, match="ORCA_API_KEYS") as caught:
        ApiKeys.read(None, {"ORCA_API_KEYS": value})
    assert value.strip(", \n")[:5] not in str(caught.value) or not value.strip(", \n")


def test_a_path_that_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes to this pipe: opening it must not block
    for name, reason in (("no", "No such file"), ("pipe", "not a regular file"), (".", "Is a directory")):
        with pytest.raises(ConfigError, match=f"cannot be read: .*{reason}"):
            ApiKeys.read(tmp_path / name, {})


def test_a_warning_for_a_file_that_others_can_read(tmp_path: Path) -> None:
    path = key_file(tmp_path, FIRST, mode=0o640)
    assert ApiKeys.read(path, {}).notes == (
        f"{path} holds API keys and others can read it; chmod 600 {path}",
    )


def test_a_key_is_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bad = "secret key"
    shown = list[str]()
    keys = ApiKeys.read(key_file(tmp_path, FIRST, mode=0o644), {"ORCA_API_KEYS": SECOND})
    shown += [repr(keys), str(keys), f"{keys}", repr(vars(keys)), *keys.notes]
    assert repr(keys) == "ApiKeys(2)"

    def all_messages(error: BaseException) -> list[str]:
        chained = [one for one in (error.__cause__, error.__context__) if one is not None]
        return [
            *traceback.format_exception(error),
            repr(error),
            *(text for one in chained for text in all_messages(one)),
        ]

    for authorization in (f"Bearer {bad}", f"Basic {bad}", bad):
        with pytest.raises(Unauthorized) as refused:
            keys.check(authorization)
        shown += all_messages(refused.value)
    for path, environ in (
        (key_file(tmp_path, bad), {}),
        (key_file(tmp_path, f"{bad}\xff".encode("latin-1")), {}),
        (None, {"ORCA_API_KEYS": bad}),
    ):
        with pytest.raises(ConfigError) as mistake:
            ApiKeys.read(path, environ)
        shown += all_messages(mistake.value)
    shown.append(caplog.text)
    for text in shown:
        assert not any(secret in text for secret in (FIRST, SECOND, bad)), text
