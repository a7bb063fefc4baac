"""The model of a round's time: programs written by hand, of which everything is known."""

import math

import pytest

from benchmarks._hlo import Program
from benchmarks._machines import MACHINES, Link, Machine
from benchmarks._model import collective, of_step, seconds
from benchmarks._work import of_a_round, steps
from benchmarks.launches import of_a_round as launched

# Five times four rounds of a run: each takes its row of x, [20, 3, 8], multiplies it with w, [8, 8], and puts it in a.
RUN = """HloModule jit_go, is_scheduled=true

%taken (p0: f32[20,3,8], p1: s32[]) -> f32[3,8] {
  %p0 = f32[20,3,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,3,8]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,3,8}
  ROOT %b = f32[3,8]{1,0} bitcast(%row)
}

%put (p0: f32[20,3,8], p1: f32[3,8], p2: s32[]) -> f32[20,3,8] {
  %p0 = f32[20,3,8]{2,1,0} parameter(0)
  %p1 = f32[3,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %b = f32[1,3,8]{2,1,0} bitcast(%p1)
  ROOT %u = f32[20,3,8]{2,1,0} dynamic-update-slice(%p0, %b, %p2, %zero, %zero)
}

%one_round (t: (s32[], f32[20,3,8], f32[20,3,8], f32[8,8])) -> (s32[], f32[20,3,8], f32[20,3,8], f32[8,8]) {
  %t = (s32[], f32[20,3,8]{2,1,0}, f32[20,3,8]{2,1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[20,3,8]{2,1,0} get-tuple-element(%t), index=1
  %a = f32[20,3,8]{2,1,0} get-tuple-element(%t), index=2
  %w = f32[8,8]{1,0} get-tuple-element(%t), index=3
  %row = f32[3,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%taken
  %product = f32[3,8]{1,0} dot(%row, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %new = f32[20,3,8]{2,1,0} fusion(%a, %product, %i), kind=kLoop, calls=%put
  ROOT %out = (s32[], f32[20,3,8]{2,1,0}, f32[20,3,8]{2,1,0}, f32[8,8]{1,0}) tuple(%i, %x, %new, %w)
}

%inner (c: (s32[], f32[20,3,8], f32[20,3,8], f32[8,8])) -> pred[] {
  %c = (s32[], f32[20,3,8]{2,1,0}, f32[20,3,8]{2,1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %four = s32[]{:T(128)} constant(4)
  ROOT %lt = pred[] compare(%i, %four), direction=LT
}

%some_rounds (t: (s32[], f32[20,3,8], f32[20,3,8], f32[8,8])) -> (s32[], f32[20,3,8], f32[20,3,8], f32[8,8]) {
  %t = (s32[], f32[20,3,8]{2,1,0}, f32[20,3,8]{2,1,0}, /*index=3*/f32[8,8]{1,0}) parameter(0)
  %w = f32[8,8]{1,0} get-tuple-element(%t), index=3
  %sum = f32[8,8]{1,0} all-reduce(%w), replica_groups=[1,8]<=[8], to_apply=%inner
  ROOT %loop = (s32[], f32[20,3,8]{2,1,0}, f32[20,3,8]{2,1,0}, f32[8,8]{1,0}) while(%t), condition=%inner, body=%one_round
}

ENTRY %main (x: f32[20,3,8], w: f32[8,8]) -> f32[20,3,8] {
  %x = f32[20,3,8]{2,1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %i = s32[] constant(0)
  %before = f32[20,3,8]{2,1,0} copy(%x)
  %start = (s32[], f32[20,3,8]{2,1,0}, f32[20,3,8]{2,1,0}, f32[8,8]{1,0}) tuple(%i, %x, %before, %w)
  %rounds = (s32[], f32[20,3,8]{2,1,0}, f32[20,3,8]{2,1,0}, f32[8,8]{1,0}) while(%start), condition=%inner, body=%some_rounds, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %last = f32[20,3,8]{2,1,0} get-tuple-element(%rounds), index=2
}
"""
ROW, W, X = 4 * 3 * 8, 4 * 8 * 8, 4 * 20 * 3 * 8


def test_a_round_moves_its_rows_and_no_more():
    found = {s.kind: s for s in of_a_round(RUN, 20)}
    assert {kind: s.times for kind, s in found.items()} == {"fusion": 1, "dot": 1, "all-reduce": 0.25}
    moved = sum(s.times * s.bytes for s in of_a_round(RUN, 20))
    taken, multiplied, put, summed = 2 * ROW + 4, 2 * ROW + W, 2 * ROW + 4, 2 * W
    assert moved == taken + multiplied + put + summed / 4
    assert found["dot"].flops == 2 * 3 * 8 * 8
    assert (found["all-reduce"].group, found["all-reduce"].sent) == (8, W)
    assert sum(s.times for s in steps(RUN)) == 1 + 5 + 20 * 3
    with pytest.raises(ValueError, match="no loop of 7 rounds"):
        of_a_round(RUN, 7)


def test_what_is_touched_again_after_how_many_bytes():
    since = {s.kind: {a.bytes: a.since for a in s.accesses} for s in of_a_round(RUN, 20)[1:]}
    # In a turn of the inner loop the row of x and that of a, their product, the row by itself, w and the counter.
    turn = 4 * ROW + W + 4
    assert since["dot"][W] == turn
    # The twenty rows come back with the next run of the program, which touches x, a, w, and what it makes.
    moving = [a for s in of_a_round(RUN, 20) for a in s.accesses if a.since > turn and a.bytes == ROW]
    assert len(moving) == 2
    assert {a.since for a in moving} == {2 * X + 2 * ROW + 2 * W + 4}


OPEN = """
%less (p: s32[], q: pred[]) -> pred[] {
  %p = s32[] parameter(0)
  %q = pred[] parameter(1)
  %most = s32[] constant(48)
  %lt = pred[] compare(%p, %most), direction=LT
  ROOT %and = pred[] and(%lt, %q)
}

%test (t: (s32[], pred[], f32[64])) -> pred[] {
  %t = (s32[], pred[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %q = pred[] get-tuple-element(%t), index=1
  ROOT %f = pred[] fusion(%i, %q), kind=kLoop, calls=%less
}

%body (t: (s32[], pred[], f32[64])) -> (s32[], pred[], f32[64]) {
  %t = (s32[], pred[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %q = pred[] get-tuple-element(%t), index=1
  %v = f32[64]{0} get-tuple-element(%t), index=2
  %n = f32[64]{0} negate(%v)
  ROOT %out = (s32[], pred[], f32[64]{0}) tuple(%i, %q, %n)
}

ENTRY %main (t: (s32[], pred[], f32[64])) -> (s32[], pred[], f32[64]) {
  %t = (s32[], pred[], f32[64]{0}) parameter(0)
  ROOT %w = (s32[], pred[], f32[64]{0}) while(%t), condition=%test, body=%body
}
"""


def test_an_open_ended_loop_counts_once_or_as_often_as_it_may():
    assert [s.times for s in steps(OPEN)] == [1]
    assert [s.times for s in steps(OPEN, longest=True)] == [48]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[40000,32]{0,1:T(8,128)}", 4 * 40_064 * 32),
        ("f32[40000,32]{0,1:T(8,128)S(1)}", 0),
        ("bf16[3,5]{1,0}", 30),
        ("pred[7]{0}", 7),
        ("f32[]", 4),
    ],
)
def test_bytes_of_an_array(shape, expected):
    program = Program(f"ENTRY %main (x: f32[]) -> f32[] {{\n  ROOT %x = {shape} parameter(0)\n}}\n")
    assert program.root("main").results[0].bytes == expected


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("[1,8]<=[8]", 8),
        ("{{0,1,2,3}}", 4),
        ("mesh['axis_0'=256,'axis_1'=2] {'axis_0'}", 256),
        ("mesh['axis_0'=256,'axis_1'=2] {'axis_0','axis_1'}", 512),
    ],
)
def test_devices_of_a_collective(groups, expected):
    text = RUN.replace("replica_groups=[1,8]<=[8]", f"replica_groups={groups}")
    [step] = [s for s in steps(text) if s.kind == "all-reduce"]
    assert step.group == expected


def test_the_products_of_a_tpu_are_convolutions():
    text = """
ENTRY %main (x: f32[50,32], y: f32[50,16]) -> f32[32,16] {
  %x = f32[50,32]{1,0} parameter(0)
  %y = f32[50,16]{1,0} parameter(1)
  ROOT %c = f32[32,16]{1,0} convolution(%x, %y), dim_labels=fb_io->bf
}
"""
    assert [s.flops for s in steps(text)] == [2 * 50 * 32 * 16]


PLAIN = Machine(
    "plain", start=1e-6, memories=((1000, 1e9), (math.inf, 1e8)), flops=1e9,
    links=(Link(8, 1e8, 1e-6), Link(64, 1e7, 1e-5)), columns=(("syevd", 1e-6),), shared=1e-5,
)  # fmt: skip


def test_the_time_of_a_round_is_the_sum_of_its_parts():
    found = of_a_round(RUN, 20)
    times = seconds(found, PLAIN)
    assert times.starts == pytest.approx(3.25e-6)
    assert times.products == pytest.approx(2 * 3 * 8 * 8 / 1e9)
    far = 2 * ROW + 2 * W / 4  # the two rows that move, and the sum, are touched again after more than 1000 bytes
    moved = sum(s.times * s.bytes for s in found)
    assert times.memory == pytest.approx((moved - far) / 1e9 + far / 1e8)
    assert times.network == pytest.approx((2 * 1e-6 * 3 + 2 * 7 / 8 * W / 1e8) / 4)
    assert times.total == pytest.approx(sum(times))


def test_collectives_go_by_the_slowest_link_and_over_all_hops():
    assert collective("all-reduce", 64, 80, PLAIN) == pytest.approx(
        2 * 1e-6 * 3 + 2 * 1e-5 * 3 + 2 * 63 / 64 * 80 / 1e7
    )
    assert collective("all-gather", 4, 80, PLAIN) == pytest.approx(2 * 1e-6 * 2 + 3 * 80 / 1e8)
    torus = PLAIN._replace(links=(Link(256, 1e8, 1e-6, torus=True),))
    assert collective("all-reduce", 256, 0, torus) == pytest.approx(2 * 16 * 1e-6)


def test_calls_cost_by_the_column_and_shared_steps_more_to_start():
    text = """
ENTRY %main (x: f32[32,32]) -> (f32[32,32], f32[32], s32[]) {
  %x = f32[32,32]{0,1} parameter(0)
  ROOT %e = (f32[32,32]{0,1}, f32[32]{0}, s32[]) custom-call(%x), custom_call_target="lapack_ssyevd_ffi", backend_config={"outer_dimension_partitions":["2"]}
}
"""
    [step] = steps(text)
    assert of_step(step, PLAIN).calls == pytest.approx(32e-6)
    assert of_step(step, PLAIN).starts == pytest.approx(1.1e-5)


def test_scalars_are_free_where_another_processor_has_them():
    text = "ENTRY %main (x: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n  ROOT %y = f32[] add(%x, %x)\n}\n"
    [step] = steps(text)
    assert of_step(step, MACHINES["TPU v5e"]).starts == 0.0
    assert of_step(step, MACHINES["H100"]).starts == 3e-6


def test_launches_of_a_round_leave_out_the_test_of_its_loop():
    text = """000: kCommandBuffer [source]
    001: kCopy [source] kCopy
027: kWhile         [prev=000 (1)]
condition:
    028: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    029: kDynamicSliceFusion [source       | next=000 (1)] params=1, results=1
        030: kCopy [source | sink] kCopy
    000: kCommandBuffer      [prev=029 (1) | sink        ]
        031: kCustomKernel [source       | next=032 (1)] loop_minimum_fusion grid: [8, 1, 1]
        032: kCopy       [prev=031 (1) | next=037 (5)] kCopy
    033: kSequential [source | sink]
        034: kTriangularSolve [source | sink]
    035: kWhile [source | sink]
    condition:
        036: kCustomKernel [source | sink] loop_compare_fusion_1
      body:
        037: kCustomKernel [source | sink] loop_add_fusion
038: kCopy [source | sink] kCopy
"""
    assert launched(text) == {"graphs": 1, "in graphs": 2, "alone": 1, "calls": 1, "loops": 1, "in loops": 1}
