"""Restore parameters that a forward changed during an evaluation.

A model that renormalises or clamps a parameter in forward does so where it is evaluated too. Where one worker
trains alone, what was changed is put back; elsewhere ranks evaluate other samples and would come to differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.step.rehearsal import ALONE, local, marks_of, versions


class KeptParameters:
    """What this rank keeps of a model that is evaluated. `several`: whether more than one rank may ever run
    it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, several: bool) -> None:
        self._parameters, self._several = parameters, several
        self._changing: tuple[str, ...] | None = None  # known once a forward was looked at

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """A forward belongs inside. The first is looked at by content too: writes through `.data` change no
        version."""
        parameters, first = self._parameters, self._changing is None
        before = dict(marks_of(parameters)) if first else versions(parameters)
        kept = {
            fqn: local(parameter).clone()
            for fqn, parameter in parameters.items()
            if not self._several and (first or fqn in (self._changing or ()))
        }
        yield
        after = dict(marks_of(parameters)) if first else versions(parameters)
        changed = tuple(fqn for fqn, mark in after.items() if before[fqn] != mark)
        if first:
            self._changing = changed
        for fqn in changed:
            if fqn not in kept:
                raise ConfigError(
                    field=f"model.{fqn}",
                    problem="the evaluation changes this parameter, so that it would come to depend on which "
                    "rank evaluates which samples.",
                    remedy="Clamp or normalise a copy of it in forward, or the parameter itself after the "
                    f"update, in a hook of the optimizer's step (register_step_post_hook), {ALONE}",
                )
            with torch.no_grad():
                local(parameters[fqn]).copy_(kept[fqn])
