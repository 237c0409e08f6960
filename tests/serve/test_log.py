"""Proves what an operator reads (issue 50, item 7): every line of the form json is an object, the
start has its phases, an exit and a restart a line each, throughput one where it is asked for, and a
collector gets a span of each request.
"""

import http.server
import json
import os
import signal
import threading

import pytest

from dllm_jax.cli.entry import main
from dllm_jax.serve.logs import Log, Printed
from tests.serve.driving import scripted, within

TRACE, PARENT = "a" * 32, "b" * 16


def objects(server):
    """The log; every line must be an object."""
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def test_what_is_printed_is_a_line_of_the_log(capsys):
    printed = Printed(Log("json"))
    print("note: 8 bits\na line of a library\n\nerror: it", file=printed, end="")
    print(" ended", file=printed)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(one["event"], one["level"], one["said"]) for one in lines] == [
        ("note", "info", "8 bits"),
        ("stderr", "info", "a line of a library"),
        ("error", "error", "it ended"),
    ]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--otlp-traces-endpoint", "collector:4318"], 2, "is no address of HTTP"),
        (["--prot", "1"], 2, "did you mean '--port'?"),
        (["--model", "/nowhere"], 1, "'/nowhere' does not exist"),
        (["--draft", "builtin:nope"], 1, "draft: 'builtin:nope' is no built-in model"),
    ],
)
def test_a_refused_command_line_is_a_line_of_the_log_too(capsys, words, status, said):
    assert main(["serve", "--log-format=json", *words]) == status
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())  # no port was opened
    assert (line["event"], said in line["said"]) == ("error", True)


def test_a_start_its_restart_its_throughput_and_its_exit(tmp_path):
    with scripted(tmp_path, restart_engine=1, log_stats_every=0.1) as server:
        server.chat(max_tokens=400)
        assert within(lambda: any(one["generated_tokens_per_s"] for one in server.lines("stats")))
        os.kill(server.child(), signal.SIGKILL)
        assert within(lambda: len(server.lines("ready")) == 2)
        assert within(lambda: server.metric("dllm_kv_cache_pages") == 8)
        assert server.stop() == 0
        lines = objects(server)
    events = [one["event"] for one in lines]
    assert [one for one in events if one not in ("request", "stats")] == (
        ["listening", "start", "ready", "restart", "start", "ready", "draining", "exit"]
    )
    by_event = {one["event"]: one for one in lines}
    assert by_event["start"]["phase"] == "load"
    assert by_event["ready"].keys() >= {"model", "family", "strategy", "num_slots", "seconds"}
    assert (by_event["restart"]["level"], by_event["restart"]["left"]) == ("warning", 0)
    end = by_event["exit"]
    assert (end["status"], end["reason"], end["restarts"]) == (0, "SIGTERM", 1)


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the spans of each OTLP request."""

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["content-length"]))
        asked = ExportTraceServiceRequest.FromString(body)
        for resource in asked.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_collector_gets_a_span_of_each_request(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.spans = []
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with scripted(tmp_path, otlp_traces_endpoint=endpoint) as server:
            body = {"messages": [{"role": "user", "content": "sesame"}], "max_tokens": 8}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            assert server.post("/v1/chat/completions", body, headers)[0] == 200
            assert server.post("/v1/chat/completions", {}, headers)[0] == 400
            assert server.stop() == 0
        collector.shutdown()
    good, bad = sorted(collector.spans, key=lambda one: one.start_time_unix_nano)
    assert {one.trace_id.hex() for one in (good, bad)} == {TRACE}
    assert {one.parent_span_id.hex() for one in (good, bad)} == {PARENT}
    said = {one.key: one.value for one in good.attributes}
    assert said["gen_ai.usage.output_tokens"].int_value == 8
    assert said["http.route"].string_value == good.name == "/v1/chat/completions"
    assert good.end_time_unix_nano > good.start_time_unix_nano
    assert {one.key: one.value for one in bad.attributes}[
        "http.response.status_code"
    ].int_value == 400
    assert "sesame" not in str(collector.spans)


@pytest.mark.long
def test_a_collector_that_is_away_costs_no_request(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    with scripted(tmp_path, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        assert server.chat(max_tokens=8)[0] == 200
        assert server.stop() == 0
        objects(server)
