"""JSON over HTTP: every way a server can fail ends in the right error after the right number of attempts."""

import asyncio
import logging

import pytest
from fake_server import Answer, FakeServer, in_turn, until

from focus_jax.agents.sampler import SamplerError
from focus_jax.sampling.transport import JsonClient, Limits, StatusError, read_api_key, read_base_url

QUICK = Limits(deadline=10.0, max_retries=2, backoff=0.001)
GOOD = Answer({"ok": True})


def ask(server: FakeServer, *, limits: Limits = QUICK, max_bytes: int = 1000, key: str | None = None, keep_alive: bool = False):
    async def call():
        client = JsonClient(server.url, api_key=key, limits=limits, keep_alive=keep_alive)
        try:
            return await client.post("/x", {"a": 1}, max_bytes=max_bytes)
        finally:
            await client.close()

    return asyncio.run(call())


@pytest.mark.parametrize(
    "fault",
    [
        Answer({"e": 1}, status=429),
        Answer({"e": 1}, status=500),
        Answer(b"<html>down</html>", status=503),
        Answer(hang_up=True),
        Answer({"ok": True}, cut=3),
    ],
    ids=["429", "500", "503", "hang up", "cut"],
)
def test_passing_faults_are_tried_again(fault):
    with FakeServer(lambda request: GOOD, in_turn(fault, fault, path="/x")) as server:
        assert ask(server) == {"ok": True}
        assert len(server.requests) == 3
    with FakeServer(lambda request: fault) as server:
        with pytest.raises(SamplerError, match=r"answered|connection failed"):
            ask(server)
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Answer({"error": "bad prompt"}, status=400), "answered 400: .*bad prompt"),
        (Answer({"error": "no"}, status=401), "answered 401"),
        (Answer({"error": "no"}, status=404), "answered 404"),
        (Answer(b"", status=302, headers={"Location": "http://elsewhere"}), "elsewhere"),
        (Answer(b"<html>hi</html>", headers={"Content-Type": "text/html"}), "expected plain JSON, the answer is text/html"),
        (Answer(b"{}"), "expected plain JSON, the answer is nothing"),
        (Answer(b"{}", headers={"Content-Type": "application/json", "Content-Encoding": "gzip"}), "gzip"),
        (Answer(b"{'a': oops", headers={"Content-Type": "application/json"}), "expected JSON, got"),
        (Answer(b"[" * 900, headers={"Content-Type": "application/json"}), "expected JSON, got"),
        (Answer({"long": "x" * 2000}), "longer than the 1000 bytes"),
        (Answer(b"[1,", headers={"Content-Type": "application/json"}, endless=True), "longer than the 1000 bytes"),
        (Answer(b"x" * 100, status=418, endless=True), "answered 418"),
    ],
)
def test_lasting_faults_cost_one_attempt(fault, message):
    with FakeServer(lambda request: fault) as server:
        with pytest.raises(SamplerError, match=message):
            ask(server)
        assert len(server.requests) == 1


def test_deeply_nested_json_is_an_error_not_a_crash():
    nested = Answer(b"[" * 200_000, headers={"Content-Type": "application/json"})
    with FakeServer(lambda request: nested) as server, pytest.raises(SamplerError, match="expected JSON"):
        ask(server, max_bytes=10**6)


@pytest.mark.parametrize("fault", [Answer({"ok": 1}, delay=60), Answer({"ok": "x" * 900}, drip=0.1)], ids=["silent", "slow drip"])
def test_the_deadline_covers_a_slow_server(fault):
    with FakeServer(lambda request: fault) as server, pytest.raises(SamplerError, match=r"no answer within 0\.3 s"):
        ask(server, limits=Limits(deadline=0.3))


def test_the_deadline_message_tells_what_came_before():
    script = in_turn(Answer({}, status=503), Answer({}, delay=60), path="/x")
    with (
        FakeServer(lambda request: GOOD, script) as server,
        pytest.raises(SamplerError, match=r"within 0\.5 s; before that: .*503"),
    ):
        ask(server, limits=Limits(deadline=0.5, backoff=0.001))


def test_retry_after_is_honoured_and_never_waits_past_the_deadline():
    async def waited(server: FakeServer) -> float:
        start = asyncio.get_running_loop().time()
        client = JsonClient(server.url, limits=QUICK)
        await client.post("/x", {})
        return asyncio.get_running_loop().time() - start

    wait = Answer({}, status=429, headers={"Retry-After": "1"})
    with FakeServer(lambda request: GOOD, in_turn(wait, path="/x")) as server:
        assert asyncio.run(waited(server)) >= 1.0
    for value in ("3600", "Wed, 21 Oct 2099 07:28:00 GMT"):
        wait = Answer({}, status=503, headers={"Retry-After": value})
        with FakeServer(lambda request: wait) as server:  # noqa: B023
            with pytest.raises(StatusError, match="503"):
                ask(server)
            assert len(server.requests) == 1
    nonsense = Answer({}, status=503, headers={"Retry-After": "soon"})
    with FakeServer(lambda request: GOOD, in_turn(nonsense, path="/x")) as server:
        assert ask(server) == {"ok": True}


def test_a_server_that_is_not_there():
    with FakeServer(lambda request: GOOD) as server:
        pass
    with pytest.raises(SamplerError, match=r"connection failed .*is the server running\?"):
        ask(server)


def test_the_key_is_sent_and_never_shown(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SOME_KEY", "s3cret-key\n")
    key = read_api_key("SOME_KEY")
    echo = Answer({"error": "key s3cret-key is not welcome"}, status=401)
    with FakeServer(lambda request: echo) as server:
        with pytest.raises(SamplerError, match=r"key \*\*\* is not welcome"):
            ask(server, key=key)
        assert server.requests[0].headers["authorization"] == "Bearer s3cret-key"
        assert "s3cret" not in repr(JsonClient(server.url, api_key=key))
    assert "s3cret" not in caplog.text
    assert read_api_key(None) is None
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(SamplerError, match="SOME_KEY is not set"):
        read_api_key("SOME_KEY")


@pytest.mark.parametrize("given", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_address_may_end_in_v1(given):
    assert read_base_url(given) == "http://h:1"


@pytest.mark.parametrize("given", ["h:1", "ftp://h", "http://", "http://h:port", "", "http://[::1"])
def test_an_address_that_is_none(given):
    with pytest.raises(SamplerError, match=r"expected an address like http://127\.0\.0\.1:8000/v1"):
        read_base_url(given)


def test_a_password_in_the_address_is_refused_without_showing_it():
    with pytest.raises(SamplerError) as caught:
        read_base_url("http://me:hunter2@h")
    assert "hunter2" not in str(caught.value)


def test_control_characters_of_a_server_do_not_reach_the_terminal():
    with FakeServer(lambda request: Answer(b"\x1b[31mred\r\nfake line", status=400)) as server:
        with pytest.raises(SamplerError) as caught:
            ask(server)
        assert str(caught.value).isprintable()


def test_cancelling_closes_the_connection_at_the_server():
    async def cancel(server: FakeServer) -> None:
        client = JsonClient(server.url)
        task = asyncio.create_task(client.post("/x", {}))
        await until(lambda: bool(server.requests))
        assert server.open_connections == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not server.open_connections)

    # The server notices a closed connection when it writes: it drips.
    with FakeServer(lambda request: Answer({"long": "x" * 10**5}, drip=0.001)) as server:
        asyncio.run(asyncio.wait_for(cancel(server), 10))


def test_no_more_requests_at_once_than_allowed_and_nothing_left_open():
    async def calls(server: FakeServer) -> None:
        client, before = JsonClient(server.url, limits=Limits(max_connections=3)), asyncio.all_tasks()
        await asyncio.gather(*(client.post("/x", {}) for _ in range(12)))
        await until(lambda: not server.open_connections)
        assert asyncio.all_tasks() == before

    most = 0

    def slow(request):
        nonlocal most
        most = max(most, server.open_connections)
        return Answer({}, delay=0.02)

    with FakeServer(slow) as server:
        asyncio.run(asyncio.wait_for(calls(server), 10))
    assert most <= 3
    assert len(server.requests) == 12


def test_kept_connections_are_reused():
    async def calls(server: FakeServer) -> int:
        client = JsonClient(server.url, keep_alive=True)
        for _ in range(3):
            await client.post("/x", {})
        open_now = server.open_connections
        await client.close()
        return open_now

    with FakeServer(lambda request: GOOD) as server:
        assert asyncio.run(calls(server)) == 1
