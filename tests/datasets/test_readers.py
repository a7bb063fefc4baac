"""LEAF's folders from files written here, and texts cut to rows."""

import json
from typing import Any

import numpy as np
import optax
import pytest

import mocha_jax as mj


def write(folder, name, users, **changes):
    folder.mkdir(exist_ok=True)
    content = {
        "users": list(users), "num_samples": [len(u["y"]) for u in users.values()], "hierarchies": [],
        "user_data": users,
    } | changes  # fmt: skip
    (folder / name).write_text(json.dumps(content))
    return folder


def pixels(rng, n):
    return {"x": rng.random((n, 784)).round(3).tolist(), "y": rng.integers(0, 62, n).tolist()}


@pytest.mark.slow
def test_femnist_is_read_and_trained_on(tmp_path):
    rng = np.random.default_rng(0)
    users = {f"f{i:04d}_{i}": pixels(rng, 3 + i) for i in range(5)}
    held = {name: pixels(rng, 2) for name in reversed(users)}
    train = dict(list(users.items())[:3]), dict(list(users.items())[3:])
    for i, some in enumerate(train):
        write(tmp_path / "train", f"all_data_{i}_niid.json", some)
    write(tmp_path / "test", "all_data_0_niid.json", held)
    found = mj.datasets.leaf(tmp_path / "train")
    assert found.names == list(users)
    for x, y, user in zip(found.xs, found.ys, users.values(), strict=True):
        np.testing.assert_array_equal(x, np.float32(user["x"]))
        np.testing.assert_array_equal(y, user["y"])
    test = mj.datasets.leaf(str(tmp_path / "test"), users=found.names)
    assert test.names == found.names
    np.testing.assert_array_equal(test.ys[4], held[found.names[4]]["y"])
    problem = mj.Prediction(mj.pack_tasks(found.xs, found.ys), test=mj.pack_tasks(test.xs, test.ys))
    fedavg = mj.FedAvg(mj.networks.MLP(784, 62), optax.sgd(0.1))
    assert np.isfinite(mj.solve(problem, fedavg, tol=None, max_rounds=1).history.test_loss[-1])


@pytest.mark.slow
def test_shakespeare_is_read_as_symbols(tmp_path):
    text = 'To be, or not to be: that is the question?\n"\'Tis [nobler]" & (so) 0-9; !z} >'
    lines = [text[i : i + 20] for i in range(40)]
    after = [text[i + 20] for i in range(40)]
    write(
        tmp_path, "a.json", {"HAMLET": {"x": lines, "y": after, "raw": "..."}, "FOOL": {"x": lines[:2], "y": after[:2]}}
    )
    names, xs, ys = mj.datasets.leaf(tmp_path)
    assert names == ["HAMLET", "FOOL"]
    alphabet = mj.datasets.ALPHABET
    assert len(alphabet) == len(set(alphabet)) == 80
    assert ["".join(alphabet[int(k)] for k in row) for row in xs[0]] == lines
    assert [alphabet[int(k)] for k in ys[0]] == after
    # One label a sample, as LEAF has it: the last position of the network.
    lstm = mj.networks.LSTM(80, 2, 4, 1)
    last = mj.networks.Model(lstm.init, lambda params, x: lstm.apply(params, x)[:, -1])
    problem = mj.Prediction(mj.pack_tasks(xs, ys))
    one = mj.solve(problem, mj.FedAvg(last, optax.sgd(0.1)), tol=None, max_rounds=1)
    # All of them: rows of 21 symbols.
    rows = [np.column_stack([x, y]) for x, y in zip(xs, ys, strict=True)]
    every = mj.Prediction(mj.pack_tasks(rows, [np.full(len(y), 20) for y in ys]), mj.likelihoods.NextSymbol())
    two = mj.solve(every, mj.FedAvg(lstm, optax.sgd(0.1)), tol=None, max_rounds=1)
    assert np.isfinite([one.history.loss[-1], two.history.loss[-1]]).all()
    other = mj.datasets.leaf(write(tmp_path / "other", "a.json", {"A": {"x": ["éa"], "y": ["é"]}}), alphabet="aé")
    assert (other.xs[0].tolist(), other.ys[0].tolist()) == ([[1.0, 0.0]], [1.0])


GOOD = {"x": [[0.0, 1.0], [1.0, 0.0]], "y": [0, 1]}
BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "part.json is no JSON: Expecting"),
    "a list": ("[]", "part.json needs a list 'users'"),
    "no counts": ({"num_samples": 3}, "part.json needs a list 'num_samples'"),
    "fewer counts": ({"num_samples": [2]}, "part.json has 2 users but 1 num_samples"),
    "nothing of a user": ({"user_data": {"A": GOOD}}, "part.json: user 'B' has no x and y in user_data"),
    "no labels of a user": ({"user_data": {"A": GOOD, "B": {"x": []}}}, "part.json: user 'B' has no x and y"),
    "another count": ({"num_samples": [2, 3]}, "part.json: user 'B' has 2 samples and 2 labels, where num_samples says 3"),
    "fewer labels": ({"user_data": {"A": GOOD, "B": {"x": GOOD["x"], "y": [0]}}}, "user 'B' has 2 samples and 1 labels"),
    "no samples": ({"num_samples": [2, 0], "user_data": {"A": GOOD, "B": {"x": [], "y": []}}}, "'B' has no samples"),
    "ragged": ({"user_data": {"A": GOOD, "B": {"x": [[0.0], [1.0, 2.0]], "y": [0, 1]}}}, "part.json: user 'B' has samples that are neither"),
    "flat": ({"user_data": {"A": GOOD, "B": {"x": [0.0, 1.0], "y": [0, 1]}}}, "user 'B' has samples that are no lists of numbers"),
    "NaN": ({"user_data": {"A": GOOD, "B": {"x": [[0.0, float("nan")], [1.0, 2.0]], "y": [0, 1]}}}, "'B' has samples that are no lists of numbers"),
    "other widths": ({"user_data": {"A": GOOD, "B": {"x": [[0.0], [1.0]], "y": [0, 1]}}}, "user 'B' has samples of length 1, where those of 'A' have 2"),
    "a strange symbol": ({"user_data": {"A": GOOD, "B": {"x": ["ab", "é!"], "y": "ab"}}}, "part.json: user 'B': has a 'é' at place 2, which the alphabet of 80"),
    "texts of all lengths": ({"user_data": {"A": GOOD, "B": {"x": ["ab", "a"], "y": "ab"}}}, "part.json: user 'B' has texts of different lengths"),
    "x null": ({"user_data": {"A": GOOD, "B": {"x": None, "y": [0, 1]}}}, "part.json: user 'B' has an x or y that is no list"),
    "y a number": ({"user_data": {"A": GOOD, "B": {"x": GOOD["x"], "y": 2}}}, "part.json: user 'B' has an x or y that is no list"),
    "a huge integer": ({"user_data": {"A": GOOD, "B": {"x": [[0.0, int("9" * 400)], [1.0, 2.0]], "y": [0, 1]}}}, "user 'B' has samples that are neither"),
    "a huge number": ({"user_data": {"A": GOOD, "B": {"x": [[0.0, 1e300], [1.0, 2.0]], "y": [0, 1]}}}, "'B' has samples that are no lists of numbers"),
    "deep": ("[" * 100_000, "part.json is no JSON: maximum recursion depth"),
    "long labels": ({"user_data": {"A": GOOD, "B": {"x": ["ab", "ab"], "y": ["a", "bc"]}}}, "a label that is no single symbol"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_its_user(name, tmp_path):
    wrong, message = BROKEN[name]
    if isinstance(wrong, str):
        (tmp_path / "part.json").write_text(wrong)
    else:
        write(tmp_path, "part.json", {"A": GOOD, "B": GOOD}, **wrong)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as error:
        mj.datasets.leaf(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_among_the_files_is_named(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ValueError, match="leaf: .*a.json cannot be read, .*Is a directory"):
        mj.datasets.leaf(tmp_path)


def test_what_is_not_there_is_said(tmp_path):
    leaf = mj.datasets.leaf
    with pytest.raises(ValueError, match="leaf: folder must be one with LEAF's .json files"):
        leaf(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="there is no .json file in"):
        leaf(tmp_path)
    write(tmp_path, "a.json", {"A": GOOD})
    with pytest.raises(ValueError, match="1 of 2 users are not in .*, e.g. 'B'"):
        leaf(tmp_path, users=["A", "B"])
    write(tmp_path, "b.json", {"A": GOOD})
    with pytest.raises(ValueError, match=r"b.json: user 'A' is in an earlier file too"):
        leaf(tmp_path)


@pytest.mark.parametrize(("count", "length"), [(2, 1), (2, 5), (6, 5), (7, 5), (81, 80), (100, 7)])
def test_windows_predict_every_symbol_once(count, length):
    text = np.random.default_rng(0).integers(0, 9, count)
    rows, lengths = mj.datasets.windows(text, length)
    assert rows.shape[1] == length + 1
    assert lengths.min() >= 1
    assert int(lengths.sum()) == count - 1
    pairs = [pair for row, n in zip(rows, lengths, strict=True) for pair in zip(row, row[1 : int(n) + 1], strict=False)]
    assert pairs == list(zip(text, text[1:], strict=False))
