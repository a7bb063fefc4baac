"""Watching a solve: callbacks for every record, records read from checkpoints, and warnings of what did not converge."""

import json
import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mocha_jax as mj
from tests import zoo
from tests.driver.test_solve import same
from tests.files.rewriting import closed, opened, rewritten

EachRecord, TensorBoard = mj.callbacks.EachRecord, mj.callbacks.TensorBoard


@pytest.fixture
def problem():
    return mj.Problem(zoo.data(), mj.losses.Hinge(), mj.regularizers.MeanRegularized(0.1, 0.02))


def options(**more):
    return dict(key=jax.random.key(5), tol=None, max_rounds=24, chunk=8, record_every=2) | more


class Writer:
    """Keeps what is written, as torch's writer would take it."""

    def __init__(self):
        self.written, self.flushes = list[tuple[str, float, int]](), 0

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.written.append((tag, scalar_value, global_step))

    def flush(self):
        self.flushes += 1


@pytest.mark.slow
def test_every_record_is_told_once_as_numbers(problem):
    seen: list[Any] = []
    solution = mj.solve(problem, **options(callback=EachRecord(lambda *told: seen.append(told))))
    assert [round for round, _ in seen] == list(range(2, 25, 2))
    whole = jax.tree.map(lambda *a: np.stack(a), *(record for _, record in seen))
    chex.assert_trees_all_equal(whole, solution.history)
    assert seen[3][1].gap.shape == ()


@pytest.mark.extended
def test_a_true_value_for_one_of_the_records_stops_the_solve(problem):
    solution = mj.solve(problem, **options(callback=EachRecord(lambda round, _: round == 10)))
    assert (solution.rounds, solution.status) == (16, mj.Status.STOPPED)


@pytest.mark.slow
def test_a_resumed_run_is_told_without_repetition(problem, tmp_path):
    seen: list[int] = []
    tell = EachRecord(lambda round, _: seen.append(round))
    for rounds in (10, 24):
        mj.solve(problem, **options(max_rounds=rounds, checkpoint=tmp_path / "run.npz", callback=tell))
    assert seen == list(range(2, 25, 2))
    for after, want in ((0, list(range(2, 29, 2))), (24, [26, 28])):  # as in a new process
        again: list[int] = []
        tell = EachRecord(partial(lambda into, round, _: into.append(round), again), after=after)
        path = tmp_path / f"{after}.npz"
        path.write_bytes((tmp_path / "run.npz").read_bytes())
        mj.solve(problem, **options(max_rounds=28, checkpoint=path, callback=tell))
        assert again == want


@pytest.mark.slow
def test_a_record_that_could_not_be_told_is_told_again(problem, tmp_path):
    seen: list[int] = []

    def once_broken(round, record):
        if round == 6 and 6 not in seen:
            seen.append(round)
            raise OSError("disk full")
        seen.append(round)

    tell = EachRecord(once_broken)
    with pytest.raises(OSError, match="disk full"):
        mj.solve(problem, **options(callback=tell, checkpoint=tmp_path / "run.npz"))
    mj.solve(problem, **options(callback=tell, checkpoint=tmp_path / "run.npz"))
    assert seen == [2, 4, 6, *range(6, 25, 2)]


@pytest.mark.extended
def test_tensorboard_gets_every_number_of_every_record(problem):
    writer = Writer()
    solution = mj.solve(problem, **options(callback=TensorBoard(writer, "mocha")))
    columns = solution.history.to_dict()
    finite = {name: column for name, column in columns.items() if name != "round" and not np.isinf(column).any()}
    assert len(finite) >= 10
    want = [
        (f"mocha/{name}", float(column[i]), 2 * i + 2)
        for i in range(12)
        for name, column in columns.items()
        if name in finite
    ]
    assert writer.written == want
    assert writer.flushes == 3  # once a chunk
    assert not any(np.isinf(value) for _, value, _ in writer.written)


@pytest.mark.extended
def test_a_writer_may_be_called_like_that_of_flax_and_what_is_not_finite_any_more_is_written(problem):
    class Flax:
        def __init__(self):
            self.gaps = list[float]()

        def scalar(self, tag, value, step):
            self.gaps += [value] if tag == "gap" else []

    history = mj.solve(problem, **options(max_rounds=12)).history
    flax, gaps = Flax(), np.array([np.inf, np.nan, np.inf, 2.0, 1.0, -np.inf])
    TensorBoard(flax)(12, history.replace(quality=history.quality.replace(gap=gaps)))
    np.testing.assert_array_equal(flax.gaps, gaps[1:])


def test_a_folder_needs_tensorboardx_and_a_writer_its_method(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ImportError, match=r"TensorBoard: a folder needs tensorboardX \(pip install tensorboardX\)"
    ) as raised:
        TensorBoard(tmp_path)
    assert raised.value.__suppress_context__  # one sentence, without the one that tensorboardX is missing
    for writer in (None, object(), Writer, ""):
        with pytest.raises(ValueError, match=r"TensorBoard: writer must have add_scalar\(tag, value, step\)"):
            TensorBoard(writer)

    class Module:
        @staticmethod
        def SummaryWriter(folder):
            made = Writer()
            made.written.append(("folder", folder, 0))
            return made

    monkeypatch.setitem(sys.modules, "tensorboardX", Module)
    assert TensorBoard(tmp_path)._add.__self__.written == [("folder", str(tmp_path), 0)]


@pytest.mark.slow
def test_the_records_of_a_checkpoint_are_those_of_the_solution(problem, tmp_path):
    path = tmp_path / "run.npz"
    for watch in (None, mj.Watch(theta=0.1)):
        every = 1 if watch is not None and watch.theta is not None else 2
        solution = mj.solve(problem, **options(watch=watch, record_every=every, checkpoint=path, max_rounds=8))
        chex.assert_trees_all_equal(mj.read_history(path), solution.history)
        chex.assert_trees_all_equal_structs(mj.read_history(str(path)), solution.history)
        path.unlink()
    half = problem.replace(data=problem.data.replace(x=problem.data.x.astype(jnp.bfloat16)))
    solution = mj.solve(half, **options(checkpoint=path, max_rounds=4))
    chex.assert_trees_all_equal(mj.read_history(path), solution.history)


@pytest.mark.slow
def test_the_records_of_networks(tmp_path):
    rng = np.random.default_rng(0)
    data = mj.pack_tasks(
        [rng.normal(size=(6, 3)) for _ in range(3)], [rng.integers(0, 2, 6) for _ in range(3)], dtype="float32"
    )
    solution = mj.solve(
        mj.Prediction(data),
        mj.FedAvg(mj.networks.MLP(3, 2, (4,)), optax.sgd(0.1)),
        max_rounds=3,
        tol=None,
        checkpoint=tmp_path / "run.npz",
    )
    found = mj.read_history(tmp_path / "run.npz")
    assert isinstance(found.quality, mj.Evaluation)
    chex.assert_trees_all_equal(found, solution.history)


@pytest.mark.slow
def test_records_are_read_while_the_solve_goes_on(problem, tmp_path):
    path, seen = tmp_path / "run.npz", list[list[int]]()

    def look(round, history):
        found = mj.read_history(path)
        chex.assert_trees_all_equal(found, history)
        code = f"import mocha_jax as mj; print(mj.read_history({str(path)!r}).round.tolist())"
        if round == 16:  # by another process, which gets no lock
            seen.append(
                json.loads(
                    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
                )
            )

    before = sorted(tmp_path.iterdir())
    straight = mj.solve(problem, **options())
    same(mj.solve(problem, **options(checkpoint=path, callback=look)), straight)
    assert seen == [[2, 4, 6, 8, 10, 12, 14, 16]]
    assert sorted(tmp_path.iterdir()) == [*before, path]


@pytest.mark.extended
def test_what_is_no_checkpoint_is_said_in_a_sentence(problem, tmp_path):
    path = tmp_path / "run.npz"
    mj.solve(problem, **options(checkpoint=path, max_rounds=8))
    whole = path.read_bytes()
    about, arrays = opened(whole)

    def saying(**changes):
        return rewritten(whole, lambda about, _: about.update(changes))

    cases: list[tuple[bytes, str]] = [
        (whole[: len(whole) // 2], "damaged"), (b"", "damaged"), (b"text", "damaged"),
        (closed(about, {name: a for name, a in arrays.items() if name != "history/round"}), "damaged"),
        (mj.federated.to_bytes({"a": np.ones(3)}), "of the kind 'state', and 'checkpoint' is wanted"),
        (saying(version=2), "of version 2, and this library reads up to 1"),
        (rewritten(whole, lambda about, _: about.pop("quality")), "does not hold what it says it holds"),
        (rewritten(whole, lambda _, arrays: [arrays.pop(n) for n in list(arrays) if "quality" in n]), "does not hold"),
        (saying(quality="os.system"), "the records are of os.system, which is not defined here; import it first"),
    ]  # fmt: skip
    for content, message in cases:
        path.write_bytes(content)
        with pytest.raises(mj.CheckpointError, match=message) as error:
            mj.read_history(path)
        assert "\n" not in str(error.value)
    with pytest.raises(mj.CheckpointError, match="there is no file at"):
        mj.read_history(tmp_path / "none.npz")
    for wrong in (5, b"", ""):
        with pytest.raises(ValueError, match="path must be that of a file"):
            mj.read_history(wrong)  # type: ignore[arg-type]


def warned(work):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        work()
    return [(one.category, str(one.message), one.filename) for one in said]


@pytest.mark.slow
def test_a_solve_that_ran_out_of_rounds_says_so(problem):
    ((category, message, file),) = warned(lambda: mj.solve(problem, tol=1e-12, max_rounds=5))
    assert category is mj.NotConverged
    assert issubclass(mj.NotConverged, UserWarning)
    assert file == __file__
    gap = f"{mj.solve(problem, tol=1e-12, max_rounds=5).relative_gap:.2g}"
    assert message.startswith(
        f"solve: tol=1e-12 was not reached: stopped at max_rounds after 5 rounds with relative gap {gap}; pass more max_rounds"
    )
    uneven = problem.replace(data=problem.data.replace(x=problem.data.x.at[:, :, 0].multiply(1e4)))
    ((_, message, _),) = warned(lambda: mj.solve(uneven, tol=1e-12, max_rounds=2))
    assert "standardise them" in message


@pytest.mark.slow
def test_no_other_solve_says_so(problem):
    networks = mj.pack_tasks([np.eye(3)] * 3, [np.array([0, 1, 1])] * 3, dtype="float32")
    fedavg = mj.FedAvg(mj.networks.MLP(3, 2, (4,)), optax.sgd(0.1))
    for work in (
        lambda: mj.solve(problem, tol=None, max_rounds=5),
        lambda: mj.solve(problem, tol=1e-1, max_rounds=200),
        lambda: mj.solve(problem, tol=1e-12, max_rounds=0),
        lambda: mj.solve(problem, tol=1e-12, max_rounds=5, callback=lambda *_: True),
        lambda: jax.jit(lambda p: mj.solve(p, tol=1e-12, max_rounds=5).weights)(problem),
        lambda: mj.solve(mj.Prediction(networks), fedavg, tol=1e-12, max_rounds=2),
    ):
        assert warned(work) == []
    # Nodes that never answer are one warning, not two.
    silent = mj.systems.Dropout(jnp.asarray([1.0, 0.0, 0.0, 0.0, 0.0]))
    ((category, message, _),) = warned(lambda: mj.solve(problem, tol=1e-12, max_rounds=12, systems=silent))
    assert category is mj.NotConverged
    assert "never answered" in message


@pytest.mark.slow
def test_searches_say_so_once(problem):
    candidates = mj.grid(mj.regularizers.Independent, lam=[2.0, 0.1])
    problem = problem.replace(loss=mj.losses.Logistic())
    few: dict[str, Any] = dict(tol=1e-15, max_rounds=2)
    found: list[Any] = []
    said = warned(lambda: found.append(mj.cross_validate(problem, candidates, folds=2, **few)))
    assert found[0].best == 1  # behind another one
    late = [message for category, message, _ in said if category is mj.NotConverged]
    assert len(late) == 2  # of the fits in folds, and of the model that is handed out
    assert late[0].startswith("cross_validate: candidates 0 (")
    assert late[1].startswith("solve: tol=1e-15 was not reached: stopped at max_rounds after 2 rounds")
    ((category, message, file),) = warned(lambda: mj.lambda_path(problem, candidates, **few))
    assert (category, file) == (mj.NotConverged, __file__)
    assert message.startswith("lambda_path: candidates 0 (")
    assert "are as far as they got" in message
    assert warned(lambda: jax.jit(lambda p: mj.lambda_path(p, candidates, **few).weights)(problem)) == []
