"""How DeepSpeed divides experts among ranks: MoE layers, each expert a module, and AutoEP, all in one tensor.

Ranks call their experts by numbers of their own (`deepspeed_experts.0`), or hold some of the first dim; only
files of one expert each have the numbers of the whole model. An optimizer cuts a group of experts' parameters
among the ranks that have the same experts, dp / ep of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.importers.deepspeed_files import Tag
from elastic_train.checkpoint.importers.foreign_rows import FileSlice, Patch, flat_parts, flat_rows, whole_row
from elastic_train.checkpoint.importers.pickle_free import TensorRef
from elastic_train.checkpoint.importers.torch_file import TorchFile, check_readable, is_contiguous
from elastic_train.checkpoint.importers.tp_patterns import Shape
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import FormatUnsupported, FragmentMissing, TensorMismatch
from elastic_train.geometry.box import Box

_NUMBERED = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
MOST = 1 << 16
"""Experts of a layer."""
_FUSED = re.compile(r"(.*\.w[123])\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a checkpoint, none where it has no such layers.

    `counts`: how many a layer has, by the prefix of its experts' names. `placed`: a tensor of all experts ->
    the experts of each expert-parallel rank, in the rank's order.
    """

    tag: Tag
    counts: Mapping[str, int]
    placed: Mapping[str, Sequence[Sequence[int]]]
    data_first: bool

    @property
    def any(self) -> bool:
        return bool(self.counts or self.placed)

    def of(self, name: str) -> bool:
        """Whether a rank's parameter is an expert's."""
        numbered = _NUMBERED.fullmatch(name)
        return name in self.placed or (numbered is not None and numbered[1] in self.counts)

    def degree(self, count: Any, file: TorchFile) -> int:
        """Among how many ranks the experts of a group are divided that is cut into `count` parts."""
        dp = self.tag.ranks[0]
        if type(count) is not int or count < 1 or dp % count or (count != dp and not self.any):
            raise self.refused(count, file)
        return dp // count

    def refused(self, count: Any, file: TorchFile) -> FormatUnsupported:
        """That a state is cut in `count` parts, which isn't understood."""
        return FormatUnsupported(
            url=file.url,
            problem=f"its state is cut in {str(count)[:20]} parts and {self.tag.ranks[0]} data-parallel "
            "ranks wrote files: ZeRO within groups of ranks can't be read yet.",
        )

    def holders(self, part: int, degree: int) -> Sequence[int]:
        """The data-parallel ranks that have one part of the experts, in the order of their shards."""
        dp = self.tag.ranks[0]
        each = dp // degree
        return range(part * each, (part + 1) * each) if self.data_first else range(part, dp, degree)

    def place(self, name: str, shape: Shape, part: int, degree: int) -> tuple[str, FileSlice]:
        """What rank 0's parameter of this name and shape is in the whole model, on the ranks that hold part
        `part` of `degree` of the experts.
        """
        numbered = _NUMBERED.fullmatch(name)
        if name in self.placed:
            return name, self._rows_of(name, shape, part, degree)
        if numbered is None or numbered[1] not in self.counts:
            if degree > 1:
                raise TensorMismatch(
                    url=self.tag.url, problem=f"{name} is divided as experts are and is none."
                )
            return name, FileSlice.whole(shape)
        each, left = divmod(self.counts[numbered[1]], degree)
        local = int(numbered[2])
        if left or local >= each:
            raise TensorMismatch(
                url=self.tag.url,
                problem=f"{name} is one of {each} experts of a rank: there are files of "
                f"{self.counts[numbered[1]]} experts, divided by {degree}. Copy the missing ones.",
            )
        return f"{numbered[1]}{part * each + local}{numbered[3]}", FileSlice.whole(shape)

    def _rows_of(self, name: str, shape: Shape, part: int, degree: int) -> FileSlice:
        ranks = self.placed[name]
        if len(ranks) != degree or not shape or shape[0] != len(ranks[0]):
            raise TensorMismatch(
                url=self.tag.url,
                problem=f"{name} of {list(shape)} isn't what rank 0 of {degree} should hold of its "
                f"{sum(map(len, ranks))} experts.",
            )
        rest = tuple(shape[1:])
        local = (len(ranks[part]), *rest)
        return FileSlice(
            local=local,
            shape=(sum(map(len, ranks)), *rest),
            patches=tuple(
                Patch(
                    local=Box((at, *(0,) * len(rest)), (1, *rest)),
                    offsets=(number, *(0,) * len(rest)),
                )
                for at, number in enumerate(ranks[part])
            ),
        )


def experts_of(tag: Tag) -> Experts:
    """What the model files and the files of experts say; FragmentMissing where an expert has no file."""
    tree = tag.model().tree
    layers = tree.get("ds_autoep_layers") or []
    said = tree.get("ds_config") or {}
    placed = {
        f"{layer['expert_key_prefix']}.{weight}": _placement(layer, tag.model())
        for layer in layers
        for weight in ("w1", "w2", "w3")
    }
    counts: dict[str, int] = {}
    numbers = tree.get("num_experts")
    for layer in sorted({at for at, _ in tag.experts}):
        found = sorted(number for at, number in tag.experts if at == layer)
        wanted = numbers[layer] if isinstance(numbers, list) and layer < len(numbers) else len(found)
        if len(found) != wanted or found[-1] != wanted - 1:
            strange = next(n for n in range(len(found) + 1) if n not in found)
            raise FragmentMissing(
                url=tag.url,
                problem=f"layer {layer} has {wanted} experts and files of {len(found)}; expert {strange} is "
                "the first that differs. Copy them from where it was.",
            )
        for number in found:
            for prefix in _prefixes(tag.experts[layer, number], number, placed):
                if counts.setdefault(prefix, wanted) != wanted:
                    raise TensorMismatch(url=tag.url, problem=f"{prefix} is in the files of two layers.")
    if (counts or placed) and tag.ranks[1] > 1:
        raise FormatUnsupported(
            url=tag.url,
            problem="its experts were divided among model-parallel ranks too, which can't be read yet. Load "
            "it with DeepSpeed and save it with torch.distributed.checkpoint.",
        )
    first = bool(said.get("use_data_before_expert_parallelism")) if isinstance(said, dict) else False
    return Experts(tag=tag, counts=counts, placed=placed, data_first=first)


def expert_rows(experts: Experts, known: set[str]) -> Iterator[Row]:
    """Rows of the experts' buffers and frozen parameters; what is in `known` the optimizer has."""
    tag = experts.tag
    buffers = {_anonymous(str(name)) for name in tag.model().tree.get("buffer_names") or ()}
    for (_, number), file in sorted(tag.experts.items()):
        for name, ref in file.tree.items():
            check_readable(ref, str(name), url=file.url)
            fused = _FUSED.fullmatch(name)
            if name in known or (fused is not None and fused[1] in known):
                continue
            if fused is not None and fused[1] in experts.placed:
                yield from _fused_row(file, tag.name(file), fused[1], ref, number, experts)
            else:
                state = "buffer" if _anonymous(name) in buffers else "param"
                yield whole_row(file, tag.name(file), name, state, ref)


def _fused_row(
    file: TorchFile, name: str, tensor: str, ref: TensorRef, number: int, experts: Experts
) -> Iterator[Row]:
    """One expert's part of a tensor of all of them."""
    if not is_contiguous(ref):
        raise FormatUnsupported(url=file.url, problem=f"{tensor} is stored with gaps.")
    count = sum(map(len, experts.placed[tensor]))
    zeros = (0,) * len(ref.shape)
    part = FileSlice(
        local=(1, *ref.shape),
        shape=(count, *ref.shape),
        patches=(Patch(local=Box.whole((1, *ref.shape)), offsets=(number, *zeros)),),
    )
    elements = math.prod(ref.shape)
    flat = TensorRef(ref.storage, ref.dtype, ref.offset, (elements,), (1,))
    parts = flat_parts(file, {"param": flat})
    yield from flat_rows(file, name, tensor, parts, at=0, first=0, count=elements, of=part)


def _prefixes(file: TorchFile, number: int, placed: Mapping[str, Any]) -> Iterator[str]:
    """The beginnings of its experts' names in a file of one expert of a layer."""
    for name in file.tree:
        numbered, fused = _NUMBERED.fullmatch(str(name)), _FUSED.fullmatch(str(name))
        if fused is not None and fused[1] in placed and int(fused[2]) == number:
            continue
        if numbered is None or int(numbered[2]) != number:
            raise FormatUnsupported(
                url=file.url, problem=f"{str(name)[:80]!r} isn't the name of a tensor of expert {number}."
            )
        yield numbered[1]


def _placement(layer: Mapping[str, Any], file: TorchFile) -> list[list[int]]:
    """The experts of each expert-parallel rank; each is somewhere, once."""
    count, degree = layer.get("num_experts"), layer.get("ep_size")
    descriptor = layer.get("expert_placement")
    ranks: list[list[int]] = []
    if isinstance(descriptor, Mapping):
        entries = sorted(descriptor.get("ranks") or (), key=lambda entry: entry["rank"])
        ranks = [list(entry["experts"]) for entry in entries]
    elif (
        isinstance(count, int)
        and isinstance(degree, int)
        and 0 < degree <= count <= MOST
        and count % degree == 0
    ):
        each = count // degree
        ranks = [list(range(part * each, (part + 1) * each)) for part in range(degree)]
    every = sorted(number for own in ranks for number in own)
    if not isinstance(count, int) or len(every) != count or every != list(range(count)):
        raise FormatUnsupported(
            url=file.url,
            problem=f"its {str(count)[:20]} experts aren't on one rank each, which can't be read yet. Save "
            "it without replicas of experts.",
        )
    return ranks


def _anonymous(name: str) -> str:
    """A name without its expert's number."""
    found = _NUMBERED.fullmatch(name)
    return f"{found[1]}{found[3]}" if found else name
