"""Files of svmlight against scikit-learn's reader, and what is wrong with them by file and line."""

import gzip
import re
from typing import Any

import numpy as np
import pytest

import mocha_jax as mj

datasets = pytest.importorskip("sklearn.datasets")


def write(folder, text, name="clicks.txt"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("zero_based", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_scikit_learn_reads_the_same(tmp_path, zero_based, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 9)) * (rng.random((40, 9)) < 0.3)
    x[:3] = 0
    x[5, 0] = x[7, 8] = 1.0  # the first and the last are there
    y, query = rng.choice([-1.0, 1.0], 40), np.sort(rng.integers(0, 5, 40))
    path = str(tmp_path / "made.svm")
    datasets.dump_svmlight_file(x, y, path, zero_based=zero_based, query_id=query, comment="by scikit-learn")
    expected, labels, queries = datasets.load_svmlight_file(path, query_id=True)
    data = mj.datasets.svmlight(path, dtype="float32")
    assert data.names.tasks == tuple(np.unique(queries).tolist())
    for t, one in enumerate(data.names.tasks):
        rows, n = queries == one, int(data.sizes[t])
        np.testing.assert_array_equal(data.x[t, :n], np.float32(expected.toarray()[rows]))
        np.testing.assert_array_equal(data.y[t, :n], labels[rows])
    groups = rng.choice(["a", "b"], 40)
    other = mj.datasets.svmlight(path, groups, zero_based=zero_based, num_features=11, intercept=True)
    wider, _ = datasets.load_svmlight_file(path, n_features=11, zero_based=zero_based)
    assert other.names.tasks == ("a", "b")
    np.testing.assert_allclose(other.x[0, : int(other.sizes[0]), :11], wider.toarray()[groups == "a"], rtol=1e-6)


def test_test_files_are_like_the_training_file(tmp_path):
    train = mj.datasets.svmlight(write(tmp_path, "1 qid:3 1:1 4:2\n-1 qid:1 2:1\n"), intercept=True)
    packed = tmp_path / "test.txt.gz"
    packed.write_bytes(gzip.compress(b"# a comment\n\n-1 qid:3 1:5\n"))
    test = mj.datasets.svmlight(packed, like=train)
    assert test.names == train.names
    np.testing.assert_array_equal(test.x, [[[0, 0, 0, 0, 0]], [[5, 0, 0, 0, 1]]])
    with pytest.raises(ValueError, match="line 1: has feature 5, more than the num_features=4 there are"):
        mj.datasets.svmlight(write(tmp_path, "1 qid:3 5:1\n"), like=train)


def test_what_dense_samples_would_take_is_said(tmp_path):
    path = write(tmp_path, "1 1:1 20000000:1\n-1 2:1\n1 3:1\n")
    message = (
        "clicks.txt: samples are stored dense, and 2 tasks of up to 2 samples with 20000000 features would take 0.32 GB, "
        "more than limit_gb=0.1; raise it if that fits"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        mj.datasets.svmlight(path, ["a", "a", "b"], limit_gb=0.1, dtype="float32")
    with pytest.raises(ValueError, match="would take 0.16 GB"):
        mj.datasets.svmlight(path, ["a", "a", "b"], limit_gb=0.1, dtype="bfloat16")
    small = write(tmp_path, "1 1:1 1000:1\n-1 2:1\n1 3:1\n")
    assert mj.datasets.svmlight(small, ["a", "a", "b"], limit_gb=1.61e-5, dtype="float32").x.shape == (2, 2, 1000)
    with pytest.raises(ValueError, match="would take 1.6e-05 GB, more than limit_gb=1.5e-05"):
        mj.datasets.svmlight(small, ["a", "a", "b"], limit_gb=1.5e-5, dtype="float32")


BROKEN = {
    "a word": ("1 qid:1 1:1\nyes qid:1 1:1\n", "clicks.txt, line 2: 'yes' is no label, which is a number."),
    "several labels": ("1,2 1:1\n", "clicks.txt, line 1: '1,2' is no label, which is a number; several labels of a sample are not read."),
    "no colon": ("1 qid:1 1:1\n\n1 qid:1 3\n", "clicks.txt, line 3: '3' is no feature such as 3:0.5."),
    "a name": ("1 qid:1 x:1\n", "clicks.txt, line 1: 'x:1' is no feature such as 3:0.5."),
    "a qid late": ("1 1:1 qid:1\n", "clicks.txt, line 1: 'qid:1' is no feature"),
    "a qid of what": ("1 qid:a 1:1\n", "clicks.txt, line 1: 'qid:a' is no feature"),
    "more colons": ("1 qid:1 1:2:3\n", "clicks.txt, line 1: '1:2:3' is no feature"),
    "an underscore in a label": ("1_0 qid:1 1:1\n", "clicks.txt, line 1: '1_0' is no label, which is a number."),
    "an underscore in a value": ("1 qid:1 1:1_0 # a_b\n", "clicks.txt, line 1: '1:1_0' is no feature such as 3:0.5."),
    "an underscore in an index": ("1 qid:1 1:1 # a_b\n1 qid:1 1_0:1\n", "clicks.txt, line 2: '1_0:1' is no feature"),
    "an underscore in a qid": ("1 qid:1_0 1:1\n", "clicks.txt, line 1: 'qid:1_0' is no feature"),
    "descending": ("1 qid:1 1:1\n1 qid:1 3:1 2:1\n", "clicks.txt, line 2: features must be numbered from 0 or 1 in ascending order, each once, but 2 follows 3."),
    "twice": ("1 qid:1 3:1 3:1\n", "but 3 follows 3."),
    "negative": ("1 qid:1 -3:1\n", "clicks.txt, line 1: features must be numbered from 0 or 1 in ascending order, each once, but -3 is negative."),
    "huge": ("1 qid:1 99999999999999999999:1\n", "clicks.txt, line 1: holds a number that is too large."),
    "NaN": ("1 qid:1 1:1\n1 qid:1 2:nan\n", "clicks.txt, line 2: feature 2 is NaN or infinite; impute it."),
    "an infinite label": ("inf qid:1 1:1\n", "clicks.txt, line 1: the label is NaN or infinite"),
    "no qid": ("1 1:1\n", "clicks.txt: has no qid; pass group, the task of every line [1]."),
    "some qid": ("1 1:1\n1 qid:1 1:1\n", "clicks.txt: has a qid in 1 lines of 2; all must have one, or none."),
    "nothing": ("# nothing\n\n", "clicks.txt: has no samples."),
    "no features": ("1 qid:1\n", "clicks.txt: has no features at all; pass num_features if that is meant."),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_named_by_file_and_line(tmp_path, name):
    text, message = BROKEN[name]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        mj.datasets.svmlight(write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_arguments_that_do_not_fit_are_named(tmp_path):
    path = write(tmp_path, "1 qid:1 0:1\n")
    cases: dict[str, dict[str, Any]] = {
        "line 1: has feature 0, which zero_based=False rules out": {"zero_based": False},
        "group must have a label for each of the 1 samples": {"group": [1, 2]},
        'group must be "qid"': {"group": "query"},
        "zero_based must be one of 'auto'": {"zero_based": "no"},
        "num_features must be an integer >= 1": {"num_features": 0},
        "limit_gb must be > 0": {"limit_gb": -1.0},
    }
    for message, wrong in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            mj.datasets.svmlight(path, **wrong)
