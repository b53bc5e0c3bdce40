.PHONY: demo test lint clean

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

demo: $(INSTALLED)
	$(BIN)/mamba-checkpoint-cache demo

test: $(INSTALLED)
	$(BIN)/pytest

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests dashboards -name __pycache__ -type d -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@
