"""Fuzzers: hostile bytes for every reader. ``python -m tests.fuzz --seconds 60`` runs all of them.

Each target is a module with ``TARGET``; ``python -m tests.fuzz pickles zips`` runs these alone,
``python -m tests.fuzz.pickles`` one of them in the same process.
With atheris (the extra ``fuzz``) the search is guided by coverage; without it, and in the suite,
mutations are drawn from a fixed seed.
"""
