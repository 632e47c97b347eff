"""Benchmarks: each scenario beside the least code that does the same durable work, on the same server in the same run.

    python -m benchmarks [SCENARIO …] [--quick] [--json FILE] [--list]

model.py        what a scenario is, and what comes of it
scenarios/      one file a scenario
bare/           the hand-written side: tables, statements, loops; nothing of ours
sandbox.py      a fresh database per sample, cloned from a template
child.py        another process of the same benchmark
fleet.py        many of them, forked
claimers.py     a process of claimers, for the scenario claim
workers.py      relays in another process
loops.py        the event loop, the same for both sides
environment.py  what the figures were measured on
runner.py       rounds, order, medians
known.py        do the baselines reach what is known of such a machine?
report.py       the tables and the JSON document
plots.py        the curves
"""
