"""A step of the weighing as one kernel on a GPU, by Triton, for versions of JAX whose Mosaic is not for all cards."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from mocha_jax.servers._quadratic_programs import Programs, answer
from mocha_jax.servers._quadratic_programs_kernels import KernelPlan

if TYPE_CHECKING:
    from jax import Ref

# Numbers of all points of a program's nodes, in so many warps; and its nodes at most.
_NUMBERS, _WARPS, _MOST_NODES = 2**12, 4, 2**5

# Rows of others that a program mixes at once.
_ROWS_AT_ONCE = 2**3

# Results of the first step, which takes nothing from an earlier one.
_FIRST = 4


def plan(m: int, d: int, p: int) -> KernelPlan:
    """Choose as many nodes as one program can hold; its arrays have sizes that are powers of two."""
    del m
    size = pl.next_power_of_2(p) * pl.next_power_of_2(d)
    return KernelPlan(max(min(_NUMBERS // size, _MOST_NODES), 1), d)


def step(plan: KernelPlan, relaxation: float | None, interpret: object, *arrays: Array) -> list[Array]:
    """See `mocha_jax.servers._quadratic_programs_kernels.Kernel`."""
    m, p, d = arrays[0].shape
    count = pl.cdiv(m, plan.nodes)
    gram = [(m, p * (p + 1) // 2)] if len(arrays) == _FIRST else []
    return pl.pallas_call(
        partial(_kernel, relaxation, plan.nodes, pl.next_power_of_2(d)),
        out_shape=[jax.ShapeDtypeStruct(shape, arrays[0].dtype) for shape in [(m, d), (m, p), (count, d), *gram]],
        grid=(count,),
        compiler_params=pltriton.CompilerParams(num_warps=_WARPS),
        interpret=bool(interpret),
        name="weigh_on_gpu",
    )(*arrays)


def _kernel(
    relaxation: float | None, nodes: int, width: int, along: Ref, slope: Ref, free: Ref, stiffness: Ref, *refs: Ref
) -> None:
    """A step of a few nodes; the arguments are references to whole arrays.

    Triton's arrays have sizes that are powers of two: what is beyond p points and d features is masked.
    """
    m, p, d = along.shape
    points = range(p)
    node = pl.program_id(0) * nodes + lax.iota(jnp.int32, nodes)
    feature = lax.iota(jnp.int32, width)[None]
    real = node < m
    inside = real[:, None] & (feature < d)

    def numbers(ref: Ref) -> Array:
        common = ref.shape[0] == 1
        return pltriton.load(ref.at[jnp.zeros_like(node) if common else node], mask=real, other=0)

    def by_point(ref: Ref) -> list[Array]:
        return [pltriton.load(ref.at[node, j], mask=real, other=0) for j in range(ref.shape[1])]

    def matrix(ref: Ref) -> Array:
        return pltriton.load(ref.at[node[:, None], feature], mask=inside, other=0)

    def against(z: Array) -> list[Array]:
        """Products of the points' vectors with one of every node, times the stiffness."""
        return [numbers(stiffness) * jnp.sum(vector * z, axis=1) for vector in vectors]

    def mixed(rows: Ref, mix: Ref) -> Array:
        """Mix rows, a few at a time."""
        count, common = rows.shape[0], mix.shape == (1, 1)
        some = min(_ROWS_AT_ONCE, pl.next_power_of_2(count))

        def add(k: Array, pulled: Array) -> Array:
            row = k * some + lax.iota(jnp.int32, some)
            row_exists = (row < count)[:, None]
            others = pltriton.load(rows.at[row[:, None], feature], mask=row_exists & (feature < d), other=0)
            if common:
                return pulled + jnp.sum(others, axis=0)[None]
            much = pltriton.load(mix.at[node[:, None], row[None]], mask=real[:, None] & row_exists.T, other=0)
            return pulled + jnp.sum(much[:, :, None] * others[None], axis=1)

        none = jnp.zeros((1 if common else nodes, width), along.dtype)
        pulled = lax.fori_loop(0, pl.cdiv(count, some), add, none)
        if not common:
            return pulled
        first = jnp.zeros_like(node)
        return pltriton.load(mix.at[first, first], mask=real, other=0)[:, None] * pulled

    vectors = [pltriton.load(along.at[node[:, None], j, feature], mask=inside, other=0) for j in points]
    if len(refs) == _FIRST:
        h_out, a_out, sums_out, gram_out = refs
        products = [product for i, vector in enumerate(vectors) for product in against(vector)[: i + 1]]
        for k, product in enumerate(products):
            pltriton.store(gram_out.at[node, k], product, mask=real)
        h = pulled = jnp.zeros_like(vectors[0])
        weights = asked = [jnp.zeros_like(products[0])] * p
    else:
        gram_in, h_in, a_in, scale, rows, *mix, h_out, a_out, sums_out = refs
        products, weights, h = by_point(gram_in), by_point(a_in), matrix(h_in)
        pulled = numbers(scale)[:, None] * h + (mixed(rows, mix[0]) if mix else matrix(rows))
        asked = against(h - 2.0 * pulled)
    gram = tuple(tuple(products[i * (i + 1) // 2 :][: i + 1]) for i in points)
    new_weights = answer(Programs(tuple(by_point(slope)), gram, numbers(free)), asked, weights)
    moved = jnp.zeros_like(h)
    for weight, vector in zip(new_weights, vectors, strict=True):
        moved += weight[:, None] * vector
    after = moved if relaxation is None else h + relaxation * (moved - h + pulled)
    pltriton.store(h_out.at[node[:, None], feature], after, mask=inside)
    for j, weight in enumerate(new_weights):
        pltriton.store(a_out.at[node, j], weight, mask=real)
    summed = jnp.sum(jnp.where(inside, after, 0.0), axis=0)[None]
    pltriton.store(sums_out.at[pl.program_id(0) + jnp.zeros_like(feature), feature], summed, mask=feature < d)
