"""The reference engine: a step is schedule, run, postprocess."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING

import structlog
from torch import Tensor

from mamba_checkpoint_cache.cache import PrefixCache
from mamba_checkpoint_cache.drift.guard import DriftGuard
from mamba_checkpoint_cache.policy import CheckpointPolicy
from mamba_checkpoint_cache.pools import CheckpointPool
from mamba_checkpoint_cache.results import FlushResult, Stored
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.drift_checks import DriftChecks
from mamba_checkpoint_cache.serving.kv_slots import KvSlots
from mamba_checkpoint_cache.serving.logprobs import WantedLogprobs
from mamba_checkpoint_cache.serving.near_ties import MAX_NOISE, NearTies
from mamba_checkpoint_cache.serving.request import ABORTED, Finish, Request, unavailable
from mamba_checkpoint_cache.serving.sampling import GREEDY, Sampler, Sampling
from mamba_checkpoint_cache.serving.scheduler import Running, Scheduler
from mamba_checkpoint_cache.serving.tokens import Tokens
from mamba_checkpoint_cache.slots import ActiveSlot
from mamba_checkpoint_cache.telemetry.recorder import Telemetry

if TYPE_CHECKING:
    from mamba_checkpoint_cache.integrations.transformers import HybridModel

NEVER = 2**31 - 1

logger = structlog.get_logger()


class Engine:
    """Runs requests on a model, through a prefix cache. One thread calls it; :meth:`check_request` alone may be called from any.

    One request per forward pass: a row's last bits depend on how many rows run beside it, and here a request's output must not
    depend on who else is there.
    """

    def __init__(
        self,
        model: HybridModel,
        tokens: Tokens,
        config: EngineConfig,
        telemetry: Telemetry | None = None,
        *,
        guard: DriftGuard | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.config = config
        self.kv_store = model.kv_store(config.kv_slots)
        self.kv = None if self.kv_store is None else KvSlots(config.kv_slots)
        self.cache = PrefixCache(
            active=model.active_pool(config.active_slots),
            checkpoints=CheckpointPool(model.spec, config.checkpoint_slots, codec=config.codec, device=model.device),
            kv=self.kv,
            telemetry=telemetry,
            policy=CheckpointPolicy(max_hops=config.max_hops) if config.caching else CheckpointPolicy(min_tokens=NEVER),
            page_size=config.page_size,
            guard=guard,
        )
        self.scheduler = Scheduler(None if self.kv is None else self.kv.capacity, config.max_waiting)
        exact = config.caching and not self.cache.checkpoints.codec.lossy and model.continuation.noise <= MAX_NOISE
        self._near_ties = NearTies(model, config.chunk) if exact else None
        self._checks = DriftChecks(
            model, self.cache, rate=config.drift_rate, per_minute=config.drift_checks_per_minute, clock=clock
        )
        self.counts: Counter[str] = Counter()
        self._slots_are_out = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do: no request, and no drift check under way."""
        return self.scheduler.idle and not self._checks.pending

    # -- what others ask of it -----------------------------------------------------------------------------------------

    def check_request(self, tokens: Sequence[int], sampling: Sampling, logprobs: WantedLogprobs | None = None) -> None:
        """Raise :class:`ValueError` if such a request can never run."""
        if not tokens:
            raise ValueError("the prompt is empty: it must have at least one token")
        if len(tokens) + sampling.max_new_tokens > self.config.max_context:
            asked = f"{len(tokens)} prompt tokens and {sampling.max_new_tokens} new ones"
            raise ValueError(f"{asked} exceed the {self.config.max_context} tokens that a request may have")
        if not all(0 <= token < self.tokens.vocab_size for token in tokens):
            raise ValueError(f"token ids must lie in 0 … {self.tokens.vocab_size - 1}")
        if logprobs is not None:
            logprobs.check(len(tokens), self.tokens.vocab_size)

    def submit(self, request: Request) -> None:
        """Queue a request that passes :meth:`check_request`."""
        self.check_request(request.tokens, request.sampling, request.logprobs)
        if len(self.scheduler.waiting) >= self.scheduler.max_waiting:
            self._close(request, unavailable(f"{self.scheduler.max_waiting} requests are waiting already"))
        else:
            self.scheduler.waiting.append(request)

    def abort(self, request: Request, finish: Finish = ABORTED) -> None:
        """End a request wherever it stands; what it committed before stays. Nothing happens if it has ended."""
        if request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
            self._close(request, finish)
        elif running := self.scheduler.find(request):
            self._end(running, finish)

    def refuse_waiting(self, message: str) -> None:
        """End all requests that have not started."""
        for request in list(self.scheduler.waiting):
            self.abort(request, unavailable(message))

    def refuse_all(self, message: str) -> None:
        """End all requests."""
        self.refuse_waiting(message)
        for running in list(self.scheduler.running):
            self.abort(running.request, unavailable(message))

    def flush(self) -> FlushResult:
        """Drop everything from the cache that no running request uses."""
        return self.cache.flush()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY) -> list[Request]:
        """Run prompts side by side to their end, for callers that have no thread for the engine."""
        requests = [Request(list(prompt), sampling) for prompt in prompts]
        for request in requests:
            self.check_request(request.tokens, sampling)
        for request in requests:
            self.submit(request)
        while not self.scheduler.idle:
            self.step()
        return requests

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One prefill chunk, then one token for everyone who decodes, and perhaps a slice of a drift check.

        What fails is one request, never the engine.
        """
        self._admit()
        for running in self.scheduler.turn():
            try:
                finish = self._postprocess(running, self._run(running))
            except Exception as error:
                logger.exception("request failed", request=running.request.id)
                finish = _failure(error)
            if finish is not None:
                self._end(running, finish)
        self._checks.step(idle=self.scheduler.idle)

    def _admit(self) -> None:
        """Give active slots to those who wait, as far as slots and KV go."""
        while not self._slots_are_out and self.scheduler.may_start():
            slot = self.cache.active.allocate()
            if slot is None:
                self._slots_are_out = True
                return
            request = self.scheduler.waiting.popleft()
            try:
                self.scheduler.running.append(self._start(request, slot))
            except Exception as error:
                logger.exception("request failed", request=request.id)
                self._close(request, _failure(error))

    def _start(self, request: Request, slot: ActiveSlot) -> Running:
        """Match and restore. If that fails, the slot is free again."""
        with self.cache.telemetry.within(request.parent), ExitStack() as undo:
            undo.callback(self.cache.active.free, slot, "aborted")
            lease = self.cache.match_prefix(request.tokens)
            undo.callback(self.cache.release, lease)
            self.cache.restore(lease, slot)
            session = self.model.start(self.cache.active, slot.index, kv=self.kv_store, kv_ids=lease.kv, depth=lease.depth)
            undo.pop_all()
        request.cached_tokens = lease.depth
        request.skip_prompt_logprobs(lease.depth)
        self.counts.update(requests=1, prompt_tokens=len(request.tokens), cached_tokens=lease.depth)
        sampler, sequence = Sampler(request.sampling), array("i", request.tokens)
        running = Running(request, slot, lease, session, sampler, sequence, kv=array("i", lease.kv), num_owned=len(lease.kv))
        self._checks.started(running)
        return running

    def _run(self, running: Running) -> Tensor:
        """Run the next step of one request: a chunk of its prompt, or its newest token. Returns the last token's logits."""
        begin, end = running.session.depth, running.step_end(self.config.chunk)
        ids = self._allocate_kv(end - begin)
        running.kv.extend(ids)
        tokens, request = running.sequence[begin:end], running.request
        if request.lacks_prompt_logprobs(end):
            every = running.session.run(tokens, ids, every=True)
            request.add_prompt_logprobs(begin, every)
            logits = every[-1]
        else:
            logits = running.session.run(tokens, ids)
        self.cache.active.advance(running.slot, depth=end)
        self._checks.ran(running, logits)
        return logits

    def _postprocess(self, running: Running, logits: Tensor) -> Finish | None:
        """Choose the next token once all before it have run, and checkpoint where that is worth it. Returns the end, if it is."""
        finish = None
        if running.session.depth == len(running.sequence):
            finish = self._extend(running, logits)
        if finish is not None or running.worth_checkpoint(self.config.chunk):
            self._commit(running, donate=finish is not None)
        return finish

    def _extend(self, running: Running, logits: Tensor) -> Finish | None:
        """Append the next token. Returns how the request ends, if it does."""
        request, sampling = running.request, running.request.sampling
        if sampling.max_new_tokens == 0:
            return Finish("length")
        logits = self._settled(running, logits)
        token = running.sampler.choose(logits)
        running.sequence.append(token)
        self.counts["output_tokens"] += 1
        request.add_output(token, logits)
        if token in sampling.stop_ids or (token in self.tokens.eos_ids and not sampling.ignore_eos):
            return Finish("stop", matched=token)
        if (text := self._stop_text(request)) is not None:
            return Finish("stop", matched=text)
        return Finish("length") if len(request.output) == sampling.max_new_tokens else None

    def _settled(self, running: Running, logits: Tensor) -> Tensor:
        """The logits, or those of a run without the cache if a greedy choice between them hangs on rounding."""
        request, resumed = running.request, running.lease.matched > 0
        if self._near_ties is None or not (resumed and running.sampler.greedy and self._near_ties.is_close(logits)):
            return logits
        self.counts["near_ties"] += 1
        return self._near_ties.logits_from_start(request.tokens, request.output)

    def _stop_text(self, request: Request) -> str | None:
        """The stop text that the output has just come to contain."""
        texts = request.sampling.stop_texts
        if not texts:
            return None
        tail = self.tokens.decode(request.output[-2 * max(len(text.encode()) for text in texts) - 8 :])
        return next((text for text in texts if text in tail), None)

    # -- what it holds -------------------------------------------------------------------------------------------------

    def _commit(self, running: Running, *, donate: bool = False) -> None:
        """Offer the state to the cache, and use the KV slots that the tree owns from here on."""
        depth = running.session.depth
        with self.cache.telemetry.within(running.request.parent):
            result = self.cache.commit(
                running.sequence,
                depth=depth,
                source=running.slot,
                kv=None if self.kv is None else running.kv,
                lease=running.lease,
                donate=donate,
            )
        running.donated = donate
        running.kv[: len(result.kv)] = result.kv
        running.num_owned = len(result.kv)
        if isinstance(result, Stored):
            self._checks.stored(running)

    def _allocate_kv(self, count: int) -> array[int]:
        """KV slots for ``count`` tokens, if need be after dropping the least recently used prefixes."""
        if self.kv is None:
            return array("i")
        ids = self.kv.allocate(count)
        if ids is None:
            self.cache.evict_kv(count - self.kv.num_free)
            ids = self.kv.allocate(count)
        if ids is None:
            raise RuntimeError(f"{count} KV slots are promised, but only {self.kv.num_free} of {self.kv.capacity} could be freed")
        return ids

    def _end(self, running: Running, finish: Finish) -> None:
        """Give back all that a request holds, and end it."""
        self.scheduler.running.remove(running)
        self._checks.ended(running, finish)
        self._slots_are_out = False
        try:
            if self.kv is not None:
                self.kv.free(running.kv[running.num_owned :])
            self.cache.release(running.lease)
            if not running.donated:
                self.cache.active.free(running.slot, "aborted")
        finally:
            self._close(running.request, finish)

    def _close(self, request: Request, finish: Finish) -> None:
        self.counts[finish.reason] += 1
        request.end(finish)


def _failure(error: Exception) -> Finish:
    message = f"the request failed inside the server: {type(error).__name__}: {error}"
    return Finish("error", status=HTTPStatus.INTERNAL_SERVER_ERROR, message=message)
