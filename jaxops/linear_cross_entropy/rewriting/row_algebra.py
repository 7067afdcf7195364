"""Computes what rows of logits are reduced to from the rows' statistics, with the user's equations for the rest.

With logits z, their scale s and the row's maximum m of s z, the operator gives l = log sum exp(s z - m), s z_y - m for
a label y, and sum t (s z - m) for targets t. What has a number for each class is a form: logits a z + b, their
exponentials times a number, one number at a label and another elsewhere, one number for all, or an array. A sum, a
maximum or a pick of a form is a number that follows from the statistics.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._primitive.sharding import same_varying_axes
from jaxops.linear_cross_entropy.operands import RowStatistics
from jaxops.linear_cross_entropy.rewriting.row_forms import (
    Asked,
    Combined,
    Exponentials,
    Factor,
    Layer,
    Logits,
    Maxima,
    Number,
    OneHot,
    Vector,
    aligned,
    check_terms,
    counts,
    is_plain,
    is_same,
    is_shared,
    reads_logits,
    stopped,
    widened,
)
from lowering.rewriting.graph import Node
from lowering.rewriting.rules import RefusalError

# Operations without a derivative.
_STEPS = frozenset({"sign", "floor", "ceil", "round", "stop_gradient"})


class RowAlgebra:
    """Arithmetic of one evaluation: what nodes make of forms and of numbers of rows, and what they ask the operator.

    A number of rows is an array of the rows' shape, or () if all rows share it; the classes are a last axis behind.

    Attributes:
      asked: what was asked for.
      maxima: whether numbers rise with all logits, and whether maxima were read.
      wants_mean, wants_prediction: whether these metrics were asked for.
      squares: whether squares of log sum exp were.
      picks_by_label: whether labels or targets decide about a number.
    """

    def __init__(self, classes: int, dtype: Any, *, is_promised: bool = False) -> None:
        """Takes the number of classes, and the dtype of the statistics.

        With `is_promised`, labels are classes wherever the user's code promises so.
        """
        self.classes, self.dtype = classes, dtype
        self._is_promised = is_promised
        self.asked, self.maxima = Asked(), Maxima(None)
        self.wants_mean = self.wants_prediction = self.squares = self.picks_by_label = False
        # Equal computations give the same object, so labels are equal if they are the same.
        self._done: dict[Any, Any] = {}
        self._dependent: dict[Any, Any] = {}  # the same for what depends on logits
        self._behind: set[int] = set()  # identities of that
        self._kept: list[Any] = []  # an identity is that of an object that exists
        self._finite: dict[int, Any] = {}
        self._guessed: list[Number] = []  # scales that were taken for that of exponentials before one was seen

    def answer(self, statistics: RowStatistics, square: Any = None, peak: Any = None, stop: Any = None) -> None:
        """Takes the answers.

        Args:
          statistics: of the rows.
          square: (m + l)^2, if squares of log sum exp are to be taken from there.
          peak: the user's maximum, if it is to be told from m.
          stop: a number to multiply by where gradients are stopped, by which a derivative can tell.
        """
        self._given, self._square = statistics, square
        self.maxima.level, self.maxima.peak = statistics.max_logit, peak
        self._stop = jax.lax.stop_gradient if stop is None else lambda x: x * stop.astype(x.dtype)

    def logits(self) -> Logits:
        """Begins, or begins once more, with the logits of a layer."""
        logits = Logits(Layer())
        self._kept += [logits, self._dependent]
        self._dependent, self._behind = {}, {id(logits)}
        return logits

    @property
    def has_guessed_wrong(self) -> bool:
        """Tells whether a scale was taken for that of the exponentials, which turned out to be another."""
        return self.asked.scale is not None and not all(is_same(scale, self.asked.scale) for scale in self._guessed)

    def once(self, key: Any, operands: Sequence[Any], make: Callable[[], Any]) -> Any:
        """Returns what is made of forms, the same for the same key and the same forms."""
        key, is_behind = (key, *map(id, operands)), any(id(x) in self._behind for x in operands)
        done = self._dependent if is_behind else self._done
        if key not in done:
            self._kept.append(operands)
            done[key] = make()
            if is_behind:
                self._behind.add(id(done[key]))
        return done[key]

    def elementwise(self, node: Node, operands: list[Any]) -> Any:
        """Applies a node that computes number by number."""
        is_of_numbers = all(isinstance(x, Number | Factor) for x in operands)
        return self._of_numbers(node, operands) if is_of_numbers else self._of_forms(node, operands)

    def _of_numbers(self, node: Node, operands: list[Any]) -> Any:
        """Applies an elementwise node to numbers; what is floating point is in the dtype of the statistics."""
        a, b, maxima = operands[0], operands[-1], self.maxima
        match node.name:
            case "add" | "add_any" | "sub" if isinstance(a, Number) and isinstance(b, Number):
                return maxima.plus(a, b, -1.0 if node.name == "sub" else 1.0)
            case "square" | "integer_pow" | "mul" if (
                a is b and node.params.get("y", 2) == 2 and self._is_log_sum_exp(a)
            ):
                self.squares = True
                return Number(self._square)
            case "neg":
                return maxima.times(a, Number(-1.0))
            case "mul":
                return maxima.times(a, b)
            case "div":
                return maxima.over(a, b)
            case "exp" if isinstance(a, Number) and a.known is None:
                return Factor(a)
            case "log" if isinstance(a, Factor):
                return maxima.logarithm(a, self.dtype)
            case "abs" if isinstance(a, Factor) and a.gain.known == 1:
                return a
            case "max" if -math.inf in (getattr(a, "known", 0), getattr(b, "known", 0)):
                return b if a.known == -math.inf else a
            case "stop_gradient" if isinstance(a, Number):
                return stopped(a, self._stop)
            case "convert_element_type" if _is_floating(node) and (isinstance(a, Factor) or a.level or a.peak):
                return a
            case "select_n" if len(operands) == 3:
                # A maximum that is not finite is replaced by 0: then the loss is not finite, whatever it is.
                is_kept = getattr(operands[1], "known", None) == 0 and self._finite.get(id(a)) is b
                return b if is_kept else maxima.where(a, b, operands[1])
        is_smooth = jnp.issubdtype(node.outputs[0].dtype, jnp.floating) and node.name not in _STEPS
        arrays = [maxima.array(x, is_differentiated=is_smooth) for x in operands]
        is_known = all(map(is_plain, arrays))
        dtypes = [x.dtype for x in (*node.inputs, *node.outputs)]
        if is_known:
            with jax.ensure_compile_time_eval():
                return Number(self._bound(node, arrays, dtypes).item())
        wide = [self.dtype if jnp.issubdtype(dtype, jnp.floating) else dtype for dtype in dtypes]
        found = Number(self._bound(node, arrays, wide))
        if node.name == "is_finite":
            self._finite[id(found)] = a
        return found

    def _bound(self, node: Node, arrays: Sequence[Any], dtypes: Sequence[Any]) -> Any:
        """Evaluates an elementwise node in these dtypes of its operands and its result."""
        *of_operands, of_result = dtypes
        arrays = [jnp.asarray(x, dtype) for x, dtype in zip(arrays, of_operands, strict=True)]
        if node.name == "convert_element_type":
            return arrays[0].astype(of_result)
        if len({x.shape for x in arrays}) > 1:
            arrays = aligned(*arrays)
        params = node.params | ({"sharding": None} if "sharding" in node.params else {})
        return node.equation.primitive.bind(*same_varying_axes(arrays), **params)

    def _is_log_sum_exp(self, number: Any) -> bool:
        """Tells whether a number is log sum exp, whose square is one more statistic."""
        is_pure = self._square is not None and isinstance(number, Number) and number[1:] == (1.0, 0.0, 0.0)
        return is_pure and number.rest is self._given.log_sum_exp

    def _of_forms(self, node: Node, forms: list[Any]) -> Any:
        """Applies an elementwise node to forms."""
        labels = [x.label for x in forms if isinstance(x, OneHot)]
        if all(isinstance(x, Number | OneHot) for x in forms) and all(x is labels[0] for x in labels):
            cases = ([getattr(x, case, x) for x in forms] for case in ("on", "off"))
            return OneHot(labels[0], *(self._of_numbers(node, case) for case in cases))
        found = self._of_logits(node, forms)
        if found is None and all(isinstance(x, Number | OneHot | Vector) for x in forms):
            arrays = aligned(*(self._vector(x) for x in forms))
            return Vector(self._bound(node, arrays, [x.dtype for x in (*node.inputs, *node.outputs)]))
        return Combined(node, tuple(forms), any(map(reads_logits, forms))) if found is None else found

    def _vector(self, form: Any) -> Any:
        """Computes the array of a form without logits."""
        if isinstance(form, OneHot):
            label, on, off = aligned(*(jnp.asarray(self.maxima.array(x))[..., None] for x in form))
            return jnp.where(aligned(jnp.arange(self.classes), label)[0] == label, on, off)
        return form.array if isinstance(form, Vector) else jnp.asarray(self.maxima.array(form))[..., None]

    def _of_logits(self, node: Node, forms: list[Any]) -> Any:
        """Returns the form of what keeps logits, exponentials or one-hot rows; None for anything else."""
        a, b = forms[0], forms[-1]
        plus, sign = self.maxima.plus, -1.0 if node.name == "sub" else 1.0
        match node.name, a, b:
            case ("eq" | "ne", Number(), Vector(counts=True)) | ("eq" | "ne", Vector(counts=True), Number()) if counts(
                node.inputs[0].dtype, self.classes
            ):
                label = a if isinstance(a, Number) else b
                return OneHot(label, Number(node.name == "eq"), Number(node.name != "eq"))
            case "add" | "add_any", Number(), Logits():
                return b._replace(shift=plus(b.shift, a))
            case "add" | "add_any" | "sub", Logits(), Number():
                return a._replace(shift=plus(a.shift, b, sign))
            case "sub", Number(), Logits():
                return self.scaled(b, Number(-1.0), self.maxima.times)._replace(shift=plus(a, b.shift, -1.0))
            case "add" | "add_any" | "sub", Logits(), Vector():
                return self._biased(a, b, sign)
            case "add" | "add_any", Vector(), Logits():
                return self._biased(b, a, 1.0)
            case "mul", Number() | Factor(), _:
                return self._capped(b, a) or self.scaled(b, a, self.maxima.times)
            case "mul", _, Number() | Factor():
                return self._capped(a, b) or self.scaled(a, b, self.maxima.times)
            case "div", _, Number() | Factor():
                return self.scaled(a, b, self.maxima.over)
            case "neg", _, _:
                return self.scaled(a, Number(-1.0), self.maxima.times)
            case "exp", Logits(), _:
                return Exponentials(a)
            case "log", Exponentials(logits, gain), _:
                log = self.maxima.logarithm(Factor(Number(0.0), gain), self.dtype)
                return logits._replace(shift=plus(logits.shift, log))
            case "convert_element_type", Vector(array, True), _:
                dtype = node.outputs[0].dtype
                return Vector(array.astype(dtype), counts(dtype, self.classes))
            case "convert_element_type", Logits() | Exponentials() | Combined(), _ if _is_floating(node):
                if jnp.finfo(node.outputs[0].dtype).bits > jnp.finfo(self.dtype).bits:
                    raise RefusalError(f"the logits are widened to {node.outputs[0].dtype} on {node.source}")
                return a
            case "select_n", Vector(), _ if is_shared(a) and id(a) not in self._behind:
                return self._masked(*forms)
        return None

    def scaled(self, form: Any, by: Any, change: Callable[..., Any]) -> Any:
        """Multiplies or divides a form by a number; returns None if no form describes the result."""
        if isinstance(form, Logits) and isinstance(by, Number):
            if by.known is None and id(by) in self._behind:
                raise RefusalError("the logits are multiplied by a number that depends on them")
            scale = self.once(change.__name__, (form.scale, by), lambda: change(form.scale, by))
            return form._replace(scale=scale, shift=change(form.shift, by))
        if not isinstance(form, Exponentials):
            return None
        gain = change(form.gain, by)
        if isinstance(gain, Number):
            return form._replace(gain=gain)
        shift = self.maxima.plus(form.logits.shift, gain.power)
        return Exponentials(form.logits._replace(shift=shift), gain.gain)

    def _biased(self, logits: Logits, bias: Vector, sign: float) -> Logits | None:
        """Adds one more bias to logits, which the layer takes as long as nothing but a number has multiplied them."""
        layer, scale, array = logits.layer, logits.scale.known, bias.array
        is_fresh = scale not in (None, 0) and logits.shift.known == 0 and layer.softcap is None and layer.kept is None
        is_fresh &= is_shared(bias) and id(bias) not in self._behind
        if not (is_fresh and jnp.issubdtype(array.dtype, jnp.floating)):
            return None

        def added() -> Any:
            more = sign / scale * array.astype(self.dtype)
            return more if layer.bias is None else layer.bias + more

        more = self.once(("bias", sign / scale), (bias, layer.bias), added)
        return logits._replace(layer=layer._replace(bias=more))

    def _capped(self, form: Any, by: Any) -> Logits | None:
        """Reads c tanh(z / c) as the logits of a layer with a softcap."""
        if not (isinstance(form, Combined) and form.node.name == "tanh" and isinstance(form.operands[0], Logits)):
            return None
        (layer, scale, shift), cap = form.operands[0], getattr(by, "known", None)
        if shift.known != 0 or layer.softcap is not None or layer.kept is not None or scale.known is None:
            return None
        if cap is None or cap <= 0 or abs(scale.known * cap - 1) > 4 * float(jnp.finfo(self.dtype).eps):
            return None
        return Logits(layer._replace(softcap=float(cap)))

    def _masked(self, condition: Vector, *cases: Any) -> Logits | None:
        """Puts a number in place of some columns of the logits."""
        for logits, other, kept in ((cases[-1], cases[0], True), (cases[0], cases[-1], False)):
            if isinstance(logits, Logits) and isinstance(other, Number) and other.known is not None:
                layer, scale, array = logits.layer, logits.scale.known, condition.array
                is_fresh = logits.shift.known == 0 and layer.softcap is None and layer.kept is None
                fill = other.known / (scale or 1)
                fits = math.isinf(other.known) or abs(fill) <= float(jnp.finfo(self.dtype).max)
                if is_fresh and scale not in (None, 0) and fits:
                    inverted = self.once("not", (array,), functools.partial(jnp.logical_not, array))
                    return logits._replace(layer=layer._replace(kept=array if kept else inverted, fill=fill))
        return None

    def total(self, form: Any) -> Any:
        """Sums over the classes."""
        # What is combined may be read in many places.
        is_combined = isinstance(form, Combined)
        return self.once("total", (form,), lambda: self._total(form)) if is_combined else self._total(form)

    def _total(self, form: Any) -> Any:
        maxima, count = self.maxima, Number(float(self.classes))
        match form:
            case Number() | Factor():
                return maxima.times(count, form)
            case Vector(array):
                return Number(jnp.sum(widened(array), axis=-1))
            case OneHot(label, on, off):
                return maxima.plus(maxima.times(count, off), self._if_class(label, maxima.plus(on, off, -1.0)))
            case Logits():
                return self._weighted(form, "ones", count)
            case Exponentials(logits, gain):
                return Factor(self._log_total(logits), gain)
            case Combined(node, (a,)) if node.name == "neg":
                return maxima.times(self.total(a), Number(-1.0))
            case Combined(node, (a,)) if node.name == "convert_element_type":
                return self.total(a)
            case Combined(node, (a, b)) if node.name in ("add", "add_any", "sub"):
                check_terms(node, form.operands)
                return maxima.plus(self.total(a), self.total(b), -1.0 if node.name == "sub" else 1.0)
            case Combined(node, (a, Number() | Factor() as b)) if node.name == "div":
                return maxima.over(self.total(a), b)
            case Combined(node, (a, b)) if node.name == "mul":
                return self.total_of_product(a, b)
            case Combined(node, (Number() as condition, no, yes)) if node.name == "select_n":
                return maxima.where(condition, self.total(yes), self.total(no))
            case Combined(node, (OneHot(label, on, off), no, yes)) if node.name == "select_n":
                at_label, others = (yes, no) if on.known else (no, yes)
                # Only numbers may stand for the others: a difference of two sums would cost digits.
                if isinstance(others, Number) and {on.known, off.known} == {True, False}:
                    of_others = maxima.times(Number(float(self.classes - 1)), others)
                    inside = maxima.plus(of_others, self.picked_at(at_label, label))
                    return maxima.where(self.is_class(label), inside, maxima.times(count, others), is_label=True)
        what = f"{form.node.name} on {form.node.source}" if isinstance(form, Combined) else "something else"
        raise RefusalError(f"{what} is added up over the classes")

    def total_of_product(self, a: Any, b: Any) -> Any:
        """Sums a b over the classes."""
        maxima = self.maxima
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Number | Factor):
                return maxima.times(self.total(other), one)
            if isinstance(one, OneHot):
                at_label = maxima.times(self.picked_at(other, one.label), maxima.plus(one.on, one.off, -1.0))
                inside = self._if_class(one.label, at_label)
                return inside if one.off.known == 0 else maxima.plus(inside, maxima.times(self.total(other), one.off))
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Vector) and isinstance(other, Vector):
                first, second = aligned(widened(one.array), widened(other.array))
                return Number(jnp.sum(first * second, axis=-1))
            if isinstance(one, Vector) and isinstance(other, Combined) and other.node.name in ("add", "sub"):
                check_terms(other.node, other.operands)
                make = functools.partial(self.total_of_product, one)
                first, second = (self.once("product", (one, x), functools.partial(make, x)) for x in other.operands)
                return maxima.plus(first, second, -1.0 if other.node.name == "sub" else 1.0)
            if isinstance(one, Vector) and isinstance(other, Logits):
                return self._weighted(other, one, Number(jnp.sum(widened(one.array), axis=-1)))
            if isinstance(one, Exponentials) and isinstance(other, Logits):
                return self._expected(one, other)
        raise RefusalError("a product with the logits is added up over the classes")

    def picked(self, form: Any, label: Number) -> Any:
        """Picks the number at a label."""
        match form:
            case Number() | Factor():
                return form
            case Vector(array):
                at = jnp.asarray(self.clipped(label).rest)
                if array.ndim == 1 or at.ndim == 0:
                    return Number(array[..., at])
                return Number(jnp.take_along_axis(array, at[..., None], axis=-1)[..., 0])
            case OneHot(other, on, off):
                at_other = jnp.asarray(self.maxima.array(label)) == jnp.asarray(self.maxima.array(other))
                return self.maxima.where(Number(at_other), on, off)
            case Logits(_, _, shift):
                if self.asked.label is not None and not is_same(label, self.asked.label):
                    raise RefusalError("the logits are picked at two kinds of labels")
                if id(label) in self._behind:
                    raise RefusalError("the logits decide which of them are picked")
                self._ask(form, label=label)
                answer = Number(self._given.label_logit, 1.0)
                return self.maxima.plus(shift, self.maxima.times(self._ratio(form), answer))
            case Exponentials(logits, gain):
                return Factor(self.picked(logits, label), gain)
            case Combined(node, operands):
                picks = functools.partial(self.picked, label=label)
                return self.once("picked", (form, label), lambda: self._of_numbers(node, [*map(picks, operands)]))
        raise RefusalError("a class is picked from something that has no number for each class")

    def picked_at(self, form: Any, label: Number) -> Any:
        """Picks the number at a label by which rows differ, unless it is written in the code."""
        self.picks_by_label |= label.known is None
        return self.picked(form, label)

    def gathered(self, node: Node, form: Any, label: Any) -> Any:
        """Picks the number at a label of each row as a gather does, where a label may be no class."""
        mode, fill = node.params["mode"].name, node.params["fill_value"]
        if mode == "FILL_OR_DROP":
            missing = Number(math.nan if fill is None else float(fill))
            return self.maxima.where(self.is_class(label), self.picked_at(form, label), missing, is_label=True)
        found = self.picked_at(form, self.clipped(label))
        if mode == "CLIP" or self._is_promised:
            return found
        # JAX picks a class for a label that is none, but drops its gradient.
        fixed = stopped(self.maxima.plain(found), jax.lax.stop_gradient)._replace(slope=self.maxima.plain(found).slope)
        return self.maxima.where(self.is_class(label), found, fixed, is_label=True)

    def clipped(self, label: Number) -> Number:
        """Returns the class that is nearest to a label."""
        last = self.classes - 1
        if label.known is not None:
            return Number(min(max(label.known, 0), last))
        return self.once("clip", (label,), lambda: Number(jnp.clip(label.rest, 0, last)))

    def is_class(self, label: Number) -> Number:
        """Tells whether a label is a class."""
        if label.known is not None:
            return Number(0 <= label.known < self.classes)
        rest = label.rest
        return self.once("is class", (label,), lambda: Number((rest >= 0) & (rest < self.classes)))

    def _if_class(self, label: Number, number: Any) -> Any:
        """Returns a number where the label is a class, else 0."""
        return self.maxima.where(self.is_class(label), number, Number(0.0), is_label=True)

    def _ask(self, logits: Logits, **more: Any) -> None:
        """Asks something about logits, which must be of one layer."""
        if self.asked.layer is not None and not self.asked.layer.is_same(logits.layer):
            raise RefusalError("the logits are read in two ways, such as with and without a bias, or not all rows")
        self.asked = self.asked._replace(layer=logits.layer, **more)

    def _ratio(self, logits: Logits) -> Number:
        """Returns these logits' scale in units of that of the statistics."""
        scale = self.asked.scale
        if scale is None:
            self._guessed.append(logits.scale)
        if scale is None or is_same(logits.scale, scale):
            return Number(1.0)
        if scale.known in (None, 0):
            raise RefusalError("the logits are read at two temperatures")
        return self.maxima.over(logits.scale, scale)

    def _log_total(self, logits: Logits) -> Number:
        """Returns the logarithm of the sum of exp(logits)."""
        if self.asked.scale is not None and not is_same(self.asked.scale, logits.scale):
            raise RefusalError("exponentials of the logits are taken at two temperatures")
        self._ask(logits, scale=self.asked.scale or logits.scale)
        return self.maxima.plus(logits.shift, Number(self._given.log_sum_exp, 1.0))

    def _weighted(self, logits: Logits, weights: Any, total: Number) -> Number:
        """Sums the logits times weights, an array or "ones", whose own sum is known."""
        target = self.asked.target
        if id(weights) in self._behind:
            raise RefusalError("the logits are added up with weights that depend on them")
        if target is not None and target is not weights:
            raise RefusalError("two different weighted sums of the logits are wanted")
        self._ask(logits, target=weights)
        self.picks_by_label |= weights != "ones" and not is_shared(weights)
        plus, times, ratio = self.maxima.plus, self.maxima.times, self._ratio(logits)
        # What all classes share goes first: where it cancels the maximum, the sum of weights multiplies nothing large.
        offset = plus(logits.shift, times(ratio, Number(0.0, 1.0)))
        minus_loss = times(Number(-1.0), Number(self._given.target_loss))
        relative = plus(times(total, Number(self._given.log_sum_exp)), minus_loss)
        return plus(times(total, offset), times(ratio, relative))

    def _expected(self, exponentials: Exponentials, logits: Logits) -> Number:
        """Sums exponentials times logits, as in an entropy."""
        total = self.total(exponentials)
        self._ask(logits)
        self.wants_mean = True
        mean = self.maxima.times(self._ratio(logits), Number(self._given.mean_logit, 1.0))
        return self.maxima.times(total, Number(self.maxima.array(self.maxima.plus(logits.shift, mean))))

    def maximum(self, form: Any) -> Number:
        """Takes the maximum over the classes."""
        if not isinstance(form, Logits):
            raise RefusalError("the maximum of something else than logits is taken")
        rest, level, peak, slope = form.shift
        ratio = self._positive_ratio(form, "maximum")
        return Number(rest, level, peak + ratio, slope + ratio)

    def prediction(self, form: Any) -> Number:
        """Finds the first class of the largest logit."""
        form = form.logits if isinstance(form, Exponentials) else form
        if not isinstance(form, Logits):
            raise RefusalError("the largest of something else than logits is looked for")
        self._positive_ratio(form, "prediction")
        self.wants_prediction = True
        return Number(self._given.prediction)

    def _positive_ratio(self, logits: Logits, what: str) -> float:
        self._ask(logits)
        ratio = self._ratio(logits).known
        if ratio is None or ratio <= 0:
            raise RefusalError(f"the {what} is taken at another temperature than the exponentials")
        return float(ratio)


def _is_floating(node: Node) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in (node.inputs[0], node.outputs[0]))
