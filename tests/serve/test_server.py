"""hookstats serve, asked over loopback: who gets what, and what no request can do."""

from __future__ import annotations

import random
import re
import shutil
import socket
import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import pytest

from hookstats.numbers.fields import Site
from hookstats.rules import Finding
from hookstats.serve import server as http_server
from tests.records.recorded import wait_for
from tests.serve.served import Clock, Growing, Served, serving

HOSTILE = "<img src=x onerror=alert(1)>&\"'\u202egnp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, one of a hostile name, and beside them a file that nobody may see."""
    top = tmp_path_factory.mktemp("served")
    (top / "secret.txt").write_text("a secret that no request may have")
    plain = Growing(top / "runs" / "plain")
    plain.add(range(12))
    plain.find(Finding("spike", 5, plain.sites[0], 6.0, 3.0, "warning", f"It rose {HOSTILE}."))
    plain.end()
    twin = Growing(top / "runs" / "twin")
    twin.add(range(7))
    twin.end()
    hostile = Growing(top / "runs" / "deep" / HOSTILE, [Site(HOSTILE, "output"), Site("b", HOSTILE)])
    hostile.add(range(3))
    (top / "runs" / "link").symlink_to(top)
    return top


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder / "runs") as found:
        yield found


def raw(port: int, sent: bytes) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        found = b""
        try:
            while more := connection.recv(65536):
                found += more
        except ConnectionResetError:
            pass
        return found


def test_the_address_that_is_printed_opens_the_index_and_gives_a_cookie(served: Served) -> None:
    assert re.fullmatch(r"runs are shown at http://127\.0\.0\.1:\d+/\?token=[\w-]{32}\n", served.said)
    moved = served.ask(f"/?token={served.token}", headers={"Cookie": ""})
    assert (moved.status, moved.headers["location"]) == (303, "/")
    assert moved.headers["set-cookie"] == f"{served.cookie}; Path=/; HttpOnly; SameSite=Lax"
    assert set(served.runs()) == {"plain", "twin", "deep/&lt;img src=x onerror=alert(1)&gt;&amp;&quot;&#x27;\\u202egnp"}


@pytest.mark.parametrize("path", ["/", "/?token=wrong", "/?token=", "/nothing", "RUN", "RUNblob"])
@pytest.mark.parametrize("cookie", ["", "hookstats=x", "hookstats-PORT=", "hookstats-PORT=wrong", "other=TOKEN"])
def test_without_the_token_nothing_is_shown(served: Served, path: str, cookie: str) -> None:
    given = cookie.replace("PORT", str(served.port)).replace("TOKEN", served.token)
    found = served.ask(path.replace("RUN", served.runs()["plain"]), headers={"Cookie": given})
    assert found.status == 403
    assert "plain" not in found.text.replace("text/plain", "")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:PORT",
        "127.0.0.1.evil.example:PORT",
        "127.0.0.1",
        "",
        "evil@127.0.0.1:PORT",
        "[::1]:1",
        "10.0.0.1:PORT",
    ],
)
def test_another_host_is_refused_also_with_the_token(served: Served, host: str) -> None:
    found = served.ask("/", headers={"Host": host.replace("PORT", str(served.port))})
    assert found.status == 421
    two = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nHost: evil\r\nCookie: {served.cookie}\r\n\r\n"
    assert b" 421 " in raw(served.port, two.encode()).split(b"\r\n")[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_its_own_names_are_let_in(served: Served, host: str) -> None:
    assert served.ask("/", headers={"Host": f"{host}:{served.port}"}).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT", "get", "PROPFIND"])
def test_other_methods_are_refused(served: Served, method: str) -> None:
    found = served.ask("/", method)
    assert (found.status, found.headers["allow"]) == (405, "GET, HEAD")


def test_head_has_the_headers_of_get_and_no_body(served: Served) -> None:
    head, got = served.ask("/", "HEAD"), served.ask("/")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(len(got.body))


TRAVERSALS = [
    "../secret.txt",
    "..%2fsecret.txt",
    "%2e%2e/secret.txt",
    "....//secret.txt",
    "..\\secret.txt",
    "%2fetc%2fpasswd",
]
TRAVERSALS += [
    "/etc/passwd",
    "file:///etc/passwd",
    "link/secret.txt",
    "plain/rank=0/sites.json",
    "..%252fsecret.txt",
    "%00",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_of_a_request_is_opened(served: Served, path: str) -> None:
    run = served.runs()["plain"]
    for asked in (f"/{path}", f"/run/{path}", f"{run}{path}", f"{run}../{path}", f"//{path}"):
        found = served.ask(asked)
        assert found.status == 404, asked
    version = served.record(run)["version"]
    for name in ("name", "version"):
        found = served.ask(f"{run}blob?version={version}&{name}={path}")
        assert found.status in (404, 410)
        assert b"secret" not in found.body


def test_the_page_of_a_run_says_all_headers_that_keep_others_out(served: Served) -> None:
    for path in ("/", served.runs()["plain"]):
        found = served.ask(path)
        assert found.status == 200
        policy = found.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["referrer-policy"] == "no-referrer"
        assert found.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in found.headers


def test_what_somebody_has_already_is_not_sent_again(served: Served) -> None:
    for path in ("/", served.runs()["plain"]):
        found = served.ask(path)
        again = served.ask(path, headers={"If-None-Match": found.headers["etag"]})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", found.headers["etag"])
        assert served.ask(path, headers={"If-None-Match": '"another"'}).body == found.body
    assert served.record(served.runs()["plain"])["tag"] == found.headers["etag"].strip('"')


def test_hostile_names_are_text_in_every_page(served: Served) -> None:
    for path in ("/", *served.runs().values()):
        body = served.ask(path).text
        assert "<img src=x" not in body
        assert "\u202e" not in body


def test_a_request_that_is_too_long_is_refused(served: Served) -> None:
    start = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n".encode()
    for sent in (
        b"GET /" + b"x" * 100_000,
        start + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
        start + b"A: b\r\n" * 50_000 + b"\r\n",
    ):
        found = raw(served.port, sent)
        assert not found or re.match(rb"HTTP/1\.\d (414|431|400) ", found), found[:80]
    assert served.ask("/", headers={"X": "y" * 8_000}).status == 200
    assert served.ask("/", headers={"X": "y" * 70_000}).status == 431


@contextmanager
def serving_here(answer: http_server.Answer) -> Iterator[http_server.Server]:
    """In this process, whose times may be others: the same for every request."""
    server = http_server.open_server("127.0.0.1", 0, lambda _: answer, has_token=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(http_server, "time", clock)
    return clock


def test_slow_readers_and_many_of_them_hold_nothing_up(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Each sends a byte now and then, or none, and never the end of its head; a reader of an answer never reads."""
    monkeypatch.setattr(http_server._Handler, "timeout", 600.0)  # of a single byte
    slow: list[socket.socket] = []
    threads = threading.active_count()
    with serving_here(http_server.Answer(HTTPStatus.OK, b"here")) as server:
        asked = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()

        def connect(sent: bytes) -> None:
            slow.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            with suppress(OSError):  # it is one too many
                slow[-1].sendall(sent)

        try:
            for _ in range(16):
                connect(asked)
                assert slow[-1].recv(1, socket.MSG_PEEK) == b"H"
            for i in range(2 * http_server.CONNECTIONS):
                connect(b"GET / HTTP/1.1\r\nX: " if i % 4 else b"")
            wait_for(lambda: len(server._until) == http_server.CONNECTIONS)
            wait_for(lambda: threading.active_count() - threads <= http_server.CONNECTIONS + 1)  # and the server's own
            assert raw(server.port, asked) == b""
            for _ in range(3):
                clock.now += 0.3 * http_server.HEAD_SECONDS
                for connection in slow:
                    with suppress(OSError):
                        connection.send(b"a")
            assert raw(server.port, asked) == b""
            clock.now += 0.2 * http_server.HEAD_SECONDS
            wait_for(lambda: not server._until)
            assert raw(server.port, asked).endswith(b"here")
        finally:
            for connection in slow:
                connection.close()


def test_a_slow_reader_of_an_answer_is_let_go_whatever_it_reads(clock: Clock) -> None:
    size = 64 << 20
    with (
        serving_here(http_server.Answer(HTTPStatus.OK, b"x" * size)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as slow,
    ):
        slow.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        assert slow.recv(64).startswith(b"HTTP/1.0 200 ")
        for _ in range(9):
            clock.now += 0.1 * http_server.ANSWER_SECONDS
            server.service_actions()
            left = size // 16  # nine of them are more than lies between the two
            while left > 0:
                more = slow.recv(left)
                assert more
                left -= len(more)
        clock.now += 0.2 * http_server.ANSWER_SECONDS
        wait_for(lambda: not server._until)


def both(served: Served, first: str, second: str) -> str:
    """The address of two runs."""
    runs = served.runs()
    return f"{runs[first]}{runs[second].split('/')[2]}/"


def test_1500_random_requests_get_an_answer_or_a_closed_connection(served: Served) -> None:
    rng = random.Random(0)
    run = served.runs()["plain"]
    words = [
        "GET",
        "HEAD",
        "POST",
        "/",
        run,
        both(served, "plain", "twin"),
        run.split("/")[2],
        "blob",
        "?",
        "version=",
        "name=",
        "..",
        "%2e",
        "%00",
        "\r\n",
    ]
    words += [
        "HTTP/1.1",
        "HTTP/1.0",
        "HTTP/9",
        f"Host: 127.0.0.1:{served.port}",
        f"Cookie: {served.cookie}",
        "rms.relative",
    ]
    words += [
        "Content-Length: 99999999",
        "Transfer-Encoding: chunked",
        "Expect: 100-continue",
        "Range: bytes=0-",
        "\x00",
        "\xff",
    ]
    good = f"Host: 127.0.0.1:{served.port}\r\nCookie: {served.cookie}\r\n"
    for number in range(1500):
        kind = number % 4
        if kind == 0:
            sent = bytes(rng.randrange(256) for _ in range(rng.randrange(60))) + b"\r\n\r\n"
        elif kind == 1:
            parts = (rng.choice([*words, rng.choice(string.printable)]) for _ in range(rng.randrange(12)))
            sent = "".join(part + rng.choice(["", " ", "\r\n"]) for part in parts).encode("latin-1") + b"\r\n\r\n"
        else:
            path = "".join(
                rng.choice([*words[3:14], rng.choice(string.ascii_letters)]) for _ in range(rng.randrange(8))
            )
            method = rng.choice(["GET", "GET", "HEAD", "POST", "XX"])
            sent = f"{method} {'/' if kind == 2 else ''}{path} HTTP/1.1\r\n{good}\r\n".encode()
        found = raw(served.port, sent)
        assert not found or re.match(rb"HTTP/1\.[01] [2345]\d\d ", found), (sent, found[:200])
        assert b" 500 " not in found.split(b"\r\n")[0], (sent, found[:200])
        assert b"a secret" not in found
    assert served.ask("/").status == 200


def says(served: Served, path: str, words: str) -> str:
    """The page, when these words stand in it."""
    wait_for(lambda: words in served.ask(path).text)
    return served.ask(path).text


def test_a_run_that_is_deleted_is_said_to_be(tmp_path: Path) -> None:
    for name in ("gone", "torn"):
        run = Growing(tmp_path / name)
        run.add(range(5))
        run.end()
    Growing(tmp_path / "empty")
    with serving(tmp_path) as served:
        runs = served.runs()
        for name in ("gone", "torn"):
            says(served, runs[name], 'id="record"')
        shutil.rmtree(tmp_path / "gone")
        says(served, runs["gone"], "This run was deleted.")
        assert "Nothing is recorded yet." in says(served, runs["empty"], "Nothing")
        rows = served.ask("/").text
        assert all(word in rows for word in (">deleted<", ">alive<"))


def test_a_run_may_be_torn_and_deleted_while_it_is_read(tmp_path: Path) -> None:
    """Alone, and beside another one."""
    Growing(tmp_path / "other").add(range(40))
    with serving(tmp_path) as served:
        for turn in range(6):
            run = Growing(tmp_path / "run")
            run.add(range(40))
            paths = ["/", *served.runs().values(), both(served, "other", "run")]
            for path in paths:
                assert served.ask(path).status == 200
            if turn % 2:
                part = next((run.folder / "totals").iterdir())
                part.write_bytes(part.read_bytes()[: 100 * turn])
                for path in paths[1:]:
                    assert served.ask(path).status == 200
            shutil.rmtree(tmp_path / "run")
            for path in paths:
                assert served.ask(path).status == 200


def test_other_hosts_and_no_token_are_said_out_loud(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0", "--no-token") as served:
        assert served.process.stdout is not None
        warnings = [served.process.stdout.readline() for _ in range(2)]
        assert warnings[0].startswith("warning: 0.0.0.0 can be asked from other machines")
        assert warnings[1].startswith("warning: there is no token")
        assert "token" not in served.address
        assert served.ask("/", headers={"Cookie": ""}).status == 200
        assert served.ask("/", headers={"Host": f"192.0.2.7:{served.port}"}).status == 200
        assert served.ask("/", headers={"Host": f"evil.example:{served.port}"}).status == 421
