"""Training the model, in the library's operators; and the same step in plain jnp and optax, to compare with."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxops
import lowering
from jaxops._demo import corpus, model
from jaxops._demo.corpus import Corpus
from jaxops._demo.model import Params

OURS, PLAIN = "jaxops", "plain JAX and optax"
LARGE_VOCABULARY, STEPS_OF_LARGE = 50_257, 5
VALIDATION_WINDOWS = 64
EVALUATIONS = 8
CHUNK_ROWS = 128


class Settings(NamedTuple):
    """Settings of a run."""

    steps: int = 150
    seed: int = 0
    batch: int = 16
    peak_learning_rate: float = 4e-3
    b2: float = 0.99
    weight_decay: float = 0.1

    @property
    def learning_rate(self) -> optax.Schedule:
        warmup = max(1, self.steps // 10)
        peak = self.peak_learning_rate
        return optax.warmup_cosine_decay_schedule(peak / 10, peak, warmup, max(self.steps, warmup + 1), peak / 2)

    @property
    def ema_decay(self) -> float:
        """The average looks back over a fifteenth of the run: long enough to smooth, short enough to keep up."""
        return 1 - 1 / max(self.steps / 15, 1)


class Formulation(NamedTuple):
    """A way to write the parts of a train step that the library offers."""

    embedding: model.Embedding
    cross_entropy: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    init: Callable[[Params], Any]
    update: Callable[[Params, Any, Params], tuple[Params, Any]]


class Evaluation(NamedTuple):
    """Validation losses after a number of steps, with the weights as trained and with their moving average."""

    step: int
    raw: float
    averaged: float


class Cost(NamedTuple):
    """Speed and memory of the train step in a formulation."""

    tokens_per_second: float
    temporary_bytes: int


class Run(NamedTuple):
    """Results of one run: losses and costs by the name of a formulation, and the averaged parameters."""

    losses: dict[str, list[float]]
    costs: dict[str, Cost]
    evaluations: list[Evaluation]
    parameters: int
    explanation: lowering.Explanation
    average: Params


def operators(settings: Settings) -> Formulation:
    """Returns the train step in the library's operators."""
    optimizer = jaxops.ema_adam(
        settings.learning_rate, b2=settings.b2, weight_decay=settings.weight_decay, ema_decay=settings.ema_decay
    )
    return Formulation(
        embedding=jaxops.embedding,
        # Gradients are taken with each chunk of logits, so that no more than one chunk exists at a time.
        cross_entropy=functools.partial(jaxops.linear_cross_entropy, strategy="grad_in_forward", chunk_rows=CHUNK_ROWS),
        init=optimizer.init,
        update=lambda grads, opt_state, params: jaxops.fused_apply(optimizer, grads, opt_state, params),
    )


def plain(settings: Settings) -> Formulation:
    """Returns the train step in jnp and optax: logits of the whole batch, AdamW, then the average of the parameters."""
    optimizer = optax.adamw(settings.learning_rate, b2=settings.b2, weight_decay=settings.weight_decay)

    def cross_entropy(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ weight.T, labels))

    def update(grads: Params, opt_state: Any, params: Params) -> tuple[Params, Any]:
        adam_state, average = opt_state
        updates, adam_state = optimizer.update(grads, adam_state, params)
        params = optax.apply_updates(params, updates)
        return params, (adam_state, optax.incremental_update(params, average, 1 - settings.ema_decay))

    return Formulation(
        embedding=lambda table, indices: table[indices],
        cross_entropy=cross_entropy,
        init=lambda params: (optimizer.init(params), jax.tree.map(jnp.copy, params)),
        update=update,
    )


def mean_loss(formulation: Formulation, shape: model.Shape) -> Callable[[Params, jax.Array], jax.Array]:
    """Returns `loss(params, tokens)`, the loss of a batch of windows."""

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        hidden = model.hidden_states(params, tokens[:, :-1], shape, formulation.embedding)
        return formulation.cross_entropy(hidden, params["table"], tokens[:, 1:])

    return loss


def step_of(loss: Callable[..., jax.Array], update: Callable[[Params, Any, Params], tuple[Params, Any]]) -> Any:
    """Returns `step(params, opt_state, *batch) -> (params, opt_state, loss)`, descending on `loss(params, *batch)`."""

    def step(params: Params, opt_state: Any, *batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return *update(grads, opt_state, params), value

    return step


def train_step(formulation: Formulation, shape: model.Shape) -> Any:
    """Jits `step(params, opt_state, tokens) -> (params, opt_state, loss)`; it updates the first two in place."""
    return jax.jit(step_of(mean_loss(formulation, shape), formulation.update), donate_argnums=(0, 1))


def step_arguments(formulation: Formulation, settings: Settings, shape: model.Shape) -> tuple[Any, Any, Any]:
    """Returns the types of a train step's arguments."""
    params = jax.eval_shape(lambda key: model.init(key, shape), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((settings.batch, shape.context + 1), jnp.int32)
    return params, jax.eval_shape(formulation.init, params), tokens


def compiled_step(formulation: Formulation, settings: Settings, shape: model.Shape) -> Any:
    """Compiles the train step ahead of time."""
    return train_step(formulation, shape).lower(*step_arguments(formulation, settings, shape)).compile()


def temporary_bytes(compiled: Any) -> int:
    """Returns the memory that a compiled function needs beyond its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def validation_loss(params: Params, tokens: jax.Array, shape: model.Shape) -> jax.Array:
    """Computes the mean negative log-likelihood of windows of text."""
    hidden = model.hidden_states(params, tokens[:, :-1], shape, jaxops.embedding)
    log_probs = jax.nn.log_softmax(hidden @ params["table"].T)
    return jaxops.nll_loss(log_probs, tokens[:, 1:])


class Trainer:
    """The state of a run in one formulation, and how long its steps took."""

    def __init__(self, formulation: Formulation, settings: Settings, shape: model.Shape) -> None:
        self.params = model.init(jax.random.key(settings.seed), shape)
        self.opt_state = formulation.init(self.params)
        self.step = compiled_step(formulation, settings, shape)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def train(self, tokens: jax.Array) -> None:
        """Takes one step."""
        started = time.perf_counter()
        self.params, self.opt_state, loss = self.step(self.params, self.opt_state, tokens)
        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - started)

    def cost(self, tokens: int) -> Cost:
        """Returns the memory and the speed of the median step, which has so many tokens."""
        return Cost(tokens / statistics.median(self.seconds), temporary_bytes(self.step))


def run(settings: Settings, text: Corpus, shape: model.Shape, on_step: Callable[[int, float], None]) -> Run:
    """Trains from scratch in both formulations, and calls `on_step(steps done, loss of the last one)` after each step.

    They start from the same parameters and see the same batches, one after the other.
    """
    formulation = operators(settings)
    trainers = {OURS: Trainer(formulation, settings, shape), PLAIN: Trainer(plain(settings), settings, shape)}
    ours, draw = trainers[OURS], np.random.default_rng(settings.seed)
    evaluate = _evaluator(text, shape, settings.batch)
    evaluate_after = set(np.linspace(0, settings.steps, EVALUATIONS + 1).round().astype(int).tolist())
    evaluations = [Evaluation(0, *evaluate(ours.params, ours.opt_state))]
    for done in range(1, settings.steps + 1):
        tokens = _batch(text.train, draw, settings.batch, shape.context + 1)
        for trainer in trainers.values():
            trainer.train(tokens)
        if done in evaluate_after:
            evaluations.append(Evaluation(done, *evaluate(ours.params, ours.opt_state)))
        on_step(done, ours.losses[-1])
    return Run(
        losses={name: trainer.losses for name, trainer in trainers.items()},
        costs={name: trainer.cost(settings.batch * shape.context) for name, trainer in trainers.items()},
        evaluations=evaluations,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(ours.params)),
        explanation=lowering.explain(train_step(formulation, shape), *step_arguments(formulation, settings, shape)),
        average=jaxops.ema_params(ours.opt_state),
    )


def costs_of_large(settings: Settings, shape: model.Shape) -> dict[str, Cost]:
    """Measures the train step with a large vocabulary, on tokens that are drawn."""
    shape = shape._replace(vocabulary=LARGE_VOCABULARY)
    draw, found = np.random.default_rng(settings.seed), {}
    for name, formulation in ((OURS, operators(settings)), (PLAIN, plain(settings))):
        trainer = Trainer(formulation, settings, shape)
        for _ in range(STEPS_OF_LARGE):
            drawn = draw.integers(0, shape.vocabulary, (settings.batch, shape.context + 1))
            trainer.train(jnp.asarray(drawn, jnp.int32))
        found[name] = trainer.cost(settings.batch * shape.context)
    return found


def _batch(tokens: np.ndarray, draw: np.random.Generator, rows: int, length: int) -> jax.Array:
    return jnp.asarray(corpus.windows(tokens, draw.integers(0, len(tokens) - length, rows), length))


def _evaluator(text: Corpus, shape: model.Shape, batch: int) -> Callable[[Params, Any], tuple[float, float]]:
    """Returns a function that measures trained and averaged parameters on evenly spread windows of validation text."""
    length = shape.context + 1
    starts = np.linspace(0, len(text.validation) - length, VALIDATION_WINDOWS).astype(int)
    batches = [corpus.windows(text.validation, starts[i : i + batch], length) for i in range(0, len(starts), batch)]
    loss = jax.jit(lambda params, tokens: validation_loss(params, tokens, shape))

    def mean_loss(params: Params) -> float:
        return float(np.mean([loss(params, tokens) for tokens in batches]))

    return lambda params, opt_state: (mean_loss(params), mean_loss(jaxops.ema_params(opt_state)))
