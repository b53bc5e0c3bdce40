"""A format for each layer: how it is written, and that each layer is stored as its own format stores it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from codec_contract import CPU, DTYPES, LAYOUTS, ROWS, bits, canaries, fresh_numbers, hard_states, lay_out
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_checkpoint_cache import ActivePool, CheckpointPool, SideSpec, StateSpec
from mamba_checkpoint_cache.codec import CODEC_NAMES, check_codec, get_codec
from mamba_checkpoint_cache.codec.layered import choice_name, codecs_by_layer, layered, parse_choice, split_choices
from mamba_checkpoint_cache.codec.reference import Int8Codec

SPEC = StateSpec(5, 2, 7, 3, side=(SideSpec("conv", (3, 2)),))
choices = st.lists(st.sampled_from(CODEC_NAMES), min_size=1, max_size=9)


@st.composite
def spellings(draw: st.DrawFn) -> tuple[list[str], str]:
    """The format of each layer, and one of the many ways to write that."""
    formats = draw(choices)
    default = draw(st.sampled_from(CODEC_NAMES))
    items, layer = [], 0
    while layer < len(formats):
        run = 1
        while layer + run < len(formats) and formats[layer + run] == formats[layer] and draw(st.booleans()):
            run += 1
        layers = draw(st.sampled_from([f"{layer}-{layer + run - 1}", *([f"{layer}"] if run == 1 else [])]))
        if formats[layer] != default or draw(st.booleans()):
            items.append(f"{layers}={formats[layer]}")
        layer += run
    comma = draw(st.sampled_from([",", ", "]))
    return formats, comma.join([default, *draw(st.permutations(items))])


@given(spellings())
def test_equal_choices_have_one_name(spelling: tuple[list[str], str]) -> None:
    """However it is written, the name is that of the formats, and reads back as them; a single format has its own name."""
    formats, text = spelling

    codec = get_codec(text, CPU, len(formats))

    assert [plain.name for plain in codecs_by_layer(codec, len(formats))] == formats
    assert codec.name == choice_name(formats)
    assert parse_choice(codec.name, CODEC_NAMES).by_layer(len(formats)) == formats
    assert get_codec(codec.name, CPU, len(formats)).name == codec.name
    assert codec.lossy == any(get_codec(name, CPU).lossy for name in formats)
    if len(set(formats)) == 1:
        assert type(codec) is type(get_codec(formats[0], CPU))


@given(choices, choices)
def test_different_choices_have_different_names(one: list[str], other: list[str]) -> None:
    """Of as many layers, and so have their fingerprints."""
    other = (other * len(one))[: len(one)]

    assert (choice_name(one) == choice_name(other)) == (one == other)


@pytest.mark.parametrize(
    ("formats", "name"),
    [
        (["int8"], "int8"),
        (["none", "int8", "int8", "none"], "int8,0=none,3=none"),
        (["int8", "int8", "int8", "none", "none"], "int8,3-4=none"),
        (["none", "none", "int8"], "none,2=int8"),
        (["b", "a"], "a,0=b"),
        (["c", "c", "b", "a", "a", "a"], "a,0-1=c,2=b"),
    ],
)
def test_a_name_is_short(formats: list[str], name: str) -> None:
    """First the format of most layers, or the alphabetically first; then the others in ascending order, as ranges."""
    assert choice_name(formats) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown codec '', expected one of none"),
        ("int3", "unknown codec 'int3', expected one of none"),
        ("0=none", "unknown codec '0=none', expected one of"),
        ("int8,2=int3", "unknown codec 'int3' in 'int8,2=int3', expected one of"),
        ("int8,", "expected LAYERS=FORMAT after the first format, as in int8,0=none,3-5=none; got ''"),
        ("int8,none", "got 'none'"),
        ("int8,=none", "got '=none'"),
        ("int8,2=", "got '2='"),
        ("int8,-1=none", "got '-1=none'"),
        ("int8,5-3=none", "got '5-3=none'"),
        ("int8,1-2-3=none", "got '1-2-3=none'"),
        ("int8,²=none", "got '²=none'"),
        ("int8,1=none=int8", "got '1=none=int8'"),
        (f"int8,{'9' * 5000}=none", "expected LAYERS=FORMAT"),
        ("int8,2=none,2=none", "'int8,2=none,2=none' names layer 2 twice"),
        ("int8,4=none,0-6=none", "names layer 4 twice"),
    ],
)
def test_what_is_written_otherwise_is_refused(text: str, message: str) -> None:
    """In one line that says what was expected, before anything is known of the model."""
    for refuse in (lambda: check_codec(text), lambda: get_codec(text, CPU, 8)):
        with pytest.raises(ValueError) as refusal:  # noqa: PT011 - compared below
            refuse()
        assert message in str(refusal.value)


def test_a_layer_that_is_not_there_is_refused() -> None:
    """Once the number of layers is known; without it, a choice by layer is no codec."""
    check_codec("int8,3-5=none")
    with pytest.raises(ValueError, match="names layer 5, but the recurrent layers are 0 … 4: they are counted among themselves"):
        get_codec("int8,3-5=none", CPU, 5)
    with pytest.raises(ValueError, match="names layer 5"):
        CheckpointPool(SPEC, 3, codec="int8,5=int8")
    with pytest.raises(ValueError, match="'int8,0=none' chooses by layer: pass num_layers"):
        get_codec("int8,0=none", CPU)


@given(st.lists(spellings(), min_size=1, max_size=4))
def test_several_choices_in_one_text(found: list[tuple[list[str], str]]) -> None:
    """An item with a layer belongs to the choice before it, one without begins the next."""
    texts = [text for _, text in found]

    assert list(split_choices(",".join(texts))) == texts


shapes = st.tuples(st.integers(1, 3), st.sampled_from([1, 5, 17, 63, 64]), st.sampled_from([1, 3, 16, 80]))


@settings(max_examples=60)
@given(formats=choices, shape=shapes, dtype=st.sampled_from(DTYPES), layout=st.sampled_from(LAYOUTS))
def test_each_layer_is_stored_as_its_own_format_stores_it(
    formats: list[str], shape: tuple[int, int, int], dtype: torch.dtype, layout: str
) -> None:
    """Report, restored state and bytes, to the bit, for hard states as they lie in an engine; other rows are not touched."""
    spec = StateSpec(len(formats), *shape, dtype)
    codec = get_codec(",".join(["none", *(f"{i}={name}" for i, name in enumerate(formats))]), CPU, len(formats))
    states = lay_out(hard_states(spec, fresh_numbers()), layout, CPU)
    stored, target = canaries(codec, spec), lay_out(torch.full_like(states, 9.0), layout, CPU)

    report = codec.compress(states, (3, 0), stored, (1, 4))
    codec.restore(stored, (4, 1), target, (2, 3))

    assert report.shape == (2, len(formats), shape[0], 3)
    for layer, name in enumerate(formats):
        plain, part = get_codec(name, CPU), slice(layer, layer + 1)
        own, alone = canaries(plain, replace(spec, num_layers=1)), lay_out(torch.full_like(states, 9.0), layout, CPU)[part]
        assert torch.equal(report[:, part], plain.compress(states[part], (3, 0), own, (1, 4)))
        plain.restore(own, (4, 1), alone, (2, 3))
        assert torch.equal(bits(target[part]), bits(alone))
        held = formats[:layer].count(name)
        tensors = stored if len(set(formats)) == 1 else {key.removeprefix(f"{name}."): tensor for key, tensor in stored.items()}
        assert all(torch.equal(bits(tensors[key][held : held + 1]), bits(tensor)) for key, tensor in own.items())
    assert codec.bytes_per_slot(spec) * ROWS == sum(tensor.nbytes for tensor in stored.values())
    assert codec.bytes_per_slot(spec) == sum(get_codec(name, CPU).bytes_per_slot(replace(spec, num_layers=1)) for name in formats)


def test_no_slots_are_compressed_too() -> None:
    """Nothing to do is reported on as nothing."""
    codec = get_codec("int8,1=none", CPU, 5)

    report = codec.compress(torch.ones(5, 2, 2, 7, 3), [], codec.allocate(SPEC, 2, CPU), [])

    assert report.shape == (0, 5, 2, 3)


def test_states_of_other_layers_are_refused() -> None:
    """A codec that was made for five layers says so when it is given four, whatever it is asked to do."""
    codec, four = get_codec("int8,1=none", CPU, 5), replace(SPEC, num_layers=4)
    stored, state = codec.allocate(SPEC, 2, CPU), torch.ones(4, 2, 2, 7, 3)

    for refuse in (
        lambda: codec.compress(state, (0,), stored, (0,)),
        lambda: codec.restore(stored, (0,), state, (0,)),
        lambda: codec.allocate(four, 2, CPU),
        lambda: codec.bytes_per_slot(four),
    ):
        with pytest.raises(ValueError, match="int8,1=none is for states of 5 recurrent layers, got one of 4"):
            refuse()


def test_what_was_stored_otherwise_is_refused() -> None:
    """The tensors of another codec, and a dtype that is not theirs, are refused by the format that they are for."""
    codec, state = get_codec("int8,1=none", CPU, 5), torch.ones(5, 2, 2, 7, 3)

    with pytest.raises(ValueError, match=r"expected compressed tensors named \['q', 'scale'\], got \[\]"):
        codec.compress(state, (0,), get_codec("none", CPU).allocate(SPEC, 2, CPU), (0,))
    with pytest.raises(ValueError, match=r"compressed tensor 'scale': expected contiguous torch.bfloat16"):
        codec.compress(state.bfloat16(), (0,), codec.allocate(SPEC, 2, CPU), (0,))


def test_codecs_of_one_s_own() -> None:
    """Any plain codecs do, under their names; equal ones are that codec itself."""

    class Worn(Int8Codec):
        name = "worn"

    worn, plain = Worn(), get_codec("none", CPU)

    assert layered([worn, plain, worn]).name == "worn,1=none"
    assert layered([worn] * 3) is worn
    assert codecs_by_layer(worn, 2) == (worn, worn)


def test_a_pool_names_what_it_holds() -> None:
    """Fingerprint, bytes and layers by format are those of the choice, in whatever way it was written."""
    pools = [CheckpointPool(SPEC, 3, codec=codec) for codec in ("int8,0=none,3-4=none", "none,1-2=int8", "none, 2=int8, 1=int8")]

    assert {pool.fingerprint for pool in pools} == {f"{SPEC.fingerprint}-none,1-2=int8"}
    native, compressed = (CheckpointPool.bytes_per_slot_for(replace(SPEC, num_layers=1), codec) for codec in ("none", "int8"))
    assert {pool.bytes_per_slot for pool in pools} == {3 * native + 2 * compressed}
    assert pools[0].layers == dict.fromkeys(CODEC_NAMES, 0) | {"none": 3, "int8": 2}
    assert CheckpointPool(SPEC, 3, codec="none").layers == dict.fromkeys(CODEC_NAMES, 0) | {"none": 5}
    assert CheckpointPool(SPEC, 3, codec="int8,0-4=none").fingerprint == CheckpointPool(SPEC, 3, codec="none").fingerprint


@settings(max_examples=40)
@given(st.lists(st.lists(st.sampled_from(CODEC_NAMES), min_size=5, max_size=5).map(choice_name), min_size=2, max_size=4))
def test_a_pool_is_laid_out_for_any_choice_in_the_memory_that_it_has(codecs: list[str]) -> None:
    """From any to any, with as many slots as such memory holds; what is stored then comes back as a new pool would give it."""
    pool, active = CheckpointPool(SPEC, 9, codec=codecs[0]), ActivePool(SPEC, 2)
    memory, block = 10 * pool.bytes_per_slot, next(iter(pool.stored.values())).untyped_storage().data_ptr()
    source, target = (active.slots.reserve() for _ in range(2))
    active.state.copy_(torch.randn(active.state.shape, generator=fresh_numbers()))
    for codec in codecs[1:]:
        if pool.slots_in_place(codec) < 1:
            continue
        pool.relayout(codec)
        fresh, found = CheckpointPool(SPEC, 1, codec=codec), []

        assert pool.slots.capacity == CheckpointPool.slots_for(SPEC, codec, memory)
        assert {tensor.untyped_storage().data_ptr() for tensor in pool.stored.values()} == {block}
        assert not any(tensor.any() for tensor in pool.stored.values())
        for each in (fresh, pool):
            slots = [each.slots.reserve() for _ in range(each.slots.capacity)]
            each.compress(active, source, slots[-1])
            each.restore(slots[-1], active, target)
            found.append(active.state[:, target.index].clone())
            for slot in slots:
                each.slots.free(slot)
        assert torch.equal(*found)
