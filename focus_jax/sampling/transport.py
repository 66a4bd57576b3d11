"""JSON over HTTP to a server that may be slow, broken or hostile: deadline, bounded retries, bounded answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from focus_jax.agents.sampler import SamplerError

MEBIBYTE = 2**20
_CONNECT_TIMEOUT = 10.0  # seconds for one attempt to connect; the rest is covered by the deadline
_LONGEST_BACKOFF = 30.0
_ERROR_BYTES = 4096  # of an error's body are read


class StatusError(SamplerError):
    """The server answered with an error status.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class _Retry(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, failure: SamplerError, delay: float = 0.0):
        self.failure = failure
        self.delay = delay


@dataclass(frozen=True)
class Limits:
    """How long and how often to try.

    Attributes:
        deadline: seconds one question to the server may take in all, waiting for a connection and retries included.
        max_retries: further attempts after connection errors, status 429 and status 5xx; other failures get none.
        backoff: seconds before the first retry; it doubles with each, give or take half (jitter).
        max_connections: most requests at the server at once; the others wait here. None is no limit.
    """

    deadline: float = 600.0
    max_retries: int = 4
    backoff: float = 0.5
    max_connections: int | None = None


def read_base_url(url: str) -> str:
    """The root of a server's address: "http://host:8000/v1/" gives "http://host:8000".

    Raises:
        SamplerError: not an http(s) address, or one with a password in it (it would end up in logs).
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.username or parts.password:
        raise SamplerError("`base_url`: expected no user or password in the address; give keys through an environment variable")
    if parts.scheme not in ("http", "https") or not host:
        raise SamplerError(f"`base_url`: expected an address like http://127.0.0.1:8000/v1, got {url!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def read_api_key(variable: str | None) -> str | None:
    """The key in an environment variable; None where no variable is named.

    Raises:
        SamplerError: the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise SamplerError(f"`api_key_env`: the environment variable {variable} is not set; export it, or leave api_key_env out")
    return key


class JsonClient:
    """Asks one server for JSON.

    Connections are not kept open between calls unless `keep_alive`: nothing is left behind when an event loop ends, and
    no call meets a connection the server has just closed. Keep them open (and call `close`) for a server far away.

    Args:
        base_url: root of the server's address.
        api_key: sent as a bearer token; never part of a message, a repr or a log.
        limits: deadline and retries.
        keep_alive: keep connections open between calls.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, limits: Limits | None = None, keep_alive: bool = False):
        self.base_url = base_url
        self.limits = limits or Limits()
        self._api_key = api_key
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=self.limits.max_connections, max_keepalive_connections=None if keep_alive else 0),
            # Reading the certificates takes a while, and plain HTTP needs none.
            verify=base_url.startswith("https"),
            # Proxies of the environment are for far servers; one on this machine is reached directly.
            trust_env=urlsplit(base_url).hostname not in ("127.0.0.1", "localhost", "::1"),
        )

    def __repr__(self) -> str:
        return f"JsonClient({self.base_url!r})"

    async def get(self, path: str) -> Any:
        """GET `path`; see `post`."""
        return await self._request("GET", path, None, 4 * MEBIBYTE)

    async def post(self, path: str, payload: Mapping[str, Any], *, max_bytes: int = 4 * MEBIBYTE) -> Any:
        """POST `payload` as JSON and return the parsed answer.

        Args:
            path: under the base url.
            payload: a JSON object.
            max_bytes: longest answer that is accepted.

        Raises:
            StatusError: the server refused the request, or kept failing.
            SamplerError: no answer in time, no connection, or an answer that is not JSON or too long.
        """
        return await self._request("POST", path, json.dumps(payload, allow_nan=False).encode(), max_bytes)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _request(self, method: str, path: str, body: bytes | None, max_bytes: int) -> Any:
        last: SamplerError | None = None
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.deadline):
                for attempt in range(self.limits.max_retries + 1):
                    try:
                        return await self._attempt(method, path, body, max_bytes)
                    except _Retry as retry:
                        last = retry.failure
                        delay = max(retry.delay, self._backoff(attempt))
                    left = self.limits.deadline - (time.monotonic() - start)
                    if attempt == self.limits.max_retries or delay > left:
                        break
                    await asyncio.sleep(delay)
        except TimeoutError:
            reason = f"; before that: {last}" if last else ""
            raise SamplerError(f"{self._name(path)}: no answer within {self.limits.deadline:g} s{reason}") from None
        assert last is not None
        raise last

    def _backoff(self, attempt: int) -> float:
        return min(self.limits.backoff * 2**attempt, _LONGEST_BACKOFF) * random.uniform(0.5, 1.5)

    async def _attempt(self, method: str, path: str, body: bytes | None, max_bytes: int) -> Any:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with self._client.stream(method, self.base_url + path, content=body, headers=headers) as response:
                if response.status_code != 200:
                    raise await self._status_failure(path, response)
                kind = response.headers.get("content-type", "nothing")
                encoding = response.headers.get("content-encoding", "identity")
                if not kind.startswith("application/json") or encoding != "identity":
                    raise SamplerError(
                        f"{self._name(path)}: expected plain JSON, the answer is {self._clean(f'{kind}, {encoding}')}"
                    )
                raw = await self._read(path, response, max_bytes)
        except httpx.UnsupportedProtocol as error:
            raise SamplerError(f"{self._name(path)}: {error}") from None
        except httpx.TransportError as error:
            text = self._clean(str(error)) or type(error).__name__
            raise _Retry(SamplerError(f"{self._name(path)}: the connection failed ({text}); is the server running?")) from None
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise SamplerError(
                f"{self._name(path)}: expected JSON, got {self._clean(raw[:200].decode(errors='replace'))!r}"
            ) from None

    async def _read(self, path: str, response: httpx.Response, max_bytes: int) -> bytearray:
        raw = bytearray()
        async for chunk in response.aiter_raw():
            raw += chunk
            if len(raw) > max_bytes:
                raise SamplerError(f"{self._name(path)}: the answer is longer than the {max_bytes} bytes it may have")
        return raw

    async def _status_failure(self, path: str, response: httpx.Response) -> SamplerError | _Retry:
        raw = bytearray()
        async for chunk in response.aiter_raw():
            raw += chunk
            if len(raw) > _ERROR_BYTES:
                break
        status = response.status_code
        text = self._clean(raw[:300].decode(errors="replace"))
        failure = StatusError(f"{self._name(path)}: the server answered {status}: {text}", status)
        if status == 429 or status >= 500:
            return _Retry(failure, _retry_after(response.headers.get("retry-after")))
        if 300 <= status < 400:
            return StatusError(f"{self._name(path)}: the server sends us elsewhere ({status}); give its final address", status)
        return failure

    def _name(self, path: str) -> str:
        return self.base_url + path

    def _clean(self, text: str) -> str:
        """A server's text fit for an error message: one line, printable, and without the key."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _retry_after(value: str | None) -> float:
    """Seconds a Retry-After header asks for; 0 where there is none or it makes no sense."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return max(seconds, 0.0) if seconds == seconds else 0.0
