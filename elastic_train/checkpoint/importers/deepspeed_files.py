"""The files of a DeepSpeed checkpoint: which there are, whether all are there, and what they are for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_train.checkpoint.importers.torch_file import TorchFile, open_files
from elastic_train.errors import FormatUnsupported, FragmentMissing, TensorMismatch
from elastic_train.storage.store import Store

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL3 = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_WITHOUT_ZERO = re.compile(r"expert_\d+_.*|expp_rank_\d+_.*")

Rank = tuple[int, int]
"""Data-parallel rank, model-parallel rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """An indexed checkpoint: its files by rank; `models` has one file per data-parallel rank under ZeRO-3."""

    url: str
    directory: str
    models: Mapping[Rank, TorchFile]
    optimizers: Mapping[Rank, TorchFile]
    layers: tuple[TorchFile, ...]
    experts: Mapping[tuple[int, int], TorchFile]  # by number of the layer of experts, and of the expert
    partitioned: bool  # ZeRO-3: parameters are partitioned too

    @property
    def ranks(self) -> tuple[int, int]:
        """Data-parallel and model-parallel ranks that wrote it."""
        some = self.optimizers or self.models
        return max(dp for dp, _ in some) + 1, max(mp for _, mp in some) + 1

    def name(self, file: TorchFile) -> str:
        """A file as the rows of the manifest name it."""
        return file.path.removeprefix(f"{self.directory}/") if self.directory else file.path

    def model(self, mp: int = 0) -> TorchFile:
        return self.models[0, mp]


def open_tag(store: Store, directory: str, *, optimizer: bool = True) -> Tag:
    """Index every file of a checkpoint; FragmentMissing names those that should be there and aren't.

    Without `optimizer`, as in universal directories, optimizer files aren't wanted, and where model files of
    several stages are there, all tensors are in those that aren't ZeRO-3's.
    """
    url = f"{store.url}/{directory}".rstrip("/")
    prefix = f"{directory}/" if directory else ""
    names = store.names(directory)
    experts = _experts(names, url, optimizer=optimizer)
    optimizers = _by_rank(_OPTIM, names, url) if optimizer else {}
    models = {(0, int(m[1])): n for n in names if (m := _MODEL.fullmatch(n))}
    models3 = _by_rank(_MODEL3, names, url) if optimizer or not models else {}
    _check_whole(optimizers, url)
    _check_whole(models3 or models, url)
    if models and models3:
        problem = "it has model files of ZeRO-3 and of other stages. Remove those that don't belong."
        raise TensorMismatch(url=url, problem=problem)
    if not (models or models3):
        raise FragmentMissing(url=url, problem="its *_model_states.pt are gone. Copy them from where it was.")
    layers = [n for n in names if _LAYER.fullmatch(n)]
    wanted = [*optimizers.values(), *(models3 or models).values(), *layers, *experts.values()]
    files = {p.removeprefix(prefix): f for p, f in open_files(store, [prefix + n for n in wanted]).items()}
    for file in files.values():
        if not isinstance(file.tree, dict):
            raise FormatUnsupported(url=file.url, problem="it is no file that DeepSpeed writes.")
    tag = Tag(
        url=url,
        directory=directory,
        models={rank: files[n] for rank, n in (models3 or models).items()},
        optimizers={rank: files[n] for rank, n in optimizers.items()},
        layers=tuple(files[n] for n in layers),
        experts={place: files[n] for place, n in experts.items()},
        partitioned=bool(models3),
    )
    _check_counts(tag)
    return tag


def _experts(names: list[str], url: str, *, optimizer: bool) -> dict[tuple[int, int], str]:
    """The files of one expert each; FormatUnsupported where optimizer states of experts have no names."""
    for name in names:
        if _EXPERT_WITHOUT_ZERO.fullmatch(name):
            raise FormatUnsupported(
                url=url,
                problem=f"{name} is of experts that were saved without ZeRO, and then their optimizer state "
                "has no names. Save it under ZeRO stage 1.",
            )
    found: dict[tuple[int, int], str] = {}
    for name in names:
        if (match := _EXPERT.fullmatch(name)) is None:
            continue
        if not optimizer:
            raise FormatUnsupported(
                url=url,
                problem=f"it was converted from a checkpoint with experts ({name}), and the converter "
                "doesn't say whose their moments are. Open the checkpoint that was converted.",
            )
        if int(match[3]):
            raise FormatUnsupported(
                url=url,
                problem=f"{name}: experts that model-parallel ranks divided can't be read yet. Load it with "
                "DeepSpeed and save it with torch.distributed.checkpoint.",
            )
        if found.setdefault((int(match[1]), int(match[2])), name) != name:
            problem = f"{name} and another file are of the same expert. Remove the one that doesn't belong."
            raise TensorMismatch(url=url, problem=problem)
    return found


def _by_rank(pattern: re.Pattern[str], names: list[str], url: str) -> dict[Rank, str]:
    found: dict[Rank, str] = {}
    for name in names:
        if (match := pattern.fullmatch(name)) is not None:
            rank = (int(match[1]), int(match[2]))
            if rank in found:
                problem = (
                    f"{found[rank]} and {name} are of the same rank. Remove the one that doesn't belong."
                )
                raise TensorMismatch(url=url, problem=problem)
            found[rank] = name
    return found


def _check_whole(found: Mapping[Rank, str], url: str) -> None:
    """No rank is missing below the highest that is there."""
    if found:
        dp, mp = max(r for r, _ in found) + 1, max(m for _, m in found) + 1
        missing = dp * mp - len(found)
        if missing:  # the first one is among as many ranks as there are files, however large numbers are
            few = len(found) + 1
            places = ((r, m) for r in range(min(dp, few)) for m in range(min(mp, few)))
            r, m = next(place for place in places if place not in found)
            raise FragmentMissing(
                url=url,
                problem=f"the file of dp rank {r}, mp rank {m} beside {next(iter(found.values()))} is gone; "
                f"{missing} of {dp * mp} are missing. Copy them from where it was.",
            )


def _check_counts(tag: Tag) -> None:
    """As many files as the checkpoint says it has ranks."""
    tree = tag.model().tree
    dims = tree.get("checkpoint_parallel_dimensions") or {}
    said_dp = tree.get("dp_world_size")
    said_mp = dims["pp_degree"] * dims["tp_degree"] if {"pp_degree", "tp_degree"} <= dims.keys() else None
    dp, mp = tag.ranks
    has_dp = bool(tag.optimizers) or tag.partitioned
    model_mp = max(m for _, m in tag.models) + 1
    for said, found, what in (
        (said_dp if has_dp else None, dp, "data-parallel ranks"),
        (max(r for r, _ in tag.models) + 1 if tag.partitioned and tag.optimizers else None, dp, "ranks"),
        (said_mp, mp, "model-parallel ranks"),
        (mp, model_mp, "model-parallel ranks"),
    ):
        if said is not None and said != found:
            raise FragmentMissing(
                url=tag.url,
                problem=f"it was written by {said} {what} and has files of {found}. Copy the missing files "
                "from where "
                "it was, or remove those that don't belong.",
            )
