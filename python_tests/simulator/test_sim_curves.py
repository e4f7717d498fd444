"""The picture of recorded runs: a panel per attack, a line per defense, the paper's results beside them."""

import math

import pytest
from outcomes import outcome, written

from secureafl_ext.cli import main
from secureafl_ext.report import curves
from secureafl_ext.sim import results

ROUNDS = {"rounds": 20, "dataset": "fashion-mnist"}


def panels(*outcomes, **only) -> curves.Panels:
    return curves.select([results.record(each) for each in outcomes], only)


def lines(axes, style: str) -> list:
    return [line for line in axes.get_lines() if line.get_linestyle() == style]


def test_a_line_is_the_mean_over_seeds_and_its_band_has_all_of_them():
    seeds = [outcome(errors=(0.5, error), seed=seed, **ROUNDS) for seed, error in enumerate((0.2, 0.4))]
    (axes,) = curves.figure(panels(*seeds)).axes
    (line,) = lines(axes, "-")
    assert line.get_xydata().tolist() == [[10, 0.5], [20, pytest.approx(0.3)]]
    (band,) = axes.collections
    ends = [y for x, y in band.get_paths()[0].vertices if x == 20]
    assert (min(ends), max(ends)) == (0.2, 0.4)


def test_a_panel_per_attack_in_the_usual_order_and_dashes_for_the_attack_success():
    runs = [outcome(attack=name, asr=asr, **ROUNDS) for name, asr in (("scaling", 0.25), ("gaussian", None))]
    drawn = curves.figure(panels(*runs, outcome(**ROUNDS)))
    assert [axes.get_title() for axes in drawn.axes] == ["none", "gaussian", "scaling"]
    assert [len(lines(axes, "--")) for axes in drawn.axes] == [0, 0, 1]
    assert lines(drawn.axes[2], "--")[0].get_ydata().tolist() == [0.25, 0.25]
    assert "attack success" in [text.get_text() for text in drawn.legends[0].get_texts()]


def test_the_paper_s_result_stands_at_the_last_round():
    runs = [outcome(attack="gaussian", defense=name, **ROUNDS) for name in ("secureafl-support", "kardam", "flame")]
    (axes,) = curves.figure(panels(*runs)).axes
    marks = [line.get_xydata().tolist()[0] for line in axes.get_lines() if line.get_marker() == "x"]
    assert sorted(marks) == [[20, 0.14], [20, 0.15]]  # SecureAFL's and Kardam's; the paper has no flame


def test_values_that_are_not_finite_leave_a_gap_and_not_an_error():
    (axes,) = curves.figure(panels(outcome(errors=(0.3, math.inf), dataset="udacity", rounds=20))).axes
    assert lines(axes, "-")[0].get_xydata().tolist() == [[10, 0.3]]
    assert all(map(math.isfinite, axes.get_ylim()))


def test_of_equal_runs_the_last_counts_wherever_its_data_were():
    old, new = outcome(errors=(0.9,), data_dir="/a", **ROUNDS), outcome(errors=(0.1,), data_dir="/b", **ROUNDS)
    ((runs,),) = (list(lines.values()) for lines in panels(old, new).values())
    assert [run.error for run in runs] == [0.1]


def test_only_chooses_runs():
    many = [outcome(malicious=share, errors=(share,), **ROUNDS) for share in (0.1, 0.3)]
    assert panels(*many, malicious=[0.3])["none"]["secureafl"][0].error == 0.3


@pytest.mark.parametrize(
    ("many", "only", "words"),
    [
        ([{"malicious": 0.1}, {"malicious": 0.3}], {}, "runs must have the same malicious, got 0.1, 0.3; choose with"),
        ([{"rounds": 10}, {"rounds": 20}], {}, "the same rounds, got 10, 20; choose with --only rounds=10"),
        ([{"memory": 1}, {"memory": 2}], {}, "the runs of secureafl under none must have the same memory, got 1, 2"),
        ([{"defense_options": {"trim": 1}}, {}], {}, "must have the same defense_options, got {'trim': 1}, {}"),
        ([{}], {"seed": [3, 4], "attack": ["dba"]}, "curves: no run has seed=3,4 and attack=dba"),
        ([], {}, "curves: no run has a result"),
    ],
)
def test_runs_that_do_not_belong_in_one_picture_are_refused(many, only, words):
    with pytest.raises(ValueError) as caught:
        panels(*(outcome(**settings) for settings in many), **only)
    assert words in str(caught.value)


def test_the_command_reads_several_folders_and_writes_one_picture(tmp_path, capsys):
    for seed in range(2):
        written(tmp_path / str(seed) / results.NAME, outcome(errors=(0.5, 0.1 + seed / 5), seed=seed, **ROUNDS))
    folders = [str(tmp_path / str(seed)) for seed in range(2)]
    assert main.main(["curves", *folders]) == 0
    assert capsys.readouterr().out == f"Curves: {tmp_path}/0/curves.png\n"
    assert main.main(["curves", *folders, "--only", "seed=1", "--png", str(tmp_path / "a/b.png")]) == 0
    one, other = (tmp_path / "0/curves.png").read_bytes(), (tmp_path / "a/b.png").read_bytes()
    assert one.startswith(b"\x89PNG\r\n\x1a\n") and other.startswith(b"\x89PNG\r\n\x1a\n") and one != other


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    assert main.main(["curves", str(tmp_path)]) == 2
    assert f"FOLDER must have a results.jsonl, got '{tmp_path}'" in capsys.readouterr().err
    written(tmp_path / results.NAME, outcome())
    assert main.main(["curves", str(tmp_path), "--only", "malicios=0.1"]) == 2
    assert "unknown setting 'malicios'" in capsys.readouterr().err
