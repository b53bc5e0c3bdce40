"""Log-probabilities in SGLang's request and response shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mamba_checkpoint_cache.serving.http.body import Fields
from mamba_checkpoint_cache.serving.http.errors import bad_request
from mamba_checkpoint_cache.serving.logprobs import TokenLogprob, WantedLogprobs
from mamba_checkpoint_cache.serving.request import Request
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.serving.tokens import Tokens

MAX_LIKELIEST = 2**21
"""The most entries of likeliest tokens in one response, some 50 MB of JSON."""

OUTPUT_ONLY = -1
"""SGLang's ``logprob_start_len`` for no log-probabilities of the prompt."""

Entry = list[float | int | str | None]


@dataclass(frozen=True, slots=True)
class LogprobFields:
    """What is wanted of each request, and whether each token comes with its text."""

    wanted: WantedLogprobs
    with_text: bool

    def of(self, request: Request, tokens: Tokens) -> dict[str, Any]:
        """The fields of ``meta_info``: entries are ``[log-probability, token id, text]``, null where nothing is known."""
        text = tokens if self.with_text else None
        output = request.output_logprobs[: len(request.output)]
        result: dict[str, Any] = {
            "input_token_logprobs": [_entry(one.logprob, one.token, text) for one in request.prompt_logprobs],
            "output_token_logprobs": [_entry(one.logprob, one.token, text) for one in output],
        }
        if self.wanted.top:
            result["input_top_logprobs"] = _likeliest(request.prompt_logprobs, text)
            result["output_top_logprobs"] = _likeliest(output, text)
        return result


def read_logprobs(fields: Fields, prompts: Sequence[Sequence[int]], sampling: Sampling) -> LogprobFields | None:
    """Read what a call asks for; None if it asks for no log-probabilities.

    Raises:
        ApiError: 400 if a number is out of range, log-probabilities are described but not asked for, or they are too many.
    """
    wanted, with_text = fields.flag("return_logprob"), fields.flag("return_text_in_logprobs")
    start, top = fields.integer("logprob_start_len", OUTPUT_ONLY), fields.integer("top_logprobs_num", 0)
    for name, value, least in (("logprob_start_len", start, OUTPUT_ONLY), ("top_logprobs_num", top, 0)):
        if value < least:
            raise bad_request(f"{name} must be {least} or more, got {value}", name)
        if value != least and not wanted:
            raise bad_request(f"{name} asks for log-probabilities: set return_logprob too", name)
    if not wanted:
        return None
    positions = sum(sampling.max_new_tokens + (len(prompt) - start if start != OUTPUT_ONLY else 0) for prompt in prompts)
    if top * positions > MAX_LIKELIEST:
        raise bad_request(f"{top} likeliest tokens at {positions} positions are more than {MAX_LIKELIEST:,}", "top_logprobs_num")
    return LogprobFields(WantedLogprobs(top, None if start == OUTPUT_ONLY else start), with_text)


def _likeliest(logprobs: Iterable[TokenLogprob], text: Tokens | None) -> list[list[Entry] | None]:
    return [None if one.top is None else [_entry(logprob, token, text) for logprob, token in one.top] for one in logprobs]


def _entry(logprob: float | None, token: int, text: Tokens | None) -> Entry:
    return [logprob, token, None if text is None else text.decode([token])]
