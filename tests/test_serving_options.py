"""Options of the server, checked at construction."""

from __future__ import annotations

import pytest

from mamba_checkpoint_cache.serving.options import OptionError, ServeOptions


def test_defaults_listen_locally_and_compress() -> None:
    """Without options the server is not reachable from outside and stores int8."""
    options = ServeOptions()

    assert (options.host, options.codec, options.model) == ("127.0.0.1", "int8", None)


@pytest.mark.parametrize("name", ["checkpoint_slots", "checkpoint_memory_bytes", "active_slots", "page_size", "chunk", "threads"])
def test_refuses_numbers_below_one(name: str) -> None:
    """A count of nothing is refused with its name and the number given."""
    for value in (0, -3):
        with pytest.raises(OptionError, match=f"{name} must be at least 1, got {value}"):
            ServeOptions(**{name: value})


def test_refuses_two_sizes_for_one_pool() -> None:
    """Slots and memory for the same pool contradict each other."""
    with pytest.raises(OptionError, match="not both"):
        ServeOptions(checkpoint_slots=4, checkpoint_memory_bytes=4096)


def test_refuses_chunks_that_end_inside_a_page() -> None:
    """A chunk's end must be a depth at which a checkpoint may stand."""
    with pytest.raises(OptionError, match="chunk must be a multiple of page_size, got 48 and 32"):
        ServeOptions(page_size=32, chunk=48)
    assert ServeOptions(page_size=32, chunk=96).chunk == 96


@pytest.mark.parametrize("port", [-1, 65536])
def test_refuses_ports_that_do_not_exist(port: int) -> None:
    """A port has sixteen bits."""
    with pytest.raises(OptionError, match=f"port must lie in 0 … 65535, got {port}"):
        ServeOptions(port=port)


def test_refuses_an_unknown_codec() -> None:
    """A codec that doesn't exist is answered with those that do."""
    with pytest.raises(OptionError, match="unknown codec 'int4', expected one of none, int8"):
        ServeOptions(codec="int4")
