"""Fuzzers: malicious bytes for every reader. ``python -m tests.fuzz --seconds 60`` runs all.

With atheris (the extra ``fuzz``) coverage guides the search; without it, and in the test suite,
mutations are drawn from a fixed seed.
"""
