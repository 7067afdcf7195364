"""Plans made by the real compilers: what is sent and held is what the sizes say, and what is too large is told so."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import lowering

DEPTH, ROWS, WIDTH = 6, 64, 512


@pytest.fixture(autouse=True)
def standard_promotion():
    """What users have."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def step(weights, x):
    def loss(weights):
        def layer(x, weight):
            weight = jax.lax.with_sharding_constraint(weight, P(None, None))
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ weight), P("fsdp")), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    return weights - 0.1 * jax.grad(loss)(weights)


def fsdp(mesh):
    return P(None, "fsdp"), P("fsdp")


@pytest.mark.parametrize(
    "chip",
    [
        pytest.param("tpu-v5e:2x4", marks=pytest.mark.tpu_compile),
        pytest.param("cuda-h100:8", marks=pytest.mark.cuda_compile),
    ],
    indirect=True,
)
def test_plan_reads_what_fully_sharded_parallelism_sends(chip, tmp_path):
    weights = jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    donating = jax.jit(step, donate_argnums=0)
    options = {"targets": [chip], "meshes": [{"fsdp": 8}], "shardings": fsdp, "cache": tmp_path}
    (row,) = lowering.plan(donating, weights, x, **options).rows
    assert row.fits
    assert row.memory_bytes >= 4 * (DEPTH * WIDTH * WIDTH + ROWS * WIDTH) // 8
    # Three products of each layer; the first layer's input needs no gradient, which the loop does not know.
    assert row.matmul_flops >= 3 * DEPTH * 2 * ROWS * WIDTH * WIDTH / 8
    assert row.matmul_flops <= 3.1 * DEPTH * 2 * ROWS * WIDTH * WIDTH / 8
    gathered = sum(one.count * one.bytes for one in row.collectives if one.kind == "all-gather")
    layer_bytes = {"tpu": 2, "cuda": 4}[chip.split("-")[0]] * WIDTH * WIDTH
    # Each layer once forward, and once more for its gradient unless the compiler keeps it.
    assert DEPTH * layer_bytes <= gathered <= 2 * DEPTH * layer_bytes * 2
    summed = sum(one.count * one.bytes for one in row.collectives if one.kind in ("all-reduce", "reduce-scatter"))
    assert DEPTH * WIDTH * WIDTH * 2 <= summed <= DEPTH * WIDTH * WIDTH * 8
    assert all(one.axes == ("fsdp",) and one.seconds > 0 for one in row.collectives)
    assert lowering.plan(donating, weights, x, **options, budget_seconds=0).rows == (row,)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("chip", ["tpu-v5e:2x2"], indirect=True)
def test_plan_says_by_how_much_a_program_does_not_fit(chip, tmp_path):
    x = jax.ShapeDtypeStruct((4, 2**31), jnp.float32)
    plan = lowering.plan(
        lambda x: (x + 1, x * 2),
        x,
        targets=[chip],
        meshes=[{"data": 4}],
        shardings=lambda mesh: (P("data"),),
        cache=tmp_path,
    )
    (row,) = plan.rows
    assert row.fits is False
    # Three arrays of 8 GiB, and 15.75 GiB to hold them.
    assert row.memory_limit_bytes == 15.75 * 2**30
    assert -9.5 * 2**30 < row.spare_bytes < -8 * 2**30


@pytest.mark.tpu_compile
@pytest.mark.parametrize("chip", ["tpu-v5e"], indirect=True)
def test_plan_replays_a_single_chip(chip, tmp_path):
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    (row,) = lowering.plan(lambda x: jnp.tanh(x @ x), x, targets=[chip], meshes=[{"data": 1}], cache=tmp_path).rows
    assert row.replayed_seconds > row.bound_seconds > 0
    assert row.collectives == ()


@pytest.mark.tpu_compile
@pytest.mark.parametrize("chip", ["tpu-v5e:2x2"], indirect=True)
def test_plan_says_what_every_chip_computes(chip, tmp_path):
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    plan = lowering.plan(lambda x: x @ x, x, targets=[chip], meshes=[{"data": -1}], cache=tmp_path)
    assert f"{chip} data=4: each chip computes 4.0 times its share of the products" in str(plan)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("chip", ["tpu-v5e"], indirect=True)
def test_plan_of_one_chip_may_name_the_mesh_and_donates(chip, tmp_path):
    weights = jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    fns = [step, jax.jit(step, donate_argnums=0)]
    options = {"targets": [chip], "meshes": [{"fsdp": 1}], "shardings": fsdp, "cache": tmp_path}
    apart, donated = (lowering.plan(fn, weights, x, **options).rows[0] for fn in fns)
    assert donated.memory_bytes < apart.memory_bytes


@pytest.mark.parametrize(
    "chip",
    [
        pytest.param("tpu-v6e:2x2", marks=pytest.mark.tpu_compile),
        pytest.param("cuda-h100:4", marks=pytest.mark.cuda_compile),
    ],
    indirect=True,
)
def test_plan_of_policies_says_what_offloading_stores_and_reads(chip, tmp_path):
    rows, width = 8192, 512
    policies = {
        "keep": jax.checkpoint_policies.everything_saveable,
        "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["layer_input"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }

    def step_with(policy):
        def layer(x, weight):
            x = checkpoint_name(x, "layer_input")
            return x + jax.nn.relu(x @ weight), None

        def loss(weights, x):
            return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0].astype(jnp.float32))

        return jax.grad(loss)

    variants = {name: step_with(policy) for name, policy in policies.items()}
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((DEPTH, width, width), (4 * rows, width))]
    options = {"shardings": lambda mesh: (P(), P("data")), "cache": tmp_path}
    plan = lowering.plan(variants, *types, targets=[chip], meshes=[{"data": 4}], **options)
    found = {row.variant: row for row in plan.rows}
    assert found["keep"].host_bytes == 0
    # Each layer's input goes to the host, and comes back.
    assert found["offload"].host_bytes == 2 * DEPTH * rows * width * 2
    assert found["offload"].host_seconds == pytest.approx(
        found["offload"].host_bytes / {"tpu-v6e:2x2": 32e9, "cuda-h100:4": 64e9}[chip]
    )
    assert found["offload"].memory_bytes < 0.8 * found["keep"].memory_bytes
