"""Linear cross entropy for Hopper, compiled by the real NVIDIA compilers: kernels, registers, spills, temporaries."""

import functools

import jax
import pytest
from compile_targets.sass import machine_code

import lowering
from jaxops.linear_cross_entropy import linear_cross_entropy, linear_log_probs
from jaxops.linear_cross_entropy.operands import Columns, CotangentTerms, Needs, Rows
from lowering.targets import named
from pallas_kernels.gpu.linear_cross_entropy import exponentials, gradients, statistics, tiles

pytestmark = pytest.mark.cuda_compile

H100 = named("cuda-h100")
BF16, F16, F32 = "bfloat16", "float16", "float32"
SHAPES = {  # rows, hidden, classes
    "llama": (16384, 4096, 128256),
    "gpt2": (8192, 768, 50257),
    "odd": (100, 200, 1000),
}
FORMS = {  # softcap, metrics, bias, target
    "plain": (None, False, False, False),
    "bias": (None, False, True, False),
    "softcap": (30.0, False, False, False),
    "target": (None, False, False, True),
    "everything": (30.0, True, True, True),
}
CASES = [*((form, "llama") for form in FORMS), ("plain", "gpt2"), ("everything", "gpt2"), ("everything", "odd")]
# From JAX 0.12 Mosaic GPU's kernels are linked, and ptxas ignores requests for registers (C7504), those of JAX's own
# kernels too: a thread has 168, and what is added up beside the logits does not fit.
GETS_REGISTERS = jax.__version_info__ < (0, 12)
CHUNK_ROWS = 4096
SPARE_BYTES = 1024  # of shared memory, for a JAX that reserves more of it
# What the matrix units of one multiprocessor multiply in a nanosecond, at most, and the longest trip to memory that the
# stages have to outlast.
PRODUCTS_PER_NS, TRIP_NS = 989e3 / 2 / 132, 1000


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(target, function, *operands):
    return lowering.compile(function, *operands, target=target)


def spilled_bytes(report):
    # So many a thread starts with: 168 in three warpgroups, where the copying one hands most of its own to the others.
    assert all(resources.registers <= 255 for resources in report.gpu_resources)
    most = H100.on_chip_bytes - SPARE_BYTES
    assert all(0 < resources.shared_bytes <= most for resources in report.gpu_resources)
    return max(resources.spilled_bytes for resources in report.gpu_resources)


def operands_of(shape, form, dtype):
    rows, hidden, classes = shape
    *_, has_bias, has_target = form
    vectors = (array(classes) if given else None for given in (has_bias, has_target))
    of_rows = Rows(array(rows, hidden, dtype=dtype), array(rows, dtype="int32"))
    return of_rows, Columns(array(classes, hidden, dtype=dtype), *vectors)


def terms_of(rows, form):
    """The terms of all statistics of which there are any."""
    _, metrics, _, has_target = form
    return CotangentTerms(*[rows] * 4, rows if has_target else None, rows if metrics else None)


def compiled_statistics(target, form, rows, columns, config):
    softcap, metrics, *_ = form
    run = functools.partial(statistics.run, softcap=softcap, metrics=metrics, config=config)
    return compiled(target, run, rows, columns)


def compiled_gradients(target, form, rows, columns, config):
    needs = Needs(x=True, weight=True, bias=columns.bias is not None)
    run = functools.partial(gradients.run, softcap=form[0], needs=needs, config=config)
    return compiled(target, run, terms_of(array(*rows.labels.shape), form), rows, columns)


def compiled_exponentials(target, form, config):
    rows, columns = operands_of((CHUNK_ROWS, *SHAPES["llama"][1:]), FORMS[form], BF16)
    run = functools.partial(exponentials.exponentials, softcap=FORMS[form][0], most_excess=60.0, config=config)
    return compiled(target, run, rows.x, *columns, rows.labels, array(CHUNK_ROWS))


def tiled(shape):
    """The sizes in the order in which a launch is asked for its configurations: rows, columns, hidden."""
    rows, hidden, classes = SHAPES[shape]
    return rows, classes, hidden


def exponentials_configs():
    rows, columns = operands_of(SHAPES["llama"], FORMS["plain"], BF16)
    return exponentials.configs(H100, rows.x, columns.weight, CHUNK_ROWS)


@pytest.mark.parametrize(("form", "shape"), CASES)
def test_linear_cross_entropy_statistics_compile_in_registers(h100, form, shape):
    rows, columns = operands_of(SHAPES[shape], FORMS[form], BF16)
    config = statistics.launch_configs(H100, *tiled(shape))[0]
    program = compiled_statistics(h100, FORMS[form], rows, columns, config)
    assert program.kernels == {"linear_cross_entropy": 1}
    limits = {"bias": 8, "target": 40, "everything": 40}, {"bias": 320, "target": 1024, "everything": 1600}
    limit = limits[not GETS_REGISTERS]
    assert spilled_bytes(program) <= limit.get(form, 0 if GETS_REGISTERS else 32)
    _, hidden, classes = SHAPES[shape]
    copied = 2 * classes * hidden * (classes % 8 > 0 or hidden % 64 > 0)
    assert program.memory.temporaries <= 64 * 2**20 + 1.1 * copied


def test_log_probs_at_a_temperature_compile_in_registers(h100):
    scoring = functools.partial(linear_log_probs, temperature=0.7, return_entropy=True)
    rows, columns = operands_of(SHAPES["llama"], FORMS["plain"], BF16)
    with lowering.use("pallas"):
        program = compiled(h100, scoring, rows.x, columns.weight, rows.labels)
    assert program.kernels == {"linear_cross_entropy": 1}
    assert spilled_bytes(program) <= (0 if GETS_REGISTERS else 400)


@pytest.mark.parametrize(("form", "shape"), CASES)
def test_linear_cross_entropy_gradients_compile_in_registers(h100, form, shape):
    rows, columns = operands_of(SHAPES[shape], FORMS[form], BF16)
    config = gradients.launch_configs(H100, *tiled(shape))[0]
    program = compiled_gradients(h100, FORMS[form], rows, columns, config)
    # One for whole chunks of the vocabulary, in a loop, and one for the rest.
    classes, chunk = SHAPES[shape][2], config["chunk_columns"]
    launches = 1 if classes <= chunk or classes % chunk == 0 else 2
    assert program.kernels == {"linear_cross_entropy_backward": launches}
    limit = {"odd": 64} if GETS_REGISTERS else {"everything": 2048}
    assert spilled_bytes(program) <= (limit.get(shape, 0) if GETS_REGISTERS else limit.get(form, 256))
    assert program.memory.temporaries <= 1.5e9


@pytest.mark.parametrize("index", range(len(tiles.TILE_SIZES)))
def test_linear_cross_entropy_exponentials_keep_the_matrix_units_busy(h100, index):
    """What the machine code of the main loop says, and how much memory is on its way meanwhile."""
    config = exponentials_configs()[index]
    program = compiled_exponentials(h100, "plain", config)
    assert spilled_bytes(program) == 0
    block_rows, block_columns = config["block_rows"], config["block_columns"]
    # The operands of a step: 64 of the products' terms. While one step is multiplied, the others are on their way.
    stage_bytes = (2 * block_rows + block_columns) * 64 * 2
    step_ns = 2 * block_rows * block_columns * 64 / PRODUCTS_PER_NS
    assert (config["stages"] - 1) * stage_bytes >= stage_bytes * TRIP_NS / step_ns
    assert program.gpu_resources[0].shared_bytes >= config["stages"] * stage_bytes
    (code,) = machine_code(program)
    # An instruction multiplies 64 rows by 16 terms: two times four of them for 128 rows and 64 terms, and four for 64
    # rows. There is one loop over steps, with no copy of it unrolled, and it leaves its products in flight.
    products = {f"HGMMA.64x{block_columns}x16.F32.BF16": block_rows // 64 * 4}
    steps = min((loop for loop in code.loops() if loop.count("HGMMA")), key=lambda loop: len(loop.instructions))
    assert code.opcodes("HGMMA") == steps.opcodes("HGMMA") == products
    waits = [each.operands for each in steps.instructions if each.opcode.startswith("WARPGROUP.DEPBAR")]
    assert [wait.split(",")[-1].strip(" ;") for wait in waits] == ["0x1"]
    # A thread's rows have a label and a reference each, asked for before the products that they are used after.
    loads = [place for place, each in enumerate(code.instructions) if each.opcode.startswith(("LD.", "LDG."))]
    first = next(place for place, each in enumerate(code.instructions) if each.is_a("HGMMA"))
    assert len(loads) == 2 * block_rows // 32
    assert max(loads) < first
    # One request hands out registers, the other takes them.
    assert code.count("USETMAXREG") == 2 * config["copying"] * GETS_REGISTERS
    multicasts = [opcode for opcode in code.opcodes("UTMALDG") if "MULTICAST" in opcode]
    assert len(multicasts) == (config["cluster_blocks"] > 1)


@pytest.mark.parametrize("form", ["softcap", "target", "everything"])
def test_linear_cross_entropy_without_a_copying_warpgroup_needs_no_more_registers_than_a_launch_gives(h100, form):
    """The threads of two warpgroups have 255 registers each, whether or not ptxas drops `setmaxnreg`."""
    (config,) = (config for config in statistics.launch_configs(H100, *tiled("llama")) if not config["copying"])
    program = compiled_statistics(h100, FORMS[form], *operands_of(SHAPES["llama"], FORMS[form], BF16), config)
    assert spilled_bytes(program) <= {"target": 32, "everything": 32}.get(form, 0)  # 24 in JAX 0.10
    (config,) = (config for config in exponentials_configs() if not config["copying"])
    assert spilled_bytes(compiled_exponentials(h100, form, config)) <= {"softcap": 128, "target": 128}.get(form, 0)


@pytest.mark.parametrize("index", range(len(tiles.TILE_SIZES)))
def test_linear_cross_entropy_configs_compile(h100, index):
    operands = operands_of(SHAPES["gpt2"], FORMS["plain"], F16)
    for compiled_kernel, kernel in ((compiled_statistics, statistics), (compiled_gradients, gradients)):
        config = kernel.launch_configs(H100, *tiled("gpt2"))[index]
        compiled_kernel(h100, FORMS["plain"], *operands, config)


def test_linear_cross_entropy_trains_within_three_gigabytes(h100):
    """Loss and gradients of a large model's last layer, as a user asks for them; the logits alone are 8.4 GB."""
    rows, hidden, classes = SHAPES["llama"]

    def loss(x, weight, labels):
        return linear_cross_entropy(x, weight, labels, strategy="recompute", z_loss=1e-4)

    operands = array(rows, hidden, dtype=BF16), array(classes, hidden, dtype=BF16), array(rows, dtype="int32")
    with lowering.use("pallas"):
        program = compiled(h100, jax.value_and_grad(loss, (0, 1)), *operands)
    assert program.kernels == {"linear_cross_entropy": 1, "linear_cross_entropy_backward": 2}
    assert program.memory.temporaries < 0.7e9


@pytest.mark.parametrize(
    ("form", "sum_dtype", "peak"),
    [("plain", BF16, 3.0e9), ("plain", F32, 4.6e9), ("bias", F32, 4.6e9), ("softcap", F32, 4.6e9)],
)
def test_linear_cross_entropy_takes_three_products_and_keeps_no_float32_logits(h100, form, sum_dtype, peak):
    rows, hidden, classes = SHAPES["llama"]
    softcap, _, has_bias, _ = FORMS[form]

    def loss(x, weight, labels, bias):
        options = {"bias": bias if has_bias else None, "softcap": softcap, "weight_grad_dtype": sum_dtype}
        return linear_cross_entropy(x, weight, labels, **options)

    operands = array(rows, hidden, dtype=BF16), array(classes, hidden, dtype=BF16), array(rows, dtype="int32")
    with lowering.use("pallas"):
        program = compiled(h100, jax.value_and_grad(loss, (0, 1)), *operands, array(classes))
    assert program.kernels == {"linear_cross_entropy_exponentials": 1}
    assert spilled_bytes(program) <= (40 if GETS_REGISTERS else 384) * (form == "softcap")
    # Arguments and results, 2.4 GB, with the weight's gradient in float32, or a chunk of exponentials; the logits alone
    # are 8.4 GB.
    memory = program.memory
    assert memory.arguments + memory.outputs + memory.temporaries <= peak
