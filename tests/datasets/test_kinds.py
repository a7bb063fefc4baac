"""Columns of texts that are no categories are refused, and become no feature for every value."""

import numpy as np
import pytest

import mocha_jax as mj
from mocha_jax.datasets._column_types import no_categories

# Columns of real tables: levels and rows of cars, airports, barley and others.
CATEGORIES = {
    "handful": [f"kind {i}" for i in range(10)] * 2,
    "makes of 205 cars": [f"make {i % 22}" for i in range(205)],
    "56 states of 3364 airports": [f"state {i % 56}" for i in range(3364)],
    "versions": ["3.11", "v3.12", "3.13-rc"] * 5,
    "ranges": ["0-10", "10-20", "20-30"] * 5,
}
OTHERS = {
    "days": ([f"2024-01-{i % 28 + 1:02d}" for i in range(1000)], "dates such as '2024-01-01'"),
    "times": (["2010/01/01 00:00", "2010/01/01 01:00"], "dates such as"),
    "times as ISO": (["2024-05-01T12:30:00Z", "2024-05-02T12:30:00Z"], "dates such as"),
    "German": (["1.5.2024", "17.12.2024"], "dates such as"),
    "American": (["1/1/85", "2/28/85"], "dates such as"),
    "months": (["Jan 1 2000", "Feb 12, 2000"], "dates such as"),
    "commas": (["66,23", "70", "-1,5", "1,5e3"], "decimal commas such as '66,23'"),
    "names of 406 cars": ([f"car {i % 311}" for i in range(406)], "311 different texts in 406 rows"),
    "ids": ([f"A-{i:04d}" for i in range(100)], "100 different texts in 100 rows"),
}


@pytest.mark.parametrize("name", CATEGORIES)
def test_categories_are_categories(name):
    assert no_categories(CATEGORIES[name]) is None


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none_is_named(name):
    texts, sentence = OTHERS[name]
    assert sentence in (no_categories(texts) or "")


def write(path, **columns):
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join([";".join(columns), *(";".join(map(str, row)) for row in rows)]) + "\n")
    return path


def test_a_csv_file_encodes_them_when_it_is_told_so(tmp_path):
    days = [f"2024-01-{i + 1:02d}" for i in range(20)]
    path = write(tmp_path / "t.csv", shop=["a", "b"] * 10, day=days, price=np.arange(20), sold=np.arange(20))
    with pytest.raises(ValueError, match=r"t.csv, column 'day': holds dates such as '2024-01-01'; leave it out by"):
        mj.datasets.csv(path, "sold", "shop", categories="encode")
    assert mj.datasets.csv(path, "sold", "shop", features=["price"]).names.features == ("price",)
    data = mj.datasets.csv(path, "sold", "shop", categories=["day"])
    assert data.names.features == (*(f"day={day}" for day in days), "price")


def test_labels_with_decimal_commas_are_no_classes(tmp_path):
    path = write(tmp_path / "t.csv", shop=["a", "b"] * 10, price=np.arange(20), sold=[f"{i},5" for i in range(20)])
    with pytest.raises(ValueError, match=r"column 'sold': holds numbers with decimal commas such as '0,5'; write them"):
        mj.datasets.csv(path, "sold", "shop", categories="encode")
