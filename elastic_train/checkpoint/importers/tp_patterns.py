"""How DeepSpeed's tensor-parallel ranks cut a parameter, by the patterns of its `universal_checkpoint_info`.

Each rule is the one by which DeepSpeed's own converter joins the slices (`merge_tp_slices`), as boxes.
Averaging is no map of boxes, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.importers.foreign_rows import FileSlice, Patch
from elastic_train.errors import ChecksumMismatch, FormatUnsupported, TensorMismatch
from elastic_train.geometry.box import Box

_NEWEST = 0.4
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """`info` is None where the checkpoint has none, which is enough for one rank."""

    url: str
    degree: int
    info: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        if self.degree > 1 and self.info is None:
            raise FormatUnsupported(
                url=self.url,
                problem=f"{self.degree} tensor-parallel ranks wrote it and it has no "
                "universal_checkpoint_info, which "
                "says how they cut the parameters. Save it with a framework that records it, or with one "
                "such rank.",
            )
        version = (self.info or {}).get("universal_checkpoint_version", 0.0)
        if not isinstance(version, int | float) or version > _NEWEST:
            raise FormatUnsupported(
                url=self.url,
                problem=f"its universal_checkpoint_info has version {version}, this release reads up to "
                f"{_NEWEST}. "
                "Upgrade elastic_train.",
            )

    def only_in_first_stage(self, name: str) -> bool:
        """Whether a pipeline stage but the first holds a copy of what the first one holds."""
        return name.startswith("tied_modules.") or self._matches(
            "pipeline_replicated_parameter_patterns", name
        )

    def slices(self, name: str, shapes: Sequence[Shape]) -> list[FileSlice | None]:
        """What each tensor-parallel rank holds of a parameter; None for copies of what rank 0 holds."""
        if self.degree == 1:
            return [FileSlice.whole(shapes[0])]
        self._refuse(name)
        if self._matches("tp_replicated_parameter_patterns", name):
            if len(set(shapes)) != 1:
                raise self._wrong(name, f"is said to be the same on every rank and has shapes {list(shapes)}")
            found: list[FileSlice | None] = [FileSlice.whole(shapes[0]), *(None for _ in shapes[1:])]
        elif self._matches("parameter_with_2_sub_params_cat_dim_0", name):
            if any(s[0] % 2 for s in shapes):
                raise self._wrong(name, "is said to have two halves and has an odd dim 0")
            found = self._joined(name, shapes, 0, [[s[0] // 2 for s in shapes]] * 2)
        elif (fused := self._fused(name)) is not None:
            dim = fused["partition_dim"]
            found = self._joined(name, shapes, dim, self._widths(name, shapes, fused))
        else:
            dim = 1 if self._matches("parameter_with_row_parallelism_patterns", name) else 0
            if any(len(s) <= dim for s in shapes):
                raise self._wrong(
                    name, f"of shape {shapes[0]} has no dim {dim} along which ranks could have cut it"
                )
            found = self._joined(name, shapes, dim, [[s[dim] for s in shapes]])
        if self._matches("vocabulary_parameter_patterns", name):
            found = [s and self._without_padding(name, s) for s in found]
        return found

    def _joined(
        self, name: str, shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]
    ) -> list[FileSlice | None]:
        """Ranks hold one piece of each part along `dim`; `widths[part][rank]` is how wide it is."""
        if len({(s[:dim], s[dim + 1 :]) for s in shapes}) != 1:
            raise self._wrong(name, f"has shapes {list(shapes)}, which don't fit together along dim {dim}")
        first = shapes[0]
        total = sum(sum(part) for part in widths)
        whole = (*first[:dim], total, *first[dim + 1 :])
        found: list[FileSlice | None] = []
        for rank, local in enumerate(shapes):
            patches: list[Patch] = []
            at, start = 0, 0
            for part in widths:
                box = Box(
                    (*(0,) * dim, at, *(0,) * (len(local) - dim - 1)),
                    (*local[:dim], part[rank], *local[dim + 1 :]),
                )
                place = (*(0,) * dim, start + sum(part[:rank]), *(0,) * (len(local) - dim - 1))
                patches.append(Patch(local=box, offsets=place))
                at, start = at + part[rank], start + sum(part)
            if at != local[dim]:
                raise self._wrong(
                    name, f"has {local[dim]} along dim {dim} on rank {rank} and its parts have {at}"
                )
            found.append(FileSlice(local=local, shape=whole, patches=tuple(patches)))
        return found

    def _widths(self, name: str, shapes: Sequence[Shape], fused: Mapping[str, Any]) -> list[list[int]]:
        """The width of each fused part on each rank: as recorded, or equal where older versions can't say."""
        dim, parts = fused["partition_dim"], fused["shape"][fused["partition_dim"]]
        recorded = (self._info.get("sub_param_shard_widths") or {}).get(fused["pattern"])
        if recorded is not None:
            return [list(part) for part in recorded]
        if isinstance(parts, int):
            total = sum(s[dim] for s in shapes)
            parts = (total // parts,) * parts if parts > 0 and total % parts == 0 else (total,)
        if any(part % self.degree for part in parts):
            raise self._wrong(
                name, f"has fused parts of {tuple(parts)}, which {self.degree} ranks can't share equally"
            )
        return [[part // self.degree] * self.degree for part in parts]

    def _fused(self, name: str) -> dict[str, Any] | None:
        for entry in self._info.get("parameter_with_sub_params") or ():
            said = entry if isinstance(entry, dict) else entry.state
            for pattern in said["patterns"]:
                if self._match(pattern, name):
                    return {**said, "pattern": pattern}
        return None

    def _without_padding(self, name: str, cut: FileSlice) -> FileSlice:
        """Rows behind the vocabulary are padding."""
        rows = self._info.get("original_vocab_size")
        if not isinstance(rows, int) or rows > cut.shape[0]:
            raise self._wrong(name, f"is a vocabulary of {rows} rows and has {cut.shape[0]}")
        patches: list[Patch] = []
        for patch in cut.patches:
            kept = min(patch.local.sizes[0], max(0, rows - patch.offsets[0]))
            box = Box(patch.local.offsets, (kept, *patch.local.sizes[1:]))
            patches.append(Patch(local=box, offsets=patch.offsets))
        return FileSlice(local=cut.local, shape=(rows, *cut.shape[1:]), patches=tuple(patches))

    def _refuse(self, name: str) -> None:
        affine = (self._info.get("affine_map") or {}).get("params") or {}
        for what, patterns in (
            ("averages copies that differ", self._info.get("parameter_to_average_patterns") or ()),
            (
                "says its cut can't be described",
                self._info.get("autotp_unsupported_parameter_patterns") or (),
            ),
            ("has experts", self._info.get("expert_parameter_patterns") or ()),
            ("has an affine map", list(affine)),
        ):
            if any(self._match(p, name) for p in patterns):
                raise FormatUnsupported(
                    url=self.url,
                    problem=f"for {name} its universal_checkpoint_info {what}, which can't be read in "
                    "place. Convert it "
                    "with DeepSpeed's ds_to_universal and open the result.",
                )

    def _matches(self, kind: str, name: str) -> bool:
        found = [p for p in self._info.get(kind) or () if self._match(p, name)]
        if len(found) > 1:
            raise self._wrong(name, f"is matched by several patterns of {kind}: {found}")
        return bool(found)

    def _match(self, pattern: str, name: str) -> bool:
        try:
            return re.match(pattern, name) is not None
        except re.error as error:
            raise ChecksumMismatch(
                url=self.url,
                problem=f"its universal_checkpoint_info has a pattern {pattern!r} that is none ({error}).",
            ) from error

    @property
    def _info(self) -> Mapping[str, Any]:
        return self.info or {}

    def _wrong(self, name: str, what: str) -> TensorMismatch:
        return TensorMismatch(
            url=self.url, problem=f"{name} {what}: its universal_checkpoint_info isn't right for it."
        )
