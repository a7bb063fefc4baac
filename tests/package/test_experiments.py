"""The protocol of the tables: loading, skewing, resuming."""

import argparse
import json
from pathlib import Path
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "experiments").exists(), reason="the tests run away from the repository")


@pytest.fixture
def experiments(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from experiments import (
        _personalized_parts,
        compression,
        defaults,
        fedavg_rounds,
        heads,
        images,
        kernels,
        mixed,
        new_clients,
        personalized,
        private_dual,
        private_school,
        protocol,
        robust,
        roles,
        rows,
        shakespeare,
        tasksets,
        tuning,
        virtual_letter,
        virtual_table2,
        wire,
    )

    return argparse.Namespace(
        protocol=protocol, tasksets=tasksets, rows=rows, fedavg=fedavg_rounds, images=images, table2=virtual_table2,
        roles=roles, shakespeare=shakespeare, letter=virtual_letter, kernels=kernels, mixed=mixed, heads=heads, defaults=defaults,
        tuning=tuning, personalized=personalized, personalized_parts=_personalized_parts, private_school=private_school,
        robust=robust, compression=compression, wire=wire, private_dual=private_dual, new_clients=new_clients,
    )  # fmt: skip


def flat(tasks=4, n=24, d=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tasks * n, d)).astype(np.float32)
    y = np.where(x[:, 0] + 0.3 * rng.normal(size=len(x)) > 0, 1.0, -1.0)
    return x, y, np.repeat(np.arange(tasks), n)


def options(folder, data, trials=2):
    from experiments.protocol import MODELS

    settings = dict(trials=trials, rounds=10, tol=1e-2, metric=None, seed=0, models=MODELS)
    return argparse.Namespace(data=data, out=folder, **settings)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.slow
def test_trials_are_resumed_and_tabled(experiments, tmp_path, capsys, monkeypatch):
    protocol = experiments.protocol
    x, y, task = flat()
    np.savez(tmp_path / "small.npz", X=x, y=y, task=task)
    monkeypatch.setattr(protocol, "LAMBDAS", (1.0, 0.01))
    paper = {"small": {"MTL": "0.46 (0.11)"}}
    protocol.study(options(tmp_path, [tmp_path / "small.npz"], trials=1), paper)
    path = tmp_path / "trials.csv"
    first = path.read_text()
    assert len(first.splitlines()) == 1 + len(protocol.MODELS)
    path.write_text(first + "small,rounds=10 tol=0.01 se")  # cut off by a kill
    protocol.study(options(tmp_path, [tmp_path / "small.npz"]), paper)
    rows = [row for row in experiments.rows.read(path, protocol.Row) if row.tasks == "small"]
    assert [(r.trial, r.model) for r in rows] == [(t, m) for t in range(2) for m in protocol.MODELS]
    assert path.read_text().startswith(first)
    table = (tmp_path / "table.md").read_text()
    assert "| MTL | " in table
    assert "0.46 (0.11) |" in table
    assert r"\begin{tabular}" in (tmp_path / "table.tex").read_text()
    assert "trial 1" in capsys.readouterr().out
    capsys.readouterr()
    protocol.study(options(tmp_path, [tmp_path / "small.npz"]), paper)  # nothing is left to do
    assert "trial" not in capsys.readouterr().out.splitlines()[1]


def test_skewed_sizes_differ_by_two_orders_of_magnitude(experiments, key):
    rng = np.random.default_rng(0)
    sizes = [300, 250, 280, 310, 260, 290]
    data = mj.pack_tasks([rng.normal(size=(n, 2)) for n in sizes], [np.sign(rng.normal(size=n)) for n in sizes])
    log, uniform = (np.asarray(experiments.protocol.skewed(key, data, how).sizes) for how in ("log-uniform", "uniform"))
    for skewed in (log, uniform):
        assert (skewed.min(), skewed.max()) == (3, 310)
        assert (skewed <= sizes).all()
        assert len(set(skewed.tolist())) > 3
    assert log.sum() < uniform.sum()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_same_tasks_from_all_formats(experiments, tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    x, y, task = flat()
    load = experiments.tasksets.load
    np.savez(tmp_path / "tasks.npz", X=x, y=y, task=task)
    cells = {"X": np.empty((1, 4), object), "Y": np.empty((1, 4), object)}
    for t in range(4):
        cells["X"][0, t], cells["Y"][0, t] = x[task == t], y[task == t][:, None]
    scipy_io.savemat(tmp_path / "tasks.mat", cells)
    activities, folder = np.where(y > 0, 4, 1), tmp_path / "UCI HAR"
    for part, rows in (("train", task < 2), ("test", task >= 2)):
        (folder / part).mkdir(parents=True)
        for name, values in (("X", x), ("y", activities), ("subject", task)):
            np.savetxt(folder / part / f"{name}_{part}.txt", values[rows])
    want = load(tmp_path / "tasks.npz").data
    for path in (tmp_path / "tasks.mat", folder):
        got = load(path).data
        np.testing.assert_allclose(got.x, want.x, rtol=1e-6)
        np.testing.assert_array_equal(got.y, want.y)
    scipy_io.savemat(tmp_path / "wrong.mat", {"A": 1.0})
    with pytest.raises(ValueError, match="has no X and Y"):
        load(tmp_path / "wrong.mat")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no X_train.txt"):
        load(tmp_path / "empty")
    assert isinstance(load(tmp_path / "tasks.npz").loss, mj.losses.Hinge)


def test_vehicles_are_tasks_of_two_classes(experiments, tmp_path):
    for run, sensors in {"aav3": (1, 41), "dw10": (1, 41)}.items():
        for sensor in sensors:
            place = tmp_path / "events" / "runs" / run / f"n{sensor}"
            place.mkdir(parents=True)
            for kind in (1, 2):
                np.savetxt(place / f"{run}evfeat{sensor}_1_{kind}.txt", np.full((3, 53), sensor + kind))
    found = experiments.tasksets.load(tmp_path / "events")
    assert isinstance(found.loss, mj.losses.Hinge)
    assert found.data.x.shape == (2, 6, 101)
    np.testing.assert_array_equal(found.data.y, np.repeat([[1.0, -1.0]], 3, axis=1).repeat(2, axis=0))


def test_a_line_that_was_cut_off_counts_for_nothing(experiments, tmp_path):
    protocol, path = experiments.protocol, tmp_path / "trials.csv"
    rows = [protocol.Row(*(kind(i) for kind in get_type_hints(protocol.Row).values())) for i in (12, 34, 56)]
    for row in rows[:2]:
        experiments.rows.append(path, row)
    whole = path.read_bytes()
    for cut in (1, 2, 3, 10):
        path.write_bytes(whole[:-cut])
        assert experiments.rows.read(path, protocol.Row) == rows[:1]
    experiments.rows.append(path, rows[2])
    assert experiments.rows.read(path, protocol.Row) == [rows[0], rows[2]]


def test_rounds_to_a_target_are_interpolated(experiments):
    crossing = experiments.fedavg.crossing
    rounds, accuracy = np.array([1, 3, 5, 7]), np.array([0.5, 0.9, 0.7, 0.98])
    assert crossing(rounds, accuracy, 0.94) == pytest.approx(6.0)
    assert crossing(rounds, accuracy, 0.4) == 1.0
    assert crossing(rounds, accuracy, 0.99) == float("inf")


@pytest.mark.slow
def test_the_slides_tables_are_resumed(experiments, tmp_path, capsys, monkeypatch):
    def main(*more):
        monkeypatch.setattr(
            "sys.argv",
            ["fedavg_rounds", "--clients", "8", "--samples", "40", "--rounds", "6", "--target", "0.3", "--batch", "10",
             "--fraction", "0.5", "--out", str(tmp_path), *more],
        )  # fmt: skip
        experiments.fedavg.main()
        return capsys.readouterr().out

    first = main("--rates", "0.1", "--parts", "iid")
    both = main("--rates", "0.1", "0.3", "--parts", "iid", "shards")
    assert first.count("rate 0.1 ") == 1
    assert both.count("rate 0.1 ") == 1  # the other was there
    assert both.count("rate 0.3 ") == 2
    assert not list(tmp_path.glob("*.npz"))
    rows = experiments.rows.read(tmp_path / "rounds.csv", experiments.fedavg.Row)
    assert len(rows) == 4
    assert (tmp_path / "fedavg_rounds.png").stat().st_size > 10_000
    assert "non-IID" in both


def test_roles_are_divided_in_time(experiments, tmp_path, key):
    texts = [b"abcdefghij" * 3, b"aaaaa", b"the quick brown fox jumps over it"]
    offsets = np.cumsum([0, *map(len, texts)])
    np.savez(tmp_path / "texts.npz", text=np.frombuffer(b"".join(texts), np.uint8), offsets=offsets)
    found = experiments.roles.shakespeare(tmp_path / "texts.npz", 8)
    alphabet = bytes(sorted(set(b"".join(texts))))
    assert found.symbols == len(alphabet)
    assert len(found.train) == 2  # five characters are too few

    def written(rows, lengths):
        said = "".join(chr(alphabet[int(row[0])]) for row in rows[:1])
        for row, n in zip(rows, lengths, strict=True):
            said += "".join(chr(alphabet[int(k)]) for k in row[1 : int(n) + 1])
        return said

    for train, test, text in zip(found.train, found.test, (texts[0], texts[2]), strict=True):
        cut = int(0.8 * len(text))
        assert (written(*train), written(*test)) == (text[:cut].decode(), text[cut:].decode())
    by_role, iid = (found.problem(key, iid) for iid in (False, True))
    assert by_role.data.sizes.tolist() == [len(rows) for rows, _ in found.train]
    assert sorted(iid.data.sizes.tolist()) == sorted(by_role.data.sizes.tolist())
    assert int(by_role.data.y.sum()) >= 2 * 8
    assert by_role.test.num_tasks == 1
    assert int(by_role.test.sizes.sum()) == sum(len(rows) for rows, _ in found.test)


def test_roles_of_leaf_are_rows_of_all_symbols(experiments, tmp_path):
    line = "What's in a name? That"
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        user = {"x": [line[:10], line[1:11]], "y": [line[10], line[11]]}
        content = {"users": ["JULIET"], "num_samples": [2], "user_data": {"JULIET": user}}
        (tmp_path / part / "0.json").write_text(json.dumps(content))
    found = experiments.roles.shakespeare(tmp_path, 80)
    rows, lengths = found.train[0]
    assert ["".join(mj.datasets.ALPHABET[int(k)] for k in row) for row in rows] == [line[:11], line[1:12]]
    assert lengths.tolist() == [10, 10]


@pytest.mark.slow
def test_the_language_model_is_trained_and_resumed(experiments, tmp_path, capsys, monkeypatch):
    def main(*more):
        monkeypatch.setattr(
            "sys.argv",
            ["shakespeare", "--clients", "6", "--length", "12", "--passes", "10", "--fraction", "0.5", "--marks", "0.2",
             "--sgd-rates", "1", "--rates", "1", "--parts", "roles", "--out", str(tmp_path), *more],
        )  # fmt: skip
        experiments.shakespeare.main()
        return capsys.readouterr().out

    first = main("--settings", "e1")
    every = main("--settings", "e1", "e5", "fedsgd")
    assert (first.count("rate 1 "), every.count("rate 1 ")) == (1, 2)  # one was there
    assert [line.split()[1:4] for line in every.splitlines()[-4:-1]] == [
        ["FedAvg", "1", "10"], ["FedAvg", "5", "10"], ["FedSGD", "1", "all"],
    ]  # fmt: skip
    rows = {
        row.epochs: row for row in experiments.rows.read(tmp_path / "rounds.csv", experiments.fedavg.Row) if row.batch
    }
    assert [len(rows[e].curve.split()) for e in (1, 5)] == [2, 2]
    assert rows[5].best > 0.2  # of 12 symbols
    assert (tmp_path / "shakespeare.png").stat().st_size > 10_000
    assert "is not here: skipped" in main("--data", str(tmp_path / "nothing.npz"))


def test_all_cells_of_the_slides_come_by_cost(experiments):
    options = argparse.Namespace(slides=True, model="cnn", clients=100, missing=False)
    cells = experiments.fedavg.cells(options)
    assert len(cells) == len(set(cells)) == sum(name[0] == "cnn" for name in experiments.fedavg.SLIDES)
    assert cells[0] == (5, 10, 0.0, True)  # 50 rounds of one client and five epochs
    assert cells[-1] == (5, 0, 0.5, False)  # 1067 rounds of fifty
    options = argparse.Namespace(slides=False, epochs=[1], batch=[0, 10], fraction=[0.1], parts=["shards"])
    assert experiments.fedavg.cells(options) == [(1, 0, 0.1, False), (1, 10, 0.1, False)]


@pytest.mark.slow
def test_the_letter_of_virtual_is_judged_and_pruned(experiments, tmp_path, capsys, monkeypatch):
    def main():
        monkeypatch.setattr(
            "sys.argv",
            ["virtual_letter", "--clients", "3", "--epochs", "1", "--draws", "1", "--hidden", "4", "--refinements", "2",
             "--ways", "letter", "--shares", "0", "0.9", "--out", str(tmp_path)],
        )  # fmt: skip
        experiments.letter.main()
        return capsys.readouterr().out

    first, again = main(), main()
    assert first.startswith("letter")
    assert again.startswith("\n|")  # nothing was trained again
    (row,) = experiments.rows.read(tmp_path / "letter.csv", experiments.letter.Row)
    assert len(row.accuracy.split()) == 2
    assert row.pruned.split()[0] == row.accuracy.split()[-1]  # nothing left out


STUDIES = {
    "kernels": ["--trials", "2", "--models", "SVC, local"],
    "mixed": ["--trials", "1", "--rounds", "20"],
    "heads": ["--trials", "1", "--rounds", "4", "--hidden", "8"],
    "defaults": ["--trials", "1", "--rows", "5", "--only", "one model"],
    "tuning": ["--short"],
}


@pytest.mark.parametrize("name", [n if n == "tuning" else pytest.param(n, marks=pytest.mark.slow) for n in STUDIES])
@pytest.mark.filterwarnings("ignore:cross_validate")
@pytest.mark.extended
def test_studies_are_resumed_and_tabled(name, experiments, tmp_path, capsys, monkeypatch):
    study = getattr(experiments, name)

    def main():
        monkeypatch.setattr("sys.argv", [name, *STUDIES[name], "--out", str(tmp_path)])
        study.main()
        return capsys.readouterr().out

    first, again = main(), main()
    assert "trial 0" in first
    assert "trial 0" not in again
    assert first.endswith(again[again.index("\n|") :])
    rows = experiments.rows.read(tmp_path / "trials.csv", study.Row)
    assert len(rows) == {"kernels": 2, "mixed": 4, "heads": 5, "defaults": 4, "tuning": 3}[name]


@pytest.mark.extended
def test_personalized_methods_are_resumed_and_tabled(experiments, tmp_path, capsys, monkeypatch):
    study = experiments.personalized

    def main(*methods, report=()):
        monkeypatch.setattr(
            "sys.argv",
            ["personalized", "--sets", "mixture", "school", "--data", "--seeds", "1", "--clients", "4", "--rounds", "2",
             "--rates", "1", "--out", str(tmp_path), *report, "--methods", *methods],
        )  # fmt: skip
        study.main()
        return capsys.readouterr()

    linear, heads = next(iter(study.GRIDS)), "FedAvg + MOCHA heads"
    first = main("Local", "Ditto")
    assert "school.npz is not here" in first.err
    path = tmp_path / "trials.csv"
    path.write_text(path.read_text() + "mixture,rounds=2")  # cut off by a kill
    methods = "Local", "Ditto", "FedU", "FedRep", linear, heads
    both = main(*methods)
    assert [sum(f"{method}: 0." in out for out in (first.out, both.out)) for method in methods] == [1] * 6
    rows = {row.method: row for row in experiments.rows.read(path, study.Row)}
    assert tuple(rows) == methods
    assert all(len(row.scores.split()) == 4 and row.lte > 0 for row in rows.values())
    parameters = 50 * 50 + 50 + 50 * 2 + 2
    assert rows["Ditto"].sent == rows["Ditto"].received == pytest.approx(4e-6 * parameters * rows["Ditto"].rounds)
    assert rows["Local"].sent == 0
    networks, vectors = 4e-6 * parameters * 2, 4e-6 * (50 + 1)  # of two rounds of averaging, then one a round
    assert rows[heads].sent == pytest.approx(networks + vectors * (rows[heads].rounds - 2))
    again = main(*methods, report=["--report"]).out
    assert again == both.out[both.out.index("\n|") :]
    assert (tmp_path / "personalized.png").stat().st_size > 5_000

    def newcomers(*more):
        of_trials = ["--trials", str(path), "--settings", "rounds=2 rates=1 clients=4", "--out", str(tmp_path / "new")]
        monkeypatch.setattr("sys.argv", ["new_clients", *of_trials, *more])
        experiments.new_clients.main()
        return capsys.readouterr().out

    trained, again = newcomers(), newcomers("--report")
    assert "mixture, seed 0, Ditto: 0." in trained
    assert trained.endswith(again[again.index("\n|") :])
    found = experiments.rows.read(tmp_path / "new" / "trials.csv", experiments.new_clients.Row)
    assert [row.method for row in found] == ["Local", "Ditto", "FedU", "FedRep"]  # no convex models
    assert found[0].joined == found[0].rounds
    assert {row.joined for row in found[1:]} <= set(experiments.new_clients.JOINED)
    assert all(len(row.scores.split()) == len(row.took_part.split()) == 4 for row in found)


def test_new_clients_are_not_among_the_others(experiments):
    for m in (4, 20, 29):
        old, new = experiments.new_clients.folds(m, seed=1)
        assert set(new.ravel()) == set(range(m))
        assert all(sorted([*a, *b]) == list(range(m)) for a, b in zip(old, new, strict=True))


def test_a_draw_of_personalized_methods_that_is_under_way_is_left_out(experiments):
    study = experiments.personalized
    blank = study.Row(*("" for _ in study.Row._fields))
    # Of digits all seeds have A and B, and one has C too; of letters the last one lacks B, and of words the only one.
    ran = {("digits", 0): "ABC", ("digits", 1): "AB", ("letters", 0): "AB", ("letters", 1): "AB", ("letters", 2): "A"}
    ran[("words", 0)] = "A"
    rows = [
        blank._replace(tasks=tasks, seed=seed, method=method)
        for (tasks, seed), methods in ran.items()
        for method in methods
    ] + [blank._replace(tasks="digits", seed=2, method=method) for method in "AB"]
    left_out = {(row.tasks, row.seed) for row in set(rows) - set(study.whole(rows))}
    assert left_out == {("letters", 2), ("words", 0)}


def test_roles_predict_the_character_after_eight_others(experiments, tmp_path):
    parts, roles = experiments.personalized_parts, [b"abcdefgh i" * 120, b"too short", b"ihgfedcba" * 150]
    np.savez(
        tmp_path / "roles.npz", text=np.frombuffer(b"".join(roles), np.uint8),
        offsets=np.cumsum([0, *map(len, roles)]),
    )  # fmt: skip
    xs, ys = parts.SOURCES["Shakespeare"].draw(tmp_path / "roles.npz", 0, 2)
    alphabet = np.unique(np.frombuffer(b"".join(roles), np.uint8))
    texts = set()
    for x, y in zip(xs, ys, strict=True):
        before = x.reshape(len(x), 8, len(alphabet))
        assert (before.sum(axis=2) == 1).all()
        texts.add(alphabet[np.column_stack([before.argmax(axis=2), y])].astype(np.uint8).tobytes())
    assert texts == {role[: len(role) // 9 * 9] for role in (roles[0], roles[2])}


def test_clients_of_personalized_methods_are_scored(experiments, tmp_path):
    parts, rng = experiments.personalized_parts, np.random.default_rng(0)
    x, y, task = rng.normal(size=(90, 3)), rng.normal(3.0, 12.0, 90), np.repeat([0, 1, 2], 30)
    np.savez(tmp_path / "school.npz", X=x, y=y, task=task)
    found = parts.federation(parts.SOURCES["school"], 0, 0, tmp_path / "school.npz")
    assert [data.sizes.tolist() for data in found[1:4]] == [[12] * 3, [6] * 3, [12] * 3]
    assert found.shape == parts.Shape("numbers", 3, 1, 3)
    real = np.asarray(found.test.weight) > 0
    off = np.asarray(found.test.y)[None, :, :, None] + np.array([0.0, 0.5])[:, None, None, None]
    rmse, loss = parts.scores(found.shape, off, found.test, found.scale)
    np.testing.assert_allclose(rmse, np.outer([0.0, 0.5 * y.std()], np.ones(3)), atol=1e-6)
    assert loss.tolist() == pytest.approx([0.0, 0.25])
    rare = found.shape._replace(kind="rare", outputs=2)
    data = found.test.replace(y=np.where(np.arange(real.shape[1]) % 3 == 0, 1.0, 0.0) * [[0.0], [1.0], [1.0]])
    p = rng.choice([0.2, 0.5, 0.7], (*real.shape, 1))
    area = parts.scores(rare, np.concatenate([1.0 - p, p], axis=-1), data, 1.0)[0]
    kept = data.replace(y=2.0 * data.y - 1.0)
    np.testing.assert_allclose(area, _areas(p[..., 0], kept), rtol=1e-6)


@pytest.mark.slow
def test_private_schools_are_resumed_and_tabled(experiments, tmp_path, capsys, monkeypatch):
    rng, study = np.random.default_rng(0), experiments.private_school
    x, task = rng.normal(size=(120, 3)), np.repeat([0, 1, 2], [30, 40, 50])
    y = 35.0 + 20.0 * np.tanh(x @ [1.0, -1.0, 0.5])
    np.savez(tmp_path / "school.npz", X=x, y=y, task=task)
    monkeypatch.setattr(study, "PULLS", (1.0,))
    command = ["private_school", "--data", str(tmp_path / "school.npz"), "--seeds", "1", "--rounds", "6", "--epsilons", "6",
               "inf", "--out", str(tmp_path)]  # fmt: skip
    monkeypatch.setattr("sys.argv", command)
    study.main()
    first = capsys.readouterr().out
    rows = experiments.rows.read(tmp_path / "runs.csv", study.Row)
    assert len(rows) == 3 + 2 * len(study.METHODS)
    # Without noise and clipping, and with whole batches, the published training is the library's, of one round more.
    monkeypatch.setattr(study, "BATCH", 64)
    monkeypatch.setattr(study, "CLIP", 1e3)
    monkeypatch.setattr(mj.privacy, "noise", lambda *_, **__: 0.0)
    study.algorithms.cache_clear()
    parts = study.split(np.load(tmp_path / "school.npz"), 1)
    for method in ("FedAvg", "Local"):
        ours = study.private(parts, method, 1.0, np.inf, 0, 7)
        assert study.published(parts, method, 1.0, 6.0, 0, 6) == pytest.approx(ours, rel=1e-4)
    monkeypatch.setattr(study, "private", None)
    study.main()
    assert capsys.readouterr().out == first
    assert (tmp_path / "private_school.png").stat().st_size > 5_000


@pytest.mark.extended
def test_noisy_sums_of_duals_are_resumed_and_lead_to_the_optimum(experiments, tmp_path, capsys, monkeypatch):
    study = experiments.private_dual
    x, y, task = flat()
    np.savez(tmp_path / "some.npz", X=x, y=y, task=task)
    few = ((2,), (0.1,), (1.0,), (0.1,))
    monkeypatch.setattr(study, "_CLASSES", dict.fromkeys(study.METHODS.values(), few))
    command = ["private_dual", "--data", str(tmp_path / "some.npz"), "--seeds", "1", "--epsilons", "2", "--out", str(tmp_path)]  # fmt: skip
    monkeypatch.setattr("sys.argv", command)
    study.main()
    first = capsys.readouterr().out
    assert len(experiments.rows.read(tmp_path / "runs.csv", study.Row)) == len(study.METHODS)
    # Without noise the steps end where the library's solver does; those of a batch, too, which gradients do not.
    tasks, numbers = (
        study.load(tmp_path / "some.npz", 0),
        study.Numbers(*(jnp.array([v]) for v in (9.0, 0.3, 0.1, 0.0))),
    )
    train, test = (data.replace(y=data.x[..., 0]) for data in tasks[:2])
    problem = mj.Problem(train, mj.losses.Squared(), mj.regularizers.MeanRegularized(0.3, 0.1))
    monkeypatch.setattr(study, "CAUTION", 2.0)  # with so few samples a batch may be twice as large as in the mean
    want = study.judged(mj.solve(problem, tol=1e-6).weights, test, False)
    for release in ("increments", "path"):
        keys = jax.random.split(jax.random.key(0), 1)
        method = study.Method(release, "mean")
        got = study.by_duals(train, test, 500, numbers, keys, method=method, classes=False)
        assert float(got[0]) == pytest.approx(float(want), rel=1e-3)
    monkeypatch.setattr(study, "errors", lambda tasks, method, wanted, seed: [0.0] * len(wanted))
    study.main()
    assert capsys.readouterr().out == first
    assert (tmp_path / "private_dual.png").stat().st_size > 10_000


@pytest.mark.extended
def test_rules_against_attacks_are_resumed_and_tabled(experiments, tmp_path, capsys, monkeypatch):
    study = experiments.robust
    monkeypatch.setattr(
        study, "ATTACKS", {"sign flip times 10": mj.robust.SignFlip(10.0), "labels turned around": None}
    )
    monkeypatch.setattr(study, "SHARES", (0.2,))
    command = ["robust", "--seeds", "1", "--rounds", "2", "--rules", "mean", "Krum", "--deals", "at random", "--out",
               str(tmp_path)]  # fmt: skip
    monkeypatch.setattr("sys.argv", command)
    study.main()
    first = capsys.readouterr().out
    assert len(experiments.rows.read(tmp_path / "runs.csv", study.Row)) == 2 * 3
    seeds: list[int] = []

    def error_of(*run):
        seeds.append(run[4])
        return 0.5

    monkeypatch.setattr(study, "error_of", error_of)
    study.main()
    assert not seeds
    assert first.endswith(capsys.readouterr().out[-200:])
    assert "| labels turned around |" in first
    command[2] = "2"
    study.main()
    assert seeds == [1] * 6
    assert len(experiments.rows.read(tmp_path / "runs.csv", study.Row)) == 2 * 6


@pytest.mark.slow
def test_forms_of_few_bytes_are_resumed_and_tabled(experiments, tmp_path, capsys, monkeypatch):
    study = experiments.compression
    few = {name: study.FORMS[name] for name in ("as they are", "1 bit, rotated")}
    monkeypatch.setattr(study, "FORMS", few)
    monkeypatch.setattr(study, "MOST", 20)
    x, y, task = flat()
    np.savez(tmp_path / "some.npz", X=x, y=y, task=task)
    monkeypatch.setattr("sys.argv", ["compression", "--data", str(tmp_path / "some.npz"), "--seeds", "1", "--rounds", "2",
                                     "--out", str(tmp_path)])  # fmt: skip
    study.main()
    first = capsys.readouterr().out
    rows = experiments.rows.read(tmp_path / "runs.csv", study.Row)
    assert [(row.tasks, row.form) for row in rows] == [(name, form) for name in ("some", study.NETWORK) for form in few]
    assert rows[3].kilobytes < 0.06 * rows[2].kilobytes
    monkeypatch.setattr(study, "certified", None)
    monkeypatch.setattr(study, "of_network", None)
    study.main()
    assert first.endswith(capsys.readouterr().out[-200:])
    assert (tmp_path / "compression.png").stat().st_size > 5_000


@pytest.mark.extended
def test_bytes_over_flower_are_those_of_the_forms(experiments, capsys, monkeypatch):
    pytest.importorskip("flwr")
    study = experiments.wire
    few = {name: study.FORMS[name] for name in ("as they are", "1 bit, rotated")}
    monkeypatch.setattr(study, "FORMS", few)
    monkeypatch.setattr("sys.argv", ["wire"])
    study.main()
    plain, coded = ([int(cell.replace(",", "")) for cell in line.split("|")[2:-1]]
                    for line in capsys.readouterr().out.splitlines()[2:])  # fmt: skip
    assert plain[0] - coded[0] == 8 * 561 - (1024 // 8 + 3 * 4)  # a bit for each of 1,024 numbers, and three of 32 bits
    assert all(message > arrays for row in (plain, coded) for arrays, message in zip(row[::2], row[1::2], strict=True))
    assert coded[3] < 0.05 * plain[3]


def _areas(scores, data):
    """The library's areas, of a model with one feature, the score itself."""
    one = data.replace(x=scores[..., None] * np.ones_like(np.asarray(data.y))[..., None])
    return np.asarray(mj.metrics.auc(np.ones((data.num_tasks, 1)), one, per_task=True))


@pytest.mark.slow
def test_table_2_is_resumed(experiments, tmp_path, capsys, monkeypatch):
    def main(splits):
        monkeypatch.setattr(
            "sys.argv",
            ["virtual_table2", "--samples", "160", "--epochs", "2", "--hidden", "8", "--splits", splits, "--out", str(tmp_path)],
        )  # fmt: skip
        experiments.table2.main()
        return capsys.readouterr().out

    assert main("1").count("split 0") == 5
    again = main("2")
    assert (again.count("split 0"), again.count("split 1")) == (0, 5)
    table = (tmp_path / "table.md").read_text()
    assert "| VIRTUAL | 0." in table
    assert (tmp_path / "table2.png").stat().st_size > 5_000


def test_writers_are_clients(experiments, key):
    train, test = experiments.images.blobs(key)
    assert len(test.y) == len(train.y) // 3
    data = experiments.images.writers(key, train, 5, least=50)
    assert data.num_nodes == 5
    assert int(data.sizes.min()) >= 50
