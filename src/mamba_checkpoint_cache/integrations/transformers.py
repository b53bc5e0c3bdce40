"""Hybrid models of the transformers library, run straight on the slots of an ActivePool."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mamba_checkpoint_cache.integrations.continuation import ANY_STEPS, Continuation
from mamba_checkpoint_cache.integrations.layout import CONV, KvSpec, Layout, discover_layout, layers_of
from mamba_checkpoint_cache.pools import ActivePool
from mamba_checkpoint_cache.state import StateSpec

AdoptedStates = list[tuple[dict[int, Tensor], Tensor]]
"""Each dict in which the library holds a state, under the key 0, and the pool's row that is to be there."""


class KvStore:
    """Keys and values by KV slot: per attention layer ``[slots + 1, heads, dim]``; row 0 is padding."""

    def __init__(self, kv: Sequence[KvSpec], slots: int, device: torch.device) -> None:
        self.slots = slots
        self.layers = kv
        self.keys = [torch.zeros(slots + 1, *spec.key_shape, dtype=spec.dtype, device=device) for spec in kv]
        self.values = [torch.zeros(slots + 1, *spec.value_shape, dtype=spec.dtype, device=device) for spec in kv]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values, all layers."""
        return sum(tensor[0].nbytes for tensor in (*self.keys, *self.values))

    def read(self, ids: Sequence[int], cache: DynamicCache) -> None:
        """Append the tokens in the slots ``ids`` to the attention layers of ``cache``."""
        rows = self._rows(ids)
        for spec, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            held = (tensor[rows].transpose(0, 1)[None].contiguous() for tensor in (keys, values))
            layers_of(cache)[spec.layer].update(*held)

    def write(self, ids: Sequence[int], cache: DynamicCache) -> None:
        """Copy the last ``len(ids)`` tokens of the attention layers of ``cache`` to the slots ``ids``."""
        rows = self._rows(ids)
        for spec, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            layer = layers_of(cache)[spec.layer]
            keys[rows] = layer.keys[0, :, -len(ids) :].transpose(0, 1)
            values[rows] = layer.values[0, :, -len(ids) :].transpose(0, 1)

    def _rows(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self.keys[0].device)


class HybridModel:
    """A transformers model, the layout of its state, and the steps in which it may be continued.

    Puts the model in eval mode and changes nothing else about it.

    Raises:
        UnsupportedModelError: if the model's state can't be kept in slots.
    """

    def __init__(self, model: PreTrainedModel, continuation: Continuation = ANY_STEPS) -> None:
        self.model = model.train(False)
        self.layout: Layout = discover_layout(model)
        self.continuation = continuation
        self._parameters = frozenset(inspect.signature(model.forward).parameters)

    @property
    def spec(self) -> StateSpec:
        """The recurrent state of one request."""
        return self.layout.spec

    @property
    def device(self) -> torch.device:
        """Where the model computes, and where the tensors for it are allocated."""
        device: torch.device = self.model.device
        return device

    def active_tensors(self, slots: int) -> tuple[Tensor, dict[str, Tensor]]:
        """``state`` and ``side`` for an ActivePool of ``slots``, zeroed, in memory ordered as the model's own cache is."""
        spec, order, rows = self.spec, self.layout.order, slots + 1
        native = torch.zeros(spec.num_layers, rows, *order.native_shape(spec), dtype=spec.dtype, device=self.device)
        side = {s.name: torch.zeros(spec.num_layers, rows, *s.shape, dtype=s.dtype, device=self.device) for s in spec.side}
        return order.to_spec(native, spec), side

    def active_pool(self, slots: int) -> ActivePool:
        """An ActivePool of ``slots`` on :meth:`active_tensors`."""
        state, side = self.active_tensors(slots)
        return ActivePool(self.spec, slots, state=state, side=side)

    def kv_store(self, slots: int) -> KvStore | None:
        """Room for the keys and values of ``slots`` tokens; None if the model has no attention layers."""
        return KvStore(self.layout.kv, slots, self.device) if self.layout.kv else None

    def start(
        self, active: ActivePool, row: int, *, kv: KvStore | None = None, kv_ids: Sequence[int] = (), depth: int = 0
    ) -> Session:
        """A request that goes on in ``active`` at row ``row``, whose state is that after ``depth`` tokens.

        ``kv_ids`` are the KV slots of those tokens; they are read here and not needed again. At depth 0 what the row holds does
        not matter.

        Raises:
            ValueError: if the model has attention layers and ``kv`` is missing, or ``kv_ids`` are not ``depth`` many.
        """
        if self.layout.kv and (kv is None or len(kv_ids) != depth):
            raise ValueError(f"expected a KvStore and {depth} KV slots to go on at that depth, got {kv} and {len(kv_ids)}")
        cache = DynamicCache(config=self.model.config)
        states = _adopt(cache, self.layout, active, row, started=depth > 0)
        if self.layout.kv and kv is not None and depth:
            kv.read(kv_ids, cache)
        return Session(self, cache, states, kv if self.layout.kv else None, depth)

    def forward(self, tokens: Sequence[int], cache: DynamicCache, depth: int, every: bool) -> Tensor:
        """Logits ``[tokens, vocabulary]``, of the last token only unless ``every``; updates ``cache`` in place."""
        ids = torch.tensor(tokens, dtype=torch.long, device=self.device)[None]
        options: dict[str, Any] = {
            "position_ids": torch.arange(depth, depth + len(tokens), device=self.device)[None],
            "logits_to_keep": 0 if every else 1,
        }
        options = {name: value for name, value in options.items() if name in self._parameters}
        logits: Tensor = self.model(input_ids=ids, use_cache=True, **{self.layout.cache_argument: cache}, **options).logits[0]
        return logits


class Session:
    """One running request: a cache object whose recurrent and conv states *are* one row of an ActivePool.

    Keys and values are held here while the request runs, and copied to their KV slots as they are made. Good until the row
    is given to somebody else.
    """

    def __init__(self, model: HybridModel, cache: DynamicCache, states: AdoptedStates, kv: KvStore | None, depth: int) -> None:
        self.depth = depth
        self._model = model
        self._cache = cache
        self._states = states
        self._kv = kv

    @torch.no_grad()
    def run(self, tokens: Sequence[int], kv_ids: Sequence[int] = (), *, every: bool = False) -> Tensor:
        """Run the next ``tokens``, in the steps that the model's continuation allows; their KV goes to the slots ``kv_ids``.

        Returns the logits after the last token, ``[vocabulary]``, or after each, ``[len(tokens), vocabulary]``, with ``every``.

        Raises:
            ValueError: if there are no tokens, or not as many ``kv_ids`` though the model has attention layers.
        """
        if not tokens or (self._kv is not None and len(kv_ids) != len(tokens)):
            raise ValueError(f"expected a KV slot for each of at least one token, got {len(kv_ids)} for {len(tokens)}")
        logits = []
        first = self.depth
        for count in self._model.continuation.steps(first, len(tokens)):
            done = self.depth - first
            logits.append(self._step(tokens[done : done + count], kv_ids[done : done + count], every))
        return torch.cat(logits) if every else logits[-1][-1]

    def _step(self, tokens: Sequence[int], kv_ids: Sequence[int], every: bool) -> Tensor:
        logits = self._model.forward(tokens, self._cache, self.depth, every)
        for states, row in self._states:
            if states[0] is not row:
                # The model put another tensor in place of the pool's row.
                states[0] = row.copy_(states[0])
        if self._kv is not None:
            self._kv.write(kv_ids, self._cache)
        self.depth += len(tokens)
        return logits


def _adopt(cache: DynamicCache, layout: Layout, active: ActivePool, row: int, *, started: bool) -> AdoptedStates:
    """Make the states of ``cache`` views of ``active`` at ``row``."""
    adopted: AdoptedStates = []
    for index, layer in enumerate(layout.state_layers):
        target = layers_of(cache)[layer]
        recurrent = layout.order.to_native(active.state[index, row : row + 1], layout.spec)
        adopted.append((target.recurrent_states, recurrent))
        target.is_recurrent_states_initialized[0] = True
        target.device, target.dtype = recurrent.device, recurrent.dtype
        if CONV in active.side:
            conv = active.side[CONV][index, row : row + 1]
            adopted.append((target.conv_states, conv))
            target.is_conv_states_initialized[0] = True
            target.dtype, target.conv_kernel_size[0] = conv.dtype, conv.shape[-1]
        target.has_previous_state[0] = started
    for states, view in adopted:
        states[0] = view
    return adopted
