"""What the summary of a run says of its second half, of its worst class and of the clients that are left out."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import scenes
import torch

from secureafl_ext.report import console, page
from secureafl_ext.sim import flat_table, loop, metrics, results
from secureafl_ext.sim.outcome import Point, late_mean
from secureafl_ext.sim.settings import Settings

KEYS = ("late_error", "late_asr", "worst_class_error", "left_out_precision", "left_out_recall")


def short(**changed: object) -> Settings:
    return Settings(**{"clients": 8, "rounds": 24, "batch": 4, "device": "cpu", "evaluations": 4, **changed})


def test_the_second_half_begins_behind_the_middle():
    curve = [Point(10 * i, i / 10, None) for i in range(1, 5)]  # rounds 10, 20, 30, 40
    assert late_mean(curve, 40, "error") == pytest.approx((0.3 + 0.4) / 2)
    assert late_mean(curve[-1:], 40, "error") == pytest.approx(0.4), "a single evaluation is the last one"
    assert late_mean(curve, 40, "asr") is None
    assert late_mean([Point(1, math.inf, 0.0)], 1, "error") == math.inf


def test_an_odd_number_of_evaluations_leaves_the_middle_in_the_second_half():
    curve = [Point(i, i / 10, i / 100) for i in (2, 4, 6)]  # the middle of the run is round 3
    assert late_mean(curve, 6, "error") == pytest.approx(0.5)
    assert late_mean(curve, 6, "asr") == pytest.approx(0.05)


def test_a_run_has_the_late_numbers_of_its_curve():
    backdoor, plain = (loop.run(short(attack=attack, defense="async-sgd")) for attack in ("scaling", "none"))
    late = backdoor.curve[2:]
    assert [point.round for point in late] == [18, 24]
    assert backdoor.late_error == pytest.approx(np.mean([point.error for point in late]))
    assert backdoor.late_asr == pytest.approx(np.mean([point.asr for point in late]))
    assert plain.late_asr is None and plain.late_error is not None
    assert plain.error <= plain.summary["worst_class_error"] <= 1


def test_the_worst_class_is_the_highest_error_of_a_class_that_is_there(random):
    data = scenes.dataset("grey")
    net = scenes.small_net(data)
    model = torch.randn(net.size, generator=random)
    guesses, labels = net.predict(model, data.inputs(data.test_x)).argmax(1).numpy(), data.test_y.numpy()
    errors = {int(label): float((guesses != label)[labels == label].mean()) for label in np.unique(labels)}
    assert metrics.worst_class_error(net, data, model) == pytest.approx(max(errors.values()))
    # Class 0 alone, which a model of zeros answers always: a class without an image is no class with an error.
    first = replace(data, test_x=data.test_x[data.test_y == 0], test_y=data.test_y[data.test_y == 0])
    assert len(first.test_y) > 0
    assert metrics.worst_class_error(net, first, torch.zeros(net.size)) == 0.0
    assert metrics.worst_class_error(net, data, torch.full((net.size,), torch.nan)) == 1.0


def test_a_regression_has_no_worst_class():
    roads = scenes.dataset("regression")
    net = scenes.small_net(roads)
    assert metrics.worst_class_error(net, roads, torch.zeros(net.size)) is None


def test_records_without_them_stay_readable(tmp_path):
    path = tmp_path / results.NAME
    outcome = loop.run(short(attack="scaling", defense="krum"))
    results.append(path, results.record(outcome))
    line = json.loads(path.read_text())
    for key in KEYS:
        assert line["summary"].pop(key) is not None
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
    new, old = results.read(path)
    assert (old.outcome.late_error, old.outcome.late_asr) == (None, None)
    assert old.outcome.error == new.outcome.error
    first, second = flat_table.rows([new, old])
    for key in KEYS:
        assert first[f"summary.{key}"] == outcome.summary[key] and second[f"summary.{key}"] is None
    heads = [column.header for column in console.table([new.outcome, old.outcome], ["attack"]).columns]
    assert {"late\nerror", "late attack\nsuccess", "worst\nclass"} <= set(heads)
    assert {"left out:\nprecision", "left out:\nrecall"} <= set(heads)
    shown = page.all_runs("All runs", [new, old])
    assert all(key.replace("_", " ") in shown for key in KEYS)
