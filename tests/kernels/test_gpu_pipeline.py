"""The pipeline of the linear cross entropy's GPU kernels on a model of the hardware, under schedules by chance."""

import random
import types

import pytest
from hopper_machine import Array, Machine, Warpgroup, on_machine
from hopper_model import At, Block, HazardError

from pallas_kernels.gpu.linear_cross_entropy import pipeline, tiles

SCHEDULES, SEARCHED = 40, 400
STORED_PARTS = 4  # of each tile of logits; the kernels have as many, or twice as many
PERSISTENT, SPLIT = {"workers": 2}, {"vocab_splits": 2}
FORMS = {
    "a warpgroup copies": {"copying": 1, "cluster_blocks": 1, **PERSISTENT},
    "two warpgroups": {"copying": 0, "cluster_blocks": 1, **PERSISTENT},
    "cluster": {"copying": 1, "cluster_blocks": 2, **PERSISTENT},
    "runs of tiles": {"copying": 1, "cluster_blocks": 1, **SPLIT},
    "runs of tiles, cluster": {"copying": 1, "cluster_blocks": 2, **SPLIT},
}


class Part:
    """A part of a tile of logits, which knows its place."""

    def __init__(self, place, index):
        self.name = (*place, index)

    def astype(self, dtype):
        return self.name


def run(seed, config, shape, changes=(), last_wait=True):
    """Runs the pipeline as the exponentials' kernel does, on one worker, and checks what it computes and stores."""
    rows, hidden, columns = shape
    machine = Machine(seed)
    code, layout = on_machine(pipeline, machine, changes), on_machine(tiles, machine)
    tiling = layout.Tiling.of(config, rows, (columns, hidden))
    worker, slots = machine.chance.randrange(tiling.workers), config["store_slots"]
    stored, blocks = [], [Block(rank, tiles.MULTIPLYING + tiling.copying) for rank in range(tiling.cluster_blocks)]

    def body(first, fold):
        buffers = types.SimpleNamespace(at=At(machine.current.buffers.__getitem__))

        def begin(place):
            def consume(terms, _):
                where = place.rows.start, place.column
                thread_block = where[0] // tiling.thread_block_rows
                x_rows = thread_block * tiling.thread_block_rows, tiling.thread_block_rows
                hidden_parts = [(at * tiles.BLOCK_HIDDEN, tiles.BLOCK_HIDDEN) for at in range(tiling.hidden_blocks)]
                weight = where[1], tiling.block_columns
                expected = [(where[0] - x_rows[0], (x_rows, part), (weight, part)) for part in hidden_parts]
                if terms != expected:
                    raise HazardError(f"the logits at {where} are made of {terms}")
                for index in range(STORED_PARTS):
                    result = types.SimpleNamespace(dtype=None, stored=stored, place=where)
                    code.store(Part(where, index), index, slots, buffers, result)

            return consume

        fold(begin, None)
        if last_wait:
            machine.wait_smem_to_gmem(0)

    warpgroups = [Warpgroup(x, number, slots, worker=worker) for x in blocks for number in range(x.running)]
    machine.run(warpgroups, lambda: code.fold_tiles(body, Array(), Array(), tiling=tiling, interpret=False))
    count = tiling.tiles_of(worker) * tiling.cluster_blocks * tiles.MULTIPLYING * STORED_PARTS
    if len(stored) != count or len(set(stored)) != count or any(value[:2] != place for place, value in stored):
        raise HazardError(f"{len(stored)} parts were stored of {count}, or at other places")


def drawn(seed, form):
    """A configuration of a form, and a shape: no tiles or several, more hidden blocks than stages or fewer."""
    chance = random.Random(seed)
    sizes = {"block_rows": 64, "block_columns": 64, "row_group": 2}
    config = {**sizes, "stages": chance.choice([2, 3, 4, 6]), "store_slots": chance.choice(tiles.STORE_SLOTS)}
    return {**config, **FORMS[form]}, (chance.choice([100, 300]), 64 * chance.randrange(1, 6), chance.choice([60, 300]))


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_pipeline_has_no_hazard_under_any_schedule(form):
    for seed in range(SCHEDULES):
        run(seed, *drawn(seed, form))


@pytest.mark.parametrize("number", range(len(tiles.TILE_SIZES)))
def test_pipeline_has_no_hazard_in_a_configuration_that_is_tried_on_devices(number):
    config = {**tiles.TILE_SIZES[number], "row_group": 2, "workers": 1, "store_slots": 2}
    for seed in range(2):
        run(seed, config, (2 * tiles.worker_rows(config), 576, config["block_columns"]))


WAIT = "plgpu.barrier_wait(self.consumed.at[self.slot(step)])"
RELEASE = "plgpu.barrier_arrive(self.consumed.at[self.slot(step - 1)])"
# The form in which something does harm, and what is changed.
BUGS = {
    "early release": (
        "a warpgroup copies",
        ("@pl.when(block > 0)", "@pl.when(block >= 0)"),
        (RELEASE, RELEASE.replace("step - 1", "step")),
        ("plgpu.barrier_arrive(self.consumed.at[self.slot((number + 1) * hidden_blocks - 1)])", "pass"),
    ),
    "two products in flight": ("two warpgroups", ("plgpu.wgmma_wait(1)", "plgpu.wgmma_wait(2)")),
    "no wait for the last product": (
        "two warpgroups",
        ("result = accumulator[...]", "result = accumulator.terms"),
    ),
    "no wait for who multiplies": (
        "a warpgroup copies",
        (f"def _wait():\n                {WAIT}", "def _wait():\n                pass"),
    ),
    "no wait for the other warpgroup": (
        "two warpgroups",
        (f"def _copy():\n            {WAIT}", "def _copy():\n            pass"),
    ),
    "no wait for copies": ("two warpgroups", ("plgpu.barrier_wait(self.loaded.at[slot])", "pass")),
    "one arrival for two copies": (
        "a warpgroup copies",
        ("num_barriers=stages, num_arrivals=2", "num_barriers=stages"),
    ),
    "two arrivals in a cluster": (
        "cluster",
        ("axes, num_barriers=stages, num_arrivals=MULTIPLYING", "axes, num_barriers=stages"),
    ),
    "barriers of the block in a cluster": (
        "cluster",
        ("if tiling.cluster_blocks > 1 and (INTERPRETS_CLUSTER_BARRIERS or not interpret):", "if False:"),
    ),
    "no finish": ("cluster", ("self.steps, copy, None)\n        self.finish()", "self.steps, copy, None)")),
    "copies into the slot that is read": (
        "two warpgroups",
        ("self._copy_into_slot_of(step - 1)", "self._copy_into_slot_of(step)"),
    ),
    "the next tile a step too late": (
        "two warpgroups",
        ("self.place(lax.div(step, hidden_blocks))", "self.place(lax.div(jnp.maximum(0, step - 1), hidden_blocks))"),
    ),
    "no wait for stores": ("a warpgroup copies", ("wait_smem_to_gmem(slots - 1", "wait_smem_to_gmem(slots")),
    "one buffer for all stores": ("a warpgroup copies", ("buffers.at[index % slots]", "buffers.at[0]")),
    "no fence": ("a warpgroup copies", ("plgpu.commit_smem()", "pass")),
}


def search(form, **options):
    """Looks for a schedule in which something goes wrong."""
    for seed in range(SEARCHED):
        run(seed, *drawn(seed, form), **options)


@pytest.mark.parametrize("bug", BUGS)
def test_model_finds_seeded_bugs(bug):
    form, *changes = BUGS[bug]
    with pytest.raises(HazardError):
        search(form, changes=changes)


def test_model_finds_that_a_kernel_does_not_wait_for_its_last_stores():
    with pytest.raises(HazardError, match="reads after its thread block has ended"):
        search("a warpgroup copies", last_wait=False)
