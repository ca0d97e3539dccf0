"""Checks of the return values of users' functions in training: types, shapes, and that a loss has
a gradient with respect to the function's arguments.

A loss without gradient would train nothing, and an extra dimension would be broadcast over all
tokens, both silently.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from slime.log import get_logger, tell
from slime.samples.sample_fields import LARGEST_LOG_PROB
from slime.trainer.records import LossInputs
from slime.user_code.loading import FunctionFailed, described, shown

logger = get_logger(__name__)

#: Metrics of a step that the trainer sets.
_TAKEN = ("grad_norm", "skipped", "global_batch_size")
#: Relative difference of two sums of the same terms that rounding may explain.
_SAME_LOSS = 0.01

_CUT = (
    "detach(), item(), tolist(), numpy(), torch.no_grad() and a new tensor cut the way back to "
    "the model"
)


class UserValues:
    """Records the tensors with gradient that are passed to a function, before it can change them in
    place.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> (UserValues(x).has_grad_path(x.exp().sum()),
        ...  UserValues(x).has_grad_path(torch.ones((), requires_grad=True) * 2))
        (True, False)
    """

    def __init__(self, *tensors: Tensor | None) -> None:
        self._tensors = [
            tensor for tensor in tensors if tensor is not None and tensor.requires_grad
        ]
        self._nodes = {get_gradient_edge(tensor).node for tensor in self._tensors}

    def has_grad_path(self, value: Tensor) -> bool:
        """Tell whether the backward pass of ``value`` reaches any of them; true if none has a
        gradient."""
        if not self._nodes or not value.requires_grad:
            return not self._nodes
        waiting: list[Node] = [get_gradient_edge(value).node]
        seen: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node in self._nodes:
                return True
            if node not in seen:
                seen.add(node)
                waiting.extend(before for before, _ in node.next_functions if before is not None)
        return False

    @contextlib.contextmanager
    def without_backward(self, origin: str) -> Iterator[None]:
        """Check that the user's code in this block does not compute gradients of the model itself.

        Raises:
            FunctionFailed: it did; they would count twice.
        """
        reached: list[Any] = []
        hooks = [node.register_prehook(lambda *_: reached.append(1)) for node in self._nodes]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if reached:
            raise FunctionFailed(
                f"{origin} called backward()",
                why="the trainer does, too, and each gradient would be added twice",
                fix="return the loss, and leave backward() out",
            )

    def connected(self, value: Tensor, masks: Tensor, what: str, fix: str) -> Tensor:
        """Return ``value``, with a gradient of zeros if it has none and no token is trained, so
        that the backward pass runs.

        Raises:
            FunctionFailed: it would train nothing; the message begins with ``what``.
        """
        if self.has_grad_path(value):
            return value
        if masks.any():
            raise FunctionFailed(
                f"{what}, without gradient", why=f"{_CUT}, which would learn nothing", fix=fix
            )
        return value + self._tensors[0].reshape(-1)[:0].sum()


# -- losses ----------------------------------------------------------------------------------------


def loss_and_metrics(
    returned: Any, given: UserValues, masks: Tensor, origin: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the checked output of a loss function, the metrics as 0-dimensional tensors.

    Args:
        given: log-probs and logits, from which the loss must be computed.
        masks: flat [T].
        origin: the function's name in messages (`slime.user_code.loading.named`).
    Raises:
        FunctionFailed: not such a pair, a loss of another shape or without gradient, or a metric
            that is not a number.
    """
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise FunctionFailed(
            f"{origin} returned {described(returned)}",
            why="it must return (loss, metrics): a tensor of shape [], and a dict with a number "
            "for each name",
            fix="end it with `return loss, metrics`; the metrics may be {}",
        )
    loss, metrics = returned
    fix = 'compute it from batch["current_log_probs"] or logits, with sum_of_sample_mean'
    what = f"{origin} returned {described(loss)} as its loss"
    loss = given.connected(_number(loss, masks, what, fix), masks, what, fix)
    if not isinstance(metrics, dict):
        raise FunctionFailed(
            f"{origin} returned {described(metrics)} as its metrics",
            fix="return (loss, metrics), a dict; {} for none",
        )
    for name in metrics:
        if str(name) in _TAKEN or str(name).startswith("lr-pg_"):
            raise _taken(name, origin)
    fix = "reduce each to a number, with sum_of_sample_mean"
    return loss, {
        _name(name, origin): _number(
            value, masks, f"{origin} returned {described(value)} as its metric {name!r}", fix
        )
        for name, value in metrics.items()
    }


def check_summed(values: Any, masks: Tensor, origin: str) -> None:
    """Check the argument that a loss function passes to ``sum_of_sample_mean``: another shape would
    be broadcast over all tokens.

    Raises:
        FunctionFailed: it does not have one value per response token.
    """
    if not isinstance(values, Tensor) or values.shape != masks.shape:
        raise FunctionFailed(
            f"{origin} called sum_of_sample_mean with {described(values)}",
            why=f"it takes a tensor of shape {list(masks.shape)}: one value per response token of "
            "the micro-batch",
            fix="put the samples' tensors [R] together, as in "
            'torch.cat(batch["current_log_probs"])',
        )


def tell_unless_sum(whole: Tensor, alone: Callable[[int], Any], count: int, origin: str) -> None:
    """Warn once if a loss is not the sum of those of single samples: it would depend on the samples
    with which each one shares a micro-batch.

    Args:
        whole: of a micro-batch with ``count`` samples.
        alone: the function's value for the sample at a position.
    """
    try:
        with torch.no_grad():
            total = sum(float(alone(position)) for position in range(count))
    except Exception as error:  # it may need several samples, or gradients
        logger.debug("%s was not compared with single samples: %r", origin, error)
        return
    value = float(whole.detach())
    largest = max(abs(value), abs(total))
    if math.isfinite(largest) and abs(value - total) > max(_SAME_LOSS * largest, 1e-6):
        tell(
            logger,
            "%s is no sum over samples: it is %.4g for a micro-batch of %d samples, and %.4g in "
            "total for one after the other. So training depends on which samples share a "
            "micro-batch; sum over samples, as sum_of_sample_mean does, and do not average",
            origin,
            value,
            count,
            total,
            once=f"no sum {origin}",
        )


def check_reducer(reduce: Any, origin: str) -> None:
    """Check the reducer that the user's function returned.

    Raises:
        FunctionFailed: it cannot be called with the losses.
    """
    fix = (
        "return a function that takes the loss of each token [T] and returns their sum, a tensor "
        "of shape []"
    )
    if not callable(reduce):
        raise FunctionFailed(
            f"{origin} returned {described(reduce)}", why="it must return a function", fix=fix
        )
    try:
        inspect.signature(reduce).bind(None)
    except TypeError as error:
        why = f"its signature is {inspect.signature(reduce)}: {error}"
        raise FunctionFailed(
            f"{origin} returned a function that cannot be called with (losses)", why, fix
        ) from error
    except ValueError:  # some builtins have no signature; a call will show any error
        return


def reduced_loss(value: Any, given: UserValues, masks: Tensor, origin: str) -> Tensor:
    """Return the checked output of a reducer.

    Args:
        given: the loss of each token.
        masks: flat [T], after any correction.
    Raises:
        FunctionFailed: it is not a single number, or lacks the gradient of the losses.
    """
    fix = "reduce the losses that it is given to a tensor of shape []: a sum over samples"
    what = f"the reducer of {origin} returned {described(value)}"
    return given.connected(_number(value, masks, what, fix), masks, what, fix)


def _number(value: Any, like: Tensor, what: str, fix: str) -> Tensor:
    """Return ``value`` as a 0-dimensional tensor.

    Args:
        like: a tensor on the target device.
        what: the beginning of an error's message.
    """
    value = _real(value, what, fix)
    if not isinstance(value, Tensor) or value.shape:
        raise FunctionFailed(what, why="it must be one number: a tensor of shape []", fix=fix)
    return value.to(like.device)


def _real(value: Any, what: str, fix: str) -> Any:
    """Convert a plain number to a tensor; return anything else unchanged.

    Raises:
        FunctionFailed: it is complex, or does not fit a float.
    """
    if isinstance(value, numbers.Number):
        try:
            return torch.as_tensor(float(value))  # type: ignore[arg-type]
        except (OverflowError, TypeError, ValueError) as error:
            raise FunctionFailed(what, why=f"it is no real number: {error}", fix=fix) from error
    if isinstance(value, Tensor) and value.is_complex():
        raise FunctionFailed(what, why="it is complex, and must be a real number", fix=fix)
    return value


def _taken(name: Any, origin: str) -> FunctionFailed:
    return FunctionFailed(
        f"{origin} returned a metric {name!r}, which the trainer has", fix="name it otherwise"
    )


def _name(name: Any, origin: str) -> str:
    if not isinstance(name, str):
        raise FunctionFailed(
            f"{origin} returned {name!r:.60} as the name of a metric", fix="name metrics with text"
        )
    return name


# -- the correction for the mismatch ---------------------------------------------------------------

_CORRECTION = (
    "return (loss of each token [T], the loss masks [R] of each sample, a dict of metrics [T] by "
    "name)"
)


def mismatch_metrics(
    returned: Any, token_loss: Tensor, taken: Collection[str], origin: str
) -> dict[str, Tensor]:
    """Return the metrics [T] of a correction; a single number applies to every token.

    Args:
        taken: names of the trainer's own metrics.
    Raises:
        FunctionFailed: it did not return three values, or a metric is not one number per token.
    """
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise FunctionFailed(
            f"{origin} returned {described(returned)}",
            why="it must return three things",
            fix=_CORRECTION,
        )
    metrics = returned[2]
    if not isinstance(metrics, dict):
        raise FunctionFailed(
            f"{origin} returned {described(metrics)} as its metrics",
            fix=f"{_CORRECTION}; {{}} for none",
        )
    found = {}
    for name, value in metrics.items():
        what = f"{origin} returned {described(value)} as its metric {shown(name)}"
        value = _real(value, what, "give a number, or one per token")
        if not isinstance(value, Tensor) or value.shape not in ((), token_loss.shape):
            raise FunctionFailed(
                what,
                why="it must have a value for each of the response tokens, the shape "
                f"{list(token_loss.shape)}",
                fix="give a value per token, the samples' put together with torch.cat",
            )
        if _name(name, origin) in taken:
            raise _taken(name, origin)
        found[name] = value.to(token_loss.device).expand_as(token_loss)
    return found


def corrected_loss(
    returned: Sequence[Any], given: UserValues, token_loss: Tensor, inputs: LossInputs, origin: str
) -> tuple[Tensor, Tensor]:
    """Return the loss and the masks [T] of a correction, after `mismatch_metrics` has checked it.

    Args:
        given: ``token_loss``.
    Raises:
        FunctionFailed: other shapes, a loss without gradient, or masks with values other than 0, 1
            and the previous ones.
    """
    loss = returned[0]
    if not isinstance(loss, Tensor) or loss.shape != token_loss.shape:
        raise FunctionFailed(
            f"{origin} returned {described(loss)} as the loss",
            why=f"it must be the loss of each response token, of shape {list(token_loss.shape)} "
            "as pg_loss",
            fix=_CORRECTION,
        )
    what = f"{origin} returned the loss masks"
    masks = torch.cat(
        per_token(
            returned[1], inputs.masks.split(inputs.lengths.tolist()), inputs.sample_indices, what
        )
    )
    masks = masks.to(inputs.masks)
    check_masks([masks], [inputs.masks], origin)
    what = f"{origin} returned {described(loss)} as the loss"
    return given.connected(loss, masks, what, fix="compute it from pg_loss"), masks


def check_masks(masks: Sequence[Tensor], before: Sequence[Tensor], origin: str) -> None:
    """Check that loss masks have only the values 0, 1 and the previous ones.

    Raises:
        FunctionFailed: a mask has another value.
    """
    if not all(((now == 0) | (now == 1) | (now == then)).all() for now, then in zip(masks, before)):
        raise FunctionFailed(
            f"{origin} returned loss masks with values other than 0 and 1",
            why="a mask says whether a token is trained, and is no weight",
            fix="multiply the loss, or the advantages, with weights, and give masks of 0 and 1",
        )


# -- one number per token --------------------------------------------------------------------------


def per_token(
    values: Any, masks: Sequence[Tensor], indices: Sequence[int | None], what: str
) -> list[Tensor]:
    """Return ``values`` as float32 tensors [R] of each sample, on the device of the masks, without
    gradient.

    Args:
        masks: [R] of each sample.
        indices: of the samples, for messages.
        what: the beginning of an error's message.
    Raises:
        FunctionFailed: they are not one number per response token.
    """
    fix = "give a list with one float32 tensor [R] per sample, R being its response tokens"
    is_list = isinstance(values, (list, tuple)) or len(getattr(values, "shape", ())) == 2
    if not is_list or len(values) != len(masks):
        raise FunctionFailed(
            f"{what} as {described(values)}", why=f"there are {len(masks)} samples", fix=fix
        )
    found = []
    for value, mask, index in zip(values, masks, indices):
        try:
            if getattr(value, "dtype", None) in (torch.complex64, torch.complex128):
                raise TypeError("it is complex")
            tensor = torch.as_tensor(value, dtype=torch.float32, device=mask.device).detach()
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            why = f"that of the sample with index {index} is {described(value)}: {error}"
            raise FunctionFailed(
                f"{what}, but not all of it is numbers", why=why, fix=fix
            ) from error
        if tensor.shape != mask.shape:
            why = (
                f"that of the sample with index {index} is {described(value)} instead of "
                f"{list(mask.shape)}"
            )
            raise FunctionFailed(f"{what} of other shapes than the responses", why=why, fix=fix)
        found.append(tensor)
    return found


def are_finite(values: Sequence[Tensor], masks: Sequence[Tensor]) -> bool:
    """Tell whether the values of all trained tokens are finite."""
    return not values or bool(
        (torch.cat(list(values)).isfinite() | (torch.cat(list(masks)) == 0)).all()
    )


def check_finite(
    values: Sequence[Tensor], masks: Sequence[Tensor], indices: Sequence[int | None], what: str
) -> None:
    """Check that the values of all trained tokens are finite.

    Raises:
        FunctionFailed: a value is NaN or infinite.
    """
    if are_finite(values, masks):
        return
    bad = [i for i, v, m in zip(indices, values, masks) if not (v.isfinite() | (m == 0)).all()]
    raise FunctionFailed(
        f"{what} with NaN or infinite values",
        why=f"in {len(bad)} of {len(masks)} samples, first that with index {bad[0]}",
        fix="look for a division by 0, and for a logarithm of 0",
    )


def finite_where_untrained(values: list[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Return the values with 0 for NaN and infinity on untrained tokens. Their weight is 0, but
    their gradient would be 0 · NaN."""
    if not values or bool(torch.cat(values).isfinite().all()):
        return values
    return [value.where(value.isfinite() | (mask != 0), 0.0) for value, mask in zip(values, masks)]


def check_log_probs(
    values: Sequence[Tensor], masks: Sequence[Tensor], indices: Sequence[int | None], what: str
) -> None:
    """Check that the log-probs of all trained tokens are not above 0, beyond a rounding.

    Raises:
        FunctionFailed: one is.
    """
    trained = [value.where(mask != 0, 0.0) for value, mask in zip(values, masks)]
    if not trained or not bool((torch.cat(trained) > LARGEST_LOG_PROB).any()):
        return
    for index, value in zip(indices, trained):
        if value.numel() and (largest := float(value.max())) > LARGEST_LOG_PROB:
            raise FunctionFailed(
                f"{what} with {largest:g} in the sample with index {index}",
                why="the logarithm of a probability is not above 0",
                fix="give log-probs, not probabilities or their ratios",
            )
