"""Read a flat buffer's moments and counters from ZeRO's optimizer files, and check that ranks agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.importers.foreign_document import scalar
from elastic_train.checkpoint.importers.foreign_rows import FlatPart, flat_parts
from elastic_train.checkpoint.importers.pickle_free import TensorRef
from elastic_train.checkpoint.importers.side_by_side import each
from elastic_train.checkpoint.importers.torch_file import TorchFile, check_readable
from elastic_train.errors import ChecksumMismatch, FormatUnsupported, TensorMismatch
from elastic_train.storage.store import Store

Scalars = Mapping[str, dict[str, Json]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """One group's flat buffers on one rank: the parameters as `param`, elementwise states by their names."""

    file: TorchFile
    parts: Mapping[str, FlatPart]
    numbers: Mapping[str, Any]  # states that are one number for the whole group

    @property
    def numel(self) -> int:
        return self.parts["param"].numel


def buffers(file: TorchFile, master: Sequence[Any], states: Mapping[Any, Any]) -> list[FlatBuffer]:
    """Group by group, from the flat master weights and the state of the optimizer that steps them."""
    found: list[FlatBuffer] = []
    for number, flat in enumerate(master):
        if not isinstance(flat, TensorRef):
            raise FormatUnsupported(
                url=file.url,
                problem="its parameters are not in it: they were offloaded to a disk. Save them with it.",
            )
        state = states.get(number, {})
        parts = {"param": flat}
        numbers: dict[str, Any] = {}
        for name, value in state.items():
            check_readable(value, f"the optimizer's {name}", url=file.url)
            if (
                isinstance(value, TensorRef)
                and len(value.shape) == 1
                and value.shape[0] >= math.prod(flat.shape)
            ):
                parts[str(name)] = value
            elif not isinstance(value, TensorRef) or all(n == 1 for n in value.shape):
                numbers[str(name)] = value
            else:
                raise FormatUnsupported(
                    url=file.url, problem=f"the optimizer's {name} has shape {value.shape}: it isn't one "
                    "value per "
                    "element, and how it belongs to the parameters isn't recorded."
                )  # fmt: skip
        found.append(FlatBuffer(file=file, parts=flat_parts(file, parts), numbers=numbers))
    return found


def optimizer_of(file: TorchFile) -> Mapping[str, Any]:
    """The part of the file that is ZeRO's."""
    found = file.tree.get("optimizer_state_dict")
    if not isinstance(found, Mapping):
        raise FormatUnsupported(url=file.url, problem="it holds no state of a ZeRO optimizer.")
    return found


def common_numbers(store: Store, ranks: Iterable[Sequence[FlatBuffer]], *, url: str) -> list[Scalars]:
    """The numbers of each group, if every rank has the same ones: files of two checkpoints don't."""
    ranks = list(ranks)
    said = each(store, lambda own: [{k: scalar(b.file, v) for k, v in b.numbers.items()} for b in own], ranks)
    for own, found in zip(ranks, said, strict=True):
        if found != said[0]:
            raise ChecksumMismatch(
                url=own[0].file.url if own else url,
                problem="its optimizer has made another number of steps than rank 0's: the files are of two "
                "checkpoints.",
            )
        if [sorted(b.parts) for b in own] != [sorted(b.parts) for b in ranks[0]]:
            raise TensorMismatch(url=own[0].file.url, problem="its optimizer has other states than rank 0's.")
    return list(said[0]) if said else []
