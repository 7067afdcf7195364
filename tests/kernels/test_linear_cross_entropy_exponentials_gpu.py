"""Where Hopper's tiles of linear cross entropy's logits lie, and the persistent kernel of their exponentials."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from linear_cross_entropy_rows_oracle import is_label, make_logits
from test_linear_cross_entropy_kernels_gpu import H100, INTERPRET, TILES, make_case

from jaxops.linear_cross_entropy.operands import CotangentTerms, Needs
from pallas_kernels.gpu.linear_cross_entropy import exponentials, gradients, statistics, tiles


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("sizes", "options", "form"),
    [
        ((65, 70, 200), {"bias": True}, {}),
        ((64, 64, 128), {"target": True}, {"store_slots": 1}),
        ((40, 32, 130), {"softcap": 3.0}, {"copying": 0}),
        ((200, 70, 150), {}, {"row_group": 1, "copying": 0, "workers": 5}),
        ((200, 40, 150), {}, {"cluster_blocks": 2, "workers": 2}),
    ],
    ids=str,
)
def test_linear_cross_entropy_exponentials_agree_with_float64(sizes, options, form, capfd):
    """Workers have several tiles each, of one row block or of several, in whole groups of these or not."""
    rows, columns, softcap = make_case(*sizes, **options)
    config = {**TILES, "workers": 3, "store_slots": 2, **form}
    shift = np.random.default_rng(1).normal(size=sizes[0]).astype(np.float32)
    off_label, rest, target_logit = exponentials.exponentials(
        rows.x,
        *columns,
        rows.labels,
        shift,
        softcap=softcap,
        most_excess=60.0,
        config=config,
        interpret=INTERPRET,
    )
    assert "RACE DETECTED" not in capfd.readouterr().out
    logits = make_logits(rows, columns, softcap)
    shifted = logits - shift[:, None]
    truth = np.where(is_label(rows, columns), 0, np.exp(shifted))
    np.testing.assert_allclose(rest, truth.sum(-1), rtol=1e-5)
    if softcap is not None:
        truth = truth * (1 - (logits / softcap) ** 2)
    np.testing.assert_allclose(np.asarray(off_label, np.float64), truth, rtol=5e-3, atol=1e-3)
    target = columns.class_targets
    true_target = np.zeros(sizes[0]) if target is None else (shifted * np.asarray(target)).sum(-1)
    np.testing.assert_allclose(target_logit, true_target, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["exponentials", "gradients"])
def test_linear_cross_entropy_kernels_end_when_their_stores_have(kernel):
    """JAX's interpreter stores at once, and the model of the hardware has kernels of its own."""
    rows, columns, softcap = make_case(3, 8, 40)
    ones, config = jnp.ones(3), {**TILES, "workers": 3, "chunk_columns": 128, "store_slots": 2}
    if kernel == "gradients":
        run = functools.partial(gradients.run, softcap=softcap, needs=Needs(x=True), config=config)
        jaxpr = jax.make_jaxpr(run)(CotangentTerms(*[ones] * 4), rows, columns)
    else:
        run = functools.partial(exponentials.exponentials, softcap=softcap, most_excess=60.0, config=config)
        jaxpr = jax.make_jaxpr(run)(rows.x, *columns, rows.labels, ones)

    def of_stores(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("copy_smem_to_gmem", "wait_smem_to_gmem"):
                yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from of_stores(inner)

    *_, store, last = of_stores(jaxpr.jaxpr)
    assert (store.primitive.name, last.primitive.name) == ("copy_smem_to_gmem", "wait_smem_to_gmem")
    # How many may be under way is an operand, and since JAX 0.12 a parameter.
    allowed = last.params["n"] if "n" in last.params else last.invars[0].val
    assert (allowed, last.params["wait_read_only"]) == (0, False)


def test_linear_cross_entropy_configs_fit_and_use_the_chip():
    for rows, hidden, classes in ((16384, 4096, 128256), (4096, 4096, 50257), (1, 64, 1000), (131072, 8192, 256000)):
        x, weight = (types.SimpleNamespace(shape=(size, hidden)) for size in (rows, classes))
        forward = statistics.launch_configs(H100, rows, classes, hidden)
        backward = gradients.launch_configs(H100, rows, classes, hidden)
        persistent = exponentials.configs(H100, x, weight, 4096)
        for configs in (forward, backward, persistent):
            assert len(configs) == len({tuple(config.items()) for config in configs})
        for config in (*forward, *backward, *persistent):
            tile_rows = 2 * config["block_rows"] + config["block_columns"]
            stored = config.get("store_slots", 0) * 2 * config["block_rows"] * 32 * 2
            assert config["stages"] * tile_rows * 64 * 2 + stored <= 226 * 2**10
            # What stays in the cache, unless a single row block is larger.
            row_block = 2 * config["block_rows"] * config["cluster_blocks"]
            assert config["row_group"] * row_block * hidden * 2 <= 32 * 2**20 or config["row_group"] == 1
        assert all(config["vocab_splits"] <= -(-classes // config["block_columns"]) for config in (*forward, *backward))
        # A thread block for each multiprocessor.
        assert all(config["workers"] * config["cluster_blocks"] == 132 for config in persistent)
    # All multiprocessors are at work, with row blocks that their cache holds, of 16, 8 or 32 MiB.
    configs = statistics.launch_configs(H100, 16384, 128256, 4096)
    assert configs[0]["vocab_splits"] * configs[0]["row_group"] >= 132
    changing = {"row_group": 0, "vocab_splits": 0}
    groups = [config["row_group"] for config in configs if config | changing == configs[0] | changing]
    assert groups == [8, 4, 16]


@pytest.mark.parametrize(
    ("rows", "columns", "config"),
    [
        (1000, 700, {"workers": 5}),
        (1000, 700, {"workers": 3, "cluster_blocks": 2}),
        (1000, 100, {"workers": 100, "row_group": 8}),
        (520, 700, {"vocab_splits": 3}),
        (700, 300, {"vocab_splits": 4, "row_group": 1}),
    ],
    ids=str,
)
def test_linear_cross_entropy_tiles_are_computed_once(rows, columns, config):
    """Every tile of every row block has one worker, and workers that have several are within a tile of each other."""
    tiling = tiles.Tiling.of({**TILES, **config}, rows, (columns, 64))
    counts = [int(tiling.tiles_of(jnp.int32(worker))) for worker in range(tiling.workers)]
    places = [
        tuple(map(int, tiling.place(jnp.int32(worker), number)))
        for worker, count in enumerate(counts)
        for number in range(count)
    ]
    assert sorted(places) == [(row, tile) for row in range(tiling.row_blocks) for tile in range(tiling.tiles)]
    if "workers" in config:
        assert max(counts) - min(counts) <= 1
