"""A request: a prompt, and the output as it grows."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

from opentelemetry.context import Context, get_current
from torch import Tensor

from mamba_checkpoint_cache.serving.logprobs import TokenLogprob, WantedLogprobs, token_logprobs
from mamba_checkpoint_cache.serving.sampling import GREEDY, Sampling

_serials = itertools.count()
_process = uuid.uuid4().hex[:12]


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended. ``matched``: the token or the text it stopped at. ``status`` and ``message``: what went wrong."""

    reason: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    status: HTTPStatus = HTTPStatus.OK
    message: str = ""


ABORTED = Finish("abort")


def unavailable(message: str) -> Finish:
    """The end of a request that the server can't serve now."""
    return Finish("error", status=HTTPStatus.SERVICE_UNAVAILABLE, message=message)


@dataclass(slots=True, eq=False)
class Request:
    """What is asked of the engine, and what has come of it so far.

    The engine's thread alone writes to it, and calls ``notify`` after each change. ``output`` only grows; it is complete once
    ``finish`` is set. ``cached_tokens`` is the part of the prompt that was not computed again. If ``logprobs`` are wanted,
    ``output_logprobs`` has one for each output token, and is never the shorter of the two; ``prompt_logprobs`` likewise has those
    of the prompt. ``parent`` is the trace that it came in with.
    """

    tokens: list[int]
    sampling: Sampling = GREEDY
    notify: Callable[[], None] = lambda: None
    logprobs: WantedLogprobs | None = None
    parent: Context = field(default_factory=get_current)
    id: str = field(default_factory=lambda: f"{_process}-{next(_serials)}")
    output: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    finish: Finish | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are wanted."""
        return self.logprobs is not None and self.logprobs.prompt_from is not None

    def skip_prompt_logprobs(self, depth: int) -> None:
        """The first ``depth`` tokens were reused: nothing is known of them, nor of the token that starts what is wanted."""
        if self.logprobs is not None and (start := self.logprobs.prompt_from) is not None:
            self.prompt_logprobs += [TokenLogprob(token) for token in self.tokens[start : max(start, depth) + 1]]

    def lacks_prompt_logprobs(self, end: int) -> bool:
        """Whether the logits after up to ``end`` tokens have log-probabilities that are wanted and not there yet."""
        following = self._next_prompt_logprob()
        return following is not None and following <= min(end, len(self.tokens) - 1)

    def add_prompt_logprobs(self, begin: int, logits: Tensor) -> None:
        """Add what ``logits`` ``[tokens, vocabulary]`` of a step from depth ``begin`` on say of the prompt's next tokens."""
        first = self._next_prompt_logprob()
        if first is not None and self.logprobs is not None:
            tokens = self.tokens[first : begin + 1 + len(logits)]
            rows = logits[first - begin - 1 :][: len(tokens)]
            self.prompt_logprobs += token_logprobs(rows, tokens, self.logprobs.top)

    def add_output(self, token: int, logits: Tensor) -> None:
        """Add the token that was chosen by ``logits`` ``[vocabulary]``."""
        if self.logprobs is not None:
            self.output_logprobs += token_logprobs(logits[None], [token], self.logprobs.top)
        self.output.append(token)
        self.notify()

    def _next_prompt_logprob(self) -> int | None:
        start = None if self.logprobs is None else self.logprobs.prompt_from
        return None if start is None else start + len(self.prompt_logprobs)

    def end(self, finish: Finish) -> None:
        """Record how it ended, once."""
        if self.finish is None:
            self.finish = finish
            self.notify()
