"""What may happen to an export from outside: kills, refusals of the system, full disks.

``python -m tests.torture`` runs the long forms and prints figures; the tests run short forms of the
same functions.
"""
