"""Plans: what is read from a compiled program, the times of links, and what a plan says, keeps and refuses."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
import lowering
from lowering.compiling.report import Memory
from lowering.planning import api, hlo, links
from lowering.planning.collectives import Collective, collectives
from lowering.planning.host import host_copies
from lowering.planning.products import compiled_product_flops
from lowering.targets import parse

# A loop of six turns that gathers, with steps of one asynchronous gather; and at the end all kinds of groups.
PROGRAM = """HloModule jit_step, is_scheduled=true

%fused_async.1 (p: bf16[8,16]) -> bf16[8,64] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,64]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], \
dimensions={1}, frontend_attributes={chain_id="2"}, metadata={op_name="jit(step)/while/body/dot_general"}
}

%fused_async.2 (p: bf16[8,16]) -> bf16[8,64] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %fusion.9 = bf16[8,64]{1,0} fusion(%p), kind=kOutput, calls=%fused_async.3
}

%fused_async.3 (p: bf16[8,16]) -> bf16[8,64] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], \
dimensions={1}, frontend_attributes={chain_id="2"}, metadata={op_name="jit(step)/while/body/dot_general"}
}

%all-reduce-scatter.3 (input: f32[32,8]) -> f32[8,8] {
  %input = f32[32,8]{1,0} parameter(0)
  %all-reduce.9 = f32[32,8]{1,0} all-reduce(%input), channel_id=9, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %slice = f32[8,8]{1,0} dynamic-slice(%all-reduce.9), dynamic_slice_sizes={8,8}
}

%body (loop: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %loop = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%loop), index=1
  %fusion.1 = bf16[8,64]{1,0} fusion(%x), kind=kOutput, calls=%fused_async.1
  %fusion.2 = bf16[8,64]{1,0} fusion(%x), kind=kOutput, calls=%fused_async.2
  %dot.1 = f32[8,8]{1,0} dot(%fusion.2, %fusion.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %tuple = (s32[], bf16[8,16]{1,0}) tuple(%x, %x)
}

%condition (loop: (s32[], bf16[8,16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  %loop = (s32[], bf16[8,16]{1,0}) parameter(0)
  %turn = s32[] get-tuple-element(%loop), index=0
  ROOT %lt = pred[] compare(%turn, %limit), direction=LT
}

ENTRY %main (x: bf16[8,16], y: f32[8,2,4], z: bf16[8,128,2,32]) -> f32[] {
  %x = bf16[8,16]{1,0} parameter(0)
  %y = f32[8,2,4]{2,1,0} parameter(1)
  %z = bf16[8,128,2,32]{1,3,2,0:T(8,128)(2,1)} parameter(2)
  %while.1 = (s32[]{:T(128)}, bf16[8,16]{1,0}) while(%x), condition=%condition, body=%body
  %scatter = f32[8,8]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.3
  %all-reduce-start = f32[4]{0} all-reduce-start(%y), channel_id=1, replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}
  %all-to-all = f32[1,8]{1,0} all-to-all(%y), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}
  %permute = (f32[6]{0}, f32[6]{0}, u32[]{:S(2)}, u32[]) collective-permute-start(%y), channel_id=3, \
source_target_pairs={{0,0},{1,3},{3,1}}
  %reduce-scatter-start = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%y), channel_id=4, replica_groups={{0,1,2,3}}
  %alone = f32[3]{0} all-reduce(%y), channel_id=5, replica_groups=[8,1]<=[8]
  ROOT %conv = f32[8,2,128,128]{2,3,1,0} convolution(%z, %z), window={size=8x2 stride=7x1 lhs_dilate=8x2}, \
dim_labels=0b1f_0o1i->01bf
}
"""
MESH = {"data": 2, "tensor": 4}


def test_collectives_are_read_with_bytes_groups_and_turns():
    found = {one.kind: one for one in collectives(hlo.parse(PROGRAM), MESH) if one.bytes != 32}
    gather = found["all-gather"]
    assert (gather.count, gather.bytes, gather.axes, gather.group) == (6, 2 * 8 * 64, ("tensor",), (0, 1, 2, 3))
    assert gather.source == "jit(step)/while/body/dot_general"
    # What a TPU fuses from an all-reduce and a slice sends half as much as an all-reduce.
    assert (found["reduce-scatter"].bytes, found["reduce-scatter"].axes) == (4 * 32 * 8, ("tensor",))
    assert (found["all-reduce"].bytes, found["all-reduce"].group) == (16, (0, 1, 4, 5))
    assert (found["collective-permute"].bytes, found["collective-permute"].group) == (24, (1, 3))
    assert sum(one.count for one in found.values()) == 6 + 3


def test_collectives_of_a_start_and_of_numbered_groups():
    found = {one.kind: one for one in collectives(hlo.parse(PROGRAM), MESH) if one.bytes == 32}
    assert found["all-to-all"].group == (0, 4)
    assert found["all-to-all"].axes == ("data",)
    # The operand, not the part of it that is the result.
    assert found["reduce-scatter"].arrays == ("f32[8]",)


def test_flops_count_turns_and_no_holes():
    # Attention's scores, 16 products of 128x32 by 32x128, are a convolution to a TPU; its window meets mostly holes.
    assert compiled_product_flops(hlo.parse(PROGRAM)) == 6 * 2 * 8 * 8 * 64 + 2 * 16 * 128 * 128 * 32


# As TPUs and GPUs store and read slices, six turns, and as they copy whole arrays, once.
OFFLOADING = PROGRAM.replace(
    "  %dot.1 = ",
    """  %stored = ((bf16[6,8,16]{2,1,0:T(8,128)S(5)}, bf16[1,8,16]{2,1,0}, s32[]), bf16[6,8,16]{2,1,0:S(5)}, u32[]) \
dynamic-update-slice-start(%x)
  %read = ((bf16[6,8,16]{2,1,0:S(5)}, s32[]), bf16[1,8,16]{2,1,0:T(8,128)}, u32[]{:S(2)}) fusion-start(%x), kind=kCustom
  %near = (bf16[8,16]{1,0:S(1)}, bf16[8,16]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %dot.1 = """,
).replace(
    "  %scatter = ",
    """  %state = (f32[8,2,4]{2,1,0}, f32[8,2,4]{2,1,0:S(5)}, u32[]{:S(2)}) copy-start(%y)
  %kept = (f32[2,4]{1,0:S(5)}, f32[2,4]{1,0}, u32[]{:S(2)}) copy-start(%y)
  %scatter = """,
)


def test_flops_of_branches_are_those_of_the_cheapest():
    branches = "  %chosen = f32[8,8]{1,0} conditional(%i, %x, %y), branch_computations={%body, %fused_async.2}\n"
    program = hlo.parse(PROGRAM.replace("  %scatter = ", f"{branches}  %scatter = "))
    assert compiled_product_flops(program) == compiled_product_flops(hlo.parse(PROGRAM))
    both = hlo.parse(PROGRAM.replace("  %scatter = ", f"{branches.replace('fused_async.2', 'body')}  %scatter = "))
    assert compiled_product_flops(both) == compiled_product_flops(hlo.parse(PROGRAM)) + 2 * 8 * 8 * 64


def test_copies_to_the_host_count_turns_and_directions():
    assert host_copies(hlo.parse(PROGRAM)) == (0, 0)
    assert host_copies(hlo.parse(OFFLOADING)) == (6 * 2 * 8 * 16 + 4 * 2 * 4, 6 * 2 * 8 * 16 + 4 * 8 * 2 * 4)


def counting_from(start: int) -> str:
    """The program, whose loop's counter starts there."""
    carried = f"""  %start = s32[] constant({start})
  %counter = s32[]{{:T(128)}} copy(%start)
  %carried = (s32[], bf16[8,16]{{1,0}}) tuple(%counter, %x)
  %while.1 = """
    return PROGRAM.replace("  %while.1 = ", carried).replace("while(%x)", "while(%carried)")


def test_a_loop_of_which_a_turn_was_taken_out_turns_less_often():
    program = hlo.parse(counting_from(1))
    assert next(one.count for one in collectives(program, MESH) if one.kind == "all-gather") == 5


def test_a_loop_that_counts_down_is_not_understood():
    down = hlo.parse(counting_from(8).replace("direction=LT", "direction=GT"))
    assert down.unknown_loops == ("while.1",)
    assert next(one.count for one in collectives(down, MESH) if one.kind == "all-gather") == 1


def test_a_loop_that_data_decides_is_named():
    program = hlo.parse(PROGRAM.replace("constant(6)", "parameter(1)"))
    assert compiled_product_flops(program) == 2 * 16 * 128 * 128 * 32
    assert program.unknown_loops == ("while.1",)
    assert collectives(program, MESH)[0].count == 1


def test_a_compiled_program_has_the_flops_and_the_gathers_of_its_loop():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def split(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def fn(x, weights):
        def body(x, weight):
            x = jnp.dot(x, weight, preferred_element_type=jnp.float32)
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "tensor"))), None

        return jax.lax.scan(body, x, weights)[0]

    text = jax.jit(fn).lower(split((8, 16), "data"), split((5, 16, 16), None, None, "tensor")).compile().as_text()
    program = hlo.parse(text)
    assert compiled_product_flops(program) == 5 * 2 * (8 // 2) * 16 * (16 // 4)
    gathers = [one for one in collectives(program, MESH) if one.kind == "all-gather" and one.axes == ("tensor",)]
    assert sum(one.count * one.bytes for one in gathers) == 5 * 4 * (8 // 2) * 16


@pytest.mark.parametrize(
    ("target", "kind", "group", "seconds"),
    [
        # Google publishes 51.2 TB/s for an all-reduce of 256 v5e: 200 GB/s of a chip, all its links at once.
        ("tpu-v5e:16x16", "all-reduce", range(256), 2 * 255 / 256 * 1e9 / 200e9),
        ("tpu-v5e:16x16", "all-gather", range(16), 15 / 16 * 1e9 / 100e9),
        ("tpu-v5e:4x4", "all-gather", range(4), 3 / 4 * 1e9 / 50e9),  # a line, no ring
        ("tpu-v5e:16x16", "all-gather", range(4), 3 / 4 * 1e9 / 50e9),
        ("tpu-v5e:16x16", "reduce-scatter", range(0, 256, 16), 15 / 16 * 1e9 / 100e9),
        ("tpu-v5e:16x16", "all-gather", range(0, 16, 4), 3 / 4 * 1e9 / 25e9),  # a ring shared by four groups
        ("tpu-v5p:8x8x8", "all-gather", range(512), 511 / 512 * 1e9 / 600e9),
        # Both devices of a chip receive through its links: together once, apart with half of them each.
        ("tpu-v7x:4x4x4", "all-gather", range(128), 63 / 64 * 1e9 / 600e9),
        ("tpu-v7x:4x4x4", "all-gather", range(0, 128, 2), 63 / 64 * 1e9 / 300e9),
        ("tpu-v7x:4x4x4", "all-reduce", range(2), 0.0),
        ("tpu-v6e:16x16", "collective-permute", (0, 1), 1e9 / 200e9),
        # The published bisection is 1.6 TB/s: of 256 GB, half crosses, half of that in each direction.
        ("tpu-v5e:16x16", "all-to-all", range(256), 256e9 / 4 / 1.6e12),
        ("cuda-h100:8", "all-gather", range(8), 7 / 8 * 1e9 / 450e9),
        ("cuda-h100:8", "all-reduce", range(8), 7 / 8 * 1e9 / 450e9),  # the switch adds
        ("cuda-a100:8", "all-reduce", range(8), 2 * 7 / 8 * 1e9 / 300e9),
        ("cuda-h100:64", "all-gather", range(0, 64, 8), 7 / 8 * 1e9 / 50e9),
        ("cuda-h100:64", "all-gather", range(64), 7 / 8 / 8 * 1e9 / 50e9),  # eight cards bring it to each machine
    ],
)
def test_links_take_their_published_rates(target, kind, group, seconds):
    one = Collective(kind, ("u8[1000000000]",), ("data",), tuple(group), count=3, bytes=10**9)
    assert links.seconds(one, parse(target)) == pytest.approx(3 * seconds)


@pytest.fixture
def compiled(monkeypatch):
    """Stands in for the compilers, and lists what they were asked for."""
    asked = []

    def compile(fn, *args, target):
        asked.append((target, args))
        if target == "tpu-v6e:4x4":
            raise lowering.CompileError("lowering.compile: RESOURCE_EXHAUSTED: Used 40.00G of 31.25G hbm. Exceeded by")
        if target == "cuda-h100:16":
            raise lowering.CompileError(f"lowering.compile: {REFUSAL}\nsecond\nthird")
        return types.SimpleNamespace(memory=Memory(2 * 10**9, 10**9, 10**9, 5 * 10**8), hlo=PROGRAM)

    monkeypatch.setattr(api, "compile", compile)
    monkeypatch.setattr(api, "availability", lambda hardware: "can compile for")
    return asked


def step(weight, x):
    return weight - jax.grad(lambda weight: jnp.sum(x @ weight))(weight)


REFUSAL = f"cuda-h100's compiler refuses step: {'of a long reason ' * 20}only the end matters"
WEIGHT, X = jax.ShapeDtypeStruct((256, 512), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32)
TARGETS = ["tpu-v6e:4x4", "cuda-h100:16", "tpu-v5e:2x4"]
MESHES = [{"data": -1, "tensor": 4}, {"data": 3, "tensor": -1}, {"data": 16}]


def split(mesh):
    return P(None, "tensor"), P("data")


def test_plan_has_a_row_for_each_slice_and_mesh(compiled, tmp_path):
    options = {"shardings": split, "tokens": 64, "price_per_chip_hour": {"tpu-v5e": 1.5}, "cache": tmp_path}
    plan = lowering.plan(step, WEIGHT, X, targets=TARGETS, meshes=MESHES[:1], **options)
    assert [row.target for row in plan.rows] == ["tpu-v5e:2x4", "tpu-v6e:4x4", "cuda-h100:16"]
    first, too_large, refused = plan.rows
    assert plan.best is first
    assert compiled[2][1][0].sharding.spec == P(None, "tensor")
    assert (first.mesh, first.fits, first.memory_bytes) == ({"data": 2, "tensor": 4}, True, 25 * 10**8)
    assert first.spare_bytes == 16 * 2**30 - 25 * 10**8
    # Arguments and results once, temporaries twice: 4 GB at 819 GB/s.
    assert first.memory_seconds == pytest.approx(4e9 / 819e9)
    # The gradient's product is less than what the program's own lines have.
    assert first.matmul_flops == compiled_product_flops(hlo.parse(PROGRAM)) > 2 * 2 * 64 * 256 * 512 / 8
    assert first.matmul_seconds == pytest.approx(first.matmul_flops / 197e12)
    assert first.bound == "memory"
    assert first.bound_seconds == max(first.times.values())
    assert first.serial_seconds == pytest.approx(sum(first.times.values()))
    assert first.tokens_per_second == pytest.approx(64 / first.bound_seconds)
    assert first.cost_per_step == pytest.approx(1.5 * 8 * first.bound_seconds / 3600)
    assert first.link_seconds == pytest.approx(sum(one.seconds for one in first.collectives))
    # By how much it does not fit is what the compiler says.
    assert (too_large.fits, too_large.spare_bytes) == (False, round(-8.75 * 2**30))
    # The first line is whole, however long it is.
    assert (refused.fits, refused.refusal) == (None, f"{REFUSAL} (`lowering.compile` shows 2 more lines)")
    record = json.loads(plan.to_json())
    assert [row["target"] for row in record["rows"]] == [row.target for row in plan.rows]
    assert record["rows"][0]["collectives"][0]["group"] == 4
    assert "1 of 3 fit" in str(plan)
    assert "only the end matters" in str(plan)


def test_plan_keeps_what_was_compiled_and_goes_on_after_its_budget(compiled, tmp_path):
    options = {"targets": TARGETS, "meshes": MESHES[:1], "shardings": split, "cache": tmp_path / "kept"}
    stopped = lowering.plan(step, WEIGHT, X, **options, budget_seconds=0)
    assert (stopped.rows, stopped.stopped) == ((), "stopped at the time budget: 3 of 3 left")
    lowering.plan(step, WEIGHT, X, **{**options, "targets": TARGETS[2:]})
    assert len(lowering.plan(step, WEIGHT, X, **options, budget_seconds=0).rows) == 1
    plan = lowering.plan(step, WEIGHT, X, **options)
    assert len(compiled) == 3
    assert lowering.plan(step, WEIGHT, X, **options) == plan
    assert len(compiled) == 3
    # Another program, another split and other types are others.
    lowering.plan(lambda weight, x: 2 * step(weight, x), WEIGHT, X, **options)
    lowering.plan(step, WEIGHT, X, **{**options, "shardings": None})
    lowering.plan(step, WEIGHT, jax.ShapeDtypeStruct((32, 256), jnp.float32), **options)
    assert len(compiled) == 12


def test_plan_of_several_functions_says_which_fits_and_is_fastest(compiled, monkeypatch, tmp_path):
    def compile(fn, *args, target):
        temporaries = {"step": 10**11, "offloading": 10**9}[fn.__name__]
        return types.SimpleNamespace(memory=Memory(10**9, 0, 0, temporaries), hlo=OFFLOADING)

    def offloading(weight, x):
        return 1 * step(weight, x)

    monkeypatch.setattr(api, "compile", compile)
    variants = {"keep": step, "offload": offloading}
    options = {"targets": ["cuda-a100:8"], "meshes": [{"data": 8}], "cache": tmp_path}
    plan = lowering.plan(variants, WEIGHT, X, **options)
    assert [(row.variant, row.fits) for row in plan.rows] == [("offload", True), ("keep", False)]
    assert plan.best.name == "cuda-a100:8 data=8 offload"
    assert plan.best.host_bytes == sum(host_copies(hlo.parse(OFFLOADING)))
    assert plan.best.host_seconds == pytest.approx(plan.best.host_bytes / 32e9)
    assert {"host", "links"} <= plan.best.times.keys()
    assert " offload" in str(plan)
    assert "PCIe 4.0" in str(plan)
    with pytest.raises(lowering.PlanError, match=r"fn must be a function, or a dict of functions by name; got \{\}"):
        lowering.plan({}, WEIGHT, X, **options)


def test_plan_reads_around_a_damaged_record(compiled, tmp_path):
    options = {"targets": TARGETS[2:], "meshes": MESHES[:1], "cache": tmp_path}
    lowering.plan(step, WEIGHT, X, **options)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    lowering.plan(step, WEIGHT, X, **options)
    assert len(compiled) == 2


def test_plan_refuses_a_mesh_that_does_not_divide_an_argument_and_plans_the_others(compiled, tmp_path):
    options = {"targets": ["tpu-v5e:2x4"], "shardings": lambda mesh: (P(), P("data")), "cache": tmp_path}
    odd = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    plan = lowering.plan(step, WEIGHT, odd, **options, meshes=[{"data": 8}, {"data": 4, "tensor": 2}])
    assert [row.fits for row in plan.rows] == [True, None]
    assert plan.rows[1].refusal == "args[1] must be split into 8 equal parts along data; got float32[4, 256]"


def test_plan_draws_what_it_found(compiled, tmp_path):
    pytest.importorskip("matplotlib")
    plan = lowering.plan(step, WEIGHT, X, targets=TARGETS, meshes=MESHES[:1], cache=tmp_path / "kept")
    figure = plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert len(figure.axes[0].patches) == 2  # the refused one has no memory to show


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"targets": "tpu-v5e:2x4"}, "targets must be a sequence of slices such as tpu-v5e:4x4; got 'tpu-v5e:2x4'"),
        ({"targets": []}, r"targets must be a sequence of slices such as tpu-v5e:4x4; got \[\]"),
        ({"targets": ["tpu-v9"]}, "targets must be one of cpu, tpu-v5e, .*; got 'tpu-v9'"),
        ({"targets": ["cpu"]}, "targets must be TPUs or NVIDIA GPUs; got 'cpu'"),
        ({"targets": ["tpu-v5e:4y4"]}, "target must have a topology such as 16x16 or 8; got '4y4'"),
        ({"meshes": {"data": 8}}, "meshes must be a sequence of dicts such as .*; got {'data': 8}"),
        ({"meshes": [{"data": 0}]}, "meshes must have a positive size for each axis, or -1 for one of them; got"),
        ({"meshes": [{"a": -1, "b": -1}]}, "meshes must have a positive size for each axis, or -1 for one of them"),
        (
            {"meshes": [{"data": 3}]},
            "meshes must have as many devices as a target; got {'data': 3} where tpu-v5e:2x4 has 8",
        ),
        (
            {"targets": ["tpu-v5e:2x4", "tpu-v5e:4x4"]},
            "targets must have as many devices as a mesh; got 'tpu-v5e:4x4', ",
        ),
        ({"shardings": lambda mesh: P()}, "shardings must return a tuple with an entry for each of 2 args; got"),
        (
            {"shardings": lambda mesh: (P("rows"), P())},
            "must be split over axes of the mesh; got 'rows' with {'data': 8}",
        ),
        ({"shardings": lambda mesh: ({"w": P()}, P())}, "shardings must return a prefix of the args' pytrees"),
        ({"shardings": lambda mesh: ("data", P())}, r"args\[0\] must have a PartitionSpec from shardings; got 'data'"),
        (
            {"shardings": lambda mesh: (P(None, None, "data"), P())},
            r"args\[0\] must have an axis for each entry of its",
        ),
        ({"tokens": 0}, "tokens must be a positive integer; got 0"),
        ({"price_per_chip_hour": {"v5e": 1}}, "price_per_chip_hour must name tpu-v5e, .*; got 'v5e'"),
        ({"price_per_chip_hour": 1.2}, "price_per_chip_hour must be a dict of prices by chip; got 1.2"),
        ({"budget_seconds": -1}, "budget_seconds must be a number of seconds; got -1"),
        ({"cache": __file__}, "cache must be a folder that can be written to; got"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_plan_refuses_in_one_sentence(given, words, compiled, tmp_path):
    options = {"targets": ["tpu-v5e:2x4"], "meshes": [{"data": 8}], "cache": tmp_path, **given}
    with pytest.raises(lowering.PlanError, match=words):
        lowering.plan(step, WEIGHT, X, **options)


def test_plan_refuses_what_is_no_function(compiled, tmp_path):
    with pytest.raises(TypeError, match="fn must be a function"):
        lowering.plan(3, X, targets=["tpu-v5e:2x4"], meshes=[{"data": 8}], cache=tmp_path)
    with pytest.raises(TypeError, match="args must hold arrays"):
        lowering.plan(step, WEIGHT, np.array(["x"]), targets=["tpu-v5e:2x4"], meshes=[{"data": 8}], cache=tmp_path)


def test_plan_says_which_compiler_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(api, "availability", lambda hardware: "needs: jaxops targets --install tpu")
    words = "targets must be chips that can be compiled for; got tpu-v5e:2x4, which needs: jaxops targets --install tpu"
    with pytest.raises(lowering.PlanError, match=words):
        lowering.plan(step, WEIGHT, X, targets=["tpu-v5e:2x4"], meshes=[{"data": 8}], cache=tmp_path)


@pytest.mark.parametrize("strategy", ["recompute", "grad_in_forward"])
def test_plan_counts_the_products_that_operators_mean(strategy, monkeypatch, tmp_path):
    rows, features, classes = 64, 32, 100

    def compile(fn, *args, target):
        return types.SimpleNamespace(memory=Memory(0, 0, 0, 0), hlo="")

    def loss(x, weight, labels):
        return jaxops.linear_cross_entropy(
            jnp.tanh(x @ jnp.ones((features, features))), weight, labels, strategy=strategy
        )

    monkeypatch.setattr(api, "compile", compile)
    monkeypatch.setattr(api, "availability", lambda hardware: "can compile for")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, features), (classes, features))]
    (row,) = lowering.plan(
        jax.grad(loss, (0, 1)),
        *shapes,
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        targets=["cuda-h100"],
        meshes=[{"data": 1}],
        cache=tmp_path,
    ).rows
    # Forward, and both gradients of the loss; forward, and the gradient of x, of the other product.
    products = {"recompute": 4, "grad_in_forward": 3}[strategy]
    assert row.matmul_flops == 2 * rows * features * (products * classes + 2 * features)
    assert not [remark for remark in row.remarks if "share of the products" in remark]
