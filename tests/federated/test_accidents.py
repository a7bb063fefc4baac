"""Nodes and servers that stop, begin again, join and leave: ends at the same optimum, and the bound holds meanwhile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mocha_jax as mj
from tests.federated import world

R, L = mj.regularizers, mj.losses
SAFE = mj.Mocha(server="dual", sigma_prime="per_task")
GIVEN, LEARNED = R.MeanRegularized(0.2, 0.05), R.Probabilistic(0.05)
SERVERS = {"safe": (SAFE, GIVEN), "adaptive": (mj.Mocha(), GIVEN), "proximal": (mj.Mocha(), LEARNED)}


class World:
    """A federation whose messages are handed over at once."""

    def __init__(self, name, key):
        self.algorithm, regularizer = SERVERS[name]
        self.xs, self.ys = world.tables()
        self.key = key
        self.problem = world.problem_of(self.xs, self.ys, L.Hinge(), regularizer)
        self.nodes = world.nodes_of(self.xs, self.ys, L.Hinge(), self.algorithm)
        self.server = world.server_of(self.algorithm, regularizer)
        self.state, self.mine = self.server.init(), [node.init() for node in self.nodes]
        self.best = float(mj.solve(self.problem, mj.Mocha(), tol=1e-10, max_rounds=5000).certificate.joint_primal)

    def rounds(self, count, without=()):
        for _ in range(count):
            ups = {}
            for task, node in enumerate(self.nodes):
                if task not in without:
                    down = self.server.down(self.state, task)
                    self.mine[task], ups[task] = node.step(self.key, self.mine[task], down)
            self.state, report = self.server.step(self.state, ups)
            assert not report.refused, report.refused
            if report.quality.joint_dual > -np.inf:
                assert report.quality.joint_dual <= self.best * (1 + 1e-9)
        return report

    def at_optimum(self, count=150):
        report = self.rounds(count)
        assert report.quality.relative_joint_gap < 1e-7
        np.testing.assert_allclose(float(report.quality.joint_primal), self.best, rtol=1e-7)
        return True


@pytest.fixture(params=[pytest.param("safe", marks=pytest.mark.slow), "adaptive", "proximal"])
def federation(request, key):
    return World(request.param, key)


@pytest.mark.slow
def test_a_node_begins_again_from_nothing(federation):
    federation.rounds(20)
    federation.mine[2] = federation.nodes[2].init()
    assert federation.at_optimum()


@pytest.mark.parametrize("since", [20, 1])
@pytest.mark.slow
def test_a_node_begins_again_from_what_it_kept_before(federation, since):
    federation.rounds(5)
    kept = federation.mine[2]
    federation.rounds(since)
    federation.mine[2] = kept
    assert federation.at_optimum()


@pytest.mark.parametrize("since", [20, 1])
@pytest.mark.slow
def test_the_server_begins_again_from_an_earlier_state(federation, since):
    federation.rounds(5)
    kept = federation.state
    federation.rounds(since)
    federation.state = federation.server.restarted(kept, incarnation=1)
    assert federation.at_optimum()


@pytest.mark.slow
def test_a_server_that_forgets_to_say_so_is_refused(federation):
    """Of two answers to one round a node could not know which one is held."""
    federation.rounds(5)
    kept = federation.state
    federation.rounds(1)
    federation.state = kept
    with pytest.raises(mj.federated.Refused, match="the server sent round 6, and round 6 is answered already"):
        federation.rounds(1)


@pytest.mark.slow
def test_the_server_begins_again_from_nothing(federation):
    federation.rounds(20)
    federation.state = federation.server.init(incarnation=1)
    assert federation.at_optimum()


@pytest.mark.extended
def test_a_new_server_over_used_nodes_knows_a_bound_from_its_second_round_on(key):
    """As the page on Flower says; of nodes that are new, too, it knows one in the first."""
    federation = World("proximal", key)
    assert np.isfinite(float(federation.rounds(1).quality.bound))
    before = float(federation.rounds(4).quality.bound)
    federation.state = federation.server.init(incarnation=1)
    assert float(federation.rounds(1).quality.bound) == -np.inf
    assert before * (1 - 1e-9) <= float(federation.rounds(1).quality.bound) <= federation.best * (1 + 1e-9)


@pytest.mark.slow
def test_a_server_of_another_life_is_told_whole_vectors(key):
    federation = World("safe", key)
    federation.rounds(20)
    federation.state = federation.server.init(incarnation=1)
    federation.rounds(1)
    v = federation.problem.data.dual_vectors(np.concatenate([mine.beta for mine in federation.mine]))
    np.testing.assert_allclose(federation.state.inner.v, v, atol=1e-12)
    report = federation.rounds(1)
    assert report.quality.relative_gap < 0.05  # what the nodes had done is not lost


@pytest.mark.slow
def test_a_node_that_leaves_for_good_takes_its_samples_with_it(federation):
    federation.rounds(10)
    federation.state = federation.server.leave(federation.state, 1)
    data = federation.problem.data
    others = federation.problem.replace(data=data.replace(weight=data.weight.at[1].set(0.0)))
    best = mj.solve(others, mj.Mocha(), tol=1e-10, max_rounds=5000).certificate
    federation.best = float(best.joint_primal)
    report = federation.rounds(150, without=(1,))
    assert report.quality.relative_joint_gap < 1e-7
    np.testing.assert_allclose(float(report.quality.joint_primal), federation.best, rtol=1e-7)


@pytest.mark.slow
def test_a_node_that_joins_later_counts_from_then_on(federation):
    everyone = federation.best
    federation.state = federation.server.leave(federation.state, 1)
    federation.best = np.inf
    report = federation.rounds(40, without=(1,))
    assert report.quality.relative_joint_gap < 1e-3
    federation.state = federation.server.join(federation.state, 1)
    federation.best = everyone
    assert federation.at_optimum()


@pytest.mark.slow
def test_a_node_that_has_left_is_not_heard(key):
    federation = World("safe", key)
    down = federation.server.down(federation.state, 1)
    _, up = federation.nodes[1].step(key, federation.mine[1], down)
    left = federation.server.leave(federation.state, 1)
    _, report = federation.server.step(left, {1: up})
    assert "the node of task 1 takes no part in the federation any more" in report.refused[1]


@pytest.mark.slow
def test_an_answer_that_comes_too_late_costs_a_round(key):
    """A node keeps the vectors of its last answers: of one that it has forgotten it tells where it stands, no more."""
    federation = World("safe", key)
    federation.rounds(3)
    ups = []
    for _ in range(12):  # the server hears nothing of node 0
        down = federation.server.down(federation.state, 0)
        federation.mine[0], up = federation.nodes[0].step(key, federation.mine[0], down)
        ups.append(up)
        federation.rounds(1, without=(0,))
    federation.state, report = federation.server.step(federation.state, {0: ups[1]})
    assert report.accepted == (0,)
    before = np.asarray(federation.mine[0].beta)
    down = federation.server.down(federation.state, 0)
    federation.mine[0], up = federation.nodes[0].step(key, federation.mine[0], down)
    np.testing.assert_array_equal(federation.mine[0].beta, before)
    assert up.arrays["share"] == 0
    federation.state, report = federation.server.step(federation.state, {0: up})
    assert report.accepted == (0,)
    assert federation.at_optimum()


@pytest.mark.extended
def test_work_of_lost_answers_is_not_lost(key):
    """A node whose answers were lost twice is as far, once it is heard, as one that was heard each time."""
    heard, lost = World("safe", key), World("safe", key)
    for one in (heard, lost):
        one.rounds(3)
    others = (1, 2, 3, 4)
    heard.rounds(3, without=others)
    for _ in range(2):
        lost.mine[0], _ = lost.nodes[0].step(key, lost.mine[0], lost.server.down(lost.state, 0))
        lost.rounds(1, without=(0, *others))
    report = lost.rounds(1, without=others)
    assert report.accepted == (0,)
    # The subproblem that it has worked on all the time is of the model that it was sent first: that differs from the
    # other's once it was heard, so that the objectives are alike, not equal.
    values = [float(mj.objective(one.problem, one.server.weights(one.state))) for one in (heard, lost)]
    assert values[1] < float(mj.objective(heard.problem, jnp.zeros((world.M, world.D))))
    assert abs(values[1] - values[0]) < 0.05 * values[0]


@pytest.mark.slow
def test_messages_are_the_same_for_equal_states(key):
    federation = World("proximal", key)
    federation.rounds(2)
    one, two = (federation.server.down(federation.state, 3) for _ in range(2))
    assert one.header == two.header
    assert jax.tree.all(jax.tree.map(np.array_equal, dict(one.arrays), dict(two.arrays)))
