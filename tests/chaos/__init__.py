"""A run in which everything breaks, again and again, and an audit of what came of it: `make chaos MINUTES=10 SEED=7`.

schedule.py   which faults, when, to whom: a pure function of the seed
roster.py     who there is: processes, tenants, relays, and their settings
relay.py, gateway.py     programs of the processes (clock.py: their wall clock, which is moved)
journal.py    what they have seen and done, told past the SDK to a server that no fault is done to
rig.py        servers, ways to them, processes     faults.py   how each fault is done
waits.py      how long processes had no CPU, which no bound is to count
evidence.py   all that was told and all that is stored          audit.py, order.py    what of it cannot be
logs.py       what processes and server have logged, which a red run prints
__main__.py   the command

Beside it, in one process: churn.py, in which all comes and goes (`make churn MINUTES=30`), and footprint.py, which
measures what is left.
"""
