"""The example on Flower itself: a simulation of eight nodes, and, where slow tests are asked for, a deployment."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flower_processes import events_of, free_port, listens, running, said_by, server_of, wait_for
from places import HERE


def by_node(events):
    tally = defaultdict(Counter)
    for event in events:
        tally[event["node"]][event["kind"]] += 1
    return tally


def test_eight_simulated_nodes_half_of_them_broken_or_malicious(flower):
    """Three of the four that misbehave cannot be told of by mistake: Flower itself delivers their errors."""
    port = free_port()
    (flower / "home" / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    command = ["flower-superlink", "--insecure", "--simulation", "--host=127.0.0.1", f"--port={port}"]
    updates = 80
    settings = f"updates={updates} evaluations=4 capacity=8 malicious=0.5 degree=0.1 checkpoint-every=50 slowest=1.0"
    settings += " ttl=1200.0 patience=1200.0"  # a busy machine needs minutes to start the actors: nobody has vanished
    fleet = "num-supernodes=8 client-resources-num-cpus=1 init-args-num-cpus=2"  # two at once: each imports torch
    run = ["flwr", "run", "app", "here", "--stream", "--federation-config", fleet, "--run-config"]
    run.append(settings + f' attack="sign-flip,crash,garbage,not-finite" out="{flower}/results"')
    with running(command, flower / "superlink.log"):
        wait_for(lambda: listens(port), 60, "the SuperLink answers")
        done = subprocess.run(run, cwd=flower, capture_output=True, text=True, timeout=1500)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "curve, events and checkpoint" in said, said[-3000:]

    results = flower / "results" / "secureafl"
    events = events_of(results)
    tally = by_node(events)
    assert len(tally) == 8 and all(counts["joined"] == 1 for counts in tally.values())
    assert sum(counts["accepted"] + counts["rejected"] for counts in tally.values()) == updates

    def those(kind):
        return [node for node, counts in tally.items() if counts[kind]]

    (crashing,), broken = those("failed"), those("garbage")
    assert set(tally[crashing]) == {"joined", "failed"} and len(broken) == 2
    assert all(set(tally[node]) == {"joined", "garbage"} for node in broken)
    assert "this client breaks down" in next(e["reason"] for e in events if e["kind"] == "failed")
    reasons = {e["node"]: e["reason"] for e in events if e["kind"] == "garbage"}
    shape, finite = sorted(reasons.values())
    assert "0.weight must be (30, 1, 3, 3) float32" in shape and finite == "the update is not finite"
    honest = {event["node"] for event in events if event["metrics"].get("malicious") == 0}
    assert len(honest) == 4 and all(tally[node]["accepted"] > tally[node]["rejected"] for node in honest)
    # Asynchronous: fast clients overtake slow ones, so the staleness varies and the order is no fixed cycle.
    judged = [event for event in events if event["staleness"] is not None]
    assert len({event["staleness"] for event in judged}) >= 4
    order = [event["node"] for event in judged]
    assert len({tuple(order[i : i + 5]) for i in range(0, len(order) - 4, 5)}) > 2
    assert "staleness 0.." in said or "staleness 1.." in said

    curve = [line.split(",") for line in (results / "curve.csv").read_text().splitlines()]
    assert curve[0] == ["updates", "seconds", "error"] and [row[0] for row in curve[1:]] == ["20", "40", "60", "80"]
    assert float(curve[-1][2]) < 0.7  # a model that knows nothing has 0.9
    assert (results.parent / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = said[said.index("client         is") :].splitlines()[1:9]
    assert [sum(word in row for row in table) for word in ("honest", "malicious", "unknown")] == [4, 1, 3], table


@pytest.mark.slow
def test_three_supernodes_with_tls_and_keys_one_dies_and_the_server_is_killed(flower):
    """The model goes on from the checkpoint, every node in its slot; the dead is noticed, a stranger stays outside."""
    sys.path.insert(0, str(flower / "app"))
    from deploy import Deployment

    results = flower / "out" / "secureafl"
    config = f'capacity=3 malicious=0.34 checkpoint-every=2 evaluations=1 ttl=60.0 updates=100 out="{flower}/out"'
    run = ["flwr", "run", ".", "loopback", "--stream", "--run-config"]
    with Deployment(flower / "home", 3, free_port()) as deployment:
        where = {"cwd": flower / "app", "env": deployment.environment}
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", flower / "home" / "node-9"], check=True)
        deployment.supernode(9)  # with a key that nobody has registered
        with running([*run, config], flower / "first.log", **where):
            wait_for(lambda: len(said_by(results)) == 3, 400, "every client has answered")
            heard = events_of(results)[-1]["version"]
            wait_for(lambda: events_of(results)[-1]["version"] > heard + 2, 200, "a checkpoint knows them all")
            os.kill(server_of(flower), signal.SIGKILL)
        before, clients = events_of(results), said_by(results)
        deployment.started["node-0"].kill()
        with running([*run, config + " resume=true"], flower / "second.log", **where):

            def noticed():
                again = by_node(events_of(results)[len(before) :])
                return again[clients[0]].keys() & {"left", "vanished"} and all(
                    again[clients[k]].keys() & {"accepted", "rejected"} for k in (1, 2)
                )

            wait_for(noticed, 400, "the living go on and the dead is noticed")
    again = events_of(results)[len(before) :]
    rounds = [event["version"] for event in again if event["kind"] in ("accepted", "rejected")]
    assert rounds[0] % 2 == 1 and rounds[0] > heard and rounds == list(range(rounds[0], rounds[0] + len(rounds)))
    slots = {event["node"]: event["slot"] for event in before}
    assert sorted(slots.values()) == [0, 1, 2]  # and nobody waits: the stranger is no node
    assert all(event["slot"] == slots[event["node"]] for event in again)
    assert not any("first contact" in event["reason"] for event in again)  # all are known
    assert f"at version {rounds[0] - 1}, room for 3 clients" in (flower / "second.log").read_text()


@pytest.mark.slow
def test_a_deployed_server_that_is_killed_loses_no_upload(tmp_path):
    command = [
        sys.executable,
        HERE / "killed_fleet.py",
        "--kills",
        "3",
        "--folder",
        tmp_path / "fleet",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3000)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, found["kills"], found["lost"]) == (0, 3, []) and found["uploads"] >= 5
