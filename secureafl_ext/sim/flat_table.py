"""Results as a flat table: one row per run, one column per value. For pandas, spreadsheets and databases.

The columns have the names that `pandas.json_normalize` gives the lines of the results file: `settings.defense`,
`settings.defense_options.radius`, `summary.error`, `versions.torch`, `started`, .. The curve is left out.
"""

import csv
from pathlib import Path
from typing import IO, Any

from .results import Record, flat

Row = dict[str, Any]


def rows(records: list[Record]) -> list[Row]:
    """One row per run, oldest first. All rows have the same columns; None where a run does not have the value."""
    flattened = [_flatten({name: part for name, part in flat(record).items() if name != "curve"}) for record in records]
    groups = ("settings", "summary", "versions")
    names = list(dict.fromkeys(name for row in flattened for name in row))
    # Keep a group together, also if only a later run has one of its options.
    names.sort(key=lambda name: groups.index(name.split(".")[0]) if name.split(".")[0] in groups else len(groups))
    return [{name: row.get(name) for name in names} for row in flattened]


def write_csv(file: IO[str], records: list[Record]) -> None:
    """None is an empty cell; infinity and NaN are inf and nan."""
    table = rows(records)
    writer = csv.DictWriter(file, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)


def write_parquet(path: Path, records: list[Record]) -> None:
    try:
        import pandas
        import pyarrow  # noqa: F401 - to_parquet needs it
    except ModuleNotFoundError as error:
        text = f"parquet needs the package {error.name}: pip install 'secureafl_ext[pandas]'"
        raise ModuleNotFoundError(text, name=error.name) from error
    pandas.DataFrame(_one_type_per_column(rows(records))).to_parquet(path)


def _flatten(value: dict[str, Any], prefix: str = "") -> Row:
    row: Row = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            row |= _flatten(inner, f"{prefix}{name}.")
        else:
            row[prefix + name] = inner
    return row


def _one_type_per_column(table: list[Row]) -> list[Row]:
    """A Parquet column has one type: a column with text and numbers becomes text."""
    mixed = {
        name
        for name in (table[0] if table else ())
        if len({_type(row[name]) for row in table if row[name] is not None}) > 1
    }
    return [
        {name: str(value) if name in mixed and value is not None else value for name, value in row.items()}
        for row in table
    ]


def _type(value: object) -> type:
    return float if type(value) is int else type(value)
