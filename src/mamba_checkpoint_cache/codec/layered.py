"""A format for each recurrent layer: how such a choice is written, and the codec that follows it.

``int8,0=none,3-5=none`` keeps layer 0 and the layers 3 to 5 in ``none`` and all others in ``int8``. Layers are counted from 0 in
the order of the state tensor: among the recurrent layers of a model, not among all that it has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec.base import Codec
from mamba_checkpoint_cache.state import StateSpec

_EXCEPTION = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?=([^=]+)")


class Choice(NamedTuple):
    """``default`` is the format of all layers but those of ``exceptions``, which are in ascending order and don't overlap."""

    default: str
    exceptions: tuple[tuple[range, str], ...]

    @property
    def formats(self) -> set[str]:
        """Every format that is named."""
        return {self.default, *(name for _, name in self.exceptions)}

    def by_layer(self, num_layers: int) -> list[str]:
        """The format of each layer. Raises :class:`ValueError` if a layer is named that a state of ``num_layers`` has not."""
        found = [self.default] * num_layers
        for layers, name in self.exceptions:
            if layers.stop > num_layers:
                raise ValueError(
                    f"a codec names layer {layers.stop - 1}, but the recurrent layers are 0 … {num_layers - 1}: they are counted "
                    "among themselves, without the model's other layers"
                )
            found[layers.start : layers.stop] = [name] * len(layers)
        return found


def parse_choice(text: str, known: Collection[str]) -> Choice:
    """Read a format, or a format and its exceptions as ``LAYERS=FORMAT``, with commas between.

    ``LAYERS`` is an index or an inclusive range of them.

    Raises:
        ValueError: if a format is not ``known``, an item is written otherwise, or a layer is named twice.
    """
    default, *items = (item.strip() for item in text.split(","))
    exceptions = sorted((_exception(text, item) for item in items), key=lambda exception: exception[0].start)
    for (before, _), (after, _) in pairwise(exceptions):
        if after.start < before.stop:
            raise ValueError(f"codec {text!r} names layer {after.start} twice")
    choice = Choice(default, tuple(exceptions))
    for name in (default, *(name for _, name in exceptions)):
        if name not in known:
            raise ValueError(f"unknown codec {name!r}{f' in {text!r}' if items else ''}, expected one of {', '.join(known)}")
    return choice


def _exception(text: str, item: str) -> tuple[range, str]:
    found = _EXCEPTION.fullmatch(item)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ValueError(
            f"codec {text!r}: expected LAYERS=FORMAT after the first format, as in int8,0=none,3-5=none; got {item!r}"
        )
    return range(int(found[1]), int(found[2] or found[1]) + 1), found[3]


def split_choices(text: str) -> tuple[str, ...]:
    """Several choices with commas between: ``LAYERS=FORMAT`` belongs to the one before it, all else begins another."""
    return tuple(re.split(r",(?=[^=,]*(?:,|$))", text))


def choice_name(formats: Sequence[str]) -> str:
    """The one way to write a format for each layer: first that of most layers (the alphabetically first of equally many)."""
    counts = Counter(formats)
    default = min(counts, key=lambda name: (-counts[name], name))
    items = [
        f"{layers.start}{f'-{layers.stop - 1}' if len(layers) > 1 else ''}={name}"
        for layers, name in _runs(formats)
        if name != default
    ]
    return ",".join([default, *items])


def _runs(formats: Sequence[str]) -> Iterator[tuple[range, str]]:
    """Adjacent layers of the same format, and the format."""
    begin = 0
    for name, run in groupby(formats):
        end = begin + sum(1 for _ in run)
        yield range(begin, end), name
        begin = end


def layered(codecs: Sequence[Codec]) -> Codec:
    """The codec that gives each layer its own: a plain one if they are all the same."""
    return codecs[0] if len({codec.name for codec in codecs}) == 1 else LayeredCodec(codecs)


def codecs_by_layer(codec: Codec, num_layers: int) -> tuple[Codec, ...]:
    """The plain codec that ``codec`` uses for each layer of a state of ``num_layers``."""
    return codec.codecs if isinstance(codec, LayeredCodec) else (codec,) * num_layers


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent layers of one format: where they lie in a state, and where in the compressed tensors of that format."""

    codec: Codec
    layers: slice
    held: slice

    def of(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        prefix = _prefix(self.codec)
        return {name.removeprefix(prefix): tensor[self.held] for name, tensor in stored.items() if name.startswith(prefix)}


class LayeredCodec:
    """A codec for each layer. The layers of one format share its compressed tensors; a call is made for each run of them.

    ``name`` is the canonical way to write the choice. All plain codecs under one name must be the same.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self.codecs = tuple(codecs)
        self.name = choice_name([codec.name for codec in codecs])
        self.lossy = any(codec.lossy for codec in codecs)
        self._kinds = {codec.name: codec for codec in codecs}
        self._counts = Counter(codec.name for codec in codecs)
        self._layers_of_each = list(self._find_runs())

    def _find_runs(self) -> Iterator[_Run]:
        held = Counter[str]()
        for layers, name in _runs([codec.name for codec in self.codecs]):
            begin = held[name]
            held[name] += len(layers)
            yield _Run(self._kinds[name], slice(layers.start, layers.stop), slice(begin, held[name]))

    def bytes_per_slot(self, spec: StateSpec) -> int:
        """The sum over the layers."""
        return sum(codec.bytes_per_slot(part) for codec, part in self._specs(spec))

    def allocate(self, spec: StateSpec, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """The tensors of each format, for as many layers as have it, under names that begin with the format's."""
        return {
            f"{_prefix(codec)}{name}": tensor
            for codec, part in self._specs(spec)
            for name, tensor in codec.allocate(part, num_rows, device).items()
        }

    def compress(
        self, source: Tensor, source_rows: Sequence[int], stored: dict[str, Tensor], stored_rows: Sequence[int]
    ) -> Tensor:
        """Compress each run of layers with its codec; the report has the layers in their order.

        Raises:
            ValueError: if the state has another number of layers, or a plain codec refuses its part.
        """
        self._require(source.shape[0])
        reports = [
            run.codec.compress(source[run.layers], source_rows, run.of(stored), stored_rows) for run in self._layers_of_each
        ]
        return torch.cat(reports, 1)

    def restore(self, stored: dict[str, Tensor], stored_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]) -> None:
        """Decompress each run of layers with its codec.

        Raises:
            ValueError: if the state has another number of layers, or a plain codec refuses its part.
        """
        self._require(target.shape[0])
        for run in self._layers_of_each:
            run.codec.restore(run.of(stored), stored_rows, target[run.layers], target_rows)

    def _specs(self, spec: StateSpec) -> list[tuple[Codec, StateSpec]]:
        self._require(spec.num_layers)
        return [(codec, replace(spec, num_layers=self._counts[name])) for name, codec in self._kinds.items()]

    def _require(self, num_layers: int) -> None:
        if num_layers != len(self.codecs):
            raise ValueError(f"codec {self.name} is for states of {len(self.codecs)} recurrent layers, got one of {num_layers}")


def _prefix(codec: Codec) -> str:
    return f"{codec.name}."
