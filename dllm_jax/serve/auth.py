"""Access control: keys, and the Host header.

Without a key the Host must be loopback or named by `--allowed-host`: a page of another site cannot
reach the server through a name of its own that resolves to this machine. `limits.check_body`
refuses what a form of another site can send.
"""

import base64
import binascii
import functools
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any

from dllm_jax.serve.refusals import Refusal

# A header field of its own: Chromium reads the first scheme of a field alone.
BASIC = 'Basic realm="dllm_jax"'
OPEN_PATHS = frozenset({"/health", "/live"})


class Guard:
    """Checks that come before a route.

    Args:
        keys: Any of them opens every route; none: loopback names only.
        names: Of the last keys; the others have numbers.
        hosts: Further names that the Host header may hold.
        open_metrics: `/metrics` needs no key.
    """

    def __init__(
        self,
        keys: Iterable[str],
        hosts: Iterable[str],
        open_metrics: bool = False,
        names: Sequence[str] = (),
    ):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._names = [*map(str, range(len(self._digests) - len(names))), *names]
        self._hosts = {host.lower() for host in hosts}
        self._open = OPEN_PATHS | ({"/metrics"} if open_metrics else set())

    def check(self, path: str, headers: dict[bytes, bytes], peer: Any = None) -> str:
        """Refuse who may not ask.

        Args:
            headers: Names in lower case.
            peer: Address and port of the connection, if it has any.

        Returns:
            Who asks, as far as requests of one client share the engine with those of others: a
            key, else an address; a connection where addresses are loopback's.

        Raises:
            Refusal: 401 or 403.
        """
        if path not in self._open:
            if self._digests:
                said = headers.get(b"authorization", b"").decode("latin-1")
                if not said and (key := headers.get(b"x-api-key")):  # as Anthropic's clients send
                    said = f"Bearer {key.decode('latin-1')}"
                return f"key {self._check_key(said)}"
            self._check_host(headers.get(b"host", b""))
        if not peer:
            return ""
        host, port = peer[:2]
        return f"{host}:{port}" if _is_loopback(host) else str(host)

    def _check_key(self, said: str) -> str:
        """The key's name or number."""
        scheme, _, value = said.partition(" ")
        key = value.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "basic":  # a browser asks for it; the user name is not looked at
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                key = b""
        elif scheme.lower() != "bearer":
            key = b""
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise Refusal(
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key",
                status=401,
                headers={"www-authenticate": "Bearer"},  # `Gate` adds BASIC
            )
        return self._names[matches.index(True)]

    def _check_host(self, said: bytes) -> None:
        name, is_loopback = _host(said)
        if is_loopback or name in self._hosts:
            return
        raise Refusal(
            "the Host header names no loopback address; start the server with --api-key, or with "
            "--allowed-host for this name",
            code="forbidden_host",
            status=403,
        )


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdecimal() and not (host.count(":") > 1 and "]" not in host)


@functools.lru_cache(maxsize=64)
def _host(said: bytes) -> tuple[str, bool]:
    """The name in a Host header, and whether it is loopback's."""
    host = said.decode("latin-1")
    name = host.rpartition(":")[0] if _has_port(host) else host
    name = name.strip("[]").lower()
    return name, name == "localhost" or _is_loopback(name)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
