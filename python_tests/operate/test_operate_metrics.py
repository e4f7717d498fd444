"""Metrics, traces, dashboard and their page: they agree with the server and with each other, and stay bounded."""

import csv
import importlib
import json
import re
import socket
import sys
import threading
import time
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from places import ROOT

from secureafl_ext import SecureAFL
from secureafl_ext.operate import KINDS, Look, Queue, Verdict, Watched
from secureafl_ext.operate.json_log import look_fields, verdict_fields
from secureafl_ext.operate.tracing import Traces
from secureafl_ext.operate.verdict import UPLOADS

PAGE = (ROOT / "docs" / "guides" / "metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "examples" / "deployment" / "grafana" / "secureafl.json").read_text())
N, D = 4, 8
NAME = re.compile(r"\bsecureafl_\w+")


@pytest.fixture
def prometheus():
    pytest.importorskip("prometheus_client", reason="the extra `operate` is not installed")
    return importlib.import_module("secureafl_ext.operate.prometheus")


def rounds(server, count=40, device="cpu"):
    """Accepted, rejected and stale uploads, an event, an evaluation."""
    random = torch.Generator().manual_seed(0)
    for t in range(count):
        update = 1 + 0.1 * torch.randn(D, generator=random)
        server.submit(
            t % N, (update / 0 if t % 11 == 7 else update).to(device), max(0, server.version - 12 * (t % 9 == 8))
        )
    server.event(SimpleNamespace(kind="joined", slot=1, node=77, version=server.version, reason=""))
    server.evaluated(0.25)


def exported(registry):
    return {sample.name for metric in registry.collect() for sample in metric.samples}


def make(device="cpu"):
    return SecureAFL(torch.zeros(D, device=device), N, rule="support", memory=0, max_staleness=5)


def test_metrics_are_those_of_the_server(prometheus, device):
    metrics, queue = prometheus.Prometheus(), Queue(6, 3, 56, 0.5, 0, 1, 12)
    with Watched(make(device), [metrics], every=60) as server:
        server.queue = lambda: queue
        rounds(server, device=device)
    value, stats, look = metrics.registry.get_sample_value, server.stats(), server.look()
    for kind in UPLOADS:
        assert value("secureafl_uploads_total", {"kind": kind}) == stats[kind]
        of_clients = [value("secureafl_client_uploads_total", {"client": str(k), "kind": kind}) for k in range(N)]
        assert sum(count or 0 for count in of_clients) == stats[kind]
    assert stats["accepted"] and stats["rejected"] and stats["stale"]
    assert value("secureafl_events_total", {"kind": "joined"}) == 1
    assert value("secureafl_events_total", {"kind": "failed"}) == 0  # there before the first
    assert value("secureafl_staleness_count") == value("secureafl_submit_seconds_count") == 40
    assert value("secureafl_staleness_bucket", {"le": "0.0"}) == stats["accepted"] + stats["rejected"]
    assert 0 < value("secureafl_factor_count", {"kind": "accepted"}) <= stats["accepted"]
    for state in prometheus.STATES:
        assert value("secureafl_clients", {"state": state}) == stats[state]
    assert value("secureafl_version") == server.version
    assert value("secureafl_threshold") == look.threshold
    assert value("secureafl_model_error") == 0.25
    assert abs(value("secureafl_look_timestamp_seconds") - look.at) < 60
    for part in prometheus.PLACES:
        assert value("secureafl_queue", {"part": part}) == getattr(queue, part)
    assert value("secureafl_queue_bytes") == 3 * 56 and value("secureafl_queue_wait_seconds") == 0.5
    for client in range(N):
        assert value("secureafl_client_weight", {"client": str(client)}) == look.weights[client]
        assert value("secureafl_client_left_out", {"client": str(client)}) == look.left_out[client]


def test_series_and_sums_are_bounded_whatever_clients_do(prometheus):
    metrics = prometheus.Prometheus(clients=2)
    hostile = 'evil"} 1\nup 0 #'
    batch = [Verdict(1.0, "accepted", k, hostile, k, 0, 1e300, 0.1, hostile) for k in range(1_000)]
    metrics.verdicts([*batch, Verdict(1.0, "waiting", None, hostile, 1_000)])
    flags = np.ones(1_000, dtype=bool)
    metrics.look(Look(1.0, 1_000, {"present": 1_000}, flags, flags, flags, flags / 1_000, flags, float("inf")))
    metrics.dropped(3)
    text = prometheus_text(metrics)
    assert "evil" not in text and len(text.splitlines()) < 250
    assert set(re.findall(r'client="(\w+)"', text)) == {"0", "1"}
    value = metrics.registry.get_sample_value
    assert value("secureafl_factor_sum", {"kind": "accepted"}) == 1_000 * prometheus.LARGEST_FACTOR
    assert value("secureafl_dropped_verdicts_total") == 3 and value("secureafl_threshold") == float("inf")
    assert "client=" not in prometheus_text(prometheus.Prometheus(clients=0))


def prometheus_text(metrics):
    from prometheus_client import generate_latest

    return generate_latest(metrics.registry).decode()


def test_two_servers_need_two_registries(prometheus):
    first = prometheus.Prometheus()
    before = exported(first.registry)
    with pytest.raises(ValueError, match="Prometheus: registry must have no metrics of another server, got one with"):
        prometheus.Prometheus(first.registry)
    assert exported(first.registry) == before == exported(prometheus.Prometheus().registry)
    with pytest.raises(ValueError, match="Prometheus: clients must be a whole number, 0 or more, got -1"):
        prometheus.Prometheus(clients=-1)


def test_a_scrape_over_http_until_the_end(prometheus):
    metrics, before = prometheus.Prometheus(), threading.active_count()
    with Watched(make(), [metrics], every=60) as server:
        address = metrics.serve(port=0)
        assert address.startswith("http://127.0.0.1:") and address.endswith("/metrics")
        rounds(server)
        assert server.flush()
        with urlopen(address, timeout=30) as answer:
            text = answer.read().decode()
        assert f"secureafl_version {server.version}.0" in text and 'secureafl_uploads_total{kind="stale"}' in text
        with pytest.raises(ValueError, match=r"Prometheus\.serve: must be called once, .* it serves " + address):
            metrics.serve(port=0)
    with pytest.raises(OSError):
        urlopen(address, timeout=30)
    metrics.close()
    assert threading.active_count() == before
    for bad in ({"port": 70_000}, {"port": "x"}, {"host": 7}):
        with pytest.raises(ValueError, match=rf"Prometheus\.serve: {next(iter(bad))} must be "):
            metrics.serve(**bad)


def test_silent_connections_are_few_and_end(prometheus, monkeypatch):
    monkeypatch.setattr(prometheus, "LONGEST_CONNECTION", 0.2)
    metrics = prometheus.Prometheus()
    port = int(re.search(r":(\d+)/", metrics.serve(port=0))[1])
    most = prometheus.MOST_CONNECTIONS
    silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(most + 1)]
    for connection in silent:  # the last is refused at once, the others are closed in their silence
        assert connection.recv(1) == b""
        connection.close()
    metrics.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "secureafl-metrics"]


def test_connections_that_trickle_end_and_scrapes_go_on(prometheus, monkeypatch):
    monkeypatch.setattr(prometheus, "LONGEST_CONNECTION", 0.5)
    metrics = prometheus.Prometheus()
    address = metrics.serve(port=0)
    port = int(re.search(r":(\d+)/", address)[1])
    slow = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(prometheus.MOST_CONNECTIONS)]
    for _ in range(100):
        for connection in list(slow):
            try:
                connection.sendall(b"G")
            except OSError:
                connection.close()
                slow.remove(connection)
        time.sleep(0.05)
        if not slow:
            break
    assert not slow, "they are cut by their age"

    def wait_until(are_open):  # the threads have noticed
        while len(metrics._endpoint._open) != are_open:
            time.sleep(0.001)

    wait_until(0)
    with urlopen(address, timeout=30) as answer:
        assert answer.status == 200
    wait_until(0)
    metrics._endpoint.seconds = 60.0
    with socket.create_connection(("127.0.0.1", port), timeout=30) as idle:
        wait_until(1)
        metrics.close()
        assert idle.recv(1) == b"", "closing ends what is open"


def test_every_metric_is_documented_and_every_query_has_metrics(prometheus):
    metrics = prometheus.Prometheus()
    with Watched(make(), [metrics], every=60) as server:
        rounds(server)
    names = exported(metrics.registry)
    table = dict(re.findall(r"^\| `(secureafl_\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
    families = {
        metric.name + "_total" * (metric.type == "counter"): metric.type for metric in metrics.registry.collect()
    }
    assert table == families
    targets = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = {name for target in targets for name in NAME.findall(target["expr"])}
    asked |= {name for variable in DASHBOARD["templating"]["list"] for name in NAME.findall(json.dumps(variable))}
    asked |= set(NAME.findall(PAGE.split("```yaml")[1].split("```")[0]))
    assert asked <= names, asked - names
    shown = " ".join(target["expr"] for target in targets)
    for wanted in (
        "uploads_total",
        "staleness_bucket",
        "submit_seconds_bucket",
        "clients",
        "threshold",
        "factor_bucket",
    ):
        assert f"secureafl_{wanted}{{" in shown


def test_the_dashboard_is_whole():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels) >= 7
    places = [panel["gridPos"] for panel in panels]
    assert len({(place["x"], place["y"]) for place in places}) == len(panels)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    sources = {json.dumps(each["datasource"]) for panel in panels for each in (panel, *panel["targets"])}
    assert sources == {'{"type": "prometheus", "uid": "${datasource}"}'}
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(panels)))
    assert used == variables and DASHBOARD["schemaVersion"] >= 39


def test_alert_rules_are_rules():
    yaml = pytest.importorskip("yaml")
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (group,) = yaml.safe_load(block)["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 5
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "annotations"} and rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_page_has_every_field_and_kind_and_its_code_runs(prometheus, tmp_path, monkeypatch):
    verdict = Verdict(1.0, "accepted", 0, "", 1)
    flags = np.ones(1, dtype=bool)
    look = Look(1.0, 1, {}, flags, flags, flags, flags / 1, None, 1.0)
    for event, fields in (("verdict", verdict_fields(verdict)), ("look", look_fields(look))):
        row = re.search(rf"^\| `{event}` \| (.*) \|$", PAGE, re.MULTILINE)[1]
        assert set(fields) - {"event"} <= set(re.findall(r"`(\w+)`", row))
    assert all(re.search(rf"[:,] {kind}\b", PAGE) for kind in KINDS)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block.replace("port=9464", "port=0"), "metrics.md", "exec"), {})
    assert (tmp_path / "server.jsonl").read_text().count('"event":"verdict"') == 1


class Tracer:
    def __init__(self):
        self.spans = []

    def start_span(self, name, start_time, attributes):
        self.spans.append([name, start_time, None, attributes])
        return SimpleNamespace(end=lambda end_time: self.spans[-1].__setitem__(2, end_time))


def test_a_span_per_upload():
    tracer = Tracer()
    with Watched(make(), [Traces(tracer)], every=0, names={1: "one\n"}) as server:
        rounds(server)
    assert len(tracer.spans) == 40
    name, begin, end, attributes = tracer.spans[1]
    assert name == "secureafl.submit" and 0 <= end - begin < 60e9 and begin > 1e18
    assert attributes["secureafl.who"] == "one " and attributes["secureafl.client"] == 1
    assert {attributes["secureafl.kind"] for *_, attributes in tracer.spans} == {"accepted", "rejected", "stale"}
    assert all(value is not None for *_, attributes in tracer.spans for value in attributes.values())


def test_spans_are_those_of_opentelemetry():
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    Traces(provider.get_tracer("test")).verdicts([Verdict(5.0, "stale", 3, "", 7, staleness=9, seconds=0.5)])
    (span,) = kept.get_finished_spans()
    assert (span.start_time, span.end_time, span.parent) == (4_500_000_000, 5_000_000_000, None)
    assert dict(span.attributes) == {
        "secureafl.kind": "stale",
        "secureafl.client": 3,
        "secureafl.version": 7,
        "secureafl.staleness": 9,
    }
    Traces()  # of the global provider


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ModuleNotFoundError, match=r"Traces needs the package opentelemetry-sdk: .*\[otel\]"):
        Traces()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "secureafl_ext.operate.prometheus", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs prometheus_client: .*\[operate\]"):
        importlib.import_module("secureafl_ext.operate.prometheus")


def test_the_benchmark_compares_like_with_like(prometheus, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    operate = importlib.import_module("operate")
    arguments = ["operate.py", "--sizes", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    operate.main()
    text = (tmp_path / "operate.md").read_text()
    assert capsys.readouterr().out == text and "python bench/operate.py" in text and "JsonLog, a look" in text
    with (tmp_path / "operate.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["table"], row["how"]) for row in rows] == [
        (rule, how) for rule in ("median", "support") for how in ("alone", "watched")
    ]
    assert all(float(row["ms"]) > 0 for row in rows)
    alone, slower = operate.Block(0.010, 0.010), operate.Block(0.011, 0.012, 0.0001, 0.0002)
    assert operate.added([alone], [slower], 0.02)[-2:] == ["4.00", "20.00"]
