"""What can be imported from the package is what it says it exports."""

from __future__ import annotations

import types

import mamba_checkpoint_cache


def test_exports_are_what_can_be_imported() -> None:
    """``__all__`` names every public object of the package once, and nothing else."""
    public = [
        name
        for name, value in vars(mamba_checkpoint_cache).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]

    assert sorted(mamba_checkpoint_cache.__all__) == sorted(public)


def test_every_export_says_what_it_is() -> None:
    """Each class and function that is exported has a docstring of its own."""
    exports = [getattr(mamba_checkpoint_cache, name) for name in mamba_checkpoint_cache.__all__]

    assert [item.__name__ for item in exports if callable(item) and not (item.__doc__ or "").strip()] == []
