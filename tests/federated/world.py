"""Federations in one process, as the tests run them: messages are handed over, with or without an accident."""

import jax
import jax.numpy as jnp
import numpy as np

import mocha_jax as mj
from mocha_jax.federated import Header
from mocha_jax.federated._message import arrays_of
from tests import zoo

M, D = 5, 4
SCALING = "task_mean"


def tables(regression=False, seed=3, dtype=np.float64):
    return zoo.ragged(seed=seed, m=M, d=D, regression=regression, dtype=dtype)


def labels():
    """Samples of three classes."""
    xs, ys = tables(regression=True)
    cuts = np.quantile(np.concatenate(ys), [1 / 3, 2 / 3])
    return xs, [np.digitize(y, cuts).astype(y.dtype) for y in ys]


def prediction_of(xs, ys, scaling="sum"):
    return mj.Prediction(mj.pack_tasks(xs, ys, dtype=xs[0].dtype, loss_scaling=scaling))


def problem_of(xs, ys, loss, regularizer):
    data = mj.pack_tasks(xs, ys, dtype=xs[0].dtype, loss_scaling=SCALING)
    return mj.Problem(data, loss, regularizer)


def nodes_of(xs, ys, loss, algorithm, rows=None, scaling=SCALING, **options):
    rows = max(map(len, xs)) if rows is None else rows
    return [
        mj.federated.Node(x, y, loss, algorithm, rows=rows, dtype=x.dtype, loss_scaling=scaling, **options)
        for x, y in zip(xs, ys, strict=True)
    ]


def server_of(algorithm, regularizer, dtype=np.float64, scaling=SCALING, **options):
    return mj.federated.Server(algorithm, regularizer, M, D, dtype=dtype, loss_scaling=scaling, **options)


def works(problem, algorithm, key, systems, rounds):
    """The steps of every node in every round, None where it does not answer: as `run` plans them."""
    systems = algorithm.select_nodes(mj.systems.Full() if systems is None else systems)
    for done in range(rounds):
        request = algorithm.request(problem, np.int32(done))
        work = systems.work(jax.random.fold_in(key, np.uint32(2**32 - 1)), problem.data, request)
        steps = np.asarray(work.budget(request.steps))
        yield [int(s) if s > 0 else None for s in steps]


def deployed(server, nodes, key, rounds, plan=None, lost=None, begin=None):
    """Run so many rounds, and report after each what the answers of the next one say of its model.

    Of round r the answers of the tasks in ``lost[r]`` do not arrive. `begin` goes on from states of server and nodes.
    """
    state, mine = begin or (server.init(), [node.init() for node in nodes])
    mine, reports = list(mine), []
    for r, steps in enumerate(plan or [[-1] * len(nodes)] * rounds):
        ups = {}
        for task, node in enumerate(nodes):
            if steps[task] is not None:
                down = server.down(state, task, steps=None if steps[task] < 0 else steps[task])
                mine[task], up = node.step(key, mine[task], down)
                if lost is None or task not in lost[r]:
                    ups[task] = up
        state, report = server.step(state, ups)
        assert not report.refused, report.refused
        reports.append(report)
    return state, mine, reports


def as_each_by_itself(key, server, nodes, there, mine, together, side):
    """Assert that nodes together answer as each by itself, and return what they keep and what each keeps."""
    steps = [-1, 1, 0, -1, 2]
    downs = [server.down(there, task, steps=None if s < 0 else s) for task, s in enumerate(steps)]
    header = Header(
        *(
            jnp.asarray([getattr(d, name) for d in downs], jnp.int32)
            for name in ("round", "incarnation", "held", "task")
        )
    )
    down = server._side.down(there.inner).exchange(steps=jnp.asarray(steps, jnp.int32))
    here = jax.random.fold_in(jax.random.fold_in(key, downs[0].round - 1), 1)
    kept, held, up = side.work(here, together, header, down)
    alone = [node.step(key, one, d) for node, one, d in zip(nodes, mine, downs, strict=True)]
    assert held.tolist() == [answer.held for _, answer in alone]
    for task, (_, answer) in enumerate(alone):
        for name, array in arrays_of(jax.tree.map(lambda a, t=task: a[t : t + 1], up)).items():
            np.testing.assert_allclose(array, answer.arrays[name], rtol=1e-9, atol=1e-9, err_msg=name)
    return kept, [one for one, _ in alone]
