"""Peers: other PostgreSQL queues doing the same work on the same server in the same run, ours among them.

    make bench-peers [ARGS='PEER … --quick --rounds N --row ROW --json FILE']

model.py       what a system, a contender and a sample are
systems/       one file a system: how it is installed, fed and worked, at its defaults and at its documented best
child.py       a producer or a worker in a process of its own, for the systems written in Python
processes.py   the other end of such a process, whatever it is written in
databases.py   a fresh database for each sample, cloned from the system's template
rows.py        the rows of the table: what is timed, and the check that every job ran exactly once
runner.py      rounds, order, medians
report.py      the table and the JSON document
cli.py         the command line
"""
