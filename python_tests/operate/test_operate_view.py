"""View: the state of the live page is right, plain, and of bounded size."""

import json
import math
import time

import numpy as np
import pytest

from secureafl_ext.operate import KINDS, Look, Verdict, View, fleet
from secureafl_ext.operate.buckets import COUNT, Buckets
from secureafl_ext.operate.fleet import ALL_HISTORIES, HISTORY, MOST_CLIENTS
from secureafl_ext.operate.verdict import MEAN_UPDATES
from secureafl_ext.operate.view import MOST_ERRORS, MOST_NAMED, MOST_ROWS, TIMELINE

EVIL = '<img src=x onerror="document.title=1">'


def told(client, kind="accepted", at=1000.0, **more):
    return Verdict(at, kind, client, **{"who": "", "version": 1, "staleness": 2, "factor": 1.5, **more})


def looked(n, left_out=(), at=1000.0, version=5, weights=None, **more):
    without = np.isin(np.arange(n), list(left_out))
    given = {name: np.asarray(more.get(name, np.ones(n, bool))) for name in ("seen", "live", "present")}
    weights = np.where(without, 0.0, 1 / n) if weights is None else np.asarray(weights)
    agreement = {name: more.get(name) for name in MEAN_UPDATES}
    return Look(at, version, {}, **given, weights=weights, left_out=without, threshold=math.inf, **agreement)


def plain(view, **arguments):
    """A snapshot, as JSON gives it back."""
    return json.loads(json.dumps(view.snapshot(**arguments), allow_nan=False))


def order(view, **arguments):
    return [row["client"] for row in plain(view, **arguments)["clients"]["rows"]]


def test_every_verdict_counts_for_its_client():
    view = View("a fleet")
    view.verdicts([told(3, who="three"), told(3, "rejected", staleness=4, factor=9.0, reason="rejected: far")])
    view.verdicts([told(0, "joined", staleness=None, factor=None), told(None, "waiting", staleness=None)])
    state = plain(view)
    assert (state["title"], state["version"], state["clients"]["total"]) == ("a fleet", 1, 2)
    assert state["totals"] == {"accepted": 1, "rejected": 1, "joined": 1, "waiting": 1}
    row = state["clients"]["rows"][0]
    assert (row["client"], row["name"], row["counts"]) == (3, "three", {"accepted": 1, "rejected": 1})
    assert (row["staleness"], row["factor"], row["weight"], row["state"]) == (3.0, 9.0, None, "new")
    history = view.client(3)["history"]
    assert [entry["kind"] for entry in history] == ["rejected", "accepted"]
    assert history[0] == {
        "at": 1000.0,
        "kind": "rejected",
        "version": 1,
        "staleness": 4,
        "factor": 9.0,
        "reason": "rejected: far",
    }
    assert view.client(1) is None and view.client(-1) is None and view.client(10**8) is None


def test_the_state_of_a_client_is_that_of_the_last_look():
    view, n = View(), 6
    seen = np.arange(n) != 5
    live = np.isin(np.arange(n), [0, 1, 2])
    present = np.isin(np.arange(n), [0, 1])
    view.verdicts([told(4, "left"), told(5, "joined")])
    view.look(looked(n, left_out=[1], seen=seen, live=live, present=present))
    states = {row["client"]: row["state"] for row in plain(view)["clients"]["rows"]}
    assert states == {0: "counts", 1: "left out", 2: "on probation", 3: "expired", 4: "left", 5: "new"}
    assert plain(view)["states"]["left out"] == 1
    view.verdicts([told(4)])
    assert view.client(4)["state"] == "new", "it has come back, and no look has seen it yet"


def test_a_client_is_named_when_its_weight_is_low_for_ten_looks():
    view = View()
    view.verdicts([told(2, who="culprit")])
    for k in range(20):
        without = {0: [1, 2], 1: [2, 3], 2: [2], 3: [2]}[k % 4]  # now and then an honest one too
        view.look(looked(6, without, at=1000.0 + k, version=10 * k, present=np.arange(6) != 5))
    why = "its weight is 0.00 of the mean"
    assert plain(view)["named"] == [
        {"client": 2, "name": "culprit", "at": 1009.0, "version": 90, "why": why, "now": True}
    ]
    found = view.client(2)
    assert (found["named_at"], found["named_version"], found["left_out"]) == (1009.0, 90, 1.0)
    assert found["reason"] == why and order(view)[0] == 2 and view.client(1)["left_out"] == 0.25
    for k in range(20):
        view.look(looked(6, at=2000.0 + k))
    assert [moment["now"] for moment in plain(view)["named"]] == [False] and view.client(2)["named_at"] == 1009.0


def agreeing(looks, **agreement):
    """A view after so many looks. agreement: MEAN_UPDATES"""
    view, n = View(), len(next(iter(agreement.values())))
    for k in range(looks):
        view.look(looked(n, at=1000.0 + k, **{name: np.array(values) for name, values in agreement.items()}))
    return view, {moment["client"]: moment["why"] for moment in plain(view)["named"]}


def test_a_client_is_named_when_its_updates_point_against_the_others():
    others = [0.3, 0.2, 0.1, 0.25, -0.5, 0.0, math.nan, 0.15]
    assert agreeing(4, with_others=others)[1] == {}, "four looks are too few"
    view, named = agreeing(5, with_others=others)
    assert named == {4: "its updates point against those of the others, cosine -0.50"} and order(view)[0] == 4
    assert view.client(4)["with_others"] == -0.5 and view.client(6)["with_others"] is None


@pytest.mark.parametrize("others", [[-0.3] * 8, [0.3, -0.3] * 4, [0.2] * 7 + [-0.19]], ids=["all", "half", "little"])
def test_nobody_is_named_where_the_fleet_disagrees(others):
    """Data that differ much, or a model that has converged: no majority that somebody could be against."""
    assert agreeing(30, with_others=others)[1] == {}


def test_a_client_is_named_when_its_updates_have_no_direction():
    _, named = agreeing(10, with_itself=[1.0, 0.5, 1.2, 0.05, 0.21, math.nan])
    assert named == {3: "its updates have no direction in common, mean norm 0.05 of the median client's"}


def test_a_group_of_clients_that_send_alike_is_named():
    group = [5.0, 5.0, 6.0, 8.0, 4.0, 5.0, 5.0, 5.0, math.nan, 9.0, 9.0, 9.0]
    assert agreeing(9, group=group)[1] == {}, "nine looks are too few"
    why = "it is one of 9 clients that send similar updates, far more than usual"
    assert agreeing(10, group=group)[1] == dict.fromkeys((9, 10, 11), why)
    assert agreeing(30, group=[50.0] * 10)[1] == {}, "all clients have the same data"


def rounds(view, shares, start, count=40):
    """Uploads of all clients in turn, a turn per second; shares: of refused ones, by client."""
    for k in range(start, start + count):
        kinds = ["rejected" if int((k + 1) * share) > int(k * share) else "accepted" for share in shares]
        view.verdicts([told(client, kind, 1000.0 + k, version=k) for client, kind in enumerate(kinds)])


@pytest.mark.parametrize("usual", [0.0, 0.05, 0.2])
def test_a_client_is_named_when_it_is_refused_far_more_often_than_others(usual):
    view, shares = View(), [usual] * 9
    shares[3], shares[7] = 0.7, 1.0
    rounds(view, shares, 0)
    named = plain(view)["named"]
    assert {moment["client"] for moment in named if moment["now"]} == {3, 7} == {m["client"] for m in named}
    assert view.client(7)["named_version"] < 15 and set(order(view)[:2]) == {3, 7}
    assert view.client(7)["reason"] == "100% of its last uploads were refused" and view.client(0)["reason"] == ""
    shares[3] = shares[7] = usual
    rounds(view, shares, 40, 200)
    named = plain(view)["named"]
    assert [moment["now"] for moment in named] == [False] * 2, "what was long ago is no reason"
    assert view.client(7)["named_at"] is not None


@pytest.mark.parametrize("shares", [[0.1] * 8 + [0.2], [1.0] * 9, [0.5] * 8 + [1.0], [0.0] * 8 + [0.1]], ids=str)
def test_nobody_is_named_for_a_difference_that_may_be_chance(shares):
    view = View()
    rounds(view, shares, 0, 200)
    assert plain(view)["named"] == []


@pytest.mark.parametrize("ahead", [1.0, -1.0, 5.0], ids=["slow", "back", "far"])
def test_a_log_with_seconds_between_all_lines_is_not_compared_at_each(monkeypatch, ahead):
    compared, name = [], fleet.Fleet.name
    monkeypatch.setattr(fleet.Fleet, "name", lambda *given: compared.append(given) or name(*given))
    view, n = View(), 2_000
    view.verdicts([told(n - 1, at=5000.0)])
    for k in range(200):
        at = 5000.0 + (k % 2 if ahead < 0 else k * ahead)
        view.verdicts([told(k, at=at)])
        view.look(looked(1, at=at))
    assert 10 <= len(compared) < 50
    view.look(looked(n, at=9000.0))
    assert compared[-1][1] == 9000.0, "a look at everybody is always compared"


def test_the_suspicious_come_first():
    view, n = View(), 6
    view.verdicts(
        [told(0)] * 4 + [told(1, "rejected"), told(1)] + [told(2, "garbage")] * 3 + [told(3), told(4), told(5)]
    )
    view.look(looked(n, [5]))
    view.look(looked(n, [4], weights=[0.3, 0.2, 0.2, 0.1, 0.0, 0.2]))
    # Left out now; left out before; share of refused uploads; low weight.
    assert order(view) == [4, 5, 2, 1, 3, 0]
    assert view.suspects() == [4, 5, 2, 1, 3, 0] and view.suspects(2, 1) == [4, 5, 0]
    assert order(view, start=1, count=2) == [5, 2] and order(view, start=99) == []
    assert order(view, search="LEFT out") == [4] and order(view, search="3") == [3]


def test_a_forgotten_number_starts_anew():
    view = View()
    view.verdicts([told(1, "rejected", who="old")] * 9 + [told(0)] * 9 + [told(2, at=1002.0)] * 9)
    view.look(looked(2, [1]))
    view.verdicts([told(1, "forgotten", who="old")])
    assert order(view) == [0, 2] and view.client(1) is None
    view.verdicts([told(1, who="new")])
    found = view.client(1)
    assert (found["name"], found["counts"], found["named_at"], len(found["history"])) == (
        "new",
        {"accepted": 1},
        None,
        1,
    )
    assert [(moment["name"], moment["now"]) for moment in plain(view)["named"]] == [("old", False)]


def sizes(view):
    """How much a view holds, counted."""
    fleet = view.fleet
    arrays = sum(values.nbytes for values in vars(fleet).values() if isinstance(values, np.ndarray))
    series = view._series
    buckets = sum(v.nbytes for part in (series.sums, series.largest, series.last) for v in part.values())
    lists = [len(view._timeline), len(view._recent), len(view._errors), len(view._named), len(fleet.names)]
    return [arrays, buckets, sum(map(len, fleet.histories.values())), len(fleet.histories), *lists]


def fill(view, n, laps, uploads):
    """Sizes after every lap."""
    found = []
    for lap in range(laps):
        for k in range(4):
            at = 1000.0 + 1000 * lap + 250 * k
            some = range(k * uploads // 4, (k + 1) * uploads // 4)
            view.verdicts([told(i % n, "rejected", at + i / uploads, reason=f"reason {i}") for i in some])
            view.look(looked(n, range(k * 100), at + 250))
            for i in range(MOST_ERRORS // 4):
                view.evaluated(at + i, k, 0.5)
        found.append(sizes(view))
    return found


def check_sizes(view, n, found, entries_at_most):
    assert found[-2] == found[-1], "as many again add nothing"
    arrays, buckets, entries, histories, timeline, _, errors, named, names = found[-1]
    assert arrays < 10e6 and buckets < 1e5
    assert entries <= entries_at_most and histories == names == n
    assert timeline == TIMELINE and errors <= MOST_ERRORS and named <= MOST_NAMED
    state = plain(view)
    assert len(state["clients"]["rows"]) == MOST_ROWS and len(json.dumps(state)) < 400_000


def test_memory_does_not_grow_with_uploads(monkeypatch):
    monkeypatch.setattr(fleet, "ALL_HISTORIES", 2**15)
    view, n = View(), 10_000
    found = fill(view, n, laps=4, uploads=n)
    check_sizes(view, n, found, 2**15)
    assert plain(view)["totals"]["rejected"] == 4 * n


@pytest.mark.slow
def test_memory_does_not_grow_in_a_million_uploads():
    view, n = View(), 10_000
    check_sizes(view, n, fill(view, n, laps=5, uploads=200_000), ALL_HISTORIES)


def test_few_clients_have_long_histories_and_many_share_the_room():
    view = View()
    view.verdicts([told(0, version=k) for k in range(500)])
    assert [entry["version"] for entry in view.client(0)["history"]] == list(range(499, 499 - HISTORY, -1))
    view.verdicts([told(k) for k in range(4096)])
    kept = ALL_HISTORIES // 4096
    assert len(view.client(0)["history"]) == kept, "one flood does not push out the history of others"
    view.verdicts([told(0)] * 1000)
    assert len(view.client(0)["history"]) == kept and len(view.client(4095)["history"]) == 1


def test_numbers_that_no_server_has_are_counted_and_not_kept():
    view = View()
    view.verdicts([told(MOST_CLIENTS), told(10**15), told(-1), told(MOST_CLIENTS - 1)])
    view.verdicts([told(0, at=math.nan), told(0, at=1e300), told(0, at=-1.0), told(0, "no such kind")])
    state = plain(view)
    assert state["totals"] == {"accepted": 4} and state["clients"]["total"] == 1 and state["damaged"] == 4
    assert state["timeline"]["client"] == [MOST_CLIENTS - 1]
    with pytest.raises(ValueError, match=r"View.look: look must have one entry per client in every array, got \[3, 2"):
        view.look(Look(1.0, 1, {}, np.ones(3), np.ones(2), np.ones(3), np.ones(3), None, 0.0))
    assert plain(view)["states"]["counts"] == 0, "nothing of it was taken"


def test_names_and_reasons_are_cut():
    view = View("t" * 1000)
    view.verdicts([told(0, "failed", who=EVIL + "x" * 10_000, reason=EVIL + "y" * 10_000)])
    found = view.client(0)
    assert found["name"].startswith(EVIL) and len(found["name"]) < 200 > len(found["history"][0]["reason"])
    assert len(plain(view)["title"]) < 200


@pytest.mark.parametrize("seconds", [1.0, 1e3, 1e7])
def test_buckets_hold_everything_whatever_the_time(seconds):
    buckets = Buckets(["count"], ["high"], ["last"])
    for k in range(1000):
        i = buckets.bucket(5000.0 + seconds * k / 1000)
        buckets.sums["count"][i] += 1
        buckets.largest["high"][i] = np.fmax(buckets.largest["high"][i], k)
        buckets.last["last"][i] = k
    used = buckets.used()
    assert COUNT / 2 <= used <= COUNT or seconds == 1.0
    assert buckets.sums["count"].sum() == 1000 and buckets.sums["count"][used:].sum() == 0
    assert np.nanmax(buckets.largest["high"]) == buckets.last["last"][used - 1] == 999
    assert (np.diff(buckets.times()) > 0).all()
    rate = buckets.sums["count"][: used - 1] / buckets.seconds()[: used - 1]
    assert rate.mean() == pytest.approx(1000 / seconds, rel=0.05)


def test_series_have_rates_staleness_threshold_and_errors():
    view = View()
    view.verdicts([told(0, at=1000 + i / 10, staleness=i % 3) for i in range(600)])
    view.look(Look(1060.0, 600, {}, *[np.ones(2, bool)] * 3, np.ones(2) / 2, None, 3.5))
    view.evaluated(1060.0, 600, 0.25)
    view.evaluated(1061.0, 601, math.inf)
    state = plain(view)
    series = state["series"]
    assert np.mean(series["rates"]["accepted"][:-3]) == pytest.approx(10, rel=0.05)
    known = [value for value in series["staleness"] if value is not None]
    assert np.mean(known) == pytest.approx(1, abs=0.1) and max(filter(None, series["oldest"])) == 2
    assert [value for value in series["threshold"] if value is not None] == [3.5] and state["threshold"] == 3.5
    assert len(series["at"]) == len(series["rates"]["accepted"]) == len(series["threshold"])
    assert state["errors"] == {"at": [1060.0, 1061.0], "version": [600, 601], "error": [0.25, None]}
    assert state["weighs"] is False


def test_the_rate_is_that_of_the_last_seconds():
    view, now = View(), time.time()
    view.verdicts([told(0, at=now - 5 + i / 20) for i in range(100)])
    assert 5 < plain(view)["rate"] < 30
    old = View()
    old.verdicts([told(0, at=now - 500 + i / 20) for i in range(100)])
    assert plain(old)["rate"] == 0


def test_a_reader_gets_only_what_is_new():
    view = View()
    view.verdicts([told(0), told(1)])
    first = plain(view)
    assert first["timeline"]["client"] == [0, 1] and first["since"] == view.since()
    view.verdicts([told(2, "rejected")])
    assert view.since() != first["since"]
    timeline = plain(view, since=first["since"])["timeline"]
    assert timeline["client"] == [2] and list(KINDS)[timeline["kind"][0]] == "rejected"
    for other in (View().since(), "", "x.y", f"{view.id}.-1", f"{view.id}.{'9' * 5000}"):
        assert plain(view, since=other)["timeline"]["client"] == [0, 1, 2], "of another run, or damaged"
    for change in (lambda: view.dropped(3), view.damaged, lambda: view.evaluated(1.0, 1, 0.5), view.close):
        before = view.since()
        change()
        assert view.since() != before
    state = plain(view)
    assert (state["dropped"], state["damaged"], state["ended"]) == (3, 1, True)
