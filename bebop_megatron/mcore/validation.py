"""Measures the MTP head while Megatron evaluates, and logs it where Megatron logs its own validation loss."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.utils import get_model_config
from torch import Tensor

from bebop_megatron.mcore.attachment import Attachment, attached
from bebop_megatron.mcore.keep_best import KeepBest
from bebop_megatron.mcore.logging import in_line, summed_over_ranks, write
from bebop_megatron.mcore.validation_sums import ValidationSums

BEST_BY = "mtp accept-length/rejection"


@contextmanager
def measuring(config: Any) -> Iterator[ValidationSums]:
    """Measure the model of `config` while the block runs in evaluation mode.

    For training loops of the user's own: `state()` of what this gives, summed over the data x context parallel ranks,
    goes into its `compute`. Megatron's own loop does so by itself.

    Raises:
        ValueError: the config has no objective.
    """
    attachment = attached(config)
    if attachment is None:
        raise ValueError("the model's config has no objective to measure: call attach() first")
    attachment.validation = ValidationSums(config.mtp_num_layers)
    try:
        yield attachment.validation
    finally:
        attachment.validation = None


@dataclass
class _Evaluation:
    """One call of Megatron's evaluation: on one data set, or on several of which each gives a state."""

    name: str
    iteration: int
    to_tensorboard: bool
    total: Tensor | None = None
    # of the last set, until its line is printed
    values: dict[str, float] | None = None


class ValidationLoop:
    """Wrappers for the functions of a training loop that evaluate, print and save."""

    def __init__(self, keep_best: KeepBest | None = None) -> None:
        self.keep_best = keep_best
        self._running: _Evaluation | None = None

    def evaluate(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Around one pass over one set of validation data.

        Collectives: one all-reduce over the data x context parallel group behind each pass.
        """

        @functools.wraps(evaluate)
        def wrapper(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            config = get_model_config(model[0])
            attachment = attached(config)
            if attachment is None or not attachment.metrics.measures:
                return evaluate(forward_step, data_iterator, model, *args, **kwargs)
            with measuring(config) as sums:
                result = evaluate(forward_step, data_iterator, model, *args, **kwargs)
                # the third says that the time was over before the data
                if not result[2] and self._running is not None:
                    self._add(self._running, attachment, sums)
            return result

        return wrapper

    def _add(self, running: _Evaluation, attachment: Attachment, sums: ValidationSums) -> None:
        state = summed_over_ranks(sums.state())
        assert attachment.default_loss is not None
        loss = attachment.objective.loss or attachment.default_loss
        running.values = sums.compute(state, loss, per_depth=attachment.metrics.full)
        running.total = state if running.total is None else running.total + state

    def evaluate_and_print(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Around a whole evaluation, of which only the outermost function knows the iteration."""

        @functools.wraps(evaluate)
        def wrapper(
            prefix: str, forward_step: Any, data_iterator: Any, model: Any, iteration: int, *args: Any, **kwargs: Any
        ) -> None:
            name = "test" if prefix.endswith("test set") else "validation"
            self._running = _Evaluation(name, iteration, kwargs.get("write_to_tensorboard", True))
            try:
                evaluate(prefix, forward_step, data_iterator, model, iteration, *args, **kwargs)
                if self.keep_best is not None and name == "validation":
                    config = get_model_config(model[0])
                    self.keep_best.measured(self._value(config), iteration)
                    # behind the last step no checkpoint is due any more
                    if prefix.endswith("validation set"):
                        self.keep_best.save_if_better(iteration)
            finally:
                self._running = None

        return wrapper

    def _value(self, config: Any) -> float | None:
        """The accept length over all sets; None on ranks that compute no loss, and where no chain was complete."""
        total = None if self._running is None else self._running.total
        return None if total is None else ValidationSums(config.mtp_num_layers).compute(total, "").get(BEST_BY)

    def print_line(self, write_line: Callable[[str], None]) -> Callable[[str], None]:
        """Around the function that prints: the validation line gets our values, and only it knows the set's name."""

        @functools.wraps(write_line)
        def wrapper(message: str) -> None:
            match = re.match(r" validation(.*?) loss at ", message)
            if match and self._running is not None and self._running.values is not None:
                values, self._running.values = self._running.values, None
                message += "".join(f"{name} value: {value:.6E} | " for name, value in values.items() if in_line(name))
                self._write(self._running, values, match[1])
            write_line(message)

        return wrapper

    def _write(self, running: _Evaluation, values: dict[str, float], suffix: str) -> None:
        from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

        named = {f"{name} {running.name}{suffix}": value for name, value in values.items()}
        writer = get_tensorboard_writer() if running.to_tensorboard else None
        write(named, running.iteration, writer, get_wandb_writer())
        if writer:
            samples = get_args().consumed_train_samples
            for name, value in named.items():
                writer.add_scalar(f"{name} vs samples", value, samples)
