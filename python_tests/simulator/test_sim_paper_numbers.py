"""The paper's own numbers, as they were typed in."""

import math

import pytest
from pretended import BACKDOORS

from secureafl_ext.attacks import ATTACKS
from secureafl_ext.cli import calibrate
from secureafl_ext.defenses import DEFENSES
from secureafl_ext.report import paper, paper_numbers, tables
from secureafl_ext.sim.settings import Settings


def test_the_paper_has_as_many_numbers_as_its_tables_have_cells():
    counts = {name: {data: len(cells) for data, cells in table.paper.items()} for name, table in paper.TABLES.items()}
    images = dict.fromkeys(["fashion-mnist", "cifar10", "cifar100", "tiny-imagenet"])
    assert counts["main"] == dict.fromkeys(images, 7 * 11) | {"udacity": 6 * 5}
    assert counts["asyncdefender"] == dict.fromkeys(images, 11) | {"udacity": 5}
    fashion = {"alpha": 3 * 11, "variants": 5 * 11, "estimation-error": 6, "memory": 1}
    fashion |= {"runtime-clients": 4 * 3, "runtime-parameters": 4 * 3}
    assert {name: counts[name] for name in fashion} == {name: {"fashion-mnist": n} for name, n in fashion.items()}
    assert all(counts[name] == {} for name in ("malicious", "delay", "degree", "clients", "max-norm"))


@pytest.mark.parametrize(
    ("table", "dataset", "cell", "value"),
    [
        ("main", "fashion-mnist", ("kardam", "scaling"), (0.79, 0.92)),
        ("main", "fashion-mnist", ("secureafl", "adaptive"), (0.18,)),
        ("main", "cifar10", ("sageflow", "neurotoxin"), (0.79, 0.92)),
        ("main", "cifar100", ("zeno++", "scaling"), (0.21, 0.68)),
        ("main", "tiny-imagenet", ("basgd", "3dfed"), (0.56, 0.02)),
        ("main", "udacity", ("zeno++", "sign-flip"), (math.inf,)),
        ("main", "udacity", ("async-sgd", "gaussian"), (1.10,)),
        ("asyncdefender", "cifar100", ("async-defender", "pgd"), (0.71, 0.67)),
        ("asyncdefender", "udacity", ("async-defender", "min-max"), (0.29,)),
        ("alpha", "fashion-mnist", ("0.6", "neurotoxin"), (0.20, 0.01)),
        ("variants", "fashion-mnist", ("secureafl-iii", "dba"), (0.68, 0.53)),
        ("estimation-error", "fashion-mnist", ("estimation_error", "450"), (0.68,)),
        ("memory", "fashion-mnist", ("float32", "GB"), (0.456,)),
        ("runtime-clients", "fashion-mnist", ("AFLGuard", "300"), (0.08,)),
        ("runtime-parameters", "fashion-mnist", ("SecureAFL", "500000"), (0.04,)),
    ],
)
def test_numbers_of_the_paper(table, dataset, cell, value):
    assert paper.TABLES[table].paper[dataset][cell] == value


def test_numbers_that_the_paper_prints_twice_agree():
    """Also with those that `calibrate` aims at, which were typed in apart."""
    main = paper_numbers.MAIN["fashion-mnist"]
    for column in paper_numbers.ATTACK_COLUMNS:
        ours = main["secureafl", column]
        assert paper.TABLES["alpha"].paper["fashion-mnist"]["0.8", column] == ours
        assert paper.TABLES["variants"].paper["fashion-mnist"]["secureafl", column] == ours
    for dataset, targets in calibrate.TARGETS.items():
        for attack, target in targets.items():
            known = tuple(number for number in target if number is not None)
            assert paper_numbers.MAIN[dataset][calibrate.UNDEFENDED, attack] == known


def test_two_numbers_are_the_backdoors_alone():
    for table in paper.TABLES.values():
        for numbers in table.paper.values():
            assert all(len(value) == (2 if column in BACKDOORS else 1) for (_, column), value in numbers.items())
    assert list(paper_numbers.ATTACK_COLUMNS) == list(ATTACKS)[:11]  # the others are not in the paper


@pytest.mark.parametrize("name", [name for name, table in paper.TABLES.items() if table.source == "runs"])
def test_every_number_of_the_paper_has_a_cell_that_is_run(name):
    for dataset in paper.TABLES[name].datasets:
        plan = tables.plan_table(name, Settings(), {"dataset": dataset}, {}, 1)
        [first, *_] = grids = tables.collect(plan, [], "not run")
        assert set(first.paper) <= {key for key, cell in first.cells.items() if not cell.undefined}
        runs = [settings for settings in plan.runs() if settings.dataset == dataset and settings.defense in DEFENSES]
        assert len(runs) == sum(len(grid.cells) for grid in grids)


@pytest.mark.parametrize("dataset", paper.TABLES["main"].datasets)
def test_our_rule_is_compared_with_the_papers_secureafl_and_is_no_row_of_the_paper(dataset):
    [grid] = tables.collect(tables.plan_table("main", Settings(), {"dataset": dataset}, {}, 1), [], "not run")
    for column in grid.columns:
        assert grid.paper_value(paper.OUR_RULE, column) == grid.paper["secureafl", column]
    assert paper.OUR_RULE in grid.rows and "secureafl" in grid.paper_rows()
    assert paper.OUR_RULE not in grid.paper_rows()
    assert not any(row == paper.OUR_RULE for numbers in paper_numbers.MAIN.values() for row, _ in numbers)
