"""Proves what a connection may do: offers, framing, HTTP/1.0, silence, and how many there may be.

Issue 45, items 3 and 4. No byte of a body is ever read as a request.
"""

import contextlib
import json
import re
import socket
import struct
import time

import pytest

from tests.serve import scripted as script
from tests.serve.driving import PATIENCE_S, TEXT, scripted, within

LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = b'{"prompt": "hello there"}'
OFFERS = {
    "none": (),
    "h2c": (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAEA"),
    "websocket": (b"connection: keep-alive, Upgrade", b"upgrade: websocket"),
    "twice": (b"Connection: Upgrade", b"Upgrade: TLS/1.2", b"Upgrade: h2c"),
}
CHUNKED = b"transfer-encoding: chunked"
MOST = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    patient = {"max_connections": MOST, "head_timeout": 2 * PATIENCE_S}
    with scripted(tmp_path_factory.mktemp("server"), limits=patient) as one:
        yield one


def head(*fields, path=b"/tokenize", version=b"1.1", method=b"POST"):
    lines = [b"%b %b HTTP/%b" % (method, path, version), b"host: localhost"]
    return b"\r\n".join([*lines, b"content-type: application/json", *fields, b"", b""])


def sized(body):
    return b"content-length: %d" % len(body)


def chunks(body):
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def statuses(data):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", data)]


@pytest.mark.parametrize("offer", OFFERS)
def test_item_4_an_offer_to_upgrade_is_answered_as_if_it_were_not_there(server, offer):
    fields, one = OFFERS[offer], sized(BODY)
    coded = head(*fields, CHUNKED)
    for parts in (
        (head(*fields, one) + BODY,),
        (head(*fields, one), BODY),
        (coded + chunks(BODY),),
        (coded, *(chunks(BODY)[i : i + 9] for i in range(0, 40, 9))),
        (head(*fields, one) + BODY + coded + chunks(BODY),),
    ):
        data = server.raw(*parts, LIVE)
        count = sum(part.count(b"POST ") for part in parts)
        assert statuses(data) == [200] * (count + 1)
        assert data.count(b'"count":') == count
    (byte_by_byte,) = (head(b"connection: upgrade, close", b"upgrade: h2c", one) + BODY,)
    pieces = [byte_by_byte[i : i + 1] for i in range(len(byte_by_byte))]
    assert statuses(server.raw(*pieces, pause=0.0005)) == [200]  # and closed, as it asked


@pytest.mark.parametrize("offer", OFFERS)
def test_item_4_a_body_is_never_a_request(server, offer):
    for path, method, status in (
        (b"/tokenize", b"POST", 400),
        (b"/nope", b"POST", 404),
        (b"/health", b"GET", 200),
    ):
        first = head(*OFFERS[offer], sized(HIDDEN), path=path, method=method)
        for parts in ((first + HIDDEN,), (first, HIDDEN), (first, HIDDEN[:9], HIDDEN[9:])):
            data = server.raw(*parts, LIVE)
            assert statuses(data) == [status, 200]
            assert b'"object":"list"' not in data


AMBIGUOUS = {
    "both_lengths": head(sized(BODY), CHUNKED) + chunks(BODY),
    "both_lengths_turned": head(CHUNKED, sized(BODY)) + chunks(BODY),
    "length_twice": head(sized(BODY), sized(BODY)) + BODY,
    "lengths_in_a_list": head(b"content-length: 25, 25") + BODY,
    "length_with_a_sign": head(b"content-length: +25") + BODY,
    "length_in_hexadecimal": head(b"content-length: 0x19") + BODY,
    "length_of_many_digits": head(b"content-length: " + b"9" * 30) + BODY,
    "length_empty": head(b"content-length:") + BODY,
    "space_before_the_colon": head(b"content-length : 25") + BODY,
    "folded_field": head(b"a: b", b" transfer-encoding: chunked", sized(BODY)) + BODY,
    "folded_coding": head(b"transfer-encoding:", b" chunked") + chunks(BODY),
    "bare_line_feed": head(b"a: b\ncontent-length: 25") + BODY,
    "bare_carriage_return": head(b"a: b\rcontent-length: 25") + BODY,
    "bare_line_feeds": head(sized(BODY)).replace(b"\r", b"") + BODY,
    "chunked_then_identity": head(b"transfer-encoding: chunked, identity") + chunks(BODY),
    "identity": head(b"transfer-encoding: identity") + BODY,
    "another_coding": head(b"transfer-encoding: gzip, chunked") + chunks(BODY),
    "coding_twice": head(CHUNKED, CHUNKED) + chunks(BODY),
    "unknown_coding": head(b"transfer-encoding: xchunked") + chunks(BODY),
    "chunk_of_bare_line_feeds": head(CHUNKED) + chunks(BODY).replace(b"\r\n", b"\n"),
    "chunk_with_a_prefix": head(CHUNKED) + b"0x" + chunks(BODY),
    "chunk_with_a_sign": head(CHUNKED) + b"-" + chunks(BODY),
    "chunk_too_short": head(CHUNKED) + b"1" + chunks(BODY)[2:],
    "chunks_before_1_1": head(CHUNKED, version=b"1.0") + chunks(BODY),
    "two_hosts": head(b"host: evil.example", sized(BODY)) + BODY,
    "connect": head(sized(HIDDEN), method=b"CONNECT", path=b"a:80"),
    "http_2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_item_4_framing_that_may_be_read_in_two_ways_is_refused_and_closes(server, name):
    for offer in ((), OFFERS["h2c"]):
        sent = AMBIGUOUS[name].replace(
            b"host: localhost", b"\r\n".join([b"host: localhost", *offer]), 1
        )
        data = server.raw(sent, HIDDEN)
        assert statuses(data) == [400]
        assert json.loads(data[data.index(b"\r\n\r\n") :])["error"]["code"] == "invalid_http"


def test_item_4_trailers_change_no_header_and_have_no_room(server):
    late = chunks(BODY)[:-2] + b"host: evil.example\r\ncontent-type: text/plain\r\n\r\n"
    data = server.raw(head(CHUNKED) + late, LIVE)
    assert (statuses(data), data.count(b'"count":')) == ([200, 200], 1)
    for endless in (b"5;", b"0\r\na: "):  # an extension, a trailer
        data = server.raw(head(CHUNKED) + endless, *[b"x" * 40_000] * 3)
        assert statuses(data) in ([431], [])  # [] where the rest was not read


def test_item_4_what_follows_a_refusal_or_an_answer_is_no_request_of_its_own(server):
    asked = head(b"expect: 100-continue", sized(HIDDEN), path=b"/nope")
    assert statuses(server.raw(asked, HIDDEN)) == [404]  # closed: is HIDDEN its body?
    asked = head(b"expect: 100-continue", sized(BODY))
    assert statuses(server.raw(asked, BODY, LIVE)) == [100, 200, 200]
    large = 5 << 20
    data = server.raw(head(b"content-length: %d" % large), HIDDEN * (large // len(HIDDEN) + 1))
    assert statuses(data) == [413]
    data = server.raw(head(sized(BODY)) + BODY + b"\0 rubbish\r\n\r\n", HIDDEN)
    assert statuses(data) == [200]  # what was whole is answered, then the end
    assert statuses(server.raw(HIDDEN * 5 + LIVE)) == [200] * 6


def test_item_4_a_body_that_breaks_takes_no_answer_from_another(server):
    whole, broken = head(sized(BODY)) + BODY, head(CHUNKED) + b"zz\r\n"
    assert statuses(server.raw(whole + whole + broken)) == [200, 200]
    assert statuses(server.raw(head(CHUNKED, path=b"/nope") + b"1\r\nx\r\n", b"zz\r\n")) == [404]


def test_item_4_a_client_that_leaves_several_requests_is_no_error(server):
    whole = head(sized(BODY)) + BODY
    for _ in range(20):
        with connect(server) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(whole * 9)
    assert statuses(server.raw(LIVE)) == [200]
    assert server.lines("stderr") == []


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_item_4_a_stream_before_http_1_1_has_no_chunk_sizes(server, version):
    body = b'{"prompt": "a", "max_tokens": 64, "stream": true}'
    asked = head(b"connection: close", sized(body), path=TEXT.encode(), version=version) + body
    start, _, data = server.raw(asked).partition(b"\r\n\r\n")
    is_plain = version == b"1.0"
    assert (b"chunked" not in start.lower()) is is_plain
    assert data.startswith(b"data: ") is is_plain
    assert data.endswith(b"data: [DONE]\n\n") is is_plain
    for path in (b"/live", b"/v1/models"):
        data = server.raw(head(path=path, method=b"GET", version=b"1.0"), HIDDEN)
        assert statuses(data) == [200]


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def test_item_3_silent_connections_make_room(server):
    held = [connect(server) for _ in range(3 * MOST)]
    for one in held[::2]:
        with contextlib.suppress(ConnectionError):
            one.sendall(b"GET /live HTTP/1.1\r\nx: ")
    assert server.get("/live")[0] == server.get("/v1/models")[0] == 200  # long before their time

    def is_open(one):
        try:
            return one.recv(1) != b""
        except TimeoutError:
            return True
        except ConnectionError:  # reset, with what was sent unread
            return False

    with contextlib.ExitStack() as stack:
        for one in held:
            stack.enter_context(one).settimeout(0.01)
        assert within(lambda: sum(map(is_open, held)) <= MOST)


def test_item_3_places_are_kept_for_probes(server):
    body = {"prompt": "a", "max_tokens": 4000, "seed": script.HANGS, "stream": True}
    with contextlib.ExitStack() as stack:
        for _ in range(MOST):
            one = stack.enter_context(server.open(TEXT, body))
            assert b"200 OK" in one.recv(4096)
        for path in ("/health", "/live", "/metrics"):
            assert server.get(path)[0] == 200
        status, reported, _ = server.get("/v1/models")
        assert (status, reported["error"]["code"]) == (503, "too_many_connections")
        assert statuses(server.raw(head(sized(BODY)) + BODY)) == [503]
    assert within(lambda: server.get("/v1/models")[0] == 200)


def test_item_3_heads_have_a_time_limit(tmp_path):
    limit_s = 1.0
    with scripted(tmp_path, limits={"head_timeout": limit_s}) as server:
        started = time.monotonic()
        with connect(server) as silent, connect(server) as slow:
            slow.sendall(b"GET /live HTTP/1.1\r\nx: ")
            slow.settimeout(0.05)
            data = b""
            while not data:
                with contextlib.suppress(TimeoutError):
                    slow.sendall(b"a")
                    data = slow.recv(4096)
            assert silent.recv(1) == b""
        assert time.monotonic() - started > limit_s
        assert statuses(data) == [408]
        # The limit is of each head, whatever came before.
        assert statuses(server.raw(HIDDEN + b"GET /live HT")) == [200, 408]
