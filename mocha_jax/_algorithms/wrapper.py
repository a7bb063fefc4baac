"""Algorithms around a dual method, whose rounds ask the nodes for that method's work."""

from __future__ import annotations

from typing import Self

from jax import Array

from mocha_jax._algorithms.base import Algorithm
from mocha_jax._algorithms.dual_method import DualMethod
from mocha_jax._node.buckets import BucketSizes
from mocha_jax._problem.problem import Problem
from mocha_jax.systems import System
from mocha_jax.systems._base import Request


class Around(Algorithm[Problem]):
    """Base class of algorithms that transform the rounds of a dual method; their cost is the method's."""

    algorithm: DualMethod

    def check(self, problem: Problem) -> None:
        self.algorithm.check(problem)

    def select_nodes(self, systems: System) -> System:
        return self.algorithm.select_nodes(systems)

    def by_loops(self, problem: Problem) -> Self | None:
        other = self.algorithm.by_loops(problem)
        return None if other is None else self.replace(algorithm=other)

    @property
    def lays_out(self) -> bool:
        return self.algorithm.lays_out

    def prepare(self, problem: Problem, bucketing: BucketSizes = ()) -> Problem:
        return self.algorithm.prepare(problem, bucketing)

    def full_work(self, problem: Problem) -> Array:
        return self.algorithm.full_work(problem)

    def step_flops(self, problem: Problem) -> Array | float:
        return self.algorithm.step_flops(problem)

    def fixed_flops(self, problem: Problem) -> Array | float:
        return self.algorithm.fixed_flops(problem)

    def request(self, problem: Problem, round: Array | int = 0) -> Request:
        return self.algorithm.request(problem, round)
